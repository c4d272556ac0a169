"""Memory as transfers see it: what can be registered, who uses it, and how requests map onto it.

buffers: an object of the caller -> BufferView (address, size, owner). chunks: a region -> pieces that one registration
may cover. region: one range that is registered. regions: RegionTable, the book of all and of their uses. columns:
requests as columns, checked. slices: columns found in regions, joined and cut. Nothing here copies memory, opens a
device or reads a clock. Not imported here, because it loads verbs: registration, a region -> chunks with their keys
on RDMA devices.
"""

from kvxfer.memory.buffers import BufferView, buffer_view
from kvxfer.memory.chunks import CHUNK_DTYPE, plan_chunks
from kvxfer.memory.columns import Rows, as_columns, as_rows, bounds
from kvxfer.memory.region import Region
from kvxfer.memory.regions import RegionSnapshot, RegionTable, Reservation
from kvxfer.memory.slices import (
    SLICE_DTYPE,
    coalesce,
    cut_slices,
    distinct,
    locate,
    locate_one,
    row_numbers,
)

__all__ = [
    "CHUNK_DTYPE",
    "SLICE_DTYPE",
    "BufferView",
    "Region",
    "RegionSnapshot",
    "RegionTable",
    "Reservation",
    "Rows",
    "as_columns",
    "as_rows",
    "bounds",
    "buffer_view",
    "coalesce",
    "cut_slices",
    "distinct",
    "locate",
    "locate_one",
    "plan_chunks",
    "row_numbers",
]
