"""What goes wrong between two hosts, for real: packets, links, processes, devices. Nothing is lost, nothing leaks.

Each fault comes LAB_ROUNDS times. No test says how long a thing takes, only what is told at once, by a connection that
ends or a port that goes down, and what not before the device has given up (wire.NIC_TIMEOUT_S).
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import TransferEngine
from kvxfer.batch import TransferBatch
from kvxfer.errors import (
    ClosedError,
    NotRegisteredError,
    PeerClosedError,
    PeerError,
    PeerRestartedError,
    RemoteAccessError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from tests.faults.test_kill import free_port
from tests.lab.wire import (
    AT_ONCE_S,
    BLOCK_NBYTES,
    HERE,
    IS_EMULATED,
    LONG,
    NBYTES,
    ROUNDS,
    THERE,
    Held,
    Hosts,
    count_objects,
    into_the_middle,
    links_down,
    netem,
    wait_not_held_more,
)
from tests.support.fault_peer import count, resume, sessions, stop, wait_not_grown
from tests.support.peer import Peer, wait_until

pytestmark = [pytest.mark.rdma, pytest.mark.topology("wire")]

OPCODES = ("write", "read")
FAST: dict[str, Any] = {"rdma_timeout": 16 if IS_EMULATED else 14, "connect_timeout_s": 3.0}
"""Seven tries of 67 ms, or of 268 ms where an emulated machine may stand still for longer: where the device's giving up
is what is waited for."""


@pytest.fixture(scope="module")
def shared_hosts() -> Iterator[Hosts]:
    """One pair for all tests that leave it whole: a process is slow to start in an emulated machine."""
    with Hosts() as made:
        yield made


@pytest.fixture(scope="module")
def shared_fast_hosts() -> Iterator[Hosts]:
    with Hosts(**FAST) as made:
        yield made


@pytest.fixture
def hosts(shared_hosts: Hosts) -> Iterator[Hosts]:
    """The module's pair, with both rails connected before and after."""
    yield from _lend(shared_hosts)


@pytest.fixture
def fast_hosts(shared_fast_hosts: Hosts) -> Iterator[Hosts]:
    """Another, whose devices give up soon."""
    yield from _lend(shared_fast_hosts)


def _lend(hosts: Hosts) -> Iterator[Hosts]:
    hosts.warm()
    yield hosts
    try:
        hosts.warm()
    except BaseException:  # a failed test broke it: it must not fail the next ones too
        hosts.restart()
        raise


@pytest.fixture
def slow_wires() -> Iterator[None]:
    """Each wire held to 25 MB/s: a batch of 64 MiB is in its middle for as long as a command or two takes to run,
    however fast devices and processors are."""
    with netem("rate", "200mbit"):
        yield


# The wires.


@pytest.mark.parametrize(
    "fault",
    ["loss 1%", "loss 2%", "delay 5ms", "delay 5ms reorder 25% 50%", "duplicate 5%"],
)
def test_every_byte_arrives_over_a_bad_wire(fast_hosts: Hosts, fault: str) -> None:
    hosts = fast_hosts
    before = Held(hosts)
    with netem(*fault.split()):
        for number in range(ROUNDS):
            hosts.move(OPCODES[number % 2], timeout_s=60.0)

    wait_not_held_more(hosts, before)


# Links.


