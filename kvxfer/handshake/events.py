"""What the handshake machine tells its owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    """Who the peer says it is. generation: random, new in every engine: two are never the same process's."""

    generation: str
    name: str


@dataclass(frozen=True)
class CardWanted:
    """The peer may know what we offer: call `offer(card)`. With a key, it has proved that it knows it."""


@dataclass(frozen=True)
class PeerOffered:
    """The peer's card is here. Who chooses tries transports and calls `local_ready`."""

    peer: PeerIdentity
    card: Mapping[str, Any]


@dataclass(frozen=True)
class TransportChosen:
    """The other side has chosen: prepare, then call `local_ready` with the same name."""

    transport: str
    passed_over: Mapping[str, str]


@dataclass(frozen=True)
class Established:
    """Both sides are ready: data may flow."""

    peer: PeerIdentity
    transport: str
    passed_over: Mapping[str, str]


@dataclass(frozen=True)
class SessionFrame:
    """A frame of the established session."""

    frame: Frame


@dataclass(frozen=True)
class PeerClosed:
    """The peer said goodbye. Nothing follows."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """It is over. Nothing follows."""

    error: KvxferError


Event = CardWanted | PeerOffered | TransportChosen | Established | SessionFrame | PeerClosed | Failed
