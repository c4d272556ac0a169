"""RegionTable: one owner per range, counted references, counted uses, and no way to lose memory that is in use."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import (
    ClosedError,
    LocalProtocolError,
    MemoryArgumentError,
    NotRegisteredError,
    RegionBusyError,
    RegionOverlapError,
    UsageError,
)
from kvxfer.memory import BufferView, Region, RegionTable, Reservation, buffer_view
from kvxfer.types import RegionDescriptor, Rights

BASE = 0x7F00_0000_0000
MIB = 1 << 20
WAIT_S = 10.0  # only ever reached by a broken build


def memory_at(offset: int, nbytes: int = MIB) -> BufferView:
    return buffer_view((BASE + offset, nbytes))


def register(table: RegionTable, view: BufferView, name: str = "", rights: Rights = Rights.ALL, **keys: Any) -> Region:
    taken = table.reserve(view, name, rights)
    return taken.commit(keys) if isinstance(taken, Reservation) else taken


@pytest.fixture
def table() -> RegionTable:
    return RegionTable()


@contextlib.contextmanager
def running(work: Callable[[], None]) -> Iterator[None]:
    """Run `work` in a thread of its own; its exception is raised here at the end."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as exc:
            failures.append(exc)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield
    finally:
        thread.join(WAIT_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


# Registering


def test_committed_region_is_found_with_its_keys(table: RegionTable) -> None:
    region = register(table, memory_at(0), "kv", Rights.REMOTE_READ, tcp={"port": 1})

    snapshot = table.snapshot()
    assert snapshot.find(BASE + 5, 100) is snapshot.find_id(region.region_id) is snapshot.find_name("kv") is region
    assert region.descriptor() == RegionDescriptor(
        region.region_id, "kv", BASE, MIB, Rights.REMOTE_READ, {"tcp": {"port": 1}}
    )


def test_snapshot_is_sorted_and_cannot_be_written(table: RegionTable) -> None:
    for offset in (4 * MIB, 0, 2 * MIB):
        register(table, memory_at(offset))

    snapshot = table.snapshot()

    assert snapshot.starts.tolist() == [BASE, BASE + 2 * MIB, BASE + 4 * MIB]
    assert (snapshot.ends - snapshot.starts).tolist() == [MIB] * 3
    assert [region.address for region in snapshot.regions] == snapshot.starts.tolist()
    assert len(snapshot) == 3
    with pytest.raises(ValueError, match="read-only"):
        snapshot.starts[0] = 0


def test_snapshot_does_not_change_and_its_version_grows(table: RegionTable) -> None:
    before = table.snapshot()

    register(table, memory_at(0))

    after = table.snapshot()
    assert len(before) == 0
    assert len(after) == 1
    assert after.version > before.version
    assert table.snapshot() is after


@pytest.mark.parametrize(
    ("address", "nbytes"),
    [
        (BASE + MIB, 1),
        (BASE + MIB - 1, 2),
        (2**64 - 16, 32),
        (BASE - 1, 1),
        (BASE - 1, 2),
        (BASE + 3 * MIB, 1),
        (BASE + 4 * MIB, 2 * MIB),
        (BASE, 0),
        (BASE, -1),
    ],
    ids=["end", "end-1", "wrap", "below", "into first", "between", "two adjacent", "no bytes", "negative"],
)
def test_range_outside_one_region_is_not_found(table: RegionTable, address: int, nbytes: int) -> None:  # B120
    for offset in (0, 4 * MIB, 5 * MIB):
        register(table, memory_at(offset))

    assert table.snapshot().find(address, nbytes) is None


@pytest.mark.parametrize("nbytes", [1, 65535, 65536, 65537, 131073])
def test_any_length_up_to_the_region_end_is_found(table: RegionTable, nbytes: int) -> None:  # B119
    region = register(table, memory_at(0, 131073))

    assert table.snapshot().find(BASE + 131073 - nbytes, nbytes) is region
    assert table.snapshot().find(BASE + 131074 - nbytes, nbytes) is None


def test_region_ids_are_never_used_again(table: RegionTable) -> None:
    first = register(table, memory_at(0))
    table.retire(first.region_id)
    table.forget(first)
    with table.reserve(memory_at(0)) as abandoned:  # type: ignore[union-attr]
        pass

    second = register(table, memory_at(0))

    assert len({first.region_id, abandoned.region.region_id, second.region_id}) == 3


def test_equal_range_registered_twice_is_unregistered_twice(table: RegionTable) -> None:  # B80
    first = register(table, memory_at(0))
    second = register(table, memory_at(0))

    assert first is second
    assert not table.retire(first.region_id)
    assert table.snapshot().find(BASE, MIB) is first
    assert table.retire(first.region_id)
    assert table.snapshot().find(BASE, MIB) is None
    with pytest.raises(ClosedError, match=f"region {first.region_id} is unregistered already"):
        table.retire(first.region_id)
    table.forget(first)
    with pytest.raises(ClosedError, match="no more"):
        table.retire(first.region_id)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(4096, MIB), (-4096, MIB), (0, MIB - 1), (0, MIB + 1), (1, 1), (-1, MIB + 2), (MIB - 1, 1)],
    ids=["later", "earlier", "shorter", "longer", "inside", "around", "last byte"],
)
def test_overlap_names_the_existing_region(table: RegionTable, offset: int, nbytes: int) -> None:  # B80
    existing = register(table, memory_at(0), "kv")

    with pytest.raises(RegionOverlapError, match=r"overlaps region 'kv' \[0x7f0000000000, 0x7f0000100000\)") as caught:
        table.reserve(memory_at(offset, nbytes))

    assert caught.value.values["region_id"] == existing.region_id
    assert existing.reference_count == 1
    assert len(table.snapshot()) == 1


