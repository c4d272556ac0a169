"""One end of an RC connection at the level of C calls, over a FakeLibrary: what a test needs that goes below kvxfer.

It uses nothing of kvxfer.verbs but declarations and numbers, so a test of the fake cannot be right by a slip on both
sides. `Endpoint.connect` brings two of them to RTS; every attribute can be changed on the way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvxfer.verbs.abi import ffi
from kvxfer.verbs.enums import Access, CompletionStatus, QueuePairMask, QueuePairState, QueuePairType, WorkOpcode
from tests.support.fake_verbs import FakeLibrary, FakeQueuePair

M = QueuePairMask
ALL_RIGHTS = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
INIT_MASK = M.STATE | M.PORT | M.PKEY_INDEX | M.ACCESS_FLAGS
RTR_MASK = M.STATE | M.AV | M.PATH_MTU | M.DEST_QPN | M.RQ_PSN | M.MAX_DEST_RD_ATOMIC | M.MIN_RNR_TIMER
RTS_MASK = M.STATE | M.SQ_PSN | M.TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.MAX_QP_RD_ATOMIC


class Polled(NamedTuple):
    """One completion."""

    wr_id: int
    status: CompletionStatus
    opcode: int
    byte_len: int
    imm_data: int
    qp_num: int
    vendor_err: int


class Endpoint:
    """A device, a protection domain, a completion queue with its channel, a queue pair in RESET.

    pd: a protection domain that exists; by default the device is opened anew for its own one.
    """

    def __init__(self, library: FakeLibrary, device: int = 0, *, pd: Any = None, cqe: int = 1000, **caps: int) -> None:
        self.library = library
        self.owns_pd = pd is None
        if pd is None:
            devices = library.ibv_get_device_list(ffi.NULL)
            self.context = library.ibv_open_device(devices[device])
            library.ibv_free_device_list(devices)
            self.pd = library.ibv_alloc_pd(self.context)
        else:
            self.pd, self.context = pd, pd.context
        self.channel = library.ibv_create_comp_channel(self.context)
        self.cq = library.ibv_create_cq(self.context, cqe, ffi.NULL, self.channel, 0)
        self.qp = ffi.NULL
        self.regions: list[Any] = []
        self.gid_index = max(library.devices[device].nic.port(1).gids, default=0)
        self.create_qp(**caps)

    @property
    def fake(self) -> FakeQueuePair:
        found: FakeQueuePair = self.library.find(self.qp)
        return found

    @property
    def state(self) -> QueuePairState:
        attributes, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
        assert self.library.ibv_query_qp(self.qp, attributes, int(M.STATE), init) == 0
        return QueuePairState(attributes.qp_state)

    def create_qp(self, **caps: int) -> None:
        init = ffi.new("struct ibv_qp_init_attr *")
        init.send_cq = init.recv_cq = self.cq
        init.qp_type = QueuePairType.RC
        asked = {"max_send_wr": 128, "max_recv_wr": 128, "max_send_sge": 2, "max_recv_sge": 2, "max_inline_data": 0}
        for name, value in {**asked, **caps}.items():
            setattr(init.cap, name, value)
        self.qp = self.library.ibv_create_qp(self.pd, init)
        assert self.qp != ffi.NULL, f"errno {ffi.errno}"

    def register(self, memory: np.ndarray[Any, Any], access: int = ALL_RIGHTS) -> Any:
        address = memory.__array_interface__["data"][0]
        region = self.library.ibv_reg_mr(self.pd, address, memory.nbytes, int(access))
        assert region != ffi.NULL, f"errno {ffi.errno}"
        self.regions.append(region)
        return region

    def modify(self, mask: int, **fields: Any) -> int:
        attributes = ffi.new("struct ibv_qp_attr *")
        for name, value in fields.items():
            setattr(attributes, name, value)
        return self.library.ibv_modify_qp(self.qp, attributes, int(mask))

    def to_init(self, **changes: Any) -> int:
        fields = {"port_num": 1, "pkey_index": 0, "qp_access_flags": int(ALL_RIGHTS), **changes}
        return self.modify(INIT_MASK, qp_state=QueuePairState.INIT, **fields)

    def to_rtr(self, peer: Endpoint, **changes: Any) -> int:
        fields = {
            "path_mtu": 5,
            "dest_qp_num": peer.qp.qp_num,
            "rq_psn": 100,
            "max_dest_rd_atomic": 1,
            "min_rnr_timer": 12,
            **changes,
        }
        ah = fields.pop("ah", {})
        attributes = ffi.new("struct ibv_qp_attr *")
        attributes.qp_state = QueuePairState.RTR
        for name, value in fields.items():
            setattr(attributes, name, value)
        self.fill_address(attributes.ah_attr, peer, **ah)
        return self.library.ibv_modify_qp(self.qp, attributes, int(RTR_MASK))

    def fill_address(self, ah: Any, peer: Endpoint, **changes: Any) -> None:
        port = peer.fake.device.nic.port(1)
        row = port.gids.get(changes.pop("dgid_index", peer.gid_index))
        dgid = changes.pop("dgid", row.value if row else bytes(16))
        fields = {"is_global": int(port.lid == 0), "dlid": port.lid, "port_num": 1}
        grh = {"sgid_index": self.gid_index, "hop_limit": 64}
        for name, value in changes.items():
            (fields if name in fields else grh)[name] = value
        for name, value in fields.items():
            setattr(ah, name, value)
        for name, value in grh.items():
            setattr(ah.grh, name, value)
        ffi.buffer(ffi.addressof(ah.grh.dgid), 16)[:] = dgid

    def to_rts(self, **changes: Any) -> int:
        fields = {"sq_psn": 100, "timeout": 14, "retry_cnt": 6, "rnr_retry": 7, "max_rd_atomic": 1, **changes}
        return self.modify(RTS_MASK, qp_state=QueuePairState.RTS, **fields)

    def to_error(self) -> int:
        return self.modify(M.STATE, qp_state=QueuePairState.ERR)

    def connect(self, peer: Endpoint) -> None:
        """Bring this end and `peer` to RTS."""
        for end, other in ((self, peer), (peer, self)):
            assert end.to_init() == 0
            assert end.to_rtr(other) == 0
        for end in (self, peer):
            assert end.to_rts() == 0

    def post(self, *requests: dict[str, Any]) -> tuple[int, int]:
        """Post one chain; return (errno, how many were taken).

        A request: opcode, remote, rkey, pieces [(address, nbytes, lkey)], and wr_id, flags, imm where they matter.
        """
        chain = ffi.new("struct ibv_send_wr[]", len(requests))
        keep = []
        for row, (wr, given) in enumerate(zip(chain, requests, strict=True)):
            pieces = given.get("pieces", [])
            sges = _sges(pieces)
            keep.append(sges)
            wr.wr_id = given.get("wr_id", row)
            wr.sg_list, wr.num_sge = sges, len(pieces)
            wr.opcode = given["opcode"]
            wr.send_flags = given.get("flags", 2)
            wr.imm_data = given.get("imm", 0)
            wr.wr.rdma.remote_addr, wr.wr.rdma.rkey = given.get("remote", 0), given.get("rkey", 0)
            wr.next = chain + row + 1 if row + 1 < len(requests) else ffi.NULL
        bad = ffi.new("struct ibv_send_wr **")
        error = self.library.ibv_post_send(self.qp, chain, bad)
        return error, bad[0] - (chain + 0) if error else len(requests)

    def rdma(
        self, opcode: WorkOpcode, local: Any, remote: Any, nbytes: int | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return a request between two regions, from their beginnings; `at` and `to` are offsets."""
        at, to = more.pop("at", 0), more.pop("to", 0)
        size = local.length - at if nbytes is None else nbytes
        address = int(ffi.cast("uintptr_t", local.addr)) + at
        return {
            "opcode": opcode,
            "pieces": [(address, size, local.lkey)],
            "remote": int(ffi.cast("uintptr_t", remote.addr)) + to,
            "rkey": remote.rkey,
            **more,
        }

    def post_receive(self, *, pieces: list[tuple[int, int, int]] | None = None, wr_id: int = 0) -> int:
        wr = ffi.new("struct ibv_recv_wr *")
        sges = _sges(pieces or [])
        wr.wr_id, wr.sg_list, wr.num_sge = wr_id, sges, len(pieces or [])
        return self.library.ibv_post_recv(self.qp, wr, ffi.new("struct ibv_recv_wr **"))

    def poll(self, count: int = 64) -> list[Polled]:
        found = ffi.new("struct ibv_wc[]", count)
        taken = self.library.ibv_poll_cq(self.cq, count, found)
        assert taken >= 0
        return [
            Polled(wc.wr_id, CompletionStatus(wc.status), wc.opcode, wc.byte_len, wc.imm_data, wc.qp_num, wc.vendor_err)
            for wc in found[0:taken]
        ]

    def close(self) -> None:
        library = self.library
        assert library.ibv_destroy_qp(self.qp) == 0
        for region in self.regions:
            assert library.ibv_dereg_mr(region) == 0
        assert library.ibv_destroy_cq(self.cq) == 0
        assert library.ibv_destroy_comp_channel(self.channel) == 0
        if self.owns_pd:
            assert library.ibv_dealloc_pd(self.pd) == 0
            assert library.ibv_close_device(self.context) == 0


def _sges(pieces: list[tuple[int, int, int]]) -> Any:
    sges = ffi.new("struct ibv_sge[]", max(1, len(pieces)))
    for row, piece in enumerate(pieces):
        sges[row].addr, sges[row].length, sges[row].lkey = piece
    return sges
