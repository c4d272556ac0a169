"""The result of a bench, and the ways it is shown: JSON fields, a table with bars, a plot by matplotlib.

Pure but for `save_plot`, which writes one file. matplotlib is optional and imported only there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

from kvxfer import __version__
from kvxfer.cli.table import Align, Style, draw_bar, draw_table, format_gbps, format_ratio, format_size, wrap
from kvxfer.errors import UnsupportedError, UsageError

__all__ = ["BenchRow", "check_plot_target", "draw_rows", "save_plot"]

PLOT_SUFFIXES = (".png", ".svg")
COLOURS = {"shm": "cyan", "tcp": "magenta", "rdma": "green"}
BAR_WIDTH_MIN = 10


@dataclass(frozen=True)
class BenchRow:
    """One point of a sweep. batch_s and memcpy_s: medians, in seconds, of a whole batch and of a copy of its blocks."""

    transport: str
    operation: str
    block_nbytes: int
    block_count: int
    rounds: int
    batch_s: float
    memcpy_s: float
    wrong: int
    verified_by: str
    peer: str
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Transports that were preferred and could not be used, and why."""

    @property
    def nbytes(self) -> int:
        """Bytes of one batch."""
        return self.block_nbytes * self.block_count

    @property
    def gbps(self) -> float:
        """The rate in GB/s (10^9 bytes)."""
        return self.nbytes / self.batch_s / 1e9

    @property
    def memcpy_gbps(self) -> float:
        """The rate of the plain copy of the same blocks."""
        return self.nbytes / self.memcpy_s / 1e9

    @property
    def ratio(self) -> float:
        """The rate by that of the plain copy."""
        return self.memcpy_s / self.batch_s

    def to_json(self) -> dict[str, Any]:
        """Return the row as one JSON object."""
        return {
            "transport": self.transport,
            "op": self.operation,
            "block_nbytes": self.block_nbytes,
            "blocks": self.block_count,
            "nbytes": self.nbytes,
            "rounds": self.rounds,
            "gbps": round(self.gbps, 3),
            "batch_p50_us": round(self.batch_s * 1e6, 2),
            "memcpy_gbps": round(self.memcpy_gbps, 3),
            "memcpy_ratio": round(self.ratio, 3),
            "verified": not self.wrong,
            "verified_by": self.verified_by,
            "wrong_blocks": self.wrong,
            "peer": self.peer,
            "passed_over": dict(self.passed_over),
        }


def draw_rows(rows: Sequence[BenchRow], style: Style, against: str) -> str:
    """Return the table with a bar per row: full for the rate, hollow up to what memcpy reached on the same blocks.

    On a terminal that has no room for bars there are none.
    """
    header = ["transport", "op", "blocks", "batch p50", "GB/s", "of memcpy", " "]
    align: list[Align] = ["<", "<", ">", ">", ">", ">", "<"]
    cells = [
        [
            row.transport,
            row.operation,
            f"{row.block_count:,} x {format_size(row.block_nbytes)}",
            _format_time(row.batch_s),
            format_gbps(row.gbps),
            format_ratio(row.ratio),
            "fail" if row.wrong else "ok",
        ]
        for row in rows
    ]
    used = sum(max(map(len, column)) + 2 for column in list(zip(header, *cells, strict=True))[:-1]) + len("x  ")
    cells = [[*line, style.mark(mark)] for *line, mark in cells]
    bar_width = max(BAR_WIDTH_MIN, style.width - used)
    has_bars = style.columns is None or used + bar_width <= style.columns
    top = max((max(row.gbps, row.memcpy_gbps) for row in rows), default=1.0)
    if has_bars:
        header, align = [*header, ""], [*align, "<"]
        cells = [[*line, _bar(row, top, bar_width, style)] for row, line in zip(rows, cells, strict=True)]
    lines = [
        style.paint(f"kvxfer {__version__} bench", "bold") + f"  against {against}",
        "",
        draw_table(header, _with_gaps(rows, cells), align, style),
        "",
        style.paint(wrap(_legend(rows, top, style, has_bars=has_bars), style, indent=""), "dim"),
    ]
    passed = dict(reason for row in rows for reason in row.passed_over.items())
    lines += [wrap(f"{name} was passed over: {reason}", style, indent="") for name, reason in passed.items()]
    wrong = [row for row in rows if row.wrong]
    lines += [
        f"{style.mark('fail')} {row.transport} {row.operation} of {row.block_count:,} x "
        f"{format_size(row.block_nbytes)}: {row.wrong} blocks were wrong. "
        "Does another bench use the same peer? Else it is a bug in kvxfer."
        for row in wrong
    ]
    return "\n".join(lines)


