"""Submitted transfers: what a number that an asynchronous call returned stands for.

What a submit call has not finished by itself goes on in a thread of `Senders`, whether its status is asked for or not.
Read next: `target.py`, which makes them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kvxfer import TransferBatch

__all__ = ["BatchTicket", "DoneTicket", "FutureTicket", "Senders", "Ticket"]

SENDER_THREADS_MAX = 16
"""Asynchronous transfers of one engine that move at once by themselves; further ones wait for their turn, or move when
their status is asked for."""


class Ticket(ABC):
    """One submitted transfer."""

    @abstractmethod
    def poll(self) -> bool:
        """Move it as far as that does not block; whether it has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Move it to its end; raises what made it fail."""


class DoneTicket(Ticket):
    """A transfer that had ended when it was submitted: nothing was to be done, or it could not be."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


class BatchTicket(Ticket):
    """A batch of the native engine; any number of threads may move it. finish: what is to be done once after its end;
    told whether it went well."""

    def __init__(self, batch: TransferBatch, finish: Callable[[bool], None] | None) -> None:
        self.batch = batch
        self._finish = finish
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def poll(self) -> bool:
        if not self.batch.poll():
            return False
        self._end()
        return True

    def wait(self) -> None:
        try:
            self.batch.wait()
        finally:
            if self.batch.is_done:  # else it was interrupted while another thread moves it
                self._end()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    finish(self.batch.exception is None)
                except Exception as error:
                    self._error = error


class FutureTicket(Ticket):
    """A transfer to a real Mooncake, moved by a thread of its own."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def poll(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class Senders:
    """The threads that move asynchronous transfers, from the first one that needs them on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Have a thread do it. Raises RuntimeError once they are closed."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(SENDER_THREADS_MAX, thread_name_prefix="kvxfer-sender")
            return self._pool.submit(work)

    def close(self) -> None:
        """Take no more; those that run end by their deadline, or because their peer was closed."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
