"""Each of Mooncake's environment variables that is honoured, by what it changes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvxfer
from kvxfer.compat import mooncake
from kvxfer.compat.mooncake.environment import VARIABLES
from kvxfer.compat.mooncake.settings import P2P, Wish, listen_ports, open_engine, queue_pair_count
from kvxfer.transports.rdma import RdmaTransport

SERVER = "http://127.0.0.1:1/metadata"  # asked by nobody here
ELSEWHERE = {
    "MC_TRANSFER_TIMEOUT": "test_initialize",
    "MC_FORCE_TCP": "test_initialize",
    "MC_LOG_LEVEL": "test_initialize",
    "MC_TE_FILTERS": "test_initialize",
    "MC_IB_PORT": "test_initialize",
    "MC_METADATA_CLUSTER_ID": "../unit/mooncake/test_directory",
    "MC_REDIS_USERNAME": "../unit/mooncake/test_directory",
    "MC_REDIS_PASSWORD": "../unit/mooncake/test_directory",
    "MC_REDIS_DB_INDEX": "../unit/mooncake/test_directory",
}
"""Variables that a test of another file is about."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., kvxfer.TransferEngine]]:
    """Open an engine as `initialize` does, with these variables set; it is closed at the end."""
    engines: list[kvxfer.TransferEngine] = []

    def make(host: str = "127.0.0.1", server: str = P2P, **environment: str) -> kvxfer.TransferEngine:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        engines.append(open_engine(Wish(host, server, "tcp", ""), environment))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def port_of(engine: kvxfer.TransferEngine) -> int:
    return int(engine.address.rpartition(":")[2])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_every_variable_that_is_honoured_has_a_test() -> None:
    here = Path(__file__).read_text()

    assert not [name for name in VARIABLES if name not in here]
    for name, file in ELSEWHERE.items():
        assert name in (Path(__file__).parent / f"{file}.py").read_text(), name


@pytest.mark.parametrize(
    ("name", "text", "setting", "value"),
    [
        ("MC_HANDSHAKE_CONNECT_TIMEOUT", "7", "connect_timeout_s", 7.0),
        ("MC_TCP_LANES_PER_PEER", "3", "tcp_streams_max", 3),
        ("MC_MAX_WR", "64", "rdma_send_depth", 64),
        ("MC_IB_TC", "104", "rdma_traffic_class", 104),
        ("MC_IB_SL", "3", "rdma_service_level", 3),
        ("MC_MTU", "1024", "path_mtu_nbytes_max", 1024),
        ("MC_PKEY_INDEX", "2", "pkey_index", 2),
        ("MC_GID_INDEX", "5", "gid_index", "5"),
        ("MC_MAX_MR_SIZE", "1073741824", "rdma_chunk_nbytes_max", 1 << 30),
    ],
)
def test_variable_is_a_setting(opened: Any, name: str, text: str, setting: str, value: object) -> None:
    before = getattr(opened().config, setting)

    found = getattr(opened(**{name: text}).config, setting)

    assert found in (value, str(value)) or str(found) == str(value)
    assert found != before


@pytest.mark.parametrize(
    ("environment", "value"),
    [({"NCCL_IB_GID_INDEX": "3"}, "3"), ({"NCCL_IB_GID_INDEX": "3", "MC_GID_INDEX": "5"}, "5")],
)
def test_gid_index_of_nccl_counts_where_mooncakes_is_not_set(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], value: str
) -> None:
    seen: list[str] = []

    def probe(cls: type, config: kvxfer.EngineConfig) -> kvxfer.Probe:
        seen.append(str(config.gid_index))
        return kvxfer.Probe("rdma", usable=False, reason="none")

    monkeypatch.setattr(RdmaTransport, "probe", classmethod(probe))
    for name, text in environment.items():
        monkeypatch.setenv(name, text)

    with pytest.raises(kvxfer.DeviceNotFoundError):
        open_engine(Wish("127.0.0.1", P2P, "rdma", ""), environment)

    assert seen[0] == value


@pytest.mark.parametrize(
    ("low", "high"), [("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"), ("MC_MIN_PRC_PORT", "MC_MAX_PRC_PORT")]
)
def test_ports_are_taken_from_the_range(low: str, high: str) -> None:
    assert set(listen_ports({low: "20100", high: "20103"})) == set(range(20100, 20104))


def test_range_that_ends_before_it_begins_names_both_variables() -> None:
    with pytest.raises(kvxfer.ConfigError, match=r"end, at 100, before they begin, at 15000.*MC_MIN_RPC_PORT"):
        listen_ports({"MC_MAX_RPC_PORT": "100"})


