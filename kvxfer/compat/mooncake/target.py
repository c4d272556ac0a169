"""One peer of a drop-in engine, by what it is: a kvxfer engine, this very engine, or a real Mooncake process.

Each moves rows and waits, or submits them. `Staged` is how memory that is not registered takes part. Read next:
`targets.py`, which finds them by name.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvxfer import (
    NotRegisteredError,
    Opcode,
    Region,
    RegionDescriptor,
    Segment,
    TransferEngine,
)
from kvxfer.addresses import HostPort, parse_host_port
from kvxfer.compat.mooncake.arguments import Rows
from kvxfer.compat.mooncake.memory import BufferPool, copy_rows
from kvxfer.compat.mooncake.tickets import BatchTicket, DoneTicket, FutureTicket, Senders, Ticket
from kvxfer.mooncake.calls import open_connection
from kvxfer.mooncake.peer import MooncakePeer, send_notify
from kvxfer.mooncake.wire.descriptor import SegmentDescriptor
from kvxfer.mooncake.wire.frames import pack_notify
from kvxfer.types import AddressColumn

if TYPE_CHECKING:
    from kvxfer.mooncake.rdma import MooncakeRdmaPeer

__all__ = ["MooncakeTarget", "NativeTarget", "Notify", "OwnTarget", "Target"]

UNUSED_S = 60.0  # as tcp_idle_timeout_s: how long connections to a real Mooncake are kept for nothing

LOOK_S = 150e-6
"""How long a submit call moves its batch itself: a short one is over by then, and a thread to move it costs more."""

Notify = tuple[str, str]
"""The name and the message of a notification."""


class Target(ABC):
    """One peer. waits_until: when the last transfer that was begun has ended at the latest (monotonic seconds)."""

    waits_until = 0.0

    @abstractmethod
    def transfer(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> None:
        """Move the rows, at least one, and wait; raises what made it fail, finally."""

    @abstractmethod
    def submit(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> Ticket:
        """Begin to move the rows."""

    @abstractmethod
    def first_address(self) -> int:
        """Return where the peer's first region begins; 0 where it has none."""

    def is_unused(self, now: float) -> bool:
        """Whether it is not worth being kept: the process is gone, or it has not been used for long."""
        return False

    def close(self) -> None:  # noqa: B027  not every kind has connections of its own
        """Let go of the connections."""


