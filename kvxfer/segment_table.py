"""The segments that one engine has open, one for each address and choice of transports.

Lets everybody who opens the same address at once share one attempt, and looks after what is idle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvxfer.addresses import HostPort, format_host_port, parse_host_port
from kvxfer.config import EngineConfig
from kvxfer.errors import KvxferError, PeerRestartedError, PeerUnreachableError, UsageError
from kvxfer.memory import RegionTable
from kvxfer.peer_connection import PeerConnection
from kvxfer.peer_transfers import PeerTransfers
from kvxfer.segment import Segment
from kvxfer.serving import PeerService
from kvxfer.transports.loop import Loop

__all__ = ["SegmentTable"]

REAP_S = 1.0
"""How often idle streams and batches that nobody moves are looked for, while there are segments."""

Key = tuple[str, tuple[str, ...]]
"""The address in its canonical form, and the wanted transports."""


class SegmentTable:
    """The open segments of one engine. All methods may be called from any thread."""

    def __init__(self, service: PeerService, local_table: RegionTable) -> None:
        self._service = service
        self._local_table = local_table
        self._lock = threading.Lock()
        self._open: dict[Key, Segment] = {}
        self._opening: dict[Key, _Opening] = {}
        self._closed: KvxferError | None = None
        self._reaper = _Reaper(service.loop, min(REAP_S, service.config.tcp_idle_timeout_s / 2), self._reap)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, address: str, transports: Sequence[str] | None) -> Segment:
        """As `TransferEngine.open_segment`."""
        target = parse_host_port(address)
        if target.port == 0:
            raise UsageError(
                f"{address} has no port to connect to.",
                remedy="Pass the peer's engine.address: port 0 is the wish for a free one, which that names.",
            )
        wanted = self._service.config.transports if transports is None else EngineConfig.check_transports(transports)
        key = (format_host_port(target.host, target.port), tuple(wanted))
        with self._lock:
            if self._closed is not None:
                raise self._closed.with_traceback(None)
            segment = self._open.get(key)
            if segment is not None and not segment.is_open:
                segment = None
            opening = self._opening.get(key)
            is_leader = segment is None and opening is None
            if is_leader:
                opening = self._opening[key] = _Opening(self._new(target, key))
        if segment is not None:
            try:
                segment._connection.session()
            except PeerRestartedError:  # void now, and forgotten: who opens wants the process that is there
                return self.open(address, transports)
            return segment
        assert opening is not None
        if is_leader:
            self._lead(key, opening)
        return opening.result()

    def close(self, error: KvxferError) -> None:
        """Close every segment, and those that are being opened; none is opened any more: `open` raises `error`."""
        with self._lock:
            self._closed = error
            segments = [*self._open.values(), *(opening.segment for opening in self._opening.values())]
        for segment in segments:
            segment.close()

    def abandon(self, error: KvxferError) -> None:
        """In a forked child: close the copies of the descriptors; every later use raises `error`."""
        self._closed = error
        for segment in self._open.values():
            segment._connection.abandon(error)

    def _new(self, target: HostPort, key: Key) -> Segment:
        address, wanted = key
        transfers = PeerTransfers(address, self._local_table)
        connection = PeerConnection(self._service, target, wanted, transfers, lambda: self._forget(key, connection))
        return Segment(self, connection)

    def _lead(self, key: Key, opening: _Opening) -> None:
        """Connect, for everybody who waits."""
        try:
            opening.segment._connection.session()
            opening.is_open = True
        except KvxferError as exc:
            opening.error = exc
        finally:
            with self._lock:
                del self._opening[key]
                if opening.is_open and opening.segment.is_open:
                    self._open[key] = opening.segment
            opening.is_over.set()
        self._reaper.start()

    def _forget(self, key: Key, connection: PeerConnection) -> None:
        """A segment is closed or void."""
        with self._lock:
            segment = self._open.get(key)
            if segment is not None and segment._connection is connection:
                del self._open[key]

    def _reap(self, now: float) -> bool:
        """Close what is idle; whether there are segments at all."""
        with self._lock:
            segments = list(self._open.values())
        for segment in segments:
            segment._transfers.reap(now)
        return bool(segments)


class _Opening:
    """One connection attempt, and everybody who waits for it: all get the same segment or the same error."""

    def __init__(self, segment: Segment) -> None:
        self.is_over = threading.Event()
        self.segment = segment
        self.is_open = False
        self.error: KvxferError | None = None

    def result(self) -> Segment:
        """Wait for the end; return the segment or raise why there is none."""
        self.is_over.wait()
        if self.error is not None:
            raise self.error
        if not self.is_open:
            address = self.segment.address
            raise PeerUnreachableError(
                f"the thread that connected to {address} was interrupted.", remedy="Open it again.", peer=address
            )
        return self.segment


class _Reaper:
    """Calls `reap` each `interval_s` in the loop's thread, from `start` until it says that nothing is left to watch."""

    def __init__(self, loop: Loop, interval_s: float, reap: Callable[[float], bool]) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._reap = reap
        self._running = False

    def start(self) -> None:
        """Begin, unless it runs; from any thread."""
        self._loop.call_soon(self._start)

    def _start(self) -> None:
        if not self._running:
            self._running = True
            self._loop.call_at(time.monotonic() + self._interval_s, self)

    def timer(self, now: float) -> None:
        """Handler of the loop; it has no descriptor."""
        self._running = False
        if self._reap(now):
            self._start()

    def fileno(self) -> int:
        return -1

    def ready(self, events: int, now: float) -> bool:
        return False

    def failed(self, error: BaseException) -> None:
        """The loop has logged it."""
