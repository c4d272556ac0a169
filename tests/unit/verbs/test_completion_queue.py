"""Completion queues: polled into a view, slept on without a lost wake-up, closed without a hang."""

from __future__ import annotations

import errno
import select

import pytest

from kvxfer.errors import UsageError, VerbsError
from kvxfer.verbs.completion_queue import ACKNOWLEDGE_EVERY
from kvxfer.verbs.device import Context, list_devices
from kvxfer.verbs.enums import CompletionStatus, WorkOpcode
from kvxfer.verbs.queue_pair import QueuePair, QueuePairCapabilities
from kvxfer.verbs.work_request import WorkRequestBatch
from tests.support.fake_verbs import FakeLibrary, connectx


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary(None, connectx(), name="a")


def flushed_pair(context: Context, completions: int = 8) -> QueuePair:
    """A queue pair whose requests all end at once, flushed: the shortest way to completions."""
    channel = context.create_comp_channel()
    queue = context.create_cq(completions, channel, poll_count=4)
    pair = context.alloc_pd().create_qp(queue, capabilities=QueuePairCapabilities(max_send_wr=completions))
    pair.to_init(port=1)
    pair.to_error()
    return pair


def post(pair: QueuePair, count: int, first: int = 1) -> None:
    batch = WorkRequestBatch(count)
    for number in range(first, first + count):
        batch.append(WorkOpcode.RDMA_WRITE, local_addr=0, lkey=0, remote_addr=0, rkey=0, nbytes=0, wr_id=number)
    pair.post_send(batch)


def test_poll_returns_rows_in_order_and_no_more_than_asked_for(library: FakeLibrary) -> None:
    with list_devices(library)[0].open() as context:
        pair = flushed_pair(context)
        post(pair, 6)

        first = pair.send_cq.poll()["wr_id"].tolist()
        rows = pair.send_cq.poll()

        assert first == [1, 2, 3, 4]
        assert rows["wr_id"].tolist() == [5, 6]
        assert set(rows["status"].tolist()) == {CompletionStatus.WR_FLUSH_ERR}
        assert len(pair.send_cq.poll()) == 0


def test_notification_wakes_once_for_each_request(library: FakeLibrary) -> None:
    with list_devices(library)[0].open() as context:
        pair = flushed_pair(context)
        queue = pair.send_cq
        channel = queue.channel
        assert channel is not None
        queue.request_notification()
        assert channel.get_event() is None

        post(pair, 1)

        assert select.select([channel.fd], [], [], 1.0)[0]
        assert channel.get_event() is queue
        assert channel.get_event() is None
        post(pair, 1, first=2)  # nobody asked
        assert not select.select([channel.fd], [], [], 0.0)[0]
        assert len(queue.poll()) == 2


def test_close_acknowledges_what_is_left(library: FakeLibrary) -> None:
    with list_devices(library)[0].open() as context:
        pair = flushed_pair(context)
        queue = pair.send_cq
        assert queue.channel is not None
        for number in range(1, 6):
            queue.request_notification()
            post(pair, 1, first=number)
            assert queue.channel.get_event() is queue
            queue.poll()

    assert not library.leaks  # the fake would fail a destroy with events that nobody acknowledged


def test_queue_that_is_dropped_acknowledges_what_is_left(library: FakeLibrary) -> None:
    """Or ibv_destroy_cq would wait for ever, in whatever thread the collector runs."""
    with list_devices(library)[0].open() as context:
        pair = flushed_pair(context)
        queue = pair.send_cq
        assert queue.channel is not None
        queue.request_notification()
        post(pair, 1)
        assert queue.channel.get_event() is queue

        with pytest.warns(ResourceWarning):
            del pair, queue

        assert library.leaks == {"context": 1}


def test_poll_of_nothing_is_a_wrong_call(library: FakeLibrary) -> None:
    with list_devices(library)[0].open() as context:
        with pytest.raises(UsageError, match="a poll of 0 completions"):
            context.create_cq(16, poll_count=0)

        assert library.leaks == {"context": 1}


def test_number_of_the_driver_is_not_taken_for_an_errno(library: FakeLibrary) -> None:
    with list_devices(library)[0].open() as context:
        pair = flushed_pair(context)
        library.fail("ibv_poll_cq", 2)  # CQ_POLL_ERR of mlx5 is -2

        with pytest.raises(VerbsError, match="it returned -2") as caught:
            pair.send_cq.poll()

    assert caught.value.errno == errno.EIO


def test_events_are_acknowledged_in_bulk(library: FakeLibrary) -> None:
    with list_devices(library)[0].open() as context:
        pair = flushed_pair(context)
        queue = pair.send_cq
        assert queue.channel is not None
        for number in range(1, ACKNOWLEDGE_EVERY + 1):
            queue.request_notification()
            post(pair, 1, first=number)
            queue.channel.get_event()
            queue.poll()

        assert library.calls["ibv_ack_cq_events"] == 1


@pytest.mark.parametrize(
    ("verb", "use"),
    [
        ("ibv_poll_cq", lambda pair: pair.send_cq.poll()),
        ("ibv_req_notify_cq", lambda pair: pair.send_cq.request_notification()),
    ],
)
def test_failing_call_names_itself_and_the_device(library: FakeLibrary, verb: str, use: object) -> None:
    with list_devices(library)[0].open() as context:
        pair = flushed_pair(context)
        library.fail(verb, errno.EIO)

        with pytest.raises(VerbsError, match=rf"{verb}\(mlx5_0\) failed") as caught:
            use(pair)  # type: ignore[operator]
    assert (caught.value.verb, caught.value.device) == (verb, "mlx5_0")


def test_queue_that_the_device_refuses_tells_its_limits(library: FakeLibrary) -> None:
    with list_devices(library)[0].open() as context:
        library.fail("ibv_create_cq", errno.ENOMEM)

        with pytest.raises(VerbsError, match=rf"{context.limits.max_cqe} a queue") as caught:
            context.create_cq(16)
    assert caught.value.values["cqe"] == 16


def test_a_queue_for_which_there_is_no_memory_names_the_limit_of_locked_memory(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B53: queues are locked as well."""
    monkeypatch.setattr("kvxfer.system.memlock.memlock_nbytes", lambda: 65536)
    with list_devices(library)[0].open() as context:
        queue, domain = context.create_cq(8), context.alloc_pd()
        library.fail("ibv_create_cq", errno.ENOMEM)
        library.fail("ibv_create_qp", errno.ENOMEM)

        with pytest.raises(VerbsError, match="locked-memory limit of this process is 65536 bytes") as caught:
            context.create_cq(8)
        with pytest.raises(VerbsError, match="locked-memory limit of this process is 65536 bytes"):
            domain.create_qp(queue, capabilities=QueuePairCapabilities(max_send_wr=8))

    assert "ulimit -l unlimited" in caught.value.remedy