def test_overlap_with_a_region_on_either_side_is_seen(table: RegionTable) -> None:
    register(table, memory_at(0), "low")
    register(table, memory_at(2 * MIB), "high")

    with pytest.raises(RegionOverlapError, match="'low'"):
        table.reserve(memory_at(MIB - 1, 2))
    with pytest.raises(RegionOverlapError, match="'high'"):
        table.reserve(memory_at(2 * MIB - 1, 2))
    register(table, memory_at(MIB), "between")


def test_unknown_id_cannot_be_unregistered(table: RegionTable) -> None:
    with pytest.raises(UsageError, match="never was a region 7"):
        table.retire(7)


def test_two_threads_cannot_register_overlapping_memory(table: RegionTable) -> None:  # B81
    reserved, may_fail = threading.Event(), threading.Event()

    def first_registration() -> None:
        with table.reserve(memory_at(0)):  # type: ignore[union-attr]
            reserved.set()
            assert may_fail.wait(WAIT_S)  # and leaves without a commit, as a registration that failed does

    with running(first_registration):
        assert reserved.wait(WAIT_S)
        with pytest.raises(RegionOverlapError, match="being registered"):
            table.reserve(memory_at(4096))
        may_fail.set()

    assert register(table, memory_at(4096)).is_live


def test_only_one_of_many_threads_gets_the_range(table: RegionTable) -> None:  # B81
    barrier = threading.Barrier(4)
    outcomes: list[str] = []

    def work(offset: int) -> None:
        barrier.wait(WAIT_S)
        try:
            register(table, memory_at(offset))
            outcomes.append("ok")
        except RegionOverlapError:
            outcomes.append("overlap")

    with contextlib.ExitStack() as stack:
        for offset in (0, 1, 2, 3):
            stack.enter_context(running(lambda offset=offset: work(offset)))  # type: ignore[misc]

    assert sorted(outcomes) == ["ok", "overlap", "overlap", "overlap"]


def test_equal_range_being_registered_may_be_tried_again(table: RegionTable) -> None:  # B81
    reservation = table.reserve(memory_at(0))
    assert isinstance(reservation, Reservation)

    with pytest.raises(RegionBusyError, match="being registered by another call") as caught:
        table.reserve(memory_at(0))

    assert caught.value.retryable
    region = reservation.commit({})
    assert table.reserve(memory_at(0)) is region


def test_failed_registration_leaves_nothing_behind(table: RegionTable) -> None:  # B82
    buffer = bytearray(4096)
    before = table.snapshot()

    with pytest.raises(OSError, match="dev1"), table.reserve(buffer_view(buffer), "kv"):  # type: ignore[union-attr]
        raise OSError("dev1")

    assert table.snapshot() is before
    buffer.extend(b"x")
    register(table, memory_at(0), "kv")


