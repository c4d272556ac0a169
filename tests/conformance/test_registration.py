"""What may be registered, who may use it, and what happens when it is taken back."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer import (
    AccessDeniedError,
    AllocationError,
    ClosedError,
    MemoryArgumentError,
    NotRegisteredError,
    RegionBusyError,
    RegionOverlapError,
    RemoteAccessError,
    Rights,
    TransferEngine,
    TransferError,
    UsageError,
)
from kvxfer.remote_table import RemoteTable
from kvxfer.transports.rdma import RdmaTransport
from kvxfer.transports.shm import ShmTransport
from kvxfer.transports.tcp import TcpTransport
from tests.conformance.conftest import Link
from tests.support.peer import Peer, Remote, environment, pattern, wait_until

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[TransferEngine]:
    with TransferEngine() as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: TransferEngine) -> Iterator[TransferEngine]:
    yield shared_engine
    for region in shared_engine.regions:
        for _ in range(region.reference_count):
            shared_engine.unregister(region)


# Rights.


def open_up(link: Link, region: Remote) -> None:
    """Make this side believe that it may do all, so that the serving side has to refuse."""
    link.segment.refresh()
    known = [replace(one, rights=Rights.ALL) for one in link.segment.regions]
    if region.address not in [one.address for one in known]:
        known.append(replace(known[0], region_id=10**6, address=region.address, nbytes=region.nbytes))
    link.segment._transfers.table = RemoteTable(known)


@pytest.mark.parametrize(
    ("rights", "forbidden"), [(Rights.REMOTE_READ, "write"), (Rights.REMOTE_WRITE, "read"), (Rights.NONE, "write")]
)
def test_what_the_rights_forbid_is_refused_here(link: Link, rights: Rights, forbidden: str) -> None:
    here, there = link.here(4096), link.there(4096, rights=rights)
    here.array[:] = pattern(4096, 1)
    there.fill(pattern(4096, 2))

    with pytest.raises((AccessDeniedError, NotRegisteredError), match="row 0") as caught:
        getattr(link.engine, forbidden)(link.segment, [here.address], [there.address], [4096])

    assert caught.value.rows == (0,)
    if rights:
        assert isinstance(caught.value, AccessDeniedError)
        allowed = "read" if forbidden == "write" else "write"
        getattr(link.engine, allowed)(link.segment, here.address, there.address, 100)
    assert np.array_equal(here.array[100:], pattern(4096, 1)[100:])
    assert np.array_equal(there.array()[100:], pattern(4096, 2)[100:])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("rights", "forbidden"),
    [
        (Rights.REMOTE_READ, "write"),
        (Rights.REMOTE_WRITE, "read"),
        (Rights.NONE, "write"),
        (Rights.NONE, "read"),
    ],
)
def test_what_the_rights_forbid_is_refused_by_the_owner_too(
    own_link: Link, rights: Rights, forbidden: str, rows: int
) -> None:  # B90
    link = own_link
    if link.medium == "shm-any" or (link.medium == "shm" and (forbidden == "read" or not rights)):
        pytest.skip("over shm the owner takes no part: it can only keep a writeable descriptor to itself")
    here, there = link.here(4096), link.there(4096, rights=rights)
    link.there(4096)
    here.array[:] = pattern(4096, 3)
    there.fill(pattern(4096, 4))
    open_up(link, there)
    offsets = np.arange(rows) * 8

    with pytest.raises(TransferError) as caught:
        getattr(link.engine, forbidden)(link.segment, here.address + offsets, there.address + offsets, 4)

    if link.medium == "tcp":
        assert isinstance(caught.value, RemoteAccessError)
        assert "row 0" in str(caught.value)
    assert np.array_equal(there.array(), pattern(4096, 4))
    assert np.array_equal(here.array, pattern(4096, 3))


@pytest.mark.parametrize("opcode", ["write", "read"])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_past_the_end_are_refused_by_the_owner_too(opcode: str, rows: int) -> None:
    link = Link("tcp")
    try:
        here, there = link.here(8192), link.there(4096)
        here.array[:] = pattern(8192, 5)
        link.segment.refresh()
        link.segment._transfers.table = RemoteTable([replace(link.segment.regions[0], nbytes=8192)])
        local, remote = [here.address] * rows, [there.address] * (rows - 1) + [there.address + 4000]

        with pytest.raises(RemoteAccessError, match=f"row {rows - 1}\\b"):
            getattr(link.engine, opcode)(link.segment, local, remote, [100] * rows)

        assert not there.array().any()
        assert np.array_equal(here.array, pattern(8192, 5))
        link.engine.write(link.segment, here.address, there.address, 4096)  # the connection stays in step
        assert np.array_equal(there.array(), pattern(8192, 5)[:4096])
    finally:
        link.close()


def test_read_only_memory_here_may_be_sent_and_not_read_into(link: Link) -> None:  # B90
    content = pattern(4096, 6)
    content.flags.writeable = False
    here = link.engine.register(content, rights=Rights.REMOTE_READ)
    there = link.there(4096)

    link.engine.write(link.segment, here.address, there.address, 4096)

    assert there.bytes() == content.tobytes()
    there.fill(b"\0" * 4096)
    for local, remote in ((here.address, there.address), ([here.address], [there.address])):
        with pytest.raises(AccessDeniedError, match=r"row 0.*read-only"):
            link.engine.read(link.segment, local, remote, 4096)
    assert content.tobytes() == pattern(4096, 6).tobytes()


def test_read_only_memory_of_the_peer_may_be_read_and_not_written(link: Link) -> None:  # B90
    there = link.peer.register(4096, read_only=True, rights=Rights.REMOTE_READ)
    here = link.here(4096)
    here.array[:] = 1

    with pytest.raises(AccessDeniedError, match="row 0"):
        link.engine.write(link.segment, here.address, there.address, 4096)
    link.engine.read(link.segment, here.address, there.address, 4096)

    assert not here.array.any()
    assert not there.array().any()


def test_read_only_memory_needs_rights_that_say_so(engine: TransferEngine, tmp_path: Path) -> None:  # B90
    frozen = np.zeros(16, np.uint8)
    frozen.flags.writeable = False
    (tmp_path / "file").write_bytes(b"x" * 4096)
    with (tmp_path / "file").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)

    for memory in (frozen, bytes(16), mapped):
        with pytest.raises(MemoryArgumentError, match="read-only"):
            engine.register(memory)
        region = engine.register(memory, rights=Rights.REMOTE_READ)
        assert not region.array.flags.writeable
        engine.unregister(region)
        del region


# Names.


def test_region_is_found_by_its_name_although_it_was_registered_after_open(link: Link) -> None:  # B134
    here, there = link.here(4096), link.there(4096, name="kv/layer-0")
    here.array[:] = 9

    found = link.segment.region("kv/layer-0")

    assert (found.address, found.nbytes, found.name) == (there.address, 4096, "kv/layer-0")
    link.engine.write(link.segment, here.address, found.address, 4096)
    assert there.bytes() == b"\x09" * 4096


def test_region_registered_after_open_is_reached_without_a_refresh(link: Link) -> None:  # B134
    here = link.here(4096)
    here.array[:] = 8
    link.segment.refresh()
    there = link.there(4096)

    link.engine.write(link.segment, here.address, there.address, 4096)

    assert there.bytes() == b"\x08" * 4096


def test_unknown_name_is_refused_with_the_known_ones(link: Link) -> None:
    link.there(4096, name="pool")

    with pytest.raises(NotRegisteredError, match=r"'pol'.*pool"):
        link.segment.region("pol")


def test_name_follows_the_region_that_has_it_now(link: Link) -> None:  # B134: found stale over tcp
    here = link.here(4096)
    here.array[:] = 7
    first = link.there(4096, name="pool")
    assert link.segment.region("pool").address == first.address
    blocker = link.there(64 * 1024)
    first.unregister()
    second = link.there(64 * 1024, name="pool")

    found = link.segment.region("pool")
    link.engine.write_blocks(link.segment, here, [0], "pool", [1], block_nbytes=4096)

    assert (found.address, found.nbytes) == (second.address, 64 * 1024)
    assert second.bytes(4096, 4096) == b"\x07" * 4096
    assert not blocker.array().any()


def test_rights_follow_the_region_that_is_there_now(link: Link) -> None:  # B134: found stale over tcp
    here = link.here(4096)
    here.array[:] = 6
    there = link.there(4096, rights=Rights.REMOTE_READ)
    link.engine.read(link.segment, here.address, there.address, 16)
    here.array[:] = 6

    link.peer.run("engine.unregister(regions[one]); regions[one] = engine.register(arrays[one])", one=there.region_id)
    link.engine.write(link.segment, here.address, there.address, 4096)

    assert there.bytes() == b"\x06" * 4096


# Taking back.


def test_unregistered_by_the_peer_later_transfers_fail_and_name_it(link: Link) -> None:  # B169
    here, there = link.here(4096), link.there(4096, name="gone")
    link.engine.write(link.segment, here.address, there.address, 4096)
    there.unregister()

    for local, remote in ((here.address, there.address), ([here.address], [there.address])):
        with pytest.raises((NotRegisteredError, RemoteAccessError), match=f"{there.address:#x}"):
            link.engine.read(link.segment, local, remote, 4096)
    with pytest.raises(NotRegisteredError, match="gone"):
        link.segment.region("gone")


def test_batch_that_waits_fails_when_the_peer_unregisters(own_link: Link) -> None:  # B169
    link = own_link
    here, there = link.here(4096), link.there(4096, name="lease")
    here.array[:] = 5
    batch = link.engine.submit_write(link.segment, [here.address], [there.address], [4096])

    there_id = there.region_id
    link.peer.run("engine.unregister(regions[one])", one=there_id)

    if link.transport == "rdma":  # submit has posted it: it was not waiting, and is waited for
        assert batch.wait().is_done
        return
    with pytest.raises((RemoteAccessError, NotRegisteredError)) as caught:
        batch.wait()
    assert isinstance(caught.value, RemoteAccessError)
    assert batch.is_done
    assert not there.array().any()
    link.engine.unregister(here)  # the failed batch does not hold it


def test_batch_that_runs_ends_before_unregister_returns(own_link: Link) -> None:  # B169
    link, nbytes = own_link, 64 * MIB
    here, there = link.here(nbytes), link.there(nbytes)
    here.array[:] = 1
    step = 65536
    order = np.random.default_rng(1).permutation(nbytes // step) * step
    batch = link.engine.submit_write(link.segment, here.address + order, there.address + order, step)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            batch.wait()
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: batch.nbytes_done > 0 or batch._transfer.nbytes_moved > 0)
    link.peer.run(
        "engine.unregister(regions[one]); arrays[one][:] = 2; time.sleep(0.05); "
        "result = int(np.count_nonzero(arrays[one] != 2))",
        one=there.region_id,
    )
    thread.join()
    written_late = link.peer.run("result = int(np.count_nonzero(arrays[one] != 2))", one=there.region_id)

    assert written_late == 0
    assert all(isinstance(one, RemoteAccessError) for one in failed)


def test_unregister_while_batches_of_this_process_use_it_is_refused(link: Link) -> None:
    here, there = link.here(4096), link.there(4096)
    here.array[:] = 4
    batch = link.engine.submit_write(link.segment, here.address, there.address, 4096)

    with pytest.raises(RegionBusyError, match="1 running transfer of") as caught:
        link.engine.unregister(here)

    assert caught.value.retryable
    batch.wait()
    assert there.bytes() == b"\x04" * 4096
    link.engine.unregister(here)
    with pytest.raises(NotRegisteredError, match="local"):
        link.engine.write(link.segment, here.address, there.address, 4096)


def test_unregister_does_not_wait_for_a_peer_over_tcp_that_is_stopped() -> None:
    with Peer(transports=("tcp",)) as peer, TransferEngine(transports=("tcp",)) as engine:
        region = engine.register(np.zeros(4096, np.uint8))
        peer.run("engine.open_segment(address)", address=engine.address)
        with peer.stopped():
            engine.unregister(region)

        assert engine.regions == ()


def test_unregister_says_who_does_not_let_go() -> None:
    settings = {"transports": ("shm",), "unregister_timeout_s": 0.1}
    with Peer(transports=("shm",)) as peer, TransferEngine(**settings) as engine:
        region = engine.allocate(4096)
        peer.run("engine.open_segment(address)", address=engine.address)
        with peer.stopped(), pytest.raises(RegionBusyError, match=peer.address):
            engine.unregister(region)

        with pytest.raises(RegionOverlapError):
            engine.register((region.address, 8))  # its range is still taken
        wait_until(lambda: try_unregister(engine, region))
        assert engine.regions == ()


def try_unregister(engine: TransferEngine, region: Any) -> bool:
    try:
        engine.unregister(region)
    except RegionBusyError:
        return False
    return True


# What may be registered.


def test_a_region_is_not_registered_again_by_itself(engine: TransferEngine) -> None:
    region = engine.allocate(4096)

    with pytest.raises(MemoryArgumentError, match="is registered already"):
        engine.register(region)

    assert region.reference_count == 1
    assert engine.register(region.array) is region
    assert region.reference_count == 2


def test_equal_range_is_counted(engine: TransferEngine) -> None:  # B80
    memory = np.zeros(MIB, np.uint8)

    first, second = engine.register(memory), engine.register(memory)

    assert first is second
    engine.unregister(first)
    assert first.is_live
    engine.unregister(first)
    assert engine.regions == ()
    with pytest.raises(ClosedError, match="unregistered already"):
        engine.unregister(first)


def test_equal_range_stays_usable_for_peers_until_the_last(link: Link) -> None:  # B80
    here, there = link.here(4096), link.there(4096)
    here.array[:] = 3
    link.peer.run("engine.register(arrays[one])", one=there.region_id)
    link.peer.run("engine.unregister(regions[one])", one=there.region_id)

    link.engine.write(link.segment, here.address, there.address, 4096)

    assert there.bytes() == b"\x03" * 4096


@pytest.mark.parametrize("part", [slice(4096, None), slice(None, 4096), slice(100, 200)])
def test_overlap_is_refused_and_names_the_region(engine: TransferEngine, part: slice) -> None:  # B80
    memory = np.zeros(MIB, np.uint8)
    engine.register(memory, name="whole")

    with pytest.raises(RegionOverlapError, match="'whole'"):
        engine.register(memory[part])

    assert len(engine.regions) == 1


def test_allocated_memory_cannot_be_registered_in_part(engine: TransferEngine) -> None:
    region = engine.allocate(8192)

    with pytest.raises(RegionOverlapError):
        engine.register(region.array[:4096])


def test_name_can_be_had_once(engine: TransferEngine) -> None:
    engine.allocate(64, name="pool")

    with pytest.raises(UsageError, match="'pool' is taken"):
        engine.allocate(64, name="pool")
    with pytest.raises(UsageError, match="'pool' is taken"):
        engine.register(np.zeros(64, np.uint8), name="pool")

    assert len(engine.regions) == 1


class OnGpu:
    __cuda_array_interface__: ClassVar[dict[str, Any]] = {
        "data": (0x7000, False),
        "shape": (4,),
        "typestr": "|u1",
        "version": 3,
    }


class OnDlpackGpu:
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> object:
        raise AssertionError("not asked for")


SQUARE = np.arange(16, dtype=np.int64).reshape(4, 4)


@pytest.mark.parametrize(
    "memory",
    [
        SQUARE[:, 1],
        SQUARE[::2],
        SQUARE.T,
        np.lib.stride_tricks.as_strided(SQUARE, (4, 4), (0, 8)),
        SQUARE[::-1],
        np.zeros(0),
        b"",
        bytearray(),
        (4096, 0),
        (0, 16),
        (-4096, 16),
        (2**63 - 8, 16),
        (4096,),
        (4096, 1.5),
        "text",
        None,
        [1, 2, 3],
        np.array([object()]),
        OnGpu(),
        OnDlpackGpu(),
    ],
    ids=lambda memory: f"{type(memory).__name__}",
)
def test_memory_that_is_no_plain_block_is_refused(engine: TransferEngine, memory: Any) -> None:  # B86, B87, B91
    with pytest.raises(MemoryArgumentError) as caught:
        engine.register(memory)

    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TypeError)
    assert engine.regions == ()


def test_gpu_memory_is_told_with_a_remedy(engine: TransferEngine) -> None:  # B91
    with pytest.raises(MemoryArgumentError, match=r"cuda.*host memory"):
        engine.register(OnGpu())
    with pytest.raises(MemoryArgumentError, match=r"cuda:0.*host memory"):
        engine.register(OnDlpackGpu())


def test_contiguous_part_of_an_array_is_accepted(engine: TransferEngine) -> None:  # B86
    region = engine.register(SQUARE[1:3])

    assert (region.address, region.nbytes) == (SQUARE.ctypes.data + 32, 64)


def test_bytearray_cannot_be_resized_while_registered(engine: TransferEngine) -> None:  # B88
    memory = bytearray(4096)
    region = engine.register(memory)

    with pytest.raises(BufferError):
        memory.extend(b"more")

    engine.unregister(region)
    gc.collect()
    memory.extend(b"more")


def test_temporary_lives_as_long_as_its_registration(engine: TransferEngine) -> None:  # B88
    temporary = np.arange(8192, dtype=np.uint8)[::2].copy()
    seen = weakref.ref(temporary)
    region = engine.register(temporary)
    del temporary
    gc.collect()

    assert seen() is not None
    assert region.array.tobytes() == np.arange(8192, dtype=np.uint8)[::2].tobytes()

    engine.unregister(region)
    del region
    gc.collect()
    assert seen() is None


class FakeTensor:
    """What kvxfer asks of a torch.Tensor on the CPU, or on a GPU."""

    layout = "torch.strided"

    def __init__(self, array: Any, device: str = "cpu") -> None:
        self.array, self.device = array, types.SimpleNamespace(type=device)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


def test_torch_tensor_is_registered_without_importing_torch(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=FakeTensor))
    tensor, there = FakeTensor(np.arange(1024, dtype=np.float32)), link.there(4096)
    region = link.engine.register(tensor)

    link.engine.write(link.segment, tensor.data_ptr(), there.address, 4096)

    assert region.nbytes == 4096
    assert there.bytes() == tensor.array.tobytes()
    with pytest.raises(MemoryArgumentError, match="cuda"):
        link.engine.register(FakeTensor(np.zeros(4), "cuda"))


def test_address_and_size_are_enough(link: Link) -> None:
    memory, there = pattern(4096, 7), link.there(4096)
    link.engine.register((int(memory.ctypes.data), np.int64(4096)))

    link.engine.write(link.segment, int(memory.ctypes.data), there.address, 4096)

    assert there.bytes() == memory.tobytes()


@pytest.mark.parametrize(
    "make", [lambda: mmap.mmap(-1, 4096), lambda: bytearray(4096), lambda: memoryview(bytearray(4096))]
)
def test_buffers_are_moved_in_place(link: Link, make: Any) -> None:
    memory, there = make(), link.there(4096)
    there.fill(pattern(4096, 8))
    region = link.engine.register(memory)

    link.engine.read(link.segment, region.address, there.address, 4096)

    assert bytes(memory[:]) == pattern(4096, 8).tobytes()


# Allocation.


def test_allocate_more_than_there_is_raises_and_does_not_kill(engine: TransferEngine) -> None:  # B157
    for nbytes in (1 << 50, 1 << 62, 2**63 - 1, 2**64):
        with pytest.raises(AllocationError, match=str(nbytes)) as caught:
            engine.allocate(nbytes)
        assert caught.value.nbytes == nbytes
    assert engine.regions == ()


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True, "1", None])
def test_allocate_of_no_size_is_refused(engine: TransferEngine, nbytes: Any) -> None:
    with pytest.raises(MemoryArgumentError):
        engine.allocate(nbytes)


def test_failed_allocation_leaves_the_name_free(engine: TransferEngine) -> None:  # B82
    with pytest.raises(AllocationError):
        engine.allocate(1 << 50, name="pool")

    assert engine.allocate(4096, name="pool").name == "pool"


def test_array_outlives_unregister_and_the_engine() -> None:
    with TransferEngine() as engine:
        region = engine.allocate(4096)
        array = region.array
        array[:] = 1
        engine.unregister(region)
        array[:] = 2
        other = engine.allocate(4096).array
    other[:] = 3

    assert array.tobytes() == b"\2" * 4096
    assert other.tobytes() == b"\3" * 4096


def test_many_regions(link: Link) -> None:
    addresses = link.peer.run(
        "whole = np.zeros((2000, 64), np.uint8); arrays['many'] = whole\n"
        "regions |= {region.region_id: region for region in map(engine.register, whole)}\n"
        "arrays |= {one: whole for one in regions}\n"
        "result = [region.address for region in regions.values()]"
    )
    here = link.here(2000 * 32)
    here.array[:] = pattern(2000 * 32, 9)

    link.engine.write(link.segment, here.address + np.arange(2000) * 32, np.array(addresses) + 16, 32)

    found = link.peer.run("result = arrays.pop('many').tobytes()")
    expected = np.zeros((2000, 64), np.uint8)
    expected[:, 16:48] = here.array.reshape(2000, 32)
    assert found == expected.tobytes()


def test_registration_that_fails_at_the_second_transport_is_undone_at_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # B77, B82, B83
    def fail(self: TcpTransport, address: int, nbytes: int, **rights: Any) -> dict[str, Any]:
        raise OSError(errno.EIO, "the second one is full")

    calls: list[tuple[Any, ...]] = []
    with TransferEngine(transports=("shm", "tcp")) as engine, Peer() as peer:
        first = engine.register(np.zeros(64, np.uint8))
        with monkeypatch.context() as patch:
            patch.setattr(ShmTransport, "register", lambda self, address, nbytes, **rights: {"key": 5})
            patch.setattr(ShmTransport, "deregister", lambda self, *arguments: calls.append(arguments))
            patch.setattr(TcpTransport, "register", fail)
            memory = bytearray(4096)
            address = int(np.frombuffer(memory, np.uint8).ctypes.data)
            for attempt in (lambda: engine.register(memory, name="kv"), lambda: engine.allocate(4096, name="kv")):
                with pytest.raises(OSError, match="second one"):
                    attempt()

        assert calls[0] == (address, 4096, {"key": 5})
        assert len(calls) == 2
        assert engine.regions == (first,)
        gc.collect()
        memory.extend(b"nothing holds it")
        assert engine.allocate(4096, name="kv").name == "kv"
        assert peer.run("result = len(engine.open_segment(address).regions)", address=engine.address) == 2


def test_thousand_transfers_register_once(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:  # B93
    calls: list[int] = []
    kind: Any = {"shm": ShmTransport, "tcp": TcpTransport, "rdma": RdmaTransport}[link.transport]
    register = kind.register

    def count(self: Any, address: int, nbytes: int, **settings: Any) -> Any:
        calls.append(address)
        return register(self, address, nbytes, **settings)

    monkeypatch.setattr(kind, "register", count)
    here, there = link.here(8 * 4096), link.there(8 * 4096)
    rows = np.arange(4) * 8192

    for _ in range(500):
        link.engine.write(link.segment, here.address, there.address, 4096)
        link.engine.write(link.segment, here.address + rows, there.address + rows, 4096)

    assert calls == [here.address]


@pytest.mark.parametrize("order", [("shm", "tcp"), ("tcp", "shm")])
def test_every_region_is_there_for_every_transport_in_any_order(order: tuple[str, ...]) -> None:  # B141
    with Peer(transports=order) as peer:
        regions = [peer.allocate(4096, name="first"), peer.register(4096, name="second")]
        assert peer.run("result = [set(region.keys) for region in engine.regions]") == [{"shm", "tcp"}] * 2
        for transport in order:
            with TransferEngine(transports=(transport,)) as engine:
                here = engine.register(np.full(4096, 3, np.uint8))
                segment = engine.open_segment(peer.address)
                assert {region.name for region in segment.regions} == {"first", "second"}
                for there in regions:
                    there.fill(bytes(4096))
                    engine.write(segment, here.address, there.address, 4096)
                    assert there.bytes() == b"\3" * 4096


def test_allocate_does_not_depend_on_the_size_of_dev_shm() -> None:  # B157
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces cannot be made here")
    source = (
        "import os, kvxfer\n"
        "with kvxfer.TransferEngine(transports=('shm',)) as one, kvxfer.TransferEngine(transports=('shm',)) as two:\n"
        "    here, there = one.allocate(64 << 20), two.allocate(64 << 20)\n"
        "    here.array[:] = 1\n"
        "    one.write(one.open_segment(two.address), here.address, there.address, 64 << 20)\n"
        "    print(there.array.min(), os.listdir('/dev/shm'))\n"
    )
    small = 'mount -t tmpfs -o size=16m none /dev/shm && exec "$@"'

    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", small, "sh", sys.executable, "-c", source],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "1 []\n", "")
