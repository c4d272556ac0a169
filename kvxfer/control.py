"""The control plane's sockets: one listener for control and data connections, and the way to a peer's.

The first bytes of an accepted connection decide what it is. Nobody who connects can hold up others: each connection has
a deadline until it has shown what it wants, and half a frame is just not yet a frame. Who accepts: `acceptor.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import time
from collections.abc import Callable
from typing import Protocol

from kvxfer.acceptor import Acceptor, resolve
from kvxfer.addresses import HostPort, format_host_port
from kvxfer.config import EngineConfig
from kvxfer.errors import (
    KvxferError,
    PeerClosedError,
    PeerRefusedError,
    PeerRestartedError,
    PeerUnreachableError,
    RemoteProtocolError,
)
from kvxfer.handshake.frames import MAGIC, FrameDecoder, FrameKind, decode_json, encode_json
from kvxfer.limits import remedy_for, shortages_told
from kvxfer.log import get_logger
from kvxfer.session import Session
from kvxfer.transports.loop import Loop
from kvxfer.transports.tcp import tune

__all__ = ["Dialect", "Listener", "ListenerOwner", "connect", "dial_data", "resolve"]

FIRST_NBYTES = len(MAGIC) + 8
"""The magic and one frame header: enough to tell a control connection from a data connection."""
KIND_AT = len(MAGIC) + 4
RETRY_ERRNOS = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.ECONNRESET})
"""What a peer that is starting, or a flapping link, looks like: tried again until the deadline."""


class ListenerOwner(Protocol):
    """What the listener asks of the engine; called in the loop's thread."""

    generation: str
    dialect: Dialect | None

    def accept_control(self, connection: socket.socket, label: str) -> Session:
        """Return a session for a new control connection; raises KvxferError to refuse it."""

    def accept_data(self, token: str) -> tuple[int, Callable[[socket.socket], None]]:
        """Take on a data connection that shows `token`: its number, and what begins to serve it once the peer has been
        told. Raises KvxferError to refuse it."""


