"""The RDMA part of a segment descriptor: ours made from ports and regions, a peer's read into regions with keys.

Pure: opens no device. A Mooncake device is a port, and a buffer has one key for each device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvxfer.errors import RemoteProtocolError, TransportUnavailableError
from kvxfer.mooncake.rdma.handshake import gid_text
from kvxfer.mooncake.wire.descriptor import BufferDescriptor, DeviceDescriptor, SegmentDescriptor
from kvxfer.types import AddressColumn, RegionDescriptor, Rights

if TYPE_CHECKING:
    from kvxfer.transports.rdma_nic import Nic

__all__ = ["PeerMemory", "rdma_buffers", "rdma_devices", "read_memory"]


def rdma_devices(nics: Sequence[Nic]) -> tuple[DeviceDescriptor, ...]:
    """Return the ports as devices of a segment descriptor. Mooncake has one port a device: the first one."""
    return tuple(DeviceDescriptor(nic.context.name, nic.port.lid, gid_text(nic.choice.best.value)) for nic in nics)


def rdma_buffers(nics: Sequence[Nic], regions: Sequence[Any]) -> tuple[BufferDescriptor, ...]:
    """Return the regions with their keys on each device: one buffer for each chunk."""
    found = []
    for region in regions:
        told: Mapping[str, Any] = region.keys.get("rdma", {}).get("nics", {})
        columns = [told.get(nic.name, []) for nic in nics]
        if not region.rights or not columns or any(len(rows) != len(columns[0]) for rows in columns):
            continue  # for its owner only, or cut otherwise on another device, which a descriptor cannot tell
        for chunks in zip(*columns, strict=True):
            keys = tuple(chunk[2] for chunk in chunks)
            found.append(BufferDescriptor("*", chunks[0][0], chunks[0][1], rkeys=keys, lkeys=keys))
    return tuple(found)


class PeerMemory(NamedTuple):
    """What a process told of itself last, replaced whole: regions ascending in address, with their keys by device."""

    descriptor: SegmentDescriptor
    regions: tuple[RegionDescriptor, ...]
    starts: AddressColumn
    ends: AddressColumn


def read_memory(name: str, descriptor: SegmentDescriptor, region_ids: Iterator[int]) -> PeerMemory:
    """Return the buffers of a peer's descriptor as regions, each with the next of the ids.

    Raises TransportUnavailableError where it has no rdma, RemoteProtocolError where buffers overlap.
    """
    if "rdma" not in descriptor.protocols or not descriptor.devices:
        raise TransportUnavailableError(
            f"{name} is reached over {', '.join(descriptor.protocols)} only, not over rdma.",
            remedy="Look at its log: Mooncake goes over to tcp without a word where it finds no device.",
            reasons={"rdma": "the descriptor has no rdma device"},
        )
    devices = [device.name for device in descriptor.devices]
    buffers = sorted((one for one in descriptor.buffers_over("rdma") if one.rkeys), key=lambda one: one.address)
    regions = tuple(
        RegionDescriptor(
            next(region_ids),
            "",
            buffer.address,
            buffer.nbytes,
            Rights.ALL,
            {
                "rdma": {
                    "nics": {
                        f"{device}:1": [[buffer.address, buffer.nbytes, key]]
                        for device, key in zip(devices, buffer.rkeys, strict=True)
                    }
                }
            },
        )
        for buffer in buffers
    )
    starts = np.array([one.address for one in regions], np.int64)
    ends = np.array([one.end for one in regions], np.int64)
    if (starts[1:] < ends[:-1]).any():
        raise RemoteProtocolError(f"buffers in the descriptor of {name} overlap.", peer=name)
    return PeerMemory(descriptor, regions, starts, ends)
