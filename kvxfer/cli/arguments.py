"""Turn the words of a command line into values: sizes, lists, addresses, ports. Used as argparse types.

Pure. A word that cannot be meant raises ArgumentTypeError with what would be right; nothing is guessed.
"""

from __future__ import annotations

import ipaddress
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

from kvxfer.addresses import parse_host_port
from kvxfer.config import TRANSPORT_NAMES
from kvxfer.errors import KvxferError

__all__ = [
    "OPERATIONS",
    "TRANSPORT_NAMES",
    "address",
    "listed",
    "operation",
    "parallel",
    "peer",
    "port",
    "positive",
    "seconds",
    "size",
    "transport",
]

OPERATIONS = ("write", "read")
_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "kb": 10**3,
    "m": 1 << 20,
    "mib": 1 << 20,
    "mb": 10**6,
    "g": 1 << 30,
    "gib": 1 << 30,
    "gb": 10**9,
    "t": 1 << 40,
    "tib": 1 << 40,
    "tb": 10**12,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
SIZE_MAX = 1 << 50
PORT_MAX = 65535
PARALLEL_MAX = 64
SECONDS_MAX = 3600.0

T = TypeVar("T")


def size(text: str) -> int:
    """Bytes from 4096, 4KiB, 64K, 1.5GiB (binary units) or 1MB (decimal units)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ArgumentTypeError(f"{text!r} is no size; write it as 65536, 64KiB, 1.5GiB or 1MB")
    number, unit = match[1], _UNITS[match[2].lower()]
    nbytes = float(number) * unit if "." in number else int(number) * unit
    if nbytes != int(nbytes):
        raise ArgumentTypeError(f"{text!r} is no whole number of bytes")
    if not 1 <= nbytes <= SIZE_MAX:
        raise ArgumentTypeError(f"{text!r} is out of range; a size is at least 1 byte and at most 1024TiB")
    return int(nbytes)


def positive(text: str) -> int:
    """A whole number, at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def parallel(text: str) -> int:
    """How many at once: 1 to 64."""
    if not text.strip().isdecimal() or not 1 <= int(text) <= PARALLEL_MAX:
        raise ArgumentTypeError(f"{text!r} is no number of 1 to {PARALLEL_MAX}")
    return int(text)


def seconds(text: str) -> float:
    """A time of 1 to 3600 seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1.0 <= value <= SECONDS_MAX:
        raise ArgumentTypeError(f"{text!r} is no number of seconds from 1 to {SECONDS_MAX:.0f}")
    return value


def port(text: str) -> int:
    """A port number; 0 lets the system choose."""
    if not text.strip().isdecimal() or int(text) > PORT_MAX:
        raise ArgumentTypeError(f"{text!r} is no port; ports are 0 (any free one) to {PORT_MAX}")
    return int(text)


def peer(text: str) -> str:
    """HOST:PORT or [V6]:PORT, checked for its form and returned as it is."""
    try:
        target = parse_host_port(text)
    except KvxferError as error:
        raise ArgumentTypeError(str(error).rstrip(".")) from None
    if target.port == 0:
        raise ArgumentTypeError(f"{text!r} names port 0; give the port that the peer printed")
    return text


def address(text: str) -> str:
    """An IP address."""
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no IP address") from None


def transport(text: str) -> str:
    """The name of a transport."""
    return _one_of(text, "transport", TRANSPORT_NAMES)


def operation(text: str) -> str:
    """The name of an operation: write or read."""
    return _one_of(text, "operation", OPERATIONS)


def listed(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return a type for a comma-separated list of what `parse` takes; doubles are dropped."""

    def parse_list(text: str) -> tuple[T, ...]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words:
            raise ArgumentTypeError(f"{text!r} is an empty list")
        return tuple(dict.fromkeys(parse(word) for word in words))

    return parse_list


def _one_of(text: str, kind: str, names: tuple[str, ...]) -> str:
    if text.strip() not in names:
        raise ArgumentTypeError(f"no {kind} is called {text!r}; there are {', '.join(names)}")
    return text.strip()
