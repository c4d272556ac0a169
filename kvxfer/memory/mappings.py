"""What the kernel says of this process's memory: page sizes, rights.

Reads /proc; touches no byte of the memory itself. `registration.py` asks here before it cuts a
region, and after the kernel refused one.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["Explanation", "MemoryMapping", "explain_fault", "find_mappings", "find_page_nbytes"]

PAGE_NBYTES = mmap.PAGESIZE
_GPU_REMEDY = "Memory of a GPU is not moved: copy it to registered host memory first."


@dataclass(frozen=True)
class MemoryMapping:
    """One line of /proc/self/maps. rights: such as "rw-p"; inode 0: anonymous memory of ordinary pages."""

    start: int
    end: int
    rights: str
    inode: int
    name: str

    def __str__(self) -> str:
        return f"[{self.start:#x}, {self.end:#x}) {self.rights}{' ' if self.name else ''}{self.name}"


class Explanation(NamedTuple):
    """Why the kernel refused, in words that end a sentence, and what to do."""

    why: str
    remedy: str


def find_mappings(address: int, nbytes: int, root: Path = Path("/")) -> list[MemoryMapping]:
    """Return the mappings that `[address, address + nbytes)` touches, ascending; empty where /proc cannot be read."""
    found = []
    try:
        with (root / "proc/self/maps").open() as lines:
            for line in lines:
                mapping = _parse_mapping(line)
                if mapping is None or mapping.end <= address:
                    continue
                if mapping.start >= address + nbytes:
                    break
                found.append(mapping)
    except OSError:
        return []
    return found


def find_page_nbytes(address: int, nbytes: int = 1, root: Path = Path("/")) -> int:
    """Return the largest page that backs a range: 4096, or 2 MiB or more where it lies on huge pages (hugetlbfs).

    Ordinary anonymous memory is known from /proc/self/maps alone. Only for files and shared memory is smaps read, up to
    the range: it costs a walk through the page tables of everything below.
    """
    if all(mapping.inode == 0 for mapping in find_mappings(address, nbytes, root)):
        return PAGE_NBYTES
    largest = PAGE_NBYTES
    is_inside = False
    try:
        with (root / "proc/self/smaps").open() as lines:
            for line in lines:
                if (mapping := _parse_mapping(line)) is not None:
                    if mapping.start >= address + nbytes:
                        break
                    is_inside = mapping.end > address
                elif is_inside and line.startswith("KernelPageSize:"):
                    largest = max(largest, int(line.split()[1]) << 10)
    except OSError:
        pass
    return largest


def explain_fault(address: int, nbytes: int, *, is_written: bool, root: Path = Path("/")) -> Explanation:
    """Say why the kernel could not take hold of a range (EFAULT).

    is_written: whether the right to write was asked for.
    """
    at = address
    for mapping in find_mappings(address, nbytes, root):
        if mapping.start > at:
            break
        if "r" not in mapping.rights or mapping.name.startswith("/dev/nvidia"):
            return Explanation(
                why=f"{at:#x} lies in {mapping}, which the CPU cannot read: that is how memory of a GPU looks",
                remedy=_GPU_REMEDY,
            )
        if is_written and "w" not in mapping.rights:
            return Explanation(
                why=f"{at:#x} lies in {mapping}, which is read-only, and the right to write was asked for",
                remedy="Register it with the right to be read only.",
            )
        at = mapping.end
    if at < address + nbytes:
        return Explanation(
            why=f"nothing is mapped at {at:#x}: the memory was freed, the range is too long, or it is memory of a GPU",
            remedy=f"Keep the memory until it is unregistered. {_GPU_REMEDY}",
        )
    return Explanation(
        why="all of it is mapped, so it changed meanwhile, or it is memory that devices cannot use, such as a file on "
        "disk or another device's",
        remedy="Register anonymous or shared memory, and keep it until it is unregistered.",
    )


def _parse_mapping(line: str) -> MemoryMapping | None:
    """Return the mapping that a line of maps or smaps describes; None for the other lines of smaps."""
    span, _, rest = line.partition(" ")
    start, dash, end = span.partition("-")
    if not dash or span.endswith(":"):
        return None
    fields: Iterator[str] = iter(rest.split(maxsplit=4))
    rights, _offset, _device, inode = (next(fields, "0") for _ in range(4))
    return MemoryMapping(int(start, 16), int(end, 16), rights, int(inode), next(fields, "").strip())
