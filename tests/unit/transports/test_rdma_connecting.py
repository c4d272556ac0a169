"""How an RDMA connection comes about, over fake NICs that refuse: the ladder, its memory, and every way it can fail."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvxfer.errors import ClosedError, KvxferError, PeerUnreachableError, TransportUnavailableError
from kvxfer.transports.rdma import RdmaTransport
from kvxfer.transports.rdma_worked import what_worked
from kvxfer.verbs.enums import EventType, GidType, LinkLayer, Mtu, PortState, QueuePairState
from tests.support.fake_engines import FakeHosts, Pair
from tests.support.fake_verbs import (
    GIB,
    FakeGid,
    FakeNic,
    FakePort,
    connectx,
    erdma,
    gid,
    infiniband,
    ionic,
    irdma,
    rxe,
)

RTR, RTS = QueuePairState.RTR, QueuePairState.RTS
A, B = "10.10.0.1", "10.10.0.2"


def check_connected(pair: Pair) -> None:
    """Both ends have one queue pair each, which know each other, and data moves both ways."""
    ours, theirs = pair.queue_pairs()
    assert len(ours) == len(theirs) == 1
    assert ours[0].state is RTS
    assert theirs[0].state in (RTR, RTS)
    assert ours[0].attributes["dest_qp_num"] == theirs[0].number
    assert theirs[0].attributes["dest_qp_num"] == ours[0].number
    pair.write()
    pair.read()


def changes(events: list[dict[str, Any]]) -> list[str]:
    """The rungs that a warning tells of."""
    return [attempt for event in events if event["event"] == "rdma.attribute_lowered" for attempt in event["attempts"]]


# Devices that refuse, at either end: one row of the table of known ones each.

REFUSALS = {
    "read depth above 4": ({"read_depth_max": 4}, "read_depth 16 -> 4"),
    "read depth above 1": ({"read_depth_max": 1}, "read_depth 16 -> 1"),
    "hop limit below 255": ({"hop_limits": (255, 255)}, "hop_limit 64 -> 255"),
    "hop limit above 1": ({"hop_limits": (0, 1)}, "hop_limit 64 -> 1"),
}


@pytest.mark.parametrize("side", ["here", "there"])
@pytest.mark.parametrize(("limits", "change"), REFUSALS.values(), ids=REFUSALS)
def test_what_a_device_refuses_is_lowered_with_a_warning(
    hosts: FakeHosts, side: str, limits: dict[str, Any], change: str
) -> None:
    """Reads at once, hop limit."""
    nics = [connectx(address=A), connectx(address=B)]
    for name, value in limits.items():
        setattr(nics[side == "there"], name, value)
    pair = hosts.pair(*nics)

    with capture_logs() as events:
        pair.open()

    assert any(change in rung for rung in changes(events)), events
    check_connected(pair)


@pytest.mark.parametrize(("budget", "number", "depth"), [(7, errno.EINVAL, 4), (3, errno.ENOMEM, 1)])
def test_a_read_depth_above_what_is_left_of_the_devices_budget_is_lowered(
    hosts: FakeHosts, budget: int, number: int, depth: int
) -> None:
    """Who answers reads pays for them; the device does not say that it has so few."""
    there = connectx(address=B, read_budget=budget, read_budget_errno=number)
    pair = hosts.pair(connectx(address=A), there)

    with capture_logs() as events:
        pair.open()

    assert f"read_depth 16 -> {depth}" in changes(events)[-1]
    check_connected(pair)


def test_an_mtu_that_the_port_does_not_carry_after_all_is_lowered(hosts: FakeHosts) -> None:
    """The port says 4096; the driver takes 1024."""
    port = FakePort({0: gid(B, ndev="eth0")}, max_mtu=Mtu.MTU_1024, active_mtu=Mtu.MTU_4096)
    pair = hosts.pair(
        connectx(address=A), connectx(address=B, ports=[port], mtu_checked_against="max", max_qp_rd_atom=1)
    )

    with capture_logs() as events:
        pair.open()

    told = " ".join(changes(events))
    assert "path_mtu 4096 -> 2048" in told
    assert "path_mtu 4096 -> 1024" in told
    check_connected(pair)


@pytest.mark.parametrize(("here", "there"), [(Mtu.MTU_4096, Mtu.MTU_1024), (Mtu.MTU_1024, Mtu.MTU_4096)])
def test_both_ends_take_the_smaller_mtu_at_once(hosts: FakeHosts, here: Mtu, there: Mtu) -> None:
    """B37."""
    nics = [connectx(address=A), connectx(address=B)]
    for nic, mtu in zip(nics, (here, there), strict=True):
        nic.ports[0].active_mtu = mtu
    pair = hosts.pair(*nics)

    pair.open()

    assert [qp.attributes["path_mtu"] for side in pair.queue_pairs() for qp in side] == [Mtu.MTU_1024] * 2
    check_connected(pair)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM])
def test_a_deep_queue_that_is_refused_is_halved(hosts: FakeHosts, number: int) -> None:
    """The device says 32768 and takes 60; B123."""
    pair = hosts.pair(connectx(address=A, send_queue_sges_max=60), connectx(address=B))
    if number == errno.EINVAL:
        pair.libraries[0].fail("ibv_create_qp", errno.EINVAL, times=2)

    with capture_logs() as events:
        pair.open()

    assert any("send_depth 256 -> 128" in rung for rung in changes(events))
    assert pair.queue_pairs()[0][0].caps["max_send_wr"] <= 60
    check_connected(pair)


def test_a_queue_deeper_than_the_device_says_is_not_asked_for(hosts: FakeHosts) -> None:
    """B123: max_qp_wr 128, and 120 are granted."""
    pair = hosts.pair(connectx(address=A, max_qp_wr=128, granted_send_wr_max=120), connectx(address=B))

    pair.open()

    assert pair.queue_pairs()[0][0].caps["max_send_wr"] == 120
    check_connected(pair)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (irdma(address=A), irdma(address=B)),
        (connectx(address=A), ionic(address=B)),
        (ionic(address=A), rxe(address=B)),
        (erdma(address=A), rxe(address=B)),
        (infiniband(lid=0x120), infiniband(lid=0x121)),
        (connectx(address=A, create_state=QueuePairState.INIT), connectx(address=B, create_state=QueuePairState.INIT)),
    ],
    ids=["irdma", "connectx-ionic", "ionic-rxe", "erdma-rxe", "infiniband", "made in INIT"],
)
def test_devices_of_all_kinds_connect_at_the_first_try(hosts: FakeHosts, here: FakeNic, there: FakeNic) -> None:
    """B41 (RESET to RESET refused), B38, B18 (a LID and no GRH), queue pairs that begin in INIT."""
    pair = hosts.pair(here, there)

    with capture_logs() as events:
        pair.open()

    assert not changes(events)
    (ours,), (theirs,) = pair.queue_pairs()
    if here.ports[0].link_layer is LinkLayer.INFINIBAND:
        assert (ours.address["is_global"], ours.address["dlid"], theirs.address["dlid"]) == (0, 0x121, 0x120)
    check_connected(pair)


@pytest.mark.parametrize("flagged", [0, 1])
def test_an_infiniband_port_that_demands_a_global_header_gets_one(hosts: FakeHosts, flagged: int) -> None:
    """B19: the flag at either side is enough."""
    nics = [infiniband(lid=0x120), infiniband(lid=0x121)]
    nics[flagged].ports[0].flags = 1
    pair = hosts.pair(*nics)

    pair.open()

    (ours,), (theirs,) = pair.queue_pairs()
    assert ours.address["is_global"] == theirs.address["is_global"] == 1
    assert ours.address["dgid"] == nics[1].ports[0].gids[0].value
    check_connected(pair)


def test_an_infiniband_port_that_wants_a_global_header_and_does_not_say_so_gets_one(hosts: FakeHosts) -> None:
    pair = hosts.pair(infiniband(lid=0x120), infiniband(lid=0x121))
    for tries in range(3):  # RTR, with read depths 16, 4 and 1
        pair.libraries[1].fail("ibv_modify_qp", errno.EINVAL, nth=2 + tries)

    with capture_logs() as events:
        pair.open()

    assert "is_global None -> True" in changes(events)[-1]
    (ours,), _ = pair.queue_pairs()
    assert ours.attributes["max_rd_atomic"] == 16  # what was not at fault is as it was
    check_connected(pair)


def test_memory_is_registered_in_chunks_where_the_device_takes_less_than_it_says(hosts: FakeHosts) -> None:
    """max_mr_size 1 GiB, and 1 GiB fails: what is asked is halved. (64 KiB chunks stand for it: memory is dear.)"""
    nic = connectx(address=B, max_mr_size=GIB, mr_nbytes_max=GIB - 1)
    pair = hosts.pair(connectx(address=A), nic, nbytes=1 << 20, rdma_chunk_nbytes_max=1 << 16)

    pair.open()

    assert len(pair.segment.regions[0].keys["rdma"]["nics"]["mlx5_0:1"]) >= 16
    facts = pair.remote.keys["rdma"]["chunked"]["mlx5_0"]
    assert facts["count"] >= 16  # and one more where it does not begin at a page
    assert (facts["limit_nbytes"], facts["limit_origin"]) == (1 << 16, "setting")
    check_connected(pair)


def test_memory_in_one_piece_says_nothing_of_pieces(hosts: FakeHosts) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B))

    assert "chunked" not in pair.remote.keys["rdma"]


@pytest.mark.slow
def test_a_gibibyte_that_the_device_refuses_is_registered_in_halves(hosts: FakeHosts) -> None:
    """max_mr_size 1 GiB, and exactly 1 GiB fails."""
    import mmap

    pair = hosts.pair(connectx(address=A), connectx(address=B, max_mr_size=GIB, mr_nbytes_max=GIB - 1))
    memory = mmap.mmap(-1, GIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    region = pair.b.register(memory)

    assert len(region.keys["rdma"]["nics"]["mlx5_0:1"]) == 2
    pair.open()
    check_connected(pair)
    pair.b.unregister(region)


def test_eight_connections_to_a_device_with_one_read_budget_all_stand(hosts: FakeHosts) -> None:
    """B38: 16 reads for the whole device."""
    hosts.add("b", ionic(address=B))
    target = hosts.engine("b")
    for row in range(8):
        hosts.add(f"a{row}", connectx(address=f"10.10.0.{10 + row}"))

    for row in range(8):
        hosts.engine(f"a{row}").open_segment(target.address)

    assert [qp.state for row in range(8) for qp in hosts.libraries[f"a{row}"].queue_pairs] == [RTS] * 8
    assert hosts.libraries["b"].devices[0].read_depth_used <= 16


def test_the_smaller_read_depth_of_both_ends_is_set_at_both(hosts: FakeHosts) -> None:
    """B38: 16 here, 4 there."""
    pair = hosts.pair(connectx(address=A), connectx(address=B, max_qp_rd_atom=4))

    pair.open()

    (ours,), (theirs,) = pair.queue_pairs()
    assert ours.attributes["max_rd_atomic"] == theirs.attributes["max_dest_rd_atomic"] == 4
    check_connected(pair)


def test_only_the_rights_that_are_used_are_given(hosts: FakeHosts) -> None:
    """The opening end lets nobody in; the opened one lets in writes and reads, no atomics. Retries are bounded."""
    pair = hosts.pair(connectx(address=A), connectx(address=B))

    pair.open()

    (ours,), (theirs,) = pair.queue_pairs()
    assert (ours.attributes["qp_access_flags"], theirs.attributes["qp_access_flags"]) == (0, 2 | 4)
    assert (ours.attributes["retry_cnt"], ours.attributes["rnr_retry"]) == (6, 6)  # B135: 7 is for ever
    assert ours.attributes["sq_psn"] == theirs.attributes["rq_psn"]


OTHER_WORDS = [errno.EOPNOTSUPP, errno.ERANGE, errno.E2BIG, errno.ENOSPC, errno.EIO]


@pytest.mark.parametrize("number", OTHER_WORDS, ids=errno.errorcode.__getitem__)
@pytest.mark.parametrize(
    ("side", "verb", "nth", "change"),
    [(0, "ibv_create_qp", 1, "send_depth 256 -> 128"), (1, "ibv_modify_qp", 2, "read_depth 16 -> 4")],
    ids=["create", "RTR"],
)
def test_attributes_are_lowered_whatever_number_a_driver_refuses_with(
    hosts: FakeHosts, side: int, verb: str, nth: int, change: str, number: int
) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    pair.libraries[side].fail(verb, number, nth=nth)

    with capture_logs() as events:
        pair.open()

    assert change in changes(events)[0]
    check_connected(pair)


@pytest.mark.parametrize("number", [errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENODEV], ids=errno.errorcode.get)
def test_no_attribute_is_lowered_for_a_network_that_does_not_answer(hosts: FakeHosts, number: int) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    pair.libraries[0].fail("ibv_modify_qp", number, nth=2)

    pair.open()

    assert pair.rails[0]["attributes"]["read_depth"] == 16
    assert all(" -> " not in attempt for attempt in pair.rails[0]["attempts"])
    assert pair.rails[0]["gids"].startswith("fe80")  # the next pair


def test_an_errno_with_two_names_is_told_by_the_one_that_drivers_use(hosts: FakeHosts) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    pair.libraries[0].fail("ibv_create_qp", errno.EOPNOTSUPP)

    pair.open()

    assert pair.rails[0]["attempts"] == ["create (local) EOPNOTSUPP; send_depth 256 -> 128"]


def test_what_had_to_be_lowered_once_is_not_remembered(hosts: FakeHosts) -> None:
    """A passing cause would cost every later connection its speed."""
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    pair.libraries[1].fail("ibv_modify_qp", errno.EINVAL, nth=2)
    pair.open()
    assert pair.rails[0]["attributes"]["read_depth"] == 4
    pair.segment.close()

    pair.open()

    assert pair.rails[0]["attributes"]["read_depth"] == 16
    assert not what_worked()


def test_what_was_remembered_does_not_overrule_a_setting(hosts: FakeHosts) -> None:
    """Two connections needed a hop limit of 255; who asks for 10 since then gets 10."""
    there = connectx(address=B, hop_limits=(255, 255))
    pair = hosts.pair(connectx(address=A), there)
    for _ in range(2):
        pair.open().close()
    assert {worked.hop_limit for worked in what_worked().values()} == {255}
    there.hop_limits = (0, 255)

    hosts.engine("a", rdma_hop_limit=10).open_segment(pair.b.address)

    assert [qp.address["hop_limit"] for qp in pair.queue_pairs()[0]] == [10]


def test_what_worked_is_remembered_for_the_kind_of_device(hosts: FakeHosts) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B, read_depth_max=1))
    pair.open().close()
    pair.open()
    used = {side: library.calls["ibv_modify_qp"] for side, library in hosts.libraries.items()}
    pair.segment.close()

    with capture_logs() as events:
        pair.open()

    assert not changes(events)
    # to INIT, RTR and RTS, and to ERR for the one that was closed
    assert hosts.libraries["b"].calls["ibv_modify_qp"] - used["b"] == 3
    assert hosts.libraries["a"].calls["ibv_modify_qp"] - used["a"] <= 4
    assert {worked.read_depth for worked in what_worked().values()} == {1}
    check_connected(pair)


def test_attributes_of_a_device_are_set_as_the_user_says(hosts: FakeHosts) -> None:
    """Each end for its own device: the smaller of what both take counts for what both must have alike."""
    pair = hosts.pair(
        connectx("mlx5_0", A),
        connectx("mlx5_0", B),
        rdma_attributes="mlx5_0:timeout=20,mlx5_0:hop_limit=3,mlx5_0:send_depth=32,mlx5_9:hop_limit=9",
        rdma_read_depth=8,
        peer_settings={"rdma_attributes": "mlx5_0:1:read_depth=2,mlx5_0:1:path_mtu=1024,mlx5_0:1:timeout=9"},
    )

    pair.open()

    (ours,), (theirs,) = pair.queue_pairs()
    assert (ours.attributes["timeout"], ours.address["hop_limit"], ours.caps["max_send_wr"]) == (20, 3, 32)
    assert (ours.attributes["max_rd_atomic"], theirs.attributes["max_dest_rd_atomic"]) == (2, 2)
    assert ours.attributes["path_mtu"] == theirs.attributes["path_mtu"] == Mtu.MTU_1024
    check_connected(pair)


def test_a_depth_that_is_named_for_a_device_is_not_divided(hosts: FakeHosts) -> None:
    """16 READs for the whole device are one for each of 64 connections; who has few gives each four."""
    pair = hosts.pair(connectx(address=A), ionic(address=B), peer_settings={"rdma_attributes": "ionic_0:read_depth=4"})

    pair.open()

    assert pair.rails[0]["attributes"]["read_depth"] == 4


# What cannot be helped.


def test_an_error_shows_all_rungs(hosts: FakeHosts) -> None:
    """A device that refuses everything: one error, with each try and the values it was made with."""
    pair = hosts.pair(connectx(address=A), connectx(address=B, hop_limits=(3, 3)))

    with pytest.raises(TransportUnavailableError) as caught:
        pair.open()

    told = str(caught.value)
    for rung in ("read_depth 16 -> 4", "read_depth 16 -> 1", "path_mtu 4096 -> 256", "hop_limit 64 -> 255", "64 -> 1"):
        assert rung in told
    assert pair.queue_pairs() == ([], [])


@pytest.mark.parametrize("side", [0, 1], ids=["here", "there"])
@pytest.mark.parametrize(("nth", "step"), [(1, "INIT"), (2, "RTR"), (3, "RTS")], ids=["INIT", "RTR", "RTS"])
def test_a_step_that_fails_names_step_errno_and_attributes(hosts: FakeHosts, side: int, nth: int, step: str) -> None:
    """B111: whichever end it is; EPERM is on no ladder."""
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    for pair_of_gids in range(4):  # a fault does not count the calls that another one takes
        pair.libraries[side].fail("ibv_modify_qp", errno.EPERM, nth=(nth - 1) * (pair_of_gids + 1) + 1)

    with pytest.raises(TransportUnavailableError) as caught:
        pair.open()

    told = str(caught.value)
    assert "EPERM" in told
    assert step in told
    assert "mlx5_0" in told
    if side == 1:
        assert f"{pair.b.address} answered" in told
    if step == "RTR":
        assert "path_mtu" in told
    assert pair.queue_pairs() == ([], [])


@pytest.mark.parametrize("verb", ["ibv_create_comp_channel", "ibv_create_cq", "ibv_create_qp"])
def test_a_device_without_room_is_an_error_that_says_so(hosts: FakeHosts, verb: str) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    pair.libraries[0].fail(verb, errno.EMFILE, times=100)

    with pytest.raises(TransportUnavailableError, match="EMFILE"):
        pair.open()

    assert pair.queue_pairs() == ([], [])


def test_a_peer_that_cannot_make_a_queue_pair_says_why(hosts: FakeHosts) -> None:
    """B111."""
    pair = hosts.pair(connectx(address=A), connectx(address=B, max_qp=0))

    with pytest.raises(TransportUnavailableError, match=r"answered: ibv_create_qp.*ENOMEM"):
        pair.open()


def test_a_bug_at_the_peer_is_an_answer_too(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    monkeypatch.setattr("kvxfer.transports.rdma_service.RdmaService._find_gids", lambda *_: 1 // 0)

    with pytest.raises(TransportUnavailableError, match="ZeroDivisionError"):
        pair.open()


# The network.


def test_a_neighbour_that_answers_later_is_waited_for(hosts: FakeHosts) -> None:
    """ETIMEDOUT in RTR, as at start-up: again with back-off."""
    pair = hosts.pair(erdma(address=A), erdma(address=B))
    pair.libraries[0].fail("ibv_modify_qp", errno.ETIMEDOUT, nth=2)

    pair.open()

    check_connected(pair)


@pytest.mark.parametrize("source", ["a/erdma_0", "b/erdma_0"], ids=["here", "there"])
def test_a_neighbour_that_never_answers_names_both_ends_and_the_port(hosts: FakeHosts, source: str) -> None:
    hosts.fabric.set_path(source, "b/erdma_0" if source[0] == "a" else "a/erdma_0", both_ways=False, rtr_errno=110)
    here, there = erdma(address=A, ndev="ens1"), erdma(address=B, ndev="ens2")
    pair = hosts.pair(here, there, connect_timeout_s=0.5)

    with pytest.raises(TransportUnavailableError) as caught:
        pair.open()

    told = str(caught.value)
    for word in (A, B, "4791", "ETIMEDOUT", "RTR"):
        assert word in told, told
    assert pair.libraries[source[0] == "b"].calls["ibv_modify_qp"] > 3
    assert pair.queue_pairs() == ([], [])


def test_a_try_without_time_does_not_hide_what_the_one_before_found_out(hosts: FakeHosts) -> None:
    """The kernel is slow to say that a neighbour does not answer; the second pair of GIDs has no time left."""
    hosts.fabric.set_path("a/mlx5_0", "b/mlx5_0", rtr_errno=errno.ETIMEDOUT)
    pair = hosts.pair(connectx(address=A), connectx(address=B), connect_timeout_s=0.5)
    steps = itertools.count()
    pair.libraries[0].before["ibv_modify_qp"] = lambda: time.sleep(0.5 if next(steps) else 0.0)

    with pytest.raises(TransportUnavailableError) as caught:
        pair.open()

    assert "ETIMEDOUT" in caught.value.message
    assert "4791" in caught.value.remedy
    assert "did not answer the request" not in str(caught.value)


def test_another_pair_of_gids_is_tried_where_one_does_not_resolve(hosts: FakeHosts) -> None:
    """The IPv4 rows do not reach each other, the others do: one try is lost, no time."""
    hosts.fabric.rules.append(_only_link_local)
    pair = hosts.pair(connectx(address=A), connectx(address=B), connect_timeout_s=600.0, handshake_timeout_s=600.0)

    pair.open()

    assert pair.rails[0]["gids"].startswith("fe80")
    check_connected(pair)


def _only_link_local(_source: Any, row: FakeGid | None, _target: Any, _dgid: bytes) -> Any:
    from tests.support.fake_verbs import Path as FabricPath

    return None if row is None or row.value[:2] == b"\xfe\x80" else FabricPath(errno.ETIMEDOUT, is_lost=True)


def test_a_gid_that_moves_to_another_row_is_found_again(hosts: FakeHosts) -> None:
    """B13: at both ends, between two connections."""
    pair = hosts.pair(erdma(address=A), erdma(address=B))
    for library in pair.libraries:
        library.devices[0].nic.ports[0].gid_tbl_len = 8
    pair.open()
    pair.segment.close()

    for library in pair.libraries:
        library.move_gid("erdma_0", 1, 0, 5)
    pair.open()

    assert [qp.address["sgid_index"] for side in pair.queue_pairs() for qp in side] == [5, 5]
    check_connected(pair)


def test_an_address_of_the_peer_that_changed_is_learned_without_opening_anew(hosts: FakeHosts) -> None:
    """DHCP, a fail-over: the old address is gone, and the peer tells its new one when it is asked for the old."""
    pair = hosts.pair(erdma(address=A), erdma(address=B))
    pair.open()
    pair.write()

    pair.libraries[1].devices[0].nic.ports[0].gids[0] = gid("10.10.7.7", ndev="eth0")
    pair.libraries[1].raise_event("erdma_0", EventType.GID_CHANGE, 1)

    check_connected(pair)
    assert "10.10.7.7" in pair.rails[0]["remote_gid"]


def test_a_lid_of_the_peer_that_changed_is_learned_without_opening_anew(hosts: FakeHosts) -> None:
    """Another subnet manager took over."""
    pair = hosts.pair(infiniband(lid=0x120), infiniband(lid=0x121))
    pair.open()

    pair.libraries[1].devices[0].nic.ports[0].lid = 0x321
    pair.libraries[1].raise_event("mlx5_0", EventType.LID_CHANGE, 1)

    check_connected(pair)
    assert pair.queue_pairs()[0][0].address["dlid"] == 0x321


def test_an_address_that_was_taken_away_is_told_with_those_there_are(hosts: FakeHosts) -> None:
    """The peer has IPv6 only now, and this end IPv4 only."""
    pair = hosts.pair(erdma(address=A), erdma(address=B), connect_timeout_s=0.3)
    pair.open()
    pair.libraries[1].devices[0].nic.ports[0].gids[0] = gid("2001:db8::7", ndev="eth0")
    pair.libraries[1].raise_event("erdma_0", EventType.GID_CHANGE, 1)

    with pytest.raises(KvxferError):
        pair.write()

    assert "2001:db8::7" in pair.rails[0]["trouble"]
    assert A in pair.rails[0]["trouble"]


def test_too_low_a_limit_of_locked_memory_is_a_reason_for_the_next_transport(hosts: FakeHosts) -> None:
    """Where no region could be registered, rdma is not usable here, and tcp is not the worse for it."""
    hosts.add("a", connectx(address=A)).memlock_nbytes = 64 << 10
    hosts.add("b", connectx(address=B))

    probe = RdmaTransport.probe(_config("a"))
    a, b = hosts.engine("a", transports=("rdma", "tcp")), hosts.engine("b", transports=("rdma", "tcp"))

    assert not probe.usable
    assert "ENOMEM" in probe.reason
    assert "mlx5_0:1" in probe.details["refusals"]
    assert a.transports == ("tcp",)
    a.register(bytearray(1 << 20))
    assert a.open_segment(b.address).transport == "tcp"


def test_the_remedy_of_a_limit_of_locked_memory_is_told(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.memory.registration_error.memlock_nbytes", lambda: 64 << 10)
    hosts.add("a", connectx(address=A)).memlock_nbytes = 64 << 10

    with pytest.raises(TransportUnavailableError, match="locked-memory limit of this process is 65536") as caught:
        hosts.engine("a")

    assert "ulimit -l unlimited" in caught.value.remedy


def test_a_zero_gid_is_no_gid(hosts: FakeHosts) -> None:
    """B12: such a port is not used, and says so."""
    hosts.add("a", connectx(ports=[FakePort({0: FakeGid(bytes(16))})]))

    probe = RdmaTransport.probe(_config("a"))

    assert not probe.usable
    assert "no GID" in probe.reason


def test_a_request_with_a_zero_gid_is_answered_with_an_error(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """B12: no queue pair is touched for it."""
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    from kvxfer.transports import rdma_connect

    make = rdma_connect.ConnectRequest.to_json

    def without(self: Any) -> dict[str, Any]:
        return {**make(self), "gid": bytes(16).hex()}

    monkeypatch.setattr(rdma_connect.ConnectRequest, "to_json", without)

    with pytest.raises(TransportUnavailableError, match="GID"):
        pair.open()

    assert pair.libraries[1].calls["ibv_create_qp"] == 0


def test_only_ports_of_one_link_layer_are_paired(hosts: FakeHosts) -> None:
    """B24: Ethernet and InfiniBand here, InfiniBand there: one legal pair."""
    pair = hosts.pair([connectx("mlx_0", A), infiniband("mlx_1", 0x11)], [infiniband("mlx_0", 0x12)])

    pair.open()

    assert pair.connected == ["mlx_1:1 to mlx_0:1"]
    assert pair.libraries[0].device("mlx_0").live["qp"] == 0
    check_connected(pair)


def test_no_common_link_layer_falls_back_to_tcp_visibly(hosts: FakeHosts) -> None:
    """B24: before any queue pair is made."""
    pair = hosts.pair(
        [connectx("mlx_0", A), infiniband("mlx_1", 0x11)],
        [infiniband("mlx_0", 0x12)],
        transports=("rdma", "tcp"),
        rdma_devices="mlx_0",
    )

    with capture_logs() as events:
        pair.open()

    assert pair.segment.transport == "tcp"
    assert "no common link layer" in pair.segment.passed_over["rdma"]
    assert any(event["event"] == "segment.opened" and event["passed_over"] for event in events)
    assert [library.calls["ibv_create_qp"] for library in pair.libraries] == [0, 0]


def test_a_connection_that_fails_falls_back_to_tcp_with_its_reason(hosts: FakeHosts) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B, max_qp=0), transports=("rdma", "tcp"))

    with capture_logs() as events:
        pair.open()

    assert pair.segment.transport == "tcp"
    assert "ENOMEM" in pair.segment.passed_over["rdma"]
    assert [event["log_level"] for event in events if event["event"] == "segment.opened"] == ["warning"]
    pair.write()


def test_a_driver_that_does_not_tell_its_longest_message_is_used(hosts: FakeHosts) -> None:
    """mana leaves max_msg_sz at 0; here the device takes 1 GiB all the same."""
    nics = [connectx(address=A), connectx(address=B)]
    for nic in nics:
        nic.ports[0].max_msg_sz = 0
    pair = hosts.pair(*nics)

    pair.open()

    for nic in nics:  # the fake takes this value as its limit
        nic.ports[0].max_msg_sz = 1 << 30
    check_connected(pair)


def test_a_port_of_the_peer_that_makes_no_sense_is_left_out_with_a_warning(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    card = RdmaTransport.card

    def with_another(self: RdmaTransport) -> dict[str, Any]:
        good = card(self)["ports"]
        return {"ports": [{**good[0], "offer": {**good[0]["offer"], "message_max": 0}}, *good]}

    monkeypatch.setattr(RdmaTransport, "card", with_another)

    with capture_logs() as events:
        pair.open()

    assert any("message_max" in event.get("warning", "") for event in events)
    check_connected(pair)


def test_a_peer_that_refuses_the_request_for_a_connection_is_reached_by_tcp_visibly(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer of another version, say: to refuse a request ends the session, and yet not the open."""
    pair = hosts.pair(connectx(address=A), connectx(address=B), transports=("rdma", "tcp"))
    from kvxfer.transports.rdma_wire import ConnectRequest

    make = ConnectRequest.to_json
    monkeypatch.setattr(ConnectRequest, "to_json", lambda self: {**make(self), "qp_num": -1})

    with capture_logs() as events:
        pair.open()

    assert pair.segment.transport == "tcp"
    assert "qp_num" in pair.segment.passed_over["rdma"]
    assert [event["log_level"] for event in events if event["event"] == "segment.opened"] == ["warning"]
    pair.write()


