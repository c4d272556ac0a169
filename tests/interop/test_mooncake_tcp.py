"""kvxfer and the real Mooncake on one host, over tcp: who starts x write, read, 2,000 rows, notify, probe; and ends."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import Rights, TransferEngine
from kvxfer.config import EngineConfig
from kvxfer.errors import (
    KvxferError,
    NotRegisteredError,
    PeerError,
    PeerUnreachableError,
    RemoteAccessError,
    TransferTimeoutError,
)
from kvxfer.mooncake.peer import MooncakePeer, ask_descriptor, send_notify, send_probe
from kvxfer.mooncake.service import MooncakeService
from kvxfer.mooncake.wire.descriptor import SegmentDescriptor
from kvxfer.types import Opcode
from tests.interop.environments import mooncake_python
from tests.interop.real_mooncake import Mooncake, digest, pattern
from tests.support.peer import Peer, wait_until

pytestmark = [pytest.mark.interop, pytest.mark.timeout(120)]

NBYTES = 8 << 20
OWN = SegmentDescriptor("127.0.0.1:1")


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(scope="module")
def mooncake() -> Iterator[Mooncake]:
    with Mooncake(mooncake_python(), nbytes=NBYTES) as process:
        yield process


def make_mooncake(**environment: str) -> Mooncake:
    return Mooncake(mooncake_python(), nbytes=NBYTES, **environment)


def shuffled(count: int, nbytes: int, seed: int = 1) -> tuple[Any, Any]:
    """Offsets of so many rows on both sides, in no order."""
    rng = np.random.default_rng(seed)
    return rng.permutation(count) * nbytes, rng.permutation(count) * nbytes


# kvxfer initiates.


def refresher(there: Mooncake) -> Callable[[], SegmentDescriptor]:
    return lambda: ask_descriptor("127.0.0.1", there.port, OWN, deadline=soon(2.0))


def open_peer(there: Mooncake, *, version: int = 2, **settings: Any) -> MooncakePeer:
    refresh = refresher(there)
    descriptor = dataclasses.replace(refresh(), tcp_proto_version=version)
    return MooncakePeer(there.name, descriptor, config=EngineConfig(**settings), refresh=refresh)


@pytest.fixture(params=[2, 1], ids=["v2", "v1"])
def peer(mooncake: Mooncake, request: pytest.FixtureRequest) -> Iterator[MooncakePeer]:
    """Mooncake's serving side answers both versions."""
    opened = open_peer(mooncake, version=request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize(("count", "nbytes"), [(1, NBYTES), (1, 1), (2000, 4096), (100_000, 80), (7, 1 << 20)])
def test_kvxfer_writes_and_reads(peer: MooncakePeer, mooncake: Mooncake, count: int, nbytes: int) -> None:
    here, back = pattern(count * nbytes, count), np.zeros(count * nbytes, np.uint8)
    local, remote = shuffled(count, nbytes)
    expected = np.empty((count, nbytes), np.uint8)
    expected[remote // nbytes] = here.reshape(count, nbytes)[local // nbytes]

    peer.transfer(Opcode.WRITE, here.ctypes.data + local, mooncake.address + remote, nbytes, deadline=soon())
    assert mooncake.digest(count * nbytes) == digest(expected)

    peer.transfer(Opcode.READ, back.ctypes.data + local, mooncake.address + remote, nbytes, deadline=soon())
    assert (back == here).all()


@pytest.mark.parametrize("streams", [1, 4, 16])
def test_lanes(mooncake: Mooncake, streams: int) -> None:
    here = pattern(NBYTES, streams)
    local, _ = shuffled(512, NBYTES // 512)
    opened = open_peer(mooncake, tcp_streams_max=streams)
    for _ in range(3):
        opened.transfer(
            Opcode.WRITE, here.ctypes.data + local, mooncake.address + local, NBYTES // 512, deadline=soon()
        )
    opened.close()

    assert mooncake.digest() == digest(here)


def test_kvxfer_notifies_and_probes(mooncake: Mooncake) -> None:
    send_probe("127.0.0.1", mooncake.port, deadline=soon(2.0))
    send_notify("127.0.0.1", mooncake.port, "näme", "wörds\n\0", deadline=soon(2.0))

    assert mooncake.call("notifies") == [["näme", "wörds\n\0"]]


def test_an_address_outside_is_refused_before_and_by_mooncake(mooncake: Mooncake) -> None:
    here = np.zeros(64, np.uint8)
    opened = open_peer(mooncake)
    with pytest.raises(NotRegisteredError):
        opened.transfer(Opcode.WRITE, here.ctypes.data, mooncake.address + NBYTES - 8, 16, deadline=soon())

    mooncake.call("unregister")  # the descriptor that is known still has it
    try:
        for opcode in Opcode:
            with pytest.raises((RemoteAccessError, NotRegisteredError)):
                opened.transfer(opcode, here.ctypes.data, mooncake.address, 64, deadline=soon())
    finally:
        mooncake.call("register")
    opened.transfer(Opcode.WRITE, here.ctypes.data, mooncake.address, 64, deadline=soon())  # found anew
    opened.close()


def test_mooncake_is_killed_and_restarted() -> None:
    here = pattern(4096, 3)
    with make_mooncake() as first:
        opened = open_peer(first)
        opened.transfer(Opcode.WRITE, here.ctypes.data, first.address, 4096, deadline=soon())
        first.kill()
        for _ in range(2):
            with pytest.raises(PeerError):
                opened.transfer(Opcode.WRITE, here.ctypes.data, first.address, 4096, deadline=soon(600.0))
        with pytest.raises(PeerUnreachableError):
            send_probe("127.0.0.1", first.port, deadline=soon(600.0))
        opened.close()
    with make_mooncake() as second:
        opened = open_peer(second)
        opened.transfer(Opcode.WRITE, here.ctypes.data, second.address, 4096, deadline=soon())
        assert second.digest(4096) == digest(here)
        opened.close()


@pytest.mark.parametrize("opcode", Opcode, ids=lambda opcode: opcode.name)
def test_mooncake_is_stopped(opcode: Opcode) -> None:
    here = np.zeros(NBYTES, np.uint8)
    with make_mooncake() as there:
        there.fill(5)
        opened = open_peer(there)
        with there.stopped():
            with pytest.raises(TransferTimeoutError):
                opened.transfer(opcode, here.ctypes.data, there.address, NBYTES, deadline=soon(0.5))
            with pytest.raises(PeerUnreachableError):
                send_probe("127.0.0.1", there.port, deadline=soon(0.5))
        assert not here.any()
        opened.transfer(Opcode.READ, here.ctypes.data, there.address, 4096, deadline=soon())
        opened.close()


def test_mooncake_is_killed_in_mid_batch() -> None:
    here = np.ones(NBYTES, np.uint8)
    with make_mooncake() as there:
        opened = open_peer(there)
        with there.stopped():
            timer = threading.Timer(0.3, there.kill)
            timer.start()
            with pytest.raises(PeerError):
                opened.transfer(Opcode.WRITE, here.ctypes.data, there.address, NBYTES, deadline=soon(600.0))
            timer.join()
        opened.close()


# Mooncake initiates.


class Served:
    """An engine of this process with a region, as Mooncake processes see it."""

    def __init__(self, **settings: Any) -> None:
        self.engine = TransferEngine(**settings)
        self.service = MooncakeService(self.engine)
        self.memory = np.zeros(NBYTES, np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.region = self.engine.register(self.memory)


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.engine.close()


@pytest.mark.parametrize("environment", [{}, {"MC_TCP_PROTO": "1"}, {"MC_TCP_ENABLE_CONNECTION_POOL": "0"}], ids=str)
def test_mooncake_writes_and_reads(served: Served, environment: dict[str, str]) -> None:
    with make_mooncake(**environment) as there:
        data = there.fill(7)
        for count, nbytes in ((1, NBYTES), (1, 1), (2000, 4096), (7, 1 << 20)):
            if environment and count == 2000:  # a connection for each row, or no end of a row that can be seen
                count = 200
            local, remote = shuffled(count, nbytes)
            served.memory[:] = 0
            columns = local.tolist(), (served.address + remote).tolist(), [nbytes] * count

            assert there.call("move", "write", served.engine.address, *columns) == 0
            expected = np.zeros(NBYTES, np.uint8)
            expected[: count * nbytes].reshape(count, nbytes)[remote // nbytes] = data[: count * nbytes].reshape(
                count, nbytes
            )[local // nbytes]
            wait_until(lambda e=expected: (served.memory == e).all())

            there.fill(8)
            assert there.call("move", "read", served.engine.address, *columns) == 0
            back = pattern(NBYTES, 8)
            back[: count * nbytes] = data[: count * nbytes]
            assert there.digest() == digest(back)
            there.fill(7)


def test_mooncake_notifies_probes_and_finds_the_first_buffer(served: Served, mooncake: Mooncake) -> None:
    target = served.engine.address

    assert mooncake.call("probe", target) == 0
    assert mooncake.call("first_buffer", target) == served.address
    assert mooncake.call("write_and_notify", target, served.address, 64, "näme", "wörds") == 0
    assert served.service.notifies() == [("näme", "wörds")]


def test_mooncake_is_refused_what_is_not_registered_or_not_allowed(served: Served, mooncake: Mooncake) -> None:
    target = served.engine.address
    mooncake.fill(9)
    secret = np.full(NBYTES, 7, np.uint8)
    served.engine.register(secret, rights=Rights.REMOTE_READ)
    hidden = np.full(NBYTES, 8, np.uint8)
    served.engine.register(hidden, rights=Rights.NONE)

    for opcode, address in (
        ("write", served.address + NBYTES - 8),
        ("read", served.address - 8),
        ("write", int(secret.ctypes.data)),
        ("write", int(hidden.ctypes.data)),
        ("read", int(hidden.ctypes.data)),
    ):
        assert mooncake.call("move", opcode, target, [0], [address], [16]) == -1
    assert mooncake.call("move", "read", target, [0], [int(secret.ctypes.data)], [NBYTES]) == 0

    assert (secret == 7).all()
    assert (hidden == 8).all()
    assert not served.memory.any()
    assert mooncake.digest() == digest(secret)


def test_what_is_registered_later_is_found(served: Served, mooncake: Mooncake) -> None:
    assert mooncake.call("move", "write", served.engine.address, [0], [served.address], [64]) == 0
    data = mooncake.fill(10)
    later = np.zeros(NBYTES, np.uint8)
    served.engine.register(later)

    assert mooncake.call("move", "write", served.engine.address, [0], [int(later.ctypes.data)], [NBYTES]) == 0
    assert (later == data).all()


def test_a_mooncake_that_dies_in_mid_row_lets_go_of_the_region(served: Served) -> None:
    with make_mooncake() as there:
        there.begin("move", "write", served.engine.address, [0] * 500, [served.address] * 500, [NBYTES] * 500)
        wait_until(lambda: served.region.remote_use_count)
        there.kill()

    served.engine.unregister(served.region)


def test_a_mooncake_that_stops_in_mid_row_is_dropped_in_time() -> None:
    served = Served(transfer_timeout_s=0.5, unregister_timeout_s=5.0)
    with make_mooncake() as there:
        there.fill(13)
        there.begin("move", "write", served.engine.address, [0] * 500, [served.address] * 500, [NBYTES] * 500)
        wait_until(served.memory.any)
        with there.stopped():
            served.engine.unregister(served.region)
            before = served.memory.copy()
        there.finish()
        assert (served.memory == before).all()
    served.engine.close()


SERVE = """
from kvxfer.mooncake.service import MooncakeService
engine.mooncake = MooncakeService(engine)
"""


def test_kvxfer_is_killed_and_restarted(mooncake: Mooncake) -> None:
    data = mooncake.fill(11)
    for _ in range(2):
        with Peer() as peer:
            peer.run(SERVE)
            region = peer.register(NBYTES)
            assert mooncake.call("move", "write", peer.address, [0], [region.address], [NBYTES]) == 0
            assert (region.array() == data).all()
            peer.kill()
            assert mooncake.call("move", "write", peer.address, [0], [region.address], [NBYTES]) == -1
            assert mooncake.call("probe", peer.address) == -102


def test_kvxfer_is_stopped() -> None:
    with make_mooncake(MC_TRANSFER_TIMEOUT="5") as there, Peer() as peer:
        peer.run(SERVE)
        region = peer.register(NBYTES)
        assert there.call("move", "write", peer.address, [0], [region.address], [64]) == 0
        with peer.stopped():
            assert there.call("move", "write", peer.address, [0], [region.address], [NBYTES]) == -1
        assert there.call("probe", peer.address) == 0


def test_two_engines_of_kvxfer_know_each_other_by_the_mark(served: Served) -> None:
    host, _, port = served.engine.address.rpartition(":")

    found = ask_descriptor(host, int(port), OWN, deadline=soon(2.0))

    assert found.kvxfer is not None
    assert (found.kvxfer.address, found.kvxfer.generation) == (served.engine.address, served.engine.generation)


def test_one_port_answers_both_dialects(served: Served, mooncake: Mooncake) -> None:
    data = mooncake.fill(12)
    with TransferEngine() as engine:
        here = engine.allocate(NBYTES)
        segment = engine.open_segment(served.engine.address)
        assert mooncake.call("move", "write", served.engine.address, [0], [served.address], [NBYTES]) == 0
        engine.read(segment, here.address, served.address, NBYTES)
        assert (here.array == data).all()


def test_nothing_grows_over_many_peers(served: Served) -> None:
    with make_mooncake() as there:
        for _ in range(50):
            assert there.call("probe", served.engine.address) == 0
        assert there.call("move", "write", served.engine.address, [0], [served.address], [64]) == 0
    wait_until(lambda: served.service._data.connection_count == 0)
    with pytest.raises(KvxferError):
        send_probe("127.0.0.1", there.port, deadline=soon(1.0))
