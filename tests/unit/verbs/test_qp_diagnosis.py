"""Which value is blamed for a step that failed, and what an operator is told to do about it."""

from __future__ import annotations

import dataclasses
import errno
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.verbs.device import DeviceLimits, Port
from kvxfer.verbs.enums import Access, GidType, LinkLayer, Mtu, PortState, QueuePairState
from kvxfer.verbs.gid import GidEntry, GidTable
from kvxfer.verbs.port import AddressVector
from kvxfer.verbs.qp_capabilities import QueuePairCapabilities, explain_refusal
from kvxfer.verbs.qp_diagnosis import Attempt, Surroundings, allowed_text, diagnose
from kvxfer.verbs.qp_states import Finding

RESET, INIT, RTR, RTS = QueuePairState.RESET, QueuePairState.INIT, QueuePairState.RTR, QueuePairState.RTS
ERR = QueuePairState.ERR


def ipv4(text: str) -> bytes:
    return bytes(10) + b"\xff\xff" + bytes(map(int, text.split(".")))


LINK_LOCAL = b"\xfe\x80" + bytes(6) + bytes(range(8))
PEER = AddressVector(port=1, is_global=True, dgid=ipv4("10.0.0.2"), sgid_index=1, hop_limit=64)
TO_RTR: dict[str, Any] = {
    "ah_attr": PEER,
    "path_mtu": Mtu.MTU_1024,
    "dest_qp_num": 17,
    "rq_psn": 1,
    "max_dest_rd_atomic": 4,
    "min_rnr_timer": 12,
}
TO_RTS: dict[str, Any] = {"sq_psn": 2, "timeout": 18, "retry_cnt": 7, "rnr_retry": 7, "max_rd_atomic": 4}
TO_INIT: dict[str, Any] = {"port_num": 1, "pkey_index": 0, "qp_access_flags": Access.REMOTE_WRITE}
TABLE = GidTable(
    "rxe0",
    1,
    LinkLayer.ETHERNET,
    8,
    (GidEntry(0, LINK_LOCAL, GidType.ROCE_V2, "eth0"), GidEntry(1, ipv4("10.0.0.1"), GidType.ROCE_V2, "eth0")),
)


def limits(**changes: Any) -> DeviceLimits:
    values: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(DeviceLimits)), 0)
    values |= {
        "phys_port_cnt": 1,
        "max_qp": 100,
        "max_qp_wr": 1024,
        "max_sge": 30,
        "max_qp_rd_atom": 16,
        "max_qp_init_rd_atom": 16,
        "max_res_rd_atom": 100_000,
    }
    return DeviceLimits(**{**values, **changes})


def port(**changes: Any) -> Port:
    values: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(Port)), 0)
    values |= {
        "device": "rxe0",
        "number": 1,
        "state": PortState.ACTIVE,
        "link_layer": LinkLayer.ETHERNET,
        "active_mtu": Mtu.MTU_1024,
        "max_mtu": Mtu.MTU_4096,
        "gid_tbl_len": 8,
        "pkey_tbl_len": 2,
    }
    return Port(**{**values, **changes})


def around(**changes: Any) -> Surroundings:
    values: dict[str, Any] = {"device": "rxe0", "limits": limits(), "port": port(), "gid_table": TABLE}
    return Surroundings(**{**values, **changes})


def first(
    error: int,
    step: tuple[QueuePairState, QueuePairState] = (INIT, RTR),
    attributes: dict[str, Any] | None = None,
    **surroundings: Any,
) -> Finding:
    given = TO_RTR if attributes is None else attributes
    return diagnose(Attempt(*step, given, error), around(**surroundings))[0]


def with_address(**changes: Any) -> dict[str, Any]:
    return {**TO_RTR, "ah_attr": dataclasses.replace(PEER, **changes)}


# EINVAL.


