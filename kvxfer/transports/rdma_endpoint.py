"""One peer over RDMA: its rails, the batches on them, and what happens when a rail breaks.

A batch becomes lanes, one for each rail it is spread over; lanes wait in their rail until its send queue has room.
Whoever waits for a batch posts, polls and, if need be, connects anew; there is no thread behind it. One of the waiters
sleeps on the completion channels, the others on a condition until it has looked.

The rule when a connection breaks, or must be broken to stop one batch: the batch at fault fails; every other batch on
that connection goes on from what is known to be in place, over another rail or over a new connection, a few times and
within its deadline. The peer drops its end of the old connection before a new one is made and before a failure is
reported, so that no packet that is still on its way writes over what came later.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.errors import KvxferError, PeerUnreachableError, PostError, TransportUnavailableError, VerbsError
from kvxfer.memory.chunks import CHUNK_DTYPE
from kvxfer.memory.slices import cut_slices
from kvxfer.transports.base import Delivery, Endpoint, PeerLink, Transfer, is_delivered
from kvxfer.transports.rdma_faults import fault_error, is_of_path
from kvxfer.transports.rdma_keys import KeyTable, read_remote_keys
from kvxfer.transports.rdma_queue import Fault, Lane
from kvxfer.types import ADDRESS_MAX, AddressColumn, Opcode, RegionDescriptor

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.transports.rdma_rail import Rail

__all__ = ["RdmaEndpoint"]

SPREAD_NBYTES = 1 << 20
"""Batches from this size on are spread over all rails: below it the second rail saves less than it costs."""
FAULTS_MAX = 3
"""How often a batch goes on after its connection broke; then it fails with what broke it first."""
PIECES = 16
"""A large batch is cut into at least so many pieces for each rail, so that their shares can be unlike."""
MORE_S = 1.0
"""How long a batch that could begin waits for one more rail."""
STOP_S = 0.5
"""How long a broken connection may take to give its requests back before it is destroyed as it is."""
HANG_UP_S = 1.0
"""How long the peer has to say that it has dropped its end; a live one answers within milliseconds."""
TICK_S = 0.05
"""How long who waits may be deaf to a cancel, a closed peer, a port that went down."""


class RdmaEndpoint(Endpoint):
    """A peer reached by RC queue pairs, one for each rail."""

    transport = "rdma"
    needs_session = True

    def __init__(self, rails: Sequence[Rail], link: PeerLink, config: EngineConfig) -> None:
        self._rails = list(rails)
        self._link = link
        self._config = config
        self._changed = threading.Condition(threading.Lock())
        self._epoll = select.epoll()
        self._orphans: list[Lane] = []
        self._is_connecting = False
        self._has_sleeper = False
        self._spin_until = 0.0
        self._turn = 0
        self._closed: KvxferError | None = None
        self._remote_tables: dict[tuple[str, tuple[int, ...]], KeyTable] = {}

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def establish(self, deadline: float) -> None:
        """Connect the first rail that can be; the others are connected when a batch is large enough for them."""
        if any(rail.is_connected for rail in self._rails):
            return
        failures: list[TransportUnavailableError] = []
        for rail in self._rails:
            try:
                self._connect(rail, deadline)
                return
            except TransportUnavailableError as error:
                failures.append(error)
                if time.monotonic() >= deadline:
                    break
        told = " ".join(error.message for error in failures)
        raise TransportUnavailableError(
            f"no RDMA connection to {self._link.label}: {told}",
            remedy=failures[0].remedy,
            peer=self._link.label,
            reasons={rail.label: rail.trouble for rail in self._rails if rail.trouble},
            attempts=tuple(attempt for error in failures for attempt in error.values.get("attempts", ())),
        )

    def unreachable(self, region: RegionDescriptor) -> str | None:
        if "nics" in region.keys.get("rdma", {}):
            return None
        return "the peer has not registered it with an RDMA device"

    # Batches.

    def post(self, transfer: Transfer) -> None:
        try:
            with self._changed:
                if self._closed is None and self._find_next_rail(transfer) is None:
                    self._begin(transfer)
                    self._pump()
        except VerbsError:
            pass  # whoever waits finds it again, and deals with it

    def progress(self, transfer: Transfer, until: float) -> None:
        try:
            while self._move(transfer, until):
                self._repair(transfer, until)
            if transfer.stop is None and transfer.work is not None and self._is_over(transfer):
                if self._announce(transfer, until):
                    transfer.finish()
        except KvxferError as error:
            self._give_up(transfer, time.monotonic() + HANG_UP_S)
            if self._closed is None:
                error.note(nbytes_done=transfer.nbytes_done)
            transfer.finish(self._closed or error)

    def waits_for(self, transfer: Transfer) -> tuple[int, int] | None:
        with self._changed:
            if self._closed is not None or self._has_sleeper or transfer.work is None:
                return None
            for rail in self._rails:
                if rail.queue is not None:
                    rail.queue.arm()
            return None if self._pump() else (self._epoll.fileno(), select.POLLIN)

    def abort(self, transfer: Transfer, deadline: float) -> None:
        work: _Work | None = transfer.work
        if work is not None and work.delivery is not None:
            work.delivery.abandon()
        self._give_up(transfer, min(deadline, time.monotonic() + HANG_UP_S))

    def describe(self) -> Mapping[str, Any]:
        return {"rails": [rail.describe() for rail in self._rails]}

    def forget(self, region_ids: Sequence[int]) -> None:
        with self._changed:
            gone = set(region_ids)
            self._remote_tables = {key: one for key, one in self._remote_tables.items() if not gone & set(key[1])}

    def abandon(self, error: KvxferError) -> None:
        self._closed = error
        self._epoll.close()

    def close(self, error: KvxferError) -> None:
        with self._changed:
            if self._closed is not None:
                return
            self._closed = error
            for rail in self._rails:
                self._break(rail)
            self._orphans.clear()
            self._changed.notify_all()
        self._epoll.close()

    # Moving. `_changed` is held by whoever calls these, unless they say otherwise.

    def _move(self, transfer: Transfer, until: float) -> bool:
        """Post and poll until the batch is over or `until`; True where a connection is to be made first. Takes
        `_changed`."""
        with self._changed:
            while True:
                if self._closed is not None:
                    raise self._closed
                if transfer.work is None:
                    if transfer.stop is None and time.monotonic() < until and self._find_next_rail(transfer):
                        return True
                    if not any(rail.is_connected for rail in self._rails):
                        return False
                    self._begin(transfer)
                moved = self._pump()
                if transfer.work.error is not None:
                    raise transfer.work.error
                if self._is_over(transfer):
                    self._changed.notify_all()
                    return False
                now = time.monotonic()
                if transfer.stop is not None or now >= until:
                    return False
                if self._orphans and not self._is_connecting:
                    return True
                if moved:
                    self._spin_until = now + self._config.spin_s
                elif now >= self._spin_until:
                    self._sleep(min(TICK_S, until - now))
                else:
                    self._changed.release()
                    os.sched_yield()  # who answers may need this very core
                    self._changed.acquire()

    def _sleep(self, timeout_s: float) -> None:
        """Wait for a completion, or for the one waiter who does."""
        if self._has_sleeper:
            self._changed.wait(timeout_s)
            return
        queues = [rail.queue for rail in self._rails if rail.queue is not None]
        for queue in queues:
            queue.arm()
        if self._pump():
            return
        self._has_sleeper = True
        self._changed.release()
        try:
            self._epoll.poll(timeout_s)
        except ValueError:  # closed meanwhile
            pass
        finally:
            self._changed.acquire()
            self._has_sleeper = False
            for queue in queues:
                queue.disarm()
            self._changed.notify_all()

    def _pump(self) -> bool:
        """Take what has completed, post what there is room for; whether anything was done."""
        moved = False
        for rail in self._rails:
            queue = rail.queue
            if queue is None:
                continue
            if queue.outstanding and queue.poll():
                moved = True
            if queue.fault is None and rail.is_down:
                queue.fault = rail.down_fault()
            if queue.fault is None and rail.waiting:
                moved |= self._post_waiting(rail)
            if queue.fault is not None:
                self._handle_fault(rail, queue.fault)
                moved = True
        return moved

    def _post_waiting(self, rail: Rail) -> bool:
        moved = False
        queue, waiting = rail.queue, rail.waiting
        assert queue is not None
        for _ in range(len(waiting)):
            lane = waiting[0]
            try:
                moved |= queue.post(lane) > 0
            except PostError as error:
                if queue.outstanding == 0:  # not a queue that is full for the moment
                    lane.transfer.work.error = error
                    waiting.popleft()
                break
            if lane.posted == lane.count:
                waiting.popleft()
            else:
                waiting.rotate(-1)  # the next window is another batch's
        return moved

    def _begin(self, transfer: Transfer) -> None:
        """Make lanes of the batch and have them wait in their rails."""
        local, remote, nbytes = transfer.columns
        work = transfer.work = _Work()
        rows = np.arange(len(local))
        rails = [rail for rail in self._rails if rail.is_connected]
        if len(rails) == 1 or transfer.nbytes_total < SPREAD_NBYTES:
            self._turn += 1
            rail = min(rails, key=lambda one: (one.nbytes_waiting, (one.order + self._turn) % len(rails)))
            self._add_lane(transfer, work, rail, local, remote, nbytes, rows)
            return
        piece_nbytes = transfer.nbytes_total // (PIECES * len(rails))
        if int(nbytes.max()) > piece_nbytes:  # adjacent blocks were joined: too coarse to share out
            cut = cut_slices(local, remote, nbytes, _EVERYWHERE, _EVERYWHERE, piece_nbytes)
            local, remote, nbytes, rows = cut["local"], cut["remote"], cut["nbytes"], cut["request"]
        ends = np.cumsum(nbytes)
        is_known = all(rail.rate for rail in rails)
        shares = np.cumsum([rail.rate if is_known else 1.0 for rail in rails])
        borders = np.searchsorted(ends, ends[-1] * shares / shares[-1], "left") + 1
        start = 0
        for rail, border in zip(rails, borders, strict=True):
            end = min(int(border), len(rows))
            if end > start:
                part = slice(start, end)
                self._add_lane(transfer, work, rail, local[part], remote[part], nbytes[part], rows[part])
                start = end

    def _add_lane(
        self,
        transfer: Transfer,
        work: _Work,
        rail: Rail,
        local: AddressColumn,
        remote: AddressColumn,
        nbytes: AddressColumn,
        rows: AddressColumn,
    ) -> None:
        mine = rail.nic.local_keys()
        theirs = self._remote_keys(transfer.regions, rail)
        lkey, rkey = mine.find_one(local, nbytes), theirs.find_one(remote, nbytes)
        if lkey is not None and rkey is not None and int(nbytes.max()) <= rail.message_nbytes_max:
            lane = Lane(transfer, rail, local, remote, nbytes, lkey, rkey, rows)
        else:
            cut = cut_slices(local, remote, nbytes, mine.chunks, theirs.chunks, rail.message_nbytes_max)
            lane = Lane(
                transfer,
                rail,
                np.ascontiguousarray(cut["local"]),
                np.ascontiguousarray(cut["remote"]),
                np.ascontiguousarray(cut["nbytes"]),
                mine.keys[cut["local_chunk"]],
                theirs.keys[cut["remote_chunk"]],
                rows[cut["request"]],
            )
        work.lanes.append(lane)
        rail.waiting.append(lane)

    def _remote_keys(self, regions: tuple[RegionDescriptor, ...], rail: Rail) -> KeyTable:
        ids = tuple(region.region_id for region in regions)
        found = self._remote_tables.get((rail.remote_name, ids))
        if found is None:
            found = read_remote_keys(regions, rail.remote_name, self._link.label)
            self._remote_tables[rail.remote_name, ids] = found
        return found

    @staticmethod
    def _is_over(transfer: Transfer) -> bool:
        work: _Work = transfer.work
        if work.lanes and all(lane.done == lane.count for lane in work.lanes):
            for lane in work.lanes:
                lane.rail.note_speed(lane)
            work.lanes.clear()
        return not work.lanes

    def _announce(self, transfer: Transfer, until: float) -> bool:
        """Whether the peer has the notification: by the control connection, after the last completion."""
        if transfer.notify is None:
            return True
        work: _Work = transfer.work
        if work.delivery is None:
            work.delivery = self._link.deliver(transfer.notify)
        return is_delivered(work.delivery, transfer, until)

    # What breaks.

    def _handle_fault(self, rail: Rail, fault: Fault) -> None:
        """A queue is broken: the batch at fault fails, the others are orphans until they have a rail again."""
        error = fault_error(fault, rail, self._link.label)
        rail.note_failure(error, is_of_path=is_of_path(fault.status))
        for lane in self._break(rail):
            work: _Work = lane.transfer.work
            work.faults += 1
            work.first_error = work.first_error or error
            if fault.lane is not None and fault.lane.transfer is lane.transfer and not is_of_path(fault.status):
                work.error = error
            elif work.faults > FAULTS_MAX:
                work.error = work.first_error
            else:
                self._orphans.append(lane)
        self._changed.notify_all()

    def _break(self, rail: Rail) -> list[Lane]:
        """Stop a rail's queue and destroy it; return the lanes that are not done, as far as they are."""
        queue, rail.queue = rail.queue, None
        lanes = {id(lane): lane for lane in rail.waiting}
        rail.waiting = deque()
        if queue is None:
            return list(lanes.values())
        for lane in queue.lanes():
            lanes[id(lane)] = lane
            lane.transfer.work.broken.add(rail.number)
        queue.stop(time.monotonic() + STOP_S)
        queue.close()
        return [lane for lane in lanes.values() if lane.done < lane.count]

    def _give_up(self, transfer: Transfer, deadline: float) -> None:
        """Take a batch off the rails for good; takes `_changed`. When this returns nothing writes on its account."""
        work: _Work | None = transfer.work
        if work is None:
            return
        with self._changed:
            for rail in self._rails:
                queue = rail.queue
                if queue is not None and any(lane.transfer is transfer for lane in queue.lanes()):
                    self._orphans += [lane for lane in self._break(rail) if lane.transfer is not transfer]
                rail.waiting = deque(lane for lane in rail.waiting if lane.transfer is not transfer)
            self._orphans = [lane for lane in self._orphans if lane.transfer is not transfer]
            left = [lane.rows[lane.done :] for lane in work.lanes]
            transfer.slices_left = np.unique(np.concatenate(left)) if left else np.zeros(0, np.int64)
            work.lanes.clear()
            self._changed.notify_all()
        if transfer.opcode is Opcode.WRITE:
            for number in sorted(work.broken):
                self._link.hang_up("rdma", number, deadline)
        work.broken.clear()

    def _repair(self, transfer: Transfer, until: float) -> None:
        """Make a connection, for this batch's first slice or for lanes that have lost theirs; takes `_changed`."""
        with self._changed:
            if self._is_connecting:
                self._changed.wait(min(TICK_S, max(0.0, until - time.monotonic())))
                return
            self._is_connecting = True
        try:
            with self._changed:
                rail = self._find_next_rail(transfer) if transfer.work is None else None
            if rail is not None:
                is_first = not any(one.is_connected for one in self._rails)
                self._connect(rail, until if is_first else min(until, time.monotonic() + MORE_S))
                return
            rail = self._find_rail(until)
            if rail is None:
                return
            if not rail.is_connected:
                self._connect(rail, until)
            with self._changed:
                self._adopt_orphans(rail)
        except TransportUnavailableError as error:
            with self._changed:
                self._fail_orphans(transfer, error)
        except PeerUnreachableError:
            if time.monotonic() < until:
                raise  # else the time of this batch is over, which says nothing of the peer
        finally:
            with self._changed:
                self._is_connecting = False
                self._changed.notify_all()

    def _find_next_rail(self, transfer: Transfer) -> Rail | None:
        """Return the rail that should be connected before this batch begins: one at all, or for a large batch each that
        is no spare and not known to be broken."""
        if not any(rail.is_connected for rail in self._rails):
            return min(self._rails, key=lambda rail: (not rail.may_connect, rail.paused_until, rail.order))
        if transfer.nbytes_total < SPREAD_NBYTES:
            return None
        return next((rail for rail in self._rails if not rail.is_spare and rail.may_connect), None)

    def _find_rail(self, until: float) -> Rail | None:
        """Return the rail to go on with: one that stands, else the one whose pause ends first; None where that is not
        yet, after having waited for it a little."""
        with self._changed:
            standing = [rail for rail in self._rails if rail.is_connected]
            if standing:
                return min(standing, key=lambda rail: rail.nbytes_waiting)
            rail = min(self._rails, key=lambda rail: (rail.paused_until, rail.order))
            now = time.monotonic()
            if rail.paused_until <= now:
                return rail
            self._changed.wait(min(TICK_S, max(0.0, min(until, rail.paused_until) - now)))
        return None

    def _adopt_orphans(self, rail: Rail) -> None:
        orphans, self._orphans = self._orphans, []
        for lane in orphans:
            work: _Work = lane.transfer.work
            if lane in work.lanes:
                work.lanes.remove(lane)
                rows = lane.rows[lane.done :]
                left = slice(lane.done, lane.count)
                self._add_lane(
                    lane.transfer, work, rail, lane.local[left], lane.remote[left], lane.nbytes[left], rows
                )

    def _fail_orphans(self, transfer: Transfer, error: TransportUnavailableError) -> None:
        """No connection could be made: each batch without one has one try less."""
        if any(rail.is_connected for rail in self._rails):
            return  # one more rail would have been nice
        orphans, self._orphans = self._orphans, []
        if transfer.work is None and not any(rail.may_connect for rail in self._rails):
            raise error
        for lane in orphans:
            work: _Work = lane.transfer.work
            work.faults += 1
            if work.faults > FAULTS_MAX:
                work.error = work.first_error or error
            else:
                self._orphans.append(lane)

    def _connect(self, rail: Rail, deadline: float) -> None:
        """Connect a rail; no lock is held meanwhile. Raises TransportUnavailableError."""
        queue = rail.connect(self._link, deadline)
        with self._changed:
            if self._closed is not None:
                queue.close()
                raise self._closed
            rail.queue = queue
            self._epoll.register(queue.channel.fd, select.EPOLLIN)
            self._changed.notify_all()


_EVERYWHERE = np.array([(0, ADDRESS_MAX)], CHUNK_DTYPE)


class _Work:
    """How far one batch is: its lanes, what broke under it, and its notification."""

    __slots__ = ("broken", "delivery", "error", "faults", "first_error", "lanes")

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.broken: set[int] = set()
        """Connections that broke with slices of it on them: the peer must have dropped these before it is reported."""
        self.faults = 0
        self.first_error: KvxferError | None = None
        self.error: KvxferError | None = None
        self.delivery: Delivery | None = None

