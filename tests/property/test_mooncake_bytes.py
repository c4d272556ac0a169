"""Mooncake's control messages, descriptors and tcp headers: what is written is read again, however it is cut, and no
bytes at all make more than a RemoteProtocolError or keep more than the limit."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.errors import RemoteProtocolError
from kvxfer.handshake.frames import MAGIC
from kvxfer.mooncake.wire.descriptor import BufferDescriptor, DeviceDescriptor, KvxferMark, SegmentDescriptor
from kvxfer.mooncake.wire.frames import (
    LENGTH_MAX,
    LENGTH_NBYTES,
    Message,
    MessageDecoder,
    MessageKind,
    encode,
    may_be_message,
    pack_notify,
    parse_object,
    unpack_notify,
)
from kvxfer.mooncake.wire.tcp_frames import (
    HEADER_NBYTES,
    STATUS_OK,
    STATUS_REJECTED,
    Header,
    header_column,
    is_status,
    pack_status,
)
from kvxfer.types import ADDRESS_MAX, Opcode

CUTS = st.lists(st.integers(0, 10_000), max_size=8)
KINDS = st.sampled_from(MessageKind)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut at these positions (modulo the length)."""
    places = sorted({place % (len(data) + 1) for place in cuts} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


def decode(pieces: list[bytes], **settings: Any) -> tuple[Message | None, str]:
    decoder = MessageDecoder(**settings)
    try:
        for piece in pieces:
            message = decoder.feed(piece)
            if message is not None:
                return message, ""
    except RemoteProtocolError as error:
        return None, error.message
    return None, ""


# Control messages.


@given(KINDS, st.dictionaries(st.text(max_size=5), json_values, max_size=4), st.booleans(), CUTS)
def test_a_message_is_read_again_however_it_is_cut(
    kind: MessageKind, fields: dict[str, Any], is_old: bool, cuts: list[int]
) -> None:
    kind = MessageKind.CONNECTION if is_old else kind

    message, _ = decode(cut(encode(kind, fields, is_old=is_old), cuts))

    assert message is not None
    assert (message.kind, message.is_old, message.fields()) == (kind, is_old, fields)


@given(
    st.binary(max_size=64)
    | st.builds(lambda n, tail: n.to_bytes(8, "little") + tail, st.integers(0, 40), st.binary(max_size=48)),
    CUTS,
)
def test_any_bytes_are_a_message_half_of_one_or_a_typed_error_however_cut(data: bytes, cuts: list[int]) -> None:
    whole = decode([data])
    pieces = decode(cut(data, cuts))

    assert pieces == whole


@given(st.binary(max_size=24))
@example(MAGIC)
@example(b"GET / HTTP/1.1\r\n")
@example(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")
@example(bytes(8))
@example((LENGTH_MAX).to_bytes(8, "little"))
@example((LENGTH_MAX + 1).to_bytes(8, "little"))
def test_a_beginning_is_told_early_and_never_taken_back(data: bytes) -> None:
    answers = [may_be_message(data[:count]) for count in range(1, len(data) + 1)]

    assert answers == sorted(answers, reverse=True)  # once False, always False
    if len(data) >= LENGTH_NBYTES:
        assert answers[-1] == (1 <= int.from_bytes(data[:8], "little") <= LENGTH_MAX)


def test_kvxfer_peers_and_other_protocols_are_no_messages() -> None:
    for other in (MAGIC, b"GET / HT", b"SSH-2.0-", b"\x16\x03\x01\x02\x00\x01\x00\x01"):
        assert not may_be_message(other[:8])


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (bytes(8) + b"\1", "0 bytes"),
        ((LENGTH_MAX + 1).to_bytes(8, "little") + b"\1", str(LENGTH_MAX + 1)),
        (b"\xff" * 9, str(2**64 - 1)),
        ((9).to_bytes(8, "little") + b"\4", "kind 4"),
        ((9).to_bytes(8, "little") + b"\xff", "kind 255"),
        ((2000).to_bytes(8, "little") + b"\2", "limit is 1000"),
        ((2000).to_bytes(8, "little") + b"{", "limit is 1000"),
    ],
)
def test_what_cannot_be_is_refused_from_its_head(head: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        MessageDecoder(1000).feed(head)


def test_bodies_that_nobody_reads_are_not_kept() -> None:
    decoder = MessageDecoder(1000, unread_kinds=(MessageKind.METADATA,))
    nbytes = 10 << 20

    message = decoder.feed((nbytes + 1).to_bytes(8, "little") + b"\1")
    fed = 0
    while message is None:
        assert fed < nbytes
        message = decoder.feed(bytes(100_000))
        fed += 100_000
        assert decoder.kept_nbytes == 0

    assert message == Message(MessageKind.METADATA, b"")
    assert fed >= nbytes


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"{}{}"],
    ids=lambda body: bytes(body[:12]).hex(),
)
def test_a_body_of_nonsense_is_a_typed_error(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_object(body, "a test")


@given(st.text(max_size=100), st.text(max_size=100))
def test_a_notification_is_read_again(name: str, message: str) -> None:
    assert unpack_notify(pack_notify(name, message)) == (name, message)


@pytest.mark.parametrize("payload", [b"", b"{}", b'{"name": 1, "notify_msg": ""}', b'{"name": "x"}', b"\x00", b"[1]"])
def test_other_notifications_are_a_typed_error(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_notify(payload)


# Descriptors.

names = st.text("ab0:.@ äß", min_size=1, max_size=20)
keys = st.integers(0, 2**32 - 1)


@st.composite
def descriptors(draw: st.DrawFn) -> SegmentDescriptor:
    protocols = draw(st.sampled_from([("tcp",), ("rdma",), ("rdma", "tcp"), ("tcp", "rdma")]))
    has_rdma = "rdma" in protocols
    devices = draw(
        st.lists(st.builds(DeviceDescriptor, names, st.integers(0, 65535), st.text("0123:", max_size=9)), max_size=3)
    )
    devices = devices if has_rdma else []
    buffers = []
    for _ in range(draw(st.integers(0, 4))):
        protocol = draw(st.sampled_from(protocols))
        count = draw(st.sampled_from([0, len(devices)])) if protocol == "rdma" else 0
        address = draw(st.integers(1, ADDRESS_MAX - 1))
        buffers.append(
            BufferDescriptor(
                name=draw(names),
                address=address,
                nbytes=draw(st.integers(1, ADDRESS_MAX - address)),
                rkeys=tuple(draw(keys) for _ in range(count)),
                lkeys=tuple(draw(keys) for _ in range(count)),
                protocol=protocol if len(protocols) > 1 else "",
            )
        )
    tops = st.lists(names, max_size=2).map(tuple)
    return SegmentDescriptor(
        name=draw(names),
        protocols=protocols,
        buffers=tuple(buffers),
        tcp_data_host=draw(st.sampled_from(["", "127.0.0.1", "::1"])),
        tcp_data_port=draw(st.integers(0, 65535)),
        tcp_proto_version=draw(st.integers(1, 3)),
        timestamp="2026-01-01 00:00:00.000000",
        rdma_server_name=draw(st.sampled_from(["", "10.0.0.1:15000"])),
        devices=tuple(devices),
        priority_matrix=draw(st.dictionaries(names, st.tuples(tops, tops), max_size=2)) if has_rdma else {},
        kvxfer=draw(st.none() | st.builds(KvxferMark, names, names)),
    )


@given(descriptors())
def test_a_descriptor_is_read_again(descriptor: SegmentDescriptor) -> None:
    fields = json.loads(json.dumps(descriptor.to_json()))

    assert SegmentDescriptor.from_json(fields) == descriptor


SAMPLE = {
    "buffers": [{"addr": 140446168772624, "length": 67108864, "name": "127.0.0.1:15612"}],
    "name": "127.0.0.1:15612",
    "protocol": "tcp",
    "rdma_server_name": "",
    "tcp_data_host": "127.0.0.1",
    "tcp_data_port": 15372,
    "tcp_proto_version": 2,
    "timestamp": "2026-08-01 12:00:00.000000",
}
"""As a Mooncake 0.3.13 writes it."""
RDMA_SAMPLE = {
    "name": "10.0.0.1:15432",
    "protocol": "rdma",
    "tcp_data_port": 0,
    "devices": [{"name": "mlx5_0", "lid": 0, "gid": "00:" * 15 + "01"}],
    "priority_matrix": {"cpu:0": [["mlx5_0"], []]},
    "buffers": [{"name": "cpu:0", "addr": 4096, "length": 4096, "rkey": [7], "lkey": [8]}],
}


def test_a_descriptor_that_mooncake_wrote_is_read_and_written_alike() -> None:
    assert SegmentDescriptor.from_json(SAMPLE).to_json() == SAMPLE


def test_an_old_descriptor_means_version_1() -> None:
    old = {name: value for name, value in SAMPLE.items() if name in ("name", "protocol", "buffers", "tcp_data_port")}

    assert SegmentDescriptor.from_json(old).tcp_proto_version == 1


def test_buffers_of_transports_that_are_not_spoken_are_passed_over() -> None:
    several = {
        **SAMPLE,
        "protocol": ["cxl", "tcp", "hip"],
        "buffers": [
            {"name": "x", "length": 5, "offset": 1, "protocol": "cxl"},
            {"name": "x", "length": 5, "addr": 99, "protocol": "tcp"},
            {"name": "x", "length": 5, "addr": 0, "shm_name": "s", "protocol": "hip"},
        ],
    }

    found = SegmentDescriptor.from_json(several)

    assert [one.address for one in found.buffers_over("tcp")] == [99]
    assert found.buffers_over("rdma") == ()


BUFFER: dict[str, Any] = SAMPLE["buffers"][0]  # type: ignore[index]


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        {},
        SAMPLE | {"name": ""},
        SAMPLE | {"name": 5},
        SAMPLE | {"name": "x" * 5000},
        SAMPLE | {"name": "\ud800"},
        SAMPLE | {"protocol": None},
        SAMPLE | {"protocol": []},
        SAMPLE | {"protocol": ["tcp"] * 100},
        SAMPLE | {"protocol": [5]},
        SAMPLE | {"tcp_data_port": -1},
        SAMPLE | {"tcp_data_port": 65536},
        SAMPLE | {"tcp_data_port": "80"},
        SAMPLE | {"tcp_data_port": True},
        SAMPLE | {"tcp_data_port": 1.5},
        SAMPLE | {"tcp_proto_version": "2"},
        SAMPLE | {"buffers": {}},
        SAMPLE | {"buffers": [None]},
        SAMPLE | {"buffers": [BUFFER | {"addr": 0}]},
        SAMPLE | {"buffers": [BUFFER | {"addr": -8}]},
        SAMPLE | {"buffers": [BUFFER | {"addr": 2**63}]},
        SAMPLE | {"buffers": [BUFFER | {"addr": 2**63 - 9, "length": 16}]},
        SAMPLE | {"buffers": [BUFFER | {"length": 0}]},
        SAMPLE | {"buffers": [BUFFER | {"length": 2**64}]},
        SAMPLE | {"buffers": [BUFFER | {"length": 1.0}]},
        SAMPLE | {"buffers": [BUFFER | {"name": ""}]},
        SAMPLE | {"kvxfer": "yes"},
        SAMPLE | {"kvxfer": {"address": "127.0.0.1:1"}},
        SAMPLE | {"kvxfer": {"address": 5, "generation": "g"}},
        RDMA_SAMPLE | {"devices": None},
        RDMA_SAMPLE | {"devices": [{"name": "mlx5_0", "lid": 70000, "gid": ""}]},
        RDMA_SAMPLE | {"devices": [RDMA_SAMPLE["devices"][0]] * 1000},  # type: ignore[index]
        RDMA_SAMPLE | {"buffers": [RDMA_SAMPLE["buffers"][0] | {"rkey": [1, 2]}]},  # type: ignore[index]
        RDMA_SAMPLE | {"buffers": [RDMA_SAMPLE["buffers"][0] | {"rkey": [2**32]}]},  # type: ignore[index]
        RDMA_SAMPLE | {"buffers": [RDMA_SAMPLE["buffers"][0] | {"rkey": ["1"]}]},  # type: ignore[index]
        RDMA_SAMPLE | {"priority_matrix": {"cpu:0": [["mlx5_0"]]}},
        RDMA_SAMPLE | {"priority_matrix": {"cpu:0": [[1], []]}},
        RDMA_SAMPLE | {"priority_matrix": []} | {"priority_matrix": [1]},
    ],
    ids=lambda fields: json.dumps(fields)[-60:],
)
def test_a_descriptor_that_cannot_be_is_a_typed_error(fields: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        SegmentDescriptor.from_json(fields)


@given(st.sampled_from([SAMPLE, RDMA_SAMPLE]), st.data())
def test_a_field_of_any_type_is_read_or_a_typed_error(sample: dict[str, Any], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(sample)))
    try:
        found = SegmentDescriptor.from_json({**sample, name: data.draw(json_values)})
    except RemoteProtocolError:
        return
    assert SegmentDescriptor.from_json(json.loads(json.dumps(found.to_json()))) == found


