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

    @property
    def rows_done(self) -> int:
        """How many rows, counted from the first, are wholly done."""
        return self._index

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


class SingleCursor:
    """The same for one row, without numpy: the way of short messages. Reusable by `reset`."""

    __slots__ = ("_iovec", "nbytes_done", "nbytes_total")

    rows_done = 0

    def __init__(self, base: int = 0, nbytes: int = 0) -> None:
        self._iovec = ffi.new("struct iovec *")
        self.reset(base, nbytes)

    def reset(self, base: int, nbytes: int) -> None:
        """Begin anew with another row."""
        self._iovec.base = base
        self._iovec.nbytes = nbytes
        self.nbytes_done = 0
        self.nbytes_total = nbytes

    @property
    def is_done(self) -> bool:
        """Whether every byte has been moved."""
        return self.nbytes_done >= self.nbytes_total

    def window(self, nbytes_max: int) -> tuple[CData, int]:
        """Return a pointer to the iovec of what is left, and 1."""
        return self._iovec, 1

    def advance(self, nbytes: int) -> None:
        """Note that `nbytes` more bytes were moved."""
        self.nbytes_done += nbytes
        self._iovec.base += nbytes
        self._iovec.nbytes -= nbytes
