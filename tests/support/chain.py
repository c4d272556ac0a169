"""Walk a chain of work requests as a driver does: by its pointers, not by its rows."""

from __future__ import annotations

from typing import NamedTuple

from kvxfer.verbs.library import ffi
from kvxfer.verbs.work_request import WorkRequestBatch

LENGTH_MAX = 1_000_000


class Range(NamedTuple):
    """One struct ibv_sge."""

    address: int
    nbytes: int
    lkey: int


class Request(NamedTuple):
    """One struct ibv_send_wr; imm_data in the byte order of this host."""

    wr_id: int
    opcode: int
    send_flags: int
    imm_data: int
    ranges: list[Range]
    remote_addr: int
    rkey: int


def walk(batch: WorkRequestBatch) -> list[Request]:
    """Return what a driver finds when it is given `batch.first`."""
    found: list[Request] = []
    request = batch.first
    while request != ffi.NULL:
        assert len(found) < LENGTH_MAX, "the chain has no end"
        sges = [request.sg_list[row] for row in range(request.num_sge)]
        rdma = request.wr.rdma
        found.append(
            Request(
                request.wr_id,
                request.opcode,
                request.send_flags,
                int.from_bytes(bytes(ffi.buffer(request))[36:40], "big"),
                [Range(sge.addr, sge.length, sge.lkey) for sge in sges],
                rdma.remote_addr,
                rdma.rkey,
            )
        )
        request = request.next
    return found
