"""Any bytes at all into the frame decoder and the handshake machine: no exception escapes, memory is bounded, and how
the stream was cut does not matter."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.errors import KvxferError, RemoteProtocolError
from kvxfer.handshake.bodies import error_from_json, error_to_json
from kvxfer.handshake.events import Event, Failed
from kvxfer.handshake.frames import (
    BODY_NBYTES_MAX,
    HANDSHAKE_KINDS,
    HEADER,
    MAGIC,
    Frame,
    FrameDecoder,
    FrameKind,
    decode_json,
    encode,
    encode_json,
)
from kvxfer.handshake.machine import Role, State
from kvxfer.text import clean
from tests.support.two_peers import Setup, Side, TwoPeers, expected_proof

KEPT_NBYTES_MAX = 600 << 10
"""A partial card, one early frame of each kind, and the answers to them."""

A = Setup(Role.INITIATOR, "aa", b"a" * 16)
B = Setup(Role.RESPONDER, "bb", b"b" * 16)

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut at these positions (modulo the length)."""
    places = sorted({place % (len(data) + 1) for place in cuts} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


def decode_all(pieces: list[bytes]) -> tuple[list[Frame], str]:
    decoder, frames = FrameDecoder(), []
    try:
        for piece in pieces:
            decoder.feed(piece)
            while (frame := decoder.next_frame()) is not None:
                frames.append(frame)
        decoder.check_end()
    except RemoteProtocolError as error:
        return frames, str(error)
    return frames, ""


cuts = st.lists(st.integers(0, 1 << 12), max_size=12)
some_frames = st.lists(
    st.builds(encode, st.sampled_from(FrameKind), st.binary(max_size=64), st.integers(0, 255), st.integers(0, 65535)),
    max_size=6,
).map(b"".join)


@given(
    data=st.binary(max_size=40) | st.builds(lambda a, b: MAGIC + a + b, some_frames, st.binary(max_size=20)), cuts=cuts
)
@example(data=b"HTTP/1.1 200 OK\r\n", cuts=[1, 2, 5])
@example(data=MAGIC[:3] + b"x", cuts=[3])
def test_frames_do_not_depend_on_how_the_stream_was_cut(data: bytes, cuts: list[int]) -> None:
    whole = decode_all([data])

    assert decode_all(cut(data, cuts)) == whole
    assert decode_all([data[n : n + 1] for n in range(len(data))]) == whole


@given(frames=some_frames, cuts=cuts)
def test_frames_survive_the_wire(frames: bytes, cuts: list[int]) -> None:
    read, error = decode_all(cut(MAGIC + frames, cuts))

    assert not error
    assert b"".join(encode(one.kind, one.body, one.flags, one.sequence) for one in read) == frames


# The machine, in one state after another.

STATES = [State.WAIT_HELLO, State.WAIT_PROOF, State.OWN_CARD, State.WAIT_CARD]
STATES_CHOOSING = [State.OWN_CHOICE, State.WAIT_ANSWER, State.ESTABLISHED]
STATES_CHOSEN = [State.WAIT_CHOICE, State.OWN_ANSWER, State.ESTABLISHED]
PLACES = [(0, state) for state in STATES + STATES_CHOOSING] + [(1, state) for state in STATES + STATES_CHOSEN]


def bring_to(index: int, state: State) -> Side:
    """One of two honest sides, just come to `state`."""
    return TwoPeers((replace(A, key=b"secret"), replace(B, key=b"secret"))).bring_to(index, state)


def good_bodies(us: Setup, them: Setup) -> dict[FrameKind, dict[str, Any]]:
    """What the peer of `us` would send in each frame."""
    common = {"generation": them.generation, "echo": us.nonce.hex()}
    hello = {
        "versions": [1, 1],
        "generation": them.generation,
        "nonce": them.nonce.hex(),
        "name": "peer",
        "auth": True,
        "role": them.role.value,
        "transports": ["shm", "tcp"],
    }
    return {
        FrameKind.HELLO: hello,
        FrameKind.AUTH: {**common, "proof": expected_proof(b"secret", them, us)},
        FrameKind.CARD: {**common, "card": {"memory of": them.generation}},
        FrameKind.READY: {**common, "transport": "tcp", "passed_over": {"shm": "other host"}},
        FrameKind.CLOSE: {**common, "reason": "bye"},
        FrameKind.ERROR: {
            **common,
            "code": "PeerRestartedError",
            "message": "no",
            "remedy": "",
            "values": {"errno": 5},
        },
    }


@st.composite
def mutated_frames(draw: st.DrawFn, us: Setup, them: Setup) -> bytes:
    """A few frames, each a good one with at most one thing wrong, or bytes."""
    good = good_bodies(us, them)
    data = b""
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(list(good)))
        body: Any = dict(good[kind])
        flags = draw(st.integers(0, 3))
        match draw(
            st.sampled_from(["good", "value", "deep", "drop", "extra", "body", "length", "session", "bytes", "flip"])
        ):
            case "value":
                body[draw(st.sampled_from(list(body)))] = draw(json_values)
            case "deep":
                name = draw(st.sampled_from(list(body)))
                body[name] = {str(name): [body[name]] * draw(st.integers(0, 300))}
            case "drop":
                del body[draw(st.sampled_from(list(body)))]
            case "extra":
                body |= draw(st.dictionaries(st.text(max_size=8), json_values, max_size=3))
            case "body":
                body = draw(json_values)
            case "length":
                data += HEADER.pack(draw(st.integers(0, 2**32 - 1)), kind, flags, 0)
                continue
            case "session":
                data += encode(
                    draw(st.sampled_from([FrameKind.PING, FrameKind.NOTIFY, FrameKind.ATTACH])), b"body", flags
                )
                continue
            case "bytes":
                data += draw(st.binary(max_size=24))
                continue
            case "flip":
                frame = bytearray(encode_json(kind, body, flags))
                frame[draw(st.integers(0, len(frame) - 1))] ^= 1 << draw(st.integers(0, 7))
                data += bytes(frame)
                continue
        text = json.dumps(body).encode()[: BODY_NBYTES_MAX[kind]]
        data += encode(kind, text, flags)
    return data


