"""NUMA nodes: the one that memory lies on, and the one that this process is bound to.

Everything here may be unknown, which is None and never an error: a machine without nodes, memory that is spread over
several or not there yet, a container that forbids the question.
"""

from __future__ import annotations

import functools
import os
import platform
from collections import Counter
from pathlib import Path

import numpy as np

from kvxfer.system.abi import ffi
from kvxfer.system.calls import libc

__all__ = ["find_memory_node", "find_process_node"]

MOVE_PAGES = {"x86_64": 279, "aarch64": 239}.get(platform.machine())
"""The number of move_pages(2), which libc has no function for. Source: <asm/unistd_64.h>, <asm-generic/unistd.h>."""
PAGES_ASKED_MAX = 64
PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


def find_memory_node(address: int, nbytes: int, root: Path = Path("/")) -> int | None:
    """Return the node that at least three quarters of a range lie on, judged by 64 of its pages.

    Costs one system call of some 10 us. Where the kernel does not answer (a container without CAP_SYS_NICE), the node
    is known only if this process may take memory of no other. root: where proc/ and sys/ are looked for; for tests.
    """
    first, last = address // PAGE_NBYTES, (address + nbytes - 1) // PAGE_NBYTES
    pages = np.linspace(first, last, min(PAGES_ASKED_MAX, last - first + 1)).astype(np.uint64) * np.uint64(PAGE_NBYTES)
    found = _ask(pages)
    if found is None:
        allowed = _memory_nodes(root)
        return allowed[0] if len(allowed) == 1 else None
    if not found:
        return None  # no page is there yet
    node, count = Counter(found).most_common(1)[0]
    return node if 4 * count >= 3 * len(found) else None


def find_process_node(root: Path = Path("/")) -> int | None:
    """Return the one node that this process runs on or takes its memory from; None where it may be any.

    root: where proc/ and sys/ are looked for; for tests.
    """
    allowed = _memory_nodes(root)
    if len(allowed) == 1:
        return allowed[0]
    cpus = os.sched_getaffinity(0)
    folder = root / "sys/devices/system/node"
    nodes = [node for node in _online_nodes(root) if cpus & set(_parse_list(_read(folder / f"node{node}/cpulist")))]
    return nodes[0] if len(nodes) == 1 else None


def _ask(pages: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> list[int] | None:
    """Return the node of each page that is there; None where the kernel does not tell."""
    if MOVE_PAGES is None:
        return None
    status = np.full(len(pages), -1, np.int32)
    where, answer = ffi.from_buffer("void *[]", pages), ffi.from_buffer("int[]", status, require_writable=True)
    if libc.syscall(MOVE_PAGES, 0, len(pages), where, ffi.NULL, answer, 0) != 0:
        return None
    return [int(node) for node in status if node >= 0]  # below 0: an errno, such as ENOENT for a page not there


def _memory_nodes(root: Path) -> list[int]:
    """Return the nodes that this process may take memory from, of those that there are."""
    for line in _read(root / "proc/self/status").splitlines():
        name, _, text = line.partition(":")
        if name == "Mems_allowed_list":
            online = _online_nodes(root)
            return [node for node in _parse_list(text) if not online or node in online]
    return []


def _online_nodes(root: Path) -> list[int]:
    return _parse_list(_read(root / "sys/devices/system/node/online"))


@functools.lru_cache(64)
def _parse_list(text: str) -> list[int]:
    """Return the numbers of a list of the kernel's, such as 0-3,8; none of what is no such list."""
    found: list[int] = []
    for item in text.strip().split(","):
        low, _, high = item.partition("-")
        if not low.isdecimal() or not (high or low).isdecimal():
            return []
        found += range(int(low), int(high or low) + 1)
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
