"""The peers of a drop-in engine, by the names that callers give: kvxfer engines, and real Mooncake processes.

`Targets.find` asks a name's process, or the metadata server, what it is. A kvxfer engine is reached natively, any other
by Mooncake's wire. What went wrong at a peer makes it be looked up anew at the next call: another process may be there.
Read next: `mooncake_engine.py`, `kvxfer/mooncake_peer.py`.
"""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

import numpy as np

from kvxfer import (
    NotRegisteredError,
    Opcode,
    PeerError,
    PeerRestartedError,
    PeerUnreachableError,
    Region,
    RegionDescriptor,
    Segment,
    TransferBatch,
    TransferEngine,
)
from kvxfer.addresses import HostPort, format_host_port, parse_host_port
from kvxfer.compat.mooncake_arguments import Rows
from kvxfer.compat.mooncake_codes import Code
from kvxfer.compat.mooncake_memory import BufferPool, copy_rows
from kvxfer.compat.mooncake_settings import P2P
from kvxfer.mooncake.descriptor import SegmentDescriptor
from kvxfer.mooncake.frames import pack_notify
from kvxfer.mooncake_calls import open_connection
from kvxfer.mooncake_peer import MooncakePeer, send_notify
from kvxfer.types import AddressColumn

if TYPE_CHECKING:
    from kvxfer.mooncake_directory import Directory

__all__ = ["Target", "Targets", "Ticket"]

SENDER_THREADS_MAX = 16
"""Asynchronous batches to real Mooncake processes that move at once; further ones wait for their turn."""

UNUSED_S = 60.0  # as tcp_idle_timeout_s: how long connections to a real Mooncake are kept for nothing

Notify = tuple[str, str]


class Ticket(ABC):
    """One submitted transfer."""

    @abstractmethod
    def poll(self) -> bool:
        """Move it as far as that does not block; whether it has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Move it to its end; raises what made it fail."""


