"""How long does it take to fill 256 work requests from numpy columns and to post them by one call?

The device is a stub: its post_send is a libc function that returns 0 and touches nothing, so the figure is kvxfer's and
cffi's own time; a driver's doorbell and work queue entries come on top. The baseline fills the same requests field by
field through cffi, as a program without columns would. Prints one JSON line; `--rows 1,16,256` measures other batches.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import cffi
import numpy as np

from processes import machine_words

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support


from kvxfer.verbs.device import list_devices
from kvxfer.verbs.enums import SendFlags, WorkOpcode
from kvxfer.verbs.library import FastCalls, ffi
from kvxfer.verbs.queue_pair import QueuePair, QueuePairCapabilities
from kvxfer.verbs.work_request import WorkRequestBatch
from tests.support.fake_verbs import FakeLibrary, connectx

ROWS: Final = 256
REQUIRED_US: Final = 3.0
ROUNDS: Final = 30
ROUND_S: Final = 0.02
BLOCK_NBYTES: Final = 64 << 10
SLOTS: Final = 4 * ROWS


class Stub(FakeLibrary):
    """A device whose post_send is pthread_mutexattr_destroy(3): in glibc and musl a function that only returns 0."""

    def __init__(self) -> None:
        super().__init__(None, connectx())
        self._libc_ffi = cffi.FFI()
        self._libc_ffi.cdef("int pthread_mutexattr_destroy(void *attributes);")
        self._libc = self._libc_ffi.dlopen(None)
        function = self._libc_ffi.addressof(self._libc, "pthread_mutexattr_destroy")
        self._context = ffi.new("struct ibv_context *")
        self._context.ops.post_send = ffi.cast(
            "int (*)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **)",
            int(self._libc_ffi.cast("uintptr_t", function)),
        )

    def fast_calls(self, context: Any) -> FastCalls:
        return super().fast_calls(context)._replace(post_send=self._context.ops.post_send)


def check_harmless(queue_pair: QueuePair) -> None:
    """See that the stub returns 0 and leaves everything it is given as it was."""
    bad = ffi.new("struct ibv_send_wr **")
    request = ffi.new("struct ibv_send_wr *")
    ffi.buffer(request)[:] = b"\xa5" * ffi.sizeof("struct ibv_send_wr")
    ffi.buffer(bad)[:] = b"\xa5" * 8
    before = bytes(ffi.buffer(queue_pair.pointer)), bytes(ffi.buffer(request)), bytes(ffi.buffer(bad))
    assert queue_pair.library.fast_calls(queue_pair.context.pointer).post_send(queue_pair.pointer, request, bad) == 0
    assert (bytes(ffi.buffer(queue_pair.pointer)), bytes(ffi.buffer(request)), bytes(ffi.buffer(bad))) == before


def columns_step(queue_pair: QueuePair, rows: int) -> Callable[[], None]:
    """Fill by columns and post: what is measured."""
    batch = WorkRequestBatch(rows)
    local, remote, nbytes, lkey, rkey = make_rows(rows)
    wr_id = 0

    def step() -> None:
        nonlocal wr_id
        batch.fill(
            WorkOpcode.RDMA_WRITE,
            local_addr=local,
            lkey=lkey,
            remote_addr=remote,
            rkey=rkey,
            nbytes=nbytes,
            wr_id=wr_id,
        )
        queue_pair.post_send(batch)
        wr_id += rows

    return step


def fields_step(queue_pair: QueuePair, rows: int) -> Callable[[], None]:
    """Fill field by field and post: the baseline. What never changes is written once here too."""
    chain = ffi.new("struct ibv_send_wr[]", rows)
    ranges = ffi.new("struct ibv_sge[]", rows)
    bad = ffi.new("struct ibv_send_wr **")
    post_send = queue_pair.context.fast_calls.post_send
    columns = [column.tolist() for column in make_rows(rows)]
    for row in range(rows):
        chain[row].next = chain + row + 1 if row + 1 < rows else ffi.NULL
        chain[row].sg_list, chain[row].num_sge = ranges + row, 1
    chain[rows - 1].send_flags = SendFlags.SIGNALED

    def step() -> None:
        for row, (local, remote, nbytes, lkey, rkey) in enumerate(zip(*columns, strict=True)):
            request, range_ = chain[row], ranges[row]
            request.wr_id = row
            rdma = request.wr.rdma
            rdma.remote_addr, rdma.rkey = remote, rkey
            range_.addr, range_.length, range_.lkey = local, nbytes, lkey
        post_send(queue_pair.pointer, chain, bad)

    return step


def make_rows(rows: int) -> tuple[Any, ...]:
    """Return scattered blocks, a key of its own for each: local, remote, nbytes, lkey, rkey."""
    random = np.random.default_rng(1)
    local = random.permutation(rows) * BLOCK_NBYTES + (1 << 40)
    remote = random.permutation(rows) * BLOCK_NBYTES + (1 << 41)
    nbytes = np.full(rows, BLOCK_NBYTES, np.uint32)
    lkey, rkey = (random.integers(1, 2**32, rows, np.uint32) for _ in range(2))
    return local, remote, nbytes, lkey, rkey


def best_us(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return the least time of one step of each kind, in us: many rounds, the kinds by turns."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step()
            count, start = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - start) < ROUND_S:
                for _ in range(16):
                    step()
                count += 16
            best[name] = min(best[name], elapsed / count * 1e6)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=str(ROWS), help="batch sizes, separated by commas")
    sizes = [int(word) for word in parser.parse_args().rows.split(",")]
    with list_devices(Stub())[0].open() as context:
        completions = context.create_cq(SLOTS)
        queue_pair = context.alloc_pd().create_qp(completions, capabilities=QueuePairCapabilities(max_send_wr=SLOTS))
        check_harmless(queue_pair)
        for rows in sizes:
            best = best_us({"columns": columns_step(queue_pair, rows), "fields": fields_step(queue_pair, rows)})
            figure: dict[str, Any] = {
                "bench": "work_requests",
                "question": f"fill and post {rows} work requests",
                "rows": rows,
                "value": round(best["columns"], 2),
                "unit": "us",
                "baseline": round(best["fields"], 2),
                "baseline_is": "cffi, field by field",
                "ratio": round(best["fields"] / best["columns"], 1),
                "required": REQUIRED_US if rows == ROWS else None,
                "met": best["columns"] <= REQUIRED_US if rows == ROWS else None,
                "machine": machine_words(),
            }
            print(json.dumps(figure))
    return 0


if __name__ == "__main__":
    sys.exit(main())
