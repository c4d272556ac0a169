"""Choose among GIDs: which row of one port, or which pair of rows of two, and why not the others.

Pure. The order, strongest first; `GidRank` has one field for each:

1. nothing known to fail: the interface is here, up, and has the address (else a row is kept as a last resort)
2. RoCE v2 before v1, which no router forwards and many switches drop
3. an interface that was looked at before one that nobody knows
4. a pair in one subnet
5. routable before link-local, whatever private range it is in
6. IPv4 before IPv6
7. a base interface before a VLAN on top of it
8. the lower row

A pair is as good as its worse half. Both ends rank the same pairs from the same values and come to the same one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvxfer.errors import DeviceUnusableError
from kvxfer.system.interfaces import Interface
from kvxfer.verbs.enums import GidType
from kvxfer.verbs.gid import GidTable
from kvxfer.verbs.gid_candidate import CANDIDATES_MAX, GidCandidate, GidScope, find_candidates

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig

__all__ = [
    "GidChoice",
    "GidPair",
    "GidPreference",
    "GidRank",
    "GidVerdict",
    "choose_gid",
    "choose_gid_pair",
    "rank_gid_pairs",
]

INDEX_MAX = 255
"""ibv_global_route.sgid_index is a byte: later rows cannot be named in an address vector."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class GidRank(NamedTuple):
    """How good a candidate or a pair is; the smaller the better, field by field."""

    is_broken: bool = False
    is_old_type: bool = False
    state: int = 0
    is_other_subnet: bool = False
    scope: int = 0
    is_ipv6: bool = False
    is_vlan: bool = False


@dataclass(frozen=True)
class GidPreference:
    """What the user fixed of the choice.

    index: the row to take; index_source: where that was said, for a message. interface, subnet: rows to prefer; where
    none is there, the others are taken with a warning.
    """

    index: int | None = None
    index_source: str = ""
    interface: str = ""
    subnet: Network | None = None

    @classmethod
    def of(cls, config: EngineConfig, device: str) -> GidPreference:
        """Return what the settings say about a device."""
        index = config.gid_index.of(device) if config.gid_index else None
        return cls(index, config.source_of("gid_index"), config.gid_interface or "", config.gid_subnet)

    def wants(self, candidate: GidCandidate) -> bool:
        """Whether the candidate is one that the user prefers."""
        is_on_interface = not self.interface or candidate.netdev == self.interface
        address = candidate.address
        is_in_subnet = self.subnet is None or (address.version == self.subnet.version and address in self.subnet)
        return is_on_interface and is_in_subnet

    def __str__(self) -> str:
        wishes = [f"on {self.interface}"] if self.interface else []
        wishes += [f"in {self.subnet}"] if self.subnet else []
        return " ".join(wishes)


@dataclass(frozen=True)
class GidVerdict:
    """What was thought of one row. is_usable: it is offered to peers."""

    candidate: GidCandidate
    is_usable: bool
    reason: str

    @property
    def index(self) -> int:
        """The row."""
        return -1 if self.candidate.index is None else self.candidate.index

    def __str__(self) -> str:
        return f"{self.index}: {self.candidate}: {self.reason}"


@dataclass(frozen=True)
class GidChoice:
    """What one end takes for itself, and offers to a peer.

    best: what it takes where the peer has no say. offered: all usable ones, best first. reason: why `best`.
    warning: what a person should know of it, or "". verdicts: one per row that is not empty, by index.
    """

    best: GidCandidate
    offered: tuple[GidCandidate, ...]
    reason: str
    warning: str
    verdicts: tuple[GidVerdict, ...]

    @property
    def index(self) -> int:
        """The row of `best`."""
        return -1 if self.best.index is None else self.best.index

    def __str__(self) -> str:
        return "\n".join(
            [f"GID index {self.index}: {self.best}: {self.reason}", *(f"  {one}" for one in self.verdicts)]
        )


@dataclass(frozen=True)
class GidPair:
    """Two GIDs that can talk to each other, seen from this end. reason: what makes the pair what it is."""

    local: GidCandidate
    remote: GidCandidate
    rank: GidRank
    reason: str

    @property
    def is_broken(self) -> bool:
        """Whether it is known to fail: a last resort."""
        return self.rank.is_broken

    def __str__(self) -> str:
        return f"{self.local} to {self.remote}: {self.reason}"


