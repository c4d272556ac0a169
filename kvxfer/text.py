"""Text that a peer wrote, made fit for a message or a log line."""

from __future__ import annotations

import unicodedata

__all__ = ["clean"]


def clean(text: str, length_max: int = 200) -> str:
    """Return `text` in one line, without control characters and not longer than that."""
    cut = text[: 4 * length_max]  # bounds the work; what is dropped below still leaves enough to fill the length
    kept = cut if cut.isascii() and cut.isprintable() else "".join(map(_printable, cut))
    return kept if len(kept) <= length_max else kept[: length_max - 3] + "..."


def _printable(letter: str) -> str:
    if letter in "\n\r\t":
        return " "
    return "" if unicodedata.category(letter).startswith("C") else letter
