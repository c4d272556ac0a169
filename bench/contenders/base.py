"""What a contender's process does for the orchestrator, whichever engine is in it.

A subclass of `Peer` knows one engine: how to open it, connect it and time one transfer. `run_peer` wraps it in the
calls that `peers.py` makes: patterns, checks and CPU time are the same code for all contenders.
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness import Blocks, Pool, Side
from processes import cpu_time_s, die_with_parent, public_methods, serve


@dataclass(frozen=True)
class Measurement:
    """One repetition. `seconds` has one entry, or one for each transfer of a latency workload."""

    seconds: list[float]
    nbytes: int
    cpu_s: float


class Peer(ABC):
    """One process of a contender. The target only opens and serves; the methods that transfer run at the initiator."""

    def __init__(self) -> None:
        self.pools: dict[Side, Pool] = {}

    @abstractmethod
    def card(self) -> Any:
        """Return what the other side needs to reach this one (picklable)."""

    @abstractmethod
    def connect(self, card: Any) -> None:
        """Take the other side's card; called on the initiator first."""

    @abstractmethod
    def prepare(self, blocks: Blocks) -> Any:
        """Return the batch in the form the engine takes it. Not timed: a caller could keep it."""

    @abstractmethod
    def transfer(self, blocks: Blocks, prepared: Any) -> float:
        """Move the whole batch, wait for it, and return the seconds from submit to completion."""

    @abstractmethod
    def transfer_each(self, blocks: Blocks) -> list[float]:
        """Move the blocks one transfer after the other and return the seconds of each."""

    def measure(self, blocks: Blocks, prepared: Any, *, is_latency: bool, pids: list[int]) -> Measurement:
        """Run one repetition; `pids` are the processes whose CPU time counts."""
        cpu_before_s = cpu_time_s(*pids)
        seconds = self.transfer_each(blocks) if is_latency else [self.transfer(blocks, prepared)]
        return Measurement(seconds, blocks.nbytes, cpu_time_s(*pids) - cpu_before_s)

    def close(self) -> None:
        """Let go of the pools; an engine that has a close overrides this."""
        self.pools.clear()


class PeerCalls:
    """The functions the orchestrator calls; batches are named by a key, so that they cross the pipe once."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._blocks: dict[str, Blocks] = {}
        self._prepared: dict[str, Any] = {}

    def card(self) -> Any:
        return self._peer.card()

    def connect(self, card: Any) -> None:
        self._peer.connect(card)

    def plan(self, key: str, blocks: Blocks) -> None:
        self._blocks[key] = blocks

    def prepare(self, key: str) -> None:
        self._prepared[key] = self._peer.prepare(self._blocks[key])

    def clear_all(self) -> None:
        for pool in self._peer.pools.values():
            pool.clear_all()

    def clear(self, key: str) -> None:
        blocks = self._blocks[key]
        self._peer.pools[blocks.destination_side].clear(blocks)

    def count_wrong(self, key: str) -> int:
        blocks = self._blocks[key]
        return self._peer.pools[blocks.destination_side].count_wrong(blocks)

    def count_touched(self, key: str) -> int:
        blocks = self._blocks[key]
        return self._peer.pools[blocks.destination_side].count_touched(blocks)

    def measure(self, key: str, is_latency: bool, other_pids: list[int]) -> Measurement:
        pids = [os.getpid(), *other_pids]
        return self._peer.measure(self._blocks[key], self._prepared[key], is_latency=is_latency, pids=pids)


def run_peer(open_peer: Callable[..., Peer]) -> None:
    """Be a contender's process: open the peer with the settings on the command line and answer calls to the end."""
    die_with_parent()
    peer = open_peer(**json.loads(sys.argv[1]))
    serve(public_methods(PeerCalls(peer)))
    peer.close()
    sys.stderr.flush()
    os._exit(0)  # some engines' threads outlive, or crash in, the interpreter's own shutdown
