"""Mooncake's segment descriptor: what a process tells others about its memory and the ways to it. To JSON and back.

What Mooncake writes for transports that are not spoken here (nvlink, cxl, nvmeof ...) is passed over, so that a process
that has tcp or rdma beside them is understood. kvxfer's own processes add `"kvxfer": {"address", "generation"}`; a
Mooncake ignores keys that it does not know.
Source: encodeSegmentDesc and decodeSegmentDesc of Mooncake 0.3.13; what these refuse is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kvxfer.errors import RemoteProtocolError
from kvxfer.types import ADDRESS_MAX

__all__ = ["BufferDescriptor", "DeviceDescriptor", "KvxferMark", "SegmentDescriptor"]

NAME_LENGTH_MAX = 1024
DEVICES_MAX = 256
PROTOCOLS_MAX = 16
KEY_MAX = 2**32 - 1  # rkey and lkey of ibv_mr


@dataclass(frozen=True)
class DeviceDescriptor:
    """One RDMA device. gid: sixteen two-digit hexadecimal bytes joined by colons."""

    name: str
    lid: int
    gid: str


@dataclass(frozen=True)
class BufferDescriptor:
    """One registered range. name: its location ("cpu:0") for rdma, the segment's name for tcp.

    rkeys, lkeys: one for each device; empty where the range is for its owner only. protocol: set only in descriptors
    of several protocols.
    """

    name: str
    address: int
    nbytes: int
    rkeys: tuple[int, ...] = ()
    lkeys: tuple[int, ...] = ()
    protocol: str = ""


@dataclass(frozen=True)
class KvxferMark:
    """Says that a kvxfer engine stands behind a descriptor: its address, and which process it is."""

    address: str
    generation: str


@dataclass(frozen=True)
class SegmentDescriptor:
    """What one process has registered. name: "host:port" where processes ask each other, else any text.

    protocols: one, or several where every buffer names its own.
    priority_matrix: for each location the preferred devices and the other ones, by name.
    """

    name: str
    protocols: tuple[str, ...] = ("tcp",)
    buffers: tuple[BufferDescriptor, ...] = ()
    tcp_data_host: str = ""
    tcp_data_port: int = 0
    tcp_proto_version: int = 1
    timestamp: str = ""
    rdma_server_name: str = ""
    devices: tuple[DeviceDescriptor, ...] = ()
    priority_matrix: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    kvxfer: KvxferMark | None = None

    def buffers_over(self, protocol: str) -> tuple[BufferDescriptor, ...]:
        """Return the buffers that are reached over a protocol."""
        if protocol not in self.protocols:
            return ()
        return tuple(one for one in self.buffers if one.protocol in ("", protocol))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, as Mooncake writes it."""
        has_rdma = "rdma" in self.protocols
        fields: dict[str, Any] = {
            "name": self.name,
            "protocol": self.protocols[0] if len(self.protocols) == 1 else list(self.protocols),
            "tcp_data_port": self.tcp_data_port,
            "tcp_proto_version": self.tcp_proto_version,
            "timestamp": self.timestamp,
            "rdma_server_name": self.rdma_server_name,
            "buffers": [self._buffer_to_json(one) for one in self.buffers],
        }
        if self.tcp_data_host:
            fields["tcp_data_host"] = self.tcp_data_host
        if has_rdma:
            fields["devices"] = [{"name": one.name, "lid": one.lid, "gid": one.gid} for one in self.devices]
            fields["priority_matrix"] = {
                place: [list(names) for names in both] for place, both in self.priority_matrix.items()
            }
        if self.kvxfer is not None:
            fields["kvxfer"] = {"address": self.kvxfer.address, "generation": self.kvxfer.generation}
        return fields

    def _buffer_to_json(self, buffer: BufferDescriptor) -> dict[str, Any]:
        fields: dict[str, Any] = {"name": buffer.name, "addr": buffer.address, "length": buffer.nbytes}
        if (buffer.protocol or self.protocols[0]) == "rdma":
            fields["rkey"], fields["lkey"] = list(buffer.rkeys), list(buffer.lkeys)
        if len(self.protocols) > 1:
            fields["protocol"] = buffer.protocol or self.protocols[0]
        return fields

    @classmethod
    def from_json(cls, fields: object) -> SegmentDescriptor:
        """Read a descriptor that a peer or a metadata server gave; raises RemoteProtocolError naming what is wrong."""
        reader = _Reader(fields, "a segment descriptor")
        protocols = _protocols(reader)
        devices = tuple(_device(one) for one in reader.rows("devices", DEVICES_MAX)) if "rdma" in protocols else ()
        mark = reader.fields.get("kvxfer")
        return cls(
            name=reader.text("name", is_needed=True),
            protocols=protocols,
            buffers=_buffers(reader, protocols, len(devices)),
            tcp_data_host=reader.text("tcp_data_host"),
            tcp_data_port=reader.number("tcp_data_port", 65535, default=0),
            tcp_proto_version=reader.number("tcp_proto_version", 1 << 31, default=1),
            timestamp=reader.text("timestamp"),
            rdma_server_name=reader.text("rdma_server_name"),
            devices=devices,
            priority_matrix=_priority_matrix(reader) if "rdma" in protocols else {},
            kvxfer=None if mark is None else _mark(mark),
        )


