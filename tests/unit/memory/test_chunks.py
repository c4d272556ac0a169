"""plan_chunks: the chunks of the cases, and what is refused."""

from __future__ import annotations

import pytest

from kvxfer.errors import ConfigError, UsageError
from kvxfer.memory import CHUNK_DTYPE, plan_chunks

GIB = 1 << 30
BASE = 0x7F00_0000_0000


def test_region_above_max_mr_size_is_split_and_nothing_is_cut_off() -> None:  # B72
    chunks = plan_chunks(BASE, 7 * GIB // 2, GIB)

    assert chunks.dtype == CHUNK_DTYPE
    assert chunks["nbytes"].tolist() == [GIB, GIB, GIB, GIB // 2]
    assert chunks["address"].tolist() == [BASE, BASE + GIB, BASE + 2 * GIB, BASE + 3 * GIB]


def test_device_without_a_limit_gives_one_chunk() -> None:  # B72
    assert plan_chunks(BASE, 7 * GIB // 2, 2**64 - 1).tolist() == [(BASE, 7 * GIB // 2)]


@pytest.mark.parametrize(("override", "count"), [(4 * GIB, 2), (GIB, 8), (GIB // 2, 16)])
def test_override_of_the_chunk_size_works_both_ways(override: int, count: int) -> None:  # B75
    chunks = plan_chunks(BASE, 8 * GIB, override)

    assert len(chunks) == count
    assert chunks["nbytes"].max() == override


def test_unaligned_region_has_aligned_inner_borders() -> None:
    chunks = plan_chunks(BASE + 100, 20000, 8192)

    assert chunks.tolist() == [(BASE + 100, 8092), (BASE + 8192, 8192), (BASE + 16384, 3716)]


def test_huge_page_alignment_holds_for_every_inner_border() -> None:
    chunks = plan_chunks(BASE + 4096, 10 << 20, 5 << 20, alignment=2 << 20)

    assert (chunks["address"][1:] % (2 << 20) == 0).all()
    assert chunks["nbytes"].sum() == 10 << 20


def test_rest_that_fits_into_the_last_chunk_makes_no_further_one() -> None:
    assert plan_chunks(BASE, 4096 + 4196, 4096 + 100).tolist() == [(BASE, 4096), (BASE + 4096, 4196)]


@pytest.mark.parametrize("chunk_nbytes_max", [4095, 0, -1])
def test_chunk_below_a_page_is_a_setting_error(chunk_nbytes_max: int) -> None:
    with pytest.raises(ConfigError, match=rf"chunk_nbytes_max {chunk_nbytes_max} is below the alignment of 4096"):
        plan_chunks(BASE, 8192, chunk_nbytes_max)


@pytest.mark.parametrize("alignment", [0, -4096, 4097])
def test_alignment_that_is_no_power_of_two_is_a_setting_error(alignment: int) -> None:
    with pytest.raises(ConfigError, match="power of two"):
        plan_chunks(BASE, 8192, GIB, alignment)


@pytest.mark.parametrize(("address", "nbytes"), [(BASE, 0), (-1, 8), (2**63 - 4, 8)])
def test_impossible_range_is_refused(address: int, nbytes: int) -> None:
    with pytest.raises(UsageError, match="no range of memory"):
        plan_chunks(address, nbytes, GIB)
