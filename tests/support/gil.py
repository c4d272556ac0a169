"""Who has the GIL: what a copy that gives it up costs shows only beside a thread that computes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def gives_up_gil(action: Callable[[], object]) -> bool:
    """Do `action`; return whether another thread, which waits for the GIL, has got it before the end."""
    ready, go, has_run = threading.Event(), threading.Lock(), []

    def wait() -> None:
        ready.set()
        with go:
            has_run.append(True)

    go.acquire()
    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody takes the GIL from a thread that keeps it
    try:
        go.release()
        action()
        return bool(has_run)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
