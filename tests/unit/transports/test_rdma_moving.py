"""Batches over fake NICs: cut, posted, counted, retried, stopped; and what is told of each that fails."""

from __future__ import annotations

import errno
import functools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import TransferBatch
from kvxfer.errors import (
    ClosedError,
    CompletionError,
    KvxferError,
    NotRegisteredError,
    PostError,
    RegionBusyError,
    RemoteAccessError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    UsageError,
)
from kvxfer.transports.rdma_endpoint import FAULTS_MAX
from kvxfer.verbs.completion_queue import CompletionQueue
from kvxfer.verbs.enums import CompletionStatus, QueuePairState, WorkOpcode
from tests.support.fake_engines import FakeHosts, Pair, fake_hosts
from tests.support.fake_verbs import FakeFabric, FakeNic, FakeQueuePair, connectx
from tests.support.peer import wait_until

A, B = "10.10.0.1", "10.10.0.2"
Status = CompletionStatus
SHORT_S = 0.05

pytestmark = pytest.mark.usefixtures("short_pauses")

until = functools.partial(wait_until, timeout_s=2.0)


def open_pair(hosts: FakeHosts, *, here: FakeNic | None = None, there: FakeNic | None = None, **options: Any) -> Pair:
    pair = hosts.pair(here or connectx(address=A), there or connectx(address=B), **options)
    hosts.fabric.trace = []
    pair.open()
    return pair


def sender(pair: Pair) -> FakeQueuePair:
    return pair.queue_pairs()[0][0]


def endpoint(pair: Pair) -> Any:
    return pair.segment._transfers.endpoints[0]


def submit(pair: Pair, offset: int = 0, nbytes: int = 4096, *, count: int = 1, **options: Any) -> TransferBatch:
    """Submit `count` rows of `nbytes` bytes, every second place from `offset` on."""
    rows = offset + 2 * nbytes * np.arange(count, dtype=np.int64)
    return pair.a.submit_write(pair.segment, pair.local.address + rows, pair.remote.address + rows, nbytes, **options)


def wait_in_thread(batch: TransferBatch) -> tuple[threading.Thread, list[BaseException]]:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            batch.wait()
        except KvxferError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, caught


# Cutting.


@pytest.mark.parametrize("nbytes", [1, 65535, 65536, 65537, 131073])
def test_any_length_up_to_the_end_of_the_region_arrives(hosts: FakeHosts, nbytes: int) -> None:
    """B119: the tail of a region, and its begin; messages of 64 KiB."""
    nic = connectx(address=A)
    nic.ports[0].max_msg_sz = 65536
    pair = open_pair(hosts, here=nic, nbytes=200_000)
    pair.fill()
    end = 200_000 - nbytes

    pair.a.write(pair.segment, pair.local.address + end, pair.remote.address + end, nbytes)
    pair.a.write(pair.segment, pair.local.address, pair.remote.address, nbytes)

    assert (pair.there[end:] == pair.here[end:]).all()
    assert (pair.there[:nbytes] == pair.here[:nbytes]).all()
    assert max(one.nbytes for one in hosts.fabric.trace or ()) <= 65536


@pytest.mark.parametrize("message_nbytes", [4096, 50_000, 2**30])
@pytest.mark.parametrize(("here", "there"), [(1 << 16, 1 << 62), (1 << 62, 1 << 16), (1 << 16, 1 << 17)])
def test_rows_are_cut_at_the_chunks_of_both_ends_and_at_the_longest_message(
    hosts: FakeHosts, here: int, there: int, message_nbytes: int
) -> None:
    nic = connectx(address=B)
    nic.ports[0].max_msg_sz = message_nbytes  # the peer's counts as well
    pair = open_pair(
        hosts,
        there=nic,
        nbytes=700_001,
        rdma_chunk_nbytes_max=here,
        peer_settings={"rdma_chunk_nbytes_max": there},
    )

    pair.write(100_000)  # crosses chunks at both ends, at different places
    pair.read(101)

    for one in hosts.fabric.trace or ():
        assert one.nbytes <= message_nbytes
        assert one.status is Status.SUCCESS


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(1 << 16, 1), ((1 << 16) - 1, 2), (2**63 - 16 - (1 << 20), 32)],
    ids=["at the end", "over the end", "wraps"],
)
def test_rows_outside_the_region_are_refused_before_anything_is_posted(
    hosts: FakeHosts, offset: int, nbytes: int
) -> None:
    """B120."""
    pair = open_pair(hosts)
    remote = min(pair.remote.address + offset, 2**63 - 1)

    with pytest.raises(UsageError, match="row 0"):
        pair.a.write(pair.segment, pair.local.address, remote, nbytes)

    assert hosts.libraries["a"].calls["ibv_post_send"] == 0


