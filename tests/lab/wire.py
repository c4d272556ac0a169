"""The topology "wire" as a test of faults sees it: an engine here on host a, a process on host b, and the wires.

`Hosts` moves and checks; `netem`, `links_down` and `Held` are what happens to the wires and what both processes hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer import Region, Segment, TransferEngine
from kvxfer.batch import TransferBatch
from tests.support.fault_peer import Counts, memory_of
from tests.support.peer import Peer, Remote, pattern, wait_until

IS_EMULATED = os.environ.get("LAB_MACHINE") != "uml"
ROUNDS = int(os.environ.get("LAB_ROUNDS") or (1 if IS_EMULATED else 50))
"""How often a fault is repeated: an emulated machine has less time."""
HERE, THERE = ("rxa0", "rxa1"), ("rxb0", "rxb1")
NETDEVS = ("va0", "va1", "vb0", "vb1")
ADDRESSES = {"va0": "10.10.0.1", "va1": "10.10.1.1", "vb0": "10.10.0.2", "vb1": "10.10.1.2"}
BLOCK_NBYTES = 1 << 16
BLOCKS = 32
NBYTES = BLOCKS * BLOCK_NBYTES
"""2 MiB: enough to be spread over both rails."""
LONG = 32
"""So many times the same rows in one batch give time to do something to it."""
NIC_TIMEOUT_S = 7.5
"""What the device bears with as the engine is set: seven tries of 1.07 s. What is told sooner was not found out by
it."""
AT_ONCE_S = 4.0
"""Less than that, and enough for an emulated machine."""


class Hosts:
    """An engine here, a peer process there, memory of both, and the segment between them. A context manager."""

    def __init__(self, *, port: int = 0, peer_settings: dict[str, Any] | None = None, **settings: Any) -> None:
        self.engine = TransferEngine(transports=("rdma",), rdma_devices=",".join(HERE), **settings)
        self.region: Region = self.engine.register(np.zeros(NBYTES, np.uint8))
        self._peer_settings = {"port": port, **(peer_settings or {})}
        self._rng = np.random.default_rng(1)
        self._opcode = "write"
        try:
            self.start()
        except BaseException:
            self.engine.close()
            raise

    def start(self) -> None:
        """Start the peer's process and open it."""
        self.peer = Peer(transports=("rdma",), rdma_devices=",".join(THERE), **self._peer_settings)
        try:
            self.there: Remote = self.peer.register(NBYTES)
            self.segment: Segment = self.engine.open_segment(self.peer.address)
        except BaseException:
            self.peer.close()
            raise

    def restart(self) -> None:
        """Begin anew with another process."""
        self.peer.kill()
        self.peer.close()
        self.start()

    def prepare(self, opcode: str) -> None:
        """New content at the source, zeros at the target, and a new order of blocks on both sides."""
        self._opcode = opcode
        self._mine, self._theirs = (self._rng.permutation(BLOCKS) * BLOCK_NBYTES for _ in range(2))
        self._content = pattern(NBYTES, int(self._rng.integers(1 << 30)))
        self.region.array[:] = self._content if opcode == "write" else 0
        self.there.fill(bytes(NBYTES) if opcode == "write" else self._content)

    def post(self, *, times: int = 1, **settings: Any) -> TransferBatch:
        """Submit all blocks as prepared, so many times over; `check` says whether they arrived."""
        local, remote = self.region.address + self._mine, self.there.address + self._theirs
        return self._submit(np.tile(local, times), np.tile(remote, times), **settings)

    def submit(self, opcode: str, **settings: Any) -> TransferBatch:
        """Prepare and post."""
        self.prepare(opcode)
        return self.post(**settings)

    def storm(self, opcode: str, rows: int, **settings: Any) -> TransferBatch:
        """Submit rows that all go to the first block of the target, each with other bytes: what moves shows."""
        self.prepare(opcode)
        sources, window = np.arange(rows) % (BLOCKS - 1) * BLOCK_NBYTES + BLOCK_NBYTES, np.zeros(rows, np.int64)
        mine, theirs = (sources, window) if opcode == "write" else (window, sources)
        return self._submit(self.region.address + mine, self.there.address + theirs, **settings)

    def _submit(self, local: Any, remote: Any, **settings: Any) -> TransferBatch:
        submit = self.engine.submit_write if self._opcode == "write" else self.engine.submit_read
        return submit(self.segment, local, remote, BLOCK_NBYTES, **settings)

    def check(self) -> None:
        """Fail where a byte of the last batch is wrong, on either side."""
        found, kept = (self.far(), self.near()) if self._opcode == "write" else (self.near(), self.far())
        assert found == self.expected(), "wrong bytes at the target"
        assert kept == self._content.tobytes(), "the source has changed"

    def expected(self) -> bytes:
        """What the target of the last batch must hold."""
        source, target = (self._mine, self._theirs) if self._opcode == "write" else (self._theirs, self._mine)
        blocks = np.zeros((BLOCKS, BLOCK_NBYTES), np.uint8)
        blocks[target // BLOCK_NBYTES] = self._content.reshape(BLOCKS, -1)[source // BLOCK_NBYTES]
        return blocks.tobytes()

    def move(self, opcode: str, **settings: Any) -> None:
        """Submit, wait, check."""
        self.submit(opcode, **settings).wait()
        self.check()

    def far(self) -> bytes:
        """What is in the peer's memory now, whether it runs or not."""
        return memory_of(self.peer.pid, self.there.address, NBYTES)

    def near(self) -> bytes:
        """What is in the memory here now."""
        return self.region.array.tobytes()

    def target(self) -> bytes:
        """What is now where the last batch writes."""
        return self.far() if self._opcode == "write" else self.near()

    def rails(self) -> dict[str, dict[str, Any]]:
        """What the segment says of each rail, by the device here, spares left out."""
        found = self.segment.describe()["rdma"]["rails"]
        return {rail["rail"].partition(":")[0]: rail for rail in found if not rail["spare"]}

    def connected(self) -> set[str]:
        """The devices here whose rails are connected."""
        return {device for device, rail in self.rails().items() if rail["connected"]}

    def warm(self) -> None:
        """Move until both rails are connected."""

        def is_warm() -> bool:
            self.move("write")
            return self.connected() == set(HERE)

        wait_until(is_warm, 30.0)

    def close(self) -> None:
        """End both."""
        self.engine.close()
        self.peer.close()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def into_the_middle(batch: TransferBatch) -> None:
    """Move a batch until some of it is in place."""
    while not batch.nbytes_done:
        assert not batch.poll(), f"it ended before its middle: {batch.exception}"
    assert batch.nbytes_done < batch.nbytes


@contextlib.contextmanager
def netem(*words: str, netdevs: tuple[str, ...] = NETDEVS) -> Iterator[None]:
    """Do to the packets that leave these netdevs what tc-netem(8) calls `words`; then again what was done before."""
    before = {netdev: _shaped.get(netdev, ()) for netdev in netdevs}
    try:
        for netdev in netdevs:
            _shape(netdev, words)
        yield
    finally:
        for netdev, old in before.items():
            _shape(netdev, old)


_shaped: dict[str, tuple[str, ...]] = {}
"""What is done to the packets that leave a netdev."""


def _shape(netdev: str, words: tuple[str, ...]) -> None:
    if netdev in _shaped:
        run("tc", "qdisc", "del", "dev", netdev, "root")
        del _shaped[netdev]
    if words:
        run("tc", "qdisc", "add", "dev", netdev, "root", "netem", "limit", "20000", *words)
        _shaped[netdev] = words


SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1  # <linux/sockios.h>, <linux/if.h>


def set_down(netdev: str) -> None:
    """Take a link down, at once, by netdevice(7); that of the other end of the wire loses its carrier."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        (flags,) = struct.unpack("16xH14x", fcntl.ioctl(opened, SIOCGIFFLAGS, struct.pack("16s16x", netdev.encode())))
        fcntl.ioctl(opened, SIOCSIFFLAGS, struct.pack("16sH14x", netdev.encode(), flags & ~IFF_UP))


def set_up(netdev: str) -> None:
    """Bring a link up again, with the route and the neighbour that the kernel forgot when it went down."""
    other = f"v{'b' if netdev[1] == 'a' else 'a'}{netdev[2:]}"
    table = str(100 + int(Path(f"/sys/class/net/{netdev}/ifindex").read_text()))  # as topologies/common.sh
    mac = Path(f"/sys/class/net/{other}/address").read_text().strip()
    run("ip", "link", "set", netdev, "up")
    run("ip", "route", "replace", ADDRESSES[other], "dev", netdev, "src", ADDRESSES[netdev], "table", table)
    run("ip", "neigh", "replace", ADDRESSES[other], "lladdr", mac, "dev", netdev, "nud", "permanent")


@contextlib.contextmanager
def links_down(*netdevs: str) -> Iterator[None]:
    """Take links down meanwhile."""
    for netdev in netdevs:
        set_down(netdev)
    try:
        yield
    finally:
        for netdev in netdevs:
            set_up(netdev)


def run(*words: str) -> str:
    """Run a command of the system; returns what it prints."""
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


class Held:
    """What the two processes hold: queue pairs and other objects of devices, descriptors, threads, memory."""

    def __init__(self, hosts: Hosts) -> None:
        gc.collect()
        hosts.peer.run("import gc; gc.collect()")
        sides = {"here": HERE, "there": THERE}
        self.objects = {(side, kind): count_objects(kind, names) for side, names in sides.items() for kind in KINDS}
        self.counts = {"here": Counts.of(os.getpid()), "there": Counts.of(hosts.peer.pid)}

    def grown_from(self, before: Held) -> str:
        """Say what is more than before; "" for nothing."""
        grown = [f"{side} {kind}: {before.objects[side, kind]} -> {now}"
                 for (side, kind), now in self.objects.items() if now > before.objects[side, kind]]  # fmt: skip
        grown += [
            f"{side} {told}" for side, now in self.counts.items() if (told := now.grown_from(before.counts[side]))
        ]
        return ", ".join(grown)


KINDS = ("qp", "cq", "mr", "pd")


def count_objects(kind: str, devices: tuple[str, ...]) -> int:
    """Return how many objects of a kind programs have on these devices, by rdma-resource(8).

    Not by process: the kernel notes the thread that made an object, and that may have ended.
    """
    rows = json.loads(run("rdma", "-j", "resource", "show", kind) or "[]")
    return sum(row["ifname"] in devices and row.get("comm") != "ib_core" for row in rows)


def wait_not_held_more(hosts: Hosts, before: Held, timeout_s: float = 30.0) -> None:
    """Fail where the two go on holding more than before: what was dropped may take a moment to go."""
    deadline = time.monotonic() + timeout_s
    while grown := Held(hosts).grown_from(before):
        assert time.monotonic() < deadline, f"it has grown: {grown}"
        time.sleep(0.1)
