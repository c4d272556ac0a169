"""Who waits for a notification of a peer hears of that peer's end, however it ended, and of nothing else.

The waits have a timeout longer than a test may take: that they end at all is the proof that the peer's end ended them.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import PeerClosedError, Region, TransferEngine, UsageError
from tests.support.peer import Peer, wait_until

FOREVER_S = 1000.0
MIB = 1 << 20


@pytest.fixture(params=["shm", "tcp"])
def receiver(request: pytest.FixtureRequest) -> Iterator[TransferEngine]:
    with TransferEngine(transports=(request.param,), keepalive_interval_s=0.1, keepalive_timeout_s=0.5) as engine:
        yield engine


@pytest.fixture
def kept(receiver: TransferEngine) -> Region:
    """What senders write to."""
    return receiver.allocate(MIB, name="kept")


def sender_of(receiver: TransferEngine, **settings: Any) -> Peer:
    """Start a process that has opened the receiver and sent it one notification."""
    peer = Peer(transports=receiver.transports, **settings)
    peer.run(
        "engine.segment = engine.open_segment(address)\n"
        "engine.row = engine.segment, engine.allocate(64).address, engine.segment.region('kept').address, 64\n"
        "engine.write(*engine.row, notify=b'begun')",
        address=receiver.address,
    )
    return peer


class Wait(threading.Thread):
    """A thread that waits for a peer's next notification."""

    def __init__(self, receiver: TransferEngine, peer: str) -> None:
        super().__init__(daemon=True)
        self._receiver, self._peer = receiver, peer
        self.outcome: list[Any] = []
        self.start()

    def run(self) -> None:
        try:
            self.outcome.append([one.payload for one in self._receiver.notifications(FOREVER_S, peer=self._peer)])
        except PeerClosedError as error:
            self.outcome.append(error)

    def result(self) -> Any:
        self.join(30.0)
        assert self.outcome, "it still waits"
        return self.outcome[0]


def kill(peer: Peer) -> None:
    peer.kill()


def close(peer: Peer) -> None:
    peer.close()


def close_segment(peer: Peer) -> None:
    peer.run("engine.segment.close()")


def stop(peer: Peer) -> None:
    os.kill(peer.pid, signal.SIGSTOP)


# B166
@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (kill, "broke|closed|ended"),
        (close, "closed the session"),
        (close_segment, "closed the session"),
        (stop, "no sign of life"),
    ],
)
@pytest.mark.parametrize("by", ["address", "generation"])
def test_the_end_of_the_peer_ends_the_wait(
    receiver: TransferEngine, kept: Region, end: Callable[[Peer], None], reason: str, by: str
) -> None:
    with sender_of(receiver) as peer, sender_of(receiver) as other:
        generation = peer.run("result = engine.generation")
        (first,) = receiver.notifications(FOREVER_S, peer=peer.address)
        assert (first.peer, first.generation, first.payload) == (peer.address, generation, b"begun")
        wait = Wait(receiver, peer.address if by == "address" else generation)

        end(peer)

        error = wait.result()
        assert isinstance(error, PeerClosedError)
        assert (error.peer, error.values["generation"]) == (peer.address, generation)
        assert peer.address in str(error)
        assert re.search(reason, error.values["reason"])
        with pytest.raises(PeerClosedError):  # and who asks later hears it at once
            receiver.notifications(FOREVER_S, peer=peer.address)
        assert [one.payload for one in receiver.notifications(FOREVER_S, peer=other.address)] == [b"begun"]
        if end is stop:
            peer.kill()


def test_what_the_peer_sent_before_it_died_comes_first(receiver: TransferEngine, kept: Region) -> None:  # B168
    with sender_of(receiver) as peer:
        peer.kill()
        wait_until(lambda: receiver._service.notifications._ended)

        assert [one.payload for one in receiver.notifications(FOREVER_S, peer=peer.address)] == [b"begun"]
        with pytest.raises(PeerClosedError):
            receiver.notifications(peer=peer.address)


@pytest.mark.slow
def test_bytes_still_on_their_way_from_a_dead_peer_come_before_its_end() -> None:  # B168
    """The control connection's end is read before what the data connections still hold in the kernel."""
    with TransferEngine(transports=("tcp",), tcp_service_threads=1) as receiver:
        receiver.register(np.zeros(MIB, np.uint8), name="kept")
        with sender_of(receiver) as peer:
            receiver.notifications(FOREVER_S, peer=peer.address)
            release, holding = threading.Event(), threading.Event()
            (loop,) = receiver._transports.tcp.service._loops  # type: ignore[union-attr]
            loop.call_soon(lambda: (holding.set(), release.wait(30.0)))
            holding.wait(30.0)
            peer.run("batch = engine.submit_write(*engine.row, notify=b'end')\nfor _ in range(100): batch.poll()")
            peer.kill()
            wait_until(lambda: not receiver._service._sessions)
            wait = Wait(receiver, peer.address)

            release.set()

            assert wait.result() == [b"end"]
            with pytest.raises(PeerClosedError):
                receiver.notifications(FOREVER_S, peer=peer.address)


