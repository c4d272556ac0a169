"""Which port talks to which port of the peer.

Pure. Two ports make a pair where they have one kind of link, one partition and GIDs that fit and reach each other; of
the pairs, those in one subnet come first, then those whose devices have one name on both hosts (which is how the ports
of one switch are known where every port has a subnet of its own), then those on one NUMA node, then those in one place
of the lists. No pair is tried that cannot work, and none is the only one: `rank_port_pairs` gives what to go on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvxfer.errors import DeviceUnusableError
from kvxfer.verbs.gid_candidate import GidScope
from kvxfer.verbs.gid_choice import GidPair, rank_gid_pairs
from kvxfer.verbs.port_offer import PortOffer, find_pkey_conflict

__all__ = ["GID_PAIRS_ASKED_MAX", "PortPair", "find_shared_gids", "match_ports", "rank_port_pairs"]


GID_PAIRS_ASKED_MAX = 16
"""Pairs of GIDs of two ports that are asked about; each costs a question to the kernel."""

FindProblem = Callable[[GidPair], str]
"""Why packets do not get from one GID to the other, or "" where nothing is known against it."""


@dataclass(frozen=True)
class PortPair:
    """Two ports that can be connected. gids: the best pair of their GIDs; None on InfiniBand ports without any."""

    local: PortOffer
    remote: PortOffer
    gids: GidPair | None

    def __str__(self) -> str:
        return f"{self.local} to the peer's {self.remote}" + (f", {self.gids}" if self.gids else "")


def rank_port_pairs(
    local: Sequence[PortOffer], remote: Sequence[PortOffer], find_problem: FindProblem = lambda pair: ""
) -> list[PortPair]:
    """Return every pair of ports that could work, best first. find_problem: what the network says of two GIDs."""
    found = []
    for row, ours in enumerate(local):
        for other_row, theirs in enumerate(remote):
            if _find_port_conflict(ours, theirs):
                continue
            gids = next((pair for pair, problem in _judge_gids(ours, theirs, find_problem) if not problem), None)
            if gids is None and (ours.gids or theirs.gids):
                continue
            key = (
                gids is not None and gids.is_broken,
                gids is not None and gids.rank.is_other_subnet,
                ours.device != theirs.device,
                _numa_distance(ours.numa_node, theirs.numa_node),
                abs(row - other_row),
                gids.rank if gids else (),
                max(row, other_row),
                row,
            )
            found.append((key, PortPair(ours, theirs, gids)))
    return [pair for _, pair in sorted(found, key=lambda item: item[0])]


def match_ports(
    local: Sequence[PortOffer], remote: Sequence[PortOffer], find_problem: FindProblem = lambda pair: ""
) -> list[PortPair]:
    """Return a pair for each local port that has any, with the peer's ports shared out evenly: the rails to begin with.

    find_problem: as for `rank_port_pairs`. Raises DeviceUnusableError, with the reason of each pair, where no two ports
    fit.
    """
    left = rank_port_pairs(local, remote, find_problem)
    if not left:
        raise _no_pair(local, remote, find_problem)
    uses: dict[PortOffer, int] = dict.fromkeys(remote, 0)
    matched: list[PortPair] = []
    while left:
        # min() takes the first of equal ones: of the pairs with the least used remote port, the best
        best = min(left, key=lambda pair: uses[pair.remote])
        matched.append(best)
        uses[best.remote] += 1
        left = [pair for pair in left if pair.local != best.local]
    order = {offer: row for row, offer in enumerate(local)}
    return sorted(matched, key=lambda pair: order[pair.local])


def find_conflict(local: PortOffer, remote: PortOffer, find_problem: FindProblem = lambda pair: "") -> str:
    """Return why two ports cannot be connected; "" where nothing is known against it."""
    conflict = _find_port_conflict(local, remote)
    if conflict or not (local.gids or remote.gids):
        return conflict
    problems = [problem for _, problem in _judge_gids(local, remote, find_problem)]
    return "" if "" in problems else next(iter(problems), "no common kind of GID")


def _judge_gids(local: PortOffer, remote: PortOffer, find_problem: FindProblem) -> Iterator[tuple[GidPair, str]]:
    """Yield pairs of GIDs that fit, best first, each with its problem or "": the best one and those that are like it.

    A link-local pair beside a routable one is left out: it always has a route, to whatever is on the link.
    """
    pairs = rank_gid_pairs(local.gids, remote.gids)
    like = [pair for pair in pairs if _kind_of(pair) == _kind_of(pairs[0])]
    return ((pair, find_problem(pair)) for pair in like[:GID_PAIRS_ASKED_MAX])


def _kind_of(pair: GidPair) -> tuple[bool, bool, int]:
    return pair.rank.is_broken, pair.rank.is_old_type, pair.rank.scope


def _find_port_conflict(local: PortOffer, remote: PortOffer) -> str:
    """Return why two ports can never be connected, whatever their GIDs."""
    if local.link_layer is not remote.link_layer:
        return f"{local.link_layer} here, {remote.link_layer} there"
    return find_pkey_conflict(local, remote)


def find_shared_gids(offers: Sequence[PortOffer]) -> list[str]:
    """Return a warning for each GID that several ports offer: a bond over two cards, whose rails are not independent.

    Link-local GIDs are left out: they are unique on a link only.
    """
    holders: dict[bytes, list[PortOffer]] = {}
    names: dict[bytes, str] = {}
    for offer in offers:
        for value in dict.fromkeys(one.value for one in offer.gids if one.scope is GidScope.ROUTABLE):
            holders.setdefault(value, []).append(offer)
            names.setdefault(value, next(str(one.address) for one in offer.gids if one.value == value))
    groups: dict[tuple[PortOffer, ...], list[str]] = {}
    for value, sharing in holders.items():
        if len(sharing) > 1:
            groups.setdefault(tuple(sharing), []).append(names[value])
    return [
        f"{' and '.join(map(str, sharing))} have the same address {', '.join(addresses)}: no independent rails"
        for sharing, addresses in groups.items()
    ]


def _numa_distance(ours: int | None, theirs: int | None) -> int:
    """Return 0 for one node at both ends, 2 for two. What is not known may be either, and leaves pairs that are known
    to be alike to each other."""
    if ours is None or theirs is None:
        return 1
    return 0 if ours == theirs else 2


def _no_pair(local: Sequence[PortOffer], remote: Sequence[PortOffer], find_problem: FindProblem) -> DeviceUnusableError:
    conflicts = {
        f"{ours} to {theirs}": find_conflict(ours, theirs, find_problem) for ours in local for theirs in remote
    }
    layers = {offer.link_layer for offer in local} & {offer.link_layer for offer in remote}
    reason = "no common link layer" if conflicts and not layers else "no two ports fit"
    told = "; ".join(f"{pair}: {why}" for pair, why in conflicts.items()) or "one end offers no port"
    return DeviceUnusableError(
        f"no RDMA port here can talk to one of the peer, {reason}: {told}.",
        remedy="Give the ports addresses in common subnets, or routes; `kvxfer devices` on both hosts shows them."
        if rank_port_pairs(local, remote)
        else "`kvxfer devices` on both hosts shows what they have; other transports go on.",
        device=", ".join(dict.fromkeys(offer.device for offer in local)),
        reason=reason,
        conflicts=conflicts,
    )
