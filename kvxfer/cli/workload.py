"""What demo and bench move, and how they prove that it arrived: plans of scattered blocks, pools, patterns, timing.

Every 8-byte word of a pool says where it was and in which round it was written, so that a block at the wrong place, an
old block and a torn block all differ from what is expected. Blocks are random and never adjacent, because adjacent ones
would be joined into one copy. Read next: `demo.py`, `bench.py`, and `child.py` for the pools in the other process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvxfer.errors import UsageError

if TYPE_CHECKING:
    import kvxfer

__all__ = ["Lane", "Plan", "Pool", "ReadBack", "Remote", "copy_blocks", "median", "pool_nbytes_for"]

WORD_NBYTES = 8
STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: consecutive words differ in all their bytes
PIECE_WORDS = 1 << 16
"""Patterns are made and compared this many words of a block, and 8 MiB of a pool, at a time."""
TILE_WORDS = 1 << 20
PAGE_NBYTES = 4096

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """Which blocks move: `source[i]` of one pool to `destination[i]` of the other.

    source: even block numbers, destination: odd ones, shape (count,), each once, in random order; the same on both
    sides of the network for the same numbers.
    """

    pool_nbytes: int
    block_nbytes: int
    count: int
    source: Ids = field(init=False, compare=False, repr=False)
    destination: Ids = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.block_nbytes % WORD_NBYTES:
            raise UsageError(
                f"a block of {self.block_nbytes} bytes cannot be verified.", remedy="Use a multiple of 8 bytes."
            )
        needed = pool_nbytes_for(self.block_nbytes, self.count)
        if self.pool_nbytes < needed:
            raise UsageError(
                f"{self.count} scattered blocks of {self.block_nbytes} bytes need a pool of {needed} bytes; this "
                f"one has {self.pool_nbytes}.",
                remedy="Take fewer or smaller blocks, or a larger pool.",
                needed_nbytes=needed,
                pool_nbytes=self.pool_nbytes,
            )
        rng = np.random.default_rng(self.block_nbytes)
        half = self.pool_nbytes // self.block_nbytes // 2
        object.__setattr__(self, "source", rng.permutation(half)[: self.count] * 2)
        object.__setattr__(self, "destination", rng.permutation(half)[: self.count] * 2 + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of one batch."""
        return self.block_nbytes * self.count


def pool_nbytes_for(block_nbytes: int, count: int) -> int:
    """Return the least pool in which `count` blocks can be scattered: every second block is a gap."""
    return 2 * block_nbytes * count


