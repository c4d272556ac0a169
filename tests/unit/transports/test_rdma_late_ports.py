"""Ports that are down, or not there, when the engine is made, and are used once they come up."""

from __future__ import annotations

import errno
import functools
import time
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvxfer import TransferEngine
from kvxfer.errors import TransportUnavailableError
from kvxfer.verbs.enums import EventType, PortState
from tests.support.fake_engines import FakeHosts, Pair
from tests.support.fake_sysfs import write_sysfs
from tests.support.fake_verbs import FakeFabric, FakeLibrary, FakeNic, FakePort, erdma, gid
from tests.support.peer import wait_until

NBYTES = 4 << 20

until = functools.partial(wait_until, timeout_s=5.0)


def rails(host: int, *, down: int | None = None) -> list[FakeNic]:
    """Two devices in separate subnets; the port of one is down."""
    nics = [erdma(f"mlx_{row}", f"10.{row}.0.{host}", ndev=f"eth{row}") for row in range(2)]
    if down is not None:
        nics[down].ports[0].state = PortState.DOWN
    return nics


def names(engine: TransferEngine) -> list[str]:
    return [nic.name for nic in engine._transports["rdma"].nics]  # type: ignore[attr-defined]


def offered(engine: TransferEngine) -> list[str]:
    return [port["offer"]["device"] for port in engine._transports["rdma"].card()["ports"]]


def write_until_connected(pair: Pair, count: int) -> None:
    until(lambda: bool(pair.write(65536) or len(pair.connected) == count))


def test_a_port_that_comes_up_carries_for_peers_that_are_open(hosts: FakeHosts) -> None:
    """Memory that was registered before has keys on it; what is registered after it too."""
    hosts.fabric.separate_subnets()
    pair = hosts.pair(rails(1, down=0), rails(2), nbytes=NBYTES)
    pair.open()
    pair.write(65536)
    before = (names(pair.a), pair.connected)

    with capture_logs() as events:
        pair.libraries[0].set_port("mlx_0", 1, PortState.ACTIVE)
        until(lambda: len(names(pair.a)) == 2)
    write_until_connected(pair, 2)
    later = pair.a.register(np.full(NBYTES, 7, np.uint8))
    pair.a.write(pair.segment, later.address, pair.remote.address, NBYTES)

    assert before == (["mlx_1:1"], ["mlx_1:1 to mlx_1:1"])
    assert sorted(pair.connected) == ["mlx_0:1 to mlx_0:1", "mlx_1:1 to mlx_1:1"]
    assert (pair.there == 7).all()
    assert [event["nic"] for event in events if event["event"] == "rdma.port_added"] == ["mlx_0:1"]


def test_a_port_of_the_peer_that_comes_up_is_used_once_the_peer_is_opened_anew(hosts: FakeHosts) -> None:
    hosts.fabric.separate_subnets()
    pair = hosts.pair(rails(1), rails(2, down=0), nbytes=NBYTES)
    pair.open()
    pair.write(65536)

    pair.libraries[1].set_port("mlx_0", 1, PortState.ACTIVE)
    until(lambda: offered(pair.b) == ["mlx_1", "mlx_0"])
    pair.write(65536)
    before = pair.connected
    pair.segment.close()
    pair.open()
    write_until_connected(pair, 2)
    pair.read(65536)

    assert before == ["mlx_1:1 to mlx_1:1"]
    assert sorted(pair.connected) == ["mlx_0:1 to mlx_0:1", "mlx_1:1 to mlx_1:1"]


def test_the_second_port_of_a_device_that_is_used_needs_no_registration(hosts: FakeHosts) -> None:
    hosts.fabric.separate_subnets()
    here, there = (
        erdma("mlx_0", ports=[FakePort({0: gid(f"10.{row}.0.{host}")}) for row in range(2)]) for host in (1, 2)
    )
    here.ports[1].state = PortState.DOWN
    pair = hosts.pair(here, there, nbytes=NBYTES)
    pair.open()
    registered = pair.libraries[0].calls["ibv_reg_mr"]

    pair.libraries[0].set_port("mlx_0", 2, PortState.ACTIVE)
    until(lambda: names(pair.a) == ["mlx_0:1", "mlx_0:2"])
    write_until_connected(pair, 2)

    assert pair.libraries[0].calls["ibv_reg_mr"] == registered


def test_a_port_gets_its_address_after_its_link(hosts: FakeHosts) -> None:
    """As of a DHCP client: PORT_ACTIVE first, GID_CHANGE later."""
    nics = rails(1, down=0)
    rows, nics[0].ports[0].gids = nics[0].ports[0].gids, {}
    library = hosts.add("a", *nics)
    engine = hosts.engine("a")
    library.set_port("mlx_0", 1, PortState.ACTIVE)
    until(lambda: library.calls["ibv_query_gid_table"] > 0 or library.calls["ibv_query_gid"] > 0)

    nics[0].ports[0].gids = dict(enumerate(rows.values(), start=1))
    library.move_gid("mlx_0", 1, 1, 0)

    until(lambda: names(engine) == ["mlx_1:1", "mlx_0:1"])


