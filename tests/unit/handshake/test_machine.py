"""kvxfer.handshake.machine: named cases. What holds in every history is in tests/property/test_handshake.py."""

from __future__ import annotations

import errno
import itertools
import pickle
from dataclasses import replace
from typing import Any

import pytest

from kvxfer.errors import (
    AuthenticationError,
    ClosedError,
    HandshakeTimeoutError,
    KvxferError,
    LocalProtocolError,
    PeerClosedError,
    PeerRefusedError,
    PeerRestartedError,
    RemoteProtocolError,
    TransportUnavailableError,
    VerbsError,
)
from kvxfer.handshake.events import CardWanted, Established, Failed, PeerClosed, PeerOffered, SessionFrame
from kvxfer.handshake.frames import HEADER, MAGIC, RESEND, FrameKind, decode_json, encode, encode_json
from kvxfer.handshake.machine import Handshake, Role, State
from tests.support.two_peers import DEADLINE_S, RESEND_S, Setup, Side, TwoPeers

A = Setup(Role.INITIATOR, "aa", b"a" * 16)
B = Setup(Role.RESPONDER, "bb", b"b" * 16)
HELLO = {
    "versions": [1, 1],
    "generation": "bb",
    "nonce": B.nonce.hex(),
    "name": "engine-bb",
    "auth": False,
    "role": "responder",
    "transports": ["shm", "tcp"],
}


def established(one: Setup = A, other: Setup = B) -> TwoPeers:
    peers = TwoPeers((one, other))
    peers.settle()
    assert [side.state for side in peers.sides] == [State.ESTABLISHED] * 2
    return peers


def errors_of(one: Setup, other: Setup) -> tuple[KvxferError, KvxferError]:
    peers = TwoPeers((one, other))
    peers.settle()
    ours, theirs = (side.error for side in peers.sides)
    assert ours is not None
    assert theirs is not None
    return ours, theirs


def alone(setup: Setup = A) -> Handshake:
    machine = Side(setup, 0.0).machine
    machine.data_to_send()
    return machine


def events_of(machine: Handshake) -> list[Any]:
    return list(iter(machine.next_event, None))


def error_after(*frames: bytes, setup: Setup = A) -> KvxferError:
    machine = alone(setup)
    machine.receive_data(MAGIC + b"".join(frames), 1.0)
    last = events_of(machine)[-1]
    assert isinstance(last, Failed)
    return last.error


def frame_of(kind: FrameKind, flags: int = 0, sender: Setup = B, receiver: Setup = A, **body: Any) -> bytes:
    return encode_json(kind, {"generation": sender.generation, "echo": receiver.nonce.hex(), **body}, flags)


# The cases of /work/shared/cases, by number.


@pytest.mark.parametrize("order", sorted(set(itertools.permutations([0, 0, 1, 1]))), ids=str)
@pytest.mark.parametrize("generations", [("aa", "bb"), ("bb", "aa")])
def test_b95_simultaneous_open_ends_alike_in_every_order(order: tuple[int, ...], generations: tuple[str, str]) -> None:
    peers = TwoPeers(
        (
            Setup(Role.INITIATOR, generations[0], b"a" * 16, choice="shm"),
            Setup(Role.INITIATOR, generations[1], b"b" * 16, choice="tcp"),
        )
    )
    for index in order:
        peers.deliver(index)
        while peers.sides[index].duties:
            peers.act(index)
    peers.settle()

    assert [side.state for side in peers.sides] == [State.ESTABLISHED] * 2
    transports = {side.established.transport for side in peers.sides if side.established}
    assert transports == {"shm" if generations[0] == "aa" else "tcp"}, "the smaller generation chooses"


