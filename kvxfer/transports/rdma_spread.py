"""How a batch is shared out: which rail takes which rows next, cut for the memory keys and messages of both devices.

Of the rails that are near to its memory (`rdma_near.py`) a small batch takes the one with the least on it. The rows of
a large one wait for all of them: each takes part of its share by measured speed, and more when that is done, so that a
rail that is slower than expected takes less. Touches no device; the endpoint's lock is held. Its result, lanes, goes to
`rdma_queue.SendQueue.post`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.memory.chunks import CHUNK_DTYPE
from kvxfer.memory.columns import bounds
from kvxfer.memory.slices import cut_slices, row_numbers
from kvxfer.transports.rdma_keys import KeyTable, read_remote_keys
from kvxfer.transports.rdma_lane import Lane
from kvxfer.transports.rdma_near import find_near, memory_nodes
from kvxfer.types import ADDRESS_MAX, RegionDescriptor

if TYPE_CHECKING:
    from kvxfer.transports.base import Transfer
    from kvxfer.transports.rdma_rail import Rail

__all__ = ["SPREAD_NBYTES", "Spreader", "find_window"]

SPREAD_NBYTES = 1 << 20
"""Batches from this size on are spread over all rails: below it the second rail saves less than it costs."""
PIECES = 32
"""A large batch is cut into at least so many pieces for each rail, so that their shares can be unlike."""
WINDOW_NBYTES, WINDOW_S = 256 << 10, 0.001
"""What a rail takes at once at least: less is not worth a post, or is done before the next one is posted."""
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

    def begin(self, transfer: Transfer, rail_count: int) -> Lane:
        """Return all rows of a transfer, for rails to take; fine enough for so many."""
        local, remote, nbytes = transfer.columns
        rows = row_numbers(len(nbytes))
        piece_nbytes = transfer.nbytes_total // (PIECES * rail_count)
        # Adjacent blocks were joined: that is too coarse to share out.
        if rail_count > 1 and transfer.nbytes_total >= SPREAD_NBYTES and bounds(nbytes)[1] > piece_nbytes:
            cut = cut_slices(local, remote, nbytes, _EVERYWHERE, _EVERYWHERE, piece_nbytes)
            local, remote, nbytes, rows = cut["local"], cut["remote"], cut["nbytes"], cut["request"]
        return Lane(transfer, None, local, remote, nbytes, 0, 0, rows)

    def spread(self, rest: Lane, rails: Sequence[Rail]) -> list[Lane]:
        """Return lanes that take rows off `rest`, for `rails`, of which there is one at least; none while each has
        enough of it.

        Raises TransferError where the peer told no keys for a region.
        """
        transfer = rest.transfer
        if len(rails) > 1:
            rails = find_near(rails, *memory_nodes(transfer), nbytes=rest.nbytes_left)
        if len(rails) == 1:
            return [self._make(rest, rails[0], rest.count - rest.done)]
        if transfer.nbytes_total < SPREAD_NBYTES:
            self._turn += 1
            rail = min(rails, key=lambda one: (one.nbytes_waiting, (one.order + self._turn) % len(rails)))
            return [self._make(rest, rail, rest.count - rest.done)]
        is_known = all(rail.rate for rail in rails)
        rates = [rail.rate if is_known else 1.0 for rail in rails]
        loads = [sum(lane.nbytes_left for lane in transfer.work.lanes if lane.rail is rail) for rail in rails]
        lanes: list[Lane] = []
        while nbytes_left := rest.nbytes_left:
            at, window_nbytes = find_window(nbytes_left, rates, loads)
            if window_nbytes == 0:
                break
            target = int(rest.ends[-1]) - nbytes_left + window_nbytes
            count = int(rest.ends.searchsorted(target, "right")) - rest.done
            lanes.append(self._make(rest, rails[at], max(1, count)))
            loads[at] += lanes[-1].nbytes_left
        return lanes

    def _make(self, rest: Lane, rail: Rail, count: int) -> Lane:
        """Return a lane that takes the next `count` slices off `rest`."""
        transfer = rest.transfer
        mine = rail.nic.local_keys()
        theirs = self._remote_keys(transfer.regions, rail)
        local, remote, nbytes, rows = rest.take(count)
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


def find_window(nbytes_left: int, rates: Sequence[float], loads: Sequence[int]) -> tuple[int, int]:
    """Return which rail takes of `nbytes_left` next, and how many bytes; 0 where each has enough of the batch.

    rates: bytes a second of each rail; loads: bytes of the batch that are on it. It takes half of what it lacks to be
    done when the others are, and has two such windows at most: the second one keeps it busy until the next is posted,
    and what is left goes to whoever is done first.
    """
    at = min(range(len(rates)), key=lambda one: loads[one] / rates[one])
    lacks = rates[at] * (nbytes_left + sum(loads)) / sum(rates) - loads[at]
    window = max(lacks / 2, min(lacks, max(WINDOW_NBYTES, rates[at] * WINDOW_S)))
    return at, 0 if loads[at] > 3 * window else max(1, int(window))
