"""A fake RC queue pair: its states, its two queues and what errors do to them.

It obeys the rules that need no peer; what happens between two queue pairs is in `fake_fabric.py`.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer.verbs.enums import (
    CompletionOpcode,
    CompletionStatus,
    EventType,
    QueuePairMask,
    QueuePairState,
    SendFlags,
    WorkOpcode,
)
from tests.support.fake_nic import FakeGid, FakePort
from tests.support.fake_queues import Completion, FakeCompletionQueue, FakeObject

if TYPE_CHECKING:
    from tests.support.fake_fabric import FakeFabric

SUCCESS, FLUSHED = CompletionStatus.SUCCESS, CompletionStatus.WR_FLUSH_ERR
RESET, INIT, RTR, RTS, SQD, ERR = (
    QueuePairState.RESET,
    QueuePairState.INIT,
    QueuePairState.RTR,
    QueuePairState.RTS,
    QueuePairState.SQD,
    QueuePairState.ERR,
)
SIGNALED = int(SendFlags.SIGNALED)
POISON = 0x5A5A
"""The opcode of a failed completion, which must not be read."""
VENDOR_ERRS = {  # syndromes of a ConnectX
    CompletionStatus.LOC_PROT_ERR: 0x51,
    CompletionStatus.WR_FLUSH_ERR: 0xF5,
    CompletionStatus.REM_ACCESS_ERR: 0x88,
    CompletionStatus.REM_INV_REQ_ERR: 0x89,
    CompletionStatus.RNR_RETRY_EXC_ERR: 0x82,
}
_M = QueuePairMask
_ANY = (RESET, INIT, RTR, RTS, SQD, ERR)
_LIVE = _M.CUR_STATE | _M.ACCESS_FLAGS | _M.MIN_RNR_TIMER | _M.PATH_MIG_STATE
_INIT_MASK = _M.PORT | _M.PKEY_INDEX | _M.ACCESS_FLAGS
_RTR_MASK = _M.AV | _M.PATH_MTU | _M.DEST_QPN | _M.RQ_PSN | _M.MAX_DEST_RD_ATOMIC | _M.MIN_RNR_TIMER
_RTS_MASK = _M.SQ_PSN | _M.TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC
STEPS: dict[tuple[QueuePairState, QueuePairState], tuple[int, int]] = {
    **{(old, new): (0, 0) for old in _ANY for new in (RESET, ERR)},
    (RESET, INIT): (_INIT_MASK, 0),
    (INIT, INIT): (0, _INIT_MASK),
    (INIT, RTR): (_RTR_MASK, _M.ACCESS_FLAGS | _M.PKEY_INDEX | _M.ALT_PATH),
    (RTR, RTS): (_RTS_MASK, _LIVE | _M.ALT_PATH),
    (RTS, RTS): (0, _LIVE | _M.ALT_PATH),
    (RTS, SQD): (0, _M.EN_SQD_ASYNC_NOTIFY),
    (SQD, RTS): (0, _LIVE | _M.ALT_PATH),
}
"""Required and optional attributes of each step for RC. Written from the kernel's qp_state_table on its own, not from
kvxfer.verbs.qp_states, so that a slip there is seen here."""

FIELDS = {
    _M.ACCESS_FLAGS: "qp_access_flags",
    _M.PKEY_INDEX: "pkey_index",
    _M.PORT: "port_num",
    _M.PATH_MTU: "path_mtu",
    _M.TIMEOUT: "timeout",
    _M.RETRY_CNT: "retry_cnt",
    _M.RNR_RETRY: "rnr_retry",
    _M.RQ_PSN: "rq_psn",
    _M.MAX_QP_RD_ATOMIC: "max_rd_atomic",
    _M.MIN_RNR_TIMER: "min_rnr_timer",
    _M.SQ_PSN: "sq_psn",
    _M.MAX_DEST_RD_ATOMIC: "max_dest_rd_atomic",
    _M.DEST_QPN: "dest_qp_num",
}
BITS_MAX = {"timeout": 31, "min_rnr_timer": 31, "retry_cnt": 7, "rnr_retry": 7}


@dataclass
class SendRequest:
    """One work request of a send queue. pieces: (address, nbytes, lkey); payload: what was inline, copied at post."""

    seq: int
    wr_id: int
    opcode: int
    flags: int
    imm_data: int
    remote: int
    rkey: int
    pieces: Sequence[tuple[int, int, int]]
    payload: bytes | None
    nbytes: int
    is_tried: bool = False
    status: CompletionStatus | None = None
    vendor_err: int | None = None

    @property
    def is_read(self) -> bool:
        return self.opcode == WorkOpcode.RDMA_READ

    @property
    def has_imm(self) -> bool:
        return self.opcode in (WorkOpcode.RDMA_WRITE_WITH_IMM, WorkOpcode.SEND_WITH_IMM)

    @property
    def is_send(self) -> bool:
        return self.opcode in (WorkOpcode.SEND, WorkOpcode.SEND_WITH_IMM)

    @property
    def completion_opcode(self) -> CompletionOpcode:
        if self.is_read:
            return CompletionOpcode.RDMA_READ
        return CompletionOpcode.SEND if self.is_send else CompletionOpcode.RDMA_WRITE


@dataclass
class ReceiveRequest:
    """One work request of a receive queue."""

    seq: int
    wr_id: int
    pieces: Sequence[tuple[int, int, int]]


@dataclass
class Injection:
    """A status that a request will end with, whatever happens; after `skipped_count` more."""

    status: CompletionStatus
    vendor_err: int | None
    skipped_count: int
    remaining_count: int = field(default=1)


class FakeQueuePair(FakeObject):
    """An RC queue pair. `attributes` holds what ibv_modify_qp set, by the names of ibv_qp_attr."""

    kind = "qp"

    def __init__(
        self, struct: Any, domain: FakeObject, send_cq: FakeCompletionQueue, recv_cq: FakeCompletionQueue, number: int
    ) -> None:
        super().__init__(struct, domain.device, domain, send_cq, recv_cq)
        self.domain = domain
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.number = number
        self.state: QueuePairState = RESET
        self.caps: dict[str, int] = {}
        self.signals_all = False
        self.attributes: dict[str, int] = {}
        self.address: dict[str, Any] = {}
        self.source: FakeGid | None = None
        self.queued: deque[SendRequest] = deque()
        """Posted, nothing moved yet."""
        self.delivered: deque[SendRequest] = deque()
        """The data has moved, or the failure is known; the completion is not made yet."""
        self.receives: deque[ReceiveRequest] = deque()
        self.hidden: list[tuple[int, bytes]] = []
        """What the peer wrote and nobody here can see yet: (address, bytes); see FakeFabric.hides_writes."""
        self.injections: list[Injection] = []
        self.sent_count = 0
        self.received_count = 0
        self.posted_count = 0
        self._send_seq = self._send_free = 0
        self._recv_seq = self._recv_free = 0
        self._modify_count = 0

    def __repr__(self) -> str:
        return f"<FakeQueuePair {self.device.full_name} {self.number} {self.state}>"

    @property
    def fabric(self) -> FakeFabric:
        return self.device.library.fabric

    @property
    def port(self) -> FakePort | None:
        return self.device.port(self.attributes.get("port_num", 0))

    @property
    def send_room(self) -> int:
        return self.caps["max_send_wr"] - (self._send_seq - self._send_free)

    @property
    def recv_room(self) -> int:
        return self.caps["max_recv_wr"] - (self._recv_seq - self._recv_free)

    def inject(
        self, status: CompletionStatus, *, vendor_err: int | None = None, after: int = 0, times: int = 1
    ) -> None:
        """Let a request end with `status` and move nothing: the next one, or the one after `after` more."""
        self.injections.append(Injection(status, vendor_err, after, times))

    def take_injection(self) -> Injection | None:
        for injection in self.injections:
            if injection.skipped_count:
                injection.skipped_count -= 1
                continue
            injection.remaining_count -= 1
            if not injection.remaining_count:
                self.injections.remove(injection)
            return injection
        return None

    # The states.

    def modify(self, attr: Any, mask: int) -> int:
        """Do ibv_modify_qp: 0, or an error number and nothing has changed."""
        old = self.state
        new = QueuePairState(attr.qp_state) if mask & _M.STATE else old
        if error := self._check_step(old, new, mask, attr):
            return error
        if new is RESET:
            self._reset()
        elif new is ERR:
            self.to_error()
        else:
            if error := self._check_values(attr, mask, new):
                return error
            self._take(attr, mask)
            self.state = new
        self.struct.state = new
        return 0

    def _check_step(self, old: QueuePairState, new: QueuePairState, mask: int, attr: Any) -> int:
        if old is RESET and new is RESET and self.device.nic.refuses_reset_to_reset:
            return errno.EINVAL
        if mask & _M.CUR_STATE and attr.cur_qp_state != old:
            return errno.EINVAL
        step = STEPS.get((old, new))
        if step is None:
            return errno.EINVAL
        required, optional = step
        if mask & required != required or mask & ~(required | optional | _M.STATE):
            return errno.EINVAL
        return 0

    def _check_values(self, attr: Any, mask: int, new: QueuePairState) -> int:
        nic, device = self.device.nic, self.device
        if mask & _M.PORT and device.port(attr.port_num) is None:
            return errno.EINVAL
        port = device.port(attr.port_num if mask & _M.PORT else self.attributes.get("port_num", 0))
        if port is None:
            return errno.EINVAL
        if mask & _M.PKEY_INDEX and attr.pkey_index >= len(port.pkeys):
            return errno.EINVAL
        for bit, name in FIELDS.items():
            if mask & bit and getattr(attr, name) > BITS_MAX.get(name, 2**32):
                return errno.EINVAL
        if mask & _M.PATH_MTU:
            mtu_max = port.active_mtu if nic.mtu_checked_against == "active" else port.max_mtu
            if not 1 <= attr.path_mtu <= mtu_max:
                return errno.EINVAL
        depth_max = nic.read_depth_max if nic.read_depth_max is not None else 255
        if mask & _M.MAX_QP_RD_ATOMIC and attr.max_rd_atomic > min(nic.max_qp_init_rd_atom, depth_max):
            return errno.EINVAL
        if mask & _M.MAX_DEST_RD_ATOMIC:
            if attr.max_dest_rd_atomic > min(nic.max_qp_rd_atom, depth_max):
                return errno.EINVAL
            if nic.read_budget is not None and device.read_depth_used + attr.max_dest_rd_atomic > nic.read_budget:
                return nic.read_budget_errno
        if mask & _M.AV:
            return self._check_address(attr.ah_attr)
        return 0

    def _check_address(self, ah: Any) -> int:
        if ah.port_num != self.attributes["port_num"]:
            return errno.EINVAL  # uverbs: the address vector must be on the queue pair's port
        low, high = self.device.nic.hop_limits
        if ah.is_global and not low <= ah.grh.hop_limit <= high:
            return errno.EINVAL
        return self.fabric.resolve(self.device, ah)

    def _take(self, attr: Any, mask: int) -> None:
        for bit, name in FIELDS.items():
            if mask & bit:
                self.attributes[name] = int(getattr(attr, name))
        if mask & _M.MAX_DEST_RD_ATOMIC:
            self.device.read_depth_used += self.attributes["max_dest_rd_atomic"]
        if mask & _M.SQ_PSN:
            self.sent_count = 0
        if mask & _M.RQ_PSN:
            self.received_count = 0
        if mask & _M.AV:
            ah = attr.ah_attr
            self.address = {
                name: int(getattr(ah, name))
                for name in ("dlid", "sl", "src_path_bits", "static_rate", "is_global", "port_num")
            }
            self.address["dgid"] = bytes(ah.grh.dgid.raw)
            for name in ("flow_label", "sgid_index", "hop_limit", "traffic_class"):
                self.address[name] = int(getattr(ah.grh, name))
            port = self.port
            self.source = port.gids.get(self.address["sgid_index"]) if port and ah.is_global else None

    def _give_back_reads(self) -> None:
        self.device.read_depth_used -= self.attributes.pop("max_dest_rd_atomic", 0)

    def _reset(self) -> None:
        self._give_back_reads()
        self.attributes.clear()
        self.address = {}
        self.queued.clear()
        self.delivered.clear()
        self.receives.clear()
        self._send_free, self._recv_free = self._send_seq, self._recv_seq
        self.state = RESET
        self._clean_completions()

    def _clean_completions(self) -> None:
        if self.device.nic.destroy_cleans_completions:
            self.send_cq.forget(self)
            self.recv_cq.forget(self)

    def destroy(self) -> None:
        """Take it out of everything; its requests vanish without a completion."""
        self._give_back_reads()
        self.show_writes()
        self.queued.clear()
        self.delivered.clear()
        self.receives.clear()
        self._clean_completions()
        del self.device.queue_pairs[self.number]
        self.send_cq.queue_pairs.remove(self)
        if self.recv_cq is not self.send_cq:
            self.recv_cq.queue_pairs.remove(self)

    def fail(self, event: EventType) -> None:
        """The device moves it to ERR by itself, and says so."""
        if self.state is not ERR:
            self.device.raise_event(event, self.struct, self.send_cq.context)
            self.to_error()

    def to_error(self) -> None:
        """Enter ERR: everything outstanding is flushed, unsignalled requests too."""
        self.state = ERR
        self.show_writes()
        if not self.device.nic.flushes_on_error:
            return
        while self.delivered:
            self.complete(self.delivered.popleft(), FLUSHED)
        while self.queued:
            self.complete(self.queued.popleft(), FLUSHED)
        while self.receives:
            self.complete_receive(self.receives.popleft(), FLUSHED)

    # The queues.

    def queue(self, request: SendRequest) -> None:
        """Append a request that `new_send` made."""
        self._send_seq += 1
        self.posted_count += 1
        self.queued.append(request)
        if self.state is ERR and self.device.nic.flushes_on_error:
            self.complete(self.queued.popleft(), FLUSHED)

    def queue_receive(self, wr_id: int, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._recv_seq += 1
        self.receives.append(ReceiveRequest(self._recv_seq, wr_id, pieces))
        if self.state is ERR and self.device.nic.flushes_on_error:
            self.complete_receive(self.receives.popleft(), FLUSHED)

    @property
    def next_seq(self) -> int:
        return self._send_seq + 1

    def complete(self, request: SendRequest, status: CompletionStatus) -> None:
        """Make the completion of a request, where it has one: failed ones always have."""
        if status is SUCCESS:
            if not (self.signals_all or request.flags & SIGNALED):
                return
            byte_len = request.nbytes if request.is_read else 0
            self.send_cq.put(
                Completion(self, request.seq, False, request.wr_id, SUCCESS, request.completion_opcode, byte_len)
            )
            return
        vendor_err = request.vendor_err if request.vendor_err is not None else self.vendor_err_of(status)
        self.send_cq.put(Completion(self, request.seq, False, request.wr_id, status, POISON, vendor_err=vendor_err))

    def vendor_err_of(self, status: CompletionStatus) -> int:
        base = self.device.nic.vendor_err
        return VENDOR_ERRS.get(status, base) if base else 0

    def complete_receive(
        self,
        receive: ReceiveRequest,
        status: CompletionStatus,
        request: SendRequest | None = None,
        *,
        src_qp: int = 0,
    ) -> None:
        if request is None or status is not SUCCESS:
            self.recv_cq.put(
                Completion(
                    self, receive.seq, True, receive.wr_id, status, POISON, vendor_err=self.vendor_err_of(status)
                )
            )
            return
        opcode = CompletionOpcode.RECV if request.is_send else CompletionOpcode.RECV_RDMA_WITH_IMM
        entry = Completion(
            self,
            receive.seq,
            True,
            receive.wr_id,
            SUCCESS,
            opcode,
            request.nbytes,
            request.imm_data if request.has_imm else 0,
            src_qp,
            2 if request.has_imm else 0,
        )
        self.recv_cq.put(entry, is_solicited=bool(request.flags & SendFlags.SOLICITED))

    def show_writes(self) -> None:
        """Let what was written be seen."""
        from tests.support.fake_fabric import copy_bytes

        while self.hidden:
            copy_bytes(*self.hidden.pop(0))

    def polled(self, entry: Completion) -> None:
        """A completion was taken: the slots up to its request are free."""
        if entry.is_receive:
            self.show_writes()
            self._recv_free = max(self._recv_free, entry.seq)
        else:
            self._send_free = max(self._send_free, entry.seq)
