"""One peer over RDMA: its rails, the batches on them, and what happens when a rail breaks.

A batch becomes lanes, one for each rail it is spread over; lanes wait in their rail until its send queue has room.
Whoever waits for a batch posts and polls; one of the waiters sleeps on the completion channels, the others on a
condition until it has looked. Connections are made by the mender's thread.

The rule when a connection breaks, or must be broken to stop one batch: the batch at fault fails; every other batch on
that connection goes on from what is known to be in place, over another rail or over a new connection, a few times and
within its deadline. No batch ends, well or not, before the peer has dropped its end of every connection that broke
under it, so that no packet that is still on its way writes over what came later.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.errors import KvxferError, PostError
from kvxfer.memory.slices import row_numbers
from kvxfer.transports.base import Endpoint, PeerLink, Transfer, is_delivered
from kvxfer.transports.rdma_connect import connect
from kvxfer.transports.rdma_faults import fault_error, is_of_path
from kvxfer.transports.rdma_lane import Lane, Work
from kvxfer.transports.rdma_mender import Connect, Mender
from kvxfer.transports.rdma_near import find_near, memory_nodes
from kvxfer.transports.rdma_queue import Fault, SendQueue
from kvxfer.transports.rdma_rail import Rail, usable_rails
from kvxfer.transports.rdma_spread import SPREAD_NBYTES, Spreader
from kvxfer.types import AddressColumn, Opcode, RegionDescriptor
from kvxfer.verbs.enums import CompletionStatus

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig

__all__ = ["RdmaEndpoint"]

FAULTS_MAX = 3
"""How often a batch goes on after its connection broke; then it fails with what broke it first."""
MORE_S = 1.0
"""How long a large batch that could begin waits for the rails that are not connected yet."""
STOP_S = 0.5
"""How long broken connections may take to give their requests back before they are destroyed as they are."""
HANG_UP_S = 1.0
"""How long the end of a failed batch waits for a peer that does not say that it has dropped its end."""
TICK_S = 0.05
"""How long who waits may be deaf to a cancel, a closed peer, a port that went down."""


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
        self._has_far_rails = len({rail.numa_nodes for rail in self._rails}) > 1
        self._spreader = Spreader(link.label)
        self._mender = Mender(
            self._rails,
            link,
            config,
            self._changed,
            connect=connect,
            is_needed=lambda: bool(self._orphans),
            on_connected=self._take_into_use,
        )
        self._orphans: list[Lane] = []
        """Lanes that have no rail, until one can be had."""
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._has_sleeper = False
        self._follower_count = 0
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
            self._has_far_rails = len({rail.numa_nodes for rail in self._rails}) > 1

    def unreachable(self, region: RegionDescriptor) -> str | None:
        if "nics" in region.keys.get("rdma", {}):
            return None
        return "the peer has not registered it with an RDMA device"

    # Batches.

    def post(self, transfer: Transfer) -> None:
        with self._changed:
            if self._closed is None:
                self._begin(transfer)
                self._pump()

    def progress(self, transfer: Transfer, until: float) -> None:
        try:
            if self._move(transfer, until) and self._announce(transfer, until):
                transfer.finish()
        except KvxferError as error:
            self._give_up(transfer, time.monotonic() + HANG_UP_S)
            if self._closed is None:
                error.note(nbytes_done=transfer.nbytes_done)
            transfer.finish(self._closed or error)

    def waits_for(self, transfer: Transfer) -> tuple[int, int] | None:
        with self._changed:
            if self._closed is not None or self._has_sleeper:
                return None
            self._arm()
            return None if self._pump() else (self._epoll.fileno(), select.POLLIN)

    def abort(self, transfer: Transfer, deadline: float) -> None:
        work: Work | None = transfer.work
        if work is not None and work.delivery is not None:
            work.delivery.abandon()
        self._give_up(transfer, min(deadline, time.monotonic() + HANG_UP_S))

    def describe(self) -> Mapping[str, Any]:
        return {"rails": [rail.describe() for rail in self._rails]}

    def forget(self, region_ids: Sequence[int]) -> None:
        with self._changed:
            self._spreader.forget(region_ids)

    def abandon(self, error: KvxferError) -> None:
        self._closed = error
        self._close_descriptors()

    def close(self, error: KvxferError) -> None:
        with self._changed:
            if self._closed is not None:
                return
            self._closed = error
            self._mender.close(error)
            deadline = time.monotonic() + STOP_S
            for rail in self._rails:
                self._break(rail, deadline)
            self._orphans.clear()
            self._changed.notify_all()
            if self._has_sleeper:
                os.eventfd_write(self._wake_fd, 1)  # and closes it then: not while it sleeps there
            else:
                self._close_descriptors()

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
                    self._begin(transfer)
                moved = self._pump()
                if transfer.work.error is not None:
                    raise transfer.work.error
                if self._is_over(transfer):
                    self._changed.notify_all()
                    return True
                now = time.monotonic()
                if transfer.stop is not None or now >= until:
                    return False
                self._check_patience(transfer.work, now)
                if moved:
                    self._spin_until = now + self._config.spin_s
                elif now >= self._spin_until:
                    self._sleep(min(TICK_S, until - now))
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
        if self._has_sleeper:
            self._follower_count += 1
            try:
                self._changed.wait(timeout_s)
            finally:
                self._follower_count -= 1
            return
        self._arm()
        if self._pump():
            return
        self._has_sleeper = True
        self._changed.release()
        try:
            self._epoll.poll(timeout_s)
        finally:
            self._changed.acquire()
            self._has_sleeper = False
            self._changed.notify_all()
            if self._closed is not None:
                self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._epoll.close()
        os.close(self._wake_fd)

    def _arm(self) -> None:
        """Have the epoll become readable at the next completion of any rail, or when there is another rail."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        for rail in self._rails:
            if rail.queue is not None:
                rail.queue.arm()

    def _pump(self) -> bool:
        """Take what has completed, post what there is room for; whether anything was done."""
        moved = self._place_orphans() if self._orphans else False
        for rail in self._rails:
            queue = rail.queue
            if queue is None:
                continue
            if queue.outstanding and queue.poll():
                moved = True
            if queue.fault is None and (rail.nic.is_down or rail.has_moved):
                queue.fault = rail.down_fault()
            if queue.fault is None and rail.waiting:
                moved |= self._post_waiting(rail, queue)
            if queue.fault is not None:
                self._handle_fault(rail, queue.fault)
                moved = True
        if moved and self._follower_count:
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

    def _begin(self, transfer: Transfer) -> None:
        """Make lanes of the batch and have them wait in their rails; raises what is wrong with it."""
        work = transfer.work = Work()
        columns = (*transfer.columns, row_numbers(len(transfer.columns[0])))
        rails = self._rails_for(transfer, transfer.nbytes_total)
        if rails:
            self._place(transfer, rails, columns)
            return
        lane = Lane(transfer, None, *columns[:3], 0, 0, columns[3])
        work.lanes.append(lane)
        self._orphans.append(lane)
        self._mender.start()

    def _rails_for(self, transfer: Transfer, nbytes: int) -> list[Rail]:
        """Return the rails that so many bytes should go over now; none where there is none, or there soon are more."""
        rails = usable_rails(self._rails)
        if rails and nbytes >= SPREAD_NBYTES and self._mender.connect_more():
            return rails if time.monotonic() - transfer.work.begun >= MORE_S else []
        if rails and self._has_far_rails and self._lacks_near(transfer):
            self._mender.connect_more()  # for the next one: a small batch waits for no rail
        return rails

    def _lacks_near(self, transfer: Transfer) -> bool:
        """Whether none of the rails that are nearest to the batch's memory is connected."""
        main = [rail for rail in self._rails if not rail.is_spare]
        return not any(rail.is_connected for rail in find_near(main, *memory_nodes(transfer), nbytes=0))

    def _place(self, transfer: Transfer, rails: list[Rail], columns: tuple[AddressColumn, ...]) -> None:
        for lane in self._spreader.spread(transfer, rails, *columns):
            transfer.work.lanes.append(lane)
            assert lane.rail is not None
            lane.rail.waiting.append(lane)

    def _place_orphans(self) -> bool:
        """Give lanes that have no rail one, as far as there is any; whether there was."""
        orphans, self._orphans = self._orphans, []
        for lane in orphans:
            work: Work = lane.transfer.work
            rails = self._rails_for(lane.transfer, lane.nbytes_left)
            if not rails:
                self._orphans.append(lane)
                continue
            work.lost_at = 0.0
            left = slice(lane.done, lane.count)
            try:
                self._place(
                    lane.transfer, rails, (lane.local[left], lane.remote[left], lane.nbytes[left], lane.rows[left])
                )
                work.lanes.remove(lane)
            except KvxferError as error:
                work.error = error
        if self._orphans:
            self._mender.start()
        return len(self._orphans) < len(orphans)

    def _check_patience(self, work: Work, now: float) -> None:
        """Raise why there is no connection for a batch, once it has been without for too long."""
        if any(rail.is_connected for rail in self._rails) or not self._orphans:
            work.lost_at = 0.0
        elif not work.lost_at:
            work.lost_at = now
        elif now - work.lost_at >= self._config.connect_timeout_s:
            raise work.first_error or self._mender.failure()

    def _is_over(self, transfer: Transfer) -> bool:
        work: Work = transfer.work
        if work.lanes and all(lane.done == lane.count for lane in work.lanes):
            for lane in work.lanes:
                if lane.rail is not None:
                    lane.rail.note_speed(lane)
            work.lanes.clear()
        return not work.lanes and not self._may_still_write(transfer)

    def _may_still_write(self, transfer: Transfer) -> bool:
        """Whether packets of a connection that broke under it may still be on their way."""
        return transfer.opcode is Opcode.WRITE and not self._mender.undropped.isdisjoint(transfer.work.broken)

    def _announce(self, transfer: Transfer, until: float) -> bool:
        """Whether the peer has the notification: by the control connection, after the last completion. Takes no
        lock."""
        if transfer.notify is None:
            return True
        work: Work = transfer.work
        if work.delivery is None:
            work.delivery = self._link.deliver(transfer.notify)
        return is_delivered(work.delivery, transfer, until)

    # What breaks.

    def _take_into_use(self, rail: Rail, queue: SendQueue) -> None:
        """There is a new connection."""
        rail.queue = queue
        self._epoll.register(queue.channel.fd, select.EPOLLIN)
        os.eventfd_write(self._wake_fd, 1)

    def _handle_fault(self, rail: Rail, fault: Fault) -> None:
        """A queue is broken: the batch at fault fails, the others are orphans until they have a rail again."""
        error = fault_error(fault, rail, self._link.label)
        is_path = is_of_path(fault.status)
        rail.note_failure(error, is_of_path=is_path)
        lanes = self._break(rail, time.monotonic() + STOP_S)
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
        self._orphans += [lane for lane in lanes if lane.transfer.work.error is None]
        if self._orphans or self._mender.undropped:
            self._mender.start()
        self._changed.notify_all()

    def _break(self, rail: Rail, deadline: float) -> list[Lane]:
        """Stop a rail's queue and destroy it; return the lanes that are not done, as far as they are."""
        queue, rail.queue = rail.queue, None
        lanes = {id(lane): lane for lane in rail.waiting}
        rail.waiting = deque()
        if queue is not None:
            self._mender.undropped.add(rail.number)
            for lane in queue.lanes():
                lanes[id(lane)] = lane
                lane.transfer.work.broken.add(rail.number)
            queue.stop(deadline)
            with contextlib.suppress(OSError, ValueError):  # a forked child may hold a copy of the descriptor
                self._epoll.unregister(queue.channel.fd)
            queue.close()
        return [lane for lane in lanes.values() if lane.done < lane.count]

    def _give_up(self, transfer: Transfer, deadline: float) -> None:
        """Take a batch off the rails for good; takes `_changed`. When this returns nothing writes on its account."""
        work: Work | None = transfer.work
        if work is None:
            return
        with self._changed:
            for rail in self._rails:
                if rail.queue is not None and any(lane.transfer is transfer for lane in rail.queue.lanes()):
                    self._orphans += self._break(rail, time.monotonic() + STOP_S)
                rail.waiting = deque(lane for lane in rail.waiting if lane.transfer is not transfer)
            self._orphans = [lane for lane in self._orphans if lane.transfer is not transfer]
            left = [lane.rows[lane.done :] for lane in work.lanes]
            transfer.slices_left = np.unique(np.concatenate(left)) if left else np.zeros(0, np.int64)
            work.lanes.clear()
            stale = sorted(work.broken & self._mender.undropped) if self._may_still_write(transfer) else []
            self._changed.notify_all()
        for number in stale:
            self._mender.hang_up(number, deadline)
        with self._changed:
            if self._orphans or self._mender.undropped:
                self._mender.start()
