"""The bytes of Mooncake's tcp data port: one header for each row, its payload, and since version 2 a status.

    header    uint64 size, uint64 address, uint8 opcode, 7 bytes of padding; little-endian
    WRITE     header, payload ->     version 2: status once the last byte is applied; version 1: nothing at all
    READ      header ->              version 2: status, then the payload; version 1: the payload
    status    uint64; after any other than OK the serving side closes the connection

A connection carries any number of rows, one after the other. A request of version 2 has the high bit of its opcode
set; a serving side says in its descriptor (tcp_proto_version) whether it knows that.
Source: tcp_transport_session_impl.h of Mooncake 0.3.13.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxfer.errors import RemoteProtocolError
from kvxfer.types import AddressColumn, Opcode

__all__ = [
    "HEADER_DTYPE",
    "HEADER_NBYTES",
    "STATUS_DTYPE",
    "STATUS_NBYTES",
    "STATUS_OK",
    "STATUS_REJECTED",
    "Header",
    "header_column",
    "is_status",
    "pack_status",
]

_HEADER = struct.Struct("<QQB7x")
HEADER_NBYTES = _HEADER.size
HEADER_DTYPE = np.dtype([("nbytes", "<u8"), ("address", "<u8"), ("opcode", "u1"), ("padding", "u1", (7,))])
STATUS_DTYPE = np.dtype("<u8")
STATUS_NBYTES = 8
STATUS_MAGIC = 0x4D435456 << 32  # "MCTV"
STATUS_OK = STATUS_MAGIC
STATUS_REJECTED = STATUS_MAGIC | 1
"""The rows are not inside one registered buffer there."""
VERSION_2 = 0x80
NBYTES_MAX = 1 << 46
"""The most payload of one row; more than any machine's memory."""

_NUMBERS = {Opcode.READ: 0, Opcode.WRITE: 1}
_OPCODES = {number: opcode for opcode, number in _NUMBERS.items()}


class Header(NamedTuple):
    """One row's request. has_status: version 2."""

    opcode: Opcode
    address: int
    nbytes: int
    has_status: bool

    def pack(self) -> bytes:
        """Return its bytes."""
        return _HEADER.pack(self.nbytes, self.address, _NUMBERS[self.opcode] | (VERSION_2 if self.has_status else 0))

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Header:
        """Read a header; raises RemoteProtocolError for an opcode, a size or an address that cannot be.

        The padding is what the sender's memory held; Mooncake does not clear it. Mooncake takes every unknown opcode
        for a READ; this is not followed.
        """
        nbytes, address, number = _HEADER.unpack(data)
        opcode = _OPCODES.get(number & ~VERSION_2)
        if opcode is None:
            raise RemoteProtocolError(f"a request on the tcp data port has opcode {number}: not known.")
        if not 1 <= nbytes <= NBYTES_MAX or address >= 1 << 63:
            raise RemoteProtocolError(f"a request on the tcp data port asks for {nbytes} bytes at {address:#x}.")
        return cls(opcode, address, nbytes, bool(number & VERSION_2))


def header_column(
    opcode: Opcode, addresses: AddressColumn, nbytes: AddressColumn, *, has_status: bool
) -> npt.NDArray[np.void]:
    """Return the headers of many rows, shape (n,), HEADER_DTYPE: the bytes of row i are those of `Header.pack`."""
    headers: npt.NDArray[np.void] = np.zeros(len(addresses), HEADER_DTYPE)
    headers["nbytes"] = nbytes
    headers["address"] = addresses
    headers["opcode"] = _NUMBERS[opcode] | (VERSION_2 if has_status else 0)
    return headers


def pack_status(status: int) -> bytes:
    """Return the bytes of a status."""
    return status.to_bytes(STATUS_NBYTES, "little")


def is_status(value: int) -> bool:
    """Whether this is a status at all. A serving side of version 1, asked by version 2, answers with payload."""
    return value & ~0xFFFFFFFF == STATUS_MAGIC
