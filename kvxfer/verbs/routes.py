"""Whether packets from one of this host's addresses reach another address, as the kernel's routing tables have it.

The kernel resolves the peer's GID by the same tables when a queue pair goes to RTR, bound to the source GID's network
device; no route there is ENETUNREACH or, after a vain ARP request, ETIMEDOUT. Asking first costs 50 us, sends no packet
and says which interface is meant. What a route cannot say: whether anybody is at its other end.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from kvxfer.system.interfaces import IpAddress

__all__ = ["Route", "find_route"]

# rtnetlink(7), <linux/rtnetlink.h>
NLMSG_ERROR = 2
NLM_F_REQUEST = 1
RTM_GETROUTE = 26
RTM_F_FIB_MATCH = 0x2000
"""Give the table's entry, or an error. Without it the kernel takes any IPv4 address for a neighbour on an interface
that is asked for by name and has no route (`ip_route_output_key_hash_rcu`)."""
RTA_DST, RTA_SRC, RTA_OIF, RTA_GATEWAY = 1, 2, 4, 5
HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
ROUTE = struct.Struct("=BBBBBBBBI")  # rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags
ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
ANSWER_NBYTES_MAX = 8192
ANSWER_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Route:
    """The way to an address, or why there is none.

    problem: "" where there is a way. interface: the one it leaves by. gateway: None for an address on the same link.
    doubt: why the kernel could not be asked (a sandbox without netlink): there may be a way, nobody knows which.
    """

    problem: str = ""
    interface: str = ""
    gateway: IpAddress | None = None
    doubt: str = ""

    @property
    def is_reachable(self) -> bool:
        """Whether there is a way, or may be one."""
        return not self.problem

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        if self.doubt:
            return f"unknown: {self.doubt}"
        return f"by {self.interface}" + (f" through {self.gateway}" if self.gateway else "")


def find_route(source: IpAddress, destination: IpAddress, *, interface: str = "") -> Route:
    """Return how packets from `source`, an address of this host, go to `destination`.

    interface: the only one they may leave by; a link-local IPv6 address needs one. Never raises: what the network lacks
    is the result's `problem`, what this process may not ask its `doubt`. Source: rtnetlink(7), RTM_GETROUTE.
    """
    if source.version != destination.version:
        return Route(f"{source} and {destination} are addresses of different families")
    try:
        index = socket.if_nametoindex(interface) if interface else 0
    except OSError:
        return Route(f"there is no interface {interface} here")
    try:
        answer = _ask(_question(source, destination, index))
    except OSError as exc:
        return Route(doubt=f"the kernel does not tell its routes: {exc.strerror or exc}")
    if number := _error_of(answer):
        where = f" by {interface}" if interface else ""
        return Route(f"no route from {source} to {destination}{where}: {os.strerror(number)}")
    attributes = dict(_attributes(answer[HEADER.size + ROUTE.size :]))
    gateway = attributes.get(RTA_GATEWAY)
    return Route(
        interface=_interface_name(attributes.get(RTA_OIF)),
        gateway=type(destination)(gateway) if gateway else None,
    )


def _question(source: IpAddress, destination: IpAddress, interface_index: int) -> bytes:
    family = socket.AF_INET if source.version == 4 else socket.AF_INET6
    nbits = source.max_prefixlen
    body = ROUTE.pack(family, nbits, nbits, 0, 0, 0, 0, 0, RTM_F_FIB_MATCH)
    body += _attribute(RTA_DST, destination.packed) + _attribute(RTA_SRC, source.packed)
    if interface_index:
        body += _attribute(RTA_OIF, interface_index.to_bytes(4, sys.byteorder))
    return HEADER.pack(HEADER.size + len(body), RTM_GETROUTE, NLM_F_REQUEST, 1, 0) + body


def _ask(question: bytes) -> bytes:
    """Return the kernel's answer, which may be an error; raises OSError where it cannot be asked or says nothing."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(ANSWER_TIMEOUT_S)
        netlink.send(question)
        return netlink.recv(ANSWER_NBYTES_MAX)


def _error_of(answer: bytes) -> int:
    """Return the error number that an answer is; 0 for a route."""
    if HEADER.unpack_from(answer)[1] != NLMSG_ERROR:
        return 0
    (number,) = struct.unpack_from("=i", answer, HEADER.size)
    return int(-number)


def _attribute(kind: int, value: bytes) -> bytes:
    return ATTRIBUTE.pack(ATTRIBUTE.size + len(value), kind) + value


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= ATTRIBUTE.size:
        length, kind = ATTRIBUTE.unpack_from(data)
        if length < ATTRIBUTE.size:
            return
        yield kind, data[ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]  # attributes are aligned to 4 bytes


def _interface_name(index: bytes | None) -> str:
    try:
        return socket.if_indextoname(int.from_bytes(index, sys.byteorder)) if index else ""
    except OSError:
        return ""
