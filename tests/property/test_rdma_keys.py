"""KeyTable against a look at every chunk: one key for a batch only where that one chunk holds all of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.transports.rdma_keys import KeyTable
from kvxfer.types import RegionDescriptor, Rights

Chunks = list[tuple[int, int, int]]


@st.composite
def key_rows(draw: st.DrawFn) -> Chunks:
    """Draw chunks (address, nbytes, key) without overlap, in any order; about half touch the one before."""
    rows, position = [], draw(st.integers(0, 4))
    for key, (gap, nbytes) in enumerate(draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1))):
        position += max(0, gap - 1)
        rows.append((position, nbytes, 1000 + key))
        position += nbytes
    return draw(st.permutations(rows))


@given(key_rows(), st.integers(0, 40), st.integers(1, 20))
def test_a_region_has_one_key_exactly_where_one_chunk_covers_it(rows: Chunks, address: int, nbytes: int) -> None:
    region = RegionDescriptor(1, "", address, nbytes, Rights.ALL, {})
    keys = [key for start, size, key in rows if start <= address and address + nbytes <= start + size]

    assert KeyTable.of_rows(rows).find_region(region) == (keys[0] if keys else None)


@given(key_rows(), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 5))
def test_rows_of_one_length_have_one_key_exactly_where_one_chunk_holds_them(
    rows: Chunks, addresses: list[int], nbytes: int
) -> None:
    keys = [key for start, size, key in rows if all(start <= at and at + nbytes <= start + size for at in addresses)]

    found = KeyTable.of_rows(rows).find_one(np.array(addresses), np.full(len(addresses), nbytes))

    assert found == (keys[0] if keys else None)
