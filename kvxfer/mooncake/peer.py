"""MooncakePeer: reads and writes the memory of one process that speaks Mooncake's tcp protocol.

Whoever calls `transfer` moves the bytes, on up to `tcp_streams_max` connections at once; no thread, no queue. A failure
is final on this side: the connections are reset, and no local byte is written any more. Mooncake's side still applies
what it had received before it finds the reset (a process that is stopped does so when it is continued).
"""

from __future__ import annotations

import dataclasses
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvxfer.addresses import is_wildcard, parse_host_port
from kvxfer.config import EngineConfig
from kvxfer.errors import (
    ClosedError,
    ConfigError,
    KvxferError,
    NotRegisteredError,
    PeerClosedError,
    PeerUnreachableError,
    RemoteAccessError,
    RemoteProtocolError,
    TransferTimeoutError,
    TransportUnavailableError,
)
from kvxfer.memory.columns import Integers, as_columns
from kvxfer.memory.slices import IndexColumn, coalesce, locate
from kvxfer.mooncake.calls import ask_descriptor, open_connection, send_notify, send_probe
from kvxfer.mooncake.lane import Lane, Rows
from kvxfer.mooncake.wire.descriptor import SegmentDescriptor
from kvxfer.types import Opcode

__all__ = ["MooncakePeer", "ask_descriptor", "send_notify", "send_probe"]

LANE_NBYTES = 1 << 20
"""What is worth one more connection. Mooncake serves all of them in one thread, so that they only hide its waits."""
TICK_S = 0.1
"""How long a call may block: the bound on seeing a deadline or `close`."""


