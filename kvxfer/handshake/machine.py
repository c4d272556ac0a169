"""The handshake of two engines, sans-IO: bytes and the time in, bytes and events out.

Both sides send HELLO at once. With a key each proves to the other that it has it (AUTH); only then cards are exchanged
(CARD). The side that chooses - the initiator, or the smaller generation when both opened - tries transports and says
READY; the other prepares and says READY. Whoever has said and seen READY is established. All moves are in
`Handshake.TRANSITIONS`.

Frames may be lost, doubled or late: what comes too early waits, what comes twice is ignored, what belongs to another
attempt is dropped and counted (each frame after HELLO has its sender's generation and the receiver's nonce), and all
that was sent is sent again each `resend_s` until the peer has it.

No socket, thread, clock or random number here: `kvxfer.session` has them. Frame bodies are in `bodies.py`, faults in
words in `faults.py`.
"""

from __future__ import annotations

import enum
import hmac
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from kvxfer.errors import (
    ClosedError,
    KvxferError,
    LocalProtocolError,
    PeerClosedError,
    RemoteProtocolError,
)
from kvxfer.handshake.bodies import (
    Hello,
    check_hello,
    error_from_json,
    error_to_json,
    parse_reasons,
    parse_versions,
    prove,
    trim_reasons,
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
from kvxfer.handshake.faults import find_identity_fault, find_version_fault, stream_ended, timed_out, wrong_proof
from kvxfer.handshake.frames import (
    HANDSHAKE_KINDS,
    HEADER,
    MAGIC,
    RESEND,
    SESSION_KINDS,
    Frame,
    FrameDecoder,
    FrameKind,
    decode_json,
    encode,
    encode_json,
    field,
)
from kvxfer.text import clean

__all__ = ["Handshake", "Role", "State"]

Body: TypeAlias = Mapping[str, Any]


class Role(enum.Enum):
    """Who opened the connection; both may have."""

    INITIATOR = "initiator"
    RESPONDER = "responder"


class State(enum.Enum):
    """What has to happen next. WAIT_...: the peer must send it; OWN_...: our owner must call."""

    WAIT_HELLO = "the peer's HELLO"
    WAIT_PROOF = "the peer's proof that it has the key"
    OWN_CARD = "this side's own card"
    WAIT_CARD = "the peer's card"
    OWN_CHOICE = "this side's own choice of a transport"
    WAIT_ANSWER = "the peer's READY for the chosen transport"
    WAIT_CHOICE = "the peer's choice of a transport"
    OWN_ANSWER = "this side's own READY for the chosen transport"
    ESTABLISHED = "established"
    CLOSED = "closed"
    FAILED = "failed"


OVER = frozenset({State.CLOSED, State.FAILED})


class Call(enum.Enum):
    """What the owner may do to move on."""

    OFFER = "offer"
    LOCAL_READY = "local_ready"


class Handshake:
    """One attempt on one connection.

    generation: of this process, hex. nonce: random, new for each attempt. key: the pre-shared key, None for none.
    expected_generation: the peer must be this very process. transports: the names this side can use, preferred first.
    deadline_s, resend_s: counted from `now`, in seconds of the caller's clock.
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
        transports: Sequence[str],
        session_kinds: Collection[FrameKind] = SESSION_KINDS,
    ) -> None:
        self.state = State.WAIT_HELLO
        self.peer: PeerIdentity | None = None
        self.stale_frames = 0
        self._ours = check_hello(
            Hello(versions, generation, nonce.hex(), clean(name), key is not None, role.value, tuple(transports))
        )
        self._theirs: Hello | None = None
        self._key = key
        self._expected_generation = expected_generation
        self._transport = ""
        self._passed_over: Mapping[str, str] = {}
        self._error: KvxferError | None = None
        self._deadline_s = deadline_s
        self._deadline = now + deadline_s
        self._resend_s = resend_s
        self._resend_at = now + resend_s
        self._answer_at = now
        self._now = now
        self._events: deque[Event] = deque()
        self._decoder = FrameDecoder(kinds=HANDSHAKE_KINDS)
        self._session_kinds = frozenset(session_kinds)
        self._seen: set[FrameKind] = set()
        self._early: dict[FrameKind, Frame] = {}
        self._sent: dict[FrameKind, bytes] = {}  # bodies
        self._sequence = 0
        self._outgoing = bytearray(MAGIC)
        self._send(FrameKind.HELLO, self._ours.to_json())

    # What the owner calls.

    def receive_data(self, data: bytes | bytearray | memoryview, now: float) -> None:
        """Take bytes from the peer; b"" says that its stream has ended. Whatever they are, this does not raise: a fault
        becomes an ERROR frame to the peer and a `Failed` event, and further bytes are ignored."""
        self._now = now
        if self.state is not State.ESTABLISHED and now >= self._deadline:
            self.handle_timer(now)
        if self.state in OVER:
            return
        try:
            if not data:
                self._end_stream()
                return
            self._decoder.feed(data)
            while self.state not in OVER and (frame := self._decoder.next_frame()) is not None:
                self._receive_frame(frame)
        except KvxferError as error:
            self.fail(error)

    def data_to_send(self) -> bytes:
        """Return what is to be sent now, and forget it."""
        if not self._outgoing:
            return b""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def next_event(self) -> Event | None:
        """Return the next thing that has happened, or None."""
        return self._events.popleft() if self._events else None

    def offer(self, card: Mapping[str, Any]) -> None:
        """Send this side's card, after `CardWanted`. Raises LocalProtocolError out of turn, or if it is no plain JSON
        or too large; raises the error that ended the handshake if it is over."""
        self._call(Call.OFFER, {"card": card})

    def local_ready(self, transport: str, passed_over: Mapping[str, str] | None = None) -> None:
        """This side can receive over `transport`: its choice, after `PeerOffered`, where it chooses; else what
        `TransportChosen` said. Raises as `offer`."""
        self._call(Call.LOCAL_READY, {"transport": transport, "passed_over": passed_over or {}})

    def send(self, kind: FrameKind, body: bytes | bytearray | memoryview = b"") -> None:
        """Send a frame of the session, once established. Raises as `offer`."""
        if self.state is not State.ESTABLISHED or kind not in SESSION_KINDS:
            raise self._out_of_turn(f"send({kind.name})")
        self._sequence += 1
        self._outgoing += encode(kind, body, 0, self._sequence)

    def fail(self, error: KvxferError) -> None:
        """The owner, or this machine, found a fault: tell the peer and end with `Failed(error)`. A no-op once over."""
        if self.state not in OVER:
            self._send(FrameKind.ERROR, error_to_json(error))
            self._end(State.FAILED, error, Failed(error))

    def close(self, reason: str) -> None:
        """Say goodbye. No event follows. A no-op once over."""
        if self.state not in OVER:
            self._send(FrameKind.CLOSE, {"reason": clean(reason)})
            self._end(State.CLOSED, ClosedError(f"this side has closed the session: {reason}."), None)

    def deadline(self) -> float | None:
        """Return when `handle_timer` wants to be called, None for never."""
        if self.state in OVER or self.state is State.ESTABLISHED:
            return None
        return min(self._deadline, self._resend_at)

    def handle_timer(self, now: float) -> None:
        """Send again what may be lost, or give up. May be called at any time."""
        self._now = now
        if self.state in OVER or self.state is State.ESTABLISHED:
            return
        if now >= self._deadline:
            self.fail(timed_out(self._label, self._deadline_s, self.state.name, self.state.value, self.stale_frames))
        elif now >= self._resend_at:
            self._resend_at = now + self._resend_s
            self._send_again(RESEND)

    @property
    def is_chooser(self) -> bool:
        """Whether this side chooses the transport; known once the peer's HELLO is there."""
        if self._theirs is None or self._ours.role != self._theirs.role:
            return self._ours.role == Role.INITIATOR.value
        return self._ours.generation < self._theirs.generation

    # Moves: each returns the state that follows; they stand in TRANSITIONS below.

    def _greet(self, body: Body) -> State:
        name = body.get("name")
        versions = parse_versions(body)  # before all else: the rest may be another in another version
        fault = find_version_fault(self._ours.versions, versions, clean(name) if isinstance(name, str) else "")
        if fault is not None:
            raise fault
        hello = Hello.from_json(body)
        self._theirs = hello
        self.peer = PeerIdentity(hello.generation, hello.name, hello.versions, hello.transports)
        fault = find_identity_fault(self._ours, hello, self._expected_generation)
        if fault is not None:
            raise fault
        if self._key is None:
            return self._want_card()
        self._send(FrameKind.AUTH, {"proof": prove(self._key, sender=self._ours, receiver=hello)})
        return State.WAIT_PROOF

    def _check_proof(self, body: Body) -> State:
        assert self._key is not None
        assert self._theirs is not None
        proof = field(body, "proof", str, of="AUTH", length_max=64)
        expected = prove(self._key, sender=self._theirs, receiver=self._ours)
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            raise wrong_proof(self._ours, self._theirs)
        return self._want_card()

    def _want_card(self) -> State:
        self._events.append(CardWanted())
        return State.OWN_CARD

    def _send_card(self, body: Body) -> State:
        self._send(FrameKind.CARD, body)
        return State.WAIT_CARD

    def _take_card(self, body: Body) -> State:
        assert self.peer is not None
        self._events.append(PeerOffered(self.peer, field(body, "card", dict, of="CARD")))
        return State.OWN_CHOICE if self.is_chooser else State.WAIT_CHOICE

    def _send_choice(self, body: Body) -> State:
        assert self.peer is not None
        self._check_usable(body["transport"], (self._ours.transports, self.peer.transports), LocalProtocolError)
        self._transport, self._passed_over = body["transport"], trim_reasons(body["passed_over"])
        self._send(FrameKind.READY, {"transport": self._transport, "passed_over": self._passed_over})
        return State.WAIT_ANSWER

    def _refuse_answer(self, body: Body) -> State:
        raise RemoteProtocolError(f"{self._who} said READY before this side has chosen a transport.")

    def _take_answer(self, body: Body) -> State:
        transport = field(body, "transport", str, of="READY", length_max=32)
        if transport != self._transport:
            raise RemoteProtocolError(
                f"{self._who} is ready for {clean(transport)!r}; {self._transport!r} was chosen.", transport=transport
            )
        return self._establish()

    def _take_choice(self, body: Body) -> State:
        transport = field(body, "transport", str, of="READY", length_max=32)
        self._check_usable(transport, (self._ours.transports,), RemoteProtocolError)
        self._transport, self._passed_over = transport, parse_reasons(body)
        self._events.append(TransportChosen(transport, self._passed_over))
        return State.OWN_ANSWER

    def _send_answer(self, body: Body) -> State:
        if body["transport"] != self._transport:
            raise LocalProtocolError(
                f"local_ready({body['transport']!r}) was called; the peer has chosen {self._transport!r}."
            )
        self._send(FrameKind.READY, {"transport": self._transport, "passed_over": trim_reasons(body["passed_over"])})
        return self._establish()

    def _establish(self) -> State:
        assert self.peer is not None
        self._decoder.kinds = HANDSHAKE_KINDS | self._session_kinds
        self._events.append(Established(self.peer, self._transport, dict(self._passed_over)))
        return State.ESTABLISHED

    TRANSITIONS: ClassVar[Mapping[tuple[State, FrameKind | Call], Callable[[Handshake, Body], State]]] = {
        (State.WAIT_HELLO, FrameKind.HELLO): _greet,
        (State.WAIT_PROOF, FrameKind.AUTH): _check_proof,
        (State.OWN_CARD, Call.OFFER): _send_card,
        (State.WAIT_CARD, FrameKind.CARD): _take_card,
        (State.OWN_CHOICE, Call.LOCAL_READY): _send_choice,  # the side that chooses
        (State.OWN_CHOICE, FrameKind.READY): _refuse_answer,
        (State.WAIT_ANSWER, FrameKind.READY): _take_answer,
        (State.WAIT_CHOICE, FrameKind.READY): _take_choice,  # the other side
        (State.OWN_ANSWER, Call.LOCAL_READY): _send_answer,
    }

    # Frames in.

    def _receive_frame(self, frame: Frame) -> None:
        kind = frame.kind
        if kind not in HANDSHAKE_KINDS:
            self._sent.clear()  # the peer is established, so it has everything
            self._events.append(SessionFrame(frame))
            return
        body = decode_json(frame)
        if self._is_stale(kind, body):
            self.stale_frames += 1
        elif kind is FrameKind.ERROR:
            error = error_from_json(body, self.peer.name if self.peer else "")
            self._end(State.FAILED, error, Failed(error))
        elif kind is FrameKind.CLOSE:
            reason = clean(field(body, "reason", str, of="CLOSE", default="no reason given"))
            error = PeerClosedError(f"{self._who} has closed the session: {reason}.", peer=self._label)
            self._end(State.CLOSED, error, PeerClosed(reason))
        elif (self.state, kind) in self.TRANSITIONS:
            self._seen.add(kind)
            self._move(kind, body)
        elif kind not in self._seen:
            self._early.setdefault(kind, frame)
        elif kind is FrameKind.HELLO and frame.flags & RESEND and self._now >= self._answer_at:
            # HELLO stands for the whole set; and not at each of a flood: a card is 1000 times larger than a HELLO.
            self._answer_at = self._now + self._resend_s / 2
            self._send_again(0)

    def _is_stale(self, kind: FrameKind, body: Body) -> bool:
        """Whether a frame belongs to another attempt: from another process, or in answer to an older HELLO."""
        if kind is FrameKind.HELLO:
            if self._theirs is None:
                return False
            return (body.get("generation"), body.get("nonce")) != (self._theirs.generation, self._theirs.nonce)
        optional = "" if kind in (FrameKind.ERROR, FrameKind.CLOSE) else None  # their sender may not know us yet
        echo = field(body, "echo", str, of=kind.name, default=optional)
        generation = field(body, "generation", str, of=kind.name, default=optional)
        if echo and echo != self._ours.nonce:
            return True
        return bool(generation) and self._theirs is not None and generation != self._theirs.generation

    def _move(self, what: FrameKind | Call, body: Body) -> None:
        """Make one move, and those that frames which came early make possible."""
        self.state = self.TRANSITIONS[self.state, what](self, body)
        for kind in [one for one in self._early if (self.state, one) in self.TRANSITIONS]:
            self._receive_frame(self._early.pop(kind))  # at most one: each state waits for one kind

    def _call(self, call: Call, body: Body) -> None:
        if (self.state, call) not in self.TRANSITIONS:
            raise self._out_of_turn(call.value)
        try:
            self._move(call, body)
        except LocalProtocolError:
            raise
        except KvxferError as error:  # a frame that came early
            self.fail(error)

    def _end_stream(self) -> None:
        self._decoder.check_end()
        missing = None if self.state is State.ESTABLISHED else self.state.value
        error = stream_ended(self._label, self.state.name, missing)
        self._end(State.FAILED, error, Failed(error))

    # Frames out.

    def _send(self, kind: FrameKind, body: Body) -> None:
        if kind is not FrameKind.HELLO:
            body = {**body, "generation": self._ours.generation, "echo": self._theirs.nonce if self._theirs else ""}
        frame = encode_json(kind, body, 0, self._sequence + 1)
        self._sequence += 1
        self._outgoing += frame
        self._sent[kind] = frame[HEADER.size :]

    def _send_again(self, flags: int) -> None:
        for kind, body in self._sent.items():
            self._sequence += 1
            self._outgoing += encode(kind, body, flags, self._sequence)

    # Ends and words.

    def _end(self, state: State, error: KvxferError, event: Event | None) -> None:
        self.state = state
        self._error = error
        self._early.clear()
        self._sent.clear()
        self._decoder = FrameDecoder(kinds=())
        if event is not None:
            self._events.append(event)

    def _out_of_turn(self, what: str) -> KvxferError:
        if self._error is not None:
            return self._error
        return LocalProtocolError(f"{what} was called out of turn; the next step is {self.state.value}.")

    def _check_usable(self, transport: str, offers: Sequence[Sequence[str]], kind: type[KvxferError]) -> None:
        if not all(transport in names for names in offers):
            told = "; ".join(", ".join(names) or "none" for names in offers)
            raise kind(f"transport {clean(transport)!r} was chosen, which is not offered ({told}).")

    @property
    def _label(self) -> str:
        return self.peer.name if self.peer is not None else ""

    @property
    def _who(self) -> str:
        return f"peer {self.peer.name!r}" if self.peer is not None else "the peer"
