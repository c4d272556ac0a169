"""The book of registered memory: which ranges exist, who may use them, who uses them now. One range: `region.py`.

Owns names, reference counts and use counts; never touches the memory, a transport or a clock. The one module below the
transports with locks: check-and-insert must be atomic for threads that register at the same time, and a removal has to
wait for users that other threads count down. Lookups take no lock: they read an immutable RegionSnapshot.
A range goes reserved -> live -> retired -> gone; only live ones are in snapshots, all but gone ones block overlaps.
No method may be called from a finalizer (`__del__`, weakref callback): it might run while the lock is held.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, NoReturn

import numpy as np

from kvxfer.errors import (
    ClosedError,
    LocalProtocolError,
    MemoryArgumentError,
    NotRegisteredError,
    RegionBusyError,
    RegionOverlapError,
    UsageError,
)
from kvxfer.memory.buffers import BufferView
from kvxfer.memory.region import Region, RegionKeys, RegionState
from kvxfer.memory.slices import distinct
from kvxfer.text import format_count
from kvxfer.types import AddressColumn, Rights

__all__ = ["Region", "RegionKeys", "RegionSnapshot", "RegionTable", "Reservation", "Side"]

Side = Literal["local", "remote"]
"""Who uses a region: transfers of this process, or requests of peers."""


class RegionSnapshot:
    """The live regions at one moment, ascending in address. Immutable; the lookups take no lock.

    starts, ends: int64, shape (n,), not writeable. regions: the same rows. version: grows with every change.
    """

    __slots__ = ("_by_id", "_by_name", "_end_ints", "_start_ints", "ends", "regions", "starts", "version")

    def __init__(self, regions: tuple[Region, ...], version: int) -> None:
        self.regions = regions
        self.version = version
        self._start_ints = tuple(region.address for region in regions)
        self._end_ints = tuple(region.end for region in regions)
        self.starts: AddressColumn = np.array(self._start_ints, np.int64)
        self.ends: AddressColumn = np.array(self._end_ints, np.int64)
        self.starts.flags.writeable = False
        self.ends.flags.writeable = False
        self._by_id = {region.region_id: region for region in regions}
        self._by_name = {region.name: region for region in regions if region.name}

    def __len__(self) -> int:
        return len(self.regions)

    def find(self, address: int, nbytes: int) -> Region | None:
        """Return the region that holds the whole range, or None. 0.15 us, for one row; `slices.locate` is for many."""
        index = bisect_right(self._start_ints, address) - 1
        if index < 0 or nbytes < 1 or nbytes > self._end_ints[index] - address:
            return None
        return self.regions[index]

    def find_id(self, region_id: int) -> Region | None:
        """Return the live region with this id, or None."""
        return self._by_id.get(region_id)

    def find_name(self, name: str) -> Region | None:
        """Return the live region with this name, or None."""
        return self._by_name.get(name)

    def find_used(self, index: np.ndarray[Any, np.dtype[np.intp]]) -> tuple[Region, ...]:
        """Return the regions that an index column of `slices.locate` names, each once."""
        return tuple(self.regions[i] for i in distinct(index, len(self.regions)).tolist())


class Reservation:
    """A range taken by one registration in progress; leave it with `commit` or `release`.

    As a context manager it releases on the way out what was not committed, so that a failure leaves nothing behind.
    """

    __slots__ = ("_table", "region")

    def __init__(self, table: RegionTable, region: Region) -> None:
        self._table = table
        self.region = region

    def commit(self, keys: RegionKeys) -> Region:
        """Publish the region with the keys of all transports and return it."""
        return self._table._commit(self.region, keys)

    def release(self) -> None:
        """Give the range back if it was not committed; a second call, or one after `commit`, does nothing."""
        self._table._release_reservation(self.region)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class RegionTable:
    """All regions of one engine. Every method may be called from any thread; none blocks but `wait_idle`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.guard = self._lock
        """Whoever holds it keeps every live region live: for a copy of a few microseconds it is cheaper than a use."""
        self._idle = threading.Condition(self._lock)
        self._waiting_count = 0
        self._starts: list[int] = []  # of every region that is not gone, ascending; _ranges has the regions themselves
        self._ranges: list[Region] = []
        self._by_id: dict[int, Region] = {}
        self._by_name: dict[str, Region] = {}
        self._ids = itertools.count(1)
        self._last_id = 0
        self._version = 0
        self._snapshot: RegionSnapshot | None = RegionSnapshot((), 0)

    def snapshot(self) -> RegionSnapshot:
        """Return the live regions now; built on the first call after a change, so a bulk registration pays once."""
        snapshot = self._snapshot
        if snapshot is not None:
            return snapshot
        with self._lock:
            if self._snapshot is None:
                self._snapshot = RegionSnapshot(tuple(r for r in self._ranges if r.is_live), self._version)
            return self._snapshot

    def reserve(self, view: BufferView, name: str = "", rights: Rights = Rights.ALL) -> Reservation | Region:
        """Take a range for a registration, or count one more reference on the region of the equal range.

        Returns a Reservation, to be committed or released, for a new range. An equal (address, nbytes) that is live
        returns its Region: `name` is taken over if it had none; another name or other rights are refused. Both views
        are kept alive from then on, since nobody can tell which registration is undone first.

        Raises MemoryArgumentError for REMOTE_WRITE on read-only memory; RegionOverlapError for a real overlap with a
        region that is not gone; RegionBusyError (retryable) if the equal range is just being registered or removed;
        UsageError for a name or rights that do not fit. Nothing is changed then.
        """
        if view.read_only and rights & Rights.REMOTE_WRITE:
            raise MemoryArgumentError(
                f"{view.nbytes} bytes at {view.address:#x} ({view.kind}) are read-only, and the rights {rights} let "
                "peers write them.",
                remedy="Register it for reading only (rights=kvxfer.Rights.REMOTE_READ), or pass writeable memory.",
                address=view.address,
                nbytes=view.nbytes,
                rights=rights,
            )
        with self._lock:
            index = bisect_left(self._starts, view.address)
            existing = self._find_overlap(index, view)
            if existing is not None:
                if (existing.address, existing.nbytes) != (view.address, view.nbytes):
                    _refuse_overlap(view, existing)
                self._add_reference(existing, view, name, rights)
                return existing
            self._check_name(name)
            self._last_id = next(self._ids)
            region = Region(self._last_id, view, name, rights)
            self._starts.insert(index, region.address)
            self._ranges.insert(index, region)
            self._by_id[region.region_id] = region
            if name:
                self._by_name[name] = region
            return Reservation(self, region)

    def _find_overlap(self, index: int, view: BufferView) -> Region | None:
        """Return a region that shares a byte with `view`, or None; `index` is where its address sorts in."""
        if index < len(self._ranges) and self._starts[index] < view.end:
            return self._ranges[index]
        if index > 0 and self._ranges[index - 1].end > view.address:
            return self._ranges[index - 1]
        return None

    def _check_name(self, name: str) -> None:
        owner = self._by_name.get(name) if name else None
        if owner is not None:
            raise UsageError(
                f"the name {name!r} is taken by {owner} ({owner.state.value}).",
                remedy="Choose another name, or unregister that region first.",
                name=name,
                region_id=owner.region_id,
            )

    def _add_reference(self, region: Region, view: BufferView, name: str, rights: Rights) -> None:
        if not region.is_live:
            raise RegionBusyError(
                f"{region} is {region.state.value} by another call.",
                remedy="Try again when that call has returned.",
                region_id=region.region_id,
            )
        if rights != region.rights:
            raise UsageError(
                f"{region} is registered with the rights {region.rights}; a second registration asks for {rights}.",
                remedy="Ask for the same rights, or unregister it first.",
                region_id=region.region_id,
                rights=rights,
                existing_rights=region.rights,
            )
        if name and name != region.name:
            if region.name:
                raise UsageError(
                    f"{region} has that name; a second registration calls it {name!r}.",
                    remedy="Leave the name out, or use the same.",
                    region_id=region.region_id,
                    name=name,
                    existing_name=region.name,
                )
            self._check_name(name)
            region.name = name
            self._by_name[name] = region
            self._changed()
        region.reference_count += 1
        kept = [region.view.owner, *region._also_kept]
        if view.owner is not None and not any(_exporter(owner) is _exporter(view.owner) for owner in kept):
            region._also_kept.append(view.owner)

    def _changed(self) -> None:
        self._version += 1
        self._snapshot = None

    def _commit(self, region: Region, keys: RegionKeys) -> Region:
        with self._lock:
            if region.state is not RegionState.RESERVED:
                raise LocalProtocolError(f"{region!r} was committed out of turn.", region_id=region.region_id)
            region.keys = keys
            region.state = RegionState.LIVE
            self._changed()
        return region

    def _release_reservation(self, region: Region) -> None:
        with self._lock:
            if region.state is not RegionState.RESERVED:
                return
            dropped = self._remove(region)
        del dropped  # outside the lock: dropping the last owner may run code of the caller

    def _remove(self, region: Region) -> list[object]:
        """Forget the range, the name and the id; return the owners that the caller drops after the lock."""
        index = bisect_left(self._starts, region.address)
        del self._starts[index], self._ranges[index], self._by_id[region.region_id]
        if region.name:
            del self._by_name[region.name]
        region.state = RegionState.GONE
        dropped = [region.view, *region._also_kept]
        region.view = replace(region.view, owner=None)
        region._also_kept = []
        return dropped

    def acquire(self, regions: Collection[Region], side: Side) -> None:
        """Count one use of each region (0.3 us for one), all or none. `RegionSnapshot.find_used` gives the regions.

        Raises NotRegisteredError if one was unregistered since the snapshot.
        """
        with self._lock:
            for region in regions:
                if region.state is not RegionState.LIVE:
                    raise NotRegisteredError(
                        f"{region} is {region.state.value}.",
                        remedy="Do not unregister memory that transfers still name.",
                        region_id=region.region_id,
                    )
            if side == "local":
                for region in regions:
                    region.local_use_count += 1
            else:
                for region in regions:
                    region.remote_use_count += 1

    def release(self, regions: Collection[Region], side: Side) -> None:
        """Undo one `acquire` of the same regions."""
        with self._lock:
            for region in regions:
                count = region.local_use_count if side == "local" else region.remote_use_count
                if count < 1:
                    raise LocalProtocolError(f"{region} was released more often than acquired.", side=side)
                if side == "local":
                    region.local_use_count = count - 1
                else:
                    region.remote_use_count = count - 1
            if self._waiting_count:
                self._idle.notify_all()

    def retire(self, region_id: int) -> bool:
        """End one registration; return True if it was the last, so the region must be deregistered and forgotten.

        After the last one no lookup finds the region and no `acquire` succeeds; its range stays taken until `forget`.

        Raises RegionBusyError, and changes nothing, if it is the last and transfers of this process still use it;
        ClosedError if the region was unregistered before; UsageError if there never was one with this id.
        """
        with self._lock:
            region = self._by_id.get(region_id)
            if region is None or region.state is not RegionState.LIVE:
                self._refuse_retire(region_id, region)
            if region.reference_count > 1:
                region.reference_count -= 1
                return False
            if region.local_use_count:
                raise RegionBusyError(
                    f"{region} is used by {format_count(region.local_use_count, 'running transfer')} of this process.",
                    remedy="Wait for them or cancel them, then unregister it.",
                    region_id=region_id,
                    use_count=region.local_use_count,
                )
            region.reference_count = 0
            region.state = RegionState.RETIRED
            self._changed()
            return True

    def _refuse_retire(self, region_id: int, region: Region | None) -> NoReturn:
        remedy = "Unregister as many times as you registered, no more."
        if region is not None and region.state is RegionState.RESERVED:
            raise RegionBusyError(f"{region} is being registered.", remedy="Wait for that call.", region_id=region_id)
        if 1 <= region_id <= self._last_id:
            raise ClosedError(f"region {region_id} is unregistered already.", remedy=remedy, region_id=region_id)
        raise UsageError(f"there never was a region {region_id}.", remedy=remedy, region_id=region_id)

    def owns(self, region: Region) -> bool:
        """Whether the region is, or was, one of this table."""
        known = self._by_id.get(region.region_id)
        return known is region or (known is None and region.state is RegionState.GONE)

    def wait_idle(self, region: Region, timeout_s: float | None) -> bool:
        """Block until no request of a peer uses the region; return False if some still do after `timeout_s`."""
        with self._lock:
            self._waiting_count += 1
            try:
                return self._idle.wait_for(lambda: region.remote_use_count == 0, timeout_s)
            finally:
                self._waiting_count -= 1

    def forget(self, region: Region) -> None:
        """Free the range and the name of a retired region and let go of its memory."""
        with self._lock:
            if region.state is not RegionState.RETIRED:
                raise LocalProtocolError(f"{region!r} was forgotten out of turn.", region_id=region.region_id)
            if region.remote_use_count:
                raise RegionBusyError(
                    f"{region} is used by {region.remote_use_count} running requests of peers.",
                    remedy="Wait for them (wait_idle) or drop the connections they came from.",
                    region_id=region.region_id,
                    use_count=region.remote_use_count,
                )
            dropped = self._remove(region)
        del dropped  # outside the lock: dropping the last owner may run code of the caller


def _refuse_overlap(view: BufferView, existing: Region) -> NoReturn:
    raise RegionOverlapError(
        f"[{view.address:#x}, {view.end:#x}), {view.nbytes} bytes, overlaps {existing} ({existing.state.value}).",
        remedy="Register the whole buffer once; an equal range may be registered again, a part of one may not.",
        address=view.address,
        nbytes=view.nbytes,
        region_id=existing.region_id,
        existing_address=existing.address,
        existing_nbytes=existing.nbytes,
    )


def _exporter(owner: object) -> object:
    """Return the object whose memory `owner` shows: what a memoryview exports, the base of a numpy view."""
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner.obj if isinstance(owner, memoryview) else owner
