"""Managed buffers, and copies within the process that no address can crash."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvxfer
from kvxfer.compat.mooncake.memory import CLASS_NBYTES_MIN, SLAB_NBYTES, BufferPool, copy_bytes, copy_rows
from kvxfer.compat.mooncake.regions import Registrations
from kvxfer.types import Rights


@pytest.fixture(scope="module")
def engine() -> Iterator[kvxfer.TransferEngine]:
    with kvxfer.TransferEngine() as engine:
        yield engine


steps = st.lists(st.one_of(st.integers(0, SLAB_NBYTES), st.integers(0, 1 << 16), st.integers(-9, -1)), max_size=40)


@given(steps=steps)
@settings(max_examples=40)
def test_pieces_never_overlap_and_come_back_whole(engine: kvxfer.TransferEngine, steps: list[int]) -> None:
    """A positive step allocates so many bytes, a negative one frees the piece of that age."""
    pool = BufferPool(engine, Rights.NONE)
    pieces: dict[int, int] = {}
    for step in steps:
        if step >= 0 and sum(pieces.values()) + step <= 4 * SLAB_NBYTES:
            address = pool.allocate(step)
            assert all(address >= one + nbytes or address + step <= one for one, nbytes in pieces.items())
            pieces[address] = max(step, 1)
        elif step < 0 and pieces:
            address = list(pieces)[step % len(pieces)]
            del pieces[address]
            pool.free(address)

    for address in pieces:
        pool.free(address)

    slabs = [region for region in engine.regions if region.nbytes == SLAB_NBYTES]
    whole = {pool.allocate(SLAB_NBYTES) for _ in range(len(pool._slabs))}  # nothing is left in pieces
    assert whole == set(pool._slabs)
    for region in slabs:
        engine.unregister(region)


def test_piece_is_registered_and_backed_when_touched(engine: kvxfer.TransferEngine) -> None:
    pool = BufferPool(engine, Rights.ALL)

    address = pool.allocate(3 * CLASS_NBYTES_MIN)

    region = next(one for one in engine.regions if one.address <= address < one.end)
    assert region.rights is Rights.ALL
    copy_bytes(address, address + CLASS_NBYTES_MIN, CLASS_NBYTES_MIN)


@pytest.mark.parametrize("address", [12345, 0])
def test_free_of_what_is_not_in_use_is_refused(engine: kvxfer.TransferEngine, address: int) -> None:
    pool = BufferPool(engine, Rights.ALL)
    piece = pool.allocate(1)
    pool.free(piece)

    with pytest.raises(kvxfer.NotRegisteredError, match="no managed buffer"):
        pool.free(address or piece)


def test_rows_are_copied_in_order() -> None:
    source = np.arange(100_000, dtype=np.int64)
    destination = np.zeros_like(source)
    order = np.random.default_rng(1).permutation(len(source))
    here, there = destination.ctypes.data + 8 * np.arange(len(source)), source.ctypes.data + 8 * order

    copy_rows(here, there, np.full(len(source), 8))

    assert (destination == order).all()


@pytest.mark.parametrize(("to", "of"), [(16, None), (None, 16)])
def test_no_memory_is_an_error_and_no_signal(to: int | None, of: int | None) -> None:
    data = np.zeros(64, np.uint8)

    with pytest.raises(kvxfer.MemoryArgumentError, match="no such memory"):
        copy_bytes(to or data.ctypes.data, of or data.ctypes.data, 64)


def test_read_only_memory_is_not_written() -> None:
    data = np.zeros(64, np.uint8)
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ)

    with pytest.raises(kvxfer.MemoryArgumentError):
        copy_bytes(np.frombuffer(page, np.uint8).ctypes.data, data.ctypes.data, 64)


def test_large_piece_that_is_in_use_can_be_freed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with kvxfer.TransferEngine() as engine:
        pool = BufferPool(engine, Rights.ALL)
        address = pool.allocate(SLAB_NBYTES + 1)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "unregister", raise_busy)
            with pytest.raises(kvxfer.RegionBusyError):
                pool.free(address)

        pool.free(address)

        assert not engine.regions


def raise_busy(region: kvxfer.Region) -> None:
    raise kvxfer.RegionBusyError("it is in use.")


def test_empty_range_does_not_free_the_address_of_another(engine: kvxfer.TransferEngine) -> None:
    """Else the memory could be registered twice and was remotely writable after it was unregistered."""
    data = np.zeros(4096, np.uint8)
    registrations, whole = Registrations(engine), (data.ctypes.data, data.nbytes)
    registrations.add([whole])
    with pytest.raises(kvxfer.MemoryArgumentError):
        registrations.add([(data.ctypes.data, 0)])

    with pytest.raises(kvxfer.RegionOverlapError):
        registrations.add([whole])
    registrations.remove([data.ctypes.data])

    assert all(region.address != data.ctypes.data for region in engine.regions)


def test_the_range_of_a_batch_that_cannot_be_registered_is_named(engine: kvxfer.TransferEngine) -> None:
    """B83: the third of five; nothing of the batch stays registered."""
    memory = np.zeros(5 * 4096, np.uint8)
    ranges = [(memory.ctypes.data + 4096 * row, 0 if row == 2 else 4096) for row in range(5)]
    registrations = Registrations(engine)
    before = len(engine.regions)

    with pytest.raises(kvxfer.KvxferError) as caught:
        registrations.add(ranges)

    assert caught.value.values["index"] == 2
    assert len(engine.regions) == before
