"""How a batch is shared out: which rows go over which rail, cut for the memory keys and messages of both devices.

Of the rails that are near to its memory (`rdma_near.py`) a small batch takes the one with the least on it, a large one
all, by measured speed. Touches no device; the
endpoint's lock is held. Its result, lanes, goes to `rdma_queue.SendQueue.post`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.memory.chunks import CHUNK_DTYPE
from kvxfer.memory.columns import bounds
from kvxfer.memory.slices import cut_slices
from kvxfer.transports.rdma_keys import KeyTable, read_remote_keys
from kvxfer.transports.rdma_lane import Lane
from kvxfer.transports.rdma_near import find_near, memory_nodes
from kvxfer.types import ADDRESS_MAX, AddressColumn, RegionDescriptor

if TYPE_CHECKING:
    from kvxfer.transports.base import Transfer
    from kvxfer.transports.rdma_rail import Rail

__all__ = ["SPREAD_NBYTES", "Spreader"]

SPREAD_NBYTES = 1 << 20
"""Batches from this size on are spread over all rails: below it the second rail saves less than it costs."""
PIECES = 16
"""A large batch is cut into at least so many pieces for each rail, so that their shares can be unlike."""
TABLES_MAX = 1024
"""Key tables that are kept: one for each rail and each set of regions that a batch used."""

_EVERYWHERE = np.array([(0, ADDRESS_MAX)], CHUNK_DTYPE)


class Spreader:
    """Makes lanes, for one endpoint; remembers the peer's keys."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._turn = 0
        self._tables: dict[tuple[str, tuple[int, ...]], KeyTable] = {}

    def forget(self, region_ids: Iterable[int]) -> None:
        """Drop the keys of regions that the peer took back."""
        gone = set(region_ids)
        self._tables = {key: one for key, one in self._tables.items() if not gone & set(key[1])}

    def spread(
        self,
        transfer: Transfer,
        rails: Sequence[Rail],
        local: AddressColumn,
        remote: AddressColumn,
        nbytes: AddressColumn,
        rows: AddressColumn,
    ) -> list[Lane]:
        """Return lanes that carry these rows of a transfer over `rails`, of which there is one at least.

        Raises TransferError where the peer told no keys for a region.
        """
        if len(rails) == 1:
            return [self._make(transfer, rails[0], local, remote, nbytes, rows)]
        ends = nbytes.cumsum()
        nbytes_total = ends.item(-1)
        rails = find_near(rails, *memory_nodes(transfer), nbytes=nbytes_total)
        if len(rails) == 1 or nbytes_total < SPREAD_NBYTES:
            self._turn += 1
            rail = min(rails, key=lambda one: (one.nbytes_waiting, (one.order + self._turn) % len(rails)))
            return [self._make(transfer, rail, local, remote, nbytes, rows)]
        piece_nbytes = nbytes_total // (PIECES * len(rails))
        if bounds(nbytes)[1] > piece_nbytes:  # adjacent blocks were joined: too coarse to share out
            cut = cut_slices(local, remote, nbytes, _EVERYWHERE, _EVERYWHERE, piece_nbytes)
            local, remote, nbytes, rows = cut["local"], cut["remote"], cut["nbytes"], rows[cut["request"]]
            ends = nbytes.cumsum()
        is_known = all(rail.rate for rail in rails)
        shares = np.cumsum([rail.rate if is_known else 1.0 for rail in rails])
        borders = np.searchsorted(ends, nbytes_total * shares / shares[-1], "left") + 1
        borders[-1] = len(rows)
        lanes: list[Lane] = []
        start = 0
        for rail, border in zip(rails, borders, strict=True):
            end = min(int(border), len(rows))
            if end > start:
                part = slice(start, end)
                lanes.append(self._make(transfer, rail, local[part], remote[part], nbytes[part], rows[part]))
                start = end
        return lanes

    def _make(
        self,
        transfer: Transfer,
        rail: Rail,
        local: AddressColumn,
        remote: AddressColumn,
        nbytes: AddressColumn,
        rows: AddressColumn,
    ) -> Lane:
        mine = rail.nic.local_keys()
        theirs = self._remote_keys(transfer.regions, rail)
        # One region, one key, as in most batches: planning has seen that all rows lie in it.
        lkey = mine.find_region(transfer.used[0]) if len(transfer.used) == 1 else None
        rkey = theirs.find_region(transfer.regions[0]) if len(transfer.regions) == 1 else None
        if lkey is None:
            lkey = mine.find_one(local, nbytes)
        if rkey is None:
            rkey = theirs.find_one(remote, nbytes)
        limit = rail.message_nbytes_max
        fits = transfer.nbytes_total <= limit or bounds(nbytes)[1] <= limit
        if lkey is not None and rkey is not None and fits:
            return Lane(transfer, rail, local, remote, nbytes, lkey, rkey, rows)
        cut = cut_slices(local, remote, nbytes, mine.chunks, theirs.chunks, limit)
        return Lane(
            transfer,
            rail,
            np.ascontiguousarray(cut["local"]),
            np.ascontiguousarray(cut["remote"]),
            np.ascontiguousarray(cut["nbytes"]),
            mine.keys[cut["local_chunk"]],
            theirs.keys[cut["remote_chunk"]],
            rows[cut["request"]],
        )

    def _remote_keys(self, regions: tuple[RegionDescriptor, ...], rail: Rail) -> KeyTable:
        ids = tuple(region.region_id for region in regions)
        found = self._tables.get((rail.remote_name, ids))
        if found is None:
            found = read_remote_keys(regions, rail.remote_name, self._peer)
            if len(self._tables) >= TABLES_MAX:
                self._tables.clear()
            self._tables[rail.remote_name, ids] = found
        return found
