"""Which rails are near to the memory of a batch, and when it goes over the farther ones too.

Pure. A rail is as far as the number of its ends whose device is attached to another NUMA node than the memory there:
0, 1 or 2. What is not known, of a device or of memory, is near. Called by `rdma_spread.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from kvxfer.transports.base import Transfer

__all__ = ["NearRail", "find_near", "memory_node", "memory_nodes", "rail_distance"]

FAR_SAVING_S = 0.0002
"""What the farther rails must save of a batch's time: twice what it costs to share it out, post it and take it back on
one rail more (bench/README.md, 0.1 ms for 1,024 rows). 16 MiB on NICs of 400 Gb/s, 1 MiB on those of 25 Gb/s."""
REGIONS_ASKED_MAX = 8


class NearRail(Protocol):
    """What must be known of a rail."""

    rate: float

    @property
    def numa_nodes(self) -> tuple[int | None, int | None]:
        """Of the device here and of the peer's."""


class _Registered(Protocol):
    @property
    def keys(self) -> Mapping[str, Mapping[str, Any]]:
        """By transport."""


RailT = TypeVar("RailT", bound=NearRail)


def rail_distance(rail: NearRail, local: int | None, remote: int | None) -> int:
    """Return at how many ends the rail is far from the memory: on nodes `local` here and `remote` at the peer."""
    here, there = rail.numa_nodes
    return _is_far(here, local) + _is_far(there, remote)


def find_near(rails: Sequence[RailT], local: int | None, remote: int | None, *, nbytes: int) -> list[RailT]:
    """Return the rails for a batch of `nbytes`, in the order given: the nearest, or all where that is worth it.

    It is where the others, at the speed that was measured, save more time than a rail more costs. One that was not
    measured yet counts as fast as the nearest are.
    """
    distances = [rail_distance(rail, local, remote) for rail in rails]
    nearest = min(distances, default=0)
    near = [rail for rail, distance in zip(rails, distances, strict=True) if distance == nearest]
    known = [rail.rate for rail in near if rail.rate]
    if len(near) == len(rails) or not known:
        return near
    usual = sum(known) / len(known)
    near_rate, whole_rate = (sum(rail.rate or usual for rail in some) for some in (near, rails))
    return list(rails) if nbytes / near_rate - nbytes / whole_rate >= FAR_SAVING_S else near


def memory_nodes(transfer: Transfer) -> tuple[int | None, int | None]:
    """Return the nodes that a batch's memory here and at the peer lies on."""
    return memory_node(transfer.used), memory_node(transfer.regions)


def memory_node(regions: Sequence[_Registered]) -> int | None:
    """Return the node that the regions of one end lie on, as its transport told it, judged by 8 of them; None where
    that is not known, or not one."""
    step = -(-len(regions) // REGIONS_ASKED_MAX) or 1
    told = [region.keys.get("rdma", {}).get("numa_node") for region in regions[::step]]
    nodes = {node if type(node) is int else None for node in told}  # of the peer's it is its word
    return nodes.pop() if len(nodes) == 1 else None


def _is_far(device: int | None, memory: int | None) -> bool:
    return device is not None and memory is not None and device != memory
