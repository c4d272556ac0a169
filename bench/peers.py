#!/usr/bin/env python3
"""How fast is kvxfer beside the engines people use, beside memcpy, and beside TCP itself, on this machine, now?

Every contender is two processes that live for the whole run. In each round every contender is measured once on every
workload, one right after the other, so that whatever else the machine does hits all of them alike; ratios are taken
inside a round. Every byte of every repetition is checked, and once for each workload also that no other byte changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import numpy as np

import extras
import report
from harness import OPERATIONS, POOL_NBYTES, WORKLOADS, Operation, Side, Workload, plan_blocks
from processes import Worker, WorkerError, machine_words, python_worker
from roster import CONTENDERS, Contender

GIB = 1 << 30
T = TypeVar("T")
EPILOG = """\
contenders
  kvxfer-shm       shared memory, both pools from engine.allocate
  kvxfer-shm-any   shared-memory transport, both pools ordinary numpy arrays
  kvxfer-tcp       transports=("tcp",)
  memcpy-shared    C memcpy over the same blocks, memfd to memfd in one process: the limit for kvxfer-shm
  memcpy-anonymous the same between anonymous pools: the limit for kvxfer-shm-any
  mooncake-tcp     Mooncake, protocol tcp, in batches of 1,024 rows
  nixl-default-*   NIXL on the path UCX chooses; nixl-tcp-*: UCX_TLS=tcp
  *-tuned          no progress thread at the initiator, sched_yield in its poll loop; *-installed: as pip leaves it
  iperf3           one stream, default windows, 64 MiB; no content, so nothing to verify

workloads
  64KiB            1,024 scattered blocks of 64 KiB, one batch
  4KiB             16,384 scattered blocks of 4 KiB, one batch
  latency          1,000 single transfers of 4 KiB, p50 and p99

examples
  python3 bench/peers.py                                              everything, 10 rounds, about 3 minutes
  python3 bench/peers.py --only kvxfer-tcp,iperf3 --workloads 64KiB   one question
  python3 bench/peers.py --json > bench/results/today.jsonl           to keep
  python3 bench/peers.py --extras                                     8 peers at once, idle CPU, memory, import, ...

Figures go to standard output, messages to standard error. The exit status is 0 only where every contender ran and
every byte was right; a missed ratio does not change it. `make peers` installs the peers that are missing.
"""


class Match:
    """A running contender: its processes, connected, with the batches of all workloads planned."""

    def __init__(self, contender: Contender, pool_nbytes: int) -> None:
        self.contender = contender
        self._workers: dict[Side, Worker] = {}
        try:
            self._start(pool_nbytes)
        except BaseException:
            self.close()
            raise

    def _start(self, pool_nbytes: int) -> None:
        sides: list[Side] = ["target", "initiator"] if self.contender.has_target else ["initiator"]
        for side in sides:
            self._workers[side] = python_worker(
                f"{self.contender.name} {side}",
                self.contender.python,
                self.contender.module,
                {**self.contender.settings, "side": side, "name": self.contender.name, "pool_nbytes": pool_nbytes},
                self.contender.environment,
            )
        cards = {side: worker.call("card") for side, worker in self._workers.items()}
        if self.contender.has_target:
            self._workers["initiator"].call("connect", cards["target"])
            self._workers["target"].call("connect", cards["initiator"])

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the processes run for a while, where they are otherwise stopped."""
        if not self.contender.spins_when_idle:
            yield
            return
        for worker in self._workers.values():
            worker.resume()
        try:
            yield
        finally:
            for worker in self._workers.values():
                worker.pause()

    def rehearse(self, workload: Workload, operation: Operation, pool_nbytes: int) -> None:
        """Plan the batch, run it once from clean pools, and check that it touched its blocks and nothing else.

        Raises WorkerError when it did not.
        """
        key = _key(workload, operation)
        blocks = plan_blocks(workload, operation, pool_nbytes)
        for worker in self._workers.values():
            worker.call("plan", key, blocks)
            if self.contender.carries_data:
                worker.call("clear_all")
        self._workers["initiator"].call("prepare", key)
        sample = self.measure(workload, operation, round_=-1)
        if self.contender.carries_data:
            touched = self._owner(blocks.destination_side).call("count_touched", key)
            if not sample.is_verified or touched:
                raise WorkerError(
                    f"{self.contender.name}: {operation} {workload.name}: "
                    f"{'right blocks' if sample.is_verified else 'WRONG blocks'}, {touched} places touched outside them"
                )

    def measure(self, workload: Workload, operation: Operation, round_: int) -> report.Sample:
        """Run one repetition and check every byte of it."""
        key = _key(workload, operation)
        destination = self._owner("target" if operation == "write" else "initiator")
        if self.contender.carries_data:
            destination.call("clear", key)
        other_pids = [worker.pid for side, worker in self._workers.items() if side != "initiator"]
        measured = self._workers["initiator"].call("measure", key, workload.is_latency, other_pids)
        is_verified = destination.call("count_wrong", key) == 0 if self.contender.carries_data else None
        p50_us, p99_us = (np.percentile(measured.seconds, [50, 99]) * 1e6).tolist()
        return report.Sample(
            round=round_,
            who=self.contender.name,
            operation=operation,
            workload=workload.name,
            gbps=None if workload.is_latency else measured.nbytes / sum(measured.seconds) / 1e9,
            p50_us=p50_us if workload.is_latency else None,
            p99_us=p99_us if workload.is_latency else None,
            cpu_s_per_gib=measured.cpu_s / (measured.nbytes / GIB),
            is_verified=is_verified,
        )

    def close(self) -> None:
        for side in ("initiator", "target"):  # the initiator first: it leaves, the target sees it go
            if side in self._workers:
                self._workers[side].close()

    def _owner(self, side: Side) -> Worker:
        return self._workers.get(side, self._workers["initiator"])


