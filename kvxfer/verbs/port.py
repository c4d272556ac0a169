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
    "judge_ports",
]

HOP_LIMIT = 64  # crosses routers; 1 would stay in the rack (mori PR 298)
LID_UNICAST_MAX = 0xBFFF
"""Higher ones are multicast. Source: InfiniBand specification 1.4, 4.1.3."""
SERVICE_LEVEL_MAX = 15
BYTE_MAX = 255
FLOW_LABEL_MAX = (1 << 20) - 1
ZERO_GID = bytes(16)
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
    ports: Iterable[Port], transport_type: TransportType, wanted: Sequence[DevicePort] | None = None
) -> list[PortVerdict]:
    """Return the verdict on each port of one device. wanted: the user's filter; None for every port."""
    return [_judge(port, transport_type, wanted) for port in ports]


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
    InfiniBand where a port demands it or the subnets differ. Source: InfiniBand specification 1.4, 11.2.5.2.
    """
    if local.link_layer is not remote.link_layer:
        raise _refuse(local, f"its link is {local.link_layer}, the peer's ({remote}) is {remote.link_layer}")
    is_ethernet = local.link_layer is LinkLayer.ETHERNET
    if is_global is None or is_ethernet:
        is_global = (
            is_ethernet or local.needs_grh or remote.needs_grh or (gids is not None and gids.rank.is_other_subnet)
        )
    if not is_ethernet and not 1 <= remote.lid <= LID_UNICAST_MAX:
        raise _refuse(local, f"the peer ({remote}) has LID {remote.lid}, which no subnet manager gives")
    for name, value, high in (
        ("hop_limit", hop_limit, BYTE_MAX),
        ("traffic_class", traffic_class, BYTE_MAX),
        ("flow_label", flow_label, FLOW_LABEL_MAX),
        ("service_level", service_level, SERVICE_LEVEL_MAX),
    ):
        if not 0 <= value <= high:
            raise _refuse(local, f"{name} {value} is outside 0..{high}")
    vector = AddressVector(
        port=local.port, is_global=is_global, dlid=0 if is_ethernet else remote.lid, sl=service_level
    )
    if not is_global:
        return vector
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
        dlid=vector.dlid,
        sl=service_level,
    )


def _judge(port: Port, transport_type: TransportType, wanted: Sequence[DevicePort] | None) -> PortVerdict:
    never = _why_never(port, transport_type, wanted)
    if never:
        return PortVerdict(port, never)
    reason = _why_not_now(port)
    return PortVerdict(port, reason, may_change=bool(reason))


def _why_never(port: Port, transport_type: TransportType, wanted: Sequence[DevicePort] | None) -> str:
    """Why a port never carries data for us; "" where it may."""
    named = [item for item in wanted or () if item.device == port.device]
    if wanted is not None and not any(item.port in (None, port.number) for item in named):
        return NOT_WANTED
    if transport_type not in (TransportType.IB, TransportType.IWARP, TransportType.UNKNOWN):
        return f"unsupported ({transport_type}, such as EFA): it has no RC queue pairs"
    if transport_type is TransportType.IWARP or port.link_layer is LinkLayer.UNSPECIFIED:
        return "unsupported (iWARP): its queue pairs need a connection manager"
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
