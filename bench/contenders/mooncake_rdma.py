"""One end of Mooncake's TransferEngine over RDMA; bench/rdma.py and a test drive it by JSON lines on its pipes.

mooncake_rdma.py DEVICE ADDRESS POOL_NBYTES     first line out: {"target": "host:port", "address": ..., "nbytes": ...}
["fill", offsets, size, value] ["check", offsets, size, value] ["move", operation, target, local, remote, size]
["probe", target] ["notify", target, remote, name, message] ["notifies"]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # both read when the module below is loaded
os.environ.setdefault("GLOG_minloglevel", "2")

import numpy as np
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode  # type: ignore[import-not-found]

BATCH_ROWS = 1024


def main() -> None:
    device, address, pool_nbytes = sys.argv[1:]
    if not Path("/sys/devices/system/node").exists():
        # A kernel without NUMA nodes: Mooncake then finds no device, and goes over to tcp without a word.
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as topology:
            json.dump({"cpu:0": [[device], []]}, topology)
        os.environ["MC_CUSTOM_TOPO_JSON"] = topology.name
    engine = TransferEngine()
    assert engine.initialize(address, "P2PHANDSHAKE", "rdma", device) == 0, "Mooncake's initialize failed"
    pool = np.zeros(int(pool_nbytes), np.uint8)
    base = pool.ctypes.data
    assert engine.register_memory(base, pool.nbytes) == 0, "Mooncake's register_memory failed"
    print(json.dumps({"target": f"{address}:{engine.get_rpc_port()}", "address": base}), flush=True)
    for line in sys.stdin:
        what, *rest = json.loads(line)
        answer: dict[str, object] = {"ok": True}
        if what == "move":
            operation, target, local, remote, size = rest
            move = engine.batch_transfer_sync_write if operation == "write" else engine.batch_transfer_sync_read
            mine, theirs = [base + offset for offset in local], remote
            started, cpu = perf_counter(), process_time()
            for at in range(0, len(mine), BATCH_ROWS):
                part = slice(at, at + BATCH_ROWS)
                answer["ok"] = answer["ok"] and move(target, mine[part], theirs[part], [size] * len(mine[part])) == 0
            answer |= {"seconds": perf_counter() - started, "cpu_s": process_time() - cpu}
        elif what == "probe":
            answer["ok"] = engine.send_probe(*rest) == 0
        elif what == "notify":
            target, remote, name, message = rest
            notify = TransferNotify(name, message)
            answer["ok"] = engine.transfer_sync(target, base, remote, 64, TransferOpcode.Write, notify) == 0
        elif what == "notifies":
            answer["notifies"] = [[one.name, one.msg] for one in engine.get_notifies()]
        else:
            offsets, size, value = rest
            if what == "fill":
                for offset in offsets:
                    pool[offset : offset + size] = value
            else:
                answer["ok"] = all((pool[offset : offset + size] == value).all() for offset in offsets)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