def test_only_that_peers_are_taken_and_the_others_stay_in_order(receiver: TransferEngine, kept: Region) -> None:
    with sender_of(receiver) as peer, sender_of(receiver) as other:
        assert [one.peer for one in receiver.notifications(FOREVER_S, peer=other.address)] == [other.address]
        assert receiver.notifications(peer=other.address) == []
        assert [one.peer for one in receiver.notifications()] == [peer.address]


def test_a_notification_wakes_who_waits_for_its_sender(receiver: TransferEngine, kept: Region) -> None:
    with sender_of(receiver) as peer, sender_of(receiver) as other:
        receiver.notifications(FOREVER_S, peer=peer.address)
        receiver.notifications(FOREVER_S, peer=other.address)
        waits = [Wait(receiver, one.address) for one in (peer, other)]

        for one in (other, peer):
            one.run("engine.write(*engine.row, notify=engine.address.encode())")

        assert [wait.result() for wait in waits] == [[peer.address.encode()], [other.address.encode()]]


@pytest.mark.parametrize("peer", ["127.0.0.1", "foo", "", "0" * 31, "0" * 33, "http://127.0.0.1:1", 5])
def test_what_no_peer_can_be_called_by_is_refused_and_not_waited_for(receiver: TransferEngine, peer: Any) -> None:
    with pytest.raises(UsageError, match=r"neither an address \(host:port\) nor a generation"):
        receiver.notifications(FOREVER_S, peer=peer)


def test_a_peer_that_has_not_come_yet_is_waited_for(receiver: TransferEngine, kept: Region) -> None:
    assert receiver.notifications(0.01, peer="127.0.0.1:1") == []
    with Peer(transports=receiver.transports) as peer:
        wait = Wait(receiver, peer.address)

        peer.run(
            "here = engine.allocate(64); segment = engine.open_segment(address)\n"
            "engine.write(segment, here.address, segment.region('kept').address, 64, notify=b'now')",
            address=receiver.address,
        )

        assert wait.result() == [b"now"]


def test_a_peer_started_anew_at_the_same_address_is_waited_for_by_address_and_not_by_generation(
    receiver: TransferEngine, kept: Region
) -> None:
    with sender_of(receiver) as first:
        old = first.run("result = engine.generation")
        receiver.notifications(FOREVER_S, peer=first.address)
        first.kill()
        with pytest.raises(PeerClosedError):
            receiver.notifications(FOREVER_S, peer=first.address)

        with sender_of(receiver, port=first.port) as second:
            assert second.address == first.address
            found = receiver.notifications(FOREVER_S, peer=second.address)
            assert [one.payload for one in found] == [b"begun"]
            assert receiver.notifications(0.01, peer=second.address) == []
            with pytest.raises(PeerClosedError):
                receiver.notifications(FOREVER_S, peer=old)


def test_a_peer_is_here_while_one_of_its_connections_is(receiver: TransferEngine, kept: Region) -> None:
    with sender_of(receiver) as peer:
        receiver.notifications(FOREVER_S, peer=peer.address)
        peer.run(
            "engine.again = engine.open_segment(address, transports=[*engine.transports, 'rdma'])",
            address=receiver.address,
        )
        assert len(receiver._service._sessions) == 2
        peer.run("engine.segment.close()")
        wait_until(lambda: len(receiver._service._sessions) == 1)

        assert receiver.notifications(0.01, peer=peer.address) == []

        peer.run("engine.again.close()")
        with pytest.raises(PeerClosedError):
            receiver.notifications(FOREVER_S, peer=peer.address)


def test_the_end_of_this_engine_ends_the_wait() -> None:
    engine = TransferEngine()
    wait = Wait(engine, "127.0.0.1:1")

    engine.close()

    assert wait.result() == []


def test_peers_that_have_gone_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.notifications.ENDED_COUNT_MAX", 3)
    with TransferEngine() as receiver:
        gone = []
        for _ in range(5):
            with TransferEngine() as sender:
                sender.open_segment(receiver.address)
                gone.append(sender.generation)
            with pytest.raises(PeerClosedError):
                receiver.notifications(FOREVER_S, peer=gone[-1])

        assert receiver.notifications(0.01, peer=gone[0]) == []
        with pytest.raises(PeerClosedError):
            receiver.notifications(peer=gone[2])


@pytest.mark.parametrize("peer", ["", b"127.0.0.1:1", 7])
def test_what_names_no_peer_is_refused(peer: Any) -> None:
    with TransferEngine() as engine, pytest.raises(UsageError, match=r"engine\.address"):
        engine.notifications(peer=peer)


def test_any_timeout_may_be_given() -> None:
    engine = TransferEngine()
    threading.Timer(0.05, engine.close).start()

    assert engine.notifications(float("inf")) == []
