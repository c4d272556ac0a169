"""Turn samples into figures: medians by contender, ratios by round, as JSON rows or as tables for a terminal.

Pure: samples in, rows or text out. A ratio is taken inside one round, between two repetitions a few seconds apart, and
its median is taken after that: a machine that slows down for a while slows both down and leaves the ratio alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from harness import OPERATIONS, WORKLOADS
from roster import LATENCY_REQUIRED_US, PAIRS

MARK: Final = {True: "ok", False: "MISSED", None: ""}


@dataclass(frozen=True)
class Sample:
    """One repetition of one contender.

    gbps: 10**9 bytes a second, None for latency; p50_us, p99_us: None for throughput.
    is_verified: every byte arrived; None where the contender carries no content to check (iperf3).
    """

    round: int
    who: str
    operation: str
    workload: str
    gbps: float | None
    p50_us: float | None
    p99_us: float | None
    cpu_s_per_gib: float
    is_verified: bool | None

    @property
    def value(self) -> float:
        """The figure this workload is about."""
        value = self.p50_us if self.gbps is None else self.gbps
        assert value is not None
        return value


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of one figure over the rounds."""

    median: float
    min: float
    max: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        kept = list(values)
        return cls(median(kept), min(kept), max(kept), len(kept))

    def words(self) -> str:
        return f"{_short(self.median)} ({_short(self.min)}-{_short(self.max)})"


@dataclass(frozen=True)
class Ratio:
    """A ratio over the rounds and what is asked of it (None: nothing)."""

    name: str
    workload: str
    operation: str
    spread: Spread
    required: float | None

    @property
    def is_met(self) -> bool | None:
        return None if self.required is None else self.spread.median >= self.required


def compare(samples: Sequence[Sample]) -> list[Ratio]:
    """Return the ratios of all pairs that were both measured. Latency: time over time, so lower is better."""
    by_place = {(s.who, s.operation, s.workload, s.round): s.value for s in samples}
    ratios = []
    for pair in PAIRS:
        for workload in WORKLOADS:
            for operation in OPERATIONS:
                rounds = [r for w, o, k, r in by_place if (w, o, k) == (pair.who, operation, workload)]
                values = [
                    by_place[pair.who, operation, workload, round_] / by_place[pair.rival, operation, workload, round_]
                    for round_ in rounds
                    if (pair.rival, operation, workload, round_) in by_place
                ]
                if values:
                    required = pair.required.get(workload)
                    ratios.append(Ratio(pair.name, workload, operation, Spread.of(values), required))
    return ratios


def json_rows(samples: Sequence[Sample], machine: str) -> list[dict[str, Any]]:
    """Return one row for each contender, operation and workload, then one for each ratio."""
    rows: list[dict[str, Any]] = []
    for (who, operation, workload), group in _grouped(samples).items():
        values = Spread.of(sample.value for sample in group)
        is_latency = WORKLOADS[workload].is_latency
        verdicts = {sample.is_verified for sample in group}
        rows.append(
            {
                "who": who,
                "op": operation,
                "workload": workload,
                "gbps": None if is_latency else _rounded(values.median),
                "p50_us": _rounded(values.median) if is_latency else None,
                "cpu_s_per_gib": _rounded(median(sample.cpu_s_per_gib for sample in group)),
                "verified": None if verdicts == {None} else verdicts == {True},
                "min": _rounded(values.min),
                "max": _rounded(values.max),
                "p99_us": _rounded(median(s.p99_us for s in group if s.p99_us is not None)) if is_latency else None,
                "p50_us_required": LATENCY_REQUIRED_US.get(who) if is_latency else None,
                "rounds": values.count,
                "machine": machine,
            }
        )
    for ratio in compare(samples):
        rows.append(
            {
                "ratio": ratio.name,
                "workload": ratio.workload,
                "op": ratio.operation,
                "median": _rounded(ratio.spread.median),
                "min": _rounded(ratio.spread.min),
                "max": _rounded(ratio.spread.max),
                "required": ratio.required,
                "met": ratio.is_met,
                "better": "lower" if WORKLOADS[ratio.workload].is_latency else "higher",
                "rounds": ratio.spread.count,
            }
        )
    return rows


