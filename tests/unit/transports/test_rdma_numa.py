"""Batches over NICs on several NUMA nodes. Bnn: faults that other engines had."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvxfer.memory import Region
from kvxfer.transports.rdma import RdmaTransport
from tests.support.fake_engines import FakeHosts, Pair, fake_hosts
from tests.support.fake_sysfs import write_sysfs
from tests.support.fake_verbs import FakeLibrary, FakeNic, erdma

NBYTES = 4 << 20
VERY_FAST = 1e15  # bytes a second: a second rail saves nothing


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[FakeHosts]:
    """The devices of both hosts have these nodes by name: mlx_0 0, mlx_1 1, mlx_2 none."""
    nodes = [erdma(f"mlx_{row}", numa_node=node) for row, node in enumerate((0, 1, -1))]
    write_sysfs(tmp_path, FakeLibrary(None, *nodes, name="elsewhere"))
    with fake_hosts(tmp_path) as made:
        yield made


@pytest.fixture
def memory_nodes(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The node that all memory lies on, for whoever registers it; unbound processes."""
    now: list[int | None] = [0]
    monkeypatch.setattr("kvxfer.transports.rdma.find_memory_node", lambda address, nbytes: now[0])
    monkeypatch.setattr("kvxfer.transports.rdma.find_process_node", lambda: None)
    return now


def rails(host: int, count: int = 2) -> list[FakeNic]:
    return [erdma(f"mlx_{row}", f"10.{row}.0.{host}", ndev=f"eth{row}") for row in range(count)]


def open_pair(hosts: FakeHosts, count: int = 2) -> Pair:
    """Rails in separate subnets, all of them connected."""
    hosts.fabric.separate_subnets()
    pair = hosts.pair(rails(1, count), rails(2, count), nbytes=NBYTES)
    pair.open()
    end = time.monotonic() + 5.0
    while len(pair.connected) < count:
        pair.write(65536)
        assert time.monotonic() < end
    return pair


def set_rate(pair: Pair, rate: float) -> None:
    for rail in pair.segment._transfers.endpoints[0]._rails:  # type: ignore[attr-defined]
        rail.rate = rate


def sent(pair: Pair) -> dict[str, int]:
    transport = pair.a._transports.find("rdma")
    assert isinstance(transport, RdmaTransport)
    return {nic.context.name: nic.nbytes_sent for nic in transport.nics}


def write(pair: Pair, local: Region, nbytes: int) -> dict[str, int]:
    """Write from a region of ours; the bytes that each device sent."""
    before = sent(pair)
    pair.a.write(pair.segment, local.address, pair.remote.address, nbytes)
    return {name: count - before[name] for name, count in sent(pair).items() if count > before[name]}


@pytest.mark.parametrize(("node", "used"), [(0, {"mlx_0"}), (1, {"mlx_1"})])
def test_a_batch_goes_over_the_device_near_its_memory(
    hosts: FakeHosts, memory_nodes: list[int | None], node: int, used: set[str]
) -> None:
    """B30."""
    memory_nodes[0] = None
    pair = open_pair(hosts)
    set_rate(pair, VERY_FAST)
    memory_nodes[0] = node
    region = pair.a.register(np.zeros(NBYTES, np.uint8))

    assert all(set(write(pair, region, 64)) == used for _ in range(4))
    assert set(write(pair, region, NBYTES)) == used


def test_a_large_batch_takes_the_far_device_too_where_that_saves_time(
    hosts: FakeHosts, memory_nodes: list[int | None]
) -> None:
    pair = open_pair(hosts)
    set_rate(pair, 1e9)  # 4 MiB take 4 ms over one

    assert set(write(pair, pair.local, NBYTES)) == {"mlx_0", "mlx_1"}


def test_memory_at_the_peer_counts_as_much(hosts: FakeHosts, memory_nodes: list[int | None]) -> None:
    memory_nodes[0] = None
    pair = open_pair(hosts)
    memory_nodes[0] = 1
    pair.b.unregister(pair.remote)
    pair.remote = pair.b.register(pair.there)
    pair.segment.refresh()

    assert all(set(write(pair, pair.local, 64)) == {"mlx_1"} for _ in range(4))


def test_a_device_of_unknown_node_is_near_to_all_memory(hosts: FakeHosts, memory_nodes: list[int | None]) -> None:
    """B31."""
    memory_nodes[0] = None
    pair = open_pair(hosts, 3)
    set_rate(pair, VERY_FAST)
    memory_nodes[0] = 1
    region = pair.a.register(np.zeros(NBYTES, np.uint8))

    assert set(write(pair, region, NBYTES)) == {"mlx_1", "mlx_2"}


def test_memory_of_unknown_node_goes_over_all(hosts: FakeHosts, memory_nodes: list[int | None]) -> None:
    """B31."""
    memory_nodes[0] = None
    pair = open_pair(hosts)
    set_rate(pair, VERY_FAST)

    assert set(write(pair, pair.local, NBYTES)) == {"mlx_0", "mlx_1"}


def test_small_batches_have_the_near_device_connected(hosts: FakeHosts, memory_nodes: list[int | None]) -> None:
    """They go over the one there is until then."""
    memory_nodes[0] = 1
    hosts.fabric.separate_subnets()
    pair = hosts.pair(rails(1), rails(2), nbytes=NBYTES)
    pair.open()
    first = write(pair, pair.local, 64)
    end = time.monotonic() + 5.0
    while len(pair.connected) < 2:
        assert time.monotonic() < end
        time.sleep(0.001)

    assert set(first) == {"mlx_0"}
    assert set(write(pair, pair.local, 64)) == {"mlx_1"}


@pytest.mark.parametrize("node", [0, 1])
def test_the_first_connection_is_near_to_the_process(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch, node: int
) -> None:
    monkeypatch.setattr("kvxfer.transports.rdma.find_process_node", lambda: node)
    hosts.fabric.separate_subnets()
    pair = hosts.pair(rails(1), rails(2))

    pair.open()

    assert pair.connected == [f"mlx_{node}:1 to mlx_{node}:1"]


def test_nodes_are_told(hosts: FakeHosts, memory_nodes: list[int | None]) -> None:
    memory_nodes[0] = 1
    pair = open_pair(hosts)

    assert [rail["numa_nodes"] for rail in pair.rails if not rail["spare"]] == [[0, 0], [1, 1]]
    assert pair.local.keys["rdma"]["numa_node"] == 1


def test_nobody_asks_where_memory_is_while_no_two_devices_differ(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.transports.rdma.find_memory_node", lambda address, nbytes: 1 / 0)
    pair = hosts.pair([erdma("mlx_1", "10.0.0.1"), erdma("mlx_2", "10.1.0.1")], erdma("mlx_1", "10.0.0.2"))

    assert "numa_node" not in pair.local.keys["rdma"]