@pytest.mark.parametrize(
    "order", [("late", "new"), ("new", "late"), ("late", "new", "new"), ("late", "late", "new")], ids="-".join
)
def test_b97_a_late_reply_to_an_older_attempt_is_dropped_and_counted(order: tuple[str, ...]) -> None:
    first = TwoPeers((A, B))
    first.deliver(1)
    first.deliver(1)
    first.act(1)
    late = first.pipes[0].frames[-1]  # B's card for the first attempt
    second = TwoPeers((replace(A, nonce=b"A" * 16), replace(B, nonce=b"B" * 16)))
    for _ in range(2):
        second.deliver(0)
        second.deliver(1)
    second.act(0)
    second.act(1)
    (new,) = second.pipes[0].frames
    second.pipes[0].frames.clear()

    for which in order:
        second.sides[0].receive(late if which == "late" else new, second.now)
    second.settle()

    assert second.sides[0].machine.stale_frames == order.count("late")
    assert [side.state for side in second.sides] == [State.ESTABLISHED] * 2
    offers = [event for event in second.sides[0].events if isinstance(event, PeerOffered)]
    assert len(offers) == 1


def test_b101_an_error_reply_is_reported_as_such() -> None:
    error = error_after(encode_json(FrameKind.ERROR, {"code": "Busy", "message": "busy"}))

    assert type(error) is PeerRefusedError
    assert error.code == "Busy"
    assert str(error) == "peer answered: busy"


def test_b101_a_peer_that_lost_its_end_is_served_anew_beside_the_old_one() -> None:
    old = established()

    new = established(replace(A, generation="aaa", nonce=b"n" * 16), replace(B, nonce=b"m" * 16))

    assert old.sides[1].state is State.ESTABLISHED, "the old one ends with its own connection"
    assert new.sides[1].machine.peer is not None
    assert new.sides[1].machine.peer.generation == "aaa"


def test_b107_all_that_is_tried_after_a_failure_has_the_same_cause() -> None:
    peers = TwoPeers((A, B))
    peers.cut()
    peers.settle()
    machine = peers.sides[0].machine

    causes = []
    for call in (lambda: machine.offer({}), lambda: machine.local_ready("tcp"), lambda: machine.send(FrameKind.PING)):
        with pytest.raises(PeerClosedError) as caught:
            call()
        causes.append(caught.value)

    assert all(cause is peers.sides[0].error for cause in causes)
    assert [type(event) for event in peers.sides[0].events] == [Failed]
    assert established() is not None, "the next attempt works"


def test_b107_a_second_failure_changes_nothing() -> None:
    machine = alone()
    first = TransportUnavailableError("no transport.")

    machine.fail(first)
    machine.fail(ClosedError("closed."))
    machine.receive_data(b"\xff" * 100, 1.0)
    machine.receive_data(b"", 1.0)
    machine.handle_timer(1e9)
    machine.close("bye")

    assert events_of(machine) == [Failed(first)]
    assert machine.deadline() is None


WRONG_HELLOS: list[tuple[dict[str, Any], type[KvxferError], str]] = [
    ({"versions": [99, 99]}, PeerRefusedError, "'engine-bb' speaks protocol versions 99 to 99, this side 1 to 1"),
    ({"versions": [2, 1]}, RemoteProtocolError, r"field 'versions' of the HELLO frame is \[2, 1\]"),
    ({"versions": "1"}, RemoteProtocolError, "field 'versions' of the HELLO frame is str, not list"),
    ({"versions": [True, 1]}, RemoteProtocolError, "field 'versions'"),
    ({"versions": [1]}, RemoteProtocolError, "field 'versions'"),
    ({"versions": [-1, 1 << 70]}, RemoteProtocolError, "field 'versions'"),
    ({"generation": 7}, RemoteProtocolError, "field 'generation' of the HELLO frame is int, not str"),
    ({"generation": ""}, RemoteProtocolError, "field 'generation'"),
    (
        {"generation": "BB"},
        RemoteProtocolError,
        "field 'generation' of the HELLO frame is 'BB', not 1 or more lower-case",
    ),
    ({"generation": "a" * 65}, RemoteProtocolError, "'generation' of the HELLO frame has length 65; the limit is 64"),
    ({"nonce": "abc"}, RemoteProtocolError, "field 'nonce'"),
    ({"nonce": ["b"]}, RemoteProtocolError, "field 'nonce' of the HELLO frame is list, not str"),
    ({"name": None}, RemoteProtocolError, "field 'name' of the HELLO frame is NoneType, not str"),
    ({"auth": 1}, RemoteProtocolError, "field 'auth' of the HELLO frame is int, not bool"),
    ({"role": "king"}, RemoteProtocolError, "field 'role' of the HELLO frame is 'king'"),
    ({"transports": {"tcp": 1}}, RemoteProtocolError, "field 'transports' of the HELLO frame is dict, not list"),
    ({"transports": ["tcp", 3]}, RemoteProtocolError, "field 'transports' of the HELLO frame is not a list of names"),
]


