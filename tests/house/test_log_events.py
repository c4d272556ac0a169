"""Every log event is listed with its meaning, and every listed one can happen."""

from __future__ import annotations

import ast
from pathlib import Path

from kvxfer.log import EVENTS

PACKAGE = Path(__file__).parents[2] / "kvxfer"
LEVELS = ("debug", "info", "warning", "error")
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py")) if path.name != "log.py"}


def test_logged_events_are_listed() -> None:
    unknown = [
        f"{path.relative_to(PACKAGE.parent)}:{node.lineno}: {name!r} is not in kvxfer.log.EVENTS"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS
        if ast.unparse(node.func.value).rpartition(".")[2].lstrip("_") in ("log", "logger") and node.args
        for name in [node.args[0].value if isinstance(node.args[0], ast.Constant) else None]
        if name is not None and name not in EVENTS
    ]

    assert not unknown, "\n".join(unknown)


def test_listed_events_are_logged_somewhere() -> None:
    words = {node.value for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Constant)}

    assert not sorted(set(EVENTS) - words)
