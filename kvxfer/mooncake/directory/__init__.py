"""Metadata servers: where a process is published under its name, and where it finds others, as Mooncake does it.

`open_directory` chooses by the server's scheme: P2PHANDSHAKE (no server: a peer is asked for its own descriptor),
http(s), redis, etcd. The server is asked when a peer is opened and when memory is registered; no transfer between peers
that know each other needs it. Read next: `server.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvxfer.addresses import HostPort, parse_host_port
from kvxfer.errors import ConfigError
from kvxfer.mooncake.directory.server import KEEP_INTERVAL_S, Ask, ServerDirectory, Store
from kvxfer.mooncake.wire.descriptor import SegmentDescriptor
from kvxfer.text import show

__all__ = ["Directory", "PeerDirectory", "open_directory"]

P2P = "P2PHANDSHAKE"
SCHEMES = ("http", "https", "redis", "etcd")


class Directory(Protocol):
    """What a metadata server knows. All methods may be called from any thread; deadlines are of time.monotonic()."""

    server: str

    def publish(self, descriptor: SegmentDescriptor) -> None:
        """Tell others of this process: at the start, and again when its memory changes."""

    def withdraw(self) -> None:
        """Take back what was published; never raises. Done at the end of the process, too."""

    def find(self, name: str, *, deadline: float) -> SegmentDescriptor:
        """Return the descriptor of a segment as it is now: nothing is kept between two calls."""

    def find_control(self, name: str, *, deadline: float) -> HostPort:
        """Return where a segment's process takes control messages."""

    def stale_hint(self, descriptor: SegmentDescriptor) -> str:
        """Return a sentence for the error of who could not reach a segment: its entry may outlive its process."""


def open_directory(
    server: str,
    *,
    own_name: str,
    own_host: str,
    own_port: int,
    environment: Mapping[str, str],
    ask: Ask | None = None,
    keep_interval_s: float = KEEP_INTERVAL_S,
) -> Directory:
    """Return the directory that a metadata server string names; a string without a scheme is etcd's.

    own_name: under which this process is published; own_host, own_port: where it takes control messages. ask: reads
    the descriptor of another process from itself; `mooncake.calls.ask_descriptor` if not given.

    Raises ConfigError for a string that cannot be meant, UnsupportedError naming the pip command if a library is
    missing. The server itself is asked by `publish` first.
    """
    if ask is None:
        from kvxfer.mooncake.peer import ask_descriptor

        ask = ask_descriptor
    if server == P2P:
        return PeerDirectory(own_name, ask)
    scheme, separator, _ = server.partition("://")
    if not separator:
        scheme = "etcd"
    if not server or scheme not in SCHEMES:
        what = f"{show(server)} is not a metadata server: the scheme {show(scheme)} is not known."
        raise ConfigError(
            what if server else "the metadata server is an empty string.",
            remedy=f"Use {P2P} (no server at all), or http://HOST:PORT/metadata, redis://HOST:PORT, etcd://HOST:PORT.",
            setting="metadata_server",
            value=server,
        )
    return ServerDirectory(
        _open_store(scheme, server, environment),
        own_name=own_name,
        own_control=HostPort(own_host, own_port),
        cluster=environment.get("MC_METADATA_CLUSTER_ID", ""),
        ask=ask,
        keep_interval_s=keep_interval_s,
    )


def _open_store(scheme: str, server: str, environment: Mapping[str, str]) -> Store:
    # What the others need is not imported: http and TLS alone take longer than all the rest of kvxfer.
    if scheme == "redis":
        from kvxfer.mooncake.directory.redis import RedisStore

        return RedisStore(server, environment)
    if scheme == "etcd":
        from kvxfer.mooncake.directory.etcd import EtcdStore

        return EtcdStore(server)
    from kvxfer.mooncake.directory.http import HttpStore

    return HttpStore(server)


class PeerDirectory:
    """P2PHANDSHAKE: names are addresses, and every process answers for itself."""

    server = P2P

    def __init__(self, own_name: str, ask: Ask) -> None:
        self._own = SegmentDescriptor(own_name)
        self._ask = ask

    def publish(self, descriptor: SegmentDescriptor) -> None:
        """Keep it: a peer that is asked is told who asks."""
        self._own = descriptor

    def withdraw(self) -> None:
        """Nothing was published."""

    def find(self, name: str, *, deadline: float) -> SegmentDescriptor:
        """Ask the process at the address `name`."""
        at = parse_host_port(name)
        return self._ask(at.host, at.port, self._own, deadline=deadline)

    def find_control(self, name: str, *, deadline: float) -> HostPort:
        """Return the address that `name` is."""
        return parse_host_port(name)

    def stale_hint(self, descriptor: SegmentDescriptor) -> str:
        """Return nothing: no entry outlives its process."""
        return ""
