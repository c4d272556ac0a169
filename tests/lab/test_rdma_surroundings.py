"""What is not RDMA over RoCE and stands in its way: iWARP devices, drivers that are missing, network namespaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer import TransferEngine
from kvxfer.errors import TransportUnavailableError
from kvxfer.verbs.device import open_device
from kvxfer.verbs.queue_pair import QueuePairCapabilities
from tests.lab.wire import BLOCK_NBYTES, HERE, THERE, run
from tests.support.peer import Peer, environment, pattern, wait_until

pytestmark = [pytest.mark.rdma, pytest.mark.topology("wire")]

on_siw = pytest.mark.topology("wire", machine="uml")  # Debian's kernels have no siw
NAMESPACE = "kvxfer-pod"
UNSUPPORTED = r"siw0:1: unsupported \(iWARP\): its queue pairs need a connection manager"


def kvxfer(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvxfer", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(), check=False)


def move_a_block(engine: TransferEngine, peer: Peer) -> str:
    """Write and compare; returns over what it went."""
    here, there = engine.register(pattern(BLOCK_NBYTES, 1)), peer.register(BLOCK_NBYTES)
    segment = engine.open_segment(peer.address)
    engine.write(segment, here.address, there.address, BLOCK_NBYTES)
    assert there.bytes() == here.array.tobytes()
    return str(segment.transport)


# iWARP.


@pytest.fixture
def siw() -> Iterator[str]:
    """A soft iWARP device beside the others, on the netdev of one of them."""
    run("rdma", "link", "add", "siw0", "type", "siw", "netdev", "va0")
    yield "siw0"
    run("rdma", "link", "delete", "siw0")


@on_siw
def test_an_iwarp_device_is_refused_with_its_reason(siw: str) -> None:  # B21
    with pytest.raises(TransportUnavailableError, match=UNSUPPORTED):
        TransferEngine(transports=("rdma",), rdma_devices=siw)


@on_siw
@pytest.mark.usefixtures("siw")
def test_an_iwarp_device_is_passed_over_for_those_beside_it() -> None:
    with (
        TransferEngine(transports=("rdma",)) as engine,
        Peer(transports=("rdma",), rdma_devices=",".join(THERE)) as peer,
    ):
        assert move_a_block(engine, peer) == "rdma"
        assert "siw0" not in str(engine._transports["rdma"].card())
    devices = kvxfer("devices")

    assert devices.returncode == 0
    assert "unsupported (iWARP)" in devices.stdout


@on_siw
def test_whatever_the_state_of_a_new_iwarp_queue_pair_is_it_can_be_dropped(siw: str) -> None:  # B182
    with open_device(siw) as context, context.alloc_pd() as domain, context.create_cq(4) as queue:
        capabilities = QueuePairCapabilities(max_send_wr=4, max_recv_wr=4)
        with domain.create_qp(queue, queue, capabilities=capabilities) as queue_pair:
            assert queue_pair.query()["qp_state"] >= 0


# Drivers.


@pytest.fixture
def foreign_driver() -> Iterator[None]:
    """libibverbs is told of a driver that is not installed."""
    file = Path("/etc/libibverbs.d/nosuch.driver")
    file.write_text("driver nosuch\n")
    yield
    file.unlink()


@pytest.mark.usefixtures("foreign_driver")
def test_a_driver_that_cannot_be_loaded_harms_no_other() -> None:  # B187
    """libibverbs says so on stderr by itself."""
    devices = kvxfer("devices")

    assert devices.returncode == 0
    assert "nosuch" in devices.stderr
    assert "nosuch" not in devices.stdout
    assert all(name in devices.stdout for name in (*HERE, *THERE))


@pytest.mark.usefixtures("foreign_driver")
def test_peers_of_which_one_has_a_driver_that_cannot_be_loaded_talk() -> None:
    with (
        TransferEngine(transports=("rdma",), rdma_devices=",".join(HERE)) as engine,
        Peer(transports=("rdma",), rdma_devices=",".join(THERE)) as peer,  # loads the library now
    ):
        assert move_a_block(engine, peer) == "rdma"


# Network namespaces: kvxfer's handshake is its own, over TCP, and the addresses of a device are those of an interface.


@pytest.fixture
def namespace() -> Iterator[tuple[str, ...]]:
    """A command to run others in another network namespace, which has a loopback interface and no other."""
    run("ip", "netns", "add", NAMESPACE)
    run("ip", "-n", NAMESPACE, "link", "set", "lo", "up")
    yield ("ip", "netns", "exec", NAMESPACE)
    run("ip", "netns", "del", NAMESPACE)


IN_A_NAMESPACE = """
import numpy as np
from kvxfer import TransferEngine
from tests.support.peer import Peer

settings = {"transports": ("rdma", "tcp")}
with TransferEngine(**settings, rdma_devices="rxa0") as engine, Peer(**settings, rdma_devices="rxb0") as peer:
    segment = engine.open_segment(peer.address)
    here, there = engine.register(np.full(4096, 7, np.uint8)), peer.register(4096)
    engine.write(segment, here.address, there.address, 4096)
    assert there.bytes() == here.array.tobytes()
    print(segment.transport)
"""


def test_devices_whose_interfaces_are_in_another_namespace_are_used_with_a_warning(
    namespace: tuple[str, ...],
) -> None:  # B180, B186
    """The kernel may send all the same, as soft RoCE does; where it does not, the batch goes over tcp."""
    done = subprocess.run(
        [*namespace, sys.executable, "-c", IN_A_NAMESPACE],
        capture_output=True, text=True, timeout=120, env=environment(), check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "rdma"
    assert "va0 is not in this network namespace" in done.stderr


def doctor(*prefix: str) -> str:
    """What `kvxfer doctor` prints under a command, in one line."""
    command = [*prefix, sys.executable, "-m", "kvxfer", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(), check=False)
    return " ".join(done.stdout.split())


@pytest.fixture
def exclusive() -> Iterator[None]:
    """Devices are in one network namespace each: the kernel changes that only while there is one namespace."""
    run("rdma", "system", "set", "netns", "exclusive")
    yield
    share = ["rdma", "system", "set", "netns", "shared"]
    # namespaces that have ended are forgotten in the background
    wait_until(lambda: subprocess.run(share, capture_output=True, check=False).returncode == 0, 30.0)


@pytest.mark.slow
@pytest.mark.usefixtures("exclusive")
def test_a_namespace_without_devices_is_told_what_to_do_and_harms_no_other(namespace: tuple[str, ...]) -> None:  # B180
    with_old_sysfs = doctor("unshare", "--net")
    with_its_own = doctor(*namespace)
    with (
        TransferEngine(transports=("rdma",), rdma_devices=",".join(HERE)) as engine,
        Peer(transports=("rdma",), rdma_devices=",".join(THERE)) as peer,
    ):
        assert move_a_block(engine, peer) == "rdma"

    assert "lists no device" in with_old_sysfs
    assert "or the devices belong to another network namespace" in with_old_sysfs
    assert "this machine has no RDMA device" in with_its_own
    for told in (with_old_sysfs, with_its_own):
        assert "`rdma dev set DEVICE netns NAME`" in told
