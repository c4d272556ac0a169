"""Which ports of a device carry data and why the others do not, and how packets are addressed from one to another.

Pure: `Port` is what `device.py` read, `PortOffer` what both ends told each other. An address vector is checked here,
before ibv_modify_qp would answer EINVAL and leave the rest to guessing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.errors import DeviceNotFoundError, DeviceUnusableError
from kvxfer.verbs.enums import LinkLayer, TransportType

if TYPE_CHECKING:
    from kvxfer.rdma_names import DevicePort
    from kvxfer.verbs.device import Port
    from kvxfer.verbs.gid_choice import GidPair
    from kvxfer.verbs.port_offer import PortOffer

__all__ = [
    "NOT_WANTED",
    "AddressVector",
    "PortVerdict",
    "build_address_vector",
    "check_wanted",
    "choose_port",
    "find_router_lid",
    "find_router_problem",
    "judge_ports",
]

HOP_LIMIT = 64  # crosses routers; 1 would stay in the rack (mori PR 298)
LID_UNICAST_MAX = 0xBFFF
"""Higher ones are multicast. Source: InfiniBand specification 1.4, 4.1.3."""
SERVICE_LEVEL_MAX = 15
BYTE_MAX = 255
FLOW_LABEL_MAX = (1 << 20) - 1
ZERO_GID = bytes(16)
ALIBABA = 0x1DED
"""Vendor of eRDMA, which is an iWARP device unless its module was loaded with compat_mode=1."""
NOT_WANTED = "not in rdma_devices"


@dataclass(frozen=True)
class PortVerdict:
    """What was thought of one port. reason: why it carries no data for us; "" where it does. may_change: whether it may
    carry data later without any change of the settings: it is down now."""

    port: Port
    reason: str
    may_change: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether it carries data for us."""
        return not self.reason

    def __str__(self) -> str:
        return f"port {self.port.number}: {self.reason or 'usable'}"


@dataclass(frozen=True)
class AddressVector:
    """Where the packets of a queue pair go: ibv_ah_attr, with the names of its fields but for `port` (port_num).

    dgid, sgid_index, hop_limit, traffic_class and flow_label count only where is_global; dlid only on InfiniBand.
    """

    port: int
    is_global: bool
    dgid: bytes = ZERO_GID
    sgid_index: int = 0
    hop_limit: int = 0
    traffic_class: int = 0
    flow_label: int = 0
    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0


def judge_ports(
    ports: Iterable[Port],
    transport_type: TransportType,
    wanted: Sequence[DevicePort] | None = None,
    *,
    vendor_id: int = 0,
) -> list[PortVerdict]:
    """Return the verdict on each port of one device. wanted: the user's filter; None for every port. vendor_id: of the
    device, for a hint."""
    return [_judge(port, _why_never(port, transport_type, wanted, vendor_id)) for port in ports]


def choose_port(device: str, verdicts: Sequence[PortVerdict]) -> Port:
    """Return the first usable port; raises DeviceUnusableError with the reason of each."""
    for verdict in verdicts:
        if verdict.is_usable:
            return verdict.port
    reason = "; ".join(map(str, verdicts)) or "it has no port"
    raise DeviceUnusableError(
        f"{device} cannot be used: {reason}.",
        remedy="Look at cable, switch and, on InfiniBand, the subnet manager; `kvxfer devices` shows all ports.",
        device=device,
        reason=reason,
    )


def check_wanted(wanted: Sequence[DevicePort], devices: Sequence[str]) -> None:
    """Raise DeviceNotFoundError where the user's filter names a device that is not here."""
    missing = sorted({item.device for item in wanted} - set(devices))
    if missing:
        there = ", ".join(devices) or "none"
        raise DeviceNotFoundError(
            f"there is no RDMA device {', '.join(missing)} here; there is {there}.",
            remedy="Correct rdma_devices (KVXFER_RDMA_DEVICES); `kvxfer devices` lists what there is.",
            device=missing[0],
            devices=tuple(devices),
        )


