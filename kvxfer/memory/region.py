"""One registered range: its memory, its name and rights, and where it is in its life.

A Region only holds; what changes it is its RegionTable (`regions.py`), under that table's lock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvxfer.errors import ClosedError
from kvxfer.memory.buffers import BufferView
from kvxfer.text import format_count
from kvxfer.types import RegionDescriptor, Rights

__all__ = ["Region", "RegionKeys", "RegionState"]

RegionKeys = Mapping[str, Mapping[str, Any]]
"""What each transport needs to reach a region, by transport name."""


class RegionState(enum.Enum):
    """Where a range is in its life."""

    RESERVED = "being registered"
    LIVE = "registered"
    RETIRED = "being unregistered"
    GONE = "unregistered"


class Region:
    """One registered range. Read-only for all but its RegionTable, which changes it under its lock.

    region_id: never used again in the life of the table.
    reference_count: how many registrations of the equal range are not yet undone.
    view: the memory and its owner, kept alive until the region is gone; then the view has no owner.
    """

    __slots__ = (
        "_also_kept", "address", "keys", "local_use_count", "name", "nbytes", "reference_count", "region_id",
        "remote_use_count", "rights", "state", "view",
    )  # fmt: skip

    def __init__(self, region_id: int, view: BufferView, name: str, rights: Rights) -> None:
        self.region_id = region_id
        self.name = name
        self.address = view.address
        self.nbytes = view.nbytes
        self.rights = rights
        self.view = view
        self.keys: RegionKeys = {}
        self.state = RegionState.RESERVED
        self.reference_count = 1
        self.local_use_count = 0
        self.remote_use_count = 0
        self._also_kept: list[object] = []

    @property
    def end(self) -> int:
        """The address one past the last byte."""
        return self.address + self.nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The memory as numpy sees it: an array made from this holds the region's memory, not the registration.

        The memory goes out as a buffer, not as an address: numpy would keep only this object alive for an address, and
        this object lets go of the memory when the region is unregistered.
        """
        return {"data": self.array.data, "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    @property
    def array(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The memory as bytes: uint8, shape (nbytes,). It stays valid as long as the array is held."""
        view = self.view  # read before the state: a view that lost its owner is seen as gone
        if self.state is RegionState.GONE:
            raise ClosedError(f"{self} is unregistered.", remedy="Keep the array that you registered.")
        return np.asarray(_Held(view))

    @property
    def is_live(self) -> bool:
        """Whether new transfers may use it."""
        return self.state is RegionState.LIVE

    def descriptor(self) -> RegionDescriptor:
        """Return the region as a peer sees it."""
        return RegionDescriptor(self.region_id, self.name, self.address, self.nbytes, self.rights, self.keys)

    def __str__(self) -> str:
        return str(self.descriptor())

    def __repr__(self) -> str:
        references = format_count(self.reference_count, "reference")
        return f"<Region {self.region_id}: {self}, {self.state.value}, {references}>"


class _Held:
    """Shows numpy the memory of a view and keeps its owner alive with it."""

    def __init__(self, view: BufferView) -> None:
        self.__array_interface__ = {
            "data": (view.address, view.read_only),
            "shape": (view.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        self._owner = view.owner
