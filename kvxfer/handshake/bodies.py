"""What the bodies of handshake frames hold: the HELLO, the proof of the key, and errors on their way to the peer.

Pure: values in, values out. Everything a peer wrote is checked for type and length here, and stripped of control
characters before it can reach a message or a log. Called by `machine.py`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import (
    AuthenticationError,
    HandshakeTimeoutError,
    KvxferError,
    LocalProtocolError,
    PeerClosedError,
    PeerRefusedError,
    PeerRestartedError,
    RemoteProtocolError,
    TransportUnavailableError,
)
from kvxfer.handshake.frames import field
from kvxfer.text import clean

__all__ = [
    "Hello",
    "check_hello",
    "error_from_json",
    "error_to_json",
    "parse_reasons",
    "parse_versions",
    "prove",
    "trim_reasons",
]

NAME_LENGTH_MAX = 200
GENERATION_LENGTH_MAX = 64
NONCE_NBYTES_MIN, NONCE_NBYTES_MAX = 8, 32
TRANSPORTS_MAX = 8
TRANSPORT_LENGTH_MAX = 32
REASON_LENGTH_MAX = 400  # 8 reasons of 4-byte characters stay below the 16 KiB of the READY frame
MESSAGE_LENGTH_MAX = 2000  # with the remedy and the values below at most 16 KiB, the limit of an ERROR frame
REMEDY_LENGTH_MAX = 800
VALUE_LENGTH_MAX = 200

_HEX = re.compile(r"[0-9a-f]+")

_TYPED: Mapping[str, type[KvxferError]] = {
    "AuthenticationError": AuthenticationError,
    "PeerRestartedError": PeerRestartedError,
    "HandshakeTimeoutError": HandshakeTimeoutError,
    "TransportUnavailableError": TransportUnavailableError,
    "ClosedError": PeerClosedError,
    "PeerClosedError": PeerClosedError,
}
"""What a peer's error becomes here; every other one is a refusal in the peer's words."""

_VALUES = ("expected", "actual", "state", "step", "errno", "verb", "device", "transport")
"""Values of an error that travel, if they are plain; a fixed list, because they become attributes."""


@dataclass(frozen=True)
class Hello:
    """What each side says first."""

    versions: tuple[int, int]
    generation: str
    nonce: str
    name: str
    auth: bool
    role: str
    transports: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the body of the HELLO frame."""
        return {
            "versions": list(self.versions),
            "generation": self.generation,
            "nonce": self.nonce,
            "name": self.name,
            "auth": self.auth,
            "role": self.role,
            "transports": list(self.transports),
        }

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Hello:
        """Return the peer's HELLO. Raises RemoteProtocolError naming the field that is wrong."""
        role = field(obj, "role", str, of="HELLO", length_max=16)
        if role not in ("initiator", "responder"):
            raise RemoteProtocolError(f"field 'role' of the HELLO frame is {clean(role)!r}.", field="role")
        return cls(
            versions=parse_versions(obj),
            generation=parse_hex(obj, "generation", of="HELLO", length_max=GENERATION_LENGTH_MAX),
            nonce=parse_hex(obj, "nonce", of="HELLO", length_min=2 * NONCE_NBYTES_MIN, length_max=2 * NONCE_NBYTES_MAX),
            name=clean(field(obj, "name", str, of="HELLO", length_max=2 * NAME_LENGTH_MAX), NAME_LENGTH_MAX),
            auth=field(obj, "auth", bool, of="HELLO"),
            role=role,
            transports=parse_transports(obj),
        )


def parse_versions(obj: Mapping[str, Any]) -> tuple[int, int]:
    """Return the version range of a HELLO: the one part that all versions read alike."""
    versions = field(obj, "versions", list, of="HELLO")
    if len(versions) != 2 or any(type(one) is not int or not 0 <= one < 1 << 16 for one in versions):
        raise RemoteProtocolError("field 'versions' of the HELLO frame is not [lowest, highest].", field="versions")
    lowest, highest = versions
    if lowest > highest:
        raise RemoteProtocolError(f"field 'versions' of the HELLO frame is [{lowest}, {highest}].", field="versions")
    return lowest, highest