class NativeTarget(Target):
    """A kvxfer engine."""

    def __init__(self, engine: TransferEngine, staging: BufferPool, address: str, senders: Senders) -> None:
        self._engine = engine
        self._staging = staging
        self._senders = senders
        self._at = parse_host_port(address)
        self._address = address
        self._segment: Segment | None = None

    def transfer(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> None:
        if notify is None and rows.count == 1:
            self.waits_until = max(self.waits_until, time.monotonic() + timeout_s)
            move = self._engine.write if opcode is Opcode.WRITE else self._engine.read
            try:
                move(self.segment(), rows.local, rows.remote, rows.nbytes, timeout_s=timeout_s)
                return
            except NotRegisteredError as error:
                if not _is_local(error):
                    raise
        self._start(opcode, rows, notify, timeout_s).wait()

    def submit(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> BatchTicket:
        ticket = self._start(opcode, rows, notify, timeout_s)
        look_until = time.monotonic() + LOOK_S
        while not ticket.poll():
            if time.monotonic() >= look_until:
                with contextlib.suppress(RuntimeError):  # closed meanwhile: the engine's end is the batch's
                    self._senders.submit(ticket.wait)
                break
            os.sched_yield()
        return ticket

    def _start(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> BatchTicket:
        self.waits_until = max(self.waits_until, time.monotonic() + timeout_s)
        payload = None if notify is None else pack_notify(*notify)
        submit = self._engine.submit_write if opcode is Opcode.WRITE else self._engine.submit_read
        segment = self.segment()
        try:
            batch = submit(segment, rows.local, rows.remote, rows.nbytes, notify=payload, timeout_s=timeout_s)
            return BatchTicket(batch, None)
        except NotRegisteredError as error:
            if not _is_local(error):
                raise
        staged = Staged(self._engine, self._staging, opcode, rows)
        try:
            batch = submit(segment, staged.local, rows.remote, rows.nbytes, notify=payload, timeout_s=timeout_s)
        except BaseException:
            staged.finish(False)
            raise
        return BatchTicket(batch, staged.finish)

    def first_address(self) -> int:
        segment = self.segment()
        segment.refresh()
        return _first_address(segment.regions)

    def is_unused(self, now: float) -> bool:
        segment = self._segment
        return segment is not None and not segment.is_connected and now > self.waits_until

    def close(self) -> None:
        segment = self._segment
        if segment is not None and not segment.is_connected:
            segment.close()

    def segment(self) -> Segment:
        """Return the open segment; a peer that is gone is told at once, as Mooncake does, not after the time that the
        native engine gives a peer to come back."""
        segment = self._segment
        if segment is None or not segment.is_connected:
            deadline = time.monotonic() + self._engine.config.connect_timeout_s
            open_connection(self._at.host, self._at.port, deadline=deadline).close()
            segment = self._segment = self._engine.open_segment(self._address)
        return segment


def _first_address(regions: Sequence[Region | RegionDescriptor]) -> int:
    """Return the address of what was registered first."""
    visible = [region for region in regions if region.rights]
    return min(visible, key=lambda region: region.region_id).address if visible else 0


def _is_local(error: NotRegisteredError) -> bool:
    """Whether it is memory of this process that is not registered."""
    return error.values.get("side") == "local"


class Staged:
    """Rows whose local memory is not registered, in a registered place.

    Mooncake's tcp takes any local memory. Here the bytes go by way of a place that is registered, which is right over
    every transport, costs one copy more, and cannot crash where the memory is none.
    """

    def __init__(self, engine: TransferEngine, pool: BufferPool, opcode: Opcode, rows: Rows) -> None:
        local, _, nbytes = rows.columns()
        starts = np.array([region.address for region in engine.regions], np.int64)
        ends = np.array([region.end for region in engine.regions], np.int64)
        index = starts.searchsorted(local, "right") - 1
        is_staged = (index < 0) | (local + nbytes > ends[index]) if len(starts) else np.ones(len(local), bool)
        self._pool = pool
        self._rows: AddressColumn = local[is_staged]
        self._nbytes: AddressColumn = nbytes[is_staged]
        self._copies_back = opcode is Opcode.READ
        self._place = pool.allocate(int(self._nbytes.sum()))
        self._staged = self._place + np.cumsum(self._nbytes) - self._nbytes
        self.local = local.astype(np.int64)
        self.local[is_staged] = self._staged
        try:
            if opcode is Opcode.WRITE:
                copy_rows(self._staged, self._rows, self._nbytes)
        except BaseException:
            self.finish(False)
            raise

    def finish(self, is_good: bool) -> None:
        """Bring what was read to where it belongs, and give the place back."""
        try:
            if is_good and self._copies_back:
                copy_rows(self._rows, self._staged, self._nbytes)
        finally:
            self._pool.free(self._place)


class OwnTarget(Target):
    """This very engine: a copy within the process, checked as a peer's request is."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def transfer(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> None:
        local, remote, nbytes = rows.columns()
        let_go = self._engine._service.admit(opcode, remote, nbytes)
        try:
            copy_rows(*((remote, local) if opcode is Opcode.WRITE else (local, remote)), nbytes)
        finally:
            let_go()
        if notify is not None:
            self._engine._service.notify(self._engine.address, pack_notify(*notify))

    def submit(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> DoneTicket:
        self.transfer(opcode, rows, notify, timeout_s)
        return DoneTicket()

    def first_address(self) -> int:
        return _first_address(self._engine.regions)


class MooncakeTarget(Target):
    """A real Mooncake process."""

    def __init__(
        self,
        peer: MooncakePeer | MooncakeRdmaPeer,
        refresh: Callable[[], SegmentDescriptor],
        at: HostPort,
        senders: Senders,
    ) -> None:
        self._peer = peer
        self._refresh = refresh
        self._at = at
        self._senders = senders

    def transfer(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self.waits_until = max(self.waits_until, deadline)
        self._peer.transfer(opcode, rows.local, rows.remote, rows.nbytes, deadline=deadline)
        if notify is not None:
            send_notify(self._at.host, self._at.port, *notify, deadline=deadline)

    def submit(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> FutureTicket:
        return FutureTicket(self._senders.submit(lambda: self.transfer(opcode, rows, notify, timeout_s)))

    def is_unused(self, now: float) -> bool:
        return now > self.waits_until + UNUSED_S

    def first_address(self) -> int:
        buffers = self._refresh().buffers
        return buffers[0].address if buffers else 0

    def close(self) -> None:
        self._peer.close()
