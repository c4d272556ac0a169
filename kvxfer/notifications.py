"""Notifications that have come in and are unread, and the peers that they come from.

Owns what `TransferEngine.notifications` waits for: the queue, and which peers have a connection to this engine or had
one lately. Filled by `serving.PeerService` in the loops' threads; moves no bytes and knows no socket.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvxfer.errors import KvxferError, PeerClosedError

__all__ = ["Notification", "NotificationQueue"]

NBYTES_MAX = 256 << 20
"""What unread notifications may hold of memory, whatever their number."""
ENDED_COUNT_MAX = 1024
"""How many peers that have gone are remembered; the one that went first is forgotten first."""


@dataclass(frozen=True)
class Notification:
    """What a peer sent with a batch; it is here only once all bytes of that batch are in place."""

    peer: str
    """The address of the peer's engine."""
    payload: bytes
    generation: str = ""
    """The peer's `engine.generation`: an engine that is started anew has another one, whatever its address. Empty for a
    Mooncake process, whose end is not known here."""


@dataclass
class _Peer:
    """An engine that has, or had, connections to this one."""

    address: str
    generation: str
    connections: set[object] = field(default_factory=set)
    reason: KvxferError | None = None
    ended_at: float = 0.0

    def is_meant(self, peer: str) -> bool:
        return peer in (self.address, self.generation)


class NotificationQueue:
    """The unread notifications, oldest first; all methods may be called from any thread.

    A peer is here while any connection of it is: what it sent over one is still taken when another has ended already.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._changed = threading.Condition()
        self._unread: deque[Notification] = deque()
        self._unread_nbytes = 0
        self._here: dict[str, _Peer] = {}
        self._ended: OrderedDict[str, _Peer] = OrderedDict()
        self._closed = False

    @property
    def unread(self) -> tuple[int, int]:
        """How many are unread, and their bytes."""
        return len(self._unread), self._unread_nbytes

    @property
    def is_full(self) -> bool:
        """Whether `put` would take none."""
        return len(self._unread) >= self._count_max or self._unread_nbytes >= NBYTES_MAX

    def put(self, notification: Notification) -> bool:
        """Queue a notification; False where there is no room for it."""
        with self._changed:
            if self.is_full:
                return False
            self._unread.append(notification)
            self._unread_nbytes += len(notification.payload)
            self._changed.notify_all()
        return True

    def take(self, timeout_s: float, peer: str | None) -> list[Notification]:
        """Return and forget what has come in, of one peer or of all; waits up to `timeout_s` for something, or for the
        end. Raises PeerClosedError if nothing is there, and nothing can come, because that peer has gone."""
        with self._changed:
            if timeout_s > 0.0:
                self._changed.wait_for(lambda: self._is_over(peer), min(timeout_s, threading.TIMEOUT_MAX))
            found = self._pop(peer)
            ended = None if found or peer is None or self._closed else self._find_ended(peer)
        if ended is not None:
            raise _gone(ended) from ended.reason
        return found

    def connected(self, generation: str, address: str, connection: object) -> None:
        """A peer has a connection; `connection` is a key of the caller's for it."""
        with self._changed:
            self._ended.pop(generation, None)
            peer = self._here.setdefault(generation, _Peer(address, generation))
            peer.connections.add(connection)

    def disconnected(self, generation: str, connection: object, reason: KvxferError | None = None) -> None:
        """A connection has ended; `reason` where it is known. With its last one the peer has gone."""
        with self._changed:
            peer = self._here.get(generation)
            if peer is None or connection not in peer.connections:
                return
            peer.connections.discard(connection)
            if (
                reason is not None
            ):  # a copy: the error itself has frames, and gets more, which hold memory that was in use
                peer.reason = copy.copy(reason)
            if not peer.connections:
                del self._here[generation]
                peer.ended_at = time.time()
                self._ended[generation] = peer
                if len(self._ended) > ENDED_COUNT_MAX:
                    self._ended.popitem(last=False)
                self._changed.notify_all()

    def close(self) -> None:
        """End all waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # Inside, under the lock.

    def _is_over(self, peer: str | None) -> bool:
        """Whether there is something to return or to raise."""
        if self._closed:
            return True
        if peer is None:
            return bool(self._unread)
        return any(_is_of(one, peer) for one in self._unread) or self._find_ended(peer) is not None

    def _pop(self, peer: str | None) -> list[Notification]:
        found = [one for one in self._unread if peer is None or _is_of(one, peer)]
        if found:
            self._unread = deque(one for one in self._unread if not (peer is None or _is_of(one, peer)))
            self._unread_nbytes -= sum(len(one.payload) for one in found)
        return found

    def _find_ended(self, peer: str) -> _Peer | None:
        """Return the engine of that name that has gone last; None while one of that name is here or none ever was."""
        if any(one.is_meant(peer) for one in self._here.values()):
            return None
        return next((one for one in reversed(self._ended.values()) if one.is_meant(peer)), None)


def _is_of(notification: Notification, peer: str) -> bool:
    return peer in (notification.peer, notification.generation)


def _gone(peer: _Peer) -> PeerClosedError:
    reason = peer.reason.message if peer.reason is not None else "its connections ended."
    ended = time.strftime("%H:%M:%S", time.localtime(peer.ended_at))
    return PeerClosedError(
        f"{peer.address} (generation {peer.generation}) went away at {ended}, {time.time() - peer.ended_at:.1f} s ago, "
        f"and no notification of it is left: {reason}",
        remedy="What it had announced will not come: let go of what is kept for it. If it opens this engine again, its "
        "notifications come as before.",
        peer=peer.address,
        generation=peer.generation,
        ended_at=peer.ended_at,
        reason=reason,
    )
