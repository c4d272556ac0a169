"""TransferBatch: the handle of one submitted batch. Whoever waits for it moves it."""

from __future__ import annotations

import math
import numbers
import select
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvxfer.errors import KvxferError, TransferCancelledError, TransferError, TransferTimeoutError, UsageError
from kvxfer.limits import shortages_told
from kvxfer.text import format_count, format_seconds, show
from kvxfer.transports.base import Endpoint, Transfer, is_owned
from kvxfer.types import Opcode

if TYPE_CHECKING:
    from kvxfer.segment import Segment

__all__ = ["TransferBatch", "check_timeout", "wait_all"]

LOOK_S = 0.1
"""How often a thread looks up that waits while another thread moves the batch."""
TURN_S = 0.01
"""How long `wait_all` sleeps before it looks again when no batch can move."""


class TransferBatch:
    """One submitted batch. It moves while somebody waits, polls or awaits it, never behind the caller's back.

    All methods may be called from any thread. `transport` is what carries it; `opcode`, `row_count` and `nbytes` are
    what was asked.
    """

    __slots__ = ("_deadline", "_endpoint", "_limit_s", "_started", "_transfer", "segment")

    def __init__(
        self, segment: Segment, endpoint: Endpoint, transfer: Transfer, started: float, deadline: float
    ) -> None:
        self.segment = segment
        self._endpoint = transfer.endpoint = endpoint
        self._transfer = transfer
        self._started = started
        self._deadline = transfer.deadline = deadline
        self._limit_s = deadline - started

    def _start(self) -> None:
        """Hand the transfer to its endpoint; called once, by the engine."""
        transfer = self._transfer
        with transfer.lock:
            if transfer.finished:  # its region was taken back, or its deadline has passed, since it began
                return
            try:
                self._endpoint.post(transfer)
            except BaseException as exc:
                self._give_up(exc)
                raise

    @property
    def transport(self) -> str:
        """The name of the transport that carries this batch."""
        return self._endpoint.transport

    @property
    def row_count(self) -> int:
        """How many rows were submitted."""
        return self._transfer.row_count

    @property
    def nbytes(self) -> int:
        """The sum of all rows, in bytes."""
        return self._transfer.nbytes_total

    @property
    def nbytes_done(self) -> int:
        """How many bytes are known to be in place."""
        return self._transfer.nbytes_done

    @property
    def is_done(self) -> bool:
        """Whether the batch has ended, well or not. Moves nothing; see `poll`."""
        return self._transfer.finished

    @property
    def exception(self) -> KvxferError | None:
        """Why the batch failed; None while it runs or after it went well."""
        return self._transfer.error

    @property
    def rows_done(self) -> npt.NDArray[np.bool_]:
        """Shape (row_count,): which rows are known to be wholly in place.

        After a failure a row that is False may be in place, in part or not at all; nothing of it changes any more.
        """
        transfer = self._transfer
        done = np.full(transfer.row_count, transfer.finished and transfer.error is None)
        if transfer.error is not None and transfer.slices_left is not None:
            first = np.zeros(1, np.int64) if transfer.first_row is None else transfer.first_row
            left = np.zeros(len(first), bool)
            left[transfer.slices_left] = True
            done = ~np.repeat(left, np.diff(np.append(first, transfer.row_count)))
        return done

    def poll(self) -> bool:
        """Move the batch as far as that does not block; whether it has ended. Never raises the error it ended with."""
        transfer = self._transfer
        try:
            if not transfer.finished and transfer.lock.acquire(blocking=False):
                self._advance(0.0, self._deadline)
                transfer.lock.release()
        except BaseException as exc:
            self._let_go(exc)
            raise
        return transfer.finished

    def wait(self, timeout_s: float | None = None) -> TransferBatch:
        """Move the batch to its end; returns itself.

        timeout_s: counted from now; None keeps the deadline set at submit. When it passes the batch has failed,
        finally: TransferTimeoutError is raised and not one byte more is written.

        Raises the batch's error, at every call; UsageError for a time that is none, before anything else.
        """
        transfer = self._transfer
        limit_s = None if timeout_s is None else check_timeout(timeout_s)
        if not transfer.finished:
            deadline = self._deadline if limit_s is None else time.monotonic() + limit_s
            transfer.deadline = deadline
            if limit_s is not None:
                self._limit_s = limit_s
            try:
                while not transfer.finished:
                    left = deadline - time.monotonic()
                    if transfer.lock.acquire(timeout=min(LOOK_S, left) if left > 0.0 else LOOK_S):
                        self._advance(deadline, deadline)
                        transfer.lock.release()
                    elif left <= 0.0:
                        transfer.stop = transfer.stop or self._timeout_error()
            except BaseException as exc:
                self._let_go(exc)
                raise
        if transfer.error is not None:
            raise transfer.error.with_traceback(None)  # a stored error would grow by these frames at each call
        return self

    def cancel(self) -> None:
        """Give the batch up; when this returns it has ended, and unless it was done before, as cancelled."""
        transfer = self._transfer
        transfer.stop = transfer.stop or TransferCancelledError(
            f"{self} was cancelled with {transfer.nbytes_done} bytes in place.",
            nbytes_done=transfer.nbytes_done,
        )
        with transfer.lock:
            self._advance(0.0, self._deadline)

    def __await__(self) -> Generator[None, None, TransferBatch]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> TransferBatch:
        import asyncio

        try:
            with shortages_told(f"awaiting {self}"):
                moved = asyncio.get_running_loop().run_in_executor(None, self.wait)
            return await moved
        except asyncio.CancelledError:
            transfer = self._transfer
            transfer.stop = transfer.stop or TransferCancelledError(f"{self}: the task that awaited it ended.")
            self.poll()  # ends it here if no thread has taken it up; else that thread does, within a tick
            raise

    def _advance(self, until: float, deadline: float) -> None:
        """Move, then judge: stopped or too late ends the batch. The caller holds the transfer's lock."""
        transfer = self._transfer
        if transfer.finished:
            return
        try:
            if transfer.stop is None:
                self._endpoint.progress(transfer, until)
        except BaseException as exc:
            self._give_up(exc)
            raise
        if not transfer.finished:
            if transfer.stop is not None:
                self._fail(transfer.stop)
            elif time.monotonic() >= deadline:
                self._fail(self._timeout_error())

    def _let_go(self, cause: BaseException) -> None:
        """Ctrl-C anywhere on the way: give the batch up and unlock it, unless another thread moves it."""
        transfer = self._transfer
        if not is_owned(transfer.lock) and not transfer.lock.acquire(blocking=False):
            return
        try:
            self._give_up(cause)
        finally:
            while is_owned(transfer.lock):
                transfer.lock.release()

    def _give_up(self, cause: BaseException) -> None:
        """Ctrl-C, or a bug: either way nothing may go on writing."""
        if not self._transfer.finished:
            self._fail(TransferCancelledError(f"{self} was given up: {cause!r}."))

    def _fail(self, error: KvxferError) -> None:
        self._endpoint.abort(self._transfer, time.monotonic() + LOOK_S)
        self._transfer.finish(error)

    def _timeout_error(self, limit_s: float | None = None) -> TransferError:
        """Return what is told of a batch that took too long. limit_s: the limit that passed, if not the batch's own."""
        transfer = self._transfer
        limit = format_seconds(max(0.0, self._limit_s if limit_s is None else limit_s))
        ended = format_seconds(time.monotonic() - self._started)
        is_moved = transfer.notify is not None and transfer.nbytes_done == transfer.nbytes_total
        return TransferTimeoutError(
            f"{self} did not end in time (limit {limit} s, ended after {ended} s): "
            f"{transfer.nbytes_done} of {transfer.nbytes_total} bytes are known to be in place"
            + ("; the peer has not confirmed the notification." if is_moved else "."),
            remedy="The peer may be stopped or overloaded, or the time too short for so many bytes; the limit is "
            "timeout_s of the call, else transfer_timeout_s (KVXFER_TRANSFER_TIMEOUT_S).",
            peer=self.segment.address,
            transport=self.transport,
            nbytes_done=transfer.nbytes_done,
            nbytes=transfer.nbytes_total,
        )

    def __str__(self) -> str:
        direction = "to" if self._transfer.opcode is Opcode.WRITE else "from"
        return (
            f"{self._transfer.opcode.name} of {format_count(self.row_count, 'row')}, {self.nbytes} bytes, "
            f"{direction} {self.segment.address} over {self.transport}"
        )

    def __repr__(self) -> str:
        state = "running" if not self.is_done else "failed" if self.exception else "done"
        return f"<TransferBatch {self}: {state}>"


