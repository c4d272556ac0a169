"""The examples of docs/verbs.md on a real device."""

from __future__ import annotations

import pytest

from tests.support.doc_examples import ROOT, run_blocks


@pytest.mark.rdma
@pytest.mark.topology("wire", "simple")
def test_examples_of_the_verbs_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(ROOT / "docs" / "verbs.md")

    assert "rxa0" in capsys.readouterr().out
