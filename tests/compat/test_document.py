"""docs/mooncake.md says what the code does: its table of variables, its codes. Run as a program this file writes the
table."""

from __future__ import annotations

import re
from pathlib import Path

from kvxfer.compat.mooncake.codes import Code
from kvxfer.compat.mooncake.environment import IGNORED, VARIABLES
from tests.support.doc_examples import ROOT, run_blocks

DOCUMENT = ROOT / "docs" / "mooncake.md"
BEGIN, END = "<!-- variables, written by tests/compat/test_document.py -->\n", "<!-- end of variables -->\n"


def render() -> str:
    lines = ["| honoured | as |\n", "|---|---|\n"]
    lines += [f"| `{name}` | {meaning} |\n" for name, meaning in VARIABLES.items()]
    lines += ["\n", "| ignored | because |\n", "|---|---|\n"]
    return "".join([*lines, *(f"| `{name}` | {why} |\n" for name, why in IGNORED.items())])


def test_variables_in_the_document_are_those_of_the_code() -> None:
    assert DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0] == render(), f"run: python {Path(__file__).name}"


def test_codes_in_the_document_are_those_of_the_code() -> None:
    told = {int(found) for found in re.findall(r"^\| (-\d+) \|", DOCUMENT.read_text(), re.MULTILINE)}

    assert told == {int(code) for code in Code if code}


def test_example_of_the_document_runs() -> None:
    run_blocks(DOCUMENT)


if __name__ == "__main__":
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + render() + END + rest.partition(END)[2])
