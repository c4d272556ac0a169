"""The attributes of a queue pair, and what is lowered when a device refuses them: one table.

No two kinds of device take the same attributes, and a refusal is a bare errno. So a connection begins with the best
values that both ends say they can do, and goes down the ladder one rung at a time, with a fresh queue pair for each try
(Intel irdma does not take one back to RESET). Every rung is recorded; what worked is remembered for the kind of device.
Pure. The side that opens the connection decides for both, so that there is one ladder and not two that run against each
other. Read next: `rdma_connect.py`, which climbs down.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.verbs.library import errno_name

__all__ = ["FINAL_ERRNOS", "LADDER", "Attempt", "Ladder", "QueuePairAttributes"]

MTU_STEPS = (4096, 2048, 1024, 512, 256)
READ_DEPTH_STEPS = (16, 4, 1)
SEND_DEPTH_STEPS = (128, 64, 32, 16)
HOP_LIMIT_STEPS = (255, 1)


@dataclass(frozen=True)
class QueuePairAttributes:
    """What both ends of one connection are set to.

    path_mtu: bytes. read_depth: READs that are on their way at once. send_depth: work requests that the queue holds.
    timeout: of an acknowledgement, 4.096 us * 2**timeout per try. is_global: None for what the link needs.
    """

    path_mtu: int
    read_depth: int
    send_depth: int = 256
    timeout: int = 18  # 1.07 s: long enough for a link to come back; NCCL's value since 2.14
    retry_count: int = 6  # 7 is "for ever" on rxe and others
    rnr_retry: int = 6  # never needed: what takes a receive is counted (rdma_fences.py)
    min_rnr_timer: int = 12  # 0.64 ms; every engine's value
    hop_limit: int = 64  # crosses routers; 1 would stay in the rack
    traffic_class: int = 0
    service_level: int = 0
    is_global: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Attempt:
    """One try that failed: where, with what, why, and what was changed for the next."""

    step: str
    """create, INIT, RTR or RTS."""
    side: str
    """local or remote."""
    errno: int
    reason: str
    attributes: QueuePairAttributes
    change: str

    def __str__(self) -> str:
        name = errno_name(self.errno) if self.errno else "refused"
        return f"{self.step} ({self.side}) {name}; {self.change}"


def _step_down(name: str, steps: tuple[int, ...]) -> Callable[[QueuePairAttributes], QueuePairAttributes | None]:
    def lower(attributes: QueuePairAttributes) -> QueuePairAttributes | None:
        for step in steps:
            if step < getattr(attributes, name):
                return dataclasses.replace(attributes, **{name: step})  # type: ignore[arg-type]
        return None

    return lower


def _other_hop_limit(attributes: QueuePairAttributes) -> QueuePairAttributes | None:
    for step, after in zip((64, *HOP_LIMIT_STEPS), HOP_LIMIT_STEPS, strict=False):
        if attributes.hop_limit == step:
            return dataclasses.replace(attributes, hop_limit=after)
    return None


def _with_global_route(attributes: QueuePairAttributes) -> QueuePairAttributes | None:
    return dataclasses.replace(attributes, is_global=True) if attributes.is_global is None else None


_read_depth = _step_down("read_depth", READ_DEPTH_STEPS)
_path_mtu = _step_down("path_mtu", MTU_STEPS)
_send_depth = _step_down("send_depth", SEND_DEPTH_STEPS)

_Lower = Callable[[QueuePairAttributes], QueuePairAttributes | None]

LADDER: Mapping[str, tuple[_Lower, ...]] = {
    # The product of requests and their size is bounded, not each alone; a device has room for so many queues.
    "create": (_send_depth,),
    "RTR": (
        # A read depth above the device's, or above what is left of a budget for the whole device (Ionic).
        _read_depth,
        # An InfiniBand port that wants a global route header and does not say so.
        _with_global_route,
        _other_hop_limit,
        # An active MTU that the port does not carry after all.
        _path_mtu,
    ),
    "RTS": (_read_depth,),
}
"""For each step: which attributes are lowered, what costs least first. Source: docs/rdma.md, "The ladder"."""
FINAL_ERRNOS = frozenset({errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENODEV, errno.EPERM})
"""What no attribute helps with: the network does not answer, the device is gone, this process may not. For all else
drivers have no common word: beside EINVAL and ENOMEM they say EOPNOTSUPP, ERANGE, E2BIG, ENOSPC and EIO."""


class Ladder:
    """The way down for one pair of ports: `attributes` is what to try now.

    One attribute at a time is lowered, all the way, with the others as they were: mostly one is at fault, and the
    others are worth keeping. Where none helps alone, all are at their lowest once; then it is over.
    """

    def __init__(self, first: QueuePairAttributes) -> None:
        self.first = self.attributes = first
        self._place = ("", "")
        self._rungs: Iterator[QueuePairAttributes] = iter(())
        self._base = first

    def descend(self, step: str, side: str, number: int) -> str:
        """Go down after `step` failed at `side` with errno `number`; what was changed, or "" where nothing is left.

        Another pair of GIDs, or of devices, may still do.
        """
        if (step, side) != self._place:  # what was lowered for another step helped there
            self._place, self._base = (step, side), self.attributes
            self._rungs = _rungs(self._base, step, number)
        lowered = next(self._rungs, None)
        if lowered is None:
            return ""
        self.attributes = lowered
        before, after = self._base.to_json(), lowered.to_json()
        return ", ".join(f"{name} {before[name]} -> {after[name]}" for name in after if before[name] != after[name])


def _rungs(base: QueuePairAttributes, step: str, number: int) -> Iterator[QueuePairAttributes]:
    ways = () if number in FINAL_ERRNOS or not number else LADDER.get(step, ())
    lowest = base
    for lower in ways:
        alone = base
        while (further := lower(alone)) is not None:
            alone = further
            yield alone
        while (further := lower(lowest)) is not None:
            lowest = further
    if len(ways) > 1:
        yield lowest