def test_a_port_that_the_settings_leave_out_stays_out(hosts: FakeHosts) -> None:
    library = hosts.add("a", *rails(1, down=0))
    engine = hosts.engine("a", rdma_devices="mlx_1")

    library.set_port("mlx_0", 1, PortState.ACTIVE)
    time.sleep(0.02)

    assert names(engine) == ["mlx_1:1"]
    assert library.device("mlx_0").live.total() == 0


def test_a_port_whose_device_refuses_the_memory_stays_out_and_nothing_is_left_on_it(hosts: FakeHosts) -> None:
    pair = hosts.pair(rails(1, down=0), rails(2), nbytes=NBYTES)
    pair.a.register(np.zeros(NBYTES, np.uint8))
    library = pair.libraries[0]
    library.fail("ibv_reg_mr", errno.EPERM, nth=3, times=9, device="mlx_0")  # after the trial and the first region

    with capture_logs() as events:
        library.set_port("mlx_0", 1, PortState.ACTIVE)
        until(lambda: bool(events) and library.device("mlx_0").live["pd"] == 0)
    pair.open()
    pair.write(65536)

    assert names(pair.a) == ["mlx_1:1"]
    assert not library.device("mlx_0").live["mr"]
    assert "mlx_0:1" not in pair.local.keys["rdma"]["nics"]
    assert [event["port"] for event in events if event["event"] == "rdma.port_doubtful"] == ["mlx_0:1"]


def test_a_port_whose_device_takes_no_memory_at_all_is_told_once(hosts: FakeHosts) -> None:
    pair = hosts.pair(rails(1, down=0), rails(2), nbytes=NBYTES)
    library = pair.libraries[0]
    library.fail("ibv_reg_mr", errno.EPERM, times=9, device="mlx_0")

    with capture_logs() as events:
        library.set_port("mlx_0", 1, PortState.ACTIVE)
        until(lambda: bool(events))
        looks = library.calls["ibv_alloc_pd"]
        library.raise_event("mlx_0", EventType.GID_CHANGE, 1)
        until(lambda: library.calls["ibv_alloc_pd"] > looks and library.device("mlx_0").live["pd"] == 0)

    assert names(pair.a) == ["mlx_1:1"]
    (event,) = [event for event in events if event["event"] == "rdma.port_doubtful"]
    assert event["port"] == "mlx_0:1"
    assert "EPERM" in event["warning"]


def test_regions_come_and_go_while_a_port_is_taken_into_use(hosts: FakeHosts) -> None:
    """Each that stays has its keys on all ports, and none that went has any."""
    pair = hosts.pair(rails(1, down=0), rails(2), nbytes=65536)
    gone = [pair.a.register(np.zeros(65536, np.uint8)) for _ in range(20)]
    stay = []
    pair.libraries[0].set_port("mlx_0", 1, PortState.ACTIVE)

    for region in gone:
        stay.append(pair.a.register(np.zeros(65536, np.uint8)))
        pair.a.unregister(region)
    until(lambda: len(names(pair.a)) == 2)

    for region in [pair.local, *stay]:
        assert sorted(region.keys["rdma"]["nics"]) == ["mlx_0:1", "mlx_1:1"]
    assert pair.libraries[0].device("mlx_0").live["mr"] == 21


def test_a_device_that_appears_is_used_when_a_peer_is_opened(hosts: FakeHosts, tmp_path: Path) -> None:
    hosts.fabric.separate_subnets()
    here = rails(1)
    write_sysfs(tmp_path, FakeLibrary(None, here[0], name="before"))
    pair = hosts.pair(here[:1], rails(2), nbytes=NBYTES)
    pair.open()
    pair.segment.close()
    write_sysfs(tmp_path / "now", FakeLibrary(FakeFabric(), here[1], name="after"))
    (tmp_path / "sys/class/infiniband/mlx_1").symlink_to(tmp_path / "now/sys/class/infiniband/mlx_1")
    pair.libraries[0].plug_in(here[1])

    pair.open()
    until(lambda: names(pair.a) == ["mlx_0:1", "mlx_1:1"])
    write_until_connected(pair, 2)

    assert sorted(pair.connected) == ["mlx_0:1 to mlx_0:1", "mlx_1:1 to mlx_1:1"]


def test_an_engine_without_any_port_that_is_up_has_no_rdma(hosts: FakeHosts) -> None:
    hosts.add("a", *rails(1, down=0)[:1])

    with pytest.raises(TransportUnavailableError, match="mlx_0:1: DOWN"):
        hosts.engine("a")


def test_an_engine_that_is_closed_while_a_port_is_taken_into_use_leaves_nothing(hosts: FakeHosts) -> None:
    pair = hosts.pair(rails(1, down=0), rails(2), nbytes=NBYTES)
    library = pair.libraries[0]
    library.before["ibv_reg_mr"] = lambda: time.sleep(0.05)
    library.set_port("mlx_0", 1, PortState.ACTIVE)
    until(lambda: library.running["ibv_reg_mr"] > 0)

    pair.a.close()

    assert not library.leaks
