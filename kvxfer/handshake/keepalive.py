"""Whether a silent peer is still there: when to ask it, when to give it up. Pure: `now` is an argument."""

from __future__ import annotations

from typing import Literal

__all__ = ["Keepalive"]


class Keepalive:
    """Ask after `interval_s` of silence and again each interval; dead after `timeout_s`."""

    def __init__(self, interval_s: float, timeout_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._heard = now
        self._asked = now

    def received(self, now: float) -> None:
        """Anything came from the peer."""
        self._heard = self._asked = max(now, self._heard)

    def next_deadline(self) -> float:
        """Return when to call `poll` next."""
        return min(self._asked + self._interval_s, self._heard + self._timeout_s)

    def poll(self, now: float) -> None | Literal["ping", "dead"]:
        """Say what is to be done now."""
        if now >= self._heard + self._timeout_s:
            # A process that was itself stopped finds the time gone by before it could ask: ask first, then judge.
            if self._asked == self._heard:
                self._heard = now - self._timeout_s + self._interval_s
                self._asked = now
                return "ping"
            return "dead"
        if now >= self._asked + self._interval_s:
            self._asked = now
            return "ping"
        return None
