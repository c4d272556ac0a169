"""`kvxfer demo`: two processes, scattered blocks both ways over each transport, every byte compared.

Rounds go lane by lane, with a plain memory copy of the same blocks in each round, so that the ratios hold on a machine
whose speed changes while it is measured. Figures are medians. Read next: `workload.py`, `child.py`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer import __version__
from kvxfer.cli.arguments import TRANSPORT_NAMES
from kvxfer.cli.child import Child, ChildPool
from kvxfer.cli.table import Progress, Style, draw_table, format_gbps, format_ratio, format_size, wrap
from kvxfer.cli.workload import Lane, Plan, Pool, allocate_plain, median, pool_nbytes_for
from kvxfer.config import EngineConfig
from kvxfer.errors import KvxferError, TransportUnavailableError
from kvxfer.types import Probe

if TYPE_CHECKING:
    import kvxfer

__all__ = ["run"]

LATENCY_NBYTES = 4096
LATENCY_COUNT = 1000
LATENCY_WARM = 50
REGISTERED = "shm (registered memory)"
LEGEND = (
    "Speeds are in GB/s (10^9 bytes), figures are medians. Ratios are to memcpy: a loop of memory copies over the same "
    "blocks inside one process, by one thread, in the same rounds. One can be above 1: two processes have the caches "
    "of two cores, and other work on the machine may slow down the copy more than the transfer."
)
LATENCY_LEGEND = (
    f"4 KiB p50 is one `write` of 4 KiB, its addresses given as plain ints: {LATENCY_COUNT:,} of them in a row. A call "
    "after a pause, as those of `kvxfer bench --blocks 1` are, takes longer, because the caches hold something else."
)
WIDE_COLUMNS = 104
"""The width of the terminal from which the table has all its columns."""
LANES = {
    "shm": ("shm", "allocated"),
    REGISTERED: ("shm", "registered"),
    "rdma": ("rdma", "registered"),
    "tcp": ("tcp", "allocated"),
}
"""Row of the table -> transport, kind of memory."""
GROUPS = (("shm", "tcp"), ("rdma",))
"""Transports that share two engines. rdma has its own, so that memory a device refuses fails no other row."""
HERE: dict[str, Any] = {"host": "127.0.0.1", "port": 0}


@dataclass
class Outcome:
    """What became of one row; `probe` is set where the transport was not even tried."""

    label: str
    plan: Plan
    probe: Probe | None = None
    error: KvxferError | None = None
    wrong: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"copy": [], "write": [], "read": []})
    latencies_s: list[float] = field(default_factory=list)

    @property
    def is_measured(self) -> bool:
        """Whether there are figures to show."""
        return self.probe is None and self.error is None

    @property
    def is_verified(self) -> bool:
        """Whether it ran and every byte was right."""
        return self.is_measured and not self.wrong

    def gbps(self, what: str) -> float:
        """Return the median rate of "write", "read" or "copy" in GB/s (10^9 bytes)."""
        return self.plan.nbytes / median(self.seconds[what]) / 1e9

    def ratio(self, what: str) -> float:
        """Return the rate of "write" or "read" by that of the copy."""
        return self.gbps(what) / self.gbps("copy")

    @property
    def latency_us(self) -> float:
        """Return the median time of one small WRITE."""
        return median(self.latencies_s) * 1e6

    def figures(self) -> dict[str, Any]:
        """Return the figures by their names in the JSON output."""
        return {
            "write_gbps": round(self.gbps("write"), 3),
            "read_gbps": round(self.gbps("read"), 3),
            "latency_4k_p50_us": round(self.latency_us, 2),
            "memcpy_ratio_write": round(self.ratio("write"), 3),
            "memcpy_ratio_read": round(self.ratio("read"), 3),
            "memcpy_gbps": round(self.gbps("copy"), 3),
            "verified": self.is_verified,
        }


def run(arguments: Namespace) -> int:
    """Run the demo; 0 where at least one transport ran and every usable one verified."""
    plan = Plan(
        arguments.pool_size or pool_nbytes_for(arguments.block_size, arguments.blocks),
        arguments.block_size,
        arguments.blocks,
    )
    progress = Progress(sys.stderr, "kvxfer demo", total=(arguments.rounds + 2) * len(LANES) + len(GROUPS))
    try:
        outcomes = measure(plan, arguments.transports, arguments.rounds, progress)
    finally:
        progress.clear()
    if arguments.json:
        for transport in TRANSPORT_NAMES:
            if transport in outcomes:
                print(json.dumps(to_json(transport, outcomes)))
    else:
        print(to_text(plan, outcomes, Style.of(sys.stdout)))
    tried = [outcome for outcome in outcomes.values() if outcome.probe is None and not _is_extra_refused(outcome)]
    return 0 if tried and all(outcome.is_verified for outcome in tried) else 1


@dataclass
class _Ends:
    """An engine here and one in a second process, and the pools here by the kind of their memory."""

    engine: kvxfer.TransferEngine
    child: Child
    pools: dict[str, Pool] = field(default_factory=dict)

    def pool(self, memory: str, nbytes: int) -> Pool:
        """Return the pool of that kind, made when it is first asked for."""
        if memory not in self.pools:
            if memory == "allocated":
                array = self.engine.allocate(nbytes, name="demo").array
            else:
                array = allocate_plain(nbytes)
                self.engine.register(array, name="demo.registered")
            self.pools[memory] = Pool(array, salt=1 << 16 << len(self.pools))
        return self.pools[memory]


def measure(plan: Plan, wanted: tuple[str, ...], rounds: int, progress: Progress) -> dict[str, Outcome]:
    """Return one outcome per row of the wanted transports, in the order of the table."""
    import kvxfer
    from kvxfer.transports import TRANSPORTS

    config = EngineConfig.resolve(**HERE)
    probes = {name: transport.probe(config) for name, transport in TRANSPORTS.items()}
    outcomes = {
        label: Outcome(label, plan, None if probes[transport].usable else probes[transport])
        for label, (transport, _) in LANES.items()
        if transport in wanted
    }
    with contextlib.ExitStack() as stack:
        ends: dict[str, _Ends] = {}
        for group in GROUPS:
            tried = [outcome for outcome in outcomes.values() if outcome.probe is None and _carrier(outcome) in group]
            if not tried:
                continue
            progress.step("starting the second process")
            names = tuple(dict.fromkeys(map(_carrier, tried)))
            memory = list(dict.fromkeys(LANES[outcome.label][1] for outcome in tried))
            with _recorded(*tried):
                engine = stack.enter_context(kvxfer.TransferEngine(**HERE, transports=names))
                child = stack.enter_context(Child(pool_nbytes=plan.pool_nbytes, memory=memory, transports=names))
                ends |= dict.fromkeys(names, _Ends(engine, child))
        _measure_lanes(ends, [outcome for outcome in outcomes.values() if outcome.is_measured], rounds, progress)
    return outcomes


def _carrier(outcome: Outcome) -> str:
    return LANES[outcome.label][0]


def _measure_lanes(ends: Mapping[str, _Ends], outcomes: list[Outcome], rounds: int, progress: Progress) -> None:
    lanes: dict[str, Lane] = {}
    for outcome in outcomes:
        transport, memory = LANES[outcome.label]
        with _recorded(outcome):
            engine, child = ends[transport].engine, ends[transport].child
            lanes[outcome.label] = lane = Lane(
                outcome.label,
                engine,
                engine.open_segment(child.address, transports=(transport,)),
                local=ends[transport].pool(memory, outcome.plan.pool_nbytes),
                remote=ChildPool(child, memory),
                remote_address=child.regions[memory].address,
            )
            lane.use(outcome.plan)
    for at in range(rounds + 1):
        for outcome in outcomes:
            if outcome.error is not None:
                continue
            progress.step(f"{outcome.label}: round {at} of {rounds}" if at else f"{outcome.label}: warming up")
            with _recorded(outcome):
                _measure_round(lanes[outcome.label], outcome, is_warm_up=at == 0)
    for outcome in outcomes:
        if outcome.error is None:
            progress.step(f"{outcome.label}: latency")
            with _recorded(outcome):
                times = lanes[outcome.label].latencies_s("write", LATENCY_NBYTES, LATENCY_WARM + LATENCY_COUNT)
                outcome.latencies_s = times[LATENCY_WARM:]


def _measure_round(lane: Lane, outcome: Outcome, *, is_warm_up: bool) -> None:
    """Copy, WRITE, READ; the first round counts for the comparison only, and looks at the whole of both pools."""
    seconds = {"copy": lane.copy()}
    for operation in ("write", "read"):
        seconds[operation], wrong = lane.run(operation, check_rest=is_warm_up)
        outcome.wrong += wrong
    if not is_warm_up:
        for what, value in seconds.items():
            outcome.seconds[what].append(value)


@contextlib.contextmanager
def _recorded(*outcomes: Outcome) -> Iterator[None]:
    """Let these rows fail without the others."""
    try:
        yield
    except KvxferError as error:
        for outcome in outcomes:
            outcome.error = error


def _is_extra_refused(outcome: Outcome) -> bool:
    """Whether this is the row of registered memory on a machine that allows only allocated pools: no failure."""
    return outcome.label == REGISTERED and isinstance(outcome.error, TransportUnavailableError)


def to_json(transport: str, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Return the object of one transport; what was measured with registered memory goes with shm's."""
    outcome = outcomes[transport]
    if outcome.probe is not None:
        probe = outcome.probe
        return {"transport": transport, "usable": False, "reason": probe.reason, "remedy": probe.remedy}
    if outcome.error is not None:
        error = outcome.error
        return {
            "transport": transport,
            "usable": True,
            "verified": False,
            "error": type(error).__name__,
            "reason": error.message,
            "remedy": error.remedy,
        }
    fields = {"transport": transport, "usable": True, **outcome.figures(), "wrong_blocks": outcome.wrong}
    if transport == "shm":
        extra = outcomes[REGISTERED]
        if extra.is_measured:
            fields |= {f"registered_{name}": value for name, value in extra.figures().items()}
        elif extra.error is not None:
            fields |= {"registered_error": extra.error.message, "registered_remedy": extra.error.remedy}
    return fields


