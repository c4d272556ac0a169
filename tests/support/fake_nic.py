"""What a fake device is: its limits, ports and GID tables, and the ways in which it misbehaves.

`FakeNic` is plain data that a test may change while the device runs. The profiles at the end are devices that exist, as
far as their facts are public; each is a `FakeNic` whose fields may be given anew: `connectx(max_inline=0)`.
Read next: `fake_verbs.FakeLibrary`, which obeys it; `fake_sysfs.write_sysfs`, which shows it as the kernel would.
"""

from __future__ import annotations

import errno
import ipaddress
from dataclasses import dataclass, field
from typing import Any

from kvxfer.verbs.enums import (
    Access,
    CompletionStatus,
    GidType,
    LinkLayer,
    Mtu,
    NodeType,
    PortState,
    QueuePairState,
    QueuePairType,
    TransportType,
)

GIB = 2**30
NO_LIMIT = 2**64 - 1
GRH_REQUIRED = 1  # IBV_QPF_GRH_REQUIRED of ibv_port_attr.flags
FULL_MEMBER = 0xFFFF  # the default partition key with its full-member bit


@dataclass
class FakeGid:
    """One used row of a GID table.

    ndev: the interface it comes from, empty where this network namespace does not see it.
    is_foreign: it belongs to another namespace; a queue pair that uses it reaches nobody.
    """

    value: bytes
    type: GidType = GidType.ROCE_V2
    ndev: str = ""
    ifindex: int = 0
    is_foreign: bool = False

    @property
    def is_ipv4(self) -> bool:
        return self.value[:12] == bytes(10) + b"\xff\xff"


def gid(
    text: str, type: GidType = GidType.ROCE_V2, ndev: str = "", *, ifindex: int = 0, is_foreign: bool = False
) -> FakeGid:
    """Return a row by the text of its address: "10.0.0.1" is ::ffff:10.0.0.1."""
    address = ipaddress.ip_address(text)
    value = address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed
    if ndev and not ifindex:
        ifindex = 2 + sum(ndev.encode()) % 1000
    return FakeGid(value, type, ndev, ifindex, is_foreign)


@dataclass
class FakePort:
    """One port. gids: by index; what is not there reads as an empty row."""

    gids: dict[int, FakeGid] = field(default_factory=dict)
    state: PortState = PortState.ACTIVE
    link_layer: LinkLayer = LinkLayer.ETHERNET
    lid: int = 0
    sm_lid: int = 0
    lmc: int = 0
    max_mtu: Mtu = Mtu.MTU_4096
    active_mtu: Mtu = Mtu.MTU_4096
    gid_tbl_len: int = 16
    max_msg_sz: int = 2**30
    pkeys: list[int] = field(default_factory=lambda: [FULL_MEMBER])
    flags: int = 0
    active_speed: int = 32  # EDR
    active_width: int = 2  # 4x
    phys_state: int = 5  # LinkUp
    subnet_timeout: int = 18
    active_speed_ex: int = 0