class _Reader:
    """One JSON object of a descriptor, read field by field."""

    __slots__ = ("fields", "what")

    def __init__(self, fields: object, what: str) -> None:
        if not isinstance(fields, dict):
            raise RemoteProtocolError(f"{what} is a JSON {type(fields).__name__}, not an object.")
        self.fields: dict[str, Any] = fields
        self.what = what

    def text(self, name: str, *, is_needed: bool = False) -> str:
        value = self.fields.get(name, "")
        if not isinstance(value, str) or len(value) > NAME_LENGTH_MAX or (is_needed and not value):
            self.refuse(name, value)
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            self.refuse(name, value)  # cannot be sent on, or printed
        return str(value)

    def number(self, name: str, high: int, *, low: int = 0, default: int | None = None) -> int:
        value: Any = self.fields.get(name, default)
        if type(value) is not int or not low <= value <= high:
            self.refuse(name, value)
        return int(value)

    def rows(self, name: str, count_max: int | None = None) -> list[Any]:
        value = self.fields.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or (count_max is not None and len(value) > count_max):
            self.refuse(name, value)
        return value

    def numbers(self, name: str, count: int) -> tuple[int, ...]:
        """A key for each device, or none at all."""
        value = self.rows(name)
        if len(value) not in (0, count) or not all(type(one) is int and 0 <= one <= KEY_MAX for one in value):
            self.refuse(name, value)
        return tuple(value)

    def refuse(self, name: str, value: object) -> NoReturn:
        raise RemoteProtocolError(f"{self.what} has {name} {value!r:.80}, which cannot be.", field=name)


def _protocols(reader: _Reader) -> tuple[str, ...]:
    value = reader.fields.get("protocol")
    several = value if isinstance(value, list) else [value]
    if not 1 <= len(several) <= PROTOCOLS_MAX or not all(
        isinstance(one, str) and 0 < len(one) <= NAME_LENGTH_MAX for one in several
    ):
        reader.refuse("protocol", value)
    return tuple(several)


def _device(fields: object) -> DeviceDescriptor:
    reader = _Reader(fields, "a device of a segment descriptor")
    return DeviceDescriptor(reader.text("name", is_needed=True), reader.number("lid", 65535), reader.text("gid"))


def _buffers(reader: _Reader, protocols: tuple[str, ...], device_count: int) -> tuple[BufferDescriptor, ...]:
    """The buffers that are reached by tcp or rdma."""
    found = []
    for fields in reader.rows("buffers"):
        row = _Reader(fields, "a buffer of a segment descriptor")
        protocol = row.text("protocol") if len(protocols) > 1 else ""
        carrier = protocol or protocols[0]
        if carrier not in ("tcp", "rdma"):
            continue
        address = row.number("addr", ADDRESS_MAX, low=1)
        keys = (row.numbers("rkey", device_count), row.numbers("lkey", device_count)) if carrier == "rdma" else ((), ())
        found.append(
            BufferDescriptor(
                name=row.text("name", is_needed=True),
                address=address,
                nbytes=row.number("length", ADDRESS_MAX - address, low=1),
                rkeys=keys[0],
                lkeys=keys[1],
                protocol=protocol,
            )
        )
    return tuple(found)


def _priority_matrix(reader: _Reader) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    matrix = reader.fields.get("priority_matrix") or {}
    if not isinstance(matrix, dict):
        reader.refuse("priority_matrix", matrix)
    found = {}
    for place, both in matrix.items():
        good = isinstance(both, list) and len(both) == 2 and all(isinstance(names, list) for names in both)
        if not good or not all(isinstance(name, str) for names in both for name in names):
            reader.refuse("priority_matrix", both)
        found[place] = (tuple(both[0]), tuple(both[1]))
    return found


def _mark(fields: object) -> KvxferMark:
    reader = _Reader(fields, "the mark of kvxfer in a segment descriptor")
    return KvxferMark(reader.text("address", is_needed=True), reader.text("generation", is_needed=True))
