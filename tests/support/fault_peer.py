"""What fault tests need besides `peer.Peer`: looking into a process from outside, and peers that break the rules.

`memory_of` and `Counts` read /proc, so they work on a stopped process too. `RawClient` is a valid session without an
engine behind it, for sending anything. `FakePeer` is a server that lies to a real client, as told.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.handshake.events import CardWanted, Established, Failed, PeerClosed, PeerOffered, TransportChosen
from kvxfer.handshake.frames import MAGIC, FrameKind, encode, encode_json
from kvxfer.handshake.machine import Handshake, Role
from kvxfer.transports.tcp_wire import Request, Response
from kvxfer.types import Opcode
from tests.support.peer import Peer, wait_until

FIRST_NBYTES = len(MAGIC) + 8
RESET = struct.pack("ii", 1, 0)


def memory_of(pid: int, address: int, nbytes: int) -> bytes:
    """Return what is in a process's memory now, whether it runs or is stopped (proc_pid_mem(5))."""
    fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.pread(fd, nbytes, address)
    finally:
        os.close(fd)
    assert len(found) == nbytes
    return found


@dataclass(frozen=True)
class Counts:
    """What a process holds; `grown_from` says what it has more of than before."""

    fds: int
    threads: int
    rss_nbytes: int

    @classmethod
    def of(cls, pid: int) -> Counts:
        rss_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(
            len(os.listdir(f"/proc/{pid}/fd")),
            len(os.listdir(f"/proc/{pid}/task")),
            rss_pages * os.sysconf("SC_PAGESIZE"),
        )

    def grown_from(self, before: Counts, *, rss_slack_nbytes: int = 32 << 20) -> str:
        """Return in words what has grown, "" for nothing. Memory may by the slack: allocators keep some."""
        grown = [
            f"{what}: {old} -> {new}"
            for what, old, new in (
                ("descriptors", before.fds, self.fds),
                ("threads", before.threads, self.threads),
                ("memory", before.rss_nbytes + rss_slack_nbytes, self.rss_nbytes),
            )
            if new > old
        ]
        return ", ".join(grown)


def count(peer: Peer | None = None) -> Counts:
    """Return what the peer, or this process, holds after a garbage collection: a failure and its frames are a cycle."""
    if peer is None:
        gc.collect()
        return Counts.of(os.getpid())
    peer.run("import gc; gc.collect()")
    return Counts.of(peer.pid)


def wait_not_grown(peer: Peer | None, before: Counts, timeout_s: float = 15.0, **slack: int) -> None:
    """Fail where the peer, or this process, holds more than before and lets go of nothing of it: timers of ended
    sessions take a keepalive interval to go."""
    deadline = time.monotonic() + timeout_s
    while grown := count(peer).grown_from(before, **slack):
        assert time.monotonic() < deadline, f"it has grown: {grown}"
        time.sleep(0.1)


def stop(pid: int) -> None:
    """Stop a process and wait until it stands still, all threads of it."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(_state(pid, task) == "T" for task in os.listdir(f"/proc/{pid}/task")))


def _state(pid: int, task: str) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0]
    return "T"  # the thread has ended meanwhile


def resume(pid: int) -> None:
    """Undo `stop`."""
    os.kill(pid, signal.SIGCONT)


def data_connections(peer: Peer) -> int:
    """How many data connections the peer serves."""
    return int(peer.run("result = len(engine._transports['tcp'].service._connections)"))


def sessions(peer: Peer) -> int:
    """How many control connections the peer serves."""
    return int(peer.run("result = len(engine._service._sessions)"))


def host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Return so many bytes, or what came before the end."""
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            break
        data += part
    return data


def receive_rest(connection: socket.socket, timeout_s: float = 5.0) -> bytes:
    """Return all that comes until the other side closes; fails the test if it does not."""
    connection.settimeout(timeout_s)
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    return data


def is_closed_by_peer(connection: socket.socket, timeout_s: float = 5.0) -> bool:
    """Whether the other side ends the connection within the time; what it says before is thrown away."""
    try:
        receive_rest(connection, timeout_s)
    except TimeoutError:
        return False
    return True


def make_machine(
    role: Role, *, key: bytes | None = None, transports: tuple[str, ...] = ("tcp",), deadline_s: float = 20.0
) -> Handshake:
    """Return one side of a handshake, as a new process would begin it."""
    return Handshake(
        role=role,
        generation=os.urandom(16).hex(),
        name="raw",
        nonce=os.urandom(16),
        now=time.monotonic(),
        deadline_s=deadline_s,
        key=key,
        transports=transports,
    )


