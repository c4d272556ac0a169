"""The notifications of one endpoint: how the peer is told that the rows of a batch are in place.

The frame over the control connection has the words. A socket's word says nothing of what a device wrote, though: so a
fence goes behind the rows on every queue pair that carried some (`rdma_fences.py`), at the same time, and the frame
names them; the peer takes the notification when it has all. Where a queue pair that carried rows is gone, or the peer
takes no fences, the frame goes alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from kvxfer.log import get_logger
from kvxfer.types import Opcode

if TYPE_CHECKING:
    from kvxfer.transports.base import PeerLink, Transfer
    from kvxfer.transports.rdma_lane import Work
    from kvxfer.transports.rdma_queue import SendQueue

__all__ = ["Notices"]

log = get_logger(__name__)


class Notices:
    """Begins notifications, and counts them. The endpoint's lock is held for every call."""

    def __init__(self, link: PeerLink) -> None:
        self._link = link
        self._counts = {"fenced": 0, "unfenced": 0}

    def begin(self, transfer: Transfer) -> bool:
        """Make the notification of a batch whose rows are all in place, and post its fences; False where one has to
        wait for room. The first wait for it sends the frame."""
        work: Work = transfer.work
        if transfer.notify is None or work.delivery is not None:
            return True
        queues: Collection[SendQueue] = work.carriers
        if transfer.opcode is Opcode.READ:
            queues = ()
        for queue in queues:
            if queue.fault is not None or not queue.fences.limit:
                queues = ()
                break
        for queue in queues:
            if not queue.can_fence:
                return False
        delivery = work.delivery = self._link.deliver(transfer.notify)
        for queue in queues:
            delivery.fences[queue.number] = queue.post_fence(delivery)
        return True

    def note_delivered(self, transfer: Transfer) -> None:
        """The peer has it."""
        broken = [queue for queue in transfer.work.carriers if queue.fault is not None]
        is_fenced = bool(transfer.work.delivery.fences) and not broken
        self._counts["fenced" if is_fenced else "unfenced"] += 1
        if transfer.opcode is Opcode.WRITE and any(queue.fences.limit for queue in broken):
            log.warning("rdma.fence_missed", peer=self._link.label, notify_nbytes=len(transfer.notify or b""))

    def describe(self) -> dict[str, int]:
        """How many the peer has taken, with fences and without."""
        return dict(self._counts)