class Dialect(Protocol):
    """Another protocol on the engine's port; called in the loop's thread."""

    def may_begin_with(self, data: bytes) -> bool:
        """Whether these first bytes may be its beginning; from `head_nbytes` on a certain answer."""

    @property
    def head_nbytes(self) -> int:
        """How many bytes it takes to be sure; no more than a frame of kvxfer's has at least."""

    def accept(self, connection: socket.socket, label: str, data: bytes) -> None:
        """Serve a connection that began with `data`."""

    def close(self) -> None:
        """The engine is being closed; from any thread."""

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors only."""


class Listener:
    """The listening socket of an engine, and the connections that have not yet shown what they want."""

    def __init__(self, config: EngineConfig, loop: Loop, owner: ListenerOwner) -> None:
        self._config = config
        self._loop = loop
        self._owner = owner
        self._arrivals: set[_Arrival] = set()
        self._acceptor = Acceptor(config, config.port, loop, self._arrive)
        self.port = self._acceptor.port
        self.family = self._acceptor.family

    def start(self) -> None:
        """Begin to accept; from any thread."""
        self._acceptor.start()

    @property
    def dialect(self) -> Dialect | None:
        """The other protocol that is answered here."""
        return self._owner.dialect

    def _arrive(self, connection: socket.socket, label: str, now: float) -> None:
        arrival = _Arrival(connection, label, self)
        self._arrivals.add(arrival)
        self._loop.add(arrival)
        self._loop.call_at(now + self._config.handshake_timeout_s, arrival)

    def sort_out(self, arrival: _Arrival, data: bytes) -> None:
        """Give a connection that has shown what it is to who serves it."""
        connection = arrival.hand_off()
        if data[KIND_AT] != FrameKind.ATTACH:
            try:
                session = self._owner.accept_control(connection, arrival.label)
            except KvxferError as error:
                with contextlib.suppress(OSError):
                    connection.send(_refusal(error), socket.MSG_NOSIGNAL)
                connection.close()
            else:
                session.begin(data)
            return
        answer, serve = self._attach(data)
        try:
            connection.send(answer, socket.MSG_NOSIGNAL)  # a few hundred bytes into an empty socket buffer
        except OSError:
            serve = None
        if serve is None:
            connection.close()
        else:
            tune(connection, self._config)
            serve(connection)

    def forget(self, arrival: _Arrival) -> None:
        """An arrival is served or closed."""
        self._arrivals.discard(arrival)

    @property
    def loop(self) -> Loop:
        """The loop that accepts."""
        return self._loop

    def close(self) -> None:
        """Stop accepting and drop who has not said what it wants; in the loop's thread, or after its end."""
        self._acceptor.close()
        for arrival in list(self._arrivals):
            arrival.close()

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors only."""
        self._acceptor.abandon()
        for arrival in self._arrivals:
            with contextlib.suppress(OSError):
                os.close(arrival.connection.detach())

    def _attach(self, data: bytes) -> tuple[bytes, Callable[[socket.socket], None] | None]:
        try:
            decoder = FrameDecoder()
            decoder.feed(data)
            frame = decoder.next_frame()
            assert frame is not None
            fields = decode_json(frame)
            if fields.get("target") != self._owner.generation:
                raise PeerRestartedError(
                    f"generation {fields.get('target')!r:.40} was asked for; this engine is {self._owner.generation}."
                )
            token = fields.get("token")
            if not isinstance(token, str):
                raise RemoteProtocolError("an ATTACH frame has no token.")
            number, serve = self._owner.accept_data(token)
            return MAGIC + encode_json(FrameKind.ATTACHED, {"number": number}), serve
        except KvxferError as error:
            return _refusal(error), None


def _refusal(error: KvxferError) -> bytes:
    """Return what a connection is told that is not served."""
    fields = {"code": type(error).__name__, "message": error.message, "remedy": error.remedy}
    return MAGIC + encode_json(FrameKind.ERROR, fields)


class _Arrival:
    """An accepted connection that has not yet shown what it wants."""

    def __init__(self, connection: socket.socket, label: str, listener: Listener) -> None:
        self.connection = connection
        self.label = label
        self._listener = listener
        self._data = b""
        self._needed = FIRST_NBYTES
        self._open = True

    def fileno(self) -> int:
        return self.connection.fileno()

    def ready(self, events: int, now: float) -> bool:
        try:
            data = self.connection.recv(self._needed - len(self._data))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        self._data += data
        magic = self._data[: len(MAGIC)]
        if data and self._is_dialect():
            return True
        if not data or magic != MAGIC[: len(magic)]:
            if data:
                error = {"code": "RemoteProtocolError", "message": "this is a kvxfer port", "remedy": ""}
                with contextlib.suppress(OSError):
                    self.connection.send(MAGIC + encode_json(FrameKind.ERROR, error), socket.MSG_NOSIGNAL)
                get_logger(__name__).warning("listener.stranger", peer=self.label, first_bytes=self._data.hex())
            self.close()
        elif len(self._data) == self._needed:
            if self._needed == FIRST_NBYTES and self._data[KIND_AT] == FrameKind.ATTACH:
                body_nbytes = int.from_bytes(self._data[len(MAGIC) : KIND_AT], "big")
                if not 0 < body_nbytes <= 4096:
                    self.close()
                    return True
                self._needed += body_nbytes
            else:
                self._listener.sort_out(self, self._data)
        return True

    def _is_dialect(self) -> bool:
        """Whether this may be somebody who speaks the other protocol; it is served there once that is certain."""
        dialect = self._listener.dialect
        if dialect is None or not dialect.may_begin_with(self._data):
            return False
        if len(self._data) >= dialect.head_nbytes:
            dialect.accept(self.hand_off(), self.label, self._data)
        return True

    def timer(self, now: float) -> None:
        if self._open:
            get_logger(__name__).warning("listener.silent", peer=self.label, received_nbytes=len(self._data))
            self.close()

    def failed(self, error: BaseException) -> None:
        self.close()

    def hand_off(self) -> socket.socket:
        """Give the connection away."""
        self._open = False
        self._listener.loop.remove(self)
        self._listener.forget(self)
        return self.connection

    def close(self) -> None:
        """Drop the connection; tolerated twice."""
        if self._open:
            self.hand_off().close()


def connect(target: HostPort, config: EngineConfig, deadline: float) -> socket.socket:
    """Return a connected socket; tries all addresses of the name, again and again until `deadline` where the errno says
    that this may help. Raises PeerUnreachableError naming the last errno and how often and how long it was tried."""
    label = format_host_port(target.host, target.port)
    started = time.monotonic()
    tries, pause = 0, 0.01
    last: OSError | None = None
    while True:
        for family, kind, protocol, _, address in resolve(target, passive=False):
            left = deadline - time.monotonic()
            if left <= 0 and tries:
                break
            tries += 1
            with shortages_told(f"connecting to {label}", peer=label):
                connection = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
            try:
                tune(connection, config, listening=True)
                connection.settimeout(max(left, 0.001))
                connection.connect(address)
                if connection.getsockname() == connection.getpeername():
                    raise OSError(errno.ECONNREFUSED, "the kernel connected the socket to itself: nobody listens there")
                tune(connection, config)
                return connection
            except OSError as exc:
                connection.close()
                last = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) if isinstance(exc, TimeoutError) else exc
        now = time.monotonic()
        if last is not None and (last.errno not in RETRY_ERRNOS or now + pause >= deadline):
            raise PeerUnreachableError(
                f"connecting to {label} failed after {now - started:.1f} s and {tries} tries: {last.strerror}.",
                remedy=_CONNECT_REMEDY.get(last.errno or 0)
                or remedy_for(last.errno)
                or "Check the address and the network between the two hosts.",
                peer=label,
                errno=last.errno,
                elapsed_s=now - started,
            ) from None
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, 0.25)


_CONNECT_REMEDY = {
    errno.ECONNREFUSED: "Nobody listens on that port: check that the peer runs and that this is its engine.address "
    "(a port of 0 in its configuration means another one each time).",
    errno.ETIMEDOUT: "Nothing answers: a firewall drops the packets, the host is down, or the address is another "
    "network's. Try `kvxfer doctor --peer HOST:PORT` from here.",
    errno.EADDRNOTAVAIL: "This host has no free local port for the connection (net.ipv4.ip_local_port_range), or the "
    "address cannot be reached from it.",
    errno.EACCES: "A local security policy forbids the connection.",
    errno.EHOSTUNREACH: "There is no route to that host now.",
    errno.ENETUNREACH: "There is no route to that network: check the address and this host's routes.",
}


def dial_data(
    target: HostPort, config: EngineConfig, deadline: float, *, token: str, generation: str
) -> tuple[socket.socket, int]:
    """Open a data connection of the session that `token` belongs to; returns it and its number at the peer."""
    label = format_host_port(target.host, target.port)
    connection = connect(target, config, deadline)
    try:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.sendall(MAGIC + encode_json(FrameKind.ATTACH, {"token": token, "target": generation}))
        data = _read(connection, FIRST_NBYTES, label, deadline)
        decoder = FrameDecoder(kinds={FrameKind.ATTACHED, FrameKind.ERROR})
        decoder.feed(data)
        decoder.next_frame()  # checks magic, kind and length
        decoder.feed(_read(connection, int.from_bytes(data[len(MAGIC) : KIND_AT], "big"), label, deadline))
        frame = decoder.next_frame()
        assert frame is not None
        fields = decode_json(frame)
        if frame.kind is FrameKind.ERROR:
            kind = PeerRestartedError if fields.get("code") == "PeerRestartedError" else PeerRefusedError
            raise kind(
                f"{label} refused a data connection: {str(fields.get('message'))[:500]}",
                remedy=str(fields.get("remedy"))[:500],
                peer=label,
                code=str(fields.get("code"))[:80],
            )
        number = fields.get("number")
        if frame.kind is not FrameKind.ATTACHED or not isinstance(number, int):
            raise RemoteProtocolError(f"{label} answered ATTACH with {frame.kind.name} {fields!r:.100}.", peer=label)
        return connection, number
    except OSError as exc:
        connection.close()
        raise PeerUnreachableError(
            f"opening a data connection to {label} failed: {exc.strerror or 'timed out'}.",
            remedy="The peer is stopped, overloaded or gone.",
            peer=label,
            errno=exc.errno,
        ) from exc
    except BaseException:
        connection.close()
        raise


def _read(connection: socket.socket, nbytes: int, label: str, deadline: float) -> bytes:
    """Read exactly so many bytes: what follows in the stream is not ours."""
    data = b""
    while len(data) < nbytes:
        connection.settimeout(max(0.001, deadline - time.monotonic()))  # for all of it: a peer may send byte by byte
        part = connection.recv(nbytes - len(data))
        if not part:
            raise PeerClosedError(f"{label} closed a new data connection.", peer=label)
        data += part
    return data
