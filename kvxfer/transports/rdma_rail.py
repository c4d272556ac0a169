"""One rail: a port of ours and the port of the peer it talks to; what is on it, how fast it is, why it rests.

Its state is guarded by the endpoint's lock. Read next: `rdma_connect.py`, which gives it a connected queue pair.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvxfer.errors import KvxferError
from kvxfer.log import get_logger
from kvxfer.transports.rdma_ladder import Attempt, QueuePairAttributes
from kvxfer.transports.rdma_lane import Lane
from kvxfer.transports.rdma_queue import Fault, SendQueue
from kvxfer.verbs.enums import CompletionStatus, GidType
from kvxfer.verbs.gid_choice import GidPair
from kvxfer.verbs.port_offer import PortOffer

if TYPE_CHECKING:
    from kvxfer.transports.rdma_nic import Nic
    from kvxfer.verbs.gid_choice import GidChoice

__all__ = ["Rail", "usable_rails"]

PAUSE_S, PAUSE_MAX_S = 0.1, 5.0
"""How long a rail is left alone after it broke: doubled each time until it has carried something."""
REST_MAX_S = 300.0
"""The same where there are others, and nothing came through: each try costs a batch the time that it takes to find
out, so that the rest is longer than all of those before together."""
RATE_NBYTES = 16 << 20
"""So many bytes count as much for the speed of a rail as all before them: the last rows of a batch tell little."""

_GidKey = tuple[bytes, GidType, bytes, GidType]

log = get_logger(__name__)


class Rail:
    """A port of ours with one of the peer's."""

    def __init__(
        self, nic: Nic, remote: PortOffer, remote_kind: str, *, order: int, gids: GidPair | None, is_spare: bool = False
    ) -> None:
        self.nic = nic
        self.remote = remote
        self.remote_kind = remote_kind
        self.remote_name = f"{remote.device}:{remote.port}"
        self.order = order
        self.label = f"{nic.name} to {self.remote_name}"
        self.queue: SendQueue | None = None
        self.waiting: deque[Lane] = deque()
        self.number = 0
        """The number of its newest connection; 0 before the first."""
        self.numa_nodes = (nic.numa_node, remote.numa_node)
        """Of the device here and of the peer's; None where that is not known."""
        self.is_spare = is_spare
        """Whether it is for the case that another one breaks: its ports are on other rails already."""
        self.rate = 0.0
        """Bytes a second that it carried lately; 0.0 until it has. Large batches are shared out by it."""
        self.paused_until = self.rests_until = 0.0
        """When it may be connected again, monotonic seconds: at all, and where other rails stand."""
        self.trouble = ""
        """Why it last failed; empty again when it is connected."""
        self.attempts: tuple[Attempt, ...] = ()
        self.attributes: QueuePairAttributes | None = None
        self.gids = gids
        self._choice: GidChoice | None = None  # as it was when the queue pair was made, or last looked at
        self._silent_gids: dict[_GidKey, None] = {}  # as a list without doubles, the last that was found last
        self._pause_s, self._rest_s = PAUSE_S, 0.0

    @property
    def is_connected(self) -> bool:
        """Whether it has a queue that can be posted to."""
        return self.queue is not None and self.queue.fault is None

    @property
    def has_moved(self) -> bool:
        """Whether the GID that its queue pair was made with is in another row now, or gone: links flap, and addresses
        come back elsewhere."""
        if self.gids is None or self._choice is self.nic.choice:
            return False
        self._choice = self.nic.choice
        now = self.nic.find_candidate(self.gids.local.value, self.gids.local.type)
        return now is None or now.index != self.gids.local.index

    @property
    def message_nbytes_max(self) -> int:
        """The longest message that both ports take."""
        return min(self.nic.port.message_nbytes_max, self.remote.message_nbytes_max)

    @property
    def nbytes_waiting(self) -> int:
        """Bytes of batches that are on it and not done."""
        lanes = list(self.waiting) + (self.queue.lanes() if self.queue is not None else [])
        return sum(lane.nbytes_left for lane in {id(lane): lane for lane in lanes}.values())

    @property
    def may_connect(self) -> bool:
        """Whether it is not connected, and it is time to try although others stand."""
        return self.queue is None and not self.nic.is_down and self.rests_until <= time.monotonic()

    def renew(self, offer: PortOffer) -> bool:
        """Take what the peer's port offers now; False where that is of another port, or no news."""
        is_same_port = (offer.device, offer.port) == (self.remote.device, self.remote.port)
        if not is_same_port or offer.link_layer is not self.remote.link_layer or offer == self.remote:
            return False
        self.remote = offer
        return True

    def prefer_gids(self, pairs: Sequence[GidPair]) -> list[GidPair]:
        """Return pairs of GIDs in the order to try: last, oldest first, those over which a connection stood and carried
        nothing."""
        silent = list(self._silent_gids)
        return sorted(pairs, key=lambda pair: silent.index(_key(pair)) if _key(pair) in self._silent_gids else -1)

    def note_carried(self, queue: SendQueue) -> None:
        """Requests on its queue are done: remember how fast, if that can be told; it needs no long rest."""
        self._pause_s, self._rest_s = PAUSE_S, 0.0
        if self.gids is not None:
            self._silent_gids.pop(_key(self.gids), None)
        nbytes, seconds = queue.take_pace()
        if nbytes and seconds > 0.0:
            weight = nbytes / (nbytes + RATE_NBYTES) if self.rate else 1.0
            self.rate += weight * (nbytes / seconds - self.rate)

    def down_fault(self) -> Fault:
        """The fault of a queue whose port went down, or whose GID has moved."""
        cause = "the local port went down" if self.nic.is_down else "the local GID moved to another row, or is gone"
        return Fault(CompletionStatus.LOC_QP_OP_ERR, 0, cause=cause)

    def note_connected(
        self,
        gids: GidPair | None,
        attributes: QueuePairAttributes,
        attempts: Sequence[Attempt],
        *,
        fences_max: int = 0,
    ) -> None:
        """It has a queue pair with these attributes, after these failed tries."""
        self.gids, self.attributes, self.attempts = gids, attributes, tuple(attempts)
        self._choice = self.nic.choice
        self.trouble = ""
        log.info("rdma.connected", rail=self.label, gids=str(gids or ""), fences_max=fences_max, **attributes.to_json())

    def note_failure(self, error: KvxferError, *, is_of_path: bool) -> None:
        """It broke; one that is the path's fault rests a while."""
        self.trouble = error.message
        rest_s = 0.0
        if is_of_path:
            now = time.monotonic()
            rest_s = max(self._pause_s, self._note_silence(error, now))
            self.paused_until, self.rests_until = now + self._pause_s, now + rest_s
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        log.warning("rdma.rail_broken", rail=self.label, error=error.message, pause_s=rest_s)

    def _note_silence(self, error: KvxferError, now: float) -> float:
        """Remember GIDs between which nothing comes through, though the kernel found a way; return for how many seconds
        the rail should rest therefore, 0.0 where it is something else."""
        queue, gids = self.queue, self.gids
        if queue is None or queue.has_carried or error.values.get("status") != CompletionStatus.RETRY_EXC_ERR.name:
            return 0.0
        if gids is not None:
            self._silent_gids.pop(_key(gids), None)
            self._silent_gids[_key(gids)] = None
        silence_s = now - queue.busy_since
        self._rest_s = min(2 * self._rest_s + silence_s, REST_MAX_S)
        return self._rest_s

    def facts(self) -> dict[str, Any]:
        """What an operator compares between both ends."""
        facts: dict[str, Any] = {"port state": str(self.nic.port.state)}
        if self.gids is not None:
            facts |= {
                "local GID": f"{self.gids.local} in row {self.gids.local.index}",
                "remote GID": str(self.gids.remote),
                "one subnet": "no" if self.gids.rank.is_other_subnet else "yes",
            }
        if self.attributes is not None:
            facts |= {"path MTU": self.attributes.path_mtu, "hop limit": self.attributes.hop_limit}
            facts |= {"timeout": self.attributes.timeout, "retry count": self.attributes.retry_count}
        return facts

    def describe(self) -> dict[str, Any]:
        """Facts for a person."""
        return {
            "rail": self.label,
            "connected": self.is_connected,
            "spare": self.is_spare,
            "gids": str(self.gids) if self.gids else "",
            "local_gid": str(self.gids.local) if self.gids else "",
            "remote_gid": str(self.gids.remote) if self.gids else "",
            "attributes": self.attributes.to_json() if self.attributes else {},
            "fences_max": self.queue.fences.limit if self.queue is not None else 0,
            "attempts": [str(attempt) for attempt in self.attempts],
            "trouble": self.trouble,
            "link": str(self.remote.link_layer),
            "numa_nodes": list(self.numa_nodes),
        }


def _key(pair: GidPair) -> _GidKey:
    return pair.local.value, pair.local.type, pair.remote.value, pair.remote.type


def usable_rails(rails: Iterable[Rail]) -> list[Rail]:
    """Return the connected rails that batches go over: spares only where nothing else stands."""
    standing = [rail for rail in rails if rail.is_connected]
    return [rail for rail in standing if not rail.is_spare] or standing
