"""When connections to a peer are made and dropped: the first one, more for large batches, new ones for broken ones.

A thread of its own does it, which lives as long as there is something to do: the kernel may take seconds for one step,
and neither a batch on another rail nor a caller that cancels may wait for that. One connection is made at a time, best
rail first; a rail that failed rests for a while, so that nothing is tried in a tight loop.

A connection that broke is first dropped by the peer as well, for a packet of it that is still on its way could write
over what came later: `undropped` has those for which the peer has not said so yet.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvxfer.errors import KvxferError, PeerRefusedError, TransportUnavailableError

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.transports.base import PeerLink
    from kvxfer.transports.rdma_queue import SendQueue
    from kvxfer.transports.rdma_rail import Rail

__all__ = ["Connect", "Mender"]

Connect = Callable[["Rail", "PeerLink", float], "SendQueue"]

MORE_S = 1.0
"""How long a rail more may take: what waits for it could begin without."""
HANG_UP_S = 1.0
"""How long the peer has to say that it has dropped its end; a live one answers within milliseconds."""
TICK_S = 0.05


class Mender:
    """The connections of one endpoint. `changed` is the endpoint's lock: it is held for every call, if not said
    otherwise, and notified after every change.

    connect: connects the queue pair of one rail, before a deadline (monotonic seconds). is_needed: whether batches wait
    for a connection. on_connected: takes a new one into use.
    """

    def __init__(
        self,
        rails: Sequence[Rail],
        link: PeerLink,
        config: EngineConfig,
        changed: threading.Condition,
        *,
        connect: Connect,
        is_needed: Callable[[], bool],
        on_connected: Callable[[Rail, SendQueue], None],
    ) -> None:
        self._rails = rails
        self._link = link
        self._config = config
        self._changed = changed
        self._connect = connect
        self._is_needed = is_needed
        self._on_connected = on_connected
        self.undropped: set[int] = set()
        self._wants_more = False
        self._is_running = False
        self._closed: KvxferError | None = None

    def establish(self, deadline: float) -> None:
        """Make the first connection, in the caller's thread; takes the lock by itself.

        Where the network did not answer, the rails are tried again until `deadline`: at start-up that is a matter of
        seconds. Spare rails have one try. Raises TransportUnavailableError with all tries, or with the word of a
        peer that refused what it was asked.
        """
        try:
            self._establish(deadline)
        except PeerRefusedError as error:  # what it refuses of rdma it need not refuse of another transport
            raise TransportUnavailableError(
                f"no RDMA connection to {self._link.label}: {error.message}",
                remedy=error.remedy,
                peer=self._link.label,
                reasons={"rdma": error.message},
            ) from error

    def _establish(self, deadline: float) -> None:
        with self._changed:
            if self._closed is not None:
                raise self._closed
            if self._is_running or any(rail.is_connected for rail in self._rails):
                return
            self._is_running = True
        rails = list(self._rails)
        failures: list[TransportUnavailableError] = []
        try:
            while True:
                failures_before = len(failures)
                for rail in rails:
                    error = self._make(rail, deadline)
                    if error is None:
                        return
                    failures.append(error)
                    if time.monotonic() >= deadline - TICK_S:
                        break
                rails = [rail for rail in rails if not rail.is_spare] or rails
                pause_s = max(0.0, min(deadline, *(rail.paused_until for rail in rails)) - time.monotonic())
                is_silent = any(_is_silence(error) for error in failures[failures_before:])
                with self._changed:
                    if is_silent and pause_s > 0.0:
                        self._changed.wait_for(lambda: self._closed is not None, pause_s)
                    if self._closed is not None:
                        raise self._closed
                    # A round without time would only hide what the last one found out.
                    if not is_silent or time.monotonic() >= deadline - TICK_S:
                        raise self._failure(failures)
        finally:
            with self._changed:
                self._is_running = False
                self._changed.notify_all()

    def connect_more(self) -> bool:
        """Have every rail that is no spare connected; whether one that never failed is still to come."""
        missing = [rail for rail in self._rails if not rail.is_spare and rail.may_connect]
        if missing:
            self._wants_more = True
            self.start()
        return any(not rail.trouble for rail in missing)

    def start(self) -> None:
        """See to it that what is to be done is done."""
        if not self._is_running and self._closed is None:
            threading.Thread(target=self._run, name="kvxfer-mender", daemon=True).start()
            self._is_running = True  # it begins with taking the lock, which is held here

    def close(self, error: KvxferError) -> None:
        """Make no more connections; one that is being made is closed as soon as it is there."""
        self._closed = error

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether nothing touches a device any more; takes the lock by itself."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, timeout_s)

    def failure(self) -> TransportUnavailableError:
        """Why there is no connection."""
        troubles = {rail.label: rail.trouble for rail in self._rails if rail.trouble}
        return TransportUnavailableError(
            f"no RDMA connection to {self._link.label} within {self._config.connect_timeout_s:g} s: "
            + (" ".join(troubles.values()) or "the peer did not answer in time."),
            remedy="`kvxfer doctor` on both ends says more; connect_timeout_s (KVXFER_CONNECT_TIMEOUT_S) is the limit.",
            peer=self._link.label,
            reasons=troubles,
            attempts=tuple(attempt for rail in self._rails for attempt in rail.attempts),
        )

    # The thread.

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException:  # a bug: the next who waits starts another thread
            with self._changed:
                self._stop()
            raise

    def _step(self) -> bool:
        """Do one thing; False where there is nothing left. Takes the lock by itself."""
        with self._changed:
            if self._closed is not None:
                return self._stop()
            stale = sorted(self.undropped)
            rail = None if stale else self._next_rail()
            if not stale and rail is None:
                if not self._is_needed():
                    return self._stop()
                self._changed.wait(TICK_S)  # all rails rest
                return True
            is_needed = not any(one.is_connected for one in self._rails)
        if rail is not None:
            with contextlib.suppress(KvxferError):  # closed meanwhile: the next step sees it
                self._make(rail, time.monotonic() + (self._config.connect_timeout_s if is_needed else MORE_S))
            return True
        for number in stale:
            self.hang_up(number, time.monotonic() + HANG_UP_S)
        with self._changed:
            if self.undropped and self._closed is None:
                self._changed.wait(TICK_S)  # a peer that cannot be asked: its session is about to end
        return True

    def _stop(self) -> bool:
        self._is_running = False  # under the same lock as the look: who finds more to do starts another thread
        self._changed.notify_all()
        return False

    def _next_rail(self) -> Rail | None:
        if any(rail.is_connected for rail in self._rails):
            if self._wants_more:
                for rail in self._rails:
                    if not rail.is_spare and rail.may_connect:
                        return rail
            self._wants_more = False
            return None
        if not self._is_needed():
            return None
        now = time.monotonic()
        ready = [rail for rail in self._rails if rail.queue is None and rail.paused_until <= now]
        return min(ready, key=lambda rail: (rail.nic.is_down, rail.paused_until, rail.order), default=None)

    def hang_up(self, number: int, deadline: float) -> None:
        """Have the peer drop a connection; takes the lock by itself."""
        if self._link.hang_up("rdma", number, deadline):
            with self._changed:
                self.undropped.discard(number)
                self._changed.notify_all()

    def _make(self, rail: Rail, deadline: float) -> TransportUnavailableError | None:
        """Connect a rail; why not, where that fails. Takes the lock by itself. Raises why all is over."""
        before = rail.number
        try:
            queue = self._connect(rail, self._link, deadline)
        except KvxferError as exc:
            error = exc if isinstance(exc, TransportUnavailableError) else _as_unavailable(rail, exc)
            with self._changed:
                if self._closed is not None:
                    raise self._closed from exc
                rail.note_failure(error, is_of_path=True)
                self._changed.notify_all()
            return error
        with self._changed:
            if self._closed is not None:
                queue.close()
                raise self._closed
            self.undropped.discard(before)  # the peer dropped it before it made the new one
            self._on_connected(rail, queue)
            self._changed.notify_all()
        return None

    def _failure(self, failures: Sequence[TransportUnavailableError]) -> TransportUnavailableError:
        told = " ".join(rail.trouble for rail in self._rails if rail.trouble)  # the last of each: rounds repeat
        return TransportUnavailableError(
            f"no RDMA connection to {self._link.label}: {told}",
            remedy=failures[0].remedy,
            peer=self._link.label,
            reasons={rail.label: rail.trouble for rail in self._rails if rail.trouble},
            attempts=tuple(attempt for error in failures for attempt in error.values.get("attempts", ())),
            errno=failures[0].values.get("errno", 0),
            step=failures[0].values.get("step", ""),
        )


def _is_silence(error: TransportUnavailableError) -> bool:
    """Whether the network did not answer, which may pass."""
    return any(attempt.errno == errno.ETIMEDOUT for attempt in error.values.get("attempts", ()))


def _as_unavailable(rail: Rail, error: KvxferError) -> TransportUnavailableError:
    return TransportUnavailableError(
        f"{rail.label}: {error.message}", remedy=error.remedy, reasons={"rdma": error.message}
    )
