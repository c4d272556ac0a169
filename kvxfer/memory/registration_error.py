"""The message of a registration that failed: which piece, what was tried, why it usually fails, what to change.

Reads /proc and the locked-memory limit for the reason; registers nothing. Called by `registration.register`.
"""

from __future__ import annotations

import dataclasses
import errno
from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import RegistrationError
from kvxfer.memory.mappings import PAGE_NBYTES, Explanation, explain_fault, find_page_nbytes
from kvxfer.system.memlock import MEMLOCK_ERRNOS, memlock_nbytes
from kvxfer.verbs.enums import Access
from kvxfer.verbs.library import errno_name, errno_text

__all__ = ["Failure", "build_error"]

SETTING = "rdma_chunk_nbytes_max"
"""What an EngineConfig calls `chunk_nbytes_max` of `registration.register`."""


@dataclass(frozen=True)
class Failure:
    """All that is known of a failed registration; each field becomes an attribute of the error.

    address, nbytes: the piece that failed; region_address, region_nbytes: the whole. nbytes_done: of the region, on
    that device, before it was rolled back. nbytes_worked: the longest piece that was taken.
    """

    device: str
    device_count: int
    address: int
    nbytes: int
    region_address: int
    region_nbytes: int
    chunk_index: int
    chunk_count: int
    nbytes_done: int
    advertised_nbytes: int
    limit_nbytes: int
    limit_origin: str
    access: Access
    errno: int
    tried: tuple[tuple[int, int], ...]
    nbytes_worked: int

    @property
    def is_of_sum(self) -> bool:
        """Whether the length of the piece cannot be the reason."""
        return self.nbytes <= self.nbytes_worked


def build_error(failure: Failure, root: Path = Path("/")) -> RegistrationError:
    """Return the error to raise. root: where proc/ is looked for; for tests."""
    why, remedy = _explain(failure, root)
    values = {field.name: getattr(failure, field.name) for field in dataclasses.fields(failure)}
    values["access"] = str(failure.access)
    return RegistrationError(
        f"registering {failure.region_nbytes} bytes at {failure.region_address:#x} on {failure.device} failed at chunk "
        f"{failure.chunk_index + 1} of {failure.chunk_count} ({failure.nbytes} bytes at {failure.address:#x}, "
        f"{failure.access}) after {failure.nbytes_done} bytes: {errno_text(failure.errno)}; {why}. Nothing of it stays "
        f"registered.",
        remedy=remedy,
        verb="ibv_reg_mr",
        option=SETTING,
        **values,
    )


def _explain(failure: Failure, root: Path) -> Explanation:
    if failure.errno == errno.EFAULT:
        is_written = bool(failure.access & Access.LOCAL_WRITE)
        return explain_fault(failure.address, failure.nbytes, is_written=is_written, root=root)
    if failure.errno in MEMLOCK_ERRNOS:
        limit, needed = memlock_nbytes(), _locked_nbytes(failure)
        if limit is not None and limit < needed:
            return Explanation(
                why=f"the locked-memory limit of this process is {limit} bytes, and this region takes {needed} (each "
                f"device counts, and what is registered already counts too)",
                remedy="Raise it: `ulimit -l unlimited`, LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 "
                "(docker), or the capability IPC_LOCK.",
            )
    leave_out = f"leave {failure.device} out (rdma_devices, KVXFER_RDMA_DEVICES)"
    if failure.errno == errno.EOPNOTSUPP:
        return Explanation(
            why=f"the driver of {failure.device} does not register such memory, or not with these rights",
            remedy=f"Update the driver, or {leave_out}.",
        )
    if failure.is_of_sum:
        page = find_page_nbytes(failure.region_address, failure.region_nbytes, root)
        return Explanation(
            why=f"the device took {failure.nbytes_worked} bytes at once before, so it is the sum that it has no room "
            f"for; this region is {-(-failure.region_nbytes // page)} pages of {page} bytes, and it has room for so "
            f"many",
            remedy=f"Register less, use huge pages (mmap with MAP_HUGETLB), or {leave_out}.",
        )
    return Explanation(
        why=f"the device says it takes {_size(failure.advertised_nbytes)} at once, the limit was {_limit(failure)}; it "
        f"refused {_tried(failure)}",
        remedy=f"Set {SETTING} to a size that the device takes, or register less: it may have no room for the sum. The "
        "kernel's log says more (dmesg).",
    )


def _locked_nbytes(failure: Failure) -> int:
    """Return what the whole region locks on all devices: whole pages."""
    start = failure.region_address // PAGE_NBYTES
    end = -(-(failure.region_address + failure.region_nbytes) // PAGE_NBYTES)
    return (end - start) * PAGE_NBYTES * failure.device_count


def _size(nbytes: int) -> str:
    return "any length" if nbytes >= 2**63 - 1 else f"{nbytes} bytes"


def _limit(failure: Failure) -> str:
    origin = {"device": "its own", "setting": SETTING, "refused": "lowered because of that"}
    return f"{_size(failure.limit_nbytes)} ({origin[failure.limit_origin]})"


def _tried(failure: Failure) -> str:
    """Return all that was refused, in words: each is half of the one before, so there are never many."""
    first, *more = (f"{nbytes} bytes ({errno_name(number)})" for nbytes, number in failure.tried)
    return f"{first}, then {', '.join(more)}" if more else first
