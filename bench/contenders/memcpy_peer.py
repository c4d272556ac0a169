"""C memcpy over the same blocks: both pools in one process, in the kind of memory its rival transfers between."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from time import perf_counter
from typing import Any

import numpy as np

from contenders.base import Peer, run_peer
from harness import Blocks, Pool, Side, allocate_anonymous
from processes import BENCH_FOLDER

SOURCE_PATH = BENCH_FOLDER / "memcpy_reference.c"
LIBRARY_PATH = BENCH_FOLDER / "build" / "memcpy_reference.so"


class MemcpyPeer(Peer):
    """Two pools: each its own memfd mapped shared, as kvxfer allocates them, or each anonymous numpy memory."""

    def __init__(self, *, side: Side, name: str, pool_nbytes: int, memory: str) -> None:
        super().__init__()
        allocate = _allocate_shared if memory == "shared" else allocate_anonymous
        self.pools = {"initiator": Pool(allocate(pool_nbytes), "initiator")}
        self.pools["target"] = Pool(allocate(pool_nbytes), "target")
        self._copy_blocks = ctypes.CDLL(str(build_library())).copy_blocks
        self._copy_blocks.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._copy_blocks.restype = None

    def card(self) -> None:
        return None

    def connect(self, card: None) -> None:
        del card

    def prepare(self, blocks: Blocks) -> Any:
        destination = (blocks.destination + self.pools[blocks.destination_side].address).astype(np.uint64)
        source = (blocks.source + self.pools[blocks.source_side].address).astype(np.uint64)
        return destination, source

    def transfer(self, blocks: Blocks, prepared: Any) -> float:
        destination, source = prepared
        start = perf_counter()
        self._copy_blocks(destination.ctypes.data, source.ctypes.data, blocks.block_nbytes, len(source))
        return perf_counter() - start

    def transfer_each(self, blocks: Blocks) -> list[float]:
        raise NotImplementedError("one memcpy of 4 KiB in the same process has no latency worth a comparison")


def build_library() -> os.PathLike[str]:
    """Compile the reference where it is missing or older than its source, and return its path.

    Built beside its final name and moved there, since two contenders may build it at the same time.
    """
    if LIBRARY_PATH.exists() and LIBRARY_PATH.stat().st_mtime >= SOURCE_PATH.stat().st_mtime:
        return LIBRARY_PATH
    LIBRARY_PATH.parent.mkdir(exist_ok=True)
    unfinished = LIBRARY_PATH.with_suffix(f".{os.getpid()}")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(unfinished), str(SOURCE_PATH)], check=True)
    unfinished.replace(LIBRARY_PATH)
    return LIBRARY_PATH


def _allocate_shared(nbytes: int) -> np.ndarray:
    descriptor = os.memfd_create("kvxfer-bench")
    try:
        os.ftruncate(descriptor, nbytes)
        return np.frombuffer(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED), np.uint8)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    run_peer(MemcpyPeer)
