"""The wire between fake devices: who reaches whom, and what one queue pair does to another.

One `FakeFabric` joins the hosts of a test. Nothing runs by itself: requests move when they are posted or polled, or,
with `delivery="manual"`, when the test says so, in the order that it chooses. All of it is deterministic.
"""

from __future__ import annotations

import ctypes
import errno
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvxfer.verbs.abi import ffi
from kvxfer.verbs.enums import Access, CompletionStatus, EventType, LinkLayer, Mtu, PortState, WorkOpcode
from tests.support.fake_nic import GRH_REQUIRED, FakeGid, FakePort
from tests.support.fake_queue_pair import ERR, RTR, RTS, SQD, SUCCESS, FakeQueuePair, ReceiveRequest, SendRequest
from tests.support.fake_queues import FakeDevice, FakeMemoryRegion

if TYPE_CHECKING:
    from tests.support.fake_library import LibraryBase

Delivery = Literal["post", "poll", "manual"]
Status = CompletionStatus
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = int(Access.LOCAL_WRITE), int(Access.REMOTE_WRITE), int(Access.REMOTE_READ)
"""As plain numbers: arithmetic of enums would be a third of a request's time."""
PAGE_NBYTES = 4096
MS_ASYNC = 1
PSN_MASK = 0xFFFFFF

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL: 0.5 us, and called for each request
_libc.msync.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)


def is_mapped(address: int, nbytes: int) -> bool:
    """Whether all of a range is mapped now; MS_ASYNC does nothing but look (msync(2), ENOMEM)."""
    start = address // PAGE_NBYTES * PAGE_NBYTES
    end = address + nbytes
    return end < 2**63 and _libc.msync(start, end - start, MS_ASYNC) == 0


@dataclass(frozen=True)
class Path:
    """How one device reaches another. hops: routers on the way; a smaller or equal hop limit does not get through.

    rtr_errno: what the kernel's address resolution answers in INIT->RTR. is_lost: packets do not arrive.
    """

    rtr_errno: int = 0
    is_lost: bool = False
    hops: int = 0
    mtu: Mtu = Mtu.MTU_4096


STRAIGHT = Path()


class Traced(NamedTuple):
    """A request that was carried out, for tests that count."""

    device: str
    qp_number: int
    opcode: WorkOpcode
    nbytes: int
    remote: int
    rkey: int
    status: CompletionStatus


