"""The notifications of one endpoint: how the peer is told that the rows of a batch are in place.

The frame over the control connection has the words. A socket's word says nothing of what a device wrote, though: so a
fence goes behind the rows on every queue pair that carried some (`rdma_fences.py`), at the same time, and the frame
names them; the peer takes the notification when it has all. A queue pair that carried rows and broke has none, nor has
one whose peer takes none.
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
    """Begins notifications, and counts them. The endpoint's lock is held for every call.

    undropped: the broken connections that the peer has not dropped yet (`rdma_mender.py`).
    """

    def __init__(self, link: PeerLink, undropped: Collection[int]) -> None:
        self._link = link
        self._undropped = undropped
        self._counts = {"fenced": 0, "unfenced": 0}

    def begin(self, transfer: Transfer) -> bool:
        """Make the notification of a batch whose rows are all in place, and post its fences; False where one has to
        wait for room, or until the peer has dropped what carried rows and broke: that is the next best to a fence. The
        first wait for it sends the frame."""
        work: Work = transfer.work
        if transfer.notify is None or work.delivery is not None:
            return True
        queues: list[SendQueue] = []
        for queue in work.carriers if transfer.opcode is Opcode.WRITE else ():
            if queue.number in self._undropped:
                return False
            if queue.fault is None and queue.fences.limit:
                if not queue.can_fence:
                    return False
                queues.append(queue)
        delivery = work.delivery = self._link.deliver(transfer.notify)
        for queue in queues:
            delivery.fences[queue.number] = queue.post_fence(delivery)
        return True

    def note_delivered(self, transfer: Transfer) -> None:
        """The peer has it."""
        broken = [queue for queue in transfer.work.carriers if queue.fault is not None]
        fences = transfer.work.delivery.fences
        is_fenced = bool(fences) and len(fences) == len(transfer.work.carriers) and not broken
        self._counts["fenced" if is_fenced else "unfenced"] += 1
        if transfer.opcode is Opcode.WRITE and any(queue.fences.limit for queue in broken):
            log.warning("rdma.fence_missed", peer=self._link.label, notify_nbytes=len(transfer.notify or b""))

    def describe(self) -> dict[str, int]:
        """How many the peer has taken, with fences and without."""
        return dict(self._counts)
