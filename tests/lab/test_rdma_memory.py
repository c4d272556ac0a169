"""Regions longer than what a device takes at once, and longer than 4 GiB: rows across every border, on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvxfer import TransferEngine
from tests.lab.wire import HERE, THERE, count_objects
from tests.support.peer import Peer, map_aliased, pattern

MIB = 1 << 20
CHUNK_NBYTES = MIB
REGION_NBYTES = 10 * MIB
FOUR_GIB = 4 << 30
ALIASED_NBYTES = 12 * MIB
"""No divisor of 4 GiB: an address that lost its upper half shows other bytes."""
ALIASES = 352
"""4.1 GiB of addresses, 12 MiB of memory."""

pytestmark = [pytest.mark.rdma, pytest.mark.topology("wire")]


@contextmanager
def two_engines(**settings: Any) -> Iterator[tuple[TransferEngine, Peer]]:
    with (
        TransferEngine(transports=("rdma",), rdma_devices=",".join(HERE), **settings) as engine,
        Peer(transports=("rdma",), rdma_devices=",".join(THERE), **settings) as peer,
    ):
        yield engine, peer


@pytest.mark.parametrize("opcode", ["write", "read"])
def test_rows_across_every_border_of_chunks_on_both_sides(opcode: str) -> None:
    with two_engines(rdma_chunk_nbytes_max=CHUNK_NBYTES) as (engine, peer):
        before = count_objects("mr", HERE)
        here, there = engine.register(np.zeros(REGION_NBYTES, np.uint8)), peer.register(REGION_NBYTES)
        assert count_objects("mr", HERE) - before >= len(HERE) * REGION_NBYTES // CHUNK_NBYTES
        segment = engine.open_segment(peer.address)
        borders = range(CHUNK_NBYTES, REGION_NBYTES, CHUNK_NBYTES)
        move = getattr(engine, opcode)
        expected = {"near": pattern(REGION_NBYTES, 1), "far": pattern(REGION_NBYTES, 2)}
        here.array[:] = expected["near"]
        there.fill(expected["far"])
        for shift in range(len(borders)):  # each border here with each border there, a little off it, not all alike
            pairs = [(mine, borders[(at + shift) % len(borders)]) for at, mine in enumerate(borders)]
            local, remote, nbytes = np.array(
                [(m - 700 + (m >> 20) * 31, t - 900 + (t >> 20) * 57, 1500 + (m + t) % 331) for m, t in pairs]
            ).T
            move(segment, here.address + local, there.address + remote, nbytes)
            for row in zip(local, remote, nbytes, strict=True):
                copy(expected, opcode, *row)
        assert np.array_equal(here.array, expected["near"])
        assert np.array_equal(there.array(), expected["far"])

        for local, remote, nbytes in ((0, 0, REGION_NBYTES), (1, 4097, REGION_NBYTES - 5000)):  # all borders in one row
            here.array[:] = expected["near"] = pattern(REGION_NBYTES, 3 + local)
            move(segment, here.address + local, there.address + remote, nbytes)
            copy(expected, opcode, local, remote, nbytes)
            assert np.array_equal(here.array, expected["near"])
            assert np.array_equal(there.array(), expected["far"])

        engine.unregister(here)
        assert count_objects("mr", HERE) == before


def copy(content: dict[str, Any], opcode: str, local: int, remote: int, nbytes: int) -> None:
    """Do to the model what a row does; memory that is mapped again and again begins anew at its end."""
    near, far = content["near"], content["far"]
    mine, theirs = place(local, nbytes, len(near)), place(remote, nbytes, len(far))
    if opcode == "write":
        far[theirs] = near[mine]
    else:
        near[mine] = far[theirs]


def place(offset: int, nbytes: int, size: int) -> Any:
    """Where bytes of a region lie in memory of `size` bytes."""
    start = offset % size
    return slice(start, start + nbytes) if start + nbytes <= size else (start + np.arange(nbytes)) % size


@pytest.mark.timeout(280)
@pytest.mark.topology("wire", machine="qemu")  # User-Mode Linux cannot map so many pages of one process
@pytest.mark.parametrize("chunk_nbytes", [None, 1 << 30])
def test_rows_beyond_4_gib_of_a_region_on_both_sides(chunk_nbytes: int | None) -> None:
    with two_engines(rdma_chunk_nbytes_max=chunk_nbytes) as (engine, peer):
        address, near = map_aliased(ALIASED_NBYTES, ALIASES)
        region = engine.register((address, ALIASED_NBYTES * ALIASES))
        there = peer.register_aliased(ALIASED_NBYTES, ALIASES)
        segment = engine.open_segment(peer.address)
        near[:] = pattern(ALIASED_NBYTES, 1)
        expected = {"near": near.copy(), "far": np.zeros(ALIASED_NBYTES, np.uint8)}
        offsets = [
            0,
            (1 << 30) - 777,
            (2 << 30) - 4097,
            (3 << 30) - 1,
            FOUR_GIB - 2222,
            ALIASED_NBYTES * ALIASES - 5001,
        ]

        for opcode, turn in (("write", 1), ("read", 2)):
            theirs = [*offsets[turn:], *offsets[:turn]]
            getattr(engine, opcode)(segment, region.address + np.array(offsets), there.address + np.array(theirs), 5000)
            for local, remote in zip(offsets, theirs, strict=True):
                copy(expected, opcode, local, remote, 5000)

            assert np.array_equal(near, expected["near"])
            assert np.frombuffer(there.bytes(0, ALIASED_NBYTES), np.uint8).tobytes() == expected["far"].tobytes()
