"""Why a queue pair did not take a step, or could not be made: the likely culprits, the likeliest first.

Pure: an error number, what was given and what is known of the device go in, findings come out. The kernel says one
number for dozens of causes; what it says most often for which cause was read from its sources (6.12, drivers/infiniband:
core/verbs.c, core/addr.c, hw/*) and from reports about real devices. `queue_pair.py` gathers the facts and raises.
"""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.verbs.enums import Access, GidType, LinkLayer, Mtu, PortState, QueuePairState
from kvxfer.verbs.qp_states import Finding

if TYPE_CHECKING:
    from kvxfer.verbs.device import DeviceLimits, Port

__all__ = ["Attempt", "Surroundings", "diagnose", "gid_text"]

CERTAIN, LIKELY, POSSIBLE = 3, 2, 1

QUEUE_PAIR_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
"""The rights that mean something on a queue pair; the others belong to memory regions."""

SMALL_READ_BUDGET = 256
"""max_res_rd_atom below this can be used up by a few queue pairs; most devices say thousands (AMD Pensando: 16)."""

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

    source_gid: the row of the port's table that sgid_index names; empty or all zero for a hole.
    actual_state: what the device says of the queue pair after the failure.
    reads_held: max_dest_rd_atomic of this process's other queue pairs on the device, together.
    """

    device: str
    limits: DeviceLimits
    port: Port | None = None
    source_gid: bytes | None = None
    source_type: GidType | None = None
    source_netdev: str = ""
    actual_state: QueuePairState | None = None
    reads_held: int = 0


def diagnose(attempt: Attempt, around: Surroundings) -> tuple[Finding, ...]:
    """Return what probably stood in the way, the likeliest first; never empty."""
    suspects: list[Suspect] = []
    for rule in _RULES:
        suspects.extend(rule(attempt, around))
    ranked = sorted(suspects, key=lambda suspect: -suspect[0])  # stable: within a rank the order of the rules
    found: dict[str, Finding] = {}
    for _, finding in ranked:
        found.setdefault(finding.culprit, finding)
    return tuple(found.values())


def gid_text(gid: bytes) -> str:
    """Return a GID for a message; an IPv4 address that it carries stands beside it."""
    if len(gid) != 16:
        return gid.hex() or "none"
    address = ipaddress.IPv6Address(gid)
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)


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
        remedy = "Bring the link up: the cable, the switch, `ip link set ... up`; on InfiniBand the subnet manager."
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
    elif access & Access.REMOTE_ATOMIC and not around.limits.atomic_cap:
        why = "REMOTE_ATOMIC, and the device has no atomic operations (atomic_cap is 0)"
        yield CERTAIN, Finding("qp_access_flags", why, "Leave REMOTE_ATOMIC out.")


def _source(attempt: Attempt, around: Surroundings) -> Iterator[Suspect]:
    address, port = attempt.address, around.port
    if address is None or not address.is_global:
        return
    index = address.sgid_index
    choose = "Choose a row that has a value and a netdev that is up; `kvxfer devices` shows the table."
    weight = CERTAIN if attempt.error in (errno.EINVAL, errno.ENODATA, errno.ENODEV) else LIKELY
    if port is not None and index >= port.gid_tbl_len:
        why = f"sgid_index {index} is beyond the table's {port.gid_tbl_len} rows"
        yield weight, Finding("sgid_index", why, choose)
    elif around.source_gid is not None and not any(around.source_gid):
        yield weight, Finding("sgid_index", f"row {index} of the port's GID table is empty", choose)
    elif attempt.error == errno.ENODEV:
        netdev = f"its netdev {around.source_netdev}" if around.source_netdev else "its netdev"
        why = f"row {index} of the GID table ({_source_text(around)}): {netdev} is down, gone or in another namespace"
        yield LIKELY, Finding("sgid_index", why, choose)
    elif around.source_type is GidType.ROCE_V1:
        why = f"row {index} is RoCE v1, which no router carries and newer devices lack"
        yield POSSIBLE, Finding("sgid_index", why, "Choose the RoCE v2 row of the same address, at both ends.")
    elif attempt.error == errno.EINVAL:
        why = f"row {index} ({_source_text(around)}) may not suit this peer"
        yield POSSIBLE, Finding("sgid_index", why, choose)


def _peer(attempt: Attempt, around: Surroundings) -> Iterator[Suspect]:
    address = attempt.address
    if address is None:
        return
    if not address.is_global:
        if around.port is not None and around.port.link_layer is LinkLayer.ETHERNET:
            why = "is_global is false, and Ethernet (RoCE) knows peers by GID only"
            yield CERTAIN, Finding("is_global", why, "Set is_global, and with it dgid, sgid_index and hop_limit.")
        return
    source, target = _source_text(around), gid_text(address.dgid)
    families = {_is_ipv4(around.source_gid), _is_ipv4(address.dgid)} - {None}
    if len(families) == 2:
        why = f"the GIDs are of two families: own {source}, peer {target}"
        remedy = "Choose rows of the same family at both ends: IPv4 with IPv4, IPv6 with IPv6."
        yield LIKELY, Finding("dgid", why, remedy)
        return
    test = f"`ping -I {around.source_netdev or '<netdev>'} {target.removeprefix('::ffff:')}`"
    if attempt.error == errno.ETIMEDOUT:
        why = f"the neighbour of peer GID {target} was not resolved from own {source}: no answer to ARP or ND"
        remedy = (
            f"Try {test} on this host, and see that UDP port 4791 is open; rails that are not connected to each other "
            f"give the same, and so does a peer that starts up: try again, then another pair of devices."
        )
        yield LIKELY, Finding("dgid", why, remedy)
    elif attempt.error in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        why = f"no route leads from own {source} to peer GID {target}"
        remedy = f"Look with `ip route get {target.removeprefix('::ffff:')}` and {test}; or choose GIDs of one subnet."
        yield LIKELY, Finding("dgid", why, remedy)
    if address.hop_limit <= 1 and attempt.error in (errno.EINVAL, errno.ETIMEDOUT, errno.ENETUNREACH):
        why = f"hop_limit {address.hop_limit} reaches no peer behind a router"
        yield POSSIBLE, Finding("hop_limit", why, "Give 64 or 255.")


def _other(attempt: Attempt, around: Surroundings) -> Iterator[Suspect]:
    """What an error number means by itself; the last word where no value is to blame."""
    rank = 0 if attempt.error == errno.EINVAL else POSSIBLE
    why, remedy = _ERRNO_WORDS.get(attempt.error, ("the driver gives no reason that is known here", _SEE_KERNEL))
    culprit = "the step" if attempt.error == errno.EINVAL else errno.errorcode.get(attempt.error, str(attempt.error))
    if attempt.error not in (errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH) or attempt.address is None:
        yield rank, Finding(culprit, why, remedy)


def _source_text(around: Surroundings) -> str:
    """Return own GID with its netdev, as far as they are known."""
    gid = gid_text(around.source_gid) if around.source_gid else "unknown"
    return f"{gid} on {around.source_netdev}" if around.source_netdev else gid


def _is_ipv4(gid: bytes | None) -> bool | None:
    """None where it cannot be told, and for link-local addresses, which every netdev has beside the others."""
    if gid is None or len(gid) != 16 or not any(gid):
        return None
    return ipaddress.IPv6Address(gid).ipv4_mapped is not None


_SEE_KERNEL = "Look into the kernel's log (`dmesg`): drivers say there what they do not return."
_ERRNO_WORDS = {
    errno.EINVAL: ("every value is within what device and port say", _SEE_KERNEL),
    errno.ENOMEM: (
        "the device or the kernel has no memory for it: too many queue pairs, too deep queues, or too low a limit of "
        "locked memory",
        "Make fewer or shallower queue pairs, or raise the limit (`ulimit -l unlimited`).",
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
