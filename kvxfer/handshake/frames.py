"""Bytes <-> frames of a control connection, and the first frames of a data connection.

A connection begins with MAGIC from both sides; then come frames: an 8-byte header (body length, kind, flags, the low 16
bits of a sequence number; network byte order) and the body. Every kind has a limit for its body, checked as soon as the
header is there. Nothing here knows in which order frames may come: that is `machine.py`.
"""

from __future__ import annotations

import enum
import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvxfer.errors import LocalProtocolError, RemoteProtocolError
from kvxfer.text import guess_protocol

__all__ = [
    "ANSWERING_KINDS",
    "ASKING_KINDS",
    "BODY_NBYTES_MAX",
    "HANDSHAKE_KINDS",
    "HEADER",
    "MAGIC",
    "RESEND",
    "SESSION_KINDS",
    "Frame",
    "FrameDecoder",
    "FrameKind",
    "decode_json",
    "encode",
    "encode_json",
    "field",
]

MAGIC = b"\x93kvxfer\n"
"""Neither ASCII nor UTF-8, and as a little-endian length, as other dialects begin, far beyond any limit."""

HEADER = struct.Struct("!IBBH")
RESEND = 0x01
"""Flag: this frame was sent before; the sender misses something and wants ours again."""

KIB, MIB = 1 << 10, 1 << 20
JSON_DEPTH_MAX = 16
INTEGER_DIGITS_MAX = 40  # 2**128 has 39; without a limit int() of a long text takes quadratic time before Python 3.10.7

T = TypeVar("T")


class FrameKind(enum.IntEnum):
    """What a frame is; the numbers are the protocol."""

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
    CONNECT = 26
    CONNECTED = 27
    NOTIFY_FENCED = 28
    ATTACH = 32
    ATTACHED = 33


BODY_NBYTES_MAX: Mapping[FrameKind, int] = {
    FrameKind.HELLO: 4 * KIB,
    FrameKind.AUTH: 256,
    FrameKind.CARD: 256 * KIB,
    FrameKind.READY: 16 * KIB,
    FrameKind.CLOSE: 4 * KIB,
    FrameKind.ERROR: 16 * KIB,
    FrameKind.PING: 64,
    FrameKind.PONG: 64,
    FrameKind.REGIONS_GET: 4 * KIB,
    FrameKind.REGIONS: 64 * MIB,
    FrameKind.REVOKE: MIB,
    FrameKind.REVOKED: MIB,
    FrameKind.NOTIFY: MIB + KIB,
    FrameKind.NOTIFY_ACK: KIB,
    FrameKind.ABORT: KIB,
    FrameKind.ABORTED: KIB,
    FrameKind.CONNECT: 16 * KIB,
    FrameKind.CONNECTED: 16 * KIB,
    FrameKind.NOTIFY_FENCED: MIB + 2 * KIB,
    FrameKind.ATTACH: 4 * KIB,
    FrameKind.ATTACHED: 4 * KIB,
}
HANDSHAKE_KINDS = frozenset(kind for kind in FrameKind if kind < FrameKind.PING)
SESSION_KINDS = frozenset(kind for kind in FrameKind if FrameKind.PING <= kind < FrameKind.ATTACH)
ASKING_KINDS = frozenset(
    {
        FrameKind.PING,
        FrameKind.PONG,
        FrameKind.REGIONS_GET,
        FrameKind.REVOKED,
        FrameKind.NOTIFY,
        FrameKind.NOTIFY_FENCED,
        FrameKind.ABORT,
        FrameKind.CONNECT,
    }
)
"""What the side that opened a session sends."""
ANSWERING_KINDS = (SESSION_KINDS - ASKING_KINDS) | {FrameKind.PING, FrameKind.PONG}
"""What the side that was opened sends: the large ones are among these, so nobody can make it keep one."""

UNREAD_NBYTES_MAX = HEADER.size + max(BODY_NBYTES_MAX.values()) + MIB
"""Whoever feeds more than this without taking frames out has forgotten to."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it came."""

    kind: FrameKind
    body: bytes = b""
    flags: int = 0
    sequence: int = 0


