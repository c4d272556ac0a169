"""Which row, or which pair of rows, is taken, and what is said of the others. Bnn: a fault that other engines had."""

from __future__ import annotations

import ipaddress

import pytest

from kvxfer.config import EngineConfig
from kvxfer.errors import DeviceUnusableError
from kvxfer.verbs.enums import GidType
from kvxfer.verbs.gid_candidate import NetdevState
from kvxfer.verbs.gid_choice import GidPreference, choose_gid, choose_gid_pair, rank_gid_pairs
from tests.support.gid_rows import IB, INFINIBAND, V1, V2, candidate, interface, row, table


@pytest.mark.parametrize("address", ["10.20.3.4", "172.20.0.1", "100.64.0.1", "192.168.1.1", "192.0.2.1", "fd00:1::5"])
@pytest.mark.parametrize("is_first", [True, False])
def test_routable_row_beats_link_local_in_whatever_private_range(address: str, is_first: bool) -> None:
    """B01, B04."""
    rows = [row(0, address), row(1, "fe80::1")] if is_first else [row(0, "fe80::1"), row(1, address)]
    interfaces = [interface("eth0", f"{address}/24", "fe80::1/64")]

    for known in (interfaces, None):
        choice = choose_gid(table(*rows), known)

        assert choice.index == (0 if is_first else 1)
        assert choice.warning == ""
        assert "link-local" in str(choice)


def test_row_of_another_network_namespace_comes_after_one_of_this() -> None:
    """B02, B186."""
    foreign = row(3, "198.51.100.50", netdev="")
    ours = row(7, "198.51.100.52", netdev="eth1")

    choice = choose_gid(table(foreign, ours), [interface("eth1", "198.51.100.52/24")])

    assert choice.index == 7
    assert choice.verdicts[0].reason == ("after row 7: no interface of this network namespace has 198.51.100.50")


def test_row_of_another_network_namespace_is_a_last_resort_with_a_warning() -> None:
    """B02."""
    choice = choose_gid(table(row(3, "198.51.100.50", netdev="")), [interface("eth1", "198.51.100.52/24")])

    assert choice.index == 3
    assert choice.warning == "no interface of this network namespace has 198.51.100.50"


def test_interface_of_the_same_name_proves_nothing_without_the_address() -> None:
    choice = choose_gid(
        table(row(0, "198.51.100.50", netdev="eth0"), row(1, "192.0.2.9", netdev="eth7")),
        [interface("eth0", "192.0.2.9/24")],
    )

    assert choice.index == 1
    assert choice.best.netdev == "eth0"
    assert choice.verdicts[0].reason == "after row 1: eth0 does not have 198.51.100.50"


def test_global_ipv6_rows_alone_are_enough() -> None:
    """B03."""
    rows = [row(0, "fe80::1", V1), row(1, "fe80::1"), row(2, "2001:db8::10", V1), row(3, "2001:db8::10")]

    assert choose_gid(table(*rows), [interface("eth0", "fe80::1/64", "2001:db8::10/64")]).index == 3
    assert choose_gid(table(*rows), None).index == 3


def test_link_local_row_alone_is_taken_with_a_warning() -> None:
    """B04."""
    choice = choose_gid(table(row(0, "fe80::1")), [interface("eth0", "fe80::1/64")])

    assert choice.index == 0
    assert "only link-local addresses" in choice.warning


def test_roce_v2_beats_v1_of_the_same_address() -> None:
    """B05."""
    rows = [row(0, "fe80::1", V1), row(1, "fe80::1"), row(2, "192.0.2.1", V1), row(3, "192.0.2.1")]

    choice = choose_gid(table(*rows), [interface("eth0", "192.0.2.1/24", "fe80::1/64")])

    assert choice.index == 3
    assert [verdict.reason for verdict in choice.verdicts] == [
        "after row 3: RoCE v1",
        "after row 3: link-local",
        "after row 3: RoCE v1",
        "chosen",
    ]


def test_roce_v1_alone_is_taken_and_said() -> None:
    """B05."""
    choice = choose_gid(table(row(2, "192.0.2.1", V1)), [interface("eth0", "192.0.2.1/24")])

    assert choice.index == 2
    assert "only RoCE v1" in choice.warning


def test_rows_before_the_first_used_one_do_not_end_the_search() -> None:
    """B06: empty rows are no rows of the table."""
    rows = [row(6, "192.0.2.9", V1), row(7, "192.0.2.9"), row(8, "fe80::9", V1), row(9, "fe80::9")]

    assert choose_gid(table(*rows), [interface("eth0", "192.0.2.9/24", "fe80::9/64")]).index == 7


def test_link_local_row_whose_address_was_removed_comes_last() -> None:
    """B15."""
    choice = choose_gid(table(row(0, "fe80::a"), row(1, "192.0.2.2")), [interface("eth0", "192.0.2.2/24")])

    assert choice.index == 1
    assert choice.verdicts[0].reason == "after row 1: eth0 does not have fe80::a"


