"""Register a region on one or several devices: cut to what each takes, whole or not at all, in parallel.

A device says how much it takes at once (max_mr_size), and may be wrong: what it refuses is halved, down to 64 MiB,
before the call fails with everything that was tried. What worked is remembered for the next region. A right that a
device may ignore and yet refuses (relaxed ordering) is left out. Nothing is ever registered short or left behind.
Read next: `chunks.plan_chunks`, which cuts; `slices.cut_slices`, which takes the result.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvxfer.errors import ConfigError, MemoryArgumentError, RegistrationError, UsageError, VerbsError
from kvxfer.log import get_logger
from kvxfer.memory.chunks import plan_chunks
from kvxfer.memory.mappings import PAGE_NBYTES, find_page_nbytes
from kvxfer.memory.registration_error import Failure, build_error
from kvxfer.memory.slices import IndexColumn, locate
from kvxfer.types import ADDRESS_MAX, AddressColumn, Rights
from kvxfer.verbs.enums import OPTIONAL_ACCESS, Access
from kvxfer.verbs.library import errno_name

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvxfer.verbs.protection_domain import MemoryRegion, ProtectionDomain

__all__ = ["CHUNK_NBYTES_MIN", "KEYED_CHUNK_DTYPE", "DeviceRegistration", "Registration", "access_for", "register"]

log = get_logger(__name__)

KEYED_CHUNK_DTYPE = np.dtype([("address", np.int64), ("nbytes", np.int64), ("lkey", np.uint32), ("rkey", np.uint32)])
"""CHUNK_DTYPE of chunks.py with the keys of one device; `slices.cut_slices` takes it as it is."""

CHUNK_NBYTES_MIN = 64 << 20
"""Halving ends here: no device is known that takes less at once, and 1 TiB would be 16,384 registrations."""
THREADS_MAX = 16  # four devices with four pieces each under way; the kernel zeroes and pins pages in each
THREADED_NBYTES_MIN = 16 << 20
"""Less is registered by the caller's thread: to start two threads takes 0.3 ms, to pin 16 MiB a few."""
HUGE_PAGE_NBYTES = 2 << 20
PROGRESS_COUNT = 4
"""How often a long registration tells how far it is."""

SIZE_ERRNOS = frozenset({errno.EINVAL, errno.ENOMEM, errno.EIO, errno.E2BIG, errno.ENOSPC, errno.EOVERFLOW})
"""What drivers answer to a length that they do not take: EINVAL and ENOMEM mostly, EIO on eRDMA."""
ACCESS_ERRNOS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})

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
        errors = _release(self._regions, self._threads)
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
    request = _Request(address, nbytes, access, chunk_nbytes_max, trusts_device, alignment, root)
    work = _Work(request, [_Job(request, domain) for domain in domains])
    try:
        work.run(threads)
    except BaseException as error:
        left_behind = _release(work.regions, threads)
        if left_behind and isinstance(error, RegistrationError):
            error.note(left_behind=tuple(left_behind))
        raise
    for job in work.jobs:
        job.remember()
    return Registration(address, nbytes, [job.result() for job in work.jobs], work.regions, threads)


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


@dataclass(frozen=True)
class _Request:
    """What `register` was asked for."""

    address: int
    nbytes: int
    access: Access
    chunk_nbytes_max: int | None
    trusts_device: bool
    alignment: int | None
    root: Path

    @cached_property
    def page_nbytes(self) -> int:
        """The largest page below the region; asked for only where a region is cut."""
        return find_page_nbytes(self.address, self.nbytes, self.root)

    def cut(self, address: int, nbytes: int, limit: int) -> list[tuple[int, int]]:
        """Return the pieces of a part of the region, none larger than `limit`."""
        if nbytes <= limit:
            return [(address, nbytes)]
        return [tuple(row) for row in plan_chunks(address, nbytes, limit, self._alignment(limit)).tolist()]

    def _alignment(self, limit: int) -> int:
        wanted = self.alignment
        if wanted is None:
            wanted = max(self.page_nbytes, HUGE_PAGE_NBYTES if limit >= CHUNK_NBYTES_MIN else PAGE_NBYTES)
        return min(wanted, 1 << (limit.bit_length() - 1))  # a page of 1 GiB may be more than the device takes


@dataclass
class _Learnt:
    """What a domain's device turned out not to take."""

    nbytes_max: int | None = None
    refused_access: Access = Access.NONE


