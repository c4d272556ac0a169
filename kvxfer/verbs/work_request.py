"""A chain of work requests for a send queue, as numpy columns laid over the C structs.

One batch is one arena: `capacity` times struct ibv_send_wr, then as many struct ibv_sge, one for each request. What is
the same for every chain (next, sg_list, num_sge) is written once; `fill` writes columns, never single requests.
`QueuePair.post_send` posts the chain by one call; the device has copied it when that returns, so a batch is free for
the next chain at once. One thread at a time may use it. Figures: bench/bench_work_requests.py.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import UsageError
from kvxfer.verbs.enums import SendFlags, WorkOpcode
from kvxfer.verbs.library import ffi

if TYPE_CHECKING:
    from kvxfer.verbs.library import CData

__all__ = ["SEND_WR_DTYPE", "SGE_DTYPE", "Column", "WorkRequestBatch"]

Column = int | npt.NDArray[np.integer[Any]]
"""A column with a value for each request, or one value for all."""

SEND_WR_DTYPE = np.dtype(
    {
        "names": [
            "wr_id",
            "next",
            "sg_list",
            "num_sge",
            "opcode",
            "send_flags",
            "imm_data",
            "remote_addr",
            "rkey",
        ],
        "formats": ["u8", "u8", "u8", "i4", "i4", "u4", ">u4", "u8", "u4"],
        "offsets": [0, 8, 16, 24, 28, 32, 36, 40, 48],
        "itemsize": 128,
    }
)
"""struct ibv_send_wr as far as RDMA reads and writes use it."""

SGE_DTYPE = np.dtype([("addr", "u8"), ("length", "u4"), ("lkey", "u4")])
"""struct ibv_sge."""

_WR_NBYTES = SEND_WR_DTYPE.itemsize
_SGE_NBYTES = SGE_DTYPE.itemsize
_WR_WORDS = _WR_NBYTES // 8
_NEXT_WORD, _OPCODE_WORD, _FLAGS_WORD, _REMOTE_WORD = 1, 3, 4, 5
_RKEY_HALF, _LENGTH_HALF, _LKEY_HALF = 12, 2, 3
_CACHE_LINE_NBYTES = 64
_INT64, _UINT32 = np.dtype(np.int64), np.dtype(np.uint32)
_UINT32_MAX = 2**32 - 1
_SIGNALED = int(SendFlags.SIGNALED)

_pack_request: Callable[..., None] = struct.Struct("=QQQiiIIQQ").pack_into
_pack_element: Callable[..., None] = struct.Struct("=QII").pack_into


def _word(low_address: int, high_address: int) -> int:
    """Return the 64-bit word that holds two 32-bit fields, in the order of their addresses."""
    return int.from_bytes(struct.pack("=II", low_address, high_address), sys.byteorder)


class WorkRequestBatch:
    """A chain of at most `capacity` work requests, each with one local range."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise UsageError(f"a batch of {capacity} work requests.", remedy="Give a capacity of 1 at least.")
        self.capacity = capacity
        self.count = 0
        """Requests of the chain."""
        self._arena = np.zeros(capacity * (_WR_NBYTES + _SGE_NBYTES) + _CACHE_LINE_NBYTES, np.uint8)
        start = -self._arena.ctypes.data % _CACHE_LINE_NBYTES
        border = start + capacity * _WR_NBYTES
        requests = self._arena[start:border]
        elements = self._arena[border : border + capacity * _SGE_NBYTES]
        self.first: CData = ffi.cast("struct ibv_send_wr *", requests.ctypes.data)
        """The chain for C; `first + n` is its n-th request."""
        self._address = int(requests.ctypes.data)
        self._elements_address = int(elements.ctypes.data)
        self._bytes = self._arena.data[start:]
        self._border = capacity * _WR_NBYTES
        self._flat = requests.data.cast("q")  # a single store costs 60 ns here, 90 in numpy

        self._requests = requests.view(SEND_WR_DTYPE)
        self._elements = elements.view(SGE_DTYPE)
        self._requests.flags.writeable = self._elements.flags.writeable = False
        # Plain strided columns: half the cost of the same assignment to a field of a structured array.
        words = requests.view(np.int64).reshape(capacity, _WR_WORDS)
        halves = elements.view(np.uint32).reshape(capacity, _SGE_NBYTES // 4)
        self._wr_id = words[:, 0]
        self._opcodes = words[:, _OPCODE_WORD]
        self._flags = words[:, _FLAGS_WORD]
        columns: tuple[npt.NDArray[Any], ...] = (
            elements.view(np.int64).reshape(capacity, _SGE_NBYTES // 8)[:, 0],
            halves[:, _LKEY_HALF],
            words[:, _REMOTE_WORD],
            requests.view(np.uint32).reshape(capacity, _WR_NBYTES // 4)[:, _RKEY_HALF],
            halves[:, _LENGTH_HALF],
        )
        self._rows = np.arange(capacity, dtype=np.int64)
        base = np.zeros(1, np.int64)
        self._base = base.reshape(())
        self._base_word = base.data  # the same word: a store costs half of numpy's here

        words[:, _NEXT_WORD] = self._address + _WR_NBYTES * (self._rows + 1)
        words[-1, _NEXT_WORD] = 0
        words[:, 2] = self._elements_address + _SGE_NBYTES * self._rows
        self._pattern: tuple[int, int, int] = (0, 0, 0)
        self._pattern_count = 0  # rows that hold the opcode and the flags of the pattern
        self._end_flags = 0  # of the last request, before it was marked
        self._whole = (*columns, self._rows, self._wr_id)  # what a long batch begins with, again and again
        self._views, self._views_count = self._whole, capacity

    @property
    def requests(self) -> npt.NDArray[np.void]:
        """The chain as rows of SEND_WR_DTYPE, read-only; valid until it changes."""
        return self._requests[: self.count]

    @property
    def elements(self) -> npt.NDArray[np.void]:
        """The local ranges as rows of SGE_DTYPE, read-only; row n belongs to request n."""
        return self._elements[: self.count]

    def fill(
        self,
        opcode: WorkOpcode | int,
        *,
        local_addr: npt.NDArray[np.integer[Any]],
        lkey: Column,
        remote_addr: Column,
        rkey: Column,
        nbytes: Column,
        wr_id: int = 0,
        signal_every: int = 0,
        send_flags: int = 0,
    ) -> None:
        """Make the chain these rows, in their order.

        local_addr, remote_addr: shape (n,), 1 <= n <= capacity; int64 is fastest. lkey, rkey, nbytes: shape (n,) or one
        value for all; uint32 goes in as it is, other integers are checked first.
        wr_id: of the first request; each next has one more.
        signal_every: each so many-th request gives a completion, and the last always; 0 means the last only. Send-queue
        slots come back by completions, so at most half the queue should lie between two.
        send_flags: for all requests, such as SendFlags.FENCE.

        Raises UsageError for columns that are none of integers, differ in length, or do not fit; the chain may be empty
        then.
        """
        if getattr(local_addr, "ndim", 0) != 1:
            raise UsageError(
                f"local_addr is {local_addr!r:.80}, no column.", remedy="Give a 1-D numpy array; `append` takes ints."
            )
        count = len(local_addr)
        if not 0 < count <= self.capacity:
            raise UsageError(
                f"{count} work requests, the batch holds 1 to {self.capacity}.",
                remedy="Cut the rows into chains of that many.",
            )
        for column in (local_addr, remote_addr):
            if getattr(column, "dtype", None) is not _INT64:
                _check_integers(column)
        for column in (lkey, rkey, nbytes):
            if getattr(column, "dtype", None) is not _UINT32:
                _check_uint32(column)
        if count == self.capacity:
            views = self._whole
        else:
            if count != self._views_count:
                self._views, self._views_count = tuple([column[:count] for column in self._whole]), count
            views = self._views
        local, local_key, remote, remote_key, length, rows, identities = views
        try:
            local[...] = local_addr
            local_key[...] = lkey
            remote[...] = remote_addr
            remote_key[...] = rkey
            length[...] = nbytes
        except ValueError as exc:
            self.clear()
            raise UsageError(
                f"the columns of {count} work requests differ in length: {exc}.",
                remedy="Give each column a value for each request, or one int for all.",
            ) from exc
        self._base_word[0] = wr_id
        np.add(rows, self._base, identities)
        pattern = (opcode, signal_every, send_flags)
        if count != self.count or count > self._pattern_count or pattern != self._pattern:
            self.clear()
            self._write_pattern(pattern, count)
            self._end(count)

    def append(
        self,
        opcode: WorkOpcode | int,
        *,
        local_addr: int,
        lkey: int,
        remote_addr: int,
        rkey: int,
        nbytes: int,
        wr_id: int = 0,
        send_flags: int = 0,
    ) -> None:
        """Put one request at the end of the chain; after `clear`, for one request, half the cost of `fill`."""
        row = self._next_row()
        _pack_element(self._bytes, self._border + row * _SGE_NBYTES, local_addr, nbytes, lkey)
        self._append(row, wr_id, 1, opcode, send_flags, 0, remote_addr, rkey)

    def append_notice(self, imm_data: int, *, wr_id: int = 0, send_flags: int = 0) -> None:
        """Put a WRITE_WITH_IMM of zero bytes at the end: the peer gets `imm_data` (32 bits) after all that is before.

        It touches no memory and needs no key; at the peer it consumes one receive.
        """
        row = self._next_row()
        imm = int.from_bytes(imm_data.to_bytes(4, "big"), sys.byteorder)
        self._append(row, wr_id, 0, WorkOpcode.RDMA_WRITE_WITH_IMM, send_flags, imm, 0, 0)

    def truncate(self, count: int) -> None:
        """Make the chain end after its first `count` requests, the last of them signalled."""
        if not 0 < count <= self.count:
            raise UsageError(f"the first {count} of {self.count} work requests.", remedy=f"Give 1 to {self.count}.")
        self._join()
        self._end(count)

    def clear(self) -> None:
        """Make the chain empty."""
        if self.count:
            self._join()
            self.count = 0

    def _write_pattern(self, pattern: tuple[int, int, int], count: int) -> None:
        """Have the first `count` rows hold the opcode and the flags; those that do already are left alone."""
        opcode, every, flags = pattern
        if pattern != self._pattern:
            self._pattern, self._pattern_count = (int(opcode), every, int(flags)), 0
        start = self._pattern_count
        if count <= start:
            return
        self._opcodes[start:count] = _word(1, opcode)
        self._flags[start:count] = _word(flags, 0)
        if every > 0:
            first = start + (every - 1 - start) % every
            self._flags[first:count:every] = _word(flags | _SIGNALED, 0)
        self._pattern_count = count

    def _next_row(self) -> int:
        row = self.count
        if row == self.capacity:
            raise UsageError(f"all {row} work requests of the batch are in use.", remedy="Post it and clear it.")
        return row

    def _append(
        self, row: int, wr_id: int, num_sge: int, opcode: int, send_flags: int, imm: int, remote_addr: int, rkey: int
    ) -> None:
        element = self._elements_address + row * _SGE_NBYTES
        _pack_request(
            self._bytes, row * _WR_NBYTES, wr_id, 0, element, num_sge, opcode, send_flags, imm, remote_addr, rkey
        )
        if row:
            self._join()
        self._pattern_count = min(self._pattern_count, row)
        self._end(row + 1)

    def _end(self, count: int) -> None:
        """Cut the chain after `count` requests and have the last give a completion."""
        last = (count - 1) * _WR_WORDS
        flat = self._flat
        flat[last + _NEXT_WORD] = 0
        self._end_flags = flags = flat[last + _FLAGS_WORD]
        flat[last + _FLAGS_WORD] = flags | _SIGNALED_WORD
        self.count = count

    def _join(self) -> None:
        """Undo `_end`."""
        row = self.count - 1
        last = row * _WR_WORDS
        self._flat[last + _NEXT_WORD] = self._address + (row + 1) * _WR_NBYTES if row + 1 < self.capacity else 0
        self._flat[last + _FLAGS_WORD] = self._end_flags

    def __repr__(self) -> str:
        return f"<WorkRequestBatch {self.count} of {self.capacity}>"


_SIGNALED_WORD = _word(_SIGNALED, 0)


def _check_integers(column: Column) -> None:
    """Refuse what is no integer or column of them: numpy would cut fractions off without a word."""
    dtype = getattr(column, "dtype", None)
    is_int = isinstance(column, int) and not isinstance(column, bool)
    if not is_int and (dtype is None or dtype.kind not in "iu"):
        kind = f"a {type(column).__name__}" + ("" if dtype is None else f" of {dtype}")
        raise UsageError(f"a column of work requests is {kind}.", remedy="Give an int or a numpy array of integers.")


def _check_uint32(column: Column) -> None:
    """Refuse what does not fit a 32-bit field: numpy would cut it off without a word."""
    _check_integers(column)
    if isinstance(column, int):
        fits = 0 <= column <= _UINT32_MAX
    else:
        # One pass tells of a negative value as well as of one that is too large; min and max are two, and dearer.
        fits = 0 <= np.bitwise_or.reduce(column) <= _UINT32_MAX
    if not fits:
        raise UsageError(
            f"a length or a key between {np.min(column)} and {np.max(column)} does not fit 32 bits.",
            remedy="Cut messages at the port's max_msg_sz.",
        )
