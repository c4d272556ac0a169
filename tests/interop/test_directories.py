"""Real metadata servers, and the real Mooncake beside them: what one publishes the other finds."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvxfer import errors
from kvxfer.mooncake.directory import Directory, open_directory
from kvxfer.mooncake.wire.descriptor import BufferDescriptor, SegmentDescriptor
from tests.interop.environments import end, mooncake_python, program
from tests.interop.processes import accepts, engine_process, free_port, server_process, shim_process

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(180)]
NBYTES = 1 << 20


@dataclass
class Server:
    """A real server that can be stopped, killed and started anew on its port, empty."""

    kind: str
    address: str
    start: Callable[[], contextlib.AbstractContextManager[subprocess.Popen[str]]]
    process: subprocess.Popen[str]
    stack: contextlib.ExitStack

    def restart(self) -> None:
        end(self.process, signal.SIGKILL)
        self.process = self.stack.enter_context(self.start())


def command_http(port: int, folder: Path) -> list[Any]:
    python = mooncake_python("aiohttp")
    return [
        python,
        "-m",
        "mooncake.http_metadata_server",
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--log-level",
        "ERROR",
    ]


def command_redis(port: int, folder: Path) -> list[Any]:
    pytest.importorskip("redis")
    server = program("redis-server", "redis-server")
    return [server, "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]


def command_etcd(port: int, folder: Path) -> list[Any]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    data = folder / f"etcd-{time.monotonic_ns()}"  # a new one for each start: it comes back empty
    urls = {
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
        "data-dir": data,
    }
    return [program("etcd", "etcd-server"), *(word for name, value in urls.items() for word in (f"--{name}", value))]


KINDS = {
    "http": (command_http, "http://127.0.0.1:{}/metadata"),
    "redis": (command_redis, "redis://127.0.0.1:{}"),
    "etcd": (command_etcd, "etcd://127.0.0.1:{}"),
}
WITH_MOONCAKE = pytest.mark.parametrize("server", ["http", "etcd"], indirect=True)
"""Mooncake's wheel has no redis: it ends the process when it is asked for it."""


@contextlib.contextmanager
def run_server(kind: str, folder: Path) -> Iterator[Server]:
    command, pattern = KINDS[kind]
    port = free_port()
    log = (folder / f"{kind}.log").open("w")

    def start() -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        return server_process([str(word) for word in command(port, folder)], log, is_up)

    def is_up() -> bool:
        if not accepts(port):
            return False
        probe = open_(pattern.format(port), "probe")
        try:
            probe.find("nobody", deadline=time.monotonic() + 2)
        except errors.SegmentNotFoundError:
            return True
        except errors.DirectoryError:
            return False
        return False

    with log, contextlib.ExitStack() as stack:
        process = stack.enter_context(start())
        yield Server(kind, pattern.format(port), start, process, stack)


@pytest.fixture(params=list(KINDS))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with run_server(request.param, tmp_path) as found:
        yield found


def ask_nobody(host: str, port: int, own: SegmentDescriptor, *, deadline: float) -> SegmentDescriptor:
    raise errors.PeerUnreachableError("nobody is there.", peer=host)


def open_(address: str, name: str, **options: Any) -> Directory:
    options = {"own_host": "127.0.0.1", "own_port": 15999, "environment": {}, "ask": ask_nobody, **options}
    return open_directory(address, own_name=name, **options)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def describe(name: str, count: int = 1) -> SegmentDescriptor:
    buffers = tuple(BufferDescriptor(name, 0x7F0000000000 + row * 8192, 4096) for row in range(count))
    return SegmentDescriptor(name, buffers=buffers, tcp_data_port=15998, tcp_data_host="127.0.0.1", tcp_proto_version=2)


# kvxfer and the server.


def test_publish_find_change_withdraw(server: Server) -> None:
    mine, other = open_(server.address, "a:1"), open_(server.address, "b:1")
    mine.publish(describe("a:1"))
    mine.publish(describe("a:1", count=2))
    found = other.find("a:1", deadline=soon())
    control = other.find_control("a:1", deadline=soon())
    mine.withdraw()

    assert found.buffers == describe("a:1", count=2).buffers
    assert (control.host, control.port) == ("127.0.0.1", 15999)
    with pytest.raises(errors.SegmentNotFoundError):
        other.find("a:1", deadline=soon())


def test_many_buffers_and_odd_names(server: Server) -> None:
    name = "node/ä b&c=%?#:1"
    mine = open_(server.address, name)
    mine.publish(describe(name, count=10_000))

    assert len(mine.find(name, deadline=soon()).buffers) == 10_000
    mine.withdraw()


