"""Many connections, silent ones, dead peers, idle streams, keys: what a control port and a client must bear.

Time limits here are those of the cases or far above what is measured: they tell a hang from an answer, nothing finer.
"""

# ruff: noqa: SIM117  the outer `with` is the stage, the inner one the act

from __future__ import annotations

import contextlib
import errno
import http.server
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import TransferEngine
from kvxfer.addresses import HostPort
from kvxfer.config import EngineConfig
from kvxfer.control import connect
from kvxfer.errors import (
    AuthenticationError,
    HandshakeTimeoutError,
    KvxferError,
    PeerClosedError,
    PeerError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    RemoteProtocolError,
    TransferError,
)
from kvxfer.handshake.events import CardWanted, Established, Failed, PeerOffered
from kvxfer.handshake.frames import MAGIC
from kvxfer.handshake.machine import Role
from kvxfer.transports.tcp import TcpEndpoint
from tests.faults.test_kill import free_port
from tests.support.fault_peer import (
    RESET,
    Counts,
    FakePeer,
    RawClient,
    count,
    data_connections,
    host_port,
    is_closed_by_peer,
    make_machine,
    sessions,
    wait_not_grown,
)
from tests.support.peer import ROOT, Peer, environment, pattern, wait_until

NBYTES = 1 << 20


class _Caller:
    """One of many valid clients, driven by a selector."""

    def __init__(self, address: str) -> None:
        self.machine = make_machine(Role.INITIATOR)
        self.connection = socket.create_connection(host_port(address))
        self.connection.setblocking(False)
        self.established = False
        self.error: KvxferError | None = None

    def step(self, readable: bool) -> None:
        if readable:
            with contextlib.suppress(BlockingIOError):
                self.machine.receive_data(self.connection.recv(65536), time.monotonic())
        while (event := self.machine.next_event()) is not None:
            if isinstance(event, CardWanted):
                self.machine.offer({"address": "raw", "transports": {}})
            elif isinstance(event, PeerOffered):
                self.machine.local_ready("tcp")
            elif isinstance(event, Established):
                self.established = True
            elif isinstance(event, Failed):
                self.error = event.error
        self.connection.send(self.machine.data_to_send())


# B98
@pytest.mark.slow
def test_1000_connections_of_which_100_are_bad_are_answered_before_these_are_given_up() -> None:
    settings: dict[str, Any] = {"handshake_timeout_s": 12.0, "keepalive_timeout_s": 60.0}  # callers answer no keepalive
    with Peer(transports=("tcp",), **settings) as server, contextlib.ExitStack() as stack:
        before = count(server)
        silent = [stack.enter_context(socket.create_connection(host_port(server.address))) for _ in range(50)]
        halves = [stack.enter_context(socket.create_connection(host_port(server.address))) for _ in range(50)]
        for index, half in enumerate(halves):
            half.sendall(make_machine(Role.INITIATOR).data_to_send()[: 1 + 2 * index])
        started = time.monotonic()
        callers = [_Caller(server.address) for _ in range(900)]
        with selectors.DefaultSelector() as selector:
            for caller in callers:
                stack.callback(caller.connection.close)
                selector.register(caller.connection, selectors.EVENT_READ, caller)
                caller.step(False)
            while not all(one.established or one.error for one in callers) and time.monotonic() < started + 20.0:
                for key, _ in selector.select(0.1):
                    key.data.step(True)
        bad_are_open = not any(is_closed_by_peer(one, 0.001) for one in silent + halves)

        assert [one.error for one in callers if not one.established] == []
        assert bad_are_open
        assert all(is_closed_by_peer(one, 20.0) for one in silent + halves)
        wait_until(lambda: sessions(server) == 900)  # a bad one's session ends a moment after its connection
        stack.close()
        wait_until(lambda: sessions(server) == 0)
        wait_not_grown(server, before)


