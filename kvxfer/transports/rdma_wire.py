"""What two ends say to each other to connect a queue pair: the bodies of CONNECT and CONNECTED.

Pure: plain JSON out and in; everything that a peer sent is checked for type and range.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import KvxferError, PeerRefusedError, RemoteProtocolError
from kvxfer.text import clean
from kvxfer.transports.rdma_ladder import MTU_STEPS, QueuePairAttributes
from kvxfer.verbs.peer_json import take_hex, take_int, take_name, take_object
from kvxfer.verbs.port_offer import PortOffer

__all__ = ["ConnectFailure", "ConnectReply", "ConnectRequest", "random_psn"]

QP_NUM_MAX = PSN_MAX = (1 << 24) - 1
GID_NBYTES = 16
LID_MAX = 0xFFFF
NUMBER_MAX = 1 << 62
NAME_LENGTH_MAX = 80
FENCES_MAX = 1 << 20
"""More than any end has receives: a bound on what a peer may say."""
STEPS = ("create", "INIT", "RTR", "RTS", "address", "port")


@dataclass(frozen=True)
class ConnectRequest:
    """What the opening side asks for.

    number: what the connection is called from now on, chosen by who asks, so that it can be hung up even where the
    reply never came. port: the peer's, as it offered it. offer: our port, with the one GID that is used. gid: the
    peer's that is used; empty on InfiniBand without one. lid: the peer's, as it offered it, 0 on Ethernet. replaces:
    the number of the connection that this one takes the place of, or 0.
    """

    number: int
    port: str
    offer: PortOffer
    gid: bytes
    lid: int
    qp_num: int
    psn: int
    attributes: QueuePairAttributes
    replaces: int

    def to_json(self) -> dict[str, Any]:
        """Return the body."""
        return {
            "connection": self.number,
            "port": self.port,
            "offer": self.offer.to_json(),
            "gid": self.gid.hex(),
            "lid": self.lid,
            "qp_num": self.qp_num,
            "psn": self.psn,
            "attributes": self.attributes.to_json(),
            "replaces": self.replaces,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ConnectRequest:
        """Return a peer's request. Raises RemoteProtocolError naming the field that is wrong."""
        return cls(
            number=take_int(body, "connection", 1, NUMBER_MAX),
            port=take_name(body, "port", NAME_LENGTH_MAX),
            offer=PortOffer.from_json(take_object(body.get("offer"), "offer")),
            gid=b"" if body.get("gid") == "" else take_hex(body, "gid", GID_NBYTES),
            lid=take_int(body, "lid", 0, LID_MAX),
            qp_num=take_int(body, "qp_num", 0, QP_NUM_MAX),
            psn=take_int(body, "psn", 0, PSN_MAX),
            attributes=_attributes_from_json(take_object(body.get("attributes"), "attributes")),
            replaces=take_int(body, "replaces", 0, NUMBER_MAX),
        )


@dataclass(frozen=True)
class ConnectReply:
    """The end that the other side has made ready to receive. fences: receives that it keeps posted for fences; 0 for
    none, as from a peer that does not know them."""

    qp_num: int
    psn: int
    fences: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the body."""
        return {"qp_num": self.qp_num, "psn": self.psn, "fences": self.fences}

    @classmethod
    def from_json(cls, body: Mapping[str, Any], peer: str) -> ConnectReply:
        """Return the peer's reply. Raises ConnectFailure where it says that it could not."""
        failed = body.get("failed")
        if isinstance(failed, dict):
            raise ConnectFailure.from_json(failed, peer)
        return cls(
            qp_num=take_int(body, "qp_num", 0, QP_NUM_MAX),
            psn=take_int(body, "psn", 0, PSN_MAX),
            fences=take_int(body, "fences", 0, FENCES_MAX) if "fences" in body else 0,
        )


class ConnectFailure(Exception):  # noqa: N818  an answer, which becomes the caller's error
    """The other side could not make its end: in which step, with which errno, in its own words.

    offer: what its port offers now, where it was asked for what the port does not have any more.
    """

    def __init__(self, step: str, number: int, error: KvxferError, offer: PortOffer | None = None) -> None:
        super().__init__(error.message)
        self.step = step
        self.number = number
        self.error = error
        self.offer = offer

    def to_json(self) -> dict[str, Any]:
        """Return the body."""
        return {
            "failed": {
                "step": self.step,
                "errno": self.number,
                "message": clean(self.error.message, 2000),
                "remedy": clean(self.error.remedy, 800),
                "offer": None if self.offer is None else self.offer.to_json(),
            }
        }

    @classmethod
    def from_json(cls, failed: Mapping[str, Any], peer: str) -> ConnectFailure:
        """Return what the peer told. Raises RemoteProtocolError for an offer that makes no sense."""
        offer = failed.get("offer")
        step = failed.get("step")
        number = failed.get("errno")
        message, remedy = failed.get("message"), failed.get("remedy")
        return cls(
            step if isinstance(step, str) and step in STEPS else "RTR",
            number if type(number) is int and 0 <= number < 4096 else 0,
            PeerRefusedError(
                f"{peer} answered: {clean(message if isinstance(message, str) else 'no reason given', 2000)}",
                remedy=clean(remedy, 800) if isinstance(remedy, str) else "",
                peer=peer,
            ),
            None if offer is None else PortOffer.from_json(take_object(offer, "offer")),
        )


def _attributes_from_json(body: Mapping[str, Any]) -> QueuePairAttributes:
    is_global = body.get("is_global")
    path_mtu = take_int(body, "path_mtu", 256, 4096)
    if path_mtu not in MTU_STEPS:
        raise RemoteProtocolError(f"the peer's RDMA field 'path_mtu' is {path_mtu}: no MTU.", field="path_mtu")
    return QueuePairAttributes(
        path_mtu=path_mtu,
        read_depth=take_int(body, "read_depth", 0, 255),
        send_depth=take_int(body, "send_depth", 1, 1 << 20),
        timeout=take_int(body, "timeout", 0, 31),
        retry_count=take_int(body, "retry_count", 0, 7),
        rnr_retry=take_int(body, "rnr_retry", 0, 7),
        min_rnr_timer=take_int(body, "min_rnr_timer", 0, 31),
        hop_limit=take_int(body, "hop_limit", 0, 255),
        traffic_class=take_int(body, "traffic_class", 0, 255),
        service_level=take_int(body, "service_level", 0, 15),
        is_global=is_global if isinstance(is_global, bool) else None,
    )


def random_psn() -> int:
    """Return a first packet number: random, so that packets of an older connection do not fit."""
    return int.from_bytes(os.urandom(3), "big")
