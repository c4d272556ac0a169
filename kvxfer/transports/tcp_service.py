"""The serving side of tcp: answers the requests of peers on data connections, in threads that sleep in a selector.

A request is checked, every row of it, before the first byte is applied; a refused one is answered with the reason and
its payload is thrown away, so that the connection stays in step. How bytes move: `tcp_stream.py`.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvxfer.config import EngineConfig
from kvxfer.errors import KvxferError, RemoteProtocolError, ResourceLimitError, UsageError
from kvxfer.limits import shortages_told
from kvxfer.log import get_logger
from kvxfer.system.iovec import IovecCursor, ShortCursor
from kvxfer.transports.loop import READABLE, Loop
from kvxfer.transports.tcp_stream import ServedStream
from kvxfer.transports.tcp_wire import (
    COLUMN_DTYPE,
    OK,
    REFUSED,
    REQUEST_NBYTES,
    RESPONSE_NBYTES,
    Request,
    Response,
    pack_refusal,
)
from kvxfer.types import AddressColumn, Opcode

__all__ = ["DataService", "Gate"]

DISCARD_NBYTES = 1 << 16


class Gate(Protocol):
    """What the serving side asks of the engine."""

    def admit(self, opcode: Opcode, addresses: AddressColumn, nbytes: AddressColumn) -> Callable[[], None]:
        """Check rows against the registered regions and their rights and pin these; returns the unpin call. Raises
        UsageError naming the row."""

    def admit_row(self, opcode: Opcode, address: int, nbytes: int) -> Callable[[], None]:
        """The same for one row."""

    def check_room(self) -> None:
        """Raise UsageError where no notification would be taken now."""

    def notify(self, peer: str, payload: bytes, generation: str) -> None:
        """Hand a notification to the application; raises UsageError where there is no room for it."""

    def stream_began(self, generation: str, peer: str, number: int) -> None:
        """A peer has a data connection."""

    def stream_ended(self, generation: str, number: int) -> None:
        """It is closed, and all that came in over it was taken."""


class DataService:
    """The data connections of one engine and the threads that serve them; threads start with the first connection."""

    def __init__(self, config: EngineConfig, gate: Gate) -> None:
        self._config = config
        self.gate = gate
        self._lock = threading.Lock()
        self._loops: list[Loop] = []
        self._connections: dict[int, ServedStream] = {}
        self._closed = False

    def adopt(self, connection: socket.socket, number: int, peer: str, generation: str) -> None:
        """Serve an authenticated data connection of the process `generation`; from any thread. Closes it where the
        limit is reached."""
        notify_nbytes_max = self._config.notify_nbytes_max

        def make(loop: Loop) -> ServedStream:
            return _DataConnection(connection, number, peer, generation, loop, self, notify_nbytes_max)

        self.gate.stream_began(generation, peer, number)
        is_served = False
        try:
            is_served = self.serve(number, make)
        finally:
            if not is_served:
                connection.close()
                self.gate.stream_ended(generation, number)

    def serve(self, number: int, make: Callable[[Loop], ServedStream]) -> bool:
        """Give a connection to one of the threads; from any thread. False where the limit is reached.

        make: makes the connection for a loop.
        """
        with self._lock:
            if self._closed or len(self._connections) >= self._config.tcp_connections_max:
                return False
            self._grow()
            loop = self._loops[len(self._connections) % len(self._loops)]
            served = make(loop)
            self._connections[number] = served
            loop.call_soon(served.begin)  # under the lock: before anybody can ask to close it
        return True

    def prepare(self) -> None:
        """Have a thread for one more connection; raises ResourceLimitError where there is none and none can be had."""
        with self._lock:
            if not self._closed:
                self._grow()

    def _grow(self) -> None:
        """Start one more thread, up to `tcp_service_threads`; those that run serve all where no more can be started."""
        if len(self._loops) < self._config.tcp_service_threads:
            try:
                with shortages_told("serving a data connection"):
                    self._loops.append(self._start_loop())
            except ResourceLimitError:
                if not self._loops:
                    raise

    def _start_loop(self) -> Loop:
        loop = Loop(f"kvxfer-data-{len(self._loops)}", spin_s=self._config.spin_s)
        try:
            loop.start()
        except BaseException:  # no more threads
            loop.close(0.0)
            raise
        return loop

    @property
    def is_full(self) -> bool:
        """Whether the next connection would be refused."""
        return self.connection_count >= self._config.tcp_connections_max

    @property
    def connection_count(self) -> int:
        """How many data connections are open."""
        return len(self._connections)

    def next_number(self) -> int:
        """Return a number for a new connection."""
        return int.from_bytes(os.urandom(7), "big")  # nobody can name, and hang up, a connection that is not its own

    def hang_up(self, number: int, done: Callable[[], None]) -> None:
        """Drop a connection, then call `done` in its thread: from then on nothing is written on its account."""
        with self._lock:
            connection = self._connections.get(number)
        if connection is None:
            done()
            return

        def drop() -> None:
            connection.close()
            done()

        connection.loop.call_soon(drop)

    def drop_peer(self, generation: str) -> None:
        """Drop all connections of a process that counts as dead: it would hold what it uses for ever."""
        with self._lock:
            connections = [one for one in self._connections.values() if one.generation == generation]
        for connection in connections:
            connection.loop.call_soon(connection.close)

    def forget(self, number: int) -> None:
        """A connection has closed itself."""
        with self._lock:
            self._connections.pop(number, None)

    def close(self, timeout_s: float) -> None:
        """Drop all connections and end the threads."""
        with self._lock:
            self._closed = True
            connections, loops = list(self._connections.values()), list(self._loops)
            self._loops.clear()
        for connection in connections:
            connection.loop.call_soon(connection.close)
        for loop in loops:
            loop.close(timeout_s)
        for connection in connections:
            connection.close()

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors, say nothing to anybody."""
        for connection in self._connections.values():
            connection.abandon()
        for loop in self._loops:
            loop.abandon()


