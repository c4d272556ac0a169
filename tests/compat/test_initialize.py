"""What `initialize` makes of its arguments and of Mooncake's environment variables."""

from __future__ import annotations

import errno
import io
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.compat import mooncake
from kvxfer.compat.mooncake import environment as environment_of
from kvxfer.compat.mooncake import logs as mooncake_logs
from kvxfer.compat.mooncake import running as mooncake_running
from kvxfer.compat.mooncake import settings
from kvxfer.compat.mooncake.settings import P2P, Wish, open_engine, transfer_timeout_s
from kvxfer.transports.rdma import RdmaTransport
from kvxfer.transports.shm import ShmEndpoint

NO_PORT = kvxfer.Probe(
    "rdma",
    usable=False,
    reason="no RDMA port can be used: mlx5_0:1: the port is DOWN; mlx5_1:1: no usable GID",
    remedy="`kvxfer devices` shows each port and its GIDs.",
    details={"refusals": {"mlx5_0:1": "the port is DOWN", "mlx5_1:1": "no usable GID"}},
)


@pytest.fixture
def engines() -> Iterator[list[kvxfer.TransferEngine]]:
    """Engines that are closed at the end."""
    opened: list[kvxfer.TransferEngine] = []
    yield opened
    for engine in opened:
        engine.close()


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two NICs, neither of which can be used."""
    monkeypatch.setattr(RdmaTransport, "probe", classmethod(lambda cls, config: NO_PORT))


def wish(host: str = "127.0.0.1", protocol: str = "tcp", device_name: str = "", server: str = P2P) -> Wish:
    return Wish(host, server, protocol, device_name)


def open_one(engines: list[Any], asked: Wish, **environment: str) -> kvxfer.TransferEngine:
    engines.append(open_engine(asked, environment))
    return engines[-1]


def test_host_is_kept_and_its_port_is_not(engines: list[Any]) -> None:
    engine = open_one(engines, wish("localhost:5000"), MC_MIN_RPC_PORT="20000", MC_MAX_RPC_PORT="20999")

    host, _, port = engine.address.rpartition(":")
    assert host == "localhost"
    assert 20000 <= int(port) <= 20999
    assert engine.config.host == "0.0.0.0"
    assert engine.transports == ("shm", "tcp")


@pytest.mark.parametrize("host", ["::1", "[::1]", "[::1]:5000"])
def test_ipv6_address_is_bracketed_and_ipv6_listened_on(engines: list[Any], host: str) -> None:
    engine = open_one(engines, wish(host))

    assert engine.address.startswith("[::1]:")
    assert engine.config.host == "::"


def test_two_engines_never_take_one_port(engines: list[Any]) -> None:
    limits = {"MC_MIN_RPC_PORT": "21000", "MC_MAX_RPC_PORT": "21003"}

    ports = {open_one(engines, wish(), **limits).address.rpartition(":")[2] for _ in range(3)}

    assert len(ports) == 3


@pytest.mark.parametrize("name", ["MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT", "MC_HANDSHAKE_CONNECT_TIMEOUT"])
def test_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(kvxfer.ConfigError, match=name):
        open_engine(wish(), {name: "soon"})


def test_transfer_timeout_that_is_no_number_is_named() -> None:
    with pytest.raises(kvxfer.ConfigError, match="MC_TRANSFER_TIMEOUT"):
        transfer_timeout_s({"MC_TRANSFER_TIMEOUT": "soon"})


@pytest.mark.parametrize(("text", "seconds"), [("60", 60.0), ("1", 5.0), ("5.5", 5.5)])
def test_transfer_timeout_has_mooncakes_floor(text: str, seconds: float) -> None:
    assert transfer_timeout_s({"MC_TRANSFER_TIMEOUT": text}) == seconds
    assert transfer_timeout_s({}) == 30.0


@pytest.mark.parametrize("seconds", ["5", "30", "600"])
def test_silent_peer_counts_as_dead_only_after_the_time_of_a_transfer(engines: list[Any], seconds: str) -> None:
    engine = open_one(engines, wish(), MC_TRANSFER_TIMEOUT=seconds)

    assert engine.config.transfer_timeout_s == float(seconds)
    assert engine.config.keepalive_timeout_s > float(seconds)


def test_own_variables_win_over_what_mooncakes_arguments_mean(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"KVXFER_TRANSPORTS": "tcp", "KVXFER_HOST": "127.0.0.1", "KVXFER_CONNECT_TIMEOUT_S": "1.5"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)

    engine = open_one(engines, wish(), **own, MC_HANDSHAKE_CONNECT_TIMEOUT="9")

    assert engine.transports == ("tcp",)
    assert engine.config.host == "127.0.0.1"
    assert engine.config.connect_timeout_s == 1.5


def test_peer_without_shared_memory_is_no_news(engines: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    engine = open_one(engines, wish())
    with kvxfer.TransferEngine(transports=("tcp",)) as peer:
        segment = engine.open_segment(peer.address)

        assert segment.transport == "tcp"
        assert not caplog.records


# Which path is in use, and who is told.


@pytest.fixture
def no_process_vm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that lets no engine reach another's memory, as with ptrace_scope 1."""
    monkeypatch.setattr(ShmEndpoint, "_try_process_vm", lambda self: "process_vm_readv is not permitted")


