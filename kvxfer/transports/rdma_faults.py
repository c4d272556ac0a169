"""What a failed completion means: whose fault it is, and the error that the user gets. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.errors import CompletionError, RemoteAccessError, TransferError
from kvxfer.verbs.enums import CompletionStatus

if TYPE_CHECKING:
    from kvxfer.transports.rdma_queue import Fault
    from kvxfer.transports.rdma_rail import Rail

__all__ = ["fault_error", "is_of_path"]

_OF_REQUEST = frozenset(
    {
        CompletionStatus.LOC_LEN_ERR,
        CompletionStatus.LOC_PROT_ERR,
        CompletionStatus.LOC_ACCESS_ERR,
        CompletionStatus.MW_BIND_ERR,
        CompletionStatus.REM_INV_REQ_ERR,
        CompletionStatus.REM_ACCESS_ERR,
        CompletionStatus.REM_OP_ERR,
    }
)
"""A request is wrong: it would fail on any path. Everything else, statuses of newer devices among it, is the path's."""

_REMEDIES = {
    CompletionStatus.RETRY_EXC_ERR: "Check that the peer runs and its port is up, that UDP port 4791 is open between "
    "the two addresses, that the network carries packets of the path MTU (if not, path_mtu_nbytes_max 1024), and that "
    "no more routers are between than the hop limit (rdma_hop_limit); `kvxfer doctor` on both ends says more.",
    CompletionStatus.REM_ACCESS_ERR: "The peer unregistered that memory, or registered it without the right: look at "
    "its log; `segment.refresh()` asks for its regions again.",
    CompletionStatus.LOC_PROT_ERR: "The local memory was freed or unmapped while it was registered.",
    CompletionStatus.WR_FLUSH_ERR: "The queue pair was stopped under the requests: a port that went down, or a peer "
    "that dropped its end.",
    CompletionStatus.LOC_QP_OP_ERR: "The local port went down, or the device was removed: `kvxfer devices` shows it.",
}


def is_of_path(status: CompletionStatus) -> bool:
    """Whether the same request may succeed on another path or a new connection."""
    return status not in _OF_REQUEST


def fault_error(fault: Fault, rail: Rail, peer: str) -> TransferError:
    """Return the error for the batch that a broken queue belongs to, with everything that is known of the place."""
    where = rail.facts()
    told = ", ".join(f"{name} {value}" for name, value in where.items())
    lane = fault.lane
    if lane is None:
        request, values = "", {}
    else:
        at = fault.slice
        row = lane.transfer.first_row_of(int(lane.rows[at]))
        local, remote, nbytes = int(lane.local[at]), int(lane.remote[at]), int(lane.nbytes[at])
        lkey = lane.lkey if isinstance(lane.lkey, int) else int(lane.lkey[at])
        rkey = lane.rkey if isinstance(lane.rkey, int) else int(lane.rkey[at])
        request = (
            f" Row {row}: {lane.transfer.opcode.name} of {nbytes} bytes, local {local:#x} (key {lkey:#x}), remote "
            f"{remote:#x} (key {rkey:#x})."
        )
        values = {
            "row": row,
            "local_addr": local,
            "remote_addr": remote,
            "row_nbytes": nbytes,
            "lkey": lkey,
            "rkey": rkey,
        }
    kind = RemoteAccessError if fault.status is CompletionStatus.REM_ACCESS_ERR else CompletionError
    rows = {"rows": (values["row"],)} if "row" in values and not is_of_path(fault.status) else {}
    return kind(
        f"the RDMA connection to {peer} broke: {fault}. {rail.label}: {told}.{request}",
        remedy=_REMEDIES.get(fault.status, "The kernel's log (dmesg) and the vendor's tools know what the device saw."),
        peer=peer,
        transport="rdma",
        status=fault.status.name,
        vendor_err=fault.vendor_err,
        device=rail.nic.name,
        **values,
        **rows,
        **{name.replace(" ", "_"): value for name, value in where.items()},
    )