def parse_hex(obj: Mapping[str, Any], name: str, *, of: str, length_max: int, length_min: int = 1) -> str:
    """Return a field of lower-case hex digits."""
    text = field(obj, name, str, of=of, length_max=length_max)
    if len(text) < length_min or not _HEX.fullmatch(text):
        raise RemoteProtocolError(
            f"field {name!r} of the {of} frame is {clean(text)!r}, not {length_min} or more lower-case hex digits.",
            field=name,
        )
    return text


def parse_transports(obj: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the transports that a HELLO names."""
    names = field(obj, "transports", list, of="HELLO", length_max=64)
    if not all(isinstance(one, str) and 0 < len(one) <= TRANSPORT_LENGTH_MAX for one in names):
        raise RemoteProtocolError("field 'transports' of the HELLO frame is not a list of names.", field="transports")
    return tuple(clean(one) for one in names)


def prove(key: bytes, *, sender: Hello, receiver: Hello) -> str:
    """Return the proof that `sender` knows `key`, good for `receiver` and this attempt only.

    Each part is preceded by its length: without it a stranger could choose a generation and a nonce that read the same
    as ours when put together, and send us our own proof back.
    """
    mac = hmac.new(key, b"kvxfer auth v1", "sha256")
    for hello in (sender, receiver):
        for part in (hello.generation.encode(), bytes.fromhex(hello.nonce)):
            mac.update(len(part).to_bytes(2, "big") + part)
    return mac.hexdigest()


def error_to_json(error: KvxferError) -> dict[str, Any]:
    """Return the body of an ERROR frame that tells `error`; always within the frame's limit."""
    values: dict[str, Any] = {}
    for name in _VALUES:
        value = error.values.get(name)
        if isinstance(value, str):
            values[name] = clean(value, VALUE_LENGTH_MAX)
        elif isinstance(value, int) and abs(value) < 1 << 64:
            values[name] = value
    body: dict[str, Any] = {
        "code": type(error).__name__,
        "message": clean(error.message, MESSAGE_LENGTH_MAX),
        "remedy": clean(error.remedy, REMEDY_LENGTH_MAX),
    }
    return {**body, "values": values} if values else body


def error_from_json(obj: Mapping[str, Any], peer: str) -> KvxferError:
    """Return the error that a peer's ERROR frame becomes here. `peer` is its name, or empty."""
    code = clean(field(obj, "code", str, of="ERROR", default="unknown"), 80)
    message = clean(field(obj, "message", str, of="ERROR", default="no reason given"), MESSAGE_LENGTH_MAX)
    remedy = clean(field(obj, "remedy", str, of="ERROR", default=""), REMEDY_LENGTH_MAX)
    told: Mapping[str, Any] = field(obj, "values", dict, of="ERROR", default={})
    values: dict[str, Any] = {}
    for name in _VALUES:
        value = told.get(name)
        if isinstance(value, str):
            values[name] = clean(value, VALUE_LENGTH_MAX)
        elif type(value) is int:
            values[name] = value
    kind = _TYPED.get(code, PeerRefusedError)
    text = f"peer {peer} answered: {message}" if peer else f"peer answered: {message}"
    return kind(text, remedy=remedy, peer=peer, code=code, **values)


def trim_reasons(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return why transports were passed over, in a size that fits a READY frame."""
    kept = list(reasons.items())[:TRANSPORTS_MAX]
    return {clean(str(name), TRANSPORT_LENGTH_MAX): clean(str(why), REASON_LENGTH_MAX) for name, why in kept}


def parse_reasons(obj: Mapping[str, Any]) -> dict[str, str]:
    """Return the reasons in a READY frame."""
    reasons: Mapping[Any, Any] = field(obj, "passed_over", dict, of="READY", length_max=64, default={})
    if not all(isinstance(why, str) for why in reasons.values()):
        raise RemoteProtocolError(
            "field 'passed_over' of the READY frame is not names with reasons.", field="passed_over"
        )
    return trim_reasons(reasons)


def check_hello(hello: Hello) -> Hello:
    """Return our own HELLO if a peer will accept it; raises LocalProtocolError."""
    try:
        assert Hello.from_json(hello.to_json()) == hello
    except RemoteProtocolError as exc:
        raise LocalProtocolError(f"this engine's own HELLO is wrong: {exc.message}") from exc
    return hello
