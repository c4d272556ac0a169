"""TransferEngine: registers memory, opens peers, submits batches. Owns every thread and socket of the process's side.

Read next: `segment.py` (a peer), `batch.py` (a submitted batch), `transports/base.py` (what carries it).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from kvxfer.addresses import choose_advertised_host, format_host_port, is_wildcard, parse_host_port
from kvxfer.batch import TransferBatch, wait_all
from kvxfer.config import TRANSPORT_NAMES, EngineConfig
from kvxfer.control import Listener
from kvxfer.errors import (
    ClosedError,
    ConfigError,
    ForkedError,
    KvxferError,
    MemoryArgumentError,
    PeerRestartedError,
    PeerUnreachableError,
    RegionBusyError,
    TransferCancelledError,
    TransportUnavailableError,
    UsageError,
)
from kvxfer.interfaces import default_route_host, list_interfaces
from kvxfer.log import get_logger
from kvxfer.memory import Region, RegionTable, buffer_view
from kvxfer.memory.buffers import BufferView
from kvxfer.memory.shared import SharedMemory
from kvxfer.notifications import Notification
from kvxfer.planning import Addresses, block_addresses, plan
from kvxfer.segment import Segment
from kvxfer.serving import PeerService
from kvxfer.system.calls import is_readable
from kvxfer.text import join_reasons
from kvxfer.transports import TRANSPORTS
from kvxfer.transports.base import Transport
from kvxfer.transports.loop import Loop
from kvxfer.transports.rdma import RdmaTransport
from kvxfer.transports.shm import ShmTransport
from kvxfer.transports.tcp import TcpTransport
from kvxfer.types import Opcode, Probe, RegionDescriptor, Rights

__all__ = ["TransferEngine"]


NAME_LENGTH_MAX = 1024
GIVE_UP_S = 0.25
"""How long an interrupted submit waits for the peer to say that it has let go."""
REAP_S = 1.0
"""How often idle streams and batches that nobody moves are looked for, while there are segments."""
ROW_NBYTES = 64 << 10
"""One row up to this is worth the shortest way: about 5 us of copying under the region table's guard."""


