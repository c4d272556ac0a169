"""One connection to a Mooncake tcp data port and the rows it moves; never blocks.

The serving side takes one row after the other. All headers are sent without waiting for the answers to the first ones,
and statuses are read meanwhile, so neither side ever waits for a round trip, or for the other to make room.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time

import numpy as np
import numpy.typing as npt

from kvxfer.config import EngineConfig
from kvxfer.errors import (
    KvxferError,
    PeerClosedError,
    PeerUnreachableError,
    RemoteAccessError,
    RemoteProtocolError,
    TransferError,
)
from kvxfer.mooncake.wire.tcp_frames import (
    HEADER_NBYTES,
    STATUS_DTYPE,
    STATUS_NBYTES,
    STATUS_OK,
    STATUS_REJECTED,
    Header,
    header_column,
    is_status,
)
from kvxfer.system.calls import MSG_DONTWAIT, Messenger
from kvxfer.system.iovec import IovecCursor
from kvxfer.transports.sockets import close_with_reset
from kvxfer.transports.tcp import tune
from kvxfer.types import AddressColumn, Opcode

__all__ = ["Lane", "Rows"]

WINDOW_NBYTES = 1 << 20
"""The most one call is given: what socket buffers take at once, and some 300 us."""

Rows = tuple[AddressColumn, AddressColumn, AddressColumn]
"""Local addresses, remote addresses, byte counts."""


class Lane:
    """A connection, used by one transfer at a time.

    place: host and port at the other end. nbytes_done: of the rows of this transfer, known to be in place.
    """

    def __init__(self, connection: socket.socket, place: tuple[str, int], label: str, config: EngineConfig) -> None:
        self.place = place
        tune(connection, config)
        connection.setblocking(False)
        self._socket = connection
        self._fd = connection.fileno()
        self._label = label
        self._messenger = Messenger()
        self._readable = select.poll()
        self._readable.register(self._fd, select.POLLIN)
        self.used_at = time.monotonic()
        self.is_fresh = True
        """Whether no transfer has used it yet."""
        self.nbytes_done = 0

    def fileno(self) -> int:
        """The descriptor of the connection."""
        return self._fd

    def is_healthy(self) -> bool:
        """Whether the peer has not closed the connection while it was idle."""
        return not self._readable.poll(0)  # an idle lane has nothing to read: readable means closed, or out of step

    def begin(self, opcode: Opcode, rows: Rows, numbers: AddressColumn, *, has_status: bool) -> None:
        """Take rows on. numbers: how messages call them. has_status: the peer speaks version 2."""
        local, remote, nbytes = rows
        count = len(local)
        self._opcode, self._rows, self._numbers, self._has_status = opcode, rows, numbers, has_status
        self._totals = np.concatenate(([0], np.cumsum(nbytes)))
        self.nbytes_done = 0
        self._answered = 0
        self._broken: OSError | None = None
        self._received_any = False
        self._headers = header_column(opcode, remote, nbytes, has_status=has_status)
        self._statuses: npt.NDArray[np.uint64] = np.zeros(count, STATUS_DTYPE)
        headers = _cells(self._headers, HEADER_NBYTES)
        statuses = _cells(self._statuses, STATUS_NBYTES)
        if opcode is Opcode.READ:
            self._outgoing = IovecCursor(headers[:1], np.array([HEADER_NBYTES * count]))
            if has_status:
                self._incoming = IovecCursor(*_interleave(statuses, STATUS_NBYTES, local, nbytes))
                self._status_ends = self._totals[:-1] + np.arange(1, count + 1) * STATUS_NBYTES
            else:
                self._incoming = IovecCursor(local, nbytes)
            return
        outgoing = _interleave(headers, HEADER_NBYTES, local, nbytes)
        if has_status:
            self._outgoing = IovecCursor(*outgoing)
            self._incoming = IovecCursor(statuses[:1], np.array([STATUS_NBYTES * count]))
            self._status_ends = np.arange(1, count + 1) * STATUS_NBYTES
        else:
            # Version 1 never says that a row is applied, but it takes one after the other: once a byte that is asked
            # back after them is here, all are.
            self._probe = np.frombuffer(bytearray(Header(Opcode.READ, int(remote[-1]), 1, False).pack()), np.uint8)
            self._probe_byte = np.zeros(1, np.uint8)
            base, counts = outgoing
            self._outgoing = IovecCursor(np.append(base, self._probe.ctypes.data), np.append(counts, HEADER_NBYTES))
            self._incoming = IovecCursor(_cells(self._probe_byte, 1), np.ones(1, np.int64))

    @property
    def is_done(self) -> bool:
        """Whether every row is in place."""
        return self._outgoing.is_done and self._incoming.is_done

    @property
    def events(self) -> int:
        """What poll(2) must tell for it to move."""
        return select.POLLIN if self._outgoing.is_done else select.POLLIN | select.POLLOUT

    @property
    def was_lost(self) -> bool:
        """Whether the peer had closed the connection before it took anything: another one may do."""
        return not self.is_fresh and not self._received_any

    def move(self) -> bool:
        """Send and receive what can be at once; whether that was anything. Raises where the peer refuses a row or the
        connection fails."""
        has_sent = not self._outgoing.is_done and self._send()
        has_received = not self._incoming.is_done and self._receive()
        if self._broken is not None:
            raise self._gone(self._broken.errno or 0)
        return has_sent or has_received

    def end(self) -> None:
        """Every row is in place: forget them."""
        self.used_at = time.monotonic()
        self.is_fresh = False
        del self._outgoing, self._incoming, self._headers, self._statuses, self._rows, self._numbers, self._totals

    def reset(self) -> None:
        """Close so that the peer finds an error instead of the end of a stream."""
        close_with_reset(self._socket)

    def close(self) -> None:
        """Close in order."""
        self._socket.close()

    def shut_down(self) -> None:
        """Make whoever moves it find an error; from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self) -> bool:
        pointer, count = self._outgoing.window(WINDOW_NBYTES)
        moved = self._messenger.send(self._fd, pointer, count, MSG_DONTWAIT)
        if moved > 0:
            self._outgoing.advance(moved)
        elif moved not in (-errno.EAGAIN, -errno.EINTR):
            self._broken = OSError(-moved, os.strerror(-moved))  # the reason may still be there to be read
        return moved > 0

    def _receive(self) -> bool:
        while True:
            pointer, count = self._incoming.window(WINDOW_NBYTES)
            moved = self._messenger.receive(self._fd, pointer, count, MSG_DONTWAIT)
            if moved > 0:
                self._received_any = True
                self._incoming.advance(moved)
                self._check()
                if self._broken is None or self._incoming.is_done:
                    return True
            elif moved in (-errno.EAGAIN, -errno.EINTR):
                return False
            elif moved == 0 or self._broken is not None:
                self._broken = self._broken or OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                return False
            else:  # a reset; a status that came before it is handed out by the next call
                self._broken = OSError(-moved, os.strerror(-moved))

    def _check(self) -> None:
        """Look at the statuses that are whole, and note what is done."""
        moved = self._incoming.nbytes_done
        if not self._has_status:
            self.nbytes_done = moved if self._opcode is Opcode.READ else int(self._totals[-1])
            return
        answered = int(self._status_ends.searchsorted(moved, "right"))
        is_bad = self._statuses[self._answered : answered] != STATUS_OK
        if is_bad.any():
            at = self._answered + int(np.argmax(is_bad))
            self.nbytes_done = int(self._totals[at])
            raise self._refused(at, int(self._statuses[at]))
        self._answered = answered
        if self._opcode is Opcode.READ:
            self.nbytes_done = min(int(self._totals[answered]), moved - answered * STATUS_NBYTES)
        else:
            self.nbytes_done = int(self._totals[answered])

    def _refused(self, at: int, status: int) -> KvxferError:
        """The error for row `at` of this lane, whose status is not OK."""
        if status == STATUS_REJECTED:
            _, remote, nbytes = (int(column[at]) for column in self._rows)
            number = int(self._numbers[at])
            return RemoteAccessError(
                f"{self._label} refused row {number}: [{remote:#x}, {remote + nbytes:#x}), {nbytes} bytes, is not "
                "inside one registered buffer there.",
                remedy="Register memory before its address is told, and do not unregister it while it is used.",
                peer=self._label,
                rows=(number,),
            )
        if is_status(status):
            return TransferError(
                f"{self._label} refused a row with status {status & 0xFFFFFFFF}, which is not known.", peer=self._label
            )
        return RemoteProtocolError(
            f"{self._label} answered with {status:#018x}, which is no status.",
            remedy="It may have been replaced by a process that speaks version 1: open it again.",
            peer=self._label,
        )

    def _gone(self, code: int) -> KvxferError:
        if code == errno.EFAULT:
            return TransferError(
                f"local memory of a batch with {self._label} is not mapped, or not with the needed protection.",
                remedy="Memory must stay mapped while it is used: look for a buffer that was freed first.",
                peer=self._label,
                errno=code,
            )
        reason = "" if self._has_status else " Version 1 of its protocol gives no reason for a refused row but this."
        is_silent = code in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
        kind = PeerUnreachableError if is_silent else PeerClosedError
        return kind(
            f"{self._label} ended a data connection in the middle of a batch: {os.strerror(code)}.{reason}",
            remedy="It may have crashed or been restarted: look at its log.",
            peer=self._label,
            errno=code,
        )


def _cells(array: npt.NDArray[np.generic], nbytes: int) -> AddressColumn:
    """Return where the items of an array are."""
    return int(array.ctypes.data) + np.arange(len(array), dtype=np.int64) * nbytes


def _interleave(
    cells: AddressColumn, cell_nbytes: int, local: AddressColumn, nbytes: AddressColumn
) -> tuple[AddressColumn, AddressColumn]:
    """Return the addresses and byte counts of a cell and a row in turn."""
    base, counts = np.empty((2, 2 * len(cells)), np.int64)
    base[0::2], base[1::2] = cells, local
    counts[0::2], counts[1::2] = cell_nbytes, nbytes
    return base, counts
