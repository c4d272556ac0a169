"""Threads that copy beside the thread that waits for a batch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvxfer.system.held import current_cpu

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["CopyHelpers", "Turn"]


class CopyHelpers:
    """Up to `count` threads; each begins with the first call that finds none idle."""

    def __init__(self, count: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._threads: list[int] = []
        self._executor = ThreadPoolExecutor(
            count,
            thread_name_prefix="kvxfer-copy",
            initializer=lambda: self._threads.append(threading.get_native_id()),
        )

    def submit(self, call: Callable[[], None]) -> Future[None] | None:
        """Have `call` made by a helper; None where the engine is being closed, or there are no more threads. Then the
        call may still be in the queue."""
        self._keep_off_this_cpu()
        with contextlib.suppress(RuntimeError):
            return self._executor.submit(call)
        return None

    def _keep_off_this_cpu(self) -> None:
        """Have helpers run on the CPUs that the caller may run on, without the one where it is.

        Else the kernel often wakes a helper on that one, behind its waker, and moves it when the copy of 4 ms is over:
        the two were then as slow as one (measured on 2 cores).
        """
        cpus = os.sched_getaffinity(0) - {current_cpu()}
        if cpus:
            for thread in self._threads:
                with contextlib.suppress(OSError):  # its CPUs were restricted meanwhile: it stays where it is
                    os.sched_setaffinity(thread, cpus)

    def close(self) -> None:
        """Begin no more calls."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class Turn:
    """When a helper may copy: from its submit until `end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False

    def take(self, copy: Callable[[], None]) -> None:
        """Call `copy`, unless the turn is over."""
        with self._lock:
            if not self._is_over:
                copy()

    def end(self) -> None:
        """Wait for a copy that has begun; none begins any more."""
        with self._lock:
            self._is_over = True