def test_silent_and_half_said_connections_are_dropped_after_the_handshake_timeout() -> None:
    with Peer(transports=("tcp",), handshake_timeout_s=0.2) as server:
        whole = make_machine(Role.INITIATOR).data_to_send()
        for said in (b"", MAGIC[:3], MAGIC, whole[:16], whole[:17], whole[:-1], whole):
            with socket.create_connection(host_port(server.address)) as connection:
                connection.sendall(said)
                assert is_closed_by_peer(connection), said
        wait_until(lambda: sessions(server) == 0)


def test_a_stopped_peer_is_noticed_by_keepalive_on_both_sides() -> None:
    settings: dict[str, Any] = {"transports": ("tcp",), "keepalive_interval_s": 0.1, "keepalive_timeout_s": 0.5}
    with TransferEngine(**settings) as engine, Peer(**settings) as peer:
        here, there = engine.register(np.zeros(NBYTES, np.uint8)), peer.register(NBYTES)
        segment = engine.open_segment(peer.address)
        engine.write(segment, here.address, there.address, NBYTES)
        with peer.stopped():
            batch = engine.submit_write(
                segment, np.full(4096, here.address), np.full(4096, there.address), NBYTES, timeout_s=30.0
            )
            with pytest.raises(PeerUnreachableError, match="no sign of life"):
                batch.wait()

        # The other way round: the serving side notices a client that says nothing more.
        with RawClient(peer.address) as silent:
            assert is_closed_by_peer(silent.connection)


def test_a_peer_is_not_taken_for_dead_because_this_process_was_stopped() -> None:
    """The answers to its questions were there when it went on."""
    with (
        Peer(transports=("tcp",), keepalive_interval_s=0.1, keepalive_timeout_s=0.5) as paused,
        TransferEngine(transports=("tcp",), keepalive_interval_s=0.1, keepalive_timeout_s=60.0) as engine,
    ):
        segment = engine.open_segment(paused.address)
        session = segment._connection.session()
        for _ in range(5):
            with paused.stopped():
                time.sleep(0.8)
            paused.run("time.sleep(0.05)")

            assert session.error is None


class _Blackhole:
    """A listener whose backlog is full: the kernel drops what comes, as a host that is gone does."""

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._fill = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(self._listener.getsockname())
            self._fill.append(one)

    def __enter__(self) -> _Blackhole:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self._fill, self._listener):
            one.close()


# B100
@pytest.mark.slow
def test_a_dead_peer_does_not_delay_a_healthy_one() -> None:
    with _Blackhole() as hole, Peer(transports=("tcp",)) as peer:
        with TransferEngine(transports=("tcp",), connect_timeout_s=1.5) as engine:
            here, there = engine.register(np.zeros(4096, np.uint8)), peer.register(4096)
            segment = engine.open_segment(peer.address)
            errors: list[BaseException] = []

            def try_dead() -> None:
                try:
                    engine.open_segment(hole.address)
                except PeerUnreachableError as error:
                    errors.append(error)

            callers = [threading.Thread(target=try_dead) for _ in range(4)]
            for caller in callers:
                caller.start()
            count = 0
            while any(caller.is_alive() for caller in callers):
                engine.write(segment, here.address, there.address, 4096, timeout_s=5.0)
                count += 1

            assert count > 100
            assert len(errors) == 4


# B152
def test_connecting_is_tried_again_until_the_listener_is_there() -> None:
    port = free_port()
    with TransferEngine(transports=("tcp",), connect_timeout_s=10.0) as engine:
        peers: list[Peer] = []
        starter = threading.Timer(0.5, lambda: peers.append(Peer(port=port, transports=("tcp",))))
        starter.start()
        try:
            segment = engine.open_segment(f"127.0.0.1:{port}")
            assert segment.transport == "tcp"
        finally:
            starter.join()
            peers[0].close()


# B152
def test_giving_up_connecting_names_errno_and_time() -> None:
    with TransferEngine(transports=("tcp",), connect_timeout_s=0.2) as engine:
        with pytest.raises(PeerUnreachableError, match="refused") as caught:
            engine.open_segment(f"127.0.0.1:{free_port()}")
    assert caught.value.errno == 111
    assert caught.value.elapsed_s > 0.0