def test_a_peer_that_refuses_the_request_for_a_connection_is_told_where_there_is_no_other_way(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    from kvxfer.transports.rdma_wire import ConnectRequest

    make = ConnectRequest.to_json
    monkeypatch.setattr(ConnectRequest, "to_json", lambda self: {**make(self), "qp_num": -1})

    with pytest.raises(TransportUnavailableError, match="qp_num"):
        pair.open()


def test_the_peer_is_told_why_it_is_reached_by_tcp(hosts: FakeHosts) -> None:
    """Who looks at its log only must see as well what is lost, and why."""
    pair = hosts.pair(connectx(address=A, max_qp=0), connectx(address=B), transports=("rdma", "tcp"))

    with capture_logs() as events:
        pair.open()
        pair.write()

    (connected,) = [one for one in events if one["event"] == "peer.connected" and one["transport"] == "tcp"]
    assert "ENOMEM" in connected["passed_over"]["rdma"]
    ended = [one["reason"] for one in events if one["event"] == "peer.disconnected"]
    assert any("rdma could not be established" in reason and "ENOMEM" in reason for reason in ended)


def test_roce_v1_and_v2_do_not_meet(hosts: FakeHosts) -> None:
    """B05: refused before anything is made."""
    old = connectx(address=B, ports=[FakePort({0: gid(B, GidType.ROCE_V1, "eth0")})])
    pair = hosts.pair(erdma(address=A), old)

    with pytest.raises(TransportUnavailableError, match="no common kind of GID"):
        pair.open()

    assert pair.libraries[1].calls["ibv_create_qp"] == 0


def test_a_port_that_is_down_is_named_with_its_state(hosts: FakeHosts) -> None:
    """B22: no retries, and the reason is there."""
    nic = connectx("mlx5_9", A)
    nic.ports[0].state = PortState.DOWN
    hosts.add("a", nic)

    probe = RdmaTransport.probe(_config("a"))

    assert not probe.usable
    assert "mlx5_9" in probe.reason
    assert "DOWN" in probe.reason


def test_a_port_that_went_down_since_is_named_with_its_state(hosts: FakeHosts) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    pair.libraries[1].device("mlx5_0").nic.ports[0].state = PortState.DOWN  # and no event tells

    with pytest.raises(TransportUnavailableError, match="DOWN"):
        pair.open()


def test_a_port_other_than_the_first_is_used(hosts: FakeHosts) -> None:
    """B26: port 1 is down, port 2 carries."""
    first, second = connectx(address=A).ports[0], connectx(address=A).ports[0]
    first.state = PortState.DOWN
    pair = hosts.pair(connectx(address=A, ports=[first, second]), connectx(address=B))

    pair.open()

    assert pair.connected == ["mlx5_0:2 to mlx5_0:1"]
    check_connected(pair)


# Peers that go away, and engines that are closed.


def test_a_peer_that_vanishes_before_it_answers_is_an_error(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B), connect_timeout_s=0.5)
    closing: list[threading.Thread] = []

    def vanish(*_: Any) -> dict[str, Any]:
        closing.append(threading.Thread(target=pair.b.close))
        closing[0].start()
        raise AssertionError

    monkeypatch.setattr("kvxfer.transports.rdma_service.RdmaService._make", vanish)

    with pytest.raises(KvxferError):
        pair.open()

    closing[0].join()
    assert pair.queue_pairs() == ([], [])


