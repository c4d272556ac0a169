"""Copy rows of memory on one host: directly where both sides are mapped here, else by process_vm_readv/writev.

A job owns its columns, copies window by window, and looks at the clock and at `transfer.stop` between two windows, so
that a caller who gives up waits for one window at most. Rows of a batch may be copied in any order.

Measured on 2 cores (bench/README.md), over a C loop of memcpy: a window of rows in one call is 1.0 at 64 KiB and 0.9 at
4 KiB, where memmove row by row is 0.87 and 0.45. process_vm_* releases the GIL for a whole window, so a second thread
helps there (0.68 to 0.83); the mapped copy keeps the GIL (`kvxfer/system/held.py`).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvxfer.errors import KvxferError, PeerClosedError, RemoteAccessError, TransferCancelledError, TransferError
from kvxfer.limits import is_shortage
from kvxfer.memory.columns import bounds
from kvxfer.system.abi import ffi
from kvxfer.system.calls import process_vm_read, process_vm_write
from kvxfer.system.held import ProcessVmRow, Readable, RowCopy, memmove
from kvxfer.system.iovec import IOV_MAX, address_of
from kvxfer.transports.base import Transfer
from kvxfer.transports.shm_helpers import CopyHelpers, Turn
from kvxfer.types import IOVEC_DTYPE, AddressColumn, Opcode

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["CopyJob", "MappedCopy", "ProcessIdentity", "ProcessVmCopy"]

WINDOW_NBYTES = 2 << 20
"""What is copied between two looks at the clock: about 0.2 ms."""
KERNEL_WINDOW_NBYTES = 16 << 20
"""The same, at most, where the kernel copies: between two windows the GIL may have to be waited for."""
KERNEL_WINDOWS = 8
"""How many windows a batch is cut into at least, as far as they are not below `WINDOW_NBYTES`: threads share them."""
MAPPED_ROWS_MAX = 4096
"""Rows of a window that is copied here: short ones, far apart, take 40 ns each, and the GIL is kept meanwhile."""
ROWS_MIN = 8
"""Fewer rows than this are not worth the making of a call for many."""
SORTED_NBYTES = 16 << 10
"""Below this, sorting rows by address costs less than it brings."""
TOKEN_FRESH_S = 1e-3
PARALLEL_NBYTES = 2 << 20
"""Below this waking a second thread (15 us, at times 200) costs more than it brings."""
_Columns = tuple[AddressColumn, AddressColumn, AddressColumn, AddressColumn]
"""destination, source, nbytes, slices"""


class CopyJob(ABC):
    """Some rows of one transfer and the way they are copied.

    slices: for each row, its place among the slices of the transfer.
    """

    _rows_max: ClassVar[int]

    def __init__(
        self, destination: AddressColumn, source: AddressColumn, nbytes: AddressColumn, slices: AddressColumn
    ) -> None:
        least, greatest = bounds(nbytes)
        destination, source, nbytes, slices = self._arrange(
            (destination, source, nbytes, slices), is_uniform=least == greatest
        )
        self._nbytes_total = greatest * len(nbytes) if least == greatest else int(nbytes.sum())
        window_nbytes = self._window_nbytes()
        if greatest > window_nbytes:
            destination, source, nbytes, slices = _cut_pieces(destination, source, nbytes, slices, window_nbytes)
        self._destination, self._source, self._nbytes, self._slices = destination, source, nbytes, slices
        self._windows = (
            _cut_equal_windows(len(nbytes), greatest, min(self._rows_max, window_nbytes // greatest))
            if least == greatest <= window_nbytes
            else _cut_windows(nbytes, window_nbytes, self._rows_max)
        )
        """What is still to be copied, last first: (first piece, one past the last, bytes). list.pop is atomic, so
        several threads may take from it."""
        self._done: list[tuple[int, int, int]] = []

    def _arrange(self, columns: _Columns, *, is_uniform: bool) -> _Columns:
        """Return the columns in the order in which they are copied. is_uniform: all rows have one length."""
        return columns

    def _window_nbytes(self) -> int:
        """How much is copied between two looks at the clock, at most; no piece of a row is longer."""
        return WINDOW_NBYTES

    @property
    def nbytes_done(self) -> int:
        """How many bytes are in place."""
        return sum(nbytes for _, _, nbytes in self._done)

    @property
    def is_done(self) -> bool:
        """Whether every byte is in place."""
        return self.nbytes_done == self._nbytes_total

    def slices_left(self) -> AddressColumn:
        """Return which slices of the transfer are not wholly copied."""
        left = np.ones(len(self._nbytes), bool)
        for start, stop, _ in self._done:
            left[start:stop] = False
        return np.unique(self._slices[left])

    @abstractmethod
    def run(self, transfer: Transfer, until: float) -> None:
        """Copy until done, `until`, or `transfer.stop`; at least one window. Raises KvxferError."""


class MappedCopy(CopyJob):
    """Both sides are mapped in this process: plain copies, which keep the GIL for a window at a time."""

    _rows_max = MAPPED_ROWS_MAX

    def __init__(
        self, destination: AddressColumn, source: AddressColumn, nbytes: AddressColumn, slices: AddressColumn
    ) -> None:
        super().__init__(destination, source, nbytes, slices)
        self._copy = RowCopy(self._destination, self._source) if len(self._nbytes) >= ROWS_MIN else None

    def _arrange(self, columns: _Columns, *, is_uniform: bool) -> _Columns:
        """Rows of one length together: they can be one call. Short ones by address: neighbours share pages."""
        destination, source, nbytes, slices = columns
        if len(nbytes) < ROWS_MIN:
            return columns
        if not is_uniform:
            order = np.argsort(nbytes, kind="stable")
            return destination[order], source[order], nbytes[order], slices[order]
        if int(nbytes[0]) < SORTED_NBYTES:
            order = np.argsort(source)
            return destination[order], source[order], nbytes, slices[order]
        return columns

    def run(self, transfer: Transfer, until: float) -> None:
        while self._windows:
            window = self._windows.pop()
            self._copy_window(*window[:2])
            self._done.append(window)
            if transfer.stop is not None or time.monotonic() >= until:
                return

    def _copy_window(self, start: int, stop: int) -> None:
        nbytes = int(self._nbytes[start])
        # Sorted by length, and a window this full has no row that was cut: equal ends are equal rows.
        if self._copy is not None and stop - start >= ROWS_MIN and nbytes == self._nbytes[stop - 1]:
            self._copy.copy(start, stop, nbytes)
            return
        for row in zip(
            self._destination[start:stop].tolist(),
            self._source[start:stop].tolist(),
            self._nbytes[start:stop].tolist(),
            strict=True,
        ):
            memmove(*row)


class ProcessIdentity:
    """A process that can be asked, before each copy, whether it is still the one that was met.

    A pidfd tells whether it has ended, so a recycled pid is never taken for it. The same pid after exec(2) it cannot
    tell, so the engine's random token is read from the process as well, again whenever `TOKEN_FRESH_S` has passed (the
    read costs 2.3 us, the pidfd 0.4; after exec the peer's sockets are closed too).
    """

    def __init__(self, pid: int, address: int, token: bytes, label: str) -> None:
        self.pid = pid
        self.label = label
        self._token = token
        self._seen = bytearray(len(token))
        self._token_address = address
        self._seen_address = address_of(self._seen)
        self._row = ProcessVmRow()
        self._lock = threading.Lock()
        self._token_until = 0.0
        self._pidfd = -1
        self._has_ended: Callable[[], bool] = bool
        if pid:
            try:
                self._pidfd = os.pidfd_open(pid)
                self._has_ended = Readable(self._pidfd)
            except OSError as exc:
                if is_shortage(exc.errno):
                    raise
                # Forbidden by a seccomp profile: then the token is read each time.

    def check(self) -> int:
        """Return 0 where the process is the one that was met, else an errno: ESRCH for another or none."""
        with self._lock:
            return self._check()

    def copy_row(self, opcode: Opcode, local: int, remote: int, nbytes: int) -> bool:
        """Copy one short row; False where anything is wrong, for the long way to find out what."""
        with self._lock:
            if self._check():
                return False
            return self._row.copy(opcode, self.pid, local, remote, nbytes) == nbytes

    def close(self) -> None:
        """Give up the pidfd; every later check fails."""
        with self._lock:
            pidfd, self._pidfd = self._pidfd, -1
            self._token = b"closed"
            self._token_until = 0.0
            if pidfd >= 0:
                os.close(pidfd)

    def abandon(self) -> None:
        """In a forked child: close the copy of the pidfd; takes no lock."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _check(self) -> int:
        if self._pidfd >= 0:
            if self._has_ended():
                return errno.ESRCH
            now = time.monotonic()
            if now < self._token_until:
                return 0
            self._token_until = now + TOKEN_FRESH_S
        done = self._row.copy(Opcode.READ, self.pid, self._seen_address, self._token_address, len(self._seen))
        if done == len(self._seen) and self._seen == self._token:
            return 0
        self._token_until = 0.0
        return -done if done < 0 and done != -errno.EFAULT else errno.ESRCH


