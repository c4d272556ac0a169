"""Text made fit for a message or a log line: what a peer wrote, what it may be, what a caller passed, several reasons
in one sentence, times."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

__all__ = ["clean", "format_count", "format_seconds", "guess_protocol", "join_reasons", "name_kind", "show"]

_STRANGERS: tuple[tuple[bytes, str], ...] = (
    (b"SSH-", "an SSH server"),
    (b"HTTP/", "an HTTP server"),
    (b"GET ", "an HTTP client"),
    (b"HEAD ", "an HTTP client"),
    (b"POST ", "an HTTP client"),
    (b"PUT ", "an HTTP client"),
    (b"PRI * HT", "an HTTP/2 client"),
    (b"OPTIONS ", "an HTTP client"),
    (b"CONNECT ", "an HTTP client"),
    (b"DELETE ", "an HTTP client"),
    (b"\x16\x03", "a TLS client or server"),
    (b"\x15\x03", "a TLS alert"),
    (b"\x93kvxfer\n", "a kvxfer engine"),
)


def clean(text: str, length_max: int = 200) -> str:
    """Return `text` in one line, without control characters and not longer than that."""
    cut = text[: 4 * length_max]  # bounds the work; what is dropped below still leaves enough to fill the length
    kept = cut if cut.isascii() and cut.isprintable() else "".join(map(_printable, cut))
    return kept if len(kept) <= length_max else kept[: length_max - 3] + "..."


def show(value: object, length_max: int = 80) -> str:
    """Return what a caller passed, as Python writes it, in one line that is not longer than that."""
    try:
        return clean(repr(value), length_max)
    except Exception:  # its own __repr__ fails: that is not what the message is about
        return name_kind(value)


def name_kind(value: object) -> str:
    """Return the type of what a caller passed, with its article: "a str", "an int", "bytes", "None"."""
    if value is None or type(value) is bytes:
        return "None" if value is None else "bytes"
    name = type(value).__name__
    return f"{'an' if name.startswith((*'aeioAEIO', 'ndarray')) else 'a'} {name}"


def guess_protocol(first_bytes: bytes) -> str:
    """Return who begins a connection like this, such as "an HTTP server"; "" for what is not known."""
    return next((who for start, who in _STRANGERS if first_bytes.startswith(start)), "")


def join_reasons(reasons: Mapping[str, str]) -> str:
    """Return "name: reason; name: reason" without a full stop at its end, whether or not the reasons have one."""
    return "; ".join(f"{name}: {reason.removesuffix('.')}" for name, reason in reasons.items())


def format_count(count: int, noun: str) -> str:
    """Return "1 row" or "2 rows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_seconds(seconds: float) -> str:
    """Return a time in seconds with the three digits that mean something: 0.0123, 3, 86400."""
    return f"{seconds:.3g}" if abs(seconds) < 999.5 else f"{seconds:.0f}"


def _printable(letter: str) -> str:
    if letter in "\n\r\t":
        return " "
    return "" if unicodedata.category(letter).startswith("C") else letter