@pytest.mark.parametrize(("change", "kind", "words"), WRONG_HELLOS, ids=[str(change) for change, _, _ in WRONG_HELLOS])
def test_b108_an_incompatible_hello_is_an_error_of_that_peer(
    change: dict[str, Any], kind: type[KvxferError], words: str
) -> None:
    machine = alone()

    machine.receive_data(MAGIC + encode_json(FrameKind.HELLO, {**HELLO, **change}), 1.0)

    (failed,) = events_of(machine)
    assert type(failed.error) is kind
    with pytest.raises(kind, match=words):
        raise failed.error
    told = machine.data_to_send()
    assert told[4] == FrameKind.ERROR
    assert kind.__name__.encode() in told


@pytest.mark.parametrize("missing", HELLO)
def test_b108_a_missing_field_is_named(missing: str) -> None:
    hello = {name: value for name, value in HELLO.items() if name != missing}

    with pytest.raises(RemoteProtocolError, match=f"the HELLO frame has no field '{missing}'"):
        raise error_after(encode_json(FrameKind.HELLO, hello))


def test_b108_unknown_fields_are_ignored() -> None:
    machine = alone()
    hello = {**HELLO, "versions": [1, 7], "compression": {"zstd": [1, 2]}, "": None}

    machine.receive_data(MAGIC + encode_json(FrameKind.HELLO, hello), 1.0)

    assert events_of(machine) == [CardWanted()]


def test_b111_the_reason_of_the_passive_side_arrives_in_its_words() -> None:
    peers = TwoPeers((A, B))
    peers.bring_to(1, State.OWN_ANSWER)
    reason = VerbsError(
        "ibv_modify_qp to RTR on mlx5_0 port 1 failed: EINVAL.",
        remedy="Check the GID index.",
        verb="ibv_modify_qp",
        errno=errno.EINVAL,
        device="mlx5_0",
        step="RTR",
    )
    peers.sides[1].machine.fail(reason)
    peers.flush()
    peers.settle()

    error = peers.sides[0].error
    assert type(error) is PeerRefusedError
    assert str(error) == (
        "peer engine-bb answered: ibv_modify_qp to RTR on mlx5_0 port 1 failed: EINVAL. Check the GID index."
    )
    assert (error.code, error.peer, error.remedy) == ("VerbsError", "engine-bb", "Check the GID index.")
    assert error.values["errno"] == errno.EINVAL
    assert error.values["step"] == "RTR"
    assert peers.sides[1].error is reason
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_b138_another_process_at_the_address_is_found_out() -> None:
    ours, theirs = errors_of(replace(A, expected_generation="b0b0"), B)

    assert type(ours) is type(theirs) is PeerRestartedError
    assert (ours.values["expected"], ours.values["actual"]) == ("b0b0", "bb")
    assert (theirs.values["expected"], theirs.values["actual"]) == ("b0b0", "bb")
    assert "generation b0b0 was expected, and peer 'engine-bb' is generation bb." in str(ours)


def test_b138_the_same_process_is_taken_again() -> None:
    established(replace(A, expected_generation="bb"), replace(B, expected_generation="aa"))


# Keys.


def test_wrong_keys_are_named_on_both_sides() -> None:
    for error, peer in zip(
        errors_of(replace(A, key=b"one"), replace(B, key=b"two")), ("engine-bb", "engine-aa"), strict=True
    ):
        assert type(error) is AuthenticationError
        assert error.peer == peer
        assert "another pre-shared key" in str(error)
        assert "KVXFER_KEY" in error.remedy