def test_a_peer_that_vanishes_between_rtr_and_rts_is_found_by_the_first_batch(hosts: FakeHosts) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B), connect_timeout_s=0.3)
    steps = 0

    def before() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:  # INIT, RTR, RTS
            pair.b.close()

    pair.libraries[0].before["ibv_modify_qp"] = before

    def open_and_write() -> None:
        pair.open()
        pair.write(timeout_s=1.0)

    with pytest.raises(KvxferError):
        open_and_write()

    assert pair.queue_pairs()[1] == []


def test_a_peer_that_does_not_answer_in_time_leaves_nothing_behind(hosts: FakeHosts) -> None:
    """B97: its late reply counts for nothing, and the queue pair that it made is dropped."""
    pair = hosts.pair(connectx(address=A), connectx(address=B), connect_timeout_s=0.1)
    go_on = threading.Event()
    pair.libraries[1].before["ibv_modify_qp"] = lambda: go_on.wait(5.0) and None

    with pytest.raises((TransportUnavailableError, PeerUnreachableError)):
        pair.open()
    go_on.set()

    until = time.monotonic() + 2.0
    while pair.queue_pairs()[1] and time.monotonic() < until:
        time.sleep(0.001)
    assert pair.queue_pairs() == ([], [])


def test_an_engine_that_is_closed_while_it_connects_ends_at_once(hosts: FakeHosts) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    go_on, there = threading.Event(), threading.Event()

    def block() -> None:
        there.set()
        go_on.wait(5.0)

    pair.libraries[1].before["ibv_modify_qp"] = block
    caught: list[BaseException] = []

    def run() -> None:
        try:
            pair.open()
        except KvxferError as error:
            caught.append(error)

    opening = threading.Thread(target=run)
    opening.start()
    there.wait(5.0)

    pair.a.close()
    opening.join(2.0)

    assert not opening.is_alive()
    assert isinstance(caught[0], ClosedError)
    go_on.set()
    assert pair.queue_pairs()[0] == []


