"""plan_chunks against its own definition: exact cover, limits, alignment, and as few chunks as greed can reach."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.memory import plan_chunks


def naive_chunk_count(address: int, nbytes: int, limit: int, alignment: int) -> int:
    """Count the chunks of a loop that ends each chunk at the last aligned address within the limit."""
    count, end = 1, address + nbytes
    while end - address > limit:
        address = (address + limit) // alignment * alignment
        count += 1
    return count


@given(
    address=st.integers(0, 1 << 20) | st.integers(0, 2**62),
    nbytes=st.integers(1, 1 << 16),
    alignment=st.sampled_from([1, 2, 64, 4096]),
    extra=st.integers(0, 1 << 15) | st.just(2**64),
)
def test_chunks_cover_the_region_exactly_within_their_limits(
    address: int, nbytes: int, alignment: int, extra: int
) -> None:
    limit = max(alignment + extra, nbytes // 200)

    chunks = plan_chunks(address, nbytes, limit, alignment)

    starts, lengths = chunks["address"].tolist(), chunks["nbytes"].tolist()
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    assert starts == [address, *ends[:-1]]
    assert ends[-1] == address + nbytes
    assert all(1 <= length <= limit for length in lengths)
    assert all(start % alignment == 0 for start in starts[1:])
    assert len(chunks) == naive_chunk_count(address, nbytes, limit, alignment)