def move_one_row(engine: kvxfer.TransferEngine, peer: kvxfer.TransferEngine, buffers: Any) -> str:
    """Write a row between two ordinary arrays; returns what carried it."""
    source, target = buffers
    engine.register(source)
    peer.register(target)
    segment = engine.open_segment(peer.address)
    batch = engine.submit_write(segment, [source.ctypes.data], [target.ctypes.data], [source.nbytes])
    batch.wait()
    assert (target == source).all()
    return batch.transport


@pytest.fixture
def buffers() -> tuple[Any, Any]:
    return np.full(4096, 7, np.uint8), np.zeros(4096, np.uint8)


def test_two_processes_of_one_host_use_shared_memory(engines: list[Any], buffers: Any) -> None:
    first, second = open_one(engines, wish()), open_one(engines, wish())

    assert move_one_row(first, second, buffers) == "shm"


@pytest.mark.usefixtures("no_process_vm")
def test_memory_that_shm_does_not_reach_is_told_once_with_the_reason(
    engines: list[Any], buffers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = open_one(engines, wish()), open_one(engines, wish())

    assert [move_one_row(first, second, buffers) for _ in range(2)] == ["tcp", "tcp"]

    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "transport='tcp'" in told[0]
    assert "process_vm_readv is not permitted" in told[0]


@pytest.fixture
def kvxfer_logger() -> Iterator[logging.Logger]:
    """The library's logger, put back at the end."""
    logger = logging.getLogger("kvxfer")
    level, handlers = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.mark.parametrize(("text", "is_seen"), [("INFO", True), ("TRACE", True), ("WARNING", False), ("ERROR", False)])
def test_log_level_info_shows_the_path_to_a_peer_on_stderr(
    engines: list[Any], kvxfer_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, text: str, is_seen: bool
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # a program that has configured no logging
    monkeypatch.setattr(mooncake_logs._handler, "stream", written)
    mooncake_logs.follow_log_level({"MC_LOG_LEVEL": text})
    with kvxfer.TransferEngine() as peer:
        open_one(engines, wish()).open_segment(peer.address)

    lines = [line for line in written.getvalue().splitlines() if "segment.opened" in line]
    assert len(lines) == is_seen
    assert all("transport='shm'" in line for line in lines)


def test_log_of_a_program_that_configures_logging_is_written_once(
    kvxfer_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(mooncake_logs._handler, "stream", written)
    mooncake_logs.follow_log_level({"MC_LOG_LEVEL": "INFO"})
    theirs = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(theirs)])

    kvxfer_logger.info("something")

    assert (written.getvalue(), theirs.getvalue()) == ("", "something\n")


def test_log_level_that_mooncake_does_not_know_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_logs, "_unknown", set())
    before = logging.getLogger("kvxfer").level

    for _ in range(2):
        mooncake_logs.follow_log_level({"MC_LOG_LEVEL": "VERBOSE"})

    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "VERBOSE" in told[0]
    assert "TRACE" in told[0]
    assert logging.getLogger("kvxfer").level == before


