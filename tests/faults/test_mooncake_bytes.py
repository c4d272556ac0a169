"""What the ports for Mooncake must bear: bytes that no honest process sends, slow and silent ones, many, dying ones.

Canaries around the region, in memory without rights and in memory that was never registered show any byte that was
written without leave. The real Mooncake is in tests/interop.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import Rights, TransferEngine
from kvxfer.errors import PeerClosedError, RegionBusyError, RemoteProtocolError, UsageError
from kvxfer.mooncake.calls import ask, ask_descriptor, send_notify, send_probe
from kvxfer.mooncake.service import CONNECTING_MAX, MooncakeService
from kvxfer.mooncake.wire.descriptor import SegmentDescriptor
from kvxfer.mooncake.wire.frames import MessageKind, encode
from kvxfer.mooncake.wire.tcp_frames import STATUS_OK, STATUS_REJECTED, Header, pack_status
from kvxfer.types import Opcode
from tests.support.fault_peer import (
    RESET,
    host_port,
    is_closed_by_peer,
    memory_of,
    receive_exactly,
    receive_rest,
    resume,
    stop,
)
from tests.support.peer import Peer, pattern, wait_until

NBYTES = 1 << 20
OK, REJECTED = pack_status(STATUS_OK), pack_status(STATUS_REJECTED)
OWN = SegmentDescriptor("127.0.0.1:1")
HTTP_GET = b"GET /metadata HTTP/1.1\r\nHost: x\r\n\r\n"
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64))


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


class Served:
    """An engine that Mooncake processes may use, a region of it, and canaries."""

    def __init__(self, **settings: Any) -> None:
        self.engine = TransferEngine(**{"handshake_timeout_s": 0.3, "transfer_timeout_s": 0.2, **settings})
        self.service = MooncakeService(self.engine)
        self.whole = np.full(3 * NBYTES, 7, np.uint8)
        self.memory = self.whole[NBYTES : 2 * NBYTES]
        self.memory[:] = 0
        self.address = int(self.memory.ctypes.data)
        self.region = self.engine.register(self.memory)
        self.shown = np.full(4096, 7, np.uint8)
        self.engine.register(self.shown, rights=Rights.REMOTE_READ)
        self.host, self.port = host_port(self.engine.address)

    def control(self) -> socket.socket:
        return socket.create_connection((self.host, self.port))

    def data(self) -> socket.socket:
        return socket.create_connection((self.host, self.service.tcp_data_port))

    def check(self) -> None:
        """Canaries, and that an honest client is served."""
        assert (self.whole[:NBYTES] == 7).all()
        assert (self.whole[2 * NBYTES :] == 7).all()
        assert (self.shown == 7).all()
        send_probe(self.host, self.port, deadline=soon())
        row = pattern(100, 1).tobytes()
        with self.data() as connection:
            connection.sendall(Header(Opcode.WRITE, self.address, 100, True).pack() + row)
            assert receive_exactly(connection, 8) == OK
            connection.sendall(Header(Opcode.READ, self.address, 100, True).pack())
            assert receive_exactly(connection, 108) == OK + row


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.check()
    found.engine.close()


# The control port.


@pytest.mark.parametrize(
    "data",
    [
        HTTP_GET,
        TLS_HELLO,
        bytes(64),
        b"\xff" * 64,
        (128 << 20).to_bytes(8, "little") + b"\4",
        ((128 << 20) + 1).to_bytes(8, "little") + b"\1",
        ((9 << 20) + 1).to_bytes(8, "little") + b"\2",
        (3).to_bytes(8, "little") + b"\2{}",
        (2).to_bytes(8, "little") + b"\2{",
        (1).to_bytes(8, "little") + b"\2",
        (100_001).to_bytes(8, "little") + b"\2" + b"[" * 100_000,
        encode(MessageKind.NOTIFY, {"name": 5, "notify_msg": []}),
        encode(MessageKind.NOTIFY, {"name": "x" * 5000, "notify_msg": ""}),
        (1).to_bytes(8, "little") + b"\0",
        (5).to_bytes(8, "little") + b"{nope",
    ],
    ids=lambda data: bytes(data[:12]).hex(),
)
def test_nonsense_on_the_control_port_ends_its_connection_only(served: Served, data: bytes) -> None:
    with served.control() as connection:
        connection.sendall(data)
        assert is_closed_by_peer(connection, 2.0)

    assert served.service.notifies() == []


def test_random_bytes_on_the_control_port(served: Served) -> None:
    rng = random.Random(1)
    for _ in range(50):
        with served.control() as connection, contextlib.suppress(OSError):
            connection.sendall(rng.randbytes(rng.choice((1, 8, 9, 17, 1000))))
            connection.shutdown(socket.SHUT_WR)
            receive_rest(connection)


@pytest.mark.slow
def test_half_a_message_is_dropped_at_the_deadline(served: Served) -> None:
    whole = encode(MessageKind.PROBE, {})
    connections = []
    for count in range(len(whole)):
        connection = served.control()
        connection.sendall(whole[:count])
        connections.append(connection)
    send_probe(served.host, served.port, deadline=soon(0.25))  # nobody waits behind them

    for connection in connections:
        assert is_closed_by_peer(connection, 2.0)
        connection.close()
    wait_until(lambda: not served.service._exchanges)


def test_a_message_byte_by_byte_is_answered(served: Served) -> None:
    with served.control() as connection:
        for byte in encode(MessageKind.PROBE, {}):
            connection.sendall(bytes([byte]))
            time.sleep(0.001)
        assert receive_rest(connection) == encode(MessageKind.PROBE, {"status": "success"})


@pytest.mark.slow
def test_a_client_that_does_not_read_its_answer_is_dropped(served: Served) -> None:
    with served.control() as connection:
        connection.sendall(encode(MessageKind.PROBE, {}))
        wait_until(lambda: served.service._exchanges)
        wait_until(lambda: not served.service._exchanges, 2.0)


def test_a_huge_descriptor_is_read_past_without_being_kept(served: Served) -> None:
    nbytes = 32 << 20
    with served.control() as connection:
        connection.sendall((nbytes + 1).to_bytes(8, "little") + b"\1")
        chunk = bytes(1 << 20)
        for _ in range(nbytes >> 20):
            connection.sendall(chunk)
            assert all(one._decoder.kept_nbytes < 1 << 17 for one in served.service._exchanges)
        assert receive_exactly(connection, 9)[8:] == b"\1"


def test_notifications_are_kept_up_to_the_limit_then_refused() -> None:
    served = Served(notifications_pending_max=2)
    for at in range(2):
        send_notify(served.host, served.port, "n", str(at), deadline=soon())
    with pytest.raises(PeerClosedError):
        send_notify(served.host, served.port, "n", "2", deadline=soon())

    assert served.service.notifies() == [("n", "0"), ("n", "1")]
    send_notify(served.host, served.port, "n", "3", deadline=soon())
    assert served.service.notifies() == [("n", "3")]
    served.check()
    served.engine.close()


def test_an_rdma_connection_is_refused_with_the_reason(served: Served) -> None:
    asked = {"local_nic_path": "a:1@mlx5_0", "peer_nic_path": "b:1@mlx5_1", "qp_num": [1, 2], "reply_msg": ""}

    answer = ask(served.host, served.port, MessageKind.CONNECTION, asked, deadline=soon())

    assert "takes no rdma connection" in answer["reply_msg"]
    assert (answer["local_nic_path"], answer["peer_nic_path"]) == ("b:1@mlx5_1", "a:1@mlx5_0")


def test_connection_messages_that_are_no_json_take_no_place_of_good_ones() -> None:
    with TransferEngine() as engine:
        MooncakeService(engine, connect=lambda asked: {"reply_msg": "made"})
        host, port = host_port(engine.address)
        body = bytes([MessageKind.CONNECTION]) + b"[1]"
        for _ in range(CONNECTING_MAX + 1):
            with socket.create_connection((host, port), 5.0) as connection:
                connection.sendall(len(body).to_bytes(8, "little") + body)
                assert is_closed_by_peer(connection)

        assert ask(host, port, MessageKind.CONNECTION, {}, deadline=soon()) == {"reply_msg": "made"}


def test_an_old_message_has_an_old_answer(served: Served) -> None:
    with served.control() as connection:
        connection.sendall(encode(MessageKind.CONNECTION, {"reply_msg": ""}, is_old=True))
        answer = receive_rest(connection)

    assert int.from_bytes(answer[:8], "little") == len(answer) - 8
    assert "rdma" in json.loads(answer[8:])["reply_msg"]


def test_connections_beyond_the_limit_are_refused() -> None:
    served = Served(connections_max=3, handshake_timeout_s=5.0)
    held = [served.control() for _ in range(3)]
    for connection in held:
        connection.sendall(encode(MessageKind.PROBE, {})[:9])
    wait_until(lambda: len(served.service._exchanges) == 3)
    with pytest.raises(PeerClosedError):
        send_probe(served.host, served.port, deadline=soon())
    for connection in held:
        connection.close()
    wait_until(lambda: not served.service._exchanges)
    served.check()
    served.engine.close()


def test_an_engine_without_the_service_takes_mooncake_for_a_stranger() -> None:
    with TransferEngine() as engine:
        host, port = host_port(engine.address)
        with pytest.raises(RemoteProtocolError):
            send_probe(host, port, deadline=soon())


def test_a_service_that_was_closed_answers_no_more_and_the_engine_goes_on(served: Served) -> None:
    with served.data() as connection:
        connection.sendall(Header(Opcode.WRITE, served.address, 100, True).pack())
        wait_until(lambda: served.region.remote_use_count)
        served.service.close()
        served.service.close()
        assert is_closed_by_peer(connection)
    with pytest.raises(ConnectionRefusedError):
        served.data()
    assert served.region.remote_use_count == 0
    served.service = MooncakeService(served.engine)


def test_a_data_connection_that_gets_no_thread_does_not_close_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        with served.data() as connection:
            assert is_closed_by_peer(connection)

    served.check()
    served.engine.close()


def refuse_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_engine_has_one_service(served: Served) -> None:
    with pytest.raises(UsageError, match="already"):
        MooncakeService(served.engine)


def test_a_data_port_is_taken_from_those_given() -> None:
    with TransferEngine() as engine, socket.create_server(("127.0.0.1", 0)) as taken:
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports = taken.getsockname()[1], free.getsockname()[1]
        service = MooncakeService(engine, data_ports=ports)
        assert service.tcp_data_port == ports[1]
        assert ask_descriptor(*host_port(engine.address), OWN, deadline=soon()).tcp_data_port == ports[1]


# The data port.


def header(nbytes: int, address: int, opcode: int) -> bytes:
    return struct.pack("<QQB7x", nbytes % 2**64, address % 2**64, opcode)


@pytest.mark.parametrize("opcode", [0, 1, 0x80, 0x81])
@pytest.mark.parametrize(
    ("nbytes", "offset"),
    [
        (0, 0),
        (2**63, 0),
        (2**64 - 1, 0),
        (-16, 32),
        (NBYTES + 1, 0),
        (16, NBYTES - 8),
        (16, -8),
        (16, 2**63),
        (1 << 46, 0),
    ],
)
def test_a_request_outside_is_refused(served: Served, opcode: int, nbytes: int, offset: int) -> None:
    with served.data() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(header(nbytes, served.address + offset, opcode) + b"E" * 4096)
        assert receive_rest(connection, 2.0) in (b"", REJECTED)

    assert not served.memory.any()


@pytest.mark.parametrize("opcode", [2, 3, 0x7F, 0x82, 0xFF])
def test_an_opcode_that_is_not_known_ends_the_connection(served: Served, opcode: int) -> None:
    with served.data() as connection:
        connection.sendall(header(16, served.address, opcode) + b"E" * 16)
        assert receive_rest(connection, 2.0) == b""

    assert not served.memory.any()


@pytest.mark.parametrize(
    "data", [HTTP_GET, TLS_HELLO, encode(MessageKind.PROBE, {}) + bytes(24)], ids=["http", "tls", "probe"]
)
def test_other_protocols_on_the_data_port_end_their_connection(served: Served, data: bytes) -> None:
    with served.data() as connection:
        connection.sendall(data)
        assert is_closed_by_peer(connection, 2.0)


def test_random_requests(served: Served) -> None:
    rng = random.Random(2)
    for _ in range(50):
        with served.data() as connection, contextlib.suppress(OSError):
            connection.sendall(rng.randbytes(rng.choice((1, 23, 24, 25, 1024))))
            connection.shutdown(socket.SHUT_WR)
            receive_rest(connection)
    assert not served.memory.any()


def test_memory_without_the_right_is_refused(served: Served) -> None:
    address = int(served.shown.ctypes.data)
    with served.data() as connection:
        connection.sendall(Header(Opcode.READ, address, 4096, True).pack())
        assert receive_exactly(connection, 8 + 4096) == OK + b"\7" * 4096
        connection.sendall(Header(Opcode.WRITE, address, 4096, True).pack() + b"E" * 4096)
        assert receive_rest(connection, 2.0) == REJECTED


@pytest.mark.parametrize("has_status", [True, False], ids=["v2", "v1"])
def test_requests_however_cut(served: Served, has_status: bool) -> None:
    row = pattern(50, 3).tobytes()
    stream = Header(Opcode.WRITE, served.address, 50, has_status).pack() + row
    stream += Header(Opcode.READ, served.address, 50, has_status).pack()
    status = OK if has_status else b""
    for cut in range(1, len(stream)):
        with served.data() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(stream[:cut])
            connection.sendall(stream[cut:])
            assert receive_exactly(connection, len(status) * 2 + 50) == status * 2 + row


def test_many_requests_at_once_are_answered_in_order(served: Served) -> None:
    row = pattern(64, 4).tobytes()
    count = 2000
    with served.data() as connection:
        connection.sendall((Header(Opcode.WRITE, served.address, 64, True).pack() + row) * count)
        assert receive_exactly(connection, 8 * count) == OK * count


def test_a_refused_write_can_read_why_although_it_goes_on_to_send(served: Served) -> None:
    with served.data() as connection:
        connection.sendall(Header(Opcode.WRITE, served.address - 8, NBYTES, True).pack())
        connection.sendall(bytes(NBYTES))
        assert receive_rest(connection, 5.0) == REJECTED


@pytest.mark.slow
@pytest.mark.parametrize("opcode", Opcode, ids=lambda opcode: opcode.name)
def test_a_client_that_stops_in_mid_row_is_dropped_and_the_region_is_free(opcode: Opcode) -> None:
    served = Served(tcp_socket_buffer_nbytes=16384)
    with served.data() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        connection.sendall(Header(opcode, served.address, NBYTES, True).pack() + b"x" * 100 * (opcode == Opcode.WRITE))
        wait_until(lambda: served.region.remote_use_count)
        served.engine.unregister(served.region)  # waits for it
        before = served.memory.copy()
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"E" * 4096)
        assert (served.memory == before).all()
    served.engine.close()


def test_unregister_says_who_holds_the_region() -> None:
    served = Served(transfer_timeout_s=30.0, unregister_timeout_s=0.2)
    with served.data() as connection:
        connection.sendall(Header(Opcode.WRITE, served.address, NBYTES, True).pack())
        wait_until(lambda: served.region.remote_use_count)
        with pytest.raises(RegionBusyError, match="over tcp"):
            served.engine.unregister(served.region)
    served.engine.unregister(served.region)
    served.engine.close()


@pytest.mark.slow
def test_a_silent_connection_between_two_requests_is_kept(served: Served) -> None:
    with served.data() as connection:
        for _ in range(2):
            connection.sendall(Header(Opcode.WRITE, served.address, 8, True).pack() + b"12345678")
            assert receive_exactly(connection, 8) == OK
            time.sleep(0.7)  # more than three times what a request may be silent for


@pytest.mark.slow
@pytest.mark.timeout(15)  # if each was waited for until it is dropped, it would take longer
def test_silent_and_half_open_connections_hold_up_nobody(served: Served) -> None:
    held = [served.data() for _ in range(200)]
    for at, connection in enumerate(held):
        connection.sendall(Header(Opcode.WRITE, served.address, 4096, True).pack()[: at % 24])
    served.check()
    wait_until(lambda: served.service._data.connection_count <= 200 // 24 + 1)  # the half headers are dropped
    for connection in held:
        connection.close()
    wait_until(lambda: served.service._data.connection_count == 0)


def test_data_connections_beyond_the_limit_are_closed() -> None:
    served = Served(tcp_connections_max=2)
    held = [served.data() for _ in range(2)]
    wait_until(lambda: served.service._data.connection_count == 2)
    with served.data() as connection:
        assert is_closed_by_peer(connection)
    held.pop().close()
    wait_until(lambda: served.service._data.connection_count == 1)
    served.check()
    held.pop().close()
    served.engine.close()


@pytest.mark.slow
def test_a_reset_is_seen_before_what_came_with_it() -> None:
    """The process is stopped while a row comes in; its sender gives up; nothing of it may be applied afterwards."""
    with Peer() as peer:
        peer.run("from kvxfer.mooncake.service import MooncakeService; engine.mooncake = MooncakeService(engine)")
        region = peer.register(NBYTES)
        port = peer.run("result = engine.mooncake.tcp_data_port")
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(Header(Opcode.WRITE, region.address, NBYTES, True).pack() + b"1" * 1000)
        wait_until(lambda: region.bytes(999, 1) == b"1")
        stop(peer.pid)
        connection.sendall(b"2" * 20_000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()
        before = memory_of(peer.pid, region.address, NBYTES)
        resume(peer.pid)
        wait_until(lambda: peer.run("result = engine.mooncake._data.connection_count == 0"))

        assert region.bytes() == before
        assert b"2" not in before


@pytest.mark.slow
def test_a_forked_child_leaves_the_ports_to_its_parent(served: Served) -> None:
    with served.data() as connection:
        connection.sendall(Header(Opcode.WRITE, served.address, 8, True).pack() + b"12345678")
        assert receive_exactly(connection, 8) == OK
        with Peer() as peer:  # not this process: it has threads that a fork must not copy
            peer.run("from kvxfer.mooncake.service import MooncakeService; engine.mooncake = MooncakeService(engine)")
            port = peer.run("result = engine.mooncake.tcp_data_port")
            pid = peer.run("pid = os.fork()\nif not pid: time.sleep(30)\nresult = pid")
            peer.kill()

            def is_refused() -> bool:
                with socket.socket() as attempt:
                    return attempt.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED

            wait_until(is_refused)  # the child may not have come so far yet
            os.kill(pid, 9)