def test_an_engine_that_is_closed_while_a_step_runs_waits_for_it(hosts: FakeHosts) -> None:
    """The device must not be taken from under ibv_modify_qp."""
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    go_on, there = threading.Event(), threading.Event()

    def block() -> None:
        there.set()
        go_on.wait(5.0)

    pair.libraries[0].before["ibv_modify_qp"] = block

    def run() -> None:
        with pytest.raises(KvxferError):
            pair.open()

    opening = threading.Thread(target=run)
    opening.start()
    there.wait(5.0)
    closing = threading.Thread(target=pair.a.close)
    closing.start()
    closing.join(0.02)
    assert closing.is_alive()

    go_on.set()

    closing.join(5.0)
    opening.join(5.0)
    assert not closing.is_alive()
    assert hosts.libraries["a"].leaks == {}


def test_a_request_for_a_port_that_is_not_there_is_answered(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    from kvxfer.transports.rdma_wire import ConnectRequest

    make = ConnectRequest.to_json
    monkeypatch.setattr(ConnectRequest, "to_json", lambda self: {**make(self), "port": "mlx5_7:1"})

    with pytest.raises(TransportUnavailableError, match="there is no RDMA port mlx5_7:1"):
        pair.open()


def test_two_engines_open_each_other_at_once(hosts: FakeHosts) -> None:
    """B95: each has its own connection to the other, so neither can disturb the other's."""
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    opened: list[Any] = []
    threads = [
        threading.Thread(target=lambda us=us, them=them: opened.append(us.open_segment(them.address)))  # type: ignore[misc]
        for us, them in ((pair.a, pair.b), (pair.b, pair.a))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 2

    ours, theirs = pair.queue_pairs()

    assert [len(ours), len(theirs)] == [2, 2]
    pairs = {qp.number: qp.attributes["dest_qp_num"] for qp in ours + theirs}
    assert all(pairs[pairs[number]] == number for number in pairs)


def test_many_threads_that_open_one_peer_share_the_outcome(hosts: FakeHosts) -> None:
    """B107: one failure for all of them, with one cause; the next call works."""
    pair = hosts.pair(connectx(address=A), connectx(address=B, max_qp=0))
    told: list[str] = []

    def run() -> None:
        with pytest.raises(TransportUnavailableError) as caught:
            pair.open()
        told.append(str(caught.value))

    threads = [threading.Thread(target=run) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(told) == 20
    assert all("ENOMEM" in one for one in told)
    pair.libraries[1].device("mlx5_0").nic.max_qp = 100
    pair.open()
    check_connected(pair)


def test_many_peers_come_and_go_and_leave_no_queue_pair(hosts: FakeHosts) -> None:
    """B103: every third connection fails; none is kept beyond its session."""
    hosts.add("b", connectx(address=B))
    target = hosts.engine("b")
    for row in range(12):
        library = hosts.add(f"a{row}", connectx(address=f"10.10.0.{10 + row}"))
        if row % 3 == 0:
            library.fail("ibv_modify_qp", errno.EPERM, nth=3, times=100)
        engine = hosts.engine(f"a{row}")
        try:
            segment = engine.open_segment(target.address)
        except TransportUnavailableError:
            assert row % 3 == 0
        else:
            segment.close()

    until = time.monotonic() + 2.0
    while hosts.libraries["b"].queue_pairs and time.monotonic() < until:
        time.sleep(0.001)
    assert hosts.libraries["b"].queue_pairs == []


def test_the_partition_key_of_the_settings_is_used(hosts: FakeHosts) -> None:
    """B40: row 1 of 2."""
    nics = [infiniband(lid=0x120 + row, ports=infiniband(lid=0x120 + row).ports) for row in range(2)]
    for nic in nics:
        nic.ports[0].pkeys = [0xFFFF, 0x8001]
    pair = hosts.pair(*nics, pkey_index=1)

    pair.open()

    assert [qp.attributes["pkey_index"] for side in pair.queue_pairs() for qp in side] == [1, 1]
    check_connected(pair)


def test_a_partition_key_beyond_the_table_is_refused_with_both_numbers(hosts: FakeHosts) -> None:
    """B40: row 7 of 2."""
    nic = infiniband(lid=0x120)
    nic.ports[0].pkeys = [0xFFFF, 0x8001]
    hosts.add("a", nic)

    probe = RdmaTransport.probe(_config("a", pkey_index=7))

    assert "pkey_index 7" in probe.reason
    assert "2 rows" in probe.reason


def test_a_partition_key_row_that_is_empty_is_refused(hosts: FakeHosts) -> None:
    hosts.add("a", infiniband(lid=0x120))  # row 0 of 128 is in use

    probe = RdmaTransport.probe(_config("a", pkey_index=7))

    assert "pkey_index 7 is an empty row" in probe.reason


def test_the_first_full_membership_is_taken_where_none_is_named(hosts: FakeHosts) -> None:
    """Row 0 is a limited membership on hosts that only administrators reach by the default partition."""
    nics = [infiniband(lid=0x120), infiniband(lid=0x121)]
    nics[0].ports[0].pkeys = [0x7FFF, 0, 0x8001]
    nics[1].ports[0].pkeys = [0x8001]
    pair = hosts.pair(*nics)

    pair.open()

    assert [qp.attributes["pkey_index"] for side in pair.queue_pairs() for qp in side] == [2, 0]
    check_connected(pair)


def test_a_partition_key_that_moves_to_another_row_is_found_again(hosts: FakeHosts) -> None:
    nics = [infiniband(lid=0x120), infiniband(lid=0x121)]
    pair = hosts.pair(*nics)
    nics[0].ports[0].pkeys = [0, 0xFFFF]

    pair.open()

    assert pair.queue_pairs()[0][0].attributes["pkey_index"] == 1


def test_an_ethernet_port_without_a_partition_key_table_is_used(hosts: FakeHosts) -> None:
    """RoCE has the default partition only: whatever row is named for InfiniBand, nothing is asked."""
    nics = [connectx(address=A), connectx(address=B)]
    pair = hosts.pair(*nics, pkey_index=1)
    for nic in nics:
        nic.ports[0].pkeys = []

    for host, nic in zip("cd", nics, strict=True):
        hosts.add(host, nic)
        assert RdmaTransport.probe(_config(host, pkey_index=1)).usable
    for nic in nics:
        nic.ports[0].pkeys = [0xFFFF]  # the fake checks row 0 in INIT, as drivers with a table do
    pair.open()

    assert [qp.attributes["pkey_index"] for side in pair.queue_pairs() for qp in side] == [0, 0]
    assert [library.calls["ibv_query_pkey"] for library in pair.libraries] == [0, 0]


def test_a_partition_key_that_cannot_be_read_costs_its_port_only(hosts: FakeHosts) -> None:
    ports = [*infiniband(lid=0x120).ports, *infiniband(lid=0x121).ports]
    for port in ports:
        port.pkeys = [0xFFFF]
    library = hosts.add("a", infiniband(ports=ports))
    library.fail("ibv_query_pkey", errno.EIO)

    probe = RdmaTransport.probe(_config("a"))

    assert probe.details["ports"] == ["mlx5_0:2"]
    assert "partition key table" in probe.details["refusals"]["mlx5_0:1"]


def test_partitions_that_differ_are_not_tried(hosts: FakeHosts) -> None:
    """B40: compared before a queue pair is made."""
    here, there = infiniband(lid=0x120), infiniband(lid=0x121)
    there.ports[0].pkeys = [0x8002]
    pair = hosts.pair(here, there)

    with pytest.raises(TransportUnavailableError, match=r"0xffff here, 0x8002"):
        pair.open()


@pytest.mark.parametrize(
    "card",
    [
        {},
        {"ports": 3},
        {"ports": [3]},
        {"ports": [{}]},
        {"ports": [{"kind": "x", "offer": {"link": 99}}]},
        {"ports": []},
    ],
)
def test_a_card_that_is_none_is_a_reason_to_go_on_with_tcp(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch, card: dict[str, Any]
) -> None:
    """B108: what a peer sends wrong is its own error; this engine lives on."""
    pair = hosts.pair(connectx(address=A), connectx(address=B), transports=("rdma", "tcp"))
    monkeypatch.setattr(RdmaTransport, "card", lambda _: card)

    pair.open()

    assert pair.segment.transport == "tcp"
    assert pair.segment.passed_over["rdma"]
    pair.write()


def _config(host: str, **settings: Any) -> Any:
    from kvxfer.config import EngineConfig

    return EngineConfig.resolve(name=host, transports=("rdma",), **settings)