def test_failed_item_of_a_batch_publishes_none_of_it(table: RegionTable) -> None:  # B83
    existing = register(table, memory_at(10 * MIB))

    def register_batch() -> None:
        with contextlib.ExitStack() as stack:
            reservations = []
            for index in range(5):
                if index == 3:
                    raise UsageError("item 3", index=index)
                reservations.append(stack.enter_context(table.reserve(memory_at(index * MIB))))  # type: ignore[arg-type]
            for reservation in reservations:
                reservation.commit({})

    with pytest.raises(UsageError, match="item 3"):
        register_batch()
    assert table.snapshot().regions == (existing,)
    register(table, memory_at(0, 5 * MIB))


def test_reservation_is_not_found_before_its_commit(table: RegionTable) -> None:  # B83
    reservation = table.reserve(memory_at(0), "kv")
    assert isinstance(reservation, Reservation)

    snapshot = table.snapshot()
    assert snapshot.find(BASE, 1) is snapshot.find_name("kv") is snapshot.find_id(reservation.region.region_id) is None
    with pytest.raises(NotRegisteredError, match="being registered"):
        table.acquire((reservation.region,), "local")
    with pytest.raises(RegionBusyError, match="being registered"):
        table.retire(reservation.region.region_id)


def test_release_after_commit_keeps_the_region(table: RegionTable) -> None:
    with table.reserve(memory_at(0)) as reservation:  # type: ignore[union-attr]
        region = reservation.commit({})

    reservation.release()

    assert table.snapshot().regions == (region,)
    with pytest.raises(LocalProtocolError, match="out of turn"):
        reservation.commit({})


def test_commit_after_release_is_a_bug_of_ours(table: RegionTable) -> None:
    reservation = table.reserve(memory_at(0))
    assert isinstance(reservation, Reservation)
    reservation.release()
    reservation.release()

    with pytest.raises(LocalProtocolError, match="out of turn"):
        reservation.commit({})


# Names, rights, ownership


def test_name_belongs_to_one_range(table: RegionTable) -> None:
    register(table, memory_at(0), "kv")

    with pytest.raises(UsageError, match="the name 'kv' is taken by region 'kv'"):
        table.reserve(memory_at(2 * MIB), "kv")
    assert len(table.snapshot()) == 1


def test_second_registration_may_give_the_name(table: RegionTable) -> None:
    region = register(table, memory_at(0))
    before = table.snapshot()

    register(table, memory_at(0), "kv")
    register(table, memory_at(0))

    assert region.name == "kv"
    assert table.snapshot().find_name("kv") is region
    assert table.snapshot().version > before.version


def test_second_registration_cannot_change_the_name(table: RegionTable) -> None:
    region = register(table, memory_at(0), "kv")

    with pytest.raises(UsageError, match=r"'kv'.*calls it 'other'"):
        register(table, memory_at(0), "other")
    assert (region.name, region.reference_count) == ("kv", 1)


def test_second_registration_cannot_take_a_name_of_another_region(table: RegionTable) -> None:
    register(table, memory_at(0), "kv")
    unnamed = register(table, memory_at(2 * MIB))

    with pytest.raises(UsageError, match="'kv' is taken"):
        register(table, memory_at(2 * MIB), "kv")
    assert (unnamed.name, unnamed.reference_count) == ("", 1)


def test_name_is_free_after_forget(table: RegionTable) -> None:
    region = register(table, memory_at(0), "kv")
    table.retire(region.region_id)
    with pytest.raises(UsageError, match=r"taken by .* \(being unregistered\)"):
        register(table, memory_at(2 * MIB), "kv")

    table.forget(region)

    register(table, memory_at(2 * MIB), "kv")


def test_second_registration_cannot_change_the_rights(table: RegionTable) -> None:
    region = register(table, memory_at(0), rights=Rights.REMOTE_READ)

    with pytest.raises(UsageError, match=r"rights read; a second registration asks for read\+write"):
        register(table, memory_at(0), rights=Rights.ALL)
    assert region.reference_count == 1


