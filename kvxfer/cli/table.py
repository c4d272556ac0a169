"""Draw on a terminal: aligned tables, colour, bars, one line of progress.

Pure text apart from `Progress`, which owns one line of one stream. Colour only on a terminal and without NO_COLOR
(no-color.org); block characters unless the locale is C or the stream cannot encode them.
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

__all__ = ["Progress", "Style", "draw_bar", "draw_table", "format_gbps", "format_ratio", "format_size", "wrap"]

_CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_EIGHTHS = " ▏▎▍▌▋▊▉"
WIDTH_MAX = 110
"""Longer lines are hard to read even where the terminal has room."""

Align = Literal["<", ">"]


@dataclass(frozen=True)
class Style:
    """What the stream can show."""

    colour: bool = False
    unicode: bool = False
    width: int = 80
    columns: int | None = None
    """Of the terminal, which breaks longer lines wherever that is; None for a file or a pipe, which break none."""

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str] | None = None) -> Style:
        """Find out what `stream` can show."""
        variables = os.environ if environ is None else environ
        is_terminal = stream.isatty()
        colour = is_terminal and not variables.get("NO_COLOR") and variables.get("TERM") != "dumb"
        # With LANG=C the interpreter itself switches to UTF-8 (PEP 538, 540), so that the encoding alone does not tell.
        locale = variables.get("LC_ALL") or variables.get("LANG") or ""
        encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
        columns = shutil.get_terminal_size((WIDTH_MAX, 24)).columns if is_terminal else None
        return cls(
            colour=colour,
            unicode=encoding.startswith("utf8") and locale not in ("C", "POSIX"),
            width=min(max(columns or WIDTH_MAX, 40), WIDTH_MAX),
            columns=columns,
        )

    def paint(self, text: str, *names: str) -> str:
        """Return `text` in the colours or weights named, where the stream has colour."""
        if not self.colour or not names or not text:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m"

    def mark(self, status: str) -> str:
        """Return the one-character sign of ok, warn, fail or off."""
        sign, plain, colour = {
            "ok": ("✓", "+", "green"),
            "warn": ("!", "!", "yellow"),
            "fail": ("✗", "x", "red"),
            "off": ("-", "-", "dim"),
        }[status]
        return (
            self.paint(sign if self.unicode else plain, colour, "bold") if colour != "dim" else self.paint(sign, colour)
        )


def draw_table(header: Sequence[str], rows: Sequence[Sequence[str]], align: Sequence[Align], style: Style) -> str:
    """Return the table as text without a final newline; cells may hold colour, columns are two spaces apart.

    A row of one cell is a note and is written as it is, under the row before it. A table that is wider than the
    terminal becomes a list: a line for each cell, so that no figure is broken in two.
    """
    whole = [row for row in rows if len(row) == len(header)]
    widths = [max(_width(cell) for cell in column) for column in zip(header, *whole, strict=True)]
    if style.columns is not None and sum(widths) + 2 * (len(widths) - 1) > style.columns:
        return _draw_list(header, rows, style, style.columns)
    lines = [_line([style.paint(cell, "bold") for cell in header], widths, align)]
    rule = "─" if style.unicode else "-"
    lines.append(style.paint("  ".join(rule * width for width in widths), "dim"))
    lines += [_line(row, widths, align) if len(row) == len(header) else row[0] for row in rows]
    return "\n".join(lines)


def draw_bar(value: float, maximum: float, width: int, style: Style, colour: str = "cyan") -> str:
    """Return a bar of at most `width` cells, in eighths of a cell where the stream can show them."""
    share = min(max(value / maximum, 0.0), 1.0) if maximum > 0 else 0.0
    least = 1 if value > 0 else 0
    if not style.unicode:
        return style.paint("#" * max(round(share * width), least), colour)
    eighths = max(round(share * width * 8), least)
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return style.paint(bar, colour)


def wrap(text: str, style: Style, indent: str = "  ") -> str:
    """Return `text` folded to the width of the stream, every line after `indent`."""
    return textwrap.fill(
        text,
        style.width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def format_size(nbytes: int) -> str:
    """Return a byte count in the largest binary unit that keeps it whole, else with one decimal: 64 KiB, 1.5 MiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = min((nbytes.bit_length() - 1) // 10, len(units) - 1) if nbytes > 0 else 0
    value = nbytes / (1 << 10 * power)
    return f"{value:.0f} {units[power]}" if value == int(value) else f"{value:.1f} {units[power]}"


def format_gbps(gbps: float) -> str:
    """Return GB/s (10^9 bytes) with three digits that mean something."""
    return f"{gbps:.2f}" if gbps < 10 else f"{gbps:.1f}"


def format_ratio(ratio: float) -> str:
    """Return a ratio to memcpy, such as 0.87x."""
    return f"{ratio:.2f}x"


class Progress:
    """One line on a terminal, shown once the work has taken two seconds; silent on anything else."""

    DELAY_S = 2.0

    def __init__(self, stream: TextIO, label: str, total: int) -> None:
        self._stream = stream
        self._label = label
        self._total = total
        self._count = 0
        self._started = time.monotonic()
        self._shown = False
        self._is_terminal = stream.isatty()

    def step(self, what: str) -> None:
        """Say that `what` begins."""
        self._count += 1
        if not self._is_terminal or time.monotonic() - self._started < self.DELAY_S:
            return
        columns = shutil.get_terminal_size((80, 24)).columns
        text = f"{self._label}: {self._count} of {self._total}, {what}"[: columns - 1]
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()
        self._shown = True

    def clear(self) -> None:
        """Take the line away, so that something else can be written."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False


def _width(cell: str) -> int:
    return len(_ESCAPE.sub("", cell))


def _draw_list(header: Sequence[str], rows: Sequence[Sequence[str]], style: Style, columns: int) -> str:
    label_width = max(map(len, header))
    indent = " " * (label_width + 2)
    lines: list[str] = []
    for row in rows:
        if len(row) != len(header):
            lines += [indent + row[0].strip()] if row[0] else []
            continue
        lines += [""] if lines else []
        for name, cell in zip(header, row, strict=True):
            first, *more = textwrap.wrap(cell, columns - len(indent), break_long_words=False) or [""]
            if first:
                lines.append(f"{style.paint(name, 'bold')}{' ' * (len(indent) - len(name))}{first}")
                lines += [indent + text for text in more]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], align: Sequence[Align]) -> str:
    parts = []
    for cell, width, side in zip(cells, widths, align, strict=True):
        padding = " " * (width - _width(cell))
        parts.append(cell + padding if side == "<" else padding + cell)
    return "  ".join(parts).rstrip()
