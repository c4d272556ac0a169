"""Cut a region into chunks that one memory registration may cover.

Pure: ints in, a structured array out. Called by a transport's `register`; `slices.cut_slices` reads the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import ConfigError, UsageError
from kvxfer.types import ADDRESS_MAX

__all__ = ["CHUNK_DTYPE", "ChunkArray", "plan_chunks"]

CHUNK_DTYPE = np.dtype([("address", np.int64), ("nbytes", np.int64)])

ChunkArray = npt.NDArray[np.void]
"""Rows of CHUNK_DTYPE, ascending in address, without overlap."""


def plan_chunks(address: int, nbytes: int, chunk_nbytes_max: int, alignment: int = 4096) -> ChunkArray:
    """Return the fewest chunks that cover `[address, address + nbytes)` exactly, in order.

    chunk_nbytes_max: `max_mr_size` of the device or the caller's override, in bytes; devices without a limit say
    2**64 - 1.
    alignment: a power of two; every border between two chunks is a multiple of it, so that no page is pinned by two
    registrations. 4096 is the page of x86-64; pass 2 MiB for memory on huge pages.

    Raises ConfigError if a chunk could not hold one aligned page.
    """
    if alignment < 1 or alignment & (alignment - 1):
        raise ConfigError(
            f"alignment {alignment} is not a power of two.", remedy="Pass the page size.", alignment=alignment
        )
    if chunk_nbytes_max < alignment:
        raise ConfigError(
            f"chunk_nbytes_max {chunk_nbytes_max} is below the alignment of {alignment} bytes.",
            remedy=f"Allow at least {alignment} bytes per chunk.",
            chunk_nbytes_max=chunk_nbytes_max,
            alignment=alignment,
        )
    if nbytes < 1 or not 0 <= address <= ADDRESS_MAX - nbytes:
        raise UsageError(
            f"{nbytes} bytes at {address:#x} are no range of memory.",
            remedy="Pass at least one byte below 2**63.",
            address=address,
            nbytes=nbytes,
        )
    borders = _plan_borders(address, address + nbytes, chunk_nbytes_max, alignment)
    chunks = np.empty(len(borders) - 1, CHUNK_DTYPE)
    chunks["address"] = borders[:-1]
    chunks["nbytes"] = np.diff(borders)
    return chunks


def _plan_borders(start: int, end: int, limit: int, alignment: int) -> npt.NDArray[np.int64]:
    """Return start, the inner borders and end: each inner border as late as `limit` and `alignment` let it be."""
    if end - start <= limit:
        return np.array([start, end], np.int64)
    first = (start + limit) // alignment * alignment  # > start, because limit >= alignment
    step = limit // alignment * alignment
    # A border is needed only while more than `limit` is left from the border before it.
    rest: npt.NDArray[Any] = np.arange(first + step, end - (limit - step), step, dtype=np.int64)
    return np.concatenate([np.array([start, first], np.int64), rest, np.array([end], np.int64)])
