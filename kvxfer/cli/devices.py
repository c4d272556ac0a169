"""`kvxfer devices`: the RDMA devices of this machine, their ports and GIDs, and what kvxfer would use of them and why.

What is shown comes from `rdma_survey.py`; this file lays it out in four tables: ports, GIDs, devices, limits.
"""

from __future__ import annotations

import ipaddress
import json
import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kvxfer import __version__
from kvxfer.cli.environment import load_config
from kvxfer.cli.rdma_survey import DeviceSurvey, GidRow, PortSurvey, survey_devices
from kvxfer.cli.table import Align, Style, draw_table, format_size, wrap
from kvxfer.errors import DeviceNotFoundError, UsageError
from kvxfer.rdma_names import DevicePort, parse_devices
from kvxfer.verbs.enums import LinkLayer
from kvxfer.verbs.gid import format_gid
from kvxfer.verbs.library import VerbsLibrary, load_library
from kvxfer.verbs.port_offer import plan_read_depth

__all__ = ["draw_devices", "run"]

ROWS_SHOWN_MAX = 32
"""Rows of a GID table that are drawn; --json has all."""
UNLIMITED_NBYTES = 1 << 50


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
        print(draw_devices(chosen, library.version, Style.of(sys.stdout)))
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
        if not any(_matches(item, device.name, port.port.number) for device in found for port in device.ports):
            there = ", ".join(port.name for device in found for port in device.ports) or "none"
            raise DeviceNotFoundError(f"there is no RDMA device or port {item}; there is {there}.", device=item.device)
    kept = []
    for device in found:
        ports = tuple(
            port for port in device.ports if any(_matches(item, device.name, port.port.number) for item in wanted)
        )
        if ports:
            kept.append(DeviceSurvey(device.device, device.sysfs, device.problem, device.remedy, device.limits, ports))
    return kept


def _matches(item: DevicePort, device: str, port: int) -> bool:
    return item.device == device and item.port in (None, port)


def draw_devices(found: Sequence[DeviceSurvey], library: str, style: Style) -> str:
    """Return the text of the whole answer."""
    title = style.paint(f"kvxfer {__version__} devices", "bold") + (f"  by {library}" if library else "")
    if not found:
        return f"{title}\n\nThis machine has no RDMA device; its kernel has RDMA."
    ports = [(device, port) for device in found for port in device.ports]
    parts = [title, "", _draw_ports(found, style)]
    if any(port.rows for _, port in ports):
        parts += ["", style.paint("GIDs", "bold"), _draw_gids([port for _, port in ports if port.rows], style)]
    parts += ["", style.paint("devices", "bold"), _draw_devices(found, style)]
    if ports:
        parts += ["", style.paint("limits that kvxfer keeps to", "bold"), _draw_limits(ports, style)]
    return "\n".join(parts)


def _draw_ports(found: Sequence[DeviceSurvey], style: Style) -> str:
    """A line for each port, and under it why it cannot be used, or what to know of it."""
    header = ["", "port", "state", "link", "speed", "MTU", "NUMA", "used"]
    rows: list[list[str]] = []
    for device in found:
        if device.problem:
            rows.append([style.mark("fail"), device.name, *["-"] * 6])
            rows += _notes(f"{device.problem} {device.remedy}", style, "red")
        for one in device.ports:
            rows.append([_mark(one, style), *_port_cells(device, one)])
            rows += _notes(one.problem, style, "red") if one.problem else _notes(one.warning, style, "yellow")
    return draw_table(header, rows, ["<"] * len(header), style)


def _port_cells(device: DeviceSurvey, one: PortSurvey) -> list[str]:
    port = one.port
    is_infiniband = port.link_layer is LinkLayer.INFINIBAND
    active, most = port.active_mtu.nbytes, port.max_mtu.nbytes
    node = device.sysfs.numa_node
    best = one.choice.best if one.choice and not one.problem else None
    if best is None:
        used = f"LID {port.lid}" if is_infiniband and not one.problem else "-"
    else:
        used = f"LID {port.lid}" if is_infiniband else f"{best.address}" + (f" on {best.netdev}" if best.netdev else "")
    return [
        one.name,
        str(port.state),
        str(port.link_layer),
        one.rate or "unknown",
        f"{active}" if active == most else f"{active} of {most}",
        "-" if node is None else str(node),
        used,
    ]


