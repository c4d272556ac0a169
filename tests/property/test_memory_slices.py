"""as_columns, locate, coalesce and cut_slices against models that look at one row or one byte at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.errors import NotRegisteredError, UsageError
from kvxfer.memory import (
    CHUNK_DTYPE,
    as_columns,
    as_rows,
    bounds,
    coalesce,
    cut_slices,
    locate,
    locate_one,
    row_numbers,
)
from kvxfer.types import ADDRESS_MAX

Rows = list[tuple[int, int]]


def column(values: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(list(values), np.int64)


@st.composite
def tables(draw: st.DrawFn, *, min_size: int = 0) -> Rows:
    """Draw (start, nbytes) ranges without overlap, ascending; about half touch the one before."""
    ranges, position = [], draw(st.integers(0, 8))
    for gap, nbytes in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=min_size, max_size=6)):
        position += max(0, gap - 1)
        ranges.append((position, nbytes))
        position += nbytes
    return ranges


# Addresses near both ends of the number range and near each other.
numbers = st.integers(-2, 40) | st.integers(2**63 - 20, 2**63 + 20) | st.integers(2**64 - 20, 2**64 + 4)
makers: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    lambda v: np.array(v, np.uint64),
    lambda v: np.array(v, np.int64),
]


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=4), st.integers(0, 3))
def test_columns_are_accepted_exactly_when_every_row_is_a_range(rows: list[tuple[int, int, int]], maker: int) -> None:
    try:
        arguments = [makers[maker](list(values)) for values in zip(*rows, strict=True)]
    except OverflowError:  # numpy cannot hold the numbers in the first place
        return
    is_valid = all(n >= 1 and 0 <= a <= ADDRESS_MAX - n and 0 <= b <= ADDRESS_MAX - n for a, b, n in rows)

    if is_valid:
        assert [c.tolist() for c in as_columns(*arguments)] == [list(values) for values in zip(*rows, strict=True)]
        if len(rows) == 1:
            assert [c.tolist() for c in as_columns(*rows[0])] == [[value] for value in rows[0]]
    else:
        with pytest.raises(UsageError, match="row"):
            as_columns(*arguments)
        if len(rows) == 1:
            with pytest.raises(UsageError, match="row 0"):
                as_columns(*rows[0])


@given(tables(), st.data())
def test_locate_agrees_with_a_look_at_every_byte(table: Rows, data: st.DataObject) -> None:
    owner = {byte: i for i, (start, nbytes) in enumerate(table) for byte in range(start, start + nbytes)}
    anywhere = st.tuples(st.integers(-4, 90), st.integers(-1, 20)) | st.tuples(
        st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)
    )
    inside = [(start + skip, n) for start, count in table for skip in (0, count // 2) for n in (1, count - skip)]
    rows = data.draw(st.lists(st.sampled_from(inside) if inside else anywhere, min_size=1, max_size=8))
    if data.draw(st.booleans()):
        rows.insert(data.draw(st.integers(0, len(rows))), data.draw(anywhere))
    expected = [
        next(iter(owners)) if 1 <= n < 100 and len(owners := {owner.get(a + k) for k in range(n)}) == 1 else None
        for a, n in rows
    ]
    bad = tuple(row for row, region in enumerate(expected) if region is None)
    starts, ends = column(s for s, _ in table), column(s + n for s, n in table)
    addresses, nbytes = column(a for a, _ in rows), column(n for _, n in rows)

    if not bad:
        assert locate(addresses, nbytes, starts, ends).tolist() == expected
    else:
        with pytest.raises(NotRegisteredError, match=f"^row {bad[0]}: local") as caught:
            locate(addresses, nbytes, starts, ends)
        assert caught.value.rows == bad


@given(tables(), st.data())
def test_locate_one_names_a_region_only_where_it_holds_every_row(table: Rows, data: st.DataObject) -> None:
    numbers = st.integers(-4, 90) | st.integers(-(2**63), 2**63 - 1)
    inside = [(start + skip, n) for start, count in table for skip in (0, count // 2) for n in (1, count - skip)]
    row = st.sampled_from(inside) if inside else st.tuples(numbers, numbers)
    rows = data.draw(st.lists(row, min_size=1, max_size=4)) + data.draw(
        st.lists(st.tuples(numbers, numbers), max_size=1)
    )
    holders = [
        i for i, (start, size) in enumerate(table) if all(start <= a and 1 <= n <= start + size - a for a, n in rows)
    ]

    one = locate_one(*(column(values) for values in zip(*rows, strict=True)), *table_columns(table))

    if one is not None:
        assert [one] == holders
    elif len({n for _, n in rows}) == 1:  # where all rows are as long as the longest it is never in doubt
        assert not holders


def table_columns(table: Rows) -> tuple[Any, Any]:
    return column(start for start, _ in table), column(start + n for start, n in table)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=70))
def test_bounds_are_the_least_and_the_greatest_value(values: list[int]) -> None:
    assert bounds(column(values)) == (min(values), max(values))


@given(
    st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62), st.integers(1, 2**40)), min_size=1, max_size=40),
    st.none() | st.integers(1, 2**40),
)
def test_rows_know_their_bounds_and_their_sum(rows: list[tuple[int, int, int]], one_nbytes: int | None) -> None:
    local, remote, nbytes = (list(values) for values in zip(*rows, strict=True))

    got = as_rows(local, remote, nbytes if one_nbytes is None else one_nbytes)

    nbytes = nbytes if one_nbytes is None else [one_nbytes] * len(rows)
    assert (got.local.tolist(), got.remote.tolist(), got.nbytes.tolist()) == (local, remote, nbytes)
    assert got.local_bounds == (min(local), max(local))
    assert got.remote_bounds == (min(remote), max(remote))
    assert got.nbytes_bounds == (min(nbytes), max(nbytes))
    assert got.nbytes_total == sum(nbytes)


@pytest.mark.parametrize("count", [1, 2, 16_385, 131_072, 131_073])
def test_row_numbers_count_from_0_and_cannot_be_spoilt(count: int) -> None:
    numbers = row_numbers(count)

    assert numbers.tolist() == list(range(count))
    assert not numbers.flags.writeable


def naive_coalesce(rows: list[tuple[int, int, int, int, int]], limit: int | None) -> list[tuple[int, int, int, int]]:
    slices: list[tuple[int, int, int, int]] = []
    for row, (local, remote, nbytes, *regions) in enumerate(rows):
        if slices:
            a, b, n, first = slices[-1]
            is_next = (a + n, b + n, list(rows[row - 1][3:])) == (local, remote, regions)
            if is_next and (limit is None or n + nbytes <= limit):
                slices[-1] = (a, b, n + nbytes, first)
                continue
        slices.append((local, remote, nbytes, row))
    return slices


@st.composite
def request_rows(draw: st.DrawFn) -> list[tuple[int, int, int, int, int]]:
    """Draw rows (local, remote, nbytes, local region, remote region) that mostly continue the row before."""
    rows = [(draw(st.integers(0, 50)), draw(st.integers(0, 50)), draw(st.integers(1, 9)), 0, 0)]
    step = st.tuples(st.sampled_from("cccccclrR"), st.integers(1, 9), st.integers(0, 50))
    for kind, nbytes, address in draw(st.lists(step, max_size=30)):
        local, remote, before, local_region, remote_region = rows[-1]
        rows.append(
            (
                address if kind == "l" else local + before,
                address if kind == "r" else remote + before,
                nbytes,
                local_region + (kind == "R"),
                remote_region,
            )
        )
    return rows


@given(request_rows(), st.none() | st.integers(1, 60))
@example([(i, i, 1, 0, 0) for i in range(65)], 2)  # many slices in one run: every round of pointer doubling is needed
def test_coalesce_agrees_with_a_loop_over_the_rows(
    rows: list[tuple[int, int, int, int, int]], limit: int | None
) -> None:
    local, remote, nbytes, local_region, remote_region = (column(values) for values in zip(*rows, strict=True))

    got = coalesce(local, remote, nbytes, nbytes_max=limit, local_region=local_region, remote_region=remote_region)

    assert list(zip(*(c.tolist() for c in got), strict=True)) == naive_coalesce(rows, limit)


@given(tables(min_size=1), tables(min_size=1), st.integers(1, 20), st.data())
def test_cut_slices_agrees_with_a_look_at_every_byte(
    local_table: Rows, remote_table: Rows, limit: int, data: st.DataObject
) -> None:
    local_owner, remote_owner = (
        {byte: i for i, (start, nbytes) in enumerate(table) for byte in range(start, start + nbytes)}
        for table in (local_table, remote_table)
    )
    row = st.tuples(st.sampled_from(sorted(local_owner)), st.sampled_from(sorted(remote_owner)), st.integers(1, 20))
    anywhere = st.tuples(st.integers(0, 80), st.integers(0, 80), st.integers(1, 20))
    rows = data.draw(st.lists(row, min_size=1, max_size=5)) + data.draw(st.lists(anywhere, max_size=1))
    bad = [
        any(a + k not in local_owner for k in range(n)) or any(b + k not in remote_owner for k in range(n))
        for a, b, n in rows
    ]
    arguments: tuple[Any, ...] = (
        *(column(values) for values in zip(*rows, strict=True)),
        np.array(local_table, CHUNK_DTYPE),
        np.array(remote_table, CHUNK_DTYPE),
        limit,
    )

    if any(bad):
        with pytest.raises(NotRegisteredError, match="is not inside one registered region"):
            cut_slices(*arguments)
        return
    slices = cut_slices(*arguments).tolist()

    # Byte for byte the slices are the requests, in order.
    carried = [(q, a + k, b + k, la, rb) for a, b, n, q, la, rb in slices for k in range(n)]
    asked = [
        (q, a + k, b + k, local_owner[a + k], remote_owner[b + k]) for q, (a, b, n) in enumerate(rows) for k in range(n)
    ]
    assert carried == asked
    assert all(1 <= n <= limit for _, _, n, *_ in slices)
    # No cut without a reason: two neighbours of one request lie in other chunks, or the first one is full.
    for (_, _, n, q, *chunks), (_, _, _, next_q, *next_chunks) in itertools.pairwise(slices):
        assert q != next_q or chunks != next_chunks or n == limit