def test_a_read_depth_above_the_devices_is_blamed_with_both_numbers() -> None:
    responder = first(errno.EINVAL, attributes={**TO_RTR, "max_dest_rd_atomic": 16}, limits=limits(max_qp_rd_atom=4))
    initiator = first(errno.EINVAL, (RTR, RTS), {**TO_RTS, "max_rd_atomic": 16}, limits=limits(max_qp_init_rd_atom=4))

    assert responder.why == "max_dest_rd_atomic 16, the device allows 4 (max_qp_rd_atom)"
    assert responder.remedy.startswith("Give 4 at most")
    assert initiator.why == "max_rd_atomic 16, the device allows 4 (max_qp_init_rd_atom)"


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOMEM])
def test_a_read_budget_that_this_process_has_used_up_is_blamed(error: int) -> None:
    finding = first(
        error, attributes={**TO_RTR, "max_dest_rd_atomic": 16}, limits=limits(max_res_rd_atom=16), reads_held=16
    )

    assert finding.culprit == "max_dest_rd_atomic"
    assert "the whole device has 16 (max_res_rd_atom)" in finding.why
    assert "hold 16" in finding.why
    assert "16 divided by the number of queue pairs" in finding.remedy


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOMEM])
def test_a_small_read_budget_may_be_used_up_by_other_processes(error: int) -> None:
    finding = first(error, attributes={**TO_RTR, "max_dest_rd_atomic": 16}, limits=limits(max_res_rd_atom=16))

    assert finding.culprit == "max_dest_rd_atomic"
    assert "other processes" in finding.why


def test_a_path_mtu_above_the_active_one_is_blamed() -> None:
    finding = first(errno.EINVAL, attributes={**TO_RTR, "path_mtu": Mtu.MTU_4096})

    assert finding.why == "path_mtu 4096, the port's active MTU is 1024"


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (9, "sgid_index 9 is beyond the 8 rows of the GID table"),
        (3, "sgid_index 3 is an empty row of the GID table"),
    ],
)
@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENODATA, errno.ENODEV])
def test_a_source_gid_that_is_none_is_blamed_and_those_there_are_are_listed(index: int, why: str, error: int) -> None:
    finding = first(error, attributes=with_address(sgid_index=index))

    assert finding.why == why
    assert "1 (::ffff:10.0.0.1 on eth0, RoCE v2)" in finding.remedy


def test_a_port_that_does_not_exist_is_blamed() -> None:
    finding = first(errno.EINVAL, (RESET, INIT), {**TO_INIT, "port_num": 3}, port=None)

    assert finding.why == "port 3, the device has 1"


def test_a_partition_key_beyond_the_table_is_blamed_with_both_numbers() -> None:
    finding = first(errno.EINVAL, (RESET, INIT), {**TO_INIT, "pkey_index": 7})

    assert finding.why == "pkey_index 7, the port's table has 2 rows"
    assert first(errno.EINVAL, (RESET, INIT), {**TO_INIT, "pkey_index": 1}).culprit == "pkey_index"


def test_a_right_that_queue_pairs_do_not_have_is_blamed() -> None:
    access = Access.REMOTE_WRITE | Access.RELAXED_ORDERING
    finding = first(errno.EINVAL, (RESET, INIT), {**TO_INIT, "qp_access_flags": access})

    assert finding.culprit == "qp_access_flags"
    assert "RELAXED_ORDERING" in finding.why


def test_reset_to_reset_is_known_to_be_refused_by_intel() -> None:
    finding = first(errno.EINVAL, (RESET, RESET), {})

    assert finding.culprit == "RESET->RESET"
    assert "irdma" in finding.why
    assert "straight to INIT" in finding.remedy


def test_a_fresh_queue_pair_cannot_be_stopped() -> None:
    assert first(errno.EINVAL, (RESET, ERR), {}).remedy == "Close it; nothing is posted to it."


def test_a_queue_pair_that_an_error_has_moved_says_so() -> None:
    finding = first(errno.EINVAL, (RTS, RTS), {"min_rnr_timer": 12}, actual_state=ERR)

    assert finding.why == "the queue pair is in ERR, no longer in RTS"


