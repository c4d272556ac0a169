"""Ports: which carry data and why not; how one addresses another, checked before the call. Bnn: faults of others."""

from __future__ import annotations

import pytest

from kvxfer.errors import DeviceNotFoundError, DeviceUnusableError
from kvxfer.rdma_names import parse_devices
from kvxfer.verbs.enums import LinkLayer, PortState, TransportType
from kvxfer.verbs.gid_choice import choose_gid_pair
from kvxfer.verbs.port import AddressVector, build_address_vector, check_wanted, choose_port, judge_ports
from tests.support.gid_rows import IB, INFINIBAND, candidate, gid, offer, port

DOWN = {"state": PortState.DOWN}


def test_first_active_port_is_taken_not_port_1() -> None:
    """B26."""
    verdicts = judge_ports([port(number=1, **DOWN), port(number=2), port(number=3)], TransportType.IB)

    assert choose_port("mlx5_0", verdicts).number == 2
    assert [str(verdict) for verdict in verdicts] == ["port 1: DOWN, not ACTIVE", "port 2: usable", "port 3: usable"]


def test_no_active_port_names_the_device_and_each_port() -> None:
    """B22."""
    verdicts = judge_ports([port(number=1, **DOWN), port(number=2, state=PortState.INIT)], TransportType.IB)

    with pytest.raises(DeviceUnusableError, match="mlx5_0 cannot be used: port 1: DOWN, not ACTIVE; port 2: INIT") as e:
        choose_port("mlx5_0", verdicts)
    assert e.value.device == "mlx5_0"
    assert not e.value.retryable


@pytest.mark.parametrize(
    ("transport", "values", "reason"),
    [
        (TransportType.IWARP, {}, "iWARP"),
        (TransportType.IB, {"link_layer": LinkLayer.UNSPECIFIED}, "iWARP"),
        (TransportType.UNSPECIFIED, {}, "EFA"),
        (TransportType.IB, {"link_layer": INFINIBAND, "lid": 0}, "no LID"),
        (TransportType.IB, {"link_layer": INFINIBAND, "lid": 7}, ""),
        (TransportType.IB, {"state": PortState.ACTIVE_DEFER}, "ACTIVE_DEFER, not ACTIVE"),
    ],
)
def test_port_that_cannot_carry_says_why(transport: TransportType, values: dict[str, object], reason: str) -> None:
    """B21."""
    (verdict,) = judge_ports([port(**values)], transport)

    assert verdict.is_usable is (reason == "")
    assert reason in verdict.reason


def test_erdma_that_is_in_its_iwarp_mode_says_how_to_change_that() -> None:
    (verdict,) = judge_ports([port()], TransportType.IWARP, vendor_id=0x1DED)

    assert verdict.reason.endswith("load erdma with compat_mode=1, which has RoCE")


@pytest.mark.parametrize(
    ("wanted", "numbers"), [("mlx5_0:2", [2]), ("mlx5_0", [1, 2]), ("mlx5_1", []), ("mlx5_1:1,mlx5_0:1", [1])]
)
def test_filter_of_the_user_names_devices_or_ports(wanted: str, numbers: list[int]) -> None:
    """B26."""
    verdicts = judge_ports([port(number=1), port(number=2)], TransportType.IB, parse_devices(wanted))

    assert [verdict.port.number for verdict in verdicts if verdict.is_usable] == numbers
    assert all(verdict.reason == "not in rdma_devices" for verdict in verdicts if verdict.reason)


def test_device_of_the_filter_that_is_not_here_is_told_with_those_that_are() -> None:
    check_wanted(parse_devices("mlx5_0:2"), ["mlx5_0"])

    with pytest.raises(DeviceNotFoundError, match="no RDMA device mlx5_7 here; there is mlx5_0, mlx5_1"):
        check_wanted(parse_devices("mlx5_7,mlx5_0"), ["mlx5_0", "mlx5_1"])


OURS = offer("mlx5_0", candidate("192.0.2.1/24", index=3))
THEIRS = offer("mlx5_1", candidate("192.0.2.2/24"))
PAIR = choose_gid_pair(OURS.gids, THEIRS.gids)


def test_ethernet_gets_a_global_route_and_no_lid() -> None:
    """B18, B43."""
    vector = build_address_vector(OURS, THEIRS, PAIR, hop_limit=64, traffic_class=106)

    assert vector == AddressVector(
        port=1, is_global=True, dgid=gid("192.0.2.2"), sgid_index=3, hop_limit=64, traffic_class=106
    )
    assert build_address_vector(OURS, THEIRS, PAIR, is_global=False).is_global


