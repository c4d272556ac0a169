"""A column of iovecs and a position in it: what a window of rows becomes for writev, readv and process_vm_*.

The columns are numpy arrays laid over C structs; a call takes a pointer into them, so no row costs a Python object.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvxfer.system.abi import ffi
from kvxfer.types import IOVEC_DTYPE, AddressColumn

IOV_MAX = 1024
"""The most iovecs the kernel takes in one call: UIO_MAXIOV, readv(2)."""

CData = Any
"""A cffi pointer. cffi has no type stubs."""


def address_of(data: bytes | bytearray) -> int:
    """Return where the bytes are; who uses the address holds `data`, and never resizes it."""
    return int(ffi.cast("uintptr_t", ffi.from_buffer(data)))


class IovecCursor:
    """Rows to send or receive in order, and how far that has come.

    base, nbytes: shape (n,), n >= 1; copied, so the caller's columns stay as they are.
    The memory the rows name must stay valid until the cursor is done with.
    """

    __slots__ = ("_base", "_count", "_ends", "_index", "_keep", "_nbytes", "_pointer", "nbytes_done", "nbytes_total")

    def __init__(self, base: AddressColumn, nbytes: AddressColumn) -> None:
        self._keep = np.empty(len(base), IOVEC_DTYPE)
        self._base = self._keep["base"]
        self._nbytes = self._keep["nbytes"]
        self._base[:] = base
        self._nbytes[:] = nbytes
        self._ends = np.cumsum(self._nbytes)
        self._pointer = ffi.from_buffer("struct iovec[]", self._keep)
        self._count = len(base)
        self._index = 0
        self.nbytes_done = 0
        self.nbytes_total = int(self._ends[-1])

    @property
    def is_done(self) -> bool:
        """Whether every byte has been moved."""
        return self.nbytes_done >= self.nbytes_total

    def window(self, nbytes_max: int) -> tuple[CData, int]:
        """Return a pointer to the next iovecs and their count: at most IOV_MAX rows; rows that start within the next
        `nbytes_max` bytes, so that one call stays short enough to look at the clock between two."""
        stop = int(self._ends.searchsorted(self.nbytes_done + nbytes_max, "left")) + 1
        count = min(stop - self._index, IOV_MAX, self._count - self._index)
        return self._pointer + self._index, count

    def advance(self, nbytes: int) -> None:
        """Note that `nbytes` more bytes were moved; a row cut in the middle is shortened from its front."""
        self.nbytes_done += nbytes
        index = int(self._ends.searchsorted(self.nbytes_done, "right"))
        if index < self._count:
            left = int(self._ends[index]) - self.nbytes_done
            moved = int(self._nbytes[index]) - left
            if moved:
                self._base[index] += moved
                self._nbytes[index] = left
        self._index = index


class ShortCursor:
    """The same for one or two rows, without numpy: the way of short messages. Reusable by `reset`."""

    __slots__ = ("_count", "_first_nbytes", "_index", "_iovecs", "nbytes_done", "nbytes_total")

    def __init__(self) -> None:
        self._iovecs = ffi.new("struct iovec[2]")
        self.reset(0, 0)

    def reset(self, base: int, nbytes: int, base2: int = 0, nbytes2: int = 0) -> None:
        """Begin anew with other rows."""
        first, second = self._iovecs
        first.base, first.nbytes = base, nbytes
        self._count = 1
        if nbytes2:
            second.base, second.nbytes = base2, nbytes2
            self._count = 2
        self._first_nbytes = nbytes
        self._index = 0
        self.nbytes_done = 0
        self.nbytes_total = nbytes + nbytes2

    @property
    def is_done(self) -> bool:
        """Whether every byte has been moved."""
        return self.nbytes_done >= self.nbytes_total

    def window(self, nbytes_max: int) -> tuple[CData, int]:
        """Return a pointer to the iovecs of what is left, and their count."""
        return self._iovecs + self._index, self._count - self._index

    def advance(self, nbytes: int) -> None:
        """Note that `nbytes` more bytes were moved."""
        self.nbytes_done += nbytes
        if self.nbytes_done >= self.nbytes_total:
            return
        if self._index == 0 and self.nbytes_done >= self._first_nbytes and self._count == 2:
            self._index = 1
            nbytes = self.nbytes_done - self._first_nbytes
        row = self._iovecs[self._index]
        row.base += nbytes
        row.nbytes -= nbytes
