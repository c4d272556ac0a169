"""The doctor's checks of one peer over fake NICs: each rail, the rung, the attributes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.cli.check import Check
from kvxfer.cli.checks_peer import rail_checks
from kvxfer.cli.rail_check import REGION_NAME
from tests.support.fake_engines import FakeHosts, fake_hosts
from tests.support.fake_verbs import FakeNic, connectx

BOTH = ("rdma", "tcp")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[FakeHosts]:
    with fake_hosts(tmp_path) as found:
        yield found


def checks(hosts: FakeHosts, ours: list[FakeNic], theirs: list[FakeNic], *, has_pool: bool = True) -> dict[str, Check]:
    hosts.add("a", *ours)
    hosts.add("b", *theirs)
    peer = hosts.engine("b", transports=BOTH)
    if has_pool:
        peer.allocate(1 << 20, name=REGION_NAME)
    engine = hosts.engine("a", transports=BOTH, connect_timeout_s=1.0)
    found = list(rail_checks(engine, engine.open_segment(peer.address)))
    assert all(check.remedy for check in found if check.status != "ok")
    return {check.name: check for check in found}


def test_each_rail_tells_gids_mtu_and_what_was_moved(hosts: FakeHosts) -> None:
    found = checks(
        hosts,
        [connectx("mlx5_0", "10.0.0.1"), connectx("mlx5_1", "10.0.0.2")],
        [connectx("mlx5_0", "10.0.0.3")],
    )

    assert found["peer rails"].value.startswith("2 of 2 rails work; 0 pairs")
    rail = found["mlx5_1:1 to mlx5_0:1"]
    assert rail.status == "ok"
    assert all(word in rail.value for word in ("10.0.0.2", "10.0.0.3", "MTU 4096", "16 READs", "read back and equal"))
    assert "Mooncake" in found["mlx5_0:1 attributes"].value
    assert "rdma ladder" not in found


def test_peer_without_a_pool_is_connected_and_nothing_is_moved(hosts: FakeHosts) -> None:
    found = checks(hosts, [connectx("mlx5_0", "10.0.0.1")], [connectx("mlx5_0", "10.0.0.3")], has_pool=False)

    rail = found["mlx5_0:1 to mlx5_0:1"]
    assert rail.status == "ok"
    assert "nothing moved" in rail.value
    assert "kvxfer serve" in rail.value


def test_lowered_attribute_is_a_warning_with_the_rungs_and_is_remembered(hosts: FakeHosts) -> None:
    found = checks(hosts, [connectx("mlx5_0", "10.0.0.1")], [connectx("mlx5_0", "10.0.0.3", read_depth_max=4)])

    rail = found["mlx5_0:1 to mlx5_0:1"]
    assert rail.status == "warn"
    assert "read_depth 16 -> 4" in rail.value
    assert "read_depth 4" in found["rdma ladder"].value


def test_rail_that_fails_is_a_warning_with_the_reason(hosts: FakeHosts) -> None:
    hosts.fabric.set_path("a/mlx5_0", "b/mlx5_0", rtr_errno=errno.EHOSTUNREACH)

    found = checks(hosts, [connectx("mlx5_0", "10.0.0.1")], [connectx("mlx5_0", "10.0.0.3")])

    assert found["peer rails"].status == "warn"
    assert "FAILS" in found["peer rails"].value
    rail = found["mlx5_0:1 to mlx5_0:1"]
    assert rail.status == "warn"
    assert "10.0.0.3" in rail.value


def test_kinds_of_devices_are_compared_once_each(hosts: FakeHosts) -> None:
    ours = [connectx(f"mlx5_{at}", f"10.0.0.{at + 1}") for at in range(3)]
    ours.append(connectx("mlx5_9", "10.0.0.9", vendor_part_id=4123))

    found = checks(hosts, ours, [connectx("mlx5_0", "10.0.0.20")])

    assert [name for name in found if name.endswith("attributes")] == ["mlx5_0:1 attributes", "mlx5_9:1 attributes"]
