"""Draw what a mesh found: the matrix of all rails, a line for each that a person wants to see, and what to do.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from kvxfer import __version__
from kvxfer.cli.mesh_agent import TRANSPORT
from kvxfer.cli.rail_check import RailReport
from kvxfer.cli.table import Align, Style, draw_table, format_gbps, wrap
from kvxfer.verbs.port import NOT_WANTED

if TYPE_CHECKING:
    from kvxfer.cli.mesh import MeshHost

__all__ = ["draw_mesh", "draw_rails", "mark_of"]

LISTED_MAX = 40
"""Up to so many rails each has a line; of more, those that work as planned are summed up."""
PROBLEMS_SHOWN_MAX = 20
REASONS_SHOWN_MAX = 4
MARKS = {
    "ok": ("ok", "work"),
    "lowered": ("warn", "work with lower attributes"),
    "failed": ("fail", "failed"),
    "not tried": ("fail", "not tried"),
    "no path": ("off", "without a path"),
}
UNKNOWN = "?"


def draw_mesh(hosts: Sequence[MeshHost], problems: Sequence[tuple[str, str]], style: Style) -> str:
    """Return the whole answer."""
    found = [(host.address, target.target, rail) for host in hosts for target in host.targets for rail in target.rails]
    ports = sum(len(host.ports) for host in hosts)
    title = style.paint(f"kvxfer {__version__} mesh", "bold")
    parts = [f"{title}  {len(hosts)} engines, {ports} ports, {len(found)} rails", "", _draw_matrix(hosts, style)]
    legend = _draw_legend(found, hosts, style)
    parts += ["", legend] if legend else []
    for host in hosts:
        parts += [
            style.paint(wrap(f"! {host.address} does not use {port}: {why}", style, indent=""), "yellow")
            for port, why in host.unused.items()
            if why != NOT_WANTED and port != TRANSPORT  # that it has none at all is among the problems
        ]
    shown = [one for one in found if one[2].status != "no path"]
    if len(shown) > LISTED_MAX:
        parts += ["", _draw_sums(hosts, style)]
    elif shown:
        parts += ["", draw_rails(shown, style)]
    reasons = list(dict.fromkeys(rail.reason for _, _, rail in found if rail.status == "no path"))
    if reasons:
        parts += ["", style.paint("without a path", "bold")]
        parts += [wrap(reason, style) for reason in reasons[:REASONS_SHOWN_MAX]]
        hidden = len(reasons) - REASONS_SHOWN_MAX
        parts += [f"  ... and {hidden} more such reasons; --json has all"] if hidden > 0 else []
    parts += ["", _draw_problems(problems, style)]
    return "\n".join(parts)


def draw_rails(rails: Sequence[tuple[str, str, RailReport]], style: Style) -> str:
    """Return a table of rails, each with (from, to, report)."""
    header = ["", "from", "to", "MTU", "reads", "write GB/s", "read GB/s", "GIDs, or why not"]
    align: list[Align] = ["<", "<", "<", ">", ">", ">", ">", "<"]
    rows: list[list[str]] = []
    for source, target, rail in rails:
        cells = [mark_of(rail, style), f"{source} {rail.local}", f"{target} {rail.remote}"]
        if rail.is_working:
            rates = [format_gbps(rail.write_gbps), format_gbps(rail.read_gbps)] if rail.nbytes else ["-", "-"]
            lowered = style.paint(f"; {rail.lowered}", "yellow") if rail.lowered else ""
            rows.append([*cells, str(rail.path_mtu), str(rail.read_depth), *rates, rail.gids + lowered])
        else:
            rows.append([*cells, "-", "-", "-", "-", f"{rail.status}: see below"])
    return draw_table(header, rows, align, style)


def mark_of(rail: RailReport, style: Style) -> str:
    """Return the sign of what became of a rail."""
    return style.mark(MARKS[rail.status][0])


def _draw_matrix(hosts: Sequence[MeshHost], style: Style) -> str:
    """A row for each port, a column for each port, both numbered alike; a bar between two engines."""
    numbered = [(host, port) for host in hosts for port in host.ports]
    if not numbered:
        silent = [host.address for host in hosts if host.error]
        if len(silent) == len(hosts):
            return "no engine could be asked: whether they offer RDMA ports is not known"
        return "no engine that answered offers an RDMA port" if silent else "no engine offers an RDMA port"
    number_width = len(str(len(numbered)))
    labels = [f"{at:>{number_width}} {host.address} {port}" for at, (host, port) in enumerate(numbered, 1)]
    label_width = max(map(len, [*labels, "from / to"]))
    header = " ".join(
        ("| " if _is_first(numbered, at) else "") + f"{at + 1:>{number_width}}" for at in range(len(numbered))
    )
    lines = [style.paint(f"{'from / to':<{label_width}} {header}", "bold")]
    for label, (host, port) in zip(labels, numbered, strict=True):
        cells = []
        for at, (other, other_port) in enumerate(numbered):
            bar = "| " if _is_first(numbered, at) else ""
            cells.append(bar + " " * (number_width - 1) + _cell(host, port, other, other_port, style))
        lines.append(f"{label:<{label_width}} {' '.join(cells)}")
    return "\n".join(lines)


def _is_first(numbered: Sequence[tuple[MeshHost, str]], at: int) -> bool:
    return at == 0 or numbered[at - 1][0] is not numbered[at][0]


def _cell(host: MeshHost, port: str, other: MeshHost, other_port: str, style: Style) -> str:
    if host is other:
        return " "
    for rail in host.rails_to(other.address):
        if (rail.local, rail.remote) == (port, other_port):
            return mark_of(rail, style)
    return UNKNOWN


def _draw_legend(found: Sequence[tuple[str, str, RailReport]], hosts: Sequence[MeshHost], style: Style) -> str:
    counts: dict[str, int] = {}
    for _, _, rail in found:
        counts[rail.status] = counts.get(rail.status, 0) + 1
    parts = [f"{style.mark(MARKS[name][0])} {counts[name]} {MARKS[name][1]}" for name in MARKS if counts.get(name)]
    silent = [host.address for host in hosts if not host.targets and host.ports]
    if silent:
        parts.append(f"{UNKNOWN} not known: {', '.join(silent)} tried nothing (only a `kvxfer serve` does)")
    return wrap("; ".join(parts), style, indent="") if not style.colour else "; ".join(parts)


def _draw_sums(hosts: Sequence[MeshHost], style: Style) -> str:
    """A line for each two engines."""
    header = ["", "from", "to", "rails", "MTU", "write GB/s", "read GB/s", "connect ms", "lowered"]
    align: list[Align] = ["<", "<", "<", ">", ">", ">", ">", ">", "<"]
    rows = []
    for host in hosts:
        for target in host.targets:
            if target.error:
                continue
            good = [rail for rail in target.rails if rail.is_working]
            tried = [rail for rail in target.rails if rail.status != "no path"]
            moved = [rail for rail in good if rail.nbytes]
            rows.append(
                [
                    style.mark("ok" if good and len(good) == len(tried) else "fail"),
                    host.address,
                    target.target,
                    f"{len(good)} of {len(tried)}",
                    " ".join(map(str, sorted({rail.path_mtu for rail in good}))) or "-",
                    _range([rail.write_gbps for rail in moved]),
                    _range([rail.read_gbps for rail in moved]),
                    f"{median(rail.connect_ms for rail in good):.1f}" if good else "-",
                    style.paint("; ".join(dict.fromkeys(rail.lowered for rail in good if rail.lowered)), "yellow"),
                ]
            )
    return draw_table(header, rows, align, style)


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = format_gbps(min(values)), format_gbps(max(values))
    return low if low == high else f"{low} to {high}"


def _draw_problems(problems: Sequence[tuple[str, str]], style: Style) -> str:
    if not problems:
        return style.paint("every rail that should work does", "green")
    remedies: dict[str, list[str]] = {}
    for what, remedy in problems:
        remedies.setdefault(remedy, []).append(what)
    lines = [style.paint(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}", "red", "bold")]
    for remedy, whats in remedies.items():
        lines += [
            wrap(f"{style.mark('fail') if not style.colour else 'x'} {what}", style)
            for what in whats[:PROBLEMS_SHOWN_MAX]
        ]
        if len(whats) > PROBLEMS_SHOWN_MAX:
            lines.append(f"  ... and {len(whats) - PROBLEMS_SHOWN_MAX} more; --json has all")
        lines += [style.paint(wrap(remedy, style, indent="    "), "yellow")] if remedy else []
    return "\n".join(lines)
