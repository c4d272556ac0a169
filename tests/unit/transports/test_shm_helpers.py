"""Threads that copy beside the caller: on which CPUs, and when."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from kvxfer.transports.shm_helpers import CopyHelpers, Turn

CPUS = os.sched_getaffinity(0)


@pytest.fixture
def helpers() -> Iterator[CopyHelpers]:
    helpers = CopyHelpers(1)
    run(helpers)  # the thread begins with the first call
    yield helpers
    helpers.close()


def run(helpers: CopyHelpers) -> set[int]:
    """Return the CPUs that a helper may run on."""
    cpus: list[set[int]] = []
    done = helpers.submit(lambda: cpus.append(os.sched_getaffinity(0)))
    assert done is not None
    done.result()
    return cpus[0]


@pytest.fixture
def pinned() -> Iterator[int]:
    """This thread runs on one CPU only."""
    cpu = min(CPUS)
    os.sched_setaffinity(0, {cpu})
    yield cpu
    os.sched_setaffinity(0, CPUS)


@pytest.mark.skipif(len(CPUS) < 2, reason="there is one CPU: a helper has no other")
def test_a_helper_runs_where_the_caller_may_but_is_not(helpers: CopyHelpers) -> None:
    allowed = run(helpers)

    assert allowed < CPUS
    assert len(allowed) == len(CPUS) - 1


def test_a_caller_on_one_cpu_leaves_helpers_where_they_are(helpers: CopyHelpers, pinned: int) -> None:
    before = run(helpers)

    assert run(helpers) == before


def test_after_close_there_is_no_helper() -> None:
    helpers = CopyHelpers(1)
    helpers.close()

    assert helpers.submit(lambda: None) is None


def test_a_turn_that_is_over_copies_nothing_and_its_end_waits_for_a_copy() -> None:
    turn, copied = Turn(), []
    begun, go_on = threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        go_on.wait()
        copied.append(1)

    helper = threading.Thread(target=lambda: turn.take(copy))
    helper.start()
    begun.wait()
    threading.Timer(0.05, go_on.set).start()
    turn.end()
    assert copied == [1]
    turn.take(copy)
    assert copied == [1]
    helper.join()