@dataclass
class FakeNic:
    """One device. The names of limits are those of ibv_device_attr.

    What a device does wrong, or only some devices do, is a field as well; each defaults to the well-behaved way.
    """

    name: str = "mlx5_0"
    ports: list[FakePort] = field(default_factory=lambda: [FakePort()])
    node_type: NodeType = NodeType.CA
    transport_type: TransportType = TransportType.IB
    guid: int = 0  # 0: made from the name
    fw_ver: str = "28.39.1002"
    vendor_id: int = 0x02C9
    vendor_part_id: int = 4129
    hw_ver: int = 0
    numa_node: int = -1
    num_comp_vectors: int = 8

    max_mr_size: int = NO_LIMIT
    page_size_cap: int = 0xFFFFF000
    max_qp: int = 131072
    max_qp_wr: int = 32768
    device_cap_flags: int = 0
    max_sge: int = 30
    max_sge_rd: int = 30
    max_cq: int = 16777216
    max_cqe: int = 4194303
    max_mr: int = 16777216
    max_pd: int = 8388608
    max_qp_rd_atom: int = 16
    max_qp_init_rd_atom: int = 16
    max_res_rd_atom: int = 2097152
    max_ah: int = 2**31 - 1
    max_pkeys: int = 128
    local_ca_ack_delay: int = 16

    # Queue pairs.
    max_inline: int = 828
    create_errno: int = errno.EINVAL
    """What ibv_create_qp answers above a limit."""
    create_state: QueuePairState = QueuePairState.RESET
    refused_qp_types: frozenset[QueuePairType] = frozenset()
    granted_send_wr_max: int | None = None
    """The depth that a queue pair really gets, whatever was asked."""
    send_queue_sges_max: int | None = None
    """Bound of max_send_wr * max_send_sge; ENOMEM above."""
    refuses_reset_to_reset: bool = False
    read_depth_max: int | None = None
    """What RTR and RTS take, where that is less than max_qp_rd_atom and max_qp_init_rd_atom say."""
    read_budget: int | None = None
    """The sum of max_dest_rd_atomic over all queue pairs."""
    read_budget_errno: int = errno.EINVAL
    hop_limits: tuple[int, int] = (0, 255)
    """What RTR takes, both ends included."""
    mtu_checked_against: str = "active"
    """RTR refuses a path_mtu above the port's "active" or "max" MTU."""
    flushes_on_error: bool = True
    retry_7_is_for_ever: bool = False
    port_down_status: CompletionStatus = CompletionStatus.RETRY_EXC_ERR
    """How a request ends while the own port is not active."""
    vendor_err: int = 129
    """In the completion of a request that nobody acknowledged."""

    # Completion queues.
    cqe_is_rounded: bool = True
    """A queue gets 2**n - 1 entries; otherwise what was asked."""
    destroy_cleans_completions: bool = True
    """ibv_destroy_qp and RESET take the queue pair's completions out of its completion queues."""

    # Memory.
    mr_nbytes_max: int | None = None
    """What ibv_reg_mr takes, where that is not max_mr_size."""
    mr_errno: int = errno.EINVAL
    registered_nbytes_max: int | None = None
    registered_errno: int = errno.EIO
    refused_access: int = 0
    refused_access_errno: int = errno.EINVAL
    has_on_demand: bool = False
    has_dmabuf: bool = False
    has_one_key: bool = False
    """lkey and rkey are equal, as many devices have them; otherwise a test finds out who mixes them up."""
    reg_mr_s: float = 0.0
    """How long ibv_reg_mr sleeps, while other threads run."""

    def __post_init__(self) -> None:
        if not self.guid:
            self.guid = int.from_bytes(b"\x02" + self.name.encode()[-7:].rjust(7, b"\x01"), "big")

    def port(self, number: int) -> FakePort:
        """Return port `number`, from 1; IndexError where there is none."""
        if number < 1:
            raise IndexError(number)
        return self.ports[number - 1]


def link_local(address: str) -> str:
    """Return a link-local address that goes with an address: one per address, as an interface has."""
    tail = ipaddress.ip_address(address).packed[-4:]
    return f"fe80::ff:fe{tail[0]:02x}:{tail[1]:02x}{tail[2]:02x}:{tail[3]:02x}"


def mlx5_gids(address: str, ndev: str) -> dict[int, FakeGid]:
    """Return the four rows that a ConnectX port on Ethernet has for one address."""
    rows = [
        gid(text, type, ndev) for text in (link_local(address), address) for type in (GidType.ROCE_V1, GidType.ROCE_V2)
    ]
    return dict(enumerate(rows))


def _with(defaults: dict[str, Any], changes: dict[str, Any]) -> FakeNic:
    return FakeNic(**{**defaults, **changes})


def connectx(name: str = "mlx5_0", address: str = "10.10.0.1", ndev: str = "eth0", **changes: Any) -> FakeNic:
    """Return a ConnectX-7 on Ethernet: the device that everybody tests with."""
    port = FakePort(mlx5_gids(address, ndev), gid_tbl_len=255, active_mtu=Mtu.MTU_4096, active_speed=128)
    return _with({"name": name, "ports": [port]}, changes)


def infiniband(name: str = "mlx5_0", lid: int = 0x11, subnet: int = 0xFE80 << 48, **changes: Any) -> FakeNic:
    """Return a ConnectX-7 on InfiniBand: a LID, and one GID without an interface."""
    row = FakeGid(subnet.to_bytes(8, "big") + (0x0002C90300000000 | lid).to_bytes(8, "big"), GidType.IB)
    port = FakePort(
        {0: row},
        link_layer=LinkLayer.INFINIBAND,
        lid=lid,
        sm_lid=1,
        gid_tbl_len=8,
        pkeys=[FULL_MEMBER] + [0] * 127,
        active_speed=128,
    )
    return _with({"name": name, "ports": [port]}, changes)


def rxe(name: str = "rxe0", address: str = "10.10.0.1", ndev: str = "eth0", **changes: Any) -> FakeNic:
    """Return soft RoCE of Linux 6.12: row 0 link-local, row 1 the address, both v2; retry count 7 never ends."""
    gids = {0: gid(link_local(address), ndev=ndev), 1: gid(address, ndev=ndev)}
    port = FakePort(gids, gid_tbl_len=1024, max_msg_sz=2**23, active_speed=1, active_width=1)
    defaults: dict[str, Any] = {
        "name": name,
        "ports": [port],
        "fw_ver": "",
        "vendor_id": 0xFFFFFF,
        "vendor_part_id": 0,
        "num_comp_vectors": 2,
        "max_qp_wr": 1048576,
        "max_sge": 32,
        "max_sge_rd": 32,
        "max_cqe": 32767,
        "max_qp_rd_atom": 128,
        "max_qp_init_rd_atom": 128,
        "max_res_rd_atom": 258048,
        "max_inline": 512,
        "mtu_checked_against": "max",
        "retry_7_is_for_ever": True,
        "port_down_status": CompletionStatus.WR_FLUSH_ERR,
        "vendor_err": 0,
        "cqe_is_rounded": False,
        "destroy_cleans_completions": False,
        "has_one_key": True,
    }
    return _with(defaults, changes)


