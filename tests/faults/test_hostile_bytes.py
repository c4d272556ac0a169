"""Bytes that no honest peer sends, to a serving engine and to a client: nobody crashes, hangs, grows or writes memory.

The serving engine is a process of its own; beside the attack a healthy client goes on working. Canaries in memory that
was never registered, in a region without rights and around each region show any byte that was written without leave.
"""

# ruff: noqa: SIM117  the outer `with` is the stage, the inner one the act

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvxfer import Rights, TransferEngine
from kvxfer.errors import (
    NotRegisteredError,
    PeerError,
    ProtocolError,
    TransferError,
    TransportUnavailableError,
)
from kvxfer.handshake.frames import HEADER, MAGIC, SESSION_KINDS, FrameKind, encode, encode_json
from kvxfer.handshake.machine import Role
from kvxfer.transports.tcp_wire import ERROR_NBYTES_MAX, REQUEST_NBYTES, RESPONSE_NBYTES, ROWS_MAX
from tests.support.fault_peer import (
    FAKE_ADDRESS,
    FAKE_NBYTES,
    RESET,
    FakeHandover,
    FakePeer,
    RawClient,
    count,
    data_connections,
    hold,
    host_port,
    is_closed_by_peer,
    make_machine,
    mutate,
    read_request,
    receive_exactly,
    respond,
    response,
    sessions,
    wait_not_grown,
    write_request,
)
from tests.support.peer import Peer, pattern, run_script, wait_until

NBYTES = 1 << 16
CANARY = 0xA5
SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

_REQUEST = struct.Struct("<IBBHIIQQqq")
FIELDS = ("magic", "opcode", "flags", "zero", "rows", "notify", "number", "payload", "address", "nbytes")


def raw_request(**fields: int) -> bytes:
    """Return a request header with any values; what is not given is that of a READ of 16 bytes."""
    values = dict(zip(FIELDS, (0x5258564B, 2, 0, 0, 1, 0, 1, 16, 0, 16), strict=True)) | fields
    numbers = [values[name] for name in FIELDS]
    numbers[8:] = [one - 2**64 if one >= 2**63 else one for one in numbers[8:]]
    return _REQUEST.pack(*numbers)


class Target:
    """A serving process with canaries, a healthy client, and what both must still be after each attack."""

    def __init__(self) -> None:
        self.server = Peer(transports=("shm", "tcp"), handshake_timeout_s=2.0, notifications_pending_max=100)
        whole = self.server.run(
            """
whole = np.full(5 * n, canary, np.uint8)
engine.whole = whole
engine.regions_here = [engine.register(whole[n:2*n]), engine.register(whole[3*n:4*n], rights=kvxfer.Rights.NONE)]
result = whole.ctypes.data
""",
            n=NBYTES,
            canary=CANARY,
        )
        self.address = int(whole) + NBYTES
        self.no_rights_address = int(whole) + 3 * NBYTES
        self.read_only = self.server.register(NBYTES, rights=Rights.REMOTE_READ)
        self.engine = TransferEngine(transports=("tcp",))
        self.here = self.engine.register(pattern(NBYTES, 1))
        self.there = self.server.register(NBYTES)
        self.segment = self.engine.open_segment(self.server.address)
        self.check()
        with RawClient(self.server.address) as raw, raw.attach(), raw.attach():
            self.check()  # all its threads run now
        self.before = count(self.server)

    def check(self, *, may_have_become_valid: bool = False) -> None:
        """The server lives, its canaries too, and the healthy client is served in time on its old connection.

        may_have_become_valid: a mutation may have hit upon a valid WRITE into the writable region; the rest stands.
        """
        session = self.segment._connection.session()
        self.here.array[:] = np.roll(self.here.array, 1)
        self.engine.write(self.segment, self.here.address, self.there.address, NBYTES, timeout_s=5.0)
        assert self.there.bytes() == self.here.array.tobytes()
        assert self.segment._connection.session() is session
        if may_have_become_valid:
            self.server.run("engine.whole[n : 2 * n] = canary", n=NBYTES, canary=CANARY)
        changed = self.server.run("result = np.flatnonzero(engine.whole != canary)[:8].tolist()", canary=CANARY)
        assert changed == []
        assert not any(self.read_only.bytes())

    def check_end(self) -> None:
        """Nothing is left of the attackers."""
        self.server.call("notifications")
        wait_until(lambda: sessions(self.server) <= 1)
        wait_until(lambda: data_connections(self.server) <= 1)
        assert not self.server.run("result = [r.remote_use_count for r in engine.regions if r.remote_use_count]")
        wait_not_grown(self.server, self.before)

    def close(self) -> None:
        self.engine.close()
        self.server.close()


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.check_end()
    made.close()