def _legend(rows: Sequence[BenchRow], top: float, style: Style, *, has_bars: bool) -> str:
    track = "░" if style.unicode else "."
    verifiers = ", ".join(dict.fromkeys(row.verified_by for row in rows))
    single = ""
    if any(row.block_count == 1 for row in rows):
        single = (
            " A single block is moved by a call with plain ints, as for the 4 KiB p50 of `kvxfer demo`; here each call "
            "comes after its block was filled and the last one checked, there 1,000 in a row: that one is shorter."
        )
    memcpy = "what a Python loop of memory copies over the same blocks reached in the same rounds"
    told = (
        f"Bars are GB/s (10^9 bytes, the longest is {format_gbps(top)}); {track} goes on to {memcpy}."
        if has_bars
        else f"GB/s are 10^9 bytes; memcpy is {memcpy}."
    )
    return f"{told} Figures are medians. Verified by: {verifiers}.{single}"


def check_plot_target(path: Path) -> None:
    """Raise before the measurement begins if the plot could not be written at its end."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise UsageError(f"--plot {path}: the file must end in .png or .svg.", remedy=f"Try --plot {path}.svg.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.absolute().parent}.", remedy="Create it first.")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"--plot {path}: that cannot be written.", remedy="Give a file in a folder of yours.")
    if util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "--plot needs matplotlib, which is not installed.",
            remedy="Run `python -m pip install matplotlib`, or leave --plot out: the table has bars too.",
        )


def save_plot(rows: Sequence[BenchRow], path: Path) -> None:
    """Write GB/s over block size, a line per transport and operation, memcpy dashed."""
    import matplotlib as mpl  # type: ignore[import-not-found,unused-ignore]

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # type: ignore[import-not-found,unused-ignore]

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for transport, operation, count in dict.fromkeys(_line_of(row, rows) for row in rows):
        line = [row for row in rows if _line_of(row, rows) == (transport, operation, count)]
        label = f"{transport} {operation}" + (f", {count:,} blocks" if count else "")
        axes.plot([row.block_nbytes for row in line], [row.gbps for row in line], marker="o", label=label)
    memcpy = {(row.block_nbytes, row.block_count): row.memcpy_gbps for row in rows}
    sizes = sorted({size for size, _ in memcpy})
    best = [max(gbps for (size, _), gbps in memcpy.items() if size == wanted) for wanted in sizes]
    axes.plot(sizes, best, linestyle="--", color="grey", label="memcpy of the same blocks")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("block size")
    axes.set_ylabel("GB/s (10^9 bytes)")
    axes.set_title("kvxfer: scattered blocks" + (f", peer {rows[0].peer}" if rows and rows[0].peer else ""))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as exc:
        raise UnsupportedError(
            f"--plot {path}: {exc.strerror or exc}.",
            remedy="Give a place that can be written; the table has the figures.",
        ) from exc
    finally:
        plt.close(figure)


def _line_of(row: BenchRow, rows: Sequence[BenchRow]) -> tuple[str, str, int]:
    """Return which line of the plot a row is on; counts make lines of their own where a size has several."""
    counts = {other.block_count for other in rows if other.block_nbytes == row.block_nbytes}
    return row.transport, row.operation, row.block_count if len(counts) > 1 else 0


def _with_gaps(rows: Sequence[BenchRow], cells: Sequence[list[str]]) -> list[list[str]]:
    """Put an empty line where the block size or count changes."""
    spaced: list[list[str]] = []
    for at, line in enumerate(cells):
        shape = (rows[at].block_nbytes, rows[at].block_count)
        if at and shape != (rows[at - 1].block_nbytes, rows[at - 1].block_count):
            spaced.append([""])
        spaced.append(line)
    return spaced


def _bar(row: BenchRow, top: float, width: int, style: Style) -> str:
    bar = draw_bar(row.gbps, top, width, style, COLOURS.get(row.transport, "cyan"))
    reached = -(-round(row.gbps / top * width * 8) // 8) if style.unicode else round(row.gbps / top * width)
    rest = max(0, round(row.memcpy_gbps / top * width) - max(reached, 1))
    return bar + style.paint(("░" if style.unicode else ".") * rest, "dim")


def _format_time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
