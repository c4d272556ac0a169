"""Many that share a device, a processor or an engine, and nobody goes short."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvxfer import Segment, TransferEngine
from tests.lab.wire import BLOCK_NBYTES, HERE, THERE, Hosts, netem, run
from tests.support.peer import Peer, Remote, pattern

pytestmark = [pytest.mark.rdma, pytest.mark.slow]

WINDOW_S = 2.0
BYSTANDER = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    count = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
while True:
    time.sleep(0.01)
    count[0] += 1
"""


@contextmanager
def bystander(folder: Path) -> Iterator[memoryview]:
    """A process that wants to run again and again, for a moment; yields how often it did."""
    file = folder / "count"
    file.write_bytes(bytes(8))
    process = subprocess.Popen([sys.executable, "-c", BYSTANDER, str(file)])
    try:
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped, memoryview(mapped) as view:
            count = view.cast("Q")
            while count[0] < 10:
                time.sleep(0.01)
            yield count
            count.release()
    finally:
        process.kill()
        process.wait()


@pytest.mark.topology("simple")
def test_others_get_their_turn_while_a_device_talks_with_itself(tmp_path: Path) -> None:  # B179
    """Inside one device the kernel does all the work at once, in the process that posts: it must come up for air."""
    with (
        TransferEngine(transports=("rdma",), rdma_devices="rxa0") as engine,
        Peer(transports=("rdma",), rdma_devices="rxa0") as peer,
        bystander(tmp_path) as count,
    ):
        region, there = engine.register(np.full(BLOCK_NBYTES, 7, np.uint8)), peer.register(BLOCK_NBYTES)
        segment = engine.open_segment(peer.address)
        before = count[0]
        time.sleep(WINDOW_S)
        alone = count[0] - before

        before, end = count[0], time.monotonic() + WINDOW_S
        while time.monotonic() < end:
            for nbytes in (8, BLOCK_NBYTES):
                engine.write(segment, region.address, there.address, nbytes)
                engine.read(segment, region.address, there.address, nbytes)
        beside = count[0] - before

        assert beside >= alone / 10


@pytest.mark.topology("wire")
def test_who_waits_for_a_slow_wire_leaves_the_processor_to_others() -> None:
    with Hosts() as hosts:
        hosts.warm()
        with netem("rate", "20mbit"):
            started, used = time.monotonic(), time.process_time()
            hosts.move("write", timeout_s=60.0)
            share = (time.process_time() - used) / (time.monotonic() - started)

    assert share < 0.5


@pytest.mark.topology("wire")
def test_threads_take_turns_with_three_peers_and_no_connection_makes_room_for_another() -> None:  # B104
    threads, rounds = 4, 80
    with ExitStack() as stack:
        engine = stack.enter_context(TransferEngine(transports=("rdma",), rdma_devices=",".join(HERE)))
        ends: list[tuple[Peer, Remote, Segment]] = []
        for _ in range(3):
            peer = stack.enter_context(Peer(transports=("rdma",), rdma_devices=",".join(THERE)))
            ends.append((peer, peer.register(threads * BLOCK_NBYTES), engine.open_segment(peer.address)))
        region = engine.register(pattern(threads * BLOCK_NBYTES, 1))
        back = engine.register(np.zeros(threads * BLOCK_NBYTES, np.uint8))
        made = queue_pairs()
        failures: list[BaseException] = []

        def work(mine: int) -> None:
            at, block = mine * BLOCK_NBYTES, slice(mine * BLOCK_NBYTES, (mine + 1) * BLOCK_NBYTES)
            try:
                for number in range(rounds):
                    _, there, segment = ends[(mine + number) % len(ends)]
                    region.array[block] = pattern(BLOCK_NBYTES, mine * rounds + number)
                    engine.write(segment, region.address + at, there.address + at, BLOCK_NBYTES)
                    engine.read(segment, back.address + at, there.address + at, BLOCK_NBYTES)
                    assert np.array_equal(back.array[block], region.array[block])
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(mine,)) for mine in range(threads)]
        for one in workers:
            one.start()
        for one in workers:
            one.join()

        assert not failures
        assert len(made) >= len(ends)
        assert queue_pairs() == made


def queue_pairs() -> set[tuple[str, int]]:
    """The queue pairs of this host's devices, as the kernel has them."""
    rows = json.loads(run("rdma", "-j", "resource", "show", "qp"))
    return {(row["ifname"], row["lqpn"]) for row in rows if row["ifname"] in HERE and row.get("comm") != "ib_core"}
