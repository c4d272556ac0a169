"""kvxfer.handshake.frames: what is refused, and in which words."""

from __future__ import annotations

import json

import pytest

from kvxfer.errors import LocalProtocolError, RemoteProtocolError
from kvxfer.handshake.frames import (
    BODY_NBYTES_MAX,
    HANDSHAKE_KINDS,
    HEADER,
    MAGIC,
    SESSION_KINDS,
    Frame,
    FrameDecoder,
    FrameKind,
    decode_json,
    encode,
    encode_json,
    field,
)


def decode(data: bytes, **options: bool) -> Frame | None:
    decoder = FrameDecoder(**options)
    decoder.feed(data)
    return decoder.next_frame()


def test_a_frame_survives_the_wire() -> None:
    data = encode(FrameKind.NOTIFY, b"words", flags=3, sequence=70_000)

    assert decode(MAGIC + data) == Frame(FrameKind.NOTIFY, b"words", 3, 70_000 & 0xFFFF)
    assert decode(data, expect_magic=False) == Frame(FrameKind.NOTIFY, b"words", 3, 70_000 & 0xFFFF)


def test_every_kind_has_a_limit_and_one_place() -> None:
    assert set(BODY_NBYTES_MAX) == set(FrameKind)
    assert set(FrameKind) - HANDSHAKE_KINDS - SESSION_KINDS == {FrameKind.ATTACH, FrameKind.ATTACHED}
    assert not HANDSHAKE_KINDS & SESSION_KINDS


@pytest.mark.parametrize(
    ("data", "who"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "an HTTP server"),
        (b"GET / HTTP/1.1\r\n", "an HTTP client"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "an SSH server"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "a TLS client or server"),
    ],
)
def test_a_known_stranger_is_named(data: bytes, who: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"not a kvxfer peer and looks like {who}") as caught:
        decode(data)

    assert caught.value.first_bytes == data[:8].hex()  # type: ignore[attr-defined]


def test_an_unknown_stranger_is_shown() -> None:
    with pytest.raises(RemoteProtocolError, match=r"not a kvxfer peer: its first bytes are b'\\x00.*05 00 00"):
        decode(b"\x00\x00\x00\x00\x00\x05\x00\x00")


def test_a_tls_alert_shorter_than_the_magic_is_named_at_the_end() -> None:
    decoder = FrameDecoder()
    decoder.feed(b"\x15\x03\x03\x00\x02\x02\x28")
    assert decoder.next_frame() is None

    with pytest.raises(RemoteProtocolError, match="a TLS alert"):
        decoder.check_end()


def test_half_a_magic_is_no_fault_at_the_end() -> None:
    decoder = FrameDecoder()
    decoder.feed(MAGIC[:4])

    decoder.check_end()


def test_an_unknown_kind_is_refused_from_its_header() -> None:
    with pytest.raises(RemoteProtocolError, match=r"frame kind 99 \(0x63\) with 7 bytes of body is unknown"):
        decode(MAGIC + HEADER.pack(7, 99, 0, 0))


@pytest.mark.parametrize("kind", FrameKind)
def test_a_body_over_the_limit_is_refused_from_its_header(kind: FrameKind) -> None:
    limit = BODY_NBYTES_MAX[kind]

    assert decode(MAGIC + HEADER.pack(limit, kind, 0, 0)) is None
    with pytest.raises(
        RemoteProtocolError, match=f"a {kind.name} frame announces {limit + 1} bytes .* limit is {limit}"
    ):
        decode(MAGIC + HEADER.pack(limit + 1, kind, 0, 0))


def test_a_body_over_the_limit_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="PING frame has 65 bytes; the limit is 64"):
        encode(FrameKind.PING, bytes(65))


def test_a_kind_that_is_not_allowed_yet_is_refused_from_its_header() -> None:
    decoder = FrameDecoder(kinds=HANDSHAKE_KINDS)
    decoder.feed(MAGIC + HEADER.pack(1 << 20, FrameKind.REGIONS, 0, 0))

    with pytest.raises(RemoteProtocolError, match="a REGIONS frame is not allowed here"):
        decoder.next_frame()


def test_whoever_feeds_without_reading_is_told() -> None:
    decoder = FrameDecoder(expect_magic=False)
    decoder._buffer = bytearray(66 << 20)

    with pytest.raises(LocalProtocolError, match="no frame was taken out"):
        decoder.feed(b"more")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"{'a': 1}", "is not JSON"),
        (b'{"a": NaN}', "no JSON number"),
        (b'{"a": -Infinity}', "no JSON number"),
        (b'{"a": 1e999}', "1e999 is no JSON number that fits"),
        (b'{"a": ' + b"9" * 50 + b"}", "an integer of 50 digits"),
        (b"[1]", "a JSON list, not an object"),
        (b"null", "a JSON NoneType, not an object"),
        (b'{"a": ' + b"[" * 30 + b"]" * 30 + b"}", "nested more than 16"),
        (b"[" * 100_000, "nested too deeply|is not JSON"),
        (b'{"a": "\\ud800"}', "lone surrogates"),
        (b'{"\\udfff": 1}', "lone surrogates"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode_json(Frame(FrameKind.CARD, body))


def test_what_is_no_json_is_not_sent() -> None:
    deep: list[object] = []
    deep.append(deep)
    for obj in ({"a": object()}, {"a": float("nan")}, {"a": "\ud800"}, {"a": deep}):
        with pytest.raises(LocalProtocolError, match="cannot be sent as JSON"):
            encode_json(FrameKind.CARD, obj)


def test_a_json_body_survives_the_wire() -> None:
    obj = {"rkey": 2**64 - 1, "names": ["größe", "b"], "nested": {"a": [None, True, 1.5]}}

    frame = decode(encode_json(FrameKind.CARD, obj), expect_magic=False)

    assert frame is not None
    assert decode_json(frame) == obj == json.loads(frame.body)


def test_a_field_has_the_type_that_is_asked_for() -> None:
    obj = {"port": 7, "flag": True, "name": "x" * 10, "null": None}

    assert field(obj, "port", int) == 7
    assert field(obj, "absent", str, default="d") == "d"
    with pytest.raises(RemoteProtocolError, match="the HELLO frame has no field 'absent'"):
        field(obj, "absent", int, of="HELLO")
    with pytest.raises(RemoteProtocolError, match="field 'flag' of the HELLO frame is bool, not int"):
        field(obj, "flag", int, of="HELLO")
    with pytest.raises(RemoteProtocolError, match="field 'null' of the frame is NoneType, not str"):
        field(obj, "null", str, default="d")
    with pytest.raises(RemoteProtocolError, match=r"'name' .* has length 10; the limit is 9"):
        field(obj, "name", str, length_max=9)
