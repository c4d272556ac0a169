"""Short ways to write GID tables, interfaces, ports and offers, for the tests of choices."""

from __future__ import annotations

import ipaddress

from kvxfer.system.interfaces import Interface, InterfaceAddress
from kvxfer.verbs.device import DeviceLimits, Port
from kvxfer.verbs.enums import GidType, LinkLayer, Mtu, PortState
from kvxfer.verbs.gid import GidEntry, GidTable
from kvxfer.verbs.gid_candidate import GidCandidate, NetdevState
from kvxfer.verbs.port_offer import PortOffer, ReadDepth

V1, V2, IB = GidType.ROCE_V1, GidType.ROCE_V2, GidType.IB
ETHERNET, INFINIBAND = LinkLayer.ETHERNET, LinkLayer.INFINIBAND


def gid(text: str) -> bytes:
    """Return the GID of an address; an IPv4 one is mapped."""
    address = ipaddress.ip_address(text)
    return address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed


def row(index: int, address: str, kind: GidType = V2, netdev: str = "eth0") -> GidEntry:
    return GidEntry(index, gid(address), kind, netdev)


def table(*rows: GidEntry, length: int = 16, link_layer: LinkLayer = ETHERNET, device: str = "mlx5_0") -> GidTable:
    return GidTable(device, 1, link_layer, length, rows)


def interface(name: str, *addresses: str, is_up: bool = True, kind: str = "") -> Interface:
    """Return an interface that is up and has these addresses, such as 192.0.2.1/24."""
    found = [ipaddress.ip_interface(text) for text in addresses]
    held = tuple(InterfaceAddress(one.ip, one.network.prefixlen) for one in found)
    return Interface(name, is_up=is_up, is_running=is_up, kind=kind, addresses=held)


def candidate(
    address: str, kind: GidType = V2, *, index: int | None = None, state: NetdevState = NetdevState.UP, netdev: str = ""
) -> GidCandidate:
    """Return a candidate with its prefix: 192.0.2.1/24."""
    found = ipaddress.ip_interface(address)
    prefix = found.network.prefixlen if "/" in address else None
    return GidCandidate(gid(str(found.ip)), kind, netdev, state, prefix, index=index)


def port(device: str = "mlx5_0", number: int = 1, **values: object) -> Port:
    """Return an active Ethernet port, but for `values`."""
    plain: dict[str, object] = {
        "state": PortState.ACTIVE,
        "max_mtu": Mtu.MTU_4096,
        "active_mtu": Mtu.MTU_4096,
        "gid_tbl_len": 16,
        "port_cap_flags": 0,
        "max_msg_sz": 1 << 30,
        "pkey_tbl_len": 1,
        "lid": 0,
        "sm_lid": 0,
        "lmc": 0,
        "max_vl_num": 1,
        "sm_sl": 0,
        "subnet_timeout": 0,
        "active_width": 2,
        "active_speed": 32,
        "phys_state": 5,
        "link_layer": ETHERNET,
        "flags": 0,
        "port_cap_flags2": 0,
        "active_speed_ex": 0,
    }
    return Port(device=device, number=number, **{**plain, **values})  # type: ignore[arg-type]


def limits(**values: int) -> DeviceLimits:
    """Return the limits of a device that has a lot of everything, but for `values`."""
    plain: dict[str, object] = dict.fromkeys(DeviceLimits.__dataclass_fields__, 1 << 20)
    texts = {"fw_ver": "1.0", "node_guid": "0:0:0:1", "sys_image_guid": "0:0:0:1"}
    return DeviceLimits(**{**plain, **texts, **values})  # type: ignore[arg-type]


def offer(
    device: str = "mlx5_0", *gids: GidCandidate, link: LinkLayer = ETHERNET, number: int = 1, **values: object
) -> PortOffer:
    """Return what a port offers, but for `values`."""
    plain: dict[str, object] = {
        "lid": 0 if link is ETHERNET else 1,
        "needs_grh": link is ETHERNET,
        "mtu": Mtu.MTU_4096,
        "read_depth": ReadDepth(16, 16),
        "message_nbytes_max": 1 << 30,
        "pkey": 0xFFFF,
    }
    return PortOffer(device, number, link, gids=gids, **{**plain, **values})  # type: ignore[arg-type]
