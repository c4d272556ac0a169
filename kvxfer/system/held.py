"""Copies that keep the GIL.

Who gives up the GIL while another thread of the process computes in Python gets it back after the switch interval
only, 5 ms (sys.setswitchinterval): a thousand rows, each copied by a call that gives it up, take seconds then. A copy
made here lasts 0.2 ms at most (the caller cuts it), and whoever waits for the GIL has its turn between two.

Many rows are one call: the interpreter itself copies between two indirect buffers (PEP 3118, suboffsets), whose items
lie wherever a column of addresses says. PyObject_CopyData and PyMemoryView_FromBuffer are of CPython's stable ABI.
Addresses are taken on trust, as in `calls.py`.
"""

from __future__ import annotations

import ctypes
import errno
import select
from typing import Any

import numpy as np

from kvxfer.types import IOVEC_DTYPE, AddressColumn, Opcode

__all__ = ["ProcessVmRow", "Readable", "RowCopy", "current_cpu", "memmove"]


class _PyBuffer(ctypes.Structure):
    """Py_buffer, CPython's Include/pybuffer.h."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_libc = ctypes.PyDLL(None, use_errno=True)
memmove: Any = _libc.memmove
"""memmove(destination, source, nbytes) on plain integers."""
memmove.argtypes, memmove.restype = (ctypes.c_size_t,) * 3, None
current_cpu: Any = _libc.sched_getcpu
"""sched_getcpu(3): the number of the CPU that runs this thread."""
_process_vm: dict[Opcode, Any] = {Opcode.READ: _libc.process_vm_readv, Opcode.WRITE: _libc.process_vm_writev}
for _call in _process_vm.values():
    _call.restype = ctypes.c_ssize_t
_poll: Any = _libc.poll

_view_of: Any = ctypes.pythonapi.PyMemoryView_FromBuffer
_view_of.argtypes, _view_of.restype = (ctypes.POINTER(_PyBuffer),), ctypes.py_object
_copy: Any = ctypes.pythonapi.PyObject_CopyData
_copy.argtypes, _copy.restype = (ctypes.py_object, ctypes.py_object), ctypes.c_int


class _PollFd(ctypes.Structure):
    """struct pollfd, poll(2)."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class Readable:
    """Whether a descriptor is readable: a pidfd is where its process has ended."""

    __slots__ = ("_poll_fd", "_reference")

    def __init__(self, fd: int) -> None:
        self._poll_fd = _PollFd(fd, select.POLLIN, 0)
        self._reference = ctypes.byref(self._poll_fd)

    def __call__(self) -> bool:
        while (count := _poll(self._reference, 1, 0)) < 0 and ctypes.get_errno() == errno.EINTR:
            pass  # a signal of this process, which a poll that does not wait meets as well
        return bool(count)


class ProcessVmRow:
    """One row at a time by process_vm_readv(2) and process_vm_writev(2). Not for two threads at once."""

    __slots__ = ("_here", "_iovecs", "_there")

    def __init__(self) -> None:
        self._iovecs = np.zeros(2, IOVEC_DTYPE)
        address = self._iovecs.__array_interface__["data"][0]
        self._here, self._there = ctypes.c_void_p(address), ctypes.c_void_p(address + IOVEC_DTYPE.itemsize)

    def copy(self, opcode: Opcode, pid: int, local: int, remote: int, nbytes: int) -> int:
        """Copy one row: the bytes copied, or -errno."""
        self._iovecs[0], self._iovecs[1] = (local, nbytes), (remote, nbytes)
        done: int = _process_vm[opcode](pid, self._here, 1, self._there, 1, 0)
        return done if done >= 0 else -ctypes.get_errno()


class RowCopy:
    """Copies from the addresses of one column to those of another: shape (n,), int64, in memory without gaps."""

    __slots__ = ("_destination", "_source")

    def __init__(self, destination: AddressColumn, source: AddressColumn) -> None:
        self._destination, self._source = _Rows(destination), _Rows(source)

    def copy(self, start: int, stop: int, nbytes: int) -> None:
        """Copy rows `start` to `stop` - 1, `nbytes` bytes each; no source may overlap a destination."""
        _copy(self._destination.view(start, stop, nbytes), self._source.view(start, stop, nbytes))


class _Rows:
    """A column of addresses as an indirect buffer of one dimension: item i is at the address in row i."""

    __slots__ = ("_addresses", "_base", "_buffer", "_reference", "_shape")

    def __init__(self, addresses: AddressColumn) -> None:
        self._addresses = np.ascontiguousarray(addresses, np.int64)
        self._base: int = self._addresses.__array_interface__["data"][0]
        self._shape = (ctypes.c_ssize_t * 3)(0, self._addresses.itemsize, 0)  # shape, stride, suboffset
        at = ctypes.addressof(self._shape)
        self._buffer = _PyBuffer(ndim=1, format=b"B", shape=at, strides=at + 8, suboffsets=at + 16)
        self._reference = ctypes.byref(self._buffer)

    def view(self, start: int, stop: int, nbytes: int) -> memoryview:
        """Return rows `start` to `stop` - 1; valid as long as this object."""
        self._shape[0] = stop - start
        self._buffer.buf = self._base + start * 8
        self._buffer.len = (stop - start) * nbytes
        self._buffer.itemsize = nbytes
        view: memoryview = _view_of(self._reference)
        return view
