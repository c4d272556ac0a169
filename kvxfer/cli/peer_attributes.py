"""The queue-pair attributes that several engines use, side by side, and which of them a device would refuse.

Pure. The values of the others were read from their sources: NCCL 2.30.7 (net_ib/connect.cc), UCX 1.22 (rc_iface.c,
ib_iface.c), perftest 26.04 (perftest_resources.c), Mooncake of August 2026 (rdma_endpoint.cpp), each with its defaults.
What a device says of itself is all that is compared here; some refuse more than that, and soft RoCE takes more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.transports.rdma_ladder import QueuePairAttributes
from kvxfer.verbs.enums import LinkLayer

if TYPE_CHECKING:
    from kvxfer.verbs.device import DeviceLimits, Port

__all__ = ["ENGINES", "AttributeRow", "Cell", "compare_attributes"]

ENGINES = ("kvxfer", "perftest", "NCCL", "UCX", "Mooncake")
VENDOR_INTEL = 0x8086
VENDOR_SOFT_ROCE = 0xFFFFFF
BUDGET_SMALL = 256
"""A max_res_rd_atom below this is a budget that some queue pairs can use up; others name numbers of 10^5 and more."""


@dataclass(frozen=True)
class Cell:
    """What one engine uses for one attribute. refusal: why this device would not take it, or ""; remark: what else is
    worth knowing of it here."""

    value: str
    refusal: str = ""
    remark: str = ""


@dataclass(frozen=True)
class AttributeRow:
    """One attribute; a cell for each of ENGINES. bound: what the device says of it."""

    name: str
    cells: tuple[Cell, ...]
    bound: str = ""


def compare_attributes(
    limits: DeviceLimits, port: Port, attributes: QueuePairAttributes, *, active_mtu_there: int | None = None
) -> tuple[AttributeRow, ...]:
    """Return a row for each attribute, for connections over `port`.

    attributes: those that kvxfer uses. active_mtu_there: the peer's port's, in bytes; None for one like ours.
    """
    active = port.active_mtu.nbytes
    agreed = min(active, active_mtu_there or active)
    is_ethernet = port.link_layer is LinkLayer.ETHERNET
    device_reads = (limits.max_qp_init_rd_atom, limits.max_qp_rd_atom)
    return (
        _row("RESET first", ["no", "no", "no", "no", "yes"], refuse=lambda value: _refuse_reset(value, limits)),
        _row("access flags", ["W R", "by test", "W", "L W R atomic", "L W R atomic"]),
        _row(
            "path_mtu",
            [attributes.path_mtu, agreed, agreed, agreed, min(active, 4096)],
            bound=f"active {active}",
            refuse=lambda value: f"the port's active MTU is {active}" if value > active else "",
            remark=lambda value: f"the peer's active MTU is {agreed}: long messages are lost" if value > agreed else "",
        ),
        _row(
            "max_dest_rd_atomic",
            [min(attributes.read_depth, device_reads[1]), device_reads[1], 1, device_reads[1], 16],
            bound=str(device_reads[1]),
            refuse=lambda value: f"max_qp_rd_atom is {device_reads[1]}" if value > device_reads[1] else "",
            remark=lambda value: _remark_budget(value, limits),
        ),
        _row(
            "max_rd_atomic",
            [attributes.read_depth, device_reads[0], 1, device_reads[0], 16],
            bound=str(device_reads[0]),
            refuse=lambda value: f"max_qp_init_rd_atom is {device_reads[0]}" if value > device_reads[0] else "",
        ),
        _row("min_rnr_timer", [attributes.min_rnr_timer, 12, 12, 13, 12]),
        _row("timeout", [attributes.timeout, 14, 20, 18, 14]),
        _row(
            "retry_cnt",
            [attributes.retry_count, 7, 7, 7, 7],
            remark=lambda value: "for ever on soft RoCE" if value == 7 and _is_soft(limits) else "",
        ),
        _row("rnr_retry", [attributes.rnr_retry, 7, 7, 7, 7]),
        _row("first PSN", ["random", "random", 0, 0, 0]),
        _row(
            "is_global",
            [
                _yes(is_ethernet or port.needs_grh or attributes.is_global),
                _yes(is_ethernet),
                _yes(is_ethernet or port.needs_grh),
                _yes(is_ethernet),
                1,
            ],
        ),
        _row("hop_limit", [attributes.hop_limit, 255, 255, 255, 16]),
        _row("traffic_class", [attributes.traffic_class, 0, 0, 106, 0]),
        _row("service level", [attributes.service_level, 0, 0, 0, 0]),
        _row(
            "max_send_wr",
            [attributes.send_depth, 128, 512, 256, 256],
            bound=f"{limits.max_qp_wr}",
            refuse=lambda value: f"max_qp_wr is {limits.max_qp_wr}" if value > limits.max_qp_wr else "",
        ),
        _row(
            "max_send_sge",
            [1, 1, 1, 5, 4],
            bound=str(limits.max_sge),
            refuse=lambda value: f"max_sge is {limits.max_sge}" if value > limits.max_sge else "",
        ),
        _row("max_inline", [0, 0, 0, 64, 64], bound="not told"),
    )


def _row(name: str, values: Sequence[Any], *, bound: str = "", refuse: Any = None, remark: Any = None) -> AttributeRow:
    cells = tuple(
        Cell(str(value), refuse(value) if refuse is not None else "", remark(value) if remark is not None else "")
        for value in values
    )
    return AttributeRow(name, cells, bound)


def _refuse_reset(value: str, limits: DeviceLimits) -> str:
    if value == "yes" and limits.vendor_id == VENDOR_INTEL:
        return "Intel irdma takes no RESET to RESET"
    return ""


def _remark_budget(value: int, limits: DeviceLimits) -> str:
    budget = limits.max_res_rd_atom
    if 0 < budget < BUDGET_SMALL and value * 2 > budget:
        return f"max_res_rd_atom is {budget} for the whole device: a second queue pair like this is refused"
    return ""


def _is_soft(limits: DeviceLimits) -> bool:
    return limits.vendor_id == VENDOR_SOFT_ROCE


def _yes(is_set: bool | None) -> int:
    return int(bool(is_set))
