"""Two engines in each guest: the rails that they pair, with GIDs and MTU, bytes over each, and why the others are none.

`guests.GUESTS` says what must come out; kvxfer is asked through `segment.describe()`, as a user would.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import Segment, TransferEngine
from kvxfer.errors import TransportUnavailableError
from tests.lab.guests import GUESTS, Guest
from tests.lab.oracle import pyverbs_facts
from tests.support.peer import Peer, pattern, wait_until

NBYTES = 4 << 20  # large enough for all rails at once
BLOCK_NBYTES = 1 << 16

pytestmark = pytest.mark.rdma


@pytest.fixture
def guest(topology: str) -> Guest:
    return GUESTS[topology]


def devices(guest: Guest, side: str) -> str:
    """The devices of a host; where there is one host only, its devices are on both sides."""
    found = [name for name in guest.active_mtu if name.startswith(f"rx{side}")]
    return ",".join(found or guest.active_mtu)


@contextlib.contextmanager
def two_engines(here: str, there: str, **settings: Any) -> Iterator[tuple[TransferEngine, Peer]]:
    with (
        TransferEngine(transports=("rdma",), rdma_devices=here, **settings) as engine,
        Peer(transports=("rdma",), rdma_devices=there) as peer,
    ):
        yield engine, peer


def move(engine: TransferEngine, peer: Peer, segment: Segment) -> None:
    """Write scattered blocks, read them back, compare both times."""
    here, there = engine.register(np.zeros(NBYTES, np.uint8)), peer.register(NBYTES)
    content = pattern(NBYTES, 1)
    here.array[:] = content
    order = np.random.default_rng(2).permutation(NBYTES // BLOCK_NBYTES) * BLOCK_NBYTES
    straight = np.sort(order)
    engine.write(segment, here.address + straight, there.address + order, BLOCK_NBYTES)
    assert np.array_equal(there.array().reshape(-1, BLOCK_NBYTES)[order // BLOCK_NBYTES].ravel(), content)
    here.array[:] = 0
    engine.read(segment, here.address + straight, there.address + order, BLOCK_NBYTES)
    assert np.array_equal(here.array, content)
    engine.unregister(here)
    there.unregister()


def connected(segment: Segment) -> dict[str, dict[str, Any]]:
    """The rails that are connected, by name."""
    return {rail["rail"]: rail for rail in segment.describe()["rdma"]["rails"] if rail["connected"]}


def bare(gid: str) -> str:
    """The address in "10.10.0.1/24 (RoCE v2, va0) in row 1"."""
    return gid.partition("/")[0].partition(" ")[0]


@pytest.mark.topology("wire", "simple", "ipv6", "mtu", "gids", "port-down", "split")
def test_data_goes_over_the_rails_that_there_are_with_the_gids_and_the_mtu_of_both_ends(guest: Guest) -> None:
    wanted = {
        f"{left.device}:1 to {right.device}:1": (
            left.address,
            right.address,
            min(guest.active_mtu[left.device], guest.active_mtu[right.device]),
        )
        for left, right in guest.pairs
    }
    with two_engines(devices(guest, "a"), devices(guest, "b")) as (engine, peer):
        segment = engine.open_segment(peer.address)
        wait_until(lambda: move(engine, peer, segment) or len(connected(segment)) == len(wanted), 30.0)

        found = {
            name: (bare(rail["local_gid"]), bare(rail["remote_gid"]), rail["attributes"]["path_mtu"])
            for name, rail in connected(segment).items()
        }

        assert segment.transport == "rdma"
        assert found == wanted
        assert all("RoCE v2" in rail["local_gid"] for rail in connected(segment).values())


@pytest.mark.topology("wire", "ipv6", "split", "port-down")
def test_bytes_cross_each_wire_and_no_other(guest: Guest) -> None:
    """A large batch takes every rail; what is sent to netdevs that carry none is not data."""
    used = {left.device for left, _ in guest.pairs}
    with two_engines(devices(guest, "a"), devices(guest, "b")) as (engine, peer):
        segment = engine.open_segment(peer.address)
        wait_until(lambda: move(engine, peer, segment) or len(connected(segment)) == len(guest.pairs), 30.0)
        before = {name: sent_nbytes(name) for name in guest.active_mtu}
        move(engine, peer, segment)

        for name in guest.active_mtu:
            if name.startswith("rxa"):
                carried = sent_nbytes(name) - before[name] > NBYTES // 8
                assert carried == (name in used), name


def sent_nbytes(device: str) -> int:
    return int(Path(f"/sys/class/net/{device.replace('rx', 'v')}/statistics/tx_bytes").read_text())


@pytest.mark.topology("split")
@pytest.mark.parametrize(("here", "there"), [("rxa0", "rxb0"), ("rxa1", "rxb1")])
def test_ports_of_separate_networks_are_refused_with_both_addresses(guest: Guest, here: str, there: str) -> None:
    ends = {end.device: end.address for pair in guest.pairs for end in pair}
    with two_engines(here, there) as (engine, peer):
        with pytest.raises(TransportUnavailableError) as caught:
            engine.open_segment(peer.address)

        assert f"no route from {ends[here]} to {ends[there]}" in caught.value.message
        assert f"{here} port 1 to {there} port 1" in caught.value.message
        assert "common subnets" in caught.value.remedy


@pytest.mark.topology("split")
def test_a_peer_that_is_out_of_reach_by_rdma_is_reached_by_tcp_with_the_reason() -> None:
    with (
        TransferEngine(transports=("rdma", "tcp"), rdma_devices="rxa0") as engine,
        Peer(transports=("rdma", "tcp"), rdma_devices="rxb0") as peer,
    ):
        segment = engine.open_segment(peer.address)
        move(engine, peer, segment)

        assert segment.transport == "tcp"
        assert "no route from 10.10.0.1 to 10.20.0.2" in segment.passed_over["rdma"]


@pytest.mark.topology("port-down")
def test_a_port_that_is_down_is_neither_used_nor_offered(guest: Guest) -> None:
    with two_engines(devices(guest, "a"), devices(guest, "b")) as (engine, peer):
        there = peer.run("result = engine._transports['rdma'].card()['ports']")
        here: Any = engine._transports.find("rdma").card()

        assert [port["offer"]["device"] for port in here["ports"]] == ["rxa1"]
        assert [port["offer"]["device"] for port in there] == ["rxb0", "rxb1"]
        assert "rxa0" in engine.probe()[0].reason


@pytest.mark.topology("port-down")
def test_an_engine_of_a_port_that_is_down_says_so() -> None:
    with pytest.raises(TransportUnavailableError, match=r"rxa0:1.*DOWN"):
        TransferEngine(transports=("rdma",), rdma_devices="rxa0")


@pytest.mark.topology("port-down")
def test_a_pair_that_shares_no_wire_is_refused() -> None:
    """rxb1 has an address in the network of va0, which is down: no port here has a way to it."""
    refused = pytest.raises(TransportUnavailableError, match=r"rxa1 port 1 to rxb1 port 1.*no route")
    with two_engines("rxa1", "rxb1") as (engine, peer), refused:
        engine.open_segment(peer.address)


@pytest.mark.topology("gids")
def test_the_gid_that_the_settings_fix_is_the_one_that_is_used() -> None:
    rows = pyverbs_facts()["rxa0"]["gids"]
    # of the netdev on the wire: those of the VLAN on top of it reach nobody
    link_local = {
        row["gid_index"]: row["gid"] for row in rows if row["gid"].startswith("fe80") and row["netdev"] == "va0"
    }
    assert len(link_local) >= 2
    for index, gid in link_local.items():
        with two_engines("rxa0", "rxb0", gid_index=index) as (engine, peer):
            segment = engine.open_segment(peer.address)
            move(engine, peer, segment)

            rail = connected(segment)["rxa0:1 to rxb0:1"]
            assert bare(rail["local_gid"]) == str(ipaddress.ip_address(gid))
            assert bare(rail["remote_gid"]).startswith("fe80:")
