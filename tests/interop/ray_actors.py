"""Two CPU actors of Ray and a tensor between them, by kvxfer. Run with the Python of an environment that has Ray and
torch and a part, "actors" or "manager"; prints one JSON object of what was seen. Used by test_ray.py."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch

import kvxfer
import kvxfer.integrations.ray as integration

COUNT = 1 << 20

integration.register()
integration.register()  # tolerated


def manager() -> Any:
    from ray.experimental.rdt.util import get_tensor_transport_manager

    return get_tensor_transport_manager(integration.NAME)


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Worker:
    """Makes tensors, and looks at those of others."""

    @ray.method(tensor_transport="kvxfer")
    def make(self, start: int) -> torch.Tensor:
        return torch.arange(start, start + COUNT, dtype=torch.int64)

    @ray.method(tensor_transport="kvxfer")
    def make_many(self) -> dict[str, Any]:
        base = torch.arange(COUNT, dtype=torch.float32).to(torch.bfloat16)
        return {"whole": base, "part": base[10:20], "empty": torch.empty(0), "scalar": torch.tensor(7), "text": "kept"}

    @ray.method(tensor_transport="kvxfer")
    def make_strided(self) -> torch.Tensor:
        return torch.zeros(10, 10).t()

    def total(self, tensor: torch.Tensor) -> int:
        return int(tensor.sum())

    def describe(self, values: dict[str, Any]) -> list[Any]:
        return [
            bool((values["whole"] == torch.arange(COUNT, dtype=torch.float32).to(torch.bfloat16)).all()),
            values["part"].tolist(),
            list(values["empty"].shape),
            values["scalar"].item(),
            values["text"],
        ]

    def transports(self) -> list[str]:
        segments = manager().engine._segments._open.values()
        return sorted({segment.transport for segment in segments})

    def region_count(self) -> int:
        return len(manager().engine.regions)

    def pid(self) -> int:
        return os.getpid()


def failure(ref: Any) -> str:
    try:
        ray.get(ref)
    except Exception as exc:
        return f"{exc}"
    return "none"


def main() -> None:
    seen: dict[str, Any] = {"ray": ray.__version__}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    one, other = Worker.remote(), Worker.remote()

    ref = one.make.remote(5)
    seen["total"] = ray.get(other.total.remote(ref))
    seen["expected"] = sum(range(5, 5 + COUNT))
    seen["transports"] = ray.get(other.transports.remote())
    seen["many"] = ray.get(other.describe.remote(one.make_many.remote()))
    seen["in_driver"] = int(ray.get(ref).sum()) == seen["expected"]
    seen["refused"] = failure(other.total.remote(one.make_strided.remote()))

    seen["regions_held"] = ray.get(one.region_count.remote()) > 0
    del ref
    for _ in range(100):
        seen["regions_left"] = ray.get(one.region_count.remote())
        if seen["regions_left"] == 0:
            break
        time.sleep(0.1)
    seen["regions_left_at_reader"] = ray.get(other.region_count.remote())

    lost = one.make.remote(1)
    ray.get(other.total.remote(lost))
    pid = ray.get(one.pid.remote())
    ray.kill(one)  # returns before it has happened
    with contextlib.suppress(OSError):
        while Path(f"/proc/{pid}/cmdline").read_bytes():
            time.sleep(0.01)
    seen["after_kill"] = failure(other.total.remote(lost))
    ray.shutdown()
    json.dump(seen, sys.stdout)


def check_manager() -> None:
    """What Ray does seldom: each line of `checked` is one promise of its interface."""
    source, reader = integration.KvxferTensorTransport(), integration.KvxferTensorTransport()
    tensors = [torch.arange(COUNT), torch.zeros(3)]
    metadata = source.extract_tensor_transport_metadata("a", tensors)
    checked = 0

    assert source.extract_tensor_transport_metadata("a", tensors) is metadata  # a task that Ray runs again
    assert len(source.engine.regions) == 2
    checked += 1

    targets = [torch.empty(COUNT, dtype=torch.int64), torch.ones(3)]
    found = reader.recv_multiple_tensors("a", metadata, None, targets)
    assert found[0] is targets[0]
    assert torch.equal(targets[0], tensors[0])
    assert torch.equal(targets[1], tensors[1])
    checked += 1

    fetch = reader.fetch_multiple_tensors("a", metadata, None)
    assert torch.equal(reader.wait_fetch_complete(fetch, timeout=10)[0], tensors[0])
    del fetch
    assert not reader.engine.regions
    checked += 1

    fetch = reader.fetch_multiple_tensors("a", metadata, None)  # never waited for
    assert reader.engine.regions
    del fetch
    assert not reader.engine.regions
    checked += 1

    reader.abort_transport("a", None)
    with expect(kvxfer.TransferCancelledError):
        reader.recv_multiple_tensors("a", metadata, None)
    reader.recv_multiple_tensors("a", metadata, None)  # only once
    checked += 1

    with expect(kvxfer.PeerRestartedError):
        reader.recv_multiple_tensors("a", dataclasses.replace(metadata, generation="other"), None)
    with expect(kvxfer.RemoteProtocolError):
        reader.recv_multiple_tensors("a", dataclasses.replace(metadata, rows=metadata.rows[:1]), None)
    assert not reader.engine.regions
    checked += 1

    source.garbage_collect("a", metadata, tensors)
    source.garbage_collect("a", metadata, tensors)
    assert not source.engine.regions
    with expect(kvxfer.KvxferError):
        reader.recv_multiple_tensors("a", metadata, None)
    checked += 1

    for one in (source, reader):
        one.engine.close()
    json.dump({"checked": checked}, sys.stdout)


@contextlib.contextmanager
def expect(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    {"actors": main, "manager": check_manager}[sys.argv[1]]()