@pytest.mark.parametrize(
    ("scope", "code", "calls", "word"),
    [
        (None, 0, 0, None),
        (0, 0, 0, None),
        (1, 0, 1, None),
        (1, -errno.EPERM, 1, "Operation not permitted"),
        (2, 0, 0, "ptrace_scope is 2"),
    ],
)
def test_peers_may_reach_memory_where_that_is_asked_for(
    engines: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    scope: int | None,
    code: int,
    calls: int,
    word: str | None,
) -> None:
    called: list[int] = []
    monkeypatch.setattr(settings, "ptrace_scope", lambda: scope)
    monkeypatch.setattr(settings, "permit_ptrace", lambda: called.append(code) or code)

    open_one(engines, wish())
    assert not called
    open_one(engines, wish(), KVXFER_ALLOW_PTRACE="1")

    told = [record.getMessage() for record in caplog.records]
    assert len(called) == calls
    assert len(told) == (word is not None)
    assert all(str(word) in line for line in told)


# RDMA.


@pytest.mark.usefixtures("no_device")
def test_rdma_without_a_device_fails_and_names_every_nic(caplog: pytest.LogCaptureFixture) -> None:
    engine = mooncake.TransferEngine()

    code = engine.initialize("127.0.0.1", P2P, "rdma", "")

    error = mooncake.last_error()
    assert code == -6
    assert isinstance(error, kvxfer.DeviceNotFoundError)
    assert error.values["reasons"] == NO_PORT.details["refusals"]
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    for part in ("mlx5_0:1: the port is DOWN", "mlx5_1:1: no usable GID", "mooncake_protocol", "KVXFER_ALLOW_FALLBACK"):
        assert part in told[0]


@pytest.mark.usefixtures("no_device")
def test_calls_after_a_failed_initialize_repeat_its_reason_and_log_nothing_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = mooncake.TransferEngine()
    engine.initialize("127.0.0.1", P2P, "rdma", "")
    reason = mooncake.last_error()
    caplog.clear()

    codes = [engine.get_rpc_port(), engine.register_memory(4096, 4096)]

    error = mooncake.last_error()
    assert codes == [-1, -1]
    assert isinstance(reason, kvxfer.KvxferError)
    assert isinstance(error, kvxfer.UsageError)
    assert reason.message in error.message
    assert error.remedy == reason.remedy
    assert not caplog.records
    assert engine.initialize("127.0.0.1", P2P, "tcp", "") == 0
    assert engine.get_rpc_port() > 0


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("device_name", ["", "mlx5_0,mlx5_1"])
def test_failure_is_told_once(device_name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert mooncake.TransferEngine().initialize("127.0.0.1", P2P, "rdma", device_name) == -6

    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "mlx5_0:1: the port is DOWN" in told[0]


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("device_name", ["", "mlx5_0,mlx5_1"])
def test_fallback_that_is_allowed_is_told_once(
    engines: list[Any], caplog: pytest.LogCaptureFixture, device_name: str
) -> None:
    engine = open_one(engines, wish(protocol="rdma", device_name=device_name), KVXFER_ALLOW_FALLBACK="1")
    with kvxfer.TransferEngine(transports=("tcp",)) as peer:
        assert engine.open_segment(peer.address).transport == "tcp"

    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert engine.transports == ("shm", "tcp")
    assert len(told) == 1
    assert "mlx5_0:1: the port is DOWN" in told[0]


@pytest.mark.usefixtures("no_device")
def test_fallback_switched_off_is_none() -> None:
    with pytest.raises(kvxfer.DeviceNotFoundError):
        open_engine(wish(protocol="rdma"), {"KVXFER_ALLOW_FALLBACK": "0"})


def test_tcp_and_forced_tcp_open_no_device(engines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RdmaTransport, "probe", classmethod(lambda cls, config: pytest.fail("it looked for devices")))

    assert open_one(engines, wish(device_name="mlx5_0")).transports == ("shm", "tcp")
    assert open_one(engines, wish(protocol="rdma"), MC_FORCE_TCP="1").transports == ("shm", "tcp")


class Sysfs:
    """Stands for the devices that the kernel has."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def asked_devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rdma_devices of each engine that was opened; mlx5_0 and mlx5_1 are there."""
    found: list[Any] = []

    def probe(cls: type, config: kvxfer.EngineConfig) -> kvxfer.Probe:
        found.append(config.rdma_devices and [str(one) for one in config.rdma_devices])
        return NO_PORT

    monkeypatch.setattr(RdmaTransport, "probe", classmethod(probe))
    monkeypatch.setattr("kvxfer.verbs.sysfs.list_sysfs_devices", lambda: [Sysfs("mlx5_0"), Sysfs("mlx5_1")])
    return found


@pytest.mark.parametrize(
    ("device_name", "environment", "devices"),
    [
        ("", {}, None),
        ("mlx5_1", {}, ["mlx5_1"]),
        (" mlx5_0 , mlx5_1,", {}, ["mlx5_0", "mlx5_1"]),
        ("mlx5_0,mlx5_9", {}, ["mlx5_0"]),
        ("mlx5_9", {}, ["mlx5_9"]),
        ("", {"MC_TE_FILTERS": "mlx5_1"}, ["mlx5_1"]),
        ("", {"MC_IB_PORT": "2"}, ["mlx5_0:2", "mlx5_1:2"]),
        ("mlx5_1", {"MC_IB_PORT": "2"}, ["mlx5_1:2"]),
    ],
)
def test_device_names(
    asked_devices: list[Any], device_name: str, environment: Mapping[str, str], devices: list[str] | None
) -> None:
    with pytest.raises(kvxfer.DeviceNotFoundError):
        open_engine(wish(protocol="rdma", device_name=device_name), environment)

    assert asked_devices[0] == devices


# Environment variables.


def test_variables_in_vain_are_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_of, "_reported", set())

    for _ in range(2):
        environment_of.warn_of_ignored({"MC_WORKERS_PER_CTX": "4", "MC_MTU": "1024", "MC_HOST": "else's"})

    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "MC_WORKERS_PER_CTX" in told[0]
    assert "MC_MTU" not in told[0]


