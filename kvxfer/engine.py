"""TransferEngine: registers memory, opens peers, submits batches. What its user holds; what runs is `runtime.py`.

Read next: `segment.py` (a peer), `batch.py` (a submitted batch), `transports/base.py` (what carries it).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kvxfer.addresses import parse_host_port
from kvxfer.batch import TransferBatch, check_timeout, wait_all
from kvxfer.config import EngineConfig
from kvxfer.errors import ConfigError, TransferCancelledError, UsageError
from kvxfer.memory import Region
from kvxfer.notifications import Notification
from kvxfer.planning import Addresses, block_addresses, check_block_counts, plan
from kvxfer.runtime import Runtime
from kvxfer.segment import Segment
from kvxfer.text import name_kind, show
from kvxfer.types import Opcode, Probe, RegionDescriptor, Rights

__all__ = ["TransferEngine"]


GIVE_UP_S = 0.25
"""How long an interrupted submit waits for the peer to say that it has let go."""
GENERATION = re.compile("[0-9a-f]{32}")
ROW_NBYTES = 64 << 10
"""One row up to this is worth the shortest way: about 5 us of copying under the region table's guard."""


class TransferEngine:
    """One side of all transfers of this process. A context manager; all methods may be called from any thread.

    settings: those of `EngineConfig`, by name. What is not given comes from the environment (`KVXFER_` and the name),
    then from the default; `EngineConfig.settings()` and docs/settings.md list all. The commonest:

    host, port: where to listen ("127.0.0.1", 0); port 0 takes any free one. advertise_host: what peers are told instead
    of `host`. transports: in order of preference ("shm", "rdma", "tcp"). key: secret of at least 8 bytes that both
    sides share. name: what peers call this engine in their logs. rdma_devices: such as "mlx5_0:1,mlx5_1".
    transfer_timeout_s, connect_timeout_s: deadlines of a batch (30) and of connecting (5), in seconds.

    One that is lost without `close` is told by a ResourceWarning, and serves its peers until the process ends, which
    closes it.

    Raises ConfigError for a setting that cannot be meant, TransportUnavailableError if none of the wanted transports
    works on this machine, ResourceLimitError where there is no file descriptor or thread left for it.
    """

    def __init__(self, **settings: Any) -> None:
        self._runtime = runtime = Runtime(EngineConfig.resolve(**settings))
        # What runs, for the rest of the package; where each transfer passes, without a step between.
        self._config, self._service, self._loop = runtime.config, runtime.service, runtime.loop
        self._transports, self._segments, self._table = runtime.transports, runtime.segments, runtime.table

    # Life.

    def __repr__(self) -> str:
        return str(self._runtime)

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        runtime = getattr(self, "_runtime", None)  # none where it could not be started
        if runtime is not None:
            runtime.warn_if_open(self)

    def close(self) -> None:
        """Say goodbye to all peers, end the threads, release everything. Bounded by close_timeout_s; tolerated twice.

        Batches still running fail with ClosedError. Arrays over allocated memory stay valid as long as they are held.
        """
        self._runtime.close()

    @property
    def config(self) -> EngineConfig:
        """The settings in force."""
        return self._config

    @property
    def address(self) -> str:
        """Where peers open this engine: "host:port"."""
        return self._service.address

    @property
    def name(self) -> str:
        """What peers call this engine in their logs: the setting `name`, else the address."""
        return self._service.name

    @property
    def generation(self) -> str:
        """A random text of this engine alone: one that is started anew at the same address has another."""
        return self._service.generation

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports that work here, in order of preference."""
        return tuple(self._transports)

    def probe(self) -> list[Probe]:
        """Say of each wanted transport whether it works on this machine, and if not why and what to do."""
        return self._transports.probe()

    # Memory.

    def allocate(self, nbytes: int, *, name: str = "", rights: Rights = Rights.ALL) -> Region:
        """Return new registered memory that peers on this host can map: page-aligned, zeroed, `Region.array` is it.

        Raises AllocationError where there is not so much memory, ResourceLimitError where no file descriptor is left.
        """
        self._check()
        return self._runtime.registry.allocate(nbytes, name, rights)

    def register(self, memory: Any, *, name: str = "", rights: Rights = Rights.ALL) -> Region:
        """Make memory of the caller's available to transfers and, with `rights`, to peers.

        memory: a bytes-like object, mmap, numpy array, CPU torch tensor, anything with `__array_interface__` or DLPack
        on the CPU, or `(address, nbytes)`; contiguous. It is kept alive until `unregister`.
        The equal range may be registered again and then counts: unregister it as often. Any other overlap is refused.

        Raises MemoryArgumentError, RegionOverlapError, or UsageError for a name or rights that do not fit.
        """
        self._check()
        return self._runtime.registry.register(memory, name, rights)

    def unregister(self, region: Region) -> None:
        """Take a region back. When this returns no peer reads or writes it any more, and none can begin to.

        New transfers are refused at once; those of peers that run are waited for, for unregister_timeout_s.

        Raises RegionBusyError while batches of this process use the region (nothing has changed then), or when peers
        did not let go in time (call again; no new transfer can begin); ClosedError if it is unregistered already.
        """
        self._check()
        self._runtime.registry.unregister(region)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions registered here, ascending in address."""
        return self._table.snapshot().regions

    # Peers.

    def open_segment(self, address: str, *, transports: Sequence[str] | None = None) -> Segment:
        """Connect to the engine at `address` ("host:port", its `engine.address`) and return its memory.

        transports: only these, in this order; None for the engine's own. Calls for one address share one connection,
        and a segment that is open already is returned again.

        Raises PeerUnreachableError, HandshakeTimeoutError, AuthenticationError, PeerRefusedError,
        TransportUnavailableError when no wanted transport reaches the peer, or ResourceLimitError; each says why.
        """
        self._check()
        return self._segments.open(address, transports)

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

        Raises UsageError for an argument that is none, NotRegisteredError or AccessDeniedError naming the row, before
        anything is sent.
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
        if timeout_s is not None:  # the shortest way does not look at it
            check_timeout(timeout_s)
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
        if timeout_s is not None:  # the shortest way does not look at it
            check_timeout(timeout_s)
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
        there = self._find_regions(segment, src_region, dst_region)
        local = block_addresses("src_ids", src_region, src_ids, block_nbytes)
        remote = block_addresses("dst_ids", there, dst_ids, block_nbytes)
        check_block_counts(local, remote)
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
        there = self._find_regions(segment, dst_region, src_region)
        local = block_addresses("dst_ids", dst_region, dst_ids, block_nbytes)
        remote = block_addresses("src_ids", there, src_ids, block_nbytes)
        check_block_counts(remote, local)
        self.read(segment, local, remote, block_nbytes, notify=notify, timeout_s=timeout_s)

    def wait_all(self, batches: Sequence[TransferBatch], timeout_s: float | None = None) -> None:
        """Move several batches at once to their end; raises the first failure, after all have ended."""
        try:
            listed = list(batches)
        except TypeError:
            raise UsageError(f"batches is {show(batches)}.", remedy="Pass a list of batches.") from None
        wait_all(listed, timeout_s)

    def notifications(self, timeout_s: float = 0.0, *, peer: str | None = None) -> list[Notification]:
        """Return and forget what has come in, oldest first; waits up to `timeout_s` for something.

        peer: only what this one sent, and hear of its end: a `Notification.peer`, which is the engine at that address,
        or a `Notification.generation`, which is one process and no other that is started in its place. A peer that has
        not opened this engine yet is waited for.

        Raises PeerClosedError as soon as the peer's connections have ended, or at once if they had, and nothing of it
        is unread. The last 1024 that have gone are remembered. Without `peer` nobody's end is told.
        """
        self._check()
        if peer is not None:
            _check_peer(peer)
        return self._service.notifications.take(check_timeout(timeout_s), peer)

    # Inside.

    def _check(self) -> None:
        closed = self._runtime.closed
        if closed is not None:
            raise closed.with_traceback(None)

    def _find_regions(self, segment: object, here: object, there: object) -> RegionDescriptor:
        """Check what a call by block number was given; returns the peer's region."""
        if not isinstance(here, Region):
            raise UsageError(
                f"the local region is {show(here)}.",
                remedy="Pass the Region that register or allocate returned; only the peer's region may be given by "
                "name.",
            )
        if isinstance(there, RegionDescriptor):
            return there
        return self._check_segment(segment).region(there)  # type: ignore[arg-type]  # it says what is no name

    def _check_segment(self, segment: object) -> Segment:
        """Return a segment of this engine; raises UsageError for anything else."""
        if not isinstance(segment, Segment):
            raise UsageError(
                f"the segment is {show(segment)}.", remedy="Pass as the first argument what open_segment returned."
            )
        if segment._opener is not self._segments:
            raise UsageError(
                f"the segment {segment.address} was opened by another engine of this process.",
                remedy="Use the engine that opened it, or open the address with this one.",
            )
        return segment

    def _copy_row(
        self, opcode: Opcode, segment: Segment, local: Addresses, remote: Addresses, nbytes: Addresses
    ) -> bool:
        return (
            type(local) is int
            and type(remote) is int
            and type(nbytes) is int
            and nbytes <= ROW_NBYTES
            and isinstance(segment, Segment)
            and segment._opener is self._segments
            and segment._transfers.copy_row(opcode, local, remote, nbytes)
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
        self._check_segment(segment)
        if notify is not None:
            _check_notify(notify, self._config.notify_nbytes_max)
        started = time.monotonic()
        deadline = started + (self._config.transfer_timeout_s if timeout_s is None else check_timeout(timeout_s))
        transfer, endpoint = plan(self._table, opcode, segment._connection, local, remote, nbytes, notify, deadline)
        try:
            batch = TransferBatch(segment, endpoint, transfer, started, deadline)
            batch._start()
        except BaseException as exc:  # Ctrl-C before anybody has the batch
            if not transfer.finished:
                with transfer.lock:
                    endpoint.abort(transfer, time.monotonic() + GIVE_UP_S)
                    transfer.finish(TransferCancelledError(f"the submit was interrupted: {exc!r}."))
            raise
        return batch


def _check_peer(peer: object) -> None:
    """Raise UsageError for what no peer can be called by: nothing of it could ever come."""
    try:
        if not (isinstance(peer, str) and GENERATION.fullmatch(peer)):
            parse_host_port(peer)  # type: ignore[arg-type]  # it says what is no text
    except ConfigError:
        raise UsageError(
            f"peer is {show(peer)}: neither an address (host:port) nor a generation (32 hexadecimal digits).",
            remedy="Pass the peer's engine.address or engine.generation, as a Notification has them.",
        ) from None


def _check_notify(notify: bytes, nbytes_max: int) -> None:
    if not isinstance(notify, bytes):
        raise UsageError(
            f"notify is {name_kind(notify)}; it must be bytes.",
            remedy="Encode text first: notify=text.encode().",
        )
    if len(notify) > nbytes_max:
        raise UsageError(
            f"a notification of {len(notify)} bytes; notify_nbytes_max is {nbytes_max}.",
            remedy="Send large data as rows of the batch, or raise notify_nbytes_max on both sides.",
            nbytes=len(notify),
        )
