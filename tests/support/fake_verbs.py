"""libibverbs without hardware: `FakeLibrary` satisfies `kvxfer.verbs.library.VerbsLibrary`, one per host or process.

    fabric = FakeFabric()
    a = FakeLibrary(fabric, connectx(address="10.0.0.1"), name="a")
    b = FakeLibrary(fabric, rxe(address="10.0.0.2"), name="b")

The structs it gives out are real ones, allocated by cffi; data really moves between registered memory; failing calls
answer as in C. What a device would do silently wrong is an AssertionError here: a pointer that was destroyed, one of
another process, an event that was never acknowledged. `live` counts objects, `calls` counts calls, `fail` makes the
n-th call fail. Limits and misbehaviour are in `FakeNic`, paths and the order of deliveries in `FakeFabric`.
"""

from __future__ import annotations

import errno
from typing import Any

from kvxfer.verbs.abi import ffi
from kvxfer.verbs.enums import QueuePairType, SendFlags, WorkOpcode
from kvxfer.verbs.library import FastCalls
from tests.support.fake_device_calls import DeviceCalls, clear
from tests.support.fake_fabric import FakeFabric, Path, Traced, region_at
from tests.support.fake_nic import (
    GIB,
    FakeGid,
    FakeNic,
    FakePort,
    connectx,
    efa_like,
    erdma,
    gid,
    infiniband,
    ionic,
    irdma,
    iwarp,
    link_local,
    rxe,
)
from tests.support.fake_queue_pair import ERR, FIELDS, RESET, RTS, SQD, FakeQueuePair, SendRequest
from tests.support.fake_queues import (
    Completion,
    FakeChannel,
    FakeCompletionQueue,
    FakeContext,
    FakeDevice,
    FakeDomain,
    FakeMemoryRegion,
)

__all__ = [
    "GIB",
    "FakeDevice",
    "FakeFabric",
    "FakeGid",
    "FakeLibrary",
    "FakeMemoryRegion",
    "FakeNic",
    "FakePort",
    "FakeQueuePair",
    "Path",
    "Traced",
    "connectx",
    "efa_like",
    "erdma",
    "gid",
    "infiniband",
    "ionic",
    "irdma",
    "iwarp",
    "link_local",
    "region_at",
    "rxe",
]

CHAIN_MAX = 1_000_000
_SEND_WR = ffi.typeof("struct ibv_send_wr *")
_RECV_WR = ffi.typeof("struct ibv_recv_wr *")
INLINE = int(SendFlags.INLINE)
OPCODES = frozenset(range(5))
CAPS = ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")