def test_range_without_a_free_port_is_told_as_such(opened: Any) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = str(listener.getsockname()[1])

        with pytest.raises(kvxfer.ConfigError, match=rf"from {port} to {port}, is free.*MC_MAX_RPC_PORT"):
            opened(MC_MIN_RPC_PORT=port, MC_MAX_RPC_PORT=port)


def test_legacy_binding_takes_the_port_of_the_host_name(opened: Any) -> None:
    port = free_port()

    engine = opened(f"127.0.0.1:{port}", SERVER, MC_LEGACY_RPC_PORT_BINDING="1")

    assert port_of(engine) == port
    assert port_of(opened(f"127.0.0.1:{port}", SERVER)) != port


def test_legacy_binding_takes_the_handshake_port_where_the_name_has_none(opened: Any) -> None:
    port = free_port()

    engine = opened("127.0.0.1", SERVER, MC_LEGACY_RPC_PORT_BINDING="1", MC_HANDSHAKE_PORT=str(port))

    assert port_of(engine) == port


def test_bind_address_is_what_peers_are_told_with_a_metadata_server(opened: Any) -> None:
    told = {"MC_TCP_BIND_ADDRESS": "192.0.2.7"}

    assert opened("127.0.0.1", SERVER, **told).address.startswith("192.0.2.7:")
    assert opened("127.0.0.1", P2P, **told).address.startswith("127.0.0.1:")


def test_ipv6_is_listened_on_where_that_is_asked_for(opened: Any) -> None:
    engine = opened(MC_USE_IPV6="1")

    with (
        socket.create_connection(("::1", port_of(engine)), 5.0),
        socket.create_connection(("127.0.0.1", port_of(engine)), 5.0),
    ):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("::1", port_of(opened())), 5.0)


def test_number_of_queue_pairs_is_mooncakes() -> None:  # what it does: test_rdma_wire
    assert queue_pair_count({}) == 2
    assert queue_pair_count({"MC_NUM_QP_PER_EP": "4"}) == 4
    with pytest.raises(kvxfer.ConfigError, match="MC_NUM_QP_PER_EP"):
        queue_pair_count({"MC_NUM_QP_PER_EP": "0"})


def test_topology_is_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = {"cpu:0": [["mlx5_3"], []]}
    (tmp_path / "topology.json").write_text(json.dumps(topology))
    monkeypatch.setenv("MC_CUSTOM_TOPO_JSON", str(tmp_path / "topology.json"))

    assert json.loads(mooncake.TransferEngine().get_local_topology()) == topology


@pytest.mark.parametrize("content", [None, "no JSON"])
def test_topology_file_that_cannot_be_used_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    path = tmp_path / "topology.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("MC_CUSTOM_TOPO_JSON", str(path))

    found = mooncake.TransferEngine().get_local_topology()

    error = mooncake.last_error()
    assert json.loads(found) == {"cpu:0": [[], []]}
    assert isinstance(error, kvxfer.ConfigError)
    assert "MC_CUSTOM_TOPO_JSON" in error.message
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "mooncake.call_failed" in told[0]
    assert "code=-1 " in told[0]


@pytest.mark.parametrize("name", ["a" * 100_000, "a" * 100_000 + ":1234", "127.0.0.1:" + "9" * 100_000])
def test_peer_name_of_any_length_makes_a_short_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = mooncake.TransferEngine()
    assert engine.initialize("127.0.0.1", P2P, "tcp", "") == 0

    assert engine.transfer_sync_write(name, 4096, 4096, 64) < 0

    assert caplog.records
    assert all(len(record.getMessage()) < 1000 for record in caplog.records)


def test_empty_metadata_server_is_told_as_such() -> None:
    assert mooncake.TransferEngine().initialize("127.0.0.1", "", "tcp", "") == -1

    assert "empty" in str(mooncake.last_error())


def test_region_in_the_place_of_an_address_is_told_what_to_pass() -> None:
    with kvxfer.TransferEngine() as engine, kvxfer.TransferEngine() as peer:
        here, there = engine.allocate(4096), peer.allocate(4096)
        segment = engine.open_segment(peer.address)

        with pytest.raises(kvxfer.UsageError, match=r"local .*region\.address"):
            engine.write(segment, here, there.address, 64)  # type: ignore[arg-type]
        with pytest.raises(kvxfer.UsageError, match=r"remote .*region\.address"):
            engine.write(segment, [here.address], [segment.regions[0]], 64)  # type: ignore[list-item]