def tables(samples: Sequence[Sample], machine: str) -> str:
    """Return everything as text for a terminal of 130 columns."""
    parts = [f"{machine}; each figure is the median of its rounds, with (least-greatest)"]
    for operation in OPERATIONS:
        mine = [sample for sample in samples if sample.operation == operation]
        if mine:
            parts += [_figures_table(operation, mine), _ratios_table(operation, mine)]
    return "\n\n".join(part for part in parts if part)


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table: first column to the left, the rest to the right, as wide as it needs."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0] = line[0].ljust(widths[0])
        texts.append("  ".join(cells).rstrip())
    texts.insert(1, "-" * max(len(text) for text in texts))
    return "\n".join(texts)


def _figures_table(operation: str, samples: Sequence[Sample]) -> str:
    groups = _grouped(samples)
    header = ["", *(f"{name} GB/s" for name in ("64KiB", "4KiB")), "p50 us", "p99 us", "CPU s/GiB 64K", "4K", "bytes"]
    rows = []
    for who in dict.fromkeys(sample.who for sample in samples):
        by_workload = {workload: groups.get((who, operation, workload), []) for workload in WORKLOADS}
        latencies = by_workload["latency"]
        verdicts = {sample.is_verified for group in by_workload.values() for sample in group}
        rows.append(
            [
                who,
                *(_spread_words(s.value for s in by_workload[name]) for name in ("64KiB", "4KiB", "latency")),
                _spread_words(s.p99_us for s in latencies if s.p99_us is not None),
                *(_median_words(s.cpu_s_per_gib for s in by_workload[name]) for name in ("64KiB", "4KiB")),
                "unchecked" if verdicts == {None} else "verified" if verdicts == {True} else "WRONG",
            ]
        )
    return f"{operation.upper()}\n\n" + render(header, rows)


def _ratios_table(operation: str, samples: Sequence[Sample]) -> str:
    cells = {(ratio.name, ratio.workload): ratio for ratio in compare(samples)}
    rows = []
    for pair in PAIRS:
        if any(name == pair.name for name, _ in cells):
            row = [pair.name]
            for workload in ("64KiB", "4KiB"):
                ratio = cells.get((pair.name, workload))
                row += ["", "", ""] if ratio is None else [ratio.spread.words(), *_judgement(ratio)]
            latency = cells.get((pair.name, "latency"))
            rows.append([*row, latency.spread.words() if latency else ""])
    header = ["ratio (higher is better)", "64KiB", "asked", "", "4KiB", "asked", "", "p50 (LOWER is better)"]
    text = render(header, rows) if rows else ""
    return "\n\n".join(part for part in (text, _latency_words(samples)) if part)


def _latency_words(samples: Sequence[Sample]) -> str:
    lines = []
    for who, limit_us in LATENCY_REQUIRED_US.items():
        values = [s.value for s in samples if s.who == who and WORKLOADS[s.workload].is_latency]
        if values:
            spread = Spread.of(values)
            verdict = MARK[spread.median <= limit_us]
            lines.append(f"{who}: p50 of 4 KiB {spread.words()} us, asked at most {limit_us:g} us: {verdict}")
    return "\n".join(lines)


def _judgement(ratio: Ratio) -> tuple[str, str]:
    return ("" if ratio.required is None else f">= {ratio.required:g}", MARK[ratio.is_met])


def _grouped(samples: Sequence[Sample]) -> dict[tuple[str, str, str], list[Sample]]:
    groups: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.who, sample.operation, sample.workload), []).append(sample)
    return groups


def _spread_words(values: Iterable[float]) -> str:
    kept = list(values)
    return Spread.of(kept).words() if kept else ""


def _median_words(values: Iterable[float]) -> str:
    kept = list(values)
    return _short(median(kept)) if kept else ""


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
