"""Which port of one host is connected to which of the other. Bnn: faults that other engines had."""

from __future__ import annotations

import pytest

from kvxfer.errors import DeviceUnusableError
from kvxfer.verbs.enums import GidType
from kvxfer.verbs.gid_candidate import NetdevState
from kvxfer.verbs.port_offer import PortOffer
from kvxfer.verbs.rails import PortPair, find_shared_gids, match_ports, rank_port_pairs
from tests.support.gid_rows import IB, INFINIBAND, V1, V2, candidate, offer


def names(pairs: list[PortPair]) -> list[tuple[str, str]]:
    return [(pair.local.device, pair.remote.device) for pair in pairs]


def roce(device: str, address: str, kind: GidType = V2, state: NetdevState = NetdevState.UP) -> PortOffer:
    return offer(device, candidate(address, kind, index=3, state=state))


def test_only_ports_with_one_kind_of_link_are_paired() -> None:
    """B24."""
    a = [roce("mlx_0", "192.0.2.1/24"), offer("mlx_1", candidate("fe80::1", IB), link=INFINIBAND)]
    b = [offer("mlx_0", candidate("fe80::2", IB), link=INFINIBAND)]

    assert names(rank_port_pairs(a, b)) == [("mlx_1", "mlx_0")]
    assert names(rank_port_pairs(b, a)) == [("mlx_0", "mlx_1")]
    with pytest.raises(DeviceUnusableError, match=r"no common link layer: .*Ethernet here, InfiniBand there"):
        match_ports(a[:1], b)


def test_rails_in_one_subnet_come_first_and_the_others_stay_for_later() -> None:
    """B27."""
    a = [roce("mlx_0", "192.0.2.1/28"), roce("mlx_1", "198.51.100.1/28")]
    b = [roce("mlx_1", "192.0.2.2/28"), roce("mlx_0", "198.51.100.2/28")]

    assert names(rank_port_pairs(a, b)[:2]) == [("mlx_0", "mlx_1"), ("mlx_1", "mlx_0")]
    assert len(rank_port_pairs(a, b)) == 4
    assert names(match_ports(a, b)) == [("mlx_0", "mlx_1"), ("mlx_1", "mlx_0")]


def test_same_name_is_preferred_to_same_position() -> None:
    """B28: the hosts list their devices by NUMA node, and the nodes differ."""
    a = [roce("mlx_0", "10.0.0.1"), roce("mlx_1", "10.0.1.1"), roce("mlx_5", "10.0.5.1")]
    b = [roce("mlx_5", "10.1.5.1"), roce("mlx_0", "10.1.0.1"), roce("mlx_1", "10.1.1.1")]

    assert names(match_ports(a, b)) == [("mlx_0", "mlx_0"), ("mlx_1", "mlx_1"), ("mlx_5", "mlx_5")]


def test_same_position_decides_where_neither_subnet_nor_name_does() -> None:
    """B28."""
    a = [roce("mlx_0", "10.0.0.1"), roce("mlx_1", "10.0.1.1")]
    b = [roce("bnxt_0", "10.1.0.1"), roce("bnxt_1", "10.1.1.1")]

    assert names(match_ports(a, b)) == [("mlx_0", "bnxt_0"), ("mlx_1", "bnxt_1")]


def test_ports_of_the_smaller_side_are_shared_out_evenly() -> None:
    """B44."""
    a = [roce(f"mlx_{at}", f"10.0.0.{at + 1}/24") for at in range(4)]
    b = [roce(f"mlx_{at}", f"10.0.0.{at + 11}/24") for at in range(2)]

    used = [remote for _, remote in names(match_ports(a, b))]

    assert sorted(used) == ["mlx_0", "mlx_0", "mlx_1", "mlx_1"]
    assert len(match_ports(b, a)) == 2


def test_pair_whose_interface_is_down_is_the_last() -> None:
    a = [roce("mlx_0", "10.0.0.1/24", state=NetdevState.DOWN), roce("mlx_1", "10.0.1.1/24")]
    b = [roce("mlx_0", "10.0.0.2/24")]

    assert names(rank_port_pairs(a, b)) == [("mlx_1", "mlx_0"), ("mlx_0", "mlx_0")]


def test_versions_and_partitions_that_do_not_fit_make_no_pair() -> None:
    """B05, B40."""
    with pytest.raises(DeviceUnusableError, match="mlx_0 port 1 to mlx_0 port 1: no common kind of GID"):
        match_ports([roce("mlx_0", "10.0.0.1/24", V1)], [roce("mlx_0", "10.0.0.2/24", V2)])
    with pytest.raises(DeviceUnusableError, match="partition key 0x8001 here, 0x8002"):
        match_ports([offer(link=INFINIBAND, pkey=0x8001)], [offer(link=INFINIBAND, pkey=0x8002)])
    with pytest.raises(DeviceUnusableError, match="one end offers no port"):
        match_ports([], [roce("mlx_0", "10.0.0.2/24")])


def test_infiniband_ports_without_gids_are_paired_by_lid() -> None:
    (pair,) = match_ports([offer(link=INFINIBAND)], [offer(link=INFINIBAND)])

    assert pair.gids is None


def test_devices_with_equal_gids_are_told_once() -> None:
    """B46: a bond over two cards. Link-local addresses are the same on many links."""
    shared = candidate("192.0.2.1/24", netdev="bond0")
    offers = [
        offer("mlx5_0", candidate("fe80::1"), shared, candidate("192.0.2.1/24", V1)),
        offer("mlx5_1", candidate("fe80::1"), shared),
        offer("mlx5_2", candidate("fe80::1"), candidate("192.0.2.9/24")),
    ]

    (warning,) = find_shared_gids(offers)

    assert "mlx5_0 port 1 and mlx5_1 port 1 have the same address 192.0.2.1" in warning
    assert find_shared_gids([offer("mlx5_bond_0", shared)]) == []
    assert len(match_ports(offers[:2], [offer("mlx5_0", candidate("192.0.2.2/24"))])) == 2


def test_like_nodes_decide_before_places_and_after_names() -> None:
    """B28, B30: the position would pair across the nodes."""
    a = [offer(f"mlx_{at}", candidate(f"10.0.0.{at + 1}/24"), numa_node=at) for at in range(2)]
    b = [offer(f"bnxt_{at}", candidate(f"10.0.0.{at + 11}/24"), numa_node=1 - at) for at in range(2)]
    named = [offer(f"mlx_{at}", candidate(f"10.0.0.{at + 11}/24"), numa_node=1 - at) for at in range(2)]

    assert names(match_ports(a, b)) == [("mlx_0", "bnxt_1"), ("mlx_1", "bnxt_0")]
    assert names(match_ports(a, named)) == [("mlx_0", "mlx_0"), ("mlx_1", "mlx_1")]
