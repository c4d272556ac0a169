"""Mooncake's RDMA handshake: its CONNECTION message, and what both ends assume because it does not say.

Mooncake connects a fixed number of queue pairs for each two devices (MC_NUM_QP_PER_EP) by one CONNECTION message and
its answer, and says with a second one that it is ready. It exchanges no MTU, no packet numbers and no read depth: both
ends assume 0 for the first packet, their own port's MTU, and 16 reads. So those are not ours to choose here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvxfer.errors import PeerRefusedError
from kvxfer.mooncake.wire.descriptor import DeviceDescriptor
from kvxfer.text import clean
from kvxfer.transports.rdma_ladder import QueuePairAttributes
from kvxfer.verbs.enums import Access, GidType, LinkLayer, Mtu
from kvxfer.verbs.gid_candidate import GidCandidate
from kvxfer.verbs.port import AddressVector
from kvxfer.verbs.port_offer import PortOffer, ReadDepth
from kvxfer.verbs.queue_pair import QueuePair

if TYPE_CHECKING:
    from kvxfer.transports.rdma_nic import Nic

__all__ = [
    "bring_up",
    "connection_message",
    "gid_text",
    "offer_of",
    "pair_attributes",
    "parse_gid",
    "take_qp_numbers",
    "take_text",
]

QUEUE_PAIRS_MAX = 255
QP_NUM_MAX = (1 << 24) - 1
READ_DEPTH = 16
"""What Mooncake sets at both ends, whatever the device; we stay below our own device's limit."""
TIMEOUT, RETRY_COUNT, MIN_RNR_TIMER = 14, 6, 12  # Mooncake's, but for its 7 retries, which some devices take for ever
PSN = 0


def pair_attributes(nic: Nic) -> QueuePairAttributes:
    """Return what both ends of such a connection have, as far as it is ours to say."""
    own = nic.attributes
    return QueuePairAttributes(
        path_mtu=nic.offer().mtu.nbytes,
        read_depth=min(READ_DEPTH, own.read_depth.initiator),
        send_depth=own.send_depth,
        timeout=TIMEOUT,
        retry_count=RETRY_COUNT,
        min_rnr_timer=MIN_RNR_TIMER,
        hop_limit=own.hop_limit,
        traffic_class=own.traffic_class,
        service_level=own.service_level,
    )


def bring_up(
    queue_pair: QueuePair,
    nic: Nic,
    address: AddressVector,
    number: int,
    attributes: QueuePairAttributes,
) -> None:
    """Take a queue pair to RTS, connected to the peer's queue pair of that number. Raises VerbsError."""
    queue_pair.to_init(
        port=nic.port.number, pkey_index=nic.partition.index, access=Access.REMOTE_WRITE | Access.REMOTE_READ
    )
    queue_pair.to_rtr(
        address=address,
        dest_qp_num=number,
        path_mtu=Mtu.of_nbytes(attributes.path_mtu),
        rq_psn=PSN,
        max_dest_rd_atomic=min(READ_DEPTH, nic.attributes.read_depth.responder),
        min_rnr_timer=attributes.min_rnr_timer,
    )
    queue_pair.to_rts(
        sq_psn=PSN,
        max_rd_atomic=attributes.read_depth,
        timeout=attributes.timeout,
        retry_cnt=attributes.retry_count,
        rnr_retry=attributes.rnr_retry,
    )


def connection_message(
    *, local: str, peer: str, lid: int, gid: str, numbers: list[int], is_ready: bool
) -> dict[str, Any]:
    """Return the body of a CONNECTION message, or of its answer. local, peer: NIC paths, 'server@device'."""
    return {
        "local_nic_path": local,
        "peer_nic_path": peer,
        "local_lid": lid,
        "local_gid": gid,
        "payload": "",
        "qp_num": numbers,
        "ready_ack": is_ready,
        "reply_msg": "",
    }


def offer_of(device: DeviceDescriptor, nic: Nic) -> PortOffer:
    """Return what a Mooncake device would offer: what its descriptor says, the rest as our own port has it."""
    own = nic.offer()
    gid = parse_gid(device.gid)
    kind = GidType.IB if own.link_layer is LinkLayer.INFINIBAND else GidType.ROCE_V2
    return PortOffer(
        device=device.name,
        port=1,
        link_layer=own.link_layer,
        lid=device.lid,
        needs_grh=own.link_layer is LinkLayer.ETHERNET,
        mtu=own.mtu,
        read_depth=ReadDepth(READ_DEPTH, READ_DEPTH),
        message_nbytes_max=nic.port.message_nbytes_max,
        pkey=own.pkey,
        gids=() if gid is None else (GidCandidate(gid, kind),),
    )


def take_qp_numbers(message: Mapping[str, Any], count: int | None, peer: str) -> list[int]:
    """Return the peer's queue-pair numbers; count: how many there must be, None for any number.

    Raises PeerRefusedError where they are none that could be, or not so many.
    """
    numbers = message.get("qp_num")
    if not isinstance(numbers, list):
        numbers = []
    is_good = all(type(one) is int and 0 < one <= QP_NUM_MAX for one in numbers)
    if not is_good or not 0 < len(numbers) <= QUEUE_PAIRS_MAX or (count is not None and len(numbers) != count):
        raise PeerRefusedError(
            f"{clean(peer)} names the queue pairs {str(numbers)[:80]}; {count or 'at least one'} was expected.",
            remedy=f"MC_NUM_QP_PER_EP must be the same at both ends{f'; here it is {count}' if count else ''}.",
        )
    return list(numbers)


def take_text(message: Mapping[str, Any], name: str) -> str:
    """Return a text of a message, "" where it has none. Raises PeerRefusedError for anything else, or a long one."""
    value = message.get(name, "")
    if not isinstance(value, str) or len(value) > 1024:
        raise PeerRefusedError(f"a CONNECTION message has {name} {str(value)[:80]!r}.")
    return value


def gid_text(value: bytes) -> str:
    """Return a GID in Mooncake's form: 16 bytes in hexadecimal, with colons between."""
    return ":".join(f"{byte:02x}" for byte in value)


def parse_gid(text: str) -> bytes | None:
    """Return the bytes of Mooncake's form; None where there is none, or zeros."""
    if not re.fullmatch("([0-9a-fA-F]{2}:){15}[0-9a-fA-F]{2}", text):
        return None
    value = bytes.fromhex(text.replace(":", ""))
    return value if any(value) else None
