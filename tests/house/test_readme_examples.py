"""Every Python block of the README runs, each in a process of its own.

A block after a line `<!-- no-run -->` is not run; it is still compiled.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BLOCK = re.compile(r"(?P<marker><!-- no-run -->\s*\n)?^```python[^\n]*\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """One block of code and the line it starts at."""

    line: int
    code: str
    is_run: bool


def find_examples(text: str) -> list[Example]:
    return [
        Example(text.count("\n", 0, match.start("code")) + 1, match["code"], match["marker"] is None)
        for match in BLOCK.finditer(text)
    ]


EXAMPLES = find_examples(README.read_text()) if README.exists() else []


@pytest.mark.skipif(not README.exists(), reason="there is no README.md yet")
def test_readme_has_an_example_that_runs() -> None:
    assert any(example.is_run for example in EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"line {example.line}")
def test_example_runs(example: Example, tmp_path: Path) -> None:
    file = tmp_path / f"readme_line_{example.line}.py"
    file.write_text(example.code)
    compile(example.code, str(file), "exec")
    if not example.is_run:
        return

    done = subprocess.run(
        run_command(file),
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )

    assert done.returncode == 0, f"README.md:{example.line}\n{done.stdout}{done.stderr}"
    assert "Exception ignored" not in done.stderr, done.stderr


def run_command(file: Path) -> list[str]:
    return [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", str(file)]


@pytest.mark.slow
def test_example_of_two_processes_runs(tmp_path: Path) -> None:
    files = {}
    for example in EXAMPLES:
        if (match := re.match(r"# (\w+\.py)\n", example.code)) is not None:
            files[match[1]] = tmp_path / match[1]
            files[match[1]].write_text(example.code)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    with subprocess.Popen(run_command(files["decode.py"]), env=environment, text=True, **pipes) as decode:
        try:
            assert decode.stdout is not None
            address = decode.stdout.readline().strip()
            command = [*run_command(files["prefill.py"]), address]
            prefill = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=50)
            out, err = decode.communicate(timeout=50)
        finally:
            decode.kill()

    assert (prefill.returncode, prefill.stdout, prefill.stderr) == (0, "", "")
    assert (decode.returncode, err) == (0, "")
    assert "sent b'request-17'; the first byte is 7" in out


def test_blocks_are_found_with_their_line_and_marker() -> None:
    text = "# x\n```python\na = 1\n```\n\n<!-- no-run -->\n```python\nb = 2\n```\n```sh\nls\n```\n"

    assert find_examples(text) == [Example(3, "a = 1\n", True), Example(8, "b = 2\n", False)]
