"""Read the small files of /sys and /proc."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["read_kernel_file"]

NBYTES_MAX = 4096
"""A page: what a file of sysfs holds at most."""


def read_kernel_file(file: Path) -> str:
    """Return what a file holds, without space around it; "" where it is missing or cannot be read.

    Three system calls; `Path.read_text` makes eight, and a connection is made with dozens of such files.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, NBYTES_MAX).decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    finally:
        os.close(descriptor)
