"""The rows of batches that no rail has taken yet, and over which rails they may go, or wait for rails to be connected.

`rdma_spread.py` says how much a rail takes. Touches no device; the endpoint's lock is held for every call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvxfer.errors import KvxferError
from kvxfer.transports.rdma_lane import Lane, Work
from kvxfer.transports.rdma_near import find_near, memory_nodes
from kvxfer.transports.rdma_rail import Rail, usable_rails
from kvxfer.transports.rdma_spread import SPREAD_NBYTES, Spreader

if TYPE_CHECKING:
    from kvxfer.transports.base import Transfer
    from kvxfer.transports.rdma_mender import Mender

__all__ = ["Placement"]

MORE_S = 1.0
"""How long a large batch that could begin waits for the rails that are not connected yet."""


class Placement:
    """Where the batches of one endpoint wait. rails, mender: the endpoint's own.

    waiting: lanes without a rail, of new batches and of rails that broke.
    """

    def __init__(self, rails: list[Rail], spreader: Spreader, mender: Mender) -> None:
        self.waiting: deque[Lane] = deque()
        self._rails = rails
        self._spreader = spreader
        self._mender = mender
        self._has_far_rails = False
        self._main_count = 0
        self.note_rails()

    def note_rails(self) -> None:
        """There are rails more."""
        self._main_count = sum(not rail.is_spare for rail in self._rails)
        self._has_far_rails = len({rail.numa_nodes for rail in self._rails}) > 1

    def begin(self, transfer: Transfer) -> None:
        """Have rails take the batch; raises what is wrong with it."""
        work = transfer.work = Work()
        lane = self._spreader.begin(transfer, self._main_count)
        work.lanes.append(lane)
        self.waiting.append(lane)
        self.deal()
        if work.error is not None:
            raise work.error

    def deal(self) -> bool:
        """Have rails take what waits, as far as they have room; whether any did."""
        has_dealt = False
        for _ in range(len(self.waiting)):
            rest = self.waiting.popleft()
            work: Work = rest.transfer.work
            rails = self._choose(rest.transfer)
            if not rails:
                self.waiting.append(rest)
                self._mender.start()
                continue
            work.lost_at = 0.0
            try:
                for lane in self._spreader.spread(rest, rails):
                    assert lane.rail is not None
                    lane.rail.waiting.append(lane)
                    work.lanes.append(lane)
                    has_dealt = True
            except KvxferError as error:
                work.error = error
                continue
            if rest.done < rest.count:
                self.waiting.append(rest)
            else:
                work.lanes.remove(rest)
        return has_dealt

    def put_back(self, lanes: Iterable[Lane]) -> None:
        """Take lanes whose rail broke, those that may go on."""
        for lane in lanes:
            work: Work = lane.transfer.work
            if lane.done < lane.count and work.error is None and not work.is_given_up:
                lane.rail = None
                self.waiting.append(lane)

    def withdraw(self, transfer: Transfer) -> None:
        """Have nothing more of a batch be posted."""
        transfer.work.is_given_up = True
        for rail in self._rails:
            rail.waiting = deque(lane for lane in rail.waiting if lane.transfer is not transfer)
        self.waiting = deque(lane for lane in self.waiting if lane.transfer is not transfer)

    def _choose(self, transfer: Transfer) -> list[Rail]:
        """Return the rails that a batch may go over now; none where there is none, or there soon are more."""
        rails = usable_rails(self._rails)
        nbytes = transfer.nbytes_total
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
