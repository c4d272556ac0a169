"""One selector and the one thread that sleeps in it: accepts, handshakes, and the serving side of tcp live here.

A handler is called when its descriptor is ready and when its time has come; it never blocks. A handler that raises is
dropped with its descriptor, and the loop goes on.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvxfer.log import get_logger

__all__ = ["Handler", "Loop"]

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
_TROUBLE = select.EPOLLHUP | select.EPOLLERR
"""Told as readable and writable: whatever the handler tries next finds out what it is."""


_BOTH = READABLE | WRITABLE
EVENTS_MAX = 256


class Handler(Protocol):
    """What the loop calls. `failed` ends the handler: it closes its descriptor."""

    def fileno(self) -> int: ...
    def ready(self, events: int, now: float) -> bool: ...  # whether there was anything to do
    def timer(self, now: float) -> None: ...
    def failed(self, error: BaseException) -> None: ...


class Loop:
    """An epoll(7) with timers and a wake-up, run by one daemon thread from `start` to `close`.

    Not the `selectors` module: its bookkeeping is 3 us of each round, a tenth of a short request over tcp.

    spin_s: how long after the last event the thread looks again before it sleeps; a request that follows closely is
    then answered without a wake-up. 0 for none.
    """

    def __init__(self, name: str, *, spin_s: float = 0.0) -> None:
        self._name = name
        self._spin_s = spin_s
        self._handlers: dict[int, Handler] = {}
        self._epoll = select.epoll()
        try:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self._epoll.close()
            raise
        self._epoll.register(self._wake_fd, READABLE)
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Handler]] = []
        self._timer_count = 0
        self._closing = False
        self._wake_lock = threading.Lock()  # so that no write goes to a descriptor that has a new owner
        self._wake_fd_open = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._log = get_logger(__name__)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether its thread runs, so that what is asked for is done."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this loop's thread."""
        return threading.current_thread() is self._thread

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop's thread; from any thread."""
        self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        """Make the loop look around; from any thread."""
        with self._wake_lock:
            if self._wake_fd_open:
                with contextlib.suppress(BlockingIOError):  # the counter is full: the loop is awake already
                    os.eventfd_write(self._wake_fd, 1)

    def add(self, handler: Handler, events: int = READABLE) -> None:
        """Watch the handler's descriptor; in the loop's thread only."""
        fd = handler.fileno()
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def watch(self, handler: Handler, events: int) -> None:
        """Change what is watched for; in the loop's thread only."""
        self._epoll.modify(handler.fileno(), events)

    def remove(self, handler: Handler) -> None:
        """Stop watching; in the loop's thread only, before the descriptor is closed."""
        fd = handler.fileno()
        if self._handlers.get(fd) is handler:
            del self._handlers[fd]
            with contextlib.suppress(OSError, ValueError):  # ValueError: the loop has ended and closed its epoll
                self._epoll.unregister(fd)

    def call_at(self, when: float, handler: Handler) -> None:
        """Call `handler.timer` at `when` (monotonic seconds); in the loop's thread only. A handler that has been
        closed meanwhile must not mind."""
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, handler))

    def close(self, timeout_s: float) -> bool:
        """End the thread; False if it is still running after `timeout_s`."""
        self._closing = True
        if self._thread.ident is None:  # never started, or it could not be
            self._end()
            return True
        self.wake()
        if self._thread.is_alive() and not self.is_current:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def abandon(self) -> None:
        """Close this process's copies of the descriptors after fork; the thread is the parent's."""
        self._wake_fd_open = False
        self._epoll.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        poll = self._epoll.poll
        spin_until = 0.0
        try:
            while not self._closing:
                now = time.monotonic()
                timeout = -1.0
                if self._calls:
                    timeout = 0.0
                elif now < spin_until:
                    timeout = 0.0
                    os.sched_yield()  # whoever answers may need this very core
                elif self._timers:
                    timeout = max(0.0, self._timers[0][0] - now)
                active = False
                for fd, events in poll(timeout, EVENTS_MAX):
                    handler = self._handlers.get(fd)  # None: the wake-up, or one that another of this round has removed
                    if handler is not None:
                        active |= self._dispatch(handler, events | _BOTH if events & _TROUBLE else events)
                    elif fd == self._wake_fd:
                        os.eventfd_read(fd)
                now = time.monotonic()
                if active:
                    spin_until = now + self._spin_s
                self._run_calls()
                while self._timers and self._timers[0][0] <= now:
                    handler = heapq.heappop(self._timers)[2]
                    try:
                        handler.timer(now)
                    except Exception as error:
                        self._drop(handler, error)
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self._run_calls()  # what was asked for before the end: descriptors to close
        finally:
            with self._wake_lock:
                if self._wake_fd_open:
                    self._wake_fd_open = False
                    self._epoll.close()
                    os.close(self._wake_fd)

    def _run_calls(self) -> None:
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception as error:
                self._log.error("loop.handler_failed", loop=self._name, handler=repr(call), error=repr(error))

    def _dispatch(self, handler: Handler, events: int) -> bool:
        try:
            return handler.ready(events, time.monotonic())
        except Exception as error:
            self._drop(handler, error)
            return True

    def _drop(self, handler: Handler, error: Exception) -> None:
        self._log.error("loop.handler_failed", loop=self._name, handler=type(handler).__name__, error=repr(error))
        try:
            self.remove(handler)
            handler.failed(error)
        except Exception as again:
            self._log.error("loop.handler_failed", loop=self._name, handler=type(handler).__name__, error=repr(again))