def knock(target: Target, data: bytes) -> None:
    """Connect, say something, leave."""
    with (
        socket.create_connection(host_port(target.server.address), timeout=5.0) as connection,
        contextlib.suppress(OSError),
    ):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert is_closed_by_peer(connection)


HTTP_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: test\r\n\r\n"
TLS_HELLO = bytes.fromhex("16030100f8010000f40303") + bytes(range(240))


# Control port.


@FEW
@given(SEEDS)
def test_mutated_beginnings_of_a_handshake(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        knock(target, mutate(make_machine(Role.INITIATOR).data_to_send(), rng))
    target.check()


@FEW
@given(st.one_of(st.binary(max_size=1024), st.binary(max_size=256).map(lambda tail: MAGIC + tail)))
@example(HTTP_GET)
@example(TLS_HELLO)
@example(MAGIC + HEADER.pack(2**32 - 1, FrameKind.HELLO, 0, 0))
@example(MAGIC + HEADER.pack(2**32 - 1, FrameKind.ATTACH, 0, 0))
@example(MAGIC + HEADER.pack(0, FrameKind.ATTACH, 0, 0))
@example(MAGIC + encode(FrameKind.HELLO, b"[" * 4096))
@example(MAGIC + encode(FrameKind.ATTACH, b"[" * 4000))
@example(MAGIC + encode_json(FrameKind.ATTACH, {"token": "0" * 32, "target": "0" * 32}))
@example(MAGIC + encode_json(FrameKind.ATTACH, {"token": {"a": 1}, "target": ["x"]}))
def test_any_bytes_on_the_control_port(target: Target, data: bytes) -> None:
    knock(target, data)
    target.check()


@FEW
@given(SEEDS)
def test_mutated_frames_on_an_established_session(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        with RawClient(target.server.address) as raw:
            for _ in range(rng.choice((1, 3, 10))):
                kind = rng.choice(sorted(SESSION_KINDS))
                number = rng.choice((0, 1, -1, 2**64 - 1, 2**200, "one", None, [1], True))
                body: dict[str, Any] = {"number": number, "ids": rng.choice(([1], [-1], ["x"], 5, [2**70]))}
                body["connection"] = rng.choice((0, -1, 2**62, 2**99, "x", None))
                said = rng.choice((json.dumps(body).encode(), rng.randbytes(16), b"", b"[" * 900))
                whole = HEADER.pack(len(said), kind, 0, 0) + said
                raw.send(whole if rng.random() < 0.5 else mutate(whole, rng))
    target.check()


@pytest.mark.parametrize(
    "frame",
    [
        HEADER.pack(2**32 - 1, FrameKind.NOTIFY, 0, 0),
        HEADER.pack(64 << 20, FrameKind.REGIONS, 0, 0) + b"x" * 100000,
        encode(FrameKind.NOTIFY, b"1234567"),
        encode(FrameKind.REGIONS_GET, b'{"number": 1e999}'),
        encode(FrameKind.REGIONS_GET, b'{"number": ' + b"9" * 3000 + b"}"),
        encode(FrameKind.ABORT, b'{"number": 1, "connection": ' + b"9" * 500 + b"}"),
        encode(FrameKind.REVOKE, b'{"number": 1, "ids": [1, 2, 3]}'),
        MAGIC + encode_json(FrameKind.ATTACH, {"token": "", "target": ""}),
        HTTP_GET,
        b"\0" * 4096,
    ],
    ids=lambda frame: bytes(frame[:12]).hex(),
)
def test_a_frame_that_cannot_be_ends_that_session_only(target: Target, frame: bytes) -> None:
    with RawClient(target.server.address) as raw:
        raw.send(frame)
    target.check()


def test_a_flood_of_notifications_ends_at_the_limit(target: Target) -> None:
    with RawClient(target.server.address) as raw:
        body = bytes(8) + b"x" * 1000
        raw.send(encode(FrameKind.NOTIFY, body) * 150)
        assert is_closed_by_peer(raw.connection)
    assert len(target.server.call("notifications")) == 100
    target.check()


def test_questions_whose_answers_are_never_read_hold_no_memory_without_bound(target: Target) -> None:
    with RawClient(target.server.address) as raw:
        raw.connection.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            for _ in range(200):
                raw.send(encode(FrameKind.REGIONS_GET, b'{"number": 1}') * 100)
        target.check()


# Data port.


def attack(target: Target, *parts: bytes, reads: bool = False) -> bytes:
    """Attach, say something, leave; what was answered."""
    with RawClient(target.server.address) as raw, raw.attach() as stream, contextlib.suppress(OSError):
        for part in parts:
            stream.sendall(part)
        stream.shutdown(socket.SHUT_WR)
        stream.settimeout(5.0)
        return stream.recv(65536) if reads else receive_rest_quietly(stream)
    return b""


def receive_rest_quietly(stream: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := stream.recv(65536):
            data += part
    return data


# B150
@pytest.mark.parametrize(
    "header",
    [
        raw_request(payload=2**63, nbytes=2**63),
        raw_request(payload=2**64 - 1, nbytes=2**64 - 1),
        raw_request(address=2**64 - 8),
        raw_request(address=2**63 - 8),
        raw_request(address=2**63 - 1, payload=2**46, nbytes=2**46),
        raw_request(opcode=1, address=2**64 - 8, payload=16),
        raw_request(payload=0, nbytes=0),
        raw_request(payload=16, nbytes=17),
        raw_request(payload=2**46 + 1, nbytes=2**46 + 1),
        raw_request(opcode=0),
        raw_request(opcode=3),
        raw_request(opcode=255),
        raw_request(flags=2),
        raw_request(flags=255),
        raw_request(zero=1),
        raw_request(magic=0),
        raw_request(rows=0),
        raw_request(rows=ROWS_MAX + 1),
        raw_request(rows=2**32 - 1),
        raw_request(notify=2**32 - 1, flags=1),
        raw_request(notify=(1 << 20) + 1, flags=1),
        raw_request(notify=5),
        HTTP_GET,
        TLS_HELLO,
        bytes(REQUEST_NBYTES),
        b"\xff" * REQUEST_NBYTES,
    ],
    ids=lambda header: bytes(header[:44]).hex(),
)
def test_a_request_that_cannot_be_ends_that_connection_only(target: Target, header: bytes) -> None:
    answer = attack(target, header, b"p" * 64)

    assert len(answer) < RESPONSE_NBYTES + ERROR_NBYTES_MAX
    assert answer[4:5] != b"\0", "it was answered as a good one"
    target.check()


# B150
def test_a_header_cut_at_each_byte_is_waited_for_and_dropped(target: Target) -> None:
    whole = write_request(target.address, b"X" * 32)
    with RawClient(target.server.address) as raw:
        for cut in range(REQUEST_NBYTES):
            with raw.attach() as stream:
                stream.sendall(whole[:cut])
    target.check()


@pytest.mark.parametrize(
    ("opcode", "where"), [(1, "read_only"), (1, "none"), (2, "none"), (1, "before"), (2, "past"), (1, "past")]
)
def test_rows_without_leave_are_refused_and_nothing_moves(target: Target, opcode: int, where: str) -> None:
    address = {
        "read_only": target.read_only.address,
        "none": target.no_rights_address,
        "before": target.address - 8,
        "past": target.address + NBYTES - 8,
    }[where]
    header = raw_request(opcode=opcode, address=address)

    answer = attack(target, header, b"Z" * 16 if opcode == 1 else b"")

    assert answer[4] == 1, "refused"
    assert bytes([CANARY]) * 8 not in answer
    target.check()


@pytest.mark.parametrize(
    ("rows", "payload"),
    [
        ([(0, 8), (8, 8)], 17),
        ([(0, 8), (8, -8)], 16),
        ([(0, 2**62), (0, 2**62)], 2**40),
        ([(0, 2**63 - 1), (0, 2**63 - 1)], 2**46),
        ([(0, 0), (0, 16)], 16),
        ([(-(2**63), 8), (0, 8)], 16),
        ([(2**62, 8), (0, 8)], 16),
        ([(-8, 16), (0, 8)], 24),
    ],
)
@pytest.mark.parametrize("opcode", [1, 2])
def test_rows_that_do_not_add_up_or_leave_memory_are_not_applied(
    target: Target, opcode: int, rows: list[tuple[int, int]], payload: int
) -> None:
    addresses = b"".join(struct.pack("<q", (target.address + at if -16 <= at < 2**40 else at)) for at, _ in rows)
    sizes = b"".join(struct.pack("<q", nbytes) for _, nbytes in rows)
    header = raw_request(opcode=opcode, rows=len(rows), payload=payload)

    answer = attack(target, header + addresses + sizes, b"Z" * min(payload, 64) if opcode == 1 else b"")

    assert not answer or answer[4] == 1
    target.check()


def test_half_a_payload_then_the_end_lets_go_of_the_memory(target: Target) -> None:
    with RawClient(target.server.address) as raw:
        for end in (b"", RESET):
            with raw.attach() as stream:
                stream.sendall(write_request(target.there.address, bytes(NBYTES))[: NBYTES // 2])
                wait_until(lambda: target.server.run("result = sum(r.remote_use_count for r in engine.regions)") == 1)
                if end:
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, end)
            wait_until(lambda: target.server.run("result = sum(r.remote_use_count for r in engine.regions)") == 0)
    target.check()


def test_columns_that_never_come_hold_up_nobody(target: Target) -> None:
    with RawClient(target.server.address) as raw, contextlib.ExitStack() as stack:
        for _ in range(20):
            stream = stack.enter_context(raw.attach())
            stream.sendall(raw_request(rows=ROWS_MAX, payload=ROWS_MAX, notify=1 << 20, flags=1))
        target.check()


def test_answers_that_are_never_read_hold_up_nobody(target: Target) -> None:
    with RawClient(target.server.address) as raw, contextlib.ExitStack() as stack:
        for _ in range(20):
            stream = stack.enter_context(raw.attach())
            stream.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                for number in range(200):
                    stream.sendall(read_request(target.there.address, NBYTES, number=number))
        target.check()


@FEW
@given(SEEDS)
def test_mutated_requests(target: Target, seed: int) -> None:
    """Aimed at memory that must not change: read-only, without rights, not registered."""
    rng = random.Random(seed)
    with RawClient(target.server.address) as raw:
        for _ in range(10):
            with raw.attach() as stream, contextlib.suppress(OSError):
                where = rng.choice((target.read_only.address, target.no_rights_address, target.address - 16))
                whole = rng.choice((write_request(where, b"M" * 32), read_request(where, 32)))
                for _ in range(rng.choice((1, 1, 5))):
                    stream.sendall(mutate(whole, rng))
                if rng.random() < 0.5:
                    stream.shutdown(socket.SHUT_WR)
                    stream.settimeout(5.0)
                    receive_rest_quietly(stream)
    target.check(may_have_become_valid=True)


@pytest.mark.parametrize(
    "told", ["", "no port", "a b:1", "192.0.2.1", "a" * 400 + ":1", "a\n:1", 7, None, "192.0.2.1:80"]
)
def test_peer_with_any_address_on_its_card_can_be_waited_for_by_its_notification(told: object) -> None:
    """What the engine hands out it takes back."""
    with TransferEngine(transports=("tcp",)) as engine:
        with RawClient(engine.address, own_address=told) as raw:
            came_from = f"127.0.0.1:{raw.connection.getsockname()[1]}"
            raw.send_frame(FrameKind.NOTIFY, (1).to_bytes(8, "little") + b"one")
            (note,) = engine.notifications(10.0)
            raw.send_frame(FrameKind.NOTIFY, (2).to_bytes(8, "little") + b"two")

            (again,) = engine.notifications(10.0, peer=note.peer)

        assert (note.payload, again.payload) == (b"one", b"two")
        assert note.peer == (told if told == "192.0.2.1:80" else came_from)


@FEW
@given(st.binary(min_size=1, max_size=1024))
def test_any_bytes_on_a_data_connection(target: Target, data: bytes) -> None:
    attack(target, data)
    target.check()


def test_attach_with_a_wrong_token_or_another_generation_is_refused(target: Target) -> None:
    with RawClient(target.server.address) as raw:
        right = {"token": raw.card["data_token"], "target": raw.generation}
        for wrong in (
            {"token": "0" * 32},
            {"token": 5},
            {"token": None},
            {"target": "0" * 32},
            {"target": 7},
            {"token": "x" * 3000},
        ):
            with socket.create_connection(host_port(target.server.address), timeout=5.0) as stream:
                stream.sendall(
                    MAGIC + encode_json(FrameKind.ATTACH, right | wrong) + write_request(target.address, b"Z" * 16)
                )
                head = receive_exactly(stream, 16)
                assert head[12] == FrameKind.ERROR
                assert is_closed_by_peer(stream)
    target.check()


# The socket of shared memory.


@pytest.fixture(scope="module")
def handover(target: Target) -> Callable[[], socket.socket]:
    name = target.server.run("result = engine._transports['shm']._server.name")

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect("\0" + name)
        connection.settimeout(5.0)
        return connection

    return connect


@pytest.mark.parametrize(
    "message",
    [
        b"{",
        b"[" * 4096,
        b"null",
        b'"token"',
        b"\xff\xfe",
        b'{"token": 5}',
        b'{"token": "\\ud800"}',
        b'{"token": "0000", "file": 1}',
        b'{"token": "' + b"0" * 64 + b'", "file": 1}',
        b'{"token": "' + b"0" * 60000 + b'"}',
        b'{"file": ' + b"9" * 4000 + b"}",
    ],
    ids=lambda message: bytes(message[:16]).hex(),
)
def test_a_bad_message_gets_no_descriptor(
    target: Target, handover: Callable[[], socket.socket], message: bytes
) -> None:
    with handover() as connection:
        connection.send(message)
        data, fds, _, _ = socket.recv_fds(connection, 4096, 8)

        assert not data or "error" in json.loads(data)
        assert list(fds) == []
    target.check()


def test_descriptors_sent_to_the_server_are_not_kept(target: Target, handover: Callable[[], socket.socket]) -> None:
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
    with handover() as connection:
        for _ in range(50):
            socket.send_fds(connection, [b"{}"], fds)
            connection.recv(4096)
        for fd in fds:
            os.close(fd)
        wait_not_grown(
            target.server,
            target.before.__class__(target.before.fds + 1, target.before.threads, target.before.rss_nbytes),
        )
    target.check()


def test_many_connections_to_the_socket_of_shared_memory(target: Target, handover: Callable[[], socket.socket]) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(handover())
        target.check()


@FEW
@given(SEEDS)
def test_mutated_messages_for_shared_memory(target: Target, handover: Callable[[], socket.socket], seed: int) -> None:
    rng = random.Random(seed)
    with handover() as connection, contextlib.suppress(OSError):
        for _ in range(20):
            connection.send(mutate(json.dumps({"token": "0" * 64, "file": 1}).encode(), rng) or b"x")
            if not connection.recv(4096):
                break
    target.check()


# A server that lies. The client is a process of its own: a SIGBUS there must not end the tests, it must fail them.

OPEN = """
segment = engine.open_segment(address)
result = [(r.address, r.nbytes) for r in segment.regions]
"""
MOVE = """
segment = engine.open_segment(address)
region = engine.register(np.zeros(n, np.uint8))
try:
    (engine.submit_write if opcode == 1 else engine.submit_read)(
        segment, region.address, there, n, timeout_s=2.0, notify=notify).wait()
finally:
    engine.unregister(region)
    segment.close()
"""
TYPED = (ProtocolError, PeerError, TransferError, TransportUnavailableError)


@pytest.fixture(scope="module")
def client() -> Iterator[Peer]:
    """A real client with short limits."""
    with Peer(handshake_timeout_s=1.0, connect_timeout_s=1.0, transports=("shm", "tcp")) as peer:
        yield peer
        assert peer.run("result = 6 * 7") == 42
        wait_until(lambda: not peer.run("result = len(engine._segments)"))


def open_at(client: Peer, fake: FakePeer) -> Any:
    return client.run(OPEN, address=fake.address)


TCP_CARD: dict[str, Any] = {"address": "x", "data_token": "00", "transports": {"tcp": {"rows_max": 1}}}
SHM_CARD: dict[str, Any] = {"socket": "nobody", "token": "00" * 32, "token_address": 4096, "uid": 0}


@pytest.mark.parametrize(
    "card",
    [
        {},
        {"transports": None},
        {"transports": []},
        {"transports": {"tcp": None, "shm": None}},
        {"transports": {"shm": []}},
        {"transports": {"shm": "shm"}},
        {"transports": {"shm": 5}},
        {"transports": {"shm": {}}},
        {"transports": {"shm": SHM_CARD}},
        {"transports": {"shm": SHM_CARD | {"token": "not hex"}}},
        {"transports": {"shm": SHM_CARD | {"token": ""}}},
        {"transports": {"shm": SHM_CARD | {"token": "0" * 65}}},
        {"transports": {"shm": SHM_CARD | {"socket": "x" * 5000}}},
        {"transports": {"shm": SHM_CARD | {"socket": "a\0b"}}},
        {"transports": {"shm": SHM_CARD | {"socket": ""}}},
        {"transports": {"shm": SHM_CARD | {"token_address": 2**70}}},
        {"transports": {"shm": SHM_CARD | {"token_address": -1}}},
        {"transports": {"shm": SHM_CARD | {"token_address": True}}},
        {"transports": {"tcp": {}}, "passed_over": [1], "address": 5, "name": [], "data_token": 7},
        {"transports": {str(one): {} for one in range(5000)}},
    ],
    ids=lambda card: json.dumps(card)[:70],
)
def test_a_card_of_wrong_types_is_a_typed_error(client: Peer, card: dict[str, Any]) -> None:
    with FakePeer(card=card, transport="shm" if "shm" in (card.get("transports") or ()) else "tcp") as fake:
        with contextlib.suppress(*TYPED):
            open_at(client, fake)
            client.run("engine.open_segment(address).close()", address=fake.address)


@pytest.mark.parametrize(
    "card",
    [SHM_CARD | {"token": "not hex"}, SHM_CARD | {"token_address": 2**70}, SHM_CARD | {"token_address": -1}],
    ids=lambda card: str(card["token_address"]),
)
def test_a_shm_card_that_cannot_be_with_a_socket_that_answers(client: Peer, card: dict[str, Any]) -> None:
    with FakeHandover(lambda _: (b'{"ok": true}', [])) as server:
        with FakePeer(card=TCP_CARD | {"transports": {"shm": card | {"socket": server.name}}}, transport="shm") as fake:
            with pytest.raises(TYPED):
                open_at(client, fake)


ROW = [1, "pool", FAKE_ADDRESS, FAKE_NBYTES, 3, {}]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        {},
        [5],
        [[]],
        [ROW[:5]],
        [[*ROW, 1]],
        [["1", *ROW[1:]]],
        [[1, None, *ROW[2:]]],
        [[1, "p", -1, *ROW[3:]]],
        [[1, "p", 2**64 - 8, *ROW[3:]]],
        [[1, "p", 2**63 - 8, 16, 3, {}]],
        [[1, "p", 4096, 0, 3, {}]],
        [[1, "p", 4096, -5, 3, {}]],
        [[1, "p", 4096, 2**63, 3, {}]],
        [[1, "p", 4096, 1.5, 3, {}]],
        [[1, "p", 4096, True, 3, {}]],
        [[1, "p", 4096, 16, 4, {}]],
        [[1, "p", 4096, 16, 3, []]],
        [[1, "p" * 2000, 4096, 16, 3, {}]],
        [ROW, [2, "q", FAKE_ADDRESS + 8, 16, 3, {}]],
        [ROW, ROW],
    ],
    ids=lambda rows: json.dumps(rows)[:60],
)
def test_regions_that_cannot_be_are_a_typed_error(client: Peer, rows: Any) -> None:
    with FakePeer(regions=json.dumps({"number": 1, "version": 1, "regions": rows}).encode()) as fake:
        with pytest.raises(TYPED):
            open_at(client, fake)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"number": "1"}',
        b'{"number": 2, "version": 1, "regions": []}',
        b"[" * 100000,
        b"\xff" * 100,
        b'{"number": 1, "version": "x", "regions": []}',
        b'{"number": 1}',
    ],
    ids=lambda body: bytes(body[:24]).hex(),
)
def test_a_region_answer_of_nonsense_is_a_typed_error(client: Peer, body: bytes) -> None:
    with FakePeer(regions=body) as fake, pytest.raises(TYPED):
        open_at(client, fake)


