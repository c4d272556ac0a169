"""`kvxfer devices`: the RDMA devices of this machine, their ports and GIDs, and what kvxfer would use of them and why.

What is shown comes from `rdma_survey.py`; this file lays it out in four tables: ports, GIDs, devices, limits.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvxfer import __version__
from kvxfer.cli.environment import load_config
from kvxfer.cli.rdma_survey import DeviceSurvey, GidRow, PortSurvey, find_warnings, survey_devices
from kvxfer.cli.table import Align, Style, draw_table, format_size, wrap
from kvxfer.errors import UsageError
from kvxfer.rdma_names import parse_devices
from kvxfer.verbs.enums import LinkLayer
from kvxfer.verbs.gid import format_gid
from kvxfer.verbs.library import VerbsLibrary, load_library
from kvxfer.verbs.port_offer import agree_mtu

__all__ = ["draw_devices", "run"]

ROWS_SHOWN_MAX = 32
"""Rows of a GID table that are drawn; --json has all."""
TEXT_WIDTH_MIN = 16

Colour = Literal["red", "yellow", "green", "dim"]


def run(arguments: Namespace, library: VerbsLibrary | None = None, root: Path = Path("/")) -> int:
    """Show the devices; 1 where no port can be used."""
    config, problem = load_config()
    if problem is not None:
        raise problem
    destination = None if arguments.to is None else ipaddress.ip_address(arguments.to)
    library = library or load_library()
    found = survey_devices(config, library, root=root, destination=destination)
    chosen = select(found, arguments.names)
    if arguments.json:
        for device in chosen:
            print(json.dumps(device.to_json()))
    else:
        print(draw_devices(chosen, library.version, Style.of(sys.stdout), arguments.to or ""))
    return 0 if any(not port.problem for device in chosen for port in device.ports) else 1


def select(found: Sequence[DeviceSurvey], names: Sequence[str]) -> list[DeviceSurvey]:
    """Return the devices, and the ports of them, that the command line names; all where it names none."""
    if not names:
        return list(found)
    try:
        wanted = parse_devices(names)
    except ValueError as exc:
        raise UsageError(
            f"{' '.join(names)}: {exc}.", remedy="Name devices or ports, such as mlx5_0 or mlx5_0:2."
        ) from None
    for item in wanted:
        if not any(item.includes(device.name, port.port.number) for device in found for port in device.ports):
            there = ", ".join(port.name for device in found for port in device.ports) or "none"
            raise UsageError(
                f"there is no RDMA device or port {item}; there is {there}.",
                remedy="Name one of these, or none for all.",
                device=item.device,
            )
    kept = []
    for device in found:
        ports = tuple(
            port for port in device.ports if any(item.includes(device.name, port.port.number) for item in wanted)
        )
        if ports:
            kept.append(dataclasses.replace(device, ports=ports))
    return kept


def draw_devices(found: Sequence[DeviceSurvey], library: str, style: Style, destination: str = "") -> str:
    """Return the text of the whole answer. destination: the address that routes were looked for to."""
    title = style.paint(f"kvxfer {__version__} devices", "bold") + (f", {library}" if library else "")
    if not found:
        return f"{title}\n\nThis machine has no RDMA device; its kernel has RDMA."
    ports = [(device, port) for device in found for port in device.ports]
    parts = [title, "", _draw_ports(found, style)]
    parts += [style.paint(wrap(f"! {warning}", style, indent=""), "yellow") for warning in find_warnings(found)]
    if any(port.rows for _, port in ports):
        with_rows = [port for _, port in ports if port.rows]
        parts += ["", style.paint("GIDs", "bold"), _draw_gids(with_rows, style, destination)]
    parts += ["", style.paint("devices", "bold"), _draw_devices(found, style)]
    if ports:
        parts += ["", style.paint("limits that kvxfer keeps to", "bold"), _draw_limits(ports, style)]
    return "\n".join(parts)


def _draw_ports(found: Sequence[DeviceSurvey], style: Style) -> str:
    """A line for each port, with what is used of it or why it is not."""
    header = ["", "port", "state", "link", "speed", "MTU", "NUMA", "used"]
    lines: list[Line] = []
    for device in found:
        if device.problem:
            told = f"{device.problem} {device.remedy}"
            lines.append(Line([style.mark("fail"), device.name, *["-"] * 5], told, "red"))
        for one in device.ports:
            told, colour = _use(one)
            lines.append(Line([_mark(one, style), *_port_cells(device, one)], told, colour))
    return _draw_lines(header, ["<"] * len(header), lines, style)


def _port_cells(device: DeviceSurvey, one: PortSurvey) -> list[str]:
    active = agree_mtu(one.port.active_mtu, nbytes_max=one.attributes.path_mtu_nbytes_max).nbytes
    most = one.port.max_mtu.nbytes
    node = device.sysfs.numa_node
    return [
        one.name,
        str(one.port.state),
        str(one.port.link_layer),
        one.rate or "unknown",
        f"{active} of {most}" if active < most else f"{active}",
        "-" if node is None else str(node),
    ]


def _use(one: PortSurvey) -> tuple[str, Colour]:
    """What is used of a port, or why nothing is, and how to colour that."""
    if one.problem:
        return one.problem, "red" if one.is_wanted else "dim"
    if one.choice is None or one.port.link_layer is LinkLayer.INFINIBAND:
        others = "".join(f"; also {row}" for row in one.partitions if row != one.partition)
        return f"LID {one.port.lid}, partition {one.partition}{others}", "green"
    best = one.choice.best
    told = f"{best.address}" + (f" on {best.netdev}" if best.netdev else "")
    return (f"{told}; {one.warning}", "yellow") if one.warning else (told, "green")


def _draw_gids(ports: Sequence[PortSurvey], style: Style, destination: str) -> str:
    """The GID tables of all ports, with the reason for or against each row."""
    header = [
        "",
        "port",
        "row",
        "address",
        "type",
        "interface",
        *([f"to {destination}"] if destination else []),
        "verdict",
    ]
    align: list[Align] = ["<", "<", ">", *(["<"] * (len(header) - 3))]  # type: ignore[list-item]
    lines: list[Line] = []
    for one in ports:
        if lines:
            lines.append(Line([], "", "dim"))
        lines += [
            Line(_gid_cells(one, row, style), row.verdict, "green" if row.is_chosen else "dim")
            for row in one.rows[:ROWS_SHOWN_MAX]
        ]
        hidden = len(one.rows) - ROWS_SHOWN_MAX
        if hidden > 0:
            lines.append(Line([], f"   ... and {hidden} more rows of {one.name}; --json has all", "dim"))
    return _draw_lines(header, align, lines, style)


def _gid_cells(one: PortSurvey, row: GidRow, style: Style) -> list[str]:
    candidate = row.candidate
    address = format_gid(candidate.value) if candidate.is_infiniband else str(candidate.address)
    prefix = "" if candidate.prefix_nbits is None else f"/{candidate.prefix_nbits}"
    sign = _mark(one, style) if row.is_chosen else " "
    cells = [sign, one.name, str(row.index), address + prefix, str(candidate.type), candidate.netdev or "-"]
    if row.route is not None:
        cells.append(str(row.route) if row.route.is_reachable else "no route")
    return cells


@dataclass(frozen=True)
class Line:
    """A row of a table: its cells, and a text for the last column, which is folded there. No cells: the text alone."""

    cells: list[str]
    text: str
    colour: Colour


def _draw_lines(header: list[str], align: list[Align], lines: Sequence[Line], style: Style) -> str:
    whole = [line.cells for line in lines if line.cells]
    widths = [max(map(len, column)) for column in zip(header[1:-1], *[cells[1:] for cells in whole], strict=True)]
    text_at = 1 + sum(width + 2 for width in widths) + 2
    rows: list[list[str]] = []
    for line in lines:
        if not line.cells:
            rows.append([style.paint(line.text, line.colour)])
            continue
        first, *more = textwrap.wrap(line.text, max(TEXT_WIDTH_MIN, style.width - text_at), break_long_words=False) or [
            ""
        ]
        rows.append([*line.cells, style.paint(first, line.colour)])
        rows += [[" " * text_at + style.paint(text, line.colour)] for text in more]
    return draw_table(header, rows, align, style)


def _draw_devices(found: Sequence[DeviceSurvey], style: Style) -> str:
    header = ["device", "kind", "PCI address", "firmware", "GUID", "file"]
    rows = [
        [
            one.name,
            f"{one.device.node_type}, {one.device.transport_type}",
            one.sysfs.pci_address or "-",
            one.sysfs.firmware or "-",
            one.device.guid,
            f"/dev/infiniband/{one.device.device_file.name}",
        ]
        for one in found
    ]
    return draw_table(header, rows, ["<"] * len(header), style)


def _draw_limits(ports: Sequence[tuple[DeviceSurvey, PortSurvey]], style: Style) -> str:
    header = [
        "port",
        "region",
        "message",
        "queue pairs",
        "requests",
        "READs asked",
        "answered",
    ]
    align: list[Align] = ["<", *[">"] * 6]  # type: ignore[list-item]
    rows = []
    for device, one in ports:
        limits = device.limits
        assert limits is not None  # a device that could not be opened has no ports
        depth = one.attributes.read_depth
        counts = (limits.max_qp, one.attributes.send_depth, depth.initiator, depth.responder)
        rows.append(
            [
                one.name,
                "any size" if device.takes_any_size else format_size(device.region_nbytes_max),
                format_size(one.port.message_nbytes_max),
                *(f"{count:,}" for count in counts),
            ]
        )
    return draw_table(header, rows, align, style)


def _mark(one: PortSurvey, style: Style) -> str:
    if not one.is_wanted:
        return style.mark("off")
    return style.mark("fail" if one.problem else "warn" if one.warning else "ok")
