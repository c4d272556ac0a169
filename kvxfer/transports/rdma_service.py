"""The answering side: queue pairs that peers write to and read from, and that send nothing themselves; and the fences
that come in over them, for which notifications wait (`rdma_passive.py`, `rdma_fences.py`).

A peer says which of our ports, which GIDs and which attributes; the queue pair is ready to receive before it is told
its number. What a device refuses is the answer, with step and errno; the peer decides what to try next. Connections
belong to a session: when that ends, or when the peer asks, they are destroyed, and from then on the device drops what
still comes in.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvxfer.errors import KvxferError, RemoteProtocolError, VerbsError
from kvxfer.log import get_logger
from kvxfer.transports.rdma_fences import FenceLedger, Released, Then
from kvxfer.transports.rdma_passive import FenceChannel, PassiveEnd
from kvxfer.transports.rdma_wire import ConnectFailure, ConnectReply, ConnectRequest, random_psn
from kvxfer.verbs.enums import Access, Mtu
from kvxfer.verbs.gid import format_gid
from kvxfer.verbs.gid_choice import GidPair, rank_gid_pairs
from kvxfer.verbs.port import build_address_vector
from kvxfer.verbs.port_offer import PortOffer

if TYPE_CHECKING:
    from kvxfer.transports.loop import Handler, Loop
    from kvxfer.transports.rdma_nic import Nic

__all__ = ["RdmaService"]

CONNECTING_MAX = 8
"""Connections that are made at once: each may wait seconds for the kernel to find a neighbour."""
UNDER_WAY_MAX = 4
"""Connections of one session that are made at once: kvxfer asks for one after the other, and a peer that asks for many
must not keep the others waiting."""
PER_SESSION_MAX = 64
"""Connections of one session: a rail takes one, so more is a peer that does not let go."""

log = get_logger(__name__)


class RdmaService:
    """The ends that peers use. All methods may be called from any thread, if not said otherwise.

    loop: of the sessions. watch: has a handler looked after by that loop, from any thread.
    """

    def __init__(self, nics: Sequence[Nic], loop: Loop, watch: Callable[[Handler], None]) -> None:
        self._nics = {nic.name: nic for nic in nics}
        self._loop = loop
        self._watch = watch
        self._lock = threading.Lock()
        self._connections: dict[str, dict[int, PassiveEnd | None]] = {}
        """By session and number; None while it is being made. What is not here any more then is destroyed at once."""
        self._ledger = FenceLedger()
        """Of the connections, by session and number; under the lock."""
        self._channels: dict[str, FenceChannel] = {}
        self._makers = ThreadPoolExecutor(CONNECTING_MAX, thread_name_prefix="kvxfer-connect")
        self._is_closed = False

    def add(self, nic: Nic) -> None:
        """Serve one port more."""
        with self._lock:
            self._nics = {**self._nics, nic.name: nic}

    @property
    def connection_count(self) -> int:
        """Queue pairs that peers hold, or that are being made for them."""
        with self._lock:
            return sum(map(len, self._connections.values()))

    def accept(
        self, peer: str, session: str, body: Mapping[str, Any], answer: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        """Transport.accept."""
        request = ConnectRequest.from_json(body)

        def make() -> None:
            reply = self._answer(peer, session, request)
            if not answer(reply):
                self.drop(session)

        with self._lock:
            if self._is_closed:
                return
            held = self._connections.setdefault(session, {})
            if request.number in held:
                raise RemoteProtocolError(f"{peer} asks for connection {request.number} a second time.")
            under_way = sum(pair is None for pair in held.values())
            if len(held) < PER_SESSION_MAX and under_way < UNDER_WAY_MAX:
                held[request.number] = None
                self._makers.submit(make)
                return
        reason = KvxferError(
            f"this session holds {len(held)} connections already, {under_way} of them not made yet; at most "
            f"{PER_SESSION_MAX} and {UNDER_WAY_MAX} are allowed."
        )
        answer(ConnectFailure("create", 0, reason).to_json())

    def _answer(self, peer: str, session: str, request: ConnectRequest) -> dict[str, Any]:
        try:
            return self._make(session, request).to_json()
        except ConnectFailure as failure:
            log.info("rdma.connect_refused", peer=peer, step=failure.step, reason=failure.error.message)
            failed = failure
        except Exception as exc:  # a bug: the peer must not wait for nothing
            log.error("rdma.connect_refused", peer=peer, step="", reason=repr(exc))
            failed = ConnectFailure("create", 0, KvxferError(f"this end failed: {exc!r}."))
        self.hang_up(session, request.number)
        return failed.to_json()

    def _make(self, session: str, request: ConnectRequest) -> ConnectReply:
        self.hang_up(session, request.replaces)
        nic = self._nics.get(request.port)
        if nic is None:
            there = ", ".join(self._nics)
            raise ConnectFailure(
                "port", 0, KvxferError(f"there is no RDMA port {request.port} here; there is {there}.")
            )
        step = "address"
        end: PassiveEnd | None = None
        try:
            nic.refresh()
            offer, attributes = nic.offer(), request.attributes
            if attributes.read_depth > max(1, offer.read_depth.responder):
                # some devices have one budget for all queue pairs, and would not refuse before it is used up
                raise ConnectFailure(
                    "RTR",
                    errno.EINVAL,
                    KvxferError(
                        f"{nic.name} answers {offer.read_depth.responder} READs at once, not {attributes.read_depth}."
                    ),
                )
            address = build_address_vector(
                offer,
                request.offer,
                self._find_gids(nic, request),
                is_global=attributes.is_global,
                hop_limit=attributes.hop_limit,
                traffic_class=attributes.traffic_class,
                service_level=attributes.service_level,
            )
            step = "create"
            end = PassiveEnd(nic, (session, request.number), self._open_channel)
            queue_pair = end.queue_pair
            step = "INIT"
            queue_pair.to_init(
                port=nic.port.number,
                pkey_index=nic.partition.index,
                access=Access.REMOTE_WRITE | Access.REMOTE_READ,
            )
            end.post_receives()
            step = "RTR"
            queue_pair.to_rtr(
                address=address,
                dest_qp_num=request.qp_num,
                path_mtu=Mtu.of_nbytes(attributes.path_mtu),
                rq_psn=request.psn,
                max_dest_rd_atomic=attributes.read_depth,
                min_rnr_timer=attributes.min_rnr_timer,
            )
            step = "RTS"
            psn = random_psn()
            queue_pair.to_rts(
                sq_psn=psn,
                max_rd_atomic=min(1, offer.read_depth.initiator),
                timeout=attributes.timeout,
                retry_cnt=attributes.retry_count,
                rnr_retry=attributes.rnr_retry,
            )
        except BaseException as exc:
            self._destroy([end])
            if not isinstance(exc, KvxferError):
                raise
            number = exc.errno if isinstance(exc, VerbsError) else 0
            raise ConnectFailure(step, number or 0, exc) from exc
        self._keep(session, request.number, end)
        return ConnectReply(queue_pair.number, psn, end.fences)

    def _find_gids(self, nic: Nic, request: ConnectRequest) -> GidPair | None:
        """Return the pair that the peer chose, with the row where our GID is now.

        Raises ConnectFailure, with what the port offers now, where that is not what the peer knows of it.
        """
        offer = nic.offer()
        if request.lid != offer.lid:
            raise _moved(offer, f"LID {request.lid}", f"LID {offer.lid}")
        if not request.gid:
            return None
        kinds = {candidate.type for candidate in request.offer.gids}
        ours = [one for kind in kinds if (one := nic.find_candidate(request.gid, kind)) is not None]
        pairs = rank_gid_pairs(ours, request.offer.gids)
        if not pairs:
            raise _moved(offer, f"usable GID {format_gid(request.gid)}", ", ".join(map(str, offer.gids)))
        return pairs[0]

    def _keep(self, session: str, number: int, end: PassiveEnd) -> None:
        with self._lock:
            held = self._connections.get(session, {})
            if number in held:
                held[number] = end
                self._ledger.open(end.key, end.fences)
                return
        self._destroy([end])
        raise ConnectFailure("RTS", 0, KvxferError("the connection was given up while it was made."))

    def hang_up(self, session: str, number: int) -> None:
        """Transport.hang_up: destroy one connection; when this returns the device drops what comes in for it."""
        with self._lock:
            end = self._connections.get(session, {}).pop(number, None)
        self._destroy([end])

    def drop(self, session: str) -> None:
        """Transport.drop."""
        with self._lock:
            held = self._connections.pop(session, {})
        self._destroy(held.values())

    def close(self) -> None:
        """Destroy all connections; make no more."""
        with self._lock:
            self._is_closed = True
            held = [pair for pairs in self._connections.values() for pair in pairs.values()]
            self._connections.clear()
        self._makers.shutdown(wait=True, cancel_futures=True)
        self._destroy(held)

    def _destroy(self, ends: Iterable[PassiveEnd | None]) -> None:
        """Destroy what there is; what waits for its fences goes on without."""
        for end in ends:
            if end is not None:
                end.close()
                self._lose(end)

    # Fences. Nobody holds the lock.

    def await_fences(self, session: str, fences: Mapping[int, int], then: Then) -> None:
        """Transport.await_fences."""
        with self._lock:
            held = self._connections.get(session, {})
            ends = [end for number in fences if (end := held.get(number)) is not None]
        for end in ends:
            self._poll(end)  # mostly it is there: then nobody has to be woken for it
        with self._lock:
            released = self._ledger.hold({(session, number): fence for number, fence in fences.items()}, then)
        self._release(released)
        if not released:
            for end in ends:
                self._look(end)

    def _look(self, end: PassiveEnd) -> None:
        """Poll, and be woken again if more is waited for."""
        self._poll(end)
        with self._lock:
            waits = self._ledger.waits(end.key)
        if waits and not end.arm():
            self._lose(end)
        elif waits:
            self._poll(end)  # what came before it was armed

    def _poll(self, end: PassiveEnd) -> None:
        count, may_come = end.poll()
        if count:
            with self._lock:
                released = self._ledger.see(end.key, count)
            self._release(released)
        if not may_come:
            self._lose(end)

    def _lose(self, end: PassiveEnd) -> None:
        """No fence comes over it any more."""
        with self._lock:
            released = self._ledger.close(end.key)
        self._release(released)

    def _release(self, released: Released) -> None:
        if released and not self._loop.is_current:
            self._loop.call_soon(lambda: self._release(released))
            return
        for then, is_fenced in released:
            then(is_fenced)

    def _open_channel(self, nic: Nic) -> FenceChannel:
        """Return the channel of a port, which is made when the first peer connects to it."""
        with self._lock:
            channel = self._channels.get(nic.name)
            if channel is None or channel.has_failed:
                channel = self._channels[nic.name] = FenceChannel(nic.context, self._look, self._lose)
                self._watch(channel)
            return channel


def _moved(offer: PortOffer, asked: str, held: str) -> ConnectFailure:
    reason = KvxferError(
        f"{offer} has no {asked} any more; it has {held}.",
        remedy="An address was taken away or moved; `kvxfer devices` there shows what the port has now.",
    )
    return ConnectFailure("address", 0, reason, offer)
