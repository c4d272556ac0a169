"""One-sided READ and WRITE over sockets: the side that submits, and the transport that holds both sides.

A batch has a data connection (stream) to itself while it moves, so that giving one up harms no other. Streams are made
when needed, up to `tcp_streams_max` for a peer, and kept for the next batch. Giving up means to reset the connection
and, if the peer is alive, to hear from it that it has let go; a peer that is stopped finds the reset before it can
touch another byte (see `system.calls.Messenger.receive`).
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from kvxfer.config import EngineConfig
from kvxfer.errors import KvxferError, PeerUnreachableError, TransferCancelledError
from kvxfer.limits import remedy_for, shortages_told
from kvxfer.transports.base import Endpoint, PeerLink, Transfer, Transport, is_delivered
from kvxfer.transports.tcp_initiator import TICK_S, Requests, Stream
from kvxfer.transports.tcp_service import DataService, Gate
from kvxfer.transports.tcp_wire import ROWS_MAX
from kvxfer.types import Opcode, Probe, RegionDescriptor, Rights

__all__ = ["TcpEndpoint", "TcpTransport", "tune"]

EAGER_NBYTES = 1 << 16
"""From here on a batch begins to move at submit; a smaller one is sent as a whole by who waits for it."""
HANG_UP_TIMEOUT_S = 0.25
"""How long to wait for a peer to say that it has let go of a batch; a live one answers within 1 ms."""


class TcpTransport(Transport):
    """Works wherever the control connection works."""

    name = "tcp"

    def __init__(self, config: EngineConfig, gate: Gate) -> None:
        self._config = config
        self.service = DataService(config, gate)

    @classmethod
    def probe(cls, config: EngineConfig) -> Probe:
        """Sockets are always there; a container without any is told by its errno."""
        try:
            socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()
        except OSError as exc:
            return Probe(
                "tcp",
                usable=False,
                reason=f"no TCP socket can be made: {exc.strerror}",
                remedy=remedy_for(exc.errno) or "EPERM: allow AF_INET in the seccomp profile.",
                details={"errno": exc.errno},
            )
        return Probe("tcp", usable=True, reason="TCP sockets can be made")

    def card(self) -> dict[str, Any]:
        return {"rows_max": ROWS_MAX}

    def register(self, address: int, nbytes: int, *, rights: Rights, read_only: bool = False) -> dict[str, Any]:
        return {}

    def deregister(self, address: int, nbytes: int, keys: Mapping[str, Any]) -> None:
        pass

    def open_endpoint(self, card: Mapping[str, Any], link: PeerLink, deadline: float) -> TcpEndpoint:
        return TcpEndpoint(self._config, link)

    def abandon(self) -> None:
        self.service.abandon()

    def close(self) -> None:
        self.service.close(self._config.close_timeout_s)


class TcpEndpoint(Endpoint):
    """The streams to one peer."""

    transport = "tcp"

    def __init__(self, config: EngineConfig, link: PeerLink) -> None:
        self._config = config
        self._link = link
        self._changed = threading.Condition()
        self._idle: list[Stream] = []
        self._count = 0
        self._moving: dict[Transfer, Stream] = {}
        self._dials: dict[Transfer, _Dial] = {}
        self._closed: KvxferError | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def unreachable(self, region: RegionDescriptor) -> str | None:
        return None

    def post(self, transfer: Transfer) -> None:
        """Start on an idle stream if there is one, as far as the socket takes bytes at once."""
        if self._idle and transfer.nbytes_total > EAGER_NBYTES:
            self.progress(transfer, 0.0)

    def progress(self, transfer: Transfer, until: float) -> None:
        try:
            work = transfer.work
            if work is None:
                stream = self._take(transfer, until)
                if stream is None:
                    return
                work = transfer.work = Requests(transfer, stream)
            if self._closed is not None:
                raise self._closed
            refusal = None if work.is_done else work.stream.move(transfer, work, until)
            if refusal is not None or (work.is_done and self._announce(transfer, work, until)):
                self._give_back(transfer, work.stream)
                transfer.finish(refusal)
        except KvxferError as error:
            self._drop(transfer)
            if self._closed is None:
                error.note(nbytes_done=transfer.nbytes_done)
            transfer.finish(self._closed or error)  # where we closed it, the broken stream is only how that shows

    def waits_for(self, transfer: Transfer) -> tuple[int, int] | None:
        work: Requests | None = transfer.work
        if work is None:
            return None
        return work.stream.fileno(), select.POLLIN if work.request.is_done else select.POLLOUT

    def abort(self, transfer: Transfer, deadline: float) -> None:
        if transfer.work is not None and transfer.work.delivery is not None:
            transfer.work.delivery.abandon()
        stream = self._drop(transfer)
        if stream is not None and transfer.opcode is Opcode.WRITE:
            self._link.hang_up("tcp", stream.number, min(deadline, time.monotonic() + HANG_UP_TIMEOUT_S))

    def _announce(self, transfer: Transfer, work: Requests, until: float) -> bool:
        """Whether the peer has the notification.

        Only this side knows when the bytes of a READ are in place, so that one goes by the control connection after
        them; a WRITE carries its own.
        """
        if transfer.notify is None or transfer.opcode is Opcode.WRITE:
            return True
        if work.delivery is None:
            work.delivery = self._link.deliver(transfer.notify)
        return is_delivered(work.delivery, transfer, until)

    def reap(self, now: float) -> None:
        with self._changed:
            old = [stream for stream in self._idle if now - stream.used_at > self._config.tcp_idle_timeout_s]
            self._idle = [stream for stream in self._idle if stream not in old]
            self._count -= len(old)
        for stream in old:
            stream.close()

    def describe(self) -> Mapping[str, Any]:
        return {"streams": self._count, "streams_max": self._config.tcp_streams_max}

    def abandon(self, error: KvxferError) -> None:
        self._closed = error
        for stream in (*self._idle, *self._moving.values()):
            stream.close()  # without a shutdown: the connection is the parent's

    def close(self, error: KvxferError) -> None:
        with self._changed:
            self._closed = self._closed or error
            idle, self._idle = self._idle, []
            self._count -= len(idle)
            moving = list(self._moving.values())
            self._changed.notify_all()
        for stream in idle:
            stream.close()
        for stream in moving:
            stream.shut_down()  # wakes the thread that waits on it; that thread closes it

    def _take(self, transfer: Transfer, until: float) -> Stream | None:
        """Return a stream for this transfer alone, or None if there is none before `until`."""
        while True:
            with self._changed:
                if self._closed is not None:
                    raise self._closed
                stream = self._idle.pop() if self._idle else None
                if stream is not None:
                    self._moving[transfer] = stream
                else:
                    self._dial_for(transfer)
            if stream is not None:
                if stream.is_healthy():
                    return stream
                self._drop(transfer)
                continue
            if transfer.stop is not None or time.monotonic() >= until:
                return None
            self._help(until)

    def _dial_for(self, transfer: Transfer) -> None:
        """Have a stream made, if there may be one more; raises why the one that was asked for could not be made. The
        caller holds `_changed`."""
        dial = self._dials.get(transfer)
        if dial is not None and dial.error is not None:
            del self._dials[transfer]
            raise dial.error
        if (dial is None or dial.is_over) and self._count < self._config.tcp_streams_max:
            self._count += 1
            dial = self._dials[transfer] = _Dial()
            # A thread, because the peer may be stopped: who waits must see its deadline, a cancel, Ctrl-C meanwhile.
            try:
                with shortages_told(f"connecting to {self._link.label}", peer=self._link.label):
                    threading.Thread(target=self._dial, args=(dial,), name="kvxfer-dial", daemon=True).start()
            except BaseException:
                self._count -= 1
                del self._dials[transfer]
                raise

    def _dial(self, dial: _Dial) -> None:
        stream: Stream | None = None
        error: KvxferError | None = None
        try:
            deadline = time.monotonic() + self._config.connect_timeout_s
            stream = Stream(*self._link.dial(deadline), self._link.label, self._config)
        except KvxferError as exc:
            error = exc
        except Exception as exc:
            error = PeerUnreachableError(f"no data connection to {self._link.label}: {exc!r}.", peer=self._link.label)
        with self._changed:
            dial.error, dial.is_over = error, True
            if stream is not None and self._closed is None:
                self._idle.append(stream)
                stream = None
            else:
                self._count -= 1
            self._changed.notify_all()
        if stream is not None:
            stream.close()

    def _help(self, until: float) -> None:
        """No stream is free. The batches that have one may have nobody who moves them: move those, or wait."""
        with self._changed:
            others = list(self._moving)
        for other in others:
            if other.lock.acquire(blocking=False):
                try:
                    if not other.finished:
                        self.progress(other, min(until, time.monotonic() + 0.005))
                except BaseException as exc:  # Ctrl-C: nobody knows how far a call has come, so it must not go on
                    if not other.finished:
                        self.abort(other, time.monotonic() + HANG_UP_TIMEOUT_S)
                        other.finish(TransferCancelledError(f"a thread that moved the batch was interrupted: {exc!r}."))
                    raise
                finally:
                    other.lock.release()
                return
        with self._changed:
            if not self._idle and (self._dials or self._count >= self._config.tcp_streams_max):
                self._changed.wait(min(TICK_S, max(0.0, until - time.monotonic())))

    def _give_back(self, transfer: Transfer, stream: Stream) -> None:
        stream.used_at = time.monotonic()
        with self._changed:
            self._dials.pop(transfer, None)
            self._moving.pop(transfer, None)
            if self._closed is None:
                self._idle.append(stream)
                self._changed.notify()
                return
            self._count -= 1
        stream.close()

    def _drop(self, transfer: Transfer) -> Stream | None:
        """Reset the transfer's stream, if it has one."""
        with self._changed:
            self._dials.pop(transfer, None)
            stream = self._moving.pop(transfer, None)
            if stream is not None:
                self._count -= 1
                self._changed.notify()
        if stream is not None:
            stream.reset()
        return stream


class _Dial:
    """One stream in the making."""

    __slots__ = ("error", "is_over")

    def __init__(self) -> None:
        self.error: KvxferError | None = None
        self.is_over = False


def tune(connection: socket.socket, config: EngineConfig, *, listening: bool = False) -> None:
    """Set what a data connection needs; on a listening socket what must be set before accept.

    Buffers the size of the L2 cache let the receiver copy what the sender has just written (measured: 1.4 times the
    kernel's own sizing on loopback; over a long fat network set tcp_socket_buffer_nbytes=0).
    """
    if config.tcp_socket_buffer_nbytes:
        size = config.tcp_socket_buffer_nbytes
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    if not listening:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes in mid-batch leaves no sign on a connection that only waits: let the kernel ask.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, math.ceil(config.keepalive_timeout_s)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, math.ceil(config.keepalive_interval_s)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
