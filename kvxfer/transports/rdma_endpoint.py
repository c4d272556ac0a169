"""One peer over RDMA: its rails, the batches on them, and what happens when a rail breaks.

A batch waits until rails take its rows, as lanes; lanes wait in their rail until its send queue has room.
Whoever waits for a batch posts and polls; one of the waiters sleeps on the completion channels, the others on a
condition until it has looked. Connections are made by the mender's thread.

The rule when a connection breaks, or must be broken to stop one batch: the batch at fault fails; every other batch on
that connection goes on from what is known to be in place, over another rail or over a new connection, a few times and
within its deadline. No batch ends, well or not, before the peer has dropped its end of every connection that broke
under it, so that no packet that is still on its way writes over what came later.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.errors import KvxferError, PostError
from kvxfer.transports.base import Endpoint, PeerLink, Transfer, is_delivered
from kvxfer.transports.rdma_connect import connect
from kvxfer.transports.rdma_faults import fault_error, is_of_path
from kvxfer.transports.rdma_lane import Lane, Work
from kvxfer.transports.rdma_mender import Connect, Mender
from kvxfer.transports.rdma_notices import Notices
from kvxfer.transports.rdma_placement import Placement
from kvxfer.transports.rdma_queue import Fault, SendQueue
from kvxfer.transports.rdma_rail import Rail
from kvxfer.transports.rdma_spread import Spreader
from kvxfer.transports.rdma_waiters import Waiters
from kvxfer.types import Opcode, RegionDescriptor
from kvxfer.verbs.enums import CompletionStatus

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig

__all__ = ["RdmaEndpoint"]

FAULTS_MAX = 3
"""How often a batch goes on after its connection broke; then it fails with what broke it first."""
STOP_S = 0.5
"""How long broken connections may take to give their requests back before they are destroyed as they are."""
DRAIN_TICK_S = 0.0002
HANG_UP_S = 1.0
"""How long the end of a failed batch waits for a peer that does not say that it has dropped its end."""
TICK_S = 0.05
"""How long who waits may be deaf to a cancel, a closed peer, a port that went down."""
FENCE_TICK_S = 0.002
"""How long a notification may be deaf to room for its fence, which the answer to another one makes."""


class RdmaEndpoint(Endpoint):
    """A peer reached by RC queue pairs, one for each rail."""

    transport = "rdma"
    needs_session = True

    def __init__(self, rails: Sequence[Rail], link: PeerLink, config: EngineConfig, connect: Connect = connect) -> None:
        """connect: how a rail's queue pair is connected; another one for peers that speak another protocol."""
        self._rails = list(rails)
        self._link = link
        self._config = config
        self._changed = threading.Condition(threading.Lock())
        self._spreader = Spreader(link.label)
        self._mender = Mender(
            self._rails,
            link,
            config,
            self._changed,
            connect=connect,
            is_needed=lambda: bool(self._placement.waiting),
            on_connected=self._take_into_use,
        )
        self._placement = Placement(self._rails, self._spreader, self._mender)
        self._notices = Notices(link, self._mender.undropped)
        self._draining: list[list[Lane]] = []
        """The lanes of each queue that was stopped and may still touch memory."""
        self._waiters = Waiters(self._changed)
        self._spin_until = 0.0
        self._closed: KvxferError | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def establish(self, deadline: float) -> None:
        """Connect the first rail that can be; the others are connected when a batch is large enough for them."""
        self._mender.establish(deadline)

    def add_rails(self, rails: Sequence[Rail]) -> None:
        """Use rails more, as soon as they are wanted: of a port here that has come up."""
        with self._changed:
            for rail in rails:
                rail.order = len(self._rails)
                self._rails.append(rail)
            self._placement.note_rails()

    def unreachable(self, region: RegionDescriptor) -> str | None:
        if "nics" in region.keys.get("rdma", {}):
            return None
        return "the peer has not registered it with an RDMA device"

    # Batches.

    def post(self, transfer: Transfer) -> None:
        with self._changed:
            if self._closed is None:
                self._placement.begin(transfer)
                self._pump()

    def progress(self, transfer: Transfer, until: float) -> None:
        try:
            if self._move(transfer, until) and self._announce(transfer, until):
                transfer.finish()
        except KvxferError as error:
            self.abort(transfer, time.monotonic() + HANG_UP_S)
            if self._closed is None:
                error.note(nbytes_done=transfer.nbytes_done)
            transfer.finish(self._closed or error)

    def waits_for(self, transfer: Transfer) -> tuple[int, int] | None:
        with self._changed:
            if self._closed is not None or self._waiters.has_sleeper:
                return None
            self._arm()
            return None if self._pump() else (self._waiters.fileno(), select.POLLIN)

    def abort(self, transfer: Transfer, deadline: float) -> None:
        work: Work | None = transfer.work
        if work is not None and work.delivery is not None:
            work.delivery.abandon()
        self._give_up(transfer, min(deadline, time.monotonic() + HANG_UP_S))

    def describe(self) -> Mapping[str, Any]:
        return {"rails": [rail.describe() for rail in self._rails], "notifications": self._notices.describe()}

    def forget(self, region_ids: Sequence[int]) -> None:
        with self._changed:
            self._spreader.forget(region_ids)

    def abandon(self, error: KvxferError) -> None:
        self._closed = error
        self._waiters.abandon()

    def close(self, error: KvxferError) -> None:
        with self._changed:
            if self._closed is not None:
                return
            self._closed = error
            self._mender.close(error)
            deadline = time.monotonic() + STOP_S
            for rail in self._rails:
                self._break(rail, deadline)
            self._changed.wait_for(lambda: not self._draining)  # what a waiter was stopping meanwhile
            self._placement.waiting.clear()
            self._waiters.close()

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether, after `close`, nothing of this endpoint touches a device any more."""
        return self._mender.wait_idle(timeout_s)

    # Moving. `_changed` is held by whoever calls these, unless they say otherwise.

    def _move(self, transfer: Transfer, until: float) -> bool:
        """Post and poll until the batch is over, which is True, or `until`; raises its error. Takes `_changed`."""
        with self._changed:
            while True:
                if self._closed is not None:
                    raise self._closed
                if transfer.work is None:
                    self._placement.begin(transfer)
                moved = self._pump()
                if transfer.work.error is not None:
                    raise transfer.work.error
                is_over = self._is_over(transfer)
                if is_over and self._notices.begin(transfer):
                    self._changed.notify_all()
                    return True
                now = time.monotonic()
                if transfer.stop is not None or now >= until:
                    return False
                self._check_patience(transfer.work, now)
                if moved:
                    self._spin_until = now + self._config.spin_s
                elif now >= self._spin_until:
                    self._sleep(min(FENCE_TICK_S if is_over else TICK_S, until - now))
                else:
                    self._yield()

    def _yield(self) -> None:
        """Let go of the lock and the core: who answers may need this very core."""
        self._changed.release()
        try:
            os.sched_yield()
        finally:
            self._changed.acquire()

    def _sleep(self, timeout_s: float) -> None:
        """Wait for a completion, or for the one waiter who does."""
        if self._waiters.has_sleeper:
            self._waiters.follow(timeout_s)
            return
        self._arm()
        if not self._pump():
            self._waiters.sleep(timeout_s)

    def _arm(self) -> None:
        """Have who sleeps be woken at the next completion of any rail, or when there is another rail."""
        self._waiters.forget_wakes()
        for rail in self._rails:
            if rail.queue is not None:
                rail.queue.arm()

    def _pump(self) -> bool:
        """Take what has completed, post what there is room for; whether anything was done. Where a queue is broken the
        lock is given up in between."""
        moved = self._placement.deal()
        for rail in self._rails:
            queue = rail.queue
            if queue is None:
                continue
            if queue.outstanding and queue.poll():
                moved = True
                if queue.has_carried:
                    rail.note_carried(queue)
            if queue.fault is None and (rail.nic.is_down or rail.has_moved):
                queue.fault = rail.down_fault()
            if queue.fault is None and rail.waiting:
                moved |= self._post_waiting(rail, queue)
            if queue.fault is not None:
                self._handle_fault(rail, queue.fault)
                moved = True
        if moved and self._waiters.follower_count:
            self._changed.notify_all()
        return moved

    def _post_waiting(self, rail: Rail, queue: SendQueue) -> bool:
        moved = False
        waiting = rail.waiting
        for _ in range(len(waiting)):
            lane = waiting[0]
            try:
                if not queue.post(lane):
                    break  # it is the first to be served when there is room again
                moved = True
            except PostError as error:
                moved |= error.posted_count > 0
                if not error.is_for_want_of_room:
                    lane.transfer.work.error = error
                    waiting.popleft()
                elif error.values.get("bad_index", 0) < 0 or (not error.posted_count and queue.is_stuck):
                    queue.break_by(error, lane)  # nobody knows what is on it, or nothing will make room
                break  # room comes with completions
            if lane.posted == lane.count:
                waiting.popleft()
            else:
                waiting.rotate(-1)  # the next window is another batch's
        return moved

    def _check_patience(self, work: Work, now: float) -> None:
        """Raise why there is no connection for a batch, once it has been without for too long."""
        if any(rail.is_connected for rail in self._rails) or not self._placement.waiting:
            work.lost_at = 0.0
        elif not work.lost_at:
            work.lost_at = now
        elif now - work.lost_at >= self._config.connect_timeout_s:
            raise work.first_error or self._mender.failure()

    def _is_over(self, transfer: Transfer) -> bool:
        work: Work = transfer.work
        if work.lanes and all(lane.done == lane.count for lane in work.lanes):
            work.lanes.clear()
        return not work.lanes and not self._may_still_write(transfer)

    def _may_still_write(self, transfer: Transfer) -> bool:
        """Whether packets of a connection that broke under it may still be on their way."""
        return transfer.opcode is Opcode.WRITE and not self._mender.undropped.isdisjoint(transfer.work.broken)

    def _announce(self, transfer: Transfer, until: float) -> bool:
        """Whether the peer has the notification, which `_move` has begun. Takes `_changed`."""
        if transfer.notify is None:
            return True
        work: Work = transfer.work
        assert work.delivery is not None
        while not is_delivered(work.delivery, transfer, min(until, time.monotonic() + TICK_S)):
            if transfer.stop is not None or time.monotonic() >= until:
                return False
            with self._changed:
                if self._closed is None:
                    self._pump()  # if a fence is lost the peer is told so, and waits for it no longer
        with self._changed:
            self._notices.note_delivered(transfer)
        return True

    # What breaks.

    def _take_into_use(self, rail: Rail, queue: SendQueue) -> None:
        """There is a new connection."""
        rail.queue = queue
        self._waiters.watch(queue)

    def _handle_fault(self, rail: Rail, fault: Fault) -> None:
        """A queue is broken: the batch at fault fails, the others wait for a rail again."""
        error = fault_error(fault, rail, self._link.label)
        is_path = is_of_path(fault.status)
        rail.note_failure(error, is_of_path=is_path)
        self._break(rail, time.monotonic() + STOP_S, lambda lanes: self._blame(lanes, fault, error, is_path=is_path))
        if self._placement.waiting or self._mender.undropped:
            self._mender.start()

    def _blame(self, lanes: list[Lane], fault: Fault, error: KvxferError, *, is_path: bool) -> None:
        """Count a fault for each batch that had something on the queue; the one whose fault it was fails."""
        touched = [lane for lane in lanes if lane.posted > lane.done or lane is fault.lane]
        for transfer in dict.fromkeys(lane.transfer for lane in touched):
            work: Work = transfer.work
            work.faults += 1
            if work.first_error is None or work.first_error.values.get("status") == CompletionStatus.WR_FLUSH_ERR.name:
                work.first_error = error  # a flush is what follows a cause, and some devices tell no other at first
            if not is_path and fault.lane is not None and fault.lane.transfer is transfer:
                work.error = error
            elif work.faults > FAULTS_MAX:
                work.error = work.first_error
                work.error.note(tries=work.faults)

    def _break(self, rail: Rail, deadline: float, judge: Callable[[list[Lane]], None] = lambda lanes: None) -> None:
        """Stop a rail's queue and destroy it; what is not done on it and may go on waits again.

        The lock is given up while the device gives requests back, which may take until `deadline`: batches on other
        rails go on. judge: gets the lanes that were on the queue, before anybody else sees how far they are.
        """
        queue, rail.queue = rail.queue, None
        waiting, rail.waiting = rail.waiting, deque()
        if queue is None:
            self._placement.put_back(waiting)
            return
        lanes = queue.lanes()
        at_fault = queue.fault and queue.fault.lane  # it may have been refused before anything of it was posted
        lanes += [lane for lane in waiting if lane is at_fault and lane not in lanes]
        self._placement.put_back(lane for lane in waiting if lane not in lanes)
        self._mender.undropped.add(rail.number)
        for lane in lanes:
            lane.transfer.work.broken.add(rail.number)
        self._waiters.unwatch(queue)
        self._draining.append(lanes)
        try:
            self._drain(queue, deadline)
        finally:
            self._draining.remove(lanes)
            left = [lane for lane in lanes if lane.done < lane.count]
            judge(left)
            self._placement.put_back(left)
            self._changed.notify_all()

    def _drain(self, queue: SendQueue, deadline: float) -> None:
        """Have the device give everything back, destroy the queue. The lock is held only to count what is done."""
        self._changed.release()
        try:
            queue.stop()
            while True:
                with self._changed:
                    if queue.drain():
                        break
                if time.monotonic() >= deadline:
                    break
                time.sleep(DRAIN_TICK_S)
        finally:
            queue.close()
            self._changed.acquire()

    def _give_up(self, transfer: Transfer, deadline: float) -> None:
        """Take a batch off the rails for good; takes `_changed`. When this returns nothing writes on its account."""
        work: Work | None = transfer.work
        if work is None:
            return
        with self._changed:
            self._placement.withdraw(transfer)
            for rail in self._rails:
                if rail.queue is not None and _has_lane(rail.queue.lanes(), transfer):
                    self._break(rail, time.monotonic() + STOP_S)
            self._changed.wait_for(lambda: not any(_has_lane(lanes, transfer) for lanes in self._draining))
            left = [lane.rows[lane.done :] for lane in work.lanes]
            transfer.slices_left = np.unique(np.concatenate(left)) if left else np.zeros(0, np.int64)
            work.lanes.clear()
            stale = sorted(work.broken & self._mender.undropped) if self._may_still_write(transfer) else []
            self._changed.notify_all()
        for number in stale:
            self._mender.hang_up(number, deadline)
        with self._changed:
            if self._placement.waiting or self._mender.undropped:
                self._mender.start()


def _has_lane(lanes: Iterable[Lane], transfer: Transfer) -> bool:
    return any(lane.transfer is transfer for lane in lanes)
