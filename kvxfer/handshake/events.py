"""What the handshake machine tells its owner. Plain facts; `machine.py` makes them, `session.py` acts on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvxfer.errors import KvxferError
from kvxfer.handshake.frames import Frame

__all__ = [
    "CardWanted",
    "Established",
    "Event",
    "Failed",
    "PeerClosed",
    "PeerIdentity",
    "PeerOffered",
    "SessionFrame",
    "TransportChosen",
]


@dataclass(frozen=True)
class PeerIdentity:
    """Who answers. A process started anew has another generation, whatever its address.

    generation: lower-case hex. versions: the lowest and highest protocol version it speaks.
    name, transports: the peer's words, as in its HELLO, cut to length and without control characters.
    """

    generation: str
    name: str
    versions: tuple[int, int]
    transports: tuple[str, ...] = ()


@dataclass(frozen=True)
class CardWanted:
    """The peer has proved that it knows the key, or none is in use: the owner must call `offer(card)`."""


@dataclass(frozen=True)
class PeerOffered:
    """The peer's card is there. The side that chooses now tries transports and calls `local_ready` or `fail`."""

    peer: PeerIdentity
    card: dict[str, Any]


@dataclass(frozen=True)
class TransportChosen:
    """The choosing side has chosen: the owner prepares to receive, then calls `local_ready(transport)` or `fail`."""

    transport: str
    passed_over: Mapping[str, str]


@dataclass(frozen=True)
class Established:
    """Both sides have said READY. passed_over: transports the choosing side wanted more, and why each was not taken."""

    peer: PeerIdentity
    transport: str
    passed_over: Mapping[str, str]


@dataclass(frozen=True)
class SessionFrame:
    """A frame of the session that now runs; its body was not looked at."""

    frame: Frame


@dataclass(frozen=True)
class PeerClosed:
    """The peer said goodbye. Nothing follows."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """It is over. Nothing follows."""

    error: KvxferError


Event: TypeAlias = CardWanted | PeerOffered | TransportChosen | Established | SessionFrame | PeerClosed | Failed
