"""The bytes of a data connection: one header per batch, two columns of rows, the payload without any framing.

    request    REQUEST header, then if row_count > 1 the columns (addresses int64[n], nbytes int64[n]), the
               notification, and for a WRITE the payload: all rows one after the other
    response   RESPONSE header, then for an error its text, or for a READ the payload

Little-endian, fixed sizes; every length has a limit that is checked before anything is allocated or applied.
"""

from __future__ import annotations

import json
import struct
from typing import NamedTuple

import numpy as np

from kvxfer.errors import KvxferError, RemoteAccessError, RemoteProtocolError, TransferError

__all__ = ["REQUEST_NBYTES", "RESPONSE_NBYTES", "ROWS_MAX", "Request", "Response"]

ROWS_MAX = 1 << 17
"""The most rows of one request: 2 MiB of columns at the serving side. A larger batch is sent as several requests."""
NBYTES_MAX = 1 << 46
"""The most payload of one request; more than any machine's memory."""
ERROR_NBYTES_MAX = 1 << 15

_REQUEST = struct.Struct("<IBBHIIQQqq")
_RESPONSE = struct.Struct("<IBBHQQ")
REQUEST_NBYTES = _REQUEST.size
RESPONSE_NBYTES = _RESPONSE.size
_REQUEST_MAGIC = 0x5258564B  # "KVXR"
_RESPONSE_MAGIC = 0x4158564B  # "KVXA"
OK, REFUSED = 0, 1
COLUMN_DTYPE = np.dtype("<i8")


class Request(NamedTuple):
    """opcode: 1 WRITE, 2 READ. address, nbytes: the row where row_count is 1, else 0 and the sum over all rows."""

    opcode: int
    row_count: int
    notify_nbytes: int
    number: int
    payload_nbytes: int
    address: int
    nbytes: int
    has_notify: bool

    def pack(self) -> bytes:
        """Return the header."""
        flags = 1 if self.has_notify else 0
        return _REQUEST.pack(
            _REQUEST_MAGIC,
            self.opcode,
            flags,
            0,
            self.row_count,
            self.notify_nbytes,
            self.number,
            self.payload_nbytes,
            self.address,
            self.nbytes,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview, notify_nbytes_max: int) -> Request:
        """Read a header; raises RemoteProtocolError naming the field that cannot be."""
        magic, opcode, flags, zero, rows, notify, number, payload, address, nbytes = _REQUEST.unpack(data)
        if magic != _REQUEST_MAGIC:
            raise RemoteProtocolError(f"a request began with {bytes(data[:8]).hex()}, not with the magic number.")
        if opcode not in (1, 2) or flags > 1 or zero:
            raise RemoteProtocolError(f"a request has opcode {opcode}, flags {flags}: not known.")
        if not 1 <= rows <= ROWS_MAX:
            raise RemoteProtocolError(f"a request has {rows} rows; from 1 to {ROWS_MAX} are allowed.")
        if notify > notify_nbytes_max or (notify and not flags):
            raise RemoteProtocolError(f"a notification of {notify} bytes; at most {notify_nbytes_max} are allowed.")
        if not 1 <= payload <= NBYTES_MAX:
            raise RemoteProtocolError(f"a request of {payload} bytes; from 1 to {NBYTES_MAX} are allowed.")
        if rows == 1 and not (nbytes == payload and address >= 0):
            raise RemoteProtocolError(f"a request of one row, {nbytes} bytes at {address}, has {payload} of payload.")
        return cls(opcode, rows, notify, number, payload, address, nbytes, bool(flags))


class Response(NamedTuple):
    """The answer to request `number`: OK with its payload size (READ) or 0, or REFUSED with the size of its text."""

    status: int
    number: int
    nbytes: int

    def pack(self) -> bytes:
        """Return the header."""
        return _RESPONSE.pack(_RESPONSE_MAGIC, self.status, 0, 0, self.number, self.nbytes)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Response:
        """Read a header; raises RemoteProtocolError naming the field that cannot be."""
        magic, status, zero, zero2, number, nbytes = _RESPONSE.unpack(data)
        if magic != _RESPONSE_MAGIC or zero or zero2 or status > REFUSED:
            raise RemoteProtocolError(f"a response header is {bytes(data).hex()}: not one of kvxfer's.")
        if status == REFUSED and nbytes > ERROR_NBYTES_MAX:
            raise RemoteProtocolError(f"a refusal of {nbytes} bytes; at most {ERROR_NBYTES_MAX} are allowed.")
        return cls(status, number, nbytes)


def pack_refusal(error: KvxferError) -> bytes:
    """Return the text of a refusal: the error's name, words, remedy and rows."""
    fields = {
        "code": type(error).__name__,
        "message": error.message[:2000],
        "remedy": error.remedy[:2000],
        "rows": [int(row) for row in getattr(error, "rows", ())[:100]],
    }
    return json.dumps(fields).encode()[:ERROR_NBYTES_MAX]


def unpack_refusal(data: bytes, peer: str) -> KvxferError:
    """Return the error that a peer's refusal means here."""
    try:
        fields = json.loads(data)
        code, message, remedy = (_clean(fields[name]) for name in ("code", "message", "remedy"))
        rows = tuple(int(row) for row in fields.get("rows", ()))[:100]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return RemoteProtocolError(f"{peer} refused a batch with {data!r:.100}.", peer=peer)
    kind = RemoteAccessError if code in ("NotRegisteredError", "AccessDeniedError") else TransferError
    return kind(f"{peer} refused the batch: {message}", remedy=remedy, peer=peer, code=code, rows=rows)


def _clean(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(text)
    return "".join(ch for ch in text if ch.isprintable())[:4000]
