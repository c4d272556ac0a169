"""Which port of ours talks to which port of the peer: the rails of an endpoint, those to begin with first.

Pairs that are known not to reach each other (another link layer, no common kind of GID, no route) are never tried; if
none is left the error shows the whole matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvxfer.errors import DeviceUnusableError, TransportUnavailableError
from kvxfer.transports.rdma_near import rail_distance
from kvxfer.transports.rdma_rail import Rail
from kvxfer.verbs.gid_candidate import NetdevState
from kvxfer.verbs.gid_choice import GidPair
from kvxfer.verbs.port import find_router_problem
from kvxfer.verbs.port_offer import PortOffer
from kvxfer.verbs.rails import match_ports, rank_port_pairs
from kvxfer.verbs.routes import find_route

if TYPE_CHECKING:
    from kvxfer.transports.rdma_nic import Nic

__all__ = ["find_route_problem", "pair_rails"]


def pair_rails(
    nics: Sequence[Nic], offers: Sequence[tuple[str, PortOffer]], peer: str, *, numa_node: int | None = None
) -> list[Rail]:
    """Return the rails to a peer, best first; the first ones use each port of ours once.

    offers: kind and offer of each port of the peer. numa_node: the one that this process is bound to, if any: rails
    near to it come first. Raises TransportUnavailableError with the reason for each pair.
    """
    if not offers:
        raise TransportUnavailableError(
            f"{peer} offers no RDMA port that is up.",
            remedy="`kvxfer devices` there shows its ports; other transports go on.",
            peer=peer,
        )
    up = [nic for nic in nics if not nic.is_down]
    local = {nic.name: nic for nic in up}
    kinds = {_name(offer): kind for kind, offer in offers}
    remote = [offer for _, offer in offers]
    mine = [nic.offer() for nic in up]
    find_problem = functools.cache(find_route_problem)
    try:
        matched = match_ports(mine, remote, find_problem)
    except DeviceUnusableError as error:
        conflicts: dict[str, str] = error.values.get("conflicts", {})
        told = "; ".join(f"{pair}: {why}" for pair, why in conflicts.items()) or "no port here is up"
        raise TransportUnavailableError(
            f"no RDMA port here reaches one of {peer}, {error.reason}: {told}.",
            remedy=error.remedy,
            peer=peer,
            reasons=conflicts,
        ) from error
    others = [pair for pair in rank_port_pairs(mine, remote, find_problem) if pair not in matched]
    rails = [
        Rail(
            local[_name(pair.local)],
            pair.remote,
            kinds[_name(pair.remote)],
            order=order,
            gids=pair.gids,
            is_spare=order >= len(matched),
        )
        for order, pair in enumerate([*matched, *others])
    ]
    return _best_first(rails, numa_node)


def find_route_problem(gids: GidPair) -> str:
    """Return why packets cannot get from one GID to the other, where the kernel's tables, or the GIDs, say so.

    Of a GID whose interface is in another network namespace, or not known, ours say nothing.
    """
    local = gids.local
    if local.is_infiniband:
        return find_router_problem(gids)
    if local.state is not NetdevState.UP or not gids.rank.is_other_subnet:
        return ""
    return find_route(local.address, gids.remote.address, interface=local.netdev).problem


def _best_first(rails: list[Rail], numa_node: int | None) -> list[Rail]:
    rails.sort(
        key=lambda rail: (
            rail.gids is not None and rail.gids.rank.is_other_subnet,
            rail.is_spare,
            rail_distance(rail, numa_node, None),
        )
    )
    for order, rail in enumerate(rails):
        rail.order = order
    return rails


def _name(offer: PortOffer) -> str:
    return f"{offer.device}:{offer.port}"