class Tournament:
    """All matches of one run. A contender that fails is named, left out of the rest, and fails the run."""

    def __init__(self, workloads: Sequence[Workload], pool_nbytes: int) -> None:
        self.samples: list[report.Sample] = []
        self.failures: list[str] = []
        self._workloads = workloads
        self._pool_nbytes = pool_nbytes
        self._matches: list[Match] = []
        self._closing = ExitStack()

    def __enter__(self) -> Tournament:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing.close()

    def admit(self, contender: Contender) -> None:
        """Start a contender and run each workload once, unmeasured, with the check for stray bytes."""
        if not contender.is_installed():
            self._fail(f"{contender.name} is not installed: run `make peers`, or leave it out with --only")
            return
        say(f"starting {contender.name}")
        try:
            match = Match(contender, self._pool_nbytes)
            self._closing.callback(match.close)
            with match.awake():
                for workload, operation in self._events(contender):
                    match.rehearse(workload, operation, self._pool_nbytes)
        except WorkerError as exc:
            self._fail(str(exc))
        else:
            self._matches.append(match)

    def play_round(self, round_: int) -> None:
        """Measure everyone once on everything; who goes first moves on by one each round."""
        for workload in self._workloads:
            for operation in OPERATIONS:
                start = round_ % max(1, len(self._matches))
                for match in self._matches[start:] + self._matches[:start]:
                    if (workload, operation) in self._events(match.contender):
                        self._play(match, workload, operation, round_)

    def _play(self, match: Match, workload: Workload, operation: Operation, round_: int) -> None:
        try:
            with match.awake():
                sample = match.measure(workload, operation, round_)
        except WorkerError as exc:
            self._fail(str(exc))
            self._matches.remove(match)
            return
        self.samples.append(sample)
        if sample.is_verified is False:
            self._fail(f"{sample.who}: wrong bytes after {operation} {workload.name} in round {round_}")

    def _events(self, contender: Contender) -> list[tuple[Workload, Operation]]:
        workloads = [w for w in self._workloads if contender.has_latency or not w.is_latency]
        return [(workload, operation) for workload in workloads for operation in OPERATIONS]

    def _fail(self, message: str) -> None:
        self.failures.append(message)
        say(message)


def say(message: str) -> None:
    print(f"peers: {message}", file=sys.stderr, flush=True)


def _key(workload: Workload, operation: Operation) -> str:
    return f"{operation} {workload.name}"


def _choose(text: str | None, table: Mapping[str, T], what: str, parser: argparse.ArgumentParser) -> list[T]:
    names = text.split(",") if text else list(table)
    unknown = [name for name in names if name not in table]
    if unknown:
        parser.error(f"no such {what}: {', '.join(unknown)}. There are: {', '.join(table)}")
    return [table[name] for name in table if name in names]


def _parse() -> tuple[argparse.Namespace, list[Contender], list[Workload]]:
    parser = argparse.ArgumentParser(
        prog="peers.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="rounds to measure (default 10)")
    parser.add_argument("--only", metavar="NAME,...", help="only these contenders (default: all of those below)")
    parser.add_argument("--workloads", metavar="NAME,...", help="only these workloads (default: all of those below)")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of tables: contenders, then ratios")
    parser.add_argument("--extras", action="store_true", help="kvxfer by itself: what a run against others cannot show")
    parser.add_argument(
        "--pool-mib",
        type=int,
        default=POOL_NBYTES >> 20,
        metavar="MIB",
        help="memory of each process (default 512, at least 256; all contenders together take 10 GiB)",
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.pool_mib < 256 or options.pool_mib % 64:
        parser.error("--pool-mib must be at least 256, so that 1,024 scattered blocks fit, and a multiple of 64")
    return (
        options,
        _choose(options.only, CONTENDERS, "contender", parser),
        _choose(options.workloads, WORKLOADS, "workload", parser),
    )


def main() -> int:
    """Run what the command line asks for and return the exit status."""
    options, contenders, workloads = _parse()
    if options.extras:
        return extras.main(rounds=options.rounds, as_json=options.json)
    start = time.monotonic()
    with Tournament(workloads, options.pool_mib << 20) as tournament:
        for contender in contenders:
            tournament.admit(contender)
        for round_ in range(options.rounds):
            tournament.play_round(round_)
            say(f"round {round_ + 1} of {options.rounds} done, {time.monotonic() - start:.0f} s")
    if options.json:
        for row in report.json_rows(tournament.samples, machine_words()):
            print(json.dumps(row))
    elif tournament.samples:
        print(report.tables(tournament.samples, machine_words()))
    for failure in tournament.failures:
        say(f"FAILED: {failure}")
    return 1 if tournament.failures else 0


if __name__ == "__main__":
    sys.exit(main())
