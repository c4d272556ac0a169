"""The plain data that every floor shares: opcodes, rights, region descriptors, dtypes.

No clock, no memory, no behaviour but what counts as a whole number. Read `memory/regions.py` and
`transports/base.py` for who uses them.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "ADDRESS_MAX",
    "BOOLS",
    "IOVEC_DTYPE",
    "AddressColumn",
    "Opcode",
    "Probe",
    "RegionDescriptor",
    "Rights",
    "as_whole_number",
]

AddressColumn = npt.NDArray[np.int64]
"""A column of byte addresses or byte counts. Signed: user addresses stay below 2**63 on every platform Linux runs on,
and numpy arithmetic between int64 and Python ints never falls to float64 as uint64's does."""

ADDRESS_MAX = 2**63 - 1

IOVEC_DTYPE = np.dtype([("base", np.int64), ("nbytes", np.int64)])
"""struct iovec of readv(2) on 64-bit Linux."""

BOOLS = (bool, np.bool_)
"""No numbers here, though they have an `__index__`: numpy's until 2.3."""


def as_whole_number(value: Any) -> int | None:
    """Return the int that a value is or stands for (`__index__`); None for any other, bools among them."""
    if isinstance(value, BOOLS):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


class Opcode(enum.IntEnum):
    """What a batch does, seen from the side that submits it."""

    WRITE = 1
    READ = 2


class Rights(enum.IntFlag):
    """What peers may do to a region."""

    NONE = 0
    REMOTE_READ = 1
    REMOTE_WRITE = 2
    ALL = 3

    def allows(self, opcode: Opcode) -> bool:
        """Whether a peer with these rights may run `opcode` on the region."""
        return bool(self._value_ & (3 - opcode))  # plain ints: on the path of a 3 us transfer enum arithmetic is dear

    def __str__(self) -> str:
        return {0: "none", 1: "read", 2: "write", 3: "read+write"}[int(self)]


@dataclass(frozen=True)
class RegionDescriptor:
    """One registered region as a peer sees it.

    region_id: unique in its engine's life, never used again, so that a region registered anew at the same address is
    another region.
    keys: what each transport needs to reach it, by transport name; plain JSON values.
    """

    region_id: int
    name: str
    address: int
    nbytes: int
    rights: Rights
    keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The address one past the last byte."""
        return self.address + self.nbytes

    def __str__(self) -> str:
        label = f"region {self.name!r}" if self.name else f"region {self.region_id}"
        return f"{label} [{self.address:#x}, {self.end:#x}) {self.nbytes} bytes, {self.rights}"


@dataclass(frozen=True)
class Probe:
    """Whether a transport can be used on this machine, and if not, why and what to do about it."""

    transport: str
    usable: bool
    reason: str
    remedy: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
