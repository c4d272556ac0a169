"""What `serve` says of an event is a sentence, and says who a stranger may be."""

from __future__ import annotations

import pytest

from kvxfer.cli.serve import to_words
from kvxfer.log import EVENTS


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"event": "listener.stranger", "first_bytes": b"GET / HTTP/1.0\r\n".hex()}, "looks like an HTTP client"),
        ({"event": "listener.stranger", "first_bytes": b"hello".hex()}, "its first bytes are b'hello'"),
        ({"event": "listener.silent", "received_nbytes": 0}, "said nothing in time"),
        ({"event": "listener.silent", "received_nbytes": 3}, "sent 3 bytes and then nothing more in time"),
        ({"event": "listener.full", "connections_max": 4}, "connections_max (4)"),
        ({"event": "peer.refused", "reason": "it has no key."}, "was refused: it has no key."),
        ({"event": "peer.connected", "transport": "shm"}, "connected over shm"),
        ({"event": "peer.disconnected", "reason": "goodbye"}, "disconnected"),
        ({"event": "mesh.answered", "ok": 4, "no path": 2}, "4 ok, 2 no path rails"),
        ({"event": "mesh.answered"}, "no rails"),
        ({"event": "peer.new_fact", "peer": "a", "count": 2}, "new_fact: count 2"),
    ],
)
def test_event_is_told_in_a_sentence(event: dict[str, object], told: str) -> None:
    assert told in to_words(event)


@pytest.mark.parametrize("name", [name for name in EVENTS if name.startswith(("peer.", "listener."))])
def test_every_event_that_is_shown_has_a_sentence(name: str) -> None:
    assert not to_words({"event": name}).startswith(name.replace(".", " "))
