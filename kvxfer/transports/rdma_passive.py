"""The end of a connection that a peer writes to and reads from: a queue pair that sends nothing and takes fences.

It has a receive of zero bytes for each fence that may be on its way, and a completion queue of its own for them, which
holds as many, so that it cannot overrun. Mostly a fence has come when the frame that names it is read, and one poll
finds it; only where it has not is the channel of the port armed, which the control loop watches. So nothing is woken
by a fence alone. What fences mean is decided in `rdma_fences.py`; whose they are, in `rdma_service.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from kvxfer.errors import VerbsError
from kvxfer.log import get_logger
from kvxfer.transports.rdma_fences import IMMEDIATE_MASK
from kvxfer.transports.rdma_queue import close_all
from kvxfer.verbs.queue_pair import QueuePair, QueuePairCapabilities

if TYPE_CHECKING:
    from kvxfer.transports.rdma_nic import Nic
    from kvxfer.verbs.completion_queue import CompletionQueue
    from kvxfer.verbs.device import Context

__all__ = ["FenceChannel", "PassiveEnd"]

log = get_logger(__name__)


class FenceChannel:
    """Handler of the loop: the completion channel of the passive ends on one port.

    on_fence: called with each end that was armed and has a completion, in the loop's thread. on_lost: with each end,
    when the channel can tell nothing more.
    """

    def __init__(
        self, context: Context, on_fence: Callable[[PassiveEnd], None], on_lost: Callable[[PassiveEnd], None]
    ) -> None:
        self._channel = context.create_comp_channel()
        self._on_fence = on_fence
        self._on_lost = on_lost
        self.has_failed = False
        """It tells nothing more: new ends need another channel."""
        self._ends: dict[CompletionQueue, PassiveEnd] = {}
        self._lock = threading.Lock()
        """An event that was read and is not acknowledged keeps its queue from being destroyed, for ever."""

    def open_queue(self, context: Context, depth: int) -> CompletionQueue:
        """Return a new completion queue on the channel."""
        return context.create_cq(depth, self._channel, poll_count=depth)

    def add(self, queue: CompletionQueue, end: PassiveEnd) -> None:
        """Say whose queue it is."""
        with self._lock:
            self._ends[queue] = end

    def close_queue(self, queue: CompletionQueue) -> None:
        """Destroy a queue whose queue pair is destroyed."""
        with self._lock:
            self._ends.pop(queue, None)
            close_all(queue)

    def fileno(self) -> int:
        return self._channel.fd

    def ready(self, events: int, now: float) -> bool:
        ends = []
        with self._lock:
            while (queue := self._channel.get_event()) is not None:
                if queue in self._ends:
                    ends.append(self._ends[queue])
        for end in ends:
            self._on_fence(end)
        return bool(ends)

    def timer(self, now: float) -> None:
        """It has none."""

    def failed(self, error: BaseException) -> None:
        """The device is gone; the loop has logged it."""
        self.has_failed = True
        with self._lock:
            ends = list(self._ends.values())
        for end in ends:
            self._on_lost(end)


class PassiveEnd:
    """A queue pair that answers a peer. All methods may be called from any thread.

    key: what the ledger of fences knows it by.
    """

    def __init__(self, nic: Nic, key: Hashable, open_channel: Callable[[Nic], FenceChannel]) -> None:
        """Make the queue pair, with room for fences unless the settings or the device want none.

        Raises VerbsError where the device makes none without them either.
        """
        self.key = key
        self.fences = nic.fences_max
        """Fences that may be on their way."""
        self._lock = threading.Lock()
        self._channel: FenceChannel | None = None
        self._completions: CompletionQueue | None = None
        self._seen = 0
        if self.fences:
            try:
                self._channel = open_channel(nic)
                self._completions = self._channel.open_queue(nic.context, self.fences)
                self.queue_pair = self._create(nic, self._completions, self.fences)
                self._channel.add(self._completions, self)
                self.fences = min(self.fences, self.queue_pair.capabilities.max_recv_wr, self._completions.cqe)
                return
            except VerbsError as error:
                refusal = error
        self._drop_completions()
        self.queue_pair = self._create(nic, None, 1)
        if self.fences:  # the receives are what the device refused
            self._forgo_fences(nic.name, refusal)

    @staticmethod
    def _create(nic: Nic, completions: CompletionQueue | None, receives: int) -> QueuePair:
        capabilities = QueuePairCapabilities(max_send_wr=1, max_recv_wr=receives)
        return nic.domain.create_qp(nic.passive_queue(), completions, capabilities=capabilities)

    def _forgo_fences(self, nic: str, refusal: VerbsError) -> None:
        log.warning("rdma.fences_refused", nic=nic, error=refusal.message)
        self.fences = 0

    def _drop_completions(self) -> None:
        if self._channel is not None and self._completions is not None:
            self._channel.close_queue(self._completions)
        self._completions = None

    def post_receives(self) -> None:
        """Be ready for fences; the queue pair is in INIT, so that none can come before."""
        try:
            if self.fences:
                self.queue_pair.post_receives(self.fences)
        except VerbsError as error:  # the peer is told, and sends none
            self._forgo_fences(self.queue_pair.context.name, error)

    def poll(self) -> tuple[int, bool]:
        """Take the fences that have come and be ready for as many more; how many, and whether more may come."""
        with self._lock:
            if self._completions is None:
                return 0, False
            try:
                rows = self._completions.poll()
                count = len(rows)
                if not count:
                    return 0, True
                expected = [(self._seen + row) & IMMEDIATE_MASK for row in range(1, count + 1)]
                if any(rows["status"].tolist()) or rows["imm_data"].tolist() != expected:
                    return 0, False  # it is flushed, or the peer does not count as we do
                self._seen += count
                self.queue_pair.post_receives(count)
            except VerbsError:
                return 0, False
            return count, True

    def arm(self) -> bool:
        """Have the loop woken by the next fence, which is to be polled for once more after this; False where it cannot
        be."""
        with self._lock:
            try:
                if self._completions is None:
                    return False
                self._completions.request_notification()
            except VerbsError:
                return False
            return True

    def close(self) -> None:
        """Destroy it: when this returns the device drops what comes in for it."""
        with self._lock:
            close_all(self.queue_pair)
            self._drop_completions()
