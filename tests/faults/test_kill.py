"""One side is killed (SIGKILL) at any moment of a transfer; the other loses nothing and works on with the next process.

The moments are random; the seed is the medium and the number of the round, which a failure names.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvxfer import TransferEngine
from kvxfer.errors import KvxferError, PeerError, PeerUnreachableError, TransferError, TransferTimeoutError
from tests.support.fault_peer import Counts, RawClient, count, data_connections, sessions, wait_not_grown, write_request
from tests.support.peer import Peer, pattern, wait_until

NBYTES = 1 << 20
ROWS = 2048
MEDIA = ("tcp", "shm", "shm-any")
DEADLINE_S = 20.0
WARM_ROUNDS = 3

CLIENT = """
import numpy as np
segment = engine.open_segment(address)
region = engine.allocate(nbytes) if medium == "shm" else engine.register(np.zeros(nbytes, np.uint8))
region.array[:] = 1
while True:
    rows = np.full(n, region.address), np.full(n, there)
    engine.write(segment, *rows, nbytes, timeout_s=30.0)
    engine.read(segment, *rows, nbytes, timeout_s=30.0)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kill_serving_side(medium: str, rounds: int) -> None:
    """Each round: a new process at the old address; one good transfer; one that is in the middle when it is killed."""
    port = free_port()
    transport = medium.partition("-")[0]
    with TransferEngine(transports=(transport,)) as engine:
        here = engine.allocate(NBYTES) if medium == "shm" else engine.register(np.zeros(NBYTES, np.uint8))
        before = count()
        for number in range(rounds):
            rng = random.Random(f"{medium} {number}")
            with Peer(port=port, transports=(transport,)) as peer:
                there = peer.allocate(NBYTES) if medium == "shm" else peer.register(NBYTES)
                segment = engine.open_segment(peer.address)
                here.array[:] = pattern(NBYTES, number)
                engine.write(segment, here.address, there.address, NBYTES)
                assert there.bytes() == here.array.tobytes(), f"round {number}"
                submit = rng.choice((engine.submit_write, engine.submit_read))
                rows = np.full(ROWS, here.address), np.full(ROWS, there.address)
                batch = submit(segment, *rows, NBYTES, timeout_s=DEADLINE_S)
                killer = threading.Timer(rng.uniform(0.0, 0.03), peer.kill)
                killer.start()
                with pytest.raises((PeerError, TransferError)) as caught:  # noqa: PT012  until it fails
                    while True:
                        batch.wait()
                        batch = submit(segment, *rows, NBYTES, timeout_s=DEADLINE_S)
                assert not isinstance(caught.value, TransferTimeoutError), f"round {number}"
                killer.join()
            del segment, batch
            if number == WARM_ROUNDS - 1:
                before = count()
        wait_not_grown(None, before)
        engine.unregister(here)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("medium", MEDIA)
