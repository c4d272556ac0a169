"""The faults that a handshake can find, in words: what happened with which values, and what to do about it.

Pure: each function returns an error, or None where there is no fault. Called by `machine.py`.
"""

from __future__ import annotations

from kvxfer.errors import (
    AuthenticationError,
    HandshakeTimeoutError,
    KvxferError,
    PeerClosedError,
    PeerRefusedError,
    PeerRestartedError,
    RemoteProtocolError,
)
from kvxfer.handshake.bodies import Hello
from kvxfer.text import format_seconds

__all__ = ["find_identity_fault", "find_version_fault", "stream_ended", "timed_out", "wrong_proof"]

_SAME_KEY = "Give both sides the same key: key=, or KVXFER_KEY in the environment"


def find_version_fault(ours: tuple[int, int], theirs: tuple[int, int], peer: str) -> KvxferError | None:
    """Two version ranges (lowest, highest) must overlap."""
    if theirs[0] <= ours[1] and ours[0] <= theirs[1]:
        return None
    return PeerRefusedError(
        f"peer {peer!r} speaks protocol versions {theirs[0]} to {theirs[1]}, this side {ours[0]} to {ours[1]}: "
        "none in common.",
        remedy="Install versions of kvxfer that belong together on both hosts.",
        code="VersionMismatch",
        peer=peer,
        expected=f"{ours[0]}-{ours[1]}",
        actual=f"{theirs[0]}-{theirs[1]}",
    )


def find_identity_fault(ours: Hello, theirs: Hello, expected_generation: str | None) -> KvxferError | None:
    """The peer must be another process, the expected one if any, at the other end, and have a key if we have one."""
    peer = theirs.name
    if theirs.generation == ours.generation:
        return PeerRefusedError(
            f"engine {ours.name!r} is connected to itself (generation {ours.generation}).",
            remedy="Open the address of the peer, not this engine's own.",
            code="ConnectedToItself",
            peer=peer,
        )
    if expected_generation is not None and theirs.generation != expected_generation:
        return PeerRestartedError(
            f"generation {expected_generation} was expected, and peer {peer!r} is generation {theirs.generation}.",
            remedy="Ask the peer anew for its addresses; those of the old process are void.",
            peer=peer,
            expected=expected_generation,
            actual=theirs.generation,
        )
    if theirs.role == ours.role == "responder":
        return RemoteProtocolError(
            f"neither this side nor peer {peer!r} says that it opened the connection.", peer=peer
        )
    if theirs.auth != ours.auth:
        has, lacks = (f"peer {peer!r}", f"this side ({ours.name!r})")
        if ours.auth:
            has, lacks = lacks, has
        return AuthenticationError(
            f"{has} uses a pre-shared key, {lacks} has none.",
            remedy=f"{_SAME_KEY}; or neither.",
            peer=peer,
        )
    return None


def wrong_proof(ours: Hello, theirs: Hello) -> AuthenticationError:
    """The peer has proved another key."""
    return AuthenticationError(
        f"peer {theirs.name!r} uses another pre-shared key than this side ({ours.name!r}).",
        remedy=f"{_SAME_KEY}; look for a stray space or line end.",
        peer=theirs.name,
    )


def stream_ended(peer: str, state: str, missing: str | None) -> PeerClosedError:
    """The peer's stream has ended; `missing` is what the handshake still needed, None once established."""
    who = f"peer {peer!r}" if peer else "the peer"
    text = (
        f"{who}: connection closed without goodbye."
        if missing is None
        else f"{who} closed the connection during the handshake; still missing was {missing}."
    )
    return PeerClosedError(
        text,
        remedy="Its process ended, or something between the hosts cut the connection: look at the peer's log.",
        peer=peer,
        state=state,
    )


def timed_out(peer: str, deadline_s: float, state: str, missing: str, stale_frames: int) -> HandshakeTimeoutError:
    """The deadline has passed."""
    who = f"peer {peer!r}" if peer else "the peer"
    stale = f" {stale_frames} frames of other attempts were dropped." if stale_frames else ""
    return HandshakeTimeoutError(
        f"the handshake with {who} was not finished within {format_seconds(deadline_s)} s: "
        f"missing is {missing}.{stale}",
        remedy="The peer is overloaded or stopped, or no kvxfer engine; handshake_timeout_s "
        "(KVXFER_HANDSHAKE_TIMEOUT_S) sets how long to wait.",
        peer=peer,
        state=state,
        missing=missing,
    )
