"""Bytes and frames of a control connection. Every length is checked against its limit before anything is kept.

A connection begins with MAGIC in both directions. A frame is a header (body length, kind, flags, sequence) and a body:
a JSON object for most kinds, a number and raw bytes for notifications.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvxfer.errors import RemoteProtocolError

__all__ = [
    "HEADER",
    "LIMITS",
    "MAGIC",
    "RESEND",
    "Frame",
    "FrameDecoder",
    "FrameKind",
    "decode_json",
    "encode",
    "encode_json",
    "field",
]

MAGIC = b"\x93kvxfer\n"
"""Eight bytes that no text protocol begins with; read as a little-endian length they exceed any sane limit."""
HEADER = struct.Struct("!IBBH")
RESEND = 1
"""Flag of frames that were sent before: the receiver answers with its own."""


class FrameKind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    AUTH = 2
    CARD = 3
    READY = 4
    CLOSE = 5
    ERROR = 6
    PING = 16
    PONG = 17
    REGIONS_GET = 18
    REGIONS = 19
    REVOKE = 20
    REVOKED = 21
    NOTIFY = 22
    NOTIFY_ACK = 23
    ABORT = 24
    ABORTED = 25
    ATTACH = 32
    ATTACHED = 33


LIMITS: Mapping[FrameKind, int] = {
    FrameKind.HELLO: 4 << 10,
    FrameKind.AUTH: 1 << 10,
    FrameKind.CARD: 256 << 10,
    FrameKind.READY: 16 << 10,
    FrameKind.CLOSE: 4 << 10,
    FrameKind.ERROR: 16 << 10,
    FrameKind.PING: 64,
    FrameKind.PONG: 64,
    FrameKind.REGIONS_GET: 4 << 10,
    FrameKind.REGIONS: 64 << 20,
    FrameKind.REVOKE: 1 << 20,
    FrameKind.REVOKED: 1 << 20,
    FrameKind.NOTIFY: (1 << 20) + 1024,
    FrameKind.NOTIFY_ACK: 1 << 10,
    FrameKind.ABORT: 1 << 10,
    FrameKind.ABORTED: 1 << 10,
    FrameKind.ATTACH: 4 << 10,
    FrameKind.ATTACHED: 4 << 10,
}
"""The longest body of each kind, in bytes."""

_STRANGERS = (
    (b"HTTP/", "an HTTP answer"),
    (b"GET ", "an HTTP request"),
    (b"POST ", "an HTTP request"),
    (b"SSH-", "an SSH banner"),
    (b"\x16\x03", "a TLS hello"),
    (b"\x15\x03", "a TLS alert"),
    (b"220", "an FTP or SMTP greeting"),
)


@dataclass(frozen=True)
class Frame:
    """One frame, its length checked."""

    kind: FrameKind
    body: bytes
    flags: int = 0
    sequence: int = 0


class FrameDecoder:
    """Cut a stream into frames; how the bytes were split makes no difference, and half a frame is just not yet one."""

    def __init__(self, *, expect_magic: bool = True) -> None:
        self._buffer = bytearray()
        self._expect_magic = expect_magic

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes of the stream."""
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None; raises RemoteProtocolError where no frame of kvxfer's can begin."""
        if self._expect_magic:
            seen = bytes(self._buffer[: len(MAGIC)])
            if seen != MAGIC[: len(seen)]:
                raise RemoteProtocolError(
                    f"not a kvxfer peer: {_stranger(bytes(self._buffer[:32]))}.", received=seen.hex()
                )
            if len(seen) < len(MAGIC):
                return None
            del self._buffer[: len(MAGIC)]
            self._expect_magic = False
        if len(self._buffer) < HEADER.size:
            return None
        nbytes, number, flags, sequence = HEADER.unpack_from(self._buffer)
        try:
            kind = FrameKind(number)
        except ValueError:
            raise RemoteProtocolError(f"a frame of unknown kind {number}, {nbytes} bytes.", kind=number) from None
        if nbytes > LIMITS[kind]:
            raise RemoteProtocolError(
                f"a {kind.name} frame of {nbytes} bytes; at most {LIMITS[kind]} are allowed.",
                kind=kind.name,
                nbytes=nbytes,
            )
        if len(self._buffer) < HEADER.size + nbytes:
            return None
        body = bytes(self._buffer[HEADER.size : HEADER.size + nbytes])
        del self._buffer[: HEADER.size + nbytes]
        return Frame(kind, body, flags, sequence)


def encode(kind: FrameKind, body: bytes = b"", *, flags: int = 0, sequence: int = 0) -> bytes:
    """Return the bytes of a frame."""
    if len(body) > LIMITS[kind]:
        raise ValueError(f"a {kind.name} frame of {len(body)} bytes; at most {LIMITS[kind]} are allowed.")
    return HEADER.pack(len(body), kind, flags, sequence & 0xFFFF) + body


def encode_json(kind: FrameKind, fields: Mapping[str, Any], *, flags: int = 0) -> bytes:
    """Return the bytes of a frame whose body is a JSON object."""
    return encode(kind, json.dumps(fields).encode(), flags=flags)


def decode_json(frame: Frame) -> dict[str, Any]:
    """Return the JSON object of a frame's body; raises RemoteProtocolError where it is none."""
    try:
        fields = json.loads(frame.body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise RemoteProtocolError(f"a {frame.kind.name} frame holds no JSON object: {frame.body[:40]!r}.")
    return fields


_T = TypeVar("_T", str, int, bool, list, dict)


def field(fields: Mapping[str, Any], name: str, kind: type[_T], *, length_max: int = 256) -> _T:
    """Return a field of the given type and length; raises RemoteProtocolError naming it. Other fields do not matter."""
    value = fields.get(name)
    if type(value) is not kind:
        raise RemoteProtocolError(f"field {name!r} is {value!r:.60}; a {kind.__name__} is expected.", field=name)
    if isinstance(value, (str, list, dict)) and len(value) > length_max:
        raise RemoteProtocolError(
            f"field {name!r} has length {len(value)}; at most {length_max} is allowed.", field=name
        )
    return value


def _stranger(data: bytes) -> str:
    for start, what in _STRANGERS:
        if data.startswith(start):
            return f"it sent {what} ({data[:16]!r})"
    return f"it began with {data[:16]!r}"