class FakeLibrary(DeviceCalls):
    """One process's libibverbs; its arguments are in LibraryBase."""

    # Completions.

    def ibv_create_comp_channel(self, context: Any) -> Any:
        with self._lock:
            found = self._find(context, FakeContext)
            if error := self._ask("ibv_create_comp_channel", found.device):
                ffi.errno = error
                return ffi.NULL
            struct = self._new_struct("ibv_comp_channel", context)
            channel = FakeChannel(struct, found)
            struct.fd = channel.events.fd
            return self._new(channel)

    def ibv_destroy_comp_channel(self, channel: Any) -> int:
        with self._lock:
            found = self._find(channel, FakeChannel)
            if error := self._refuse_destroy("ibv_destroy_comp_channel", found):
                return error
            found.events.close()
            self._destroy(found)
            return 0

    def ibv_create_cq(self, context: Any, cqe: int, cq_context: Any, channel: Any, comp_vector: int) -> Any:
        with self._lock:
            found = self._find(context, FakeContext)
            nic = found.device.nic
            error = self._ask("ibv_create_cq", found.device)
            if not error and not (1 <= cqe <= nic.max_cqe and 0 <= comp_vector < nic.num_comp_vectors):
                error = errno.EINVAL
            if not error and found.device.live["cq"] >= nic.max_cq:
                error = errno.ENOMEM
            if error:
                ffi.errno = error
                return ffi.NULL
            granted = (1 << cqe.bit_length()) - 1 if nic.cqe_is_rounded else cqe
            behind = self._find(channel, FakeChannel) if channel != ffi.NULL else None
            struct = self._new_struct("ibv_cq", context, channel=channel, cq_context=cq_context, cqe=granted)
            if behind is not None:
                channel.refcnt += 1
            return self._new(FakeCompletionQueue(struct, found, behind, granted))

    def ibv_destroy_cq(self, cq: Any) -> int:
        with self._lock:
            found = self._find(cq, FakeCompletionQueue)
            if error := self._refuse_destroy("ibv_destroy_cq", found):
                return error
            missing = found.events_got - found.events_acked
            assert not missing, f"ibv_destroy_cq blocks for ever: {missing} events are not acknowledged"
            if found.channel is not None:
                found.channel.struct.refcnt -= 1
                found.channel.events.drop(found)
            self._destroy(found)
            return 0

    def ibv_get_cq_event(self, channel: Any, cq: Any, cq_context: Any) -> int:
        found = self._find(channel, FakeChannel)
        with self._lock:
            if error := self._count("ibv_get_cq_event", found.device):
                ffi.errno = error
                return -1
        try:
            queue = found.events.get()
        except BlockingIOError as exc:
            ffi.errno = exc.errno or errno.EAGAIN
            return -1
        with self._lock:
            queue.events_got += 1
            cq[0] = queue.struct
            cq_context[0] = queue.struct.cq_context
            return 0

    def ibv_ack_cq_events(self, cq: Any, count: int) -> None:
        with self._lock:
            found = self._find(cq, FakeCompletionQueue)
            self.calls["ibv_ack_cq_events"] += 1
            found.events_acked += count
            assert found.events_acked <= found.events_got, "more events are acknowledged than there were"

    def ibv_req_notify_cq(self, cq: Any, solicited_only: int) -> int:
        with self._lock:
            found = self._find(cq, FakeCompletionQueue)
            if error := self._count("ibv_req_notify_cq", found.device):
                return error
            if found.armed != "all":
                found.armed = "solicited" if solicited_only else "all"
            return 0

    def ibv_poll_cq(self, cq: Any, count: int, wc: Any) -> int:
        with self._lock:
            found = self._find(cq, FakeCompletionQueue)
            if error := self._count("ibv_poll_cq", found.device):
                return -error
            self.fabric.polled()
            taken = 0
            while taken < count and found.entries:
                entry = found.entries.popleft()
                entry.qp.polled(entry)
                _fill_completion(wc[taken], entry)
                taken += 1
            return taken

    # Queue pairs.

    def ibv_create_qp(self, pd: Any, attributes: Any) -> Any:
        with self._lock:
            domain = self._find(pd, FakeDomain)
            device = domain.device
            send_cq = self._find(attributes.send_cq, FakeCompletionQueue)
            recv_cq = self._find(attributes.recv_cq, FakeCompletionQueue)
            error = self._ask("ibv_create_qp", device)
            if not error and not send_cq.device is recv_cq.device is device:
                error = errno.EINVAL
            error = error or _refuse_queue_pair(device, attributes)
            if error:
                ffi.errno = error
                return ffi.NULL
            struct = self._new_struct("ibv_qp", pd.context, pd=pd, qp_context=attributes.qp_context)
            struct.send_cq, struct.recv_cq = attributes.send_cq, attributes.recv_cq
            struct.qp_num, struct.qp_type = device.new_qp_number(), attributes.qp_type
            struct.state = device.nic.create_state
            qp = FakeQueuePair(struct, domain, send_cq, recv_cq, struct.qp_num)
            qp.state = device.nic.create_state
            qp.signals_all = bool(attributes.sq_sig_all)
            if device.nic.granted_send_wr_max is not None:
                attributes.cap.max_send_wr = min(attributes.cap.max_send_wr, device.nic.granted_send_wr_max)
            qp.caps = {name: int(getattr(attributes.cap, name)) for name in CAPS}
            device.queue_pairs[qp.number] = qp
            for queue in {id(send_cq): send_cq, id(recv_cq): recv_cq}.values():
                queue.queue_pairs.append(qp)
            return self._new(qp)

    def ibv_destroy_qp(self, qp: Any) -> int:
        with self._lock:
            found = self._find(qp, FakeQueuePair)
            if error := self._refuse_destroy("ibv_destroy_qp", found):
                return error
            found.destroy()
            self._destroy(found)
            self.fabric.polled()
            return 0

    def ibv_modify_qp(self, qp: Any, attributes: Any, mask: int) -> int:
        with self._slowly("ibv_modify_qp"), self._lock:
            found = self._find(qp, FakeQueuePair)
            if error := self._ask("ibv_modify_qp", found.device):
                return error
            error = found.modify(attributes, mask)
            self.fabric.polled()  # a peer's request may have waited for this
            return error

    def ibv_query_qp(self, qp: Any, attributes: Any, mask: int, init: Any) -> int:
        with self._lock:
            found = self._find(qp, FakeQueuePair)
            if error := self._ask("ibv_query_qp", found.device):
                return error
            clear(attributes, "struct ibv_qp_attr")
            clear(init, "struct ibv_qp_init_attr")
            attributes.qp_state = attributes.cur_qp_state = found.state
            qp.state = found.state
            for name in FIELDS.values():
                setattr(attributes, name, found.attributes.get(name, 0))
            _fill_address(attributes.ah_attr, found.address)
            for name, value in found.caps.items():
                setattr(attributes.cap, name, value)
                setattr(init.cap, name, value)
            init.send_cq, init.recv_cq = qp.send_cq, qp.recv_cq
            init.qp_type, init.sq_sig_all = qp.qp_type, int(found.signals_all)
            return 0

    def ibv_post_send(self, qp: Any, wr: Any, bad_wr: Any) -> int:
        with self._lock:
            found = self._find(qp, FakeQueuePair)
            fault = self._count_posts("ibv_post_send", found.device)
            wr = ffi.cast(_SEND_WR, wr)  # an array will do in C
            error = row = 0
            while wr != ffi.NULL:
                assert row < CHAIN_MAX, "the chain of work requests has no end"
                request = None
                if fault is not None and row == fault.row:
                    error = fault.errno
                else:
                    request = _read_send(found, wr)
                    error = request if isinstance(request, int) else 0
                if error:
                    bad_wr[0] = wr
                    break
                assert isinstance(request, SendRequest)
                found.queue(request)
                wr = wr.next
                row += 1
            self.fabric.posted(found)
            return error

    def ibv_post_recv(self, qp: Any, wr: Any, bad_wr: Any) -> int:
        with self._lock:
            found = self._find(qp, FakeQueuePair)
            fault = self._count_posts("ibv_post_recv", found.device)
            wr = ffi.cast(_RECV_WR, wr)
            row = error = 0
            while wr != ffi.NULL:
                assert row < CHAIN_MAX, "the chain of work requests has no end"
                if fault is not None and row == fault.row:
                    error = fault.errno
                elif found.state is RESET or wr.num_sge > found.caps["max_recv_sge"]:
                    error = errno.EINVAL
                elif not found.recv_room:
                    error = errno.ENOMEM
                if error:
                    bad_wr[0] = wr
                    break
                found.queue_receive(wr.wr_id, _read_pieces(wr))
                wr = wr.next
                row += 1
            self.fabric.receive_posted()
            return error

    # The process.

    def ibv_fork_init(self) -> int:
        with self._lock:
            error = self._count("ibv_fork_init")
            return error or (errno.EINVAL if self.live["mr"] and self.fork_status != 2 else 0)

    def ibv_is_fork_initialized(self) -> int:
        return self.fork_status

    def check_layout(self, context: Any) -> str:
        self._find(context, FakeContext)
        return ""

    def fast_calls(self, context: Any) -> FastCalls:
        self._find(context, FakeContext)
        return FastCalls(self.ibv_post_send, self.ibv_post_recv, self.ibv_poll_cq, self.ibv_req_notify_cq)


