"""One control connection after the socket is there: drives the handshake, then carries the session's frames.

The same class serves both sides. The side that opens drives the handshake from its own thread (`run_handshake`) and
hands the connection to the control loop when it stands; the side that is opened lives in the loop from the start.
Frames may be sent from any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from kvxfer.answers import ANSWERS, Pending, join_number, split_number
from kvxfer.config import EngineConfig
from kvxfer.errors import (
    ClosedError,
    KvxferError,
    PeerClosedError,
    PeerUnreachableError,
    TransferError,
)
from kvxfer.handshake.events import (
    CardWanted,
    Established,
    Failed,
    PeerClosed,
    PeerOffered,
    SessionFrame,
    TransportChosen,
)
from kvxfer.handshake.frames import Frame, FrameKind
from kvxfer.handshake.keepalive import Keepalive
from kvxfer.handshake.machine import Handshake
from kvxfer.log import get_logger
from kvxfer.text import clean
from kvxfer.transports.loop import READABLE, WRITABLE, Loop
from kvxfer.transports.sockets import close_with_reset

__all__ = ["Session", "SessionOwner"]

RECEIVE_NBYTES = 1 << 16
OUTGOING_NBYTES_MAX = 128 << 20
"""A peer that lets this much pile up unread is dropped; the largest frame, a region table, is 64 MiB."""
RESET_TIMEOUT_S = 1.0


class SessionOwner(Protocol):
    """What a session asks of the engine; called without locks, from the loop's thread or the opening one."""

    def card_for_peer(self, session: Session) -> dict[str, Any]:
        """Return this engine's card."""

    def choose(self, session: Session, card: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        """Try transports with the peer's card (the opening side): the one that works and why others were passed over.
        Raises TransportUnavailableError."""

    def session_established(self, session: Session) -> None:
        """A peer that opened this engine is there."""

    def frame_received(self, session: Session, frame: Frame) -> None:
        """A frame of the session came in that is not an answer."""

    def session_ended(self, session: Session, error: KvxferError) -> None:
        """The session is over, for whatever reason."""


class Session:
    """A control connection; `error` is set when it is over."""

    def __init__(
        self,
        connection: socket.socket,
        label: str,
        machine: Handshake,
        owner: SessionOwner,
        loop: Loop,
        *,
        is_initiator: bool,
        config: EngineConfig,
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._fd = connection.fileno()
        self.label = label
        self.is_initiator = is_initiator
        self.established: Established | None = None
        self.card: Mapping[str, Any] = {}
        self.token = os.urandom(16).hex()
        """What a data connection shows to belong to this session; in our card."""
        self.error: KvxferError | None = None
        self._machine = machine
        self._owner = owner
        self._loop = loop
        self._keepalive = Keepalive(config.keepalive_interval_s, config.keepalive_timeout_s, time.monotonic())
        self._keepalive_timeout_s = config.keepalive_timeout_s
        self._lock = threading.RLock()
        self._outgoing = bytearray()
        self._in_loop = False
        self._watching = READABLE
        self._numbers = itertools.count(1)
        self._pending: dict[tuple[FrameKind, int], Pending] = {}
        self._log = get_logger(__name__)

    @property
    def generation(self) -> str:
        """The peer's generation, once it is known."""
        peer = self._machine.peer
        return peer.generation if peer is not None else ""

    # The opening side, in the caller's thread.

    def run_handshake(self, deadline: float) -> Established:
        """Drive the handshake to its end; raises the KvxferError that ended it."""
        poll = select.poll()
        while self.established is None:
            self._flush()
            if self.error is not None:
                raise self.error
            now = time.monotonic()
            until = min(deadline, self._machine.deadline() or deadline)
            poll.register(self._fd, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
            if poll.poll(max(0.0, min(until - now, 0.1)) * 1e3):
                self._receive()
            self._machine.handle_timer(time.monotonic())
            self._handle_events()
            if self.error is None and time.monotonic() >= deadline + 0.5:
                raise PeerUnreachableError(f"the handshake with {self.label} did not end.", peer=self.label)
        self._flush()
        return self.established

    def join_loop(self) -> None:
        """Let the loop read the connection from now on; from any thread."""
        self._loop.call_soon(self._join_loop)

    def _join_loop(self) -> None:
        if self.error is not None:
            return
        self._in_loop = True
        self._keepalive.received(time.monotonic())
        self._watching = WRITABLE | READABLE if self._outgoing else READABLE
        self._loop.add(self, self._watching)
        self._schedule()

    # The opened side begins here, in the loop.

    def begin(self, data: bytes) -> None:
        """Take what was read from the connection to tell what it is, and go on in the loop's thread."""
        self._join_loop()
        with self._lock:
            self._machine.receive_data(data, time.monotonic())
        self._handle_events()
        self._flush()

    # Loop handler.

    def fileno(self) -> int:
        return self._fd

    def ready(self, events: int, now: float) -> bool:
        if events & READABLE:
            self._receive()
            self._handle_events()
        self._flush()
        return True

    def timer(self, now: float) -> None:
        if self.error is not None:
            return
        if self.established is None:
            self._machine.handle_timer(now)
            self._handle_events()
        else:
            self._receive()  # the loop may have slept through the arrival: this process was stopped
            self._handle_events()
            if self.error is not None:
                return
            what = self._keepalive.poll(now)
            if what == "ping":
                self.send(FrameKind.PING, b"")
            elif what == "dead":
                self._end(
                    PeerUnreachableError(
                        f"no sign of life from {self.label} for {self._keepalive_timeout_s:g} s.",
                        remedy="The process may be stopped, its host down, or the network cut. "
                        "keepalive_timeout_s (KVXFER_KEEPALIVE_TIMEOUT_S) sets how long to bear with it.",
                        peer=self.label,
                    ),
                    reset=True,
                )
        self._flush()
        self._schedule()

    def failed(self, error: BaseException) -> None:
        self._end(
            PeerClosedError(f"the session with {self.label} failed here: {error!r}.", peer=self.label), reset=True
        )

    # Frames.

    def send(self, kind: FrameKind, body: bytes) -> None:
        """Send a frame; from any thread. Raises the session's error if it is over."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self._machine.send(kind, body)
        self._flush()

    def answer(self, kind: FrameKind, body: Mapping[str, Any]) -> None:
        """Send an answer that came late; a session that is over needs none."""
        with contextlib.suppress(KvxferError):
            self.send(kind, json.dumps(body).encode())

    def ask(self, kind: FrameKind, answer: FrameKind, body: Mapping[str, Any] | bytes) -> Pending:
        """Send a frame that is answered by one of kind `answer` with the same number."""
        number = next(self._numbers)
        pending = Pending(self, (answer, number))
        with self._lock:
            if self.error is not None:
                raise self.error
            self._pending[answer, number] = pending
        self.send(kind, join_number(number, body))
        return pending

    def forget(self, key: tuple[FrameKind, int]) -> None:
        """Nobody waits for this answer any more."""
        with self._lock:
            self._pending.pop(key, None)

    def close(self, reason: str) -> None:
        """Say goodbye and close; from any thread. Tolerated twice."""
        with self._lock:
            if self.error is None:
                self._machine.close(reason)
        self._flush()
        self._end(ClosedError(f"the session with {self.label} was closed: {reason}."))

    def reset(self, error: KvxferError) -> None:
        """Drop the connection so that the peer does not read what is still on its way; from any thread."""
        self._end(error, reset=True)

    def was_reset(self) -> bool:
        """Whether the session is over, also where the peer's reset was not read yet; in the loop's thread, before what
        the peer may have given up takes effect."""
        if self.error is None and self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._end(PeerClosedError(f"{self.label} reset the session.", peer=self.label))
        return self.error is not None

    def abandon(self) -> None:
        """In a forked child: close the copy of the descriptor only."""
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())

    # Inside.

    def _receive(self) -> None:
        now = time.monotonic()
        try:
            data = self._socket.recv(RECEIVE_NBYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._end(
                PeerClosedError(
                    f"the connection to {self.label} broke: {exc.strerror}.",
                    remedy="The peer has died or was closed; look at its log, then open the segment again.",
                    peer=self.label,
                    errno=exc.errno,
                )
            )
            return
        with self._lock:
            self._keepalive.received(now)
            self._machine.receive_data(data, now)

    def _flush(self) -> None:
        with self._lock:
            if self._fd < 0:
                return
            self._outgoing += self._machine.data_to_send()
            try:
                while self._outgoing:
                    sent = self._socket.send(self._outgoing, socket.MSG_NOSIGNAL)
                    del self._outgoing[:sent]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self._outgoing.clear()  # the reading side finds out why
            too_much = len(self._outgoing) > OUTGOING_NBYTES_MAX
            wanted = READABLE | WRITABLE if self._outgoing else READABLE
            if self._in_loop and wanted != self._watching:
                if self._loop.is_current:
                    self._watch(wanted)
                else:
                    self._loop.call_soon(lambda: self._watch(wanted))
        if too_much:
            self._end(PeerUnreachableError(f"{self.label} does not read what it is sent.", peer=self.label), reset=True)

    def _watch(self, wanted: int) -> None:
        with self._lock:
            if self.error is None and self._in_loop and wanted != self._watching:
                self._watching = wanted
                self._loop.watch(self, wanted)

    def _schedule(self) -> None:
        if self.error is None:
            when = self._machine.deadline() if self.established is None else self._keepalive.next_deadline()
            if when is not None:
                self._loop.call_at(when, self)

    def _handle_events(self) -> None:
        while True:
            with self._lock:
                event = self._machine.next_event()
            if event is None:
                return
            try:
                self._handle(event)
            except KvxferError as error:
                with self._lock:
                    self._machine.fail(error)

    def _handle(self, event: object) -> None:
        if isinstance(event, SessionFrame):
            self._handle_frame(event.frame)
        elif isinstance(event, CardWanted):
            self._machine.offer(self._owner.card_for_peer(self))
        elif isinstance(event, PeerOffered):
            self.card = event.card
            if self.is_initiator:
                transport, passed_over = self._owner.choose(self, event.card)
                self._machine.local_ready(transport, passed_over)
        elif isinstance(event, TransportChosen):
            self._machine.local_ready(event.transport, event.passed_over)
        elif isinstance(event, Established):
            self.established = event
            self._keepalive.received(time.monotonic())
            if not self.is_initiator:
                self._schedule()
                self._owner.session_established(self)
        elif isinstance(event, PeerClosed):
            reason = f"{self.label} closed the session: {event.reason}."
            self._end(PeerClosedError(reason, remedy="Open the segment again once it is back.", peer=self.label))
        elif isinstance(event, Failed):
            self._flush()
            self._end(event.error)

    def _handle_frame(self, frame: Frame) -> None:
        if frame.kind is FrameKind.PING:
            self.send(FrameKind.PONG, b"")
        elif frame.kind is FrameKind.PONG:
            pass
        elif frame.kind is FrameKind.NOTIFY and self.was_reset():
            pass  # it has given that batch up
        elif frame.kind in ANSWERS:
            number, body = split_number(frame)
            with self._lock:
                pending = self._pending.pop((frame.kind, number), None)
            if pending is not None and frame.kind is FrameKind.NOTIFY_ACK and body:
                told = clean(body.decode(errors="replace"), 1000)
                pending.fail(TransferError(f"{self.label} did not take the notification: {told}", peer=self.label))
            elif pending is not None:
                pending.resolve(body)
        else:
            self._owner.frame_received(self, frame)

    def _end(self, error: KvxferError, *, reset: bool = False) -> None:
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            pending, self._pending = list(self._pending.values()), {}
        if self._in_loop and not self._loop.is_current:
            closed = threading.Event()

            def close() -> None:
                self._close_socket(reset)
                closed.set()

            self._loop.call_soon(close)
            if reset:
                closed.wait(RESET_TIMEOUT_S)  # whoever resets counts on the peer's kernel knowing it
        else:
            self._close_socket(reset)
        for one in pending:
            one.fail(error)
        self._owner.session_ended(self, error)

    def _close_socket(self, reset: bool) -> None:
        with self._lock:
            if self._fd < 0:
                return
            if self._in_loop:
                self._loop.remove(self)
            if reset:
                close_with_reset(self._socket)
            else:
                self._socket.close()
            self._fd = -1
