"""The handshake of a control connection, without I/O: bytes and the time in, bytes and events out.

    HELLO ->  <- HELLO      who we are: protocol versions, generation, nonce, whether a key is in use
    AUTH  ->  <- AUTH       with a key only: HMAC over both nonces and generations
    CARD  ->  <- CARD       what we offer; only to a peer that has proved itself
    READY ->  <- READY      the transport; the chooser's first
    established: session frames, then CLOSE; ERROR at any time ends it with the true cause on both sides

Each side sends its part as soon as what it depends on has come, so the order in which two sides act does not matter:
duplicates are known by kind, what comes early waits, and what is lost is sent again every `resend_s` until the session
stands. All frames after HELLO carry their sender's generation and the receiver's nonce, so that an answer to an older
attempt is never taken for one to this.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import kvxfer.errors as errors
from kvxfer.errors import (
    AuthenticationError,
    HandshakeTimeoutError,
    KvxferError,
    LocalProtocolError,
    PeerClosedError,
    PeerRefusedError,
    PeerRestartedError,
    RemoteProtocolError,
)
from kvxfer.handshake.events import (
    CardWanted,
    Established,
    Event,
    Failed,
    PeerClosed,
    PeerIdentity,
    PeerOffered,
    SessionFrame,
    TransportChosen,
)
from kvxfer.handshake.frames import (
    MAGIC,
    RESEND,
    Frame,
    FrameDecoder,
    FrameKind,
    decode_json,
    encode,
    encode_json,
    field,
)

__all__ = ["Handshake", "Role", "State"]

AUTH_CONTEXT = b"kvxfer auth v1"
TEXT_MAX = 2000
HANDSHAKE_KINDS = (FrameKind.HELLO, FrameKind.AUTH, FrameKind.CARD, FrameKind.READY)
RELAYED = {
    name: getattr(errors, name)
    for name in ("AuthenticationError", "HandshakeTimeoutError", "PeerRestartedError", "TransportUnavailableError")
}
"""Errors that mean on this side what they mean on the other."""


class Role(enum.Enum):
    """Who opened the connection. Two initiators (a simultaneous open) are fine: the smaller generation chooses."""

    INITIATOR = "initiator"
    RESPONDER = "responder"


class State(enum.Enum):
    """What the machine waits for."""

    HELLO = "the peer's HELLO"
    AUTH = "the peer's proof that it knows the key"
    CARD = "the peer's card"
    READY = "READY from both sides"
    ESTABLISHED = "session frames"
    OVER = "nothing any more"


class Handshake:
    """One side of one connection. The owner feeds it bytes and the time, sends what it has to say, acts on its events.

    generation: hex text, random for each engine. nonce: random for each connection, 16 bytes. transports: the names
    this side would use; told in HELLO for the peer's messages. expected_generation: who must answer, if that is known.
    """

    def __init__(
        self,
        *,
        role: Role,
        generation: str,
        name: str,
        nonce: bytes,
        now: float,
        deadline_s: float,
        resend_s: float = 1.0,
        key: bytes | None = None,
        expected_generation: str | None = None,
        versions: tuple[int, int] = (1, 1),
        transports: Sequence[str] = (),
    ) -> None:
        self.state = State.HELLO
        self.peer: PeerIdentity | None = None
        self.stale_frames = 0
        self._role = role
        self._generation = generation
        self._nonce = nonce.hex()
        self._key = key
        self._expected_generation = expected_generation
        self._versions = versions
        self._deadline = now + deadline_s
        self._deadline_s = deadline_s
        self._resend_s = resend_s
        self._resend_at = now + resend_s
        self._decoder = FrameDecoder()
        self._outgoing = bytearray(MAGIC)
        self._events: deque[Event] = deque()
        self._sent: dict[FrameKind, dict[str, Any]] = {}
        self._early: dict[FrameKind, dict[str, Any]] = {}
        self._peer_nonce = ""
        self._is_chooser = role is Role.INITIATOR
        self._card_asked = False
        self._chosen: tuple[str, dict[str, str]] | None = None
        self._peer_ready = False
        hello = {"versions": list(versions), "nonce": self._nonce, "name": name[:256], "auth": key is not None}
        self._send(
            FrameKind.HELLO, {**hello, "generation": generation, "role": role.value, "transports": list(transports)}
        )

    # The owner's side.

    def receive_data(self, data: bytes, now: float) -> None:
        """Take bytes from the peer; b"" is the end of the stream. Never raises: what is wrong becomes an event."""
        del now
        if self.state is State.OVER:
            return
        if not data:
            self._end_of_stream()
            return
        try:
            self._decoder.feed(data)
            while self.state is not State.OVER and (frame := self._decoder.next_frame()) is not None:
                self._receive(frame)
        except KvxferError as error:
            self.fail(error)

    def data_to_send(self) -> bytes:
        """Return what must go to the peer now, once."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def next_event(self) -> Event | None:
        """Return the oldest event that was not yet taken."""
        return self._events.popleft() if self._events else None

    def offer(self, card: Mapping[str, Any]) -> None:
        """Answer CardWanted."""
        if self.state is State.OVER:
            return
        if not self._card_asked or FrameKind.CARD in self._sent:
            raise LocalProtocolError(f"offer() in state {self.state.name}: the card is not wanted (any more).")
        self._send(FrameKind.CARD, {"card": dict(card)})
        self._advance()

    def local_ready(self, transport: str, passed_over: Mapping[str, str] | None = None) -> None:
        """Our side can carry data over `transport`: the chooser's choice, or the chooser's word repeated."""
        if self.state is State.OVER:
            return
        if self.state is not State.READY or FrameKind.READY in self._sent:
            raise LocalProtocolError(f"local_ready({transport!r}) in state {self.state.name}.")
        if self._is_chooser:
            reasons = {str(name)[:64]: str(why)[:500] for name, why in (passed_over or {}).items()}
            self._chosen = (transport, reasons)
        elif self._chosen is None or self._chosen[0] != transport:
            raise LocalProtocolError(f"local_ready({transport!r}), but the peer chose {self._chosen}.")
        self._send(FrameKind.READY, {"transport": transport, "passed_over": self._chosen[1]})
        self._advance()

    def send(self, kind: FrameKind, body: bytes) -> None:
        """Send a session frame."""
        if self.state is not State.ESTABLISHED:
            raise LocalProtocolError(f"send({kind.name}) in state {self.state.name}.")
        self._outgoing += encode(kind, body)

    def fail(self, error: KvxferError) -> None:
        """End it with an error of ours; the peer is told the reason."""
        if self.state is State.OVER:
            return
        fields = {"code": type(error).__name__, "message": error.message[:TEXT_MAX], "remedy": error.remedy[:TEXT_MAX]}
        self._outgoing += encode_json(FrameKind.ERROR, fields)
        self._over(Failed(error))

    def close(self, reason: str) -> None:
        """Say goodbye; the owner then sends what is left and closes."""
        if self.state is not State.OVER:
            self._outgoing += encode_json(FrameKind.CLOSE, {"reason": reason[:TEXT_MAX]})
            self.state = State.OVER

    def deadline(self) -> float | None:
        """Return when `handle_timer` wants to be called; None when it does not."""
        if self.state in (State.ESTABLISHED, State.OVER):
            return None
        return min(self._deadline, self._resend_at)

    def handle_timer(self, now: float) -> None:
        """Send again what may be lost; give up at the deadline."""
        if self.state in (State.ESTABLISHED, State.OVER):
            return
        if now >= self._deadline:
            who = f" of {self.peer.name}" if self.peer else ""
            self.fail(
                HandshakeTimeoutError(
                    f"the handshake{who} did not end within {self._deadline_s:g} s; missing: {self.state.value}.",
                    remedy="The peer may be stopped, overloaded, or not a kvxfer engine.",
                    state=self.state.name,
                )
            )
        elif now >= self._resend_at:
            self._resend_at = now + self._resend_s
            self._send_again(RESEND)

    # Frames in.

    def _receive(self, frame: Frame) -> None:
        kind = frame.kind
        if kind is FrameKind.ERROR:
            self._receive_error(decode_json(frame))
        elif kind is FrameKind.CLOSE:
            reason = _clean(decode_json(frame).get("reason"))
            if self.state is State.ESTABLISHED:
                self._over(PeerClosed(reason))
            else:
                told = f"the peer closed during the handshake ({reason}); missing: {self.state.value}."
                self._over(Failed(PeerClosedError(told, state=self.state.name)))
        elif kind in HANDSHAKE_KINDS:
            self._receive_part(kind, decode_json(frame))
            if frame.flags & RESEND and self.state is not State.OVER:
                self._send_again(0)
        elif kind in (FrameKind.ATTACH, FrameKind.ATTACHED):
            raise RemoteProtocolError(f"a {kind.name} frame on a control connection.")
        elif self.state is not State.ESTABLISHED:
            raise RemoteProtocolError(f"a {kind.name} frame before the session stands; missing: {self.state.value}.")
        else:
            self._events.append(SessionFrame(frame))

    def _receive_part(self, kind: FrameKind, fields: dict[str, Any]) -> None:
        if self.peer is None:
            if kind is FrameKind.HELLO:
                self._take_hello(fields)
            else:
                self._early.setdefault(kind, fields)
        elif field(fields, "generation", str) != self.peer.generation:
            self.stale_frames += 1
        elif kind is not FrameKind.HELLO:
            if field(fields, "to", str) != self._nonce:
                self.stale_frames += 1
            elif self.state is not State.ESTABLISHED:
                self._early.setdefault(kind, fields)
        self._advance()

    def _advance(self) -> None:
        """Take what has come early as far as its turn has come."""
        while self.peer is not None:
            if self.state is State.AUTH and (fields := self._take_early(FrameKind.AUTH)) is not None:
                self._take_auth(fields)
            elif self.state is State.CARD and (fields := self._take_early(FrameKind.CARD)) is not None:
                card = field(fields, "card", dict, length_max=1000)
                self.state = State.READY
                self._events.append(PeerOffered(self.peer, card))
            elif (
                self.state is State.READY
                and self._may_take_ready()
                and (fields := self._take_early(FrameKind.READY)) is not None
            ):
                self._take_ready(fields)
            else:
                break
        if self.state is State.READY and self._peer_ready and FrameKind.READY in self._sent:
            assert self.peer is not None
            assert self._chosen is not None
            self.state = State.ESTABLISHED
            self._events.append(Established(self.peer, *self._chosen))

    def _take_early(self, kind: FrameKind) -> dict[str, Any] | None:
        fields = self._early.pop(kind, None)
        if fields is None or self.peer is None:
            return None
        if fields.get("generation") != self.peer.generation or fields.get("to") != self._nonce:
            self.stale_frames += 1
            return None
        return fields

    def _may_take_ready(self) -> bool:
        """The chooser has chosen before it hears the other's READY; the other has offered before it is chosen for."""
        if self._peer_ready:
            return False
        return FrameKind.READY in self._sent if self._is_chooser else FrameKind.CARD in self._sent

    def _take_hello(self, fields: dict[str, Any]) -> None:
        low_high = field(fields, "versions", list)
        generation = field(fields, "generation", str)
        self._peer_nonce = field(fields, "nonce", str)
        uses_key = field(fields, "auth", bool)
        role = field(fields, "role", str)
        if len(low_high) != 2 or not all(type(one) is int for one in low_high):
            raise RemoteProtocolError(f"field 'versions' is {low_high!r:.60}; two ints are expected.", field="versions")
        if max(low_high[0], self._versions[0]) > min(low_high[1], self._versions[1]):
            raise RemoteProtocolError(
                f"the peer speaks protocol versions {low_high[0]} to {low_high[1]}, "
                f"this side {self._versions[0]} to {self._versions[1]}.",
                remedy="Use releases of kvxfer that share a protocol version on both sides.",
                versions=tuple(low_high),
            )
        if generation == self._generation:
            raise RemoteProtocolError(
                "the engine is connected to itself.",
                remedy="Open the address of another engine; memory of one's own needs no transfer.",
            )
        if self._expected_generation is not None and generation != self._expected_generation:
            raise PeerRestartedError(
                f"generation {self._expected_generation} was expected, {generation[:64]} answers.",
                expected=self._expected_generation,
                actual=generation,
            )
        if uses_key != (self._key is not None):
            has, lacks = ("the peer", "this side") if uses_key else ("this side", "the peer")
            raise AuthenticationError(
                f"{has} uses a pre-shared key and {lacks} has none.",
                remedy="Give both sides the same key (key=... or KVXFER_KEY), or neither.",
            )
        self.peer = PeerIdentity(generation, _clean(fields.get("name"), 256))
        if role == self._role.value and self._role is Role.INITIATOR:
            self._is_chooser = self._generation < generation
        if self._key is None:
            self._want_card()
        else:
            self.state = State.AUTH
            self._send(
                FrameKind.AUTH, {"proof": self._proof(self._generation, self._nonce, generation, self._peer_nonce)}
            )

    def _take_auth(self, fields: dict[str, Any]) -> None:
        assert self.peer is not None
        expected = self._proof(self.peer.generation, self._peer_nonce, self._generation, self._nonce)
        if not hmac.compare_digest(field(fields, "proof", str).encode(), expected.encode()):
            raise AuthenticationError(
                "the pre-shared keys differ.",
                remedy="Give both sides the same key (key=... or KVXFER_KEY); mind blanks and line ends.",
            )
        self._want_card()

    def _want_card(self) -> None:
        self.state = State.CARD
        self._card_asked = True
        self._events.append(CardWanted())

    def _take_ready(self, fields: dict[str, Any]) -> None:
        transport = field(fields, "transport", str, length_max=64)
        passed_over = {_clean(name, 64): _clean(why, 500) for name, why in field(fields, "passed_over", dict).items()}
        if self._is_chooser:
            assert self._chosen is not None
            if transport != self._chosen[0]:
                raise RemoteProtocolError(f"{self._chosen[0]} was chosen, the peer is ready for {transport!r}.")
        else:
            self._chosen = (transport, passed_over)
            self._events.append(TransportChosen(transport, passed_over))
        self._peer_ready = True

    def _receive_error(self, fields: dict[str, Any]) -> None:
        code, message, remedy = (_clean(fields.get(name)) for name in ("code", "message", "remedy"))
        who = self.peer.name if self.peer is not None else "the peer"
        kind = RELAYED.get(code, PeerRefusedError)
        self._over(Failed(kind(f"{who} answered: {message}", remedy=remedy, code=code)))

    def _end_of_stream(self) -> None:
        if self.state is State.ESTABLISHED:
            told, remedy = "the connection was closed without goodbye", "The peer has died or been killed."
        else:
            told = f"the connection was closed during the handshake; missing: {self.state.value}"
            remedy = "The peer has died, refuses more connections, or is not a kvxfer engine."
        self._over(Failed(PeerClosedError(f"{told}.", remedy=remedy, state=self.state.name)))

    # Frames out.

    def _send(self, kind: FrameKind, fields: dict[str, Any]) -> None:
        self._sent[kind] = fields
        self._put(kind, 0)

    def _put(self, kind: FrameKind, flags: int) -> None:
        fields = self._sent[kind]
        if kind is not FrameKind.HELLO:
            fields = {**fields, "generation": self._generation, "to": self._peer_nonce}
        self._outgoing += encode_json(kind, fields, flags=flags)

    def _send_again(self, flags: int) -> None:
        """Everything sent so far once more; the last with `flags`, which makes the peer do the same once."""
        kinds = list(self._sent)
        for kind in kinds:
            self._put(kind, flags if kind is kinds[-1] else 0)

    def _proof(self, generation: str, nonce: str, to_generation: str, to_nonce: str) -> str:
        assert self._key is not None
        parts = [AUTH_CONTEXT, *(part.encode() for part in (generation, nonce, to_generation, to_nonce))]
        return hmac.new(self._key, b"\0".join(parts), hashlib.sha256).hexdigest()

    def _over(self, event: Event) -> None:
        self.state = State.OVER
        self._early.clear()
        self._events.append(event)


def _clean(text: object, length_max: int = TEXT_MAX) -> str:
    """Return a peer's text, fit to be shown: printable and not too long."""
    return "".join(ch for ch in str(text)[:length_max] if ch.isprintable()) if isinstance(text, str) else ""
