"""A registration while it is made: the pieces on each device, who registers what next, what a refusal changes.

`Work` goes through the pieces of all devices, in several threads where that pays; `Job` knows how one device takes
them, and learns. Called by `registration.register`, which undoes what is here when something fails.
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
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from kvxfer.errors import RegistrationError, VerbsError
from kvxfer.log import get_logger
from kvxfer.memory.chunks import plan_chunks
from kvxfer.memory.mappings import PAGE_NBYTES, find_page_nbytes
from kvxfer.memory.registration_error import Failure, build_error
from kvxfer.types import ADDRESS_MAX
from kvxfer.verbs.enums import OPTIONAL_ACCESS, Access
from kvxfer.verbs.library import errno_name

if TYPE_CHECKING:
    from kvxfer.verbs.protection_domain import MemoryRegion, ProtectionDomain

__all__ = ["CHUNK_NBYTES_MIN", "THREADS_MAX", "Job", "Piece", "Request", "Work", "release"]

log = get_logger(__name__)

CHUNK_NBYTES_MIN = 64 << 20
"""Halving ends here: no device is known that takes less at once, and 1 TiB would be 16,384 registrations."""
THREADS_MAX = 16  # four devices with four pieces each under way; the kernel zeroes and pins pages in each
THREADED_NBYTES_MIN = 16 << 20
"""Less is registered by the caller's thread: 10,000 small regions on two fake devices take 1.4 s so, 15 s with threads.
"""
HUGE_PAGE_NBYTES = 2 << 20
PROGRESS_COUNT = 4
"""How often a long registration tells how far it is."""

SIZE_ERRNOS = frozenset({errno.EINVAL, errno.ENOMEM, errno.EIO, errno.E2BIG, errno.ENOSPC, errno.EOVERFLOW})
"""What drivers answer to a length that they do not take: EINVAL and ENOMEM mostly, EIO on eRDMA."""
ACCESS_ERRNOS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


@dataclass(frozen=True)
class Request:
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


class Piece(NamedTuple):
    """A part of the region that is registered by one call, or is to be."""

    job: Job
    address: int
    nbytes: int


class Job:
    """The registration of the region on one device, while it is made."""

    def __init__(self, request: Request, domain: ProtectionDomain) -> None:
        self.request = request
        self.domain = domain
        self.device = domain.context.name
        self.regions: list[MemoryRegion] = []
        self.nbytes_done = 0
        self.nbytes_worked = 0
        self.tried: dict[int, int] = {}
        self.advertised = domain.context.limits.max_mr_size or ADDRESS_MAX  # 0: the driver does not say
        learnt = _learnt.get(domain) or _Learnt()
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

    def attempt(self, piece: Piece) -> MemoryRegion | RegistrationError:
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

    def lower(self, piece: Piece, number: int) -> bool:
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
            learnt = _learnt.setdefault(self.domain, _Learnt())
            learnt.refused_access |= self.refused_access
            if self.limit_origin == "refused":
                learnt.nbytes_max = self.limit


class Work:
    """All pieces on all devices, and who does what next. Only `Job.attempt` runs in other threads."""

    def __init__(self, request: Request, jobs: Sequence[Job]) -> None:
        self.request = request
        self.jobs = jobs
        cut = [[Piece(job, *part) for part in request.cut(request.address, request.nbytes, job.limit)] for job in jobs]
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
        running: dict[Future[MemoryRegion | RegistrationError], Piece] = {}
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
                wait(running)
                for future, piece in running.items():
                    outcome = None if future.exception() else future.result()
                    if outcome is not None and not isinstance(outcome, RegistrationError):
                        piece.job.take(outcome)

    def _next(self) -> Piece:
        piece = self.todo.popleft()
        first, *rest = self.request.cut(piece.address, piece.nbytes, piece.job.limit)
        self.todo.extendleft(Piece(piece.job, *part) for part in reversed(rest))
        self.piece_count += len(rest)
        return Piece(piece.job, *first)

    def _settle(self, piece: Piece, outcome: MemoryRegion | RegistrationError) -> None:
        if isinstance(outcome, RegistrationError):
            if not piece.job.lower(piece, outcome.errno or 0):
                raise self._failure(piece, outcome) from outcome
            self.todo.appendleft(piece)
            return
        piece.job.take(outcome)
        self.done_count += 1
        if self.piece_count >= 2 * PROGRESS_COUNT and self.done_count % -(-self.piece_count // PROGRESS_COUNT) == 0:
            log.info("registration.progressed", done_count=self.done_count, piece_count=self.piece_count)

    def _failure(self, piece: Piece, error: RegistrationError) -> RegistrationError:
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


def release(regions: Sequence[MemoryRegion], threads: int) -> list[VerbsError]:
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
