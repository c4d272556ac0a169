"""Mooncake's control messages: one request and one answer on a connection to its RPC port.

    uint64, little-endian     length of all that follows
    uint8                     kind; missing from old peers, whose body then begins with "{"
    JSON object, UTF-8

Source: SocketHandShakePlugin and readString of Mooncake 0.3.13. Its limit is 1 MiB, up to 128 MiB by
MC_HANDSHAKE_MAX_LENGTH.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import RemoteProtocolError
from kvxfer.text import guess_protocol

__all__ = [
    "LENGTH_MAX",
    "LENGTH_NBYTES",
    "Message",
    "MessageDecoder",
    "MessageKind",
    "encode",
    "may_be_message",
    "pack_notify",
    "parse_object",
    "unpack_notify",
]

LENGTH_NBYTES = 8
LENGTH_MAX = 128 << 20
"""The most that MC_HANDSHAKE_MAX_LENGTH allows."""
INTEGER_DIGITS_MAX = 40  # without a limit int() of a long text takes quadratic time before Python 3.10.7
NOTIFY_NAME_LENGTH_MAX = 1024


class MessageKind(enum.IntEnum):
    """What a message asks; its answer has the same kind."""

    CONNECTION = 0
    METADATA = 1
    NOTIFY = 2
    PROBE = 3


@dataclass(frozen=True)
class Message:
    """One message. is_old: it came without a kind, which means CONNECTION; its answer must have none either."""

    kind: MessageKind
    body: bytes
    is_old: bool = False

    def fields(self) -> dict[str, Any]:
        """Return the JSON object in it; raises RemoteProtocolError where that is none."""
        return parse_object(self.body, f"a {self.kind.name} message")


def encode(kind: MessageKind, fields: Mapping[str, Any], *, is_old: bool = False) -> bytes:
    """Return the bytes of a message. Mooncake's own end with a newline, and so do these."""
    body = json.dumps(dict(fields), separators=(",", ":")).encode() + b"\n"
    if not is_old:
        body = bytes([kind]) + body
    return len(body).to_bytes(LENGTH_NBYTES, "little") + body


def may_be_message(data: bytes | bytearray) -> bool:
    """Whether a stream that begins with these bytes may begin with a message; from LENGTH_NBYTES on a certain answer.

    Text of other protocols is a length far beyond LENGTH_MAX.
    """
    head = bytes(data[:LENGTH_NBYTES])
    if len(head) == LENGTH_NBYTES:
        return 1 <= int.from_bytes(head, "little") <= LENGTH_MAX
    low = head.ljust(4, b"\0")[:4]
    return int.from_bytes(low, "little") & 0xFF000000 <= LENGTH_MAX and not any(head[4:])


class MessageDecoder:
    """Takes the one message out of a stream, however that was cut into pieces.

    body_nbytes_max: longer ones are refused as soon as their length is there.
    unread_kinds: bodies of these are passed over, not kept, up to LENGTH_MAX: nobody looks at them.
    """

    def __init__(self, body_nbytes_max: int = LENGTH_MAX, *, unread_kinds: Collection[MessageKind] = ()) -> None:
        self._body_nbytes_max = body_nbytes_max
        self._unread_kinds = unread_kinds
        self._data = bytearray()
        self._length = 0
        self._passed_nbytes = 0
        self._kind: MessageKind | None = None
        self._is_old = False

    @property
    def kept_nbytes(self) -> int:
        """Bytes that are held while the message is not whole."""
        return len(self._data)

    def feed(self, data: bytes | bytearray | memoryview) -> Message | None:
        """Add bytes of the stream; return the message once it is whole. What follows it is dropped.

        Raises RemoteProtocolError where the stream cannot be a peer's.
        """
        self._data += data
        if self._kind is None and not self._read_head():
            return None
        assert self._kind is not None
        body_nbytes = self._length - (0 if self._is_old else 1)
        if not self._is_old and self._kind in self._unread_kinds:
            self._passed_nbytes += len(self._data)
            self._data.clear()
            return Message(self._kind, b"") if self._passed_nbytes >= body_nbytes else None
        if len(self._data) < body_nbytes:
            return None
        return Message(self._kind, bytes(self._data[:body_nbytes]), self._is_old)

    def _read_head(self) -> bool:
        """Take the length and the kind off the front; whether they are there."""
        if len(self._data) >= LENGTH_NBYTES:
            self._length = int.from_bytes(self._data[:LENGTH_NBYTES], "little")
            if not 1 <= self._length <= LENGTH_MAX:
                raise _no_length(bytes(self._data[:LENGTH_NBYTES]))
        if len(self._data) <= LENGTH_NBYTES:
            return False
        number = self._data[LENGTH_NBYTES]
        self._is_old = number == ord("{")
        if not self._is_old and number not in _KINDS:
            raise RemoteProtocolError(f"a message of {self._length} bytes has kind {number}, which is not known.")
        self._kind = MessageKind.CONNECTION if self._is_old else MessageKind(number)
        del self._data[: LENGTH_NBYTES + (0 if self._is_old else 1)]
        is_unread = self._kind in self._unread_kinds and not self._is_old
        if self._length > self._body_nbytes_max + 1 and not is_unread:
            raise RemoteProtocolError(
                f"a {self._kind.name} message announces {self._length} bytes; the limit is {self._body_nbytes_max}."
            )
        return True


def _no_length(head: bytes) -> RemoteProtocolError:
    """What is told of a length that cannot be: mostly it is the text of another protocol."""
    who = guess_protocol(head)
    told = f"a message announces {int.from_bytes(head, 'little')} bytes; from 1 to {LENGTH_MAX} can be."
    if who or (head.isascii() and head.decode().isprintable()):
        told = (
            f"the other side does not speak Mooncake's protocol{f' and looks like {who}' if who else ''}: "
            f"its first bytes are {head!r}."
        )
    return RemoteProtocolError(
        told,
        remedy="Check host and port: this must be the RPC port of a Mooncake process, as get_rpc_port() returns it.",
        first_bytes=head.hex(),
    )


_KINDS = frozenset(int(kind) for kind in MessageKind)


def parse_object(data: bytes | str, what: str) -> dict[str, Any]:
    """Return the JSON object that a peer or a metadata server wrote; `what` names it in the message.

    Raises RemoteProtocolError where it is no object, no JSON or nested too deeply.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        fields = json.loads(text, parse_int=_parse_int)
    except RecursionError:
        raise RemoteProtocolError(f"{what} is nested too deeply.") from None
    except ValueError as exc:
        raise RemoteProtocolError(f"{what} ({len(data)} bytes, {data[:40]!r}) is not JSON: {exc}.") from exc
    if not isinstance(fields, dict):
        raise RemoteProtocolError(f"{what} is a JSON {type(fields).__name__}, not an object.")
    return fields


def _parse_int(text: str) -> int:
    if len(text) > INTEGER_DIGITS_MAX:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def pack_notify(name: str, message: str) -> bytes:
    """Return a notification of Mooncake's as the bytes that kvxfer's own notifications carry."""
    return json.dumps({"name": name, "notify_msg": message}, separators=(",", ":")).encode()


def unpack_notify(payload: bytes) -> tuple[str, str]:
    """Return the name and the message; raises RemoteProtocolError for anything that is no such notification."""
    fields = parse_object(payload, "a notification")
    name, message = fields.get("name"), fields.get("notify_msg")
    if not isinstance(name, str) or not isinstance(message, str) or len(name) > NOTIFY_NAME_LENGTH_MAX:
        raise RemoteProtocolError(f"a notification holds {payload[:80]!r}: no name and message of text.")
    return name, message
