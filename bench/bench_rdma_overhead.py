"""How long does the engine take from `submit_write` to the doorbell, for batches of 1,024 to 100,000 rows?

The devices are fakes, so what is measured is kvxfer's own work: checking the rows on both sides, planning, cutting,
filling the first window of work requests. The baseline is the same call's numpy part alone: three columns copied once.
A fake makes a Python object of each work request, and after a thousand of them nothing of kvxfer is left in the CPU's
caches, which no NIC does; so a few short batches go before each that counts. `cold_us` is the figure without them, for
a caller that did much else in between. Prints one JSON line per batch size.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from kvxfer.verbs.library import FastCalls
from processes import machine_words
from tests.support.fake_engines import FakeHosts
from tests.support.fake_verbs import FakeLibrary, connectx

ROWS = (1, 64, 1024, 10_000, 100_000)
REQUIRED_US = {1024: 100.0}
BLOCK_NBYTES = 64
SHORT_ROWS, SHORT_COUNT = 64, 3
ROUNDS = 30


class Watched(FakeLibrary):
    """A library that notes when the first work request of a batch is posted."""

    posted_at = 0.0

    def fast_calls(self, context: Any) -> FastCalls:
        calls = super().fast_calls(context)

        def post_send(qp: Any, wr: Any, bad_wr: Any) -> int:
            if not self.posted_at:
                self.posted_at = time.perf_counter()
            return calls.post_send(qp, wr, bad_wr)

        return calls._replace(post_send=post_send)


def main() -> None:
    """Measure each size and print it."""
    hosts = FakeHosts(Path(tempfile.mkdtemp()))
    here = hosts.libraries["here"] = Watched(hosts.fabric, connectx(address="10.10.0.1"), name="here")
    hosts.add("there", connectx(address="10.10.0.2"))
    engine, peer = hosts.engine("here"), hosts.engine("there")
    slots = 2 * max(ROWS)
    source, target = (np.zeros(slots * BLOCK_NBYTES, np.uint8) for _ in range(2))
    local, remote = engine.register(source), peer.register(target)
    segment = engine.open_segment(peer.address)
    order = np.random.default_rng(1)
    for rows in ROWS:
        mine = local.address + order.permutation(slots)[:rows] * BLOCK_NBYTES
        theirs = remote.address + order.permutation(slots)[:rows] * BLOCK_NBYTES
        warm: list[float] = []
        cold: list[float] = []
        copies: list[float] = []
        for turn in range(2 * ROUNDS if rows < 100_000 else 10):
            for _ in range(SHORT_COUNT * (turn % 2)):
                engine.write(segment, mine[:SHORT_ROWS], theirs[:SHORT_ROWS], BLOCK_NBYTES)
            here.posted_at = 0.0
            started = time.perf_counter()
            batch = engine.submit_write(segment, mine, theirs, BLOCK_NBYTES)
            (warm if turn % 2 else cold).append(here.posted_at - started)
            batch.wait()
            started = time.perf_counter()
            mine.copy(), theirs.copy(), np.full(rows, BLOCK_NBYTES)
            copies.append(time.perf_counter() - started)
        value, baseline = statistics.median(warm) * 1e6, statistics.median(copies) * 1e6
        required = REQUIRED_US.get(rows)
        row = {
            "bench": "rdma_overhead",
            "question": f"submit_write of {rows} rows until the doorbell",
            "value": round(value, 1),
            "unit": "us",
            "cold_us": round(statistics.median(cold) * 1e6, 1),
            "baseline": round(baseline, 1),
            "baseline_is": "three columns copied",
            "ratio": round(value / baseline, 1),
            "required": required,
            "met": required is None or value <= required,
            "machine": machine_words(),
        }
        print(json.dumps(row), flush=True)
    hosts.close()


if __name__ == "__main__":
    main()