class FakeFabric:
    """All hosts of a test.

    delivery: "post" moves data and makes completions in ibv_post_send; "poll" in the next ibv_poll_cq of anybody;
    "manual" only in `step`, `deliver`, `complete` and `run`.
    moves_data: False skips the copy, for transfers larger than memory. trace: a list to be filled, or None.
    hides_writes: what was written shows only when a completion of the same queue pair is polled at the peer, or when
    the queue pair ends: as little as the specification promises.
    """

    def __init__(self, *, delivery: Delivery = "post", seed: int = 0) -> None:
        self.lock = threading.RLock()
        self.delivery: Delivery = delivery
        self.rng = random.Random(seed)
        self.moves_data = True
        self.hides_writes = False
        self.trace: list[Traced] | None = None
        self.libraries: list[LibraryBase] = []
        self.paths: dict[tuple[str, str], Path] = {}
        self.rules: list[Callable[[FakeDevice, FakeGid | None, FakeDevice, bytes], Path | None]] = []
        self._active: dict[FakeQueuePair, None] = {}

    # Who reaches whom.

    def set_path(self, source: str, target: str, *, both_ways: bool = True, **changes: Any) -> None:
        """Say how device `source` ("host/device") reaches `target`; changes are fields of Path."""
        pairs = [(source, target), (target, source)] if both_ways else [(source, target)]
        with self.lock:
            for pair in pairs:
                self.paths[pair] = replace(self.paths.get(pair, Path()), **changes)
        self._poke()

    def separate_subnets(self, prefix_nbytes: int = 15, rtr_errno: int = errno.ETIMEDOUT) -> None:
        """Let only devices reach each other whose GIDs agree in the first bytes: 15 is a /24 of IPv4."""

        def rule(_source: FakeDevice, row: FakeGid | None, _target: FakeDevice, dgid: bytes) -> Path | None:
            if row is None or row.value[:prefix_nbytes] == dgid[:prefix_nbytes]:
                return None
            return Path(rtr_errno=rtr_errno, is_lost=True)

        self.rules.append(rule)

    def separate_link_local(self, rtr_errno: int = errno.ETIMEDOUT) -> None:
        """Let link-local GIDs reach nobody but their own host, as across routers."""

        def rule(source: FakeDevice, row: FakeGid | None, target: FakeDevice, _dgid: bytes) -> Path | None:
            if row is None or source.library is target.library or row.value[:2] != b"\xfe\x80":
                return None
            return Path(rtr_errno=rtr_errno, is_lost=True)

        self.rules.append(rule)

    def path(self, source: FakeDevice, row: FakeGid | None, target: FakeDevice, dgid: bytes) -> Path:
        for rule in self.rules:
            found = rule(source, row, target, dgid)
            if found is not None:
                return found
        return self.paths.get((source.full_name, target.full_name), STRAIGHT) if self.paths else STRAIGHT

    def find_port(self, source: FakePort, address: dict[str, Any]) -> tuple[FakeDevice, FakePort] | None:
        """Return the port that an address vector leads to."""
        prefix = source.gids[0].value[:8] if source.gids.get(0) else b""
        for library in self.libraries:
            for device in library.devices:
                for port in device.nic.ports:
                    if device.is_dead or port.link_layer != source.link_layer:
                        continue
                    if address["is_global"]:
                        found = any(row.value == address["dgid"] and not row.is_foreign for row in port.gids.values())
                    else:
                        same_subnet = bool(port.gids.get(0)) and port.gids[0].value[:8] == prefix
                        found = same_subnet and port.lid != 0 and port.lid == address["dlid"]
                    if found:
                        return device, port
        return None

    def resolve(self, device: FakeDevice, ah: Any) -> int:
        """Do what the kernel does with an address vector: 0, or the error number of RTR and ibv_create_ah."""
        port = device.port(ah.port_num)
        if port is None:
            return errno.EINVAL
        is_ethernet = port.link_layer == LinkLayer.ETHERNET
        if not ah.is_global:
            return errno.EINVAL if is_ethernet or port.flags & GRH_REQUIRED else 0
        if ah.grh.sgid_index >= port.gid_tbl_len:
            return errno.EINVAL
        row = port.gids.get(ah.grh.sgid_index)
        if row is None:
            return errno.ENODATA  # rdma_get_gid_attr
        if not is_ethernet:
            return 0
        dgid = bytes(ah.grh.dgid.raw)
        if not any(dgid) or FakeGid(dgid).is_ipv4 != row.is_ipv4:
            return errno.EINVAL  # rdma_resolve_ip: the two families differ
        if port.state != PortState.ACTIVE:
            return errno.ENETUNREACH
        found = self.find_port(port, {"is_global": 1, "dgid": dgid})
        if found is None or row.is_foreign:
            return errno.ETIMEDOUT  # nobody answers the neighbour solicitation
        return self.path(device, row, found[0], dgid).rtr_errno

    # What moves, and when.

    def posted(self, qp: FakeQueuePair) -> None:
        """A queue pair got work."""
        self._active[qp] = None
        if self.delivery == "post":
            self._drain(qp)

    def receive_posted(self) -> None:
        if self.delivery == "post":
            self.run()

    def polled(self) -> None:
        if self.delivery != "manual" and self._active:
            self.run()

    def _poke(self) -> None:
        if self.delivery != "manual":
            self.run()

    @property
    def pending(self) -> list[FakeQueuePair]:
        """The queue pairs with requests that are not completed, oldest post first."""
        with self.lock:
            for qp in [qp for qp in self._active if not (qp.queued or qp.delivered)]:
                del self._active[qp]
            return list(self._active)

    def run(self) -> int:
        """Move all that can move; return how many requests were completed."""
        count = 0
        with self.lock:
            while moved := sum(self._drain(qp) for qp in self.pending):
                count += moved
        return count

    def step(self, qp: FakeQueuePair | None = None) -> bool:
        """Deliver and complete one request: of `qp`, or of a queue pair drawn by `rng`; False if none can move."""
        with self.lock:
            pending = self.pending if qp is None else [qp]
            if qp is None:
                self.rng.shuffle(pending)
            return any(self.complete(each) or (self.deliver(each) and self.complete(each)) for each in pending)

    def deliver(self, qp: FakeQueuePair) -> bool:
        """Move the data of the oldest request of `qp` and hold its completion back; False if it cannot move."""
        with self.lock:
            if qp.state not in (RTS,) or not qp.queued or (qp.delivered and qp.delivered[-1].status is not SUCCESS):
                return False
            request = qp.queued[0]
            status = self._carry_out(qp, request)
            if status is None or qp.state is ERR:
                return False
            request.status = status
            qp.queued.popleft()
            qp.delivered.append(request)
            if self.trace is not None:
                self.trace.append(
                    Traced(
                        qp.device.full_name,
                        qp.number,
                        WorkOpcode(request.opcode),
                        request.nbytes,
                        request.remote,
                        request.rkey,
                        status,
                    )
                )
            return True

    def complete(self, qp: FakeQueuePair) -> bool:
        """Make the completion of the oldest delivered request of `qp`; after a failed one, flush the rest."""
        with self.lock:
            if not qp.delivered:
                return False
            request = qp.delivered.popleft()
            assert request.status is not None
            qp.complete(request, request.status)
            if request.status is not SUCCESS:
                qp.to_error()
            return True

    def _drain(self, qp: FakeQueuePair) -> int:
        count = 0
        while self.complete(qp) or self.deliver(qp):
            count += not qp.delivered
        if not (qp.queued or qp.delivered):
            self._active.pop(qp, None)
        return count

    # What a request does. None: it waits.

    def _carry_out(self, qp: FakeQueuePair, request: SendRequest) -> CompletionStatus | None:
        if not request.is_tried:
            request.is_tried = True
            injection = qp.take_injection()
            if injection is not None:
                request.vendor_err = injection.vendor_err
                return injection.status
        port = qp.port
        if qp.device.is_dead or port is None:
            return Status.FATAL_ERR
        if port.state != PortState.ACTIVE:
            return qp.device.nic.port_down_status
        if request.nbytes > port.max_msg_sz:
            return Status.LOC_LEN_ERR
        if request.payload is None and not self._are_local(qp, request.pieces, is_written=request.is_read):
            return Status.LOC_PROT_ERR
        if request.is_read and qp.attributes["max_rd_atomic"] == 0:
            return None
        peer = self._find_peer(qp, port, request)
        if peer is None:
            return self._unanswered(qp)
        status = self._respond(peer, qp, request)
        if status is None:
            return None
        qp.sent_count += 1
        if peer.attributes["dest_qp_num"] != qp.number:
            return self._unanswered(qp)  # it was done, but the acknowledgement went elsewhere
        return status

    def _unanswered(self, qp: FakeQueuePair) -> CompletionStatus | None:
        if qp.attributes["retry_cnt"] == 7 and qp.device.nic.retry_7_is_for_ever:
            return None
        return Status.RETRY_EXC_ERR

    def _are_local(self, qp: FakeQueuePair, pieces: Any, *, is_written: bool) -> bool:
        for address, nbytes, lkey in pieces:
            region = qp.device.keys.get(lkey)
            if not nbytes:
                continue
            if region is None or region.lkey != lkey or region.domain is not qp.domain:
                return False
            if not region.covers(address, nbytes) or (is_written and not region.access & LOCAL_WRITE):
                return False
        return True

    def _find_peer(self, qp: FakeQueuePair, port: FakePort, request: SendRequest) -> FakeQueuePair | None:
        """Return the queue pair that takes a request; None where nothing comes back."""
        found = self.find_port(port, qp.address)
        if found is None:
            return None
        device, peer_port = found
        peer = device.queue_pairs.get(qp.attributes["dest_qp_num"])
        if peer is None or peer.state not in (RTR, RTS, SQD) or peer.port is not peer_port:
            return None
        if peer_port.state != PortState.ACTIVE or not self._are_routed(qp, port, peer, request):
            return None
        sent = qp.attributes["sq_psn"] + qp.sent_count
        expected = peer.attributes["rq_psn"] + peer.received_count
        return peer if (sent - expected) & PSN_MASK == 0 else None

    def _are_routed(self, qp: FakeQueuePair, port: FakePort, peer: FakeQueuePair, request: SendRequest) -> bool:
        """Whether packets go both ways between two queue pairs."""
        forth = self.path(qp.device, qp.source, peer.device, qp.address["dgid"])
        back = self.path(peer.device, peer.source, qp.device, peer.address["dgid"])
        if forth.is_lost or back.is_lost:
            return False
        if qp.address["is_global"] and qp.address["hop_limit"] <= forth.hops:
            return False
        packet_nbytes = min(request.nbytes, 128 << qp.attributes["path_mtu"])
        if packet_nbytes > 128 << forth.mtu:
            return False
        if port.link_layer != LinkLayer.ETHERNET:
            return True
        source, target = qp.source, peer.source
        if source is None or target is None or source.type != target.type or source.is_foreign or target.is_foreign:
            return False
        # RoCE knows a peer by its address, and each address must still be there.
        return (
            peer.address["dgid"] == source.value
            and qp.address["dgid"] == target.value
            and any(row.value == source.value for row in port.gids.values())
        )

    def _respond(self, peer: FakeQueuePair, qp: FakeQueuePair, request: SendRequest) -> CompletionStatus | None:
        mine, theirs = 128 << qp.attributes["path_mtu"], 128 << peer.attributes["path_mtu"]
        if mine != theirs and request.nbytes > min(mine, theirs):
            return self._refuse(peer, EventType.QP_REQ_ERR, Status.REM_INV_REQ_ERR)
        if request.is_send:
            status = self._respond_to_send(peer, qp, request)
        else:
            status = self._respond_to_rdma(peer, qp, request)
        if status is SUCCESS:
            peer.received_count += 1
        return status

    def _refuse(self, peer: FakeQueuePair, event: EventType, status: CompletionStatus) -> CompletionStatus:
        peer.fail(event)
        return status

    def _respond_to_rdma(self, peer: FakeQueuePair, qp: FakeQueuePair, request: SendRequest) -> CompletionStatus | None:
        right = REMOTE_READ if request.is_read else REMOTE_WRITE
        if not peer.attributes["qp_access_flags"] & right or self._reads_too_deep(peer, qp, request):
            return self._refuse(peer, EventType.QP_REQ_ERR, Status.REM_INV_REQ_ERR)
        if request.has_imm and not peer.receives:
            return self._not_ready(qp)
        if request.nbytes:  # a request without bytes needs no key
            region = peer.device.keys.get(request.rkey)
            if (
                region is None
                or region.rkey != request.rkey
                or region.domain is not peer.domain
                or not region.access & right
                or not region.covers(request.remote, request.nbytes)
            ):
                return self._refuse(peer, EventType.QP_ACCESS_ERR, Status.REM_ACCESS_ERR)
            if self.hides_writes and not request.is_read:
                content = request.payload or b"".join(_bytes_at(*piece[:2]) for piece in request.pieces)
                peer.hidden.append((request.remote, content))
            else:
                peer.show_writes()
                self._move(request)
        if request.has_imm:
            peer.complete_receive(peer.receives.popleft(), SUCCESS, request, src_qp=qp.number)
        return SUCCESS

    def _reads_too_deep(self, peer: FakeQueuePair, qp: FakeQueuePair, request: SendRequest) -> bool:
        """Whether more reads are on the wire than the responder has room for."""
        if not request.is_read:
            return False
        depth = peer.attributes["max_dest_rd_atomic"]
        limit = qp.attributes["max_rd_atomic"]
        if limit <= depth:
            return False
        in_flight = sum(1 for each in qp.queued if each.is_read)
        return min(in_flight, limit) > depth

    def _not_ready(self, qp: FakeQueuePair) -> CompletionStatus | None:
        return None if qp.attributes["rnr_retry"] == 7 else Status.RNR_RETRY_EXC_ERR

    def _respond_to_send(self, peer: FakeQueuePair, qp: FakeQueuePair, request: SendRequest) -> CompletionStatus | None:
        if not peer.receives:
            return self._not_ready(qp)
        receive = peer.receives.popleft()
        if request.nbytes > sum(nbytes for _, nbytes, _ in receive.pieces):
            peer.complete_receive(receive, Status.LOC_LEN_ERR)
            return self._refuse(peer, EventType.QP_REQ_ERR, Status.REM_INV_REQ_ERR)
        if not self._are_local(peer, receive.pieces, is_written=True):
            peer.complete_receive(receive, Status.LOC_PROT_ERR)
            return self._refuse(peer, EventType.QP_FATAL, Status.REM_OP_ERR)
        self._scatter(request, receive)
        peer.complete_receive(receive, SUCCESS, request, src_qp=qp.number)
        return SUCCESS

    # Bytes.

    def _move(self, request: SendRequest) -> None:
        if not self.moves_data:
            return
        if request.payload is not None:
            _copy(request.remote, ffi.from_buffer(request.payload), len(request.payload))
            return
        remote = request.remote
        for address, nbytes, _ in request.pieces:
            if request.is_read:
                _copy(address, _at(remote, nbytes), nbytes)
            else:
                _copy(remote, _at(address, nbytes), nbytes)
            remote += nbytes

    def _scatter(self, request: SendRequest, receive: ReceiveRequest) -> None:
        payload = request.payload
        if payload is None:
            payload = b"".join(_bytes_at(address, nbytes) for address, nbytes, _ in request.pieces)
        offset = 0
        for address, nbytes, _ in receive.pieces:
            part = payload[offset : offset + nbytes]
            _copy(address, ffi.from_buffer(part), len(part))
            offset += len(part)


def _at(address: int, nbytes: int) -> Any:
    """Return a pointer to memory, or None where it is not mapped any more."""
    return ffi.cast("char *", address) if is_mapped(address, nbytes) else None


def _bytes_at(address: int, nbytes: int) -> bytes:
    found = _at(address, nbytes) if nbytes else None
    return bytes(nbytes) if found is None else bytes(ffi.buffer(found, nbytes))


def copy_bytes(address: int, content: bytes) -> None:
    """Write to memory, as a device does."""
    _copy(address, ffi.from_buffer(content), len(content))


def _copy(address: int, source: Any, nbytes: int) -> None:
    """Copy to `address`. A device has its pages pinned: it goes on with memory that the process has unmapped, and the
    process sees nothing of it; so do these, by leaving out what has no mapping."""
    if nbytes and source is not None and is_mapped(address, nbytes):
        ffi.memmove(ffi.cast("char *", address), source, nbytes)


def region_at(device: FakeDevice, address: int) -> FakeMemoryRegion | None:
    """Return the newest registration of a device that covers an address, for tests that look."""
    found = [region for region in device.keys.values() if region.covers(address, 1)]
    return found[-1] if found else None
