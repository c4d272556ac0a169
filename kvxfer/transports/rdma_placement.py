"""Which rails the lanes of a batch wait in, and the orphans: lanes that have no rail until one can be had.

`rdma_spread.py` makes the lanes; here it is decided over which rails now, and whether more should be connected first.
Touches no device; the endpoint's lock is held for every call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvxfer.errors import KvxferError
from kvxfer.memory.slices import row_numbers
from kvxfer.transports.rdma_lane import Lane, Work
from kvxfer.transports.rdma_near import find_near, memory_nodes
from kvxfer.transports.rdma_rail import Rail, usable_rails
from kvxfer.transports.rdma_spread import SPREAD_NBYTES, Spreader

if TYPE_CHECKING:
    from kvxfer.transports.base import Transfer
    from kvxfer.transports.rdma_mender import Mender
    from kvxfer.types import AddressColumn

__all__ = ["Placement"]

MORE_S = 1.0
"""How long a large batch that could begin waits for the rails that are not connected yet."""


class Placement:
    """Where the batches of one endpoint wait. rails, mender: the endpoint's own."""

    def __init__(self, rails: list[Rail], spreader: Spreader, mender: Mender) -> None:
        self.orphans: list[Lane] = []
        self._rails = rails
        self._spreader = spreader
        self._mender = mender
        self._has_far_rails = False
        self.note_rails()

    def note_rails(self) -> None:
        """There are rails more."""
        self._has_far_rails = len({rail.numa_nodes for rail in self._rails}) > 1

    def begin(self, transfer: Transfer) -> None:
        """Make lanes of the batch and have them wait in their rails; raises what is wrong with it."""
        work = transfer.work = Work()
        columns = (*transfer.columns, row_numbers(len(transfer.columns[0])))
        rails = self._choose(transfer, transfer.nbytes_total)
        if rails:
            self._place(transfer, rails, columns)
            return
        lane = Lane(transfer, None, *columns[:3], 0, 0, columns[3])
        work.lanes.append(lane)
        self.orphans.append(lane)
        self._mender.start()

    def place_orphans(self) -> bool:
        """Give lanes that have no rail one, as far as there is any; whether there was."""
        if not self.orphans:
            return False
        orphans, self.orphans = self.orphans, []
        for lane in orphans:
            work: Work = lane.transfer.work
            rails = self._choose(lane.transfer, lane.nbytes_left)
            if not rails:
                self.orphans.append(lane)
                continue
            work.lost_at = 0.0
            left = slice(lane.done, lane.count)
            columns = (lane.local[left], lane.remote[left], lane.nbytes[left], lane.rows[left])
            try:
                self._place(lane.transfer, rails, columns)
                work.lanes.remove(lane)
            except KvxferError as error:
                work.error = error
        if self.orphans:
            self._mender.start()
        return len(self.orphans) < len(orphans)

    def orphan(self, lanes: Iterable[Lane]) -> None:
        """Take lanes whose rail broke, those that may go on."""
        for lane in lanes:
            work: Work = lane.transfer.work
            if lane.done < lane.count and work.error is None and not work.is_given_up:
                self.orphans.append(lane)

    def withdraw(self, transfer: Transfer) -> None:
        """Have nothing more of a batch be posted."""
        transfer.work.is_given_up = True
        for rail in self._rails:
            rail.waiting = deque(lane for lane in rail.waiting if lane.transfer is not transfer)
        self.orphans = [lane for lane in self.orphans if lane.transfer is not transfer]

    def _choose(self, transfer: Transfer, nbytes: int) -> list[Rail]:
        """Return the rails that so many bytes should go over now; none where there is none, or there soon are more."""
        rails = usable_rails(self._rails)
        if rails and nbytes >= SPREAD_NBYTES and self._mender.connect_more():
            return rails if time.monotonic() - transfer.work.begun >= MORE_S else []
        if rails and (self._lacks_room(nbytes) or (self._has_far_rails and self._lacks_near(transfer))):
            self._mender.connect_more()  # for the next one: a small batch waits for no rail
        return rails

    def _lacks_room(self, nbytes: int) -> bool:
        """Whether what waits is as much as a large batch, and there is a rail that is not connected."""
        if all(rail.queue is not None or rail.is_spare for rail in self._rails):
            return False
        return nbytes + sum(rail.nbytes_waiting for rail in self._rails) >= SPREAD_NBYTES

    def _lacks_near(self, transfer: Transfer) -> bool:
        """Whether none of the rails that are nearest to the batch's memory is connected."""
        main = [rail for rail in self._rails if not rail.is_spare]
        return not any(rail.is_connected for rail in find_near(main, *memory_nodes(transfer), nbytes=0))

    def _place(self, transfer: Transfer, rails: Sequence[Rail], columns: tuple[AddressColumn, ...]) -> None:
        for lane in self._spreader.spread(transfer, rails, *columns):
            transfer.work.lanes.append(lane)
            assert lane.rail is not None
            lane.rail.waiting.append(lane)
