"""How settings name RDMA devices, ports, GIDs and attributes: 'mlx5_0:2,mlx5_1', 'mlx5_1:3', 'mlx5_0:timeout=20'.

Pure. What cannot be meant raises ValueError that says what is wrong; `config.py` adds where it came from.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ATTRIBUTE_SETTINGS",
    "DevicePort",
    "GidIndex",
    "PortValues",
    "parse_attributes",
    "parse_devices",
    "parse_gid_index",
    "parse_interface",
    "parse_subnet",
]

PORT_MAX = 255  # ibv_qp_attr.port_num is a byte
GID_INDEX_MAX = 255  # ibv_global_route.sgid_index is a byte
GID_INDEX_AUTOMATIC = -1
ATTRIBUTE_SETTINGS = {
    "path_mtu": "path_mtu_nbytes_max",
    "read_depth": "rdma_read_depth",
    "send_depth": "rdma_send_depth",
    "timeout": "rdma_timeout",
    "retry_count": "rdma_retry_count",
    "hop_limit": "rdma_hop_limit",
    "traffic_class": "rdma_traffic_class",
    "service_level": "rdma_service_level",
}
"""Attributes of queue pairs that single devices or ports may have values of their own for; the setting for all."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class DevicePort:
    """A device, or one port of it. port: None for every port that can be used."""

    device: str
    port: int | None = None

    def includes(self, device: str, port: int) -> bool:
        """Whether it names that port, or all of its device."""
        return self.device == device and self.port in (None, port)

    def __str__(self) -> str:
        return self.device if self.port is None else f"{self.device}:{self.port}"


@dataclass(frozen=True)
class GidIndex:
    """The GID rows that the user fixed. everywhere: on devices that by_device does not name; None: kvxfer chooses."""

    everywhere: int | None = None
    by_device: tuple[tuple[str, int | None], ...] = ()

    def of(self, device: str) -> int | None:
        """Return the row that is fixed for a device; None where kvxfer chooses."""
        return dict(self.by_device).get(device, self.everywhere)

    def __str__(self) -> str:
        rows = [] if self.everywhere is None else [str(self.everywhere)]
        rows += [f"{device}:{GID_INDEX_AUTOMATIC if row is None else row}" for device, row in self.by_device]
        return ",".join(rows)


@dataclass(frozen=True)
class PortValues:
    """Attributes that the user gave single devices or ports: (where, name, value)."""

    rows: tuple[tuple[DevicePort, str, int], ...]

    def of(self, name: str, device: str, port: int) -> int | None:
        """Return what was given for a port, or else for its device; None where nothing was."""
        given = {where: value for where, row_name, value in self.rows if row_name == name}
        return given.get(DevicePort(device, port), given.get(DevicePort(device)))

    def __str__(self) -> str:
        return ",".join(f"{where}:{name}={value}" for where, name, value in self.rows)


def parse_attributes(value: object) -> PortValues:
    """Return the values of 'mlx5_0:read_depth=1,mlx5_1:2:path_mtu=1024', or of a list of such items; raises ValueError.

    Ranges are the caller's to check.
    """
    if isinstance(value, PortValues):
        return value
    rows: dict[tuple[DevicePort, str], int] = {}
    for item in _items(value):
        place, equals, number = str(item).strip().partition("=")
        where, _, name = place.rpartition(":")
        if not equals or not where:
            raise ValueError(f"{item!r} is no DEVICE:ATTRIBUTE=VALUE")
        if name not in ATTRIBUTE_SETTINGS:
            raise ValueError(f"there is no attribute {name!r}; there is {', '.join(ATTRIBUTE_SETTINGS)}")
        if not re.fullmatch("[0-9]{1,9}", number):
            raise ValueError(f"{number!r} is no number")
        key = _parse_device(where), name
        if key in rows:
            raise ValueError(f"it gives {where}:{name} twice")
        rows[key] = int(number)
    if not rows:
        raise ValueError("it is empty")
    return PortValues(tuple((where, name, number) for (where, name), number in rows.items()))


def parse_devices(value: object) -> tuple[DevicePort, ...]:
    """Return the devices of 'mlx5_0:2,mlx5_1', or of a list of such items; raises ValueError."""
    items = tuple(_parse_device(item) for item in _items(value))
    if not items:
        raise ValueError("it names no device")
    if len(set(items)) != len(items):
        raise ValueError("it names one twice")
    return items


def parse_gid_index(value: object) -> GidIndex | None:
    """Return the rows of 3, '3', 'mlx5_1:3,mlx5_2:6', '3,mlx5_2:6' or {'mlx5_1': 3}; raises ValueError.

    -1 leaves the choice to kvxfer, as it does in Mooncake; None stands for nothing fixed at all.
    """
    if isinstance(value, GidIndex):
        return value
    if isinstance(value, Mapping):
        by_device = {_check_name(str(device)): _check_row(row) for device, row in value.items()}
        return GidIndex(None, tuple(by_device.items()))
    if not isinstance(value, str):
        row = _check_row(value)
        return None if row is None else GidIndex(row)
    everywhere: int | None = None
    rows: dict[str, int | None] = {}
    items = _items(value)
    for item in items:
        device, _, number = item.rpartition(":")
        if device and device in rows:
            raise ValueError(f"it names {device} twice")
        if device:
            rows[_check_name(device)] = _parse_row(number)
        elif everywhere is not None:
            raise ValueError("it has two rows for all devices")
        else:
            everywhere = _parse_row(number)
    if not items:
        raise ValueError("it is empty")
    return GidIndex(everywhere, tuple(rows.items())) if rows or everywhere is not None else None


def parse_interface(value: object) -> str:
    """Return the name of a network interface; raises ValueError."""
    if not isinstance(value, str) or not re.fullmatch(r"[^\s/:]{1,15}", value):  # dev_valid_name of the kernel
        raise ValueError("it is no name of an interface")
    return value


def parse_subnet(value: object) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Return the subnet of '192.0.2.0/24'; raises ValueError."""
    if not isinstance(value, (str, ipaddress.IPv4Network, ipaddress.IPv6Network)):  # a number would be an address
        raise ValueError("it is no subnet")
    return ipaddress.ip_network(value)


def _items(value: object) -> list[Any]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    if not isinstance(value, Iterable):
        raise ValueError("it is neither text nor a list")
    return list(value)


def _parse_device(item: object) -> DevicePort:
    if isinstance(item, DevicePort):
        return item
    if not isinstance(item, str):
        raise ValueError(f"{item!r} is no name")
    name, colon, port = item.strip().partition(":")
    if colon and not (port.isdecimal() and 1 <= int(port) <= PORT_MAX):
        raise ValueError(f"{port!r} is no port; ports are 1 to {PORT_MAX}")
    return DevicePort(_check_name(name), int(port) if colon else None)


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a device")
    return name


def _parse_row(text: str) -> int | None:
    if not re.fullmatch("-?[0-9]{1,4}", text):
        raise ValueError(f"{text!r} is no row")
    return _check_row(int(text))


def _check_row(row: object) -> int | None:
    if isinstance(row, bool) or not hasattr(row, "__index__"):
        raise ValueError(f"{row!r} is no row")
    number = int(row.__index__())
    if number == GID_INDEX_AUTOMATIC:
        return None
    if not 0 <= number <= GID_INDEX_MAX:
        raise ValueError(f"row {number} cannot be named in an address vector")
    return number
