"""One data connection as the side that submits uses it, and the requests of one batch on it.

A batch has the connection to itself while it moves. Who makes, keeps and gives up connections: `tcp.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time

import numpy as np

from kvxfer.config import EngineConfig
from kvxfer.errors import KvxferError, PeerClosedError, PeerUnreachableError, RemoteProtocolError, TransferError
from kvxfer.system.calls import MSG_DONTWAIT, MSG_WAITALL, Messenger
from kvxfer.system.iovec import IovecCursor, ShortCursor, address_of
from kvxfer.transports.base import Delivery, Transfer
from kvxfer.transports.sockets import close_with_reset
from kvxfer.transports.tcp_wire import (
    COLUMN_DTYPE,
    OK,
    REFUSED,
    RESPONSE_NBYTES,
    ROWS_MAX,
    Request,
    Response,
    unpack_refusal,
)
from kvxfer.types import Opcode

__all__ = ["TICK_S", "Requests", "Stream"]

WINDOW_NBYTES = 16 << 20
"""The most one blocking call is given: 5 ms at 3 GB/s. A call ends after `TICK_S` anyway."""
TICK_S = 0.1
"""How long a call may block (SO_RCVTIMEO, SO_SNDTIMEO): the bound on seeing a deadline, a cancel or Ctrl-C."""


class Requests:
    """The requests of one batch, one after the other; most batches are one."""

    def __init__(self, transfer: Transfer, stream: Stream) -> None:
        self.stream = stream
        self._next = 0
        self.is_done = False
        self.delivery: Delivery | None = None
        self.begin(transfer)

    def begin(self, transfer: Transfer) -> None:
        """Prepare the next request: what is sent, and where the answer goes."""
        self.request_number = self.stream.next_request()
        self.payload_before = transfer.nbytes_done
        self.response_cursor = self.stream.response_cursor()
        self.response: Response | None = None
        self.payload: IovecCursor | ShortCursor | None = None
        if transfer.single is not None:
            self._begin_row(transfer, *transfer.single)
        else:
            self._begin_rows(transfer)

    def _begin_row(self, transfer: Transfer, local: int, remote: int, nbytes: int) -> None:
        """The short way, without numpy: it decides the latency of small batches."""
        self.is_last = True
        self.payload_nbytes = nbytes
        head = self._pack(transfer, 1, remote, nbytes, self._carried(transfer))
        request, payload = self.stream.short_cursors
        if transfer.opcode is Opcode.WRITE:
            request.reset(head, len(self._header), local, nbytes)
        else:
            request.reset(head, len(self._header))
            payload.reset(local, nbytes)
            self.payload = payload
        self.request: IovecCursor | ShortCursor = request

    def _begin_rows(self, transfer: Transfer) -> None:
        columns = transfer.columns
        first, stop = self._next, min(self._next + ROWS_MAX, len(columns[0]))
        self._next = stop
        self.is_last = stop == len(columns[0])
        local, remote, nbytes = (column[first:stop] for column in columns)
        self.payload_nbytes = total = int(nbytes.sum())
        notify = self._carried(transfer) if self.is_last else None
        if stop - first == 1:
            head = self._pack(transfer, 1, int(remote[0]), total, notify)
        else:
            rows = remote.astype(COLUMN_DTYPE).tobytes() + nbytes.astype(COLUMN_DTYPE).tobytes()
            head = self._pack(transfer, stop - first, 0, total, notify, rows)
        if transfer.opcode is Opcode.WRITE:
            self.request = IovecCursor(np.concatenate(([head], local)), np.concatenate(([len(self._header)], nbytes)))
        else:
            self.request = self.stream.short_cursors[0]
            self.request.reset(head, len(self._header))
            self.payload = IovecCursor(local, nbytes)

    @staticmethod
    def _carried(transfer: Transfer) -> bytes | None:
        """The notification that the request itself takes along."""
        return transfer.notify if transfer.opcode is Opcode.WRITE else None

    def _pack(
        self, transfer: Transfer, row_count: int, remote: int, nbytes: int, notify: bytes | None, rows: bytes = b""
    ) -> int:
        """Build the header and what follows it before the payload; returns where it is."""
        header = Request(
            transfer.opcode,
            row_count,
            len(notify or b""),
            self.request_number,
            nbytes,
            remote,
            nbytes,
            notify is not None,
        )
        self._header = header.pack() + rows + (notify or b"")
        return address_of(self._header)


class Stream:
    """One data connection, used by one transfer at a time."""

    def __init__(self, connection: socket.socket, number: int, label: str, config: EngineConfig) -> None:
        connection.settimeout(None)
        tick = struct.pack("ll", 0, int(TICK_S * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        self._socket = connection
        self._fd = connection.fileno()
        self.number = number
        self._label = label
        self._spin_s = config.spin_s
        self._messenger = Messenger()
        self._requests = 0
        self._response = bytearray(RESPONSE_NBYTES)
        self._response_address = address_of(self._response)
        self.short_cursors = ShortCursor(), ShortCursor()
        """For a request and for the payload of its answer."""
        self._response_cursor = ShortCursor()
        self._readable = select.poll()
        self._readable.register(self._fd, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(self._fd, select.POLLOUT)
        self.used_at = time.monotonic()

    def fileno(self) -> int:
        """The descriptor of the connection."""
        return self._fd

    def next_request(self) -> int:
        """Return a number for the next request on this stream."""
        self._requests += 1
        return self._requests

    def response_cursor(self) -> ShortCursor:
        """Return a cursor over an empty response header."""
        self._response_cursor.reset(self._response_address, RESPONSE_NBYTES)
        return self._response_cursor

    def is_healthy(self) -> bool:
        """Whether the peer has not closed the connection while it was idle."""
        return not self._readable.poll(0)  # an idle stream has nothing to read: readable means closed, or out of step

    def move(self, transfer: Transfer, work: Requests, until: float) -> KvxferError | None:
        """Send and receive until the work is done, `until` or `transfer.stop`. Returns the peer's refusal if it has
        one; raises where the connection failed."""
        while True:
            if not work.request.is_done:
                is_sent = self._drive(work.request, transfer, until, sending=True)
                transfer.nbytes_moved = work.payload_before + work.request.nbytes_done
                if not is_sent:
                    return None
            if work.response is None:
                if not self._drive(work.response_cursor, transfer, until, spin=True):
                    return None
                work.response = response = Response.unpack(self._response)
                if response.number != work.request_number:
                    raise RemoteProtocolError(
                        f"{self._label} answered request {response.number} where {work.request_number} was open.",
                        peer=self._label,
                    )
                if response.status == REFUSED:
                    self._refusal = bytearray(response.nbytes)
                    work.payload = self.short_cursors[1]
                    self.short_cursors[1].reset(address_of(self._refusal), response.nbytes)
                elif response.nbytes != (0 if work.payload is None else work.payload.nbytes_total):
                    raise RemoteProtocolError(f"{self._label} answers with {response.nbytes} bytes.", peer=self._label)
            if work.payload is not None:
                is_done = self._drive(work.payload, transfer, until)
                if work.response.status == OK:
                    transfer.nbytes_done = transfer.nbytes_moved = work.payload_before + work.payload.nbytes_done
                if not is_done:
                    return None
            if work.response.status == REFUSED:
                return unpack_refusal(bytes(self._refusal), self._label)
            transfer.nbytes_done = work.payload_before + work.payload_nbytes
            if work.is_last:
                work.is_done = True
                return None
            work.begin(transfer)

    def reset(self) -> None:
        """Close so that the peer finds an error before anything that is still queued."""
        close_with_reset(self._socket)

    def close(self) -> None:
        """Close in order."""
        self._socket.close()

    def shut_down(self) -> None:
        """Make every call on the connection return; from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _drive(
        self,
        cursor: IovecCursor | ShortCursor,
        transfer: Transfer,
        until: float,
        *,
        sending: bool = False,
        spin: bool = False,
    ) -> bool:
        """Move the cursor to its end: True; False at `until` or when asked to stop. Blocks for `TICK_S` at most in one
        call; never with `until` 0."""
        call = self._messenger.send if sending else self._messenger.receive
        now = time.monotonic()
        spin_until = min(now + self._spin_s, until) if spin else 0.0
        while True:
            pointer, count = cursor.window(WINDOW_NBYTES)
            blocking = until - now > TICK_S and now >= spin_until
            # MSG_WAITALL: after each call this thread needs the GIL, and where others compute that takes 5 ms.
            moved = call(self._fd, pointer, count, MSG_WAITALL if blocking else MSG_DONTWAIT)
            if moved > 0:
                cursor.advance(moved)
                if cursor.is_done:
                    return True
            elif moved == 0:
                raise self._gone("closed the connection", errno.ECONNRESET)
            elif moved not in (-errno.EAGAIN, -errno.EINTR):
                raise self._gone(f"is gone: {os.strerror(-moved)}", -moved)
            if transfer.stop is not None:
                return False
            now = time.monotonic()
            if now >= until:
                return False
            if now < spin_until:
                os.sched_yield()  # the peer may need this very core to answer
            elif moved == -errno.EAGAIN and not blocking:
                poll = self._writable if sending else self._readable
                poll.poll(min(TICK_S, until - now) * 1e3)
                now = time.monotonic()

    def _gone(self, what: str, code: int) -> KvxferError:
        if code == errno.EFAULT:
            return TransferError(
                f"local memory of a batch with {self._label} is not mapped, or not with the needed protection.",
                remedy="Memory must stay mapped until it is unregistered: look for a buffer that was freed first.",
                peer=self._label,
                errno=code,
            )
        kind = (
            PeerUnreachableError
            if code in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            else PeerClosedError
        )
        return kind(
            f"{self._label} {what} in the middle of a batch.",
            remedy="Look at the peer's log: it may have crashed, been restarted, or closed its engine. Then open the "
            "segment again.",
            peer=self._label,
            errno=code,
        )
