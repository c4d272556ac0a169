"""The serving side of Mooncake's tcp data port: one connection, one row after the other.

The same bounds and rights as for kvxfer's own peers. A refused row is told by its status, as far as the protocol has
one, and ends the connection, as Mooncake's own serving side does.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

import numpy as np

from kvxfer.errors import UsageError
from kvxfer.log import get_logger
from kvxfer.mooncake.wire.tcp_frames import (
    HEADER_NBYTES,
    STATUS_NBYTES,
    STATUS_OK,
    STATUS_REJECTED,
    Header,
    pack_status,
)
from kvxfer.system.iovec import address_of
from kvxfer.transports.loop import READABLE, Loop
from kvxfer.transports.tcp_service import Gate
from kvxfer.transports.tcp_stream import ServedStream
from kvxfer.types import Opcode

__all__ = ["RowStream"]

LINGER_S = 2.0
"""How long a refused peer has to read why. Closed at once, with its payload unread, the connection would be reset, and
a reset overtakes the status."""
DISCARD_NBYTES = 1 << 16

_OK = pack_status(STATUS_OK)
_OK_ADDRESS = address_of(_OK)


class RowStream(ServedStream):
    """A data connection of a Mooncake process.

    stall_s: a request that does not move for so long (up to twice as long) is dropped: it pins a region. A connection
    without a request may be silent for ever.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        loop: Loop,
        forget: Callable[[], None],
        *,
        gate: Gate,
        stall_s: float,
    ) -> None:
        super().__init__(connection, peer, loop, forget, header_nbytes=HEADER_NBYTES)
        self._gate = gate
        self._stall_s = stall_s
        self._row_count = 0
        self._seen = (0, 0)
        self._is_refused = False

    def begin(self) -> None:
        super().begin()
        self.loop.call_at(time.monotonic() + self._stall_s, self)

    def timer(self, now: float) -> None:
        if self._closed:
            return
        seen = (self._row_count, self._cursor.nbytes_done)
        is_open = self._cursor is not self._header_cursor or self._cursor.nbytes_done > 0
        if self._is_refused or (is_open and seen == self._seen):
            if not self._is_refused:
                get_logger(__name__).warning("data.stalled", peer=self._peer, silent_s=self._stall_s)
            self.close()
            return
        self._seen = seen
        self.loop.call_at(now + self._stall_s, self)

    def _on_header(self) -> None:
        header = self._request = Header.unpack(self._header)
        try:
            self._release = self._gate.admit_row(header.opcode, header.address, header.nbytes)
        except UsageError as error:
            self._refuse(error)
            return
        if header.opcode is Opcode.WRITE:
            self._row_cursor.reset(header.address, header.nbytes)
            self._receive(self._row_cursor, self._on_written)
        elif header.has_status:
            self._row_cursor.reset(_OK_ADDRESS, STATUS_NBYTES, header.address, header.nbytes)
            self._send(self._row_cursor, self._on_answered)
        else:
            self._row_cursor.reset(header.address, header.nbytes)
            self._send(self._row_cursor, self._on_answered)

    def _on_written(self) -> None:
        self._let_go()
        if self._request.has_status:
            self._row_cursor.reset(_OK_ADDRESS, STATUS_NBYTES)
            self._send(self._row_cursor, self._on_answered)
        else:
            self._on_answered()

    def _on_answered(self) -> None:
        self._let_go()
        self._row_count += 1
        self._watch(READABLE)
        self._await_request()

    def _refuse(self, error: UsageError) -> None:
        get_logger(__name__).warning("data.request_refused", peer=self._peer, error=str(error))
        if not self._request.has_status:
            self.close()
            return
        status = pack_status(STATUS_REJECTED)
        self._row_cursor.reset(self._keep(status), STATUS_NBYTES)
        self._send(self._row_cursor, self._linger)

    def _linger(self) -> None:
        """Read the refused payload into nowhere until the peer closes."""
        with contextlib.suppress(OSError):  # the peer has reset it: the next step finds that out
            self._socket.shutdown(socket.SHUT_WR)
        self._is_refused = True
        self._scratch = np.empty(DISCARD_NBYTES, np.uint8)
        self.loop.call_at(time.monotonic() + LINGER_S, self)
        self._discard()

    def _discard(self) -> None:
        self._row_cursor.reset(int(self._scratch.ctypes.data), DISCARD_NBYTES)
        self._receive(self._row_cursor, self._discard)
