"""The queue of notifications alone; what engines do with it is in tests/conformance."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest

from kvxfer.errors import PeerClosedError, PeerUnreachableError
from kvxfer.notifications import NotificationQueue


class Held:
    """Something that a frame has in hand."""


def raise_again(error: PeerUnreachableError, held: Held) -> None:
    """As whoever waits for an answer of a peer that has gone."""
    with contextlib.suppress(PeerUnreachableError):
        assert held is not None
        raise error


def test_peers_that_have_gone_are_remembered_with_their_reason_and_nothing_that_was_in_use() -> None:
    queue = NotificationQueue(16)
    held = Held()
    is_alive = weakref.ref(held)
    error = PeerUnreachableError("the peer has gone.")
    queue.connected("generation", "192.0.2.1:7777", 1)
    queue.disconnected("generation", 1, error)
    raise_again(error, held)

    del held, error
    gc.collect()

    assert is_alive() is None
    with pytest.raises(PeerClosedError, match=r"192\.0\.2\.1:7777") as caught:
        queue.take(0.0, "192.0.2.1:7777")
    assert "the peer has gone" in str(caught.value.__cause__)
