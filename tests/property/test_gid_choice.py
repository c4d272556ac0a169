"""Two ends that exchange candidates come to the same pair, and no order of rows makes a worse GID win."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import DeviceUnusableError, RemoteProtocolError
from kvxfer.system.interfaces import Interface, InterfaceAddress
from kvxfer.verbs.enums import GidType, LinkLayer
from kvxfer.verbs.gid import GidEntry, GidTable
from kvxfer.verbs.gid_candidate import GidCandidate, GidScope, NetdevState, find_candidates
from kvxfer.verbs.gid_choice import choose_gid, choose_gid_pair, rank_candidate, rank_gid_pairs
from tests.support.gid_rows import gid

# Few addresses in few subnets, so that they meet.
ADDRESSES = [
    *(f"10.{net}.0.{host}" for net in range(3) for host in range(1, 4)),
    *(f"fd00:{net}::{host}" for net in range(2) for host in range(1, 4)),
    *(f"fe80::{host}" for host in range(1, 4)),
    "169.254.0.1",
    "127.0.0.1",
    "::1",
]
ROCE = st.sampled_from([GidType.ROCE_V1, GidType.ROCE_V2])
NETDEVS = ["", "eth0", "eth1", "eth1.5", "gone0"]


@st.composite
def candidates(draw: st.DrawFn) -> GidCandidate:
    address = draw(st.sampled_from(ADDRESSES))
    nbits = ipaddress.ip_address(address).max_prefixlen
    return GidCandidate(
        value=gid(address),
        type=draw(ROCE),
        netdev=draw(st.sampled_from(NETDEVS)),
        state=draw(st.sampled_from(list(NetdevState))),
        prefix_nbits=draw(st.none() | st.sampled_from([8, 16, 24, 30, nbits])),
        is_vlan=draw(st.booleans()),
    )


LISTS = st.lists(candidates(), max_size=6)


@given(LISTS, LISTS)
def test_both_ends_choose_the_same_pair(ours: list[GidCandidate], theirs: list[GidCandidate]) -> None:
    here, there = rank_gid_pairs(ours, theirs), rank_gid_pairs(theirs, ours)

    assert len(here) == len(there)
    assert [pair.rank for pair in here] == [pair.rank for pair in there]
    if here:
        assert (here[0].local, here[0].remote) == (there[0].remote, there[0].local)
        assert here[0] == choose_gid_pair(ours, theirs)
    else:
        with pytest.raises(DeviceUnusableError):
            choose_gid_pair(ours, theirs)


@given(LISTS)
def test_one_list_at_both_ends_is_connected_row_by_row(both: list[GidCandidate]) -> None:
    """Two engines on one host, or one that talks to itself."""
    pairs = rank_gid_pairs(both, both)

    if both:
        assert pairs[0].local == pairs[0].remote


@given(LISTS, LISTS)
def test_no_pair_mixes_types_or_families_and_none_that_fits_is_missing(
    ours: list[GidCandidate], theirs: list[GidCandidate]
) -> None:
    pairs = rank_gid_pairs(ours, theirs)

    found = {(pair.local.value, pair.local.type, pair.remote.value, pair.remote.type) for pair in pairs}
    assert len(found) == len(pairs)
    assert found == {
        (one.value, one.type, other.value, other.type)
        for one in ours
        for other in theirs
        if one.type == other.type and one.address.version == other.address.version
    }


@given(LISTS, LISTS)
def test_a_usable_pair_always_comes_before_a_last_resort(ours: list[GidCandidate], theirs: list[GidCandidate]) -> None:
    flags = [pair.is_broken for pair in rank_gid_pairs(ours, theirs)]

    assert flags == sorted(flags)


@st.composite
def hosts(draw: st.DrawFn) -> tuple[list[GidEntry], list[Interface]]:
    """A GID table and interfaces, which agree with it or not."""
    entries = [
        GidEntry(index, gid(draw(st.sampled_from(ADDRESSES))), draw(ROCE), draw(st.sampled_from(NETDEVS)))
        for index in draw(st.lists(st.integers(0, 40), unique=True, max_size=8))
    ]
    interfaces = []
    for name in NETDEVS[1:4]:
        held = draw(st.lists(st.sampled_from(ADDRESSES), unique=True, max_size=4))
        addresses = tuple(InterfaceAddress(ipaddress.ip_address(text), 24) for text in held)
        is_up = draw(st.booleans())
        kind = "vlan" if "." in name else ""
        interfaces.append(Interface(name, is_up=is_up, is_running=is_up, kind=kind, addresses=addresses))
    return entries, interfaces


def make_table(entries: Sequence[GidEntry]) -> GidTable:
    return GidTable("mlx5_0", 1, LinkLayer.ETHERNET, 64, tuple(entries))


@given(hosts(), st.randoms())
def test_order_in_which_rows_are_read_changes_nothing(
    host: tuple[list[GidEntry], list[Interface]], random: st.DataObject
) -> None:
    entries, interfaces = host
    shuffled = list(entries)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    if entries:
        assert choose_gid(make_table(shuffled), interfaces) == choose_gid(make_table(entries), interfaces)


@given(hosts())
def test_every_row_gets_a_verdict_and_the_best_is_no_worse_than_any(
    host: tuple[list[GidEntry], list[Interface]],
) -> None:
    entries, interfaces = host
    if not entries:
        return

    choice = choose_gid(make_table(entries), interfaces)

    assert [verdict.index for verdict in choice.verdicts] == sorted(entry.index for entry in entries)
    assert [verdict.reason for verdict in choice.verdicts].count("chosen") == 1
    assert all(verdict.reason for verdict in choice.verdicts)
    best = rank_candidate(choice.best)
    assert all(best <= rank_candidate(one) for one in find_candidates(entries, interfaces))


@given(hosts())
def test_link_local_never_beats_a_routable_row_that_works(host: tuple[list[GidEntry], list[Interface]]) -> None:
    entries, interfaces = host
    found = find_candidates(entries, interfaces)
    good = [one for one in found if one.state is NetdevState.UP and one.type is GidType.ROCE_V2]

    if any(one.scope is GidScope.ROUTABLE for one in good):
        assert choose_gid(make_table(entries), interfaces).best.scope is GidScope.ROUTABLE


@given(candidates())
def test_candidate_survives_the_way_to_the_peer(one: GidCandidate) -> None:
    nbits = one.address.max_prefixlen
    if one.prefix_nbits is None or one.prefix_nbits <= nbits:
        assert GidCandidate.from_json(json.loads(json.dumps(one.to_json()))) == one


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.data(), candidates())
def test_field_of_any_other_value_is_refused_or_read_as_it_is(data: st.DataObject, one: GidCandidate) -> None:
    obj = one.to_json()
    name = data.draw(st.sampled_from(sorted(obj)))
    obj[name] = data.draw(JSON)

    try:
        told = GidCandidate.from_json(obj).to_json()
    except RemoteProtocolError as error:
        told = {**obj, "refused": error.values["field"]}

    assert told == obj or told["refused"] in obj
