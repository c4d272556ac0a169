"""register: what is cut, what is refused, what is undone. On the fake device; case numbers are in the docstrings."""

from __future__ import annotations

import errno
import itertools
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvxfer.errors import (
    ConfigError,
    MemoryArgumentError,
    NotRegisteredError,
    RegistrationError,
    UsageError,
    VerbsError,
)
from kvxfer.memory import registration_error
from kvxfer.memory.mappings import explain_fault, find_mappings, find_page_nbytes
from kvxfer.memory.registration import CHUNK_NBYTES_MIN, Registration, access_for, register
from kvxfer.types import Rights
from kvxfer.verbs.device import list_devices
from kvxfer.verbs.enums import Access, CompletionStatus, WorkOpcode
from kvxfer.verbs.protection_domain import ProtectionDomain
from tests.support.fake_endpoint import Endpoint
from tests.support.fake_verbs import GIB, FakeFabric, FakeLibrary, FakeNic, connectx

MIB = 1 << 20
PAGE = 4096
NO_RESERVE = 0x4000  # MAP_NORESERVE of <sys/mman.h>; Python names it from 3.13 on
ALL = access_for(Rights.ALL)


class Host:
    """A host with fake devices, each open with one protection domain."""

    def __init__(self, *nics: FakeNic, **changes: Any) -> None:
        self.library = FakeLibrary(FakeFabric(), *nics, **changes)
        self.contexts = [device.open() for device in list_devices(self.library)]
        self.domains: list[ProtectionDomain] = [context.alloc_pd() for context in self.contexts]

    def live(self, device: str = "mlx5_0") -> int:
        return self.library.device(device).live["mr"]

    def close(self) -> None:
        for context in self.contexts:
            context.close()
        assert self.library.leaks == {}


