"""One rail: a port of ours and the port of the peer it talks to; and how a queue pair over it is connected.

This side decides everything: which GIDs, which attributes, and what is lowered when a device of either end refuses
(`rdma_ladder.py`). Each try has a fresh queue pair here and a request to the peer, which makes its end ready to receive
before it answers; so nothing is posted before the peer can take it. All failed tries are in the error.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvxfer.errors import DeviceUnusableError, KvxferError, TransportUnavailableError, VerbsError
from kvxfer.log import get_logger
from kvxfer.transports.rdma_ladder import Attempt, QueuePairAttributes, descend
from kvxfer.transports.rdma_queue import Fault, Lane, SendQueue
from kvxfer.transports.rdma_wire import ConnectFailure, ConnectReply, ConnectRequest
from kvxfer.verbs.enums import Access, CompletionStatus, LinkLayer, Mtu
from kvxfer.verbs.gid_choice import GidPair, rank_gid_pairs
from kvxfer.verbs.port import build_address_vector
from kvxfer.verbs.port_offer import PortOffer, agree_mtu, agree_read_depth
from kvxfer.verbs.queue_pair import QueuePairCapabilities

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.transports.base import PeerLink
    from kvxfer.transports.rdma_nic import Nic

__all__ = ["Rail", "forget_what_worked", "random_psn"]

RESOLVE_TRIES_MAX = 10
RESOLVE_PAUSE_S = 0.1
"""ETIMEDOUT in RTR: the kernel found no neighbour, which at start-up is often a matter of a second. Each pause is one
step longer than the one before, as NCCL does it."""
GID_PAIRS_MAX = 4
"""Pairs of GIDs that are tried on one rail before the next."""
PAUSE_S, PAUSE_MAX_S = 0.1, 5.0
"""How long a rail rests after it broke: doubled each time until it has carried something."""

SPEED_NBYTES = 256 << 10
"""A lane shorter than this tells more of latency than of speed."""

log = get_logger(__name__)

_worked: dict[tuple[str, str], QueuePairAttributes] = {}
"""What the ladder ended with, for each two kinds of device (vendor, part, firmware): where the next connection
begins."""


class Rail:
    """A port of ours with one of the peer's. Its state is guarded by the endpoint's lock."""

    def __init__(
        self,
        nic: Nic,
        remote: PortOffer,
        remote_kind: str,
        config: EngineConfig,
        *,
        order: int,
        gids: GidPair | None,
        is_spare: bool = False,
    ) -> None:
        self.nic = nic
        self.remote = remote
        self.remote_name = f"{remote.device}:{remote.port}"
        self.order = order
        self.label = f"{nic.name} to {self.remote_name}"
        self.queue: SendQueue | None = None
        self.waiting: deque[Lane] = deque()
        self.number = 0
        """The peer's number of the connection; 0 before the first."""
        self.is_spare = is_spare
        """Whether it is for the case that another one breaks: its ports are on other rails already."""
        self.rate = 0.0
        """Bytes a second that it carried lately; 0.0 until it has. Large batches are shared out by it."""
        self.paused_until = 0.0
        self.trouble = ""
        """Why it last failed."""
        self.attempts: tuple[Attempt, ...] = ()
        self.attributes: QueuePairAttributes | None = None
        self.gids = gids
        self._config = config
        self._remote_kind = remote_kind
        self._pause_s = PAUSE_S

    @property
    def is_connected(self) -> bool:
        """Whether it has a queue that can be posted to."""
        return self.queue is not None and self.queue.fault is None

    @property
    def is_down(self) -> bool:
        """Whether our port is known to be down."""
        return self.nic.is_down

    @property
    def message_nbytes_max(self) -> int:
        """The longest message that both ports take."""
        return min(self.nic.port.max_msg_sz, self.remote.message_nbytes_max)

    @property
    def nbytes_waiting(self) -> int:
        """Bytes of batches that are on it and not done."""
        lanes = list(self.waiting) + (self.queue.lanes() if self.queue is not None else [])
        return sum(lane.nbytes_left for lane in {id(lane): lane for lane in lanes}.values())

    @property
    def may_connect(self) -> bool:
        """Whether it is not connected, and it is time to try."""
        return self.queue is None and not self.nic.is_down and self.paused_until <= time.monotonic()

    def note_speed(self, lane: Lane) -> None:
        """A lane is done: remember how fast, if it was long enough to tell."""
        seconds, nbytes = lane.ended - lane.begun, int(lane.ends[-1])
        if nbytes >= SPEED_NBYTES and seconds > 0.0:
            self.rate = nbytes / seconds if self.rate == 0.0 else 0.7 * self.rate + 0.3 * nbytes / seconds
        self.nic.nbytes_sent += nbytes

    def down_fault(self) -> Fault:
        """The fault of a queue whose port went down."""
        return Fault(CompletionStatus.LOC_QP_OP_ERR, 0)

    def note_failure(self, error: KvxferError, *, is_of_path: bool) -> None:
        """It broke; one that is the path's fault rests a while."""
        self.trouble = error.message
        if is_of_path:
            self.paused_until = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        log.warning("rdma.rail_broken", rail=self.label, error=error.message, pause_s=self._pause_s)

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
            facts |= {"path MTU": self.attributes.path_mtu, "timeout": self.attributes.timeout}
            facts |= {"retry count": self.attributes.retry_count}
        return facts

    def describe(self) -> dict[str, Any]:
        """Facts for a person."""
        return {
            "rail": self.label,
            "connected": self.is_connected,
            "gids": str(self.gids) if self.gids else "",
            "attributes": self.attributes.to_json() if self.attributes else {},
            "attempts": [str(attempt) for attempt in self.attempts],
            "trouble": self.trouble,
            "link": str(self.remote.link_layer),
        }

    # Connecting. No lock is held: the endpoint sees to it that one thread at a time does it.

    def connect(self, link: PeerLink, deadline: float) -> SendQueue:
        """Connect a new queue pair, going down the ladder as far as it must, before `deadline` (monotonic seconds).

        Raises TransportUnavailableError with every try; PeerError where the peer is gone.
        """
        attempts: list[Attempt] = []
        last: KvxferError | None = None
        self.nic.refresh()
        for gids in self._gid_pairs():
            attributes = self._first_attributes()
            tries = 0
            while True:
                try:
                    queue = self._try(link, gids, attributes, deadline)
                except _StepFailedError as failed:
                    last = failed.error
                    tries += 1
                    lowered = descend(attributes, failed.step, failed.number)
                    may_resolve = failed.number == errno.ETIMEDOUT and failed.step == "RTR"
                    pause_s = min(RESOLVE_PAUSE_S * tries, max(0.0, deadline - time.monotonic()))
                    if lowered is not None:
                        change = lowered[1]
                    elif may_resolve and tries <= RESOLVE_TRIES_MAX and pause_s > 0.0:
                        change = f"the same after {pause_s:.1f} s"
                    else:
                        change = "given up" if gids is None else f"{gids} given up"
                    attempts.append(
                        Attempt(failed.step, failed.side, failed.number, failed.error.message, attributes, change)
                    )
                    if lowered is not None:
                        attributes = lowered[0]
                    elif change.startswith("the same"):
                        time.sleep(pause_s)
                    else:
                        break
                else:
                    self._note_success(gids, attributes, attempts)
                    return queue
            if time.monotonic() >= deadline:
                break
        raise self._failure(link, last, attempts)

    def _gid_pairs(self) -> list[GidPair | None]:
        pairs = rank_gid_pairs(self.nic.choice.offered, self.remote.gids)
        sound = [pair for pair in pairs if not pair.is_broken] or pairs[:1]
        if not sound and self.remote.link_layer is LinkLayer.INFINIBAND:
            return [None]
        return list(sound[:GID_PAIRS_MAX])

    def _first_attributes(self) -> QueuePairAttributes:
        """The best that both ends say they can do; lower where that is known not to work on such devices."""
        offer, config = self.nic.offer(), self._config
        mtu = agree_mtu(offer.mtu, self.remote.mtu, nbytes_max=config.path_mtu_nbytes_max)
        depth = agree_read_depth(offer.read_depth, self.remote.read_depth).initiator
        limits = self.nic.context.limits
        first = QueuePairAttributes(
            path_mtu=mtu.nbytes,
            read_depth=depth,
            send_depth=min(config.rdma_send_depth, limits.max_qp_wr),
            timeout=config.rdma_timeout,
            retry_count=config.rdma_retry_count,
            hop_limit=config.rdma_hop_limit,
            traffic_class=config.rdma_traffic_class,
            service_level=config.rdma_service_level,
        )
        known = _worked.get((self.nic.kind, self._remote_kind))
        if known is None:
            return first
        return dataclasses.replace(
            first,
            path_mtu=min(first.path_mtu, known.path_mtu),
            read_depth=min(first.read_depth, known.read_depth),
            send_depth=min(first.send_depth, known.send_depth),
            hop_limit=known.hop_limit,
            is_global=known.is_global,
        )

    def _try(
        self, link: PeerLink, gids: GidPair | None, attributes: QueuePairAttributes, deadline: float
    ) -> SendQueue:
        """One try. Raises _StepFailedError for what the ladder may help with."""
        offer = self.nic.offer()
        step = "create"
        channel = completions = queue_pair = None
        try:
            address = build_address_vector(
                offer,
                self.remote,
                gids,
                is_global=attributes.is_global,
                hop_limit=attributes.hop_limit,
                traffic_class=attributes.traffic_class,
                service_level=attributes.service_level,
            )
            context = self.nic.context
            channel = context.create_comp_channel()
            completions = context.create_cq(attributes.send_depth + 1, channel)
            capabilities = QueuePairCapabilities(max_send_wr=attributes.send_depth)
            queue_pair = self.nic.domain.create_qp(completions, capabilities=capabilities)
            step = "INIT"
            queue_pair.to_init(port=self.nic.port.number, pkey_index=self._config.pkey_index, access=Access.NONE)
            psn = random_psn()
            request = ConnectRequest(
                port=self.remote_name,
                offer=dataclasses.replace(offer, gids=() if gids is None else (gids.local,)),
                gid=b"" if gids is None else gids.remote.value,
                qp_num=queue_pair.number,
                psn=psn,
                attributes=attributes,
                replaces=self.number,
            )
            step = "RTR"
            reply = ConnectReply.from_json(link.connect("rdma", request.to_json(), deadline), link.label)
            self.number = reply.number
            queue_pair.to_rtr(
                address=address,
                dest_qp_num=reply.qp_num,
                path_mtu=Mtu.of_nbytes(attributes.path_mtu),
                rq_psn=reply.psn,
                max_dest_rd_atomic=min(1, offer.read_depth.responder),  # the peer reads nothing over this one
                min_rnr_timer=attributes.min_rnr_timer,
            )
            step = "RTS"
            queue_pair.to_rts(
                sq_psn=psn,
                max_rd_atomic=attributes.read_depth,
                timeout=attributes.timeout,
                retry_cnt=attributes.retry_count,
                rnr_retry=attributes.rnr_retry,
            )
            return SendQueue(queue_pair, completions, channel)
        except BaseException as exc:
            for handle in (queue_pair, completions, channel):
                if handle is not None:
                    handle.close()
            if isinstance(exc, ConnectFailure):
                raise _StepFailedError(exc.step, "remote", exc.number, exc.error) from exc
            if isinstance(exc, VerbsError):
                raise _StepFailedError(step, "local", exc.errno or 0, exc) from exc
            if isinstance(exc, DeviceUnusableError):
                raise _StepFailedError("address", "local", 0, exc) from exc
            raise

    def _note_success(
        self, gids: GidPair | None, attributes: QueuePairAttributes, attempts: list[Attempt]
    ) -> None:
        self.gids, self.attributes, self.attempts = gids, attributes, tuple(attempts)
        self.trouble = ""
        self._pause_s, self.paused_until = PAUSE_S, 0.0
        lowered = [attempt for attempt in attempts if " -> " in attempt.change]
        if lowered:
            with _worked_lock:
                _worked[self.nic.kind, self._remote_kind] = attributes
            log.warning("rdma.attribute_lowered", rail=self.label, attempts=[str(attempt) for attempt in attempts])
        log.info("rdma.connected", rail=self.label, gids=str(gids or ""), **attributes.to_json())

    def _failure(
        self, link: PeerLink, last: KvxferError | None, attempts: list[Attempt]
    ) -> TransportUnavailableError:
        told = "; ".join(dict.fromkeys(map(str, attempts)))
        reason = last.message if last is not None else "its GIDs and the peer's do not fit"
        error = TransportUnavailableError(
            f"{self.label}: {reason}" + (f" Tried: {told}." if len(attempts) > 1 else ""),
            remedy=last.remedy if last is not None else "`kvxfer devices` on both hosts shows the GIDs.",
            peer=link.label,
            reasons={"rdma": reason},
            attempts=tuple(attempts),
            errno=attempts[-1].errno if attempts else 0,
            step=attempts[-1].step if attempts else "",
        )
        self.attempts = tuple(attempts)
        self.note_failure(error, is_of_path=True)
        return error


_worked_lock = threading.Lock()


def forget_what_worked() -> None:
    """Begin every ladder at its top again; for tests."""
    with _worked_lock:
        _worked.clear()


def what_worked() -> Mapping[tuple[str, str], QueuePairAttributes]:
    """Return what the ladder ended with, by the kinds of both devices; for the doctor."""
    with _worked_lock:
        return dict(_worked)


def random_psn() -> int:
    """Return a first packet number: random, so that packets of an older connection do not fit."""
    return int.from_bytes(os.urandom(3), "big")


class _StepFailedError(Exception):
    """A step was refused, here or at the peer."""

    def __init__(self, step: str, side: str, number: int, error: KvxferError) -> None:
        super().__init__(error.message)
        self.step = step
        self.side = side
        self.number = number
        self.error = error
