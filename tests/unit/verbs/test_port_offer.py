"""What two ports agree on: MTU, READs at once, partitions; and what of a peer's offer is believed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import RemoteProtocolError
from kvxfer.verbs.enums import Mtu
from kvxfer.verbs.port_offer import (
    MTU_ASSUMED,
    PortOffer,
    ReadDepth,
    agree_mtu,
    agree_read_depth,
    find_pkey_conflict,
    mtu_of_interface,
    plan_read_depth,
)
from tests.support.gid_rows import IB, INFINIBAND, candidate, limits, offer, port


def test_path_mtu_is_the_smallest_of_both_ports_and_the_bound() -> None:
    """B37."""
    assert agree_mtu(Mtu.MTU_4096, Mtu.MTU_1024) is Mtu.MTU_1024
    assert agree_mtu(Mtu.MTU_1024, Mtu.MTU_4096) is Mtu.MTU_1024
    assert agree_mtu(Mtu.MTU_4096, Mtu.MTU_4096, nbytes_max=2048) is Mtu.MTU_2048
    assert agree_mtu(Mtu(9), Mtu.MTU_4096) is MTU_ASSUMED


def test_interface_carries_what_fits_beside_the_headers() -> None:
    """B37."""
    fits = {1500: 1024, 4191: 2048, 4192: 4096, 9000: 4096, 100: 256}

    assert {mtu: mtu_of_interface(mtu).nbytes for mtu in fits} == fits


def test_peer_that_tells_no_mtu_is_assumed_to_have_the_documented_one() -> None:
    """B37."""
    told = offer("mlx5_0", candidate("192.0.2.1/24")).to_json()
    del told["mtu"]

    assert PortOffer.from_json(told).mtu is MTU_ASSUMED is Mtu.MTU_1024


def test_reads_at_once_are_bounded_by_both_ends() -> None:
    """B38."""
    a = plan_read_depth(limits(max_qp_rd_atom=16, max_qp_init_rd_atom=16), queue_pairs=1)
    b = plan_read_depth(limits(max_qp_rd_atom=4, max_qp_init_rd_atom=4), queue_pairs=1)

    assert agree_read_depth(a, b) == ReadDepth(initiator=4, responder=4)
    assert agree_read_depth(b, a) == ReadDepth(initiator=4, responder=4)


def test_budget_of_the_whole_device_is_shared_out() -> None:
    """B38: Ionic has 16 for all queue pairs."""
    budget = limits(max_qp_rd_atom=16, max_qp_init_rd_atom=16, max_res_rd_atom=16)

    assert plan_read_depth(budget, queue_pairs=8).responder * 8 <= 16
    assert plan_read_depth(budget, queue_pairs=100).responder == 1
    assert plan_read_depth(limits(max_res_rd_atom=0), queue_pairs=8) == ReadDepth(255, 255)
    assert plan_read_depth(limits(), queue_pairs=1, depth_max=16) == ReadDepth(16, 16)


DEPTHS = st.builds(ReadDepth, st.integers(0, 255), st.integers(0, 255))


@given(DEPTHS, DEPTHS)
def test_what_one_end_asks_the_other_answers(ours: ReadDepth, theirs: ReadDepth) -> None:
    here, there = agree_read_depth(ours, theirs), agree_read_depth(theirs, ours)

    assert here.initiator == there.responder <= theirs.responder
    assert here.responder == there.initiator <= ours.responder


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (0xFFFF, 0xFFFF, ""),
        (0xFFFF, 0x7FFF, ""),
        (0x7FFF, 0x7FFF, "both are limited members of partition 0x7fff"),
        (0x8001, 0x8002, "partition key 0x8001 here, 0x8002 at the peer"),
    ],
)
def test_partitions_of_infiniband_are_compared(ours: int, theirs: int, reason: str) -> None:
    """B40."""
    here, there = offer(link=INFINIBAND, pkey=ours), offer(link=INFINIBAND, pkey=theirs)

    assert find_pkey_conflict(here, there) == reason
    assert find_pkey_conflict(offer(pkey=ours), offer(pkey=theirs)) == ""


def test_offer_of_a_port_has_no_lid_on_ethernet_and_one_on_infiniband() -> None:
    """B18."""
    values = {"read_depth": ReadDepth(16, 16), "pkey": 0xFFFF}

    ethernet = PortOffer.of(port(lid=9), (), **values)  # type: ignore[arg-type]
    infiniband = PortOffer.of(port(lid=0x120, link_layer=INFINIBAND), (), **values)  # type: ignore[arg-type]

    assert (ethernet.lid, ethernet.to_json()["lid"]) == (0, 0)
    assert infiniband.to_json()["lid"] == 288
    assert PortOffer.of(port(), (), mtu_nbytes_max=1024, **values).mtu is Mtu.MTU_1024  # type: ignore[arg-type]


def test_offer_survives_the_way_to_the_peer() -> None:
    for one in (
        offer("mlx5_0", candidate("192.0.2.1/24"), candidate("2001:db8::1/64")),
        offer("mlx5_0", candidate("fe80::1", IB), link=INFINIBAND, lid=288, needs_grh=True, number=2),
        offer("mlx5_0", link=INFINIBAND),
    ):
        assert PortOffer.from_json(json.loads(json.dumps(one.to_json()))) == one


GOOD = offer("mlx5_0", candidate("192.0.2.1/24")).to_json()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "mlx5_0\n"),
        ("device", "a" * 65),
        ("port", 0),
        ("link", 0),
        ("link", None),
        ("lid", -1),
        ("grh", 0),
        ("mtu", 6),
        ("initiator_depth", 256),
        ("responder_depth", 1.0),
        ("message_max", 0),
        ("message_max", 1),
        ("pkey", 1 << 16),
        ("gids", [candidate("fe80::1", IB).to_json()]),
    ],
)
def test_field_that_no_peer_sends_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        PortOffer.from_json({**GOOD, field: value})

    assert caught.value.values["field"] == field


def test_ethernet_port_without_a_gid_is_answered_with_missing_gid() -> None:
    """B12."""
    with pytest.raises(RemoteProtocolError, match="missing GID"):
        PortOffer.from_json({**GOOD, "gids": []})


@pytest.mark.parametrize(("told", "node"), [({"numa_node": 1}, 1), ({"numa_node": -1}, None), ({}, None)], ids=str)
def test_node_that_a_peer_does_not_tell_is_unknown(told: dict[str, int], node: int | None) -> None:
    """B31: as one of an older version does."""
    rest = {name: value for name, value in GOOD.items() if name != "numa_node"}

    assert PortOffer.from_json({**rest, **told}).numa_node == node
    with pytest.raises(RemoteProtocolError, match="numa_node"):
        PortOffer.from_json({**rest, "numa_node": 1 << 20})
