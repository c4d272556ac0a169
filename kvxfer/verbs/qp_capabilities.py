"""How much a queue pair holds: asked, granted, and why a device refuses.

Pure. `queue_pair.py` asks the device.
"""

from __future__ import annotations

import dataclasses
import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.verbs.qp_states import Finding

if TYPE_CHECKING:
    from kvxfer.verbs.device import DeviceLimits

__all__ = ["QueuePairCapabilities", "explain_refusal"]


@dataclass(frozen=True)
class QueuePairCapabilities:
    """struct ibv_qp_cap: requests that wait in each queue, ranges of memory in each, bytes that travel inside one.

    A device may grant more than was asked for, and some grant less: what counts is what `QueuePair.capabilities` says.
    """

    max_send_wr: int
    max_recv_wr: int = 1
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(self).items())


def explain_refusal(error: int, asked: QueuePairCapabilities, limits: DeviceLimits) -> Finding:
    """Return the likeliest reason why ibv_create_qp failed."""
    bounds = {
        "max_send_wr": ("max_qp_wr", limits.max_qp_wr),
        "max_recv_wr": ("max_qp_wr", limits.max_qp_wr),
        "max_send_sge": ("max_sge", limits.max_sge),
        "max_recv_sge": ("max_sge", limits.max_sge),
    }
    for name, (limit_name, limit) in bounds.items():
        if getattr(asked, name) > limit:
            why = f"{name} {getattr(asked, name)}, the device allows {limit} ({limit_name})"
            return Finding(name, why, f"Ask for {limit} at most.")
    if error in (errno.EOPNOTSUPP, errno.ENOSYS):
        return Finding(
            "qp_type", "the device makes no RC queue pairs", "Use another device, or transports other than rdma."
        )
    if asked.max_inline_data and error in (errno.EINVAL, errno.ENOMEM):
        why = f"max_inline_data {asked.max_inline_data}; a device does not say how much it takes, often under 100 bytes"
        return Finding("max_inline_data", why, "Ask for none.")
    if error == errno.EINVAL:
        why = "each number is within the device's limits, but a queue's requests times their size are bounded as well"
        return Finding("max_send_wr", why, "Ask for one sge, then for half as many requests.")
    if error == errno.ENOMEM:
        why = f"queues of that size do not fit any more, or all {limits.max_qp} queue pairs of the device are in use"
        remedy = "Halve max_send_wr, raise the limit of locked memory (`ulimit -l unlimited`), or close queue pairs."
        return Finding("max_send_wr", why, remedy)
    return Finding("ibv_create_qp", "the driver gives no reason", "Look into the kernel's log (`dmesg`).")
