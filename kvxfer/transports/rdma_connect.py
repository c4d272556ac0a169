"""How the queue pair of one rail is connected.

This side decides everything: which GIDs, which attributes, and what is lowered when a device of either end refuses
(`rdma_ladder.py`). Each try has a fresh queue pair here and a request to the peer, which makes its end ready to receive
before it answers; so nothing is posted before the peer can take it. All failed tries are in the error, and whatever the
peer may have made for them it is told to drop. Read next: `rdma_mender.py`, which says when, and again after a pause.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING

from kvxfer.errors import (
    DeviceUnusableError,
    KvxferError,
    PeerUnreachableError,
    TransportUnavailableError,
    VerbsError,
)
from kvxfer.log import get_logger
from kvxfer.transports.rdma_ladder import Attempt, Ladder, QueuePairAttributes
from kvxfer.transports.rdma_pairing import find_route_problem
from kvxfer.transports.rdma_queue import SendQueue, close_all
from kvxfer.transports.rdma_wire import ConnectFailure, ConnectReply, ConnectRequest, random_psn
from kvxfer.transports.rdma_worked import lower_to_what_worked, note_what_worked
from kvxfer.verbs.enums import Access, LinkLayer, Mtu
from kvxfer.verbs.gid_choice import GidPair, choose_gid_pair, rank_gid_pairs
from kvxfer.verbs.port import build_address_vector
from kvxfer.verbs.port_offer import agree_mtu, agree_read_depth
from kvxfer.verbs.queue_pair import QueuePairCapabilities
from kvxfer.verbs.rails import GID_PAIRS_ASKED_MAX

if TYPE_CHECKING:
    from kvxfer.transports.base import PeerLink
    from kvxfer.transports.rdma_nic import Nic
    from kvxfer.transports.rdma_rail import Rail
    from kvxfer.verbs.port_offer import PortOffer

__all__ = ["best_attributes", "connect"]

GID_PAIRS_MAX = 4
"""Pairs of GIDs that are tried on one rail before the next."""
OF_GIDS = ("address", "RTR", "RTS")
"""Steps that may go well with another pair of GIDs."""
HANG_UP_S = 0.5
"""How long the peer has to say that it dropped what a failed try may have left there."""

log = get_logger(__name__)

_numbers = itertools.count(1)


def connect(rail: Rail, link: PeerLink, deadline: float) -> SendQueue:
    """Connect a new queue pair, going down the ladder as far as it must, before `deadline` (monotonic seconds).

    Each pair of GIDs is tried once with each rung; who calls tries again where the network may need time.
    Raises TransportUnavailableError with every try; PeerError where the peer is gone. Takes no lock of the endpoint.
    """
    attempts: list[Attempt] = []
    told: KvxferError | None = None
    before = rail.number
    kinds = rail.nic.kind, rail.remote_kind
    try:
        _check_port(rail)
        gid_pairs = _gid_pairs(rail)
        is_renewed = False
        while gid_pairs:
            gids = gid_pairs.pop(0)
            ladder = Ladder(lower_to_what_worked(kinds, best_attributes(rail.nic, rail.remote)))
            failed: _StepFailedError | None = None
            while failed is None or time.monotonic() < deadline:
                attributes = ladder.attributes
                try:
                    queue = _try(rail, link, gids, attributes, deadline)
                except _StepFailedError as error:
                    failed = error
                    change = ladder.descend(failed.step, failed.side, failed.number)
                    text = change or ("given up" if gids is None else f"{gids}: given up")
                    reason = error.error.message
                    attempts.append(Attempt(error.step, error.side, error.number, reason, attributes, text))
                    if not change:
                        break
                else:
                    note_what_worked(kinds, ladder.first, attributes, attempts)
                    if attributes != ladder.first:
                        told_of = [str(attempt) for attempt in attempts]
                        log.warning("rdma.attribute_lowered", rail=rail.label, attempts=told_of)
                    rail.note_connected(gids, attributes, attempts, fences_max=queue.fences.limit)
                    return queue
            assert failed is not None
            if failed.offer is not None and not is_renewed and rail.renew(failed.offer):
                gid_pairs, is_renewed = _gid_pairs(rail), True
                continue
            told = told or failed.error  # of the best pair; the others were a last resort
            if failed.step not in OF_GIDS or time.monotonic() >= deadline:
                break
    except (VerbsError, DeviceUnusableError) as error:
        told = error
    except PeerUnreachableError as error:  # it may be gone: the session finds out, and ends then
        told = told or error  # or the time was over; what was found out before says more
    if rail.number != before:
        link.hang_up("rdma", rail.number, min(deadline, time.monotonic() + HANG_UP_S))
    assert told is not None
    raise _failure(rail, link, told, attempts)


def _check_port(rail: Rail) -> None:
    """Look at the port and its GIDs as they are now."""
    nic = rail.nic
    nic.refresh()
    if nic.is_down:
        raise DeviceUnusableError(
            f"{nic.name} is {nic.port.state}, not ACTIVE.",
            remedy="Bring the link up, or leave the port out (rdma_devices); `kvxfer devices` shows it.",
            device=nic.context.name,
            port=nic.port.number,
            reason=f"{nic.port.state}",
        )


def _gid_pairs(rail: Rail) -> list[GidPair | None]:
    pairs = rank_gid_pairs(rail.nic.choice.offered, rail.remote.gids)
    sound = [pair for pair in pairs if not pair.is_broken][:GID_PAIRS_ASKED_MAX] or pairs[:1]
    if not sound and rail.remote.link_layer is LinkLayer.INFINIBAND:
        return [None]
    if not sound:
        choose_gid_pair(rail.nic.choice.offered, rail.remote.gids, device=rail.nic.name)  # raises, with both lists
    with_route = [pair for pair in sound if not find_route_problem(pair)] or sound
    return list(rail.prefer_gids(with_route)[:GID_PAIRS_MAX])


def best_attributes(nic: Nic, remote: PortOffer) -> QueuePairAttributes:
    """Return the best that a port of ours and one of the peer's say they can do together, within the settings."""
    offer, own = nic.offer(), nic.attributes
    mtu = agree_mtu(offer.mtu, remote.mtu, nbytes_max=own.path_mtu_nbytes_max)
    return QueuePairAttributes(
        path_mtu=mtu.nbytes,
        read_depth=agree_read_depth(offer.read_depth, remote.read_depth).initiator,
        send_depth=own.send_depth,
        timeout=own.timeout,
        retry_count=own.retry_count,
        hop_limit=own.hop_limit,
        traffic_class=own.traffic_class,
        service_level=own.service_level,
        is_global=True if offer.link_layer is LinkLayer.ETHERNET else None,
    )