class Pool:
    """Memory with a known content, and the questions whether it changed where it should and nowhere else.

    memory: shape (nbytes,), uint8, 8-byte aligned; filled with the pool's own pattern when the pool is made.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], salt: int) -> None:
        self.memory = memory
        self.salt = salt
        self._words: Words = memory[: memory.size // WORD_NBYTES * WORD_NBYTES].view(np.uint64)
        self._plan: Plan | None = None
        self._source_salt = salt
        for start in range(0, self._words.size, PIECE_WORDS):
            piece = self._words[start : start + PIECE_WORDS]
            piece[:] = _pattern(np.array([start]), piece.size, salt)[0]

    def use(self, plan: Plan) -> None:
        """Begin with another plan: every block is as it was at first."""
        if self._plan is not None:
            self._fill(self._plan.source, self.salt)
            self._fill(self._plan.destination, self.salt)
        self._plan = plan
        self._source_salt = self.salt

    def fill_source(self, salt: int) -> None:
        """Write the pattern of this round into the source blocks."""
        self._fill(self.plan.source, salt)
        self._source_salt = salt

    def clear_destination(self) -> None:
        """Make sure that no destination block holds what is going to arrive."""
        self._fill(self.plan.destination, self.salt)

    def wrong_in_destination(self, salt: int) -> int:
        """Return how many destination blocks differ from the source blocks of a pool filled with `salt`."""
        return self._wrong(self.plan.destination, self.plan.source, salt)

    def wrong_in_rest(self) -> int:
        """Return how many blocks changed that should not have."""
        plan = self.plan
        is_moved = np.zeros(self._blocks.shape[0], bool)
        is_moved[plan.source] = is_moved[plan.destination] = True
        rest = np.flatnonzero(~is_moved)
        wrong = self._wrong(rest, rest, self.salt) + self._wrong(plan.source, plan.source, self._source_salt)
        tail = self._words[self._blocks.size :]
        return wrong + int((tail != _pattern(np.array([self._blocks.size]), tail.size, self.salt)[0]).any())

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        assert self._plan is not None, "Pool.use comes first"
        return self._plan

    @property
    def _blocks(self) -> Words:
        words = self.plan.block_nbytes // WORD_NBYTES
        return self._words[: self._words.size // words * words].reshape(-1, words)

    def _fill(self, ids: Ids, salt: int) -> None:
        blocks = self._blocks
        for rows, columns in _tiles(len(ids), blocks.shape[1]):
            starts = ids[rows] * blocks.shape[1] + columns.start
            blocks[ids[rows], columns] = _pattern(starts, columns.stop - columns.start, salt)

    def _wrong(self, ids: Ids, expected_ids: Ids, salt: int) -> int:
        blocks = self._blocks
        is_wrong = np.zeros(len(ids), bool)
        for rows, columns in _tiles(len(ids), blocks.shape[1]):
            starts = expected_ids[rows] * blocks.shape[1] + columns.start
            expected = _pattern(starts, columns.stop - columns.start, salt)
            is_wrong[rows] |= (blocks[ids[rows], columns] != expected).any(axis=1)
        return int(is_wrong.sum())


class Remote(Protocol):
    """The pool on the other side, and what can be asked about it."""

    how: str
    """Who verifies what was written: for the reader of a result."""

    def use(self, plan: Plan) -> None:
        """Begin with another plan."""

    def prepare_write(self) -> None:
        """Make sure that what is going to be written is not there yet."""

    def wrong_after_write(self, salt: int, *, check_rest: bool) -> int:
        """Return how many blocks are not as they should be after a WRITE."""

    def prepare_read(self, salt: int) -> None:
        """Make sure that the source blocks hold the pattern of `salt`."""


class Lane:
    """One way to move bytes, measured: a segment over one transport, a pool on each side."""

    def __init__(
        self,
        label: str,
        engine: kvxfer.TransferEngine,
        segment: Any,
        *,
        local: Pool,
        remote: Remote,
        remote_address: int,
    ) -> None:
        self.label = label
        self.segment = segment
        self.local = local
        self.remote = remote
        self._engine = engine
        self._remote_address = remote_address
        self._local_address = int(local.memory.ctypes.data)
        self._salt = local.salt

    def use(self, plan: Plan) -> None:
        """Begin with another plan on both sides."""
        self.local.use(plan)
        self.remote.use(plan)

    def run(self, operation: str, *, check_rest: bool = False) -> tuple[float, int]:
        """Move the blocks of the plan once; return the seconds it took and the number of wrong blocks."""
        self._salt += 1
        return (self._write if operation == "write" else self._read)(check_rest)

    def copy(self) -> float:
        """Copy the same blocks inside the local pool, by a plain loop; return the seconds it took.

        The blocks are made ready as those of a transfer are, so that the caches hold as much of them.
        """
        self.local.fill_source(self._salt)
        self.local.clear_destination()
        return copy_blocks(self.local.memory, self.local.plan)

    def latencies_s(self, operation: str, nbytes: int, count: int) -> list[float]:
        """Time `count` single transfers of `nbytes` each, one after the other, at different addresses."""
        move = self._engine.write if operation == "write" else self._engine.read
        plan = self.local.plan
        step = max(plan.block_nbytes, nbytes)
        slots = max(1, self.local.memory.size // step)
        offsets = [(at * 7919 % slots) * step for at in range(count)]  # 7919: a prime, so that the walk visits all
        local, remote, segment, clock = self._local_address, self._remote_address, self.segment, time.perf_counter
        seconds = []
        for offset in offsets:
            started = clock()
            move(segment, local + offset, remote + offset, nbytes)
            seconds.append(clock() - started)
        return seconds

    def _write(self, check_rest: bool) -> tuple[float, int]:
        plan = self.local.plan
        self.local.fill_source(self._salt)
        self.remote.prepare_write()
        local, remote = self._columns(plan.source, plan.destination)
        started = time.perf_counter()
        self._engine.write(self.segment, local, remote, plan.block_nbytes)
        seconds = time.perf_counter() - started
        return seconds, self.remote.wrong_after_write(self._salt, check_rest=check_rest)

    def _read(self, check_rest: bool) -> tuple[float, int]:
        plan = self.local.plan
        self.remote.prepare_read(self._salt)
        self.local.clear_destination()
        local, remote = self._columns(plan.destination, plan.source)
        started = time.perf_counter()
        self._engine.read(self.segment, local, remote, plan.block_nbytes)
        seconds = time.perf_counter() - started
        wrong = self.local.wrong_in_destination(self._salt)
        return seconds, wrong + (self.local.wrong_in_rest() if check_rest else 0)

    def _columns(self, local_ids: Ids, remote_ids: Ids) -> tuple[Ids, Ids] | tuple[int, int]:
        """Return the addresses, of a single block as plain ints: the call that a program makes for one block."""
        nbytes = self.local.plan.block_nbytes
        local, remote = self._local_address + local_ids * nbytes, self._remote_address + remote_ids * nbytes
        return (int(local[0]), int(remote[0])) if len(local) == 1 else (local, remote)


class ReadBack:
    """The remote side where only its memory can be reached: what was written is read again and compared here."""

    how = "read back"

    def __init__(self, engine: kvxfer.TransferEngine, segment: Any, local: Pool, remote_address: int) -> None:
        self._engine = engine
        self._segment = segment
        self._local = local
        self._remote_address = remote_address
        self._local_address = int(local.memory.ctypes.data)

    def use(self, plan: Plan) -> None:
        """Nothing to prepare: each round has a pattern of its own."""

    def prepare_write(self) -> None:
        """Nothing to prepare: each round has a pattern of its own."""

    def wrong_after_write(self, salt: int, *, check_rest: bool) -> int:
        """Read the written blocks into the local destination blocks and compare them."""
        del check_rest  # nobody knows what the rest held before
        plan = self._local.plan
        self._local.clear_destination()
        ids = plan.destination * plan.block_nbytes
        self._engine.read(self._segment, self._local_address + ids, self._remote_address + ids, plan.block_nbytes)
        return self._local.wrong_in_destination(salt)

    def prepare_read(self, salt: int) -> None:
        """Write the pattern into the remote source blocks."""
        plan = self._local.plan
        self._local.fill_source(salt)
        ids = plan.source * plan.block_nbytes
        self._engine.write(self._segment, self._local_address + ids, self._remote_address + ids, plan.block_nbytes)


def copy_blocks(memory: npt.NDArray[np.uint8], plan: Plan) -> float:
    """Copy each source block to its destination block, both in `memory`, and return the seconds it took.

    The baseline of all ratios: a memoryview slice per block, which is memcpy at 0.95 of a C loop for 64 KiB blocks.
    """
    view = memory.data
    nbytes = plan.block_nbytes
    pairs = list(zip((plan.destination * nbytes).tolist(), (plan.source * nbytes).tolist(), strict=True))
    started = time.perf_counter()
    for destination, source in pairs:
        view[destination : destination + nbytes] = view[source : source + nbytes]
    return time.perf_counter() - started


def allocate_plain(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return page-aligned memory of the caller's own, as a program has it that never heard of kvxfer."""
    raw = np.empty(nbytes + PAGE_NBYTES, np.uint8)
    offset = -int(raw.ctypes.data) % PAGE_NBYTES
    return raw[offset : offset + nbytes]