def test_misspelt_variable_is_told_once_and_a_foreign_one_never(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_of, "_reported", set())
    foreign = {
        "MC_HOST_minio": "x",
        "MC_SID": "1",
        "MC_STORE_MEMCPY": "1",
        "MC_MIN_PRC_PORT": "1",
        "MC_CONFIG_DIR": "x",
    }

    for _ in range(2):
        environment_of.warn_of_ignored({"MC_GID_INDX": "3", "MC_FORCE_TPC": "1", **foreign})

    (told,) = [record.getMessage() for record in caplog.records]
    assert "'MC_GID_INDX': 'not known: did you mean MC_GID_INDEX?'" in told
    assert "'MC_FORCE_TPC': 'not known: did you mean MC_FORCE_TCP?'" in told
    assert not [name for name in foreign if name in told]


def test_no_variable_is_both_honoured_and_ignored() -> None:
    assert not set(environment_of.VARIABLES) & set(environment_of.IGNORED)


def test_engine_initialised_by_several_threads_at_once_is_one_engine() -> None:
    """Else those that lost would stay open, with a port each, for as long as the process."""
    engine = mooncake.TransferEngine()
    codes: list[int] = []
    before = set(mooncake_running._all)

    def initialize() -> None:
        codes.append(engine.initialize("127.0.0.1", P2P, "tcp", ""))

    for _ in range(3):
        threads = [threading.Thread(target=initialize) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    opened = [one for one in mooncake_running._all if one not in before and not one.engine._service._closed]
    assert codes == [0] * 12
    assert [one.port for one in opened] == [engine.get_rpc_port()]
    opened[0].close()


def test_length_that_no_process_has_cannot_be_read() -> None:
    with pytest.raises(kvxfer.MemoryArgumentError, match="no process"):
        mooncake.TransferEngine().read_bytes_from_buffer(4096, 2**64 - 1)