def test_a_crashed_process_comes_back_under_its_name(server: Server) -> None:
    crashed = open_(server.address, "a:1", own_port=15001)
    crashed.publish(describe("a:1"))  # and is never heard of again
    back = open_(server.address, "a:1", own_port=15002)
    back.publish(describe("a:1"))

    assert back.find_control("a:1", deadline=soon()).port == 15002
    crashed.withdraw()  # not ours any more: it must leave the entry
    assert back.find_control("a:1", deadline=soon()).port == 15002
    back.withdraw()


def test_a_server_that_restarts_empty_gets_the_entries_again(server: Server) -> None:
    mine = open_(server.address, "a:1", keep_interval_s=0.1)
    mine.publish(describe("a:1"))
    server.restart()
    limit = soon(15)
    while True:
        try:
            assert mine.find("a:1", deadline=soon()).buffers
            break
        except errors.DirectoryError:
            assert time.monotonic() < limit
            time.sleep(0.05)
    mine.withdraw()


def test_a_server_that_stops_answering_is_given_up_at_the_deadline(server: Server) -> None:
    directory = open_(server.address, "a:1")
    server.process.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    try:
        with pytest.raises(errors.DirectoryUnreachableError, match="did not answer within"):
            directory.find("x", deadline=soon(0.3))
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_a_server_that_is_gone_is_told_at_once(server: Server) -> None:
    end(server.process, signal.SIGKILL)

    with pytest.raises(errors.DirectoryUnreachableError, match="cannot be reached"):
        open_(server.address, "a:1").publish(describe("a:1"))


def test_redis_with_password_and_database(tmp_path: Path) -> None:
    with run_server("redis", tmp_path) as server:
        cli = [program("redis-cli", "redis-tools"), "-p", server.address.rpartition(":")[2]]
        subprocess.run([*cli, "config", "set", "requirepass", "secret"], check=True, capture_output=True)
        good = {"MC_REDIS_PASSWORD": "secret", "MC_REDIS_DB_INDEX": "3"}
        mine = open_(server.address, "a:1", environment=good)
        mine.publish(describe("a:1"))

        assert open_(server.address, "b:1", environment=good).find("a:1", deadline=soon()).name == "a:1"
        with pytest.raises(errors.SegmentNotFoundError):
            open_(server.address, "b:1", environment={**good, "MC_REDIS_DB_INDEX": "4"}).find("a:1", deadline=soon())
        for wrong in ({}, {"MC_REDIS_PASSWORD": "no"}, {**good, "MC_REDIS_USERNAME": "nobody"}):
            with pytest.raises(errors.DirectoryAnswerError, match="MC_REDIS_PASSWORD"):
                open_(server.address, "b:1", environment=wrong).find("a:1", deadline=soon())
        with pytest.raises(errors.DirectoryError):
            open_(server.address, "b:1", environment={**good, "MC_REDIS_DB_INDEX": "99"}).find("a:1", deadline=soon())
        mine.withdraw()


# kvxfer and the real Mooncake at one server.


def mooncake(log: Path, **environment: str) -> Any:
    return engine_process(mooncake_python(), log, MC_FORCE_TCP="1", **environment)


@WITH_MOONCAKE
def test_kvxfer_finds_what_mooncake_published(server: Server, tmp_path: Path) -> None:
    with mooncake(tmp_path / "log") as real:
        assert real.call("initialize", "127.0.0.1:15123", server.address, "tcp", "") == 0
        address = real.call("allocate", NBYTES)
        assert real.call("register_memory", address, NBYTES) == 0
        directory = open_(server.address, "b:1")
        found = directory.find("127.0.0.1:15123", deadline=soon())
        control = directory.find_control("127.0.0.1:15123", deadline=soon())

        assert found.protocols == ("tcp",)
        assert [(one.address, one.nbytes) for one in found.buffers] == [(address, NBYTES)]
        assert control.port == real.call("get_rpc_port")


@WITH_MOONCAKE
def test_mooncake_finds_what_kvxfer_published(server: Server, tmp_path: Path) -> None:
    directory = open_(server.address, "127.0.0.1:15998")
    directory.publish(describe("127.0.0.1:15998"))
    with mooncake(tmp_path / "log") as real:
        assert real.call("initialize", "127.0.0.1:15123", server.address, "tcp", "") == 0
        assert real.call("get_first_buffer_address", "127.0.0.1:15998") == 0x7F0000000000
    directory.withdraw()


