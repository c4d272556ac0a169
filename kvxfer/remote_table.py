"""A peer's regions as it told them: checked on arrival, looked up for each batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvxfer.errors import RemoteProtocolError
from kvxfer.types import AddressColumn, RegionDescriptor, Rights

__all__ = ["RemoteTable", "parse_regions"]

REGIONS_MAX = 1 << 20


class RemoteTable:
    """A peer's regions at one moment, ascending in address: what rows are checked against before anything is sent."""

    __slots__ = ("_by_name", "_end_ints", "_start_ints", "ends", "regions", "starts")

    def __init__(self, regions: Sequence[RegionDescriptor]) -> None:
        self.regions = tuple(sorted(regions, key=lambda region: region.address))
        self._start_ints = [region.address for region in self.regions]
        self._end_ints = [region.end for region in self.regions]
        self.starts: AddressColumn = np.array(self._start_ints, np.int64)
        self.ends: AddressColumn = np.array(self._end_ints, np.int64)
        self._by_name = {region.name: region for region in self.regions if region.name}
        if len(self.regions) > 1 and bool((self.starts[1:] < self.ends[:-1]).any()):
            raise RemoteProtocolError("the peer's regions overlap.")

    def find(self, address: int, nbytes: int) -> RegionDescriptor | None:
        """Return the region that holds the whole range, or None."""
        index = bisect_right(self._start_ints, address) - 1
        if index < 0 or nbytes < 1 or nbytes > self._end_ints[index] - address:
            return None
        return self.regions[index]

    def find_name(self, name: str) -> RegionDescriptor | None:
        """Return the region of that name, or None."""
        return self._by_name.get(name)


def parse_regions(body: Mapping[str, Any], peer: str) -> tuple[int, list[RegionDescriptor]]:
    """Return the version and the regions of a REGIONS answer, each checked; raises RemoteProtocolError."""
    rows, version = body.get("regions"), body.get("version")
    if not isinstance(rows, list) or len(rows) > REGIONS_MAX or not isinstance(version, int):
        raise RemoteProtocolError(f"{peer} told its regions as {str(body)[:80]}.", peer=peer)
    return version, [_region(row, peer) for row in rows]


def _region(row: Any, peer: str) -> RegionDescriptor:
    """Return one region of the peer's list, checked: it came over the wire."""
    try:
        region_id, name, address, nbytes, rights, keys = row
        numbers_fit = all(type(one) is int for one in (region_id, address, nbytes, rights))
        if not (numbers_fit and isinstance(name, str) and isinstance(keys, dict)):
            raise ValueError(row)
        if not (address >= 0 and nbytes > 0 and address + nbytes < 2**63 and 0 <= rights <= 3 and len(name) <= 1024):
            raise ValueError(row)
        checked = {str(key): value for key, value in keys.items() if isinstance(value, dict)}
    except (ValueError, TypeError):
        raise RemoteProtocolError(f"{peer} describes a region as {str(row)[:120]}.", peer=peer) from None
    return RegionDescriptor(region_id, name, address, nbytes, Rights(rights), checked)