# Posting: never more than was granted, nothing lost, nothing doubled.


class Watch:
    """Looks at every post: how much is outstanding, how often a completion is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outstanding_max = 0
        self.unsignalled_max = 0
        self.seen: list[int] = []
        self._unsignalled = 0
        original = FakeQueuePair.queue

        def queue(pair: FakeQueuePair, request: Any) -> None:
            original(pair, request)
            self.outstanding_max = max(self.outstanding_max, pair.caps["max_send_wr"] - pair.send_room)
            self._unsignalled = 0 if request.flags & 2 else self._unsignalled + 1
            self.unsignalled_max = max(self.unsignalled_max, self._unsignalled)
            self.seen.append(request.wr_id)

        monkeypatch.setattr(FakeQueuePair, "queue", queue)


@pytest.mark.parametrize(("asked", "granted"), [(256, None), (256, 120), (256, 3), (2, None), (64, 1), (100, 100)])
@pytest.mark.parametrize("delivery", ["post", "poll"])
def test_no_more_is_outstanding_than_was_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int, granted: int | None, delivery: Any
) -> None:
    """B123. At least every 64th, and every half queue, gives a completion; wr_ids are unique (B125)."""
    watch = Watch(monkeypatch)
    with fake_hosts(tmp_path, FakeFabric(delivery=delivery)) as hosts:
        pair = open_pair(
            hosts, here=connectx(address=A, granted_send_wr_max=granted), rdma_send_depth=asked, nbytes=40_000
        )

        pair.write(10)  # 4000 rows

        depth = granted or asked
        assert sender(pair).posted_count == 4000
        assert len(set(watch.seen)) == 4000
        assert watch.outstanding_max <= depth
        assert watch.unsignalled_max <= max(0, min(64, depth // 2) - 1)


def test_a_device_that_grants_more_than_was_asked_does_not_overrun_the_completion_queue(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request gives a completion when the queue breaks: more of them than completions would be lost."""
    from kvxfer.verbs import queue_pair as module

    original = module.read_capabilities

    def more(cap: Any) -> Any:
        found = original(cap)
        return type(found)(**{**vars_of(found), "max_send_wr": 4 * found.max_send_wr})

    monkeypatch.setattr(module, "read_capabilities", more)
    watch = Watch(monkeypatch)
    hosts.fabric.delivery = "poll"
    pair = open_pair(hosts, here=connectx(address=A, cqe_is_rounded=False), rdma_send_depth=16, nbytes=40_000)

    pair.write(10)

    assert watch.outstanding_max <= 16


def vars_of(value: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(value)


@pytest.mark.slow
def test_a_hundred_thousand_rows_arrive(hosts: FakeHosts) -> None:
    pair = open_pair(hosts, nbytes=800_000)

    pair.write(8)

    assert sender(pair).posted_count == 100_000


def test_ten_thousand_rows_arrive(hosts: FakeHosts) -> None:
    pair = open_pair(hosts, nbytes=80_000)
    hosts.fabric.trace = None

    pair.write(8)

    assert sender(pair).posted_count == 10_000


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN])
def test_a_chain_of_which_a_part_was_taken_goes_on_from_there(hosts: FakeHosts, number: int) -> None:
    """B122: the 7th of 10 is refused, 6 are on their way: 4 are posted later, each row once."""
    pair = open_pair(hosts, nbytes=40_960)
    hosts.libraries["a"].fail("ibv_post_send", number, row=6)
    pair.fill()

    submit(pair, nbytes=2048, count=10).wait(2.0)

    rows = np.arange(10) * 4096
    assert sorted(one.remote - pair.remote.address for one in hosts.fabric.trace or ()) == rows.tolist()
    assert all((pair.there[at : at + 2048] == pair.here[at : at + 2048]).all() for at in rows)


def test_a_queue_that_is_full_for_a_while_is_tried_again(hosts: FakeHosts) -> None:
    """ENOMEM while requests are on the queue: their completions make room."""
    pair = open_pair(hosts, nbytes=400_000)
    hosts.libraries["a"].fail("ibv_post_send", errno.ENOMEM, nth=2, row=5, times=20)

    pair.write(1000)