def to_text(plan: Plan, outcomes: dict[str, Outcome], style: Style) -> str:
    """Return the table, and below it what each row that did not run needs."""
    rows = [_row(outcome, style) for outcome in outcomes.values()]
    size = format_size(plan.block_nbytes)
    lines = [
        style.paint(f"kvxfer {__version__} demo", "bold"),
        f"{plan.count:,} scattered blocks of {size} ({format_size(plan.nbytes)}) each way, between two processes",
        "",
        _table(rows, style),
        "",
        style.paint(wrap(LEGEND, style, indent=""), "dim"),
        style.paint(wrap(LATENCY_LEGEND, style, indent=""), "dim"),
    ]
    for outcome in outcomes.values():
        reason, remedy = _why_not(outcome)
        if reason:
            lines += ["", style.paint(outcome.label, "bold"), wrap(reason, style)]
            lines += [wrap(remedy, style)] if remedy else []
    return "\n".join(lines)


def _table(rows: list[list[str]], style: Style) -> str:
    """Return the table with all columns, or where the terminal is too narrow for that, with the shorter half of it."""
    wide = ["transport", "write GB/s", "of memcpy", "read GB/s", "of memcpy", "memcpy", "4 KiB p50", "verified"]
    if style.width >= WIDE_COLUMNS:
        return draw_table(wide, rows, ["<", ">", ">", ">", ">", ">", ">", "<"], style)
    narrow = ["transport", "write", "ratio", "read", "ratio", "4 KiB p50", "verified"]
    return draw_table(narrow, [[*row[:5], *row[6:]] for row in rows], ["<", ">", ">", ">", ">", ">", "<"], style)


