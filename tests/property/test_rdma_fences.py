"""Fences and the frames that name them, in any order, over connections that break and are made anew.

Model: a peer takes a fence only with a receive posted, and posts it again when it has polled it; what it polled it
knows. Invariants: no fence comes without a receive; a notification is let through once, never before all its fences
were polled unless a connection of it is gone, and what is kept is bounded by the receives. In the end everything
arrives: then nothing waits, and all room is back. Mutants that this caught: room came back when the frame was sent; a
notification was let through by the first of its fences, or one fence too early; one that waited for a connection that
went was forgotten.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import RemoteProtocolError
from kvxfer.transports.rdma_fences import FenceCredits, FenceLedger, Released

LIMIT = 2
PLACES = 3
STEP = st.one_of(
    st.tuples(st.just("notify"), st.sets(st.integers(0, PLACES - 1), min_size=1)),
    st.tuples(st.sampled_from(["fence", "poll", "break", "drop"]), st.integers(0, PLACES - 1)),
    st.tuples(st.sampled_from(["frame", "answer"]), st.integers(0, 7)),
)


class Notice:
    """A notification; `fences` as its frame names them."""

    def __init__(self) -> None:
        self.fences: dict[Any, int] = {}
        self.is_settled = False


class Connection:
    """One connection: the end that sends, the wire, and the receives of the other end."""

    def __init__(self) -> None:
        self.credits = FenceCredits(LIMIT)
        self.on_wire = 0
        self.receives = LIMIT
        self.unpolled = 0
        self.polled = 0
        self.is_broken = False


class World:
    def __init__(self) -> None:
        self.ledger = FenceLedger()
        self.connections: dict[int, Connection] = {}
        self.places = [self.connect() for _ in range(PLACES)]
        self.frames: list[Notice] = []
        self.answers: list[Notice] = []
        self.held: set[Notice] = set()
        self.taken: Counter[Notice] = Counter()
        self.sent = 0

    def connect(self) -> int:
        key = len(self.connections) + 1
        self.connections[key] = Connection()
        self.ledger.open(key, LIMIT)
        return key

    def take(self, notice: Notice, is_fenced: bool) -> None:
        self.taken[notice] += 1
        self.held.discard(notice)
        self.answers.append(notice)
        seen = [self.connections[key].polled >= number for key, number in notice.fences.items()]
        gone = [not self.is_open(key) for key in notice.fences]
        assert all(seen) if is_fenced else any(gone)

    def is_open(self, key: int) -> bool:
        return key in self.ledger._connections

    def release(self, released: Released) -> None:
        for then, is_fenced in released:
            then(is_fenced)

    def do(self, what: str, value: Any) -> None:
        getattr(self, what + "_")(value)
        assert len(self.held) <= LIMIT * sum(map(self.is_open, self.connections))
        assert all(count == 1 for count in self.taken.values())

    def notify_(self, places: set[int]) -> None:
        keys = [self.places[place] for place in places]
        found = [self.connections[key] for key in keys]
        if any(one.is_broken for one in found) or not all(one.credits.has_room for one in found):
            return
        notice = Notice()
        for key, one in zip(keys, found, strict=True):
            notice.fences[key] = one.credits.take(notice)
            one.on_wire += 1
        self.frames.append(notice)
        self.sent += 1

    def fence_(self, place: int) -> None:
        one = self.connections[self.places[place]]
        if one.on_wire and not one.is_broken:
            assert one.receives, "RNR"
            one.on_wire, one.receives, one.unpolled = one.on_wire - 1, one.receives - 1, one.unpolled + 1

    def poll_(self, place: int) -> None:
        self.poll(self.places[place])

    def poll(self, key: int) -> None:
        one = self.connections[key]
        if self.is_open(key):
            count, one.unpolled = one.unpolled, 0
            one.polled, one.receives = one.polled + count, one.receives + count
            self.release(self.ledger.see(key, count))

    def frame_(self, at: int) -> None:
        if at < len(self.frames):
            notice = self.frames.pop(at)  # threads send in any order
            for key in notice.fences:
                self.poll(key)
            self.held.add(notice)
            self.release(self.ledger.hold(notice.fences, lambda is_fenced: self.take(notice, is_fenced)))

    def answer_(self, at: int) -> None:
        if at < len(self.answers):
            self.answers.pop(at).is_settled = True

    def break_(self, place: int) -> None:
        self.connections[self.places[place]].is_broken = True

    def drop_(self, place: int) -> None:
        """The peer drops a broken connection, which is made anew."""
        key = self.places[place]
        if self.connections[key].is_broken:
            self.release(self.ledger.close(key))
            self.places[place] = self.connect()

    def drain(self) -> None:
        while self.frames:
            self.do("frame", 0)
        for place in range(PLACES):
            self.do("drop", place)
            while self.connections[self.places[place]].on_wire:
                self.do("fence", place)
            self.do("poll", place)
        while self.answers:
            self.do("answer", 0)


@given(st.lists(STEP, max_size=60))
def test_each_notification_is_taken_once_behind_its_fences(steps: list[tuple[str, Any]]) -> None:
    world = World()

    for step in steps:
        world.do(*step)
    world.drain()

    assert len(world.taken) == world.sent
    assert not world.held
    for key in world.places:
        assert not world.ledger.waits(key)
        assert world.connections[key].credits.has_room
        assert world.connections[key].receives == LIMIT


def nothing(is_fenced: bool) -> None: ...


def test_a_fence_that_no_sender_can_have_sent_is_refused_and_keeps_nothing() -> None:
    ledger = FenceLedger()
    ledger.open("a", LIMIT)
    ledger.open("b", LIMIT)

    with pytest.raises(RemoteProtocolError, match=r"fence 3 of a connection of which 0 have come and 2 more"):
        ledger.hold({"b": 1, "a": LIMIT + 1}, nothing)

    assert not ledger.waits("a")
    assert not ledger.waits("b")


def test_a_fence_that_is_named_twice_is_refused() -> None:
    ledger = FenceLedger()
    ledger.open("a", LIMIT)
    ledger.hold({"a": 1}, nothing)

    with pytest.raises(RemoteProtocolError):
        ledger.hold({"a": 1}, nothing)


def test_a_connection_without_receives_has_no_room() -> None:
    assert not FenceCredits().has_room


def test_fences_of_a_connection_that_nobody_knows_are_waited_for_by_nobody() -> None:
    assert FenceLedger().hold({"gone": 1}, nothing) == [(nothing, False)]
    assert FenceLedger().see("gone", 1) == FenceLedger().close("gone") == []
