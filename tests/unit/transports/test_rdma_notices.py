"""Notifications of batches over fake NICs: behind a fence on each queue pair that carried rows, or without one."""

from __future__ import annotations

import contextlib
import errno
import functools
import struct
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvxfer import TransferBatch, TransferEngine
from kvxfer.errors import ClosedError, KvxferError, PeerClosedError, TransferError, TransferTimeoutError
from kvxfer.handshake.frames import FrameKind
from kvxfer.transports.rdma_fences import FenceCredits
from kvxfer.transports.rdma_passive import PassiveEnd
from kvxfer.transports.rdma_queue import SendQueue
from kvxfer.transports.rdma_wire import ConnectReply
from kvxfer.verbs.enums import CompletionStatus, PortState, WorkOpcode
from tests.support.fake_engines import FakeHosts, Pair
from tests.support.fake_verbs import connectx
from tests.support.peer import wait_until

Status = CompletionStatus
FENCE = WorkOpcode.RDMA_WRITE_WITH_IMM
LARGE_NBYTES = 4 << 20

pytestmark = pytest.mark.usefixtures("short_pauses")

until = functools.partial(wait_until, timeout_s=2.0)


def open_pair(hosts: FakeHosts, *, rails: int = 1, **options: Any) -> Pair:
    """Two hosts with `rails` ports each, one to one, all connected."""
    nics = [[connectx(f"mlx_{n}", f"10.10.{n}.{host}", f"eth{n}") for n in range(rails)] for host in (1, 2)]
    if rails > 1:
        hosts.fabric.separate_subnets()
    pair = hosts.pair(*nics, nbytes=LARGE_NBYTES, **options)
    pair.open()
    hosts.fabric.trace = []
    if rails > 1:
        delivery, hosts.fabric.delivery = hosts.fabric.delivery, "post"
        until(lambda: bool(pair.write(65536) or len(pair.connected) == rails))
        hosts.fabric.delivery = delivery
        hosts.fabric.trace.clear()
    return pair


def submit(pair: Pair, nbytes: int = 4096, **options: Any) -> TransferBatch:
    options = {"notify": b"there", **options}
    return pair.a.submit_write(pair.segment, pair.local.address, pair.remote.address, nbytes, **options)


def in_thread(batch: TransferBatch) -> tuple[threading.Thread, list[KvxferError]]:
    caught: list[KvxferError] = []

    def run() -> None:
        try:
            batch.wait()
        except KvxferError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, caught


def step_to_the_fences(pair: Pair, count: int = 1) -> None:
    """Move rows, and nothing behind them, until so many queue pairs have nothing but a fence on them."""

    def is_there() -> bool:
        senders = pair.queue_pairs()[0]
        for qp in senders:
            if qp.queued and qp.queued[0].opcode != FENCE:
                pair.fabric.step(qp)
        return sum(bool(qp.queued) and qp.queued[0].opcode == FENCE for qp in senders) == count

    until(is_there)


def hold_fence(pair: Pair, **options: Any) -> tuple[TransferBatch, threading.Thread, list[KvxferError]]:
    """A batch whose rows are in place and whose frame is at the peer, and its fence is on the wire."""
    batch = submit(pair, **options)
    thread, caught = in_thread(batch)
    step_to_the_fences(pair)
    until(lambda: pair.b._service._held_nbytes > 0)
    return batch, thread, caught


def payloads(pair: Pair, timeout_s: float = 1.0) -> list[bytes]:
    return [one.payload for one in pair.b.notifications(timeout_s)]


def fences(hosts: FakeHosts) -> int:
    return sum(one.opcode is FENCE and one.status is Status.SUCCESS for one in hosts.fabric.trace or ())


def counts(pair: Pair) -> tuple[int, int]:
    told = pair.segment.describe()["rdma"]["notifications"]
    return told["fenced"], told["unfenced"]


# Behind the bytes.


def test_a_notification_comes_with_a_fence(hosts: FakeHosts) -> None:
    pair = open_pair(hosts)

    submit(pair).wait()

    assert payloads(pair) == [b"there"]
    assert payloads(pair, 0.0) == []
    assert counts(pair) == (1, 0)
    assert [one.opcode for one in hosts.fabric.trace or ()] == [WorkOpcode.RDMA_WRITE, FENCE]
    assert pair.rails[0]["fences_max"] == 64