class TransferEngine:
    """One side of all transfers of this process. A context manager; all methods may be called from any thread.

    host, port: where to listen; port 0 takes any free one. transports: in order of preference. All settings of
    `EngineConfig` may be given by name; what is not given comes from the environment, then from the default.

    Raises ConfigError for a setting that cannot be meant, TransportUnavailableError if none of the wanted transports
    works on this machine.
    """

    def __init__(self, **settings: Any) -> None:
        self.config = config = EngineConfig.resolve(**settings)
        self.generation = os.urandom(16).hex()
        """Names this engine and no other, as peers see it; one that is started anew at the same address has another."""
        self.quiet_about: frozenset[str] = frozenset()
        """Transports that may be passed over without a warning, even where they were asked for by name."""
        self._pid = os.getpid()
        self._closed: KvxferError | None = None
        self._lock = threading.Lock()
        self._table = RegionTable()
        self._allocated: dict[int, SharedMemory] = {}
        self._segments: dict[tuple[str, tuple[str, ...]], Segment] = {}
        self._opening: dict[tuple[str, tuple[str, ...]], _Opening] = {}
        self._retired: set[int] = set()
        self._unregistering: set[int] = set()
        self._log = get_logger(__name__)
        self.loop = Loop("kvxfer-control")
        self.service = PeerService(config, self.generation, self._table, self.loop)
        self._reaper = _Reaper(self.loop, min(REAP_S, config.tcp_idle_timeout_s / 2), self._reap)
        self._transports, self._refusals = self.service.transports, self.service.refusals
        try:
            self._listener = Listener(config, self.loop, self.service)
            self.address = self.service.address = self._advertise()
            self.name = self.service.name = config.name or self.address
            self._open_transports()
            self.loop.start()
        except BaseException:
            for transport in self._transports.values():
                transport.close()
            self.loop.close(config.close_timeout_s)
            if hasattr(self, "_listener"):
                self._listener.close()
            raise
        self._listener.start()
        _ENGINES.add(self)
        self._log.info("engine.started", address=self.address, transports=list(self._transports))

    # Life.

    def __repr__(self) -> str:
        state = "closed" if self._closed is not None else ", ".join(self._transports)
        return f"<TransferEngine {self.address}: {state}>"

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Say goodbye to all peers, end the threads, release everything. Bounded by close_timeout_s; tolerated twice.

        Batches still running fail with ClosedError. Arrays over allocated memory stay valid as long as they are held.
        """
        if self._pid != os.getpid():
            return  # the parent's engine is none of our business
        with self._lock:
            if self._closed is not None:
                return
            self._closed = ClosedError("the engine was closed.", remedy="Make a new TransferEngine.")
            segments = [*self._segments.values(), *(opening.segment for opening in self._opening.values())]
        for segment in segments:
            segment.close()
        self.service.close()
        for transport in self._transports.values():
            transport.close()
        self.loop.close(self.config.close_timeout_s)
        self._listener.close()
        for memory in self._allocated.values():
            memory.close()
        _ENGINES.discard(self)
        self._log.info("engine.closed", address=self.address)

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports that work here, in order of preference."""
        return tuple(self._transports)

    def probe(self) -> list[Probe]:
        """Say of each wanted transport whether it works on this machine, and if not why and what to do."""
        return [self._refusals.get(name) or TRANSPORTS[name].probe(self.config) for name in self.config.transports]

    # Memory.

    def allocate(self, nbytes: int, *, name: str = "", rights: Rights = Rights.ALL) -> Region:
        """Return new registered memory that peers on this host can map: page-aligned, zeroed, `Region.array` is it.

        Raises AllocationError where there is not so much memory.
        """
        self._check()
        _check_rights(rights, name)
        memory = SharedMemory(nbytes, label="kvxfer")
        shm = self._transports.get("shm")
        if isinstance(shm, ShmTransport):
            shm.share(memory)
        try:
            view = BufferView(memory.address, memory.nbytes, read_only=False, owner=memory.array, kind="shared")
            region = self._register(view, name, rights)
        except BaseException:
            self._free(memory)
            raise
        with self._lock:
            self._allocated[region.region_id] = memory
        return region

    def register(self, memory: Any, *, name: str = "", rights: Rights = Rights.ALL) -> Region:
        """Make memory of the caller's available to transfers and, with `rights`, to peers.

        memory: a bytes-like object, mmap, numpy array, CPU torch tensor, anything with `__array_interface__` or DLPack
        on the CPU, or `(address, nbytes)`; contiguous. It is kept alive until `unregister`.
        The equal range may be registered again and then counts: unregister it as often. Any other overlap is refused.

        Raises MemoryArgumentError, RegionOverlapError, or UsageError for a name or rights that do not fit.
        """
        self._check()
        _check_rights(rights, name)
        view = buffer_view(memory)
        if view.kind == "address":
            _check_mapped(view)
        return self._register(view, name, rights)

    def unregister(self, region: Region) -> None:
        """Take a region back. When this returns no peer reads or writes it any more, and none can begin to.

        New transfers are refused at once; those of peers that run are waited for, for unregister_timeout_s.

        Raises RegionBusyError while batches of this process use the region (nothing has changed then), or when peers
        did not let go in time (call again; no new transfer can begin); ClosedError if it is unregistered already.
        """
        self._check()
        if not isinstance(region, Region) or not self._table.owns(region):
            raise UsageError(
                f"{region!s:.120} is not a region of this engine.",
                remedy="Pass what this engine's register or allocate returned.",
            )
        with self._lock:
            if region.region_id in self._unregistering:
                raise RegionBusyError(
                    f"{region} is being unregistered by another call.",
                    remedy="Wait for that call.",
                    region_id=region.region_id,
                )
            self._unregistering.add(region.region_id)
        try:
            self._unregister(region)
        finally:
            with self._lock:
                self._unregistering.discard(region.region_id)

    def _unregister(self, region: Region) -> None:
        if region.region_id not in self._retired:
            if not self._table.retire(region.region_id):
                return
            self._retired.add(region.region_id)
        deadline = time.monotonic() + self.config.unregister_timeout_s
        holders = self.service.take_back(region, deadline)
        if not self._table.wait_idle(region, max(0.0, deadline - time.monotonic())):
            holders.append(f"{region.remote_use_count} requests over tcp")
        if holders:
            raise RegionBusyError(
                f"{region} is still used by {', '.join(holders)} after {self.config.unregister_timeout_s:g} s.",
                remedy="The memory must not be freed yet. Call unregister again when these peers have answered, ended "
                "or been killed; no new transfer can begin meanwhile.",
                region_id=region.region_id,
                peers=tuple(holders),
            )
        self._retired.discard(region.region_id)
        for transport_name, keys in region.keys.items():
            self._transports[transport_name].deregister(region.address, region.nbytes, keys)
        self._table.forget(region)
        with self._lock:
            memory = self._allocated.pop(region.region_id, None)
        if memory is not None:
            self._free(memory)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions registered here, ascending in address."""
        return self._table.snapshot().regions

    # Peers.

    def open_segment(self, address: str, *, transports: Sequence[str] | None = None) -> Segment:
        """Connect to the engine at `address` ("host:port", its `engine.address`) and return its memory.

        transports: only these, in this order; None for the engine's own. Calls for one address share one connection,
        and a segment that is open already is returned again.

        Raises PeerUnreachableError, HandshakeTimeoutError, AuthenticationError, PeerRefusedError, or
        TransportUnavailableError when no wanted transport reaches the peer; each says why.
        """
        self._check()
        target = parse_host_port(address)
        wanted = self.config.transports if transports is None else EngineConfig.check_transports(transports)
        key = (format_host_port(target.host, target.port), tuple(wanted))
        with self._lock:
            segment = self._segments.get(key)
            if segment is not None and not segment.is_open:
                segment = None
            opening = self._opening.get(key)
            is_leader = segment is None and opening is None
            if is_leader:
                opening = self._opening[key] = _Opening(Segment(self, self._table, target, tuple(wanted)))
        if segment is not None:
            try:
                segment.session()
            except PeerRestartedError:  # void now, and forgotten: who opens wants the process that is there
                return self.open_segment(address, transports=transports)
            return segment
        assert opening is not None
        if is_leader:
            try:
                opening.segment.session()
                opening.is_open = True
            except KvxferError as exc:
                opening.error = exc
            finally:
                with self._lock:
                    del self._opening[key]
                    if opening.is_open and opening.segment.is_open:
                        self._segments[key] = opening.segment
                opening.is_over.set()
            self._reaper.start()
        return opening.result()

    # Transfers.

    def submit_write(
        self,
        segment: Segment,
        local: Addresses,
        remote: Addresses,
        nbytes: Addresses,
        *,
        notify: bytes | None = None,
        timeout_s: float | None = None,
    ) -> TransferBatch:
        """Write rows of local memory to the peer's; returns at once with the batch that will do it.

        local, remote, nbytes: three columns of one length, absolute addresses and byte counts; plain ints for one row,
        and one int as `nbytes` for all rows alike. Each row lies in one region on either side. Rows may be done in any
        order. notify: bytes that the peer's `notifications` shows once, after all rows are in place, or never.
        timeout_s: the deadline, from now; None for transfer_timeout_s.

        Raises NotRegisteredError or AccessDeniedError naming the row, before anything is sent.
        """
        return self._submit(Opcode.WRITE, segment, local, remote, nbytes, notify, timeout_s)

    def submit_read(
        self,
        segment: Segment,
        local: Addresses,
        remote: Addresses,
        nbytes: Addresses,
        *,
        notify: bytes | None = None,
        timeout_s: float | None = None,
    ) -> TransferBatch:
        """Read rows of the peer's memory into local memory; as `submit_write`."""
        return self._submit(Opcode.READ, segment, local, remote, nbytes, notify, timeout_s)

    def write(
        self,
        segment: Segment,
        local: Addresses,
        remote: Addresses,
        nbytes: Addresses,
        *,
        notify: bytes | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """`submit_write` and wait; raises what made it fail. One short row in plain ints takes the shortest way."""
        if notify is not None or not self._copy_row(Opcode.WRITE, segment, local, remote, nbytes):
            self._submit(Opcode.WRITE, segment, local, remote, nbytes, notify, timeout_s).wait()

    def read(
        self,
        segment: Segment,
        local: Addresses,
        remote: Addresses,
        nbytes: Addresses,
        *,
        notify: bytes | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """`submit_read` and wait; raises what made it fail. One short row in plain ints takes the shortest way."""
        if notify is not None or not self._copy_row(Opcode.READ, segment, local, remote, nbytes):
            self._submit(Opcode.READ, segment, local, remote, nbytes, notify, timeout_s).wait()

    def write_blocks(
        self,
        segment: Segment,
        src_region: Region,
        src_ids: Addresses,
        dst_region: RegionDescriptor | str,
        dst_ids: Addresses,
        *,
        block_nbytes: int,
        notify: bytes | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Write blocks of a local region to blocks of a peer's region, by block number, and wait.

        Block i of a region is its bytes [i * block_nbytes, (i + 1) * block_nbytes).
        """
        _check_local(src_region)
        there = segment.region(dst_region) if isinstance(dst_region, str) else dst_region
        local = block_addresses("src_ids", src_region, src_ids, block_nbytes)
        remote = block_addresses("dst_ids", there, dst_ids, block_nbytes)
        self.write(segment, local, remote, block_nbytes, notify=notify, timeout_s=timeout_s)

    def read_blocks(
        self,
        segment: Segment,
        dst_region: Region,
        dst_ids: Addresses,
        src_region: RegionDescriptor | str,
        src_ids: Addresses,
        *,
        block_nbytes: int,
        notify: bytes | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Read blocks of a peer's region into blocks of a local region, by block number, and wait."""
        _check_local(dst_region)
        there = segment.region(src_region) if isinstance(src_region, str) else src_region
        local = block_addresses("dst_ids", dst_region, dst_ids, block_nbytes)
        remote = block_addresses("src_ids", there, src_ids, block_nbytes)
        self.read(segment, local, remote, block_nbytes, notify=notify, timeout_s=timeout_s)

    def wait_all(self, batches: Sequence[TransferBatch], timeout_s: float | None = None) -> None:
        """Move several batches at once to their end; raises the first failure, after all have ended."""
        wait_all(list(batches), timeout_s)

    def notifications(self, timeout_s: float = 0.0, *, peer: str | None = None) -> list[Notification]:
        """Return and forget what has come in, oldest first; waits up to `timeout_s` for something.

        peer: only what this one sent, and hear of its end: a `Notification.peer`, which is the engine at that address,
        or a `Notification.generation`, which is one process and no other that is started in its place. A peer that has
        not opened this engine yet is waited for.

        Raises PeerClosedError as soon as the peer's connections have ended, or at once if they had, and nothing of it
        is unread. The last 1024 that have gone are remembered. Without `peer` nobody's end is told.
        """
        self._check()
        if peer is not None and not (isinstance(peer, str) and peer):
            raise UsageError(
                f"peer is {peer!r:.80}.",
                remedy="Pass the peer's engine.address or engine.generation, as a Notification has them.",
            )
        return self.service.notifications.take(timeout_s, peer)

    # For segments and the listener.

    def transport(self, name: str) -> Transport:
        """Return a working transport; raises TransportUnavailableError with what its probe said."""
        found = self._transports.get(name)
        if found is None:
            probe = self._refusals.get(name) or TRANSPORTS[name].probe(self.config)
            raise TransportUnavailableError(probe.reason, remedy=probe.remedy, reasons={name: probe.reason})
        return found

    def is_default_order(self, transports: tuple[str, ...]) -> bool:
        """Whether these transports are nobody's explicit choice, so that passing one over is not worth a warning."""
        return transports == TRANSPORT_NAMES

    def _reap(self, now: float) -> bool:
        """Close what is idle; whether there are segments at all."""
        with self._lock:
            segments = list(self._segments.values())
        for segment in segments:
            segment.reap(now)
        return bool(segments)

    def forget_segment(self, segment: Segment) -> None:
        """A segment is closed or void."""
        with self._lock:
            self._segments = {key: one for key, one in self._segments.items() if one is not segment}

    # Inside.

    def _check(self) -> None:
        if self._closed is not None:
            raise self._closed.with_traceback(None)

    def _advertise(self) -> str:
        config = self.config
        if config.advertise_host:
            return _advertised(config.advertise_host, self._listener.port)
        host, reason, warnings = choose_advertised_host(
            config.host, list_interfaces(), default_route_host(self._listener.family)
        )
        for warning in warnings:
            self._log.warning("engine.address_unsure", address=host, reason=reason, warning=warning)
        return format_host_port(host, self._listener.port)

    def _open_transports(self) -> None:
        makers: dict[str, Callable[[], Transport]] = {
            "shm": lambda: ShmTransport(self.config, self.loop, self.generation),
            "rdma": lambda: RdmaTransport(self.config, self.loop),
            "tcp": lambda: TcpTransport(self.config, self.service),
        }
        for name in self.config.transports:
            probe = TRANSPORTS[name].probe(self.config)
            if probe.usable:
                self._transports[name] = makers[name]()
            else:
                self._refusals[name] = probe
                was_asked_for = name == "rdma" and self.config.rdma_devices is not None
                tell = self._log.warning if was_asked_for else self._log.debug
                tell("transport.unusable", transport=name, reason=probe.reason)
        if not self._transports:
            reasons = {name: probe.reason for name, probe in self._refusals.items()}
            remedies = " ".join(probe.remedy for probe in self._refusals.values() if probe.remedy)
            raise TransportUnavailableError(
                f"none of the wanted transports works on this machine. {join_reasons(reasons)}.",
                remedy=remedies,
                reasons=reasons,
            )

    def _register(self, view: BufferView, name: str, rights: Rights) -> Region:
        reserved = self._table.reserve(view, name, rights)
        if isinstance(reserved, Region):
            return reserved
        keys: dict[str, dict[str, Any]] = {}
        with reserved:
            try:
                for transport_name, transport in self._transports.items():
                    keys[transport_name] = transport.register(
                        view.address, view.nbytes, rights=rights, read_only=view.read_only
                    )
                return reserved.commit(keys)
            except BaseException:
                for transport_name, key in keys.items():
                    self._transports[transport_name].deregister(view.address, view.nbytes, key)
                raise

    def _free(self, memory: SharedMemory) -> None:
        shm = self._transports.get("shm")
        if isinstance(shm, ShmTransport):
            shm.unshare(memory)
        memory.close()

    def _copy_row(
        self, opcode: Opcode, segment: Segment, local: Addresses, remote: Addresses, nbytes: Addresses
    ) -> bool:
        return (
            type(local) is int
            and type(remote) is int
            and type(nbytes) is int
            and nbytes <= ROW_NBYTES
            and self._closed is None
            and isinstance(segment, Segment)
            and segment.engine is self
            and segment.copy_row(opcode, local, remote, nbytes)
        )

    def _submit(
        self,
        opcode: Opcode,
        segment: Segment,
        local: Addresses,
        remote: Addresses,
        nbytes: Addresses,
        notify: bytes | None,
        timeout_s: float | None,
    ) -> TransferBatch:
        self._check()
        if not isinstance(segment, Segment):
            raise UsageError(
                f"the segment is a {type(segment).__name__}.", remedy="Pass what open_segment returned, first of all."
            )
        if segment.engine is not self:
            raise UsageError(
                f"the segment {segment.address} was opened by another engine of this process.",
                remedy="Use the engine that opened it, or open the address with this one.",
            )
        if notify is not None:
            _check_notify(notify, self.config.notify_nbytes_max)
        started = time.monotonic()
        deadline = started + (self.config.transfer_timeout_s if timeout_s is None else timeout_s)
        transfer, endpoint = plan(self._table, opcode, segment, local, remote, nbytes, notify, deadline)
        try:
            batch = TransferBatch(segment, endpoint, transfer, started, deadline)
            batch.start()
        except BaseException as exc:  # Ctrl-C before anybody has the batch
            if not transfer.finished:
                with transfer.lock:
                    endpoint.abort(transfer, time.monotonic() + GIVE_UP_S)
                    transfer.finish(TransferCancelledError(f"the submit was interrupted: {exc!r}."))
            raise
        return batch

    def _abandon(self) -> None:
        """In a forked child: every call raises from now on; the copies of the descriptors are closed, so that peers see
        the parent's end when it ends."""
        self._closed = ForkedError(
            f"this engine belongs to process {self._pid}; this is process {os.getpid()}, forked from it.",
            remedy="Make the TransferEngine in the process that uses it, after the fork, or start processes with "
            "multiprocessing's 'spawn'.",
            owner_pid=self._pid,
            pid=os.getpid(),
        )
        with contextlib.suppress(Exception):
            self._listener.abandon()
            self.service.abandon()
            for segment in self._segments.values():
                segment.abandon(self._closed)
            for transport in self._transports.values():
                transport.abandon()
            for memory in self._allocated.values():
                memory.close()
            self.loop.abandon()


def _advertised(host: str, port: int) -> str:
    """Return the address told to peers; raises ConfigError for a host that no peer could use."""
    text = format_host_port(host, port)
    try:
        if parse_host_port(text).host == host and not is_wildcard(host):
            return text
    except ConfigError:
        pass
    raise ConfigError(
        f"advertise_host is {host!r}; peers are told it as their way here.",
        remedy="Use a name, or an address such as 192.0.2.10 or 2001:db8::1: no brackets, no port, no wildcard.",
        setting="advertise_host",
        value=host,
    )


def _check_rights(rights: object, name: object) -> None:
    if not isinstance(rights, Rights):
        raise UsageError(
            f"rights is {rights!r}.",
            remedy="Use kvxfer.Rights.NONE, REMOTE_READ, REMOTE_WRITE or ALL.",
            rights=repr(rights),
        )
    if not isinstance(name, str) or len(name) > NAME_LENGTH_MAX or not (name.isprintable() or not name):
        raise UsageError(
            f"name is {name!r:.80}.",
            remedy=f"Use printable text of at most {NAME_LENGTH_MAX} characters.",
            name=repr(name),
        )


def _check_local(region: object) -> None:
    if not isinstance(region, Region):
        raise UsageError(
            f"the local region is a {type(region).__name__}.",
            remedy="Pass the Region that register or allocate returned; only the peer's region may be given by name.",
        )


def _check_mapped(view: BufferView) -> None:
    """Raise MemoryArgumentError where an address given as numbers is none of this process: copying would kill it."""
    for address in (view.address, view.end - 1):
        if not is_readable(address):
            raise MemoryArgumentError(
                f"({view.address:#x}, {view.nbytes}): there is no memory at {address:#x} in this process.",
                remedy="Check the address and the size; register memory before it is freed.",
                address=view.address,
                nbytes=view.nbytes,
            )


def _check_notify(notify: bytes, nbytes_max: int) -> None:
    if not isinstance(notify, bytes):
        raise UsageError(
            f"notify is a {type(notify).__name__}; it must be bytes.",
            remedy="Encode text first: notify=text.encode().",
        )
    if len(notify) > nbytes_max:
        raise UsageError(
            f"a notification of {len(notify)} bytes; notify_nbytes_max is {nbytes_max}.",
            remedy="Send large data as rows of the batch, or raise notify_nbytes_max on both sides.",
            nbytes=len(notify),
        )


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


_ENGINES: weakref.WeakSet[TransferEngine] = weakref.WeakSet()
"""The open engines of this process: closed at exit, abandoned in a forked child."""


def _close_engines() -> None:
    for engine in list(_ENGINES):
        engine.close()


def _abandon_engines() -> None:
    for engine in list(_ENGINES):
        engine._abandon()


# Before Python waits for the threads that are no daemons, not after: one that waits for a batch ends that way. What
# concurrent.futures uses for the same reason; where it is missing, atexit has to do.
getattr(threading, "_register_atexit", atexit.register)(_close_engines)
os.register_at_fork(after_in_child=_abandon_engines)