def choose_gid(
    table: GidTable, interfaces: Sequence[Interface] | None, preference: GidPreference | None = None
) -> GidChoice:
    """Return the row of a port to use, judged by this end alone, with the verdict on every row.

    interfaces: of this host; None where nobody looked.

    Raises DeviceUnusableError, with the table in its message, where no row can be used, or where the row that the user
    fixed is empty or beyond the table.
    """
    preference = preference or GidPreference()
    candidates = find_candidates(table, interfaces)
    if preference.index is not None:
        return _take_fixed(table, candidates, preference)
    usable = [one for one in candidates if not _why_never(one)]
    if not usable:
        raise _unusable(
            table,
            "it has no GID that a queue pair could use",
            "Give the port's network interface an address and bring it up (ip addr add, ip link set ... up)."
            if table.length
            else "A port without a GID table (iWARP) carries no RC queue pairs of kvxfer.",
        )
    wanted = [one for one in usable if preference.wants(one)]
    ranked = sorted(wanted or usable, key=lambda one: (rank_candidate(one), one.index))
    best = ranked[0]
    warnings = [] if wanted else [f"no usable GID is {preference}; the others were considered"]
    warnings += _doubts(best)
    verdicts = tuple(_verdict(one, best, ranked) for one in candidates)
    reason = f"the best of {len(usable)} usable rows" if len(usable) > 1 else "the only usable row"
    return GidChoice(best, tuple(ranked[:CANDIDATES_MAX]), reason, "; ".join(warnings), verdicts)


def choose_gid_pair(local: Sequence[GidCandidate], remote: Sequence[GidCandidate], *, device: str = "") -> GidPair:
    """Return the pair of GIDs that two ports should use; the peer that calls it with the sides swapped gets the same.

    local, remote: the candidates that the ends offered to each other, best first, at most one list as exchanged.
    Raises DeviceUnusableError where no candidate of one end fits any of the other.
    """
    pairs = rank_gid_pairs(local, remote)
    if pairs:
        return pairs[0]
    raise DeviceUnusableError(
        f"no GID of {device or 'this port'} fits one of the peer: here {_listed(local)}; there {_listed(remote)}. Both "
        f"ends need the same RoCE version and the same address family.",
        remedy="Give the network interfaces of both ports addresses of one family, or fix the rows (gid_index).",
        device=device,
        reason="no common kind of GID",
        local=tuple(map(str, local)),
        remote=tuple(map(str, remote)),
    )


def rank_gid_pairs(local: Sequence[GidCandidate], remote: Sequence[GidCandidate]) -> list[GidPair]:
    """Return every pair that could work, best first: what to try next when one does not.

    The first is the same seen from both ends. Source of what fits: RoCE v1 and v2 packets are of different protocols,
    and the kernel resolves a peer's address in the family of the own one.
    """
    found = []
    others = [(theirs, rank_candidate(theirs)) for theirs in _distinct(remote)]
    for row, ours in enumerate(_distinct(local)):
        own_rank = rank_candidate(ours)
        for other_row, (theirs, other_rank) in enumerate(others):
            if ours.type is theirs.type and (ours.is_infiniband or ours.address.version == theirs.address.version):
                rank = _pair_rank(ours, theirs, own_rank, other_rank)
                # every part is the same seen from the other end: no "ours before theirs"
                key = (rank, max(row, other_row), min(row, other_row), sorted([ours.value, theirs.value]))
                found.append((key, ours, theirs))
    found.sort(key=lambda item: item[0])
    return [GidPair(ours, theirs, key[0], _why_pair(ours, theirs, key[0])) for key, ours, theirs in found]


def rank_candidate(candidate: GidCandidate) -> GidRank:
    """Return how good a candidate is by itself."""
    if candidate.is_infiniband:
        return GidRank()
    return GidRank(
        is_broken=candidate.state.is_broken,
        is_old_type=candidate.type is not GidType.ROCE_V2,
        state=int(candidate.state),
        scope=int(candidate.scope),
        is_ipv6=candidate.address.version == 6,
        is_vlan=candidate.is_vlan,
    )


def are_in_one_subnet(one: GidCandidate, other: GidCandidate) -> bool:
    """Whether two GIDs are neighbours: every prefix that is known says so. Symmetric.

    Link-local addresses never are: fe80::/64 is on every link.
    """
    if one.is_infiniband or other.is_infiniband:
        return one.value[:8] == other.value[:8]  # the subnet prefix
    if one.value == other.value:
        return one.scope is GidScope.ROUTABLE
    if one.address.version != other.address.version or one.scope is not other.scope:
        return False
    said = [
        address in subnet for subnet, address in ((one.subnet, other.address), (other.subnet, one.address)) if subnet
    ]
    return bool(said) and all(said)


def _pair_rank(ours: GidCandidate, theirs: GidCandidate, own_rank: GidRank, other_rank: GidRank) -> GidRank:
    """Return how good a pair is: as good as its worse half, and better in one subnet."""
    worse = GidRank._make(map(max, own_rank, other_rank))
    return worse._replace(is_other_subnet=not are_in_one_subnet(ours, theirs))


