"""Addresses are taken apart in one place: `split(":")` cuts an IPv6 address to pieces."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "kvxfer"


def find_splits(source: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("split", "rsplit")
        and any(isinstance(given, ast.Constant) and given.value in (":", b":") for given in node.args)
    ]


def test_nothing_splits_at_a_colon() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: use kvxfer.addresses.parse_host_port"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in find_splits(path.read_text())
    ]

    assert not found, "\n".join(found)


def test_planted_fault_is_found() -> None:
    assert find_splits("host = text.split(':')[0]\nport = text.rsplit(':', 1)[1]\nfine = text.split()") == [1, 2]
