"""What does kvxfer cost by itself: many peers at once, idling, memory, import, submit, a first byte?

Run as `peers.py --extras`. One engine writes to and reads from eight target processes, first over TCP, then over shared
memory. Only the comparison of eight at once with one is asked a figure of; the rest is there to be watched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from contenders.base import Measurement
from harness import OPERATIONS, Blocks, Operation, plan_offsets
from processes import BENCH_FOLDER, Worker, WorkerError, machine_words, python_worker
from report import MARK, Spread, render
from roster import EIGHT_PEERS_REQUIRED

PEER_COUNT: Final = 8
BLOCK_NBYTES: Final = 64 << 10
BLOCKS_PER_PEER: Final = 256
POOL_NBYTES: Final = 512 << 20  # the initiator's: eight times 256 scattered blocks fit its halves exactly
TARGET_POOL_NBYTES: Final = 128 << 20
IDLE_S: Final = 3.0
IMPORT_RUNS: Final = 9
SUBMIT_COUNT: Final = 100_000
SUBMIT_ROW_NBYTES: Final = 64  # small, so that the figure is the rows and not the bytes
GIB: Final = 1 << 30

IMPORT_SCRIPT: Final = """
import time, numpy
start = time.perf_counter()
import kvxfer
print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Figure:
    """One line of the result: what was measured, over which transport, and what was asked of its median."""

    extra: str
    transport: str
    unit: str
    spread: Spread
    required: float | None = None

    @property
    def is_met(self) -> bool | None:
        return None if self.required is None else self.spread.median >= self.required

    def json_row(self) -> dict[str, Any]:
        return {
            "extra": self.extra,
            "transport": self.transport,
            "unit": self.unit,
            "median": float(f"{self.spread.median:.4g}"),
            "min": float(f"{self.spread.min:.4g}"),
            "max": float(f"{self.spread.max:.4g}"),
            "count": self.spread.count,
            "required": self.required,
            "met": self.is_met,
            "machine": machine_words(),
        }

    def table_row(self) -> list[str]:
        asked = "" if self.required is None else f">= {self.required:g}"
        return [self.extra, self.transport, self.spread.words(), self.unit, asked, MARK[self.is_met]]


@dataclass
class FanOutBench:
    """One initiator, eight targets, one transport."""

    transport: str
    rounds: int
    figures: list[Figure] = field(default_factory=list)

    def run(self) -> list[Figure]:
        """Measure everything and return the figures. Raises WorkerError where a process failed or bytes were wrong."""
        with ExitStack() as closing:
            self._start(closing)
            self._open_peers()
            self._idle()
            for operation in OPERATIONS:
                self._eight_and_one(operation)
            self._submit()
        return self.figures

    def _start(self, closing: ExitStack) -> None:
        common = {"pool_nbytes": TARGET_POOL_NBYTES, "transport": self.transport, "memory": "allocated"}
        self._targets = []
        for index in range(PEER_COUNT):
            name = f"kvxfer-{self.transport} target {index}"
            settings = {**common, "side": "target", "name": name}
            self._targets.append(_open_worker(closing, name, "contenders.kvxfer_peer", settings))
        settings = {
            "pool_nbytes": POOL_NBYTES,
            "target_pool_nbytes": TARGET_POOL_NBYTES,
            "transport": self.transport,
        }
        module = "contenders.kvxfer_fan_out"
        self._initiator = _open_worker(closing, f"kvxfer-{self.transport} fan-out", module, settings)
        self._pids = [target.pid for target in self._targets]

    def _open_peers(self) -> None:
        """Time the first byte to each new peer, and see what memory one more costs once the first is open."""
        cards = [target.call("card") for target in self._targets]
        first_byte_s, memory_nbytes = [], []
        for card in cards:
            first_byte_s.append(self._initiator.call("open", card))
            memory_nbytes.append(self._initiator.call("memory"))
        growth = (memory_nbytes[-1] - memory_nbytes[0]) / (PEER_COUNT - 1)
        self._add("time to first byte to a new peer", "us", (1e6 * seconds for seconds in first_byte_s))
        self._add("private memory of an open peer", "KiB", [growth / 1024])

    def _idle(self) -> None:
        shares = self._initiator.call("idle_cpu", IDLE_S, self._pids)
        self._add(f"idle CPU, engine with {PEER_COUNT} open peers", "% of a core", [100 * shares[0]])
        self._add("idle CPU, target with 1 open peer", "% of a core", [100 * shares[1]])

    def _eight_and_one(self, operation: Operation) -> None:
        """Interleave: all at once, one of them (another in each round), and the eight in turn."""
        self._plan(operation)
        self._checked(operation, "in_turn", list(range(PEER_COUNT)))  # once unmeasured: first touch of every page
        at_once, one, in_turn = [], [], []
        everyone = list(range(PEER_COUNT))
        for round_ in range(self.rounds):
            index = round_ % PEER_COUNT
            at_once.append(self._checked(operation, "at_once", everyone))
            one.append(self._checked(operation, "one_of_them", [index], index))
            in_turn.append(self._checked(operation, "in_turn", everyone))
        rates = {"8 peers at once": at_once, "1 peer": one, "8 peers in turn": in_turn}
        for name, measurements in rates.items():
            self._add(f"{operation}, {name}", "GB/s", map(_gbps, measurements))
        required = EIGHT_PEERS_REQUIRED[self.transport]
        ratios = [_gbps(a) / _gbps(b) for a, b in zip(at_once, one, strict=True)]
        self._add(f"{operation}, 8 at once / 1 peer", "ratio", ratios, required)
        ratios = [_gbps(a) / _gbps(b) for a, b in zip(at_once, in_turn, strict=True)]
        self._add(f"{operation}, 8 at once / 8 in turn", "ratio", ratios)
        for name in ("8 peers at once", "8 peers in turn"):
            costs = [m.cpu_s / (m.nbytes / GIB) for m in rates[name]]
            self._add(f"{operation}, {name}", "CPU s/GiB", costs)

    def _plan(self, operation: Operation) -> None:
        batches = list(_plan_fan_out(operation))
        self._initiator.call("plan", operation, batches)
        for target, blocks in zip(self._targets, batches, strict=True):
            target.call("plan", operation, blocks)

    def _checked(self, operation: Operation, way: str, indices: list[int], *arguments: Any) -> Measurement:
        """Clear every destination, move, and check the bytes of the targets that took part."""
        is_write = operation == "write"
        for owner in self._targets if is_write else [self._initiator]:
            owner.call("clear", operation)
        measured: Measurement = self._initiator.call(way, operation, *arguments, self._pids)
        if is_write:
            wrong = sum(self._targets[index].call("count_wrong", operation) for index in indices)
        else:
            wrong = self._initiator.call("count_wrong", operation, indices)
        if wrong:
            raise WorkerError(f"kvxfer-{self.transport}: {operation} {way}: {wrong} wrong blocks")
        return measured

    def _submit(self) -> None:
        """The cost of a large batch by row. Over shared memory the caller may do the copying inside the submit."""
        timings = [self._initiator.call("submit", SUBMIT_ROW_NBYTES, SUBMIT_COUNT) for _ in range(self.rounds)]
        what = f"{SUBMIT_COUNT:,} rows of {SUBMIT_ROW_NBYTES} bytes"
        self._add(f"{what}: until submit returns", "ns/row", (1e9 * t[0] / SUBMIT_COUNT for t in timings))
        self._add(f"{what}: until done", "ns/row", (1e9 * t[1] / SUBMIT_COUNT for t in timings))

    def _add(self, extra: str, unit: str, values: Any, required: float | None = None) -> None:
        self.figures.append(Figure(extra, self.transport, unit, Spread.of(values), required))