def irdma(name: str = "irdma0", address: str = "10.10.0.1", ndev: str = "eth0", **changes: Any) -> FakeNic:
    """Return an Intel E810 in RoCE mode: 13 SGEs, 101 bytes inline, RESET to RESET refused."""
    gids = {0: gid(link_local(address), ndev=ndev), 1: gid(address, ndev=ndev)}
    defaults: dict[str, Any] = {
        "name": name,
        "ports": [FakePort(gids, gid_tbl_len=32, max_msg_sz=2**31 - 1)],
        "fw_ver": "1.71",
        "vendor_id": 0x8086,
        "vendor_part_id": 0x1592,
        "max_mr_size": 2**45,
        "max_qp_wr": 4063,
        "max_sge": 13,
        "max_sge_rd": 13,
        "max_qp_rd_atom": 127,
        "max_qp_init_rd_atom": 127,
        "max_inline": 101,
        "refuses_reset_to_reset": True,
    }
    return _with(defaults, changes)


def ionic(name: str = "ionic_0", address: str = "10.10.0.1", ndev: str = "eth0", **changes: Any) -> FakeNic:
    """Return an AMD Pensando: 16 reads for the whole device, link-local GIDs only, 2 GiB said where 4 GiB work."""
    defaults: dict[str, Any] = {
        "name": name,
        "ports": [FakePort({0: gid(link_local(address), ndev=ndev)}, gid_tbl_len=256)],
        "fw_ver": "1.117.1-a-63",
        "vendor_id": 0x1DD8,
        "vendor_part_id": 0x1002,
        "max_mr_size": 2 * GIB,
        "mr_nbytes_max": 4 * GIB,
        "max_qp_rd_atom": 16,
        "max_qp_init_rd_atom": 16,
        "max_res_rd_atom": 16,
        "read_budget": 16,
        "max_inline": 96,
    }
    return _with(defaults, changes)


def erdma(name: str = "erdma_0", address: str = "10.10.0.1", ndev: str = "eth0", **changes: Any) -> FakeNic:
    """Return an Alibaba eRDMA: 64 GiB per registration and not much more in all, 96 bytes inline.

    It is so with compat_mode=1; otherwise it is an iWARP device: `iwarp(vendor_id=0x1DED)`.
    """
    defaults: dict[str, Any] = {
        "name": name,
        "ports": [FakePort({0: gid(address, ndev=ndev)}, gid_tbl_len=1)],
        "fw_ver": "0.3.0",
        "vendor_id": 0x1DED,
        "vendor_part_id": 0x107F,
        "max_mr_size": 64 * GIB,
        "registered_nbytes_max": 95 * GIB,
        "max_qp_wr": 8192,
        "max_sge": 6,
        "max_sge_rd": 1,
        "max_qp_rd_atom": 128,
        "max_qp_init_rd_atom": 128,
        "max_inline": 96,
    }
    return _with(defaults, changes)


def iwarp(name: str = "siw0", **changes: Any) -> FakeNic:
    """Return an iWARP device: no GID table, queue pairs that begin in INIT and that ERR does not flush."""
    defaults: dict[str, Any] = {
        "name": name,
        "ports": [FakePort({}, gid_tbl_len=0, link_layer=LinkLayer.UNSPECIFIED)],
        "node_type": NodeType.RNIC,
        "transport_type": TransportType.IWARP,
        "fw_ver": "",
        "vendor_id": 0x626D74,
        "vendor_part_id": 1,
        "create_state": QueuePairState.INIT,
        "flushes_on_error": False,
    }
    return _with(defaults, changes)


def efa_like(name: str = "efa_0", **changes: Any) -> FakeNic:
    """Return a device without the RC service, like EFA."""
    defaults: dict[str, Any] = {
        "name": name,
        "ports": [FakePort({0: gid("fe80::2", GidType.IB)}, gid_tbl_len=1, link_layer=LinkLayer.UNSPECIFIED)],
        "node_type": NodeType.UNSPECIFIED,
        "transport_type": TransportType.UNSPECIFIED,
        "fw_ver": "0.0.0.0",
        "vendor_id": 0x1D0F,
        "vendor_part_id": 0xEFA2,
        "refused_qp_types": frozenset({QueuePairType.RC}),
        "refused_access": int(Access.REMOTE_ATOMIC),
        "max_sge": 2,
        "max_inline": 32,
    }
    return _with(defaults, changes)
