"""`kvxfer mesh HOSTFILE`: try every RDMA rail between all engines that a file names, and show one matrix.

The engines that act are `kvxfer serve` processes: each is asked, over its control connection, to try its ports with
those of every other engine (`mesh_agent.py`), all at the same time; their answers are read from their memory. Any other
engine is tried by the ones that act. This process moves nothing and needs no RDMA. Read next: `mesh_text.py`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer.addresses import format_host_port, parse_host_port
from kvxfer.cli.keys import key_settings, remedy_of
from kvxfer.cli.mesh_agent import ANSWER_PREFIX, TRANSPORT, MeshRequest, TargetReport
from kvxfer.cli.mesh_text import draw_mesh
from kvxfer.cli.rail_check import CONTROL, RailReport, Share, find_pool
from kvxfer.cli.table import Progress, Style
from kvxfer.errors import KvxferError, UsageError
from kvxfer.text import clean
from kvxfer.transports.rdma import read_card

if TYPE_CHECKING:
    from kvxfer.engine import TransferEngine
    from kvxfer.segment import Segment

__all__ = ["MeshHost", "find_problems", "measure", "read_hosts", "run"]

LOOK_S = 0.1
"""How often it is looked whether an answer is there."""
GRACE_S = 10.0
"""How long an answer may take beyond the time that its engine was given: the last trials end by their own time-outs."""
ASKED_AT_ONCE = 16
ANSWER_NBYTES_MAX = 64 << 20
NAME_LENGTH_MAX = 80


@dataclass
class MeshHost:
    """One engine of the file, and what is known of it.

    line: where the file names it, from 1. generation: which process it is; "" where it does not answer.
    acts: whether it tries rails itself. error: why nothing is known, with remedy. ports: those it offers, "mlx5_0:1".
    unused: its other ports, and why. targets: what it tried.
    """

    address: str
    line: int = 0
    generation: str = ""
    acts: bool = False
    error: str = ""
    remedy: str = ""
    ports: tuple[str, ...] = ()
    unused: dict[str, str] = field(default_factory=dict)
    targets: tuple[TargetReport, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the host as a JSON object, without its rails."""
        return {
            "host": self.address,
            "acts": self.acts,
            "ports": list(self.ports),
            "unused": self.unused,
            "error": self.error,
            "remedy": self.remedy,
            "failed_targets": {one.target: one.error for one in self.targets if one.error},
        }

    def rails_to(self, target: str) -> tuple[RailReport, ...]:
        """Return what it found of the rails to another engine."""
        return next((one.rails for one in self.targets if one.target == target), ())


def run(arguments: Namespace) -> int:
    """Try all rails; 0 where every rail that should work does."""
    import kvxfer

    logging.getLogger("kvxfer").setLevel(logging.ERROR)  # what the engine would warn of is in the result
    lines = read_lines(arguments.hostfile)
    addresses = list(lines)
    progress = Progress(sys.stderr, "kvxfer mesh", total=3 * len(addresses))
    with kvxfer.TransferEngine(port=0, **key_settings(arguments.key_env)) as engine:
        try:
            hosts = measure(
                engine,
                addresses,
                parallel=arguments.parallel,
                timeout_s=arguments.timeout,
                progress=progress,
                lines=list(lines.values()),
            )
        finally:
            progress.clear()
    problems = find_problems(hosts)
    if arguments.json:
        for host in hosts:
            print(json.dumps(host.to_json()))
        for host in hosts:
            for target in host.targets:
                for rail in target.rails:
                    print(json.dumps({"from": host.address, "to": target.target, **rail.to_json()}))
    else:
        print(draw_mesh(hosts, problems, Style.of(sys.stdout)))
    return 1 if problems else 0


def read_hosts(file: Path) -> list[str]:
    """Return the addresses in a file, in its order; "-" is standard input. Raises UsageError."""
    return list(read_lines(file))