class FrameDecoder:
    """Cuts a byte stream into frames. The result does not depend on how the stream was cut into pieces.

    `kinds` may be set between two frames: others are refused from their header on, before their body is kept.
    """

    def __init__(self, expect_magic: bool = True, kinds: Collection[FrameKind] | None = None) -> None:
        self.kinds = kinds
        self._buffer = bytearray()
        self._magic_is_due = expect_magic

    @property
    def unread_nbytes(self) -> int:
        """Bytes that are kept because no whole frame is there yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes of the stream; then call `next_frame` until it returns None."""
        if len(self._buffer) > UNREAD_NBYTES_MAX:
            raise LocalProtocolError(f"{len(self._buffer)} bytes were fed and no frame was taken out.")
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None while it is incomplete.

        Raises RemoteProtocolError, again at each call, where the stream cannot be a peer's.
        """
        if self._magic_is_due:
            if len(self._buffer) < len(MAGIC):
                return None
            self._check_magic()
            del self._buffer[: len(MAGIC)]
            self._magic_is_due = False
        if len(self._buffer) < HEADER.size:
            return None
        body_nbytes, number, flags, sequence = HEADER.unpack_from(self._buffer)
        kind = self._check_header(number, body_nbytes)
        end = HEADER.size + body_nbytes
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            body = bytes(view[HEADER.size : end])
        del self._buffer[:end]
        return Frame(kind, body, flags, sequence)

    def check_end(self) -> None:
        """At the end of the stream: raise RemoteProtocolError if the few bytes that came were no beginning of MAGIC."""
        if self._magic_is_due:
            self._check_magic()

    def _check_magic(self) -> None:
        seen = bytes(self._buffer[: len(MAGIC)])
        if seen == MAGIC[: len(seen)]:
            return
        guess = guess_protocol(seen)
        who = f" and looks like {guess}" if guess else ""
        raise RemoteProtocolError(
            f"the other side is not a kvxfer peer{who}: its first bytes are {seen!r} ({seen.hex(' ')}), not {MAGIC!r}.",
            remedy="Check host and port: this must be the address that a kvxfer engine reports.",
            first_bytes=seen.hex(),
        )

    def _check_header(self, number: int, body_nbytes: int) -> FrameKind:
        kind = _KINDS.get(number)
        if kind is None:
            raise RemoteProtocolError(
                f"frame kind {number} (0x{number:02x}) with {body_nbytes} bytes of body is unknown.",
                remedy="The peer runs a newer version, or the stream is damaged.",
                kind=number,
            )
        if self.kinds is not None and kind not in self.kinds:
            raise RemoteProtocolError(f"a {kind.name} frame is not allowed here.", kind=int(kind))
        limit = BODY_NBYTES_MAX[kind]
        if body_nbytes > limit:
            raise RemoteProtocolError(
                f"a {kind.name} frame announces {body_nbytes} bytes of body; the limit is {limit}.",
                kind=int(kind),
                body_nbytes=body_nbytes,
            )
        return kind


_KINDS = {int(kind): kind for kind in FrameKind}


def encode(kind: FrameKind, body: bytes | bytearray | memoryview = b"", flags: int = 0, sequence: int = 0) -> bytes:
    """Return the bytes of one frame. Raises LocalProtocolError when the body is over the kind's limit."""
    if len(body) > BODY_NBYTES_MAX[kind]:
        raise LocalProtocolError(
            f"the body of a {kind.name} frame has {len(body)} bytes; the limit is {BODY_NBYTES_MAX[kind]}.",
            kind=int(kind),
            body_nbytes=len(body),
        )
    return HEADER.pack(len(body), kind, flags, sequence & 0xFFFF) + body


def encode_json(kind: FrameKind, obj: Mapping[str, Any], flags: int = 0, sequence: int = 0) -> bytes:
    """Return a frame with a JSON body. Raises LocalProtocolError when `obj` is not plain JSON, or too large."""
    try:
        text = json.dumps(dict(obj), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        body = text.encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise LocalProtocolError(f"the body of a {kind.name} frame cannot be sent as JSON: {exc}.") from exc
    return encode(kind, body, flags, sequence)


def decode_json(frame: Frame) -> dict[str, Any]:
    """Return the JSON object in a frame. Raises RemoteProtocolError when it is none, or nested too deeply."""
    name = frame.kind.name
    try:
        obj = json.loads(
            frame.body.decode(), parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise RemoteProtocolError(f"the body of a {name} frame is nested too deeply.") from None
    except ValueError as exc:
        raise RemoteProtocolError(
            f"the body of a {name} frame ({len(frame.body)} bytes, {frame.body[:40]!r}) is not JSON: {exc}."
        ) from exc
    if not isinstance(obj, dict):
        raise RemoteProtocolError(f"the body of a {name} frame is a JSON {type(obj).__name__}, not an object.")
    _check_tree(obj, name)
    return obj


def _parse_int(text: str) -> int:
    if len(text) > INTEGER_DIGITS_MAX:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is no JSON number that fits")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _check_tree(obj: dict[str, Any], name: str) -> None:
    """Bounded depth, and strings that can be printed and sent on."""
    level: list[Any] = [obj]
    for _ in range(JSON_DEPTH_MAX):
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                if not one.isascii() and any("\ud800" <= letter <= "\udfff" for letter in one):
                    raise RemoteProtocolError(f"the body of a {name} frame has a string with lone surrogates.")
            elif isinstance(one, dict):
                below.extend(one)
                below.extend(one.values())
            elif isinstance(one, list):
                below.extend(one)
        if not below:
            return
        level = below
    raise RemoteProtocolError(f"the body of a {name} frame is nested more than {JSON_DEPTH_MAX} levels deep.")


def field(
    obj: Mapping[str, Any],
    name: str,
    kind: type[T],
    *,
    of: str = "",
    length_max: int | None = None,
    default: T | None = None,
) -> T:
    """Return `obj[name]`, of that type. True is no int.

    Raises RemoteProtocolError naming the field where it is missing (without a default), of another type or longer than
    `length_max`; `of` is the kind of the frame, for the message.
    """
    place = f"the {of} frame" if of else "the frame"
    if name not in obj:
        if default is not None:
            return default
        raise RemoteProtocolError(f"{place} has no field {name!r}.", field=name)
    value = obj[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RemoteProtocolError(
            f"field {name!r} of {place} is {type(value).__name__}, not {kind.__name__}.", field=name
        )
    if length_max is not None and len(value) > length_max:  # type: ignore[arg-type]
        raise RemoteProtocolError(
            f"field {name!r} of {place} has length {len(value)}; the limit is {length_max}.",  # type: ignore[arg-type]
            field=name,
        )
    return value