def check_timeout(timeout_s: object) -> float:
    """Return a time in seconds of at least 0 as a float, infinite for no limit; raises UsageError for anything else."""
    if isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool):
        try:
            seconds = float(timeout_s)
        except OverflowError:
            seconds = -math.inf if timeout_s < 0 else math.inf
        if seconds >= 0.0:  # no number (nan) is not
            return seconds
    raise UsageError(
        f"timeout_s is {show(timeout_s)}; it must be a number of seconds, at least 0.",
        remedy="Pass seconds, such as 5 or 0.25; where a deadline may have passed, max(0.0, deadline - now).",
        timeout_s=timeout_s,
    )


def wait_all(batches: list[TransferBatch], timeout_s: float | None = None) -> None:
    """Move several batches at once to their end; raises the first failure, after all have ended."""
    for batch in batches:
        if not isinstance(batch, TransferBatch):
            raise UsageError(f"{show(batch)} is no batch.", remedy="Pass what submit_write and submit_read returned.")
    limit_s = None if timeout_s is None else check_timeout(timeout_s)
    deadline = None if limit_s is None else time.monotonic() + limit_s
    try:
        _move_all(list(batches), deadline, limit_s)
    except BaseException as exc:
        for batch in batches:
            batch._let_go(exc)
        raise
    for batch in batches:
        if batch.exception is not None:
            raise batch.exception.with_traceback(None)


def _move_all(running: list[TransferBatch], deadline: float | None, limit_s: float | None) -> None:
    while True:
        moved_before = sum(batch._transfer.nbytes_moved for batch in running)
        running = [batch for batch in running if not batch.poll()]
        if not running:
            break
        if deadline is not None and time.monotonic() >= deadline:
            for batch in running:
                batch._transfer.stop = batch._transfer.stop or batch._timeout_error(limit_s)
            _wait_for_any(running)
        elif sum(batch._transfer.nbytes_moved for batch in running) == moved_before:
            _wait_for_any(running)


def _wait_for_any(batches: list[TransferBatch]) -> None:
    """Sleep until one of the batches can move, for `TURN_S` at most."""
    poll = select.poll()
    for batch in batches:
        if batch._transfer.lock.acquire(blocking=False):
            try:
                wanted = batch._endpoint.waits_for(batch._transfer)
            finally:
                batch._transfer.lock.release()
            if wanted is not None:
                poll.register(*wanted)
    poll.poll(TURN_S * 1e3)