class _DataConnection(ServedStream):
    """One data connection of a kvxfer peer."""

    def __init__(
        self,
        connection: socket.socket,
        number: int,
        peer: str,
        generation: str,
        loop: Loop,
        service: DataService,
        notify_nbytes_max: int,
    ) -> None:
        def forget() -> None:
            service.forget(number)
            service.gate.stream_ended(generation, number)

        super().__init__(
            connection,
            peer,
            loop,
            forget,
            header_nbytes=REQUEST_NBYTES,
            generation=generation,
        )
        self._gate = service.gate
        self._notify_nbytes_max = notify_nbytes_max
        self._scratch: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None

    # The states.

    def _on_header(self) -> None:
        request = Request.unpack(self._header, self._notify_nbytes_max)
        self._request = request
        self._notify: bytearray | None = bytearray(request.notify_nbytes) if request.has_notify else None
        self._columns: np.ndarray[tuple[int, int], np.dtype[np.int64]] | None = None
        if request.row_count == 1 and not request.notify_nbytes:
            self._on_rows()
            return
        parts: list[tuple[int, int]] = []
        if request.row_count > 1:
            self._columns = np.empty((2, request.row_count), COLUMN_DTYPE)
            parts.append((int(self._columns.ctypes.data), self._columns.nbytes))
        if self._notify:
            self._notify_array = np.frombuffer(self._notify, np.uint8)
            parts.append((int(self._notify_array.ctypes.data), len(self._notify)))
        base, nbytes = np.array(parts, np.int64).T
        self._receive(IovecCursor(base, nbytes), self._on_rows)

    def _on_rows(self) -> None:
        request = self._request
        opcode = Opcode(request.opcode)
        gate = self._gate
        try:
            if self._notify is not None:
                gate.check_room()
            if self._columns is None:
                self._release = gate.admit_row(opcode, request.address, request.nbytes)
            else:
                addresses, nbytes = self._columns
                self._check_sum(nbytes, request.payload_nbytes)
                self._release = gate.admit(opcode, addresses, nbytes)
        except UsageError as error:
            self._refuse(error)
            return
        cursor: IovecCursor | ShortCursor = self._row_cursor
        if opcode is Opcode.WRITE:
            if self._columns is None:
                self._row_cursor.reset(request.address, request.nbytes)
            else:
                cursor = IovecCursor(addresses, nbytes)
            self._receive(cursor, self._on_written)
            return
        head = self._keep(Response(OK, request.number, request.payload_nbytes).pack())
        if self._columns is None:
            self._row_cursor.reset(head, RESPONSE_NBYTES, request.address, request.nbytes)
        else:
            cursor = IovecCursor(np.concatenate(([head], addresses)), np.concatenate(([RESPONSE_NBYTES], nbytes)))
        self._send(cursor, self._on_answered)

    @staticmethod
    def _check_sum(nbytes: AddressColumn, payload_nbytes: int) -> None:
        if int(nbytes.min()) < 1 or int(nbytes.max()) > payload_nbytes or int(nbytes.sum()) != payload_nbytes:
            raise RemoteProtocolError(f"rows of {int(nbytes.sum())} bytes in a request of {payload_nbytes}.")

    def _on_written(self) -> None:
        self._let_go()
        if self._notify is not None:
            if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.close()  # the peer has given the batch up: it must not be announced
                return
            try:
                self._gate.notify(self._peer, bytes(self._notify), self.generation)
            except UsageError as error:  # the queue has filled up since it was looked at: the batch fails, unannounced
                text = pack_refusal(error)
                self._answer(Response(REFUSED, self._request.number, len(text)).pack() + text)
                return
        self._answer(Response(OK, self._request.number, 0).pack())

    def _refuse(self, error: KvxferError) -> None:
        text = pack_refusal(error)
        answer = Response(REFUSED, self._request.number, len(text)).pack() + text
        get_logger(__name__).warning("data.request_refused", peer=self._peer, error=str(error))
        if self._request.opcode == Opcode.READ:
            self._answer(answer)
            return
        self._discard_left = self._request.payload_nbytes
        self._refusal = answer
        self._discard()

    def _discard(self) -> None:
        """Receive the payload of a refused WRITE into nowhere, then answer."""
        if self._discard_left == 0:
            self._answer(self._refusal)
            return
        if self._scratch is None:
            self._scratch = np.empty(DISCARD_NBYTES, np.uint8)
        part = min(DISCARD_NBYTES, self._discard_left)
        self._discard_left -= part
        self._row_cursor.reset(int(self._scratch.ctypes.data), part)
        self._receive(self._row_cursor, self._discard)

    def _answer(self, data: bytes) -> None:
        self._row_cursor.reset(self._keep(data), len(data))
        self._send(self._row_cursor, self._on_answered)

    def _on_answered(self) -> None:
        self._let_go()
        self._columns = None
        self._watch(READABLE)
        self._await_request()
