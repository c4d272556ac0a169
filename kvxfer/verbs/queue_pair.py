"""RC queue pairs: made, brought from state to state, posted to.

A step that cannot work is refused before the call, with the attribute that is missing or out of range; a step that the
device refuses raises with everything it was given, what device and port allow, the likely culprit and a remedy.
Who knows: `qp_states.py` what each step needs, `qp_diagnosis.py` why one failed, `work_request.py` what is posted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kvxfer.errors import UsageError, VerbsError, VerbsLayoutError
from kvxfer.log import get_logger
from kvxfer.verbs.enums import Access, Mtu, QueuePairMask, QueuePairState, QueuePairType
from kvxfer.verbs.handle import Handle
from kvxfer.verbs.library import errno_of, errno_text, ffi
from kvxfer.verbs.qp_attributes import from_c, read_capabilities, to_c, to_plain, to_text
from kvxfer.verbs.qp_capabilities import QueuePairCapabilities
from kvxfer.verbs.qp_diagnosis import Attempt, Surroundings
from kvxfer.verbs.qp_errors import creation_error, find_bad, receive_error, send_error, step_failure, step_refusal
from kvxfer.verbs.qp_states import ATTRIBUTE_MASKS, find_fault, mask_of

if TYPE_CHECKING:
    from kvxfer.verbs.completion_queue import CompletionQueue
    from kvxfer.verbs.device import Context, Port
    from kvxfer.verbs.gid import GidTable
    from kvxfer.verbs.library import CData
    from kvxfer.verbs.port import AddressVector
    from kvxfer.verbs.protection_domain import ProtectionDomain
    from kvxfer.verbs.work_request import WorkRequestBatch

__all__ = ["QueuePair", "QueuePairCapabilities"]

log = get_logger(__name__)

MIN_RNR_TIMER = 12  # 0.64 ms; what NCCL, perftest and Mooncake set
TIMEOUT = 18  # 4.096 us * 2**18 = 1.07 s a try, as UCX: long enough for a link flap or a storm of pause frames
RETRY_COUNT = 7  # as every engine; soft RoCE takes 7 for "for ever", so nothing ends there but by a deadline of ours
RNR_RETRY = 7  # for ever: a peer that is slow to post receives is no error, and the caller has a deadline of its own

_QUERIED = mask_of(ATTRIBUTE_MASKS) | QueuePairMask.STATE
_WR_NBYTES = ffi.sizeof("struct ibv_send_wr")
_RECV_WR_NBYTES = ffi.sizeof("struct ibv_recv_wr")


class QueuePair(Handle):
    """One RC queue pair. One thread at a time may post to it."""

    noun: ClassVar[str] = "queue pair"

    def __init__(
        self,
        protection_domain: ProtectionDomain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        *,
        capabilities: QueuePairCapabilities,
    ) -> None:
        """Make a queue pair.

        capabilities: what it should hold; `.capabilities` is what was granted.

        Raises VerbsError with what was asked for and what the device allows.
        """
        self.context = protection_domain.context
        init = ffi.new("struct ibv_qp_init_attr *")
        init.send_cq, init.recv_cq = send_cq.pointer, recv_cq.pointer
        init.cap = dataclasses.asdict(capabilities)
        init.qp_type = QueuePairType.RC
        pointer = protection_domain.library.ibv_create_qp(protection_domain.pointer, init)
        if pointer == ffi.NULL:
            raise creation_error(self.context, ffi.errno, capabilities)
        library = protection_domain.library
        super().__init__(
            library, pointer, library.ibv_destroy_qp, "ibv_destroy_qp", protection_domain, send_cq, recv_cq
        )
        self.protection_domain = protection_domain
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.number = int(pointer.qp_num)
        self.capabilities = read_capabilities(init.cap)
        self.state = QueuePairState(pointer.state)
        """The state that it was brought to; an error moves it to ERR without a word here: see `query`. A new one is in
        RESET, but for the iWARP devices that start in INIT."""
        self.attributes: dict[str, Any] = {}
        """All that the steps so far have set, by the names of struct ibv_qp_attr."""
        self._steps: dict[str, dict[str, Any]] = {}
        self._check_layout()
        calls = self.context.fast_calls
        self._post_send, self._post_recv = calls.post_send, calls.post_recv
        self._bad_send = ffi.new("struct ibv_send_wr **")
        self._bad_receive = ffi.new("struct ibv_recv_wr **")
        self._receives: CData = ffi.NULL

    # States.

    def to_init(
        self, *, port: int, pkey_index: int = 0, access: Access = Access.REMOTE_WRITE | Access.REMOTE_READ
    ) -> None:
        """Bind a new queue pair to a port; `access` is what the peer may do to registered memory through it."""
        self.modify(QueuePairState.INIT, port_num=port, pkey_index=pkey_index, qp_access_flags=access)

    def to_rtr(
        self,
        *,
        address: AddressVector,
        dest_qp_num: int,
        path_mtu: Mtu,
        rq_psn: int,
        max_dest_rd_atomic: int,
        min_rnr_timer: int = MIN_RNR_TIMER,
    ) -> None:
        """Make it ready to receive from one peer.

        path_mtu: the smaller of both ends' active MTU. rq_psn: the peer's `sq_psn`.
        max_dest_rd_atomic: reads of the peer answered at once; the peer's `max_rd_atomic` must not be more.
        """
        self.modify(
            QueuePairState.RTR,
            ah_attr=address,
            path_mtu=path_mtu,
            dest_qp_num=dest_qp_num,
            rq_psn=rq_psn,
            max_dest_rd_atomic=max_dest_rd_atomic,
            min_rnr_timer=min_rnr_timer,
        )

    def to_rts(
        self,
        *,
        sq_psn: int,
        max_rd_atomic: int,
        timeout: int = TIMEOUT,
        retry_cnt: int = RETRY_COUNT,
        rnr_retry: int = RNR_RETRY,
    ) -> None:
        """Make it ready to send; the peer must be ready to receive before something is posted.

        timeout: 4.096 us * 2**timeout for each of 1 + retry_cnt tries; it cannot be changed later.
        """
        self.modify(
            QueuePairState.RTS,
            sq_psn=sq_psn,
            max_rd_atomic=max_rd_atomic,
            timeout=timeout,
            retry_cnt=retry_cnt,
            rnr_retry=rnr_retry,
        )

    def to_error(self) -> None:
        """Stop it: everything posted ends as flushed, and the device drops what the peer still sends."""
        self.modify(QueuePairState.ERR)

    def modify(self, state: QueuePairState, **attributes: Any) -> None:
        """Take one step, with fields of struct ibv_qp_attr by their names; `ah_attr` is an AddressVector.

        After a failure the queue pair should be closed: not every driver lets it try again.

        Raises QueuePairStateError; `.called` says whether the device was asked at all.
        """
        for name in attributes:
            if name not in ATTRIBUTE_MASKS:
                known = ", ".join(ATTRIBUTE_MASKS)
                raise UsageError(f"{name!r} is no attribute of a queue pair.", remedy=f"There are {known}.")
        pointer = self.pointer
        port = self._find_port(attributes)
        bound_port = self.attributes.get("port_num", 0)
        fault = find_fault(self.state, state, attributes, port=port, bound_port=bound_port)
        if fault is not None:
            raise step_refusal(self, state, attributes, fault)
        given = ffi.new("struct ibv_qp_attr *", to_c(state, attributes))
        error = errno_of(self.library.ibv_modify_qp(pointer, given, mask_of(attributes) | QueuePairMask.STATE))
        if error:
            attempt = Attempt(self.state, state, attributes, error)
            raise step_failure(self, attempt, self._look_around(attempt, port))
        transition = f"{self.state}->{state}"
        self.state = state
        self.attributes = {**self.attributes, **attributes}
        self._steps[transition] = told = to_plain(attributes)
        log.debug("queue_pair.modified", device=self.context.name, qp_num=self.number, transition=transition, **told)

    def query(self) -> dict[str, Any]:
        """Return what the device says, by the names of struct ibv_qp_attr: `qp_state` is the true one."""
        attributes = ffi.new("struct ibv_qp_attr *")
        init = ffi.new("struct ibv_qp_init_attr *")
        error = errno_of(self.library.ibv_query_qp(self.pointer, attributes, int(_QUERIED), init))
        if error:
            raise VerbsError(
                f"ibv_query_qp({self.label}) failed: {errno_text(error)}.",
                remedy="The device is gone or its driver is at fault; the kernel's log says more (dmesg).",
                verb="ibv_query_qp",
                errno=error,
                device=self.context.name,
                qp_num=self.number,
            )
        return from_c(attributes)

    # Posting.

    def post_send(self, batch: WorkRequestBatch, count: int | None = None, *, start: int = 0) -> None:
        """Post the chain of a batch by one call.

        count: only so many of its first requests. start: not those before this one, after a PostError that was
        overcome.

        Raises PostError where not all were taken: those before `bad_index` are on their way. It is -1 where the driver
        did not say which it refused; only ERR or `close` brings certainty then.
        """
        if count is not None and count != batch.count:
            batch.truncate(count)
        if not 0 <= start < batch.count:
            raise UsageError(f"nothing to post: {batch!r} from {start}.", remedy="Fill it first.")
        first = batch.first + start if start else batch.first
        error = self._post_send(self.pointer, first, self._bad_send)
        if error:
            error = errno_of(error)
            posted = find_bad(first, self._bad_send[0], _WR_NBYTES, batch.count - start)
            self._bad_send[0] = ffi.NULL  # a driver that sets nothing at its next refusal must not be believed
            raise send_error(self, error, batch, start, posted)

    def post_receives(self, count: int) -> None:
        """Post receives of zero bytes: each takes the immediate of one WRITE_WITH_IMM of the peer. Their wr_id is 0.

        Raises PostError where not all were taken.
        """
        if not 0 < count <= self.capabilities.max_recv_wr:
            raise UsageError(
                f"{count} receives, the queue pair holds 1 to {self.capabilities.max_recv_wr} (max_recv_wr).",
                remedy="Post fewer, or make the queue pair with a larger max_recv_wr.",
            )
        chain = self._receives or self._make_receives()
        chain[count - 1].next = ffi.NULL
        try:
            error = errno_of(self._post_recv(self.pointer, chain, self._bad_receive))
        finally:
            if count < self.capabilities.max_recv_wr:
                chain[count - 1].next = chain + count
        if error:
            posted = find_bad(chain, self._bad_receive[0], _RECV_WR_NBYTES, count)
            self._bad_receive[0] = ffi.NULL
            raise receive_error(self, error, count, posted)

    def _make_receives(self) -> CData:
        count = self.capabilities.max_recv_wr
        self._receives = ffi.new("struct ibv_recv_wr[]", count)
        for row in range(count - 1):
            self._receives[row].next = self._receives + row + 1
        return self._receives

    # What went wrong.

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return f"queue pair {self.number} on {self.context.name}"

    def _facts(self) -> dict[str, Any]:
        steps = {transition: f"({to_text(given)})" for transition, given in self._steps.items()}
        return {
            "device": self.context.name,
            "number": self.number,
            "state": self.state,
            **dataclasses.asdict(self.capabilities),
            **steps,
        }

    def _check_layout(self) -> None:
        """Refuse a library whose struct ibv_qp is not the one known here, rather than post through it."""
        pointer = self.pointer
        expected = {
            "context": self.context.pointer,
            "pd": self.protection_domain.pointer,
            "send_cq": self.send_cq.pointer,
            "recv_cq": self.recv_cq.pointer,
            "qp_type": QueuePairType.RC,
        }
        for name, value in expected.items():
            if getattr(pointer, name) != value:
                self.close()
                raise VerbsLayoutError(
                    f"{self.library.version or self.library.path} is not laid out as kvxfer knows libibverbs: "
                    f"ibv_qp.{name} is not what the queue pair was made with.",
                    remedy="Use the rdma-core of your distribution, or transports other than rdma.",
                    path=self.library.path,
                    check=f"ibv_qp.{name}",
                )

    def _look_around(self, attempt: Attempt, port: Port | None) -> Surroundings:
        """Ask the device what a diagnosis needs; what cannot be asked any more stays unknown."""
        actual: QueuePairState | None = None
        table: GidTable | None = None
        try:
            actual = self.query()["qp_state"]
            if port is not None and attempt.address is not None and attempt.address.is_global:
                table = self.context.query_gid_table(port.number)
        except (VerbsError, OSError):
            pass  # the failure of the step is what is told
        held = sum(sibling.attributes.get("max_dest_rd_atomic", 0) for sibling in _queue_pairs(self.context) - {self})
        return Surroundings(self.context.name, self.context.limits, port, table, actual, held)

    def _find_port(self, attributes: Mapping[str, Any]) -> Port | None:
        """Return the port that a step is about; None where it is about none, or the port cannot be asked."""
        address = attributes.get("ah_attr")
        number = attributes.get("port_num", self.attributes.get("port_num", 0)) if address is None else address.port
        if not attributes or not 0 < number <= self.context.limits.phys_port_cnt:
            return None
        try:
            return self.context.query_port(number)
        except VerbsError:
            return None


def _queue_pairs(context: Context) -> set[QueuePair]:
    """Return this process's queue pairs on a device; each is the child of a domain and of one or two queues."""
    return {child for parent in context.children for child in parent.children if isinstance(child, QueuePair)}
