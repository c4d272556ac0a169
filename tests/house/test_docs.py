"""What the documents say holds: their examples run, their settings exist, their links lead somewhere, the ladder is
the one in the code. Run as a program this file writes the ladder into docs/rdma.md."""

from __future__ import annotations

import code
import re
import sys
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import pytest

from kvxfer.config import EngineConfig
from kvxfer.transports.rdma_ladder import LADDER, QueuePairAttributes
from tests.support.doc_examples import ROOT, find_blocks, run_blocks
from tests.support.fake_verbs import FakeFabric, FakeLibrary, connectx

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
RDMA = ROOT / "docs" / "rdma.md"
BEGIN, END = "<!-- the ladder, written by tests/house/test_docs.py -->\n", "<!-- end of the ladder -->\n"
STARTS = QueuePairAttributes(path_mtu=4096, read_depth=16, send_depth=256)
SETTING = re.compile(r"`(rdma_[a-z_]+|gid_[a-z]+|pkey_index|path_mtu_nbytes_max)`")
VARIABLE = re.compile(r"KVXFER_[A-Z_]+")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
OTHER_VARIABLES = {
    "KVXFER_ALLOW_FALLBACK",
    "KVXFER_ALLOW_PTRACE",
    "KVXFER_LIBIBVERBS",
    "KVXFER_TRACEBACK",
    "KVXFER_UML_KERNEL",
}
NO_SETTINGS = {"rdma_rxe", "rdma_cm"}


def render_ladder() -> str:
    """Return the table of the ladder as Markdown."""
    lines = ["| refused in | lowered | to |\n", "|---|---|---|\n"]
    for step, ways in LADDER.items():
        for lower in ways:
            values, attributes, changed = [], STARTS, ""
            while (lowered := lower(attributes)) is not None:
                before, after = attributes.to_json(), lowered.to_json()
                (changed,) = [name for name in after if before[name] != after[name]]
                values.append(str(after[changed]))
                attributes = lowered
            start = STARTS.to_json()[changed]
            begun = "what the link needs" if start is None else str(start)
            lines.append(f"| {step} | `{changed}` | {' → '.join([begun, *values])} |\n")
    return "".join(lines)


def test_ladder_in_the_document_is_the_one_in_the_code() -> None:
    text = RDMA.read_text()

    assert text.partition(BEGIN)[2].partition(END)[0] == render_ladder(), f"run: python {Path(__file__).name}"


def test_examples_of_the_verbs_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    library = FakeLibrary(FakeFabric(), connectx("mlx5_0", "192.0.2.1"))

    with mock.patch("kvxfer.verbs.device.load_library", return_value=library):
        run_blocks(ROOT / "docs" / "verbs.md")

    out = capsys.readouterr().out
    assert "mlx5_0" in out
    assert "sgid_index 200 is an empty row" in out
    assert not library.leaks


def test_examples_of_the_mooncake_page_run() -> None:
    names = run_blocks(ROOT / "docs" / "mooncake.md")

    assert names["cache"].sum() == 7 * 3 * 65536


class Prompt(code.InteractiveConsole):
    """A Python prompt that raises what it would only print."""

    def runcode(self, code: CodeType) -> None:
        exec(code, self.locals)  # type: ignore[arg-type, unused-ignore]

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        error = sys.exc_info()[1]
        assert error is not None
        raise error


def test_examples_of_the_verbs_page_can_be_pasted_into_a_prompt() -> None:
    prompt = Prompt()

    with mock.patch("kvxfer.verbs.device.load_library", return_value=FakeLibrary(FakeFabric(), connectx("mlx5_0"))):
        for start, block in find_blocks(ROOT / "docs" / "verbs.md"):
            for line, text in enumerate(block.splitlines(), start + 1):
                try:
                    wants_more = prompt.push(text)
                except BaseException as error:
                    raise AssertionError(f"docs/verbs.md:{line}: {error}") from error
            assert not wants_more, f"docs/verbs.md:{line}: a compound statement needs a blank line after it"


def test_a_prompt_wants_a_blank_line_after_a_compound_statement() -> None:
    prompt = Prompt()

    prompt.push("for _ in range(2):")
    prompt.push("    pass")
    with pytest.raises(SyntaxError):
        prompt.push("assert True")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_of_a_page_compiles(page: Path) -> None:
    for line, block in find_blocks(page):
        compile("\n" * line + block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_and_variables_that_a_page_names_exist(page: Path) -> None:
    rows = EngineConfig.settings()
    text = page.read_text()

    assert set(SETTING.findall(text)) - NO_SETTINGS <= {row.name for row in rows} | {"gid_tbl_len"}
    assert set(VARIABLE.findall(text)) <= {row.variable for row in rows} | OTHER_VARIABLES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]

    assert not missing


if __name__ == "__main__":
    head, _, rest = RDMA.read_text().partition(BEGIN)
    RDMA.write_text(head + BEGIN + render_ladder() + END + rest.partition(END)[2])