@pytest.mark.parametrize(
    "frames",
    [
        encode(FrameKind.REVOKE, b'{"number": 1, "ids": 5}'),
        encode(FrameKind.REVOKE, b'{"number": 1, "ids": ["x"]}'),
        encode(FrameKind.REVOKE, b'{"ids": [1]}'),
        encode(FrameKind.REVOKE, json.dumps({"number": 1, "ids": [2**99, -1, 1]}).encode()),
        encode(FrameKind.REGIONS, b"{}"),
        encode(FrameKind.REVOKED, b'{"number": 99}'),
        encode(FrameKind.NOTIFY_ACK, b"123"),
        encode(FrameKind.NOTIFY, bytes(8) + b"to a client"),
        encode(FrameKind.ABORT, b'{"number": 1, "connection": 1}'),
        HEADER.pack(2**31, FrameKind.REGIONS, 0, 0),
        HEADER.pack(5, 99, 0, 0) + b"xxxxx",
        HTTP_GET,
    ],
    ids=lambda frames: bytes(frames[:40]).hex(),
)
def test_session_frames_of_a_lying_server_are_borne(client: Peer, frames: bytes) -> None:
    with FakePeer(frames=frames, data=respond(response(0, 1, 0))) as fake:
        with contextlib.suppress(*TYPED, NotRegisteredError):  # it may take its region back: that is no lie
            client.run(MOVE, address=fake.address, n=64, there=FAKE_ADDRESS, opcode=1, notify=None)