def median(values: list[float]) -> float:
    """Return the median of at least one value."""
    return float(np.median(values))


def plan_fields(plan: Plan) -> Mapping[str, int]:
    """Return what the other process needs to make the same plan."""
    return {"pool_nbytes": plan.pool_nbytes, "block_nbytes": plan.block_nbytes, "count": plan.count}


def _pattern(starts: Ids, words: int, salt: int) -> Words:
    """Return the pattern for rows of `words` words that begin at the words `starts`: shape (len(starts), words)."""
    with np.errstate(over="ignore"):  # sums of unsigned words wrap, as they should
        base = np.arange(words, dtype=np.uint64) * np.uint64(STRIDE)
        rows = starts.astype(np.uint64) * np.uint64(STRIDE) + np.uint64(salt * 0xD1B54A32D192ED03 % 2**64)
        words_of_rows: Words = rows[:, None] + base[None, :]
    return words_of_rows


def _tiles(rows: int, words: int) -> Iterator[tuple[slice, slice]]:
    """Cut a matrix of blocks into tiles of at most TILE_WORDS words."""
    width = min(words, PIECE_WORDS)
    height = max(1, TILE_WORDS // max(width, 1))
    for column in range(0, words, width):
        for row in range(0, rows, height):
            yield slice(row, min(row + height, rows)), slice(column, min(column + width, words))