_learnt: WeakKeyDictionary[ProtectionDomain, _Learnt] = WeakKeyDictionary()
"""So that the next region does not try in vain what an earlier one was refused; forgotten with the domain."""


class _Piece(NamedTuple):
    """A part of the region that is registered by one call, or is to be."""

    job: _Job
    address: int
    nbytes: int


class _Job:
    """The registration of the region on one device, while it is made."""

    def __init__(self, request: _Request, domain: ProtectionDomain) -> None:
        self.request = request
        self.domain = domain
        self.device = domain.context.name
        self.regions: list[MemoryRegion] = []
        self.nbytes_done = 0
        self.nbytes_worked = 0
        self.tried: dict[int, int] = {}
        self.advertised = domain.context.limits.max_mr_size or ADDRESS_MAX  # 0: the driver does not say
        learnt = _learnt.get(domain, _Learnt())
        self.refused_access = learnt.refused_access & request.access
        self.limit, self.limit_origin = self._find_limit(learnt)

    def _find_limit(self, learnt: _Learnt) -> tuple[int, str]:
        request = self.request
        limit, origin = self.advertised, "device"
        if request.chunk_nbytes_max is not None and (request.chunk_nbytes_max < limit or not request.trusts_device):
            limit, origin = request.chunk_nbytes_max, "setting"
        if learnt.nbytes_max is not None and learnt.nbytes_max < limit:
            limit, origin = learnt.nbytes_max, "refused"
        return limit, origin

    @property
    def access(self) -> Access:
        return self.request.access & ~self.refused_access

    def attempt(self, piece: _Piece) -> MemoryRegion | RegistrationError:
        """Register one piece; called from several threads, changes nothing here."""
        access = self.access
        try:
            return self.domain.register(piece.address, piece.nbytes, access)
        except RegistrationError as error:
            if error.errno not in ACCESS_ERRNOS or not access & OPTIONAL_ACCESS:
                return error
        try:
            return self.domain.register(piece.address, piece.nbytes, access & ~OPTIONAL_ACCESS)
        except RegistrationError as error:
            return error

    def take(self, region: MemoryRegion) -> None:
        """Note a piece that was registered."""
        self.regions.append(region)
        self.nbytes_done += region.nbytes
        self.nbytes_worked = max(self.nbytes_worked, region.nbytes)
        self.limit = max(self.limit, region.nbytes)  # under way when the limit was lowered, and taken after all
        if refused := self.access & ~region.access:
            self.refused_access |= refused
            log.warning("registration.access_refused", device=self.device, access=str(self.refused_access))

    def lower(self, piece: _Piece, number: int) -> bool:
        """Lower the limit because `piece` was refused with an error number; False where that cannot help."""
        self.tried.setdefault(piece.nbytes, number)
        if number not in SIZE_ERRNOS or piece.nbytes <= self.nbytes_worked:
            return False  # a piece of this size was taken, so it is not the size
        if piece.nbytes > self.limit:
            return True  # it was under way when another one found out
        if piece.nbytes <= CHUNK_NBYTES_MIN:
            return False
        halved = 1 << ((piece.nbytes - 1).bit_length() - 1)  # the next power of two below
        smaller = max(halved, self.nbytes_worked)
        log.warning(
            "registration.limit_lowered",
            device=self.device,
            refused_nbytes=piece.nbytes,
            errno=errno_name(number),
            limit_nbytes=smaller,
        )
        self.limit, self.limit_origin = smaller, "refused"
        return True

    def remember(self) -> None:
        """Keep what was learnt for the next region."""
        if self.tried or self.refused_access:
            refused_before = _learnt.get(self.domain, _Learnt()).refused_access
            nbytes_max = self.limit if self.limit_origin == "refused" else None
            _learnt[self.domain] = _Learnt(nbytes_max, self.refused_access | refused_before)

    def result(self) -> DeviceRegistration:
        rows = sorted((region.address, region.nbytes, region.lkey, region.rkey) for region in self.regions)
        chunks = np.array(rows, KEYED_CHUNK_DTYPE)
        chunks.flags.writeable = False
        return DeviceRegistration(
            self.device,
            chunks,
            self.limit,
            self.limit_origin,
            self.access,
            self.refused_access,
            tuple(self.tried.items()),
        )