def test_read_only_memory_takes_reading_peers_only(table: RegionTable) -> None:  # B90
    view = buffer_view(bytes(4096))

    for rights in (Rights.ALL, Rights.REMOTE_WRITE):
        with pytest.raises(MemoryArgumentError, match=r"read-only.*only \(rights=kvxfer\.Rights\.REMOTE_READ\)"):
            table.reserve(view, rights=rights)
    assert register(table, view, rights=Rights.REMOTE_READ).is_live


def test_registered_bytearray_is_fixed_until_it_is_forgotten(table: RegionTable) -> None:  # B88
    buffer = bytearray(4096)
    region = register(table, buffer_view(buffer))
    with pytest.raises(BufferError):
        buffer.extend(b"x")
    table.retire(region.region_id)
    with pytest.raises(BufferError):
        buffer.extend(b"x")

    table.forget(region)

    buffer.extend(b"x")
    assert region.view.owner is None


def test_registered_temporary_lives_until_it_is_forgotten(table: RegionTable) -> None:  # B88
    region = register(table, buffer_view(np.arange(1024)[::2].copy()))
    alive = weakref.ref(region.view.owner)

    assert alive() is not None
    table.retire(region.region_id)
    table.forget(region)
    assert alive() is None


def test_owner_of_a_second_registration_is_kept_too(table: RegionTable) -> None:  # B88
    arr = np.zeros(512)
    alive = weakref.ref(arr)
    region = register(table, buffer_view((arr.ctypes.data, arr.nbytes)))
    register(table, buffer_view(arr))
    del arr

    table.retire(region.region_id)
    assert alive() is not None
    table.retire(region.region_id)
    table.forget(region)
    assert alive() is None


@pytest.mark.parametrize("make", [lambda: bytearray(64), lambda: np.zeros(8)], ids=["bytearray", "numpy"])
def test_registering_the_same_object_often_keeps_it_once(table: RegionTable, make: Any) -> None:
    obj = make()
    region = register(table, buffer_view(obj))

    for _ in range(10):
        register(table, buffer_view(obj[:] if isinstance(obj, np.ndarray) else obj))

    assert region.reference_count == 11
    assert region._also_kept == []


def test_owner_that_calls_the_table_when_it_goes_does_not_deadlock(table: RegionTable) -> None:
    arr = np.zeros(8)
    region = register(table, buffer_view(arr))
    calls: list[int] = []
    weakref.finalize(arr, lambda: calls.append(len(register(table, memory_at(0)).name)))
    del arr
    table.retire(region.region_id)

    with running(lambda: table.forget(region)):
        pass

    assert calls == [0]


@pytest.mark.parametrize("make", [lambda region: region.array, np.asarray], ids=["array", "asarray"])
def test_array_over_a_region_keeps_its_memory_after_the_end_of_the_region(table: RegionTable, make: Any) -> None:  # B88
    original = np.arange(64, dtype=np.uint8)
    alive = weakref.ref(original)
    region = register(table, buffer_view(original))
    del original

    array = make(region)
    table.retire(region.region_id)
    table.forget(region)

    assert alive() is not None
    assert array.tolist() == list(range(64))
    del array
    assert alive() is None


def test_array_over_a_region_is_its_memory(table: RegionTable) -> None:
    buffer = bytearray(16)
    region = register(table, buffer_view(buffer))

    region.array[3] = 7

    assert buffer[3] == 7
    assert buffer_view(region).address == region.address
    assert np.asarray(region).flags.writeable


def test_array_over_a_read_only_region_cannot_be_written(table: RegionTable) -> None:  # B90
    region = register(table, buffer_view(bytes(16)), rights=Rights.REMOTE_READ)

    assert not region.array.flags.writeable
    assert not np.asarray(region).flags.writeable
    assert buffer_view(region).read_only


def test_region_that_is_gone_gives_no_array(table: RegionTable) -> None:
    region = register(table, buffer_view(bytearray(16)))
    table.retire(region.region_id)
    table.forget(region)

    for make in (lambda: region.array, lambda: np.asarray(region), lambda: buffer_view(region)):
        with pytest.raises(ClosedError, match="is unregistered"):
            make()


# Uses