def test_row_on_an_interface_that_is_down_comes_after_any_that_is_up() -> None:
    rows = [row(0, "192.0.2.1", netdev="eth0"), row(1, "198.51.100.1", V1, netdev="eth1")]

    choice = choose_gid(
        table(*rows), [interface("eth0", "192.0.2.1/24", is_up=False), interface("eth1", "198.51.100.1/24")]
    )

    assert choice.index == 1
    assert choice.verdicts[0].reason == "after row 1: eth0 is down"


VLAN_ROWS = table(row(1, "198.51.100.2", netdev="eth2.10"), row(2, "192.0.2.12", netdev="eth2"))
VLAN_INTERFACES = [interface("eth2", "192.0.2.12/24"), interface("eth2.10", "198.51.100.2/24", kind="vlan")]


@pytest.mark.parametrize(
    ("preference", "index"),
    [
        (GidPreference(), 2),
        (GidPreference(subnet=ipaddress.ip_network("198.51.100.0/24")), 1),
        (GidPreference(interface="eth2.10"), 1),
        (GidPreference(interface="eth2"), 2),
    ],
)
def test_base_interface_is_preferred_to_a_vlan_unless_the_user_says_otherwise(
    preference: GidPreference, index: int
) -> None:
    """B16."""
    assert choose_gid(VLAN_ROWS, VLAN_INTERFACES, preference).index == index


def test_preference_that_no_row_meets_is_a_warning() -> None:
    choice = choose_gid(VLAN_ROWS, VLAN_INTERFACES, GidPreference(interface="eth9"))

    assert choice.index == 2
    assert choice.warning == "no usable GID is on eth9; the others were considered"


def test_row_in_the_subnet_of_the_peer_is_taken_for_that_peer() -> None:
    """B16."""
    offered = choose_gid(VLAN_ROWS, VLAN_INTERFACES).offered

    assert choose_gid_pair(offered, [candidate("198.51.100.9")]).local.index == 1
    assert choose_gid_pair(offered, [candidate("192.0.2.9")]).local.index == 2
    assert choose_gid_pair(offered, [candidate("203.0.113.9")]).local.index == 2


def test_ipv4_beats_ipv6_and_the_lower_row_decides_last() -> None:
    rows = [row(0, "2001:db8::1"), row(1, "192.0.2.1"), row(2, "192.0.2.2")]

    choice = choose_gid(table(*rows), [interface("eth0", "2001:db8::1/64", "192.0.2.1/24", "192.0.2.2/24")])

    assert [verdict.reason for verdict in choice.verdicts] == [
        "after row 1: IPv6",
        "chosen",
        "as good as row 1, which comes first",
    ]
    assert [one.index for one in choice.offered] == [1, 2, 0]


def test_infiniband_rows_need_no_interface() -> None:
    """B10."""
    rows = table(row(0, "fe80::2", IB, netdev=""), link_layer=INFINIBAND)

    choice = choose_gid(rows, [interface("eth0", "192.0.2.1/24")])

    assert (choice.index, choice.warning) == (0, "")
    assert choose_gid(rows, [], GidPreference(index=0)).index == 0


def test_fixed_row_is_honoured_whatever_its_rank() -> None:
    """B10."""
    rows = table(row(0, "fe80::1", V1), row(1, "192.0.2.1"))

    choice = choose_gid(rows, [interface("eth0", "192.0.2.1/24")], GidPreference(index=0, index_source="MC_GID_INDEX"))

    assert (choice.index, choice.reason) == (0, "fixed by the user (MC_GID_INDEX)")
    assert "eth0 does not have fe80::1" in choice.warning
    assert [one.index for one in choice.offered] == [0]
    assert choice.verdicts[1].reason == "row 0 was fixed (MC_GID_INDEX)"


def test_fixed_row_beyond_the_table_names_both_numbers_and_prints_the_table() -> None:
    """B09, B10."""
    rows = table(row(1, "192.0.2.1"), length=8)

    with pytest.raises(
        DeviceUnusableError, match=r"GID index 9 was fixed \(KVXFER_GID_INDEX\), and the table has 8 rows"
    ) as e:
        choose_gid(rows, None, GidPreference(index=9, index_source="KVXFER_GID_INDEX"))

    assert "  1: ::ffff:192.0.2.1 RoCE v2 eth0" in str(e.value)
    assert (e.value.device, e.value.values["index"], e.value.values["length"]) == ("mlx5_0", 9, 8)


def test_fixed_row_that_is_empty_is_refused() -> None:
    """B10, B12."""
    with pytest.raises(DeviceUnusableError, match="GID index 2 was fixed, and that row is empty"):
        choose_gid(table(row(1, "192.0.2.1"), row(2, "::")), None, GidPreference(index=2))


