"""What the ladder ended with, by the kinds of both devices (vendor, part, firmware): where the next connection begins.

What one connection ended with may have had a passing cause, and would cost every later one its speed; so that only
what two connections in a row ended with is remembered, and only as long as the process lives.
"""

from __future__ import annotations

import dataclasses
import errno
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvxfer.transports.rdma_ladder import Attempt, QueuePairAttributes

__all__ = ["forget_what_worked", "lower_to_what_worked", "note_what_worked", "what_worked"]

KINDS_MAX = 1024
"""Pairs of kinds that are remembered; half of a key is the peer's word."""

Kinds = tuple[str, str]
"""Of the device here and of the peer's."""


@dataclass(frozen=True)
class _Descent:
    """Where a ladder began and ended."""

    first: QueuePairAttributes
    last: QueuePairAttributes


_lock = threading.Lock()
_once: dict[Kinds, _Descent] = {}
_worked: dict[Kinds, _Descent] = {}


def note_what_worked(
    kinds: Kinds, first: QueuePairAttributes, last: QueuePairAttributes, attempts: Sequence[Attempt]
) -> None:
    """A connection stands with `last`, after a ladder that began at `first` and these failed tries."""
    if any(attempt.errno == errno.ENOMEM for attempt in attempts):
        return  # a want of the moment, not the nature of the device
    with _lock:
        found = _Descent(first, last)
        if first == last:
            _once.pop(kinds, None)
        elif _once.get(kinds) == found:
            _put(_worked, kinds, found)
        else:
            _put(_once, kinds, found)


def lower_to_what_worked(kinds: Kinds, best: QueuePairAttributes) -> QueuePairAttributes:
    """Return the attributes to begin with: `best`, lower where that is known not to work on such devices.

    What the user has set otherwise since then stays: nobody knows whether the devices refuse it.
    """
    with _lock:
        known = _worked.get(kinds)
    if known is None:
        return best
    first, last = known.first, known.last
    return dataclasses.replace(
        best,
        path_mtu=min(best.path_mtu, last.path_mtu),
        read_depth=min(best.read_depth, last.read_depth),
        send_depth=min(best.send_depth, last.send_depth),
        hop_limit=last.hop_limit if best.hop_limit == first.hop_limit else best.hop_limit,
        is_global=last.is_global if best.is_global == first.is_global else best.is_global,
    )


def what_worked() -> Mapping[Kinds, QueuePairAttributes]:
    """Return what is remembered, by the kinds of both devices; for the doctor."""
    with _lock:
        return {kinds: descent.last for kinds, descent in _worked.items()}


def forget_what_worked() -> None:
    """Begin every ladder at its top again; for tests."""
    with _lock:
        _once.clear()
        _worked.clear()


def _put(table: dict[Kinds, _Descent], kinds: Kinds, descent: _Descent) -> None:
    if len(table) >= KINDS_MAX:
        table.clear()
    table[kinds] = descent
