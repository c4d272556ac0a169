"""`rdma_peer_devices` picks ports of the peer; `Segment.offer_of` tells what there is to pick from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.errors import TransportUnavailableError
from kvxfer.transports.rdma import read_card
from tests.support.fake_engines import FakeHosts, fake_hosts
from tests.support.fake_verbs import connectx


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[FakeHosts]:
    with fake_hosts(tmp_path) as found:
        found.add("a", connectx("mlx5_0", "10.0.0.1"), connectx("mlx5_1", "10.0.0.2"))
        found.add("b", connectx("mlx5_0", "10.0.0.3"), connectx("mlx5_1", "10.0.0.4"))
        yield found


@pytest.mark.parametrize("wanted", ["mlx5_1", "mlx5_1:1"])
def test_rails_lead_to_the_named_ports_of_the_peer_only(hosts: FakeHosts, wanted: str) -> None:
    peer = hosts.engine("b")

    segment = hosts.engine("a", rdma_peer_devices=wanted).open_segment(peer.address)

    rails = segment.describe()["rdma"]["rails"]
    assert {rail["rail"] for rail in rails} == {"mlx5_0:1 to mlx5_1:1", "mlx5_1:1 to mlx5_1:1"}


def test_one_rail_is_named_by_a_port_of_each_end(hosts: FakeHosts) -> None:
    peer = hosts.engine("b")

    segment = hosts.engine("a", rdma_devices="mlx5_0:1", rdma_peer_devices="mlx5_1:1").open_segment(peer.address)

    (rail,) = segment.describe()["rdma"]["rails"]
    assert (rail["rail"], rail["connected"]) == ("mlx5_0:1 to mlx5_1:1", True)
    assert rail["local_gid"].startswith("10.0.0.1")
    assert rail["remote_gid"].startswith("10.0.0.4")


def test_ports_that_the_peer_does_not_offer_are_told_with_those_it_does(hosts: FakeHosts) -> None:
    peer = hosts.engine("b")

    with pytest.raises(TransportUnavailableError, match="mlx5_0:1, mlx5_1:1") as caught:
        hosts.engine("a", rdma_peer_devices="mlx5_7").open_segment(peer.address)

    assert "mlx5_7" in str(caught.value)
    assert "KVXFER_RDMA_PEER_DEVICES" in caught.value.remedy


def test_segment_tells_what_the_peer_offers(hosts: FakeHosts) -> None:
    peer = hosts.engine("b")

    segment = hosts.engine("a").open_segment(peer.address)

    offer = segment.offer_of("rdma")
    assert offer is not None
    assert [port.device for _, port in read_card(offer, "b")] == ["mlx5_0", "mlx5_1"]
    assert segment.offer_of("tcp") is None


def test_failed_open_has_every_attempt_as_a_value(hosts: FakeHosts) -> None:
    peer = hosts.engine("b")
    for source in ("a/mlx5_0", "a/mlx5_1"):
        for target in ("b/mlx5_0", "b/mlx5_1"):
            hosts.fabric.set_path(source, target, rtr_errno=113)

    with pytest.raises(TransportUnavailableError) as caught:
        hosts.engine("a", connect_timeout_s=0.2).open_segment(peer.address)

    attempts = caught.value.values["attempts"]
    assert {attempt.step for attempt in attempts} == {"RTR"}
    assert str(caught.value).count("mlx5_0:1 to mlx5_0:1:") == 1  # told once, however often it was tried
