"""Notifications: after the bytes, exactly once, in order, and never for a batch that failed."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from kvxfer import (
    NotRegisteredError,
    PeerError,
    RemoteAccessError,
    TransferCancelledError,
    TransferEngine,
    TransferError,
    TransferTimeoutError,
    UsageError,
)
from tests.conformance.conftest import Link
from tests.support.peer import Peer, pattern

MIB = 1 << 20


@pytest.mark.parametrize("opcode", ["write", "read"])
@pytest.mark.parametrize("count", [1, 50])
def test_notification_is_seen_once_and_after_the_bytes(link: Link, opcode: str, count: int) -> None:
    here, there = link.here(MIB), link.there(MIB)
    here.array[:] = pattern(MIB, 1)
    offsets = np.random.default_rng(1).permutation(count) * 8192

    getattr(link.engine, opcode)(
        link.segment, here.address + offsets, there.address + offsets, 4096, notify=b"layer 0 is there"
    )

    assert link.peer.call("notifications") == [(link.engine.address, b"layer 0 is there")]
    assert link.peer.call("notifications", 0.02) == []


def test_bytes_are_in_place_when_the_notification_is_seen(link: Link) -> None:
    rounds, nbytes = 30, MIB
    here, there = link.here(nbytes), link.there(nbytes)
    step = 4096
    offsets = np.random.default_rng(2).permutation(nbytes // step) * step
    link.peer.begin(
        "run",
        "bad = []\n"
        "for turn in range(1, rounds + 1):\n"
        "    seen = engine.notifications(10.0)\n"
        "    if [one.payload for one in seen] != [bytes([turn])] or not (arrays[one_id] == turn).all():\n"
        "        bad.append((turn, seen, np.unique(arrays[one_id]).tolist()))\n"
        "    arrays[one_id][0] = 0\n"
        "    flag[0] = turn\n"
        "result = bad",
        {"rounds": rounds, "one_id": there.region_id, "flag": [0]},
    )

    for turn in range(1, rounds + 1):
        here.array[:] = turn
        link.engine.write(
            link.segment, here.address + offsets, there.address + offsets, step, notify=bytes([turn]), timeout_s=10.0
        )
        deadline = time.monotonic() + 10.0
        while turn < rounds:  # the peer zeroes the first byte when it has looked
            link.engine.read(link.segment, here.address, there.address, 1)
            if here.array[0] == 0:
                break
            assert time.monotonic() < deadline

    assert link.peer.finish() == []


def test_notifications_of_one_sender_keep_their_order(link: Link) -> None:
    here, there = link.here(4096), link.there(4096)
    payloads = [str(number).encode() for number in range(200)]

    for payload in payloads:
        link.engine.write(link.segment, here.address, there.address, 64, notify=payload)

    assert [payload for _, payload in link.peer.call("notifications")] == payloads


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)), b"\0" * 65536, b"\xff" * (1 << 20)])
def test_any_bytes_up_to_the_limit(link: Link, payload: bytes) -> None:  # B174
    here, there = link.here(4096), link.there(4096)

    link.engine.write(link.segment, here.address, there.address, 64, notify=payload)

    assert [got for _, got in link.peer.call("notifications")] == [payload]


@pytest.mark.parametrize(
    "payload", ["x", bytearray(b"x"), memoryview(b"x"), 1, b"x" * ((1 << 20) + 1), b"x" * (16 << 20)]
)
def test_what_is_not_bytes_or_too_long_is_refused_before_a_byte_moves(link: Link, payload: Any) -> None:  # B174
    here, there = link.here(4096), link.there(4096)
    here.array[:] = 1

    with pytest.raises(UsageError, match="bytes"):
        link.engine.write(link.segment, here.address, there.address, 64, notify=payload)

    assert not there.array().any()
    assert link.peer.call("notifications") == []


def test_limit_is_a_setting() -> None:
    with Peer(notify_nbytes_max=16) as peer, TransferEngine(notify_nbytes_max=16) as engine:
        there, here = peer.allocate(64), engine.allocate(64)
        segment = engine.open_segment(peer.address)

        engine.write(segment, here.address, there.address, 64, notify=b"x" * 16)
        with pytest.raises(UsageError, match="notify_nbytes_max is 16"):
            engine.write(segment, here.address, there.address, 64, notify=b"x" * 17)

        assert [got for _, got in peer.call("notifications")] == [b"x" * 16]


# Never for a batch that failed.


def test_batch_with_a_bad_row_notifies_nobody(link: Link) -> None:
    here, there = link.here(4096), link.there(4096)

    with pytest.raises(NotRegisteredError):
        link.engine.write(link.segment, [here.address] * 2, [there.address, 4096], 64, notify=b"no")

    assert link.peer.call("notifications", 0.02) == []


def test_batch_that_the_peer_refuses_notifies_nobody() -> None:
    link = Link("tcp")
    try:
        here, there = link.here(4096), link.there(4096)
        link.segment.refresh()
        table = link.segment._transfers.table
        link.peer.run("engine.unregister(regions[one])", one=there.region_id)
        link.segment._transfers.table = table  # as if the news had not arrived yet

        with pytest.raises(RemoteAccessError):
            link.engine.write(link.segment, [here.address] * 2, [there.address] * 2, 64, notify=b"no")

        assert link.peer.call("notifications", 0.02) == []
    finally:
        link.close()


def test_cancelled_batch_notifies_nobody(own_link: Link) -> None:
    link = own_link
    here, there = link.here(4096), link.there(4096)
    batch = link.engine.submit_write(link.segment, here.address, there.address, 64, notify=b"no")

    batch.cancel()

    with pytest.raises(TransferCancelledError):
        batch.wait()
    assert link.peer.call("notifications", 0.05) == []
    link.engine.write(link.segment, here.address, there.address, 64, notify=b"yes")
    assert [got for _, got in link.peer.call("notifications")] == [b"yes"]


def test_batch_that_timed_out_notifies_nobody_even_when_the_peer_comes_back(own_link: Link) -> None:  # B127, B168
    link = own_link
    here, there = link.here(4096), link.there(4096)
    link.engine.write(link.segment, here.address, there.address, 64, notify=b"first")
    here.array[:] = 1

    with link.peer.stopped(), pytest.raises(TransferTimeoutError):
        link.engine.write(link.segment, [here.address] * 2, [there.address, there.address + 100], 64,
                          notify=b"no", timeout_s=0.2)  # fmt: skip

    assert [got for _, got in link.peer.call("notifications", 0.1)] == [b"first"]
    before = there.bytes()
    here.array[:] = 2
    link.engine.write(link.segment, here.address, there.address + 2048, 64, notify=b"yes")
    assert [got for _, got in link.peer.call("notifications", 0.1)] == [b"yes"]
    assert there.bytes(0, 2048) == before[:2048]


def test_receiver_that_was_stopped_finds_what_came_meanwhile() -> None:  # B168
    with Peer() as peer, TransferEngine() as engine:
        there, here = peer.allocate(64), engine.allocate(64)
        segment = engine.open_segment(peer.address)
        batch = engine.submit_write(segment, here.address, there.address, 64, notify=b"late")
        peer.begin("notifications", 0.2)
        time.sleep(0.05)
        with peer.stopped():
            for _ in range(100):
                batch.poll()
            time.sleep(0.4)  # longer than the receiver's own timeout
        batch.wait()

        assert (peer.finish() or peer.call("notifications", 1.0)) == [(engine.address, b"late")]


# The receiver's side.


def test_waiting_receiver_is_woken(link: Link) -> None:
    here, there = link.here(64), link.there(64)
    link.peer.begin("run", "result = [one.payload for one in engine.notifications(600.0)]", {})

    link.engine.write(link.segment, here.address, there.address, 64, notify=b"wake")

    assert link.peer.finish() == [b"wake"]


def test_waiting_receiver_is_woken_by_close() -> None:
    engine = TransferEngine()
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(engine.notifications(30.0)))
    thread.start()
    time.sleep(0.05)

    engine.close()

    thread.join(5.0)
    assert found == [[]]


def test_full_queue_fails_the_sender_and_not_the_receiver() -> None:  # B118: nothing is dropped in silence
    for transport in ("shm", "tcp"):
        settings = {"transports": (transport,)}
        with Peer(notifications_pending_max=2, **settings) as peer, TransferEngine(**settings) as engine:
            there, here = peer.allocate(64), engine.allocate(64)
            segment = engine.open_segment(peer.address)
            for payload in (b"1", b"2"):
                engine.write(segment, here.address, there.address, 64, notify=payload)

            with pytest.raises((TransferError, PeerError)):
                engine.write(segment, here.address, there.address, 64, notify=b"3", timeout_s=1.0)

            assert [got for _, got in peer.call("notifications", 0.05)] == [b"1", b"2"]
            engine.write(segment, here.address, there.address, 64, notify=b"4")
            assert [got for _, got in peer.call("notifications")] == [b"4"]


def test_notifications_from_many_threads_all_arrive(link: Link) -> None:
    here, there = link.here(4096), link.there(4096)
    failed: list[BaseException] = []

    def send(index: int) -> None:
        try:
            for turn in range(25):
                link.engine.write(
                    link.segment,
                    here.address + index * 64,
                    there.address + index * 64,
                    64,
                    notify=b"%d.%d" % (index, turn),
                )
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=send, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    seen = [payload for _, payload in link.peer.call("notifications")]
    assert failed == []
    assert sorted(seen) == sorted(b"%d.%d" % (index, turn) for index in range(8) for turn in range(25))
    for index in range(8):
        own = [payload for payload in seen if payload.startswith(b"%d." % index)]
        assert own == [b"%d.%d" % (index, turn) for turn in range(25)]