def test_missing_gid_is_told_before_the_call() -> None:
    """B43."""
    with pytest.raises(DeviceUnusableError, match="that of the peer is missing"):
        build_address_vector(OURS, offer("mlx5_1"), None)
    unknown = choose_gid_pair([candidate("192.0.2.1")], THEIRS.gids)
    with pytest.raises(DeviceUnusableError, match="that of this end is missing"):
        build_address_vector(OURS, THEIRS, unknown)


@pytest.mark.parametrize(
    ("name", "value"), [("hop_limit", 0), ("hop_limit", 256), ("traffic_class", 256), ("service_level", 16)]
)
def test_value_that_no_packet_can_have_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(DeviceUnusableError, match=f"{name} {value}"):
        build_address_vector(OURS, THEIRS, PAIR, **{name: value})  # type: ignore[arg-type]


IB_OURS = offer("mlx5_0", candidate("fe80::1", IB, index=0), link=INFINIBAND, lid=0x11)
IB_THEIRS = offer("mlx5_0", candidate("fe80::2", IB), link=INFINIBAND, lid=0x120)
IB_PAIR = choose_gid_pair(IB_OURS.gids, IB_THEIRS.gids)


def test_infiniband_is_addressed_by_lid() -> None:
    """B18."""
    assert build_address_vector(IB_OURS, IB_THEIRS, IB_PAIR) == AddressVector(port=1, is_global=False, dlid=288)
    assert build_address_vector(IB_OURS, IB_THEIRS, None).dlid == 288


@pytest.mark.parametrize("at_peer", [False, True])
def test_port_that_demands_a_global_route_gets_one(at_peer: bool) -> None:
    """B19."""
    demanding = {"needs_grh": True, "link": INFINIBAND}
    ours = offer("a", *IB_OURS.gids, lid=1, **({} if at_peer else {"needs_grh": True}), link=INFINIBAND)
    theirs = offer("b", *IB_THEIRS.gids, lid=2, **(demanding if at_peer else {"link": INFINIBAND}))  # type: ignore[arg-type]

    vector = build_address_vector(ours, theirs, IB_PAIR)

    assert (vector.is_global, vector.dgid, vector.sgid_index, vector.dlid) == (True, gid("fe80::2"), 0, 2)


def test_other_subnet_of_infiniband_is_reached_by_the_router_that_its_gid_names() -> None:
    """B18: a LID counts in its own subnet only. The router's (FLID 0x4001) is in the subnet prefix."""
    theirs = offer("b", candidate("fec0:0:4001::2", IB), link=INFINIBAND, lid=2)

    vector = build_address_vector(IB_OURS, theirs, choose_gid_pair(IB_OURS.gids, theirs.gids))

    assert (vector.is_global, vector.dlid) == (True, 0x4001)


def test_other_subnet_of_infiniband_without_a_router_is_refused() -> None:
    """Its LID would lead to a stranger in our subnet."""
    theirs = offer("b", candidate("fec0::2", IB), link=INFINIBAND, lid=2)

    with pytest.raises(DeviceUnusableError, match=r"in another subnet.*FLID"):
        build_address_vector(IB_OURS, theirs, choose_gid_pair(IB_OURS.gids, theirs.gids))


def test_port_without_a_lid_that_demands_a_global_route_is_addressed_by_its_gid() -> None:
    """It counts as usable, so that it must be addressed as well."""
    theirs = offer("b", *IB_THEIRS.gids, link=INFINIBAND, lid=0, needs_grh=True)

    vector = build_address_vector(IB_OURS, theirs, IB_PAIR)

    assert (vector.is_global, vector.dgid, vector.dlid) == (True, gid("fe80::2"), 0)


def test_global_route_can_be_tried_where_the_port_does_not_say_so() -> None:
    assert build_address_vector(IB_OURS, IB_THEIRS, IB_PAIR, is_global=True).dgid == gid("fe80::2")


@pytest.mark.parametrize("lid", [0, 0xC000])
def test_lid_that_no_subnet_manager_gives_is_refused(lid: int) -> None:
    with pytest.raises(DeviceUnusableError, match=f"has LID {lid}"):
        build_address_vector(IB_OURS, offer("b", link=INFINIBAND, lid=lid), None)


def test_ethernet_and_infiniband_are_never_connected() -> None:
    """B24."""
    with pytest.raises(DeviceUnusableError, match=r"its link is Ethernet, the peer's \(mlx5_0 port 1\) is InfiniBand"):
        build_address_vector(OURS, IB_THEIRS, PAIR)
