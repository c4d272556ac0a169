"""The fields of struct ibv_qp_attr, between Python, C and text.

In Python they are a dict by the names of the struct, with `ah_attr` an AddressVector. Pure but for cffi's structs; what
values are allowed is in `qp_states.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvxfer.verbs.enums import Access, Mtu, QueuePairState
from kvxfer.verbs.gid import format_gid
from kvxfer.verbs.port import AddressVector
from kvxfer.verbs.qp_capabilities import QueuePairCapabilities
from kvxfer.verbs.qp_states import ATTRIBUTE_MASKS

if TYPE_CHECKING:
    from kvxfer.verbs.library import CData

__all__ = ["from_c", "read_capabilities", "to_c", "to_plain", "to_text"]

_KINDS: dict[str, Callable[[int], Any]] = {
    "qp_state": QueuePairState,
    "cur_qp_state": QueuePairState,
    "path_mtu": Mtu,
    "qp_access_flags": Access,
}
_GID_NBYTES = 16


def read_capabilities(cap: CData) -> QueuePairCapabilities:
    """Return a struct ibv_qp_cap."""
    return QueuePairCapabilities(
        **{field.name: getattr(cap, field.name) for field in dataclasses.fields(QueuePairCapabilities)}
    )


def to_c(state: QueuePairState, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return struct ibv_qp_attr for cffi."""
    fields = {name: int(value) for name, value in attributes.items() if name != "ah_attr"}
    if "ah_attr" not in attributes:
        return {**fields, "qp_state": state}
    address: AddressVector = attributes["ah_attr"]
    route = {
        "dgid": {"raw": list(address.dgid)},
        "flow_label": address.flow_label,
        "sgid_index": address.sgid_index,
        "hop_limit": address.hop_limit,
        "traffic_class": address.traffic_class,
    }
    ah_attr = {
        "grh": route,
        "dlid": address.dlid,
        "sl": address.sl,
        "src_path_bits": address.src_path_bits,
        "static_rate": address.static_rate,
        "is_global": int(address.is_global),
        "port_num": address.port,
    }
    return {**fields, "qp_state": state, "ah_attr": ah_attr}


def from_c(given: CData) -> dict[str, Any]:
    """Return all fields of a struct ibv_qp_attr, `cap` among them."""
    ah, route = given.ah_attr, given.ah_attr.grh
    address = AddressVector(
        port=ah.port_num,
        is_global=bool(ah.is_global),
        dgid=bytes(route.dgid.raw),
        sgid_index=route.sgid_index,
        hop_limit=route.hop_limit,
        traffic_class=route.traffic_class,
        flow_label=route.flow_label,
        dlid=ah.dlid,
        sl=ah.sl,
        src_path_bits=ah.src_path_bits,
        static_rate=ah.static_rate,
    )
    names = [name for name in ("qp_state", *ATTRIBUTE_MASKS) if name != "ah_attr"]
    found = {name: _KINDS.get(name, int)(getattr(given, name)) for name in names}
    return {**found, "ah_attr": address, "cap": read_capabilities(given.cap)}


def to_plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields for an error, a log event or `repr`: plain values, the whole address vector among them."""
    return {name: _plain(name, value) for name, value in attributes.items()}


def to_text(plain: Mapping[str, Any]) -> str:
    """Return what `to_plain` gave, for a message."""
    words = []
    for name, value in plain.items():
        told = f"({to_text(value)})" if isinstance(value, dict) else value
        words.append(f"{name} {told}")
    return ", ".join(words)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, AddressVector):
        gid = format_gid(value.dgid) if len(value.dgid) == _GID_NBYTES else value.dgid.hex()
        return {**dataclasses.asdict(value), "dgid": gid}
    if name == "path_mtu":
        return Mtu(value).nbytes or int(value)
    return str(_KINDS[name](value)) if name in _KINDS else int(value)
