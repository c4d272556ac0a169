"""What demo and bench make of their measurements: JSON fields, tables, exit status."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from importlib import util
from pathlib import Path

import pytest

from kvxfer.cli import demo
from kvxfer.cli.demo import REGISTERED, Outcome
from kvxfer.cli.drawing import BenchRow, check_plot_target, draw_rows
from kvxfer.cli.table import Style
from kvxfer.cli.workload import Plan
from kvxfer.errors import KvxferError, TransferError, TransportUnavailableError, UnsupportedError, UsageError
from kvxfer.types import Probe

PLAN = Plan(1 << 20, 4096, 100)
NO_RDMA = Probe("rdma", usable=False, reason="no RDMA device", remedy="Nothing to do.")


def measured(label: str, *, wrong: int = 0) -> Outcome:
    outcome = Outcome(label, PLAN, wrong=wrong, latencies_s=[3e-6, 2e-6, 9e-6])
    outcome.seconds = {"copy": [100e-6] * 3, "write": [200e-6, 200e-6, 9.0], "read": [400e-6] * 3}
    return outcome


def failed(label: str, error: KvxferError) -> Outcome:
    return Outcome(label, PLAN, error=error)


def run_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *outcomes: Outcome, as_json: bool = True
) -> tuple[int, str]:
    everything = {outcome.label: outcome for outcome in (*outcomes, Outcome("rdma", PLAN, probe=NO_RDMA))}
    monkeypatch.setattr(demo, "measure", lambda *_: everything)
    arguments = Namespace(
        pool_size=None, block_size=4096, blocks=100, transports=("shm", "rdma", "tcp"), rounds=3, json=as_json
    )
    return demo.run(arguments), capsys.readouterr().out


def test_demo_gives_one_object_per_transport_with_medians_and_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = run_with(monkeypatch, capsys, measured("shm"), measured(REGISTERED), measured("tcp"))

    shm, rdma, tcp = (json.loads(line) for line in out.splitlines())
    assert status == 0
    assert [item["transport"] for item in (shm, rdma, tcp)] == ["shm", "rdma", "tcp"]
    assert shm["write_gbps"] == 2.048
    assert (shm["memcpy_ratio_write"], shm["memcpy_ratio_read"]) == (0.5, 0.25)
    assert shm["latency_4k_p50_us"] == 3.0
    assert shm["verified"] is True
    assert shm["registered_read_gbps"] == 1.024
    assert "registered_read_gbps" not in tcp
    assert rdma == {"transport": "rdma", "usable": False, "reason": "no RDMA device", "remedy": "Nothing to do."}


def test_demo_with_one_wrong_block_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run_with(monkeypatch, capsys, measured("shm"), measured(REGISTERED), measured("tcp", wrong=1))

    assert status == 1
    assert json.loads(out.splitlines()[2])["verified"] is False


def test_demo_with_a_failed_transport_fails_and_tells_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = TransferError("it broke.", remedy="Mend it.")

    status, out = run_with(monkeypatch, capsys, measured("shm"), measured(REGISTERED), failed("tcp", error))

    tcp = json.loads(out.splitlines()[2])
    assert status == 1
    assert (tcp["verified"], tcp["reason"], tcp["remedy"]) == (False, "it broke.", "Mend it.")


def test_demo_where_only_allocated_memory_can_be_shared_is_fine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = TransportUnavailableError("process_vm_readv is refused.", remedy="Use allocate().")

    status, out = run_with(monkeypatch, capsys, measured("shm"), failed(REGISTERED, error), measured("tcp"))

    assert status == 0
    assert json.loads(out.splitlines()[0])["registered_remedy"] == "Use allocate()."


def test_demo_where_nothing_ran_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    off = [Outcome(label, PLAN, probe=Probe("x", usable=False, reason="no")) for label in ("shm", REGISTERED, "tcp")]

    status, _ = run_with(monkeypatch, capsys, *off)

    assert status == 1


def test_demo_table_names_rows_figures_and_remedies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = TransferError("it broke.", remedy="Mend it.")

    _, out = run_with(monkeypatch, capsys, measured("shm"), measured(REGISTERED), failed("tcp", error), as_json=False)

    for text in ("shm (registered memory)", "0.50x", "3.0 us", "every byte", "it broke.", "Mend it.", "Nothing to do."):
        assert text in out


def test_demo_table_fits_a_terminal_of_80_columns() -> None:
    outcomes = {label: measured(label) for label in ("shm", REGISTERED, "tcp")} | {
        "rdma": Outcome("rdma", PLAN, probe=NO_RDMA)
    }

    wide, narrow = (demo.to_text(PLAN, outcomes, Style(unicode=True, width=width)) for width in (104, 80))

    assert max(len(line) for line in wide.splitlines()) <= 104
    assert max(len(line) for line in narrow.splitlines()) <= 80


def bench_row(block: int = 4096, wrong: int = 0, gbps: float = 2.0) -> BenchRow:
    seconds = block * 16 / gbps / 1e9
    return BenchRow("tcp", "write", block, 16, 3, seconds, seconds / 2, wrong, "read back", "192.0.2.7:7777")


def test_bench_row_in_json_has_rate_ratio_and_who_verified() -> None:
    fields = bench_row().to_json()

    assert (fields["gbps"], fields["memcpy_gbps"], fields["memcpy_ratio"]) == (2.0, 4.0, 0.5)
    assert (fields["op"], fields["blocks"], fields["block_nbytes"], fields["nbytes"]) == ("write", 16, 4096, 65536)
    assert (fields["verified"], fields["verified_by"], fields["peer"]) == (True, "read back", "192.0.2.7:7777")


@pytest.mark.parametrize("unicode", [True, False])
def test_bench_bars_end_at_the_width_and_go_on_to_memcpy(unicode: bool) -> None:
    style = Style(unicode=unicode, width=90)

    text = draw_rows([bench_row(), bench_row(8192, gbps=1.0)], style, "192.0.2.7:7777")

    full, rest = ("█", "░") if unicode else ("#", ".")
    bars = [line[line.index(full) :] for line in text.splitlines() if full in line and "0x" in line.split(full)[0]]
    assert len(bars) == 2
    assert all(len(line) <= style.width for line in text.splitlines())
    assert bars[0].count(full) == pytest.approx(2 * bars[1].count(full), abs=1)
    assert bars[0].count(rest) == pytest.approx(bars[0].count(full), abs=1)


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_no_line_of_demo_and_bench_is_longer_than_the_terminal(columns: int) -> None:
    style = Style(unicode=True, width=columns, columns=columns)
    outcomes = {label: measured(label) for label in ("shm", REGISTERED, "tcp")}

    texts = demo.to_text(PLAN, outcomes, style), draw_rows([bench_row(), bench_row(8192)], style, "192.0.2.7:7777")

    assert [line for text in texts for line in text.splitlines()[3:] if len(line) > columns] == []
    assert ("█" in texts[1], "Bars are" in texts[1]) == (columns == 80, columns == 80)


def test_demo_and_bench_say_how_their_times_of_one_block_differ() -> None:
    outcomes = {label: measured(label) for label in ("shm", REGISTERED, "tcp")}
    single = replace(bench_row(), block_count=1)

    shown = " ".join(demo.to_text(PLAN, outcomes, Style()).split())

    assert "as plain ints: 1,000 of them in a row" in shown
    assert "can be above 1" in shown
    assert "`kvxfer demo`" in draw_rows([single], Style(), "a").replace("\n", " ")
    assert "`kvxfer demo`" not in draw_rows([bench_row()], Style(), "a").replace("\n", " ")


def test_bench_tells_wrong_blocks() -> None:
    text = draw_rows([bench_row(wrong=3)], Style(), "192.0.2.7:7777")

    assert "3 blocks were wrong" in text


def test_bench_tells_why_a_transport_was_passed_over() -> None:
    row = replace(bench_row(), passed_over={"shm": "another host"})

    assert "shm was passed over: another host" in draw_rows([row], Style(), row.peer)
    assert row.to_json()["passed_over"] == {"shm": "another host"}


def test_plot_without_matplotlib_says_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda _: None)

    with pytest.raises(UnsupportedError, match="python -m pip install matplotlib"):
        check_plot_target(tmp_path / "x.png")


@pytest.mark.parametrize("name", ["x.jpg", "x", "no/such/folder/x.png"])
def test_plot_that_cannot_be_written_is_refused_before_the_measurement(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--plot"):
        check_plot_target(tmp_path / name)


def test_plot_that_is_a_folder_is_refused_before_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()

    with pytest.raises(UsageError, match="cannot be written"):
        check_plot_target(tmp_path / "x.png")
