"""The network interfaces of this host and their addresses, as getifaddrs(3) and /sys/class/net tell them.

"This host" is the network namespace of this process: an interface that is not here cannot send for it. Read by
`verbs/gid_candidate.py`, which judges RoCE addresses by it, and by the engine, which looks for the address to tell its
peers.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.system.abi import ffi
from kvxfer.system.calls import libc
from kvxfer.system.kernel_file import read_kernel_file

__all__ = ["Interface", "InterfaceAddress", "IpAddress", "list_interfaces"]

CData = Any
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

AF_INET, AF_INET6, AF_PACKET = 2, 10, 17  # <bits/socket.h>
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40  # netdevice(7)


@dataclass(frozen=True)
class InterfaceAddress:
    """One IP address of an interface, and how many of its leading bits are those of the subnet."""

    value: IpAddress
    prefix_nbits: int

    def __str__(self) -> str:
        return f"{self.value}/{self.prefix_nbits}"


@dataclass(frozen=True)
class Interface:
    """One network interface.

    index: 0 where it is not known. is_running: it has a carrier, so that packets can leave. mtu: None where sysfs does
    not say. kind: DEVTYPE of its uevent, such as "vlan", "bond" or "bridge"; "" for a plain one.
    """

    name: str
    index: int = 0
    is_up: bool = True
    is_running: bool = True
    is_loopback: bool = False
    mtu: int | None = None
    kind: str = ""
    addresses: tuple[InterfaceAddress, ...] = ()

    @property
    def is_usable(self) -> bool:
        """Whether packets can leave by it."""
        return self.is_up and self.is_running

    @property
    def is_vlan(self) -> bool:
        """Whether it is a VLAN on top of another interface."""
        return self.kind == "vlan"


@dataclass
class _Found:
    """What the rows of one interface have said so far."""

    index: int = 0
    flags: int = 0
    addresses: list[InterfaceAddress] = field(default_factory=list)


def list_interfaces(root: Path = Path("/")) -> tuple[Interface, ...]:
    """Return every interface, in the kernel's order. Raises OSError where the kernel does not tell them.

    root: where sys/ is looked for; for tests. The interfaces themselves are always this process's own.
    """
    found: dict[str, _Found] = {}
    head = ffi.new("struct ifaddrs **")
    if libc.getifaddrs(head) != 0:
        raise OSError(ffi.errno, f"getifaddrs: {os.strerror(ffi.errno)}")
    try:
        for row in _rows(head[0]):
            # an IPv4 address with a label is reported under it, such as eth0:1
            name = ffi.string(row.name).decode(errors="replace").partition(":")[0]
            _take(found.setdefault(name, _Found()), row)
    finally:
        libc.freeifaddrs(head[0])
    return tuple(_interface(name, one, root / "sys/class/net" / name) for name, one in found.items())


def _rows(row: CData) -> Iterator[CData]:
    while row != ffi.NULL:
        yield row
        row = row.next


def _take(found: _Found, row: CData) -> None:
    """Add what one row says: it has an interface's index (AF_PACKET), or one of its addresses."""
    found.flags |= row.flags
    if row.address == ffi.NULL:
        return
    family = row.address.family
    if family == AF_PACKET:  # struct sockaddr_ll: family, protocol, ifindex; packet(7)
        found.index = int.from_bytes(_bytes(row.address, 4, 4), sys.byteorder)
    elif family == AF_INET:  # struct sockaddr_in: family, port, address; ip(7)
        value = ipaddress.IPv4Address(_bytes(row.address, 4, 4))
        found.addresses.append(InterfaceAddress(value, _prefix_nbits(row.netmask, 4, 4)))
    elif family == AF_INET6:  # struct sockaddr_in6: family, port, flow, address, scope; ipv6(7)
        value6 = ipaddress.IPv6Address(_bytes(row.address, 8, 16))
        found.addresses.append(InterfaceAddress(value6, _prefix_nbits(row.netmask, 8, 16)))


def _prefix_nbits(netmask: CData, offset: int, nbytes: int) -> int:
    if netmask == ffi.NULL:
        return 8 * nbytes
    return int.from_bytes(_bytes(netmask, offset, nbytes), "big").bit_count()


def _bytes(address: CData, offset: int, nbytes: int) -> bytes:
    return bytes(ffi.buffer(ffi.cast("char *", address) + offset, nbytes))


def _interface(name: str, found: _Found, folder: Path) -> Interface:
    mtu = read_kernel_file(folder / "mtu")
    uevent = dict(line.partition("=")[::2] for line in read_kernel_file(folder / "uevent").splitlines())
    return Interface(
        name=name,
        index=found.index,
        is_up=bool(found.flags & IFF_UP),
        is_running=bool(found.flags & IFF_RUNNING),
        is_loopback=bool(found.flags & IFF_LOOPBACK),
        mtu=int(mtu) if mtu.isdecimal() else None,
        kind=uevent.get("DEVTYPE", ""),
        addresses=tuple(found.addresses),
    )
