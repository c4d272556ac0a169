"""A row of a GID table as a candidate: what the host's network says of it, and what is told to a peer.

Candidates are exchanged as values, never as indices. Pure: interfaces and JSON come in as values, and everything that a
peer sent is checked. Read next: `gid_choice.py`, which ranks candidates and says why.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvxfer.errors import RemoteProtocolError
from kvxfer.system.interfaces import Interface, IpAddress
from kvxfer.verbs.enums import GidType
from kvxfer.verbs.gid import GID_NBYTES, ZERO_GID, GidEntry, format_gid, gid_address
from kvxfer.verbs.peer_json import take_bool, take_hex, take_int, take_list, take_name, take_object

__all__ = ["CANDIDATES_MAX", "GidCandidate", "GidScope", "NetdevState", "candidates_from_json", "find_candidates"]

CANDIDATES_MAX = 64
"""The most candidates of one port that are exchanged: the best ones, 8 KiB of JSON. Soft RoCE has 1024 rows."""
NETDEV_LENGTH_MAX = 15  # IFNAMSIZ less its zero byte, <linux/if.h>


class GidScope(enum.IntEnum):
    """How far a RoCE address carries. A private range is as good as any: a fabric's addresses usually are in one."""

    ROUTABLE = 0
    LINK_LOCAL = 1
    LOOPBACK = 2

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


class NetdevState(enum.IntEnum):
    """What the host's network says of the address in a row. From GONE on, a queue pair is known not to connect."""

    UP = 0
    UNKNOWN = 1
    GONE = 2
    DOWN = 3
    ELSEWHERE = 4

    @property
    def is_broken(self) -> bool:
        """Whether traffic is known to fail."""
        return self >= NetdevState.GONE


@dataclass(frozen=True)
class GidCandidate:
    """A GID with everything a choice needs, of this end or of the peer.

    netdev: the interface that has the address; "" where none is known. prefix_nbits: of its subnet, where known.
    index: the row in this end's own table; None for a peer's. It is not exchanged.
    """

    value: bytes
    type: GidType
    netdev: str = ""
    state: NetdevState = NetdevState.UNKNOWN
    prefix_nbits: int | None = None
    is_vlan: bool = False
    index: int | None = field(default=None, compare=False)

    @cached_property
    def address(self) -> IpAddress:
        """The IP address that the GID is on RoCE."""
        return gid_address(self.value)

    @property
    def is_infiniband(self) -> bool:
        """Whether it is a GID of an InfiniBand subnet, not an IP address."""
        return self.type is GidType.IB

    @cached_property
    def scope(self) -> GidScope:
        """How far it carries; InfiniBand's link-local prefix is its usual one and says nothing."""
        address = self.address
        if self.is_infiniband:
            return GidScope.ROUTABLE
        if address.is_loopback:
            return GidScope.LOOPBACK
        return GidScope.LINK_LOCAL if address.is_link_local else GidScope.ROUTABLE

    @cached_property
    def subnet(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
        """The subnet of a routable RoCE address, where its prefix is known. All links have the link-local subnet."""
        if self.prefix_nbits is None or self.is_infiniband or self.scope is not GidScope.ROUTABLE:
            return None
        return ipaddress.ip_network(f"{self.address}/{self.prefix_nbits}", strict=False)

    @property
    def fault(self) -> str:
        """What is wrong with its network interface, for a sentence; "" where nothing is known to be."""
        name = self.netdev or "no interface"
        if self.state is NetdevState.ELSEWHERE:
            absent = f"{self.netdev} is not in this network namespace"
            return absent if self.netdev else f"no interface of this network namespace has {self.address}"
        return {
            NetdevState.GONE: f"{name} does not have {self.address}",
            NetdevState.DOWN: f"{name} is down",
        }.get(self.state, "")

    def to_json(self) -> dict[str, Any]:
        """Return what the peer is told."""
        return {
            "gid": self.value.hex(),
            "type": int(self.type),
            "netdev": self.netdev[:NETDEV_LENGTH_MAX],
            "state": int(self.state),
            "prefix": self.prefix_nbits,
            "vlan": self.is_vlan,
        }

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> GidCandidate:
        """Return a peer's candidate. Raises RemoteProtocolError naming the field that is wrong."""
        value = take_hex(obj, "gid", GID_NBYTES)
        if value == ZERO_GID:
            raise RemoteProtocolError("the peer's RDMA field 'gid' is all zero: missing GID.", field="gid")
        kind = GidType(take_int(obj, "type", min(GidType), max(GidType)))
        prefix_max = 128 if kind is GidType.IB else gid_address(value).max_prefixlen
        return cls(
            value=value,
            type=kind,
            netdev=take_name(obj, "netdev", NETDEV_LENGTH_MAX),
            state=NetdevState(take_int(obj, "state", min(NetdevState), max(NetdevState))),
            prefix_nbits=None if obj.get("prefix") is None else take_int(obj, "prefix", 0, prefix_max),
            is_vlan=take_bool(obj, "vlan"),
        )

    def __str__(self) -> str:
        if self.is_infiniband:
            return f"{format_gid(self.value)} (InfiniBand)"
        prefix = "" if self.prefix_nbits is None else f"/{self.prefix_nbits}"
        return f"{self.address}{prefix} ({self.type}{f', {self.netdev}' if self.netdev else ''})"


def find_candidates(entries: Iterable[GidEntry], interfaces: Sequence[Interface] | None) -> list[GidCandidate]:
    """Return the rows with what the interfaces of this host say of them; None for interfaces not looked at."""
    return [_judge(entry, interfaces) for entry in entries]


def candidates_from_json(obj: Mapping[str, Any], name: str) -> tuple[GidCandidate, ...]:
    """Return the candidates in a field of a peer's object. Raises RemoteProtocolError."""
    return tuple(GidCandidate.from_json(take_object(one, name)) for one in take_list(obj, name, CANDIDATES_MAX))


def _judge(entry: GidEntry, interfaces: Sequence[Interface] | None) -> GidCandidate:
    """Look for the interface that has the row's address: the one that the row names if it has it, else any.

    The name alone proves nothing: in a container it is that of an interface of the host, and ours may be called alike.
    """
    bare = GidCandidate(entry.value, entry.type, entry.netdev, index=entry.index)
    if bare.is_infiniband or interfaces is None:
        return bare
    address = bare.address
    holders = [one for one in interfaces if any(held.value == address for held in one.addresses)]
    named = next((one for one in interfaces if one.name == entry.netdev), None)
    holder = named if named in holders or not holders else holders[0]
    return GidCandidate(
        value=entry.value,
        type=entry.type,
        netdev=holder.name if holder else entry.netdev,
        state=_state(bare, holder, has_address=bool(holders)),
        prefix_nbits=_prefix_nbits(holder, address),
        is_vlan=holder is not None and holder.is_vlan,
        index=entry.index,
    )


def _state(bare: GidCandidate, holder: Interface | None, *, has_address: bool) -> NetdevState:
    if holder is not None:
        if not holder.is_usable:
            return NetdevState.DOWN
        return NetdevState.UP if has_address else NetdevState.GONE
    if not bare.netdev and bare.scope is GidScope.LINK_LOCAL:  # the device's own address: nothing to tell it by
        return NetdevState.UNKNOWN
    return NetdevState.ELSEWHERE


def _prefix_nbits(holder: Interface | None, address: IpAddress) -> int | None:
    held = holder.addresses if holder else ()
    return next((one.prefix_nbits for one in held if one.value == address), None)
