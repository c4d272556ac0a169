"""Run the Python blocks of a document one after the other, as a reader would at one prompt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["find_blocks", "run_blocks"]

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python[^\n]*\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def find_blocks(document: Path) -> list[tuple[int, str]]:
    """Return (line, code) of each block."""
    text = document.read_text()
    return [(text.count("\n", 0, match.start("code")), match["code"]) for match in BLOCK.finditer(text)]


def run_blocks(document: Path) -> dict[str, Any]:
    """Run all blocks in one namespace and return it; a failure shows the line of the document."""
    names: dict[str, Any] = {"__name__": "__document__"}
    for line, code in find_blocks(document):
        exec(compile("\n" * line + code, str(document), "exec"), names)
    return names
