"""Read values that a peer sent as JSON: each has a type, a range or a length, and a name for the error.

Pure. What does not fit raises RemoteProtocolError that names the field and what it may be; nothing is coerced, and text
that could not be a name never reaches a message. Used by `gid.py` and `port_offer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvxfer.errors import RemoteProtocolError

__all__ = ["take_bool", "take_hex", "take_int", "take_list", "take_name", "take_object"]

_NAME = re.compile(r"[A-Za-z0-9_.:@+-]*")


def take_int(obj: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return a whole number of `low` to `high`."""
    value = obj.get(name)
    if type(value) is not int or not low <= value <= high:  # True is no number
        raise _refuse(name, f"a whole number of {low} to {high}")
    return value


def take_bool(obj: Mapping[str, Any], name: str) -> bool:
    """Return true or false."""
    value = obj.get(name)
    if not isinstance(value, bool):
        raise _refuse(name, "true or false")
    return value


def take_name(obj: Mapping[str, Any], name: str, length_max: int) -> str:
    """Return the name of a device or an interface; may be empty."""
    value = obj.get(name)
    if not isinstance(value, str) or len(value) > length_max or not _NAME.fullmatch(value):
        raise _refuse(name, f"a name of at most {length_max} characters")
    return value


def take_hex(obj: Mapping[str, Any], name: str, nbytes: int) -> bytes:
    """Return `nbytes` bytes from lower-case hex digits."""
    value = obj.get(name)
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{2 * nbytes}}}", value):
        raise _refuse(name, f"{2 * nbytes} lower-case hex digits")
    return bytes.fromhex(value)


def take_list(obj: Mapping[str, Any], name: str, length_max: int) -> list[Any]:
    """Return a list of at most `length_max` items."""
    value = obj.get(name)
    if not isinstance(value, list) or len(value) > length_max:
        raise _refuse(name, f"a list of at most {length_max} items")
    return value


def take_object(value: Any, name: str) -> Mapping[str, Any]:
    """Return `value` as a JSON object."""
    if not isinstance(value, dict):
        raise _refuse(name, "an object")
    return value


def _refuse(name: str, wanted: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"the peer's RDMA field {name!r} is missing or not {wanted}.", field=name)
