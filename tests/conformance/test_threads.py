"""One engine, many threads: every public method may be called from any of them."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import KvxferError, NotRegisteredError, RegionOverlapError, RemoteAccessError, TransferEngine
from tests.conformance.conftest import Link
from tests.support.gil import gives_up_gil
from tests.support.peer import Peer, pattern

THREADS = 16
BLOCK = 4096


@pytest.fixture(autouse=True)
def threads_that_take_turns_often() -> Iterator[None]:
    """By default a thread may run for 5 ms, which is longer than what these tests do in one call."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    """Run `work(0)` to `work(count - 1)` at once; raises the first failure of any."""
    failed: list[BaseException] = []
    barrier = threading.Barrier(count)

    def begin(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=begin, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_sixteen_threads_on_one_segment_move_what_they_mean_to(link: Link) -> None:  # B162, B127
    span = 16 * BLOCK
    here, there = link.here(2 * THREADS * span), link.there(THREADS * span)

    def work(index: int) -> None:
        dice = np.random.default_rng(index)
        mine = here.array[2 * index * span :][:span]
        back = here.array[(2 * index + 1) * span :][:span]
        local, local_back = here.address + 2 * index * span, here.address + (2 * index + 1) * span
        remote = there.address + index * span
        for turn in range(12):
            mine[:] = pattern(span, 100 * index + turn)
            order = dice.permutation(16) * BLOCK
            if turn % 3 == 0:
                for at in order.tolist():
                    link.engine.write(link.segment, local + at, remote + at, BLOCK)
            elif turn % 3 == 1:
                link.engine.write(link.segment, local + order, remote + order, BLOCK)
            else:
                halves = [
                    link.engine.submit_write(link.segment, local + part, remote + part, BLOCK)
                    for part in (order[:8], order[8:])
                ]
                link.engine.wait_all(halves)
            back[:] = 0
            link.engine.read(link.segment, local_back + order, remote + order, BLOCK)
            assert np.array_equal(back, mine), (index, turn)

    run_threads(work)


def test_threads_that_open_the_same_peer_get_one_segment(own_link: Link) -> None:
    link = own_link
    link.segment.close()
    segments: list[Any] = []

    run_threads(lambda _: segments.append(link.engine.open_segment(link.peer.address)))

    assert len({id(segment) for segment in segments}) == 1
    assert link.peer.run("result = len(engine._service._sessions) if hasattr(engine, '_service') else 1") == 1


def test_threads_that_open_an_absent_peer_get_one_error() -> None:
    with TransferEngine(connect_timeout_s=0.2) as engine:
        absent = TransferEngine()
        address = absent.address
        absent.close()
        errors: list[KvxferError] = []

        def work(_: int) -> None:
            with pytest.raises(KvxferError) as caught:
                engine.open_segment(address)
            errors.append(caught.value)

        run_threads(work)

        assert len(errors) == THREADS
        assert len({error.values["elapsed_s"] for error in errors}) == 1, "there was more than one attempt"


def test_threads_that_register_overlapping_ranges_let_one_through(link: Link) -> None:  # B81
    memory = np.zeros(64 * BLOCK, np.uint8)
    won: list[Any] = []

    def work(index: int) -> None:
        with contextlib.suppress(RegionOverlapError):
            won.append(link.engine.register(memory[index * BLOCK : (index + 32) * BLOCK]))

    for _ in range(10):
        run_threads(work)
        assert len(won) == 1
        link.engine.unregister(won.pop())


@pytest.mark.parametrize("attempt", range(8))
def test_threads_that_register_the_equal_range_are_counted(link: Link, attempt: int) -> None:  # B80, B81
    memory = np.zeros(BLOCK, np.uint8)
    regions: list[Any] = []

    def register(_: int) -> None:
        while True:
            try:
                regions.append(link.engine.register(memory))
                return
            except KvxferError as error:
                if not error.retryable:
                    raise

    run_threads(register)

    assert len({region.region_id for region in regions}) == 1
    assert regions[0].reference_count == THREADS
    run_threads(lambda _: link.engine.unregister(regions[0]))
    assert link.engine.regions == ()


@pytest.fixture(params=["shm", "tcp"])
def three(request: pytest.FixtureRequest) -> Iterator[tuple[TransferEngine, list[Peer]]]:
    settings = {"transports": (request.param,)}
    peers = [Peer(**settings) for _ in range(2)]
    with TransferEngine(**settings) as engine:
        yield engine, peers
    for peer in peers:
        peer.close()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3.0])
def test_random_calls_from_many_threads(three: tuple[TransferEngine, list[Peer]], seconds: float) -> None:  # B162
    engine, peers = three
    remotes = [peer.allocate(THREADS * BLOCK * 4, name="pool") for peer in peers]
    ends = time.monotonic() + seconds
    counts = dict.fromkeys(["write", "read", "open", "close", "register", "poll", "cancel"], 0)

    def work(index: int) -> None:
        dice = random.Random(index)
        local = np.zeros(4 * BLOCK, np.uint8)
        base = index * 4 * BLOCK
        while time.monotonic() < ends:
            what = dice.choice(
                ["write"] * 4 + ["read", "open", "register", "poll", "cancel"] + ["close"] * (index == 0)
            )
            remote = dice.choice(remotes)
            counts[what] += 1
            try:
                segment = engine.open_segment(remote.peer.address)
                region = engine.register(local)
                try:
                    if what == "close":
                        segment.close()
                    elif what == "write":
                        seed = dice.randrange(1 << 30)
                        local[:] = pattern(4 * BLOCK, seed)
                        engine.write(segment, region.address, remote.address + base, 4 * BLOCK)
                        local[:] = 0
                        engine.read(segment, region.address, remote.address + base, 4 * BLOCK)
                        assert np.array_equal(local, pattern(4 * BLOCK, seed))
                    elif what == "read":
                        engine.read_blocks(
                            segment, region, [0, 1], "pool", [index * 4, index * 4 + 1], block_nbytes=BLOCK
                        )
                    elif what in ("poll", "cancel"):
                        batch = engine.submit_read(
                            segment, [region.address, region.address + BLOCK], [remote.address + base] * 2, BLOCK
                        )
                        batch.poll()
                        batch.cancel()
                        assert batch.is_done
                finally:
                    engine.unregister(region)
            except KvxferError as error:
                if type(error).__name__ not in ("ClosedError", "PeerClosedError", "TransferCancelledError"):
                    raise

    run_threads(work)

    assert min(counts.values()) > 0
    assert counts["write"] > 20


def test_region_registered_and_taken_back_all_the_time_is_moved_whole_or_not(own_link: Link) -> None:  # B134, B169
    link = own_link
    here = link.here(BLOCK)
    here.array[:] = 1
    link.peer.begin(
        "run",
        "memory = np.zeros((200, 4096), np.uint8); bad = 0; used = 0\n"
        "for turn in range(200):\n"
        "    region = engine.register(memory[turn], name='moving')\n"
        "    time.sleep(0.002)\n"
        "    engine.unregister(region)\n"
        "    before = memory[turn].copy()\n"
        "    used += before.all()\n"
        "    time.sleep(0.0005)\n"
        "    bad += not np.array_equal(before, memory[turn])\n"
        "result = int(bad), int(used)",
        {},
    )
    refused = moved = 0
    while not link.peer._connection.poll():
        try:
            there = link.segment.region("moving")
            link.engine.write(link.segment, here.address, there.address, BLOCK)
            moved += 1
        except (NotRegisteredError, RemoteAccessError):
            refused += 1

    changed_late, used = link.peer.finish()
    assert changed_late == 0
    assert used > 0
    assert moved > 0


@pytest.mark.parametrize("medium", ["shm", "shm-any"])
def test_a_short_copy_does_not_wait_for_a_thread_that_computes(medium: str) -> None:
    """Whoever gives up the GIL to one waits for it for a switch interval: 5 ms by default, for a copy of 5 us."""
    link = Link(medium)
    try:
        here, there = link.here(BLOCK), link.there(BLOCK)

        def copy() -> None:
            for _ in range(100):
                link.engine.write(link.segment, here.address, there.address, BLOCK)
                link.engine.read(link.segment, here.address, there.address, BLOCK)

        copy()
        assert not gives_up_gil(copy)
    finally:
        link.close()
