"""Register a region on one or several devices: cut to what each takes, whole or not at all, in parallel.

A device says how much it takes at once (max_mr_size), and may be wrong: what it refuses is halved, down to 64 MiB,
before the call fails with everything that was tried. What worked is remembered for the next region. A right that a
device may ignore and yet refuses (relaxed ordering) is left out. Nothing is ever registered short or left behind.
Read next: `registration_work.py`, which does it; `slices.cut_slices`, which takes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvxfer.errors import ConfigError, MemoryArgumentError, RegistrationError, UsageError, VerbsError
from kvxfer.memory.mappings import PAGE_NBYTES
from kvxfer.memory.registration_work import CHUNK_NBYTES_MIN, THREADS_MAX, Job, Request, Work, release
from kvxfer.memory.slices import IndexColumn, locate
from kvxfer.types import ADDRESS_MAX, AddressColumn, Rights
from kvxfer.verbs.enums import Access

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvxfer.verbs.protection_domain import MemoryRegion, ProtectionDomain

__all__ = ["CHUNK_NBYTES_MIN", "KEYED_CHUNK_DTYPE", "DeviceRegistration", "Registration", "access_for", "register"]

KEYED_CHUNK_DTYPE = np.dtype([("address", np.int64), ("nbytes", np.int64), ("lkey", np.uint32), ("rkey", np.uint32)])
"""CHUNK_DTYPE of chunks.py with the keys of one device; `slices.cut_slices` takes it as it is."""

ChunkKeyArray = npt.NDArray[np.void]
"""Rows of KEYED_CHUNK_DTYPE, ascending in address, without a gap."""


def access_for(rights: Rights, *, is_read_only: bool = False, relaxed_ordering: bool = False) -> Access:
    """Return the verbs rights that a registration needs so that peers have `rights`.

    is_read_only: the memory cannot be written, as `BufferView.read_only` says; other memory gets LOCAL_WRITE in any
    case, because the device writes what our own READs bring.

    Raises MemoryArgumentError for a right to write to read-only memory.
    Source: ibv_reg_mr(3), "If IBV_ACCESS_REMOTE_WRITE [...] is set, then IBV_ACCESS_LOCAL_WRITE must be set too".
    """
    if is_read_only and Rights.REMOTE_WRITE in rights:
        raise MemoryArgumentError(
            "read-only memory cannot be registered with the right to be written.",
            remedy="Give peers the right to read only, or register memory that can be written.",
        )
    access = Access.NONE if is_read_only else Access.LOCAL_WRITE
    if Rights.REMOTE_WRITE in rights:
        access |= Access.REMOTE_WRITE
    if Rights.REMOTE_READ in rights:
        access |= Access.REMOTE_READ
    return access | Access.RELAXED_ORDERING if relaxed_ordering else access


@dataclass(frozen=True)
class DeviceRegistration:
    """A region on one device.

    chunks: KEYED_CHUNK_DTYPE, read-only; they cover the region exactly.
    limit_nbytes: no chunk is larger. limit_origin: where that comes from: "device" (max_mr_size), "setting"
    (chunk_nbytes_max), or "refused" (the device did not take as much as it says, now or earlier).
    access: what was granted; refused_access: what was asked for and had to be left out.
    tried: (nbytes, errno) of what the device refused on the way.
    """

    device: str
    chunks: ChunkKeyArray
    limit_nbytes: int
    limit_origin: str
    access: Access
    refused_access: Access = Access.NONE
    tried: tuple[tuple[int, int], ...] = ()

    def find_chunks(self, addresses: AddressColumn, nbytes: AddressColumn) -> IndexColumn:
        """Return for each range the row of `chunks` that holds it whole.

        Raises NotRegisteredError for the first range that lies in none, or in two: `slices.cut_slices` cuts those.
        """
        starts = np.ascontiguousarray(self.chunks["address"])
        return locate(addresses, nbytes, starts, starts + self.chunks["nbytes"])


class Registration:
    """A region on all its devices, in the order in which they were given."""

    def __init__(
        self,
        address: int,
        nbytes: int,
        devices: Sequence[DeviceRegistration],
        regions: Sequence[MemoryRegion],
        threads: int = THREADS_MAX,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.devices = tuple(devices)
        self._regions = list(regions)
        self._threads = threads

    @property
    def is_closed(self) -> bool:
        """Whether all of it was deregistered."""
        return not self._regions

    def close(self) -> None:
        """Deregister all chunks on all devices; a second call does nothing.

        Raises VerbsError where a device refuses, after all others were deregistered; `errors` has every refusal, and a
        second call tries again what is left.
        """
        asked_count = len(self._regions)
        errors = release(self._regions, self._threads)
        self._regions = [region for region in self._regions if not region.is_closed]
        if errors:
            first = errors[0]
            raise VerbsError(
                f"{len(errors)} of {asked_count} chunks of {self.nbytes} bytes at {self.address:#x} were not "
                f"deregistered; the first: {first.message}",
                remedy=first.remedy,
                verb="ibv_dereg_mr",
                errno=first.errno,
                errors=tuple(errors),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        parts = ", ".join(f"{each.device}: {len(each.chunks)} chunks" for each in self.devices)
        return f"<Registration {self.nbytes} bytes at {self.address:#x} on {parts}{' closed' * self.is_closed}>"


def register(
    domains: Sequence[ProtectionDomain],
    address: int,
    nbytes: int,
    access: Access,
    *,
    chunk_nbytes_max: int | None = None,
    trusts_device: bool = True,
    alignment: int | None = None,
    threads: int = THREADS_MAX,
    root: Path = Path("/"),
) -> Registration:
    """Register `[address, address + nbytes)` in every domain: all of it in all of them, or nothing.

    The memory belongs to the caller and must stay mapped until the result is closed.

    chunk_nbytes_max: a limit of the caller's beside the device's max_mr_size; the smaller one holds.
    trusts_device: False lets chunk_nbytes_max hold alone, for a device that takes more than it says.
    alignment: of the borders between chunks; by default the size of the pages below, and 2 MiB where chunks are large.
    threads: pieces registered at the same time; other threads of the process run meanwhile.
    root: where proc/ is looked for; for tests.

    Raises RegistrationError, with nothing registered: `errno`, `device`, `address` and `nbytes` of the piece that
    failed, `chunk_index`, `chunk_count`, `nbytes_done`, `limit_nbytes`, `tried`.
    """
    _check_arguments(domains, address, nbytes, access, chunk_nbytes_max, threads)
    request = Request(address, nbytes, access, chunk_nbytes_max, trusts_device, alignment, root)
    work = Work(request, [Job(request, domain) for domain in domains])
    try:
        work.run(threads)
    except BaseException as error:
        left_behind = release(work.regions, threads)
        if left_behind and isinstance(error, RegistrationError):
            error.note(left_behind=tuple(left_behind))
        raise
    for job in work.jobs:
        job.remember()
    return Registration(address, nbytes, [_result(job) for job in work.jobs], work.regions, threads)


def _check_arguments(
    domains: Sequence[ProtectionDomain],
    address: int,
    nbytes: int,
    access: Access,
    chunk_nbytes_max: int | None,
    threads: int,
) -> None:
    if not domains or threads < 1:
        raise UsageError(
            f"{len(domains)} protection domains and {threads} threads to register with.",
            remedy="Give a domain for each device, and 1 thread at least.",
        )
    if nbytes < 1 or not 0 < address <= ADDRESS_MAX - nbytes:
        raise UsageError(
            f"{nbytes} bytes at {address:#x} are no range of memory.",
            remedy="Pass at least one byte of mapped memory.",
            address=address,
            nbytes=nbytes,
        )
    if access & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC) and not access & Access.LOCAL_WRITE:
        raise UsageError(
            f"{access} lets peers write what this process may not.",
            remedy="Add LOCAL_WRITE, or leave out REMOTE_WRITE; access_for knows.",
            access=str(access),
        )
    if chunk_nbytes_max is not None and chunk_nbytes_max < PAGE_NBYTES:
        raise ConfigError(
            f"chunk_nbytes_max is {chunk_nbytes_max}, less than a page.",
            remedy=f"Give {CHUNK_NBYTES_MIN} or more; small chunks cost a key each.",
            chunk_nbytes_max=chunk_nbytes_max,
        )


def _result(job: Job) -> DeviceRegistration:
    rows = sorted((region.address, region.nbytes, region.lkey, region.rkey) for region in job.regions)
    chunks = np.array(rows, KEYED_CHUNK_DTYPE)
    chunks.flags.writeable = False
    return DeviceRegistration(
        job.device,
        chunks,
        job.limit,
        job.limit_origin,
        job.access,
        job.refused_access,
        tuple(job.tried.items()),
    )
