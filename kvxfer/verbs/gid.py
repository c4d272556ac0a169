"""A port's GID table, as the device has it.

A GID is 16 bytes: on Ethernet (RoCE) an IP address of a network interface, on InfiniBand a subnet prefix and a GUID.
The table is sparse, and a row's index means nothing at another host and changes at this one when links flap or
addresses come and go. Read next: `gid_candidate.py`, what this host's network says of a row, and `gid_choice.py`.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.system.interfaces import Interface, IpAddress, list_interfaces
from kvxfer.verbs.enums import GidType, LinkLayer
from kvxfer.verbs.library import ffi
from kvxfer.verbs.sysfs import GID_NBYTES, ZERO_GID, SysfsDevice

if TYPE_CHECKING:
    from kvxfer.verbs.device import Context, Port

__all__ = ["GID_NBYTES", "ZERO_GID", "GidEntry", "GidTable", "format_gid", "gid_address", "read_gid_table"]

ROWS_SHOWN_MAX = 24
"""Rows that an error prints."""


@dataclass(frozen=True)
class GidEntry:
    """One row that is not empty. netdev: the name of its network interface; "" where none is known."""

    index: int
    value: bytes
    type: GidType
    netdev: str = ""

    def __str__(self) -> str:
        return f"{self.index}: {format_gid(self.value)} {self.type}" + (f" {self.netdev}" if self.netdev else "")


@dataclass(frozen=True)
class GidTable:
    """The GID table of one port at one moment.

    length: how many rows it has (gid_tbl_len), most of them empty. entries: those that are not, by index; rows of zeros
    are left out when it is made.
    """

    device: str
    port: int
    link_layer: LinkLayer
    length: int
    entries: tuple[GidEntry, ...] = ()

    def __post_init__(self) -> None:
        rows = (entry for entry in self.entries if entry.value != ZERO_GID)
        object.__setattr__(self, "entries", tuple(sorted(rows, key=lambda entry: entry.index)))

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[GidEntry]:
        return iter(self.entries)

    def find(self, index: int) -> GidEntry | None:
        """Return the row at `index`; None where it is empty or beyond the table."""
        return next((entry for entry in self.entries if entry.index == index), None)

    def find_value(self, value: bytes, kind: GidType) -> GidEntry | None:
        """Return the row that holds a GID now, wherever it has moved; None where it is gone."""
        return next((entry for entry in self.entries if (entry.value, entry.type) == (value, kind)), None)

    def __str__(self) -> str:
        title = f"GID table of {self.device} port {self.port}, {len(self.entries)} of {self.length} rows in use:"
        shown = [f"  {entry}" for entry in self.entries[:ROWS_SHOWN_MAX]]
        more = len(self.entries) - len(shown)
        return "\n".join([title, *shown, *([f"  ... and {more} more"] if more else [])])


def gid_address(value: bytes) -> IpAddress:
    """Return the IP address that a RoCE GID is; an IPv4 one is mapped into ::ffff:0:0/96."""
    address = ipaddress.IPv6Address(value)
    return address.ipv4_mapped or address


def format_gid(value: bytes) -> str:
    """Return a GID as people write it: an IPv6 address, ::ffff:192.0.2.1 for an IPv4 one."""
    address = ipaddress.IPv6Address(value)
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)


def read_gid_table(context: Context, port: Port, interfaces: Sequence[Interface] | None = None) -> GidTable:
    """Return the table of a port. interfaces: of this host, where they have been listed already.

    A row that cannot be read counts as empty, and a port without a table (iWARP) has no rows. Raises VerbsError where
    the device does not tell of its ports any more.
    """
    entries = _query_table(context, port, functools.cache(lambda: _interface_names(interfaces)))
    if entries is None:  # a library older than 32 has no call for it
        entries = _query_rows(context, port)
    return GidTable(context.name, port.number, port.link_layer, port.gid_tbl_len, tuple(entries))


def _query_table(context: Context, port: Port, names: Callable[[], dict[int, str]]) -> list[GidEntry] | None:
    sysfs = SysfsDevice(context.name, context.device.root)
    rows_max = sum(one.gid_tbl_len for one in context.ports())  # EINVAL where it holds fewer than all ports have
    rows = ffi.new("struct ibv_gid_entry[]", max(rows_max, 1))
    count = context.library.ibv_query_gid_table(context.pointer, rows, rows_max)
    if count < 0:
        return None
    return [
        GidEntry(
            index=row.gid_index,
            value=bytes(ffi.buffer(row.gid.raw)),
            type=GidType(row.gid_type),
            netdev=_netdev(sysfs, port.number, row.gid_index, row.ndev_ifindex, names),
        )
        for row in rows[0:count]
        if row.port_num == port.number
    ]


def _netdev(
    sysfs: SysfsDevice, port: int, index: int, interface_index: int, names: Callable[[], dict[int, str]]
) -> str:
    """Return the name of a row's interface: sysfs knows it although it is in another network namespace, whose numbers
    are not ours. names: asked for only where sysfs is silent, for it takes as long as all else here."""
    if not interface_index:
        return ""
    return sysfs.netdev(port, index) or names().get(interface_index, f"ifindex{interface_index}")


def _query_rows(context: Context, port: Port) -> list[GidEntry]:
    """Read row by row; the types are sysfs's, and where it does not tell them what the order of the rows says."""
    sysfs = SysfsDevice(context.name, context.device.root)
    values: dict[int, bytes] = {}
    gid = ffi.new("union ibv_gid *")
    for index in range(port.gid_tbl_len):
        if context.library.ibv_query_gid(context.pointer, port.number, index, gid) == 0:
            value = bytes(ffi.buffer(gid.raw))
            if value != ZERO_GID:
                values[index] = value
    found = []
    for index, value in values.items():
        kind = sysfs.gid_type(port.number, index)
        if kind is None:
            comes_again = any(other == value for row, other in values.items() if row > index)
            kind = _assumed_type(port, comes_again=comes_again)
        found.append(GidEntry(index, value, kind, sysfs.netdev(port.number, index)))
    return found


def _assumed_type(port: Port, *, comes_again: bool) -> GidType:
    """Return the type of a row of which nobody tells it. comes_again: whether a later row has the same GID.

    Where a device has both versions of RoCE the kernel enters each address twice, v1 first (add_modify_gid of
    drivers/infiniband/core/roce_gid_mgmt.c); one that has a single version has v2.
    """
    if port.link_layer is not LinkLayer.ETHERNET:
        return GidType.IB
    return GidType.ROCE_V1 if comes_again else GidType.ROCE_V2


def _interface_names(interfaces: Sequence[Interface] | None) -> dict[int, str]:
    if interfaces is None:
        try:
            interfaces = list_interfaces()
        except OSError:
            interfaces = ()
    return {interface.index: interface.name for interface in interfaces}
