"""The RC state table: what each step needs, may carry, and which values it may have, before the device is asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.verbs.device import Port
from kvxfer.verbs.enums import LinkLayer, Mtu, PortState, QueuePairMask, QueuePairState
from kvxfer.verbs.port import AddressVector
from kvxfer.verbs.qp_states import (
    ATTRIBUTE_MASKS,
    RANGES,
    TRANSITIONS,
    find_fault,
    mask_of,
    missing_attributes,
    names_of,
    way,
)

RESET, INIT, RTR, RTS = QueuePairState.RESET, QueuePairState.INIT, QueuePairState.RTR, QueuePairState.RTS
SQD, ERR = QueuePairState.SQD, QueuePairState.ERR
PEER = AddressVector(port=1, is_global=True, dgid=bytes(10) + b"\xff\xff\x0a\x00\x00\x02", sgid_index=1, hop_limit=64)
TO_INIT = {"port_num": 1, "pkey_index": 0, "qp_access_flags": 6}
TO_RTR = {
    "ah_attr": PEER,
    "path_mtu": Mtu.MTU_1024,
    "dest_qp_num": 17,
    "rq_psn": 1,
    "max_dest_rd_atomic": 16,
    "min_rnr_timer": 12,
}
TO_RTS = {"sq_psn": 2, "timeout": 18, "retry_cnt": 7, "rnr_retry": 7, "max_rd_atomic": 16}
STEPS: dict[tuple[QueuePairState, QueuePairState], dict[str, Any]] = {
    (RESET, INIT): TO_INIT,
    (INIT, RTR): TO_RTR,
    (RTR, RTS): TO_RTS,
}


def ethernet(**changes: Any) -> Port:
    values: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(Port)), 0)
    values |= {
        "device": "rxe0",
        "number": 1,
        "state": PortState.ACTIVE,
        "link_layer": LinkLayer.ETHERNET,
        "active_mtu": Mtu.MTU_1024,
        "max_mtu": Mtu.MTU_4096,
    }
    return Port(**{**values, **changes})


@pytest.mark.parametrize(("step", "attributes"), STEPS.items(), ids=lambda value: "")
def test_the_required_attributes_of_a_step_are_enough(step: Any, attributes: dict[str, Any]) -> None:
    assert set(names_of(TRANSITIONS[step].required)) == set(attributes)
    assert find_fault(*step, attributes, port=ethernet()) is None


@pytest.mark.parametrize(
    ("step", "name"),
    [(step, name) for step, attributes in STEPS.items() for name in attributes],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}-{value[1]}",
)
def test_a_missing_attribute_is_named(step: tuple[QueuePairState, QueuePairState], name: str) -> None:
    attributes = {key: value for key, value in STEPS[step].items() if key != name}

    fault = find_fault(*step, attributes)

    assert missing_attributes(*step, attributes) == (name,)
    assert fault is not None
    assert fault.culprit == name
    assert fault.why == f"{name} is missing"
    assert all(required in fault.remedy for required in STEPS[step])


def test_all_missing_attributes_are_named_at_once() -> None:
    fault = find_fault(RESET, INIT, {"pkey_index": 0})

    assert fault is not None
    assert fault.why == "port_num and qp_access_flags are missing"


def test_the_masks_are_those_of_the_c_header() -> None:
    # Source: ibv_modify_qp(3), the table of RC.
    mask = QueuePairMask
    assert TRANSITIONS[INIT, RTR].required == (
        mask.AV | mask.PATH_MTU | mask.DEST_QPN | mask.RQ_PSN | mask.MAX_DEST_RD_ATOMIC | mask.MIN_RNR_TIMER
    )
    assert TRANSITIONS[RTR, RTS].required == (
        mask.SQ_PSN | mask.MAX_QP_RD_ATOMIC | mask.RETRY_CNT | mask.RNR_RETRY | mask.TIMEOUT
    )


@pytest.mark.parametrize("old", [INIT, RTR, RTS, SQD, QueuePairState.SQE, ERR])
@pytest.mark.parametrize("new", [RESET, ERR])
def test_every_state_can_be_left_for_reset_and_for_the_error_state(old: QueuePairState, new: QueuePairState) -> None:
    assert find_fault(old, new, {}) is None


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        (RESET, RTS, "RESET -> INIT -> RTR -> RTS"),
        (INIT, RTS, "INIT -> RTR -> RTS"),
        (ERR, RTS, "ERR -> RESET -> INIT -> RTR -> RTS"),
        (RTS, INIT, "RTS -> RESET -> INIT"),
    ],
)
def test_a_step_that_does_not_exist_says_which_way_leads_there(
    old: QueuePairState, new: QueuePairState, path: str
) -> None:
    fault = find_fault(old, new, TO_RTS)

    assert way(old, new) == path
    assert fault is not None
    assert fault.culprit == f"{old}->{new}"
    assert fault.remedy == f"Go {path}."


def test_a_state_nobody_knows_has_no_way() -> None:
    fault = find_fault(RESET, QueuePairState(42), {})

    assert fault is not None
    assert fault.culprit == "RESET->UNKNOWN_42"
    assert "new queue pair" in fault.remedy


def test_the_timeout_of_a_live_queue_pair_is_refused_with_where_it_can_be_set() -> None:
    fault = find_fault(RTS, RTS, {"timeout": 20})

    assert fault is not None
    assert fault.culprit == "timeout"
    assert "RTR->RTS" in fault.remedy


def test_optional_attributes_are_taken() -> None:
    assert find_fault(RTS, RTS, {"min_rnr_timer": 14, "qp_access_flags": 2}) is None
    assert find_fault(INIT, RTR, {**TO_RTR, "pkey_index": 1}) is None


@pytest.mark.parametrize("name", [name for name in RANGES if any(name in given for given in STEPS.values())])
@pytest.mark.parametrize("side", [0, 1])
def test_a_value_beyond_its_range_is_named_with_the_range(name: str, side: int) -> None:
    step, attributes = next((step, given) for step, given in STEPS.items() if name in given)
    bounds = RANGES[name]

    beyond = find_fault(*step, {**attributes, name: bounds[side] + (-1, 1)[side]})
    within = find_fault(*step, {**attributes, name: bounds[side]})

    assert beyond is not None
    assert beyond.culprit == name
    assert f"{bounds[0]}..{bounds[1]}" in beyond.why
    assert within is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 0),
        ("sgid_index", 256),
        ("hop_limit", 256),
        ("hop_limit", -1),
        ("traffic_class", 256),
        ("flow_label", 1 << 20),
        ("dlid", 1 << 16),
        ("sl", 16),
    ],
)
def test_an_address_beyond_its_range_is_named(name: str, value: int) -> None:
    fault = find_fault(INIT, RTR, {**TO_RTR, "ah_attr": dataclasses.replace(PEER, **{name: value})})

    assert fault is not None
    assert fault.culprit == name
    assert str(value) in fault.why


def test_a_peer_without_a_gid_is_refused_on_ethernet() -> None:
    no_gid = find_fault(INIT, RTR, {**TO_RTR, "ah_attr": dataclasses.replace(PEER, dgid=bytes(16))}, port=ethernet())
    not_global = find_fault(
        INIT, RTR, {**TO_RTR, "ah_attr": dataclasses.replace(PEER, is_global=False)}, port=ethernet()
    )
    short = find_fault(INIT, RTR, {**TO_RTR, "ah_attr": dataclasses.replace(PEER, dgid=b"\x0a\x00\x00\x02")})

    assert no_gid is not None
    assert no_gid.culprit == "dgid"
    assert not_global is not None
    assert not_global.culprit == "is_global"
    assert "hop_limit" in not_global.remedy
    assert short is not None
    assert "4 bytes" in short.why


def test_a_peer_on_infiniband_needs_a_lid_or_a_gid() -> None:
    port = ethernet(link_layer=LinkLayer.INFINIBAND)
    by_lid = AddressVector(port=1, is_global=False, dlid=17)

    assert find_fault(INIT, RTR, {**TO_RTR, "ah_attr": by_lid}, port=port) is None
    assert find_fault(INIT, RTR, {**TO_RTR, "ah_attr": PEER}, port=port) is None
    fault = find_fault(INIT, RTR, {**TO_RTR, "ah_attr": dataclasses.replace(by_lid, dlid=0)}, port=port)

    assert fault is not None
    assert fault.culprit == "dlid"


def test_a_path_mtu_above_the_ports_is_refused_although_soft_roce_would_take_it() -> None:
    fault = find_fault(INIT, RTR, {**TO_RTR, "path_mtu": Mtu.MTU_4096}, port=ethernet())

    assert fault is not None
    assert fault.why == "path_mtu 4096, the port's active MTU is 1024"


@given(st.sets(st.sampled_from(list(ATTRIBUTE_MASKS))))
def test_a_mask_means_exactly_the_names_it_was_made_of(names: set[str]) -> None:
    assert set(names_of(mask_of(names))) == names


@given(
    st.sampled_from(list(TRANSITIONS)), st.sets(st.sampled_from(list(ATTRIBUTE_MASKS))), st.integers(-(2**33), 2**33)
)
def test_whatever_is_given_a_fault_names_something_that_was_given_or_is_missing(
    step: tuple[QueuePairState, QueuePairState], names: set[str], value: int
) -> None:
    attributes: dict[str, Any] = {name: PEER if name == "ah_attr" else value for name in names}

    fault = find_fault(*step, attributes)

    masks = TRANSITIONS[step]
    if fault is None:
        assert set(names_of(masks.required)) <= names <= set(names_of(masks.required | masks.optional))
        assert all(RANGES[name][0] <= value <= RANGES[name][1] for name in names - {"ah_attr"})
    else:
        assert fault.culprit in names or fault.culprit in missing_attributes(*step, names)