class MooncakePeer:
    """The memory of one process, found by its segment descriptor. All methods may be called from any thread.

    name: for messages, and the host to reach where the descriptor has none. refresh: asks for the descriptor anew; it
    is called once where rows are not in the one that is known, or where nobody answers at the address in it.
    """

    def __init__(
        self,
        name: str,
        descriptor: SegmentDescriptor,
        *,
        config: EngineConfig,
        refresh: Callable[[], SegmentDescriptor],
    ) -> None:
        self.name = name
        self._config = config
        self._refresh = refresh
        self._changed = threading.Condition()
        self._idle: list[Lane] = []
        self._moving: set[Lane] = set()
        self._count = 0
        self._closed = False
        self._is_stale = False
        self._target = _Target(name, descriptor)

    @property
    def descriptor(self) -> SegmentDescriptor:
        """What is known of the process's memory."""
        return self._target.descriptor

    def transfer(self, opcode: Opcode, local: Integers, remote: Integers, nbytes: Integers, *, deadline: float) -> None:
        """Move rows between local memory and the peer's; returns when every byte is in place.

        local, remote, nbytes: as in `TransferEngine.submit_write`; local memory need not be registered. deadline:
        monotonic seconds.

        Raises UsageError for columns that are none, NotRegisteredError or RemoteAccessError naming a row that is not
        registered there, PeerError where the process is gone, TransferTimeoutError; TransferError for local memory
        that is not there.
        """
        columns = as_columns(local, remote, nbytes)
        known = self._target
        if self._is_stale:
            known = self._renew(known)
        try:
            rows, numbers = known.plan(columns)
        except NotRegisteredError:
            known = self._renew(known)
            rows, numbers = known.plan(columns)
        try:
            self._move(known, opcode, rows, numbers, deadline)
        except (RemoteAccessError, _NobodyError) as error:
            reason = error.reason if isinstance(error, _NobodyError) else error
            fresh = self._try_renew(known)
            if fresh is known:
                raise reason from None
            rows, numbers = fresh.plan(columns)
            try:
                self._move(fresh, opcode, rows, numbers, deadline)
            except _NobodyError as again:
                raise again.reason from None
        except PeerClosedError:
            # Mooncake refuses a row and closes; where requests were unread, its refusal is lost with the connection.
            self._try_renew(known).plan(columns)
            raise

    def reap(self, now: float) -> None:
        """Close the connections that have been idle for longer than tcp_idle_timeout_s."""
        with self._changed:
            old = [lane for lane in self._idle if now - lane.used_at > self._config.tcp_idle_timeout_s]
            self._idle = [lane for lane in self._idle if lane not in old]
            self._count -= len(old)
        for lane in old:
            lane.close()

    def close(self) -> None:
        """Drop the connections; transfers that run fail with ClosedError. Tolerated twice."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._count -= len(idle)
            moving = list(self._moving)
            self._changed.notify_all()
        for lane in idle:
            lane.close()
        for lane in moving:
            lane.shut_down()  # the thread that moves it closes it

    # The descriptor.

    def _renew(self, known: _Target) -> _Target:
        """Ask for the descriptor; returns `known` itself where nothing has changed. Raises what `refresh` raises."""
        descriptor = self._refresh()
        with self._changed:
            self._is_stale = False
            if self._target is known and known.differs(descriptor):
                target = _Target(self.name, descriptor)
                if target.place != known.place:
                    self._drop_idle()
                self._target = target
            return self._target

    def _try_renew(self, known: _Target) -> _Target:
        try:
            return self._renew(known)
        except KvxferError:
            return known

    def _drop_idle(self) -> None:
        """The process behind the connections is another one; the caller holds `_changed`."""
        idle, self._idle = self._idle, []
        self._count -= len(idle)
        for lane in idle:
            lane.close()

    # The connections.

    def _move(self, target: _Target, opcode: Opcode, rows: Rows, numbers: IndexColumn, deadline: float) -> None:
        """Move rows; once more on new connections where the peer had closed the ones that were kept."""
        while True:
            lanes = self._take(target, _lanes_wanted(rows), deadline)
            try:
                self._share(lanes, opcode, rows, numbers, target.has_status)
                self._drive(lanes, deadline)
            except PeerClosedError as error:
                was_lost = all(lane.was_lost for lane in lanes)
                self._give_up(lanes, error)
                self._raise_if_closed(error)
                if was_lost:
                    continue
                self._is_stale = True
                raise
            except BaseException as error:
                self._give_up(lanes, error)
                if isinstance(error, PeerUnreachableError):
                    self._is_stale = True
                if not isinstance(error, RemoteAccessError):
                    self._raise_if_closed(error)
                raise
            self._give_back(lanes)
            return

    def _raise_if_closed(self, error: BaseException) -> None:
        """Where `close` broke the connections, that is the reason, not how it shows."""
        if self._closed and isinstance(error, KvxferError):
            raise self._closed_error() from None

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"the way to {self.name} was closed.", remedy="Open the peer again.")

    def _take(self, target: _Target, wanted: int, deadline: float) -> list[Lane]:
        """Return from 1 to `wanted` connections for this thread alone."""
        lanes: list[Lane] = []
        new = 0
        with self._changed:
            while not lanes and not new:
                if self._closed:
                    raise self._closed_error()
                while self._idle and len(lanes) < wanted:
                    lane = self._idle.pop()
                    if lane.is_healthy():
                        lanes.append(lane)
                    else:
                        lane.close()
                        self._count -= 1
                new = min(wanted - len(lanes), self._config.tcp_streams_max - self._count)
                if not lanes and not new:
                    left = deadline - time.monotonic()
                    if left <= 0.0:
                        raise self._timeout("no connection became free", 0)
                    self._changed.wait(min(TICK_S, left))
            self._count += new
            self._moving.update(lanes)
        made = 0
        try:
            for _ in range(new):
                lane = self._dial(target, deadline)
                with self._changed:
                    self._moving.add(lane)
                lanes.append(lane)
                made += 1
        except KvxferError as error:
            if not lanes:
                raise _NobodyError(error) from error
        except BaseException as error:
            self._give_up(lanes, error)
            raise
        finally:
            with self._changed:
                self._count -= new - made
                self._changed.notify_all()
        return lanes

    def _dial(self, target: _Target, deadline: float) -> Lane:
        until = min(deadline, time.monotonic() + self._config.connect_timeout_s)
        return Lane(open_connection(*target.place, deadline=until), target.place, self.name, self._config)

    def _give_back(self, lanes: Sequence[Lane]) -> None:
        with self._changed:
            self._moving.difference_update(lanes)
            for lane in lanes:
                lane.end()
                if self._closed or lane.place != self._target.place:
                    lane.close()
                    self._count -= 1
                else:
                    self._idle.append(lane)
            self._changed.notify_all()

    def _give_up(self, lanes: Sequence[Lane], error: BaseException) -> None:
        """Reset the connections of a transfer that has failed."""
        for lane in lanes:
            lane.reset()
        with self._changed:
            self._moving.difference_update(lanes)
            self._count -= len(lanes)
            self._changed.notify_all()
        if isinstance(error, KvxferError):
            error.note(nbytes_done=sum(lane.nbytes_done for lane in lanes))

    # Moving.

    @staticmethod
    def _share(lanes: Sequence[Lane], opcode: Opcode, rows: Rows, numbers: IndexColumn, has_status: bool) -> None:
        """Give every connection about as many bytes as the others."""
        ends = np.cumsum(rows[2])
        first = 0
        for at, lane in enumerate(lanes, 1):
            left = len(lanes) - at
            stop = int(ends.searchsorted(int(ends[-1]) * at // len(lanes))) + 1
            stop = max(first + 1, min(stop, len(ends) - left)) if left else len(ends)
            part = (rows[0][first:stop], rows[1][first:stop], rows[2][first:stop])
            lane.begin(opcode, part, numbers[first:stop], has_status=has_status)
            first = stop

    def _drive(self, lanes: Sequence[Lane], deadline: float) -> None:
        """Move the connections until all rows are in place."""
        poller = select.poll()
        running = dict.fromkeys(lanes, 0)
        spin_until = time.monotonic() + self._config.spin_s
        while running:
            moved = False
            for lane in list(running):
                moved |= lane.move()
                if lane.is_done and running.pop(lane):
                    poller.unregister(lane.fileno())
            now = time.monotonic()
            if running and now >= deadline:
                raise self._timeout("its deadline passed", sum(lane.nbytes_done for lane in lanes))
            if moved:
                spin_until = now + self._config.spin_s
            elif now < spin_until:
                os.sched_yield()  # the peer may need this very core to answer
            elif running:
                for lane, events in running.items():
                    if events != lane.events:
                        running[lane] = lane.events
                        poller.register(lane.fileno(), lane.events)
                poller.poll(max(1.0, min(TICK_S, deadline - now) * 1e3))

    def _timeout(self, what: str, nbytes_done: int) -> TransferTimeoutError:
        return TransferTimeoutError(
            f"a batch with {self.name} failed: {what}.",
            remedy="The process may be stopped or overloaded. What it had received of a WRITE it may still apply: do "
            "not count on the old bytes there.",
            peer=self.name,
            nbytes_done=nbytes_done,
        )


class _NobodyError(Exception):
    """No connection could be made, so nothing was begun."""

    def __init__(self, reason: KvxferError) -> None:
        super().__init__(reason)
        self.reason = reason


class _Target:
    """A descriptor, made ready for looking up rows.

    place: host and port of the data port.
    """

    def __init__(self, name: str, descriptor: SegmentDescriptor) -> None:
        self.descriptor = descriptor
        self.label = name
        self.has_status = descriptor.tcp_proto_version >= 2
        if "tcp" not in descriptor.protocols or not descriptor.tcp_data_port:
            raise TransportUnavailableError(
                f"{name} is reached over {', '.join(descriptor.protocols)} only, not over tcp.",
                remedy="Start it with protocol tcp, or with MC_FORCE_TCP=1.",
                reasons={"tcp": "the descriptor has no tcp data port"},
            )
        self.place = _host(name, descriptor), descriptor.tcp_data_port
        buffers = sorted(descriptor.buffers_over("tcp"), key=lambda one: one.address)
        self._starts = np.array([one.address for one in buffers], np.int64)
        self._ends = self._starts + np.array([one.nbytes for one in buffers], np.int64)
        if (self._starts[1:] < self._ends[:-1]).any():
            raise RemoteProtocolError(f"buffers in the descriptor of {name} overlap.", peer=name)

    def differs(self, descriptor: SegmentDescriptor) -> bool:
        """Whether another descriptor says something else; each answer has a timestamp of its own."""
        return dataclasses.replace(descriptor, timestamp="") != dataclasses.replace(self.descriptor, timestamp="")

    def plan(self, columns: Rows) -> tuple[Rows, IndexColumn]:
        """Return the rows, joined where adjacent, and the caller's row that each begins with; raises
        NotRegisteredError naming the first row that is not in one buffer."""
        where = locate(columns[1], columns[2], self._starts, self._ends, side=f"remote ({self.label})")
        local, remote, nbytes, first_row = coalesce(*columns, remote_region=where)
        return (local, remote, nbytes), first_row


def _host(name: str, descriptor: SegmentDescriptor) -> str:
    """Return the host of the data port: the descriptor's, else the one in a name of the form "host:port"."""
    if descriptor.tcp_data_host and not is_wildcard(descriptor.tcp_data_host):
        return descriptor.tcp_data_host
    for text in (descriptor.name, name):
        try:
            host = parse_host_port(text, 0).host
        except ConfigError:
            continue
        if not is_wildcard(host):
            return host
    raise RemoteProtocolError(f"the descriptor of {name} does not say on which host it is.", peer=name)


def _lanes_wanted(rows: Rows) -> int:
    return max(1, min(len(rows[0]), int(rows[2].sum()) // LANE_NBYTES))
