"""Two handshake machines over a bad wire: never wrong, and right once the wire behaves.

The state machine draws what the sides are, at most one defect (wrong key, other version ...) and a small budget of
faults of the wire. MUTANTS are the faults planted in `Handshake` that it must find.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvxfer.errors import (
    AuthenticationError,
    HandshakeTimeoutError,
    KvxferError,
    PeerClosedError,
    PeerRefusedError,
    PeerRestartedError,
    RemoteProtocolError,
    TransportUnavailableError,
)
from kvxfer.handshake import bodies, machine
from kvxfer.handshake.events import Established
from kvxfer.handshake.frames import RESEND, FrameKind, encode_json
from kvxfer.handshake.machine import Call, Handshake, Role, State
from tests.support.two_peers import DEADLINE_S, OVER, RESEND_S, Setup, TwoPeers

DEFECTS: dict[str, type[KvxferError]] = {
    "wrong key": AuthenticationError,
    "key on one side": AuthenticationError,
    "versions": PeerRefusedError,
    "other generation expected": PeerRestartedError,
    "connected to itself": PeerRefusedError,
    "nobody opened": RemoteProtocolError,
    "no transport": TransportUnavailableError,
}
FAULTS_MAX = 4
WAIT_S_MAX = DEADLINE_S / 3
"""Time that faults may cost; the rest is for the drain."""

side_index = st.integers(0, 1)


class HandshakeMachine(RuleBasedStateMachine):
    """Draws one history; `teardown` lets the wire behave and asks for the goal."""

    @initialize(
        roles=st.sampled_from(
            [(Role.INITIATOR, Role.RESPONDER), (Role.RESPONDER, Role.INITIATOR), (Role.INITIATOR, Role.INITIATOR)]
        ),
        generations=st.permutations(["0a", "0b"]),
        with_key=st.booleans(),
        defect=st.sampled_from([None] * 8 + list(DEFECTS)),
        at_fault=side_index,
        budget=st.integers(0, FAULTS_MAX),
        break_by=st.sampled_from(["", "", "", "cut", "stall"]),
        choices=st.tuples(st.sampled_from(["shm", "tcp"]), st.sampled_from(["shm", "tcp"])),
        plans=st.lists(
            st.tuples(
                side_index,
                st.sampled_from([FrameKind.HELLO, FrameKind.AUTH, FrameKind.CARD, FrameKind.READY]),
                st.sampled_from([("drop",), ("drop", "drop"), ("double",), ("overtake",), ("late",)]),
            ),
            max_size=FAULTS_MAX,
        ),
    )
    def start(
        self,
        roles: tuple[Role, Role],
        generations: list[str],
        with_key: bool,
        defect: str | None,
        at_fault: int,
        budget: int,
        break_by: str,
        choices: tuple[str, str],
        plans: list[tuple[int, FrameKind, tuple[str, ...]]],
    ) -> None:
        key = b"secret" if with_key else None
        setups = [
            Setup(roles[n], generations[n], bytes([n + 1] * 16), key=key, choice=choices[n], versions=(1, 2 - n))
            for n in (0, 1)
        ]
        if defect == "wrong key":
            setups = [replace(setups[n], key=b"one" if n == at_fault else b"other") for n in (0, 1)]
        elif defect == "key on one side":
            setups = [replace(setups[n], key=b"one" if n == at_fault else None) for n in (0, 1)]
        elif defect == "versions":
            setups[at_fault] = replace(setups[at_fault], versions=(98, 99))
        elif defect == "other generation expected":
            setups[at_fault] = replace(setups[at_fault], expected_generation="ee")
        elif defect == "connected to itself":
            setups[1] = replace(setups[1], generation=setups[0].generation)
        elif defect == "nobody opened":
            setups = [replace(one, role=Role.RESPONDER) for one in setups]
        elif defect == "no transport":
            setups = [replace(one, choice="") for one in setups]
        self.defect = DEFECTS.get(defect) if defect is not None else None
        self.is_self = defect == "connected to itself"
        by_pipe: tuple[dict[FrameKind, list[str]], dict[FrameKind, list[str]]] = ({}, {})
        for index, kind, what in plans:
            by_pipe[index].setdefault(kind, []).extend(what)
        self.peers = TwoPeers((setups[0], setups[1]), by_pipe)
        self.budget = budget
        self.break_by = break_by
        self.dropped = 0
        self.is_cut = False
        self.is_expired = False
        self.restarts = 0
        self.waited_s = 0.0

    @property
    def lost(self) -> int:
        """Frames lost so far, by rules and by plans."""
        return self.dropped + self.peers.lost_count

    # The wire and the owners do their work.

    @rule(index=side_index, nbytes=st.none() | st.integers(1, 60))
    def deliver(self, index: int, nbytes: int | None) -> None:
        self.peers.deliver(index, nbytes)

    @rule(index=side_index)
    def act(self, index: int) -> None:
        if self.peers.sides[index].duties:
            self.peers.act(index)

    @rule(seconds=st.sampled_from([0.1, RESEND_S, 2.5 * RESEND_S]))
    def wait(self, seconds: float) -> None:
        if self.waited_s + seconds <= WAIT_S_MAX:
            self.waited_s += seconds
            self.peers.advance(seconds)

    @rule(steps=st.integers(1, 8))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.peers.step()

    # Faults, from the budget.

    def _spend(self, index: int, frames_needed: int) -> list[bytes] | None:
        frames = self.peers.pipes[index].frames
        if self.budget == 0 or len(frames) < frames_needed:
            return None
        self.budget -= 1
        return frames

    @precondition(lambda self: self.budget)
    @rule(index=side_index, position=st.integers(0, 3))
    def drop(self, index: int, position: int) -> None:
        frames = self._spend(index, 1)
        if frames is not None:
            del frames[position % len(frames)]
            self.dropped += 1

    @precondition(lambda self: self.budget)
    @rule(index=side_index, position=st.integers(0, 3))
    def double(self, index: int, position: int) -> None:
        frames = self._spend(index, 1)
        if frames is not None:
            frames.append(frames[position % len(frames)])

    @precondition(lambda self: self.budget)
    @rule(index=side_index)
    def swap(self, index: int) -> None:
        frames = self._spend(index, 2)
        if frames is not None:
            frames.insert(0, frames.pop())

    @precondition(lambda self: self.budget)
    @rule(index=side_index, kind=st.sampled_from(["AUTH", "CARD", "READY", "ERROR", "HELLO"]), of_process=st.booleans())
    def late_frame_of_another_attempt(self, index: int, kind: str, of_process: bool) -> None:
        us, them = self.peers.sides[index], self.peers.sides[1 - index]
        if self.budget == 0 or us.state in OVER or (kind == "HELLO" and us.machine.peer is None):
            return
        self.budget -= 1
        # Of the same process in answer to an older HELLO of ours, or of a process that was there before.
        generation = them.setup.generation if of_process and kind != "HELLO" else "dead"
        echo = (b"older".ljust(16) if of_process or us.machine.peer is None else us.setup.nonce).hex()
        body = {"generation": generation, "echo": echo, "nonce": b"old".ljust(16).hex()}
        body |= {"proof": "00" * 32, "card": {"memory of": "dead"}, "transport": "tcp", "code": "X", "message": "late"}
        body = body if kind != "AUTH" else {name: body[name] for name in ("generation", "echo", "proof")}
        frame = encode_json(FrameKind[kind], body)
        pipe = self.peers.pipes[index]
        if pipe.stream:
            pipe.frames.insert(0, frame)
        elif not pipe.is_ended:
            before = us.machine.stale_frames
            us.receive(frame, self.peers.now)
            self.peers.flush()
            assert us.state not in OVER, f"a late {kind} took effect"
            assert us.machine.stale_frames == before + 1

    @precondition(lambda self: self.break_by == "cut")
    @rule()
    def cut(self) -> None:
        self.break_by = ""
        self.is_cut = True
        self.peers.cut()

    @precondition(lambda self: self.break_by == "stall")
    @rule()
    def stall_past_the_deadline(self) -> None:
        self.break_by = ""
        self.is_expired = True
        self.peers.advance(DEADLINE_S)

    @precondition(lambda self: self.budget and not self.is_self)
    @rule(index=side_index, other_remembers=st.booleans())
    def restart(self, index: int, other_remembers: bool) -> None:
        self.budget -= 1
        self.restarts += 1
        olds = [side.setup for side in self.peers.sides]
        news = [replace(old, nonce=bytes([16 * self.restarts + n] * 16)) for n, old in enumerate(olds)]
        old_generation = olds[index].generation
        news[index] = replace(news[index], generation=f"{old_generation}{self.restarts}")
        if other_remembers and self.defect is None:
            news[1 - index] = replace(news[1 - index], expected_generation=old_generation)
            self.defect = PeerRestartedError
        self.peers.replace(index, (news[0], news[1]))
        self.is_cut = self.is_expired = False
        self.dropped = 0
        self.waited_s = 0.0

    # What must hold: `check_safety` after every step of the two, and at the end:

    def teardown(self) -> None:
        if not hasattr(self, "peers"):
            return
        peers = self.peers
        peers.settle()
        states = [side.state for side in peers.sides]
        if self.is_cut:
            assert set(states) <= {State.FAILED, State.CLOSED}, f"the cut went unnoticed: {states}"
        elif not (self.lost or self.is_expired):
            assert all(state in OVER for state in states), f"nothing was lost, yet it stands at {states}"
        for _ in range(2 * FAULTS_MAX + 2 + self.dropped):  # each loss costs at most one of these
            peers.advance(RESEND_S)
            peers.settle()
        if not (self.is_cut or self.is_expired) and self.defect is None:
            assert [side.state for side in peers.sides] == [State.ESTABLISHED] * 2, [side.error for side in peers.sides]
        peers.advance(DEADLINE_S)
        peers.settle()
        self._check_causes()

    def _check_causes(self) -> None:
        allowed: set[type[KvxferError]] = set()
        if self.defect is not None:
            allowed.add(self.defect)
        if self.lost or self.is_cut or self.is_expired:
            allowed |= {PeerClosedError, HandshakeTimeoutError}
        if self.is_expired or self.lost:
            allowed.add(PeerClosedError)
        for side in self.peers.sides:
            if self.defect is not None and not (self.lost or self.is_cut or self.is_expired):
                assert side.state is State.FAILED, side.state
            if side.error is not None:
                wanted = allowed if self.defect is not RemoteProtocolError else {*allowed, PeerRefusedError}
                assert type(side.error) in wanted, (side.error, wanted)
                assert str(side.error).endswith(".")


@pytest.mark.slow
@pytest.mark.timeout(900)  # the night profile takes minutes
class TestHandshake(HandshakeMachine.TestCase):  # type: ignore[misc]
    settings = settings(deadline=None, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow])


# Planted faults.


def without(name: str) -> Callable[[Any], None]:
    """A mutant whose method does nothing."""
    return lambda patch: patch.setattr(Handshake, name, lambda self, *args: None)


def move(state: State, what: FrameKind | Call, mutant: Callable[[Handshake, Any], State]) -> Callable[[Any], None]:
    """A mutant with another move in its table."""
    return lambda patch: patch.setattr(Handshake, "TRANSITIONS", {**Handshake.TRANSITIONS, (state, what): mutant})


def skip_proof_wait(self: Handshake, body: Any) -> State:
    after = Handshake._greet(self, body)
    return self._want_card() if after is State.WAIT_PROOF else after


def establish_with_the_choice(self: Handshake, body: Any) -> State:
    Handshake._send_choice(self, body)
    return self._establish()


def establish_without_own_ready(self: Handshake, body: Any) -> State:
    return self._establish()


def first_of_ours(self: Handshake, body: Any) -> State:
    self._transport, self._passed_over = self._ours.transports[0], bodies.parse_reasons(body)
    self._events.append(machine.TransportChosen(self._transport, self._passed_over))
    return State.OWN_ANSWER


def any_answer(self: Handshake, body: Any) -> State:
    return self._establish()


def asking_answer(patch: Any) -> None:
    send_again = Handshake._send_again
    patch.setattr(Handshake, "_send_again", lambda self, flags: send_again(self, RESEND))


def no_resend(patch: Any) -> None:
    send_again = Handshake._send_again
    patch.setattr(Handshake, "_send_again", lambda self, flags: None if flags else send_again(self, flags))


def no_answer(patch: Any) -> None:
    send_again = Handshake._send_again
    patch.setattr(Handshake, "_send_again", lambda self, flags: send_again(self, flags) if flags else None)


def no_deadline(patch: Any) -> None:
    handle_timer = Handshake.handle_timer

    def mutant(self: Handshake, now: float) -> None:
        self._deadline = now + 1
        handle_timer(self, now)

    patch.setattr(Handshake, "handle_timer", mutant)


def one_resend_only(patch: Any) -> None:
    handle_timer = Handshake.handle_timer

    def mutant(self: Handshake, now: float) -> None:
        handle_timer(self, now)
        self._resend_at = self._deadline

    patch.setattr(Handshake, "handle_timer", mutant)


def forget_early(patch: Any) -> None:
    receive_frame = Handshake._receive_frame

    def mutant(self: Handshake, frame: Any) -> None:
        receive_frame(self, frame)
        self._early.clear()

    patch.setattr(Handshake, "_receive_frame", mutant)


def refuse_doubles(patch: Any) -> None:
    receive_frame = Handshake._receive_frame

    def mutant(self: Handshake, frame: Any) -> None:
        if frame.kind in self._seen and not self._is_stale(frame.kind, machine.decode_json(frame)):
            raise RemoteProtocolError("twice.")
        receive_frame(self, frame)

    patch.setattr(Handshake, "_receive_frame", mutant)


def silent_failure(patch: Any) -> None:
    patch.setattr(Handshake, "fail", lambda self, error: self._end(State.FAILED, error, machine.Failed(error)))


def proof_without_nonce(patch: Any) -> None:
    patch.setattr(machine, "prove", lambda key, *, sender, receiver: key.hex())


def established_twice(patch: Any) -> None:
    def mutant(self: Handshake) -> State:
        event = Established(self.peer, self._transport, {})  # type: ignore[arg-type]
        self._events.extend([event, event])
        return State.ESTABLISHED

    patch.setattr(Handshake, "_establish", mutant)


MUTANTS: dict[str, Callable[[Any], None]] = {
    "any proof will do": move(State.WAIT_PROOF, FrameKind.AUTH, lambda self, body: self._want_card()),
    "a card before the proof": move(State.WAIT_HELLO, FrameKind.HELLO, skip_proof_wait),
    "a proof that is good for ever": proof_without_nonce,
    "established with the choice": move(State.OWN_CHOICE, Call.LOCAL_READY, establish_with_the_choice),
    "established before own READY": move(State.OWN_ANSWER, Call.LOCAL_READY, establish_without_own_ready),
    "established twice": established_twice,
    "frames of other attempts are taken": lambda patch: patch.setattr(Handshake, "_is_stale", lambda *args: False),
    "the expected generation is not checked": lambda patch: patch.setattr(
        machine, "find_identity_fault", lambda ours, theirs, expected: FIND_IDENTITY_FAULT(ours, theirs, None)
    ),
    "versions are not checked": lambda patch: patch.setattr(machine, "find_version_fault", lambda *args: None),
    "nothing is sent again": no_resend,
    "only once is sent again": one_resend_only,
    "nobody answers who asks again": no_answer,
    "an answer asks again": asking_answer,
    "no deadline": no_deadline,
    "the tie is not broken": lambda patch: patch.setattr(
        Handshake, "is_chooser", property(lambda self: self._ours.role == "initiator")
    ),
    "the choice is not the peer's": move(State.WAIT_CHOICE, FrameKind.READY, first_of_ours),
    "what comes early is forgotten": forget_early,
    "what comes twice is a fault": refuse_doubles,
    "the peer is not told of a fault": silent_failure,
    "the end of the stream goes unnoticed": without("_end_stream"),
}
FIND_IDENTITY_FAULT = machine.find_identity_fault


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    search = settings(
        max_examples=3000,
        stateful_step_count=25,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )

    with pytest.raises(AssertionError):
        run_state_machine_as_test(HandshakeMachine, settings=search)
