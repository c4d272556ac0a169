"""kvxfer.handshake.keepalive on a clock that the test sets."""

from __future__ import annotations

from kvxfer.handshake.keepalive import Keepalive


def test_a_silent_peer_is_asked_each_interval_and_then_dead() -> None:
    keepalive = Keepalive(2.0, 5.0, 100.0)

    said = {when: keepalive.poll(when) for when in (101.9, 102.0, 103.9, 104.0, 104.9, 105.0, 106.0)}

    assert said == {
        101.9: None,
        102.0: "ping",
        103.9: None,
        104.0: "ping",
        104.9: None,
        105.0: "dead",
        106.0: "dead",
    }


def test_anything_received_puts_it_off() -> None:
    keepalive = Keepalive(2.0, 5.0, 100.0)
    keepalive.poll(102.0)

    keepalive.received(104.5)

    assert keepalive.next_deadline() == 106.5
    assert keepalive.poll(106.4) is None
    assert keepalive.poll(106.5) == "ping"
    assert keepalive.poll(109.5) == "dead"


def test_following_next_deadline_never_spins_and_never_misses() -> None:
    keepalive = Keepalive(2.0, 5.0, 0.0)
    heard = []

    while not heard or heard[-1][1] != "dead":
        now = keepalive.next_deadline()
        heard.append((now, keepalive.poll(now)))

    assert heard == [(2.0, "ping"), (4.0, "ping"), (5.0, "dead")]


def test_a_clock_reading_from_before_changes_nothing() -> None:
    keepalive = Keepalive(2.0, 5.0, 100.0)
    keepalive.received(101.0)

    keepalive.received(100.5)

    assert keepalive.next_deadline() == 103.0
