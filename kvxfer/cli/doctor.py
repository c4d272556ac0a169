"""`kvxfer doctor`: what this machine lets kvxfer do, what keeps it from doing more, and what to do about that.

The checks themselves are in `checks_system.py`, `checks_network.py`, `checks_rdma.py` and `checks_peer.py`; this file
puts them in order, runs them and shows the answers. The remedies are those of the exceptions: most come from the same
function.
"""

from __future__ import annotations

import json
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial

from kvxfer import __version__
from kvxfer.cli.check import Check, CheckFunction, Machine
from kvxfer.cli.checks_network import NETWORK_CHECKS, transport_checks
from kvxfer.cli.checks_peer import peer_checks
from kvxfer.cli.checks_rdma import rdma_checks
from kvxfer.cli.checks_system import SYSTEM_CHECKS
from kvxfer.cli.environment import load_config
from kvxfer.cli.table import Style, wrap
from kvxfer.errors import KvxferError

__all__ = ["run", "run_checks"]

Section = tuple[str, Callable[[Machine], Iterator[Check]]]


def run(arguments: Namespace) -> int:
    """Run every check; 1 where one failed."""
    logging.getLogger("kvxfer").setLevel(logging.ERROR)  # what the engine would warn of is a check of its own
    config, problem = load_config()
    machine = Machine(config)
    checks: list[Check] = []
    style = Style.of(sys.stdout)
    if not arguments.json:
        print(style.paint(f"kvxfer {__version__} doctor", "bold"))
    sections = list(SECTIONS)
    if arguments.peer is not None:
        sections.append(("peer", partial(peer_checks, peer=arguments.peer, key_env=arguments.key_env)))
    for title, section in sections:
        if not arguments.json:
            print(f"\n{style.paint(title, 'bold')}")
        found = section(machine)
        if title == "system" and problem is not None:
            found = _with_problem(found, problem)
        for check in found:
            checks.append(check)
            print(json.dumps(check.to_json()) if arguments.json else _to_text(check, style), flush=True)
    if not arguments.json:
        print(f"\n{_summary(checks, style)}")
    return 1 if any(check.status == "fail" for check in checks) else 0


def run_checks(machine: Machine, functions: tuple[CheckFunction, ...]) -> Iterator[Check]:
    """Yield the answers; a check that cannot look is a warning, not the end of the others."""
    for function in functions:
        try:
            yield function(machine)
        except (OSError, ValueError) as exc:
            name = function.__name__.removeprefix("check_").replace("_", " ")
            yield Check(name, "warn", f"could not be found out: {exc}")


def _transport_section(machine: Machine) -> Iterator[Check]:
    yield from transport_checks(machine)


def _rdma_section(machine: Machine) -> Iterator[Check]:
    try:
        yield from rdma_checks(machine)
    except (OSError, ValueError) as exc:
        yield Check("rdma", "warn", f"could not be found out: {exc}", "The kernel's log may say more: dmesg.")


SECTIONS: tuple[Section, ...] = (
    ("system", partial(run_checks, functions=SYSTEM_CHECKS)),
    ("network", partial(run_checks, functions=NETWORK_CHECKS)),
    ("transports", _transport_section),
    ("rdma", _rdma_section),
)


def _with_problem(found: Iterator[Check], problem: KvxferError) -> Iterator[Check]:
    """Put what is wrong with the settings first: the other answers are given for the defaults."""
    yield Check("settings", "fail", problem.message, problem.remedy)
    yield from found


def _to_text(check: Check, style: Style) -> str:
    label = f"{check.name:<{NAME_WIDTH - 1}} "
    indent = " " * (NAME_WIDTH + 4)
    value = "\n".join(wrap(line, style, indent) for line in check.value.splitlines())[len(indent) :]
    text = f"  {style.mark(check.status)} {label}{value}"
    if not check.remedy:
        return text
    colour = {"ok": "dim", "off": "dim", "warn": "yellow", "fail": "red"}[check.status]
    return text + "\n" + style.paint(wrap(check.remedy, style, indent), colour)


NAME_WIDTH = 18


def _summary(checks: list[Check], style: Style) -> str:
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "off", "warn", "fail")}
    parts = [style.paint(f"{counts['ok']} ok", "green")]
    if counts["off"]:
        parts.append(style.paint(f"{counts['off']} not used", "dim"))
    if counts["warn"]:
        parts.append(style.paint(f"{counts['warn']} to look at", "yellow"))
    parts.append(style.paint(f"{counts['fail']} failed", "red", "bold") if counts["fail"] else "0 failed")
    return ", ".join(parts)