@pytest.mark.parametrize("keys", [(b"k", None), (None, b"k")])
def test_a_key_on_one_side_only_names_the_side(keys: tuple[bytes | None, bytes | None]) -> None:
    errors = errors_of(replace(A, key=keys[0]), replace(B, key=keys[1]))

    has, lacks = ("aa", "bb") if keys[0] else ("bb", "aa")
    for error, own in zip(errors, ("aa", "bb"), strict=True):
        assert type(error) is AuthenticationError
        we, they = f"this side ('engine-{own}')", f"peer 'engine-{'bb' if own == 'aa' else 'aa'}'"
        assert error.message == (
            f"{we if own == has else they} uses a pre-shared key, {we if own == lacks else they} has none."
        )
        assert "KVXFER_KEY" in error.remedy


def test_our_own_proof_sent_back_is_no_proof() -> None:
    """Without lengths in the proof, a generation and a nonce that read as ours when put together would pass."""
    victim = Side(replace(A, generation="a1b2", nonce=b"12345678" * 2, key=b"secret"), 0.0)
    generation = "a1b2" + "12345678"
    nonce = victim.setup.nonce[8:]
    hello = {**HELLO, "generation": generation, "nonce": nonce.hex(), "auth": True}
    victim.receive(MAGIC + encode_json(FrameKind.HELLO, hello), 0.0)
    victim.take_frames()
    (proof,) = victim.sent_kind(FrameKind.AUTH)

    reflected = {"generation": generation, "echo": victim.setup.nonce.hex(), "proof": decode_json(proof)["proof"]}
    victim.receive(encode_json(FrameKind.AUTH, reflected), 0.0)

    assert isinstance(victim.error, AuthenticationError)
    assert CardWanted() not in victim.events


def test_a_card_that_comes_before_the_proof_waits() -> None:
    machine = alone(replace(A, key=b"secret"))
    card = frame_of(FrameKind.CARD, card={"secret": 1})

    machine.receive_data(MAGIC + encode_json(FrameKind.HELLO, {**HELLO, "auth": True}) + card, 1.0)

    assert events_of(machine) == []
    assert machine.state is State.WAIT_PROOF


# Ends.


def test_the_deadline_names_the_step_and_tells_the_peer() -> None:
    machine = alone()
    machine.receive_data(MAGIC + encode_json(FrameKind.HELLO, HELLO), 1.0)
    machine.offer({})

    machine.handle_timer(DEADLINE_S)

    error = events_of(machine)[-1].error
    assert type(error) is HandshakeTimeoutError
    assert str(error).startswith(
        "the handshake with peer 'engine-bb' was not finished within 30 s: missing is the peer's card."
    )
    assert (error.values["state"], error.values["missing"]) == ("WAIT_CARD", "the peer's card")
    assert machine.data_to_send()[-1:] == b"}"
    assert machine.deadline() is None


def test_bytes_that_trickle_do_not_put_off_the_deadline() -> None:
    machine = alone()
    data = MAGIC + encode_json(FrameKind.HELLO, HELLO)
    for second in range(40):
        machine.receive_data(data[second : second + 1], float(second))

    (failed,) = events_of(machine)
    assert type(failed.error) is HandshakeTimeoutError
    assert "missing is the peer's HELLO" in str(failed.error)


def test_the_end_of_the_stream_names_the_step() -> None:
    machine = alone()
    machine.receive_data(MAGIC + encode_json(FrameKind.HELLO, HELLO), 1.0)
    machine.receive_data(b"", 1.0)

    error = events_of(machine)[-1].error
    assert type(error) is PeerClosedError
    assert "peer 'engine-bb' closed the connection during the handshake; still missing was this side's own card" in str(
        error
    )


def test_the_end_of_the_stream_after_a_few_strange_bytes_names_the_stranger() -> None:
    machine = alone()
    machine.receive_data(b"\x15\x03\x03\x00\x02\x02\x28", 1.0)
    machine.receive_data(b"", 1.0)

    with pytest.raises(RemoteProtocolError, match="TLS alert"):
        raise events_of(machine)[-1].error