@pytest.mark.parametrize("times", [1, 1 + FAULTS_MAX])
def test_a_queue_that_takes_nothing_and_has_nothing_is_replaced_a_few_times(hosts: FakeHosts, times: int) -> None:
    pair = open_pair(hosts)
    hosts.libraries["a"].fail("ibv_post_send", errno.ENOMEM, times=times)

    if times > FAULTS_MAX:
        with pytest.raises(CompletionError, match=r"ibv_post_send.*ENOMEM"):
            submit(pair).wait(1.0)
    else:
        submit(pair).wait(1.0)

    pair.write()


def test_a_request_that_is_refused_for_what_it_is_fails_its_batch_and_no_other(hosts: FakeHosts) -> None:
    """B125: EINVAL at the 3rd of 5; what was posted before it is stopped; what comes later is fine."""
    hosts.fabric.delivery = "poll"
    pair = open_pair(hosts)
    hosts.libraries["a"].fail("ibv_post_send", errno.EINVAL, nth=1, row=2)

    batch = submit(pair, nbytes=1024, count=5)
    with pytest.raises(PostError, match="EINVAL"):
        batch.wait(1.0)

    for _ in range(30):
        submit(pair, nbytes=1024, count=10).wait(1.0)
    pair.write()


def test_a_driver_that_does_not_say_what_it_took_gets_a_new_connection(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = open_pair(hosts, nbytes=40_960)
    monkeypatch.setattr("kvxfer.verbs.queue_pair.find_bad", lambda *_: -1)
    before = sender(pair).number
    hosts.libraries["a"].fail("ibv_post_send", errno.ENOMEM, row=3)

    pair.write(1024)

    assert sender(pair).number != before


def test_reads_and_writes_of_several_batches_share_one_queue(hosts: FakeHosts) -> None:
    hosts.fabric.delivery = "poll"
    pair = open_pair(hosts, nbytes=1 << 16, rdma_send_depth=16)
    pair.fill()
    pair.there[1 << 15 :] = 7
    writes = [submit(pair, offset, 16, count=500) for offset in (0, 16)]
    rows = (1 << 15) + 32 * np.arange(1000, dtype=np.int64)
    read = pair.a.submit_read(pair.segment, pair.local.address + rows, pair.remote.address + rows, 16)

    pair.a.wait_all([*writes, read], 5.0)

    assert (pair.there[:16_000] == pair.here[:16_000]).all()
    assert (pair.here[rows] == 7).all()
    assert (pair.here[rows + 16] != 7).any()


@pytest.mark.parametrize("delivery", ["post", "poll"])
def test_several_threads_share_one_queue(tmp_path: Path, delivery: Any) -> None:
    """B127 in small: each thread has its part of the memory, and finds its own bytes there."""
    with fake_hosts(tmp_path, FakeFabric(delivery=delivery)) as hosts:
        pair = open_pair(hosts, nbytes=1 << 16, rdma_send_depth=8)
        wrong: list[object] = []

        def run(part: int) -> None:
            rng = np.random.default_rng(part)
            start = part << 13
            rows = start + 128 * np.arange(32, dtype=np.int64)
            try:
                for _ in range(3):
                    pair.here[start : start + (1 << 13)] = rng.integers(0, 256, 1 << 13, np.uint8)
                    pair.a.write(pair.segment, pair.local.address + rows, pair.remote.address + rows, 100, timeout_s=5)
                    for row in rows:
                        if (pair.there[row : row + 100] != pair.here[row : row + 100]).any():
                            wrong.append((part, row))
            except KvxferError as error:
                wrong.append(error)

        threads = [threading.Thread(target=run, args=(part,)) for part in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert not wrong


def test_a_waiter_is_told_when_another_takes_its_completion(held: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wait, one sleeps on the device for both: neither waits for a tick where its batch is done."""
    monkeypatch.setattr("kvxfer.transports.rdma_endpoint.TICK_S", 5.0)
    pair = open_pair(held)
    waiting = [wait_in_thread(submit(pair, offset, 64)) for offset in (0, 64)]
    until(lambda: endpoint(pair)._waiters.has_sleeper and endpoint(pair)._waiters.follower_count == 1)

    held.fabric.run()

    for thread, caught in waiting:
        thread.join(2.0)
        assert not thread.is_alive()
        assert not caught


def test_a_waiter_is_told_by_one_who_never_sleeps(held: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other's batch moves all the time, so that it only spins."""
    monkeypatch.setattr("kvxfer.transports.rdma_endpoint.TICK_S", 5.0)
    pair = open_pair(held, spin_s=0.01, rdma_send_depth=8)  # a completion for each fourth request
    long = submit(pair, 0, 16, count=1500)
    spinning = wait_in_thread(long)
    until(lambda: endpoint(pair)._waiters.has_sleeper)
    waiting = wait_in_thread(submit(pair, 60_000, 64))
    until(lambda: endpoint(pair)._waiters.follower_count == 1)

    end = time.monotonic() + 2.0
    while waiting[0].is_alive() and time.monotonic() < end:
        held.fabric.step()
        time.sleep(0.0002)
    was_busy = not long.is_done
    held.fabric.delivery = "poll"
    held.fabric.run()

    assert not waiting[0].is_alive()
    assert was_busy
    spinning[0].join(2.0)
    assert not spinning[1]


def test_a_short_batch_does_not_wait_for_a_long_one_before_it(held: FakeHosts) -> None:
    """The queue is shared in windows, in turn: the long one had all the room that came back."""
    pair = open_pair(held, rdma_send_depth=16)
    long, short = submit(pair, 0, 16, count=1500), submit(pair, 60_000, 64)

    for _ in range(200):
        held.fabric.step()
        long.poll()

    assert short.poll()
    assert not long.is_done
    long.cancel()


def test_who_sleeps_is_woken_by_a_new_connection(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.transports.rdma_endpoint.TICK_S", 60.0)
    hosts.fabric.delivery = "poll"
    pair = open_pair(hosts)
    batch = submit(pair)
    sender(pair).inject(Status.RETRY_EXC_ERR)

    batch.wait(20.0)  # raises if it slept for a tick


def test_connections_that_fail_are_not_tried_in_a_tight_loop(hosts: FakeHosts) -> None:
    """B136: 10 ms, 20, 40, 80 ... between the tries; and the first cause is told."""
    hosts.fabric.delivery = "poll"
    pair = open_pair(hosts, connect_timeout_s=0.2)
    batch = submit(pair)
    sender(pair).inject(Status.RETRY_EXC_ERR)
    hosts.fabric.set_path("a/mlx5_0", "b/mlx5_0", rtr_errno=errno.EHOSTUNREACH)
    before = hosts.libraries["a"].calls["ibv_create_qp"]

    with pytest.raises(CompletionError, match="RETRY_EXC_ERR"):
        batch.wait(5.0)

    gid_pairs = 4
    assert hosts.libraries["a"].calls["ibv_create_qp"] - before <= 6 * gid_pairs


def test_a_batch_that_is_only_polled_moves(held: FakeHosts) -> None:
    pair = open_pair(held)
    batch = submit(pair)

    assert not batch.poll()
    held.fabric.run()

    assert batch.poll()


# What comes back broken.


def test_retries_are_bounded_and_the_first_cause_is_kept(hosts: FakeHosts) -> None:
    """B114: every request returns RETRY_EXC: each slice is posted once and FAULTS_MAX times again. B136."""
    pair = open_pair(hosts)
    break_each_connection(hosts, Status.RETRY_EXC_ERR)

    with pytest.raises(CompletionError) as caught:
        submit(pair).wait(5.0)

    posted = [one for one in hosts.fabric.trace or () if one.status is Status.RETRY_EXC_ERR]
    assert len(posted) == 1 + FAULTS_MAX
    assert caught.value.status == "RETRY_EXC_ERR"


def break_each_connection(hosts: FakeHosts, *statuses: CompletionStatus) -> None:
    """The first request on each new connection ends so; the last one given goes on."""
    left = list(statuses)
    original = FakeQueuePair.modify

    def fail_first(pair: FakeQueuePair) -> None:
        pair.inject(left.pop(0) if len(left) > 1 else left[0])

    for pair in hosts.libraries["a"].queue_pairs:
        fail_first(pair)

    def modify(self: FakeQueuePair, attr: Any, mask: int) -> int:
        error = original(self, attr, mask)
        if not error and self.state is QueuePairState.RTS and self.device.library.name == "a" and not self.injections:
            fail_first(self)
        return error

    hosts._stack.enter_context(pytest.MonkeyPatch.context()).setattr(FakeQueuePair, "modify", modify)


def test_the_error_shows_the_first_status_and_not_the_last(hosts: FakeHosts) -> None:
    """B136."""
    pair = open_pair(hosts)
    break_each_connection(hosts, Status.RETRY_EXC_ERR, Status.WR_FLUSH_ERR)

    with pytest.raises(CompletionError) as caught:
        submit(pair).wait(5.0)

    assert caught.value.status == "RETRY_EXC_ERR"


def test_flushed_requests_are_not_counted_as_faults_of_their_own(hosts: FakeHosts) -> None:
    """B115: [RETRY_EXC, FLUSH x 63] is one fault."""
    hosts.fabric.delivery = "poll"
    pair = open_pair(hosts)
    batch = submit(pair, nbytes=100, count=64)
    sender(pair).inject(Status.RETRY_EXC_ERR)

    batch.wait(2.0)

    assert batch._transfer.error is None
    assert len([rail for rail in pair.rails if rail["connected"]]) == 1


def test_our_own_stop_makes_no_rail_rest(held: FakeHosts) -> None:
    """B115: a cancelled batch leaves 64 flushed requests; the next connection is made at once."""
    pair = open_pair(held)
    batch = submit(pair, nbytes=100, count=64)

    batch.cancel()

    (rail,) = endpoint(pair)._rails
    assert rail.trouble == ""
    assert rail.paused_until == 0.0
    held.fabric.delivery = "post"
    pair.write()


def test_a_batch_that_is_at_fault_fails_and_the_others_go_on(held: FakeHosts) -> None:
    pair = open_pair(held)
    pair.fill()
    good, bad = submit(pair, 0, 64, count=10), submit(pair, 32768, 64)
    sender(pair).inject(Status.REM_ACCESS_ERR, after=10)
    held.fabric.delivery = "poll"

    with pytest.raises(RemoteAccessError):
        bad.wait(2.0)
    good.wait(2.0)

    assert good.rows_done.all()
    assert not bad.rows_done.any()
    assert (pair.there[:64] == pair.here[:64]).all()


@pytest.mark.parametrize(
    "status",
    [Status.LOC_PROT_ERR, Status.REM_ACCESS_ERR, Status.REM_INV_REQ_ERR, Status.REM_OP_ERR, Status.LOC_LEN_ERR],
)
def test_a_request_that_is_wrong_is_not_repeated(hosts: FakeHosts, status: CompletionStatus) -> None:
    pair = open_pair(hosts)
    sender(pair).inject(status)

    with pytest.raises(TransferError) as caught:
        submit(pair, nbytes=64, count=8).wait(2.0)

    assert caught.value.status == status.name  # type: ignore[attr-defined]
    assert len(hosts.fabric.trace or ()) == 1
    pair.write()  # B172: the same engine, the same segment


@pytest.mark.parametrize("number", [24, 7, 200])
def test_a_status_that_nobody_knows_is_an_error(hosts: FakeHosts, number: int) -> None:
    """B131."""
    pair = open_pair(hosts)
    break_each_connection(hosts, CompletionStatus(number))

    with pytest.raises(CompletionError, match=rf"\({number}"):
        submit(pair).wait(5.0)


def test_an_unanswered_request_is_told_with_everything_that_is_known(hosts: FakeHosts) -> None:
    """B126."""
    pair = open_pair(hosts)
    break_each_connection(hosts, Status.RETRY_EXC_ERR)

    with pytest.raises(CompletionError) as caught:
        submit(pair, 4096, 64, count=3).wait(5.0)

    error = caught.value
    assert (error.status, error.vendor_err, error.device) == ("RETRY_EXC_ERR", 129, "mlx5_0:1")
    for name, value in {
        "row": 0,
        "local_addr": pair.local.address + 4096,
        "remote_addr": pair.remote.address + 4096,
        "row_nbytes": 64,
        "peer": pair.b.address,
        "path_MTU": 4096,
        "retry_count": 6,
        "port_state": "ACTIVE",
        "one_subnet": "no",
    }.items():
        assert error.values[name] == value, name
    told = str(error)
    for word in (
        A,
        B,
        "RoCE v2",
        "row 3",
        "0x81",
        "4791",
        "mlx5_0:1 to mlx5_0:1",
        "MTU",
        hex(pair.remote.address + 4096),
    ):
        assert word in told, word


def test_a_row_at_fault_is_named_by_the_callers_number(hosts: FakeHosts) -> None:
    """Rows 0 and 1 are one request, for they are neighbours."""
    pair = open_pair(hosts)
    sender(pair).inject(Status.REM_ACCESS_ERR, after=1)
    rows = np.array([0, 64, 256, 512], np.int64)

    with pytest.raises(RemoteAccessError) as caught:
        pair.a.write(pair.segment, pair.local.address + rows, pair.remote.address + rows, 64)

    assert caught.value.values["row"] == 2
    assert caught.value.values["rows"] == (2,)


def test_what_was_in_place_before_the_fault_is_known(held: FakeHosts) -> None:
    """B117: done rows are done, the others are not; the batch is over only then."""
    pair = open_pair(held)
    pair.fill()
    batch = submit(pair, nbytes=64, count=200)
    sender(pair).inject(Status.REM_ACCESS_ERR, after=150)
    held.fabric.run()

    with pytest.raises(RemoteAccessError) as caught:
        batch.wait(2.0)

    done = batch.rows_done
    assert done[:128].all()  # signalled every 64
    assert not done[150:].any()
    assert caught.value.values["nbytes_done"] == int(done.sum()) * 64 == batch.nbytes_done
    for row in np.flatnonzero(done):
        assert (pair.there[row * 128 : row * 128 + 64] == pair.here[row * 128 : row * 128 + 64]).all()


def test_a_poll_that_fails_breaks_the_connection_and_no_batch(hosts: FakeHosts) -> None:
    """B130."""
    pair = open_pair(hosts)
    hosts.libraries["a"].fail("ibv_poll_cq", errno.EIO)

    pair.write()
    pair.write()

    assert pair.connected


def test_a_bug_in_a_poll_fails_the_batch_at_once_and_the_next_one_works(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B130: RuntimeError once."""
    pair = open_pair(hosts)
    original = CompletionQueue.poll
    raised: list[int] = []

    def poll(self: CompletionQueue) -> Any:
        if not raised:
            raised.append(1)
            raise RuntimeError("a bug")
        return original(self)

    monkeypatch.setattr(CompletionQueue, "poll", poll)

    with pytest.raises(RuntimeError, match="a bug"):
        pair.write()

    pair.write()


@pytest.mark.parametrize("verb", ["ibv_req_notify_cq", "ibv_get_cq_event"])
def test_a_completion_channel_that_fails_breaks_the_connection_and_no_batch(held: FakeHosts, verb: str) -> None:
    pair = open_pair(held)
    batch = submit(pair)
    held.libraries["a"].fail("ibv_req_notify_cq", errno.EIO)
    thread, caught = wait_in_thread(batch)

    until(lambda: len(pair.connected) == 1 and sender(pair).posted_count == 1 and bool(held.fabric.pending))
    held.fabric.delivery = "poll"
    held.fabric.run()

    thread.join(2.0)
    assert not caught


# Keys.


def test_memory_that_the_peer_registers_anew_is_found_without_opening_again(hosts: FakeHosts) -> None:
    """B134: r1 is named as not registered, r2 works."""
    pair = open_pair(hosts)
    pair.write()
    other = np.zeros(4096, np.uint8)
    pair.b.unregister(pair.remote)
    second = pair.b.register(other, name="second")

    with pytest.raises(NotRegisteredError, match=hex(pair.remote.address)):
        pair.a.write(pair.segment, pair.local.address, pair.remote.address, 64)
    pair.a.write(pair.segment, pair.local.address, second.address, 4096)

    assert (other == pair.here[:4096]).all()


def test_the_same_memory_registered_again_has_its_new_keys_used(hosts: FakeHosts) -> None:
    """B134."""
    pair = open_pair(hosts)
    pair.write()
    for _ in range(3):
        pair.b.unregister(pair.remote)
        pair.remote = pair.b.register(pair.there)
        pair.segment.refresh()

        pair.write()


def test_keys_that_went_behind_our_back_fail_the_batch_and_name_the_place(hosts: FakeHosts) -> None:
    """B134: what the device says of a stale key."""
    pair = open_pair(hosts)
    for region in hosts.libraries["b"].devices[0].keys.values():
        region.access = 0

    with pytest.raises(RemoteAccessError, match="unregistered") as caught:
        submit(pair, 4096, 64).wait(2.0)

    assert caught.value.values["remote_addr"] == pair.remote.address + 4096


# The end is final.


def frozen(pair: Pair) -> None:
    """Nothing that the fabric still holds changes one byte."""
    seen = pair.there.copy()
    pair.here[:] = ~pair.here
    pair.fabric.run()
    assert (pair.there == seen).all()


@pytest.mark.parametrize("moved", [0, 1, 5, 9])
@pytest.mark.parametrize("how", ["timeout", "cancel", "poll late"])
def test_after_a_batch_was_stopped_no_byte_moves(held: FakeHosts, how: str, moved: int) -> None:
    """A held-back wire: `moved` of 10 requests are carried out, then the batch ends. The peer drops its end."""
    pair = open_pair(held)
    pair.fill()
    batch = submit(pair, nbytes=64, count=10, timeout_s=SHORT_S if how != "cancel" else 10.0)
    for _ in range(moved):
        held.fabric.step(sender(pair))

    if how == "cancel":
        batch.cancel()
        assert isinstance(batch.exception, TransferCancelledError)
    elif how == "timeout":
        with pytest.raises(TransferTimeoutError):
            batch.wait()
    else:
        until(batch.poll)
        assert isinstance(batch.exception, TransferTimeoutError)

    assert pair.queue_pairs() == ([], [])
    frozen(pair)


def test_a_batch_that_is_stopped_leaves_the_others_on_its_queue_right(held: FakeHosts) -> None:
    """They go on from what is in place, over a new connection, and each row arrives."""
    pair = open_pair(held)
    pair.fill()
    first, second, third = (submit(pair, offset, 64, count=20) for offset in (0, 20_000, 40_000))
    for _ in range(30):
        held.fabric.step(sender(pair))

    second.cancel()
    held.fabric.delivery = "poll"
    pair.a.wait_all([first, third], 2.0)

    assert isinstance(second.exception, TransferCancelledError)
    for offset in (0, 40_000):
        for row in range(20):
            at = offset + 128 * row
            assert (pair.there[at : at + 64] == pair.here[at : at + 64]).all()


def test_a_stopped_batch_does_not_disturb_who_sleeps(held: FakeHosts) -> None:
    """The completion channel is destroyed under a thread that sleeps on it."""
    pair = open_pair(held)
    sleeping, other = submit(pair, 0, 64), submit(pair, 128, 64)
    thread, caught = wait_in_thread(sleeping)
    until(lambda: endpoint(pair)._waiters.has_sleeper)

    other.cancel()
    held.fabric.delivery = "poll"
    held.fabric.run()

    thread.join(2.0)
    assert not thread.is_alive()
    assert not caught
    assert sleeping.is_done


def test_waiting_for_several_batches_survives_a_broken_connection(hosts: FakeHosts) -> None:
    """`wait_all` only polls: a new connection must come about all the same."""
    hosts.fabric.delivery = "poll"
    pair = open_pair(hosts)
    batches = [submit(pair, offset, 64, count=10) for offset in (0, 2000)]
    sender(pair).inject(Status.RETRY_EXC_ERR, after=3)

    pair.a.wait_all(batches, 2.0)

    assert all(batch.exception is None for batch in batches)


def test_a_cancel_does_not_wait_for_a_connection_that_is_being_made(hosts: FakeHosts) -> None:
    hosts.fabric.delivery = "poll"
    pair = open_pair(hosts)
    batch = submit(pair)
    go_on = threading.Event()
    hosts.libraries["b"].before["ibv_modify_qp"] = lambda: go_on.wait(20.0) and None
    sender(pair).inject(Status.RETRY_EXC_ERR)
    thread, caught = wait_in_thread(batch)
    until(lambda: hosts.libraries["b"].running["ibv_modify_qp"] > 0)

    batch.cancel()

    assert hosts.libraries["b"].running["ibv_modify_qp"] > 0, "it was waited for"
    go_on.set()
    thread.join(2.0)
    assert isinstance(caught[0], TransferCancelledError)


def test_no_batch_is_done_before_the_peer_has_dropped_a_connection_that_broke_under_it(
    held: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packets may still be on their way, and would write over what comes later."""
    pair = open_pair(held)
    batch = submit(pair)
    gone = threading.Event()
    from kvxfer.transports.rdma_service import RdmaService

    hang_up = RdmaService.hang_up
    waiting: list[int] = []

    def slowly(self: RdmaService, session: str, number: int) -> None:
        waiting.append(number)
        gone.wait(5.0)
        hang_up(self, session, number)

    monkeypatch.setattr(RdmaService, "hang_up", slowly)
    sender(pair).inject(Status.RETRY_EXC_ERR)
    held.fabric.delivery = "poll"
    thread, caught = wait_in_thread(batch)
    until(lambda: bool(waiting))

    assert not batch.is_done
    gone.set()
    thread.join(2.0)

    assert not caught
    assert batch.is_done


def test_closing_the_segment_ends_its_batches_for_good(held: FakeHosts) -> None:
    pair = open_pair(held)
    pair.fill()
    batch = submit(pair, count=4)

    pair.segment.close()

    with pytest.raises(ClosedError):
        batch.wait()
    frozen(pair)


def test_closing_the_engine_wakes_who_waits(held: FakeHosts) -> None:
    pair = open_pair(held)
    thread, caught = wait_in_thread(submit(pair))
    time.sleep(0.005)

    pair.a.close()

    thread.join(2.0)
    assert isinstance(caught[0], ClosedError)


def test_what_one_sleeps_on_is_not_closed_under_it(held: FakeHosts) -> None:
    """Closed between letting go of the lock and epoll_wait(2), it gave EBADF, or was another one of the same number."""
    pair = open_pair(held)
    for _ in range(4):
        pair.open()
        thread, caught = wait_in_thread(submit(pair))
        until(lambda: endpoint(pair)._waiters.has_sleeper)

        pair.segment.close()

        thread.join(2.0)
        assert isinstance(caught[0], ClosedError)


def test_a_peer_that_is_killed_fails_its_batches(held: FakeHosts) -> None:
    """B172, B137: its end is gone with it."""
    pair = open_pair(held)
    thread, caught = wait_in_thread(submit(pair))

    pair.b.close()

    thread.join(2.0)
    assert isinstance(caught[0], KvxferError)
    assert pair.queue_pairs()[0] == []


def test_memory_in_use_cannot_be_unregistered_here(held: FakeHosts) -> None:
    pair = open_pair(held)
    batch = submit(pair)

    with pytest.raises(RegionBusyError):
        pair.a.unregister(pair.local)

    batch.cancel()
    pair.a.unregister(pair.local)


def test_memory_that_a_peer_takes_back_is_written_no_more_once_it_is_gone(held: FakeHosts) -> None:
    """A batch runs and nobody moves it: the peer waits for it as long as it may, then drops the connection."""
    pair = open_pair(held, peer_settings={"unregister_timeout_s": SHORT_S})
    pair.fill()
    batch = submit(pair, nbytes=64, count=10)
    held.fabric.step(sender(pair))

    pair.b.unregister(pair.remote)

    assert pair.queue_pairs()[1] == []
    frozen(pair)
    batch.cancel()


def test_a_batch_that_began_ends_before_the_peer_may_take_its_memory_back(held: FakeHosts) -> None:
    """B169: what runs finishes before `unregister` returns."""
    pair = open_pair(held)
    pair.fill()
    batch = submit(pair, nbytes=64, count=10)
    thread, caught = wait_in_thread(batch)
    ending = threading.Thread(target=pair.b.unregister, args=(pair.remote,))
    ending.start()
    until(lambda: not pair.segment.regions)

    assert ending.is_alive()
    held.fabric.delivery = "poll"
    held.fabric.run()
    ending.join(2.0)
    thread.join(2.0)

    assert not ending.is_alive()
    assert not caught


# Notifications.


def test_a_notification_comes_after_all_bytes_and_once(held: FakeHosts) -> None:
    pair = open_pair(held)
    batch = submit(pair, nbytes=64, count=10, notify=b"there")
    thread, caught = wait_in_thread(batch)
    for _ in range(10):
        until(held.fabric.step)
        assert pair.b.notifications() == []

    until(held.fabric.step)  # the fence behind them
    thread.join(2.0)

    assert not caught
    assert [one.payload for one in pair.b.notifications(1.0)] == [b"there"]
    assert pair.b.notifications() == []


@pytest.mark.parametrize("status", [Status.REM_ACCESS_ERR, Status.RETRY_EXC_ERR])
def test_a_batch_that_fails_notifies_nobody(hosts: FakeHosts, status: CompletionStatus) -> None:
    pair = open_pair(hosts)
    break_each_connection(hosts, status)

    with pytest.raises(TransferError):
        submit(pair, notify=b"there").wait(5.0)

    assert pair.b.notifications(0.01) == []


def test_a_batch_that_goes_on_over_a_new_connection_notifies_once(hosts: FakeHosts) -> None:
    hosts.fabric.delivery = "poll"
    pair = open_pair(hosts)
    batch = submit(pair, nbytes=64, count=100, notify=b"there")
    sender(pair).inject(Status.RETRY_EXC_ERR, after=70)

    batch.wait(2.0)

    assert [one.payload for one in pair.b.notifications(1.0)] == [b"there"]
    done = [one for one in hosts.fabric.trace or () if one.status is Status.SUCCESS]
    writes = [one for one in done if one.opcode is WorkOpcode.RDMA_WRITE]
    assert [one.opcode for one in done[len(writes) :]] == [WorkOpcode.RDMA_WRITE_WITH_IMM]  # of the new connection
    assert len({one.remote for one in writes}) == 100
    assert len(writes) <= 106  # from the last completion on: 64 are known to be there
