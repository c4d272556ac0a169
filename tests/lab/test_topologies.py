"""kvxfer's choice of ports and GIDs in each topology, and data over every pair that it chose."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvxfer.errors import DeviceUnusableError
from kvxfer.system.interfaces import list_interfaces
from kvxfer.verbs.device import Context, list_devices
from kvxfer.verbs.enums import CompletionStatus, PortState, WorkOpcode
from kvxfer.verbs.gid_choice import GidPreference, choose_gid
from kvxfer.verbs.port import build_address_vector, choose_port, judge_ports
from kvxfer.verbs.port_offer import PortOffer, agree_mtu, plan_read_depth
from kvxfer.verbs.rails import PortPair, match_ports
from kvxfer.verbs.routes import find_route
from tests.lab.guests import GUESTS, End, Guest
from tests.lab.verbs_end import VerbsEnd

pytestmark = pytest.mark.rdma
everywhere = pytest.mark.topology(*GUESTS)
NBYTES = 1 << 14


@pytest.fixture
def guest(topology: str) -> Guest:
    return GUESTS[topology]


@pytest.fixture
def contexts() -> Iterator[dict[str, Context]]:
    opened = {device.name: device.open() for device in list_devices()}
    yield opened
    for context in opened.values():
        context.close()


@dataclass(frozen=True)
class Offers:
    """What the two hosts of a guest tell each other; where there is one host only, it talks with itself."""

    a: list[PortOffer]
    b: list[PortOffer]


@pytest.fixture
def offers(contexts: dict[str, Context]) -> Offers:
    a = [offer for name, context in contexts.items() if "rxa" in name for offer in offer_ports(context)]
    b = [offer for name, context in contexts.items() if "rxb" in name for offer in offer_ports(context)]
    sent = [PortOffer.from_json(offer.to_json()) for offer in b or a]  # without the indices, as a peer has them
    return Offers(a, sent)


def offer_ports(context: Context) -> list[PortOffer]:
    """Return what a host says of the usable ports of one device."""
    verdicts = judge_ports(context.ports(), context.device.transport_type)
    return [
        PortOffer.of(
            verdict.port,
            choose_gid(context.query_gid_table(verdict.port.number), list_interfaces()).offered,
            read_depth=plan_read_depth(context.limits, queue_pairs=16),
            pkey=context.query_pkey(verdict.port.number, 0),
        )
        for verdict in verdicts
        if verdict.is_usable
    ]


def ends_of(pair: PortPair) -> tuple[End, End]:
    assert pair.gids is not None
    return (
        End(pair.local.device, str(pair.gids.local.address)),
        End(pair.remote.device, str(pair.gids.remote.address)),
    )


def netdev_of(end: End) -> str:
    return end.device.replace("rx", "v")


@everywhere
def test_ports_are_paired_where_there_is_a_wire(guest: Guest, offers: Offers) -> None:
    assert {ends_of(pair) for pair in match_ports(offers.a, offers.b)} == set(guest.pairs)


@pytest.mark.topology(*(name for name in GUESTS if name != "port-down"))
def test_the_other_host_comes_to_the_same_pairs(guest: Guest, offers: Offers) -> None:
    seen_from_b = {ends_of(pair) for pair in match_ports(offers.b, offers.a)}

    assert {(there, here) for here, there in seen_from_b} == set(guest.pairs)


@everywhere
def test_data_crosses_every_pair_that_was_chosen(offers: Offers, contexts: dict[str, Context]) -> None:
    for pair in match_ports(offers.a, offers.b):
        assert pair.gids is not None
        assert pair.gids.local.index is not None
        table = contexts[pair.remote.device].query_gid_table(pair.remote.port)
        there = table.find_value(pair.gids.remote.value, pair.gids.remote.type)
        assert there is not None
        with (
            VerbsEnd(pair.local.device, gid_index=pair.gids.local.index, nbytes=NBYTES) as left,
            VerbsEnd(pair.remote.device, gid_index=there.index, nbytes=NBYTES) as right,
        ):
            path_mtu = agree_mtu(pair.local.mtu, pair.remote.mtu)
            vector = build_address_vector(pair.local, pair.remote, pair.gids)
            right.connect(qp_num=left.card["qp_num"], psn=left.card["psn"], gid=left.card["gid"], path_mtu=path_mtu)
            left.connect_by(vector, qp_num=right.card["qp_num"], psn=right.card["psn"], path_mtu=path_mtu)
            left.memory[:] = np.arange(NBYTES) % 251

            status = left.transfer(
                WorkOpcode.RDMA_WRITE, remote_addr=right.card["addr"], rkey=right.card["rkey"], nbytes=NBYTES
            )

            assert status == CompletionStatus.SUCCESS
            assert (right.memory == left.memory).all()


@pytest.mark.topology("wire", "ipv6", "mtu", "gids", "port-down", "split")
def test_the_kernel_has_a_route_over_every_wire(guest: Guest) -> None:
    for left, right in guest.pairs:
        for here, there in ((left, right), (right, left)):
            source, destination = ipaddress.ip_address(here.address), ipaddress.ip_address(there.address)

            route = find_route(source, destination, interface=netdev_of(here))

            assert route.is_reachable, route
            assert route.interface == netdev_of(here)


@pytest.mark.topology("split")
def test_the_kernel_has_no_route_into_the_other_network() -> None:
    source, destination = ipaddress.ip_address("10.10.0.1"), ipaddress.ip_address("10.20.0.2")

    assert not find_route(source, destination, interface="va0").is_reachable


@pytest.mark.topology("mtu")
def test_the_smaller_mtu_is_agreed_on(guest: Guest, offers: Offers) -> None:
    (pair,) = match_ports(offers.a, offers.b)

    assert (pair.local.mtu.nbytes, pair.remote.mtu.nbytes) == (guest.active_mtu["rxa0"], guest.active_mtu["rxb0"])
    assert agree_mtu(pair.local.mtu, pair.remote.mtu).nbytes == 1024


@pytest.mark.topology("port-down")
def test_a_port_that_is_down_is_passed_over_with_its_state(contexts: dict[str, Context]) -> None:
    (port,) = contexts["rxa0"].ports()
    verdicts = judge_ports([port], contexts["rxa0"].device.transport_type)

    assert port.state is PortState.DOWN
    with pytest.raises(DeviceUnusableError, match=r"rxa0 cannot be used: port 1: DOWN, not ACTIVE"):
        choose_port("rxa0", verdicts)


@pytest.mark.topology("gids")
def test_a_row_whose_address_was_deleted_cannot_be_fixed(contexts: dict[str, Context]) -> None:
    table = contexts["rxa0"].query_gid_table(1)
    indices = [entry.index for entry in table]
    hole = next(index for index in range(max(indices)) if index not in indices)

    assert table.find(hole) is None
    with pytest.raises(DeviceUnusableError, match=rf"GID index {hole} was fixed.*that row is empty"):
        choose_gid(table, list_interfaces(), GidPreference(index=hole))


@pytest.mark.topology("gids", machine="qemu")  # User-Mode Linux kernels have no 8021q
def test_a_vlan_in_the_same_subnet_comes_after_the_wire(contexts: dict[str, Context]) -> None:
    choice = choose_gid(contexts["rxa0"].query_gid_table(1), list_interfaces())
    addresses = [str(candidate.address) for candidate in choice.offered]

    assert addresses.index("10.10.0.1") < addresses.index("10.10.0.3")
    assert [candidate.is_vlan for candidate in choice.offered if str(candidate.address) == "10.10.0.3"] == [True]