@WITH_MOONCAKE
def test_a_cluster_id_parts_them_and_joins_them(server: Server, tmp_path: Path) -> None:
    with mooncake(tmp_path / "log", MC_METADATA_CLUSTER_ID="blue") as real:
        assert real.call("initialize", "127.0.0.1:15123", server.address, "tcp", "") == 0
        same = open_(server.address, "b:1", environment={"MC_METADATA_CLUSTER_ID": "blue"})

        assert same.find("127.0.0.1:15123", deadline=soon()).name == "127.0.0.1:15123"
        with pytest.raises(errors.SegmentNotFoundError):
            open_(server.address, "b:1").find("127.0.0.1:15123", deadline=soon())


@WITH_MOONCAKE
def test_mooncake_that_was_killed_leaves_an_entry_that_kvxfer_explains(server: Server, tmp_path: Path) -> None:
    with mooncake(tmp_path / "log") as real:
        assert real.call("initialize", "127.0.0.1:15123", server.address, "tcp", "") == 0
        real.process.kill()
        real.process.wait()
    directory = open_(server.address, "b:1")

    found = directory.find("127.0.0.1:15123", deadline=soon())

    assert "delete the key 'mooncake/ram/127.0.0.1:15123'" in directory.stale_hint(found)


# The drop-in: transfers between the two, and what happens to them without the server.


def start(engine: Any, name: str, server: Server) -> int:
    """Initialise an engine and register a buffer; returns its address."""
    assert engine.call("initialize", name, server.address, "tcp", "") == 0, engine.log()
    address: int = engine.call("allocate", NBYTES)
    assert engine.call("register_memory", address, NBYTES) == 0, engine.log()
    return address


def exchange(mine: Any, own: int, other: Any, name: str, theirs: int) -> None:
    """Write to the other and read back something else."""
    assert mine.call("poke", own, NBYTES, 7) == 0
    assert mine.call("transfer_sync_write", name, own, theirs, NBYTES) == 0, mine.log()
    assert other.call("peek", theirs, NBYTES) == [7]
    assert other.call("poke", theirs, NBYTES, 9) == 0
    assert mine.call("batch_transfer_sync_read", name, [own, own + 4096], [theirs, theirs + 4096], [4096, 4096]) == 0
    assert mine.call("peek", own, 8192) == [9]


@pytest.mark.parametrize("initiator", ["kvxfer", "mooncake"])
@WITH_MOONCAKE
def test_transfers_between_kvxfer_and_mooncake(server: Server, initiator: str, tmp_path: Path) -> None:
    with mooncake(tmp_path / "real") as real, shim_process(tmp_path / "shim") as shim:
        theirs, own = start(real, "127.0.0.1:15123", server), start(shim, "127.0.0.1:15124", server)
        if initiator == "kvxfer":
            exchange(shim, own, real, "127.0.0.1:15123", theirs)
        else:
            exchange(real, theirs, shim, "127.0.0.1:15124", own)


def test_connected_peers_go_on_without_the_server(server: Server, tmp_path: Path) -> None:
    with shim_process(tmp_path / "one") as one, shim_process(tmp_path / "two") as two:
        own, theirs = start(one, "127.0.0.1:15123", server), start(two, "127.0.0.1:15124", server)
        exchange(one, own, two, "127.0.0.1:15124", theirs)
        end(server.process, signal.SIGKILL)

        exchange(one, own, two, "127.0.0.1:15124", theirs)
        assert one.call("transfer_sync_write", "127.0.0.1:15125", own, theirs, 10) == -200
        assert "the metadata server" in one.log()


@WITH_MOONCAKE
def test_kvxfer_goes_on_with_mooncake_without_the_server(server: Server, tmp_path: Path) -> None:
    with mooncake(tmp_path / "real") as real, shim_process(tmp_path / "shim") as shim:
        theirs, own = start(real, "127.0.0.1:15123", server), start(shim, "127.0.0.1:15124", server)
        exchange(shim, own, real, "127.0.0.1:15123", theirs)
        end(server.process, signal.SIGKILL)

        exchange(shim, own, real, "127.0.0.1:15123", theirs)


def test_initialise_without_a_server_fails_and_says_why(tmp_path: Path) -> None:
    with shim_process(tmp_path / "one") as one:
        address = f"http://127.0.0.1:{free_port()}/metadata"

        assert one.call("initialize", "127.0.0.1:15123", address, "tcp", "") < 0
        assert address in one.log()


def test_an_engine_that_ends_takes_its_entries_back(server: Server, tmp_path: Path) -> None:
    with shim_process(tmp_path / "one") as one:
        start(one, "127.0.0.1:15123", server)
        assert open_(server.address, "b:1").find("127.0.0.1:15123", deadline=soon()).kvxfer is not None

    with pytest.raises(errors.SegmentNotFoundError):
        open_(server.address, "b:1").find("127.0.0.1:15123", deadline=soon())