def test_index_of_a_device_comes_from_the_settings_with_its_source() -> None:
    """B09."""
    config = EngineConfig.resolve(environment={"MC_GID_INDEX": "3,mlx5_2:6"})

    assert GidPreference.of(config, "mlx5_1") == GidPreference(3, "MC_GID_INDEX")
    assert GidPreference.of(config, "mlx5_2") == GidPreference(6, "MC_GID_INDEX")
    assert GidPreference.of(EngineConfig(), "mlx5_1").index is None


@pytest.mark.parametrize("rows", [(), (row(0, "::"),)])
def test_table_without_a_gid_disables_the_device(rows: tuple[object, ...]) -> None:
    """B12, B21."""
    with pytest.raises(DeviceUnusableError, match="no GID that a queue pair could use"):
        choose_gid(table(*rows), None)  # type: ignore[arg-type]


def test_rows_that_no_address_vector_can_name_are_left_out() -> None:
    choice = choose_gid(table(row(255, "192.0.2.1"), row(256, "192.0.2.2"), length=1024), None)

    assert choice.index == 255
    assert choice.verdicts[1].reason == "rows after 255 cannot be named in an address vector"
    assert not choice.verdicts[1].is_usable
    with pytest.raises(DeviceUnusableError, match="no GID"):
        choose_gid(table(row(256, "192.0.2.2"), length=1024), None)


def test_row_of_a_kind_that_is_newer_than_this_code_is_left_out() -> None:
    choice = choose_gid(table(row(0, "192.0.2.1", GidType(9)), row(1, "fe80::1")), None)

    assert choice.index == 1
    assert "UNKNOWN_9" in choice.verdicts[0].reason


def test_gid_is_found_again_where_it_moved_to() -> None:
    """B13."""
    moved = table(row(4, "192.0.2.1", V1), row(5, "192.0.2.1"))
    before = choose_gid(table(row(3, "192.0.2.1")), None).best

    after = moved.find_value(before.value, before.type)

    assert after is not None
    assert (before.index, after.index) == (3, 5)
    assert moved.find(3) is None


def test_versions_of_roce_are_never_mixed() -> None:
    """B05."""
    v1, v2 = [candidate("192.0.2.1/24", V1)], [candidate("192.0.2.2/24", V2)]

    assert rank_gid_pairs(v1, v2) == []
    with pytest.raises(DeviceUnusableError, match=r"192.0.2.1/24 \(RoCE v1\); there 192.0.2.2/24 \(RoCE v2\)"):
        choose_gid_pair(v1, v2)


def test_families_are_never_mixed() -> None:
    assert rank_gid_pairs([candidate("192.0.2.1/24")], [candidate("2001:db8::1/64")]) == []


def test_link_local_addresses_are_not_in_one_subnet() -> None:
    """Every link has fe80::/64: that both ends do says nothing."""
    ours = [candidate("fe80::1/64", index=0), candidate("192.0.2.1/24", index=1)]
    theirs = [candidate("fe80::2/64"), candidate("198.51.100.1/24")]

    pair = choose_gid_pair(ours, theirs)

    assert (pair.local.index, pair.reason) == (1, "in different subnets, through a router")


def test_pair_in_one_subnet_is_preferred_to_a_better_placed_one() -> None:
    """B27."""
    ours = [candidate("192.0.2.1/28", index=0), candidate("198.51.100.1/28", index=1)]

    assert choose_gid_pair(ours, [candidate("198.51.100.2/28")]).local.index == 1
    assert choose_gid_pair(ours, [candidate("192.0.2.2/28")]).local.index == 0
    assert choose_gid_pair(ours, [candidate("192.0.2.2/28")]).reason == "in one subnet"


def test_prefixes_that_disagree_are_no_common_subnet() -> None:
    pair = choose_gid_pair([candidate("10.0.0.5/8")], [candidate("10.1.0.5/16")])

    assert pair.rank.is_other_subnet


def test_pair_with_a_fault_at_either_end_is_a_last_resort() -> None:
    down = candidate("192.0.2.2/24", state=NetdevState.DOWN, netdev="eth3")

    pairs = rank_gid_pairs([candidate("192.0.2.1/24")], [down, candidate("203.0.113.2/24")])

    assert [pair.is_broken for pair in pairs] == [False, True]
    assert pairs[1].reason == "last resort: there eth3 is down"


def test_infiniband_ports_of_one_subnet_are_a_pair_of_one_subnet() -> None:
    ours = candidate("fe80::1", IB)

    assert not choose_gid_pair([ours], [candidate("fe80::2", IB)]).rank.is_other_subnet
    assert choose_gid_pair([ours], [candidate("fec0::2", IB)]).rank.is_other_subnet
