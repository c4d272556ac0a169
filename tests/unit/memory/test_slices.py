"""as_columns, locate, coalesce, cut_slices: each behaviour and the words of each refusal."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import ConfigError, NotRegisteredError, UsageError
from kvxfer.memory import CHUNK_DTYPE, SLICE_DTYPE, as_columns, coalesce, cut_slices, locate, plan_chunks
from kvxfer.text import format_count
from kvxfer.types import RegionDescriptor, Rights

BASE = 0x7F00_0000_0000
MIB = 1 << 20


def column(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


# as_columns


def test_one_row_of_ints_becomes_three_columns() -> None:
    columns = as_columns(BASE, BASE + 64, 64)

    assert [c.tolist() for c in columns] == [[BASE], [BASE + 64], [64]]
    assert {c.dtype for c in columns} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda v: np.array(v, np.int64),
        lambda v: np.array(v, np.uint64),
        lambda v: np.array(v, ">i8"),
        lambda v: np.array(v, ">u8"),
        lambda v: np.array([v, v], np.int64).T[:, 0],
        lambda v: array.array("q", v),
        lambda v: [np.int64(x) for x in v],
        lambda v: [v[0], *map(np.uint64, v[1:])],
    ],
    ids=["list", "tuple", "int64", "uint64", "big", "big unsigned", "strided", "array", "np.int64s", "mixed"],
)
def test_every_kind_of_integers_gives_the_same_column(make: Any) -> None:
    values = [BASE, BASE + 8, BASE + 24]

    local, remote, nbytes = as_columns(make(values), make(values), make([8, 16, 24]))

    assert local.tolist() == remote.tolist() == values
    assert nbytes.tolist() == [8, 16, 24]
    assert {c.dtype for c in (local, remote, nbytes)} == {np.dtype(np.int64)}


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32])
def test_narrow_integers_are_widened(dtype: type[np.integer[Any]]) -> None:
    addresses = np.array([1, 100], np.promote_types(dtype, np.int32))

    local, _, nbytes = as_columns(addresses, [1, 2], np.array([127, 127], dtype))

    assert (local + nbytes).tolist() == [128, 227]


def test_range_is_a_column() -> None:
    local, _, _ = as_columns(range(BASE, BASE + 32, 8), range(4), 8)

    assert local.tolist() == [BASE, BASE + 8, BASE + 16, BASE + 24]


@pytest.mark.parametrize("count", [64, np.int64(64), np.array(64), np.uint32(64)], ids=lambda c: type(c).__name__)
def test_one_count_stands_for_all_rows(count: Any) -> None:
    _, _, nbytes = as_columns([1, 2, 3], [4, 5, 6], count)

    assert nbytes.tolist() == [64, 64, 64]


def test_columns_are_the_callers_to_use_again_at_once() -> None:
    local, remote = column(1, 2), np.array([3, 4], np.uint64)

    got_local, got_remote, _ = as_columns(local, remote, 1)
    local += 10
    remote += 10

    assert (got_local.tolist(), got_remote.tolist()) == ([1, 2], [3, 4])


@pytest.mark.parametrize("side", ["local", "remote", "nbytes"])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([1, 2.0], "its row 1 is a float"),
        ([1, True], "its row 1 is a bool"),
        ([np.True_, 1], "its row 0 is a bool"),
        ([1, None], "its row 1 is None"),
        ([1, "2"], "its row 1 is a str"),
        ([[1], [2]], "its row 0 is a list"),
        (np.array([1.0, 2.0]), "it is an ndarray of dtype float64"),
        (np.array([True, True]), "it is an ndarray of dtype bool"),
        (np.array([1, 2], object), "it is an ndarray of dtype object"),
        (np.ones((2, 2), int), r"it has 2 dimensions, shape \(2, 2\)"),
        (True, "it is a bool"),
        (1.5, "it is a float"),
        (None, "it is None"),
        ("12", "it is a str"),
        (b"12", "it is bytes"),
    ],
    ids=repr,
)
def test_what_is_no_column_of_integers_is_refused_by_name(side: str, bad: Any, words: str) -> None:
    arguments: dict[str, Any] = {"local": [1, 2], "remote": [1, 2], "nbytes": [1, 2], side: bad}

    with pytest.raises(UsageError, match=f"^{side} is not a column of integers.*{words}") as caught:
        as_columns(**arguments)

    assert caught.value.values["argument"] == side


REGION = RegionDescriptor(1, "pool", BASE, MIB, Rights.ALL)


@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (REGION, "it is a RegionDescriptor"),
        ([BASE, REGION], "its row 1 is a RegionDescriptor"),
        (np.zeros(64, np.uint8), "it is an ndarray of dtype uint8, which is data, not addresses"),
        (np.zeros(64, np.int8), "dtype int8, which is data"),
        (np.zeros(64, np.uint16), "dtype uint16, which is data"),
        (np.zeros((4, 16), np.float32), "dtype float32, which is data"),
        (np.zeros(64, bool), "dtype bool, which is data"),
        (array.array("B", b"ab"), "it is an array of dtype uint8, which is data"),
        (b"ab", "it is bytes, which is data"),
        (memoryview(b"ab"), "it is a memoryview, which is data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_memory_in_the_place_of_its_address_is_told_as_such(side: str, memory: Any, words: str) -> None:
    arguments: dict[str, Any] = {"local": [BASE, BASE], "remote": [BASE, BASE], "nbytes": 64, side: memory}

    with pytest.raises(UsageError, match=f"^{side} is not a column of integers: .*{words}") as caught:
        as_columns(**arguments)

    assert "region.address + offsets" in caught.value.remedy


def test_memory_is_refused_before_the_other_columns_are_compared_with_it() -> None:
    with pytest.raises(UsageError, match="local is not a column of integers: it is an ndarray of dtype uint8"):
        as_columns(np.zeros(MIB, np.uint8), [BASE, BASE], 64)


@pytest.mark.parametrize("side", ["local", "remote", "nbytes"])
@pytest.mark.parametrize("empty", [[], (), np.empty(0, np.int64), np.empty(0)], ids=repr)
def test_empty_column_is_refused_by_name(side: str, empty: Any) -> None:
    arguments: dict[str, Any] = {"local": [1], "remote": [1], "nbytes": [1], side: empty}

    with pytest.raises(UsageError, match=f"{side} is empty|differ in length"):
        as_columns(**arguments)


@pytest.mark.parametrize(
    ("remote", "nbytes", "words"),
    [([1, 2], 1, "remote has 2"), (1, [1, 1, 1], "remote has 1"), ([1, 2, 3], [1], "nbytes has 1")],
)
def test_columns_of_different_length_are_refused_by_name(remote: Any, nbytes: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"local has 3 rows, {words}"):
        as_columns([1, 2, 3], remote, nbytes)


@pytest.mark.parametrize("make", [list, lambda v: np.array(v, np.int64)], ids=["list", "array"])
@pytest.mark.parametrize("bad", [0, -1])
def test_count_below_one_names_the_first_row(make: Any, bad: int) -> None:
    with pytest.raises(UsageError, match=f"row 1: nbytes {bad} is below 1") as caught:
        as_columns(make([1, 2, 3]), make([1, 2, 3]), make([8, bad, bad]))

    assert caught.value.values["row"] == 1


@pytest.mark.parametrize(
    ("local", "nbytes", "words"),
    [
        (-1, 8, "row 0: local -0x1 is negative"),
        (8, 0, "row 0: nbytes 0 is below 1"),
        (2**63 - 8, 8, "row 0: local 0x7ffffffffffffff8 with 8 bytes reaches beyond"),
        (2**64 - 16, 32, "row 0: local 0xfffffffffffffff0 is beyond"),
        (8, 2**64, "row 0: nbytes 18446744073709551616 is beyond"),
    ],
)
def test_one_row_of_ints_is_checked_like_many(local: int, nbytes: int, words: str) -> None:  # B120
    with pytest.raises(UsageError, match=words):
        as_columns(local, BASE, nbytes)


@pytest.mark.parametrize("make", [list, lambda v: np.array(v, np.uint64)], ids=["list", "uint64"])
def test_unsigned_address_beyond_63_bits_names_the_row(make: Any) -> None:  # B120
    with pytest.raises(UsageError, match="row 1: remote 0xfffffffffffffff0 is beyond"):
        as_columns([1, 2, 3], make([1, 2**64 - 16, 2**64 - 16]), 32)


def test_negative_address_names_the_side_and_the_first_row() -> None:
    with pytest.raises(UsageError, match="row 2: remote -0x8 is negative"):
        as_columns([1, 2, 3], [1, 2, -8], 1)


def test_sum_that_would_wrap_names_the_row() -> None:  # B120
    with pytest.raises(UsageError, match="row 1: local 0x7ffffffffffffff0 with 32 bytes"):
        as_columns([1, 2**63 - 16], [1, 2], [1, 32])


def test_range_that_ends_at_the_last_address_is_accepted() -> None:
    local, _, _ = as_columns([2**63 - 1 - 32, 5], [1, 2], [32, 2**62])

    assert local[0] == 2**63 - 33


# locate


STARTS = column(BASE, BASE + MIB, BASE + 4 * MIB)  # 0 and 1 are adjacent; a gap; 2
ENDS = column(BASE + MIB, BASE + 2 * MIB, BASE + 5 * MIB)
REGIONS = tuple(
    RegionDescriptor(i + 1, f"kv{i}", int(start), int(end - start), Rights.ALL)
    for i, (start, end) in enumerate(zip(STARTS, ENDS, strict=True))
)


def test_rows_in_several_regions_are_found() -> None:
    addresses = column(BASE + 4 * MIB, BASE, BASE + MIB, BASE + MIB - 1)

    index = locate(addresses, column(MIB, MIB, MIB, 1), STARTS, ENDS)

    assert index.tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize("count", [1, 3])
def test_rows_in_one_region_are_found(count: int) -> None:
    index = locate(np.full(count, BASE + MIB + 5), np.full(count, 7), STARTS, ENDS)

    assert index.tolist() == [1] * count


@pytest.mark.parametrize("nbytes", [1, 65535, 65536, 65537, 131073])
def test_any_length_that_ends_exactly_at_the_region_end_is_inside(nbytes: int) -> None:  # B119
    starts, ends = column(BASE), column(BASE + 3 * 65536)

    assert locate(ends - nbytes, column(nbytes), starts, ends).tolist() == [0]
    assert locate(starts, column(nbytes), starts, ends).tolist() == [0]
    with pytest.raises(NotRegisteredError, match="row 0"):
        locate(ends - nbytes + 1, column(nbytes), starts, ends)


def test_tail_row_of_a_cut_request_is_found() -> None:  # B119
    chunks = np.array([(BASE, 131073)], CHUNK_DTYPE)

    slices = cut_slices(column(BASE), column(BASE), column(131073), chunks, chunks, 65536)

    assert slices["nbytes"].tolist() == [65536, 65536, 1]
    assert locate(slices["local"], slices["nbytes"], column(BASE), column(BASE + 131073)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("address", "nbytes", "words"),
    [
        (BASE + 5 * MIB, 1, r"nearest before is region 'kv2' .*, which ends where the row begins"),
        (BASE + 5 * MIB - 1, 2, r"begins in region 'kv2' .* ends 1 byte past its end"),
        (BASE + 3 * MIB, 16, rf"before is region 'kv1' .* {MIB} bytes lower; .*after .*'kv2' .* {MIB - 16} bytes h"),
        (BASE + 3 * MIB, 2 * MIB, rf"after is region 'kv2' .*, which it enters after {MIB} bytes"),
        (BASE - 16, 8, r"region: the nearest after is region 'kv0' .* 8 bytes higher"),
        (BASE - 16, 16, r"region: the nearest after is region 'kv0' .*, which begins where the row ends"),
        (BASE + MIB - 8, 16, rf"spans the adjacent region 'kv0' .* and region 'kv1' .*split it at {BASE + MIB:#x}"),
        (BASE, 3 * MIB, r"spans the adjacent region 'kv0' .* and region 'kv1'"),
        (2**63 - 32, 16, r"nearest before is region 'kv2'"),
    ],
    ids=[
        "end",
        "end-1",
        "gap",
        "gap into next",
        "below all",
        "touches the first",
        "spans two",
        "spans into the gap",
        "top",
    ],
)
def test_row_outside_names_its_range_and_the_nearest_region(address: int, nbytes: int, words: str) -> None:  # B120
    side = "remote segment 'decode-1'"
    addresses, counts = column(BASE, address, BASE, address), column(8, nbytes, 8, nbytes)

    with pytest.raises(NotRegisteredError, match=words) as caught:
        locate(addresses, counts, STARTS, ENDS, side=side, regions=REGIONS)

    assert str(caught.value).startswith(
        f"row 1: {side} [{address:#x}, {address + nbytes:#x}), {format_count(nbytes, 'byte')}, is not inside one "
        "registered region"
    )
    assert "2 of 4 rows are bad" in str(caught.value)
    assert caught.value.rows == (1, 3)
    assert caught.value.values["address"] == address


@pytest.mark.parametrize("address", [0, 65535, MIB - 1])
def test_offset_in_the_place_of_an_address_is_told_as_such(address: int) -> None:
    with pytest.raises(NotRegisteredError, match="the nearest after is region 'kv0'") as caught:
        locate(column(address), column(1), STARTS, ENDS, regions=REGIONS)

    assert "higher" not in str(caught.value)  # nobody can do anything with so many bytes
    assert caught.value.remedy == "Columns are absolute addresses: pass region.address + offset."


@pytest.mark.parametrize("address", [MIB, BASE - 16, BASE + 3 * MIB])
def test_address_that_can_be_one_is_not_taken_for_an_offset(address: int) -> None:
    with pytest.raises(NotRegisteredError) as caught:
        locate(column(address), column(1), STARTS, ENDS)

    assert "offset" not in caught.value.remedy


@pytest.mark.parametrize("count", [1, 2])
def test_address_from_the_wire_that_wraps_is_outside(count: int) -> None:  # B120
    with pytest.raises(NotRegisteredError, match="row 0"):
        locate(np.full(count, -16), np.full(count, 32), STARTS, ENDS)


@pytest.mark.parametrize("nbytes", [0, -1, -(2**63)])
@pytest.mark.parametrize("count", [1, 2])
def test_count_below_one_is_never_inside(count: int, nbytes: int) -> None:
    with pytest.raises(NotRegisteredError, match="at least one byte"):
        locate(np.full(count, BASE), np.full(count, nbytes), STARTS, ENDS)


def test_lowest_address_does_not_wrap_into_a_region() -> None:  # B120
    with pytest.raises(NotRegisteredError, match="row 0"):
        locate(column(-(2**63), BASE), column(1, 1), STARTS, ENDS)


@pytest.mark.parametrize("count", [1, 2])
def test_sum_that_wraps_is_outside(count: int) -> None:  # B120
    with pytest.raises(NotRegisteredError, match=f"row {count - 1}"):
        locate(column(BASE, BASE + MIB)[-count:], column(8, 2**63 - 1)[-count:], STARTS, ENDS)


def test_row_without_any_region_says_so() -> None:
    with pytest.raises(NotRegisteredError, match="no region is registered"):
        locate(column(BASE), column(1), column(), column())


def test_regions_without_names_are_named_by_their_range() -> None:
    with pytest.raises(NotRegisteredError, match=rf"region \[{BASE + 4 * MIB:#x}, {BASE + 5 * MIB:#x}\)"):
        locate(column(BASE + 9 * MIB), column(1), STARTS, ENDS)


def test_error_lists_at_most_a_thousand_rows() -> None:
    with pytest.raises(NotRegisteredError) as caught:
        locate(np.arange(1, 5001), np.full(5000, 1), STARTS, ENDS)

    assert caught.value.rows == tuple(range(1000))
    assert caught.value.values["row_count"] == 5000


# coalesce


def joined(*args: Any, **options: Any) -> list[list[int]]:
    return [c.tolist() for c in coalesce(*args, **options)]


def test_rows_adjacent_on_both_sides_are_joined() -> None:
    local = column(100, 108, 116, 200, 208)
    remote = column(500, 508, 516, 600, 608)

    assert joined(local, remote, np.full(5, 8)) == [[100, 200], [500, 600], [24, 16], [0, 3]]


def test_rows_adjacent_on_one_side_only_stay_apart() -> None:
    local, remote, nbytes = column(100, 108, 116), column(500, 600, 608), column(8, 8, 8)

    assert joined(local, remote, nbytes) == [[100, 108], [500, 600], [8, 16], [0, 1]]
    assert joined(remote, local, nbytes) == [[500, 600], [100, 108], [8, 16], [0, 1]]


@pytest.mark.parametrize("side", ["local_region", "remote_region"])
def test_rows_never_join_across_a_region_border(side: str) -> None:
    local, remote, nbytes = column(100, 108, 116), column(500, 508, 516), column(8, 8, 8)

    assert joined(local, remote, nbytes, **{side: np.array([0, 1, 1])})[3] == [0, 1]


@pytest.mark.parametrize("count", [1, 4])
def test_columns_are_returned_themselves_when_nothing_joins(count: int) -> None:
    local, remote, nbytes = np.arange(count) * 16, np.arange(count) * 16 + 1000, np.full(count, 8)

    got = coalesce(local, remote, nbytes)

    assert got[0] is local
    assert got[1] is remote
    assert got[2] is nbytes
    assert got[3].tolist() == list(range(count))


def test_join_fills_each_slice_up_to_its_limit() -> None:
    nbytes = column(3, 3, 3, 5, 1, 1, 20, 4, 4)
    local = np.cumsum(nbytes) - nbytes

    _, _, lengths, first_row = coalesce(local, local + 1000, nbytes, nbytes_max=8)

    assert lengths.tolist() == [6, 8, 2, 20, 8]
    assert first_row.tolist() == [0, 2, 4, 6, 7]


def test_row_longer_than_the_limit_stays_whole() -> None:
    nbytes = column(8, 100, 8)
    local = np.cumsum(nbytes) - nbytes

    assert joined(local, local, nbytes, nbytes_max=16)[2] == [8, 100, 8]


def test_batch_whose_sum_would_wrap_is_left_unjoined() -> None:
    nbytes = np.full(8, 2**61)
    local = np.tile(column(0, 2**61), 4)

    assert joined(local, local, nbytes, nbytes_max=2**62)[2] == nbytes.tolist()
    assert joined(local, local, nbytes)[2] == [2**62] * 4


# cut_slices


def test_slices_follow_the_chunks_of_both_sides() -> None:
    local_chunks = np.array([(0, 100), (100, 100)], CHUNK_DTYPE)
    remote_chunks = np.array([(1000, 150), (1150, 50)], CHUNK_DTYPE)

    slices = cut_slices(column(50, 0), column(1050, 1000), column(150, 10), local_chunks, remote_chunks, 1 << 30)

    assert slices.dtype == SLICE_DTYPE
    assert slices.tolist() == [
        (50, 1050, 50, 0, 0, 0),
        (100, 1100, 50, 0, 1, 0),
        (150, 1150, 50, 0, 1, 1),
        (0, 1000, 10, 1, 0, 0),
    ]


def test_border_on_both_sides_at_the_same_offset_cuts_once() -> None:
    chunks = np.array([(0, 100), (100, 100)], CHUNK_DTYPE)

    assert cut_slices(column(50), column(50), column(100), chunks, chunks, 1000)["nbytes"].tolist() == [50, 50]


@pytest.mark.parametrize("nbytes", [2**31, 2**32, 2**32 + 5])
@pytest.mark.parametrize("limit", [0x4000_0000, 2**31, 2**40])
def test_length_beyond_32_bits_is_cut_not_narrowed(nbytes: int, limit: int) -> None:  # B74
    chunks = np.array([(BASE, 2**33)], CHUNK_DTYPE)

    slices = cut_slices(column(BASE), column(BASE), column(nbytes), chunks, chunks, limit)

    assert slices["nbytes"].sum() == nbytes
    assert slices["nbytes"].max() <= min(limit, 2**31)
    assert len(slices) == -(-nbytes // min(limit, 2**31))


def test_rows_at_every_chunk_border_get_the_right_chunk() -> None:  # B72
    gib = 1 << 30
    chunks = plan_chunks(BASE, 7 * gib // 2, gib)
    offsets = column(0, gib - 4096, gib, 7 * gib // 2 - 4096)

    slices = cut_slices(BASE + offsets, BASE + offsets, np.full(4, 4096), chunks, chunks, 2**31)

    assert slices["request"].tolist() == [0, 1, 2, 3]
    assert slices["local_chunk"].tolist() == slices["remote_chunk"].tolist() == [0, 0, 1, 3]


@pytest.mark.parametrize(
    ("nbytes", "lengths"), [(65535, [65535]), (65536, [65536]), (65537, [65536, 1]), (131073, [65536, 65536, 1])]
)
def test_row_is_cut_from_one_byte_over_the_limit_on(nbytes: int, lengths: list[int]) -> None:  # B119
    chunks = np.array([(BASE, 131073)], CHUNK_DTYPE)

    slices = cut_slices(column(BASE + 131073 - nbytes), column(BASE), column(nbytes), chunks, chunks, 65536)

    assert slices["nbytes"].tolist() == lengths


@pytest.mark.parametrize("side", ["local", "remote"])
def test_row_below_all_chunks_is_named(side: str) -> None:  # B120
    addresses = {"local": column(600), "remote": column(600), side: column(400)}
    chunks = np.array([(500, 300)], CHUNK_DTYPE)

    with pytest.raises(NotRegisteredError, match=rf"row 0: {side} \[0x190"):
        cut_slices(addresses["local"], addresses["remote"], column(50), chunks, chunks, 1000)


@pytest.mark.parametrize("side", ["local", "remote"])
def test_row_that_no_chunk_covers_is_named_with_its_side(side: str) -> None:
    whole = np.array([(0, 300)], CHUNK_DTYPE)
    with_gap = np.array([(0, 100), (200, 100)], CHUNK_DTYPE)
    tables = (with_gap, whole) if side == "local" else (whole, with_gap)
    addresses = column(0, 150, 90, 250)

    with pytest.raises(NotRegisteredError, match=rf"row 1: {side} \[0x96") as caught:
        cut_slices(addresses, addresses, np.full(4, 50), *tables, 1000)

    assert caught.value.rows == (1, 2)


def test_cut_without_chunks_is_not_registered() -> None:
    none = np.empty(0, CHUNK_DTYPE)

    with pytest.raises(NotRegisteredError, match="no region is registered"):
        cut_slices(column(1), column(1), column(1), none, none, 1000)


def test_message_limit_below_one_is_a_setting_error() -> None:
    chunks = np.array([(0, 100)], CHUNK_DTYPE)

    with pytest.raises(ConfigError, match="message_nbytes_max 0"):
        cut_slices(column(1), column(1), column(1), chunks, chunks, 0)