def test_random_session_frames_of_a_lying_server_are_borne(client: Peer) -> None:
    rng = random.Random(1)
    for _ in range(20):
        kinds = [rng.choice(sorted(SESSION_KINDS)) for _ in range(4)]
        frames = b"".join(mutate(encode(kind, b'{"number": 1, "ids": [1]}'), rng) for kind in kinds)
        with FakePeer(frames=frames) as fake, contextlib.suppress(*TYPED):
            open_at(client, fake)
            client.run("engine.open_segment(address).close()", address=fake.address)


@pytest.mark.parametrize(
    "attached",
    [
        b"",
        b"\0" * 64,
        HTTP_GET,
        MAGIC,
        MAGIC + encode_json(FrameKind.ATTACHED, {}),
        MAGIC + encode_json(FrameKind.ATTACHED, {"number": "7"}),
        MAGIC + encode_json(FrameKind.ATTACHED, {"number": None}),
        MAGIC + encode(FrameKind.ATTACHED, b"[]"),
        MAGIC + encode(FrameKind.ATTACHED, b"[" * 4000),
        MAGIC + HEADER.pack(2**32 - 1, FrameKind.ATTACHED, 0, 0),
        MAGIC + HEADER.pack(64 << 20, FrameKind.REGIONS, 0, 0) + b"x" * 4096,
        MAGIC + encode_json(FrameKind.ERROR, {}),
        MAGIC + encode_json(FrameKind.ERROR, {"code": 5, "message": [], "remedy": {}}),
        MAGIC + encode_json(FrameKind.HELLO, {"number": 7}),
    ],
    ids=lambda attached: bytes(attached[:40]).hex(),
)
def test_an_attach_answer_of_nonsense_is_a_typed_error(client: Peer, attached: bytes) -> None:
    with FakePeer(attached=attached) as fake, pytest.raises(TYPED):
        client.run(MOVE, address=fake.address, n=64, there=FAKE_ADDRESS, opcode=1, notify=None)


