"""Arguments as pybind11 takes them, and how long that takes."""

from __future__ import annotations

import time
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import UsageError
from kvxfer.compat.mooncake.arguments import Rows, take_column, take_int, take_text

COUNT = 100_000


@pytest.mark.parametrize(
    "value",
    [
        [1, 2**62],
        (1, 2**62),
        range(3),
        array("Q", [1, 2]),
        np.array([1, 2], np.uint64),
        [np.uint64(1), np.int32(2)],
        [],
    ],
    ids=lambda value: type(value).__name__,
)
def test_sequences_of_ints_become_columns(value: Any) -> None:
    assert take_column("call", "buffers", value).tolist() == [int(one) for one in value]


@pytest.mark.parametrize(
    "value",
    [5, None, "12", b"12", {1}, {1: 2}, [1.0], [None], ["1"], [-1], [2**64], np.zeros(2), np.zeros((1, 1), int),
     np.array([-1]), (one for one in [1])],
    ids=repr,
)  # fmt: skip
def test_what_is_no_list_of_unsigned_ints_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"call.*buffers"):
        take_column("call", "buffers", value)


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_no_number_changes(numbers: list[int]) -> None:
    assert take_column("call", "buffers", numbers).tolist() == numbers


@given(st.lists(st.tuples(*[st.integers(0, 2**62)] * 2, st.integers(0, 3)), max_size=20))
def test_rows_without_bytes_are_left_out(rows: list[tuple[int, int, int]]) -> None:
    columns = [np.array([row[at] for row in rows], np.int64) for at in range(3)]

    made = Rows.of_columns(*columns)

    kept = [row for row in rows if row[2]]
    assert made.count == len(kept)
    assert list(zip(*(one.tolist() for one in made.columns()), strict=True)) == kept
    assert made.nbytes_total == sum(row[2] for row in rows)


def test_columns_of_several_lengths_are_refused() -> None:
    with pytest.raises(UsageError, match="differ in length"):
        Rows.of_columns(np.zeros(2, int), np.zeros(1, int), np.zeros(2, int))


@pytest.mark.parametrize("lengths", [[2**62] * 2, [2**62] * 4 + [4096], [2**63 - 1] * 2])
def test_lengths_whose_sum_would_wrap_are_refused(lengths: list[int]) -> None:
    column = np.array(lengths, np.int64)

    with pytest.raises(UsageError, match="no process can have"):
        Rows.of_columns(column, column, column)


def test_number_that_is_no_address_is_named() -> None:
    with pytest.raises(UsageError, match="peer_buffer_addresses has 0x8000000000000000"):
        Rows.of_columns(np.array([1]), np.array([2**63], np.uint64), np.array([1]))


@pytest.mark.parametrize("value", [5, np.uint64(5), True])
def test_ints(value: Any) -> None:
    assert take_int("call", "length", value) == int(value)


@pytest.mark.parametrize("value", [1.0, "1", None, -1, 2**64])
def test_no_ints(value: Any) -> None:
    with pytest.raises(TypeError, match="length"):
        take_int("call", "length", value)


def test_texts() -> None:
    assert take_text("call", "name", "ä") == take_text("call", "name", "ä".encode()) == "ä"
    with pytest.raises(TypeError, match="name"):
        take_text("call", "name", None)
    with pytest.raises(RuntimeError, match="name"):
        take_text("call", "name", None, none_is_null=True)


@pytest.mark.slow
def test_many_rows_are_converted_by_numpy_and_not_one_by_one() -> None:
    base = 1 << 46
    lists = [[base + 4096 * row for row in range(COUNT)], [base + 8192 * row for row in range(COUNT)], [4096] * COUNT]
    ours, numpys = [], []
    for _ in range(30):
        begun = time.perf_counter()
        rows = Rows.of_columns(*(take_column("call", "list", one) for one in lists))
        converted = time.perf_counter()
        columns = [np.array(one, np.uint64) for one in lists]
        ours.append(converted - begun)
        numpys.append(time.perf_counter() - converted)

    assert rows.count == len(columns[0]) == COUNT
    assert min(ours) < 3 * min(numpys)  # 1.6 times; with a call for each row 5 times
