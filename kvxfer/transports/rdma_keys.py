"""Tables of keys: which chunk of registered memory has which key on one device, ours and the peer's.

Pure. What the peer told is checked here: a table that does not cover a region whole is refused by name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import TransferError
from kvxfer.memory.chunks import CHUNK_DTYPE, ChunkArray
from kvxfer.memory.regions import Region
from kvxfer.memory.slices import locate_one
from kvxfer.types import AddressColumn, RegionDescriptor

__all__ = ["KeyTable", "read_remote_keys"]

KeyColumn = npt.NDArray[np.uint32]


class KeyTable:
    """Chunks of registered memory, ascending in address, and the key of each on one device."""

    __slots__ = ("_end_ints", "_key_ints", "_start_ints", "chunks", "ends", "keys", "starts")

    def __init__(self, chunks: ChunkArray, keys: KeyColumn) -> None:
        self.chunks = chunks
        self.keys = keys
        self.starts: AddressColumn = np.ascontiguousarray(chunks["address"])
        self.ends: AddressColumn = self.starts + chunks["nbytes"]
        self._start_ints: list[int] = self.starts.tolist()
        self._end_ints: list[int] = self.ends.tolist()
        self._key_ints: list[int] = keys.tolist()

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[int, int, int]]) -> KeyTable:
        """Return a table of (address, nbytes, key) rows, in any order."""
        ordered = sorted(rows)
        chunks = np.array([row[:2] for row in ordered], CHUNK_DTYPE)
        return cls(chunks, np.array([row[2] for row in ordered], np.uint32))

    def find_region(self, region: Region | RegionDescriptor) -> int | None:
        """Return the key of the one chunk that covers a region whole; None where there is no such one."""
        at = bisect_right(self._start_ints, region.address) - 1
        return self._key_ints[at] if at >= 0 and region.end <= self._end_ints[at] else None

    def find_one(self, addresses: AddressColumn, nbytes: AddressColumn) -> int | None:
        """Return the key of the one chunk that holds all ranges; None where there is none, or not surely."""
        at = locate_one(addresses, nbytes, self.starts, self.ends)
        return None if at is None else self._key_ints[at]


def read_remote_keys(regions: Sequence[RegionDescriptor], nic: str, peer: str) -> KeyTable:
    """Return the keys of a peer's regions on one of its devices, as the peer told them.

    Raises TransferError where it told none that cover a region whole: it breaks the protocol.
    """
    rows: list[tuple[int, int, int]] = []
    for region in regions:
        told = region.keys.get("rdma", {}).get("nics")
        chunks = _read_chunks(told.get(nic) if isinstance(told, dict) else None)
        ends = [address + nbytes for address, nbytes, _ in chunks]
        is_whole = (
            bool(chunks)
            and chunks[0][0] == region.address
            and ends[-1] == region.end
            and all(end == after[0] for end, after in zip(ends, chunks[1:], strict=False))
        )
        if not is_whole:
            raise TransferError(
                f"{peer} told no keys that cover {region} on its device {nic}.",
                remedy="Both ends must run a kvxfer of one version; compare `kvxfer --version`.",
                peer=peer,
            )
        rows += chunks
    return KeyTable.of_rows(rows)


def _read_chunks(told: Any) -> list[tuple[int, int, int]]:
    """Return (address, nbytes, key) rows from JSON; nothing where any is not what it should be."""
    if not isinstance(told, list):
        return []
    chunks = [tuple(row) for row in told if isinstance(row, list) and len(row) == 3]
    if len(chunks) != len(told) or any(type(value) is not int for row in chunks for value in row):
        return []
    fits = all(nbytes > 0 and 0 <= address < 2**63 and 0 <= key < 2**32 for address, nbytes, key in chunks)
    return chunks if fits else []
