"""When to ask a silent peer for a sign of life, and when to take it for dead. Pure: the caller has the clock."""

from __future__ import annotations

from typing import Literal

__all__ = ["Keepalive"]


class Keepalive:
    """Watches one connection. Anything received counts as a sign of life, not only the answer to a ping.

    Read what has arrived before calling `poll`: after a pause of this process its peers are not dead.
    """

    def __init__(self, interval_s: float, timeout_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._received_at = now
        self._asked_at = now

    def received(self, now: float) -> None:
        """Bytes have come from the peer."""
        self._received_at = max(self._received_at, now)

    def next_deadline(self) -> float:
        """When `poll` has something to say, if nothing is received until then."""
        ask_at = max(self._received_at, self._asked_at) + self._interval_s
        return min(ask_at, self._received_at + self._timeout_s)

    def poll(self, now: float) -> Literal["ping", "dead"] | None:
        """Return "dead" after `timeout_s` of silence, "ping" each `interval_s` of it, else None."""
        if now >= self._received_at + self._timeout_s:
            return "dead"
        if now >= max(self._received_at, self._asked_at) + self._interval_s:
            self._asked_at = now
            return "ping"
        return None
