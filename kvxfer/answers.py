"""Questions to a peer over its control connection: the number that ties an answer to its question, and the wait for it.

Moves no bytes: `session.py` sends the question and finds the one who waits.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvxfer.errors import KvxferError, PeerUnreachableError, RemoteProtocolError, TransferTimeoutError
from kvxfer.handshake.frames import Frame, FrameKind
from kvxfer.text import format_seconds

if TYPE_CHECKING:
    from kvxfer.session import Session

__all__ = ["ANSWERS", "Notice", "Pending", "join_fences", "join_number", "split_fences", "split_number"]

ANSWERS = frozenset(
    {FrameKind.REGIONS, FrameKind.NOTIFY_ACK, FrameKind.ABORTED, FrameKind.REVOKED, FrameKind.CONNECTED}
)
_RAW = (FrameKind.NOTIFY, FrameKind.NOTIFY_FENCED, FrameKind.NOTIFY_ACK)
_NUMBER = struct.Struct("<Q")
_COUNT = struct.Struct("<H")
_FENCE = struct.Struct("<QQ")
FENCES_MAX = 64
"""Of one notification: as many as one peer may have connections."""


class Pending:
    """An answer that is on its way."""

    def __init__(self, session: Session, key: tuple[FrameKind, int]) -> None:
        self._session = session
        self._key = key
        self._event = threading.Event()
        self._error: KvxferError | None = None
        self._body: Any = None

    @property
    def is_resolved(self) -> bool:
        """Whether the answer, or an error, is there."""
        return self._event.is_set()

    def resolve(self, body: Any) -> None:
        """The answer has come."""
        self._body = body
        self._event.set()

    def fail(self, error: KvxferError) -> None:
        """No answer will come."""
        self._error = error
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether the answer is there within the time; raises the error that keeps it from coming."""
        if not self._event.wait(max(0.0, timeout_s)):
            return False
        if self._error is not None:
            raise self._error
        return True

    def result(self, timeout_s: float, what: str) -> Any:
        """Return the answer's body; raises PeerUnreachableError when it does not come in time."""
        if not self.wait(timeout_s):
            self._session.forget(self._key)
            raise PeerUnreachableError(
                f"{self._session.label} did not answer {what} within {format_seconds(timeout_s)} s.",
                remedy="The process may be stopped or overloaded; look at it, then try again.",
                peer=self._session.label,
            )
        return self._body

    def abandon(self) -> None:
        """The answer does not matter any more, and the question must not take effect if it is still unread."""
        if not self._event.is_set():
            self._session.forget(self._key)
            self._session.reset(_given_up(self._session.label))


class Notice:
    """A notification to a peer, which the first `wait` sends: so who is interrupted while it is being sent has it
    already, and can take it back."""

    def __init__(self, session: Session, payload: bytes) -> None:
        self._session = session
        self._payload = payload
        self.fences: dict[int, int] = {}
        self._is_begun = False
        self._pending: Pending | None = None

    def wait(self, timeout_s: float) -> bool:
        """Send it, unless that was done; whether the peer has it within the time. Raises what keeps it from coming."""
        if self._pending is None:
            self._is_begun = True
            kind, body = FrameKind.NOTIFY, self._payload
            if self.fences:
                kind, body = FrameKind.NOTIFY_FENCED, join_fences(self.fences, body)
            self._pending = self._session.ask(kind, FrameKind.NOTIFY_ACK, body)
        return self._pending.wait(timeout_s)

    @property
    def is_settled(self) -> bool:
        """Whether it was sent and the peer has answered, or never will."""
        return self._pending is not None and self._pending.is_resolved

    def abandon(self) -> None:
        """Make sure that the peer does not take it any more."""
        if self._pending is not None:
            self._pending.abandon()
        elif self._is_begun or self.fences:  # nobody knows how far it has come; fences would never be named
            self._session.reset(_given_up(self._session.label))


def _given_up(label: str) -> TransferTimeoutError:
    return TransferTimeoutError(f"a notification to {label} was given up.", peer=label)


def split_number(frame: Frame) -> tuple[int, Any]:
    """Return the number of a question or answer and the rest of its body: bytes for notifications, else a dict."""
    if frame.kind in _RAW:
        if len(frame.body) < _NUMBER.size:
            raise RemoteProtocolError(f"a {frame.kind.name} frame of {len(frame.body)} bytes is too short.")
        return _NUMBER.unpack_from(frame.body)[0], bytes(frame.body[_NUMBER.size :])
    try:
        body = json.loads(bytes(frame.body))
        number = body["number"]
    except (ValueError, KeyError, TypeError, RecursionError):
        number, body = None, None
    if not isinstance(number, int) or not isinstance(body, dict):
        raise RemoteProtocolError(f"a {frame.kind.name} frame holds {bytes(frame.body[:80])!r}: no numbered object.")
    return number, body


def join_number(number: int, body: Mapping[str, Any] | bytes) -> bytes:
    """Return the body of a question or answer with its number in it, as `split_number` finds it."""
    return _NUMBER.pack(number) + body if isinstance(body, bytes) else json.dumps({**body, "number": number}).encode()


def join_fences(fences: Mapping[int, int], payload: bytes) -> bytes:
    """Return a notification's payload behind the fences that it waits for, as `split_fences` finds them."""
    return b"".join([_COUNT.pack(len(fences)), *(_FENCE.pack(*pair) for pair in fences.items()), payload])


def split_fences(body: bytes) -> tuple[dict[int, int], bytes]:
    """Return the fences that a notification waits for, by connection, and its payload. Raises RemoteProtocolError."""
    count = _COUNT.unpack_from(body)[0] if len(body) >= _COUNT.size else 0
    start = _COUNT.size + count * _FENCE.size
    if not 0 < count <= FENCES_MAX or len(body) < start:
        raise RemoteProtocolError(f"a notification of {len(body)} bytes names {count} fences, not 1 to {FENCES_MAX}.")
    fences = dict(_FENCE.iter_unpack(body[_COUNT.size : start]))
    if len(fences) < count:
        raise RemoteProtocolError(f"a notification names {count} fences of {len(fences)} connections.")
    return fences, body[start:]