# The tcp data port.


@given(
    st.sampled_from(Opcode),
    st.integers(0, ADDRESS_MAX),
    st.integers(1, 1 << 46),
    st.booleans(),
    st.binary(min_size=7, max_size=7),
)
def test_a_header_is_read_again_whatever_its_padding(
    opcode: Opcode, address: int, nbytes: int, has_status: bool, padding: bytes
) -> None:
    header = Header(opcode, address, nbytes, has_status)

    data = header.pack()

    assert len(data) == HEADER_NBYTES
    assert Header.unpack(data[:-7] + padding) == header


@given(
    st.sampled_from(Opcode),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, ADDRESS_MAX), st.integers(1, 1 << 46)), min_size=1, max_size=9),
)
def test_a_column_of_headers_is_the_same_bytes(opcode: Opcode, has_status: bool, rows: list[tuple[int, int]]) -> None:
    addresses, nbytes = np.array(rows, np.int64).T

    column = header_column(opcode, addresses, nbytes, has_status=has_status)

    assert column.tobytes() == b"".join(Header(opcode, *row, has_status).pack() for row in rows)


@given(st.binary(min_size=HEADER_NBYTES, max_size=HEADER_NBYTES))
@example(Header(Opcode.WRITE, 8, 1 << 46, True).pack())
def test_any_header_is_read_or_a_typed_error(data: bytes) -> None:
    try:
        header = Header.unpack(data)
    except RemoteProtocolError:
        return
    assert 1 <= header.nbytes <= 1 << 46
    assert 0 <= header.address <= ADDRESS_MAX


@pytest.mark.parametrize(
    ("nbytes", "address", "opcode"),
    [
        (0, 4096, 1),
        (2**63, 4096, 1),
        (2**64 - 1, 4096, 0),
        (16, 2**64 - 8, 1),
        (16, 2**63, 0),
        (16, 4096, 2),
        (16, 4096, 0xFF),
    ],
)
def test_a_header_that_cannot_be_is_a_typed_error(nbytes: int, address: int, opcode: int) -> None:
    data = nbytes.to_bytes(8, "little") + address.to_bytes(8, "little") + bytes([opcode]) + bytes(7)

    with pytest.raises(RemoteProtocolError):
        Header.unpack(data)


@given(st.integers(0, 2**64 - 1))
@example(STATUS_OK)
@example(STATUS_REJECTED)
def test_a_status_is_told_from_payload(value: int) -> None:
    assert is_status(value) == (value >> 32 == 0x4D435456)
    assert int.from_bytes(pack_status(value), "little") == value
