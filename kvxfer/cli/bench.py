"""`kvxfer bench`: sweep block sizes and counts over each transport, against a second process here or a peer elsewhere.

One result per transport, operation, block size and block count, each beside a plain memory copy of the same blocks in
the same rounds, and each verified: by the second process itself, or, with --peer, by reading back what was written.
Read next: `workload.py`, `drawing.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.cli.child import Child, ChildPool
from kvxfer.cli.drawing import BenchRow, check_plot_target, draw_rows, save_plot
from kvxfer.cli.environment import given
from kvxfer.cli.keys import key_settings
from kvxfer.cli.table import Progress, Style, format_size
from kvxfer.cli.workload import Lane, Plan, Pool, ReadBack, Remote, allocate_plain, median, pool_nbytes_for
from kvxfer.config import EngineConfig
from kvxfer.errors import PeerRefusedError, TransportUnavailableError, UsageError

if TYPE_CHECKING:
    import kvxfer

__all__ = ["run"]

REGION_NAME = "kvxfer.serve"  # what `serve` calls its pool
CARRIERS = ("shm", "rdma", "tcp")
LOCAL_SALT = 1 << 16


@dataclass(frozen=True)
class Target:
    """What the bench runs against: an address, one region there, and how to look at it."""

    address: str
    remote_address: int
    nbytes: int
    child: Child | None
    memory: str


def run(arguments: Namespace) -> int:
    """Run the sweep; 0 where every block of every row was right."""
    import kvxfer

    if arguments.plot is not None:
        check_plot_target(arguments.plot)
    shapes = list(_shapes(arguments))
    needed = max(pool_nbytes_for(block, count) for block, count in shapes)
    rows: list[BenchRow] = []
    with contextlib.ExitStack() as stack:
        _refuse_rdma(arguments)
        settings = given(host=arguments.host, transports=arguments.transport)
        engine = stack.enter_context(kvxfer.TransferEngine(port=0, **settings, **key_settings(arguments.key_env)))
        target = _target(engine, arguments, needed, stack)
        lanes = _lanes(engine, target, arguments, needed)
        total = len(shapes) * len(lanes) * len(arguments.op) * (arguments.rounds + 1)
        progress = Progress(sys.stderr, "kvxfer bench", total)
        try:
            for block, count in shapes:
                plan = Plan(needed, block, count)
                for row in _measure(lanes, plan, arguments, progress):
                    rows.append(row)
                    if arguments.json:
                        progress.clear()
                        print(json.dumps(row.to_json()), flush=True)
        finally:
            progress.clear()
    if not arguments.json:
        against = arguments.peer or "a second process on this machine"
        print(draw_rows(rows, Style.of(sys.stdout), against))
    if arguments.plot is not None:
        save_plot(rows, arguments.plot)
        print(f"plot written to {arguments.plot}", file=sys.stderr)
    return 0 if all(not row.wrong for row in rows) else 1


def _shapes(arguments: Namespace) -> Iterator[tuple[int, int]]:
    """Yield (block size, block count) of each point of the sweep."""
    for block in arguments.sizes:
        if arguments.blocks is not None:
            yield from ((block, count) for count in arguments.blocks)
        else:
            yield block, max(1, arguments.bytes_per_batch // block)


def _refuse_rdma(arguments: Namespace) -> None:
    """Say before anything is started why rdma cannot be measured."""
    if "rdma" in (arguments.transport or ()):
        from kvxfer.transports.rdma import RdmaTransport

        probe = RdmaTransport.probe(EngineConfig.resolve())
        if not probe.usable:
            reason = probe.reason.rstrip(".")
            raise TransportUnavailableError(
                f"rdma cannot be measured here: {reason}.", remedy=probe.remedy, reasons={"rdma": probe.reason}
            )


def _target(
    engine: kvxfer.TransferEngine,
    arguments: Namespace,
    needed: int,
    stack: contextlib.ExitStack,
) -> Target:
    if arguments.peer is None:
        carriers = arguments.transport or CARRIERS
        child = stack.enter_context(Child(pool_nbytes=needed, memory=[arguments.memory], transports=carriers))
        region = child.regions[arguments.memory]
        return Target(child.address, region.address, region.nbytes, child, arguments.memory)
    segment = engine.open_segment(arguments.peer)
    offered = next((region for region in segment.regions if region.name == REGION_NAME), None)
    if offered is None:
        raise PeerRefusedError(
            f"{arguments.peer} offers no region {REGION_NAME!r} to measure against.",
            remedy="Start `kvxfer serve` there and pass the address that it prints.",
            peer=arguments.peer,
        )
    if offered.nbytes < needed:
        raise UsageError(
            f"this sweep needs {format_size(needed)} on the peer, and {arguments.peer} offers "
            f"{format_size(offered.nbytes)}.",
            remedy=f"Start it with `kvxfer serve --size {needed >> 20}MiB`, or measure fewer or smaller blocks.",
            needed_nbytes=needed,
            offered_nbytes=offered.nbytes,
        )
    return Target(arguments.peer, offered.address, offered.nbytes, None, arguments.memory)


def _lanes(engine: kvxfer.TransferEngine, target: Target, arguments: Namespace, needed: int) -> list[Lane]:
    """Return one lane per transport: those asked for, else the one a peer is reached by, else all that work here."""
    if target.memory == "allocated":
        memory = engine.allocate(needed, name="bench").array
    else:
        memory = allocate_plain(needed)
        engine.register(memory, name="bench")
    pool = Pool(memory, LOCAL_SALT)
    choices: tuple[tuple[str, ...] | None, ...]
    if arguments.transport:
        choices = tuple((name,) for name in arguments.transport)
    elif target.child is None:
        choices = (None,)
    else:
        usable = [probe.transport for probe in engine.probe() if probe.usable]
        choices = tuple((name,) for name in CARRIERS if name in usable)
    lanes = []
    for choice in choices:
        try:
            segment = engine.open_segment(target.address, transports=choice)
        except TransportUnavailableError as error:
            if choice is None or arguments.transport:
                raise
            print(f"kvxfer bench: {choice[0]} is left out: {error}", file=sys.stderr)
            continue
        remote: Remote = (
            ReadBack(engine, segment, pool, target.remote_address)
            if target.child is None
            else ChildPool(target.child, target.memory)
        )
        lanes.append(
            Lane(segment.transport, engine, segment, local=pool, remote=remote, remote_address=target.remote_address)
        )
    return lanes


def _measure(lanes: list[Lane], plan: Plan, arguments: Namespace, progress: Progress) -> Iterator[BenchRow]:
    """Yield the rows of one point of the sweep; lanes and operations take turns, round by round."""
    cells = list(itertools.product(lanes, arguments.op))
    seconds: dict[tuple[str, str], list[float]] = {(lane.label, operation): [] for lane, operation in cells}
    wrong = dict.fromkeys(seconds, 0)
    copies: list[float] = []
    lanes[0].use(plan)
    for at in range(arguments.rounds + 1):
        copy = lanes[0].copy()
        if at:
            copies.append(copy)
        for lane, operation in cells:
            progress.step(f"{lane.label} {operation} {plan.count:,} x {format_size(plan.block_nbytes)}")
            took, bad = lane.run(operation, check_rest=at == 0)
            wrong[lane.label, operation] += bad
            if at:
                seconds[lane.label, operation].append(took)
    for lane, operation in cells:
        yield BenchRow(
            transport=lane.label,
            operation=operation,
            block_nbytes=plan.block_nbytes,
            block_count=plan.count,
            rounds=arguments.rounds,
            batch_s=median(seconds[lane.label, operation]),
            memcpy_s=median(copies),
            wrong=wrong[lane.label, operation],
            verified_by=lane.remote.how if operation == "write" else "this process",
            peer=arguments.peer or "",
            passed_over=lane.segment.passed_over,
        )