@pytest.fixture(scope="module")
def space() -> Iterator[tuple[int, int]]:
    """12 GiB of address space, none of it touched: (address, nbytes)."""
    block = mmap.mmap(-1, 12 * GIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    array = np.frombuffer(block, np.uint8)
    yield array.__array_interface__["data"][0], len(array)
    del array
    block.close()


def starts(made: Registration, device: int = 0) -> list[int]:
    return [start - made.address for start in made.devices[device].chunks["address"].tolist()]


def sizes(made: Registration, device: int = 0) -> list[int]:
    return [int(nbytes) for nbytes in made.devices[device].chunks["nbytes"]]


# Cutting.


def test_region_above_max_mr_size_has_a_key_for_each_chunk(space: tuple[int, int]) -> None:
    """B72"""
    host = Host(connectx(max_mr_size=GIB))
    address = space[0]

    made = register(host.domains, address, 7 * GIB // 2, ALL)

    chunks = made.devices[0].chunks
    assert sizes(made) == [GIB, GIB, GIB, GIB // 2]
    assert starts(made) == [0, GIB, 2 * GIB, 3 * GIB]
    assert len(set(chunks["rkey"].tolist())) == len(set(chunks["lkey"].tolist())) == 4
    assert (made.devices[0].limit_nbytes, made.devices[0].limit_origin) == (GIB, "device")
    offsets = np.array([0, GIB - PAGE, GIB, 7 * GIB // 2 - PAGE])
    assert made.devices[0].find_chunks(address + offsets, np.full(4, PAGE)).tolist() == [0, 0, 1, 3]
    with pytest.raises(NotRegisteredError, match="spans"):
        made.devices[0].find_chunks(np.array([address + GIB - 1]), np.array([2]))
    with pytest.raises(NotRegisteredError):
        made.devices[0].find_chunks(np.array([address + 7 * GIB // 2]), np.array([1]))
    made.close()
    assert host.library.calls["ibv_dereg_mr"] == 4
    host.close()


def test_device_without_a_limit_gets_one_region(space: tuple[int, int]) -> None:
    """B72, B74: a length is not narrowed to 32 bits"""
    host = Host(connectx())

    with register(host.domains, space[0], 9 * GIB + 5, ALL) as made:
        assert sizes(made) == [9 * GIB + 5]
        assert host.library.device("mlx5_0").registered_nbytes == 9 * GIB + 5
    host.close()


def test_region_above_4_gib_is_covered_to_the_byte(space: tuple[int, int]) -> None:
    """B74"""
    host = Host(connectx(max_mr_size=2**32 - 1))

    with register(host.domains, space[0] + 1, 2**33 + 7, ALL) as made:
        assert sum(sizes(made)) == 2**33 + 7
        assert max(sizes(made)) < 2**32
        assert all((made.address + start) % (2 * MIB) == 0 for start in starts(made)[1:])
    host.close()


def test_smaller_limit_of_the_caller_holds(space: tuple[int, int]) -> None:
    """B75"""
    host = Host(connectx(max_mr_size=2 * GIB))

    with register(host.domains, space[0], 2 * GIB, ALL, chunk_nbytes_max=GIB) as made:
        assert sizes(made) == [GIB, GIB]
        assert made.devices[0].limit_origin == "setting"
    with register(host.domains, space[0], 4 * GIB, ALL, chunk_nbytes_max=4 * GIB) as made:
        assert sizes(made) == [2 * GIB, 2 * GIB]
    host.close()


def test_larger_limit_of_the_caller_holds_where_the_device_is_not_trusted(space: tuple[int, int]) -> None:
    """B75: a device that says 2 GiB and takes 4"""
    host = Host(connectx(max_mr_size=2 * GIB, mr_nbytes_max=4 * GIB))

    with register(host.domains, space[0], 8 * GIB, ALL, chunk_nbytes_max=4 * GIB, trusts_device=False) as made:
        assert sizes(made) == [4 * GIB, 4 * GIB]
    host.close()


@pytest.mark.parametrize(
    ("advertised", "hidden", "expected"),
    [(GIB, GIB - 1, 512 * MIB), (2**64 - 1, 512 * MIB, 512 * MIB), (2**64 - 1, 100 * MIB, 64 * MIB)],
)
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM, errno.EIO])
@pytest.mark.parametrize("threads", [1, 4])
def test_device_that_says_too_much_is_asked_for_less(
    space: tuple[int, int], advertised: int, hidden: int, expected: int, number: int, threads: int
) -> None:
    """B75"""
    host = Host(connectx(max_mr_size=advertised, mr_nbytes_max=hidden, mr_errno=number))

    made = register(host.domains, space[0], 7 * GIB // 2, ALL, threads=threads)

    device = made.devices[0]
    assert sum(sizes(made)) == 7 * GIB // 2
    assert (max(sizes(made)), device.limit_nbytes, device.limit_origin) == (expected, expected, "refused")
    assert device.tried[0] == (min(advertised, 7 * GIB // 2), number)
    tries = host.library.calls["ibv_reg_mr"]
    again = register(host.domains, space[0] + 4 * GIB, 7 * GIB // 2, ALL)
    assert host.library.calls["ibv_reg_mr"] == tries + len(again.devices[0].chunks), "it tried in vain what it knew"
    assert again.devices[0].tried == ()
    made.close()
    again.close()
    host.close()


def test_limit_that_was_learnt_is_the_domains_own(space: tuple[int, int]) -> None:
    host = Host(connectx(mr_nbytes_max=GIB), connectx("mlx5_1"))

    with register(host.domains, space[0], 2 * GIB, ALL) as made:
        assert [device.limit_origin for device in made.devices] == ["refused", "device"]
        assert [len(device.chunks) for device in made.devices] == [2, 1]
    host.close()


def test_smaller_setting_does_not_forget_what_was_learnt(space: tuple[int, int]) -> None:
    host = Host(connectx(mr_nbytes_max=GIB, refused_access=int(Access.RELAXED_ORDERING)))
    relaxed = access_for(Rights.ALL, relaxed_ordering=True)

    for chunk_nbytes_max, access in ((None, ALL), (512 * MIB, relaxed)):
        register(host.domains, space[0], 2 * GIB, access, chunk_nbytes_max=chunk_nbytes_max).close()
    tries = host.library.calls["ibv_reg_mr"]

    with register(host.domains, space[0], 2 * GIB, relaxed) as made:
        assert sizes(made) == [GIB, GIB]
        assert host.library.calls["ibv_reg_mr"] == tries + 2
    host.close()


def test_refusal_down_to_64_mib_tells_all_that_was_tried(space: tuple[int, int]) -> None:
    """B75, B83"""
    host = Host(connectx(mr_nbytes_max=32 * MIB))

    with capture_logs() as logs, pytest.raises(RegistrationError) as caught:
        register(host.domains, space[0], GIB, ALL)

    error: Any = caught.value
    assert [nbytes for nbytes, _ in error.tried] == [GIB, 512 * MIB, 256 * MIB, 128 * MIB, 64 * MIB]
    assert (error.errno, error.device, error.verb) == (errno.EINVAL, "mlx5_0", "ibv_reg_mr")
    assert (error.address, error.nbytes, error.chunk_index, error.nbytes_done) == (space[0], CHUNK_NBYTES_MIN, 0, 0)
    assert (error.region_address, error.region_nbytes, error.option) == (space[0], GIB, "rdma_chunk_nbytes_max")
    for text in ("67108864 bytes (EINVAL)", "1073741824", "any length", "chunk_nbytes_max"):
        assert text in str(error)
    assert {entry["event"] for entry in logs} == {"registration.limit_lowered"}
    assert host.live() == 0
    host.close()


def test_chunk_under_way_when_the_limit_is_lowered_may_be_taken_after_all(space: tuple[int, int]) -> None:
    host = Host(connectx(max_mr_size=GIB))
    host.library.fail("ibv_reg_mr", errno.EIO)
    calls, is_lowered = itertools.count(1), threading.Event()

    def hold_back_the_second() -> None:
        number = next(calls)
        if number == 2:
            assert is_lowered.wait(10)
        elif number == 3:
            is_lowered.set()

    host.library.before["ibv_reg_mr"] = hold_back_the_second

    with register(host.domains, space[0], 2 * GIB, ALL, threads=2) as made:
        assert sum(sizes(made)) == 2 * GIB
        assert max(sizes(made)) == made.devices[0].limit_nbytes == GIB
        assert made.devices[0].tried == ((GIB, errno.EIO),)
    host.close()


# All or nothing.


def test_sum_beyond_the_device_rolls_back_and_leaves_the_first_region() -> None:
    """B77"""
    host = Host(connectx(registered_nbytes_max=96 * MIB))
    block = mmap.mmap(-1, 97 * MIB)
    address = np.frombuffer(block, np.uint8).__array_interface__["data"][0]
    first = register(host.domains, address, 64 * MIB, ALL)

    with pytest.raises(RegistrationError) as caught:
        register(host.domains, address + 64 * MIB, 33 * MIB, ALL, chunk_nbytes_max=8 * MIB, threads=1)

    error: Any = caught.value
    assert (error.errno, error.chunk_index, error.chunk_count) == (errno.EIO, 4, 5)
    assert (error.nbytes, error.nbytes_done) == (MIB, 32 * MIB)
    assert "sum" in str(error)
    assert host.live() == 1
    assert not first.is_closed
    first.close()
    host.close()


def test_second_device_refuses_and_the_first_is_undone() -> None:
    """B82"""
    host = Host(connectx(), connectx("mlx5_1"))
    host.library.fail("ibv_reg_mr", errno.EPERM, device="mlx5_1")
    memory = np.zeros(MIB, np.uint8)

    with pytest.raises(RegistrationError) as caught:
        register(host.domains, memory.ctypes.data, memory.nbytes, ALL)

    assert (caught.value.device, caught.value.errno) == ("mlx5_1", errno.EPERM)
    assert host.library.live["mr"] == 0
    with register(host.domains, memory.ctypes.data, memory.nbytes, ALL) as made:
        assert [device.device for device in made.devices] == ["mlx5_0", "mlx5_1"]
        assert host.library.live["mr"] == 2
    host.close()


def test_what_is_under_way_when_another_fails_is_undone_too(space: tuple[int, int]) -> None:
    """B82, B92"""
    host = Host(connectx(), connectx("mlx5_1"))
    host.library.fail("ibv_reg_mr", errno.EFAULT, device="mlx5_1")
    calls, has_failed = itertools.count(), threading.Event()

    def hold_back_the_first() -> None:
        if next(calls) == 0:
            assert has_failed.wait(10)
        else:
            has_failed.set()

    host.library.before["ibv_reg_mr"] = hold_back_the_first

    with pytest.raises(RegistrationError):
        register(host.domains, space[0], GIB, ALL)

    assert host.library.calls["ibv_reg_mr"] == 2
    assert host.library.live["mr"] == 0
    host.close()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_interrupt_undoes_what_was_done(space: tuple[int, int], threads: int, kind: type[BaseException]) -> None:
    host = Host(connectx())
    calls = itertools.count()

    def interrupt() -> None:
        if next(calls) == 5:
            raise kind("in the sixth call")

    host.library.before["ibv_reg_mr"] = interrupt

    with pytest.raises(kind):
        register(host.domains, space[0], GIB, ALL, chunk_nbytes_max=GIB // 16, threads=threads)

    assert host.live() == 0
    host.close()


def test_several_calls_that_raise_at_once_lose_nothing_of_the_others(space: tuple[int, int]) -> None:
    host = Host(connectx())
    barrier, calls = threading.Barrier(4), itertools.count()

    def raise_in_half() -> None:
        number = next(calls)
        if number < 4:
            barrier.wait(10)
            if number % 2:
                raise RuntimeError(f"call {number}")

    host.library.before["ibv_reg_mr"] = raise_in_half

    with pytest.raises(RuntimeError):
        register(host.domains, space[0], GIB, ALL, chunk_nbytes_max=GIB // 4, threads=4)

    assert host.library.calls["ibv_reg_mr"] >= 2
    assert host.live() == 0
    host.close()


def test_failed_undoing_is_told_with_the_error() -> None:
    host = Host(connectx())
    host.library.fail("ibv_reg_mr", errno.EFAULT, nth=3)
    host.library.fail("ibv_dereg_mr", errno.EIO)
    memory = np.zeros(16 * PAGE, np.uint8)

    with pytest.raises(RegistrationError) as caught:
        register(host.domains, memory.ctypes.data, memory.nbytes, ALL, chunk_nbytes_max=PAGE, threads=1)

    error: Any = caught.value
    assert error.errno == errno.EFAULT
    assert [left.errno for left in error.left_behind] == [errno.EIO]
    host.close()


def test_close_forgets_none_and_can_be_repeated() -> None:
    host = Host(connectx(), connectx("mlx5_1"))
    memory = np.zeros(16 * PAGE, np.uint8)
    made = register(host.domains, memory.ctypes.data, memory.nbytes, ALL, chunk_nbytes_max=4 * PAGE)
    assert host.library.live["mr"] >= 8
    host.library.fail("ibv_dereg_mr", errno.EBUSY, nth=2, times=2)

    with pytest.raises(VerbsError, match="2 of") as caught:
        made.close()

    assert len(caught.value.values["errors"]) == 2
    assert host.library.live["mr"] == 2
    assert not made.is_closed
    made.close()
    made.close()
    assert made.is_closed
    host.close()


def test_domain_may_be_closed_first() -> None:
    host = Host(connectx())
    memory = np.zeros(PAGE, np.uint8)
    made = register(host.domains, memory.ctypes.data, memory.nbytes, ALL)

    host.close()
    made.close()

    assert made.is_closed


def test_memory_freed_under_a_registration_can_still_be_deregistered() -> None:
    host = Host(connectx())
    block = mmap.mmap(-1, MIB)
    made = register(host.domains, np.frombuffer(block, np.uint8).ctypes.data, MIB, ALL)
    block.close()

    made.close()

    host.close()


# Rights.


def test_rights_are_translated() -> None:
    """B90"""
    local, write, read = Access.LOCAL_WRITE, Access.REMOTE_WRITE, Access.REMOTE_READ

    assert access_for(Rights.ALL) == local | write | read
    assert access_for(Rights.REMOTE_WRITE) == local | write
    assert access_for(Rights.REMOTE_READ) == local | read
    assert access_for(Rights.NONE) == local
    assert access_for(Rights.REMOTE_READ, is_read_only=True) == read
    assert access_for(Rights.NONE, is_read_only=True) == Access.NONE
    assert access_for(Rights.REMOTE_READ, relaxed_ordering=True) == local | read | Access.RELAXED_ORDERING
    with pytest.raises(MemoryArgumentError, match="read-only"):
        access_for(Rights.ALL, is_read_only=True)


def test_read_only_memory_can_be_read_by_peers_and_not_written(tmp_path: Path) -> None:
    """B90"""
    file = tmp_path / "file"
    file.write_bytes(b"x" * PAGE)
    with file.open("rb") as opened:
        block = mmap.mmap(opened.fileno(), PAGE, prot=mmap.PROT_READ)
    address = np.frombuffer(block, np.uint8).__array_interface__["data"][0]
    host = Host(connectx(address="10.0.0.2"))
    host.library.read_only.append((address, PAGE))

    with pytest.raises(RegistrationError, match="is read-only") as caught:
        register(host.domains, address, PAGE, ALL)
    assert "to be read only" in caught.value.remedy
    access = access_for(Rights.REMOTE_READ, is_read_only=True)
    with register(host.domains, address, PAGE, access) as made:
        key = int(made.devices[0].chunks["rkey"][0])
        for opcode, expected in ((WorkOpcode.RDMA_READ, None), (WorkOpcode.RDMA_WRITE, "REM_ACCESS_ERR")):
            peer = Endpoint(FakeLibrary(host.library.fabric, connectx(), name=f"peer {opcode}"))
            end = Endpoint(host.library, pd=host.domains[0].pointer)
            peer.connect(end)
            target = np.zeros(PAGE, np.uint8)
            mine = peer.register(target)
            piece = (target.ctypes.data, PAGE, mine.lkey)
            peer.post({"opcode": opcode, "remote": address, "rkey": key, "pieces": [piece]})
            status = peer.poll()[0].status
            assert status is (CompletionStatus.SUCCESS if expected is None else CompletionStatus[expected])
            if expected is None:
                assert target.tobytes() == b"x" * PAGE
            end.close()
    assert block[:] == b"x" * PAGE
    host.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("threads", [1, 4])
def test_refused_relaxed_ordering_is_left_out_and_told(space: tuple[int, int], number: int, threads: int) -> None:
    host = Host(connectx(refused_access=int(Access.RELAXED_ORDERING), refused_access_errno=number))
    access = access_for(Rights.ALL, relaxed_ordering=True)

    with capture_logs() as logs:
        made = register(host.domains, space[0], GIB, access, chunk_nbytes_max=64 * MIB, threads=threads)

    assert made.devices[0].access == ALL
    assert made.devices[0].refused_access == Access.RELAXED_ORDERING
    assert made.devices[0].limit_nbytes == 64 * MIB
    assert [entry["event"] for entry in logs].count("registration.access_refused") == 1
    tries = host.library.calls["ibv_reg_mr"]
    with register(host.domains, space[0] + GIB, PAGE, access) as again:
        assert again.devices[0].refused_access == Access.RELAXED_ORDERING
    assert host.library.calls["ibv_reg_mr"] == tries + 1
    made.close()
    host.close()


def test_granted_relaxed_ordering_is_kept() -> None:
    host = Host(connectx())
    memory = np.zeros(PAGE, np.uint8)
    access = access_for(Rights.ALL, relaxed_ordering=True)

    with register(host.domains, memory.ctypes.data, PAGE, access) as made:
        assert made.devices[0].access == access
        assert made.devices[0].refused_access == Access.NONE
    host.close()


# Reasons.


def test_memlock_limit_is_compared_with_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """B53"""
    host = Host(connectx(), connectx("mlx5_1"), memlock_nbytes=MIB)
    monkeypatch.setattr(registration_error, "memlock_nbytes", lambda: MIB)
    memory = np.zeros(MIB + PAGE, np.uint8)
    address = -(-memory.ctypes.data // PAGE) * PAGE

    with pytest.raises(RegistrationError, match="locked-memory limit of this process is 1048576 bytes") as caught:
        register(host.domains, address, MIB, ALL)

    assert "takes 2097152" in str(caught.value)
    assert "ulimit -l unlimited" in caught.value.remedy
    assert host.library.live["mr"] == 0
    with register(host.domains[:1], address, MIB, ALL):
        pass
    host.close()


def test_driver_that_does_not_register_such_memory_can_be_left_out() -> None:
    host = Host(connectx(mr_nbytes_max=0, mr_errno=errno.EOPNOTSUPP))
    memory = np.zeros(PAGE, np.uint8)

    with pytest.raises(RegistrationError, match="EOPNOTSUPP") as caught:
        register(host.domains, memory.ctypes.data, PAGE, ALL)

    assert "leave mlx5_0 out (rdma_devices" in caught.value.remedy
    host.close()


def test_a_sum_that_a_device_has_no_room_for_is_told_in_pages() -> None:
    """B78: a device has room for so many pages, whatever their size."""
    host = Host(connectx(registered_nbytes_max=3 * MIB))
    memory = np.zeros(5 * MIB + PAGE, np.uint8)
    address = -(-memory.ctypes.data // PAGE) * PAGE

    with pytest.raises(RegistrationError) as caught:
        register(host.domains, address, 5 * MIB, ALL, chunk_nbytes_max=MIB)

    assert f"this region is 1280 pages of {PAGE} bytes" in caught.value.message
    assert "huge pages" in caught.value.remedy
    host.close()


def test_unmapped_memory_is_named_and_a_gpu_is_thought_of() -> None:
    """B91"""
    host = Host(connectx())
    block = mmap.mmap(-1, 4 * PAGE)
    address = np.frombuffer(block, np.uint8).__array_interface__["data"][0]
    block.close()

    with pytest.raises(RegistrationError) as caught:
        register(host.domains, address, 4 * PAGE, ALL)

    assert caught.value.errno == errno.EFAULT
    for text in ("nothing is mapped at", "Memory of a GPU is not moved", "copy it to registered host memory"):
        assert text in str(caught.value)
    memory = np.zeros(PAGE, np.uint8)
    with register(host.domains, memory.ctypes.data, PAGE, ALL):
        pass  # host memory still works
    host.close()


MAPS = """\
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
7f0000100000-7f0000200000 ---p 00000000 00:00 0                          /dev/nvidia-uvm
7f0000200000-7f0000300000 r--p 00000000 fe:00 42                         /some file
7f0000400000-7f0040400000 rw-s 00000000 00:0f 43                         /memfd:pool (deleted)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "proc/self"
    folder.mkdir(parents=True)
    (folder / "maps").write_text(MAPS)
    page_sizes = (4, 4, 4, 1048576)
    texts = zip(MAPS.splitlines(), page_sizes, strict=True)
    (folder / "smaps").write_text(
        "".join(f"{line}\nSize:   4 kB\nKernelPageSize:  {size:>8} kB\nVmFlags: rd wr\n" for line, size in texts)
    )
    return tmp_path


@pytest.mark.parametrize(
    ("address", "nbytes", "is_written", "expected"),
    [
        (0x7F0000000000, 0x100000, True, "changed meanwhile"),
        (0x7F0000000000, 0x100001, True, "cannot read: that is how memory of a GPU looks"),
        (0x7F0000200000, 0x1000, True, "is read-only"),
        (0x7F0000200000, 0x1000, False, "changed meanwhile"),
        (0x7F0000200000, 0x100001, False, "nothing is mapped at 0x7f0000300000"),
        (0x1000, 1, False, "nothing is mapped at 0x1000"),
    ],
)
def test_fault_is_explained_by_the_mappings(
    root: Path, address: int, nbytes: int, is_written: bool, expected: str
) -> None:
    """B90, B91"""
    assert expected in explain_fault(address, nbytes, is_written=is_written, root=root).why


def test_page_size_is_that_of_the_mapping(root: Path) -> None:
    assert find_page_nbytes(0x7F0000400000, 1, root) == GIB
    assert find_page_nbytes(0x7F0000200000, 1, root) == PAGE
    assert find_page_nbytes(0x7F0000000000, 1, root) == PAGE
    assert find_page_nbytes(0x7F0000400000, 1, root / "nowhere") == PAGE
    (root / "proc/self/smaps").unlink()
    assert find_page_nbytes(0x7F0000000000, 1, root) == PAGE  # anonymous memory does not need it


def test_own_memory_is_found_in_proc() -> None:
    memory = np.zeros(PAGE, np.uint8)

    found = find_mappings(memory.ctypes.data, PAGE)

    assert found[0].start <= memory.ctypes.data < found[0].end
    assert found[0].rights == "rw-p"
    assert find_page_nbytes(memory.ctypes.data) == PAGE


def test_borders_follow_huge_pages(root: Path, space: tuple[int, int]) -> None:
    host = Host(connectx(max_mr_size=3 * GIB))
    address = space[0] + 5 * PAGE
    (root / "proc/self/maps").write_text(f"{address:x}-{address + 8 * GIB:x} rw-s 0 00:0f 43 /memfd:p\n")
    (root / "proc/self/smaps").write_text(
        f"{address:x}-{address + 8 * GIB:x} rw-s 0 00:0f 43 /memfd:p\nKernelPageSize:  1048576 kB\n"
    )

    with register(host.domains, address, 8 * GIB, ALL, root=root) as made:
        assert all((address + start) % GIB == 0 for start in starts(made)[1:])
    with register(host.domains, address, 8 * GIB, ALL, alignment=MIB) as made:
        assert all((address + start) % MIB == 0 for start in starts(made)[1:])
    host.close()


# Many, and large.


def test_chunks_and_devices_are_registered_at_the_same_time(space: tuple[int, int]) -> None:
    """B92: 4 devices of 8 chunks; overlap is counted, time is not"""
    nics = [connectx(f"mlx5_{number}", max_mr_size=GIB) for number in range(4)]
    host = Host(*nics)
    barrier = threading.Barrier(4)
    calls = itertools.count()

    def meet() -> None:
        if next(calls) < 4:
            barrier.wait(10)  # the first of each device are under way together, or never

    host.library.before["ibv_reg_mr"] = meet
    with capture_logs() as logs:
        made = register(host.domains, space[0], 8 * GIB, ALL, threads=16)

    assert [len(device.chunks) for device in made.devices] == [8] * 4
    assert 4 <= host.library.running_max["ibv_reg_mr"] <= 16
    progress = [entry["done_count"] for entry in logs if entry["event"] == "registration.progressed"]
    assert progress == [8, 16, 24, 32]
    made.close()
    host.close()


def test_other_threads_run_while_the_kernel_pins(space: tuple[int, int]) -> None:
    """B92"""
    host = Host(connectx(reg_mr_s=0.02))
    is_over = threading.Event()
    ticks: list[int] = []

    def tick() -> None:
        while not is_over.wait(0.001):
            ticks.append(len(ticks))

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    made = register(host.domains, space[0], 4 * GIB, ALL, chunk_nbytes_max=GIB, threads=2)
    is_over.set()
    ticker.join()

    assert len(ticks) >= 5
    made.close()
    host.close()


def test_as_many_threads_as_asked_and_no_more(space: tuple[int, int]) -> None:
    host = Host(connectx(max_mr_size=GIB, reg_mr_s=0.001))
    before = threading.active_count()

    with register(host.domains, space[0], 12 * GIB, ALL, threads=3):
        assert 1 <= host.library.running_max["ibv_reg_mr"] <= 3
    with register(host.domains, space[0], 12 * GIB, ALL, threads=1):
        pass

    assert threading.active_count() == before
    host.close()


@pytest.mark.slow
def test_ten_thousand_small_regions() -> None:
    host = Host(connectx(), connectx("mlx5_1"))
    memory = np.zeros(10_000 * 64, np.uint8)
    address = memory.ctypes.data

    made = [register(host.domains, address + 64 * row, 64, ALL) for row in range(10_000)]

    assert host.library.live["mr"] == 20_000
    keys = {int(device.chunks["rkey"][0]) for each in made for device in each.devices}
    assert len(keys) == 20_000
    for each in made:
        each.close()
    host.close()


# Wrong calls.


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"domains": []}, UsageError),
        ({"threads": 0}, UsageError),
        ({"nbytes": 0}, UsageError),
        ({"address": 0}, UsageError),
        ({"address": 2**63 - 10, "nbytes": 100}, UsageError),
        ({"access": Access.REMOTE_WRITE}, UsageError),
        ({"chunk_nbytes_max": 0}, ConfigError),
        ({"chunk_nbytes_max": PAGE - 1}, ConfigError),
    ],
)
def test_wrong_arguments_call_nothing(changes: dict[str, Any], expected: type[Exception]) -> None:
    host = Host(connectx())
    memory = np.zeros(PAGE, np.uint8)
    given = {"domains": host.domains, "address": memory.ctypes.data, "nbytes": PAGE, "access": ALL, **changes}

    with pytest.raises(expected):
        register(**given)

    assert host.library.calls["ibv_reg_mr"] == 0
    host.close()


def test_repr_says_where_it_is() -> None:
    host = Host(connectx())
    memory = np.zeros(PAGE, np.uint8)

    with register(host.domains, memory.ctypes.data, PAGE, ALL) as made:
        assert f"{PAGE} bytes at {memory.ctypes.data:#x} on mlx5_0: 1 chunks" in repr(made)
    assert repr(made).endswith("closed>")
    host.close()
