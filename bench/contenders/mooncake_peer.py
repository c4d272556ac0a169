"""Mooncake's TransferEngine (mooncake-transfer-engine-non-cuda), protocol tcp, handshake between the two processes.

With `is_async` a batch is submitted and then waited for; a single transfer is submitted and its status asked for until
it has ended. `busy` names work that the target does meanwhile.
"""

from __future__ import annotations

import os
import threading
from time import perf_counter, sleep
from typing import Any

import numpy as np

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # both read when the module below is loaded
os.environ.setdefault("GLOG_minloglevel", "2")

from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

from contenders.base import Peer, run_peer
from harness import Blocks, Pool, Side, allocate_anonymous

# Measured: above about 2,000 rows in a batch its tcp returns -1, refuses for seconds after, and goes on writing.
BATCH_ROWS = 1024


def _count() -> None:
    """Hold the GIL, but for what the interpreter takes from every thread (sys.getswitchinterval)."""
    number = 0
    while True:
        number += 1


def _multiply() -> None:
    """Work without the GIL, as models do, and take it between two calls of some milliseconds."""
    first = np.ones(1 << 20, np.float32)
    second, product = first.copy(), first.copy()
    while True:
        for _ in range(10):
            np.multiply(first, second, out=product)


BUSY = {"python": _count, "numpy": _multiply}
"""What else the target's process does, by name."""


class MooncakePeer(Peer):
    """One engine with one registered numpy pool."""

    def __init__(self, *, side: Side, name: str, pool_nbytes: int, is_async: bool = False, busy: str = "") -> None:
        super().__init__()
        self._is_async = is_async
        if busy and side == "target":
            threading.Thread(target=BUSY[busy], daemon=True).start()
        self._engine = TransferEngine()
        _check("initialize", self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self._pool = self.pools[side] = Pool(allocate_anonymous(pool_nbytes), side)
        _check("register_memory", self._engine.register_memory(self._pool.address, pool_nbytes))

    def card(self) -> tuple[str, int]:
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self._pool.address

    def connect(self, card: tuple[str, int]) -> None:
        self._target, self._remote_base = card

    def prepare(self, blocks: Blocks) -> Any:
        local, remote = (column.tolist() for column in blocks.addresses(self._pool.address, self._remote_base))
        nbytes = [blocks.block_nbytes] * len(local)
        starts = range(0, len(local), BATCH_ROWS)
        return [tuple(column[start : start + BATCH_ROWS] for column in (local, remote, nbytes)) for start in starts]

    def transfer(self, blocks: Blocks, prepared: Any) -> float:
        if self._is_async:
            return self._transfer_async(blocks, prepared)
        is_write = blocks.operation == "write"
        move = self._engine.batch_transfer_sync_write if is_write else self._engine.batch_transfer_sync_read
        start = perf_counter()
        for local, remote, nbytes in prepared:
            _check("batch transfer", move(self._target, local, remote, nbytes))
        return perf_counter() - start

    def _transfer_async(self, blocks: Blocks, prepared: Any) -> float:
        is_write = blocks.operation == "write"
        submit = self._engine.batch_transfer_async_write if is_write else self._engine.batch_transfer_async_read
        start = perf_counter()
        for local, remote, nbytes in prepared:  # one at a time: Mooncake refuses what its queue does not hold
            number = submit(self._target, local, remote, nbytes)
            _check("wait for a batch", self._engine.get_batch_transfer_status([number]))
        return perf_counter() - start

    def transfer_each(self, blocks: Blocks) -> list[float]:
        move = self._submit_and_ask if self._is_async else self._move
        local, remote = (column.tolist() for column in blocks.addresses(self._pool.address, self._remote_base))
        seconds = []
        for local_address, remote_address in zip(local, remote, strict=True):
            start = perf_counter()
            move(blocks, local_address, remote_address)
            seconds.append(perf_counter() - start)
        return seconds

    def _move(self, blocks: Blocks, local: int, remote: int) -> None:
        move = self._engine.transfer_sync_write if blocks.operation == "write" else self._engine.transfer_sync_read
        _check("transfer", move(self._target, local, remote, blocks.block_nbytes))

    def _submit_and_ask(self, blocks: Blocks, local: int, remote: int) -> None:
        is_write = blocks.operation == "write"
        submit = self._engine.batch_transfer_async_write if is_write else self._engine.batch_transfer_async_read
        number = submit(self._target, [local], [remote], [blocks.block_nbytes])
        while not (status := self._engine.transfer_check_status(number)):
            sleep(0)  # as LMCache, but for how long it sleeps
        _check("asynchronous transfer", 0 if status == 1 else status)


def _check(what: str, code: int) -> None:
    if code != 0:
        raise RuntimeError(f"Mooncake's {what} returned {code}")


if __name__ == "__main__":
    run_peer(MooncakePeer)
