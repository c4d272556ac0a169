"""How much memory this process may lock: what a device reads and writes has to stay where it is (getrlimit(2))."""

from __future__ import annotations

import errno
import resource

__all__ = ["MEMLOCK_ERRNOS", "memlock_nbytes", "memlock_note"]

MEMLOCK_ERRNOS = frozenset({errno.ENOMEM, errno.EPERM, errno.EAGAIN})
"""What the kernel answers above the limit, by the call."""


def memlock_nbytes() -> int | None:
    """Return how much memory this process may lock (`ulimit -l`), in bytes; None for no limit."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def memlock_note(number: int) -> str:
    """Return what to say of the limit after a call about a queue failed with errno `number`: "; ...", or ""."""
    limit = memlock_nbytes()
    if limit is None or number not in MEMLOCK_ERRNOS:
        return ""
    return f"; the locked-memory limit of this process is {limit} bytes, and queues count as regions do"
