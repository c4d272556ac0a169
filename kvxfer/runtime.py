"""What runs while an engine is open: the loop, the listener, the transports, the registered memory, the open segments.

Starts and ends them in one order, with the process at the latest. Does not know the `TransferEngine` that its user
holds: one that is dropped without `close` can be collected and told of, while what peers use stays until it is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings

from kvxfer.addresses import choose_advertised_host, format_host_port, is_wildcard
from kvxfer.config import EngineConfig
from kvxfer.control import Listener
from kvxfer.errors import ClosedError, ForkedError, KvxferError
from kvxfer.interfaces import default_route_host, list_interfaces
from kvxfer.limits import shortages_told
from kvxfer.log import get_logger
from kvxfer.memory import RegionTable
from kvxfer.registry import Registry
from kvxfer.segment_table import SegmentTable
from kvxfer.serving import PeerService
from kvxfer.transport_set import TransportSet
from kvxfer.transports.loop import Loop

__all__ = ["KEY_REMEDY", "WITHOUT_KEY", "Runtime"]

WITHOUT_KEY = "without a key anyone who reaches the port may read and write what is registered"
KEY_REMEDY = "Set KVXFER_KEY to one secret on both sides, such as `openssl rand -hex 32` prints."


class Runtime:
    """The running parts of one engine, from its making until `close`.

    Raises ConfigError where the listener cannot be bound, TransportUnavailableError where no wanted transport works,
    ResourceLimitError where there is no file descriptor or thread left.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.closed: KvxferError | None = None
        """What every later call raises."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._log = get_logger(__name__)
        self.table = RegionTable()
        with shortages_told("starting an engine"):
            self._start()

    def _start(self) -> None:
        config = self.config
        self.loop = Loop("kvxfer-control")
        self.transports = TransportSet(config)
        self.service = PeerService(config, os.urandom(16).hex(), self.table, self.loop, self.transports)
        self.registry = Registry(config, self.table, self.transports, self.service.take_back)
        self.segments = SegmentTable(self.service, self.table)
        try:
            self._listener = Listener(config, self.loop, self.service)
            self.service.address = self._advertise()
            self.service.name = config.name or self.service.address
            self.transports.open(self.loop, self.service.generation, self.service)
            self.loop.start()
        except BaseException:
            self.transports.close()
            self.loop.close(config.close_timeout_s)
            if hasattr(self, "_listener"):
                self._listener.close()
            raise
        self._listener.start()
        _RUNNING.add(self)
        self._log.info("engine.started", address=self.service.address, transports=list(self.transports))
        if config.key is None and is_wildcard(config.host) and os.getpid() not in _warned:
            _warned.add(os.getpid())
            address = format_host_port(config.host, self._listener.port)
            self._log.warning("engine.exposed", address=address, reason=WITHOUT_KEY, remedy=KEY_REMEDY)

    def __str__(self) -> str:
        state = "closed" if self.closed is not None else ", ".join(self.transports)
        return f"<TransferEngine {self.service.address}: {state}>"

    def close(self) -> None:
        """Say goodbye to all peers, end the threads, release everything; within close_timeout_s, tolerated twice."""
        if self._pid != os.getpid():
            return  # the parent's engine is none of our business
        error = ClosedError("the engine was closed.", remedy="Make a new TransferEngine.")
        with self._lock:
            if self.closed is not None:
                return
            self.closed = error
        self.segments.close(error)
        self.service.close()
        self.transports.close()
        self.loop.close(self.config.close_timeout_s)
        self._listener.close()
        self.registry.release()
        _RUNNING.discard(self)
        self._log.info("engine.closed", address=self.service.address)

    def abandon(self) -> None:
        """In a forked child: every call raises from now on; the copies of the descriptors are closed, so that peers see
        the parent's end when it ends."""
        self.closed = error = ForkedError(
            f"this engine belongs to process {self._pid}; this is process {os.getpid()}, forked from it.",
            remedy="Make the TransferEngine in the process that uses it, after the fork, or start processes with "
            "multiprocessing's 'spawn'.",
            owner_pid=self._pid,
            pid=os.getpid(),
        )
        with contextlib.suppress(Exception):
            self._listener.abandon()
            self.service.abandon()
            self.segments.abandon(error)
            self.transports.abandon()
            self.registry.release()
            self.loop.abandon()

    def warn_if_open(self, source: object = None) -> None:
        """Warn that nobody has closed the engine. Takes no lock and ends nothing: it is called by a finalizer.

        source: the object that was lost, for the place where it was made (`python -X tracemalloc`).
        """
        if self.closed is None:
            warnings.warn(
                f"unclosed {self}: close it, or use it in a with statement",
                ResourceWarning,
                stacklevel=3,
                source=source,
            )

    def _advertise(self) -> str:
        config = self.config
        if config.advertise_host:
            return format_host_port(config.advertise_host, self._listener.port)
        host, reason, doubts = choose_advertised_host(
            config.host, list_interfaces(), default_route_host(self._listener.family)
        )
        for doubt in doubts:
            self._log.warning("engine.address_unsure", address=host, reason=reason, warning=doubt)
        return format_host_port(host, self._listener.port)


_RUNNING: set[Runtime] = set()
"""The open engines of this process: closed at exit, abandoned in a forked child."""

_warned: set[int] = set()
"""The process that has told of an exposed engine: once is enough, but a forked child tells it for itself."""


def _close_all() -> None:
    for runtime in list(_RUNNING):
        runtime.close()


def _abandon_all() -> None:
    for runtime in list(_RUNNING):
        runtime.abandon()


# Before Python waits for the threads that are no daemons, not after: one that waits for a batch ends that way. What
# concurrent.futures uses for the same reason; where it is missing, atexit has to do.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