def test_the_frame_alone_is_no_notification(held: FakeHosts) -> None:
    pair = open_pair(held)
    batch, thread, caught = hold_fence(pair)

    assert payloads(pair, 0.02) == []
    assert not batch.is_done
    until(held.fabric.step)
    thread.join(2.0)

    assert not caught
    assert payloads(pair, 0.0) == [b"there"]
    assert counts(pair) == (1, 0)


def test_a_fence_that_comes_before_its_completion_queue_is_armed(
    held: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = open_pair(held)
    arm = PassiveEnd.arm
    monkeypatch.setattr(PassiveEnd, "arm", lambda self: bool(held.fabric.run()) and arm(self))
    thread, caught = in_thread(submit(pair))
    until(held.fabric.step)
    thread.join(2.0)

    assert not caught
    assert payloads(pair, 0.0) == [b"there"]
    assert counts(pair) == (1, 0)


def test_a_fence_that_is_there_first_wakes_nobody(hosts: FakeHosts) -> None:
    pair = open_pair(hosts)

    for _ in range(200):  # more than there are receives
        submit(pair).wait()

    assert payloads(pair) == [b"there"] * 200
    assert counts(pair) == (200, 0)
    assert not pair.libraries[1].calls["ibv_req_notify_cq"]


def test_a_batch_over_two_rails_has_a_fence_on_each(held: FakeHosts) -> None:
    pair = open_pair(held, rails=2)
    thread, caught = in_thread(submit(pair, LARGE_NBYTES))
    step_to_the_fences(pair, 2)

    for qp in pair.queue_pairs()[0]:
        assert payloads(pair, 0.02) == []
        held.fabric.step(qp)
    thread.join(2.0)

    assert not caught
    assert payloads(pair, 0.0) == [b"there"]
    assert counts(pair) == (1, 0)


@pytest.mark.parametrize("fences_max", [64, 0])
def test_bytes_that_nobody_is_promised_to_see_are_seen_behind_a_fence(hosts: FakeHosts, fences_max: int) -> None:
    """The device shows what was written to who polls a completion of the same queue pair, and not before."""
    pair = open_pair(hosts, rails=2, rdma_fences_max=fences_max)
    hosts.fabric.hides_writes = True
    are_seen = []
    for _ in range(4):
        pair.fill()
        submit(pair, LARGE_NBYTES).wait()
        assert payloads(pair) == [b"there"]
        are_seen.append((pair.there == pair.here).all())
    hosts.fabric.hides_writes = False

    assert all(are_seen) if fences_max else not any(are_seen)


def test_what_was_read_needs_no_fence(hosts: FakeHosts) -> None:
    pair = open_pair(hosts)

    pair.a.read(pair.segment, pair.local.address, pair.remote.address, 4096, notify=b"read")

    assert payloads(pair) == [b"read"]
    assert fences(hosts) == 0


@pytest.mark.parametrize("rails", [1, 2])
@pytest.mark.parametrize("fences_max", [1, 3, 64])
def test_many_notifications_at_once_never_lack_a_receive(hosts: FakeHosts, fences_max: int, rails: int) -> None:
    pair = open_pair(hosts, rails=rails, rdma_fences_max=fences_max)

    def notify(sender: int) -> None:
        for turn in range(10):
            submit(pair, 2 << 20 if turn % 4 == 0 else 64, notify=b"%d.%d" % (sender, turn)).wait(10.0)

    with capture_logs() as events:
        threads = [threading.Thread(target=notify, args=(sender,)) for sender in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)

    assert sorted(payloads(pair)) == sorted(b"%d.%d" % (one, turn) for one in range(8) for turn in range(10))
    assert counts(pair) == (80, 0)
    assert "rdma.rail_broken" not in [event["event"] for event in events]


def test_answers_that_nobody_looks_at_make_room_all_the_same(hosts: FakeHosts) -> None:
    pair = open_pair(hosts, rdma_fences_max=2)
    left = [submit(pair, notify=b"left") for _ in range(2)]
    for batch in left:
        batch.poll()
    until(lambda: len(pair.b._service.notifications._unread) == 2)

    submit(pair, notify=b"last").wait(2.0)

    assert payloads(pair) == [b"left", b"left", b"last"]
    for batch in left:
        batch.wait()


@pytest.mark.parametrize("depth", [2, 16])
def test_a_long_batch_leaves_the_fences_of_others_room(held: FakeHosts, depth: int) -> None:
    pair = open_pair(held, rdma_send_depth=depth)
    rows = 128 * np.arange(1000)
    long = pair.a.submit_write(pair.segment, pair.local.address + rows, pair.remote.address + rows, 64)
    waiting = [in_thread(long), in_thread(submit(pair, 64))]

    found: list[bytes] = []
    while not found:
        until(held.fabric.step)
        found = payloads(pair, 0.0)
    is_done = long.is_done
    held.fabric.delivery = "poll"
    held.fabric.run()
    for thread, caught in waiting:
        thread.join(5.0)
        assert not caught

    assert found == [b"there"]
    assert not is_done
    assert counts(pair) == (1, 0)


# Without fences.


def without(hosts: FakeHosts, how: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What keeps fences away; the settings of the engines with it."""
    told = ConnectReply.to_json
    if how == "older peer":
        monkeypatch.setattr(
            ConnectReply, "to_json", lambda self: {n: v for n, v in told(self).items() if n != "fences"}
        )
    return {
        "here": {"rdma_fences_max": 0, "peer_settings": {"rdma_fences_max": 64}},
        "there": {"peer_settings": {"rdma_fences_max": 0}},
    }.get(how, {})


@pytest.mark.parametrize("how", ["here", "there", "older peer"])
def test_without_fences_the_control_connection_does_it(
    hosts: FakeHosts, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = open_pair(hosts, **without(hosts, how, monkeypatch))

    submit(pair).wait()

    assert payloads(pair) == [b"there"]
    assert counts(pair) == (0, 1)
    assert pair.rails[0]["fences_max"] == fences(hosts) == 0


@pytest.mark.parametrize("verb", ["ibv_create_comp_channel", "ibv_create_cq", "ibv_create_qp", "ibv_post_recv"])
def test_a_device_that_refuses_receives_is_told_of_and_used(hosts: FakeHosts, verb: str) -> None:
    pair = hosts.pair(connectx(address="10.10.0.1"), connectx(address="10.10.0.2"))
    pair.libraries[1].fail(verb, errno.ENOMEM)

    with capture_logs() as events:
        pair.open()
        submit(pair).wait()

    assert payloads(pair) == [b"there"]
    assert counts(pair) == (0, 1)
    assert [event["nic"] for event in events if event["event"] == "rdma.fences_refused"] in (["mlx5_0:1"], ["mlx5_0"])
    assert [event["fences_max"] for event in events if event["event"] == "rdma.connected"] == [0]


def test_a_peer_that_has_fewer_receives_is_sent_no_more_fences(hosts: FakeHosts) -> None:
    pair = open_pair(hosts, peer_settings={"rdma_fences_max": 3})

    assert pair.rails[0]["fences_max"] == 3
    assert len(pair.queue_pairs()[1][0].receives) == 3


# What breaks in between.


def check_missed(pair: Pair, events: list[Any], peers: int) -> None:
    """It came once, without a fence, and both ends say so where both can know."""
    assert payloads(pair) == [b"there"]
    assert payloads(pair, 0.02) == []
    assert [event["event"] for event in events].count("rdma.fence_missed") == peers
    assert counts(pair)[1] == 1


def test_a_rail_that_breaks_before_the_fence_has_come(hosts: FakeHosts) -> None:
    pair = open_pair(hosts)
    pair.queue_pairs()[0][0].inject(Status.RETRY_EXC_ERR, after=1)

    with capture_logs() as events:
        submit(pair).wait(2.0)

    check_missed(pair, events, 2)
    submit(pair, notify=b"and on").wait(2.0)  # over a new connection, whose fences begin anew
    assert payloads(pair) == [b"and on"]
    assert counts(pair) == (1, 1)


def test_one_of_two_rails_that_breaks_before_the_fence_has_come(held: FakeHosts) -> None:
    pair = open_pair(held, rails=2)
    thread, caught = in_thread(submit(pair, LARGE_NBYTES))
    step_to_the_fences(pair, 2)
    pair.queue_pairs()[0][1].inject(Status.RETRY_EXC_ERR)

    with capture_logs() as events:
        held.fabric.run()
        thread.join(2.0)

    assert not caught
    check_missed(pair, events, 2)


def test_nobody_is_told_before_the_peer_has_dropped_what_carried_rows_and_broke(
    held: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What went over it has no fence; that the peer has destroyed its end is the next best."""
    pair = open_pair(held, rails=2)
    mender = pair.segment._transfers.endpoints[0]._mender
    hang_up, may_drop = mender.hang_up, threading.Event()

    def wait_and_hang_up(number: int, deadline: float) -> None:
        if may_drop.wait(5.0):
            hang_up(number, deadline)

    monkeypatch.setattr(mender, "hang_up", wait_and_hang_up)
    batch = submit(pair, LARGE_NBYTES)
    batch.poll()
    first, second = pair.queue_pairs()[0]
    while held.fabric.step(first):
        batch.poll()
    pair.libraries[0].set_port("mlx_0", 1, PortState.DOWN)
    thread, caught = in_thread(batch)
    until(lambda: not held.fabric.step(second) and pair.connected == ["mlx_1:1 to mlx_1:1"])

    assert payloads(pair, 0.02) == []
    may_drop.set()
    held.fabric.delivery = "post"
    held.fabric.run()
    thread.join(5.0)

    assert not caught
    assert payloads(pair) == [b"there"]
    assert counts(pair) == (0, 1)


def test_a_fence_that_the_device_refuses(hosts: FakeHosts) -> None:
    pair = open_pair(hosts)
    pair.libraries[0].fail("ibv_post_send", errno.EINVAL, nth=2)

    with capture_logs() as events:
        submit(pair).wait(2.0)

    check_missed(pair, events, 2)


def test_a_queue_pair_of_the_peer_that_is_in_error(held: FakeHosts) -> None:
    """Its receives are flushed: who waits for a fence on it hears of that from its completion queue."""
    pair = open_pair(held)
    _, thread, caught = hold_fence(pair)

    with capture_logs() as events:
        with held.fabric.lock:
            pair.queue_pairs()[1][0].to_error()
        thread.join(2.0)

    assert not caught
    assert payloads(pair) == [b"there"]
    assert payloads(pair, 0.02) == []
    assert [event["event"] for event in events] == ["rdma.fence_missed"]


@pytest.mark.parametrize("verb", ["ibv_get_cq_event", "ibv_req_notify_cq", "ibv_poll_cq"])
def test_a_completion_channel_of_the_peer_that_fails(held: FakeHosts, verb: str) -> None:
    pair = open_pair(held)
    pair.libraries[1].fail(verb, errno.EIO)
    thread, caught = in_thread(submit(pair))
    step_to_the_fences(pair)
    held.fabric.run()
    thread.join(2.0)

    assert not caught
    assert payloads(pair) == [b"there"]


def test_a_connection_made_after_the_channel_failed_has_fences_again(
    held: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    arm, poll = PassiveEnd.arm, PassiveEnd.poll

    def note(name: str, result: Any) -> Any:
        calls.append(name)
        return result

    monkeypatch.setattr(PassiveEnd, "arm", lambda end: note("arm", arm(end)))
    monkeypatch.setattr(PassiveEnd, "poll", lambda end: note("poll", poll(end)))
    pair = open_pair(held)
    pair.libraries[1].fail("ibv_get_cq_event", errno.EIO)
    _, thread, _ = hold_fence(pair)
    until(lambda: calls[-2:] == ["arm", "poll"])  # from now on an event alone tells of the fence
    held.fabric.run()
    thread.join(2.0)
    pair.queue_pairs()[0][0].to_error()
    held.fabric.delivery = "post"
    until(lambda: bool(pair.write(64) or pair.connected))
    held.fabric.delivery = "manual"
    assert payloads(pair) == [b"there"]
    before = counts(pair)[0]
    calls.clear()

    _, thread, caught = hold_fence(pair)
    until(lambda: calls[-2:] == ["arm", "poll"])
    held.fabric.run()
    thread.join(2.0)

    assert not thread.is_alive()
    assert not caught
    assert payloads(pair) == [b"there"]
    assert counts(pair)[0] == before + 1


def test_rows_that_went_over_a_connection_that_is_gone_have_no_fence(hosts: FakeHosts) -> None:
    pair = open_pair(hosts)
    pair.queue_pairs()[0][0].inject(Status.RETRY_EXC_ERR, after=2)
    rows = 8192 * np.arange(5)

    with capture_logs() as events:
        pair.a.write(pair.segment, pair.local.address + rows, pair.remote.address + rows, 64, notify=b"there")

    check_missed(pair, events, 1)
    assert fences(hosts) == 1  # of the connection that carried the rest


# What ends in between.


def test_a_deadline_that_passes_while_the_fence_is_missing(held: FakeHosts) -> None:
    pair = open_pair(held)
    batch = submit(pair)
    batch.poll()
    held.fabric.step()
    batch.poll()
    until(lambda: pair.b._service._held_nbytes > 0)

    with pytest.raises(TransferTimeoutError, match="not confirmed the notification"):
        batch.wait(0.05)

    until(lambda: pair.b._service._held_nbytes == 0)
    held.fabric.run()
    assert payloads(pair, 0.05) == []


def test_a_cancel_while_the_fence_is_missing(held: FakeHosts) -> None:
    pair = open_pair(held)
    batch, thread, caught = hold_fence(pair)

    batch.cancel()
    thread.join(2.0)

    assert [type(error).__name__ for error in caught] == ["TransferCancelledError"]
    until(lambda: pair.b._service._held_nbytes == 0)
    assert payloads(pair, 0.05) == []


@pytest.mark.parametrize("who", ["segment", "engine", "peer"])
def test_a_close_while_the_fence_is_missing(held: FakeHosts, who: str) -> None:
    pair = open_pair(held)
    _, thread, caught = hold_fence(pair)

    {"segment": pair.segment, "engine": pair.a, "peer": pair.b}[who].close()
    thread.join(2.0)

    assert len(caught) == 1
    assert isinstance(caught[0], ClosedError | PeerClosedError)
    if who != "peer":
        until(lambda: pair.b._service._held_nbytes == 0)
        assert payloads(pair, 0.05) == []


def test_memory_is_taken_back_while_a_fence_is_missing(held: FakeHosts) -> None:
    """Who takes it back from one that does not answer drops its connections, and with them the fence."""
    pair = open_pair(held, unregister_timeout_s=0.1)
    _, thread, caught = hold_fence(pair)

    pair.b.unregister(pair.remote)
    thread.join(2.0)

    assert not caught
    assert payloads(pair) == [b"there"]
    assert counts(pair)[0] + counts(pair)[1] == 1


# Peers that do not keep to it.


def session_of(pair: Pair) -> Any:
    return pair.segment._connection._session


def frame(number: int, *named: tuple[int, int], payload: bytes = b"x", count: int | None = None) -> bytes:
    packed = b"".join(struct.pack("<QQ", *pair) for pair in named)
    return struct.pack("<QH", number, len(named) if count is None else count) + packed + payload


@pytest.mark.parametrize(
    "make",
    [
        lambda key: frame(1, (key, 65)),
        lambda key: frame(1, (key, 2**64 - 1)),
        lambda key: frame(1, (key, 1), (key, 2)),
        lambda key: frame(1),
        lambda key: frame(1, count=3),
        lambda key: frame(1, count=65535),
        lambda key: frame(1)[:9],
        lambda key: b"1234567",
        lambda key: frame(1, (key, 1)) + b"x" * (1 << 20),
    ],
)
def test_a_frame_that_cannot_be_ends_that_session_and_nothing_else(hosts: FakeHosts, make: Any) -> None:
    pair = open_pair(hosts)
    session = session_of(pair)
    key = pair.segment._transfers.endpoints[0]._rails[0].queue.number

    with contextlib.suppress(KvxferError):
        session.send(FrameKind.NOTIFY_FENCED, make(key))
    until(lambda: session.error is not None or len(make(key)) > 1 << 20)

    assert payloads(pair, 0.02) == []
    hosts.engine("a").open_segment(pair.b.address)


def test_an_engine_without_rdma_is_told_of_no_fences() -> None:
    with TransferEngine(transports=("tcp",)) as here, TransferEngine(transports=("tcp",)) as there:
        session: Any = here.open_segment(there.address)._connection._session

        session.send(FrameKind.NOTIFY_FENCED, frame(1, (1, 1)))
        until(lambda: session.error is not None)

        assert "no rdma here" in str(session.error)
        assert there.notifications() == []


def test_fences_of_connections_that_are_not_there_are_not_waited_for(hosts: FakeHosts) -> None:
    pair = open_pair(hosts)

    session_of(pair).send(FrameKind.NOTIFY_FENCED, frame(7, (12345, 9)))

    assert payloads(pair) == [b"x"]


def test_frames_without_fences_are_kept_to_a_bound(hosts: FakeHosts) -> None:
    pair = open_pair(hosts, rdma_fences_max=4)
    session = session_of(pair)
    key = pair.segment._transfers.endpoints[0]._rails[0].queue.number

    for number in range(1, 5):
        session.send(FrameKind.NOTIFY_FENCED, frame(number, (key, number)))
    until(lambda: pair.b._service._held_nbytes == 4)
    session.send(FrameKind.NOTIFY_FENCED, frame(5, (key, 5)))
    until(lambda: session.error is not None)

    assert "fence" in str(session.error)
    until(lambda: pair.b._service._held_nbytes == 0)
    assert payloads(pair, 0.02) == []


def test_notifications_that_wait_hold_no_memory_without_bound(held: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.serving.NBYTES_MAX", 10)
    pair = open_pair(held)
    thread, caught = in_thread(submit(pair, notify=b"too much of it"))
    step_to_the_fences(pair)
    held.fabric.run()
    thread.join(2.0)

    assert len(caught) == 1
    assert "did not take the notification" in str(caught[0])
    assert isinstance(caught[0], TransferError)
    assert payloads(pair, 0.02) == []


def test_a_notification_that_there_is_no_room_for_is_not_kept_while_it_waits(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.serving.NBYTES_MAX", 10)
    pair = open_pair(hosts)
    ledger = pair.b._service.transports["rdma"].service._ledger
    key = pair.segment._transfers.endpoints[0]._rails[0].queue.number
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, 5):
            session_of(pair).send(FrameKind.NOTIFY_FENCED, frame(number, (key, number), payload=bytes(1 << 20)))
        until(lambda: [len(one.waiting) for one in ledger._connections.values() if one.waiting] == [4])

        until(lambda: tracemalloc.get_traced_memory()[0] - before < 3 << 20)
    finally:
        tracemalloc.stop()


def test_fences_that_no_frame_names_cost_their_sender_only(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that counts nothing runs out of receives: its own queue pair breaks, and the peer keeps a number."""
    pair = open_pair(hosts, rdma_fences_max=4)
    queue: SendQueue = pair.segment._transfers.endpoints[0]._rails[0].queue
    monkeypatch.setattr(FenceCredits, "has_room", True)

    for _ in range(6):
        queue.post_fence(None)  # type: ignore[arg-type]

    assert fences(hosts) == 4
    queue.poll()
    assert queue.fault is not None
    assert queue.fault.status is Status.RNR_RETRY_EXC_ERR
    submit(pair).wait(2.0)
    assert payloads(pair) == [b"there"]


def test_an_immediate_that_is_not_the_next_number_is_no_fence(held: FakeHosts) -> None:
    pair = open_pair(held)
    thread, caught = in_thread(submit(pair))
    step_to_the_fences(pair)
    pair.queue_pairs()[0][0].queued[0].imm_data += 1
    held.fabric.run()

    with capture_logs() as events:
        thread.join(2.0)

    assert not caught
    assert payloads(pair) == [b"there"]
    assert "rdma.fence_missed" in [event["event"] for event in events]