def _take_fixed(table: GidTable, candidates: Sequence[GidCandidate], preference: GidPreference) -> GidChoice:
    """Honour a row that the user named, whatever its rank; only one that cannot be used at all is refused."""
    index = preference.index
    source = f" ({preference.index_source})" if preference.index_source else ""
    best = next((one for one in candidates if one.index == index), None)
    if best is None or _why_never(best):
        why = (
            f"the table has {table.length} rows"
            if index is None or index >= table.length
            else "that row is empty"
            if best is None
            else _why_never(best)
        )
        raise _unusable(
            table,
            f"GID index {index} was fixed{source}, and {why}",
            "Name a row that is in use, for each device its own if need be (gid_index='mlx5_0:3,mlx5_1:1'), or leave "
            "the choice to kvxfer.",
            index=index,
            source=preference.index_source,
        )
    reason = f"fixed by the user{source}"
    verdicts = tuple(
        GidVerdict(one, one is best, reason if one is best else f"row {index} was fixed{source}") for one in candidates
    )
    return GidChoice(best, (best,), reason, "; ".join(_doubts(best)), verdicts)


def _verdict(candidate: GidCandidate, best: GidCandidate, ranked: Sequence[GidCandidate]) -> GidVerdict:
    never = _why_never(candidate)
    if never:
        return GidVerdict(candidate, False, never)
    if candidate is best:
        return GidVerdict(candidate, True, "chosen")
    if candidate not in ranked:
        return GidVerdict(candidate, False, "not what the user prefers")
    return GidVerdict(candidate, True, _difference(candidate, best))


def _why_never(candidate: GidCandidate) -> str:
    """Why no queue pair can use the candidate at all; "" where one can."""
    if candidate.type not in list(GidType):
        return f"it is of a kind that kvxfer does not know ({candidate.type})"
    if candidate.index is not None and candidate.index > INDEX_MAX:
        return f"rows after {INDEX_MAX} cannot be named in an address vector"
    return ""


def _difference(candidate: GidCandidate, best: GidCandidate) -> str:
    """Name the first criterion by which `candidate` comes after `best`."""
    rank, better = rank_candidate(candidate), rank_candidate(best)
    words = dict(_words(candidate))
    for name, own, its in zip(rank._fields, rank, better, strict=True):
        if own != its:
            return f"after row {best.index}: {words[name]}"
    return f"as good as row {best.index}, which comes first"


def _words(candidate: GidCandidate) -> Iterator[tuple[str, str]]:
    """Say what each field of a rank means for this candidate, where it is not the best value."""
    fault = candidate.fault
    yield "is_broken", fault
    yield "is_old_type", str(candidate.type)
    yield "state", fault or "no network interface is known for it"
    yield "scope", str(candidate.scope)
    yield "is_ipv6", "IPv6"
    yield "is_vlan", f"{candidate.netdev} is a VLAN"


def _doubts(candidate: GidCandidate) -> list[str]:
    """What a person should know of a choice that is no good one."""
    if candidate.is_infiniband:
        return []
    doubts = [candidate.fault] if candidate.fault else []
    if candidate.type is GidType.ROCE_V1:
        doubts.append("only RoCE v1, which carries no further than the link")
    elif candidate.scope is not GidScope.ROUTABLE:
        doubts.append(f"only {candidate.scope} addresses: peers on another link cannot be reached")
    return doubts


def _why_pair(ours: GidCandidate, theirs: GidCandidate, rank: GidRank) -> str:
    faults = [f"here {ours.fault}"] if ours.fault else []
    faults += [f"there {theirs.fault}"] if theirs.fault else []
    if faults:
        return "last resort: " + "; ".join(faults)
    if not rank.is_other_subnet:
        return "in one subnet"
    return "link-local on both sides" if rank.scope else "in different subnets, through a router"


def _distinct(candidates: Iterable[GidCandidate]) -> list[GidCandidate]:
    """Drop doubles, so that a position in the list names one GID."""
    found: dict[tuple[bytes, GidType], GidCandidate] = {}
    for one in candidates:
        found.setdefault((one.value, one.type), one)
    return list(found.values())


def _listed(candidates: Sequence[GidCandidate]) -> str:
    return ", ".join(map(str, candidates)) or "none"


def _unusable(table: GidTable, what: str, remedy: str, **values: object) -> DeviceUnusableError:
    place = f"{table.device} port {table.port}"
    return DeviceUnusableError(
        f"{place} cannot be used: {what}.\n{table}\n",
        remedy=remedy,
        device=table.device,
        port=table.port,
        reason=what,
        length=table.length,
        **values,
    )
