"""What callers pass to Mooncake's methods, checked as pybind11 checks it: the wrong type is a TypeError, at once.

Lists of addresses become numpy columns here. Pure; read next: `engine.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import UsageError
from kvxfer.types import ADDRESS_MAX, AddressColumn

__all__ = ["Rows", "take_column", "take_columns", "take_int", "take_row", "take_text"]

UNSIGNED_MAX = 2**64 - 1
TOTAL_MAX = 2**62
"""Bytes of one transfer: sums of lengths must fit an int64."""


@dataclass(frozen=True)
class Rows:
    """The rows of one transfer: three columns of one length without empty rows, or one row as plain ints."""

    local: AddressColumn | int
    remote: AddressColumn | int
    nbytes: AddressColumn | int
    count: int
    nbytes_total: int

    def columns(self) -> tuple[AddressColumn, AddressColumn, AddressColumn]:
        """Return the rows as columns: local, remote, nbytes."""
        local, remote, nbytes = (np.atleast_1d(np.asarray(one)) for one in (self.local, self.remote, self.nbytes))
        return local, remote, nbytes

    @classmethod
    def of_one(cls, local: int, remote: int, nbytes: int) -> Rows:
        """Return one row; none where it has no bytes."""
        return cls(local, remote, nbytes, 1 if nbytes else 0, nbytes)

    @classmethod
    def of_columns(cls, local: npt.NDArray[Any], remote: npt.NDArray[Any], nbytes: npt.NDArray[Any]) -> Rows:
        """Return the rows that have bytes. Raises UsageError where the columns differ in length."""
        if not len(local) == len(remote) == len(nbytes):
            raise UsageError(
                f"the lists differ in length: {len(local)} buffers, {len(remote)} peer buffer addresses, "
                f"{len(nbytes)} lengths.",
                remedy="Give every row an address on either side and a length.",
            )
        if len(nbytes) and nbytes.min() == 0:
            kept = nbytes > 0
            local, remote, nbytes = local[kept], remote[kept], nbytes[kept]
        for name, column in (("buffers", local), ("peer_buffer_addresses", remote), ("lengths", nbytes)):
            if column.dtype == np.uint64 and len(column) and int(column.max()) > ADDRESS_MAX:
                row = int(column.argmax())
                raise UsageError(
                    f"{name} has {int(column[row]):#x}, which no process can have.",
                    remedy="Check how the addresses and lengths are computed.",
                )
        total = int(nbytes.sum(dtype=np.float64)) if len(nbytes) else 0  # never wraps
        if total > TOTAL_MAX:
            raise UsageError(
                f"the lengths make {total:.3g} bytes, which no process can have.",
                remedy="Check how the addresses and lengths are computed.",
            )
        return cls(
            local.astype(np.int64, copy=False),
            remote.astype(np.int64, copy=False),
            nbytes.astype(np.int64, copy=False),
            len(nbytes),
            total,
        )


def take_text(call: str, name: str, value: object, *, none_is_null: bool = False) -> str:
    """Return a std::string argument. none_is_null: it is a const char* there, and None breaks otherwise."""
    if type(value) is str:
        return value
    if value is None and none_is_null:
        raise RuntimeError(f"{call}(): {name} is None; a text is needed.")  # as Mooncake: basic_string from null
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return value.decode(errors="surrogateescape")
    raise _incompatible(call, name, "a text", value)


def take_int(call: str, name: str, value: object) -> int:
    """Return a size_t or uint64_t argument: an int, or what has `__index__`, from 0 to 2**64 - 1."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _incompatible(call, name, "an int", value) from None
    if not 0 <= number <= UNSIGNED_MAX:
        raise TypeError(f"{call}(): incompatible function arguments: {name} is {number}, not from 0 to 2**64 - 1.")
    return number


def take_column(call: str, name: str, value: object) -> npt.NDArray[Any]:
    """Return a list argument as int64, or as uint64 where a number needs that; shape (n,); never the caller's array.

    numpy would take floats, so the types are looked at first: 1.2 ms for 100,000 rows; np.fromiter takes 1.1 ms more.
    """
    if type(value) is not list and type(value) is not tuple:
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            return _from_array(call, name, value)
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence | np.ndarray):
            raise _incompatible(call, name, "a list of ints", value)
        value = list(value)
    items: list[Any] | tuple[Any, ...] = value
    if set(map(type, items)) <= {int}:
        try:
            column = np.fromiter(items, np.int64, len(items))
        except OverflowError:
            column = None
        if column is not None and (not len(column) or int(column.min()) >= 0):
            return column
    numbers = [take_int(call, f"{name}[{row}]", item) for row, item in enumerate(items)]
    fits = all(number <= ADDRESS_MAX for number in numbers)
    return np.array(numbers, np.int64 if fits else np.uint64)


def take_row(call: str, row: tuple[object, object, object, object], hint: object) -> tuple[str, Rows]:
    """Return the peer's name and the one row of (target_hostname, buffer, peer_buffer_address, length).

    hint: the transport_hint, which must be a text and is ignored.
    """
    target_hostname, buffer, peer_buffer_address, length = row
    take_text(call, "transport_hint", hint)
    return take_text(call, "target_hostname", target_hostname, none_is_null=True), Rows.of_one(
        take_int(call, "buffer", buffer),
        take_int(call, "peer_buffer_address", peer_buffer_address),
        take_int(call, "length", length),
    )


def take_columns(
    call: str, rows: tuple[object, object, object, object], hint: object
) -> tuple[str, list[npt.NDArray[Any]]]:
    """Return the peer's name and the lists of (target_hostname, buffers, peer_buffer_addresses, lengths).

    That the lists have one length is `Rows.of_columns`' to check: an error of the transfer, not of a type.
    """
    target_hostname, *lists = rows
    take_text(call, "transport_hint", hint)
    names = ("buffers", "peer_buffer_addresses", "lengths")
    columns = [take_column(call, name, value) for name, value in zip(names, lists, strict=True)]
    return take_text(call, "target_hostname", target_hostname, none_is_null=True), columns


def _from_array(call: str, name: str, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if value.ndim != 1:
        raise _incompatible(call, name, "a list of ints", value)
    if value.dtype.kind == "i" and len(value) and int(value.min()) < 0:
        raise TypeError(f"{call}(): incompatible function arguments: {name} has the negative number {value.min()}.")
    return np.array(value)


def _incompatible(call: str, name: str, wanted: str, value: object) -> TypeError:
    return TypeError(f"{call}(): incompatible function arguments: {name} must be {wanted}, not {type(value).__name__}.")
