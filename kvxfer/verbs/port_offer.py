"""What one end tells the other of a port, and what the two agree on: MTU, READs at once, partition.

Pure: plain JSON out and in, everything that a peer sent is checked. An end that trusts its own values alone is a known
way to a connection that loses large messages (MTU) or is refused with EINVAL (READs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.errors import RemoteProtocolError
from kvxfer.verbs.enums import LinkLayer, Mtu
from kvxfer.verbs.gid_candidate import GidCandidate, candidates_from_json
from kvxfer.verbs.partition import FULL_MEMBER, PARTITION
from kvxfer.verbs.peer_json import take_bool, take_int, take_name

if TYPE_CHECKING:
    from kvxfer.verbs.device import DeviceLimits, Port

__all__ = [
    "PortOffer",
    "ReadDepth",
    "agree_mtu",
    "agree_read_depth",
    "find_pkey_conflict",
    "mtu_of_interface",
    "plan_read_depth",
]

MTU_ASSUMED = Mtu.MTU_1024
"""For a peer that does not tell its MTU: what fits into an Ethernet of 1500 bytes, RoCE's headers included."""
ROCE_HEADERS_NBYTES = 40 + 8 + 12 + 4 + 28 + 4
READ_DEPTH_MAX = 255  # ibv_qp_attr.max_rd_atomic is a byte
MESSAGE_NBYTES_MIN = 4096
"""One packet of the largest path MTU, which every port takes. A peer that offers less would have us cut a transfer into
as many pieces as it likes."""
DEVICE_LENGTH_MAX = 64  # IBV_SYSFS_NAME_MAX
NUMA_NODE_UNKNOWN = -1  # as in sysfs
NUMA_NODE_MAX = 1023  # MAX_NUMNODES of Linux is 1 << 10


@dataclass(frozen=True)
class ReadDepth:
    """READs on their way at once, of one queue pair. initiator: asked for; responder: answered."""

    initiator: int
    responder: int


