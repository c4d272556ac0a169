"""The send queue of one connected queue pair: which slices are on it, in which order, and what has come back.

Work requests are numbered from 1 as they are posted; the number is their wr_id. A queue pair works in order, so one
completion stands for all before it, and the state is two numbers and a short list of spans. Its completion queue is its
own: it holds as many completions as there can be (after an error every request gives one), so that it cannot overrun,
and no peer waits behind another. Not thread-safe: the endpoint's lock is held for every call.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.errors import PostError, VerbsError
from kvxfer.log import get_logger
from kvxfer.transports.rdma_fences import IMMEDIATE_MASK, FenceCredits
from kvxfer.types import Opcode
from kvxfer.verbs.enums import CompletionStatus, QueuePairState, WorkOpcode
from kvxfer.verbs.work_request import WorkRequestBatch

if TYPE_CHECKING:
    from kvxfer.transports.base import Delivery
    from kvxfer.transports.rdma_lane import Lane
    from kvxfer.verbs.completion_queue import CompletionChannel, CompletionQueue
    from kvxfer.verbs.handle import Handle
    from kvxfer.verbs.queue_pair import QueuePair

__all__ = ["Fault", "SendQueue", "close_all"]

SIGNAL_EVERY_MAX = 64
"""UCX's value: a completion costs about as much as posting a request, and slots come back by completions only."""
PACE_NBYTES = 256 << 10
"""Less than this tells more of latency than of speed."""
PACE_S = 1.0
"""How often the speed of a queue is taken that is never idle."""
_WORK = {Opcode.WRITE: WorkOpcode.RDMA_WRITE, Opcode.READ: WorkOpcode.RDMA_READ}

log = get_logger(__name__)


@dataclass(frozen=True)
class Fault:
    """The completion that broke a queue. lane, slice: whose request it was, None where nobody knows.

    cause: the failed call, where it was no completion.
    """

    status: CompletionStatus
    vendor_err: int
    lane: Lane | None = None
    slice: int = 0
    cause: str = ""

    def __str__(self) -> str:
        vendor = f", vendor error {self.vendor_err:#x}" if self.vendor_err else ""
        return f"{self.status.name} ({int(self.status)}{vendor}): {self.cause or self.status.meaning}"


