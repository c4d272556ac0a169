"""One selector and the one thread that sleeps in it: accepts, handshakes, and the serving side of tcp live here.

A handler is called when its descriptor is ready and when its time has come; it never blocks. A handler that raises is
dropped with its descriptor, and the loop goes on.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvxfer.log import get_logger

__all__ = ["Handler", "Loop"]

READABLE = selectors.EVENT_READ
WRITABLE = selectors.EVENT_WRITE


class Handler(Protocol):
    """What the loop calls. `failed` ends the handler: it closes its descriptor."""

    def fileno(self) -> int: ...
    def ready(self, events: int, now: float) -> bool: ...  # whether there was anything to do
    def timer(self, now: float) -> None: ...
    def failed(self, error: BaseException) -> None: ...


class Loop:
    """A selector with timers and a wake-up, run by one daemon thread from `start` to `close`.

    spin_s: how long after the last event the thread looks again before it sleeps; a request that follows closely is
    then answered without a wake-up. 0 for none.
    """

    def __init__(self, name: str, *, spin_s: float = 0.0) -> None:
        self._name = name
        self._spin_s = spin_s
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, READABLE, None)
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
        self._selector.register(handler.fileno(), events, handler)

    def watch(self, handler: Handler, events: int) -> None:
        """Change what is watched for; in the loop's thread only."""
        self._selector.modify(handler.fileno(), events, handler)

    def remove(self, handler: Handler) -> None:
        """Stop watching; in the loop's thread only, before the descriptor is closed."""
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(handler.fileno())

    def call_at(self, when: float, handler: Handler) -> None:
        """Call `handler.timer` at `when` (monotonic seconds); in the loop's thread only. A handler that has been
        closed meanwhile must not mind."""
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, handler))

    def close(self, timeout_s: float) -> bool:
        """End the thread; False if it is still running after `timeout_s`."""
        self._closing = True
        self.wake()
        if self._thread.is_alive() and not self.is_current:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def abandon(self) -> None:
        """Close this process's copies of the descriptors after fork; the thread is the parent's."""
        self._wake_fd_open = False
        self._selector.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        select = self._selector.select
        spin_until = 0.0
        try:
            while not self._closing:
                now = time.monotonic()
                timeout: float | None = None
                if self._calls:
                    timeout = 0.0
                elif now < spin_until:
                    timeout = 0.0
                    os.sched_yield()  # whoever answers may need this very core
                elif self._timers:
                    timeout = max(0.0, self._timers[0][0] - now)
                active = False
                for key, events in select(timeout):
                    if key.data is None:
                        os.eventfd_read(self._wake_fd)
                    else:
                        active |= self._dispatch(key.data, events)
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
            self._run_calls()  # what was asked for before the end: descriptors to close
        finally:
            with self._wake_lock:
                self._wake_fd_open = False
                self._selector.close()
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
        self.remove(handler)
        handler.failed(error)
