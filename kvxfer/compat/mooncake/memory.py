"""Memory that the drop-in hands out, and copies of the caller's memory that cannot crash.

`BufferPool` is the managed buffers, and the staging place of rows whose local memory is not registered. `copy_bytes`
and `copy_rows` let the kernel copy (process_vm_readv of this very process): an address that is none is an error, no
signal.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.errors import MemoryArgumentError, NotRegisteredError
from kvxfer.system.calls import process_vm_read
from kvxfer.system.iovec import IovecCursor
from kvxfer.types import AddressColumn, Rights

if TYPE_CHECKING:
    from kvxfer import Region, TransferEngine

__all__ = ["BufferPool", "copy_bytes", "copy_rows"]

CLASS_NBYTES_MIN = 8 << 10  # Mooncake's least class
SLAB_NBYTES = 64 << 20
"""Pieces of up to this size come from slabs of it, larger ones are regions of their own. Mooncake takes 2 GiB at the
first call; an RDMA device pins what is registered, so a slab is no larger than it must be."""
COPY_NBYTES = 64 << 20  # of one call, some 10 ms: Ctrl-C is seen between two


class BufferPool:
    """Registered memory in pieces: a buddy allocator over slabs that are allocated when needed, backed when touched.

    All methods may be called from any thread.
    """

    def __init__(self, engine: TransferEngine, rights: Rights) -> None:
        self._engine = engine
        self._rights = rights
        self._lock = threading.Lock()
        self._slabs: list[int] = []
        self._free: dict[int, set[int]] = defaultdict(set)  # addresses by size
        self._used: dict[int, tuple[int, int]] = {}  # size and slab by address
        self._large: dict[int, Region] = {}

    def allocate(self, nbytes: int) -> int:
        """Return the address of at least so many bytes. Raises AllocationError."""
        if nbytes > SLAB_NBYTES:
            region = self._engine.allocate(nbytes, rights=self._rights)
            self._large[region.address] = region
            return region.address
        wanted = max(CLASS_NBYTES_MIN, 1 << max(0, nbytes - 1).bit_length())
        with self._lock:
            size = wanted
            while size <= SLAB_NBYTES and not self._free[size]:
                size *= 2
            if size > SLAB_NBYTES:
                size = SLAB_NBYTES
                self._slabs.append(self._engine.allocate(SLAB_NBYTES, rights=self._rights).address)
                self._free[size].add(self._slabs[-1])
            address = self._free[size].pop()
            slab = next(base for base in self._slabs if base <= address < base + SLAB_NBYTES)
            while size > wanted:
                size //= 2
                self._free[size].add(address + size)
            self._used[address] = (wanted, slab)
        return address

    def free(self, address: int) -> None:
        """Take a piece back; raises NotRegisteredError for an address that is none, or was taken back already."""
        region = self._large.pop(address, None)
        if region is not None:
            try:
                self._engine.unregister(region)
            except BaseException:
                self._large[address] = region  # in use still: it can be asked for again
                raise
            return
        with self._lock:
            if address not in self._used:
                raise NotRegisteredError(
                    f"{address:#x} is no managed buffer in use.",
                    remedy="Free what allocate_managed_buffer returned, once.",
                    address=address,
                )
            size, slab = self._used.pop(address)
            while size < SLAB_NBYTES:
                buddy = slab + ((address - slab) ^ size)
                if buddy not in self._free[size]:
                    break
                self._free[size].discard(buddy)
                address = min(address, buddy)
                size *= 2
            self._free[size].add(address)


def copy_bytes(destination: int, source: int, nbytes: int) -> None:
    """Copy one range within this process; as `copy_rows`."""
    copy_rows(np.array([destination]), np.array([source]), np.array([nbytes]))


def copy_rows(destination: AddressColumn, source: AddressColumn, nbytes: AddressColumn) -> None:
    """Copy rows within this process. Raises MemoryArgumentError where there is no memory to read or to write; rows
    before that are copied."""
    there, here = IovecCursor(source, nbytes), IovecCursor(destination, nbytes)
    while not here.is_done:
        rows, count = here.window(COPY_NBYTES)
        done = process_vm_read(os.getpid(), rows, there.window(COPY_NBYTES)[0], count)
        if done <= 0:
            raise _refusal(done, here.nbytes_done)
        here.advance(done)
        there.advance(done)


def _refusal(code: int, nbytes_done: int) -> MemoryArgumentError:
    if code in (-errno.EFAULT, 0):
        return MemoryArgumentError(
            f"there is no such memory in this process, {nbytes_done} bytes into the copy.",
            remedy="Check the address and the length; memory that is freed or read-only cannot be used.",
            nbytes_done=nbytes_done,
        )
    return MemoryArgumentError(
        f"copying memory of this process by process_vm_readv failed: {os.strerror(-code)}.",
        remedy="Register the memory first; a seccomp profile forbids the check that memory without it needs.",
        errno=-code,
    )
