"""What the host's network says of a row, and what of a peer's candidate is believed."""

from __future__ import annotations

import pytest

from kvxfer.errors import RemoteProtocolError
from kvxfer.verbs.enums import GidType
from kvxfer.verbs.gid import GidTable, format_gid, gid_address
from kvxfer.verbs.gid_candidate import GidCandidate, GidScope, NetdevState, candidates_from_json, find_candidates
from tests.support.gid_rows import IB, V2, candidate, gid, interface, row, table


@pytest.mark.parametrize(
    ("netdev", "interfaces", "state"),
    [
        ("eth0", [interface("eth0", "192.0.2.1/24")], NetdevState.UP),
        ("eth0", [interface("eth0", "192.0.2.1/24", is_up=False)], NetdevState.DOWN),
        ("eth0", [interface("eth0", "192.0.2.7/24")], NetdevState.GONE),
        ("eth0", [interface("eth1", "192.0.2.7/24")], NetdevState.ELSEWHERE),
        ("", [interface("eth1", "192.0.2.1/24")], NetdevState.UP),
        ("", [interface("eth1", "192.0.2.7/24")], NetdevState.ELSEWHERE),
        ("host9", [interface("bond0", "192.0.2.1/24")], NetdevState.UP),
        ("eth0", [], NetdevState.ELSEWHERE),
        ("eth0", None, NetdevState.UNKNOWN),
    ],
)
def test_row_is_judged_by_the_interface_that_has_its_address(
    netdev: str, interfaces: list[object] | None, state: NetdevState
) -> None:
    (found,) = find_candidates([row(0, "192.0.2.1", netdev=netdev)], interfaces)  # type: ignore[arg-type]

    assert found.state is state
    assert bool(found.fault) is state.is_broken


def test_prefix_and_name_come_from_the_interface() -> None:
    (found,) = find_candidates([row(0, "192.0.2.1", netdev="host9")], [interface("bond0", "192.0.2.1/28")])

    assert (found.netdev, found.prefix_nbits) == ("bond0", 28)
    assert str(found) == "192.0.2.1/28 (RoCE v2, bond0)"


def test_link_local_row_without_an_interface_cannot_be_judged() -> None:
    (found,) = find_candidates([row(0, "fe80::1", netdev="")], [interface("eth0", "192.0.2.1/24")])

    assert found.state is NetdevState.UNKNOWN


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        ("10.0.0.1", GidScope.ROUTABLE),
        ("fd00::1", GidScope.ROUTABLE),
        ("169.254.1.1", GidScope.LINK_LOCAL),
        ("fe80::1", GidScope.LINK_LOCAL),
        ("127.0.0.1", GidScope.LOOPBACK),
        ("::1", GidScope.LOOPBACK),
    ],
)
def test_scope_is_that_of_the_address(address: str, scope: GidScope) -> None:
    assert candidate(address).scope is scope


def test_scope_of_infiniband_is_not_that_of_its_prefix() -> None:
    assert candidate("fe80::1", IB).scope is GidScope.ROUTABLE


def test_gid_is_written_as_people_do() -> None:
    assert format_gid(gid("10.0.0.1")) == "::ffff:10.0.0.1"
    assert format_gid(gid("fe80::1")) == "fe80::1"
    assert str(gid_address(gid("10.0.0.1"))) == "10.0.0.1"


def test_table_keeps_used_rows_by_index_and_prints_them() -> None:
    found = table(row(7, "fe80::1"), row(3, "192.0.2.1"), row(4, "::"), length=16)

    assert [entry.index for entry in found] == [3, 7]
    assert len(found) == 2
    assert str(found).splitlines() == [
        "GID table of mlx5_0 port 1, 2 of 16 rows in use:",
        "  3: ::ffff:192.0.2.1 RoCE v2 eth0",
        "  7: fe80::1 RoCE v2 eth0",
    ]


def test_long_table_is_printed_in_part() -> None:
    rows = tuple(row(index, f"10.0.{index}.1") for index in range(100))

    text = str(GidTable("rxe0", 1, table().link_layer, 1024, rows))

    assert text.splitlines()[-1] == "  ... and 76 more"


GOOD = candidate("192.0.2.1/24", netdev="eth0").to_json()


def test_what_is_exchanged_is_a_value_and_no_index() -> None:
    assert candidate("192.0.2.1/24", index=7, netdev="eth0").to_json() == {
        "gid": "00000000000000000000ffffc0000201",
        "type": 2,
        "netdev": "eth0",
        "state": 0,
        "prefix": 24,
        "vlan": False,
    }
    assert GidCandidate.from_json(GOOD).index is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gid", "0" * 32),
        ("gid", "0" * 31),
        ("gid", "G" * 32),
        ("gid", 5),
        ("type", 3),
        ("type", True),
        ("type", "RoCE v2"),
        ("netdev", "a" * 16),
        ("netdev", "eth0\x1b[31m"),
        ("state", 9),
        ("prefix", 33),
        ("prefix", -1),
        ("vlan", 1),
    ],
)
def test_field_that_no_peer_sends_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError, match=f"'{field}'") as caught:
        GidCandidate.from_json({**GOOD, field: value})

    assert "\x1b" not in str(caught.value)


def test_zero_gid_of_a_peer_is_called_missing() -> None:
    """B12."""
    with pytest.raises(RemoteProtocolError, match="missing GID"):
        GidCandidate.from_json({**GOOD, "gid": "0" * 32})


@pytest.mark.parametrize("value", [None, {}, "x", [1], [GOOD] * 65])
def test_list_of_candidates_is_bounded_and_typed(value: object) -> None:
    with pytest.raises(RemoteProtocolError):
        candidates_from_json({"gids": value}, "gids")


def test_unknown_type_keeps_its_number() -> None:
    assert row(0, "192.0.2.1", GidType(9)).type == 9
    assert V2 == 2