def test_an_attach_answer_byte_by_byte_is_bounded_by_the_deadline(client: Peer) -> None:
    whole = MAGIC + encode_json(FrameKind.ATTACHED, {"number": 7, "padding": "x" * 1000})

    def trickle(connection: socket.socket) -> None:
        for at in range(len(whole)):
            connection.sendall(whole[at : at + 1])
            time.sleep(0.1)

    with FakePeer(attached=b"", data=trickle) as fake:
        with pytest.raises(TYPED):  # connect_timeout_s is 1; all of it would take 100 s, more than a test has
            client.run(MOVE, address=fake.address, n=64, there=FAKE_ADDRESS, opcode=1, notify=None)


def refusal(text: bytes) -> bytes:
    return response(1, 1, len(text)) + text


@pytest.mark.parametrize("opcode", [1, 2])
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0" * RESPONSE_NBYTES,
        b"\xff" * RESPONSE_NBYTES,
        HTTP_GET,
        response(0, 2, 0),
        response(0, 1, 2**63),
        response(0, 1, 2**64 - 1),
        response(0, 1, 63),
        response(2, 1, 64),
        response(1, 1, 0),
        response(1, 1, ERROR_NBYTES_MAX + 1),
        response(1, 1, 2**64 - 1),
        refusal(b"{"),
        refusal(b"[" * 30000),
        refusal(b"null"),
        refusal(b'{"code": 1, "message": 2, "remedy": 3}'),
        refusal(b'{"code": "X", "message": "m", "remedy": "r", "rows": [1e999]}'),
        refusal(b'{"code": "X", "message": "m", "remedy": "r", "rows": ["x"]}'),
        refusal(b'{"code": "X", "message": "m", "remedy": "r", "rows": 5}'),
        refusal(b'{"code": "X", "message": "m", "remedy": "r", "rows": [' + b"9" * 20000 + b"]}"),
        refusal(b'{"code": "X", "message": "\\ud800", "remedy": "r"}'),
    ],
    ids=lambda answer: bytes(answer[:64]).hex() if isinstance(answer, bytes) else str(answer),
)
def test_a_response_that_cannot_be_is_a_typed_error(client: Peer, opcode: int, answer: bytes) -> None:
    with FakePeer(data=respond(answer, then=lambda connection: None if answer == b"" else hold(connection))) as fake:
        with pytest.raises(TYPED):
            client.run(MOVE, address=fake.address, n=64, there=FAKE_ADDRESS, opcode=opcode, notify=None)


