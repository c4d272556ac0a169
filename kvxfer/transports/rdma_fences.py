"""Which fences were sent, which have come, and which notifications wait for which: what both ends decide by.

A fence is a zero-byte WRITE_WITH_IMM behind all rows of a batch on one queue pair. The completion that it makes at the
peer is the device's word that the rows before it can be seen there. The fences of a connection are numbered from 1, and
a queue pair works in order: the peer needs to know how many have come, nothing of any single one.

Pure: touches no device, no lock and no clock. Read next: `rdma_notices.py`, which sends, and `rdma_passive.py`, where
fences come in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.errors import RemoteProtocolError

if TYPE_CHECKING:
    from kvxfer.transports.base import Delivery

__all__ = ["IMMEDIATE_MASK", "FenceCredits", "FenceLedger", "Released", "Then"]

IMMEDIATE_MASK = 2**32 - 1
"""An immediate has the low 32 bits of its fence's number."""

Then = Callable[[bool], None]
"""What is to be called once: True when every fence has come, False when one of them cannot come any more."""
Released = list[tuple[Then, bool]]


class FenceCredits:
    """The fences of one queue pair of ours. limit: the receives that the peer keeps posted for them; 0 for none.

    The peer answers a notification after it has posted the receives of its fences anew. So as long as no more than
    `limit` are unanswered, none comes to a queue pair that is not ready for it (RNR).
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.sent = 0
        """The number of the last fence."""
        self._unanswered: deque[Delivery] = deque()

    @property
    def has_room(self) -> bool:
        """Whether one more may be sent."""
        while self._unanswered and self._unanswered[0].is_settled:
            self._unanswered.popleft()
        return len(self._unanswered) < self.limit

    def take(self, delivery: Delivery) -> int:
        """Return the number of the next fence; it counts until the peer has answered `delivery`."""
        self._unanswered.append(delivery)
        self.sent += 1
        return self.sent


@dataclass(eq=False)
class _Held:
    """A notification that waits, and the connections it waits for."""

    then: Then
    missing: set[Hashable]
    is_fenced: bool


@dataclass
class _Incoming:
    """One connection: how many fences have come, how many receives are posted, who waits for which number."""

    limit: int
    seen: int = 0
    waiting: dict[int, _Held] = field(default_factory=dict)


class FenceLedger:
    """The fences that come in over the connections of peers, each of which has a key."""

    def __init__(self) -> None:
        self._connections: dict[Hashable, _Incoming] = {}

    def open(self, key: Hashable, limit: int) -> None:
        """There is a connection with so many receives."""
        self._connections[key] = _Incoming(limit)

    def waits(self, key: Hashable) -> bool:
        """Whether a notification waits for a fence of this connection."""
        found = self._connections.get(key)
        return found is not None and bool(found.waiting)

    def hold(self, fences: Mapping[Hashable, int], then: Then) -> Released:
        """Keep a notification until these fences have come, by number; those of a connection that is gone never do.

        Returns it again where there is nothing to wait for. Raises RemoteProtocolError for fences that no peer has sent
        which keeps to its receives, and for one that another notification waits for: so what is kept is bounded.
        """
        missing: list[tuple[_Incoming, Hashable, int]] = []
        is_fenced = True
        for key, number in fences.items():
            found = self._connections.get(key)
            if found is None:
                is_fenced = False
            elif number > found.seen + found.limit or number in found.waiting:
                raise RemoteProtocolError(
                    f"a notification waits for fence {number} of a connection of which {found.seen} have come and "
                    f"{found.limit} more may be on their way; {len(found.waiting)} of them are waited for already.",
                    fence=number,
                )
            elif number > found.seen:
                missing.append((found, key, number))
        if not missing:
            return [(then, is_fenced)]
        held = _Held(then, {key for _, key, _ in missing}, is_fenced)
        for found, _, number in missing:
            found.waiting[number] = held
        return []

    def see(self, key: Hashable, count: int) -> Released:
        """So many more fences have come; returns the notifications that have waited for the last of theirs."""
        found = self._connections.get(key)
        if found is None:
            return []
        found.seen += count
        come = [number for number in found.waiting if number <= found.seen]
        return _release(key, (found.waiting.pop(number) for number in come))

    def close(self, key: Hashable) -> Released:
        """No fence comes over this connection any more; returns the notifications that wait for nothing else."""
        found = self._connections.pop(key, None)
        waiting = [] if found is None else list(found.waiting.values())
        for held in waiting:
            held.is_fenced = False
        return _release(key, waiting)


def _release(key: Hashable, waiting: Iterable[_Held]) -> Released:
    released: Released = []
    for held in waiting:
        held.missing.discard(key)
        if not held.missing:
            released.append((held.then, held.is_fenced))
    return released
