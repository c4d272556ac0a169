"""Why a queue pair did not take a step, or could not be made: the likely culprits, the likeliest first.

Pure: an error number, what was given and what is known of the device go in, findings come out. The kernel says one
number for dozens of causes; which it says for which was read in its sources (6.12, drivers/infiniband: core/verbs.c,
core/addr.c, core/uverbs_cmd.c, sw/rxe) and in reports about real devices. `queue_pair.py` gathers the facts and raises.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.verbs.enums import Access, GidType, Mtu, PortState, QueuePairState
from kvxfer.verbs.gid import GidEntry, GidTable, format_gid, gid_address
from kvxfer.verbs.library import errno_name
from kvxfer.verbs.qp_states import Finding

if TYPE_CHECKING:
    from kvxfer.verbs.device import DeviceLimits, Port

__all__ = ["Attempt", "Surroundings", "allowed_text", "diagnose"]

CERTAIN, LIKELY, POSSIBLE = 3, 2, 1

QUEUE_PAIR_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
"""The rights that mean something on a queue pair; the others belong to memory regions."""

SMALL_READ_BUDGET = 256
"""max_res_rd_atom below this can be used up by a few queue pairs; most devices say thousands (AMD Pensando: 16)."""

ROWS_SHOWN_MAX = 6
"""Rows of a GID table that a message names."""

Suspect = tuple[int, Finding]


@dataclass(frozen=True)
class Attempt:
    """One step that was tried: states, fields by name (`ah_attr` an AddressVector), and the error number."""

    old: QueuePairState
    new: QueuePairState
    attributes: Mapping[str, Any]
    error: int

    @property
    def transition(self) -> str:
        return f"{self.old}->{self.new}"

    @property
    def address(self) -> Any:
        """The AddressVector; None where the step has none."""
        return self.attributes.get("ah_attr")


@dataclass(frozen=True)
class Surroundings:
    """What is known of the device around a step that failed; None and empty mean that it could not be asked.

    gid_table: of the port; only its row `sgid_index` is looked at.
    actual_state: what the device says of the queue pair after the failure.
    reads_held: max_dest_rd_atomic of this process's other queue pairs on the device, together.
    """

    device: str
    limits: DeviceLimits
    port: Port | None = None
    gid_table: GidTable | None = None
    actual_state: QueuePairState | None = None
    reads_held: int = 0

    def source(self, address: Any) -> GidEntry | None:
        """Return the row that an AddressVector sends from; None where it is empty, beyond the table or not known."""
        return None if self.gid_table is None else self.gid_table.find(address.sgid_index)


def diagnose(attempt: Attempt, around: Surroundings) -> tuple[Finding, ...]:
    """Return what probably stood in the way, the likeliest first; never empty.

    Beside a value that the device is known to refuse, those that only might be wrong are left out.
    """
    suspects: list[Suspect] = []
    for rule in _RULES:
        suspects.extend(rule(attempt, around))
    ranked = sorted(suspects, key=lambda suspect: -suspect[0])  # stable: within a rank the order of the rules
    least = LIKELY if ranked[0][0] == CERTAIN else 0
    found: dict[str, Finding] = {}
    for rank, finding in ranked:
        if rank >= least:
            found.setdefault(finding.culprit, finding)
    return tuple(found.values())


def allowed_text(attempt: Attempt, around: Surroundings) -> str:
    """Return what device and port allow, for a message."""
    limits, port = around.limits, around.port
    ports = "1 port" if limits.phys_port_cnt == 1 else f"{limits.phys_port_cnt} ports"
    device = (
        f"{around.device} has {ports}, max_qp_rd_atom {limits.max_qp_rd_atom}, max_qp_init_rd_atom "
        f"{limits.max_qp_init_rd_atom}, max_res_rd_atom {limits.max_res_rd_atom} ({around.reads_held} held by this "
        f"process's other queue pairs)"
    )
    words = [device]
    if port is not None:
        words.append(
            f"port {port.number} is {port.state}, {port.link_layer}, active MTU {port.active_mtu} of {port.max_mtu}, "
            f"GID table of {port.gid_tbl_len} rows, partition key table of {port.pkey_tbl_len}, LID {port.lid}"
        )
    row = None if attempt.address is None else around.source(attempt.address)
    if row is not None:
        words.append(f"GID row {row.index} is {_row_text(row)}, {row.type}")
    return "; ".join(words)


def _state(attempt: Attempt, around: Surroundings) -> Iterator[Suspect]:
    if attempt.error != errno.EINVAL:
        return
    if attempt.old is attempt.new is QueuePairState.RESET:
        yield (
            CERTAIN,
            Finding(
                "RESET->RESET",
                "some drivers refuse it (Intel irdma, E810)",
                "A fresh queue pair goes straight to INIT; to use one again, close it and make a new one.",
            ),
        )
    elif attempt.old is QueuePairState.RESET and attempt.new is QueuePairState.ERR:
        yield (
            CERTAIN,
            Finding("RESET->ERR", "a queue pair in RESET has nothing to flush", "Close it; nothing is posted to it."),
        )
    elif around.actual_state not in (None, attempt.old):
        yield (
            CERTAIN,
            Finding(
                "qp_state",
                f"the queue pair is in {around.actual_state}, no longer in {attempt.old}",
                "An error has moved it, or another step has; close it, look at its completions, and make a new one.",
            ),
        )


def _reads(attempt: Attempt, around: Surroundings) -> Iterator[Suspect]:
    limits, given = around.limits, attempt.attributes
    pairs = (
        ("max_dest_rd_atomic", "max_qp_rd_atom", limits.max_qp_rd_atom),
        ("max_rd_atomic", "max_qp_init_rd_atom", limits.max_qp_init_rd_atom),
    )
    if attempt.error not in (errno.EINVAL, errno.ENOMEM):
        return
    for name, limit_name, limit in pairs:
        if name in given and given[name] > limit:
            why = f"{name} {given[name]}, the device allows {limit} ({limit_name})"
            yield CERTAIN, Finding(name, why, f"Give {limit} at most, and no more than the peer offers.")
    if "max_dest_rd_atomic" not in given:
        if "max_rd_atomic" in given:
            yield (
                POSSIBLE,
                Finding(
                    "max_rd_atomic",
                    f"max_rd_atomic {given['max_rd_atomic']} may be more than the device has left",
                    "Try 4, then 1.",
                ),
            )
        return
    depth, budget = given["max_dest_rd_atomic"], limits.max_res_rd_atom
    if 0 < budget < around.reads_held + depth:
        why = (
            f"max_dest_rd_atomic {depth}: the whole device has {budget} (max_res_rd_atom), and this process's other "
            f"queue pairs hold {around.reads_held}"
        )
        remedy = f"Share them: {budget} divided by the number of queue pairs, 1 at least."
        yield (CERTAIN if around.reads_held else LIKELY), Finding("max_dest_rd_atomic", why, remedy)
    elif attempt.error == errno.ENOMEM or 0 < budget < SMALL_READ_BUDGET:
        why = (
            f"max_dest_rd_atomic {depth}: the whole device has {budget} (max_res_rd_atom), and queue pairs of other "
            f"processes may hold them"
        )
        yield LIKELY, Finding("max_dest_rd_atomic", why, "Try 4, then 1; the device shares them between all its users.")
    else:
        why = f"max_dest_rd_atomic {depth} is within what the device says, {limits.max_qp_rd_atom}, and may be too much"
        yield POSSIBLE, Finding("max_dest_rd_atomic", why, "Try 4, then 1.")


def _mtu(attempt: Attempt, around: Surroundings) -> Iterator[Suspect]:
    mtu = attempt.attributes.get("path_mtu")
    if attempt.error != errno.EINVAL or mtu is None or around.port is None:
        return
    if mtu > around.port.active_mtu:
        why = f"path_mtu {Mtu(mtu)}, the port's active MTU is {around.port.active_mtu}"
        yield CERTAIN, Finding("path_mtu", why, "Give the smaller of both ends' active MTU.")
    elif mtu > Mtu.MTU_1024:
        why = f"path_mtu {Mtu(mtu)} is within the port's {around.port.active_mtu}"
        yield POSSIBLE, Finding("path_mtu", why, "Try one step less.")


def _port(attempt: Attempt, around: Surroundings) -> Iterator[Suspect]:
    number = attempt.attributes.get("port_num")
    address = attempt.address
    if number is None and address is not None:
        number = address.port
    if number is not None and number > around.limits.phys_port_cnt:
        why = f"port {number}, the device has {around.limits.phys_port_cnt}"
        yield CERTAIN, Finding("port_num", why, "Name a port that exists.")
        return
    port = around.port
    if port is None:
        return
    if port.state is not PortState.ACTIVE:
        why = f"port {port.number} is {port.state}, not ACTIVE"
        row = None if address is None else around.source(address)
        netdev = row.netdev if row is not None and row.netdev else "<netdev>"
        remedy = f"Bring the link up: cable, switch, `ip link set {netdev} up`; on InfiniBand the subnet manager."
        certain = attempt.error in (errno.ETIMEDOUT, errno.ENODEV, errno.ENETUNREACH, errno.EHOSTUNREACH)
        yield (CERTAIN if certain else LIKELY), Finding("port state", why, remedy)
    index = attempt.attributes.get("pkey_index")
    if attempt.error == errno.EINVAL and index is not None and index >= port.pkey_tbl_len:
        why = f"pkey_index {index}, the port's table has {port.pkey_tbl_len} rows"
        yield CERTAIN, Finding("pkey_index", why, f"Rows count from 0: {port.pkey_tbl_len - 1} at most.")
    elif attempt.error == errno.EINVAL and index:
        why = f"row {index} of the partition key table may be empty"
        yield POSSIBLE, Finding("pkey_index", why, "Read it (ibv_query_pkey; sysfs ports/N/pkeys/), or give 0.")


def _access(attempt: Attempt, around: Surroundings) -> Iterator[Suspect]:
    access = attempt.attributes.get("qp_access_flags")
    if attempt.error not in (errno.EINVAL, errno.EOPNOTSUPP) or access is None:
        return
    strange = Access(access & ~QUEUE_PAIR_ACCESS)
    if strange:
        why = f"{strange} is a right of memory regions, not of queue pairs"
        yield CERTAIN, Finding("qp_access_flags", why, "Leave it out.")


def _source(attempt: Attempt, around: Surroundings) -> Iterator[Suspect]:
    address, table = attempt.address, around.gid_table
    if address is None or not address.is_global or table is None:
        return
    index, row = address.sgid_index, around.source(address)
    choose = f"Choose from the rows in use, {_rows_text(table)}; `kvxfer devices` tells which of them are usable."
    weight = CERTAIN if attempt.error in (errno.EINVAL, errno.ENODATA, errno.ENODEV, errno.ENOENT) else LIKELY
    if index >= table.length:
        why = f"sgid_index {index} is beyond the {table.length} rows of the GID table"
        yield weight, Finding("sgid_index", why, choose)
    elif row is None:
        why = f"sgid_index {index} is an empty row of the GID table"
        yield weight, Finding("sgid_index", why, choose)
    elif attempt.error == errno.ENODEV:
        why = f"sgid_index {index} is {_row_text(row)}; that netdev is down, gone or in another network namespace"
        yield LIKELY, Finding("sgid_index", why, f"Bring it up (`ip link set {row.netdev} up`). {choose}")
    elif row.type is GidType.ROCE_V1:
        why = f"sgid_index {index} is a RoCE v1 row, which no router carries and not every device has"
        yield POSSIBLE, Finding("sgid_index", why, "Choose the RoCE v2 row of the same address, at both ends.")
    elif attempt.error == errno.EINVAL:
        why = f"sgid_index {index} ({_row_text(row)}) may not suit this peer"
        yield POSSIBLE, Finding("sgid_index", why, choose)


def _peer(attempt: Attempt, around: Surroundings) -> Iterator[Suspect]:
    address = attempt.address
    if address is None or not address.is_global:
        return
    row, target = around.source(address), format_gid(address.dgid)
    if row is not None and (gid_address(row.value).version != gid_address(address.dgid).version):
        why = f"the GIDs are of two address families: own {format_gid(row.value)}, peer {target}"
        remedy = "Choose rows of one family at both ends: IPv4 with IPv4, IPv6 with IPv6."
        yield (CERTAIN if attempt.error == errno.EINVAL else LIKELY), Finding("dgid", why, remedy)
        return
    source = "an unknown GID" if row is None else _row_text(row)
    peer_ip = gid_address(address.dgid)
    device = row.netdev if row is not None and row.netdev else "<netdev>"
    if attempt.error == errno.ETIMEDOUT:
        why = (
            f"the neighbour was not resolved: from {source}, nothing answered ARP or ND for peer GID {target} or the "
            f"router to it"
        )
        remedy = (
            f"Try `ping -I {device} {peer_ip}`. Without an answer the peer is down or the two rails are not connected: "
            f"take another pair of devices. A peer that is starting up gives the same: try again. With an answer, see "
            f"that UDP port 4791 is open."
        )
        yield LIKELY, Finding("dgid", why, remedy)
    elif attempt.error in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        why = f"no route leads to peer GID {target} from {source}"
        remedy = f"Look with `ip route get {peer_ip} oif {device}`; add the route, or choose GIDs that share a subnet."
        yield LIKELY, Finding("dgid", why, remedy)
    if address.hop_limit <= 1 and attempt.error in (errno.EINVAL, errno.ETIMEDOUT, errno.ENETUNREACH):
        why = f"hop_limit {address.hop_limit} reaches no peer behind a router"
        yield POSSIBLE, Finding("hop_limit", why, "Give 64 or 255.")


def _other(attempt: Attempt, around: Surroundings) -> Iterator[Suspect]:
    """What an error number means by itself; the last word where no value is to blame."""
    rank = 0 if attempt.error == errno.EINVAL else POSSIBLE
    why, remedy = _ERRNO_WORDS.get(attempt.error, ("the driver gives no reason that is known here", _SEE_KERNEL))
    culprit = "the step" if attempt.error == errno.EINVAL else errno_name(attempt.error)
    is_of_peer = attempt.address is not None and attempt.address.is_global  # then `_peer` has said more
    if attempt.error not in (errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH) or not is_of_peer:
        yield rank, Finding(culprit, why, remedy)


def _row_text(row: GidEntry) -> str:
    return f"{format_gid(row.value)} on {row.netdev}" if row.netdev else format_gid(row.value)


def _rows_text(table: GidTable) -> str:
    rows = [f"{entry.index} ({_row_text(entry)}, {entry.type})" for entry in table.entries[:ROWS_SHOWN_MAX]]
    more = ["..."] if len(table.entries) > ROWS_SHOWN_MAX else []
    return ", ".join(rows + more) or "of which there are none"


_SEE_KERNEL = "Look into the kernel's log (`dmesg`): drivers say there what they do not return."
_ERRNO_WORDS = {
    errno.EINVAL: ("every value is within what device and port say", _SEE_KERNEL),
    errno.ENOMEM: (
        "the device or the kernel has no memory for it: too many queue pairs, or too low a limit of locked memory",
        "Make fewer queue pairs, with shorter queues, or raise the limit (`ulimit -l unlimited`).",
    ),
    errno.ENODEV: (
        "the device, or the netdev under it, has gone",
        "Look with `rdma link` and `ip link`; open the device anew when it is back.",
    ),
    errno.EOPNOTSUPP: (
        "the driver does not know one of the attributes",
        "Leave out what the step does not need; update the driver.",
    ),
    errno.EPERM: ("this process may not", "A container needs the device and, for some drivers, CAP_NET_RAW."),
    errno.EIO: ("the device does not answer; it may be in a reset", _SEE_KERNEL),
    errno.ENOSYS: ("the kernel does not know the call", "Update the kernel or its RDMA modules."),
    errno.ETIMEDOUT: ("the device did not answer the command in time", _SEE_KERNEL),
}

_RULES: tuple[Callable[[Attempt, Surroundings], Iterator[Suspect]], ...] = (
    _state,
    _port,
    _source,
    _reads,
    _mtu,
    _access,
    _peer,
    _other,
)