def _try(
    rail: Rail,
    link: PeerLink,
    gids: GidPair | None,
    attributes: QueuePairAttributes,
    deadline: float,
) -> SendQueue:
    """One try. Raises _StepFailedError for what the ladder, or another pair of GIDs, may help with."""
    nic = rail.nic
    offer = nic.offer()
    step = "address"
    channel = completions = queue_pair = None
    try:
        address = build_address_vector(
            offer,
            rail.remote,
            gids,
            is_global=attributes.is_global,
            hop_limit=attributes.hop_limit,
            traffic_class=attributes.traffic_class,
            service_level=attributes.service_level,
        )
        step = "create"
        channel = nic.context.create_comp_channel()
        completions = nic.context.create_cq(attributes.send_depth, channel)
        queue_pair = nic.domain.create_qp(
            completions, capabilities=QueuePairCapabilities(max_send_wr=attributes.send_depth)
        )
        step = "INIT"
        queue_pair.to_init(port=nic.port.number, pkey_index=nic.partition.index, access=Access.NONE)
        psn = random_psn()
        request = ConnectRequest(
            number=next(_numbers),
            port=rail.remote_name,
            offer=dataclasses.replace(offer, gids=() if gids is None else (gids.local,)),
            gid=b"" if gids is None else gids.remote.value,
            lid=rail.remote.lid,
            qp_num=queue_pair.number,
            psn=psn,
            attributes=attributes,
            replaces=rail.number,
        )
        rail.number = request.number
        step = "RTR"
        reply = ConnectReply.from_json(link.connect("rdma", request.to_json(), deadline), link.label)
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
        fences_max = min(reply.fences, nic.fences_max)
        return SendQueue(queue_pair, completions, channel, number=request.number, fences_max=fences_max)
    except BaseException as exc:
        close_all(queue_pair, completions, channel)
        if isinstance(exc, ConnectFailure):
            raise _StepFailedError(exc.step, "remote", exc.number, exc.error, exc.offer) from exc
        if isinstance(exc, VerbsError):
            raise _StepFailedError(step, "local", exc.errno or 0, exc) from exc
        if isinstance(exc, DeviceUnusableError):
            raise _StepFailedError(step, "local", 0, exc) from exc
        raise


def _failure(rail: Rail, link: PeerLink, error: KvxferError, attempts: list[Attempt]) -> TransportUnavailableError:
    told = "; ".join(dict.fromkeys(map(str, attempts)))
    rail.attempts = tuple(attempts)
    return TransportUnavailableError(
        f"{rail.label}: {error.message}" + (f" Tried: {told}." if told else ""),
        remedy=error.remedy,
        peer=link.label,
        reasons={"rdma": error.message},
        attempts=tuple(attempts),
        errno=attempts[-1].errno if attempts else 0,
        step=attempts[-1].step if attempts else "",
    )


class _StepFailedError(Exception):
    """A step was refused, here or at the peer. offer: what the peer's port offers now, where that was the reason."""

    def __init__(self, step: str, side: str, number: int, error: KvxferError, offer: PortOffer | None = None) -> None:
        super().__init__(error.message)
        self.step = step
        self.side = side
        self.number = number
        self.error = error
        self.offer = offer