def _refuse_queue_pair(device: FakeDevice, attributes: Any) -> int:
    """Return the error number with which ibv_create_qp refuses; 0 for none."""
    nic, cap = device.nic, attributes.cap
    kind = QueuePairType(attributes.qp_type)
    if kind in nic.refused_qp_types or kind is not QueuePairType.RC:
        return errno.EOPNOTSUPP
    if max(cap.max_send_wr, cap.max_recv_wr) > nic.max_qp_wr or max(cap.max_send_sge, cap.max_recv_sge) > nic.max_sge:
        return nic.create_errno
    if cap.max_inline_data > nic.max_inline:
        return nic.create_errno
    if nic.send_queue_sges_max is not None and cap.max_send_wr * max(1, cap.max_send_sge) > nic.send_queue_sges_max:
        return errno.ENOMEM
    return errno.ENOMEM if device.live["qp"] >= nic.max_qp else 0


def _read_pieces(wr: Any) -> list[tuple[int, int, int]]:
    sges = wr.sg_list
    return [(sges[i].addr, sges[i].length, sges[i].lkey) for i in range(wr.num_sge)]


def _read_send(qp: FakeQueuePair, wr: Any) -> SendRequest | int:
    """Return a work request as Python keeps it, or the error number with which it is refused at once."""
    flags, opcode = wr.send_flags, wr.opcode
    if qp.state not in (RTS, SQD, ERR):
        return errno.EINVAL
    if opcode not in OPCODES or not 0 <= wr.num_sge <= qp.caps["max_send_sge"]:
        return errno.EINVAL
    if qp.send_room < 1:
        return errno.ENOMEM
    pieces = _read_pieces(wr)
    nbytes = sum(size for _, size, _ in pieces)
    payload = None
    if flags & INLINE:
        if nbytes > qp.caps["max_inline_data"] or opcode == WorkOpcode.RDMA_READ:
            return errno.EINVAL
        payload = b"".join(bytes(ffi.buffer(ffi.cast("char *", address), size)) for address, size, _ in pieces)
    rdma = wr.wr.rdma
    return SendRequest(
        qp.next_seq, wr.wr_id, opcode, flags, wr.imm_data, rdma.remote_addr, rdma.rkey, pieces, payload, nbytes
    )


def _fill_completion(wc: Any, entry: Completion) -> None:
    wc.wr_id = entry.wr_id
    wc.status = entry.status
    wc.opcode = entry.opcode
    wc.vendor_err = entry.vendor_err
    wc.byte_len = entry.byte_len
    wc.imm_data = entry.imm_data
    wc.qp_num = entry.qp.number
    wc.src_qp = entry.src_qp
    wc.wc_flags = entry.wc_flags
    wc.pkey_index = wc.slid = wc.sl = wc.dlid_path_bits = 0


def _fill_address(ah: Any, address: dict[str, Any]) -> None:
    for name in ("dlid", "sl", "src_path_bits", "static_rate", "is_global", "port_num"):
        setattr(ah, name, address.get(name, 0))
    for name in ("flow_label", "sgid_index", "hop_limit", "traffic_class"):
        setattr(ah.grh, name, address.get(name, 0))
    ffi.buffer(ffi.addressof(ah.grh.dgid), 16)[:] = address.get("dgid", bytes(16))