def feed_and_check(index: int, state: State, pieces: list[bytes]) -> tuple[list[tuple[Any, ...]], State, str]:
    """Feed the pieces, then let the owner do what is asked, then end the stream."""
    side = bring_to(index, state)
    machine, before = side.machine, len(side.events)
    for piece in pieces:
        machine.receive_data(piece, 101.0)
        kept = machine._decoder.unread_nbytes + sum(len(frame.body) for frame in machine._early.values())
        assert kept <= KEPT_NBYTES_MAX
    side._collect()
    while side.duties:
        side.act()
    machine.receive_data(b"", 101.0)
    side._collect()
    events: list[Event] = side.events[before:]
    assert len(machine.data_to_send()) <= KEPT_NBYTES_MAX
    assert machine.state in (State.FAILED, State.CLOSED)
    assert machine.deadline() is None
    told = [(type(one), str(one.error)) if isinstance(one, Failed) else (type(one), repr(one)) for one in events]
    return told, machine.state, str(machine.stale_frames)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the night profile takes minutes
@pytest.mark.parametrize(
    ("index", "state"), PLACES, ids=lambda value: value.name if isinstance(value, State) else str(value)
)
@given(data=st.data())
def test_no_bytes_raise_and_cuts_do_not_matter(index: int, state: State, data: st.DataObject) -> None:
    us, them = (A, B) if index == 0 else (B, A)
    if data.draw(st.integers(0, 9)) == 0:
        stream = data.draw(st.binary(max_size=64))
    else:
        stream = data.draw(mutated_frames(us, them))
        if state is State.WAIT_HELLO:
            stream = MAGIC + stream

    whole = feed_and_check(index, state, [stream] if stream else [])

    assert feed_and_check(index, state, [one for one in cut(stream, data.draw(cuts)) if one]) == whole


@pytest.mark.parametrize("kind", sorted(HANDSHAKE_KINDS))
def test_a_flood_of_the_largest_frames_is_not_kept(kind: FrameKind) -> None:
    side = bring_to(0, State.WAIT_PROOF)
    body = {"generation": "bb", "echo": A.nonce.hex(), "pad": ""}
    body["pad"] = "x" * (BODY_NBYTES_MAX[kind] - len(json.dumps(body, separators=(",", ":"))))
    frame = encode_json(kind, body)
    assert len(frame) == HEADER.size + BODY_NBYTES_MAX[kind]

    for _ in range(20):
        side.machine.receive_data(frame, 101.0)

    kept = side.machine._decoder.unread_nbytes + sum(len(one.body) for one in side.machine._early.values())
    assert kept <= BODY_NBYTES_MAX[kind]
    assert len(side.machine.data_to_send()) < 1 << 10


@given(text=st.text(max_size=700), length=st.integers(10, 300))
def test_cleaned_words_are_printable_short_and_stay_so(text: str, length: int) -> None:
    kept = clean(text, length)

    assert len(kept) <= length
    assert "\n" not in kept
    assert kept.encode().decode() == kept
    assert clean(kept, length) == kept


@given(
    message=st.text(max_size=3000),
    remedy=st.text(max_size=1000),
    values=st.dictionaries(
        st.sampled_from(["expected", "actual", "state", "step", "errno", "verb", "other"]),
        json_values | st.binary() | st.integers(),
    ),
)
def test_any_error_reaches_the_peer(message: str, remedy: str, values: dict[str, Any]) -> None:
    frame = encode_json(FrameKind.ERROR, error_to_json(KvxferError(message, remedy=remedy, **values)))

    decoder = FrameDecoder(expect_magic=False)
    decoder.feed(frame)
    read = decoder.next_frame()
    assert read is not None
    error = error_from_json(decode_json(read), "someone")
    assert error.message == f"peer someone answered: {clean(message, 2000)}"
