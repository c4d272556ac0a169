"""The drop-in and the real Mooncake read and write each other's memory over RDMA, every byte checked.

Runs where the real Mooncake is installed (`make peers`): marked interop as well, so that `make lab` leaves it out.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.compat import mooncake

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "bench/.peers/mooncake/bin/python"
PROGRAM = ROOT / "bench/contenders/mooncake_rdma.py"
BLOCK = 4096
ROWS = 2000
NBYTES = ROWS * BLOCK

pytestmark = [pytest.mark.rdma, pytest.mark.interop, pytest.mark.topology("wire")]


class RealMooncake:
    """A process with the real engine on rxb0."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [PYTHON, PROGRAM, "rxb0", "10.10.0.2", str(NBYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        told = self._answer()
        self.name: str = told["target"]
        self.address: int = told["address"]

    def ask(self, *command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = next(line for line in self._process.stdout if line.startswith("{"))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def real() -> Iterator[RealMooncake]:
    process = RealMooncake()
    yield process
    process.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[mooncake.TransferEngine, np.ndarray[Any, np.dtype[np.uint8]], str]]:
    engine = mooncake.TransferEngine()
    assert engine.initialize("10.10.0.1", "P2PHANDSHAKE", "rdma", "rxa0") == 0, mooncake.last_error()
    memory = np.zeros(NBYTES, np.uint8)
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0, mooncake.last_error()
    yield engine, memory, f"10.10.0.1:{engine.get_rpc_port()}"
    engine.unregister_memory(memory.ctypes.data)


def rows(base: int, order: list[int]) -> list[int]:
    return [base + at * BLOCK for at in order]


@pytest.mark.parametrize("count", [1, ROWS])
@pytest.mark.parametrize("operation", ["write", "read"])
def test_kvxfer_reaches_the_real_mooncake(real: RealMooncake, engine: Any, operation: str, count: int) -> None:
    ours, memory, _ = engine
    order = np.random.default_rng(count).permutation(ROWS)[:count].tolist()
    offsets = [at * BLOCK for at in order]
    value = 1 + count % 200
    memory[:] = value if operation == "write" else 0
    real.ask("fill", [0], NBYTES, 0 if operation == "write" else value)
    move = getattr(ours, f"batch_transfer_sync_{operation}")

    done = move(real.name, rows(memory.ctypes.data, list(range(count))), rows(real.address, order), [BLOCK] * count)

    assert done == 0, mooncake.last_error()
    if operation == "write":
        assert real.ask("check", offsets, BLOCK, value)["ok"]
    else:
        assert (memory[: count * BLOCK] == value).all()
        assert not memory[count * BLOCK :].any()


@pytest.mark.parametrize("count", [1, ROWS])
@pytest.mark.parametrize("operation", ["write", "read"])
def test_the_real_mooncake_reaches_kvxfer(real: RealMooncake, engine: Any, operation: str, count: int) -> None:
    _, memory, name = engine
    order = np.random.default_rng(count).permutation(ROWS)[:count].tolist()
    offsets = [at * BLOCK for at in order]
    value = 2 + count % 200
    memory[:] = 0 if operation == "write" else value
    real.ask("fill", [0], NBYTES, value if operation == "write" else 0)

    done = real.ask("move", operation, name, offsets, rows(memory.ctypes.data, order), BLOCK)

    assert done["ok"]
    if operation == "write":
        blocks = memory.reshape(ROWS, BLOCK)
        assert (blocks[order] == value).all()
        assert not np.delete(blocks, order, axis=0).any()
    else:
        assert real.ask("check", offsets, BLOCK, value)["ok"]


def test_notifications_and_probes_go_both_ways(real: RealMooncake, engine: Any) -> None:
    ours, memory, name = engine
    assert ours.send_probe(real.name) == 0
    assert real.ask("probe", name)["ok"]

    notify = mooncake.TransferNotify("from", "kvxfer")
    done = ours.transfer_sync(real.name, memory.ctypes.data, real.address, 64, mooncake.TransferOpcode.Write, notify)
    assert done == 0, mooncake.last_error()
    assert ["from", "kvxfer"] in real.ask("notifies")["notifies"]

    assert real.ask("notify", name, memory.ctypes.data, "from", "mooncake")["ok"]
    deadline = time.monotonic() + 5
    while not (found := ours.get_notifies()):
        assert time.monotonic() < deadline
    assert [(one.name, one.msg) for one in found] == [("from", "mooncake")]


def test_memory_that_is_not_registered_there_is_refused(real: RealMooncake, engine: Any) -> None:
    ours, memory, _ = engine

    assert ours.transfer_sync_write(real.name, memory.ctypes.data, real.address + (1 << 40), 64) < 0
    assert "not inside one registered region" in str(mooncake.last_error())
    assert ours.transfer_sync_write(real.name, memory.ctypes.data, real.address, 64) == 0