def measure_import() -> Figure:
    """Time `import kvxfer` in fresh processes that have numpy already."""
    paths = os.pathsep.join(filter(None, [str(BENCH_FOLDER.parent), os.environ.get("PYTHONPATH")]))
    seconds = []
    for _ in range(IMPORT_RUNS + 1):
        run = subprocess.run(
            [sys.executable, "-c", IMPORT_SCRIPT],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise WorkerError(f"`import kvxfer` failed: {run.stderr.strip().splitlines()[-1]}")
        seconds.append(float(run.stdout))
    return Figure("import kvxfer beyond numpy", "", "ms", Spread.of(1e3 * s for s in seconds[1:]))  # first: cold files


def main(*, rounds: int, as_json: bool) -> int:
    """Run all of it, print it, and return the exit status."""
    figures: list[Figure] = []
    failures: list[str] = []
    try:
        figures.append(measure_import())
        for transport in EIGHT_PEERS_REQUIRED:
            print(f"extras: {PEER_COUNT} targets over {transport}", file=sys.stderr, flush=True)
            bench = FanOutBench(transport, rounds)
            try:
                bench.run()
            finally:
                figures += bench.figures
    except WorkerError as exc:
        failures.append(str(exc))
    if as_json:
        for figure in figures:
            print(json.dumps(figure.json_row()))
    elif figures:
        print(f"{machine_words()}; median (least-greatest)\n")
        header = ["kvxfer by itself", "transport", "measured", "unit", "asked", ""]
        print(render(header, [figure.table_row() for figure in figures]))
    for failure in failures:
        print(f"extras: FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _open_worker(closing: ExitStack, name: str, module: str, settings: dict[str, Any]) -> Worker:
    worker = python_worker(name, sys.executable, module, settings, {})
    closing.callback(worker.close)
    return worker


def _plan_fan_out(operation: Operation) -> Iterator[Blocks]:
    """Yield a batch for each target: its own part of the initiator's blocks, the same places in every target."""
    ours_is_source = operation == "write"
    ours = plan_offsets(
        BLOCK_NBYTES,
        PEER_COUNT * BLOCKS_PER_PEER,
        POOL_NBYTES,
        half="source" if ours_is_source else "destination",
        seed=1,
    )
    theirs = plan_offsets(
        BLOCK_NBYTES,
        BLOCKS_PER_PEER,
        TARGET_POOL_NBYTES,
        half="destination" if ours_is_source else "source",
        seed=2,
    )
    for index in range(PEER_COUNT):
        part = ours[index * BLOCKS_PER_PEER : (index + 1) * BLOCKS_PER_PEER]
        source, destination = (part, theirs) if ours_is_source else (theirs, part)
        yield Blocks(operation, source, destination, BLOCK_NBYTES)


def _gbps(measured: Measurement) -> float:
    return measured.nbytes / sum(measured.seconds) / 1e9