@pytest.mark.usefixtures("slow_wires")
@pytest.mark.parametrize("netdev", ["va0", "vb1"])
def test_a_batch_goes_on_over_the_other_rail_when_a_link_goes_down(hosts: Hosts, netdev: str) -> None:
    before = Held(hosts)
    for number in range(ROUNDS):
        batch = hosts.submit(OPCODES[number % 2], times=LONG // 2)
        into_the_middle(batch)
        with links_down(netdev):
            batch.wait()
            hosts.check()
            hosts.move(OPCODES[number % 2])
            assert hosts.connected() == {"rxa1" if netdev == "va0" else "rxa0"}
        hosts.warm()

    wait_not_held_more(hosts, before)


@pytest.mark.usefixtures("slow_wires")
def test_a_batch_waits_for_links_that_are_all_down_and_goes_on(hosts: Hosts) -> None:
    before = Held(hosts)
    for number in range(ROUNDS):
        batch = hosts.submit(OPCODES[number % 2], times=LONG)
        into_the_middle(batch)
        with links_down("va0", "vb1"):
            assert not is_over_within(batch, 0.3)
        batch.wait()

        hosts.check()
        hosts.warm()

    wait_not_held_more(hosts, before)


@pytest.mark.usefixtures("slow_wires")
def test_a_batch_fails_by_its_deadline_where_all_links_stay_down(hosts: Hosts) -> None:
    before = Held(hosts)
    for number in range(ROUNDS):
        batch = hosts.submit(OPCODES[number % 2], times=LONG)
        into_the_middle(batch)
        with links_down("va0", "va1"):
            started = time.monotonic()
            with pytest.raises(TransferError):
                batch.wait(0.5)
            assert time.monotonic() - started < AT_ONCE_S
            reported = hosts.target()

        assert 0 < batch.nbytes_done < batch.nbytes
        time.sleep(0.1)
        assert hosts.target() == reported, f"round {number}: written after the failure was told"
        hosts.warm()

    wait_not_held_more(hosts, before)


@pytest.mark.usefixtures("slow_wires")
def test_a_rail_that_falls_silent_is_left_for_the_other(fast_hosts: Hosts) -> None:
    """No port goes down here, a switch in between does: only the device finds out, by its time-out."""
    hosts = fast_hosts
    before = Held(hosts)
    for number in range(ROUNDS // 5 + 1):
        batch = hosts.submit(OPCODES[number % 2], times=LONG)
        into_the_middle(batch)
        with netem("loss", "100%", netdevs=("va1", "vb1")):
            batch.wait()
            hosts.check()
            assert "rxa0" in hosts.connected()
        hosts.warm()

    wait_not_held_more(hosts, before)


@pytest.mark.usefixtures("slow_wires")
def test_a_batch_over_silent_wires_fails_with_what_the_device_said(fast_hosts: Hosts) -> None:
    hosts = fast_hosts
    batch = hosts.submit("write", times=LONG)
    into_the_middle(batch)

    with netem("loss", "100%"), pytest.raises(TransferError, match="RETRY_EXC_ERR") as caught:
        batch.wait()

    assert caught.value.values["device"] in {f"{name}:1" for name in HERE}
    assert "4791" in caught.value.remedy
    hosts.warm()


# Processes.


@pytest.mark.parametrize("opcode", OPCODES)
def test_the_kill_of_the_peer_is_told_at_once_and_its_successor_is_another(opcode: str) -> None:
    with Hosts(peer_settings={"port": free_port()}) as hosts:
        kill_and_restart(hosts, opcode)


def kill_and_restart(hosts: Hosts, opcode: str) -> None:
    hosts.warm()
    rng = random.Random(opcode)
    before = Held(hosts)
    for number in range(ROUNDS // 2 + 1):
        batch = hosts.submit(opcode, times=LONG)
        into_the_middle(batch)
        time.sleep(rng.uniform(0.0, 0.02))
        hosts.peer.kill()
        killed = time.monotonic()
        with pytest.raises((PeerError, TransferError)):
            batch.wait()
        assert time.monotonic() - killed < AT_ONCE_S, f"round {number}: {batch.exception}"
        near, old = hosts.near(), hosts.segment

        hosts.peer.close()
        hosts.start()

        assert hosts.near() == near, f"round {number}: written after the failure was told"
        assert hosts.segment is not old
        with pytest.raises(PeerRestartedError):
            hosts.engine.write(old, hosts.region.address, hosts.there.address, 1)
        hosts.warm()

    wait_not_held_more(hosts, before)


def test_who_serves_lets_go_of_all_that_killed_clients_held() -> None:
    with TransferEngine(transports=("rdma",), rdma_devices=",".join(HERE)) as engine:

        def serve_and_kill() -> None:
            memory = np.zeros(BLOCK_NBYTES, np.uint8)
            region = engine.register(memory)
            with client_of(engine, memory) as client:
                client.kill()
            engine.unregister(region)
            wait_until(lambda: not engine._service._sessions)

        serve_and_kill()
        before, objects = count(), count_objects("qp", HERE)
        for _ in range(ROUNDS // 2 + 1):
            serve_and_kill()

        wait_not_grown(None, before)
        wait_until(lambda: count_objects("qp", HERE) <= objects)


@pytest.mark.parametrize("opcode", OPCODES)
def test_the_device_of_a_stopped_peer_goes_on(hosts: Hosts, opcode: str) -> None:
    for _ in range(ROUNDS):
        hosts.prepare(opcode)
        stop(hosts.peer.pid)
        try:
            hosts.post(times=4).wait()
            hosts.check()
        finally:
            resume(hosts.peer.pid)


def test_a_notification_waits_for_a_stopped_peer(hosts: Hosts) -> None:
    for number in range(ROUNDS):
        hosts.prepare("write")
        stop(hosts.peer.pid)
        try:
            batch = hosts.post(notify=b"%d" % number)
            assert not is_over_within(batch, 0.1)
            hosts.check()
        finally:
            resume(hosts.peer.pid)
        batch.wait()

        assert [payload for _, payload in hosts.peer.call("notifications", 5.0)] == [b"%d" % number]


def test_a_notification_that_was_given_up_never_comes(hosts: Hosts) -> None:
    before = Held(hosts)
    for number in range(ROUNDS):
        hosts.prepare("write")
        stop(hosts.peer.pid)
        try:
            with pytest.raises(TransferTimeoutError):
                hosts.post(notify=b"late", timeout_s=0.2).wait()
            hosts.check()
        finally:
            resume(hosts.peer.pid)
        hosts.move("read")  # over a new session: the peer has seen that the old one ended

        assert hosts.peer.call("notifications") == [], f"round {number}"

    wait_not_held_more(hosts, before)


@pytest.mark.parametrize("opcode", OPCODES)
def test_a_cut_control_connection_ends_batches_at_once_and_comes_back(hosts: Hosts, opcode: str) -> None:
    before = Held(hosts)
    for number in range(ROUNDS):
        batch = hosts.submit(opcode, times=LONG)
        into_the_middle(batch)
        cut = time.monotonic()
        hosts.segment._connection._session._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        with pytest.raises(PeerClosedError):
            batch.wait()
        assert time.monotonic() - cut < AT_ONCE_S
        wait_until(lambda: sessions(hosts.peer) == 0)  # nobody could ask it to drop its end: it finds out by itself
        reported = hosts.target()
        time.sleep(0.01)

        assert hosts.target() == reported, f"round {number}: written after the failure was told"
        hosts.warm()

    wait_not_held_more(hosts, before)


# A failure is final.


@pytest.mark.parametrize("fault", ["delay 300ms", "loss 100%"])
@pytest.mark.parametrize("opcode", OPCODES)
def test_nothing_arrives_after_a_failure_was_told(hosts: Hosts, opcode: str, fault: str) -> None:
    """Packets are still on their way, or would be sent again, when the batch ends."""
    for end in ("timeout", "cancel", "close"):
        segment = hosts.segment
        with netem(*fault.split()):
            batch = hosts.storm(opcode, 2048)
            assert not is_over_within(batch, 0.4)
            if end == "close":
                segment.close()
            elif end == "cancel":
                batch.cancel()
            kind = {"timeout": TransferTimeoutError, "cancel": TransferCancelledError, "close": ClosedError}[end]
            with pytest.raises(kind):
                batch.wait(0.0)
            reported = hosts.target()
            if fault.startswith("delay"):
                time.sleep(0.5)
        if fault.startswith("loss"):
            time.sleep(1.0)

        assert hosts.target() == reported, f"{end}: written after the failure was told"
        hosts.segment = hosts.engine.open_segment(hosts.peer.address)
        hosts.warm()


# Memory.


@pytest.mark.parametrize("opcode", OPCODES)
def test_unregister_waits_for_batches_that_run_and_refuses_later_ones(hosts: Hosts, opcode: str) -> None:
    before = Held(hosts)
    for _ in range(ROUNDS):
        batch = hosts.submit(opcode, times=LONG)
        into_the_middle(batch)
        hosts.peer.begin("unregister", hosts.there.region_id)
        assert not is_answered(hosts.peer, 0.02)
        batch.wait()
        hosts.peer.finish()
        if opcode == "read":  # a WRITE's target has gone with its region
            assert hosts.near() == hosts.expected()

        with pytest.raises((NotRegisteredError, RemoteAccessError), match=hosts.peer.address):
            hosts.engine.write(hosts.segment, hosts.region.address, hosts.there.address, 1)
        hosts.there = hosts.peer.register(NBYTES)
        hosts.move(opcode)

    wait_not_held_more(hosts, before)


def test_unregister_takes_memory_back_from_a_client_that_does_not_answer() -> None:
    """It is stopped while its device writes: its connections are dropped here, and it can do nothing more."""
    with TransferEngine(transports=("rdma",), rdma_devices=",".join(HERE), unregister_timeout_s=0.5) as engine:
        for _ in range(3):
            memory = np.zeros(BLOCK_NBYTES, np.uint8)
            region = engine.register(memory)
            with netem("rate", "100mbit", netdevs=("vb0", "vb1")), client_of(engine, memory) as client:
                stop(client.pid)
                try:
                    seen = memory.tobytes()
                    wait_until(lambda memory=memory, seen=seen: memory.tobytes() != seen)  # its device goes on

                    engine.unregister(region)

                    taken_back = memory.tobytes()
                    time.sleep(0.3)
                    assert memory.tobytes() == taken_back
                finally:
                    resume(client.pid)
                with pytest.raises((RemoteAccessError, NotRegisteredError)):
                    client.finish()


CLIENT = """
source = engine.register(np.repeat(np.arange(1, 65, dtype=np.uint8), nbytes))
segment = engine.open_segment(address)
sources = source.address + np.arange(4096) % 64 * nbytes
while True:
    engine.write(segment, sources, np.full(len(sources), there), nbytes, timeout_s=60.0)
"""


@contextlib.contextmanager
def client_of(engine: TransferEngine, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> Iterator[Peer]:
    """A process on host b that writes into memory here without end, each row with other bytes."""
    with Peer(transports=("rdma",), rdma_devices=",".join(THERE), **FAST) as client:
        where = {"address": engine.address, "there": memory.ctypes.data, "nbytes": memory.nbytes}
        client.begin("run", CLIENT, where)
        wait_until(lambda: memory[-1] != 0, 30.0)
        yield client


def is_over_within(batch: TransferBatch, seconds: float) -> bool:
    """Move a batch for a while; whether it has ended then."""
    until = time.monotonic() + seconds
    while not batch.poll() and time.monotonic() < until:
        time.sleep(0.001)
    return batch.is_done


def is_answered(peer: Peer, seconds: float) -> bool:
    """Whether the command that a peer was given has come to its end within the time."""
    return bool(peer._connection.poll(seconds))
