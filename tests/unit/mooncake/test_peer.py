"""MooncakePeer against serving sides in this process: both versions, refusals, ends of all kinds, lies."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.config import EngineConfig
from kvxfer.errors import (
    ClosedError,
    KvxferError,
    NotRegisteredError,
    PeerClosedError,
    PeerError,
    PeerUnreachableError,
    RemoteAccessError,
    RemoteProtocolError,
    TransferError,
    TransferTimeoutError,
    TransportUnavailableError,
    UsageError,
)
from kvxfer.mooncake.peer import MooncakePeer
from kvxfer.mooncake.wire.descriptor import BufferDescriptor, SegmentDescriptor
from kvxfer.mooncake.wire.tcp_frames import STATUS_OK, STATUS_REJECTED, Header, pack_status
from kvxfer.types import Opcode
from tests.support.fake_mooncake import NBYTES, FakeMooncake, answer_with, hold
from tests.support.fault_peer import receive_exactly
from tests.support.peer import pattern, wait_until

OK = pack_status(STATUS_OK)
REJECTED = pack_status(STATUS_REJECTED)
BOTH = pytest.mark.parametrize("opcode", Opcode, ids=lambda opcode: opcode.name)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@contextlib.contextmanager
def opened(fake: FakeMooncake, **values: Any) -> Iterator[MooncakePeer]:
    peer = MooncakePeer("127.0.0.1:15000", fake.descriptor, config=EngineConfig(**values), refresh=fake.refresh)
    try:
        yield peer
    finally:
        peer.close()


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeMooncake]:
    with FakeMooncake(version=request.param) as server:
        yield server


def move(peer: MooncakePeer, opcode: Opcode, local: Any, remote: Any, nbytes: Any, seconds: float = 10.0) -> None:
    peer.transfer(opcode, local, remote, nbytes, deadline=soon(seconds))


# What works.


def test_rows_arrive_where_they_belong(fake: FakeMooncake) -> None:
    here, back = pattern(NBYTES, 1), np.zeros(NBYTES, np.uint8)
    blocks = np.random.default_rng(2).permutation(256) * 4096
    with opened(fake) as peer:
        move(peer, Opcode.WRITE, here.ctypes.data + blocks, fake.address + blocks[::-1].copy(), 4096)
        move(peer, Opcode.READ, back.ctypes.data + blocks, fake.address + blocks[::-1].copy(), 4096)

    assert (back == here).all()
    assert {header.has_status for header in fake.headers} == {fake.descriptor.tcp_proto_version == 2}


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 3000) | st.sampled_from([1, 7, 8, 24, 65536]), min_size=1, max_size=40),
    streams=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_rows_of_any_sizes_on_any_number_of_connections(
    fake: FakeMooncake, sizes: list[int], streams: int, seed: int
) -> None:
    sizes = sizes[: max(1, int(np.searchsorted(np.cumsum(sizes), NBYTES)))]
    nbytes = np.array(sizes)
    starts = np.concatenate(([0], np.cumsum(nbytes)[:-1]))
    order = np.random.default_rng(seed).permutation(len(sizes))
    here, back = pattern(NBYTES, seed), np.zeros(NBYTES, np.uint8)
    fake.memory[:] = 0
    with opened(fake, tcp_streams_max=streams) as peer, lanes_of(1024):
        move(peer, Opcode.WRITE, here.ctypes.data + starts[order], fake.address + starts[order], nbytes[order])
        move(peer, Opcode.READ, back.ctypes.data + starts[order], fake.address + starts[order], nbytes[order])

    total = int(nbytes.sum())
    assert (fake.memory[:total] == here[:total]).all()
    assert not fake.memory[total:].any()
    assert (back[:total] == here[:total]).all()
    assert not back[total:].any()


@contextlib.contextmanager
def lanes_of(nbytes: int) -> Iterator[None]:
    """Let a connection be worth making from fewer bytes on."""
    from kvxfer.mooncake import peer as mooncake_peer

    before, mooncake_peer.LANE_NBYTES = mooncake_peer.LANE_NBYTES, nbytes
    try:
        yield
    finally:
        mooncake_peer.LANE_NBYTES = before


def test_adjacent_rows_are_one_request(fake: FakeMooncake) -> None:
    here = pattern(4096, 3)
    with opened(fake) as peer:
        move(peer, Opcode.WRITE, here.ctypes.data + np.arange(64) * 64, fake.address + np.arange(64) * 64, 64)

    assert fake.headers[0].nbytes == 4096
    assert (fake.memory[:4096] == here).all()


def test_many_threads_share_few_connections(fake: FakeMooncake) -> None:
    here = pattern(16 * 4096, 4)
    errors: list[BaseException] = []

    def run(at: int) -> None:
        try:
            for _ in range(20):
                move(peer, Opcode.WRITE, here.ctypes.data + at * 4096, fake.address + at * 4096, 4096)
        except BaseException as exc:
            errors.append(exc)

    with opened(fake, tcp_streams_max=3) as peer:
        threads = [threading.Thread(target=run, args=(at,)) for at in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert errors == []
    assert (fake.memory[: len(here)] == here).all()
    assert fake.connection_count <= 3


# What is refused.


@BOTH
def test_a_row_outside_is_named_before_anything_is_sent(fake: FakeMooncake, opcode: Opcode) -> None:
    here = np.zeros(64, np.uint8)
    with opened(fake) as peer, pytest.raises(NotRegisteredError, match="row 1") as caught:
        move(peer, opcode, [here.ctypes.data] * 2, [fake.address, fake.address + NBYTES - 8], 16)

    assert caught.value.rows == (1,)
    assert fake.headers == []
    assert fake.refresh_count == 1


@pytest.mark.parametrize(
    "columns", [([], [], []), ([1.5], [1], [1]), ([1, 2], [1], [1]), ([1], [1], [0]), ([1], [1], [-1])]
)
def test_columns_that_are_none_are_a_usage_error(fake: FakeMooncake, columns: tuple[Any, Any, Any]) -> None:
    with opened(fake) as peer, pytest.raises(UsageError):
        move(peer, Opcode.WRITE, *columns)


@BOTH
@pytest.mark.parametrize("count", [1, 16])
def test_a_row_that_the_peer_refuses_is_named(opcode: Opcode, count: int) -> None:
    """16 rows: the refusing side closes with unread requests, and that reset must not hide the refusal. Many more would
    fill its congestion window, and what it had not sent is lost: the next test."""
    rows = np.arange(count) * 2048
    here = np.zeros(2048 * count, np.uint8)
    with FakeMooncake() as fake:
        bad = fake.address + int(rows[count // 2])
        fake._answer = lambda connection, header: (
            fake._serve(connection, header) if header.address != bad else connection.sendall(REJECTED)  # type: ignore[func-returns-value]
        )
        with opened(fake, tcp_streams_max=1) as peer, pytest.raises(RemoteAccessError) as caught:
            move(peer, opcode, here.ctypes.data + rows, fake.address + rows, 1024)

    assert caught.value.rows == (count // 2,)
    assert caught.value.nbytes_done == count // 2 * 1024
    assert fake.refresh_count == 1


def test_a_refusal_that_is_lost_with_its_connection_is_found_in_the_descriptor() -> None:
    here = np.zeros(128, np.uint8)
    with FakeMooncake(answer=lambda connection, header: False) as fake, opened(fake) as peer:
        rest = BufferDescriptor("x", fake.address, 64)
        fake.descriptor = dataclasses.replace(fake.descriptor, buffers=(rest,))
        with pytest.raises(NotRegisteredError, match="row 0"):
            move(peer, Opcode.WRITE, here.ctypes.data, fake.address, 128)


def test_a_descriptor_that_has_changed_is_asked_for_once_and_used() -> None:
    here = pattern(64, 5)
    with FakeMooncake() as old, FakeMooncake() as new:
        old.refresh = new.refresh  # type: ignore[method-assign]
        with opened(old) as peer:
            move(peer, Opcode.WRITE, here.ctypes.data, new.address + 128, 64)  # not in the old descriptor

    assert (new.memory[128:192] == here).all()
    assert (old.headers, new.refresh_count) == ([], 1)


def test_a_data_port_that_has_moved_is_found(fake: FakeMooncake) -> None:
    here = pattern(64, 6)
    with opened(fake) as peer:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            gone = nobody.getsockname()[1]
        stale = dataclasses.replace(fake.descriptor, tcp_data_port=gone)
        peer = MooncakePeer("x:1", stale, config=EngineConfig(), refresh=fake.refresh)
        move(peer, Opcode.WRITE, here.ctypes.data, fake.address, 64)
        peer.close()

    assert (fake.memory[:64] == here).all()


def test_nobody_there_is_told_at_once(fake: FakeMooncake) -> None:
    here = np.zeros(64, np.uint8)
    with opened(fake) as peer:
        fake.close()
        with pytest.raises(PeerUnreachableError, match="refused"):
            move(peer, Opcode.WRITE, here.ctypes.data, fake.address, 64, seconds=600.0)


def test_memory_that_is_not_mapped_here_is_a_typed_error(fake: FakeMooncake) -> None:
    with opened(fake) as peer:
        for opcode in Opcode:
            with pytest.raises(TransferError, match="not mapped"):
                move(peer, opcode, 4096, fake.address, 64)
        here = pattern(64, 7)
        move(peer, Opcode.WRITE, here.ctypes.data, fake.address, 64)  # the next one works

    assert (fake.memory[:64] == here).all()


def test_a_process_without_tcp_says_so() -> None:
    descriptor = SegmentDescriptor("10.0.0.1:15000", protocols=("rdma",))
    with pytest.raises(TransportUnavailableError, match="rdma only"):
        MooncakePeer("10.0.0.1:15000", descriptor, config=EngineConfig(), refresh=lambda: descriptor)


def test_buffers_that_overlap_are_a_typed_error() -> None:
    buffers = (BufferDescriptor("x", 4096, 64), BufferDescriptor("x", 4100, 64))
    descriptor = SegmentDescriptor("10.0.0.1:15000", buffers=buffers, tcp_data_port=1)
    with pytest.raises(RemoteProtocolError, match="overlap"):
        MooncakePeer("x", descriptor, config=EngineConfig(), refresh=lambda: descriptor)


# Ends of all kinds.


@pytest.mark.parametrize("reset", [False, True])
def test_kept_connections_that_the_peer_closed_are_replaced(fake: FakeMooncake, reset: bool) -> None:
    here = pattern(64, 8)
    with opened(fake) as peer:
        move(peer, Opcode.WRITE, here.ctypes.data, fake.address, 64)
        fake.drop_connections(reset=reset)
        move(peer, Opcode.WRITE, here.ctypes.data, fake.address + 64, 64)

    assert (fake.memory[64:128] == here).all()
    assert fake.connection_count == 2


def test_a_kept_connection_that_ends_under_the_first_request_is_replaced() -> None:
    here = pattern(64, 9)
    with FakeMooncake() as fake, opened(fake) as peer:
        move(peer, Opcode.WRITE, here.ctypes.data, fake.address, 64)

        def once(connection: socket.socket, header: Header) -> bool:
            del connection, header
            fake._answer = fake._serve
            return False

        fake._answer = once
        # The connection's thread calls what it finds at the next request.
        move(peer, Opcode.WRITE, here.ctypes.data, fake.address + 64, 64)

    assert (fake.memory[64:128] == here).all()
    assert fake.connection_count == 2


@BOTH
def test_a_connection_that_ends_in_mid_batch_is_a_failure_and_the_next_batch_works(opcode: Opcode) -> None:
    rows = np.arange(8) * 8192
    here = pattern(65536, 10)
    with FakeMooncake() as fake:
        fake._answer = lambda connection, header: (
            fake._serve(connection, header) if header.address < fake.address + 4 * 8192 else False
        )
        with opened(fake) as peer:
            with pytest.raises(PeerClosedError) as caught:
                move(peer, opcode, here.ctypes.data + rows, fake.address + rows, 4096)
            fake._answer = fake._serve
            move(peer, opcode, here.ctypes.data + rows, fake.address + rows, 4096)

    assert caught.value.nbytes_done == 4 * 4096  # type: ignore[attr-defined]


@BOTH
def test_a_silent_peer_is_bounded_by_the_deadline(fake: FakeMooncake, opcode: Opcode) -> None:
    here = pattern(NBYTES, 11)
    fake._answer = hold
    with opened(fake) as peer:
        with pytest.raises(TransferTimeoutError):
            move(peer, opcode, here.ctypes.data, fake.address, NBYTES, seconds=0.2)
        assert peer._count == 0
        fake._answer = fake._serve
        move(peer, opcode, here.ctypes.data, fake.address, NBYTES)


def test_nothing_is_written_here_after_a_failed_read() -> None:
    gate = threading.Event()
    here = np.zeros(4096, np.uint8)

    def late(connection: socket.socket, header: Header) -> bool:
        connection.sendall(OK)
        gate.wait(5.0)
        connection.sendall(b"L" * header.nbytes)
        return False

    with FakeMooncake(answer=late) as fake, opened(fake) as peer:
        with pytest.raises(TransferTimeoutError):
            move(peer, Opcode.READ, here.ctypes.data, fake.address, 4096, seconds=0.1)
        gate.set()
        time.sleep(0.05)

    assert not here.any()


def test_waiting_for_a_connection_is_bounded_by_the_deadline(fake: FakeMooncake) -> None:
    here = np.zeros(64, np.uint8)
    fake._answer = hold
    with opened(fake, tcp_streams_max=1) as peer:

        def run() -> None:
            with contextlib.suppress(KvxferError):
                move(peer, Opcode.WRITE, here.ctypes.data, fake.address, 64)

        other = threading.Thread(target=run)
        other.start()
        wait_until(lambda: peer._moving)
        with pytest.raises(TransferTimeoutError, match="no connection became free"):
            move(peer, Opcode.WRITE, here.ctypes.data, fake.address, 64, seconds=0.1)
        peer.close()
        other.join()


def test_close_ends_running_transfers(fake: FakeMooncake) -> None:
    here = np.zeros(64, np.uint8)
    fake._answer = hold
    found: list[BaseException] = []

    def run() -> None:
        try:
            move(peer, Opcode.READ, here.ctypes.data, fake.address, 64)
        except BaseException as exc:
            found.append(exc)

    with opened(fake) as peer:
        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: fake.headers)
        peer.close()
        thread.join(2.0)
        with pytest.raises(ClosedError):
            move(peer, Opcode.READ, here.ctypes.data, fake.address, 64)

    assert [type(one) for one in found] == [ClosedError]
    assert peer._count == 0


def test_ctrl_c_ends_a_transfer_soon(fake: FakeMooncake) -> None:
    here = np.zeros(64, np.uint8)
    fake._answer = hold
    with opened(fake) as peer:
        timer = threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            move(peer, Opcode.WRITE, here.ctypes.data, fake.address, 64, seconds=600.0)

        assert (peer._count, peer._moving) == (0, set())


def test_idle_connections_are_closed_after_their_time(fake: FakeMooncake) -> None:
    here = np.zeros(64, np.uint8)
    with opened(fake, tcp_idle_timeout_s=5.0) as peer:
        move(peer, Opcode.WRITE, here.ctypes.data, fake.address, 64)
        peer.reap(time.monotonic())
        assert peer._count == 1
        peer.reap(time.monotonic() + 6.0)
        assert peer._count == 0


# Lies.


@BOTH
@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(8),
        b"\xff" * 8,
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        pack_status(STATUS_OK | 2),
        pack_status(STATUS_OK | 0xFFFFFFFF),
        OK[:7],
        REJECTED + b"x" * 100_000,
    ],
    ids=lambda data: bytes(data[:8]).hex(),
)
def test_an_answer_that_cannot_be_is_a_typed_error(opcode: Opcode, data: bytes) -> None:
    here = np.zeros(64, np.uint8)
    with FakeMooncake(answer=answer_with(data)) as fake, opened(fake) as peer:
        with pytest.raises((PeerError, TransferError, RemoteProtocolError)):
            move(peer, opcode, here.ctypes.data, fake.address, 64, seconds=2.0)
        assert peer._count == 0


def test_too_much_payload_does_not_leave_its_row() -> None:
    whole = np.full(300, 7, np.uint8)
    with FakeMooncake(answer=answer_with(OK + b"L" * 100_000, goes_on=True)) as fake, opened(fake) as peer:
        for _ in range(3):
            with contextlib.suppress(KvxferError):
                move(peer, Opcode.READ, whole.ctypes.data + 100, fake.address, 100, seconds=1.0)

    assert (whole[:100] == 7).all()
    assert (whole[200:] == 7).all()


def test_a_version_1_server_behind_a_version_2_descriptor_is_told_by_its_payload() -> None:
    def old(connection: socket.socket, header: Header) -> bool:
        if header.opcode is Opcode.WRITE:
            receive_exactly(connection, header.nbytes)
        connection.sendall(b"\x01" * header.nbytes)  # takes every unknown opcode for a READ
        return True

    here = np.zeros(64, np.uint8)
    with FakeMooncake(answer=old) as fake, opened(fake) as peer:
        for opcode in Opcode:
            with pytest.raises(RemoteProtocolError, match="no status"):
                move(peer, opcode, here.ctypes.data, fake.address, 64)
