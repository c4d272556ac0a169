"""kvxfer, over shared memory or TCP; imported from the tree this file lies in."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import kvxfer
from contenders.base import Peer, run_peer
from harness import Blocks, Pool, Side, allocate_anonymous

TIMEOUT_S = 60.0


class KvxferPeer(Peer):
    """One engine with one pool: the engine's own memory (`allocated`), or a numpy array it is told of (`anonymous`)."""

    def __init__(self, *, side: Side, name: str, pool_nbytes: int, transport: str, memory: str) -> None:
        super().__init__()
        transports = ("tcp",) if transport == "tcp" else ("shm", "tcp")
        self._transport = transport
        self._engine = kvxfer.TransferEngine(host="127.0.0.1", port=0, transports=transports)
        if memory == "allocated":
            self._region = self._engine.allocate(pool_nbytes)
            self._pool = Pool(self._region.array, side)
        else:
            self._pool = Pool(allocate_anonymous(pool_nbytes), side)
            self._region = self._engine.register(self._pool.memory)
        self.pools[side] = self._pool

    def card(self) -> tuple[str, int]:
        return self._engine.address, self._pool.address

    def connect(self, card: tuple[str, int]) -> None:
        if self._pool.side == "target":
            return
        address, self._remote_base = card
        self._segment = self._engine.open_segment(address)
        if self._segment.transport != self._transport:
            raise RuntimeError(f"the segment uses {self._segment.transport}, but {self._transport} is to be measured")

    def prepare(self, blocks: Blocks) -> Any:
        return blocks.addresses(self._pool.address, self._remote_base)

    def transfer(self, blocks: Blocks, prepared: Any) -> float:
        local, remote = prepared
        submit = self._engine.submit_write if blocks.operation == "write" else self._engine.submit_read
        start = perf_counter()
        submit(self._segment, local, remote, blocks.block_nbytes).wait(timeout_s=TIMEOUT_S)
        return perf_counter() - start

    def transfer_each(self, blocks: Blocks) -> list[float]:
        move = self._engine.write if blocks.operation == "write" else self._engine.read
        segment, nbytes = self._segment, blocks.block_nbytes
        local, remote = (column.tolist() for column in self.prepare(blocks))
        seconds = []
        for local_address, remote_address in zip(local, remote, strict=True):
            start = perf_counter()
            move(segment, local_address, remote_address, nbytes)
            seconds.append(perf_counter() - start)
        return seconds

    def close(self) -> None:
        self._engine.close()


if __name__ == "__main__":
    run_peer(KvxferPeer)