class RawClient:
    """A control session with an engine and nothing behind it: whatever is sent, the test has written."""

    def __init__(
        self,
        address: str,
        *,
        key: bytes | None = None,
        transport: str = "tcp",
        timeout_s: float = 10.0,
        own_address: object = "raw",
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.machine = make_machine(Role.INITIATOR, key=key, transports=(transport,))
        self.generation = ""
        self.card: Mapping[str, Any] = {}
        self.error: KvxferError | None = None
        self.received = b""
        self.frames: list[Any] = []
        self.connection = socket.create_connection(host_port(address), timeout=timeout_s)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        is_established = False
        while not is_established and self.error is None:
            self.connection.sendall(self.machine.data_to_send())
            data = self.connection.recv(65536)
            self.received += data
            self.machine.receive_data(data, time.monotonic())
            while (event := self.machine.next_event()) is not None:
                if isinstance(event, CardWanted):
                    self.machine.offer({"address": own_address, "transports": {}})
                elif isinstance(event, PeerOffered):
                    self.card, self.generation = event.card, event.peer.generation
                    self.machine.local_ready(transport)
                elif isinstance(event, Failed):
                    self.error = event.error
                elif isinstance(event, Established):
                    is_established = True
        with contextlib.suppress(OSError):
            self.connection.sendall(self.machine.data_to_send())

    def ask_regions(self) -> list[list[Any]]:
        """Return the engine's regions, as a client would."""
        self.send_frame(FrameKind.REGIONS_GET, json.dumps({"number": 1}).encode())
        while True:
            data = self.connection.recv(65536)
            assert data, "the engine has closed the session"
            self.machine.receive_data(data, time.monotonic())
            while (event := self.machine.next_event()) is not None:
                frame = getattr(event, "frame", None)
                if frame is not None and frame.kind is FrameKind.REGIONS:
                    regions: list[list[Any]] = json.loads(frame.body)["regions"]
                    return regions

    def send_frame(self, kind: FrameKind, body: bytes) -> None:
        """Send one frame of the session, unless there is nobody any more."""
        with contextlib.suppress(OSError):
            self.connection.sendall(encode(kind, body))

    def send(self, data: bytes) -> None:
        """Send any bytes, unless there is nobody any more."""
        with contextlib.suppress(OSError):
            self.connection.sendall(data)

    def attach(self) -> socket.socket:
        """Return a data connection that the engine has accepted."""
        connection = socket.create_connection(host_port(self.address), timeout=self.timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = {"token": self.card["data_token"], "target": self.generation}
        connection.sendall(MAGIC + encode_json(FrameKind.ATTACH, body))
        first = receive_exactly(connection, FIRST_NBYTES)
        assert first[12] == FrameKind.ATTACHED, first
        receive_exactly(connection, int.from_bytes(first[8:12], "big"))
        return connection

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_request(address: int, payload: bytes, *, number: int = 1) -> bytes:
    """Return a valid WRITE of one row."""
    nbytes = len(payload)
    return Request(Opcode.WRITE, 1, 0, number, nbytes, address, nbytes, False).pack() + payload


def read_request(address: int, nbytes: int, *, number: int = 1) -> bytes:
    """Return a valid READ of one row."""
    return Request(Opcode.READ, 1, 0, number, nbytes, address, nbytes, False).pack()


Serve = Callable[[socket.socket], None]


def hold(connection: socket.socket) -> None:
    """Read on and say nothing until the other side closes."""
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass


class FakePeer:
    """A server for one real client. What it is not told to lie about it does as an engine would.

    raw: bytes to answer any connection with, then it is closed. card, regions: bodies instead of the right ones.
    attached: bytes instead of the answer to ATTACH. data: what serves a data connection. frames: session frames sent
    after the regions were asked for. transport: what it offers.
    """

    def __init__(
        self,
        *,
        raw: bytes | None = None,
        hello: Callable[[bytes], bytes] | None = None,
        card: Any = None,
        regions: bytes | None = None,
        attached: bytes | None = None,
        data: Serve = hold,
        frames: bytes = b"",
        transport: str = "tcp",
        key: bytes | None = None,
    ) -> None:
        self._raw, self._hello, self._card, self._regions = raw, hello, card, regions
        self._attached, self._data, self._frames, self._transport, self._key = attached, data, frames, transport, key
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(30.0)
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, KvxferError):
            if self._raw is not None:
                connection.recv(65536)
                connection.sendall(self._raw)
            else:
                first = receive_exactly(connection, FIRST_NBYTES)
                if len(first) == FIRST_NBYTES and first[12] == FrameKind.ATTACH:
                    receive_exactly(connection, int.from_bytes(first[8:12], "big"))
                    right = MAGIC + encode_json(FrameKind.ATTACHED, {"number": 7})
                    connection.sendall(right if self._attached is None else self._attached)
                    self._data(connection)
                elif first:
                    self._serve_control(connection, first)
        with contextlib.suppress(OSError):
            connection.close()

    def _serve_control(self, connection: socket.socket, first: bytes) -> None:
        machine = make_machine(Role.RESPONDER, transports=(self._transport,), key=self._key)
        machine.receive_data(first, time.monotonic())
        while True:
            while (event := machine.next_event()) is not None:
                if isinstance(event, CardWanted):
                    right = {
                        "address": self.address,
                        "data_token": "00",
                        "transports": {self._transport: {"rows_max": 1}},
                    }
                    machine.offer(right if self._card is None else self._card)
                elif isinstance(event, TransportChosen):
                    machine.local_ready(event.transport)
                elif isinstance(event, Failed | PeerClosed):
                    connection.sendall(machine.data_to_send())  # the reason
                    return
                frame = getattr(event, "frame", None)
                if frame is not None:
                    machine.send(*self._answer(frame))
                    if frame.kind is FrameKind.REGIONS_GET and self._frames:
                        connection.sendall(machine.data_to_send() + self._frames)
            out = machine.data_to_send()
            if self._hello is not None and out.startswith(MAGIC):
                out = self._hello(out)
            connection.sendall(out)
            data = connection.recv(65536)
            machine.receive_data(data, time.monotonic())
            if not data:
                return

    def _answer(self, frame: Any) -> tuple[FrameKind, bytes]:
        if frame.kind is FrameKind.REGIONS_GET:
            number = json.loads(frame.body)["number"]
            rows = [[1, "pool", FAKE_ADDRESS, FAKE_NBYTES, 3, {self._transport: {"file": 1}}]]
            right = json.dumps({"number": number, "version": 1, "regions": rows}).encode()
            return FrameKind.REGIONS, right if self._regions is None else self._regions
        if frame.kind is FrameKind.NOTIFY:
            return FrameKind.NOTIFY_ACK, bytes(frame.body[:8])
        if frame.kind is FrameKind.ABORT:
            return FrameKind.ABORTED, json.dumps({"number": json.loads(frame.body)["number"]}).encode()
        return FrameKind.PONG, b""

    def close(self) -> None:
        """End all threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(10.0)

    def __enter__(self) -> FakePeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


FAKE_ADDRESS = 0x7000_0000_0000
FAKE_NBYTES = 1 << 20


class FakeHandover:
    """An abstract Unix socket that answers a client of shared memory as told: `answer(request)` gives bytes and fds."""

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[bytes, list[int]]]) -> None:
        self.name = "kvxfer-fake-" + os.urandom(6).hex()
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("\0" + self.name)
        self._socket.listen(8)
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        clients: list[socket.socket] = []
        while True:
            readable, _, _ = select.select([self._socket, self._stop, *clients], [], [])
            if self._stop in readable:
                break
            for one in readable:
                if one is self._socket:
                    clients.append(self._socket.accept()[0])
                    continue
                with contextlib.suppress(OSError):
                    request = one.recv(65536)
                    if request:
                        data, fds = self._answer(json.loads(request))
                        socket.send_fds(one, [data], fds)
                        for fd in fds:
                            os.close(fd)
                        continue
                clients.remove(one)
                one.close()
        for one in clients:
            one.close()

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join(10.0)
        os.close(self._stop)
        self._socket.close()

    def __enter__(self) -> FakeHandover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def respond(*parts: bytes, then: Serve = hold) -> Serve:
    """Return what serves a data connection: wait for a request, send these parts, go on with `then`."""

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        for part in parts:
            connection.sendall(part)
        then(connection)

    return serve


def response(status: int, number: int, nbytes: int) -> bytes:
    return Response(status, number, nbytes).pack()


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return bytes that look like `data` but are not: a field set to an edge value, a bit turned, a cut, a doubling."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        what = rng.randrange(6)
        at = rng.randrange(len(out)) if out else 0
        if what == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            size = rng.choice((1, 2, 4, 8))
            edge = rng.choice(
                (0, 1, (1 << 8 * size) - 1, 1 << (8 * size - 1), (1 << 8 * size) - 8, rng.getrandbits(8 * size))
            )
            out[at : at + size] = (edge % (1 << 8 * size)).to_bytes(size, "little")
        elif what == 2:
            del out[at:]
        elif what == 3:
            out[at:at] = rng.randbytes(rng.choice((1, 7, 64)))
        elif what == 4:
            del out[at : at + rng.choice((1, 2, 8))]
        else:
            out += out[at:]
    return bytes(out)
