"""register, by properties: a region is on every device whole or on none, and its keys carry transfers across borders.

Devices lie about what they take, calls fail at drawn moments, several threads register. The fake device is the model:
it knows what is really registered, under which keys. Mutants that were caught: the rest of a piece that was cut anew
dropped; chunks in the order of their completion; nothing undone; a limit lowered below what was taken already.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.errors import RegistrationError, VerbsError
from kvxfer.memory.registration import CHUNK_NBYTES_MIN, Registration, access_for, register
from kvxfer.memory.slices import cut_slices
from kvxfer.types import Rights
from kvxfer.verbs.device import Context, list_devices
from kvxfer.verbs.enums import CompletionStatus, WorkOpcode
from tests.support.fake_endpoint import Endpoint
from tests.support.fake_verbs import GIB, FakeFabric, FakeLibrary, connectx

MIB = 1 << 20
SPACE_NBYTES = 6 * GIB
NO_RESERVE = 0x4000  # MAP_NORESERVE of <sys/mman.h>; Python names it from 3.13 on
ALL = access_for(Rights.ALL)
SIZE_ERRNOS = [errno.EINVAL, errno.ENOMEM, errno.EIO]

Bytes = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def spaces() -> tuple[Bytes, Bytes]:
    """Two blocks of address space, sparse: a page exists once it was written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    blocks = [mmap.mmap(-1, SPACE_NBYTES, flags) for _ in range(2)]
    return np.frombuffer(blocks[0], np.uint8), np.frombuffer(blocks[1], np.uint8)  # they go when the last array goes


