"""One connection that a peer drives, moved by a loop: what is to be moved next, and what is called when it has been.

Bytes go straight between the socket and registered memory, a window at a time; a connection that is slow or silent
holds up no other. Knows no protocol: `tcp_service.py` and `mooncake/rows.py` bring theirs.

After each call the thread needs the GIL again. Where other threads of the process compute in Python that takes 5 ms
(sys.getswitchinterval), and calls that move what a socket's buffer holds would reach 0.1 GB/s. A connection that finds
it so waits for its bytes inside the call, without the GIL, for a while.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Callable

from kvxfer.errors import RemoteProtocolError
from kvxfer.log import get_logger
from kvxfer.system.calls import MSG_DONTWAIT, MSG_WAITALL, Messenger, is_readable
from kvxfer.system.iovec import IovecCursor, ShortCursor, address_of
from kvxfer.transports.loop import READABLE, WRITABLE, Loop

__all__ = ["ServedStream"]

WINDOW_NBYTES = 4 << 20
"""How much one connection may move before the thread looks at the others: about 1 ms."""
PATIENT_NBYTES = 16 << 20
"""The same where each call costs a wait for the GIL. Measured: bench/dropin.py, the contenders whose target is busy."""
PATIENCE_S = 0.01
"""How long a call may wait for its bytes then, in sum: the other connections of the thread wait as long."""
PATIENT_S = 1.0
"""How long that goes on before it is looked again whether calls come back late."""
PROMPT_NBYTES = 1 << 20
"""So many bytes are copied in much less time than a thread waits for the GIL."""


class ServedStream:
    """Handler of a loop. A state is a cursor and the method that is called once the cursor is done; it sets the next.

    header_nbytes: what every request begins with. generation: the process at the other end, where that is known.
    forget: called once, when the connection is closed.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        loop: Loop,
        forget: Callable[[], None],
        *,
        header_nbytes: int,
        generation: str = "",
    ) -> None:
        connection.setblocking(True)  # each call says whether it waits
        patience = struct.pack("ll", 0, int(PATIENCE_S * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        self.loop = loop
        self.generation = generation
        self._socket = connection
        self._fd = connection.fileno()
        self._peer = peer
        self._forget = forget
        self._messenger = Messenger()
        self._header = bytearray(header_nbytes)
        self._header_address = address_of(self._header)
        self._header_cursor = ShortCursor()
        self._row_cursor = ShortCursor()
        self._release: Callable[[], None] | None = None
        self._closed = False
        self._turn_nbytes = 0
        self._patient_until = 0.0
        self._watching = READABLE
        self._await_request()

    def fileno(self) -> int:
        return self._fd

    def begin(self) -> None:
        """Start to serve; in the loop's thread."""
        self.loop.add(self)

    def ready(self, events: int, now: float) -> bool:
        del events, now
        self._turn_nbytes = WINDOW_NBYTES
        try:
            while self._step():
                pass
        except RemoteProtocolError as error:
            get_logger(__name__).warning("data.protocol_broken", peer=self._peer, error=str(error))
            self.close()
        return True

    def timer(self, now: float) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection and what it holds; in its loop's thread, or when that has ended. Tolerated twice."""
        if self._closed:
            return
        self._closed = True
        self.loop.remove(self)
        self._socket.close()
        self._let_go()
        self._forget()

    def abandon(self) -> None:
        """In a forked child: close the copy of the descriptor only."""
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())

    def _on_header(self) -> None:
        """A request has begun: `_header` is full."""
        raise NotImplementedError

    # For the protocol: what is next.

    def _await_request(self) -> None:
        self._header_cursor.reset(self._header_address, len(self._header))
        self._cursor: IovecCursor | ShortCursor = self._header_cursor
        self._is_sending = False
        self._then: Callable[[], None] = self._on_header

    def _receive(self, cursor: IovecCursor | ShortCursor, then: Callable[[], None]) -> None:
        self._cursor, self._is_sending, self._then = cursor, False, then
        self._watch(READABLE)

    def _send(self, cursor: IovecCursor | ShortCursor, then: Callable[[], None]) -> None:
        self._cursor, self._is_sending, self._then = cursor, True, then

    def _keep(self, data: bytes) -> int:
        """Hold bytes until the next ones and return where they are."""
        self._answer_bytes = data
        return address_of(data)

    def _let_go(self) -> None:
        """Unpin the regions of the request."""
        release, self._release = self._release, None
        if release is not None:
            release()

    # One step: False when the socket has no more for us now.

    def _step(self) -> bool:
        if self._closed:
            return False
        called_at = time.monotonic()
        is_patient = called_at < self._patient_until and self._cursor is not self._header_cursor
        pointer, count = self._cursor.window(PATIENT_NBYTES if is_patient else WINDOW_NBYTES)
        if self._is_sending:
            moved = self._messenger.send(self._fd, pointer, count, 0 if is_patient else MSG_DONTWAIT)
        else:
            moved = self._messenger.receive(self._fd, pointer, count, MSG_WAITALL if is_patient else MSG_DONTWAIT)
        if not is_patient and 0 < moved <= PROMPT_NBYTES:
            now = time.monotonic()
            if now - called_at > sys.getswitchinterval() / 2:
                self._patient_until = now + PATIENT_S
        if moved <= 0:
            if moved == -errno.EAGAIN:
                self._watch(WRITABLE if self._is_sending else READABLE)
            elif moved != -errno.EINTR:
                if moved == -errno.EFAULT:
                    bases = [pointer[row].base for row in range(count)]
                    get_logger(__name__).error(
                        "data.memory_gone",
                        peer=self._peer,
                        address=hex(next((base for base in bases if not is_readable(base)), bases[0])),
                        error="memory that a peer's request names is registered and not mapped, or not as its rights "
                        "say; a buffer was freed, or its protection changed, before it was unregistered.",
                    )
                self.close()  # the peer has closed or reset the connection: its batch has failed on its side
            return False
        self._cursor.advance(moved)
        if not self._cursor.is_done:
            self._turn_nbytes -= moved
            if self._turn_nbytes > 0:
                return True  # another call costs less than a round of the selector
            self._watch(WRITABLE if self._is_sending else READABLE)
            return False  # the selector calls again if there is more: others have their turn
        self._then()
        return not self._closed and (self._is_sending or self._cursor is not self._header_cursor)

    def _watch(self, events: int) -> None:
        if events != self._watching:
            self._watching = events
            self.loop.watch(self, events)