def test_two_address_families_are_blamed() -> None:
    finding = first(errno.EINVAL, attributes=with_address(sgid_index=0))

    assert finding.culprit == "dgid"
    assert "own fe80::" in finding.why
    assert "peer ::ffff:10.0.0.2" in finding.why


def test_the_certain_culprits_come_first_and_the_merely_possible_are_left_out() -> None:
    attributes = {**with_address(sgid_index=9, hop_limit=1), "path_mtu": Mtu.MTU_4096, "max_dest_rd_atomic": 32}
    findings = diagnose(Attempt(INIT, RTR, attributes, errno.EINVAL), around(port=port(state=PortState.DOWN)))

    culprits = [finding.culprit for finding in findings]
    assert set(culprits[:3]) == {"sgid_index", "max_dest_rd_atomic", "path_mtu"}
    assert culprits[3:] == ["port state"]


def test_values_that_all_fit_leave_the_kernels_log() -> None:
    findings = diagnose(Attempt(INIT, INIT, {}, errno.EINVAL), around())

    assert [finding.why for finding in findings] == ["every value is within what device and port say"]
    assert "dmesg" in findings[0].remedy


# The way to the peer.


def test_a_neighbour_that_does_not_answer_is_named_with_both_gids_and_the_netdev() -> None:
    finding = first(errno.ETIMEDOUT)

    assert finding.culprit == "dgid"
    assert "from ::ffff:10.0.0.1 on eth0, nothing answered" in finding.why
    assert "peer GID ::ffff:10.0.0.2" in finding.why
    assert "`ping -I eth0 10.0.0.2`" in finding.remedy
    assert "rails are not connected" in finding.remedy
    assert "4791" in finding.remedy


@pytest.mark.parametrize("error", [errno.ENETUNREACH, errno.EHOSTUNREACH])
def test_a_missing_route_is_named_with_both_gids(error: int) -> None:
    finding = first(error)

    assert finding.why == "no route leads to peer GID ::ffff:10.0.0.2 from ::ffff:10.0.0.1 on eth0"
    assert "`ip route get 10.0.0.2 oif eth0`" in finding.remedy


@pytest.mark.parametrize("error", [errno.ETIMEDOUT, errno.ENETUNREACH, errno.EINVAL])
def test_a_hop_limit_that_ends_at_the_first_router_is_a_suspect(error: int) -> None:
    findings = diagnose(Attempt(INIT, RTR, with_address(hop_limit=1), error), around())

    assert "hop_limit 1 reaches no peer behind a router" in [finding.why for finding in findings]


@pytest.mark.parametrize("error", [errno.ETIMEDOUT, errno.ENODEV, errno.ENETUNREACH])
def test_a_port_that_is_down_comes_first(error: int) -> None:
    finding = first(error, port=port(state=PortState.DOWN))

    assert finding.why == "port 1 is DOWN, not ACTIVE"
    assert "`ip link set eth0 up`" in finding.remedy


def test_a_netdev_that_is_down_is_named() -> None:
    finding = first(errno.ENODEV)

    assert finding.culprit == "sgid_index"
    assert "::ffff:10.0.0.1 on eth0; that netdev is down" in finding.why
    assert "`ip link set eth0 up`" in finding.remedy


# Everything else.


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (errno.ENOMEM, "locked memory"),
        (errno.ENODEV, "has gone"),
        (errno.EOPNOTSUPP, "driver does not know"),
        (errno.EPERM, "may not"),
        (errno.EIO, "does not answer"),
        (errno.ETIMEDOUT, "did not answer the command"),
        (errno.EPROTO, "no reason that is known"),
        (4242, "no reason that is known"),
    ],
)
def test_every_error_number_has_an_answer(error: int, word: str) -> None:
    finding = first(error, (RTS, RTS), {"min_rnr_timer": 12})

    assert word in finding.why
    assert finding.remedy.endswith(".")