class SendQueue:
    """One queue pair, ready to send, with the slices on it."""

    def __init__(
        self,
        queue_pair: QueuePair,
        completions: CompletionQueue,
        channel: CompletionChannel,
        *,
        number: int = 0,
        fences_max: int = 0,
    ) -> None:
        """number: of the connection, as the peer knows it. fences_max: how many the peer takes that it has not
        answered."""
        self.queue_pair = queue_pair
        self.channel = channel
        self.number = number
        self.fences = FenceCredits(fences_max)
        # Devices grant more than was asked, or less; and each request may give a completion.
        self.depth = max(1, min(queue_pair.capabilities.max_send_wr, completions.cqe))
        self._fence_room = max(1, self.depth >> 3) if fences_max and self.depth > 1 else 0
        """Requests of it that rows leave to fences: a long batch would let no other be told of."""
        self.fault: Fault | None = None
        """Why the queue is broken; nothing is posted to it any more."""
        self._completions = completions
        self._batch = WorkRequestBatch(self.depth)
        self._fence = WorkRequestBatch(1)
        self._signal_every = max(1, min(SIGNAL_EVERY_MAX, self.depth // 2))
        # the number of the last request of each post, whose they are (None: a fence), and how many of its slices were
        # posted then
        self._spans: deque[tuple[int, Lane | None, int]] = deque()
        self._posted = 0
        self._done = 0
        self._seen = 0
        self._signaled = 0  # the newest request that gives a completion
        self._is_armed = False
        self.busy_since = 0.0
        """Since when requests are on it, or their speed was last taken; monotonic seconds."""
        self._busy_nbytes = 0  # that were done since then

    @property
    def outstanding(self) -> int:
        """Requests on the queue."""
        return self._posted - self._done

    @property
    def has_carried(self) -> bool:
        """Whether any request was ever done."""
        return self._done > 0

    def lanes(self) -> list[Lane]:
        """The lanes with slices on the queue."""
        return list({id(lane): lane for _, lane, _ in self._spans if lane is not None}.values())

    def post(self, lane: Lane) -> int:
        """Post as many of the lane's slices as there is room for, if that is worth a call; returns how many.

        Raises PostError where the device refuses a request; those before it are on the queue. `is_stuck` says then
        whether anything will come back that makes room.
        """
        left = lane.count - lane.posted
        room = self.depth - self._fence_room - (self._posted - self._done)
        if room < left and room < self.depth >> 2:
            return 0
        count = min(left, room)
        if count == 0:
            return 0
        at = lane.posted
        end = at + count
        if self._posted == self._done:
            self.busy_since = time.monotonic()
            self._busy_nbytes = 0
        lkey, rkey = lane.lkey, lane.rkey
        lane.transfer.work.carriers.add(self)
        self._batch.fill(
            _WORK[lane.transfer.opcode],
            local_addr=lane.local[at:end],
            lkey=lkey if isinstance(lkey, int) else lkey[at:end],
            remote_addr=lane.remote[at:end],
            rkey=rkey if isinstance(rkey, int) else rkey[at:end],
            nbytes=lane.nbytes[at:end].astype(np.uint32),  # no message is longer: looking again costs more
            wr_id=self._posted + 1,
            signal_every=self._signal_every,
        )
        try:
            self.queue_pair.post_send(self._batch)
        except PostError as error:
            taken = error.posted_count
            if taken >= self._signal_every:
                self._signaled = self._posted + taken - taken % self._signal_every
            self._note_posted(lane, taken)
            raise
        self._note_posted(lane, count)
        self._signaled = self._posted
        return count

    @property
    def can_fence(self) -> bool:
        """Whether a fence may be posted now."""
        return self.fences.has_room and self.outstanding < self.depth

    def post_fence(self, delivery: Delivery) -> int:
        """Post a fence behind all that is on the queue, for this notification; returns its number. A device that
        refuses it breaks the queue, and the peer is told with that."""
        fence = self.fences.take(delivery)
        self._fence.clear()
        self._fence.append_notice(fence & IMMEDIATE_MASK, wr_id=self._posted + 1)
        try:
            self.queue_pair.post_send(self._fence)
        except PostError as error:
            self.break_by(error)
            return fence
        self._posted = self._signaled = self._posted + 1
        self._spans.append((self._posted, None, 0))
        return fence

    @property
    def is_stuck(self) -> bool:
        """Whether no request on it will give a completion while all goes well."""
        return self._signaled <= self._done

    def _note_posted(self, lane: Lane, count: int) -> None:
        if count:
            before = int(lane.ends[lane.posted - 1]) if lane.posted else 0
            self._posted += count
            lane.posted += count
            lane.transfer.nbytes_moved += int(lane.ends[lane.posted - 1]) - before
            self._spans.append((self._posted, lane, lane.posted))

    def poll(self) -> bool:
        """Take what has completed; whether there was anything."""
        try:
            rows = self._completions.poll()
        except VerbsError as error:
            self.break_by(error)
            return True
        return self._take(rows)

    def _take(self, rows: np.ndarray[tuple[int], np.dtype[np.void]]) -> bool:
        count = len(rows)
        if count == 0:
            return False
        status = rows["status"]
        self._seen = int(rows["wr_id"][-1])
        if not status.any():
            self._complete(self._seen)
            return True
        first = int(np.flatnonzero(status)[0])
        if first:
            self._complete(int(rows["wr_id"][first - 1]))
        if self.fault is None:
            self.fault = self._blame(rows, first)
        return True

    def _complete(self, number: int) -> None:
        """All requests up to `number` are done."""
        spans = self._spans
        while spans:
            end, lane, _ = spans[0]
            if end > number:
                if lane is not None:
                    self._busy_nbytes += lane.advance(number - self._done)
                self._done = number
                return
            if lane is not None:
                self._busy_nbytes += lane.advance(end - self._done)
            self._done = end
            spans.popleft()

    def take_pace(self) -> tuple[int, float]:
        """Return how many bytes were done in how many seconds, once it is idle or has been busy for a while; 0 before,
        and where they were too few to tell."""
        seconds = time.monotonic() - self.busy_since
        if self.outstanding and seconds < PACE_S:
            return 0, 0.0
        nbytes, self._busy_nbytes = self._busy_nbytes, 0
        self.busy_since += seconds
        return nbytes if nbytes >= PACE_NBYTES else 0, seconds

    def _blame(self, rows: np.ndarray[tuple[int], np.dtype[np.void]], first: int) -> Fault:
        number = int(rows["wr_id"][first])
        status = CompletionStatus(int(rows["status"][first]))
        vendor_err = int(rows["vendor_err"][first])
        for end, lane, posted in self._spans:
            if number <= end and lane is not None:
                return Fault(status, vendor_err, lane, posted - 1 - (end - number))
            if number <= end:
                break
        return Fault(status, vendor_err)

    def arm(self) -> None:
        """Have the channel become readable at the next completion; poll once more after it."""
        try:
            while self.channel.get_event() is not None:
                self._is_armed = False
            if not self._is_armed:
                self._completions.request_notification()
                self._is_armed = True
        except VerbsError as error:
            self.break_by(error)

    def break_by(self, error: VerbsError, lane: Lane | None = None) -> None:
        """A call about the queue, or to post the rest of `lane`, failed: it is of no more use."""
        at = 0 if lane is None else lane.posted
        self.fault = self.fault or Fault(CompletionStatus.FATAL_ERR, 0, lane, at, cause=error.message)

    def stop(self) -> None:
        """Move the queue pair to ERR: every request comes back. Nobody else may use the queue any more; needs no lock,
        and takes as long as the device likes."""
        if self.fault is None:
            self.fault = Fault(CompletionStatus.WR_FLUSH_ERR, 0)
        try:
            if self.queue_pair.state is not QueuePairState.ERR:
                self.queue_pair.to_error()
        except VerbsError:
            self._seen = self._posted  # the device is gone; destroying the queue pair ends what it was doing

    def drain(self) -> bool:
        """After `stop`, take what has come back; whether that is every request, or nothing more will come.

        From then on the device touches no memory for any of them. What was done before is counted as done.
        """
        try:
            while self._seen < self._posted:
                if not self._take(self._completions.poll()):
                    return False
        except VerbsError:
            pass  # as in `stop`
        return True

    def close(self) -> None:
        """Destroy the queue pair and what belongs to it: nothing of it is in flight afterwards."""
        close_all(self.queue_pair, self._completions, self.channel)


def close_all(*handles: Handle | None) -> None:
    """Close what there is, one after the other; what a device refuses is left to it."""
    for handle in handles:
        try:
            if handle is not None:
                handle.close()
        except VerbsError as error:
            log.warning("rdma.close_failed", error=error.message)
