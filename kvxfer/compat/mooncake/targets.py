"""The peers of a drop-in engine, by the names that callers give: kvxfer engines, and real Mooncake processes.

`Targets.find` asks a name's process, or the metadata server, what it is. A kvxfer engine is reached natively, any other
by Mooncake's wire. What went wrong at a peer makes it be looked up anew at the next call: another process may be there.
Read next: `target.py`, `kvxfer/mooncake/peer.py`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from kvxfer import (
    PeerError,
    PeerUnreachableError,
    TransferEngine,
    TransferError,
    TransportUnavailableError,
)
from kvxfer.addresses import HostPort, format_host_port
from kvxfer.compat.mooncake.codes import Code
from kvxfer.compat.mooncake.memory import BufferPool
from kvxfer.compat.mooncake.own import rdma_nics
from kvxfer.compat.mooncake.settings import P2P
from kvxfer.compat.mooncake.target import MooncakeTarget, NativeTarget, OwnTarget, Target
from kvxfer.compat.mooncake.tickets import Senders
from kvxfer.log import get_logger
from kvxfer.mooncake.peer import MooncakePeer
from kvxfer.mooncake.wire.descriptor import SegmentDescriptor
from kvxfer.text import clean, show

if TYPE_CHECKING:
    from kvxfer.mooncake.directory import Directory
    from kvxfer.mooncake.rdma import MooncakeRdmaPeer

__all__ = ["Targets"]

log = get_logger(__name__)


class Targets:
    """Every peer of one engine. All methods may be called from any thread.

    queue_pairs: how many a real Mooncake is asked for between two NICs.
    """

    def __init__(
        self, engine: TransferEngine, own_name: str, directory: Directory, staging: BufferPool, *, queue_pairs: int = 2
    ) -> None:
        self._engine = engine
        self._own_name = own_name
        self._directory = directory
        self._staging = staging
        self._queue_pairs = queue_pairs
        self._lock = threading.Lock()
        self._targets: dict[str, Target] = {}
        self._left: list[Target] = []
        self._senders = Senders()

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
        if isinstance(error, PeerError | TransferError | TransportUnavailableError):
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
            target = NativeTarget(self._engine, self._staging, address, self._senders)
            target.segment()
            return target
        except PeerError as error:
            hint = self._directory.stale_hint(descriptor)
            raise type(error)(error.message, remedy=f"{error.remedy} {hint}".strip(), **error.values) from error

    def _open_mooncake(self, name: str, descriptor: SegmentDescriptor, at: HostPort) -> MooncakeTarget:
        def refresh() -> SegmentDescriptor:
            timeout_s = self._engine.config.handshake_timeout_s
            return self._directory.find(name, deadline=time.monotonic() + timeout_s)

        peer = self._open_wire(name, descriptor, at, refresh)
        log.info("mooncake.peer_opened", peer=name, transport="tcp" if isinstance(peer, MooncakePeer) else "rdma")
        return MooncakeTarget(peer, refresh, at, self._senders)

    def _open_wire(
        self, name: str, descriptor: SegmentDescriptor, at: HostPort, refresh: Callable[[], SegmentDescriptor]
    ) -> MooncakePeer | MooncakeRdmaPeer:
        """Return the way to a real Mooncake: the one transport that it has, as it has it."""
        config = self._engine.config
        nics = rdma_nics(self._engine)
        if nics and "rdma" in descriptor.protocols:
            from kvxfer.mooncake.rdma import MooncakeRdmaPeer

            label = format_host_port(at.host, at.port)
            return MooncakeRdmaPeer(
                label,
                descriptor,
                own_name=self._own_name,
                nics=nics,
                queue_pairs=self._queue_pairs,
                config=config,
                refresh=refresh,
            )
        if "tcp" not in self._engine.transports:
            raise TransportUnavailableError(
                f"{name} is reached over {', '.join(descriptor.protocols)}; wanted here: "
                f"{', '.join(self._engine.transports)}.",
                remedy="Start both ends with the same protocol; KVXFER_ALLOW_FALLBACK=1 here allows tcp.",
                peer=name,
                reasons={"tcp": "not wanted here"},
            )
        return MooncakePeer(name, descriptor, config=config, refresh=refresh)


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
            f"the host name {show(at.host)} does not resolve: {clean(str(exc)) or 'no answer in time'}.",
            remedy="Check the spelling, /etc/hosts and DNS, or use the IP address.",
            peer=format_host_port(at.host, at.port),
            mooncake_code=Code.DNS,
        ) from exc
