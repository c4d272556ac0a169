"""Those who wait for completions of one peer: one sleeps on the completion channels, the others on a condition until it
has looked.

Owns the epoll descriptor, which has the channels of all rails, and an eventfd that wakes who sleeps there. Decides
nothing: what there is to post and poll is the endpoint's (`rdma_endpoint.py`).
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.transports.rdma_queue import SendQueue

__all__ = ["Waiters"]


class Waiters:
    """The sleeping of one endpoint. changed: its lock, held for every call and given up while one sleeps."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self.has_sleeper = False
        self.follower_count = 0
        self._is_closed = False

    def fileno(self) -> int:
        """Return the descriptor that becomes readable at a completion, or when it is woken."""
        return self._epoll.fileno()

    def watch(self, queue: SendQueue) -> None:
        """Have the completions of a queue wake who sleeps, and wake it now: there is a queue more to look at."""
        self._epoll.register(queue.channel.fd, select.EPOLLIN)
        self.wake()

    def unwatch(self, queue: SendQueue) -> None:
        """Undo `watch`, before the queue is closed."""
        with contextlib.suppress(OSError, ValueError):  # a forked child may hold a copy of the descriptor
            self._epoll.unregister(queue.channel.fd)

    def wake(self) -> None:
        """Wake who sleeps, or who will next."""
        os.eventfd_write(self._wake_fd, 1)

    def forget_wakes(self) -> None:
        """Begin anew: what woke so far has been looked at."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def follow(self, timeout_s: float) -> None:
        """Wait until the one who sleeps has looked."""
        self.follower_count += 1
        try:
            self._changed.wait(timeout_s)
        finally:
            self.follower_count -= 1

    def sleep(self, timeout_s: float) -> None:
        """Sleep until there is a completion on a queue that was armed."""
        self.has_sleeper = True
        self._changed.release()
        try:
            self._epoll.poll(timeout_s)
        finally:
            self._changed.acquire()
            self.has_sleeper = False
            self._changed.notify_all()
            if self._is_closed:
                self._close_descriptors()

    def close(self) -> None:
        """Wake all; the descriptors are closed when nobody sleeps on them any more."""
        self._is_closed = True
        self._changed.notify_all()
        if self.has_sleeper:
            self.wake()
        else:
            self._close_descriptors()

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors; takes no lock."""
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._epoll.close()
        os.close(self._wake_fd)
