"""Which partition of an InfiniBand subnet the queue pairs of a port are in: the choice of a row of its key table.

RoCE has the default partition only (InfiniBand specification 1.4, annex A17.4.8), and some drivers no table for it, so
that on Ethernet nothing is asked. Read next: `port_offer.py`, which compares the partitions of two ports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.errors import DeviceUnusableError, VerbsError
from kvxfer.verbs.enums import LinkLayer

if TYPE_CHECKING:
    from kvxfer.verbs.device import Context, Port

__all__ = ["DEFAULT_PKEY", "FULL_MEMBER", "PARTITION", "Partition", "choose_partition", "read_partitions"]

DEFAULT_PKEY = 0xFFFF
FULL_MEMBER = 0x8000
PARTITION = 0x7FFF
"""The number of a partition in its key; the high bit is the membership. Source: InfiniBand specification 1.4, 10.9."""


@dataclass(frozen=True)
class Partition:
    """A row of a partition key table."""

    index: int
    pkey: int

    @property
    def is_full(self) -> bool:
        """Whether the membership is full; limited members reach full ones only."""
        return bool(self.pkey & FULL_MEMBER)

    def __str__(self) -> str:
        return f"{self.pkey:#06x} in row {self.index}" + ("" if self.is_full else ", limited member")


def read_partitions(context: Context, port: Port) -> list[Partition]:
    """Return the rows of an InfiniBand port's table that are in use; one that cannot be read counts as empty.

    Of an Ethernet port the default partition is returned, and nothing is asked.
    """
    if port.link_layer is not LinkLayer.INFINIBAND:
        return [Partition(0, DEFAULT_PKEY)]
    rows = (_read(context, port, index) for index in range(port.pkey_tbl_len))
    return [row for row in rows if row is not None]


def choose_partition(context: Context, port: Port, index: int | None = None) -> Partition:
    """Return the row to use: the one that the user fixed by its `index`, else the first full member, else the first.

    Raises DeviceUnusableError where that row is beyond the table or empty, and where no row is in use.
    """
    if port.link_layer is not LinkLayer.INFINIBAND:
        return Partition(0, DEFAULT_PKEY)
    if index is None:
        return _choose(context, port)
    if not 0 <= index < port.pkey_tbl_len:
        raise _unusable(
            port, f"pkey_index {index} is beyond its partition key table of {port.pkey_tbl_len} rows", index
        )
    found = _read(context, port, index)
    if found is None:
        raise _unusable(port, f"pkey_index {index} is an empty row of its partition key table", index)
    return found


def _choose(context: Context, port: Port) -> Partition:
    limited: Partition | None = None
    for index in range(port.pkey_tbl_len):  # mostly row 0: the others are not asked for
        row = _read(context, port, index)
        if row is not None and row.is_full:
            return row
        limited = limited or row
    if limited is None:
        raise _unusable(port, f"its partition key table of {port.pkey_tbl_len} rows has none in use", None)
    return limited


def _read(context: Context, port: Port, index: int) -> Partition | None:
    try:
        pkey = context.query_pkey(port.number, index)
    except VerbsError:
        return None
    return Partition(index, pkey) if pkey & PARTITION else None


def _unusable(port: Port, reason: str, index: int | None) -> DeviceUnusableError:
    return DeviceUnusableError(
        f"{port.device} port {port.number} cannot be used: {reason}.",
        remedy="Set pkey_index (KVXFER_PKEY_INDEX) to a row that `kvxfer devices` shows, or unset it; the subnet "
        "manager fills the table.",
        device=port.device,
        port=port.number,
        reason=reason,
        index=index,
        length=port.pkey_tbl_len,
    )