def test_an_established_session_that_ends_without_goodbye_has_failed() -> None:
    peers = established()
    peers.cut()
    peers.settle()

    for side in peers.sides:
        assert type(side.error) is PeerClosedError
        assert "connection closed without goodbye" in str(side.error)


def test_goodbye_is_an_orderly_end() -> None:
    peers = established()

    peers.sides[0].machine.close("engine closed")
    peers.flush()
    peers.settle()

    assert peers.sides[1].events[-1] == PeerClosed("engine closed")
    assert [side.state for side in peers.sides] == [State.CLOSED] * 2
    with pytest.raises(ClosedError, match="this side has closed the session: engine closed"):
        peers.sides[0].machine.send(FrameKind.PING)
    with pytest.raises(PeerClosedError, match="peer 'engine-aa' has closed the session: engine closed"):
        peers.sides[1].machine.send(FrameKind.PING)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("AuthenticationError", AuthenticationError),
        ("PeerRestartedError", PeerRestartedError),
        ("HandshakeTimeoutError", HandshakeTimeoutError),
        ("TransportUnavailableError", TransportUnavailableError),
        ("ClosedError", PeerClosedError),
        ("RemoteProtocolError", PeerRefusedError),
        ("__class__", PeerRefusedError),
    ],
)
def test_an_error_keeps_its_kind_over_the_wire(code: str, kind: type[KvxferError]) -> None:
    values = {"__class__": "x", "args": "y", "message": "z", "errno": 5, "state": "WAIT_CARD"}
    body = {"code": code, "message": "no\x1b[31m\nmore", "remedy": "try", "values": values}

    error = error_after(encode_json(FrameKind.ERROR, body))

    assert type(error) is kind
    assert error.message == "peer answered: no[31m more"
    assert error.remedy == "try"
    assert set(error.values) == {"peer", "code", "errno", "state"}


def test_the_longest_error_fits_its_frame() -> None:
    machine = alone()
    long = '"\U0001f600\\' * 5000
    names = ("expected", "actual", "state", "step", "device", "verb", "transport")

    machine.fail(KvxferError(long, remedy=long, **dict.fromkeys(names, long)))

    assert len(machine.data_to_send()) < (16 << 10)


def test_control_characters_of_a_peer_reach_no_message() -> None:
    hello = {**HELLO, "name": "evil\x1b[2J\r\n\u202ename" + "x" * 300}
    machine = alone()
    machine.receive_data(MAGIC + encode_json(FrameKind.HELLO, hello), 1.0)

    assert machine.peer is not None
    assert machine.peer.name.startswith("evil[2J  name")
    assert machine.peer.name.isprintable()
    assert len(machine.peer.name) == 200


# Order.


def test_calls_out_of_turn_say_what_is_next() -> None:
    machine = alone()

    with pytest.raises(LocalProtocolError, match="offer was called out of turn; the next step is the peer's HELLO"):
        machine.offer({})
    with pytest.raises(LocalProtocolError, match="local_ready was called out of turn"):
        machine.local_ready("tcp")
    with pytest.raises(LocalProtocolError, match=r"send\(NOTIFY\) was called out of turn"):
        machine.send(FrameKind.NOTIFY)

    assert machine.state is State.WAIT_HELLO
    assert events_of(machine) == []


def test_a_card_that_cannot_be_sent_leaves_the_turn_open() -> None:
    machine = alone()
    machine.receive_data(MAGIC + encode_json(FrameKind.HELLO, HELLO), 1.0)

    with pytest.raises(LocalProtocolError, match=r"CARD frame has .* the limit is 262144"):
        machine.offer({"regions": "x" * (256 << 10)})
    with pytest.raises(LocalProtocolError, match="cannot be sent as JSON"):
        machine.offer({"regions": object()})
    machine.offer({"regions": []})

    assert machine.state is State.WAIT_CARD


def test_a_card_changed_after_the_offer_is_sent_again_as_it_was() -> None:
    machine = alone()
    machine.receive_data(MAGIC + encode_json(FrameKind.HELLO, HELLO), 1.0)
    card = {"regions": ["first"]}
    machine.offer(card)
    machine.data_to_send()

    card["regions"] = ["second"]
    machine.handle_timer(RESEND_S)

    assert b"first" in machine.data_to_send()


