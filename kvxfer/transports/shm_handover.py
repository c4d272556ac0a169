"""Hand descriptors of shared memory to peers on the same host, over a Unix socket.

The socket is abstract (unix(7)): it has no file, so nothing is left behind by a killed process, and it exists in one
network namespace only, which makes reaching it the proof that two engines share a host. A peer shows the token that it
was given in the handshake and must run as the same user (SO_PEERCRED); it asks for files and gets descriptors with just
the rights of the region: read-only where the region is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import PeerClosedError, RemoteProtocolError, TransportUnavailableError
from kvxfer.limits import is_shortage, remedy_for, shortage
from kvxfer.log import get_logger
from kvxfer.text import clean
from kvxfer.transports.loop import Loop

__all__ = ["HandoverClient", "HandoverServer", "SharedFile"]

MESSAGE_NBYTES_MAX = 4096
CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid (unix(7))
SEAL_NEEDED = fcntl.F_SEAL_SHRINK
ACCEPT_PAUSE_S = 0.2


@dataclass(frozen=True)
class SharedFile:
    """A file that may be handed over: how to open it anew, and where the region begins in it."""

    reopen: Callable[[], int]
    offset: int
    nbytes: int


class HandoverServer:
    """The listening side, in the control loop: one short message in, one with a descriptor out."""

    def __init__(self, token: bytes, find: Callable[[int], SharedFile | None]) -> None:
        self.name = "kvxfer-" + token[:8].hex()
        self._token = token.hex()
        self._find = find
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind("\0" + self.name)
            self._socket.listen(128)
        except OSError:
            self._socket.close()
            raise
        self._loop: Loop | None = None
        self._clients: set[_Client] = set()

    def serve(self, loop: Loop) -> None:
        """Begin to answer; in the loop's thread."""
        self._loop = loop
        loop.add(self)

    def fileno(self) -> int:
        return self._socket.fileno()

    def ready(self, events: int, now: float) -> bool:
        assert self._loop is not None
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return False
        except OSError as exc:  # EMFILE, ENFILE, ENOMEM: try again later instead of spinning
            get_logger(__name__).error("listener.accept_failed", error=exc.strerror, socket=self.name)
            self._loop.remove(self)
            self._loop.call_at(now + ACCEPT_PAUSE_S, self)
            return True
        connection.setblocking(False)
        pid, uid, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        if uid != os.geteuid():
            self._refuse(connection, f"it runs as user {uid}, this engine as user {os.geteuid()}")
            return True
        client = _Client(connection, self, pid)
        self._clients.add(client)
        self._loop.add(client)
        return True

    def timer(self, now: float) -> None:
        """The pause after a failed accept is over."""
        if self._loop is not None and self._socket.fileno() >= 0:
            self._loop.add(self)

    def failed(self, error: BaseException) -> None:
        self.close()

    def answer(self, request: bytes, client: _Client) -> tuple[dict[str, Any], int | None]:
        """Return the answer to one request and the descriptor that goes with it."""
        try:
            message = json.loads(request)
            token, file_id = message["token"], message.get("file")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {"error": "the request is not understood"}, None
        if not isinstance(token, str) or not hmac.compare_digest(token.encode(errors="replace"), self._token.encode()):
            return {"error": "the token is not the one given in the handshake"}, None
        client.engine = str(message.get("engine"))
        if file_id is None:
            return {"ok": True}, None
        file = self._find(file_id) if isinstance(file_id, int) else None
        if file is None:
            return {"file": file_id, "error": f"file {file_id!r} is not shared (any more)"}, None
        try:
            return {"file": file_id, "offset": file.offset, "nbytes": file.nbytes}, file.reopen()
        except OSError as exc:
            told = f"the descriptor cannot be opened: {exc.strerror}"
            return {"file": file_id, "error": told, "remedy": remedy_for(exc.errno)}, None

    def holders(self, live: Collection[str]) -> list[str]:
        """Return the processes that are connected although their engine is none of `live`: a peer closes its connection
        when it lets go of what it mapped, or ends, so that these may still copy."""
        return [f"process {client.pid}" for client in list(self._clients) if client.engine not in live]

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors only."""
        for one in (self._socket, *(client.connection for client in self._clients)):
            with contextlib.suppress(OSError):
                os.close(one.detach())

    def close(self) -> None:
        """Stop answering; in the loop's thread, or when there is no loop any more."""
        for client in list(self._clients):
            self.drop(client)
        if self._loop is not None:
            self._loop.remove(self)
        self._socket.close()

    def drop(self, client: _Client) -> None:
        """Forget one peer's connection."""
        self._clients.discard(client)
        if self._loop is not None:
            self._loop.remove(client)
        client.connection.close()

    def _refuse(self, connection: socket.socket, why: str) -> None:
        with contextlib.suppress(OSError):
            connection.send(json.dumps({"error": why}).encode())
        connection.close()