def test_a_payload_that_is_too_long_does_not_leave_its_row(client: Peer) -> None:
    source = """
segment = engine.open_segment(address)
whole = np.full(3 * n, 7, np.uint8)
region = engine.register(whole[n : 2 * n])
for _ in range(3):
    try:
        engine.read(segment, region.address, there, n, timeout_s=2.0)
    except kvxfer.KvxferError:
        pass
engine.unregister(region)
segment.close()
result = (whole[:n] == 7).all() and (whole[2 * n :] == 7).all()
"""
    with FakePeer(data=respond(response(0, 1, 64) + b"L" * 100000)) as fake:
        assert client.run(source, address=fake.address, n=64, there=FAKE_ADDRESS)


@pytest.mark.slow
@pytest.mark.parametrize("opcode", [1, 2])
def test_a_server_that_trickles_or_never_answers_is_bounded_by_the_deadline(client: Peer, opcode: int) -> None:
    for data in (hold, respond(response(0, 1, 64)[:10]), respond(response(0, 1, 64 if opcode == 2 else 0)[:-1])):
        with FakePeer(data=data) as fake, pytest.raises(TransferError):
            client.run(MOVE, address=fake.address, n=64, there=FAKE_ADDRESS, opcode=opcode, notify=None)


def memfd(nbytes: int, *, sealed: bool = True) -> int:
    fd = os.memfd_create("lie", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def told(offset: Any = 0, nbytes: Any = FAKE_NBYTES) -> bytes:
    return json.dumps({"ok": True, "offset": offset, "nbytes": nbytes}).encode()


SHARES: dict[str, Callable[[], tuple[bytes, list[int]]]] = {
    "not sealed": lambda: (told(), [memfd(FAKE_NBYTES, sealed=False)]),
    "shorter than said": lambda: (told(), [memfd(4096)]),
    "empty": lambda: (told(), [memfd(0)]),
    "offset past the end": lambda: (told(offset=FAKE_NBYTES), [memfd(FAKE_NBYTES)]),
    "huge": lambda: (told(nbytes=2**62), [memfd(FAKE_NBYTES)]),
    "huge offset": lambda: (told(offset=2**70), [memfd(FAKE_NBYTES)]),
    "negative": lambda: (told(offset=-4096), [memfd(FAKE_NBYTES)]),
    "smaller than the region": lambda: (told(nbytes=4096), [memfd(FAKE_NBYTES)]),
    "text": lambda: (told(nbytes="many"), [memfd(FAKE_NBYTES)]),
    "no file": lambda: (told(), []),
    "two files": lambda: (told(), [memfd(FAKE_NBYTES), memfd(FAKE_NBYTES)]),
    "nine files": lambda: (told(), [memfd(FAKE_NBYTES) for _ in range(9)]),
    "a pipe": lambda: (told(), list(os.pipe())[:1]),
    "a device": lambda: (told(), [os.open("/dev/zero", os.O_RDWR)]),
    "a plain file": lambda: (told(), [os.open("/proc/self/exe", os.O_RDONLY)]),
    "read-only": lambda: (told(), [_read_only()]),
    "no json": lambda: (b"{", [memfd(FAKE_NBYTES)]),
    "an array": lambda: (b"[1]", [memfd(FAKE_NBYTES)]),
    "an error": lambda: (b'{"error": [1, 2]}', [memfd(FAKE_NBYTES)]),
    "deep": lambda: (b"[" * 4000, []),
}


def _read_only() -> int:
    fd = memfd(FAKE_NBYTES)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return again


@pytest.mark.parametrize("share", list(SHARES))
def test_shared_memory_that_could_kill_is_not_mapped(client: Peer, share: str) -> None:
    token_answers = (b'{"ok": true}', [])
    with FakeHandover(lambda request: SHARES[share]() if "file" in request else token_answers) as server:
        card = TCP_CARD | {"transports": {"shm": SHM_CARD | {"socket": server.name}}}
        with FakePeer(card=card, transport="shm") as fake:
            before = count(client)
            for opcode in (1, 2):
                with pytest.raises(TYPED):
                    client.run(MOVE, address=fake.address, n=64, there=FAKE_ADDRESS, opcode=opcode, notify=None)
            wait_not_grown(client, before)


def test_honest_shared_memory_of_a_fake_server_works(client: Peer) -> None:
    """The fakes above fail for their lies, not for being fakes."""
    kept = memfd(FAKE_NBYTES)
    with (
        FakeHandover(
            lambda request: (told(), [os.dup(kept)]) if "file" in request else (b'{"ok": true}', [])
        ) as server,
        FakePeer(card=TCP_CARD | {"transports": {"shm": SHM_CARD | {"socket": server.name}}}, transport="shm") as fake,
    ):
        client.run(MOVE, address=fake.address, n=64, there=FAKE_ADDRESS, opcode=1, notify=None)
    os.close(kept)


def test_an_honest_fake_server_works_over_tcp(client: Peer) -> None:
    with FakePeer(data=respond(response(0, 1, 0))) as fake:
        client.run(MOVE, address=fake.address, n=64, there=FAKE_ADDRESS, opcode=1, notify=None)


@FEW
@given(SEEDS)
def test_mutated_answers_of_a_server_are_typed_errors(client: Peer, seed: int) -> None:
    rng = random.Random(seed)
    right = make_machine(Role.RESPONDER).data_to_send()
    with FakePeer(raw=mutate(right, rng)) as fake, pytest.raises(TYPED):
        open_at(client, fake)
    with FakePeer(data=respond(mutate(response(0, 1, 64) + b"x" * 64, rng), then=lambda _: None)) as fake:
        with contextlib.suppress(*TYPED):
            client.run(MOVE, address=fake.address, n=64, there=FAKE_ADDRESS, opcode=2, notify=None)


def test_a_flood_of_strangers_is_a_few_lines_of_log() -> None:
    server = run_script(
        "import kvxfer, sys\n"
        "with kvxfer.TransferEngine(port=0) as engine:\n"
        "    print(engine.address, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    for number in range(600):
        with socket.create_connection(host_port(address)) as stranger:
            if number % 2:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            else:
                stranger.sendall(MAGIC + b"\xff" * 64)
            with contextlib.suppress(OSError):
                stranger.recv(4096)  # it has been looked at
    _, err = server.communicate(timeout=20)

    assert server.returncode == 0
    lines = err.splitlines()
    assert 0 < len(lines) <= 20, f"{len(lines)} lines"
