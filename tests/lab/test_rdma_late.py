"""Ports that are down at first, and devices that come and go, while engines are open."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer import TransferEngine
from tests.lab.wire import BLOCK_NBYTES, NBYTES, Hosts, count_objects, links_down, run
from tests.support.peer import Peer, wait_until

pytestmark = [pytest.mark.rdma, pytest.mark.topology("wire")]

PATIENCE_S = 30.0
HALF_LOCKED = ("setpriv", "--bounding-set=-ipc_lock", "prlimit", f"--memlock={NBYTES * 3 // 2}")
"""A process that may lock the test's memory for one device and not for two."""


def names(engine: TransferEngine) -> list[str]:
    """The ports that an engine uses."""
    return [nic.name for nic in engine._transports["rdma"].nics]  # type: ignore[attr-defined]


def names_there(peer: Peer) -> list[str]:
    found: list[str] = peer.run("result = [nic.name for nic in engine._transports['rdma'].nics]")
    return found


def reopen(hosts: Hosts) -> None:
    """Open the peer anew: its ports are those that it has now."""
    hosts.segment.close()
    hosts.segment = hosts.engine.open_segment(hosts.peer.address)


def add_device(device: str) -> None:
    run("rdma", "link", "add", device, "type", "rxe", "netdev", device.replace("rx", "v"))


@pytest.fixture
def absent(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a device that is not there when the test begins, and is again when it has ended."""
    device: str = request.param
    run("rdma", "link", "delete", device)
    yield device
    if f"link {device}/" not in run("rdma", "link"):
        add_device(device)


def test_ports_that_are_down_when_engines_open_carry_once_they_are_up() -> None:
    """Memory that was registered meanwhile is moved over them too."""
    with links_down("va1"):
        hosts = Hosts()
        hosts.move("write")
        before = hosts.connected()
    with hosts:
        wait_until(lambda: names(hosts.engine) == ["rxa0:1", "rxa1:1"], PATIENCE_S)
        wait_until(lambda: names_there(hosts.peer) == ["rxb0:1", "rxb1:1"], PATIENCE_S)
        reopen(hosts)
        hosts.warm()
        hosts.move("read")

    assert before == {"rxa0"}


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["rxa1"], indirect=True)
def test_a_device_that_appears_here_carries_for_a_segment_that_is_open(absent: str) -> None:
    with Hosts() as hosts:
        hosts.move("write")
        before = hosts.connected()

        add_device(absent)
        with TransferEngine(transports=("rdma",), rdma_devices="rxb0") as other:
            other.open_segment(hosts.engine.address)  # who is opened looks for devices
            hosts.warm()
        hosts.move("read")

    assert before == {"rxa0"}


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["rxb1"], indirect=True)
def test_a_device_that_appears_at_the_peer_carries_once_the_peer_is_opened_anew(absent: str) -> None:
    with Hosts() as hosts:
        hosts.move("write")
        before = hosts.connected()

        add_device(absent)
        reopen(hosts)  # who is opened looks for devices, and uses them from then on
        wait_until(lambda: names_there(hosts.peer) == ["rxb0:1", "rxb1:1"], PATIENCE_S)
        reopen(hosts)
        hosts.warm()
        hosts.move("read")

    assert before == {"rxa0"}


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["rxa1"], indirect=True)
def test_a_device_that_is_deleted_and_added_again_serves_one_engine_after_the_other(absent: str) -> None:
    """An engine that uses another device lives through it. soft RoCE deletes once the last program has closed it."""
    with TransferEngine(transports=("rdma",), rdma_devices="rxa0") as bystander:
        here = bystander.register(np.full(BLOCK_NBYTES, 5, np.uint8))
        for _ in range(3):
            add_device(absent)
            with Hosts() as hosts:
                hosts.warm()
                there = hosts.peer.register(BLOCK_NBYTES)
                segment = bystander.open_segment(hosts.peer.address)
                deletion = subprocess.Popen(["rdma", "link", "delete", absent])
                hosts.move("write")
                bystander.write(segment, here.address, there.address, BLOCK_NBYTES)

                assert there.bytes() == here.array.tobytes()
            assert deletion.wait(PATIENCE_S) == 0
            assert count_objects("qp", (absent,)) == 0


@pytest.mark.slow
def test_a_port_whose_device_cannot_take_the_memory_stays_out_and_the_other_carries() -> None:  # B78
    with links_down("va1"):
        hosts = Hosts(peer_settings={"prefix": HALF_LOCKED})
    with hosts:
        wait_until(lambda: names(hosts.engine) == ["rxa0:1", "rxa1:1"], PATIENCE_S)
        wait_until(lambda: hosts.peer.run("result = engine._transports['rdma']._watch._thread is None"), PATIENCE_S)
        reopen(hosts)
        for opcode in ("write", "read"):
            hosts.move(opcode)

        assert hosts.connected() == {"rxa0"}
        assert names_there(hosts.peer) == ["rxb0:1"]
        assert hosts.peer.run("result = list(engine.regions[0].keys['rdma']['nics'])") == ["rxb0:1"]
