"""What a device and its ports say of themselves at one moment: ibv_device_attr and ibv_port_attr.

Facts with the names that <infiniband/verbs.h> gives them; `device.py` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.verbs.enums import LinkLayer, Mtu, PortState

__all__ = ["DeviceLimits", "Port"]

GRH_REQUIRED = 1
"""ibv_port_attr.flags: IBV_QPF_GRH_REQUIRED."""
MESSAGE_NBYTES_ASSUMED = 1 << 30
"""For a port that does not tell its longest message (max_msg_sz 0, as Microsoft's mana driver): half of what the
specification asks for, and what most devices take."""


@dataclass(frozen=True)
class DeviceLimits:
    """What a device says it can do: ibv_device_attr, as far as anything here asks for it."""

    fw_ver: str
    node_guid: str
    sys_image_guid: str
    max_mr_size: int
    page_size_cap: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    max_qp: int
    max_qp_wr: int
    device_cap_flags: int
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    """Reads from the peer that one queue pair answers at once (responder depth)."""
    max_res_rd_atom: int
    """The same over all queue pairs of the device, where the device keeps such a budget."""
    max_qp_init_rd_atom: int
    """Reads that one queue pair asks for at once (initiator depth)."""
    max_ah: int
    max_pkeys: int
    local_ca_ack_delay: int
    phys_port_cnt: int


@dataclass(frozen=True)
class Port:
    """One port of a device at one moment: ibv_port_attr."""

    device: str
    number: int
    state: PortState
    max_mtu: Mtu
    active_mtu: Mtu
    gid_tbl_len: int
    port_cap_flags: int
    max_msg_sz: int
    pkey_tbl_len: int
    lid: int
    sm_lid: int
    lmc: int
    max_vl_num: int
    sm_sl: int
    subnet_timeout: int
    active_width: int
    active_speed: int
    phys_state: int
    link_layer: LinkLayer
    flags: int
    port_cap_flags2: int
    active_speed_ex: int
    """In Mb/s, from rdma-core 62 on; 0 where the library does not say."""

    @property
    def is_active(self) -> bool:
        """Whether it carries data."""
        return self.state is PortState.ACTIVE

    @property
    def needs_grh(self) -> bool:
        """Whether packets need a global route header: on Ethernet always, on InfiniBand where the port says so."""
        return self.link_layer is LinkLayer.ETHERNET or bool(self.flags & GRH_REQUIRED)

    @property
    def message_nbytes_max(self) -> int:
        """The longest message: max_msg_sz, and 1 GiB where the driver leaves that at 0."""
        return self.max_msg_sz or MESSAGE_NBYTES_ASSUMED

    @property
    def gbps(self) -> float:
        """The rate of the link in Gb/s; 0.0 where it cannot be told. Source: IBTA 1.7, PortInfo.LinkSpeedActive."""
        if self.active_speed_ex:
            return self.active_speed_ex / 1000
        lanes = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}.get(self.active_width, 0)
        lane = {1: 2.5, 2: 5.0, 4: 10.0, 8: 10.0, 16: 14.0625, 32: 25.0, 64: 50.0, 128: 100.0}
        return lanes * lane.get(self.active_speed, 0.0)

    def __str__(self) -> str:
        return f"{self.device} port {self.number} ({self.state}, {self.link_layer})"
