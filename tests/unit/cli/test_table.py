"""What is drawn lines up, and shows no more than the stream can."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cli.table import Progress, Style, draw_bar, draw_table, format_size, wrap

PLAIN = Style()
RICH = Style(colour=True, unicode=True)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def __init__(self, encoding: str = "utf-8", *, is_terminal: bool = True) -> None:
        super().__init__()
        self._encoding = encoding
        self._is_terminal = is_terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._is_terminal


def bare(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_columns_line_up_whatever_is_coloured() -> None:
    rows = [["shm", RICH.paint("6.30", "cyan"), "x"], ["a long name", "10.1", RICH.paint("yy", "red", "bold")]]

    text = bare(draw_table(["transport", "GB/s", "end"], rows, ["<", ">", "<"], RICH))

    assert text.splitlines() == [
        "transport    GB/s  end",
        "───────────  ────  ───",
        "shm          6.30  x",
        "a long name  10.1  yy",
    ]


def test_row_of_one_cell_is_a_note_and_does_not_widen_columns() -> None:
    text = draw_table(["a", "b"], [["1", "2"], ["a very long note"], ["3", "4"]], ["<", "<"], PLAIN)

    assert text.splitlines() == ["a  b", "-  -", "1  2", "a very long note", "3  4"]


def test_table_without_rows_has_its_header() -> None:
    assert draw_table(["a"], [], ["<"], PLAIN).splitlines() == ["a", "-"]


@given(st.floats(0, 100), st.integers(1, 60), st.booleans())
def test_bar_never_leaves_its_width_and_shows_all_that_is_not_zero(value: float, width: int, unicode: bool) -> None:
    bar = draw_bar(value, 100.0, width, Style(unicode=unicode))

    assert len(bar) <= width
    assert bool(bar) == (value > 0)


def test_full_bar_fills_the_width() -> None:
    assert draw_bar(5.0, 5.0, 7, Style(unicode=True)) == "█" * 7
    assert draw_bar(5.0, 5.0, 7, PLAIN) == "#" * 7


def test_bar_of_nothing_is_empty() -> None:
    assert draw_bar(0.0, 0.0, 7, PLAIN) == ""


@pytest.mark.parametrize(
    ("environ", "terminal", "colour"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
    ],
)
def test_colour_only_on_a_terminal_that_wants_it(environ: dict[str, str], terminal: bool, colour: bool) -> None:
    assert Style.of(Terminal(is_terminal=terminal), environ).colour is colour


@pytest.mark.parametrize(
    ("environ", "encoding", "unicode"),
    [
        ({}, "utf-8", True),
        ({"LANG": "en_US.UTF-8"}, "UTF-8", True),
        ({"LANG": "C.UTF-8"}, "utf-8", True),
        ({"LANG": "C"}, "utf-8", False),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "POSIX"}, "utf-8", False),
        ({"LANG": "C", "LC_ALL": "en_US.UTF-8"}, "utf-8", True),
        ({"LANG": "en_US.UTF-8"}, "iso-8859-1", False),
    ],
)
def test_blocks_only_where_locale_and_stream_know_them(environ: dict[str, str], encoding: str, unicode: bool) -> None:
    assert Style.of(Terminal(encoding), environ).unicode is unicode


def test_plain_style_adds_no_escape() -> None:
    assert PLAIN.paint("x", "red", "bold") == "x"
    assert PLAIN.mark("ok") == "+"
    assert PLAIN.mark("fail") == "x"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (65536, "64 KiB"),
        (3 << 19, "1.5 MiB"),
        (1 << 40, "1 TiB"),
    ],
)
def test_sizes_are_written_in_binary_units(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


HEADER = ["port", "GB/s", "GIDs, or why not"]
ROWS = [["mlx5_0:1", "12.3", "10.10.0.1 (RoCE v2) to 10.10.0.2"], ["mlx5_1:1", "-", "no path"], ["    see below"]]


def test_table_that_is_wider_than_the_terminal_is_a_list_that_breaks_no_figure() -> None:
    shown = draw_table(HEADER, ROWS, ["<", ">", "<"], Style(columns=40))

    assert shown.splitlines() == [
        "port              mlx5_0:1",
        "GB/s              12.3",
        "GIDs, or why not  10.10.0.1 (RoCE v2) to",
        "                  10.10.0.2",
        "",
        "port              mlx5_1:1",
        "GB/s              -",
        "GIDs, or why not  no path",
        "                  see below",
    ]


@pytest.mark.parametrize("columns", [None, 48])
def test_table_that_the_terminal_has_room_for_is_one_and_in_a_file_always(columns: int | None) -> None:
    shown = draw_table(HEADER, ROWS, ["<", ">", "<"], Style(columns=columns)).splitlines()

    assert shown[0] == "port      GB/s  GIDs, or why not"
    assert len(shown[2]) == 48
    assert len(shown) == 5


def test_only_a_terminal_has_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")

    assert (Style.of(Terminal()).columns, Style.of(Terminal()).width) == (60, 60)
    assert (Style.of(Terminal(is_terminal=False)).columns, Style.of(Terminal(is_terminal=False)).width) == (None, 110)


def test_wrap_keeps_words_whole_and_indents() -> None:
    lines = wrap("word " * 40, Style(width=40), "    ").splitlines()

    assert all(line.startswith("    word") and len(line) <= 40 for line in lines)


def test_progress_is_silent_before_its_time_and_off_a_terminal() -> None:
    early, piped = Terminal(), Terminal(is_terminal=False)
    piped_progress = Progress(piped, "bench", 2)
    piped_progress.DELAY_S = 0.0

    Progress(early, "bench", 2).step("one")
    piped_progress.step("one")
    piped_progress.clear()

    assert early.getvalue() == piped.getvalue() == ""


def test_progress_is_one_line_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "DELAY_S", 0.0)
    terminal = Terminal()
    progress = Progress(terminal, "bench", 2)

    progress.step("one")
    progress.step("two")
    progress.clear()

    assert terminal.getvalue() == "\r\x1b[Kbench: 1 of 2, one\r\x1b[Kbench: 2 of 2, two\r\x1b[K"
