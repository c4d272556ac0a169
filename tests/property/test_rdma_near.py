"""NUMA nodes: ports of like nodes are paired, rails near to its memory carry a batch, and none is left without."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.transports.rdma_near import FAR_SAVING_S, find_near, rail_distance
from kvxfer.verbs.port_offer import PortOffer
from kvxfer.verbs.rails import PortPair, match_ports, rank_port_pairs
from tests.support.gid_rows import candidate, offer

NODE = st.none() | st.integers(0, 3)
NODES = st.lists(NODE, min_size=1, max_size=6)


def ports(side: str, nodes: Sequence[int | None], subnets: Sequence[int]) -> list[PortOffer]:
    """Ports with names of their own, so that names say nothing."""
    host = 1 if side == "a" else 101
    return [
        offer(f"{side}{row}", candidate(f"10.{subnet}.0.{host + row}/24"), numa_node=node)
        for row, (node, subnet) in enumerate(zip(nodes, subnets, strict=True))
    ]


@st.composite
def hosts(draw: st.DrawFn) -> tuple[list[PortOffer], list[PortOffer]]:
    sides = []
    for side in "ab":
        nodes = draw(NODES)
        subnets = draw(st.lists(st.integers(0, 1), min_size=len(nodes), max_size=len(nodes)))
        sides.append(ports(side, nodes, subnets))
    return sides[0], sides[1]


def is_routed(pair: PortPair) -> bool:
    return pair.gids is not None and pair.gids.rank.is_other_subnet


def is_alike(pair: PortPair) -> bool:
    return pair.local.numa_node == pair.remote.numa_node is not None


@given(hosts())
def test_nodes_never_come_before_reachability_and_take_no_pair_away(
    both: tuple[list[PortOffer], list[PortOffer]],
) -> None:
    ours, theirs = both
    pairs = rank_port_pairs(ours, theirs)
    without = [[dataclasses.replace(one, numa_node=None) for one in side] for side in both]

    routed = [is_routed(pair) for pair in pairs]
    assert routed == sorted(routed)
    assert len(pairs) == len(rank_port_pairs(*without)) == len(ours) * len(theirs)
    assert {pair.local for pair in match_ports(ours, theirs)} == set(ours)
    for kind in (True, False):
        alike = [is_alike(pair) for pair in pairs if is_routed(pair) is kind]
        assert alike == sorted(alike, reverse=True)


@given(st.lists(NODE, min_size=1, max_size=6).flatmap(lambda nodes: st.tuples(st.just(nodes), st.permutations(nodes))))
def test_hosts_with_the_same_nodes_in_any_order_are_paired_alike(
    both: tuple[list[int | None], list[int | None]],
) -> None:
    here, there = (ports(side, nodes, [0] * len(nodes)) for side, nodes in zip("ab", both, strict=True))

    for pair in match_ports(here, there):
        assert pair.local.numa_node == pair.remote.numa_node


@given(hosts(), st.permutations(range(4)))
def test_what_nodes_are_called_does_not_matter(both: tuple[list[PortOffer], list[PortOffer]], names: list[int]) -> None:
    def called(one: PortOffer) -> PortOffer:
        return dataclasses.replace(one, numa_node=None if one.numa_node is None else names[one.numa_node])

    before = match_ports(*both)
    after = match_ports(*([called(one) for one in side] for side in both))

    assert [(pair.local.device, pair.remote.device) for pair in before] == [
        (pair.local.device, pair.remote.device) for pair in after
    ]


@dataclass(frozen=True)
class Rail:
    numa_nodes: tuple[int | None, int | None]
    rate: float


RATE = st.sampled_from([0.0, 1e8, 3e9, 1e10, 5e10])
RAILS = st.lists(st.builds(Rail, st.tuples(NODE, NODE), RATE), min_size=1, max_size=6)
NBYTES = st.integers(0, 1 << 32)


@given(RAILS, NODE, NODE, NBYTES)
def test_a_batch_goes_over_all_of_the_nearest_rails_or_over_all(
    rails: list[Rail], local: int | None, remote: int | None, nbytes: int
) -> None:
    chosen = find_near(rails, local, remote, nbytes=nbytes)
    distances = [rail_distance(rail, local, remote) for rail in rails]
    nearest = [rail for rail, distance in zip(rails, distances, strict=True) if distance == min(distances)]

    assert chosen in (nearest, rails)
    assert find_near(rails, local, remote, nbytes=0) == nearest


@given(RAILS, NODE, NODE, NBYTES, NBYTES)
def test_a_larger_batch_has_no_fewer_rails(
    rails: list[Rail], local: int | None, remote: int | None, nbytes: int, more: int
) -> None:
    assert len(find_near(rails, local, remote, nbytes=nbytes)) <= len(
        find_near(rails, local, remote, nbytes=nbytes + more)
    )


@given(RAILS, NBYTES)
def test_memory_of_unknown_node_is_near_to_every_rail(rails: list[Rail], nbytes: int) -> None:
    assert find_near(rails, None, None, nbytes=nbytes) == rails


@given(RAILS, NODE, NODE, NBYTES)
def test_devices_of_unknown_node_are_near_to_all_memory(
    rails: list[Rail], local: int | None, remote: int | None, nbytes: int
) -> None:
    """B31."""
    unknown = [dataclasses.replace(rail, numa_nodes=(None, None)) for rail in rails]

    assert find_near(unknown, local, remote, nbytes=nbytes) == unknown
    assert set(unknown) <= set(find_near([*rails, *unknown], local, remote, nbytes=nbytes))


@given(RAILS, NODE, NODE, NBYTES)
def test_farther_rails_are_taken_only_where_they_save_what_they_cost(
    rails: list[Rail], local: int | None, remote: int | None, nbytes: int
) -> None:
    rails = [rail for rail in rails if rail.rate] or [Rail((None, None), 1e9)]
    near = find_near(rails, local, remote, nbytes=0)
    chosen = find_near(rails, local, remote, nbytes=nbytes)

    if len(chosen) > len(near):
        saved_s = nbytes / sum(rail.rate for rail in near) - nbytes / sum(rail.rate for rail in rails)
        assert saved_s >= FAR_SAVING_S
