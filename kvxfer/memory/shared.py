"""Memory that peers on the same host can map: an anonymous file (memfd_create(2)), sealed so that nobody can shrink it.

A memfd has no name in any file system: nothing is left behind when its owner is killed, and the size of /dev/shm does
not matter. The seals make it safe for a peer to map: no later truncation can turn its copy into SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvxfer.errors import AllocationError, MemoryArgumentError
from kvxfer.limits import remedy_for, shortage
from kvxfer.text import show

__all__ = ["SharedMemory", "available_nbytes"]

_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """One sealed memfd, mapped here.

    array: shape (nbytes,), uint8, page-aligned, zeroed; pages are backed when first touched. The mapping lives as long
    as any array over it, `close` or not; `close` gives up the descriptor.
    """

    __slots__ = ("address", "array", "fd", "nbytes")

    def __init__(self, nbytes: int, *, label: str = "kvxfer") -> None:
        if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer)) or nbytes < 1:
            raise MemoryArgumentError(
                f"allocate({show(nbytes)}): the size must be a whole number of bytes, at least 1.",
                remedy="Pass an int, such as 512 << 20 for 512 MiB.",
                nbytes=nbytes,
            )
        nbytes = int(nbytes)
        available = available_nbytes()
        if nbytes > available:
            raise AllocationError(
                f"allocate({nbytes}) asks for more memory than this process may have: {available} bytes.",
                remedy="Ask for less, or raise the memory limit of the container (docker run --memory, "
                "resources.limits.memory); touching memory that is not there would kill the process.",
                nbytes=nbytes,
                available_nbytes=available,
            )
        self.nbytes = nbytes
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = -1
        try:
            self.fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            mapping = mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as exc:
            self.close()
            if exc.errno in (errno.EMFILE, errno.ENFILE):
                raise shortage(f"allocate({nbytes})", exc.errno) from exc
            raise AllocationError(
                f"allocate({nbytes}) failed: {exc.strerror}.",
                remedy=remedy_for(exc.errno)
                or "ENOSYS or EPERM: a seccomp profile forbids memfd_create(2); use register() on memory of your own.",
                nbytes=nbytes,
                errno=exc.errno,
            ) from exc
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8, count=nbytes)
        self.address = int(self.array.ctypes.data)

    def reopen(self, *, writable: bool) -> int:
        """Return a new descriptor of the same memory for a peer; read-only where it may not write."""
        if writable:
            return os.dup(self.fd)
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give up the descriptor; tolerated twice. The memory stays until the last array over it is gone."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def available_nbytes(root: Path = Path("/")) -> int:
    """Return how many bytes this process may still use: the least of MemAvailable (proc_meminfo(5)) and what is left of
    the memory limit of its control group, version 2 or 1. A fact that cannot be read does not count."""
    limits = [2**62]
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith(("MemAvailable:", "SwapFree:")):
                limits.append(int(line.split()[1]) << 10)
        limits = [min(limits[0], sum(limits[1:]))] if len(limits) > 1 else limits
    except (OSError, ValueError, IndexError):
        pass
    for limit, used in _CGROUP_FILES:
        try:
            folder = root / "sys/fs/cgroup"
            limits.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
        except (OSError, ValueError):
            continue
    return max(0, min(limits))
