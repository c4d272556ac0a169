"""The few libc calls that kvxfer makes itself, by cffi in ABI mode: no compiler, one foreign call per window of rows.

`calls.py` holds those that move bytes, `iovec.py` the columns they take, `interfaces.py` the network interfaces;
`cdef.py` holds the C declarations they are generated from.
"""