def test_only_what_was_offered_can_be_chosen() -> None:
    machine = alone()
    machine.receive_data(MAGIC + encode_json(FrameKind.HELLO, {**HELLO, "transports": ["tcp"]}), 1.0)
    machine.offer({})
    machine.receive_data(frame_of(FrameKind.CARD, card={}), 1.0)

    with pytest.raises(LocalProtocolError, match=r"transport 'shm' was chosen, which is not offered \(shm, tcp; tcp\)"):
        machine.local_ready("shm")
    machine.local_ready("tcp", {"shm": "why " * 1000})

    assert machine.state is State.WAIT_ANSWER


def test_only_the_chosen_transport_can_be_answered() -> None:
    peers = TwoPeers((A, B))
    peers.bring_to(1, State.OWN_ANSWER)

    with pytest.raises(LocalProtocolError, match=r"local_ready\('shm'\) was called; the peer has chosen 'tcp'"):
        peers.sides[1].machine.local_ready("shm")
    peers.settle()

    assert [side.state for side in peers.sides] == [State.ESTABLISHED] * 2


@pytest.mark.parametrize(
    ("passed_over", "words"),
    [
        (["shm"], "field 'passed_over' of the READY frame is list, not dict"),
        ({"shm": 3}, "field 'passed_over' of the READY frame is not names with reasons"),
        ({str(n): "no" for n in range(65)}, "field 'passed_over' of the READY frame has length 65"),
    ],
    ids=["list", "number", "many"],
)
def test_reasons_that_are_none_are_refused(passed_over: Any, words: str) -> None:
    responder = alone(B)
    hello = {**HELLO, "generation": "aa", "nonce": A.nonce.hex(), "role": "initiator"}
    responder.receive_data(MAGIC + encode_json(FrameKind.HELLO, hello), 1.0)
    responder.offer({})
    responder.receive_data(frame_of(FrameKind.CARD, sender=A, receiver=B, card={}), 1.0)
    ready = frame_of(FrameKind.READY, sender=A, receiver=B, transport="tcp", passed_over=passed_over)

    responder.receive_data(ready, 1.0)

    with pytest.raises(RemoteProtocolError, match=words):
        raise events_of(responder)[-1].error


def test_a_peer_must_choose_what_we_offered_and_answer_what_was_chosen() -> None:
    responder = alone(B)
    hello = {**HELLO, "generation": "aa", "nonce": A.nonce.hex(), "role": "initiator"}
    responder.receive_data(MAGIC + encode_json(FrameKind.HELLO, hello), 1.0)
    responder.offer({})
    responder.receive_data(frame_of(FrameKind.CARD, sender=A, receiver=B, card={}), 1.0)
    responder.receive_data(frame_of(FrameKind.READY, sender=A, receiver=B, transport="carrier pigeon"), 1.0)
    with pytest.raises(RemoteProtocolError, match="'carrier pigeon' was chosen, which is not offered"):
        raise events_of(responder)[-1].error

    initiator = alone()
    initiator.receive_data(MAGIC + encode_json(FrameKind.HELLO, HELLO), 1.0)
    initiator.offer({})
    initiator.receive_data(frame_of(FrameKind.CARD, card={}), 1.0)
    initiator.local_ready("tcp")
    initiator.receive_data(frame_of(FrameKind.READY, transport="shm"), 1.0)
    with pytest.raises(RemoteProtocolError, match="is ready for 'shm'; 'tcp' was chosen"):
        raise events_of(initiator)[-1].error


@pytest.mark.parametrize("is_early", [True, False])
def test_an_answer_before_the_choice_is_refused(is_early: bool) -> None:
    machine = alone()
    ready = frame_of(FrameKind.READY, transport="tcp")
    machine.receive_data(MAGIC + encode_json(FrameKind.HELLO, HELLO) + (ready if is_early else b""), 1.0)
    machine.offer({})
    machine.receive_data(frame_of(FrameKind.CARD, card={}) + (b"" if is_early else ready), 1.0)

    with pytest.raises(RemoteProtocolError, match="said READY before this side has chosen"):
        raise events_of(machine)[-1].error


