"""A listening socket: bind it, and hand out the connections that come in. What these want is the taker's business."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable

from kvxfer.addresses import HostPort, format_host_port, is_wildcard
from kvxfer.config import EngineConfig
from kvxfer.errors import ConfigError, PeerUnreachableError
from kvxfer.log import get_logger
from kvxfer.text import show
from kvxfer.transports.loop import Loop
from kvxfer.transports.tcp import tune

__all__ = ["Acceptor", "resolve"]

BACKLOG = 1024
RETRY_S = 0.2
"""How long to wait after accept(2) failed for want of descriptors or memory."""


_listening: set[tuple[str, int]] = set()
"""Host and port of every acceptor of this process."""


class Acceptor:
    """Handler of a loop, bound from the start: no port is ever probed and then taken again.

    take: gets each connection, a label for it and the time; in the loop's thread.
    """

    def __init__(
        self, config: EngineConfig, port: int, loop: Loop, take: Callable[[socket.socket, str, float], None]
    ) -> None:
        self._loop = loop
        self._take = take
        self._paused = False
        self._socket = _bind(config, port)
        self._socket.setblocking(False)
        self._bound: tuple[str, int] = self._socket.getsockname()[:2]
        _listening.add(self._bound)
        self.port = self._bound[1]
        self.family = self._socket.family

    def start(self) -> None:
        """Begin to accept; from any thread."""
        self._loop.call_soon(lambda: self._loop.add(self))

    def fileno(self) -> int:
        return self._socket.fileno()

    def ready(self, events: int, now: float) -> bool:
        for _ in range(64):  # then others have their turn
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as exc:  # EMFILE, ENFILE, ENOMEM: try again later instead of spinning
                get_logger(__name__).error("listener.accept_failed", error=exc.strerror, port=self.port)
                self._loop.remove(self)
                self._paused = True
                self._loop.call_at(now + RETRY_S, self)
                break
            connection.setblocking(False)
            try:
                self._take(connection, format_host_port(*address[:2]), now)
            except Exception as exc:  # no descriptor or thread for it: the port must not be closed for that
                get_logger(__name__).error("listener.accept_failed", error=str(exc), port=self.port)
                connection.close()
        return True

    def timer(self, now: float) -> None:
        if self._paused and self._socket.fileno() >= 0:
            self._paused = False
            self._loop.add(self)

    def failed(self, error: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Stop accepting; in the loop's thread, or after its end."""
        self._loop.remove(self)
        _listening.discard(self._bound)
        self._socket.close()

    def abandon(self) -> None:
        """In a forked child: close the copy of the descriptor only."""
        _listening.discard(self._bound)
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())


def resolve(target: HostPort, *, passive: bool) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    """Return the addresses of a name. A literal is taken as a literal, whatever the resolver thinks of this host's
    interfaces."""
    flags = socket.AI_PASSIVE if passive else 0
    for extra in (socket.AI_NUMERICHOST, 0):
        try:
            return socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM, flags=flags | extra)  # type: ignore[return-value]
        except socket.gaierror as exc:
            why = exc.strerror
        except UnicodeError:  # what no name of a host can be
            why = "no host has a name like that"
    label = format_host_port(target.host, target.port)
    message = f"the host name {show(target.host)} does not resolve: {why}."
    remedy = "Check the spelling, /etc/hosts and DNS, or use the IP address."
    if passive:
        raise ConfigError(message, remedy=remedy, setting="host", value=target.host)
    raise PeerUnreachableError(message, remedy=remedy, peer=label)


def _bind(config: EngineConfig, port: int) -> socket.socket:
    target = HostPort(config.host, port)
    last: OSError | None = None
    for family, kind, protocol, _, address in resolve(target, passive=True):
        listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        try:
            if port:  # a restarted engine takes its old port although old connections linger
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if config.host == "::" else 1)
            tune(listener, config, listening=True)
            listener.bind(address)
            # After a bind to port 0, so that no port is chosen that another engine has bound and does not listen on
            # yet. The connections inherit it; without it a restart on the same port would find it in use.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.listen(BACKLOG)
            return listener
        except OSError as exc:
            listener.close()
            last = exc
    assert last is not None
    sources = {name: config.source_of(name) for name in ("host", "port")}
    told = [
        f"{name} comes from the environment variable {source}" for name, source in sources.items() if source != name
    ]
    who = "An engine of this process" if _is_ours(address[:2]) else "Another process"
    remedies = {
        errno.EADDRINUSE: f"{who} listens on that port: set {sources['port']} to another, or to 0 for any free one.",
        errno.EADDRNOTAVAIL: "This host has no interface with that address: see `ip addr`, or use 0.0.0.0.",
        errno.EACCES: "Ports below 1024 need CAP_NET_BIND_SERVICE: choose a higher one.",
    }
    raise ConfigError(
        f"listening on {format_host_port(config.host, port)} failed: {last.strerror}"
        f"{' (' + ', '.join(told) + ')' if told else ''}.",
        remedy=remedies.get(last.errno or 0, "Choose another host or port."),
        setting="port",
        host=config.host,
        port=port,
        errno=last.errno,
    ) from last


def _is_ours(address: tuple[str, int]) -> bool:
    """Whether this process listens on an address itself, or on all addresses with that port."""
    host, port = address
    return any(
        port == taken and (host == there or is_wildcard(host) or is_wildcard(there))
        for there, taken in _listening.copy()
    )
