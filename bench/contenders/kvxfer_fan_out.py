"""One kvxfer engine with many peers: the initiator of `extras.py`. Its targets are ordinary `kvxfer_peer` processes."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

import kvxfer
from contenders.base import Measurement
from harness import Blocks, Pool
from processes import cpu_time_s, die_with_parent, memory_nbytes, public_methods, serve

TIMEOUT_S = 60.0
FIRST_TRANSFER_NBYTES = 4096


class FanOut:
    """The engine, its pool, and one open segment for each target that was opened."""

    def __init__(self, *, pool_nbytes: int, target_pool_nbytes: int, transport: str) -> None:
        self._transport = transport
        self._target_half_nbytes = target_pool_nbytes // 2
        transports = ("tcp",) if transport == "tcp" else ("shm", "tcp")
        self._engine = kvxfer.TransferEngine(host="127.0.0.1", port=0, transports=transports)
        self._pool = Pool(self._engine.allocate(pool_nbytes).array, "initiator")
        self._segments: list[Any] = []
        self._remote_bases: list[int] = []
        self._blocks: dict[str, list[Blocks]] = {}

    def open(self, card: tuple[str, int]) -> float:
        """Open one more target and return the seconds from its address to its first 4 KiB written."""
        address, remote_base = card
        start = perf_counter()
        segment = self._engine.open_segment(address)
        first_address = remote_base + self._target_half_nbytes  # in its destination half, where a write may land
        self._engine.write(segment, self._pool.address, first_address, FIRST_TRANSFER_NBYTES)
        seconds = perf_counter() - start
        if segment.transport != self._transport:
            raise RuntimeError(f"the segment uses {segment.transport}, but {self._transport} is to be measured")
        self._segments.append(segment)
        self._remote_bases.append(remote_base)
        return seconds

    def plan(self, key: str, blocks: list[Blocks]) -> None:
        """Keep one batch for each open target."""
        self._blocks[key] = blocks

    def clear(self, key: str) -> None:
        for blocks in self._blocks[key]:
            self._pool.clear(blocks)

    def count_wrong(self, key: str, indices: list[int]) -> int:
        return sum(self._pool.count_wrong(self._blocks[key][index]) for index in indices)

    def at_once(self, key: str, pids: list[int]) -> Measurement:
        """Submit every target's batch, then wait for all of them."""
        rows = self._rows(key)

        def move() -> None:
            self._engine.wait_all([submit(*row) for submit, row in rows], timeout_s=TIMEOUT_S)

        return self._timed(move, sum(blocks.nbytes for blocks in self._blocks[key]), pids)

    def one_of_them(self, key: str, index: int, pids: list[int]) -> Measurement:
        """Move one target's batch alone."""
        submit, row = self._rows(key)[index]
        nbytes = self._blocks[key][index].nbytes
        return self._timed(lambda: submit(*row).wait(timeout_s=TIMEOUT_S), nbytes, pids)

    def in_turn(self, key: str, pids: list[int]) -> Measurement:
        """Move every target's batch, each alone: the bytes and the memory of `at_once`, one peer at a time."""
        rows = self._rows(key)

        def move() -> None:
            for submit, row in rows:
                submit(*row).wait(timeout_s=TIMEOUT_S)

        return self._timed(move, sum(blocks.nbytes for blocks in self._blocks[key]), pids)

    def submit(self, row_nbytes: int, count: int) -> tuple[float, float]:
        """Return the seconds until `count` scattered rows to the first target were submitted, and were done."""
        stride = 2 * row_nbytes
        offsets = np.random.default_rng(1).permutation(count).astype(np.int64) * stride
        local = self._pool.address + offsets
        remote = self._remote_bases[0] + self._target_half_nbytes + offsets
        start = perf_counter()
        batch = self._engine.submit_write(self._segments[0], local, remote, row_nbytes)
        submitted_s = perf_counter() - start
        batch.wait(timeout_s=TIMEOUT_S)
        return submitted_s, perf_counter() - start

    def memory(self) -> int:
        """Return the private memory of this process: mapped pools of peers are not in it, as they cost nothing here."""
        gc.collect()
        return memory_nbytes("RssAnon")

    def idle_cpu(self, seconds: float, other_pids: list[int]) -> tuple[float, float]:
        """Return the share of a core that this process and, on average, one of the others uses while nothing moves."""
        own_s, others_s, start = cpu_time_s(os.getpid()), cpu_time_s(*other_pids), perf_counter()
        time.sleep(seconds)
        elapsed_s = perf_counter() - start
        own = (cpu_time_s(os.getpid()) - own_s) / elapsed_s
        others = (cpu_time_s(*other_pids) - others_s) / elapsed_s
        return own, others / max(1, len(other_pids))

    def _rows(self, key: str) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
        rows = []
        for blocks, segment, base in zip(self._blocks[key], self._segments, self._remote_bases, strict=True):
            local, remote = blocks.addresses(self._pool.address, base)
            is_write = blocks.operation == "write"
            submit = self._engine.submit_write if is_write else self._engine.submit_read
            rows.append((submit, (segment, local, remote, blocks.block_nbytes)))
        return rows

    def _timed(self, move: Callable[[], object], nbytes: int, pids: Sequence[int]) -> Measurement:
        pids = [os.getpid(), *pids]
        cpu_before_s, start = cpu_time_s(*pids), perf_counter()
        move()
        seconds = perf_counter() - start
        return Measurement([seconds], nbytes, cpu_time_s(*pids) - cpu_before_s)


def main() -> None:
    die_with_parent()
    serve(public_methods(FanOut(**json.loads(sys.argv[1]))))
    os._exit(0)


if __name__ == "__main__":
    main()
