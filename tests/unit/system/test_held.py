"""What the raw calls that keep the GIL make of what Python's own wrappers hide."""

from __future__ import annotations

import os
import signal

from kvxfer.system.held import Readable


def test_a_signal_is_not_taken_for_the_end_of_a_process() -> None:
    """poll(2) ends with EINTR also where it does not wait."""
    pidfd = os.pidfd_open(os.getpid())
    has_ended = Readable(pidfd)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 2e-5, 2e-5)
    try:
        assert not any(has_ended() for _ in range(50_000))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        os.close(pidfd)