def build_address_vector(
    local: PortOffer,
    remote: PortOffer,
    gids: GidPair | None,
    *,
    is_global: bool | None = None,
    hop_limit: int = HOP_LIMIT,
    traffic_class: int = 0,
    flow_label: int = 0,
    service_level: int = 0,
) -> AddressVector:
    """Return how `local` addresses packets to `remote`; raises DeviceUnusableError naming the value that does not do.

    gids: the pair that was chosen; may be None on InfiniBand inside one subnet, where the LID is enough.
    is_global: whether there is a global route header (GRH); None for what the links need: always on Ethernet, on
    InfiniBand where a port demands it or the subnets differ; there packets go to a router, by the LID that the peer's
    GID names. Source: InfiniBand specification 1.4, 11.2.5.2.
    """
    if local.link_layer is not remote.link_layer:
        raise _refuse(local, f"its link is {local.link_layer}, the peer's ({remote}) is {remote.link_layer}")
    is_ethernet = local.link_layer is LinkLayer.ETHERNET
    if is_global is None or is_ethernet:
        is_global = (
            is_ethernet or local.needs_grh or remote.needs_grh or (gids is not None and gids.rank.is_other_subnet)
        )
    dlid = 0 if is_ethernet else _find_dlid(local, remote, gids, is_global=is_global)
    for name, value, high in (
        ("hop_limit", hop_limit, BYTE_MAX),
        ("traffic_class", traffic_class, BYTE_MAX),
        ("flow_label", flow_label, FLOW_LABEL_MAX),
        ("service_level", service_level, SERVICE_LEVEL_MAX),
    ):
        if not 0 <= value <= high:
            raise _refuse(local, f"{name} {value} is outside 0..{high}")
    if not is_global:
        return AddressVector(port=local.port, is_global=False, dlid=dlid, sl=service_level)
    index = gids.local.index if gids else None
    if gids is None or gids.remote.value == ZERO_GID or index is None:
        side = "this end" if gids is not None and index is None else "the peer"
        raise _refuse(local, f"a global route header needs the GID of both ends, and that of {side} is missing")
    if hop_limit < 1:
        raise _refuse(local, "hop_limit 0 would drop every packet")
    return AddressVector(
        port=local.port,
        is_global=True,
        dgid=gids.remote.value,
        sgid_index=index,
        hop_limit=hop_limit,
        traffic_class=traffic_class,
        flow_label=flow_label,
        dlid=dlid,
        sl=service_level,
    )


def find_router_problem(gids: GidPair) -> str:
    """Return why packets cannot get from one InfiniBand GID to the other, or "": another subnet needs a router."""
    if not gids.rank.is_other_subnet or find_router_lid(gids.remote.value):
        return ""
    return f"{gids.remote} is in another subnet, and has no LID of a router in it (FLID)"


def find_router_lid(gid: bytes) -> int:
    """Return the LID by which the routers of a fabric lead to a GID of another subnet; 0 where it has none.

    Source: NVIDIA's InfiniBand routers put it into the subnet prefix (FLID); NCCL reads it there (net_ib).
    """
    return int.from_bytes(gid[4:6], "big")


def _find_dlid(local: PortOffer, remote: PortOffer, gids: GidPair | None, *, is_global: bool) -> int:
    """Return the LID to send to; raises DeviceUnusableError where there is none."""
    if gids is not None and gids.rank.is_other_subnet:
        problem = find_router_problem(gids)
        if problem:
            raise _refuse(local, problem)
        return find_router_lid(gids.remote.value)
    # A port that demands a global header may have no LID of its own.
    least = 0 if is_global and remote.needs_grh else 1
    if not least <= remote.lid <= LID_UNICAST_MAX:
        raise _refuse(local, f"the peer ({remote}) has LID {remote.lid}, which no subnet manager gives")
    return remote.lid


def _judge(port: Port, never: str) -> PortVerdict:
    if never:
        return PortVerdict(port, never)
    reason = _why_not_now(port)
    return PortVerdict(port, reason, may_change=bool(reason))


def _why_never(port: Port, transport_type: TransportType, wanted: Sequence[DevicePort] | None, vendor_id: int) -> str:
    """Why a port never carries data for us; "" where it may."""
    if wanted is not None and not any(item.includes(port.device, port.number) for item in wanted):
        return NOT_WANTED
    if transport_type not in (TransportType.IB, TransportType.IWARP, TransportType.UNKNOWN):
        return f"unsupported ({transport_type}, such as EFA): it has no RC queue pairs"
    if transport_type is TransportType.IWARP or port.link_layer is LinkLayer.UNSPECIFIED:
        hint = "; load erdma with compat_mode=1, which has RoCE" if vendor_id == ALIBABA else ""
        return f"unsupported (iWARP): its queue pairs need a connection manager{hint}"
    return ""


def _why_not_now(port: Port) -> str:
    """Why a port carries no data now; "" where it does."""
    if not port.is_active:
        return f"{port.state}, not ACTIVE"
    if port.link_layer is LinkLayer.INFINIBAND and not port.lid and not port.needs_grh:
        return "it has no LID: no subnet manager has given it one"
    return ""


def _refuse(local: PortOffer, reason: str) -> DeviceUnusableError:
    return DeviceUnusableError(
        f"{local} cannot address the peer: {reason}.",
        remedy="Pair ports of one fabric; `kvxfer devices` on both hosts shows link layers, LIDs and GIDs.",
        device=local.device,
        port=local.port,
        reason=reason,
    )