def read_lines(file: Path) -> dict[str, int]:
    """Return the addresses in a file, in its order, each with the number of its line. Raises UsageError."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise UsageError(f"{file} cannot be read: {reason}.", remedy="Name a file with one HOST:PORT a line.") from None
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        try:
            target = parse_host_port(word)
        except KvxferError as error:
            raise UsageError(f"{file}, line {number}: {error.message}", remedy=error.remedy) from None
        address = format_host_port(target.host, target.port)
        if address in found:
            raise UsageError(f"{file}, line {number}: {address} is there twice.", remedy="Name each engine once.")
        found[address] = number
    if len(found) < 2:
        raise UsageError(
            f"{file} names {len(found) or 'no'} engine{'' if len(found) == 1 else 's'}; a mesh has two at least.",
            remedy="Start `kvxfer serve --host 0.0.0.0` on each host and write the addresses that they print into it.",
        )
    return found


def measure(
    engine: TransferEngine,
    addresses: Sequence[str],
    *,
    parallel: int,
    timeout_s: float,
    progress: Progress,
    lines: Sequence[int] = (),
) -> list[MeshHost]:
    """Have every engine that acts try its rails to all others; return what is known of each, in order.

    lines: where the file names them. Raises UsageError, before any is asked, where two names lead to one engine.
    """
    deadline = time.monotonic() + timeout_s
    hosts = [
        MeshHost(address, line) for address, line in zip(addresses, lines or range(1, len(addresses) + 1), strict=True)
    ]

    def reach(host: MeshHost) -> Segment | None:
        progress.step(f"opening {host.address}")
        try:
            segment = engine.open_segment(host.address, transports=CONTROL)
        except KvxferError as error:
            host.error, host.remedy = error.message, remedy_of(error)
            return None
        host.generation = segment.generation
        return segment

    def ask(host: MeshHost, segment: Segment | None) -> tuple[Segment, str] | None:
        if segment is None:
            return None
        progress.step(f"asking {host.address}")
        at = addresses.index(host.address)
        others = (*addresses[at + 1 :], *addresses[:at])  # each begins with another one
        try:
            offer = segment.offer_of("rdma")
            if offer is not None:
                host.ports = tuple(f"{port.device}:{port.port}" for _, port in read_card(offer, host.address))
            if find_pool(segment) is None:
                return None
            request = MeshRequest(os.urandom(8).hex(), others, Share(at, len(addresses)), parallel, timeout_s)
            _send(engine, segment, request)
        except KvxferError as error:
            host.error, host.remedy = error.message, error.remedy
            return None
        host.acts = True
        return segment, request.id

    with ThreadPoolExecutor(ASKED_AT_ONCE) as askers:  # one that is not there costs a time-out
        reached = list(askers.map(reach, hosts))
        _check_distinct(hosts)
        asked = list(askers.map(ask, hosts, reached))
    for host, question in zip(hosts, asked, strict=True):
        if question is None:
            continue
        progress.step(f"waiting for {host.address}")
        try:
            _take_answer(host, _wait_for_answer(engine, *question, deadline + GRACE_S))
        except KvxferError as error:
            host.error, host.remedy = error.message, error.remedy
    return hosts


def _check_distinct(hosts: Sequence[MeshHost]) -> None:
    first: dict[str, MeshHost] = {}
    for host in hosts:
        other = first.setdefault(host.generation, host)
        if host.generation and other is not host:
            raise UsageError(
                f"lines {other.line} and {host.line} name the same engine: {other.address} and {host.address}.",
                remedy="Name each engine once.",
                addresses=(other.address, host.address),
            )


def _send(engine: TransferEngine, segment: Segment, request: MeshRequest) -> None:
    """Hand the request over: a notification goes with a batch, so one byte is read with it."""
    pool = find_pool(segment)
    assert pool is not None
    byte = engine.allocate(1)
    try:
        engine.read(segment, byte.address, pool.address, 1, notify=request.to_payload())
    finally:
        engine.unregister(byte)


def _wait_for_answer(engine: TransferEngine, segment: Segment, request_id: str, deadline: float) -> bytes:
    name = ANSWER_PREFIX + request_id
    while True:
        segment.refresh()
        region = next((one for one in segment.regions if one.name == name), None)
        if region is not None:
            break
        if time.monotonic() >= deadline:
            raise UsageError(
                f"{segment.address} gave no answer in time.",
                remedy="Allow more time (--timeout); or is that `kvxfer serve` of an older version, or busy with "
                "another mesh?",
            )
        time.sleep(LOOK_S)
    if region.nbytes > ANSWER_NBYTES_MAX:
        raise UsageError(f"{segment.address} gave an answer of {region.nbytes} bytes.", remedy="That is no answer.")
    memory = engine.allocate(region.nbytes)
    try:
        engine.read(segment, memory.address, region.address, region.nbytes)
        return memory.array.tobytes()
    finally:
        engine.unregister(memory)


def _take_answer(host: MeshHost, answer: bytes) -> None:
    try:
        body = json.loads(answer)
        host.ports = tuple(clean(str(port), NAME_LENGTH_MAX) for port in body["ports"])
        host.unused = {clean(port, NAME_LENGTH_MAX): clean(str(why), 2000) for port, why in body["unused"].items()}
        host.targets = tuple(TargetReport.from_json(one) for one in body["targets"])
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        host.error = f"{host.address} gave an answer that is none: {exc!r}."
        host.remedy = "Is that `kvxfer serve` of another version?"


def find_problems(hosts: Sequence[MeshHost]) -> list[tuple[str, str]]:
    """Return (what does not work, what to do) for all that should: engines, rails, and pairs of engines without one."""
    found: list[tuple[str, str]] = []
    told: set[str] = set()
    for host in hosts:
        own = _own_problem(host)
        if own is not None:
            told.add(host.address)
            found.append(own)
    answered = [host for host in hosts if not host.error]
    if answered and not any(host.acts for host in hosts):
        names = ", ".join(host.address for host in answered)
        found.append((f"no engine that answered acts: {names}.", "One at least must be a `kvxfer serve`."))
    for host in hosts:
        for target in host.targets:
            if not (target.error and {host.address, target.target} & told):
                found += _target_problems(host.address, target)
    return found


def _own_problem(host: MeshHost) -> tuple[str, str] | None:
    """Return what is wrong with an engine itself, and what to do: that it does not answer, or tries nothing at all."""
    if host.error:
        return f"{host.address}: {host.error}", host.remedy
    errors = {(target.error, target.remedy) for target in host.targets}
    if len(errors) != 1:
        return None
    ((error, remedy),) = errors
    is_of_itself = error == host.unused.get(TRANSPORT) or len(host.targets) > 1
    return (f"{host.address} tries no rail; it says: {error}", remedy) if error and is_of_itself else None


def _target_problems(source: str, target: TargetReport) -> list[tuple[str, str]]:
    where = f"{source} to {target.target}"
    if target.error:
        return [(f"{where}: {target.error}", target.remedy)]
    broken = [rail for rail in target.rails if rail.status in ("failed", "not tried")]
    if broken or any(rail.is_working for rail in target.rails):
        return [(f"{where}, {one.local} to {one.remote}: {one.reason}", one.remedy) for one in broken]
    reasons = "; ".join(_unique(rail.reason for rail in target.rails)) or "one of them offers no port"
    remedy = "Give their ports addresses in common subnets, or routes; `kvxfer devices` shows them."
    return [(f"{where}: not one rail: {reasons}", remedy)]


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