def test_an_early_frame_that_is_wrong_fails_the_handshake_and_not_the_caller() -> None:
    machine = alone()
    machine.receive_data(MAGIC + encode_json(FrameKind.HELLO, HELLO) + frame_of(FrameKind.CARD, card=[]), 1.0)

    machine.offer({})

    with pytest.raises(RemoteProtocolError, match="field 'card' of the CARD frame is list, not dict"):
        raise events_of(machine)[-1].error


@pytest.mark.parametrize("kind", [FrameKind.REGIONS, FrameKind.NOTIFY, FrameKind.ATTACH, FrameKind.PING])
def test_other_frames_are_refused_before_the_handshake_is_done(kind: FrameKind) -> None:
    header = HEADER.pack(32, kind, 0, 0)

    with pytest.raises(RemoteProtocolError, match=f"a {kind.name} frame is not allowed here"):
        raise error_after(encode_json(FrameKind.HELLO, HELLO), header)


def test_session_frames_pass_through_in_order() -> None:
    peers = established()
    one, other = peers.sides
    bodies = [b"", b"\x00" * (1 << 20), b"not json"]

    for body in bodies:
        one.machine.send(FrameKind.NOTIFY, body)
    other.machine.send(FrameKind.PING, b"?")
    peers.flush()
    peers.settle()

    assert [event.frame.body for event in other.events if isinstance(event, SessionFrame)] == bodies
    assert [event.frame.kind for event in one.events if isinstance(event, SessionFrame)] == [FrameKind.PING]
    with pytest.raises(LocalProtocolError, match="out of turn"):
        one.machine.send(FrameKind.READY, b"{}")
    with pytest.raises(LocalProtocolError, match="NOTIFY frame has"):
        one.machine.send(FrameKind.NOTIFY, bytes(2 << 20))


def test_a_flood_of_questions_gets_one_answer() -> None:
    machine = alone()
    hello = encode_json(FrameKind.HELLO, HELLO, RESEND)
    machine.receive_data(MAGIC + hello, 1.0)
    machine.offer({"regions": "x" * 100_000})
    machine.data_to_send()

    machine.receive_data(hello * 1000, 1.1)

    assert 100_000 < len(machine.data_to_send()) < 110_000


def test_what_was_sent_is_forgotten_once_the_session_runs() -> None:
    peers = established()

    for side in peers.sides:
        side.machine.send(FrameKind.PING)
    peers.flush()
    peers.settle()

    assert all(not side.machine._sent for side in peers.sides)
    assert all(side.machine.deadline() is None for side in peers.sides)


def test_both_sides_learn_who_and_why() -> None:
    peers = established(A, replace(B, versions=(1, 3)))

    for side, them in (peers.sides, peers.sides[::-1]):
        (event,) = [event for event in side.events if isinstance(event, Established)]
        assert event.peer.generation == them.setup.generation
        assert event.peer.versions == them.setup.versions
        assert event.peer.name == them.name
        assert event.peer.transports == ("shm", "tcp")
        assert (event.transport, dict(event.passed_over)) == ("tcp", {"rdma": "no device"})


@pytest.mark.parametrize(
    "change",
    [{"generation": "xyz"}, {"generation": ""}, {"nonce": b"short"}, {"nonce": bytes(33)}, {"versions": (2, 1)}],
    ids=str,
)
def test_a_side_that_no_peer_would_accept_is_refused_at_once(change: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="this engine's own HELLO is wrong"):
        Side(replace(A, **change), 0.0)


def test_the_engine_that_connects_to_itself_is_told() -> None:
    for error in errors_of(A, replace(B, generation="aa")):
        assert type(error) is PeerRefusedError
        assert "is connected to itself" in str(error)


def test_an_unknown_kind_ends_it_and_the_rest_is_ignored() -> None:
    machine = alone()
    machine.receive_data(MAGIC + HEADER.pack(0, 77, 0, 0) + encode(FrameKind.CLOSE, b"{}"), 1.0)

    (failed,) = events_of(machine)
    assert "frame kind 77" in str(failed.error)