def test_a_client_stopped_while_it_tries_to_connect_still_gives_up() -> None:
    with Peer(transports=("tcp",), connect_timeout_s=0.4) as client:
        for delay_s in (0.02, 0.1, 0.2, 0.3):
            client.begin("run", "engine.open_segment(address)", {"address": f"127.0.0.1:{free_port()}"})
            time.sleep(delay_s)
            with client.stopped():
                time.sleep(0.45)
            with pytest.raises(PeerUnreachableError):
                client.finish()


# B110
@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_losing_the_control_connection_fails_no_transfer_over_tcp(side: str) -> None:
    with TransferEngine(transports=("tcp",)) as engine, Peer(transports=("tcp",)) as peer:
        here, there = engine.register(pattern(NBYTES, 1)), peer.register(NBYTES)
        segment = engine.open_segment(peer.address)
        rows = np.full(1024, here.address), np.full(1024, there.address)
        batch = engine.submit_write(segment, *rows, NBYTES, timeout_s=30.0)
        while batch._transfer.nbytes_moved == 0:
            batch.poll()
        if side == "ours":
            session = segment._connection.session()
            engine._loop.call_soon(lambda: session.reset(PeerClosedError("cut by the test")))
        else:
            peer.run("for s in list(engine._service._sessions.values()): s.reset(kvxfer.errors.PeerClosedError('cut'))")
        wait_until(lambda: segment._connection._session is None or segment._connection._session.error is not None)

        batch.wait()

        assert there.bytes() == here.array.tobytes()
        segment.refresh()  # the next call connects anew
        assert segment._connection.session().error is None


def engine_streams(segment: Any) -> int:
    return int(segment.describe()["tcp"]["streams"])


# B146, B147
@pytest.mark.slow
def test_streams_are_bounded_and_used_again() -> None:
    with TransferEngine(transports=("tcp",), tcp_streams_max=4) as engine, Peer(transports=("tcp",)) as peer:
        here, there = engine.register(np.zeros(50 << 12, np.uint8)), peer.register(50 << 12)
        segment = engine.open_segment(peer.address)
        before_total = peer.run("""
service = engine._transports["tcp"].service
adopt, adopted = service.adopt, []
def count(connection, number, *rest):
    adopted.append(number)
    adopt(connection, number, *rest)
service.adopt = count
engine.adopted = adopted
result = len(adopted)
""")
        most = [0]
        errors: list[BaseException] = []

        def move(index: int) -> None:
            try:
                for _ in range(40):
                    offset = index << 12
                    engine.write(segment, here.address + offset, there.address + offset, 4096, timeout_s=20.0)
                    most[0] = max(most[0], engine_streams(segment))
            except BaseException as error:
                errors.append(error)

        movers = [threading.Thread(target=move, args=[index]) for index in range(50)]
        for mover in movers:
            mover.start()
        for mover in movers:
            mover.join()

        assert errors == []
        assert most[0] <= 4
        assert before_total == 0
        assert len(peer.run("result = engine.adopted")) <= 4


# B147
def test_idle_streams_are_closed() -> None:
    settings: dict[str, Any] = {"transports": ("tcp",), "tcp_idle_timeout_s": 0.3}
    with TransferEngine(**settings) as engine, Peer(transports=("tcp",)) as peer:
        here, there = engine.register(np.zeros(NBYTES, np.uint8)), peer.register(NBYTES)
        segment = engine.open_segment(peer.address)
        for _ in range(2):
            engine.write(segment, here.address, there.address, NBYTES)
            assert engine_streams(segment) == 1

            wait_until(lambda: data_connections(peer) == 0)

            assert engine_streams(segment) == 0
        engine.write(segment, here.address, there.address, NBYTES)


# B148
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_transfer_after_the_server_has_closed_idle_connections_goes_well(how: str) -> None:
    with TransferEngine(transports=("tcp",)) as engine, Peer(transports=("tcp",)) as peer:
        here, there = engine.register(pattern(NBYTES, 1)), peer.register(NBYTES)
        segment = engine.open_segment(peer.address)
        for _ in range(3):
            engine.write(segment, here.address, there.address, NBYTES)
            peer.run(CLOSE_DATA, reset=RESET if how == "reset" else b"")
            wait_until(lambda: data_connections(peer) == 0)
            time.sleep(0.1)  # past the time for which a stream counts as fresh

            engine.write(segment, here.address, there.address, NBYTES)
            assert there.bytes() == here.array.tobytes()


