"""What every contender carries: workloads, the blocks they move, and the pools those blocks lie in.

Pure numpy; knows no transfer engine, process or clock. Imported on both sides of every contender, so it must not need
anything but numpy. Processes are in `processes.py`; the order of measurements is in `peers.py`.

A pool has two halves. The lower half is the source: it holds a pattern that names the side and the position, and no
transfer may change it. The upper half is the destination: zero, except where a transfer has just landed. Both checks
follow from that: a block is right when it holds the other side's pattern of its source position, and nothing else was
touched when the lower half still holds its own pattern and the rest of the upper half is still zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Side = Literal["initiator", "target"]
Operation = Literal["write", "read"]

OPERATIONS: Final[tuple[Operation, ...]] = ("write", "read")
POOL_NBYTES: Final = 512 << 20
PAGE_NBYTES: Final = 4096
PATTERN_STEP: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: odd, so no two words of a pool are equal
PATTERN_SALTS: Final[dict[Side, np.uint64]] = {"initiator": np.uint64(7), "target": np.uint64(11)}
CHUNK_WORDS: Final = 1 << 19  # 4 MiB: patterns are made in pieces that stay in the cache


@dataclass(frozen=True)
class Workload:
    """`count` blocks of `block_nbytes`, moved in one batch or, for latency, in `count` transfers in turn."""

    name: str
    block_nbytes: int
    count: int
    is_latency: bool = False

    @property
    def nbytes(self) -> int:
        return self.block_nbytes * self.count


WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload("64KiB", 64 << 10, 1024),
        Workload("4KiB", 4 << 10, 16384),
        Workload("latency", 4 << 10, 1000, is_latency=True),
    )
}


@dataclass(frozen=True)
class Blocks:
    """The blocks of one batch: byte offsets into the source's and the destination's pool, row for row."""

    operation: Operation
    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    block_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.block_nbytes * len(self.source)

    @property
    def source_side(self) -> Side:
        return "initiator" if self.operation == "write" else "target"

    @property
    def destination_side(self) -> Side:
        return "target" if self.operation == "write" else "initiator"

    def addresses(self, local_base: int, remote_base: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the (local, remote) absolute addresses, given where the initiator's and the target's pool start."""
        if self.operation == "write":
            return self.source + local_base, self.destination + remote_base
        return self.destination + local_base, self.source + remote_base


def plan_offsets(
    block_nbytes: int, count: int, pool_nbytes: int, *, half: Literal["source", "destination"], seed: int
) -> NDArray[np.int64]:
    """Return the offsets of `count` blocks of one half, in random order and no two of them adjacent."""
    half_nbytes = pool_nbytes // 2
    slots = half_nbytes // block_nbytes // 2  # every second block, so that neighbours cannot be joined into one copy
    if count > slots:
        raise ValueError(f"{count} blocks of {block_nbytes} bytes do not fit a pool of {pool_nbytes} bytes: {slots} do")
    chosen = np.random.default_rng(seed).permutation(slots)[:count].astype(np.int64)
    return chosen * (2 * block_nbytes) + (half_nbytes if half == "destination" else 0)


def plan_blocks(workload: Workload, operation: Operation, pool_nbytes: int = POOL_NBYTES) -> Blocks:
    """Return the blocks of a workload; the same ones for every contender and in every run."""
    block_nbytes, count = workload.block_nbytes, workload.count
    source = plan_offsets(block_nbytes, count, pool_nbytes, half="source", seed=block_nbytes + 1)
    destination = plan_offsets(block_nbytes, count, pool_nbytes, half="destination", seed=block_nbytes + 2)
    return Blocks(operation, source, destination, block_nbytes)


def allocate_anonymous(nbytes: int) -> NDArray[np.uint8]:
    """Return page-aligned anonymous memory (numpy asks for huge pages itself), as a KV pool in host memory is."""
    raw = np.empty(nbytes + PAGE_NBYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_NBYTES
    return raw[start : start + nbytes]


class Pool:
    """One side's memory with the patterns in it; see the top of this file for what lies where."""

    def __init__(self, memory: NDArray[np.uint8], side: Side) -> None:
        self.memory = memory
        self.side = side
        self.half_nbytes = memory.nbytes // 2
        self.fill()

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    def fill(self) -> None:
        """Write the side's pattern into the lower half and zeros into the upper one; touches every page."""
        words = self.memory[: self.half_nbytes].view(np.uint64)
        for start in range(0, words.size, CHUNK_WORDS):
            piece = words[start : start + CHUNK_WORDS]
            piece[:] = _pattern(start, piece.size, self.side)
        self.clear_all()

    def clear_all(self) -> None:
        """Zero the whole upper half."""
        self.memory[self.half_nbytes :] = 0

    def clear(self, blocks: Blocks) -> None:
        """Zero the destination blocks, so that a transfer that moves nothing cannot pass for one that did."""
        self._rows(blocks)[blocks.destination // blocks.block_nbytes] = 0

    def count_wrong(self, blocks: Blocks) -> int:
        """Return how many destination blocks do not hold, byte for byte, what their source holds."""
        rows = self._rows(blocks).view(np.uint64)
        words_per_block = blocks.block_nbytes // 8
        first_block = _pattern(0, words_per_block, blocks.source_side)
        wrong = 0
        step = max(1, CHUNK_WORDS // words_per_block)
        for start in range(0, len(blocks.source), step):
            source_words = (blocks.source[start : start + step] // 8).astype(np.uint64)
            expected = first_block[None, :] + (source_words * PATTERN_STEP)[:, None]
            found = rows[blocks.destination[start : start + step] // blocks.block_nbytes]
            wrong += int((expected != found).any(axis=1).sum())
        return wrong

    def count_touched(self, blocks: Blocks) -> int:
        """Return how many places outside the destination blocks changed since `fill`: 4 MiB chunks of the lower half,
        blocks of the upper one."""
        touched = 0
        words = self.memory[: self.half_nbytes].view(np.uint64)
        for start in range(0, words.size, CHUNK_WORDS):
            piece = words[start : start + CHUNK_WORDS]
            touched += not np.array_equal(piece, _pattern(start, piece.size, self.side))
        rows = self._rows(blocks)
        is_outside = np.ones(len(rows), bool)
        is_outside[: self.half_nbytes // blocks.block_nbytes] = False
        is_outside[blocks.destination // blocks.block_nbytes] = False
        outside = np.nonzero(is_outside)[0]
        step = max(1, 8 * CHUNK_WORDS // blocks.block_nbytes)
        for start in range(0, len(outside), step):
            touched += int(rows[outside[start : start + step]].any(axis=1).sum())
        return touched

    def _rows(self, blocks: Blocks) -> NDArray[np.uint8]:
        return self.memory.reshape(-1, blocks.block_nbytes)


def _pattern(start_word: int, count: int, side: Side) -> NDArray[np.uint64]:
    words = np.arange(start_word, start_word + count, dtype=np.uint64)
    return words * PATTERN_STEP + PATTERN_SALTS[side]
