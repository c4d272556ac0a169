"""NIXL with its UCX backend; UCX_TLS in the environment chooses the path, unset is UCX's own choice.

`is_tuned` is what makes it quick where cores are few: no progress thread at the initiator, which polls anyway, and
sched_yield in that poll loop, so that the target's progress thread gets the core. Without it, it runs as installed.
"""

from __future__ import annotations

import logging
import os
from time import perf_counter
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

from contenders.base import Peer, run_peer
from harness import Blocks, Pool, Side, allocate_anonymous

logging.disable(logging.INFO)  # its Python layer logs one line for every agent and backend


class NixlPeer(Peer):
    """One agent with one registered numpy pool."""

    def __init__(self, *, side: Side, name: str, pool_nbytes: int, is_tuned: bool) -> None:
        super().__init__()
        has_progress_thread = side == "target" or not is_tuned
        config = nixl_agent_config(backends=["UCX"], enable_prog_thread=has_progress_thread)
        self._agent = nixl_agent(f"{name}-{side}", config)
        self._must_yield = is_tuned
        self._pool = self.pools[side] = Pool(allocate_anonymous(pool_nbytes), side)
        self._agent.register_memory([(self._pool.address, pool_nbytes, 0, "")], "DRAM")

    def card(self) -> tuple[bytes, int]:
        return self._agent.get_agent_metadata(), self._pool.address

    def connect(self, card: tuple[bytes, int]) -> None:
        metadata, self._remote_base = card
        remote_name = self._agent.add_remote_agent(metadata)
        self._remote_name = remote_name.decode() if isinstance(remote_name, bytes) else remote_name

    def prepare(self, blocks: Blocks) -> Any:
        local, remote = blocks.addresses(self._pool.address, self._remote_base)
        return (
            self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(local, blocks.block_nbytes), "DRAM"),
            self._agent.prep_xfer_dlist(self._remote_name, _descriptors(remote, blocks.block_nbytes), "DRAM"),
            np.arange(len(local), dtype=np.int32),
        )

    def transfer(self, blocks: Blocks, prepared: Any) -> float:
        local, remote, rows = prepared
        start = perf_counter()
        handle = self._agent.make_prepped_xfer(blocks.operation.upper(), local, rows, remote, rows)
        self._run(handle)
        seconds = perf_counter() - start
        self._agent.release_xfer_handle(handle)
        return seconds

    def transfer_each(self, blocks: Blocks) -> list[float]:
        agent, operation, nbytes = self._agent, blocks.operation.upper(), blocks.block_nbytes
        local, remote = (column.tolist() for column in blocks.addresses(self._pool.address, self._remote_base))
        seconds = []
        for local_address, remote_address in zip(local, remote, strict=True):
            start = perf_counter()
            handle = agent.initialize_xfer(
                operation,
                agent.get_xfer_descs([(local_address, nbytes, 0)], "DRAM"),
                agent.get_xfer_descs([(remote_address, nbytes, 0)], "DRAM"),
                self._remote_name,
            )
            self._run(handle)
            seconds.append(perf_counter() - start)
            agent.release_xfer_handle(handle)
        return seconds

    def _run(self, handle: Any) -> None:
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
            if self._must_yield:
                os.sched_yield()
        if state != "DONE":
            raise RuntimeError(f"NIXL's transfer ended in state {state}")


def _descriptors(addresses: np.ndarray, nbytes: int) -> np.ndarray:
    table = np.zeros((len(addresses), 3), np.uint64)  # address, length, device
    table[:, 0] = addresses
    table[:, 1] = nbytes
    return table


if __name__ == "__main__":
    run_peer(NixlPeer)
