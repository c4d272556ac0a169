"""Every public method with everything that it cannot take: a typed error with a remedy, and nothing is left behind."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import (
    EngineConfig,
    KvxferError,
    NotRegisteredError,
    Opcode,
    Region,
    Rights,
    Segment,
    TransferBatch,
    TransferEngine,
    UsageError,
)

NBYTES = 1 << 16


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(64, np.uint8)
    array.flags.writeable = False
    return array


ANYTHING: list[Any] = [
    None, True, False, 0, 1, -1, 1.0, math.nan, 1j, 2**63, 2**64, -(2**63), 10**400,
    np.True_, np.int8(-1), np.uint64(2**63 + 5), np.float32(1.5), np.array(5), np.array([]), np.array([1.5]),
    np.array([[1, 2]]), np.array([True]), np.array(["a"]), np.array([None]), np.array([2**63], np.uint64),
    np.zeros(3, np.int64), np.zeros((0, 2)), np.zeros(3, [("a", int)]), np.datetime64("2026-01-01"), read_only(),
    "", "x" * 5000, "\0", "127.0.0.1:0", "127.0.0.1:99999", "[::1", "a:b:c", "\ud800:1", "é" * 300 + ":80",
    b"", b"x" * (2 << 20), bytearray(b"x"), memoryview(b""), [], [None], [1, "a"], [[1], [2]], [2**64], [1.5],
    (), (1, -1), (2**64, 1), (1, 2**64), ("a", 1), (16, 10), {}, {1: 2}, set(), range(0), (n for n in "ab"), iter([1]),
    object(), int, print, mmap.mmap(-1, 4096), ..., Rights.ALL, Opcode.READ,
]  # fmt: skip


class Stage:
    """Two engines, a region of each, a segment; `write` and so on with one argument in another's place."""

    def __init__(self) -> None:
        self.engine = TransferEngine(transports=("shm", "tcp"), connect_timeout_s=0.05)
        self.owner = TransferEngine(transports=("shm", "tcp"))
        self.here = self.engine.allocate(NBYTES, name="here")
        self.there = self.owner.allocate(NBYTES, name="there")
        self.segment = self.engine.open_segment(self.owner.address)

    def close(self) -> None:
        self.engine.close()
        self.owner.close()

    def with_argument(self, call: Callable[..., Any], place: int, value: Any, *arguments: Any, **named: Any) -> Any:
        listed = list(arguments)
        listed[place] = value
        return call(*listed, **named)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def calls(stage: Stage) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield each way to pass something to a public method."""
    engine, row = stage.engine, (stage.segment, stage.here.address, stage.there.address, 64)
    ids = (stage.segment, stage.here, [0], "there", [0])
    for name in ("write", "read", "submit_write", "submit_read"):
        call = getattr(engine, name)
        for place in range(4):
            yield f"{name}[{place}]", lambda v, c=call, p=place: stage.with_argument(c, p, v, *row)
        yield f"{name} columns", lambda v, c=call: c(stage.segment, v, v, v)
        yield f"{name} notify", lambda v, c=call: c(*row, notify=v)
    yield "submit_write timeout_s", lambda v: engine.submit_write(*row, timeout_s=v)
    for name in ("write_blocks", "read_blocks"):
        call = getattr(engine, name)
        for place in range(5):
            yield f"{name}[{place}]", lambda v, c=call, p=place: stage.with_argument(c, p, v, *ids, block_nbytes=64)
        yield f"{name} block_nbytes", lambda v, c=call: c(*ids, block_nbytes=v)
    yield "allocate", engine.allocate
    yield "allocate name", lambda v: engine.allocate(4096, name=v)
    yield "allocate rights", lambda v: engine.allocate(4096, rights=v)
    yield "register", engine.register
    yield "register address", lambda v: engine.register((v, 64))
    yield "register nbytes", lambda v: engine.register((stage.here.address, v))
    yield "unregister", engine.unregister
    yield "open_segment", engine.open_segment
    yield "open_segment transports", lambda v: engine.open_segment(stage.owner.address, transports=v)
    yield "notifications", lambda v: engine.notifications(v if not is_time(v) else 0)
    yield "notifications peer", lambda v: engine.notifications(0, peer=v)
    yield "wait_all", engine.wait_all
    yield "wait_all of one", lambda v: engine.wait_all([v])
    yield "wait_all timeout_s", lambda v: engine.wait_all([], v)
    batch = engine.submit_write(*row, timeout_s=60)
    yield "wait", batch.wait
    batch.cancel()
    yield "region", stage.segment.region
    yield "offer_of", stage.segment.offer_of
    for setting in EngineConfig.settings():
        yield setting.name, lambda v, n=setting.name: EngineConfig.resolve(**{n: v})


def is_time(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating))


def test_what_a_method_cannot_take_is_told_with_a_remedy_and_leaves_nothing(stage: Stage) -> None:
    wrong = []
    for name, call in calls(stage):
        for value in ANYTHING:
            try:
                result = call(value)
            except KvxferError as error:
                if not error.remedy or len(str(error)) > 1200:
                    wrong.append(f"{name}({value!r:.60}): {str(error)[:200]}")
            except Exception as error:
                wrong.append(f"{name}({value!r:.60}): {error!r:.100}")
            else:
                tidy(stage, result)

    assert not wrong, "\n".join(wrong)
    assert stage.engine.regions == (stage.here,)
    assert stage.here.local_use_count == stage.there.remote_use_count == 0
    stage.engine.write(stage.segment, stage.here.address, stage.there.address, 64)


def tidy(stage: Stage, result: Any) -> None:
    """Undo what a call did after all."""
    if isinstance(result, TransferBatch):
        result.cancel()
    elif isinstance(result, Region):
        stage.engine.unregister(result)
    elif isinstance(result, Segment) and result is not stage.segment:
        result.close()


@pytest.mark.parametrize("timeout_s", [math.inf, 2**63, 10**400, np.float32(5), np.int64(5)])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_any_number_of_seconds_is_a_time(transport: str, timeout_s: Any) -> None:
    with TransferEngine(transports=(transport,)) as engine, TransferEngine(transports=(transport,)) as owner:
        here, there = engine.allocate(NBYTES), owner.allocate(NBYTES)
        row = engine.open_segment(owner.address), here.address, there.address, NBYTES

        engine.submit_write(*row, notify=b"1", timeout_s=timeout_s).wait(timeout_s)
        engine.wait_all([engine.submit_read(*row, notify=b"2", timeout_s=timeout_s)], timeout_s)

        assert [one.payload for one in owner.notifications(timeout_s)] == [b"1", b"2"]


def test_numbers_of_numpy_are_sizes() -> None:
    with TransferEngine(transports=("shm",)) as engine, TransferEngine(transports=("shm",)) as owner:
        region = engine.allocate(np.int64(4096))
        owner.allocate(4096, name="there")
        segment = engine.open_segment(owner.address)
        engine.write_blocks(segment, region, [0], "there", [1], block_nbytes=np.int32(64))

        assert type(region.nbytes) is int


@pytest.mark.parametrize("call", ["write", "read", "submit_write", "submit_read"])
def test_a_region_in_the_place_of_an_address_is_told_as_such(stage: Stage, call: str) -> None:
    here, there = stage.here, stage.segment.region("there")
    move = getattr(stage.engine, call)

    for local, remote, words in (
        (here, there.address, "local .* it is a Region"),
        (here.array, there.address, "local .* it is an ndarray of dtype uint8, which is data"),
        (here.address, there, "remote .* it is a RegionDescriptor"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            move(stage.segment, local, remote, 64)
        assert "region.address + offsets" in caught.value.remedy


@pytest.mark.parametrize("call", ["write", "read"])
def test_addresses_of_the_wrong_sides_are_told_as_swapped(stage: Stage, call: str) -> None:
    here, there = stage.here.address, stage.there.address

    with pytest.raises(NotRegisteredError, match=r"^row 0: local .* lies in .*'there'.*'here'.* swapped\.") as caught:
        getattr(stage.engine, call)(stage.segment, [there, here], [here, there], 64)

    assert caught.value.rows == (0,)


def test_blocks_are_told_of_by_the_names_of_their_arguments(stage: Stage) -> None:
    engine, segment, here = stage.engine, stage.segment, stage.here

    with pytest.raises(UsageError, match=r"^src_ids has 3 blocks, dst_ids has 2\."):
        engine.write_blocks(segment, here, [0, 1, 2], "there", [0, 1], block_nbytes=64)
    with pytest.raises(UsageError, match=r"^src_ids has 1 block, dst_ids has 2\."):
        engine.read_blocks(segment, here, [0, 1], "there", [0], block_nbytes=64)
    with pytest.raises(UsageError, match=r"^src_ids is a Region, not a column of block numbers"):
        engine.write_blocks(segment, here, here, "there", [0], block_nbytes=64)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Pass the name that the peer gave it, or what segment\.region returned"):
        engine.write_blocks(segment, here, [0], here, [0], block_nbytes=64)  # type: ignore[arg-type]


def test_a_segment_shows_its_address_transport_and_regions(stage: Stage) -> None:
    assert repr(stage.segment) == f"<Segment {stage.segment.address} over shm, 1 region>"


@pytest.mark.parametrize(
    "timeout_s", ["5", -1, -0.001, math.nan, -math.inf, -(10**400), True], ids=lambda v: str(v)[:9]
)
def test_a_time_that_is_none_is_refused_wherever_one_is_taken(stage: Stage, timeout_s: Any) -> None:
    engine, row = stage.engine, (stage.segment, stage.here.address, stage.there.address, 64)
    blocks, columns = (stage.segment, stage.here, [0], "there", [0]), (row[0], [row[1]], [row[2]], 64)
    done = engine.submit_write(*row).wait()
    stage.here.array[:64] = 1
    stage.there.array[:64] = 2

    for call in (
        lambda: engine.write(*row, timeout_s=timeout_s),
        lambda: engine.read(*row, timeout_s=timeout_s),
        lambda: engine.write(*columns, timeout_s=timeout_s),
        lambda: engine.write(*row, notify=b"1", timeout_s=timeout_s),
        lambda: engine.submit_write(*row, timeout_s=timeout_s),
        lambda: engine.submit_read(*row, timeout_s=timeout_s),
        lambda: engine.write_blocks(*blocks, block_nbytes=64, timeout_s=timeout_s),
        lambda: engine.read_blocks(*blocks, block_nbytes=64, timeout_s=timeout_s),
        lambda: done.wait(timeout_s),
        lambda: engine.wait_all([done], timeout_s),
        lambda: engine.notifications(timeout_s),
    ):
        with pytest.raises(UsageError, match=r"^timeout_s is .*at least 0"):
            call()

    assert (stage.here.array[:64] == 1).all()
    assert (stage.there.array[:64] == 2).all()


def test_a_time_that_is_not_a_number_starts_nothing(stage: Stage) -> None:
    with pytest.raises(UsageError, match="timeout_s is 'soon'"):
        stage.engine.submit_write(stage.segment, stage.here.address, stage.there.address, 64, timeout_s="soon")  # type: ignore[arg-type]

    assert stage.here.local_use_count == 0