def test_who_is_served_outlives_the_kill_of_the_serving_process(medium: str) -> None:
    kill_serving_side(medium, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("medium", MEDIA)
def test_who_is_served_outlives_200_kills(medium: str) -> None:
    kill_serving_side(medium, 200)


def kill_asking_side(medium: str, rounds: int) -> None:
    """Each round: a new client process transfers to and fro without end and is killed; its traces must go."""
    transport = medium.partition("-")[0]
    with Peer(transports=(transport,)) as server:
        before = count(server)
        for number in range(rounds):
            rng = random.Random(f"{medium} {number}")
            there = server.allocate(NBYTES) if medium == "shm" else server.register(NBYTES)
            with Peer(transports=(transport,)) as client:
                names = {
                    "address": server.address,
                    "medium": medium,
                    "nbytes": NBYTES,
                    "n": ROWS,
                    "there": there.address,
                }
                client.begin("run", CLIENT, names)
                # 1 for what the client writes: it has begun. Some rounds are killed before that, while they connect.
                if rng.random() < 0.8:
                    wait_until(lambda there=there: there.bytes(0, 1) == b"\1")
                time.sleep(rng.uniform(0.0, 0.03))
                client.kill()
            there.unregister()
            wait_until(lambda: sessions(server) == 0)
            if transport == "tcp":
                wait_until(lambda: data_connections(server) == 0)
            if number == WARM_ROUNDS - 1:
                before = count(server)
        wait_not_grown(server, before)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("medium", MEDIA)
def test_who_serves_outlives_the_kill_of_the_asking_process(medium: str) -> None:
    kill_asking_side(medium, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("medium", MEDIA)
def test_who_serves_outlives_200_kills(medium: str) -> None:
    kill_asking_side(medium, 200)


# B154
@pytest.mark.slow
@pytest.mark.parametrize("opcode", ["write", "read"])
def test_a_kill_in_the_middle_of_a_body_tells_peer_and_errno_and_harms_no_other(opcode: str) -> None:
    with TransferEngine(transports=("tcp",)) as engine, Peer(transports=("tcp",)) as victim, Peer() as other:
        here = engine.register(np.zeros(NBYTES, np.uint8))
        there, elsewhere = victim.register(NBYTES), other.register(NBYTES)
        segment, healthy = engine.open_segment(victim.address), engine.open_segment(other.address)
        rows = np.full(512, here.address), np.full(512, there.address)
        submit = engine.submit_write if opcode == "write" else engine.submit_read
        batch = submit(segment, *rows, NBYTES, timeout_s=DEADLINE_S)
        while batch._transfer.nbytes_moved < batch.nbytes // 2:
            batch.poll()
        victim.kill()

        with pytest.raises(PeerError) as caught:
            batch.wait()

        assert caught.value.peer == victim.address
        assert hasattr(caught.value, "errno")
        engine.write(healthy, here.address, elsewhere.address, NBYTES)


def silent_writer(server: Peer, address: int) -> RawClient:
    """Return a client that stands in the middle of a WRITE and will never say another word."""
    client = RawClient(server.address)
    stream = client.attach()
    stream.sendall(write_request(address, bytes(NBYTES))[: NBYTES // 2])
    client.stream = stream  # type: ignore[attr-defined]
    wait_until(lambda: server.run("result = [r.remote_use_count for r in engine.regions]") == [1])
    return client


def test_unregister_gets_memory_back_from_a_client_that_fell_silent_in_a_write() -> None:
    with Peer(
        transports=("tcp",), keepalive_interval_s=0.1, keepalive_timeout_s=0.4, unregister_timeout_s=5.0
    ) as server:
        there = server.register(NBYTES)
        client = silent_writer(server, there.address)

        there.unregister()

        assert data_connections(server) == 0
        client.stream.close()  # type: ignore[attr-defined]
        client.close()


def test_a_new_transfer_to_a_stopped_peer_ends_by_its_deadline() -> None:
    """No stream is open yet, so one has to be dialled: that must not take longer than the batch may."""
    settings: dict[str, Any] = {"transports": ("tcp",), "connect_timeout_s": 600.0, "transfer_timeout_s": 600.0}
    with TransferEngine(**settings) as engine, Peer(transports=("tcp",)) as peer:
        here, there = engine.register(np.zeros(64, np.uint8)), peer.register(64)
        segment = engine.open_segment(peer.address)
        with peer.stopped(), pytest.raises((TransferError, PeerUnreachableError)):
            engine.write(segment, here.address, there.address, 64, timeout_s=0.3)
        engine.write(segment, here.address, there.address, 64)


@pytest.mark.slow
def test_engines_that_come_and_go_leave_nothing() -> None:
    """An engine closed in mid-transfer or idle leaves no descriptor and no thread, and needs no garbage collector."""
    import gc

    with Peer() as peer:
        there = peer.register(NBYTES)
        gc.collect()
        gc.disable()
        try:
            before: Any = None
            for number in range(40):
                engine = TransferEngine(transports=("tcp",) if number % 2 else ("shm", "tcp"))
                here = engine.register(np.zeros(NBYTES, np.uint8))
                segment = engine.open_segment(peer.address)
                batch = engine.submit_write(
                    segment, np.full(64, here.address), np.full(64, there.address), NBYTES, timeout_s=5.0
                )
                mover = threading.Thread(target=_wait_quietly, args=[batch])
                mover.start()
                engine.close()
                mover.join()
                if number == 5:
                    before = Counts.of(os.getpid())
            wait_until(lambda: not Counts.of(os.getpid()).grown_from(before, rss_slack_nbytes=32 << 20))
        finally:
            gc.enable()

        wait_until(lambda: sessions(peer) == 0)


def _wait_quietly(batch: Any) -> None:
    with contextlib.suppress(KvxferError):
        batch.wait()


# B154
@pytest.mark.slow
@pytest.mark.parametrize("opcode", ["write", "read"])
def test_a_kill_in_the_middle_of_a_body_tells_how_far_it_came(opcode: str) -> None:
    with TransferEngine(transports=("tcp",)) as engine, Peer(transports=("tcp",)) as victim:
        here, there = engine.register(np.zeros(NBYTES, np.uint8)), victim.register(NBYTES)
        segment = engine.open_segment(victim.address)
        submit = engine.submit_write if opcode == "write" else engine.submit_read
        batch = submit(segment, np.full(512, here.address), np.full(512, there.address), NBYTES)
        while batch._transfer.nbytes_moved < batch.nbytes // 2:
            batch.poll()
        victim.kill()

        with pytest.raises(PeerError) as caught:
            batch.wait()

        assert caught.value.values["errno"] != 0
        assert caught.value.values["nbytes_done"] == batch.nbytes_done