class _Client:
    def __init__(self, connection: socket.socket, server: HandoverServer, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self.engine = ""
        """The generation of the engine at the other end, once it has shown the token."""
        self._server = server

    def fileno(self) -> int:
        return self.connection.fileno()

    def ready(self, events: int, now: float) -> bool:
        try:
            request = self.connection.recv(MESSAGE_NBYTES_MAX)
        except BlockingIOError:
            return False
        except OSError:
            request = b""
        if not request:
            self._server.drop(self)
            return True
        answer, fd = self._server.answer(request, self)
        try:
            socket.send_fds(self.connection, [json.dumps(answer).encode()], [] if fd is None else [fd])
        except OSError:
            self._server.drop(self)
        finally:
            if fd is not None:
                os.close(fd)
        return True

    def timer(self, now: float) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        self._server.drop(self)


class HandoverClient:
    """The asking side: knows the peer's process, and maps its files."""

    def __init__(self, name: str, token: str, label: str, deadline: float, *, engine: str) -> None:
        self._label = label
        self._question = {"token": token, "engine": engine}
        self._open_question: int | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._connect("\0" + name, deadline)
            self.pid, _, _ = CREDENTIALS.unpack(
                self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            )
            self._ask(None, deadline)
        except OSError as exc:
            self._socket.close()
            if is_shortage(exc.errno):
                raise shortage(f"connecting to the shared-memory socket of {label}", exc.errno, peer=label) from exc
            refused = exc.errno == errno.ECONNREFUSED
            reason = "it is on another host or in another network namespace" if refused else os.strerror(exc.errno or 0)
            raise TransportUnavailableError(
                f"the shared-memory socket of {label} does not answer from here: {reason}.",
                remedy="On one host, give both processes the same network namespace (docker run --network host, or one "
                "pod) to use shm; over a network this is as it should be.",
                peer=label,
                errno=exc.errno,
            ) from exc
        except BaseException:
            self._socket.close()
            raise

    def _connect(self, name: str, deadline: float) -> None:
        """Connect; where the peer's backlog is full, which EAGAIN says at once (unix(7)), again until `deadline`."""
        while True:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                self._socket.connect(name)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.002)

    def map_file(self, file_id: int, *, writable: bool, deadline: float) -> npt.NDArray[np.uint8]:
        """Map a file of the peer: uint8, shape (nbytes of the region,). The mapping lives as long as the array.

        Raises TimeoutError at the deadline; the same question may then be put again, and is not sent twice.
        """
        answer, fds = self._ask(file_id, deadline)
        if len(fds) != 1:
            self._close_all(fds)
            raise RemoteProtocolError(f"{self._label} sent {len(fds)} descriptors where one was asked for.")
        fd = fds[0]
        try:
            offset, nbytes = answer.get("offset"), answer.get("nbytes")
            if not (isinstance(offset, int) and isinstance(nbytes, int) and offset >= 0 and nbytes > 0):
                raise RemoteProtocolError(f"{self._label} described shared file {file_id} as {answer!r:.200}.")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEAL_NEEDED or os.fstat(fd).st_size < offset + nbytes:
                raise RemoteProtocolError(
                    f"{self._label} handed over a file that is not sealed against shrinking, or too short: mapping it "
                    "could kill this process."
                )
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            whole = mmap.mmap(fd, offset + nbytes, mmap.MAP_SHARED, protection)
            return np.frombuffer(whole, np.uint8, count=nbytes, offset=offset)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the socket; mappings stay until their arrays are gone."""
        self._socket.close()

    def _ask(self, file_id: int | None, deadline: float) -> tuple[dict[str, Any], list[int]]:
        request = self._question if file_id is None else {**self._question, "file": file_id}
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        if file_id is None or file_id != self._open_question:
            with contextlib.suppress(BrokenPipeError):  # it has refused unasked: why is still to be read
                self._socket.send(json.dumps(request).encode())
            self._open_question = file_id
        while True:
            try:
                data, fds, flags, _ = socket.recv_fds(self._socket, MESSAGE_NBYTES_MAX, 4)
            except ConnectionResetError:  # told once, before what the peer said last
                data, fds, flags, _ = socket.recv_fds(self._socket, MESSAGE_NBYTES_MAX, 4)
            if not data:
                self._close_all(fds)
                raise PeerClosedError(f"{self._label} closed its shared-memory socket.", peer=self._label)
            try:
                answer = json.loads(data)
                error = answer.get("error")
            except (ValueError, AttributeError, RecursionError):
                self._close_all(fds)
                message = f"{self._label} answered {data!r:.100} on its shared-memory socket."
                raise RemoteProtocolError(message) from None
            if file_id is None or answer.get("file", file_id) == file_id:
                break
            self._close_all(fds)  # the late answer to a question that was given up
        self._open_question = None
        if flags & socket.MSG_CTRUNC and not fds:  # one was sent, and could not be put into this process
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if error is not None:
            self._close_all(fds)
            raise TransportUnavailableError(
                f"{self._label} does not share memory with this process: {str(error)[:200]}.",
                remedy=_told_remedy(answer) or "Run both processes as the same user, or use tcp.",
                peer=self._label,
            )
        return answer, list(fds)

    @staticmethod
    def _close_all(fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)


def _told_remedy(answer: dict[str, Any]) -> str:
    """Return what the peer says is to be done, if it says something; that is to be done at the peer."""
    remedy = answer.get("remedy")
    return f"At the peer: {clean(remedy, 400)}" if isinstance(remedy, str) and remedy else ""
