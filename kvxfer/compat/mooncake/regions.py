"""Which memory callers have registered, by the address where it begins: Mooncake's rules over the native engine's.

The native engine counts registrations of the equal range and takes a Region back; Mooncake refuses the second and takes
an address. Read next: `running.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from kvxfer import (
    KvxferError,
    MemoryArgumentError,
    NotRegisteredError,
    Region,
    RegionOverlapError,
    TransferEngine,
)

__all__ = ["Registrations"]


class Registrations:
    """The registered ranges of one engine. All methods may be called from any thread."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._taken: set[int] = set()

    def add(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Register ranges (address, nbytes), all or none; the error's `index` is the row that failed."""
        claimed: list[int] = []
        made: list[Region] = []
        try:
            for address, nbytes in ranges:
                if self._claim(address, nbytes):
                    claimed.append(address)
            for row, one in enumerate(ranges):
                try:
                    made.append(self._register(one))
                except KvxferError as error:
                    error.note(index=row)
                    raise
        except BaseException:
            for region in made:
                with contextlib.suppress(KvxferError):
                    self._engine.unregister(region)
            with self._lock:
                self._taken.difference_update(claimed)
            raise
        with self._lock:
            self._regions.update((region.address, region) for region in made)

    def remove(self, addresses: Sequence[int]) -> None:
        """Take ranges back by where they begin: as many as can be, then raises the first error."""
        first: KvxferError | None = None
        for address in addresses:
            try:
                self._remove(address)
            except KvxferError as error:
                first = first or error
        if first is not None:
            raise first

    def _claim(self, address: int, nbytes: int) -> bool:
        """Take an address; whether it is taken now and was not before: an empty range, which `_register` refuses, may
        begin where another one is registered."""
        with self._lock:
            is_taken = address in self._taken
            if is_taken and nbytes:
                raise RegionOverlapError(
                    f"[{address:#x}, {address + nbytes:#x}) overlaps memory that is registered from there on.",
                    remedy="Register memory once, and unregister it before it is registered anew.",
                    address=address,
                    nbytes=nbytes,
                )
            self._taken.add(address)
            return not is_taken

    def _register(self, one: tuple[int, int]) -> Region:
        try:
            return self._engine.register(one)
        except MemoryArgumentError as error:
            hint = "Memory of a GPU cannot be used yet; let the KV cache lie in host memory."
            raise MemoryArgumentError(error.message, remedy=f"{error.remedy} {hint}", **error.values) from error

    def _remove(self, address: int) -> None:
        with self._lock:
            region = self._regions.pop(address, None)
        if region is None:
            raise NotRegisteredError(
                f"no registered range begins at {address:#x}.",
                remedy="Pass the address that was registered, once.",
                address=address,
            )
        try:
            self._engine.unregister(region)
        except BaseException:
            with self._lock:
                self._regions[address] = region  # it is registered still, or must be asked for again
            raise
        with self._lock:
            self._taken.discard(address)