class DoneTicket(Ticket):
    """A transfer that had ended when it was submitted: nothing was to be done, or it could not be."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


class BatchTicket(Ticket):
    """A batch of the native engine. finish: what is to be done once after its end; told whether it went well."""

    def __init__(self, batch: TransferBatch, finish: Callable[[bool], None] | None) -> None:
        self.batch = batch
        self._finish = finish
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def poll(self) -> bool:
        if not self.batch.poll():
            return False
        self._end()
        return True

    def wait(self) -> None:
        try:
            self.batch.wait()
        finally:
            self._end()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    finish(self.batch.exception is None)
                except Exception as error:
                    self._error = error


class FutureTicket(Ticket):
    """A transfer to a real Mooncake, moved by a thread of its own."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def poll(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class Target(ABC):
    """One peer. waits_until: when the last transfer that was begun has ended at the latest (monotonic seconds)."""

    waits_until = 0.0

    @abstractmethod
    def transfer(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> None:
        """Move the rows, at least one, and wait; raises what made it fail, finally."""

    @abstractmethod
    def submit(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> Ticket:
        """Begin to move the rows."""

    @abstractmethod
    def first_address(self) -> int:
        """Return where the peer's first region begins; 0 where it has none."""

    def is_unused(self, now: float) -> bool:
        """Whether it is not worth being kept: the process is gone, or it has not been used for long."""
        return False

    def close(self) -> None:  # noqa: B027  not every kind has connections of its own
        """Let go of the connections."""


class NativeTarget(Target):
    """A kvxfer engine."""

    def __init__(self, engine: TransferEngine, staging: BufferPool, address: str) -> None:
        self._engine = engine
        self._staging = staging
        self._at = parse_host_port(address)
        self._address = address
        self._segment: Segment | None = None

    def transfer(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> None:
        if notify is None and rows.count == 1:
            self.waits_until = max(self.waits_until, time.monotonic() + timeout_s)
            move = self._engine.write if opcode is Opcode.WRITE else self._engine.read
            try:
                move(self.segment(), rows.local, rows.remote, rows.nbytes, timeout_s=timeout_s)
                return
            except (NotRegisteredError, PeerRestartedError) as error:
                if not _may_try_again(error):
                    raise
        self.submit(opcode, rows, notify, timeout_s).wait()

    def submit(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> BatchTicket:
        self.waits_until = max(self.waits_until, time.monotonic() + timeout_s)
        payload = None if notify is None else pack_notify(*notify)
        submit = self._engine.submit_write if opcode is Opcode.WRITE else self._engine.submit_read
        for is_last in (False, True):
            segment = self.segment()
            try:
                batch = submit(segment, rows.local, rows.remote, rows.nbytes, notify=payload, timeout_s=timeout_s)
                return BatchTicket(batch, None)
            except (NotRegisteredError, PeerRestartedError) as error:
                if not _may_try_again(error):
                    raise
                if isinstance(error, PeerRestartedError) and not is_last:
                    continue  # nothing was sent; the process that is there now is asked for its regions
                if isinstance(error, PeerRestartedError):
                    raise
                break
        staged = _Staged(self._engine, self._staging, opcode, rows)
        try:
            batch = submit(segment, staged.local, rows.remote, rows.nbytes, notify=payload, timeout_s=timeout_s)
        except BaseException:
            staged.finish(False)
            raise
        return BatchTicket(batch, staged.finish)

    def first_address(self) -> int:
        segment = self.segment()
        segment.refresh()
        return _first_address(segment.regions)

    def is_unused(self, now: float) -> bool:
        segment = self._segment
        return segment is not None and not segment.is_connected and now > self.waits_until

    def close(self) -> None:
        segment = self._segment
        if segment is not None and not segment.is_connected:
            segment.close()

    def segment(self) -> Segment:
        """Return the open segment; a peer that is gone is told at once, as Mooncake does, not after the time that the
        native engine gives a peer to come back."""
        segment = self._segment
        if segment is None or not segment.is_connected:
            deadline = time.monotonic() + self._engine.config.connect_timeout_s
            open_connection(self._at.host, self._at.port, deadline=deadline).close()
            segment = self._segment = self._engine.open_segment(self._address)
        return segment


def _first_address(regions: Sequence[Region | RegionDescriptor]) -> int:
    """Return the address of what was registered first."""
    first = min(regions, key=lambda region: region.region_id, default=None)
    return 0 if first is None or not first.rights else first.address


def _may_try_again(error: NotRegisteredError | PeerRestartedError) -> bool:
    return isinstance(error, PeerRestartedError) or error.values.get("side") == "local"


class _Staged:
    """Rows whose local memory is not registered, in a registered place.

    Mooncake's tcp takes any local memory. Here the bytes go by way of a place that is registered, which is right over
    every transport, costs one copy more, and cannot crash where the memory is none.
    """

    def __init__(self, engine: TransferEngine, pool: BufferPool, opcode: Opcode, rows: Rows) -> None:
        local, _, nbytes = rows.columns()
        starts = np.array([region.address for region in engine.regions], np.int64)
        ends = np.array([region.end for region in engine.regions], np.int64)
        index = starts.searchsorted(local, "right") - 1
        is_staged = (index < 0) | (local + nbytes > ends[index]) if len(starts) else np.ones(len(local), bool)
        self._pool = pool
        self._rows: AddressColumn = local[is_staged]
        self._nbytes: AddressColumn = nbytes[is_staged]
        self._copies_back = opcode is Opcode.READ
        self._place = pool.allocate(int(self._nbytes.sum()))
        self._staged = self._place + np.cumsum(self._nbytes) - self._nbytes
        self.local = local.astype(np.int64)
        self.local[is_staged] = self._staged
        try:
            if opcode is Opcode.WRITE:
                copy_rows(self._staged, self._rows, self._nbytes)
        except BaseException:
            self.finish(False)
            raise

    def finish(self, is_good: bool) -> None:
        """Bring what was read to where it belongs, and give the place back."""
        try:
            if is_good and self._copies_back:
                copy_rows(self._rows, self._staged, self._nbytes)
        finally:
            self._pool.free(self._place)


class OwnTarget(Target):
    """This very engine: a copy within the process, checked as a peer's request is."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def transfer(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> None:
        local, remote, nbytes = rows.columns()
        let_go = self._engine.service.admit(opcode, remote, nbytes)
        try:
            copy_rows(*((remote, local) if opcode is Opcode.WRITE else (local, remote)), nbytes)
        finally:
            let_go()
        if notify is not None:
            self._engine.service.notify(self._engine.address, pack_notify(*notify))

    def submit(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> DoneTicket:
        self.transfer(opcode, rows, notify, timeout_s)
        return DoneTicket()

    def first_address(self) -> int:
        return _first_address(self._engine.regions)


class MooncakeTarget(Target):
    """A real Mooncake process."""

    def __init__(self, peer: MooncakePeer, at: HostPort, senders: _Senders) -> None:
        self._peer = peer
        self._at = at
        self._senders = senders

    def transfer(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self.waits_until = max(self.waits_until, deadline)
        self._peer.transfer(opcode, rows.local, rows.remote, rows.nbytes, deadline=deadline)
        if notify is not None:
            send_notify(self._at.host, self._at.port, *notify, deadline=deadline)

    def submit(self, opcode: Opcode, rows: Rows, notify: Notify | None, timeout_s: float) -> FutureTicket:
        return FutureTicket(self._senders.submit(lambda: self.transfer(opcode, rows, notify, timeout_s)))

    def is_unused(self, now: float) -> bool:
        return now > self.waits_until + UNUSED_S

    def first_address(self) -> int:
        buffers = self._peer.descriptor.buffers
        return buffers[0].address if buffers else 0

    def close(self) -> None:
        self._peer.close()


class _Senders:
    """The threads of asynchronous batches to real Mooncake processes, from the first such batch on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Have a thread do it."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(SENDER_THREADS_MAX, thread_name_prefix="kvxfer-mooncake")
            return self._pool.submit(work)

    def close(self) -> None:
        """Take no more; those that run end by their deadline, or because their peer was closed."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)


class Targets:
    """Every peer of one engine. All methods may be called from any thread."""

    def __init__(self, engine: TransferEngine, directory: Directory, staging: BufferPool) -> None:
        self._engine = engine
        self._directory = directory
        self._staging = staging
        self._lock = threading.Lock()
        self._targets: dict[str, Target] = {}
        self._left: list[Target] = []
        self._senders = _Senders()

    def find(self, name: str) -> Target:
        """Return the peer of that name; raises a PeerError or ConfigError that says why there is none."""
        target = self._targets.get(name)
        if target is not None:
            return target
        config = self._engine.config
        made = self._open(name, time.monotonic() + config.connect_timeout_s + config.handshake_timeout_s)
        now = time.monotonic()
        with self._lock:
            # A fleet that changes leaves nothing behind; what another thread may still use is not closed.
            unused = [self._targets.pop(its) for its, one in list(self._targets.items()) if one.is_unused(now)]
            unused += [one for one in self._left if now > one.waits_until]
            self._left = [one for one in self._left if one not in unused]
            target = self._targets.setdefault(name, made)
        if target is not made:
            unused.append(made)
        for one in unused:
            one.close()
        return target

    def control_of(self, name: str, deadline: float) -> HostPort:
        """Return where the process of that name takes control messages; its host resolves."""
        at = self._directory.find_control(name, deadline=deadline)
        check_name(at, deadline)
        return at

    def forget_after(self, name: str, error: BaseException) -> None:
        """What a failed transfer says about the peer: it is looked up anew where another process may be there."""
        if isinstance(error, PeerError):
            with self._lock:
                target = self._targets.pop(name, None)
                if target is not None:
                    self._left.append(target)

    def close(self) -> None:
        """Let go of all."""
        with self._lock:
            targets = [*self._targets.values(), *self._left]
            self._targets, self._left = {}, []
        for target in targets:
            target.close()
        self._senders.close()

    def _open(self, name: str, deadline: float) -> Target:
        at = self.control_of(name, deadline)
        descriptor = self._directory.find(name, deadline=deadline)
        try:
            if descriptor.kvxfer is None:
                return self._open_mooncake(name, descriptor, at)
            if descriptor.kvxfer.generation == self._engine.generation:
                return OwnTarget(self._engine)
            # Where a name is an address it is the way that the caller knows; the mark's may be another network's.
            address = name if self._directory.server == P2P else descriptor.kvxfer.address
            target = NativeTarget(self._engine, self._staging, address)
            target.segment()
            return target
        except PeerError as error:
            hint = self._directory.stale_hint(descriptor)
            raise type(error)(error.message, remedy=f"{error.remedy} {hint}".strip(), **error.values) from error

    def _open_mooncake(self, name: str, descriptor: SegmentDescriptor, at: HostPort) -> MooncakeTarget:
        def refresh() -> SegmentDescriptor:
            timeout_s = self._engine.config.handshake_timeout_s
            return self._directory.find(name, deadline=time.monotonic() + timeout_s)

        peer = MooncakePeer(name, descriptor, config=self._engine.config, refresh=refresh)
        return MooncakeTarget(peer, at, self._senders)


def check_name(at: HostPort, deadline: float) -> None:
    """Raise PeerUnreachableError, with Mooncake's code for it, where the host name is none, or nobody says so in time:
    a resolver may take half a minute."""
    try:
        socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return
    except (socket.gaierror, UnicodeError):
        pass
    found: Future[object] = Future()

    def ask() -> None:
        try:
            found.set_result(socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM))
        except Exception as exc:
            found.set_exception(exc)

    threading.Thread(target=ask, daemon=True, name="kvxfer-resolve").start()
    try:
        found.result(max(0.001, deadline - time.monotonic()))
    except (OSError, UnicodeError, FutureTimeoutError) as exc:
        raise PeerUnreachableError(
            f"the host name {at.host!r} does not resolve: {str(exc) or 'no answer in time'}.",
            remedy="Check the spelling, /etc/hosts and DNS, or use the IP address.",
            peer=format_host_port(at.host, at.port),
            mooncake_code=Code.DNS,
        ) from exc
