"""Which bytes a batch moves, and which it leaves alone: between real processes, over every medium."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvxfer import NotRegisteredError, PeerRefusedError, TransferEngine, UsageError
from kvxfer.memory.shared import available_nbytes
from tests.conformance.conftest import Link
from tests.support.peer import map_fixed, pattern

MIB = 1 << 20


def scattered(count: int, nbytes: int, span: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return offsets of blocks that do not touch each other, in no order."""
    slots = np.random.default_rng(seed).permutation(span // (nbytes + 1))[:count]
    return slots.astype(np.int64) * (nbytes + 1)


def test_write_of_scattered_blocks_changes_their_bytes_and_no_other(link: Link) -> None:
    here, there = link.here(MIB), link.there(MIB)
    here.array[:] = pattern(MIB, 1)
    background = pattern(MIB, 2)
    there.fill(background)
    sources, targets = scattered(100, 4096, MIB, 3), scattered(100, 4096, MIB, 4)

    link.engine.write(link.segment, here.address + sources, there.address + targets, 4096)

    expected = background.copy()
    for source, target in zip(sources, targets, strict=True):
        expected[target : target + 4096] = here.array[source : source + 4096]
    assert np.array_equal(there.array(), expected)
    assert np.array_equal(here.array, pattern(MIB, 1))


def test_read_of_scattered_blocks_changes_their_bytes_and_no_other(link: Link) -> None:
    here, there = link.here(MIB), link.there(MIB)
    background = pattern(MIB, 5)
    here.array[:] = background
    there.fill(content := pattern(MIB, 6))
    targets, sources = scattered(100, 4096, MIB, 7), scattered(100, 4096, MIB, 8)

    link.engine.read(link.segment, here.address + targets, there.address + sources, 4096)

    expected = background.copy()
    for source, target in zip(sources, targets, strict=True):
        expected[target : target + 4096] = content[source : source + 4096]
    assert np.array_equal(here.array, expected)
    assert there.bytes() == content.tobytes()


@pytest.mark.parametrize("opcode", ["write", "read"])
def test_rows_of_mixed_lengths_from_one_byte_to_megabytes(link: Link, opcode: str) -> None:
    lengths = np.array([1, 3 * MIB + 5, 2, 65537, 7, 4095, MIB, 4097, 1, 255, 65536], np.int64)  # B119: 65537
    gaps = np.arange(1, len(lengths) + 1)
    starts = np.cumsum(lengths + gaps) - lengths  # odd addresses, a gap before each row
    span = int(starts[-1] + lengths[-1] + 100)
    here, there = link.here(span), link.there(span)
    mine, theirs = pattern(span, 9), pattern(span, 10)
    here.array[:] = mine
    there.fill(theirs)

    getattr(link.engine, opcode)(link.segment, here.address + starts, there.address + starts, lengths)

    mask = np.zeros(span, bool)
    for start, length in zip(starts, lengths, strict=True):
        mask[start : start + length] = True
    source, target = (mine, theirs) if opcode == "write" else (theirs, mine)
    changed = there.array() if opcode == "write" else here.array
    assert np.array_equal(changed, np.where(mask, source, target))


@pytest.mark.parametrize("nbytes", [1, 4096, 65536, 65537, MIB + 1])
@pytest.mark.parametrize("opcode", ["write", "read"])
def test_one_row_that_ends_with_its_region(link: Link, opcode: str, nbytes: int) -> None:  # B119
    span = nbytes + 3
    here, there = link.here(span), link.there(span)
    here.array[:] = pattern(span, 11)
    there.fill(pattern(span, 12))

    getattr(link.engine, opcode)(link.segment, here.address + 3, there.address + 3, nbytes)

    expected = np.concatenate((pattern(span, 12 if opcode == "write" else 11)[:3], here.array[3:]))
    assert np.array_equal(there.array() if opcode == "write" else here.array, expected)
    assert np.array_equal(here.array[3:], there.array()[3:])


@pytest.mark.parametrize("opcode", ["write", "read"])
def test_a_hundred_thousand_rows(link: Link, opcode: str) -> None:
    count, step = 100_000, 24
    here, there = link.here(count * step), link.there(count * step)
    here.array[:] = pattern(count * step, 13)
    there.fill(pattern(count * step, 14))
    before_here, before_there = here.array.copy().reshape(count, step), there.array().reshape(count, step)
    order = np.random.default_rng(15).permutation(count)

    batch = getattr(link.engine, f"submit_{opcode}")(
        link.segment, here.address + np.arange(count) * step, there.address + order * step, 16
    ).wait()

    assert batch.row_count == count
    assert batch.nbytes == batch.nbytes_done == count * 16
    if opcode == "write":
        before_there = before_there.copy()
        before_there[order, :16] = before_here[:, :16]
    else:
        before_here[:, :16] = before_there[order, :16]
    assert np.array_equal(there.array().reshape(count, step), before_there)
    assert np.array_equal(here.array.reshape(count, step), before_here)


def test_columns_may_be_lists_or_arrays_of_any_width(link: Link) -> None:
    here, there = link.here(4096), link.there(4096)
    here.array[:] = pattern(4096, 16)
    local = [here.address, here.address + 100]
    remote = np.array([there.address, there.address + 50], np.uint64)

    link.engine.write(link.segment, local, remote, np.array([10, 20], np.int16))

    expected = np.zeros(4096, np.uint8)
    expected[:10], expected[50:70] = here.array[:10], here.array[100:120]
    assert np.array_equal(there.array(), expected)


def test_adjacent_rows_become_one_slice(link: Link) -> None:
    here, there = link.here(64 * 4096), link.there(64 * 4096)
    here.array[:] = pattern(64 * 4096, 17)
    offsets = np.arange(64) * 4096

    batch = link.engine.submit_write(link.segment, here.address + offsets, there.address + offsets, 4096)

    slice_count = len(batch._transfer.columns[2])
    batch.wait()
    assert slice_count == 1
    assert batch.row_count == 64
    assert batch.rows_done.tolist() == [True] * 64
    assert np.array_equal(there.array(), here.array)


def test_adjacent_rows_on_one_side_only_stay_apart(link: Link) -> None:
    here, there = link.here(8192), link.there(8192)
    here.array[:] = pattern(8192, 18)

    batch = link.engine.submit_write(
        link.segment, [here.address, here.address + 100], [there.address, there.address + 101], 100
    )

    assert len(batch._transfer.columns[2]) == 2
    batch.wait()
    assert there.bytes(0, 201) == here.array[:100].tobytes() + b"\0" + here.array[100:200].tobytes()


def test_rows_adjacent_across_two_regions_stay_apart_and_arrive(link: Link) -> None:
    first, second = link.peer.register_parts(4096, 4096)
    here = link.here(8192)
    here.array[:] = pattern(8192, 19)

    batch = link.engine.submit_write(
        link.segment, [here.address, here.address + 4096], [first.address, second.address], 4096
    )

    assert second.address == first.address + 4096
    assert len(batch._transfer.columns[2]) == 2
    batch.wait()
    assert first.bytes() + second.bytes() == here.array.tobytes()


# Rows that must not be sent: refused by number, before a byte moves.


def assert_refused(
    link: Link, local: list[int], remote: list[int], nbytes: list[int], row: int, opcode: str = "write"
) -> NotRegisteredError:
    with pytest.raises(NotRegisteredError, match=f"row {row}\\b") as caught:
        getattr(link.engine, opcode)(link.segment, local, remote, nbytes)
    assert caught.value.rows[0] == row
    return caught.value


@pytest.mark.parametrize("opcode", ["write", "read"])
@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(4090, 7), (-1, 2), (4096, 1), (-5000, 16), (0, 4097), (4095, MIB // 2)],
    ids=["past-the-end", "before-the-start", "at-the-end", "unregistered", "one-byte-too-long", "far-too-long"],
)
def test_row_that_leaves_its_region_is_named_and_nothing_moves(
    link: Link, opcode: str, side: str, offset: int, nbytes: int
) -> None:  # B120, B176
    here, there = link.here(4096 if side == "local" else MIB), link.there(4096 if side == "remote" else MIB)
    here.array[:] = pattern(here.nbytes, 20)
    there.fill(pattern(there.nbytes, 21))
    local, remote = [here.address, here.address + 32], [there.address, there.address + 32]
    local.append(here.address + offset if side == "local" else here.address)
    remote.append(there.address + offset if side == "remote" else there.address)

    error = assert_refused(link, local, remote, [16, 16, nbytes], row=2, opcode=opcode)

    assert side in str(error)
    assert np.array_equal(here.array, pattern(here.nbytes, 20))
    assert np.array_equal(there.array(), pattern(there.nbytes, 21))


@pytest.mark.parametrize("opcode", ["write", "read"])
def test_row_over_two_neighbouring_regions_of_the_peer_is_refused(link: Link, opcode: str) -> None:  # B120
    first, second = link.peer.register_parts(4096, 4096)
    here = link.here(8192)
    here.array[:] = pattern(8192, 22)

    assert_refused(link, [here.address, here.address], [second.address, first.address + 4000], [8, 200], 1, opcode)

    assert not first.array().any()
    assert not second.array().any()
    assert np.array_equal(here.array, pattern(8192, 22))


def test_row_over_two_neighbouring_regions_here_is_refused(link: Link) -> None:
    whole = np.zeros(8192, np.uint8)
    first, _ = link.engine.register(whole[:4096]), link.engine.register(whole[4096:])
    there = link.there(8192)
    there.fill(pattern(8192, 23))

    assert_refused(link, [first.address + 4000], [there.address], [200], 0, "read")

    assert not whole.any()


@pytest.mark.parametrize(
    ("address", "nbytes"),
    [(2**63 - 8, 16), (2**64 - 8, 16), (-8, 16), (2**63 - 1, 1), (0, 16), (2**64 + 4096, 1)],
)
@pytest.mark.parametrize("side", ["local", "remote"])
def test_row_that_wraps_around_is_refused(link: Link, side: str, address: int, nbytes: int) -> None:  # B120
    here, there = link.here(4096), link.there(4096)
    here.array[:] = 1
    local, remote = (address, there.address) if side == "local" else (here.address, address)

    with pytest.raises(UsageError, match=r"row 1|[Aa]ddress|fit|64 bits"):
        link.engine.write(link.segment, [here.address, local], [there.address, remote], [16, nbytes])
    with pytest.raises(UsageError):
        link.engine.write(link.segment, local, remote, nbytes)

    assert not there.array().any()


@pytest.mark.parametrize(
    ("local", "remote", "nbytes"),
    [
        ([], [], []),
        ([0], [0, 0], [1]),
        ([0, 0], [0, 0], [1]),
        ([0], [0], [0]),
        ([0, 0], [0, 0], [16, 0]),
        ([0], [0], [-1]),
        ([0.0], [0.0], [1.0]),
        ([[0]], [[0]], [[1]]),
        (None, 0, 1),
        ("a", 0, 1),
        ([True], [0], [1]),
    ],
)
def test_columns_that_are_none_are_refused(link: Link, local: Any, remote: Any, nbytes: Any) -> None:  # B118
    here, there = link.here(4096), link.there(4096)
    here.array[:] = 1

    def shift(column: Any, base: int) -> Any:
        plain = isinstance(column, list) and all(type(one) is int for one in column)
        return [one + base for one in column] if plain else column

    with pytest.raises(UsageError):
        link.engine.write(link.segment, shift(local, here.address), shift(remote, there.address), nbytes)

    assert not there.array().any()


# Blocks by number.


def test_blocks_move_by_number(link: Link) -> None:
    here, there = link.here(64 * 1024), link.there(64 * 1024, name="pool")
    here.array[:] = pattern(64 * 1024, 24)
    source, target = [3, 0, 63], [5, 63, 1]

    link.engine.write_blocks(link.segment, here, source, "pool", target, block_nbytes=1024)

    expected = np.zeros((64, 1024), np.uint8)
    expected[target] = here.array.reshape(64, 1024)[source]
    assert np.array_equal(there.array().reshape(64, 1024), expected)

    back = link.here(64 * 1024)
    link.engine.read_blocks(
        link.segment, back, np.array([7, 8]), link.segment.region("pool"), np.array([63, 1]), block_nbytes=1024
    )

    blocks = back.array.reshape(64, 1024)
    assert np.array_equal(blocks[7], here.array.reshape(64, 1024)[0])
    assert np.array_equal(blocks[8], here.array.reshape(64, 1024)[63])
    assert blocks.any(axis=1).sum() == 2


@pytest.mark.parametrize(("source", "target"), [([0, 1], [0, 64]), ([0, 64], [0, 1]), ([0, -1], [0, 1])])
def test_block_out_of_range_is_named_and_nothing_moves(link: Link, source: list[int], target: list[int]) -> None:
    here, there = link.here(64 * 1024 + 100), link.there(64 * 1024 + 100, name="pool")  # B120: vllm-project/vllm#52234
    here.array[:] = 1

    with pytest.raises(NotRegisteredError, match="row 1"):
        link.engine.write_blocks(link.segment, here, source, "pool", target, block_nbytes=1024)
    with pytest.raises(NotRegisteredError, match="row 1"):
        link.engine.read_blocks(link.segment, here, source, "pool", target, block_nbytes=1024)

    assert not there.array().any()
    assert here.array.all()


@pytest.mark.parametrize(
    ("ids", "block_nbytes"),
    [([], 1024), ([0.5], 1024), ([[0]], 1024), ([True], 1024), ([0], 0), ([0], -1), ([0], 1.5), (["a"], 1024)],
)
def test_block_numbers_that_are_none_are_refused(link: Link, ids: Any, block_nbytes: Any) -> None:
    here = link.here(4096)
    link.there(4096, name="pool")

    with pytest.raises(UsageError):
        link.engine.write_blocks(link.segment, here, ids, "pool", [0] * max(1, len(ids)), block_nbytes=block_nbytes)


def test_block_columns_of_different_length_are_refused(link: Link) -> None:
    here = link.here(4096)
    there = link.there(4096, name="pool")
    here.array[:] = 1

    with pytest.raises(UsageError):
        link.engine.write_blocks(link.segment, here, [0, 1, 2], "pool", [0, 1], block_nbytes=64)

    assert not there.array().any()


# Processes that look alike.


def test_peer_memory_at_an_address_that_is_mapped_here_too(link: Link) -> None:  # B129
    if link.medium == "shm":
        pytest.skip("the address of memory from allocate cannot be chosen")
    # a place of its own for each medium, low enough for a User-Mode Linux guest
    address = 0x10_0000_0000 + 0x1000_0000 * ["shm-any", "tcp", "rdma"].index(link.medium)
    mine = map_fixed(address, 8192)
    there = link.peer.register_at(address, 8192)
    here = link.engine.register((address, 8192))
    mine[:4096] = 0xAA
    there.fill(b"\xbb" * 8192)

    link.engine.write(link.segment, address, address + 4096, 4096)
    link.engine.read(link.segment, address + 4096, address, 4096)

    assert here.address == there.address
    assert mine[:4096].tobytes() == b"\xaa" * 4096
    assert mine[4096:].tobytes() == b"\xbb" * 4096
    assert there.bytes() == b"\xbb" * 4096 + b"\xaa" * 4096


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("memory", ["allocate", "register"])
def test_two_engines_in_one_process(transport: str, memory: str) -> None:
    with TransferEngine(transports=(transport,)) as one, TransferEngine(transports=(transport,)) as other:
        if memory == "allocate":
            here, there = one.allocate(65536), other.allocate(65536)
        else:
            here, there = one.register(np.zeros(65536, np.uint8)), other.register(np.zeros(65536, np.uint8))
        segment, back = one.open_segment(other.address), other.open_segment(one.address)
        here.array[:] = pattern(65536, 25)

        one.write(segment, here.address, there.address, 65536)
        assert np.array_equal(there.array, here.array)

        here.array[:] = 0
        other.write(back, there.address, here.address, 65536)
        assert np.array_equal(there.array, here.array)
        assert here.array.all()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_engine_that_opens_itself_is_told_so(transport: str) -> None:  # B70
    with TransferEngine(transports=(transport,)) as engine, pytest.raises(PeerRefusedError, match="itself"):
        engine.open_segment(engine.address)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("opcode", ["write", "read"])
def test_one_row_of_more_than_four_gigabytes(own_link: Link, opcode: str) -> None:  # B74
    link, nbytes = own_link, 2**32 + 5
    needed = 6 << 30
    if available_nbytes() < needed:
        pytest.skip(f"needs {needed >> 30} GiB of memory; {available_nbytes() >> 30} GiB are available")
    if opcode == "read" and link.medium == "shm":
        there = link.peer.register(nbytes + 11)  # read, holes of a memfd would become pages: twice the memory
    else:
        there = link.there(nbytes + 11)
    here = link.engine.register(np.zeros(nbytes + 11, np.uint8))  # unwritten pages of it take no memory
    marks = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, nbytes - 1]
    for number, mark in enumerate(marks):
        if opcode == "write":
            here.array[mark] = number + 1
        else:
            there.fill([number + 1], mark)

    getattr(link.engine, opcode)(link.segment, here.address, there.address, nbytes, timeout_s=90.0)

    if opcode == "write":
        counts = "result = np.count_nonzero(arrays[one]), [int(arrays[one][mark]) for mark in marks]"
        found = link.peer.run(counts, one=there.region_id, marks=marks)
    else:
        found = np.count_nonzero(here.array), here.array[marks].tolist()
    assert found == (len(marks), [number + 1 for number in range(len(marks))])


def test_many_concurrent_writes_arrive_as_they_were_sent(link: Link) -> None:  # B127
    count, nbytes, rounds = 8, 192 * 1024, 6
    here, there = link.here(count * nbytes), link.there(count * nbytes)
    failures: list[object] = []

    def work(index: int) -> None:
        try:
            mine = here.array[index * nbytes : (index + 1) * nbytes]
            for turn in range(rounds):
                mine[:] = pattern(nbytes, 1000 * index + turn)
                offsets = index * nbytes + np.random.default_rng(turn).permutation(48) * 4096
                link.engine.write(link.segment, here.address + offsets, there.address + offsets, 4096)
                seen = np.zeros(nbytes, np.uint8)
                region = link.engine.register(seen)
                link.engine.read(link.segment, region.address, there.address + index * nbytes, nbytes)
                link.engine.unregister(region)
                if not np.array_equal(seen, mine):
                    failures.append((index, turn))
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert np.array_equal(there.array(), here.array)