@pytest.mark.parametrize("error", [errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH])
def test_an_infiniband_address_without_a_gid_has_an_answer_too(error: int) -> None:
    """The three are of RoCE's address resolution, which says more; here nothing did, and the diagnosis fell over."""
    by_lid = AddressVector(port=1, is_global=False, dlid=5)

    assert diagnose(Attempt(INIT, RTR, {**TO_RTR, "ah_attr": by_lid}, error), Surroundings("mlx5_0", limits()))


def test_nothing_is_known_of_the_device_any_more() -> None:
    findings = diagnose(Attempt(INIT, RTR, TO_RTR, errno.EIO), around(port=None, gid_table=None))

    assert findings[0].culprit == "EIO"


def test_what_is_allowed_is_told_with_the_source_row() -> None:
    told = allowed_text(Attempt(INIT, RTR, TO_RTR, errno.EINVAL), around(reads_held=12))

    assert "max_qp_rd_atom 16" in told
    assert "(12 held by this process's other queue pairs)" in told
    assert "active MTU 1024 of 4096" in told
    assert "GID table of 8 rows" in told
    assert "GID row 1 is ::ffff:10.0.0.1 on eth0, RoCE v2" in told


numbers = st.integers(0, 300)


@given(
    st.sampled_from([*errno.errorcode, 4242]),
    st.sampled_from([(RESET, INIT), (INIT, RTR), (RTR, RTS), (RTS, RTS), (RTS, ERR)]),
    st.builds(
        AddressVector,
        port=numbers,
        is_global=st.booleans(),
        dgid=st.binary(min_size=16, max_size=16),
        sgid_index=st.integers(0, 255),
        hop_limit=st.integers(0, 255),
    ),
    numbers,
    st.booleans(),
)
def test_whatever_fails_the_answer_is_ranked_distinct_and_whole_sentences(
    error: int,
    step: tuple[QueuePairState, QueuePairState],
    address: AddressVector,
    depth: int,
    is_known: bool,
) -> None:
    attributes = {**TO_RTR, "ah_attr": address, "max_dest_rd_atomic": depth} if step == (INIT, RTR) else {}
    known: dict[str, Any] = {} if is_known else {"port": None, "gid_table": None}

    findings = diagnose(Attempt(*step, attributes, error), around(**known))

    assert findings
    assert len({finding.culprit for finding in findings}) == len(findings)
    for finding in findings:
        assert finding.why
        assert not finding.why.endswith(".")
        assert finding.remedy.endswith(".")


# Making one.


@pytest.mark.parametrize(
    ("changes", "error", "culprit", "word"),
    [
        ({"max_send_wr": 2000}, errno.EINVAL, "max_send_wr", "2000, the device allows 1024 (max_qp_wr)"),
        ({"max_recv_wr": 2000}, errno.ENOMEM, "max_recv_wr", "2000, the device allows 1024 (max_qp_wr)"),
        ({"max_send_sge": 31}, errno.EINVAL, "max_send_sge", "31, the device allows 30 (max_sge)"),
        ({"max_inline_data": 220}, errno.EINVAL, "max_inline_data", "220"),
        ({}, errno.EINVAL, "max_send_wr", "requests times their size"),
        ({}, errno.ENOMEM, "max_send_wr", "all 100 queue pairs"),
        ({}, errno.EOPNOTSUPP, "qp_type", "no RC queue pairs"),
        ({}, errno.EIO, "ibv_create_qp", "no reason"),
    ],
)
def test_a_queue_pair_that_is_not_made_has_a_culprit(
    changes: dict[str, int], error: int, culprit: str, word: str
) -> None:
    asked = QueuePairCapabilities(**{"max_send_wr": 256, **changes})

    finding = explain_refusal(error, asked, limits())

    assert finding.culprit == culprit
    assert word in finding.why