@dataclass(frozen=True)
class PortOffer:
    """One port as its end offers it to the other. gids: usable ones, best first. pkey: of the partition it uses.

    needs_grh: the port demands a global route header. message_nbytes_max: the longest message (max_msg_sz).
    numa_node: the one that the device is attached to; None where that is not known.
    """

    device: str
    port: int
    link_layer: LinkLayer
    lid: int
    needs_grh: bool
    mtu: Mtu
    read_depth: ReadDepth
    message_nbytes_max: int
    pkey: int
    gids: tuple[GidCandidate, ...]
    numa_node: int | None = None

    @classmethod
    def of(
        cls,
        port: Port,
        gids: tuple[GidCandidate, ...],
        *,
        read_depth: ReadDepth,
        pkey: int,
        mtu_nbytes_max: int = 4096,
        numa_node: int | None = None,
    ) -> PortOffer:
        """Return what to say of a port of this end."""
        is_ethernet = port.link_layer is LinkLayer.ETHERNET
        return cls(
            device=port.device,
            port=port.number,
            link_layer=port.link_layer,
            lid=0 if is_ethernet else port.lid,
            needs_grh=port.needs_grh,
            mtu=agree_mtu(port.active_mtu, nbytes_max=mtu_nbytes_max),
            read_depth=read_depth,
            message_nbytes_max=port.message_nbytes_max,
            pkey=pkey,
            gids=gids,
            numa_node=numa_node,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what the peer is told."""
        return {
            "device": self.device,
            "port": self.port,
            "link": int(self.link_layer),
            "lid": self.lid,
            "grh": self.needs_grh,
            "mtu": int(self.mtu),
            "initiator_depth": self.read_depth.initiator,
            "responder_depth": self.read_depth.responder,
            "message_max": self.message_nbytes_max,
            "pkey": self.pkey,
            "gids": [candidate.to_json() for candidate in self.gids],
            "numa_node": NUMA_NODE_UNKNOWN if self.numa_node is None else self.numa_node,
        }

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> PortOffer:
        """Return a peer's offer. Raises RemoteProtocolError naming the field that is wrong."""
        link_layer = LinkLayer(take_int(obj, "link", LinkLayer.INFINIBAND, LinkLayer.ETHERNET))
        gids = candidates_from_json(obj, "gids")
        if link_layer is LinkLayer.ETHERNET and not gids:
            raise RemoteProtocolError(
                "the peer offers an Ethernet port with an empty 'gids': missing GID.", field="gids"
            )
        if any(one.is_infiniband is (link_layer is LinkLayer.ETHERNET) for one in gids):
            raise RemoteProtocolError(f"the peer offers a GID that no {link_layer} port has.", field="gids")
        node = take_int(obj, "numa_node", NUMA_NODE_UNKNOWN, NUMA_NODE_MAX) if "numa_node" in obj else NUMA_NODE_UNKNOWN
        return cls(
            device=take_name(obj, "device", DEVICE_LENGTH_MAX),
            port=take_int(obj, "port", 1, 255),
            link_layer=link_layer,
            lid=take_int(obj, "lid", 0, 0xFFFF),
            needs_grh=take_bool(obj, "grh"),
            mtu=Mtu(take_int(obj, "mtu", min(Mtu), max(Mtu))) if "mtu" in obj else MTU_ASSUMED,
            read_depth=ReadDepth(
                take_int(obj, "initiator_depth", 0, READ_DEPTH_MAX), take_int(obj, "responder_depth", 0, READ_DEPTH_MAX)
            ),
            message_nbytes_max=take_int(obj, "message_max", MESSAGE_NBYTES_MIN, (1 << 32) - 1),
            pkey=take_int(obj, "pkey", 0, 0xFFFF),
            gids=gids,
            numa_node=None if node == NUMA_NODE_UNKNOWN else node,
        )

    def __str__(self) -> str:
        return f"{self.device} port {self.port}"


def agree_mtu(*active: Mtu, nbytes_max: int = 4096) -> Mtu:
    """Return the largest path MTU that every end's active MTU and the user's bound allow."""
    return min(Mtu.of_nbytes(nbytes_max), *(one if one.nbytes else MTU_ASSUMED for one in active))


def mtu_of_interface(nbytes: int) -> Mtu:
    """Return the path MTU that an Ethernet interface with an MTU of `nbytes` carries.

    Source: iboe_get_mtu (include/rdma/ib_addr.h): 96 bytes for GRH, UDP, BTH, the longest extensions and ICRC.
    """
    fitting = [mtu for mtu in Mtu if mtu.nbytes <= nbytes - ROCE_HEADERS_NBYTES]
    return max(fitting, default=Mtu.MTU_256)


def plan_read_depth(limits: DeviceLimits, *, queue_pairs: int, depth_max: int = READ_DEPTH_MAX) -> ReadDepth:
    """Return the READs that each of `queue_pairs` queue pairs of a device may have on their way.

    Some devices have max_res_rd_atom for all queue pairs together (Ionic: 16), and refuse the second queue pair that
    asks for all of it; so each gets its share, and at least one.
    """
    high = min(depth_max, READ_DEPTH_MAX)
    share = max(1, limits.max_res_rd_atom // max(1, queue_pairs)) if limits.max_res_rd_atom > 0 else high
    return ReadDepth(
        initiator=max(0, min(limits.max_qp_init_rd_atom, high)),
        responder=max(0, min(limits.max_qp_rd_atom, share, high)),
    )


def agree_read_depth(local: ReadDepth, remote: ReadDepth) -> ReadDepth:
    """Return what this end sets: as initiator (max_rd_atomic) no more than the peer answers, as responder
    (max_dest_rd_atomic) no more than the peer asks."""
    return ReadDepth(min(local.initiator, remote.responder), min(local.responder, remote.initiator))


def find_pkey_conflict(local: PortOffer, remote: PortOffer) -> str:
    """Return why two InfiniBand ports may not talk, or "": one partition, and one full member at least.

    RoCE has the default partition only.
    """
    if local.link_layer is not LinkLayer.INFINIBAND or remote.link_layer is not LinkLayer.INFINIBAND:
        return ""
    if local.pkey & PARTITION != remote.pkey & PARTITION:
        return f"partition key {local.pkey:#06x} here, {remote.pkey:#06x} at the peer"
    if not (local.pkey | remote.pkey) & FULL_MEMBER:
        return f"both are limited members of partition {local.pkey:#06x}"
    return ""
