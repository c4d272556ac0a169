"""How fast is kvxfer on Mooncake's wire, beside Mooncake on both sides?

Three pairs over tcp on loopback, in one interleaved run, best of N: Mooncake to Mooncake (the baseline), Mooncake to
kvxfer's MooncakeService, kvxfer's MooncakePeer to Mooncake. Prints one JSON line for each pair, operation and block
size: value, unit, baseline, ratio, machine. `make peers` first; nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.interop

from kvxfer import Opcode, TransferEngine
from kvxfer.config import EngineConfig
from kvxfer.mooncake.peer import MooncakePeer, ask_descriptor
from kvxfer.mooncake.service import MooncakeService
from kvxfer.mooncake.wire.descriptor import SegmentDescriptor
from processes import machine_words
from tests.interop.real_mooncake import Mooncake

PYTHON = Path(__file__).parent / ".peers" / "mooncake" / "bin" / "python"
NBYTES = 64 << 20
BLOCKS = (4 << 10, 16 << 10, 64 << 10, 1 << 20, 64 << 20)
ROWS_MAX = 1024  # Mooncake's initiators refuse what is queued beyond about 2,000 rows
OPERATIONS = {"write": Opcode.WRITE, "read": Opcode.READ}
SMALL_COUNT = 300


def main() -> None:
    """Measure every pair and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with (
        Mooncake(PYTHON, nbytes=NBYTES) as target,
        Mooncake(PYTHON, nbytes=NBYTES) as initiator,
        TransferEngine() as engine,
    ):
        pairs = Pairs(target, initiator, engine)
        for operation in OPERATIONS:
            for nbytes in BLOCKS:
                report(pairs, operation, nbytes, rounds)
        report_latency(pairs, rounds)


class Pairs:
    """Who moves rows to whom; each method returns the seconds it took."""

    def __init__(self, target: Mooncake, initiator: Mooncake, engine: TransferEngine) -> None:
        self._target, self._initiator = target, initiator
        self._service = MooncakeService(engine)
        self._memory = np.zeros(NBYTES, np.uint8)
        self._address = int(self._memory.ctypes.data)
        engine.register(self._memory)
        self._engine = engine

        def refresh() -> SegmentDescriptor:
            own = SegmentDescriptor(engine.address)
            return ask_descriptor("127.0.0.1", target.port, own, deadline=time.monotonic() + 2.0)

        self._peer = MooncakePeer(target.name, refresh(), config=EngineConfig(), refresh=refresh)
        self.all = {
            "mooncake to mooncake": lambda *row: self._by_mooncake(target.name, target.address, *row),
            "mooncake to kvxfer": lambda *row: self._by_mooncake(engine.address, self._address, *row),
            "kvxfer to mooncake": self._by_kvxfer,
        }

    def _by_mooncake(self, name: str, address: int, operation: str, count: int, nbytes: int, times: int) -> float:
        local, remote = shuffled(count, nbytes)
        arguments = operation, name, local.tolist(), (address + remote).tolist(), [nbytes] * count, times
        return float(self._initiator.call("time_moves", *arguments))

    def _by_kvxfer(self, operation: str, count: int, nbytes: int, times: int) -> float:
        local, remote = shuffled(count, nbytes)
        columns = self._address + local, self._target.address + remote, nbytes
        started = time.perf_counter()
        for _ in range(times):
            self._peer.transfer(OPERATIONS[operation], *columns, deadline=time.monotonic() + 30.0)
        return (time.perf_counter() - started) / times


def shuffled(count: int, nbytes: int) -> tuple[Any, Any]:
    """Offsets of rows on both sides, so that none are adjacent."""
    order = np.random.default_rng(1)
    return order.permutation(count) * nbytes, order.permutation(count) * nbytes


def best_of(pairs: Pairs, rounds: int, *row: Any) -> dict[str, float]:
    """Return the least seconds of each pair, interleaved."""
    best = dict.fromkeys(pairs.all, float("inf"))
    for _ in range(rounds):
        for name, measure in pairs.all.items():
            best[name] = min(best[name], measure(*row))
    return best


def report(pairs: Pairs, operation: str, nbytes: int, rounds: int) -> None:
    """Print the throughput of a batch of one block size."""
    count = min(NBYTES // nbytes, ROWS_MAX)
    best = best_of(pairs, rounds, operation, count, nbytes, 1)
    for name, seconds in best.items():
        value = count * nbytes / seconds / 1e9
        baseline = count * nbytes / best["mooncake to mooncake"] / 1e9
        emit(name, operation, nbytes, value, "GB/s", baseline, value / baseline, rows=count)


def report_latency(pairs: Pairs, rounds: int) -> None:
    """Print the mean time of one row of 64 bytes."""
    best = best_of(pairs, rounds, "write", 1, 64, SMALL_COUNT)
    for name, seconds in best.items():
        baseline = best["mooncake to mooncake"] * 1e6
        emit(name, "write", 64, seconds * 1e6, "us", baseline, baseline / (seconds * 1e6), rows=1)


def emit(
    pair: str, operation: str, nbytes: int, value: float, unit: str, baseline: float, ratio: float, rows: int
) -> None:
    """Print one line. ratio: above 1 is better than Mooncake to Mooncake."""
    fields = {
        "bench": "mooncake_wire",
        "pair": pair,
        "operation": operation,
        "block_nbytes": nbytes,
        "rows": rows,
        "value": round(value, 3),
        "unit": unit,
        "baseline": round(baseline, 3),
        "ratio": round(ratio, 2),
        "machine": machine_words(),
    }
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