def _draw_gids(ports: Sequence[PortSurvey], style: Style) -> str:
    """The GID tables of all ports, with the reason for or against each row; a long reason goes on below."""
    header = ["", "port", "row", "address", "type", "interface", "verdict"]
    align: list[Align] = ["<", "<", ">", "<", "<", "<", "<"]
    shown = [(one, row) for one in ports for row in one.rows[:ROWS_SHOWN_MAX]]
    cells = [_gid_cells(one, row, style) for one, row in shown]
    widths = [max(map(len, column)) for column in zip(header[1:6], *[line[1:] for line in cells], strict=True)]
    verdict_at = 1 + sum(width + 2 for width in widths) + 2
    rows: list[list[str]] = []
    for (one, row), line in zip(shown, cells, strict=True):
        if row is one.rows[0] and rows:
            rows.append([""])
        first, *more = textwrap.wrap(_verdict(row), max(30, style.width - verdict_at))
        colour = "green" if row.is_chosen else "dim"
        rows.append([*line, style.paint(first, colour)])
        rows += [[" " * verdict_at + style.paint(text, colour)] for text in more]
        hidden = len(one.rows) - ROWS_SHOWN_MAX
        if hidden > 0 and row is one.rows[ROWS_SHOWN_MAX - 1]:
            rows.append([f"   ... and {hidden} more rows of {one.name}; --json has all"])
    return draw_table(header, rows, align, style)


def _gid_cells(one: PortSurvey, row: GidRow, style: Style) -> list[str]:
    candidate = row.candidate
    address = format_gid(candidate.value) if candidate.is_infiniband else str(candidate.address)
    prefix = "" if candidate.prefix_nbits is None else f"/{candidate.prefix_nbits}"
    sign = style.mark(_status(one)) if row.is_chosen and not one.problem else " "
    return [sign, one.name, str(row.index), address + prefix, str(candidate.type), candidate.netdev or "-"]


def _verdict(row: GidRow) -> str:
    if row.route is None:
        return row.verdict
    return f"{row.verdict}; {'reaches it ' if row.route.is_reachable else ''}{row.route}"


def _draw_devices(found: Sequence[DeviceSurvey], style: Style) -> str:
    header = ["device", "kind", "PCI address", "firmware", "GUID", "file"]
    rows = [
        [
            one.name,
            f"{one.device.node_type} {one.device.transport_type}",
            one.sysfs.pci_address or "-",
            one.sysfs.firmware or "-",
            one.device.guid,
            str(one.device.device_file),
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
        "pieces",
        "completions",
        "READs asked",
        "answered",
    ]
    align: list[Align] = ["<", *[">"] * 8]  # type: ignore[list-item]
    rows = []
    for device, one in ports:
        limits = device.limits
        assert limits is not None  # a device that could not be opened has no ports
        depth = plan_read_depth(limits, queue_pairs=1)
        is_any = limits.max_mr_size >= UNLIMITED_NBYTES
        counts = (limits.max_qp, limits.max_qp_wr, limits.max_sge, limits.max_cqe, depth.initiator, depth.responder)
        rows.append(
            [
                one.name,
                "any size" if is_any else format_size(limits.max_mr_size),
                format_size(one.port.max_msg_sz),
                *(f"{count:,}" for count in counts),
            ]
        )
    return draw_table(header, rows, align, style)


def _status(one: PortSurvey) -> str:
    return "fail" if one.problem else "warn" if one.warning else "ok"


def _mark(one: PortSurvey, style: Style) -> str:
    return style.mark(_status(one))


def _notes(text: str, style: Style, colour: str) -> list[list[str]]:
    return [[style.paint(line, colour)] for line in wrap(text, style, indent="   ").splitlines()] if text else []
