"""The states of an RC queue pair: which attributes each step needs, which it may carry, what values they may have.

Pure: names and numbers in, names and sentences out; calls nothing. `queue_pair.py` asks here before a call; after one
that failed it asks `qp_diagnosis.py`. Source of the table: the kernel's qp_state_table (6.12, drivers/infiniband/core/
verbs.c), which refuses a call with EINVAL and says nothing more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvxfer.verbs.enums import LinkLayer, Mtu, QueuePairMask, QueuePairState

if TYPE_CHECKING:
    from kvxfer.verbs.device import Port

__all__ = [
    "ATTRIBUTE_MASKS",
    "RANGES",
    "TRANSITIONS",
    "Finding",
    "Masks",
    "find_fault",
    "mask_of",
    "missing_attributes",
    "names_of",
    "way",
]

_RESET, _INIT, _RTR, _RTS = QueuePairState.RESET, QueuePairState.INIT, QueuePairState.RTR, QueuePairState.RTS
_SQD, _SQE, _ERR = QueuePairState.SQD, QueuePairState.SQE, QueuePairState.ERR

ATTRIBUTE_MASKS: dict[str, QueuePairMask] = {
    "cur_qp_state": QueuePairMask.CUR_STATE,
    "en_sqd_async_notify": QueuePairMask.EN_SQD_ASYNC_NOTIFY,
    "port_num": QueuePairMask.PORT,
    "pkey_index": QueuePairMask.PKEY_INDEX,
    "qp_access_flags": QueuePairMask.ACCESS_FLAGS,
    "ah_attr": QueuePairMask.AV,
    "path_mtu": QueuePairMask.PATH_MTU,
    "dest_qp_num": QueuePairMask.DEST_QPN,
    "rq_psn": QueuePairMask.RQ_PSN,
    "max_dest_rd_atomic": QueuePairMask.MAX_DEST_RD_ATOMIC,
    "min_rnr_timer": QueuePairMask.MIN_RNR_TIMER,
    "sq_psn": QueuePairMask.SQ_PSN,
    "timeout": QueuePairMask.TIMEOUT,
    "retry_cnt": QueuePairMask.RETRY_CNT,
    "rnr_retry": QueuePairMask.RNR_RETRY,
    "max_rd_atomic": QueuePairMask.MAX_QP_RD_ATOMIC,
    "path_mig_state": QueuePairMask.PATH_MIG_STATE,
}
"""The fields of struct ibv_qp_attr that an RC queue pair without an alternate path has, in the order of their steps."""

RANGES: dict[str, tuple[int, int]] = {
    "cur_qp_state": (_RESET, _ERR),
    "en_sqd_async_notify": (0, 1),
    "port_num": (1, 255),
    "pkey_index": (0, 0xFFFF),
    "qp_access_flags": (0, 0xFFFFFFFF),
    "path_mtu": (Mtu.MTU_256, Mtu.MTU_4096),
    "dest_qp_num": (0, 0xFFFFFF),
    "rq_psn": (0, 0xFFFFFF),
    "max_dest_rd_atomic": (0, 255),
    "min_rnr_timer": (0, 31),
    "sq_psn": (0, 0xFFFFFF),
    "timeout": (0, 31),
    "retry_cnt": (0, 7),
    "rnr_retry": (0, 7),
    "max_rd_atomic": (0, 255),
    "path_mig_state": (0, 2),
}
"""What fits the wire and the field. Source: InfiniBand specification, "Modify Queue Pair"; struct ibv_qp_attr. cffi
would refuse 256 for a byte with an OverflowError; 40 for a timer of 5 bits goes through and wraps in some devices."""

ADDRESS_RANGES: dict[str, tuple[int, int]] = {
    "port": (1, 255),
    "sgid_index": (0, 255),
    "hop_limit": (0, 255),
    "traffic_class": (0, 255),
    "flow_label": (0, 0xFFFFF),
    "dlid": (0, 0xFFFF),
    "sl": (0, 15),
    "src_path_bits": (0, 127),
    "static_rate": (0, 255),
}
"""The same for an AddressVector."""

_MEANINGS = {
    "path_mtu": "a code: 1 is 256 bytes, 5 is 4096",
    "timeout": "an exponent: 4.096 us * 2**timeout",
    "min_rnr_timer": "a code of 5 bits: 12 is 0.64 ms",
    "retry_cnt": "3 bits",
    "rnr_retry": "3 bits: 7 retries for ever",
    "rq_psn": "24 bits",
    "sq_psn": "24 bits",
    "dest_qp_num": "24 bits",
    "port_num": "ports count from 1",
    "port": "ports count from 1",
}


class Masks(NamedTuple):
    """What one step needs and what it may carry besides; STATE itself is left out."""

    required: QueuePairMask
    optional: QueuePairMask


def _masks(required: str = "", optional: str = "") -> Masks:
    return Masks(mask_of(required.split()), mask_of(optional.split()))


def mask_of(names: Collection[str]) -> QueuePairMask:
    """Return the mask that means these fields."""
    mask = QueuePairMask(0)
    for name in names:
        mask |= ATTRIBUTE_MASKS[name]
    return mask


def names_of(mask: int) -> tuple[str, ...]:
    """Return the fields that a mask means."""
    return tuple(name for name, bit in ATTRIBUTE_MASKS.items() if bit & mask)


_LIVE = "cur_qp_state qp_access_flags min_rnr_timer path_mig_state"
_DRAINED = (
    "port_num ah_attr timeout retry_cnt rnr_retry max_rd_atomic max_dest_rd_atomic pkey_index qp_access_flags "
    "min_rnr_timer path_mig_state"
)
TRANSITIONS: dict[tuple[QueuePairState, QueuePairState], Masks] = {
    **{(old, new): _masks() for old in (_RESET, _INIT, _RTR, _RTS, _SQD, _SQE, _ERR) for new in (_RESET, _ERR)},
    (_RESET, _INIT): _masks("port_num pkey_index qp_access_flags"),
    (_INIT, _INIT): _masks(optional="port_num pkey_index qp_access_flags"),
    (_INIT, _RTR): _masks(
        "ah_attr path_mtu dest_qp_num rq_psn max_dest_rd_atomic min_rnr_timer", "qp_access_flags pkey_index"
    ),
    (_RTR, _RTS): _masks("sq_psn timeout retry_cnt rnr_retry max_rd_atomic", _LIVE),
    (_RTS, _RTS): _masks(optional=_LIVE),
    (_RTS, _SQD): _masks(optional="en_sqd_async_notify"),
    (_SQD, _RTS): _masks(optional=_LIVE),
    (_SQD, _SQD): _masks(optional=_DRAINED),
}
"""Every step the kernel knows for RC, and RESET->ERR, which most drivers refuse: left to the device to judge."""


def missing_attributes(old: QueuePairState, new: QueuePairState, given: Collection[str]) -> tuple[str, ...]:
    """Return the required fields that `given` lacks for a step; empty for a step that does not exist."""
    masks = TRANSITIONS.get((old, new))
    return () if masks is None else tuple(name for name in names_of(masks.required) if name not in given)


def way(old: QueuePairState, new: QueuePairState) -> str:
    """Return the states to go through, such as "INIT -> RTR -> RTS"; empty where no way leads."""
    paths: list[tuple[QueuePairState, ...]] = [(old,)]
    seen = {old}
    for path in paths:  # grows while it is walked: breadth first
        for start, end in TRANSITIONS:
            if start is path[-1] and end not in seen and end is not _ERR:
                paths.append((*path, end))
                seen.add(end)
    return next((" -> ".join(map(str, path)) for path in paths if path[-1] is new), "")


class Finding(NamedTuple):
    """What stands in the way of a step: the field (or the step itself), the reason, and what to do."""

    culprit: str
    why: str
    remedy: str


def find_fault(
    old: QueuePairState,
    new: QueuePairState,
    attributes: Mapping[str, Any],
    *,
    port: Port | None = None,
    bound_port: int = 0,
) -> Finding | None:
    """Return what is wrong with a step before it is tried; None if nothing is known to be.

    attributes: fields of struct ibv_qp_attr by name, `ah_attr` an AddressVector.
    port: the one that `ah_attr` names; None where it is not known. bound_port: the one of the queue pair; 0 for none.
    """
    masks = TRANSITIONS.get((old, new))
    if masks is None:
        path = way(old, new)
        remedy = f"Go {path}." if path else "Make a new queue pair."
        return Finding(f"{old}->{new}", "an RC queue pair has no such step", remedy)
    if missing := missing_attributes(old, new, attributes):
        return Finding(
            missing[0],
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            f"{old}->{new} needs {', '.join(names_of(masks.required))}.",
        )
    allowed = names_of(masks.required | masks.optional)
    for name in attributes:
        if name not in allowed:
            return Finding(name, f"{name} cannot be set in this step", _where_allowed(name))
    address = attributes.get("ah_attr")
    if address is not None and bound_port and address.port != bound_port:
        why = f"the address vector is on port {address.port}, the queue pair on port {bound_port}"
        return Finding("port", why, "Choose one port for both; it is the queue pair's since INIT.")
    return _find_value(attributes, port)


def _where_allowed(name: str) -> str:
    bit = ATTRIBUTE_MASKS[name]
    steps = [f"{old}->{new}" for (old, new), masks in TRANSITIONS.items() if bit & (masks.required | masks.optional)]
    return f"It can be set in {', '.join(steps)} only; on a queue pair that is past that, make a new one."


def _find_value(attributes: Mapping[str, Any], port: Port | None) -> Finding | None:
    for name, (low, high) in RANGES.items():
        if name in attributes and not low <= attributes[name] <= high:
            return _out_of_range(name, attributes[name], low, high)
    address = attributes.get("ah_attr")
    if address is None:
        return None
    for name, (low, high) in ADDRESS_RANGES.items():
        if not low <= getattr(address, name) <= high:
            return _out_of_range(name, getattr(address, name), low, high)
    return _find_address(address, None if port is None else port.link_layer) or _find_mtu(attributes, port)


def _out_of_range(name: str, value: int, low: int, high: int) -> Finding:
    meaning = f" ({_MEANINGS[name]})" if name in _MEANINGS else ""
    return Finding(
        name, f"{name} {int(value)} is outside {low}..{high}{meaning}", f"Give {name} a value of that range."
    )


def _find_address(address: Any, link_layer: LinkLayer | None) -> Finding | None:
    if len(address.dgid) != 16:
        return Finding(
            "dgid", f"dgid has {len(address.dgid)} bytes, a GID has 16", "Give the 16 bytes of the peer's GID."
        )
    if address.is_global and not any(address.dgid):
        return Finding(
            "dgid",
            "dgid is zero: no GID of the peer is known",
            "Have the peer send the GID of its port; a row of its table that is all zero is an empty row.",
        )
    if link_layer is LinkLayer.ETHERNET and not address.is_global:
        return Finding(
            "is_global",
            "is_global is false, and Ethernet (RoCE) knows peers by GID only",
            "Set is_global, and with it dgid, sgid_index and hop_limit.",
        )
    if link_layer is LinkLayer.INFINIBAND and not address.is_global and address.dlid == 0:
        return Finding(
            "dlid",
            "dlid is zero and is_global false: the peer has no address",
            "Give the peer's LID (its port needs a subnet manager), or its GID with is_global.",
        )
    return None


def _find_mtu(attributes: Mapping[str, Any], port: Port | None) -> Finding | None:
    """A path MTU above the port's is taken by some drivers (rxe), and then every message of more than one packet is
    lost: better refused than found by a time-out."""
    if port is None or not port.active_mtu.nbytes or attributes.get("path_mtu", 0) <= port.active_mtu:
        return None
    return Finding(
        "path_mtu",
        f"path_mtu {Mtu(attributes['path_mtu'])}, the port's active MTU is {port.active_mtu}",
        f"Give the smaller of both ends' active MTU, {port.active_mtu} at most; it follows the MTU of the netdev "
        f"(ip link).",
    )
