"""Two handshake machines and the pipes between them, on a virtual clock; an observer notes what went over the wire.

A pipe works on whole frames until they are committed to the stream (so that they can be dropped, doubled, swapped), and
on bytes after that (so that they arrive in pieces). The observer reads the wire itself and never asks a machine.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvxfer.errors import KvxferError, TransportUnavailableError
from kvxfer.handshake.events import CardWanted, Established, Event, Failed, PeerClosed, PeerOffered, TransportChosen
from kvxfer.handshake.frames import HEADER, MAGIC, RESEND, Frame, FrameDecoder, FrameKind, encode
from kvxfer.handshake.machine import Handshake, Role, State

DEADLINE_S = 30.0
RESEND_S = 1.0
OVER = (State.ESTABLISHED, State.CLOSED, State.FAILED)


@dataclass
class Setup:
    """What one side is started with."""

    role: Role
    generation: str
    nonce: bytes
    key: bytes | None = None
    expected_generation: str | None = None
    versions: tuple[int, int] = (1, 1)
    transports: tuple[str, ...] = ("shm", "tcp")
    choice: str = "tcp"
    """What the owner chooses if it must; empty: it finds nothing that works."""


class Side:
    """A machine with an owner that does what events ask, when told to, and closes its connection when it is over."""

    def __init__(self, setup: Setup, now: float) -> None:
        self.setup = setup
        self.name = f"engine-{setup.generation}"
        self.machine = Handshake(
            role=setup.role,
            generation=setup.generation,
            name=self.name,
            nonce=setup.nonce,
            now=now,
            deadline_s=DEADLINE_S,
            resend_s=RESEND_S,
            key=setup.key,
            expected_generation=setup.expected_generation,
            versions=setup.versions,
            transports=setup.transports,
        )
        self.deadline = now + DEADLINE_S
        self.events: list[Event] = []
        self.duties: list[Event] = []
        self.sent: list[Frame] = []
        self.received: list[Frame] = []
        self._outbound = FrameDecoder()
        self._inbound = FrameDecoder()
        self.has_closed = False

    @property
    def state(self) -> State:
        return self.machine.state

    @property
    def error(self) -> KvxferError | None:
        """The error of the Failed event, if there was one."""
        return next((event.error for event in self.events if isinstance(event, Failed)), None)

    @property
    def established(self) -> Established | None:
        """The Established event, if there was one."""
        return next((event for event in self.events if isinstance(event, Established)), None)

    def receive(self, data: bytes, now: float) -> None:
        """Give bytes to the machine; the observer parses them as well."""
        self._inbound.feed(data)
        while (frame := self._inbound.next_frame()) is not None:
            self.received.append(frame)
        self.machine.receive_data(data, now)
        self._collect()

    def tick(self, now: float) -> None:
        """Let the machine look at the clock."""
        when = self.machine.deadline()
        if when is not None and when <= now:
            self.machine.handle_timer(now)
        self._collect()

    def act(self) -> None:
        """Do the oldest thing that an event asked for."""
        duty = self.duties.pop(0)
        try:
            if isinstance(duty, CardWanted):
                self.machine.offer({"memory of": self.setup.generation})
            elif isinstance(duty, PeerOffered):
                if self.setup.choice:
                    self.machine.local_ready(self.setup.choice, {"rdma": "no device"})
                else:
                    self.machine.fail(TransportUnavailableError("nothing works.", reasons={"shm": "other host"}))
            elif isinstance(duty, TransportChosen):
                self.machine.local_ready(duty.transport)
        except KvxferError as error:  # as the session does; a no-op where the machine is over already
            self.machine.fail(error)
        self._collect()

    def take_frames(self) -> list[bytes]:
        """Return what the machine sends, cut into frames; the magic is a frame of its own."""
        data = self.machine.data_to_send()
        self._outbound.feed(data)
        pieces = [MAGIC] if data.startswith(MAGIC) else []
        while (frame := self._outbound.next_frame()) is not None:
            self.sent.append(frame)
            pieces.append(encode(frame.kind, frame.body, frame.flags, frame.sequence))
        return pieces

    def _collect(self) -> None:
        while (event := self.machine.next_event()) is not None:
            self.events.append(event)
            is_duty = isinstance(event, CardWanted | TransportChosen)
            if is_duty or (isinstance(event, PeerOffered) and self.machine.is_chooser):
                self.duties.append(event)

    def sent_kind(self, kind: FrameKind) -> list[Frame]:
        """What of this kind it has sent."""
        return [frame for frame in self.sent if frame.kind is kind]

    def received_valid(self, kind: FrameKind, sender: Side) -> list[dict[str, Any]]:
        """Bodies that reached this side, of this very attempt of `sender`."""
        bodies = [json.loads(frame.body) for frame in self.received if frame.kind is kind]
        wanted = (sender.setup.generation, self.setup.nonce.hex())
        return [body for body in bodies if (body.get("generation"), body.get("echo")) == wanted]


@dataclass
class Pipe:
    """One direction. `frames` can still be interfered with; `stream` is on its way in this order.

    plans: what is to happen to the next frames of a kind: "drop", "double", "overtake" or "late" (behind the next one).
    """

    plans: dict[FrameKind, list[str]] = field(default_factory=dict)
    late: list[bytes] = field(default_factory=list)
    lost_count: int = 0
    frames: list[bytes] = field(default_factory=list)
    stream: bytearray = field(default_factory=bytearray)
    is_ended: bool = False
    end_is_told: bool = False

    def put(self, pieces: list[bytes]) -> None:
        if not self.is_ended:
            for piece in pieces:
                if piece == MAGIC:
                    self.stream += piece
                else:
                    self._put_frame(piece)

    def _put_frame(self, piece: bytes) -> None:
        plans = self.plans.get(FrameKind(piece[4]))
        plan = plans.pop(0) if plans else ""
        if plan == "drop":
            self.lost_count += 1
        elif plan == "late":
            self.late.append(piece)
        else:
            self.frames.insert(0 if plan == "overtake" else len(self.frames), piece)
            self.frames += [piece] if plan == "double" else []
            self.release()

    def release(self) -> None:
        """What is late arrives after all."""
        self.frames += self.late
        self.late.clear()

    def take(self, nbytes: int | None = None) -> bytes:
        """Return the next bytes; the rest of a frame that has begun to arrive, or of the next one."""
        if not self.frames:
            self.release()
        if not self.stream and self.frames:
            self.stream += self.frames.pop(0)
        data = bytes(self.stream[:nbytes])
        del self.stream[: len(data)]
        return data

    @property
    def has_data(self) -> bool:
        return bool(self.stream or self.frames or self.late)


class TwoPeers:
    """Side 0 and side 1; pipe i leads to side i."""

    def __init__(
        self,
        setups: tuple[Setup, Setup],
        plans: tuple[dict[FrameKind, list[str]], dict[FrameKind, list[str]]] = ({}, {}),
    ) -> None:
        self.now = 100.0
        self.sides = [Side(setup, self.now) for setup in setups]
        self.pipes = [Pipe(plans[0]), Pipe(plans[1])]
        self.flush()

    @property
    def lost_count(self) -> int:
        """How many frames the plans have dropped."""
        return sum(pipe.lost_count for pipe in self.pipes)

    def flush(self) -> None:
        """Move what machines send into the pipes; a side that is over closes its connection behind it."""
        for index, side in enumerate(self.sides):
            out = self.pipes[1 - index]
            out.put(side.take_frames())
            if side.state in (State.FAILED, State.CLOSED):
                out.is_ended = True
        check_safety(self)

    def deliver(self, index: int, nbytes: int | None = None) -> None:
        """Deliver some bytes to a side, or the end of its stream if there are none left."""
        pipe, side = self.pipes[index], self.sides[index]
        if pipe.has_data:
            flagged = self.count_flagged(side)
            side.receive(pipe.take(nbytes), self.now)
            self.flush()
            assert self.count_flagged(side) == flagged, "an answer asks for an answer: ping-pong"
        elif pipe.is_ended and not pipe.end_is_told:
            pipe.end_is_told = True
            side.machine.receive_data(b"", self.now)
            side._collect()
            self.flush()

    def act(self, index: int) -> None:
        self.sides[index].act()
        self.flush()

    def cut(self) -> None:
        """The connection breaks: what has not arrived never will."""
        for pipe in self.pipes:
            pipe.frames.clear()
            pipe.stream.clear()
            pipe.late.clear()
            pipe.is_ended = True

    def advance(self, seconds: float) -> None:
        """Let time pass and timers run."""
        self.now += seconds
        for side in self.sides:
            side.tick(self.now)
        self.flush()

    def settle(self) -> None:
        """Deliver everything and do all duties, in no time."""
        for _ in range(400):
            if not self.step():
                return
        raise AssertionError("the two never stop talking")

    def bring_to(self, index: int, state: State) -> Side:
        """Step until that side is in that state; its owner has not yet acted."""
        side = self.sides[index]
        for _ in range(40):
            for one in (0, 1):
                if side.state is state:
                    return side
                self.deliver(one)
                if side.state is state:
                    return side
                if self.sides[one].duties:
                    self.act(one)
        raise AssertionError(f"side {index} never came to {state}")

    def step(self) -> bool:
        """Deliver one frame to each side and do one duty of each; whether there was anything to do."""
        busy = False
        for index, side in enumerate(self.sides):
            pipe = self.pipes[index]
            if pipe.has_data or (pipe.is_ended and not pipe.end_is_told):
                self.deliver(index)
                busy = True
            if side.duties:
                self.act(index)
                busy = True
        return busy

    def replace(self, index: int, setups: tuple[Setup, Setup]) -> None:
        """Side `index` is a new process; both begin a new attempt. Replies to the old one are still on their way."""
        late = [[piece for piece in pipe.frames if _echo(piece)] for pipe in self.pipes]
        self.sides = [Side(setup, self.now) for setup in setups]
        self.pipes = [Pipe(), Pipe()]
        self.flush()
        for pipe, pieces in zip(self.pipes, late, strict=True):
            pipe.frames[:0] = pieces

    @staticmethod
    def count_flagged(side: Side) -> int:
        return sum(1 for frame in side.sent if frame.flags & RESEND)


def _echo(piece: bytes) -> str:
    body: Mapping[str, Any] = json.loads(piece[HEADER.size :])
    return str(body.get("echo", ""))


def expected_proof(key: bytes, sender: Setup, receiver: Setup) -> str:
    """The proof as `bodies.prove` describes it, written a second time."""
    text = b"kvxfer auth v1"
    for setup in (sender, receiver):
        generation = setup.generation.encode()
        text += bytes([0, len(generation)]) + generation + bytes([0, len(setup.nonce)]) + setup.nonce
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def check_safety(peers: TwoPeers) -> None:
    """What must hold after every step."""
    for us, them in (peers.sides, peers.sides[::-1]):
        last_words = [event for event in us.events if isinstance(event, Failed | PeerClosed)]
        assert len(last_words) <= 1
        assert not last_words or us.events[-1] is last_words[0], "something follows the end"
        kinds = [type(event) for event in us.events]
        assert all(kinds.count(kind) <= 1 for kind in (CardWanted, PeerOffered, TransportChosen, Established)), kinds
        if us.state is State.ESTABLISHED:
            assert us.sent_kind(FrameKind.READY), "established without own READY"
            answers = us.received_valid(FrameKind.READY, them)
            assert answers, "established before the peer's READY"
            assert us.machine.peer is not None
            assert us.machine.peer.generation == them.setup.generation
            assert us.established is not None
            assert us.established.transport in {body["transport"] for body in answers}
        if us.setup.key is not None and us.sent_kind(FrameKind.CARD):
            proof = expected_proof(us.setup.key, them.setup, us.setup)
            shown = [body["proof"] for body in us.received_valid(FrameKind.AUTH, them)]
            assert proof in shown, "a card left before the peer had proved the key"
        for event in us.events:
            if isinstance(event, PeerOffered):
                assert event.card == {"memory of": them.setup.generation}, "a card of another process"
        assert peers.now < us.deadline or us.state in OVER, "it did not end by the deadline"
    one, other = (side.established for side in peers.sides)
    if one is not None and other is not None:
        assert one.transport == other.transport
        assert dict(one.passed_over) == dict(other.passed_over)
