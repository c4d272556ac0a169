"""Log events: past-tense facts named `noun.verb`, the rest key=value with units.

The library never configures structlog. Where the application has, events go there; where it has not, they go to the
standard `kvxfer` logger of `logging`, which prints warnings and errors on stderr and is otherwise silent: a program
that prints results on stdout stays clean. (structlog's own default prints every event on stdout.)

What somebody outside can cause as often as he likes, or what fails again and again, is not told each time: the first
few of an interval are, and the next line after it says how many were left out (`left_out_count`).
"""

from __future__ import annotations

import logging
import sys
import time
from types import ModuleType
from typing import Any

__all__ = ["EVENTS", "LINES_MAX", "Logger", "RateLimiter", "get_logger"]

EVENTS: dict[str, str] = {
    "config.unknown_variable": "a KVXFER_* environment variable is not a setting; probably misspelt",
    "data.full": "a Mooncake process's data connection was closed because tcp_connections_max are open",
    "data.memory_gone": "registered memory is not mapped any more; the peer's batch that names it was given up",
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
    "engine.exposed": "an engine listens on all addresses without a key; told once in a process",
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
    "rdma.fence_missed": "a rail broke between the bytes of a batch and its notification, which came without a fence",
    "rdma.fences_refused": "a device takes no receives for fences; notifications come by the control connection alone",
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

INTERVAL_S = 10.0
KEYS_MAX = 1024
_FEW, _MANY = 5, 100
LINES_MAX: dict[str, tuple[int, str]] = {
    "data.full": (_FEW, ""),
    "data.memory_gone": (_FEW, ""),
    "data.protocol_broken": (_FEW, ""),
    "data.request_refused": (_FEW, ""),
    "data.stalled": (_FEW, ""),
    "listener.accept_failed": (_FEW, ""),
    "listener.full": (_FEW, ""),
    "listener.silent": (_FEW, ""),
    "listener.stranger": (_FEW, ""),
    "loop.handler_failed": (_FEW, "handler"),
    "mooncake.call_broke": (_FEW, "call"),
    "mooncake.call_failed": (_FEW, "call"),
    "mooncake.connected": (_MANY, ""),
    "mooncake.message_refused": (_FEW, ""),
    "peer.connected": (_MANY, ""),
    "peer.disconnected": (_MANY, ""),
    "peer.refused": (_FEW, ""),
    "rdma.attribute_lowered": (_FEW, "rail"),
    "rdma.connect_refused": (_FEW, ""),
    "rdma.connected": (_FEW, "rail"),
    "rdma.event": (_FEW, "nic"),
    "rdma.fence_missed": (_FEW, "peer"),
    "rdma.fences_refused": (_FEW, "nic"),
    "rdma.port_down": (_FEW, "nic"),
    "rdma.rail_broken": (_FEW, "rail"),
    "ray.region_busy": (_FEW, ""),
    "segment.disconnected": (_FEW, "peer"),
    "segment.opened": (_FEW, "peer"),
}
"""Events that may come in floods: how many lines in INTERVAL_S, and the field of which each value counts for itself
(none where somebody outside chooses its values)."""


class RateLimiter:
    """Lets the first lines of an interval through and counts the others. Approximate among threads: it has no lock."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._seen: dict[object, list[float]] = {}  # key: when its interval ends, how many lines so far

    def admit(self, key: object, lines_max: int, now: float) -> int | None:
        """Return how many lines of this kind were left out in the last interval; None where this one is to be left out.

        now: monotonic seconds.
        """
        seen = self._seen.get(key)
        if seen is None or now >= seen[0]:
            if seen is None and len(self._seen) >= KEYS_MAX:
                self._seen.clear()
            self._seen[key] = [now + self._interval_s, 1]
            return 0 if seen is None else max(0, int(seen[1]) - lines_max)
        seen[1] += 1
        return 0 if seen[1] <= lines_max else None


_limiter = RateLimiter()


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
        is_structured = structlog is not None and _is_configured(structlog)
        if not is_structured and not self._plain.isEnabledFor(level):
            return
        limit = LINES_MAX.get(event)
        if limit is not None:
            lines_max, field = limit
            left_out = _limiter.admit((event, fields.get(field)), lines_max, time.monotonic())
            if left_out is None:
                return
            if left_out:
                fields["left_out_count"] = left_out
        if structlog is not None and is_structured:
            if self._structured is None:
                self._structured = structlog.get_logger(self._name)
            getattr(self._structured, method)(event, **fields)
        else:
            told = " ".join(
                f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}" for name, value in fields.items()
            )
            # Without a handler `logging` prints the bare text: who says it, and how grave it is, is then in the text.
            prefix = "" if self._plain.hasHandlers() else f"kvxfer: {method}: "
            self._plain.log(level, "%s%s %s", prefix, event, told)


def get_logger(name: str) -> Logger:
    """Return the logger of a module."""
    return Logger(name)


def _is_configured(structlog: ModuleType) -> bool:
    try:
        return bool(structlog.is_configured())
    except AttributeError:  # another thread is importing it at this moment
        return False