class ProcessVmCopy(CopyJob):
    """The peer's memory is not mapped here: the kernel copies between the two processes.

    Several threads may take windows of one job: `helpers` run beside the caller where that pays.
    """

    _rows_max = IOV_MAX

    def __init__(
        self,
        opcode: Opcode,
        local: AddressColumn,
        remote: AddressColumn,
        nbytes: AddressColumn,
        slices: AddressColumn,
        identity: ProcessIdentity,
        helpers: CopyHelpers | None,
    ) -> None:
        if opcode is Opcode.WRITE:
            super().__init__(remote, local, nbytes, slices)
            local, remote = self._source, self._destination
        else:
            super().__init__(local, remote, nbytes, slices)
            local, remote = self._destination, self._source
        self._call: Callable[..., int] = process_vm_write if opcode is Opcode.WRITE else process_vm_read
        self._identity = identity
        self._helpers = helpers
        self._opcode = opcode
        self._local_iovecs = np.empty(len(self._nbytes), IOVEC_DTYPE)
        self._remote_iovecs = np.empty(len(self._nbytes), IOVEC_DTYPE)
        self._local_iovecs["base"], self._remote_iovecs["base"] = local, remote
        self._local_iovecs["nbytes"] = self._remote_iovecs["nbytes"] = self._nbytes
        self._local = ffi.from_buffer("struct iovec[]", self._local_iovecs)
        self._remote = ffi.from_buffer("struct iovec[]", self._remote_iovecs)

    def _window_nbytes(self) -> int:
        return min(max(WINDOW_NBYTES, self._nbytes_total // KERNEL_WINDOWS), KERNEL_WINDOW_NBYTES)

    def run(self, transfer: Transfer, until: float) -> None:
        helper: Future[None] | None = None
        turn = Turn()
        left = self._nbytes_total - self.nbytes_done
        if self._helpers is not None and until > 0.0 and left >= PARALLEL_NBYTES:
            helper = self._helpers.submit(lambda: turn.take(lambda: self._copy_windows(transfer, until)))
        try:
            self._copy_windows(transfer, until)
        except BaseException as exc:  # Ctrl-C: the helper must not go on either
            transfer.stop = transfer.stop or TransferCancelledError(f"the copy was interrupted: {exc!r}.")
            raise
        finally:
            try:
                turn.end()  # not one byte more after we return: a helper that has begun comes to its end
            except BaseException as exc:  # Ctrl-C here: that end comes after its window
                transfer.stop = transfer.stop or TransferCancelledError(f"the copy was interrupted: {exc!r}.")
                turn.end()
                raise
            if helper is not None and helper.cancel():
                helper = None
        if helper is not None:
            helper.result()

    def _copy_windows(self, transfer: Transfer, until: float) -> None:
        while self._windows:
            try:
                window = self._windows.pop()
            except IndexError:
                return  # the other thread took the last one
            try:
                self._copy_window(*window)
            except KvxferError as error:
                transfer.stop = transfer.stop or error  # the other thread must not go on
                raise
            self._done.append(window)
            if transfer.stop is not None or time.monotonic() >= until:
                return

    def _copy_window(self, start: int, stop: int, wanted: int) -> None:
        failure = self._identity.check()
        done = 0
        if not failure:
            done = self._call(self._identity.pid, self._local + start, self._remote + start, stop - start)
            if done == wanted:
                return
            failure = -done if done < 0 else errno.EFAULT
        row = start + int(np.searchsorted(np.cumsum(self._nbytes[start:stop]), max(done, 0), "right"))
        raise self._explain(failure, int(self._slices[min(row, stop - 1)]), min(row, stop - 1))

    def _explain(self, failure: int, slice_index: int, piece: int) -> KvxferError:
        call = "process_vm_writev" if self._opcode is Opcode.WRITE else "process_vm_readv"
        peer = self._identity.label
        remote = int((self._destination if self._opcode is Opcode.WRITE else self._source)[piece])
        if failure == errno.ESRCH:
            return PeerClosedError(
                f"{peer} is gone: process {self._identity.pid} has ended or is another program now.",
                remedy="Open the segment again once the peer is back; its addresses will be new.",
                peer=peer,
                pid=self._identity.pid,
            )
        if failure == errno.EFAULT:
            return RemoteAccessError(
                f"{call} of {int(self._nbytes[piece])} bytes at {remote:#x} of {peer} (process {self._identity.pid}) "
                "met memory that is not mapped, or not with the needed protection, on one of the two sides.",
                remedy="Memory must stay mapped until it is unregistered: look for a buffer that was freed first.",
                peer=peer,
                address=remote,
                slice_index=slice_index,
            )
        return TransferError(
            f"{call} to {peer} (process {self._identity.pid}) failed: {os.strerror(failure)}.",
            remedy="EPERM: the peer's user, capabilities or ptrace_scope changed; `kvxfer doctor` shows them.",
            peer=peer,
            errno=failure,
            slice_index=slice_index,
        )


def _cut_pieces(
    destination: AddressColumn,
    source: AddressColumn,
    nbytes: AddressColumn,
    slices: AddressColumn,
    window_nbytes: int,
) -> _Columns:
    """Cut rows longer than a window, so that no copy is longer than one."""
    counts = -(-nbytes // window_nbytes)
    row = np.repeat(np.arange(len(nbytes)), counts)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * window_nbytes
    return (
        destination[row] + offset,
        source[row] + offset,
        np.minimum(nbytes[row] - offset, window_nbytes),
        slices[row],
    )


def _cut_equal_windows(count: int, nbytes: int, rows: int) -> list[tuple[int, int, int]]:
    """Cut `count` pieces of one length into windows of `rows`, as `_cut_windows`."""
    starts = range((count - 1) // rows * rows, -1, -rows)
    return [(start, min(start + rows, count), (min(start + rows, count) - start) * nbytes) for start in starts]


def _cut_windows(nbytes: AddressColumn, window_nbytes: int, rows_max: int) -> list[tuple[int, int, int]]:
    """Cut pieces into windows, last first: (first piece, one past the last, bytes)."""
    ends = np.cumsum(nbytes)
    windows: list[tuple[int, int, int]] = []
    start, before = 0, 0
    while start < len(nbytes):
        stop = max(int(ends.searchsorted(before + window_nbytes, "right")), start + 1)
        stop = min(stop, start + rows_max)
        end = int(ends[stop - 1])
        windows.append((start, stop, end - before))
        start, before = stop, end
    windows.reverse()
    return windows