def address_of(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


@dataclass(frozen=True)
class Fault:
    """The nth call of a verb fails."""

    verb: str
    errno: int
    nth: int


@dataclass(frozen=True)
class Nic:
    """What a device says it takes, and what it takes."""

    advertised: int
    hidden: int | None
    errno: int


limits = st.one_of(
    st.just(2**64 - 1), st.integers(CHUNK_NBYTES_MIN, 3 * GIB), st.sampled_from([GIB, GIB - 1, 2 * GIB, 4 * GIB])
)
nics = st.builds(
    Nic,
    advertised=limits,
    hidden=st.one_of(st.none(), st.integers(CHUNK_NBYTES_MIN, 2 * GIB), st.integers(16 * MIB, GIB)),
    errno=st.sampled_from(SIZE_ERRNOS),
)
faults = st.builds(
    Fault,
    verb=st.sampled_from(["ibv_reg_mr", "ibv_reg_mr", "ibv_dereg_mr"]),
    errno=st.sampled_from([errno.EFAULT, errno.EIO, errno.EPERM, errno.ENOMEM]),
    nth=st.integers(1, 20),
)


@given(
    st.lists(nics, min_size=1, max_size=3),
    st.lists(faults, max_size=2),
    st.integers(0, 3 * MIB),
    st.integers(1, 4 * GIB),
    st.one_of(st.none(), st.integers(64 * MIB, 2 * GIB)),
    st.sampled_from([1, 4]),
)
@example([Nic(GIB, GIB - 1, errno.EINVAL)], [], 0, 7 * GIB // 2, None, 4)
@example([Nic(2**64 - 1, None, errno.EINVAL)], [Fault("ibv_reg_mr", errno.EIO, 1)], 0, 1, None, 1)
@example([Nic(2**64 - 1, None, 22), Nic(2**64 - 1, CHUNK_NBYTES_MIN + 1, 22)], [], 0, 603979777, None, 4)
@example([Nic(2**64 - 1, None, errno.EINVAL), Nic(GIB, 32 * MIB, errno.EIO)], [], 5, 4 * GIB, None, 4)
def test_region_is_on_every_device_whole_or_on_none(
    spaces: tuple[Bytes, Bytes],
    drawn: list[Nic],
    budget: list[Fault],
    offset: int,
    nbytes: int,
    chunk_nbytes_max: int | None,
    threads: int,
) -> None:
    """B72, B74, B75, B77, B82, B83"""
    fakes = [
        connectx(f"mlx5_{number}", max_mr_size=nic.advertised, mr_nbytes_max=nic.hidden, mr_errno=nic.errno)
        for number, nic in enumerate(drawn)
    ]
    library = FakeLibrary(FakeFabric(), *fakes)
    contexts = [device.open() for device in list_devices(library)]
    domains = [context.alloc_pd() for context in contexts]
    address = address_of(spaces[0]) + offset
    for fault in budget:
        library.fail(fault.verb, fault.errno, nth=fault.nth)

    made, error = None, None
    try:
        made = register(domains, address, nbytes, ALL, chunk_nbytes_max=chunk_nbytes_max, threads=threads)
    except RegistrationError as caught:
        error = caught
    if error is not None:
        left_behind = error.values.get("left_behind", ())
        assert library.live["mr"] == len(left_behind) <= len(budget)
        assert error.device in [fake.name for fake in fakes]
        assert address <= error.values["address"] < address + nbytes
        takes_little = [nic for nic in drawn if nic.hidden is not None and nic.hidden < 2 * CHUNK_NBYTES_MIN]
        assert budget or takes_little, f"it gave up without a reason: {error}"
    if made is not None:
        check_chunks(library, made, chunk_nbytes_max)
        close_with_patience(made, len(budget))
        assert library.live["mr"] == 0

    for context in contexts:
        close_context_with_patience(context, len(budget))
    assert library.leaks == {}


def check_chunks(library: FakeLibrary, made: Registration, chunk_nbytes_max: int | None) -> None:
    """What the result says is what the devices have."""
    for result, fake in zip(made.devices, library.devices, strict=True):
        at = made.address
        for address, nbytes, lkey, rkey in result.chunks.tolist():
            assert address == at, "a gap, an overlap or the wrong order"
            assert 0 < nbytes <= result.limit_nbytes
            assert nbytes <= min(chunk_nbytes_max or nbytes, fake.nic.max_mr_size)
            region = fake.keys[lkey]
            assert (region.address, region.nbytes, region.lkey, region.rkey) == (address, nbytes, lkey, rkey)
            at += nbytes
        assert at == made.address + made.nbytes
        assert fake.live["mr"] == len(result.chunks)
        assert len(result.chunks) <= made.nbytes // (CHUNK_NBYTES_MIN // 2) + 2


def close_with_patience(made: Registration, fault_count: int) -> None:
    for _ in range(fault_count + 1):
        with contextlib.suppress(VerbsError):
            made.close()
    assert made.is_closed


def close_context_with_patience(context: Context, fault_count: int) -> None:
    """Close a device on which chunks may be left behind by a failed undoing."""
    for _ in range(fault_count + 1):
        with contextlib.suppress(VerbsError):
            context.close()


@dataclass(frozen=True)
class Row:
    """A transfer near a border: how far before the border it begins on each side, and its length."""

    border: int
    before: int
    remote_border: int
    remote_before: int
    nbytes: int


rows = st.builds(
    Row,
    border=st.integers(0, 3),
    before=st.integers(-5000, 5000),
    remote_border=st.integers(0, 4),
    remote_before=st.integers(-5000, 5000),
    nbytes=st.one_of(st.integers(1, 9000), st.sampled_from([1, 4096, 65537])),
)


@given(st.lists(rows, min_size=1, max_size=6), st.sampled_from([WorkOpcode.RDMA_WRITE, WorkOpcode.RDMA_READ]))
@example([Row(1, 1, 1, 1, 2)], WorkOpcode.RDMA_WRITE)
@example([Row(1, 2048, 2, 2048, 4096), Row(3, 1, 4, 3, 65537)], WorkOpcode.RDMA_READ)
def test_transfers_cross_the_borders_of_both_sides(
    spaces: tuple[Bytes, Bytes], drawn: list[Row], opcode: WorkOpcode
) -> None:
    """B72, B74, B119: 3.5 GiB in chunks of 1 GiB here, 5 GiB in chunks of 1.25 GiB there"""
    fabric = FakeFabric()
    sides = [(spaces[0], 7 * GIB // 2, GIB), (spaces[1], 5 * GIB, 5 * GIB // 4)]
    libraries, contexts, domains, regions, ends = [], [], [], [], []
    for number, (space, nbytes, limit) in enumerate(sides):
        library = FakeLibrary(fabric, connectx(address=f"10.0.0.{number + 1}", max_mr_size=limit), name=str(number))
        context = list_devices(library)[0].open()
        domain = context.alloc_pd()
        libraries.append(library)
        contexts.append(context)
        domains.append(domain)
        regions.append(register([domain], address_of(space) + 100, nbytes, ALL))
        ends.append(Endpoint(library, pd=domain.pointer))
    ends[0].connect(ends[1])

    tables = [made.devices[0].chunks for made in regions]
    columns = []
    for side, (border, before) in enumerate((("border", "before"), ("remote_border", "remote_before"))):
        starts = tables[side]["address"].tolist()
        first, last = regions[side].address, regions[side].address + regions[side].nbytes
        wanted = [starts[min(getattr(row, border), len(starts) - 1)] - getattr(row, before) for row in drawn]
        columns.append([max(first, min(at, last - row.nbytes)) for at, row in zip(wanted, drawn, strict=True)])
    local, remote = (np.array(column, np.int64) for column in columns)
    sides_of_rows = (local, remote)
    lengths = np.array([row.nbytes for row in drawn], np.int64)
    slices = cut_slices(local, remote, lengths, tables[0], tables[1], 2**30)
    source, target = (0, 1) if opcode is WorkOpcode.RDMA_WRITE else (1, 0)

    for at, length in zip(sides_of_rows[source], lengths, strict=True):
        view(spaces[source], at, length)[:] = np.resize(np.arange(1, 252, dtype=np.uint8), length)
    for each in slices:
        lkey = int(tables[0]["lkey"][each["local_chunk"]])
        rkey = int(tables[1]["rkey"][each["remote_chunk"]])
        piece = (int(each["local"]), int(each["nbytes"]), lkey)
        request = {"opcode": opcode, "remote": int(each["remote"]), "rkey": rkey, "pieces": [piece]}
        assert ends[0].post(request) == (0, 1)
        assert [done.status for done in ends[0].poll()] == [CompletionStatus.SUCCESS]

    last = len(drawn) - 1  # rows may overlap; what the last one wrote is certain
    got = view(spaces[target], sides_of_rows[target][last], lengths[last])
    assert (got == view(spaces[source], sides_of_rows[source][last], lengths[last])).all()
    for end, made, context, library in zip(ends, regions, contexts, libraries, strict=True):
        end.close()
        made.close()
        context.close()
        assert library.leaks == {}


def view(space: Bytes, address: int, nbytes: int) -> Bytes:
    start = int(address) - address_of(space)
    return space[start : start + int(nbytes)]