def _row(outcome: Outcome, style: Style) -> list[str]:
    if not outcome.is_measured:
        failed = outcome.error is not None and not _is_extra_refused(outcome)
        text = f"{style.mark('fail' if failed else 'off')} {'failed' if failed else 'not here'}"
        return [outcome.label, *["-"] * 6, text if failed else style.paint(text, "dim")]
    verified = (
        f"{style.mark('ok')} every byte"
        if outcome.is_verified
        else f"{style.mark('fail')} {outcome.wrong} blocks wrong"
    )
    return [
        outcome.label,
        format_gbps(outcome.gbps("write")),
        _ratio(outcome.ratio("write"), style),
        format_gbps(outcome.gbps("read")),
        _ratio(outcome.ratio("read"), style),
        format_gbps(outcome.gbps("copy")),
        f"{outcome.latency_us:.1f} us",
        verified,
    ]


def _ratio(ratio: float, style: Style) -> str:
    return style.paint(format_ratio(ratio), "cyan")


def _why_not(outcome: Outcome) -> tuple[str, str]:
    if outcome.probe is not None:
        return outcome.probe.reason, outcome.probe.remedy
    if outcome.error is not None:
        return outcome.error.message, outcome.error.remedy
    if outcome.wrong:
        return f"{outcome.wrong} blocks did not hold what was sent.", "This is a bug in kvxfer: please report it."
    return "", ""
