"""Find the regions of checked columns, join rows that are adjacent, cut what is too long.

Pure: numpy columns in, numpy columns out; no loop per row, and no memory, device or clock is touched.
`planning` calls locate and coalesce on what `columns.py` has checked; a transport with limits calls cut_slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer.errors import ConfigError, NotRegisteredError
from kvxfer.memory.chunks import ChunkArray
from kvxfer.memory.columns import bounds
from kvxfer.text import format_count
from kvxfer.types import ADDRESS_MAX, AddressColumn

__all__ = [
    "MESSAGE_NBYTES_MAX",
    "SLICE_DTYPE",
    "IndexColumn",
    "coalesce",
    "cut_slices",
    "distinct",
    "locate",
    "locate_one",
    "row_numbers",
]

IndexColumn: TypeAlias = npt.NDArray[np.intp]
SliceArray: TypeAlias = npt.NDArray[np.void]

SLICE_DTYPE = np.dtype(
    [
        ("local", np.int64),
        ("remote", np.int64),
        ("nbytes", np.int64),
        ("request", np.int64),
        ("local_chunk", np.int64),
        ("remote_chunk", np.int64),
    ]
)

MESSAGE_NBYTES_MAX = 2**31  # InfiniBand Architecture 1.4, 9.7.2: an RC message is at most 2**31 bytes
_REPORTED_ROWS_MAX = 1000  # bad rows listed on an error; a batch of 100,000 garbage rows must not make a huge one
OFFSET_MAX = 64 << 10  # vm.mmap_min_addr: below it a process has no memory
FAR_NBYTES = 1 << 40  # a distance beyond it tells nobody anything
ROW_NUMBERS_KEPT = 1 << 17
"""1 MiB; a batch of 100,000 rows needs them twice, at 60 us each."""
_EXACT_SUM_MAX = 2.0**62  # below it no int64 sum of the same column wraps, whatever the rounding


def locate(
    addresses: AddressColumn,
    nbytes: AddressColumn,
    starts: AddressColumn,
    ends: AddressColumn,
    *,
    side: str = "local",
    regions: Sequence[object] = (),
) -> IndexColumn:
    """Return for each row the index of the region that holds it whole.

    starts, ends: the region table, ascending and without overlap (`RegionSnapshot.starts`, `.ends`).
    side: how a message calls the addresses: "local", or "remote" with the name of the segment.
    regions: what stands behind the rows of the table; `str()` of one names it in a message.

    Raises NotRegisteredError for the first row outside, with its nearest regions; `rows` has the first 1,000 bad rows
    and `row_count` counts all.
    """
    one = locate_one(addresses, nbytes, starts, ends)
    if one is not None:
        return np.full(len(addresses), one)  # no search per row: 16 times faster at 100,000
    if len(starts) == 0:
        _refuse_rows(np.ones(len(addresses), bool), addresses, nbytes, starts, ends, side, regions)
    index: IndexColumn = starts.searchsorted(addresses, "right") - 1
    # Where index is -1 the subtraction reads the last region and may wrap; that row is bad by index alone.
    bad = (index < 0) | (nbytes < 1) | (nbytes > ends[index] - addresses)
    if bad.any():
        _refuse_rows(bad, addresses, nbytes, starts, ends, side, regions)
    return index


def locate_one(
    addresses: AddressColumn, nbytes: AddressColumn, starts: AddressColumn, ends: AddressColumn
) -> int | None:
    """Return the index of the region that holds all rows, as most batches have it; None where not, or not surely.

    The longest row is taken to be everywhere, so that a row is looked at by itself in `locate` only.
    """
    if len(starts) == 0:
        return None
    lowest, highest = bounds(addresses)
    nbytes_min, nbytes_max = bounds(nbytes)
    index = int(starts.searchsorted(lowest, "right")) - 1
    return index if index >= 0 and nbytes_min >= 1 and highest + nbytes_max <= ends.item(index) else None


def _refuse_rows(
    bad: npt.NDArray[np.bool_],
    addresses: AddressColumn,
    nbytes: AddressColumn,
    starts: AddressColumn,
    ends: AddressColumn,
    side: str,
    regions: Sequence[object],
) -> NoReturn:
    rows = np.flatnonzero(bad)
    row = int(rows[0])
    address, count = int(addresses[row]), int(nbytes[row])
    others = f" ({len(rows)} of {len(bad)} rows are bad.)" if len(rows) > 1 else ""
    raise NotRegisteredError(
        f"row {row}: {side} [{address:#x}, {address + count:#x}), {format_count(count, 'byte')}, is not inside one "
        f"registered region: {_explain(address, count, starts.tolist(), ends.tolist(), regions)}.{others}",
        remedy="Columns are absolute addresses: pass region.address + offset."
        if _is_offset(address, starts, ends)
        else "Register the whole range as one region, or check the address and the count of that row.",
        row=row,
        rows=tuple(rows[:_REPORTED_ROWS_MAX].tolist()),
        row_count=len(rows),
        side=side,
        address=address,
        nbytes=count,
    )


def _is_offset(address: int, starts: AddressColumn, ends: AddressColumn) -> bool:
    """Whether it looks like an offset into a region: it is below all of them, and no larger than one."""
    return len(starts) > 0 and 0 <= address < starts.item(0) and address < max(OFFSET_MAX, int((ends - starts).max()))


def _explain(address: int, nbytes: int, starts: list[int], ends: list[int], regions: Sequence[object]) -> str:
    """Say in words where `[address, address + nbytes)` lies relative to the regions around it."""

    def label(index: int) -> str:
        return str(regions[index]) if regions else f"region [{starts[index]:#x}, {ends[index]:#x})"

    if not starts:
        return "no region is registered"
    if nbytes < 1:
        return "a row carries at least one byte"
    before = int(np.searchsorted(starts, address, "right")) - 1
    after = before + 1
    has_after = after < len(starts)
    if before >= 0 and address < ends[before]:
        if has_after and ends[before] == starts[after]:
            return (
                f"it spans the adjacent {label(before)} and {label(after)}, and one row cannot; "
                f"split it at {starts[after]:#x}"
            )
        beyond = format_count(address + nbytes - ends[before], "byte")
        return f"it begins in {label(before)} and ends {beyond} past its end"
    parts = []
    if before >= 0:
        distance = _distance(address - ends[before], "lower", "ends where the row begins")
        parts.append(f"the nearest before is {label(before)}{distance}")
    if has_after:
        overlap = address + nbytes > starts[after]
        entered = f", which it enters after {format_count(starts[after] - address, 'byte')}" if overlap else ""
        distance = entered or _distance(starts[after] - address - nbytes, "higher", "begins where the row ends")
        parts.append(f"the nearest after is {label(after)}{distance}")
    return "; ".join(parts)


def _distance(nbytes: int, direction: str, touch: str) -> str:
    """Return how far a region is from the row, as a clause; touch: what is to be said where that is 0 bytes."""
    if not nbytes:
        return f", which {touch}"
    return f", {format_count(nbytes, 'byte')} {direction}" if nbytes <= FAR_NBYTES else ""


def distinct(index: IndexColumn, count: int) -> IndexColumn:
    """Return which of 0 ... count - 1 an index column names, ascending.

    A table of flags beats np.unique, which sorts or hashes: 9 times at 100,000 rows.
    """
    least, greatest = bounds(index)
    if least == greatest:
        return index[:1]
    used = np.zeros(count, bool)
    used[index] = True
    return np.flatnonzero(used)


def coalesce(
    local: AddressColumn,
    remote: AddressColumn,
    nbytes: AddressColumn,
    *,
    nbytes_max: int | None = None,
    local_region: IndexColumn | None = None,
    remote_region: IndexColumn | None = None,
) -> tuple[AddressColumn, AddressColumn, AddressColumn, IndexColumn]:
    """Join rows that follow each other on both sides; return (local, remote, nbytes, first_row) of the slices.

    Row i + 1 joins row i where both its addresses continue those of row i, in the same region on both sides as far as
    the region columns are given. first_row: the first request row of each slice, ascending, so slice i carries the rows
    `first_row[i]` up to `first_row[i + 1]`.
    nbytes_max: no join makes a slice longer; a row that is longer by itself stays whole (cut_slices cuts it).
    Where nothing joins, the given columns are returned themselves.
    """
    count = len(local)
    if count == 1:
        return local, remote, nbytes, row_numbers(1)
    joins = local[1:] - local[:-1] == nbytes[:-1]
    if _has_true(joins):
        joins &= remote[1:] - remote[:-1] == nbytes[:-1]
        for region in (local_region, remote_region):
            if region is not None:
                joins &= region[1:] == region[:-1]
    if not _has_true(joins):
        return local, remote, nbytes, row_numbers(count)
    is_first = np.concatenate([[True], ~joins])
    if nbytes_max is not None:
        _limit_runs(is_first, nbytes, nbytes_max)
    first_row = np.flatnonzero(is_first)
    last_row = np.append(first_row[1:], count) - 1
    slice_local = local[first_row]
    return slice_local, remote[first_row], local[last_row] + nbytes[last_row] - slice_local, first_row


def row_numbers(count: int) -> IndexColumn:
    """Return 0 ... count - 1, read-only; up to `ROW_NUMBERS_KEPT` made once and kept."""
    global _row_numbers
    numbers = _row_numbers
    if count > len(numbers):
        numbers = np.arange(count)
        numbers.flags.writeable = False
        if count <= ROW_NUMBERS_KEPT:
            _row_numbers = numbers
    return numbers[:count]


_row_numbers: IndexColumn = np.arange(0)


def _has_true(flags: npt.NDArray[np.bool_]) -> bool:
    return bool(flags.item(flags.argmax()))  # as `bounds`: 0.1 us where any takes 0.7


def _limit_runs(is_first: npt.NDArray[np.bool_], nbytes: AddressColumn, nbytes_max: int) -> None:
    """Mark in `is_first` the rows at which a run must be cut so that no slice of several rows passes `nbytes_max`.

    Greedy, like a loop that fills each slice as far as it goes. The loop is replaced by pointer doubling: `jump[i]` is
    the first row that a slice beginning at row i has no room for; after round k every slice start up to 2**k jumps
    behind a marked one is marked.
    """
    count = len(nbytes)
    if float(nbytes.sum(dtype=np.float64)) > _EXACT_SUM_MAX:
        is_first[:] = True  # sums would wrap; joining only saves work, so such a batch goes unjoined
        return
    run_first = np.flatnonzero(is_first)
    run_end = np.append(run_first[1:], count)
    end_offset = np.cumsum(nbytes)
    start_offset = end_offset - nbytes
    limit = min(nbytes_max, ADDRESS_MAX - int(end_offset[-1]))
    if int((end_offset[run_end - 1] - start_offset[run_first]).max()) <= limit:
        return
    jump = end_offset.searchsorted(start_offset + limit, "right")
    jump = np.minimum(jump, np.repeat(run_end, run_end - run_first))  # never out of the run
    jump = np.maximum(jump, np.arange(1, count + 1))  # a row longer than the limit is a slice by itself
    jump = np.append(jump, count)  # the row past the last one stays where it is
    marked = np.append(is_first, True)
    marked_count = 0
    while marked_count < (marked_count := int(np.count_nonzero(marked))):
        marked[jump[marked]] = True
        jump = jump[jump]
    is_first |= marked[:-1]


def cut_slices(
    local: AddressColumn,
    remote: AddressColumn,
    nbytes: AddressColumn,
    local_chunks: ChunkArray,
    remote_chunks: ChunkArray,
    message_nbytes_max: int,
) -> SliceArray:
    """Return the slices that carry the rows, in request order: each in one chunk per side, each one message at most.

    local_chunks, remote_chunks: CHUNK_DTYPE, ascending and without overlap; the chunks of all regions of a side.
    message_nbytes_max: `port_attr.max_msg_sz` (ibv_query_port(3)) or less; never more than MESSAGE_NBYTES_MAX is used.
    Returns shape (m,), m >= n, SLICE_DTYPE: `request` is the row a slice came from, `local_chunk` and `remote_chunk`
    index the chunk tables.

    Raises NotRegisteredError naming the first row with a byte that no chunk covers.
    """
    if message_nbytes_max < 1:
        raise ConfigError(
            f"message_nbytes_max {message_nbytes_max} is below 1.",
            remedy="Use max_msg_sz of the port.",
            message_nbytes_max=message_nbytes_max,
        )
    limit = min(message_nbytes_max, MESSAGE_NBYTES_MAX)
    request, offset, length = _cut_at_borders(local, remote, nbytes, local_chunks["address"], remote_chunks["address"])
    if bounds(length)[1] > limit:
        piece, ordinal = _expand(-(-length // limit))
        request, offset = request[piece], offset[piece] + ordinal * limit
        length = np.minimum(length[piece] - ordinal * limit, limit)
    slices = np.empty(len(request), SLICE_DTYPE)
    slices["request"] = request
    slices["nbytes"] = length
    for side, column, chunks in (("local", local, local_chunks), ("remote", remote, remote_chunks)):
        addresses = column[request] + offset
        slices[side] = addresses
        slices[f"{side}_chunk"] = _locate_slices(addresses, length, request, column, nbytes, chunks, side)
    return slices


def _cut_at_borders(
    local: AddressColumn,
    remote: AddressColumn,
    nbytes: AddressColumn,
    local_borders: AddressColumn,
    remote_borders: AddressColumn,
) -> tuple[IndexColumn, AddressColumn, AddressColumn]:
    """Return (row, offset in the row, length) of the pieces between the borders of both sides, in request order."""
    count = len(nbytes)
    rows = [np.arange(count)]
    offsets = [np.zeros(count, np.int64)]
    for column, borders in ((local, local_borders), (remote, remote_borders)):
        inner = borders.searchsorted(column, "right")  # the first border behind the row's first byte
        row, ordinal = _expand(borders.searchsorted(column + nbytes, "left") - inner)
        rows.append(row)
        offsets.append(borders[inner[row] + ordinal] - column[row])
    if len(rows[1]) == 0 and len(rows[2]) == 0:
        return rows[0], offsets[0], nbytes
    row = np.concatenate(rows)
    offset = np.concatenate(offsets)
    order = np.lexsort((offset, row))
    row, offset = row[order], offset[order]
    is_new = np.concatenate([[True], (row[1:] != row[:-1]) | (offset[1:] != offset[:-1])])  # both sides cut here: once
    row, offset = row[is_new], offset[is_new]
    is_last = np.append(row[1:] != row[:-1], True)
    return row, offset, np.where(is_last, nbytes[row], np.append(offset[1:], 0)) - offset


def _expand(counts: IndexColumn) -> tuple[IndexColumn, IndexColumn]:
    """Return (item, ordinal): item i appears counts[i] times, with the ordinals 0 to counts[i] - 1."""
    item = np.repeat(np.arange(len(counts)), counts)
    return item, np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts, counts)


def _locate_slices(
    addresses: AddressColumn,
    lengths: AddressColumn,
    request: IndexColumn,
    column: AddressColumn,
    nbytes: AddressColumn,
    chunks: ChunkArray,
    side: str,
) -> IndexColumn:
    """Return the chunk of each slice, or raise for the rows that a slice outside all chunks belongs to."""
    starts = chunks["address"]
    ends = starts + chunks["nbytes"]
    if len(chunks) == 0:
        _refuse_rows(np.ones(len(nbytes), bool), column, nbytes, starts, ends, side, ())
    index: IndexColumn = starts.searchsorted(addresses, "right") - 1
    outside = (index < 0) | (lengths > ends[index] - addresses)
    if outside.any():
        bad = np.zeros(len(nbytes), bool)
        bad[request[outside]] = True
        _refuse_rows(bad, column, nbytes, starts, ends, side, ())
    return index
