"""Log events: past-tense facts named `noun.verb`, the rest key=value with units.

The library never configures structlog. Where the application has, events go there; where it has not, they go to the
standard `kvxfer` logger of `logging`, which prints warnings and errors on stderr and is otherwise silent: a program
that prints results on stdout stays clean. (structlog's own default prints every event on stdout.)
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

__all__ = ["EVENTS", "Logger", "get_logger"]

EVENTS: dict[str, str] = {
    "config.unknown_variable": "a KVXFER_* environment variable is not a setting; probably misspelt",
    "data.full": "a Mooncake process's data connection was closed because tcp_connections_max are open",
    "data.protocol_broken": "a peer broke the protocol on a data connection, which was closed",
    "data.request_refused": "a peer's request named memory that is not registered or without the right",
    "directory.entry_left": "what was published at a metadata server could not be taken back; the entry is stale",
    "directory.entry_replaced": "a metadata server had an entry of another process under the own name; it was replaced",
    "directory.lost": "a metadata server does not answer any more; connected peers are not concerned",
    "directory.republished": "a metadata server had lost the own entries, or missed a change; they were written again",
    "directory.returned": "a metadata server answers again",
    "data.stalled": "a Mooncake process stopped in the middle of a row; its connection was closed",
    "engine.address_unsure": "the address told to peers is a guess",
    "engine.closed": "an engine was closed",
    "engine.started": "an engine listens",
    "listener.accept_failed": "accept(2) failed, usually for want of file descriptors; tried again",
    "listener.full": "a peer was refused because connections_max are open",
    "listener.silent": "a connection did not say what it wants before the deadline",
    "listener.stranger": "something that is not a kvxfer peer connected",
    "loop.handler_failed": "a handler of the event loop raised and was dropped: a bug in kvxfer",
    "mooncake.call_broke": "a call of Mooncake's API failed by what is no kvxfer error: a bug in kvxfer",
    "mooncake.call_failed": "a call of Mooncake's API returned a failure; this is what is behind its code",
    "mooncake.devices_absent": "device_name names RDMA devices that are not here; the others are used",
    "mooncake.log_level_unknown": "MC_LOG_LEVEL is none of Mooncake's levels",
    "mooncake.ptrace_refused": "KVXFER_ALLOW_PTRACE is set and the kernel refuses to let peers reach memory here",
    "mooncake.peer_opened": "a real Mooncake process was opened; transport says what carries batches to it",
    "mooncake.publish_failed": "a metadata server was not told of a change; it is when it answers again",
    "mooncake.rdma_unusable": "RDMA was asked for and cannot be had; KVXFER_ALLOW_FALLBACK lets tcp take its place",
    "mooncake.variables_ignored": "environment variables of Mooncake's are set that mean nothing here, and why",
    "mooncake.message_refused": "a Mooncake process sent a control message that cannot be, or that is refused",
    "mooncake.connected": "a Mooncake process has connected its queue pairs to ours",
    "peer.connected": "a peer has opened this engine",
    "peer.disconnected": "a peer that had opened this engine has gone",
    "peer.refused": "a handshake of a peer failed",
    "queue_pair.modified": "a queue pair took a step; with every attribute that ibv_modify_qp was given",
    "ray.region_busy": "a tensor that Ray has dropped is still read by a peer; it is kept and let go later",
    "ray.region_left": "a tensor was not unregistered because the engine is closed",
    "rdma.attribute_lowered": "a device refused an attribute of a queue pair; a lower one works",
    "rdma.close_failed": "something of an RDMA device could not be closed",
    "rdma.connect_refused": "a queue pair for a peer could not be made here; the peer was told why",
    "rdma.connected": "a queue pair to a peer is connected; the attributes say how",
    "rdma.event": "something happened to an RDMA device or port",
    "rdma.interfaces_unknown": "the kernel did not tell the network interfaces; GIDs are judged without them",
    "rdma.port_added": "an RDMA port that was down, or not there, when the engine was made is used from now on",
    "rdma.port_doubtful": "an RDMA port that was wanted is not used, or its GID may not carry",
    "rdma.port_down": "an RDMA port went down or its device is gone; its rails are not used until it is back",
    "rdma.rail_broken": "a queue pair broke; what was on it goes over another rail or a new connection",
    "rdma.shared_gid": "two RDMA ports have one GID: a bond, whose rails are not independent",
    "registration.access_refused": "a device refused a right that it may ignore; memory was registered without it",
    "registration.limit_lowered": "a device refused to register as much at once as it says; smaller chunks are tried",
    "registration.progressed": "a part of the chunks of a large region is registered",
    "segment.disconnected": "the control connection to a peer ended; it is made anew at the next use",
    "segment.region_unreachable": "a transport does not reach memory that a batch names; another carries it",
    "segment.opened": "a peer was opened; transport says what carries batches to it",
    "transport.unusable": "a wanted transport does not work on this machine",
}
"""Every event the library logs, and what it means."""


class Logger:
    """One module's logger.

    A filtered call costs 0.3 us by `logging`, 0.6 us by structlog with cache_logger_on_first_use, 2.5 us by structlog
    without it: measured by tests/unit/test_log.py, which holds the first two under 1 us.
    """

    __slots__ = ("_name", "_plain", "_structured")

    def __init__(self, name: str) -> None:
        self._name = name
        self._plain = logging.getLogger(name)
        self._structured: Any = None  # structlog's lazy proxy, which takes up the configuration when it is used

    def debug(self, event: str, **fields: Any) -> None:
        """A fact for who looks for a fault."""
        self._emit(logging.DEBUG, "debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """A fact of normal life: connected, closed."""
        self._emit(logging.INFO, "info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something that a person should know of."""
        self._emit(logging.WARNING, "warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Something that is broken here."""
        self._emit(logging.ERROR, "error", event, fields)

    def _emit(self, level: int, method: str, event: str, fields: dict[str, Any]) -> None:
        structlog = sys.modules.get("structlog")  # an application that configures it has imported it
        if structlog is not None and _is_configured(structlog):
            if self._structured is None:
                self._structured = structlog.get_logger(self._name)
            getattr(self._structured, method)(event, **fields)
        elif self._plain.isEnabledFor(level):
            told = " ".join(
                f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}" for name, value in fields.items()
            )
            self._plain.log(level, "%s %s", event, told)


def get_logger(name: str) -> Logger:
    """Return the logger of a module."""
    return Logger(name)


def _is_configured(structlog: ModuleType) -> bool:
    try:
        return bool(structlog.is_configured())
    except AttributeError:  # another thread is importing it at this moment
        return False
