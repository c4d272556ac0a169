"""The few libc calls that move bytes in bulk, by cffi in ABI mode: no compiler, one foreign call per window of rows.

`calls.py` holds the calls, `iovec.py` the columns they take, `cdef.py` the C declarations they are generated from.
"""
