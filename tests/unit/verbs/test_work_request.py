"""Chains of work requests: what C sees when it walks one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.errors import UsageError
from kvxfer.verbs.enums import SendFlags, WorkOpcode
from kvxfer.verbs.library import ffi
from kvxfer.verbs.work_request import SEND_WR_DTYPE, SGE_DTYPE, WorkRequestBatch
from tests.support.chain import walk

WRITE, READ = WorkOpcode.RDMA_WRITE, WorkOpcode.RDMA_READ
SIGNALED = SendFlags.SIGNALED


def fill(batch: WorkRequestBatch, count: int, opcode: WorkOpcode = WRITE, **changes: Any) -> None:
    rows = np.arange(count)
    columns: dict[str, Any] = {
        "local_addr": 0x10000 + rows * 64,
        "lkey": rows + 100,
        "remote_addr": 0x20000 + rows * 64,
        "rkey": rows + 200,
        "nbytes": rows + 1,
    }
    batch.fill(opcode, **{**columns, **changes})


@pytest.mark.parametrize(
    ("dtype", "struct", "paths"),
    [
        (SGE_DTYPE, "struct ibv_sge", {}),
        (SEND_WR_DTYPE, "struct ibv_send_wr", {"remote_addr": "wr.rdma.remote_addr", "rkey": "wr.rdma.rkey"}),
    ],
)
def test_the_columns_lie_where_c_has_the_fields(dtype: np.dtype[Any], struct: str, paths: dict[str, str]) -> None:
    assert dtype.itemsize == ffi.sizeof(struct)
    assert dtype.names is not None
    for name in dtype.names:
        field, offset = dtype.fields[name][:2]  # type: ignore[index]
        path = paths.get(name, name).split(".")
        assert offset == ffi.offsetof(struct, *path), name
        kind = ffi.typeof(struct)
        for part in path:
            kind = dict(kind.fields)[part].type
        assert field.itemsize == ffi.sizeof(kind), name


def test_a_chain_is_what_was_filled() -> None:
    batch = WorkRequestBatch(4)

    fill(batch, 2, READ, wr_id=7, send_flags=SendFlags.FENCE)

    assert batch.count == 2
    assert walk(batch) == [
        (7, READ, SendFlags.FENCE, 0, [(0x10000, 1, 100)], 0x20000, 200),
        (8, READ, SendFlags.FENCE | SIGNALED, 0, [(0x10040, 2, 101)], 0x20040, 201),
    ]
    assert batch.requests["wr_id"].tolist() == [7, 8]
    assert batch.elements["lkey"].tolist() == [100, 101]
    assert repr(batch) == "<WorkRequestBatch 2 of 4>"


def test_one_value_serves_all_rows() -> None:
    batch = WorkRequestBatch(3)

    fill(batch, 3, lkey=1, rkey=2, nbytes=4096)

    assert [(row.ranges[0].nbytes, row.ranges[0].lkey, row.rkey) for row in walk(batch)] == [(4096, 1, 2)] * 3


@pytest.mark.parametrize(
    ("every", "signalled"),
    [
        (0, [4]),
        (1, [0, 1, 2, 3, 4]),
        (2, [1, 3, 4]),
        (3, [2, 4]),
        (5, [4]),
        (9, [4]),
    ],
)
def test_each_so_many_th_and_the_last_give_a_completion(every: int, signalled: list[int]) -> None:
    batch = WorkRequestBatch(8)

    fill(batch, 5, signal_every=every)

    assert [row for row, request in enumerate(walk(batch)) if request.send_flags & SIGNALED] == signalled


@pytest.mark.parametrize("counts", [(5, 3, 5), (3, 8, 1), (8, 8, 8), (1, 2, 3), (2, 5, 8)])
@pytest.mark.parametrize("first", [WRITE, READ])
def test_a_chain_leaves_nothing_behind_for_the_next(counts: tuple[int, int, int], first: WorkOpcode) -> None:
    batch, fresh = WorkRequestBatch(9), WorkRequestBatch(9)
    fill(batch, counts[0], first, signal_every=3)
    batch.append_notice(0xAA)

    fill(batch, counts[1], signal_every=3)
    fill(batch, counts[2], signal_every=3)
    fill(fresh, counts[2], signal_every=3)

    assert walk(batch) == walk(fresh)


def test_single_requests_leave_nothing_behind_for_a_chain() -> None:
    batch, fresh = WorkRequestBatch(4), WorkRequestBatch(4)
    fill(batch, 4)
    batch.clear()
    batch.append(READ, local_addr=1, lkey=2, remote_addr=3, rkey=4, nbytes=5, send_flags=SendFlags.FENCE)

    fill(batch, 4)
    fill(fresh, 4)

    assert walk(batch) == walk(fresh)


def test_a_notice_follows_the_data_and_has_none() -> None:
    batch = WorkRequestBatch(4)
    fill(batch, 2)

    batch.append_notice(0x01020304, wr_id=99)

    *data, notice = walk(batch)
    assert [bool(row.send_flags & SIGNALED) for row in data] == [False, False]
    assert notice == (99, WorkOpcode.RDMA_WRITE_WITH_IMM, SIGNALED, 0x01020304, [], 0, 0)
    assert bytes(ffi.buffer(batch.first + 2))[36:40] == b"\x01\x02\x03\x04", "immediate data is big-endian"


def test_requests_can_be_put_one_by_one() -> None:
    batch, filled = WorkRequestBatch(4), WorkRequestBatch(4)
    fill(batch, 4, READ, signal_every=1)
    fill(filled, 3)

    batch.clear()
    for row in range(3):
        batch.append(
            WRITE,
            local_addr=0x10000 + row * 64,
            lkey=100 + row,
            remote_addr=0x20000 + row * 64,
            rkey=200 + row,
            nbytes=row + 1,
            wr_id=row,
        )

    assert walk(batch) == walk(filled)


def test_a_truncated_chain_ends_with_a_completion() -> None:
    batch, short = WorkRequestBatch(4), WorkRequestBatch(4)
    fill(batch, 4)
    fill(short, 2)

    batch.truncate(2)

    assert walk(batch) == walk(short)


def test_the_highest_values_go_through() -> None:
    batch = WorkRequestBatch(1)
    top = np.array([2**32 - 1], np.uint32)

    batch.fill(WRITE, local_addr=np.array([2**63 - 1]), lkey=top, remote_addr=2**63 - 1, rkey=top, nbytes=2**32 - 1)

    assert walk(batch)[0][4:] == ([(2**63 - 1, 2**32 - 1, 2**32 - 1)], 2**63 - 1, 2**32 - 1)


@pytest.mark.parametrize("name", ["nbytes", "lkey", "rkey"])
@pytest.mark.parametrize("value", [2**32, -1, np.array([1, 2**32]), np.array([1, -1]), np.array([2**33, 5], np.uint64)])
def test_a_number_that_does_not_fit_is_never_truncated(name: str, value: Any) -> None:
    batch = WorkRequestBatch(2)
    fill(batch, 1)
    before = walk(batch)

    with pytest.raises(UsageError, match="does not fit 32 bits"):
        fill(batch, 2, **{name: value})

    assert walk(batch) == before


@pytest.mark.parametrize("count", [0, 5])
def test_a_chain_that_the_batch_does_not_hold_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match="1 to 4"):
        fill(WorkRequestBatch(4), count)


def test_columns_of_different_length_are_refused() -> None:
    batch = WorkRequestBatch(4)
    fill(batch, 3)

    with pytest.raises(ValueError, match="broadcast"):
        fill(batch, 3, remote_addr=np.arange(2))

    assert batch.count == 0, "half of it is written: it must not be posted"


def test_a_full_batch_takes_no_more() -> None:
    batch = WorkRequestBatch(1)
    batch.append_notice(1)

    with pytest.raises(UsageError, match="in use"):
        batch.append_notice(2)
    with pytest.raises(UsageError, match="first 2 of 1"):
        batch.truncate(2)
    with pytest.raises(UsageError, match="0 work requests"):
        WorkRequestBatch(0)


def test_the_views_are_for_reading_only() -> None:
    batch = WorkRequestBatch(1)
    batch.append_notice(1)

    with pytest.raises(ValueError, match="read-only"):
        batch.requests["rkey"] = 5


def test_requests_do_not_straddle_cache_lines() -> None:
    assert all(int(ffi.cast("uintptr_t", WorkRequestBatch(count).first)) % 64 == 0 for count in (1, 3, 64))


@pytest.mark.parametrize(
    "changes",
    [
        {"local_addr": np.array([0.5, 1.5])},
        {"remote_addr": np.array([0.5, 1.5])},
        {"remote_addr": ["a", "b"]},
        {"lkey": np.array([0.5, 1.5])},
        {"rkey": None},
        {"rkey": True},
        {"nbytes": 4096.0},
        {"nbytes": "4096"},
        {"local_addr": 5},
        {"local_addr": [1, 2]},
        {"nbytes": np.array([1, 2, 3])},
    ],
)
def test_what_is_no_column_of_integers_is_refused(changes: dict[str, Any]) -> None:
    batch = WorkRequestBatch(4)

    with pytest.raises(UsageError):
        fill(batch, 2, **changes)