@pytest.mark.parametrize("side", ["local", "remote"])
def test_uses_of_both_sides_are_counted_apart(table: RegionTable, side: Any) -> None:
    region = register(table, memory_at(0))

    table.acquire((region,), side)
    table.acquire((region,), side)
    table.release((region,), side)

    counts = {"local": region.local_use_count, "remote": region.remote_use_count}
    assert counts == {"local": 0, "remote": 0} | {side: 1}


def test_region_of_a_running_transfer_is_busy_and_stays(table: RegionTable) -> None:
    region = register(table, memory_at(0))
    table.acquire((region,), "local")
    before = table.snapshot()

    with pytest.raises(RegionBusyError, match="used by 1 running transfer of this process"):
        table.retire(region.region_id)

    assert table.snapshot() is before
    assert region.reference_count == 1
    table.release((region,), "local")
    assert table.retire(region.region_id)


def test_reference_that_is_not_the_last_may_go_while_transfers_run(table: RegionTable) -> None:
    region = register(table, memory_at(0))
    register(table, memory_at(0))
    table.acquire((region,), "local")

    assert not table.retire(region.region_id)


def test_acquire_is_all_or_nothing(table: RegionTable) -> None:
    first, second = register(table, memory_at(0)), register(table, memory_at(2 * MIB))
    table.retire(second.region_id)

    with pytest.raises(NotRegisteredError, match="being unregistered"):
        table.acquire((first, second), "remote")

    assert first.remote_use_count == 0


@pytest.mark.parametrize("side", ["local", "remote"])
def test_release_without_acquire_is_a_bug_of_ours(table: RegionTable, side: Any) -> None:
    region = register(table, memory_at(0))

    with pytest.raises(LocalProtocolError, match="more often"):
        table.release((region,), side)


def test_regions_of_an_index_column_are_given_once(table: RegionTable) -> None:
    regions = [register(table, memory_at(i * 2 * MIB)) for i in range(4)]
    snapshot = table.snapshot()

    assert snapshot.find_used(np.array([2])) == (regions[2],)
    assert snapshot.find_used(np.array([1, 1, 1])) == (regions[1],)
    assert snapshot.find_used(np.array([3, 0, 3, 1])) == (regions[0], regions[1], regions[3])


# Removal


def test_removed_range_stays_taken_until_it_is_forgotten(table: RegionTable) -> None:
    region = register(table, memory_at(0), "kv")
    table.retire(region.region_id)

    with pytest.raises(RegionOverlapError, match="being unregistered"):
        table.reserve(memory_at(4096))
    with pytest.raises(RegionBusyError, match="being unregistered"):
        table.reserve(memory_at(0))
    table.forget(region)

    assert register(table, memory_at(4096)).is_live


def test_removal_waits_for_the_requests_of_peers(table: RegionTable) -> None:
    region = register(table, memory_at(0))
    table.acquire((region,), "remote")
    table.acquire((region,), "remote")
    assert table.retire(region.region_id)
    assert not table.wait_idle(region, 0.0)
    waited: list[bool] = []

    with running(lambda: waited.append(table.wait_idle(region, WAIT_S))):
        table.release((region,), "remote")
        assert waited == []
        table.release((region,), "remote")

    assert waited == [True]
    table.forget(region)


def test_idle_region_is_not_waited_for(table: RegionTable) -> None:
    region = register(table, memory_at(0))
    table.acquire((region,), "local")

    assert table.wait_idle(region, None)


def test_region_that_peers_still_use_cannot_be_forgotten(table: RegionTable) -> None:
    region = register(table, memory_at(0))
    table.acquire((region,), "remote")
    table.retire(region.region_id)

    with pytest.raises(RegionBusyError, match="used by 1 running requests of peers"):
        table.forget(region)


def test_live_region_cannot_be_forgotten(table: RegionTable) -> None:
    region = register(table, memory_at(0))

    with pytest.raises(LocalProtocolError, match="out of turn"):
        table.forget(region)


def test_region_tells_what_it_is(table: RegionTable) -> None:
    region = register(table, memory_at(0), "kv")

    assert str(region) == "region 'kv' [0x7f0000000000, 0x7f0000100000) 1048576 bytes, read+write"
    assert repr(region) == f"<Region {region.region_id}: {region}, registered, 1 reference>"
    assert region.end == BASE + MIB
