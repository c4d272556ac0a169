"""The proof that bytes arrived must fail for every way in which they can fail to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cli.workload import Lane, Plan, Pool, copy_blocks, pool_nbytes_for
from kvxfer.errors import UsageError

SALT = 77


def make_pools(plan: Plan) -> tuple[Pool, Pool]:
    """A pool that sends, filled for this round, and one that receives."""
    sender, receiver = (Pool(np.zeros(plan.pool_nbytes, np.uint8), salt) for salt in (1, 2))
    for pool in (sender, receiver):
        pool.use(plan)
    sender.fill_source(SALT)
    return sender, receiver


def move(sender: Pool, receiver: Pool, rows: range | None = None) -> None:
    plan, nbytes = sender.plan, sender.plan.block_nbytes
    for row in rows or range(plan.count):
        source, destination = plan.source[row] * nbytes, plan.destination[row] * nbytes
        receiver.memory[destination : destination + nbytes] = sender.memory[source : source + nbytes]


@given(
    block=st.sampled_from([8, 24, 4096, 65536]),
    count=st.integers(1, 9),
    extra=st.integers(0, 50_000),
)
def test_right_transfer_verifies_and_every_single_wrong_byte_does_not(block: int, count: int, extra: int) -> None:
    plan = Plan(pool_nbytes_for(block, count) + extra // 8 * 8, block, count)
    sender, receiver = make_pools(plan)
    move(sender, receiver)

    assert receiver.wrong_in_destination(SALT) == receiver.wrong_in_rest() == sender.wrong_in_rest() == 0

    at = int(np.random.default_rng(extra).integers(plan.pool_nbytes))
    receiver.memory[at] ^= 1
    assert receiver.wrong_in_destination(SALT) + receiver.wrong_in_rest() == 1


def test_block_that_never_came_is_found() -> None:
    sender, receiver = make_pools(Plan(1 << 16, 64, 8))

    move(sender, receiver, range(7))

    assert receiver.wrong_in_destination(SALT) == 1


def test_block_of_the_round_before_is_found() -> None:
    sender, receiver = make_pools(Plan(1 << 16, 64, 8))
    move(sender, receiver)

    sender.fill_source(SALT + 1)
    move(sender, receiver, range(1, 8))

    assert receiver.wrong_in_destination(SALT + 1) == 1


def test_swapped_blocks_are_found() -> None:
    sender, receiver = make_pools(Plan(1 << 16, 64, 8))
    move(sender, receiver)
    first, second = (int(receiver.plan.destination[row]) * 64 for row in (0, 1))

    kept = receiver.memory[first : first + 64].copy()
    receiver.memory[first : first + 64] = receiver.memory[second : second + 64]
    receiver.memory[second : second + 64] = kept

    assert receiver.wrong_in_destination(SALT) == 2


def test_cleared_destination_holds_nothing_of_before() -> None:
    sender, receiver = make_pools(Plan(1 << 16, 64, 8))
    move(sender, receiver)

    receiver.clear_destination()

    assert receiver.wrong_in_destination(SALT) == 8


def test_next_plan_begins_with_the_pool_as_it_was_made() -> None:
    sender, receiver = make_pools(Plan(1 << 16, 64, 8))
    before = Pool(np.zeros(1 << 16, np.uint8), 2).memory
    move(sender, receiver)

    receiver.use(Plan(1 << 16, 128, 4))

    assert np.array_equal(receiver.memory, before)


@given(st.sampled_from([8, 512, 4096]), st.integers(1, 200))
def test_blocks_are_distinct_and_never_adjacent(block: int, count: int) -> None:
    plan = Plan(pool_nbytes_for(block, count) * 2, block, count)

    for ids, parity in ((plan.source, 0), (plan.destination, 1)):
        assert len(set(ids.tolist())) == count
        assert (ids % 2 == parity).all()
        assert ids.max() < plan.pool_nbytes // block
    assert plan.source.tolist() == Plan(plan.pool_nbytes, block, count).source.tolist()


def test_block_larger_than_a_piece_is_compared_to_its_end() -> None:
    plan = Plan(4 << 20, 1 << 20, 1)
    sender, receiver = make_pools(plan)
    move(sender, receiver)
    assert receiver.wrong_in_destination(SALT) == 0

    receiver.memory[int(plan.destination[0] + 1) * plan.block_nbytes - 1] ^= 0x80

    assert receiver.wrong_in_destination(SALT) == 1


def test_plain_copy_moves_the_blocks_of_the_plan() -> None:
    plan = Plan(1 << 16, 64, 8)
    pool = Pool(np.zeros(plan.pool_nbytes, np.uint8), 1)
    pool.use(plan)
    pool.fill_source(SALT)

    assert copy_blocks(pool.memory, plan) > 0
    assert pool.wrong_in_destination(SALT) == pool.wrong_in_rest() == 0


class FakeEngine:
    """Keeps the addresses that a lane hands over."""

    def __init__(self) -> None:
        self.given: list[tuple[object, object]] = []

    def write(self, segment: object, local: object, remote: object, nbytes: int) -> None:
        del segment, nbytes
        self.given.append((local, remote))


class FakeRemote:
    how = "nobody"

    def use(self, plan: Plan) -> None: ...

    def prepare_write(self) -> None: ...

    def prepare_read(self, salt: int) -> None: ...

    def wrong_after_write(self, salt: int, *, check_rest: bool) -> int:
        return 0


@pytest.mark.parametrize(("count", "kind"), [(1, int), (2, np.ndarray)])
def test_single_block_is_moved_as_plain_ints_in_the_bench_as_in_the_demo(count: int, kind: type) -> None:
    engine, plan = FakeEngine(), Plan(1 << 16, 4096, count)
    pool = Pool(np.zeros(plan.pool_nbytes, np.uint8), 1)
    lane = Lane("shm", engine, None, local=pool, remote=FakeRemote(), remote_address=1 << 20)  # type: ignore[arg-type]
    lane.use(plan)

    lane.run("write")
    lane.latencies_s("write", 4096, 1)

    assert [tuple(map(type, pair)) for pair in engine.given] == [(kind, kind), (int, int)]


def test_pool_too_small_says_what_is_needed() -> None:
    with pytest.raises(UsageError, match="16384 bytes"):
        Plan(8192, 4096, 2)


def test_odd_block_size_is_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 8"):
        Plan(8192, 12, 2)
