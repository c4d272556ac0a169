"""Windows of a large batch: who takes them when, against rails of any true speed.

Model: a rail carries what it has at its true speed, which need not be the speed that is believed. Invariants: every
byte is taken once; no rail is without work while some wait. Goal: the rails are done at nearly one time, also where
the belief is wrong, but for what a rail has already by then. Mutants that this caught: a window was half of what is
left, whoever asks; windows went on shrinking down to a byte.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.transports.rdma_spread import WINDOW_NBYTES, WINDOW_S, find_window

MIB = 1 << 20


def carry(nbytes: int, believed: list[float], true: list[float]) -> tuple[list[float], int]:
    """Return when each rail is done, in seconds, and how many windows there were."""
    left, windows = nbytes, 0
    queues: list[list[int]] = [[] for _ in true]
    free_at = [0.0 for _ in true]  # when the first of its windows is done
    ended = [0.0 for _ in true]
    now = 0.0
    while True:
        while left:
            at, window = find_window(left, believed, [sum(queue) for queue in queues])
            if window == 0:
                break
            windows += 1
            taken = min(window, left)
            if not queues[at]:
                free_at[at] = now + taken / true[at]
            queues[at].append(taken)
            left -= taken
        assert all(queues) or left == 0
        busy = [at for at, queue in enumerate(queues) if queue]
        if not busy:
            assert left == 0
            return ended, windows
        at = min(busy, key=lambda one: free_at[one])
        now = ended[at] = free_at[at]
        queues[at].pop(0)
        if queues[at]:
            free_at[at] = now + queues[at][0] / true[at]


RATE = st.floats(1e7, 1e11)


@given(st.integers(MIB, 1 << 32), st.lists(RATE, min_size=2, max_size=8))
def test_rails_of_known_speed_are_done_together(nbytes: int, rates: list[float]) -> None:
    ended, windows = carry(nbytes, rates, rates)

    slack_s = WINDOW_S + WINDOW_NBYTES / min(rates)
    assert max(ended) <= 1.25 * nbytes / sum(rates) + 4 * slack_s
    assert windows <= 64 * len(rates)


@given(st.integers(64 * MIB, 1 << 32), st.floats(1e8, 1e10), st.floats(0.05, 1.0), st.integers(2, 8))
def test_a_rail_that_is_slower_than_it_was_takes_less(nbytes: int, rate: float, speed: float, count: int) -> None:
    """Three quarters of its share are posted before anybody can tell; of the rest it takes what it is fit for."""
    believed = [rate] * count
    true = [rate * speed, *believed[1:]]

    ended, _ = carry(nbytes, believed, true)

    slack_s = WINDOW_S + WINDOW_NBYTES / min(true)
    assert max(ended) <= 1.25 * max(nbytes / sum(true), 0.75 * nbytes / count / true[0]) + 4 * slack_s


@pytest.mark.parametrize("rate", [1.0, 1e9, 5e10])
def test_a_short_batch_is_shared_out_at_once(rate: float) -> None:
    """What is done in a millisecond is not worth a second look."""
    nbytes = max(2 * WINDOW_NBYTES, int(rate * WINDOW_S))

    _, windows = carry(nbytes, [rate, rate], [rate, rate])

    assert windows == 2
