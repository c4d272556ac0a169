"""MappedCopy against a model that copies one byte at a time."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.transports import shm_copy
from kvxfer.transports.shm_copy import MappedCopy
from tests.support.gil import gives_up_gil

SLOT_NBYTES = 64
SLOTS = 40
WINDOW_NBYTES = 40
"""So small that rows are cut and windows end everywhere."""


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Draw (places in the source, places in the destination, lengths): rows that do not overlap, of one length, of
    few or of many."""
    count = draw(st.integers(1, SLOTS))
    lengths = draw(st.lists(st.integers(1, SLOT_NBYTES), min_size=1, max_size=5))
    nbytes = draw(st.lists(st.sampled_from(lengths), min_size=count, max_size=count))
    places = st.permutations(range(SLOTS)).map(lambda slots: [slot * SLOT_NBYTES for slot in slots[:count]])
    return draw(places), draw(places), nbytes


@given(batches())
def test_every_row_arrives_nothing_else_changes_and_what_is_left_is_known(
    batch: tuple[list[int], list[int], list[int]],
) -> None:
    sources, destinations, nbytes = batch
    source = np.random.default_rng(1).integers(1, 256, SLOTS * SLOT_NBYTES, np.uint8)
    destination = np.zeros_like(source)
    model = np.zeros_like(source)
    for at, to, length in zip(sources, destinations, nbytes, strict=True):
        for i in range(length):
            model[to + i] = source[at + i]
    transfer: Any = SimpleNamespace(stop=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm_copy, "WINDOW_NBYTES", WINDOW_NBYTES)
        job = MappedCopy(
            np.array(destinations) + destination.ctypes.data,
            np.array(sources) + source.ctypes.data,
            np.array(nbytes),
            np.arange(len(nbytes)),
        )
        while not job.is_done:
            before = job.nbytes_done
            job.run(transfer, 0.0)  # one window
            assert before < job.nbytes_done <= before + WINDOW_NBYTES
            missing = [
                row
                for row, (to, length) in enumerate(zip(destinations, nbytes, strict=True))
                if (destination[to : to + length] != model[to : to + length]).any()
            ]
            assert job.slices_left().tolist() == missing
    np.testing.assert_array_equal(destination, model)
    assert job.nbytes_done == sum(nbytes)


def copy_in_order(destination: Any, source: Any, nbytes: list[int]) -> MappedCopy:
    """Return the job that copies rows of these lengths, one behind the other on both sides."""
    starts = np.cumsum(nbytes) - nbytes
    return MappedCopy(
        destination.ctypes.data + starts, source.ctypes.data + starts, np.array(nbytes), np.arange(len(nbytes))
    )


@pytest.mark.parametrize("nbytes", [[4096] * 2048, [64 << 10] * 128, [3 << 20] * 2, list(range(1, 2000))])
def test_another_thread_gets_the_gil_between_windows_only(nbytes: list[int]) -> None:
    """With another thread that computes, each copy that gave up the GIL would wait for it for a switch interval."""
    source, destination = np.ones(sum(nbytes), np.uint8), np.zeros(sum(nbytes), np.uint8)
    job = copy_in_order(destination, source, nbytes)
    assert not gives_up_gil(lambda: job.run(SimpleNamespace(stop=None), math.inf))  # type: ignore[arg-type]
    assert job.is_done
    assert destination.all()


@pytest.mark.parametrize("nbytes", [[1] * 100_000, [1, 2] * 50_000])
def test_a_window_of_short_rows_ends_as_soon_as_one_of_long_rows(nbytes: list[int]) -> None:
    """Who gives up, and every thread that waits for the GIL, waits for a window."""
    source, destination = np.ones(sum(nbytes), np.uint8), np.zeros(sum(nbytes), np.uint8)
    job = copy_in_order(destination, source, nbytes)
    job.run(SimpleNamespace(stop=None), 0.0)  # type: ignore[arg-type]
    assert 0 < job.nbytes_done == destination.sum() < 10_000
