"""A serving side of Mooncake's tcp data port in this process: honest, of either version, or lying as told."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvxfer.mooncake.wire.descriptor import BufferDescriptor, SegmentDescriptor
from kvxfer.mooncake.wire.tcp_frames import HEADER_NBYTES, STATUS_OK, STATUS_REJECTED, Header, pack_status
from kvxfer.types import Opcode
from tests.support.fault_peer import receive_exactly

NBYTES = 1 << 20
RESET = struct.pack("ii", 1, 0)

Answer = Callable[[socket.socket, Header], bool]
"""What is done with a request instead of the right thing; whether the connection goes on."""


class FakeMooncake:
    """Registered memory of NBYTES behind a data port.

    answer: in place of the right answer to every request. version: 1 or 2, told and spoken.
    """

    def __init__(self, *, version: int = 2, answer: Answer | None = None) -> None:
        self.memory = np.zeros(NBYTES, np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.headers: list[Header] = []
        self.connection_count = 0
        self.refresh_count = 0
        self._answer = answer or self._serve
        self._connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.descriptor = SegmentDescriptor(
            "127.0.0.1:15000",
            buffers=(BufferDescriptor("127.0.0.1:15000", self.address, NBYTES),),
            tcp_data_host="127.0.0.1",
            tcp_data_port=self._listener.getsockname()[1],
            tcp_proto_version=version,
        )
        threading.Thread(target=self._accept, daemon=True).start()

    def refresh(self) -> SegmentDescriptor:
        """Return the descriptor, with a timestamp of its own as Mooncake's."""
        self.refresh_count += 1
        return dataclasses.replace(self.descriptor, timestamp=str(time.monotonic()))

    def drop_connections(self, *, reset: bool = False) -> None:
        """Close the connections, go on to listen."""
        connections, self._connections = self._connections, []
        for connection in connections:
            with contextlib.suppress(OSError):
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_connections()

    def __enter__(self) -> FakeMooncake:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a reset drops what Nagle holds back
            self.connection_count += 1
            self._connections.append(connection)
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while True:
                data = receive_exactly(connection, HEADER_NBYTES)
                if len(data) < HEADER_NBYTES:
                    return
                header = Header.unpack(data)
                self.headers.append(header)
                if not self._answer(connection, header):
                    return

    def _serve(self, connection: socket.socket, header: Header) -> bool:
        start = header.address - self.address
        if not 0 <= start <= NBYTES - header.nbytes:
            if header.has_status:
                connection.sendall(pack_status(STATUS_REJECTED))
            return False
        row = self.memory[start : start + header.nbytes]
        status = pack_status(STATUS_OK) if header.has_status else b""
        if header.opcode is Opcode.READ:
            connection.sendall(status + row.tobytes())
        else:
            data = receive_exactly(connection, header.nbytes)
            if len(data) < header.nbytes:
                return False
            row[:] = np.frombuffer(data, np.uint8)
            connection.sendall(status)
        return True


def answer_with(data: bytes, *, goes_on: bool = False) -> Any:
    """Return an answer that sends these bytes whatever is asked, then closes."""

    def answer(connection: socket.socket, header: Header) -> bool:
        if header.opcode is Opcode.WRITE:
            receive_exactly(connection, header.nbytes)
        connection.sendall(data)
        return goes_on

    return answer


def hold(connection: socket.socket, header: Header) -> bool:
    """Never answer, and read nothing more."""
    del header
    with contextlib.suppress(OSError):
        while connection.fileno() >= 0:
            time.sleep(0.01)
    return False