CLOSE_DATA = """
import socket
for one in list(engine._transports["tcp"].service._connections.values()):
    if reset:
        one._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    one.loop.call_soon(one.close)
"""


# B148
def test_a_half_open_stream_is_bounded_by_the_deadline() -> None:
    """The peer stands still, so nothing answers on a stream that looks healthy."""
    with TransferEngine(transports=("tcp",)) as engine, Peer(transports=("tcp",)) as peer:
        here, there = engine.register(np.zeros(NBYTES, np.uint8)), peer.register(NBYTES)
        segment = engine.open_segment(peer.address)
        engine.read(segment, here.address, there.address, NBYTES)
        with peer.stopped():
            with pytest.raises(TransferError, match=r"limit 0\.2 s"):
                engine.read(segment, here.address, there.address, NBYTES, timeout_s=0.2)
        engine.read(segment, here.address, there.address, NBYTES)


# B107
def test_50_threads_that_open_a_dead_peer_all_get_the_same_error_and_work_once_it_is_up() -> None:
    port = free_port()
    with TransferEngine(transports=("tcp",), connect_timeout_s=0.3) as engine:
        errors: list[BaseException] = []
        together = threading.Barrier(50)

        def try_it() -> None:
            together.wait()
            try:
                engine.open_segment(f"127.0.0.1:{port}")
            except BaseException as error:
                errors.append(error)

        callers = [threading.Thread(target=try_it) for _ in range(50)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()

        assert len(errors) == 50
        assert {(type(error), getattr(error, "errno", None)) for error in errors} == {(PeerUnreachableError, 111)}
        with Peer(port=port, transports=("tcp",)) as peer:
            errors.clear()
            callers = [threading.Thread(target=try_it) for _ in range(50)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()
            assert errors == []
            assert sessions(peer) == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_16_threads_that_use_a_peer_that_has_died_share_the_attempts_to_reach_it(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tried in its turn for connect_timeout_s, so that the last waited 16 times as long."""
    attempts, asked, errors = [], [], []
    with (
        Peer(transports=(transport,)) as peer,
        TransferEngine(transports=(transport,), connect_timeout_s=0.2) as engine,
    ):
        segment = engine.open_segment(peer.address)
        peer.kill()
        wait_until(lambda: not segment.is_connected)

        def connect_once_all_have_asked(*arguments: Any) -> socket.socket:
            attempts.append(1)
            wait_until(lambda: len(asked) == 16)
            return connect(*arguments)

        def use() -> None:
            asked.append(1)
            try:
                segment.refresh()
            except PeerUnreachableError as error:
                errors.append(error)

        monkeypatch.setattr("kvxfer.peer_connection.connect", connect_once_all_have_asked)
        callers = [threading.Thread(target=use) for _ in range(16)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()

    assert len(errors) == 16
    assert len(attempts) < 8


KEY, OTHER_KEY = b"k" * 16, b"o" * 16


@pytest.mark.parametrize(("ours", "theirs"), [(OTHER_KEY, KEY), (None, KEY), (KEY, None)])
def test_who_has_not_the_key_learns_nothing_of_memory(ours: bytes | None, theirs: bytes | None) -> None:
    with Peer(transports=("shm", "tcp"), key=theirs) as server:
        there = server.allocate(NBYTES, name="the-secret-pool")
        with TransferEngine(transports=("shm", "tcp"), key=ours) as engine:
            with pytest.raises(AuthenticationError, match="pre-shared key"):
                engine.open_segment(server.address)

        with RawClient(server.address, key=ours) as raw:
            assert isinstance(raw.error, AuthenticationError)
            said = raw.received + (raw.connection.recv(65536) if not is_closed_by_peer(raw.connection) else b"")

        assert raw.card == {}
        hidden = [b"the-secret-pool", b"data_token", b"socket", str(there.address).encode(), b"token_address"]
        assert [one for one in hidden if one in said] == []
        wait_until(lambda: sessions(server) == 0)


@pytest.mark.parametrize(("ours", "theirs"), [(KEY, OTHER_KEY), (KEY, None), (None, KEY)])
def test_a_client_refuses_a_server_without_the_key_before_it_says_anything(
    ours: bytes | None, theirs: bytes | None
) -> None:
    """The server lies about everything else; what the client says to it is recorded."""
    heard: list[bytes] = []
    with FakePeer(key=theirs, hello=lambda out: heard.append(out) or out) as fake:
        with TransferEngine(transports=("tcp",), key=ours) as engine:
            with pytest.raises(AuthenticationError):
                engine.open_segment(fake.address)


def test_the_right_key_on_both_sides_works() -> None:
    with Peer(transports=("tcp",), key=KEY) as server, TransferEngine(transports=("tcp",), key=KEY) as engine:
        there, here = server.register(64), engine.register(np.zeros(64, np.uint8))
        engine.write(engine.open_segment(server.address), here.address, there.address, 64)


# B66
def test_an_empty_reply_says_what_was_missing() -> None:
    with FakePeer(raw=b"") as fake, TransferEngine(transports=("tcp",)) as engine:
        with pytest.raises(PeerClosedError, match=r"closed the connection during the handshake|broke"):
            engine.open_segment(fake.address)


def test_a_port_where_nobody_answers_times_out_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with TransferEngine(transports=("tcp",), handshake_timeout_s=0.3) as engine:
            with pytest.raises(HandshakeTimeoutError, match="HELLO"):
                engine.open_segment(f"127.0.0.1:{listener.getsockname()[1]}")


class _Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def http_server() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_http_server_is_named_as_such(http_server: str) -> None:
    with TransferEngine(transports=("tcp",)) as engine:
        with pytest.raises((ProtocolError, PeerError), match=r"HTTP|not a kvxfer peer"):
            engine.open_segment(http_server)


# B177
@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"\x15\x03\x03\x00\x02\x02\x50", b"\0" * 64, os.urandom(64)]
)
def test_a_stranger_is_named_with_its_first_bytes(said: bytes) -> None:
    with FakePeer(raw=said) as fake, TransferEngine(transports=("tcp",)) as engine:
        with pytest.raises(RemoteProtocolError, match="not a kvxfer peer"):
            engine.open_segment(fake.address)


def test_a_server_out_of_descriptors_recovers() -> None:
    """EMFILE on accept, on the control port and on the socket of shared memory: wait and go on, not end for good."""
    with Peer(transports=("shm", "tcp")) as server:
        there = server.allocate(NBYTES)
        name = server.run("result = engine._transports['shm']._server.name")
        server.run(
            "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (n, 4096))", n=Counts.of(server.pid).fds + 20
        )
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(socket.create_connection(host_port(server.address)))
                local = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                local.connect("\0" + name)
            time.sleep(0.3)
        server.run("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))")

        with TransferEngine(transports=("shm",), connect_timeout_s=5.0) as engine:
            here = engine.allocate(NBYTES)
            engine.write(engine.open_segment(server.address), here.address, there.address, NBYTES)


# B66
@pytest.mark.parametrize("said", [b"", b"{}"])
def test_an_empty_reply_names_the_address_it_came_from(said: bytes) -> None:
    with FakePeer(raw=said) as fake, TransferEngine(transports=("tcp",)) as engine:
        with pytest.raises(KvxferError, match=fake.address) as caught:
            engine.open_segment(fake.address)
        assert caught.value.values["peer"] == fake.address


# B100
@pytest.mark.slow
def test_no_single_transfer_to_a_healthy_peer_waits_for_a_dead_one() -> None:
    with _Blackhole() as hole, Peer(transports=("tcp",)) as peer:
        with TransferEngine(transports=("tcp",), connect_timeout_s=4.0) as engine:
            here, there = engine.register(np.zeros(4096, np.uint8)), peer.register(4096)
            segment = engine.open_segment(peer.address)

            def try_dead() -> None:
                with contextlib.suppress(KvxferError):
                    engine.open_segment(hole.address)

            callers = [threading.Thread(target=try_dead) for _ in range(4)]
            for caller in callers:
                caller.start()
            for _ in range(20):
                engine.write(segment, here.address, there.address, 4096, timeout_s=5.0)

            assert all(caller.is_alive() for caller in callers), "they had ended when the transfers did"
        for caller in callers:
            caller.join()


FEW_PORTS = """
import contextlib, socket, sys
import numpy as np
import kvxfer
sys.path.insert(0, sys.argv[1])
from tests.support.peer import Peer
with Peer(transports=("tcp",)) as peer, kvxfer.TransferEngine(transports=("tcp",)) as engine:
    here, there = engine.register(np.zeros(4096, np.uint8)), peer.register(4096)
    segment = engine.open_segment(peer.address)
    for _ in range(5000):
        engine.submit_write(segment, here.address, there.address, 4096).wait()
    print(segment.describe()["tcp"]["streams"])
    with contextlib.ExitStack() as stack, kvxfer.TransferEngine(port=41234, connect_timeout_s=0.3) as other:
        with contextlib.suppress(OSError):
            while True:
                stack.enter_context(socket.create_connection(("127.0.0.1", peer.port)))
        try:
            other.open_segment(peer.address)
        except kvxfer.PeerUnreachableError as error:
            print(error.errno, error)
"""


# B146
@pytest.mark.slow
def test_5000_transfers_need_no_more_than_the_51_ports_there_are() -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "-n", "ip", "a"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces cannot be made here")
    setup = 'ip link set lo up; echo "50000 50050" > /proc/sys/net/ipv4/ip_local_port_range; exec "$@"'

    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", setup, "sh", sys.executable, "-c", FEW_PORTS, str(ROOT)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )

    assert (done.returncode, done.stderr) == (0, "")
    streams, told = done.stdout.splitlines()
    assert int(streams) <= 4
    assert told.startswith(f"{errno.EADDRNOTAVAIL} ")
    assert "ip_local_port_range" in told


# B147
def test_clean_up_looks_at_every_idle_stream() -> None:
    endpoint = TcpEndpoint(EngineConfig(tcp_idle_timeout_s=1.0), None)  # type: ignore[arg-type]
    closed: list[float] = []

    class Stream:
        def __init__(self, used_at: float) -> None:
            self.used_at = used_at

        def close(self) -> None:
            closed.append(self.used_at)

    endpoint._idle = [Stream(used_at) for used_at in (9.9, 5.0, 9.5, 8.0, 9.8)]  # type: ignore[misc]
    endpoint._count = 5

    endpoint.reap(10.0)

    assert closed == [5.0, 8.0]
    assert [stream.used_at for stream in endpoint._idle] == [9.9, 9.5, 9.8]
    assert endpoint.describe()["streams"] == 3


# B148
@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_stream_that_the_server_closed_right_after_use_is_replaced(how: str, pause_s: float) -> None:
    gone = CLOSE_DATA + "while engine._transports['tcp'].service._connections: time.sleep(0.0002)"
    with TransferEngine(transports=("tcp",)) as engine, Peer(transports=("tcp",)) as peer:
        here, there = engine.register(pattern(NBYTES, 1)), peer.register(NBYTES)
        segment = engine.open_segment(peer.address)
        for move in (engine.write, engine.read, engine.write):
            move(segment, here.address, there.address, NBYTES)
            peer.run(gone, reset=RESET if how == "reset" else b"")
            time.sleep(pause_s)

            move(segment, here.address, there.address, NBYTES)  # not a byte of it was processed on the old stream


# B149
def test_clients_that_are_idle_give_their_places_to_others() -> None:
    with Peer(transports=("tcp",), tcp_connections_max=4) as peer, contextlib.ExitStack() as stack:
        there = peer.register(4096)
        clients: list[tuple[Any, ...]] = []
        for number in range(5):
            engine = stack.enter_context(TransferEngine(transports=("tcp",), tcp_idle_timeout_s=0.5))
            here = engine.register(np.full(4096, number + 1, np.uint8))
            clients.append((engine, engine.open_segment(peer.address), here.address, there.address, 4096))
        for engine, *arguments in clients[:4]:
            engine.write(*arguments)
        engine, *arguments = clients[4]
        with pytest.raises(PeerRefusedError, match=r"4 data connections.*tcp_connections_max"):
            engine.write(*arguments)

        wait_until(lambda: data_connections(peer) == 0)

        engine.write(*arguments)
        assert there.bytes() == b"\5" * 4096


# B149
def test_a_client_too_many_is_told_so() -> None:
    with Peer(transports=("tcp",), connections_max=1) as peer, TransferEngine(transports=("tcp",)) as second:
        with TransferEngine(transports=("tcp",)) as first:
            first.open_segment(peer.address)
            with pytest.raises(PeerRefusedError, match="connections_max"):
                second.open_segment(peer.address)
        wait_until(lambda: sessions(peer) == 0)

        assert second.open_segment(peer.address).transport == "tcp"


# B152
@pytest.mark.parametrize("code", ["ECONNREFUSED", "EHOSTUNREACH", "ENETUNREACH", "ETIMEDOUT", "EACCES", "ENOENT"])
def test_connecting_is_tried_again_only_where_that_may_help(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = getattr(errno, code)
    tries: list[Any] = []

    class Refusing(socket.socket):
        def connect(self, address: Any) -> None:
            tries.append(address)
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(PeerUnreachableError, match=os.strerror(number)) as caught:
        connect(HostPort("127.0.0.1", 9), EngineConfig(), time.monotonic() + 0.2)

    assert caught.value.errno == number
    assert (len(tries) > 1) == (code not in ("EACCES", "ENOENT"))


CUT_AT_RANDOM = """
import random, socket, threading
dice, service = random.Random(1), engine._transports["tcp"].service
over = engine.over = threading.Event()
def cut():
    while not over.wait(dice.uniform(0.005, 0.04)):
        for one in list(service._connections.values()):
            if dice.random() < 0.5:
                one._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            one.loop.call_soon(one.close)
        if dice.random() < 0.2:
            for session in list(engine._service._sessions.values()):
                session.reset(kvxfer.errors.PeerClosedError("cut"))
threading.Thread(target=cut, daemon=True).start()
"""


# B173
@pytest.mark.slow
def test_connections_that_are_cut_at_random_under_load_give_no_wrong_bytes_and_no_silence() -> None:
    with TransferEngine(transports=("tcp",)) as engine, Peer(transports=("tcp",)) as peer:
        there, here, back = peer.register(NBYTES), *(engine.register(np.zeros(NBYTES, np.uint8)) for _ in range(2))
        segment = engine.open_segment(peer.address)
        peer.run(CUT_AT_RANDOM, reset=RESET)
        good = failed = 0
        ends = time.monotonic() + 2.0
        while time.monotonic() < ends:
            here.array[:] = pattern(NBYTES, good + failed)
            back.array[:] = 0
            try:
                segment = engine.open_segment(peer.address)
                engine.write(segment, here.address, there.address, NBYTES, timeout_s=5.0)
                engine.read(segment, back.address, there.address, NBYTES, timeout_s=5.0)
            except KvxferError:
                failed += 1
                continue
            assert np.array_equal(here.array, back.array), f"transfer {good + failed}"
            good += 1
        peer.run("engine.over.set()")

        assert good > 20
        assert failed > 0, "nothing was cut in the middle of a transfer"
        wait_until(lambda: _works(engine, peer.address, here.address, there.address))
        assert there.bytes() == here.array.tobytes()


def _works(engine: TransferEngine, address: str, here: int, there: int) -> bool:
    with contextlib.suppress(KvxferError):
        engine.write(engine.open_segment(address), here, there, NBYTES, timeout_s=5.0)
        return True
    return False