class _Work:
    """All pieces on all devices, and who does what next. Only `_Job.attempt` runs in other threads."""

    def __init__(self, request: _Request, jobs: Sequence[_Job]) -> None:
        self.request = request
        self.jobs = jobs
        cut = [[_Piece(job, *part) for part in request.cut(request.address, request.nbytes, job.limit)] for job in jobs]
        # All devices begin at once: one that is slow or refuses is known early.
        self.todo = deque(piece for row in zip_longest(*cut) for piece in row if piece is not None)
        self.piece_count = len(self.todo)
        self.nbytes = request.nbytes * len(jobs)
        self.done_count = 0

    @property
    def regions(self) -> list[MemoryRegion]:
        """Everything that is registered."""
        return [region for job in self.jobs for region in job.regions]

    def run(self, threads: int) -> None:
        """Register all pieces. Raises at the first that fails for good, when nothing is under way any more."""
        if threads == 1 or self.piece_count == 1 or self.nbytes < THREADED_NBYTES_MIN:
            while self.todo:
                piece = self._next()
                self._settle(piece, piece.job.attempt(piece))
            return
        running: dict[Future[MemoryRegion | RegistrationError], _Piece] = {}
        with ThreadPoolExecutor(min(threads, self.piece_count), "kvxfer-register") as pool:
            try:
                while self.todo or running:
                    while self.todo and len(running) < threads:
                        piece = self._next()
                        running[pool.submit(piece.job.attempt, piece)] = piece
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        self._settle(running.pop(future), future.result())
            finally:
                # A call into the kernel cannot be stopped; what it registers must not be lost.
                for future, piece in running.items():
                    outcome = future.result()
                    if not isinstance(outcome, RegistrationError):
                        piece.job.take(outcome)

    def _next(self) -> _Piece:
        piece = self.todo.popleft()
        first, *rest = self.request.cut(piece.address, piece.nbytes, piece.job.limit)
        self.todo.extendleft(_Piece(piece.job, *part) for part in reversed(rest))
        self.piece_count += len(rest)
        return _Piece(piece.job, *first)

    def _settle(self, piece: _Piece, outcome: MemoryRegion | RegistrationError) -> None:
        if isinstance(outcome, RegistrationError):
            if not piece.job.lower(piece, outcome.errno or 0):
                raise self._failure(piece, outcome) from outcome
            self.todo.appendleft(piece)
            return
        piece.job.take(outcome)
        self.done_count += 1
        if self.piece_count >= 2 * PROGRESS_COUNT and self.done_count % -(-self.piece_count // PROGRESS_COUNT) == 0:
            log.info("registration.progressed", done_count=self.done_count, piece_count=self.piece_count)

    def _failure(self, piece: _Piece, error: RegistrationError) -> RegistrationError:
        request, job = self.request, piece.job
        before = request.cut(request.address, piece.address - request.address, job.limit)
        after = request.cut(piece.address, request.address + request.nbytes - piece.address, job.limit)
        index = len(before) if piece.address > request.address else 0
        return build_error(
            Failure(
                device=job.device,
                device_count=len(self.jobs),
                address=piece.address,
                nbytes=piece.nbytes,
                region_address=request.address,
                region_nbytes=request.nbytes,
                chunk_index=index,
                chunk_count=index + len(after),
                nbytes_done=job.nbytes_done,
                advertised_nbytes=job.advertised,
                limit_nbytes=job.limit,
                limit_origin=job.limit_origin,
                access=job.access,
                errno=error.errno or 0,
                tried=tuple(job.tried.items()),
                nbytes_worked=job.nbytes_worked,
            ),
            request.root,
        )


def _release(regions: Sequence[MemoryRegion], threads: int) -> list[VerbsError]:
    """Deregister all regions; return the refusals, which stop nothing."""

    def close(region: MemoryRegion) -> VerbsError | None:
        try:
            region.close()
        except VerbsError as error:
            return error
        return None

    if len(regions) < 2 or threads == 1 or sum(region.nbytes for region in regions) < THREADED_NBYTES_MIN:
        outcomes = [close(region) for region in regions]
    else:
        try:
            with ThreadPoolExecutor(threads, "kvxfer-deregister") as pool:
                outcomes = list(pool.map(close, regions))
        except RuntimeError:  # the interpreter is on its way out and starts no thread any more
            outcomes = [close(region) for region in regions]
    return [error for error in outcomes if error is not None]
