"""What an engine makes of the RDMA devices of its host, over fake NICs. Bnn: faults that other engines had."""

from __future__ import annotations

import errno
import functools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvxfer import KvxferError, Rights, Segment, TransferBatch
from kvxfer.config import EngineConfig
from kvxfer.errors import (
    CompletionError,
    NotRegisteredError,
    RegistrationError,
    RemoteAccessError,
    TransferCancelledError,
    TransferTimeoutError,
    TransportUnavailableError,
)
from kvxfer.remote_table import RemoteTable
from kvxfer.transports.rdma import RdmaTransport
from kvxfer.verbs.enums import CompletionStatus, EventType, LinkLayer, Mtu, PortState, QueuePairState
from tests.support.fake_engines import FakeHosts, Pair, fake_hosts
from tests.support.fake_sysfs import write_sysfs
from tests.support.fake_verbs import FakeLibrary, FakeNic, FakePort, FakeQueuePair, connectx, erdma, gid, iwarp
from tests.support.gid_rows import interface
from tests.support.peer import wait_until

A, B = "10.10.0.1", "10.10.0.2"
ANY = ("shm", "rdma", "tcp")
MIB = 1 << 20
Status = CompletionStatus

until = functools.partial(wait_until, timeout_s=5.0)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rail that broke rests for 1 ms, 2, 4."""
    monkeypatch.setattr("kvxfer.transports.rdma_rail.PAUSE_S", 0.001)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[FakeHosts]:
    with fake_hosts(tmp_path) as made:
        yield made


def open_pair(hosts: FakeHosts, **options: Any) -> Pair:
    pair = hosts.pair(connectx(address=A), connectx(address=B), **options)
    pair.open()
    return pair


def nics(engine: Any) -> list[str]:
    return [nic.name for nic in engine._transports.find("rdma").nics]


def sender(pair: Pair) -> FakeQueuePair:
    return pair.queue_pairs()[0][0]


def submit(pair: Pair, count: int = 10, nbytes: int = 64) -> TransferBatch:
    rows = 2 * nbytes * np.arange(count, dtype=np.int64)
    return pair.a.submit_write(pair.segment, pair.local.address + rows, pair.remote.address + rows, nbytes)


# Which transport is used.


def test_memory_that_shm_does_not_reach_goes_by_rdma(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lets no process reach another's memory (ptrace_scope 1), and only what is allocated is mapped."""
    monkeypatch.setattr("kvxfer.transports.shm.ShmEndpoint._try_process_vm", lambda self: "it is not permitted")
    pair = open_pair(hosts, transports=("shm", "rdma"))
    mapped = pair.b.allocate(64)
    pair.segment.refresh()

    plain = submit(pair).wait()
    batch = pair.a.submit_write(pair.segment, [pair.local.address], [mapped.address], [64]).wait()

    assert (plain.transport, batch.transport) == ("rdma", "shm")


# Which devices are used.


def test_a_rail_tells_the_gids_it_was_connected_with(hosts: FakeHosts) -> None:
    """B01: the address of either end and why the pair was taken."""
    pair = open_pair(hosts)

    (rail,) = pair.rails

    assert rail["local_gid"].startswith(f"{A} (RoCE v2")
    assert rail["remote_gid"].startswith(f"{B} (RoCE v2")
    assert f"{A} " in rail["gids"]
    assert "subnet" in rail["gids"]


def test_a_row_that_one_device_does_not_have_leaves_out_that_device_only(hosts: FakeHosts) -> None:
    """B09: row 3 of a table of 2."""
    short = connectx("mlx5_2", ports=[FakePort({0: gid("10.10.1.1"), 1: gid("10.10.1.2")}, gid_tbl_len=2)])
    hosts.add("a", connectx("mlx5_1", A), short)

    engine = hosts.engine("a", gid_index=3)

    assert nics(engine) == ["mlx5_1:1"]
    refused = engine.probe()[0].details["refusals"]["mlx5_2:1"]
    assert "GID index 3 was fixed" in refused
    assert "the table has 2 rows" in refused


def test_each_device_has_the_row_that_was_named_for_it(hosts: FakeHosts) -> None:
    """B09."""
    hosts.add("a", connectx("mlx5_1", A), connectx("mlx5_2", "10.10.1.1"))

    engine = hosts.engine("a", gid_index="mlx5_1:3,mlx5_2:1")

    rdma = engine._transports.find("rdma")
    assert isinstance(rdma, RdmaTransport)
    assert {nic.name: nic.choice.index for nic in rdma.nics} == {"mlx5_1:1": 3, "mlx5_2:1": 1}


@pytest.mark.parametrize(
    ("settings", "peer", "address"),
    [
        ({}, "192.0.2.9", "192.0.2.12"),
        ({}, "198.51.100.9", "198.51.100.2"),
        ({}, "203.0.113.9", "192.0.2.12"),
        ({"gid_subnet": "198.51.100.0/24"}, "192.0.2.9", "198.51.100.2"),
        ({"gid_interface": "eth2.10"}, "203.0.113.9", "198.51.100.2"),
    ],
)
@pytest.mark.parametrize("is_vlan_first", [False, True])
def test_row_of_a_vlan_is_used_for_peers_in_its_subnet_or_where_it_is_asked_for(
    hosts: FakeHosts,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    peer: str,
    address: str,
    is_vlan_first: bool,
) -> None:
    """B16: what is in the address vector in the end."""
    known = [
        interface("eth2", "192.0.2.12/24"),
        interface("eth2.10", "198.51.100.2/24", kind="vlan"),
        interface("eth9", f"{peer}/24"),
    ]
    monkeypatch.setattr("kvxfer.transports.rdma_nic.list_interfaces", lambda: known)
    rows = [gid("192.0.2.12", ndev="eth2"), gid("198.51.100.2", ndev="eth2.10")]
    port = FakePort(dict(enumerate(reversed(rows) if is_vlan_first else rows, 1)))
    pair = hosts.pair(connectx(ports=[port]), erdma(address=peer, ndev="eth9"), peer_settings=dict(_UNSET), **settings)

    pair.open()

    assert port.gids[sender(pair).address["sgid_index"]].value == gid(address).value


_UNSET: dict[str, Any] = {"gid_subnet": None, "gid_interface": None}


def test_a_device_without_gid_table_does_not_keep_the_others_from_being_used(hosts: FakeHosts) -> None:
    """B21: iWARP, and one that says no link layer at all; reading their tables fails."""
    unknown = FakeNic(name="x", ports=[FakePort({}, gid_tbl_len=0, link_layer=LinkLayer.UNSPECIFIED)])
    library = hosts.add("a", iwarp(), connectx(address=A), unknown)
    library.fail("ibv_query_gid", 22, times=100)

    engine = hosts.engine("a")

    assert nics(engine) == ["mlx5_0:1"]
    refusals = engine.probe()[0].details["refusals"]
    assert set(refusals) == {"siw0:1", "x:1"}
    assert all("unsupported (iWARP)" in reason for reason in refusals.values())


def test_a_port_that_is_down_is_tried_once_and_left_for_tcp(hosts: FakeHosts) -> None:
    """B22: it is no use to try again, and the error says so."""
    nic = connectx("mlx5_9", A)
    nic.ports[0].state = PortState.DOWN
    library = hosts.add("a", nic)

    with pytest.raises(TransportUnavailableError, match=r"mlx5_9:1: DOWN") as caught:
        hosts.engine("a")
    opened = library.calls["ibv_open_device"]

    assert opened == 1
    assert not caught.value.retryable
    assert hosts.engine("a", transports=ANY).transports == ("shm", "tcp")


def test_no_devices_and_no_device_files_are_told_apart_and_left_for_tcp(hosts: FakeHosts, tmp_path: Path) -> None:
    """B23: nothing in sysfs; a device in sysfs and no file of it."""
    hosts.add("a")
    none = RdmaTransport.probe(_config("a"))
    write_sysfs(tmp_path, FakeLibrary(None, connectx(), name="elsewhere"), with_device_files=False)
    no_files = RdmaTransport.probe(_config("a"))

    assert "no RDMA device" in none.reason
    assert "mlx5_0" in no_files.reason
    assert "/dev/infiniband" in no_files.reason
    assert "--device=/dev/infiniband" in no_files.remedy
    assert hosts.engine("a", transports=ANY).transports == ("shm", "tcp")


def test_a_port_of_a_device_may_be_named(hosts: FakeHosts) -> None:
    """B26."""
    ports = [connectx(address=address).ports[0] for address in (A, "10.11.0.1")]
    hosts.add("a", connectx(ports=ports))

    assert nics(hosts.engine("a", rdma_devices="mlx5_0:2")) == ["mlx5_0:2"]
    assert nics(hosts.engine("a")) == ["mlx5_0:1", "mlx5_0:2"]


def test_a_device_that_is_not_here_is_an_error_with_those_that_are(hosts: FakeHosts) -> None:
    """B48."""
    hosts.add("a", connectx("mlx5_0", A), connectx("mlx5_1", "10.10.1.1"))

    with pytest.raises(TransportUnavailableError, match=r"no RDMA device mlx5_9 here; there is mlx5_0, mlx5_1"):
        hosts.engine("a", rdma_devices="mlx5_9")


def test_a_device_that_is_not_here_beside_one_that_is_is_a_warning(
    hosts: FakeHosts, caplog: pytest.LogCaptureFixture
) -> None:
    """B48."""
    hosts.add("a", connectx("mlx5_0", A), connectx("mlx5_1", "10.10.1.1"))

    assert nics(hosts.engine("a", rdma_devices="mlx5_0,mlx5_9")) == ["mlx5_0:1"]
    assert "mlx5_9" in caplog.text
    assert "there is mlx5_0, mlx5_1" in caplog.text


def test_wanted_devices_that_are_not_here_are_a_warning_where_others_carry(
    hosts: FakeHosts, caplog: pytest.LogCaptureFixture
) -> None:
    """B48."""
    hosts.add("a", connectx("mlx5_0", A))

    assert "rdma" not in hosts.engine("a", rdma_devices="mlx5_9", transports=("rdma", "tcp")).transports
    assert "no RDMA device mlx5_9 here" in caplog.text


@pytest.mark.parametrize(
    ("named", "used"), [(" mlx5_0 , mlx5_1 ", ["mlx5_0:1", "mlx5_1:1"]), ("mlx5_0,,", ["mlx5_0:1"])]
)
def test_blanks_in_the_list_of_devices_mean_nothing(hosts: FakeHosts, named: str, used: list[str]) -> None:
    """B48."""
    hosts.add("a", connectx("mlx5_0", A), connectx("mlx5_1", "10.10.1.1"))

    assert nics(hosts.engine("a", rdma_devices=named)) == used


def test_shared_memory_comes_before_rdma_on_one_host(hosts: FakeHosts) -> None:
    """B185: the card is not asked to carry what is here already."""
    for host, address in (("a", A), ("b", B)):
        hosts.add(host, connectx(address=address))
    ours, theirs = (hosts.engine(host, transports=EngineConfig().transports) for host in "ab")

    assert "rdma" in ours.transports
    assert ours.open_segment(theirs.address).transport == "shm"


# Memory.


def test_what_one_device_refuses_is_on_none_and_what_was_there_stays(hosts: FakeHosts) -> None:
    """B77: 96 MiB in all; B82."""
    hosts.add("a", connectx("mlx5_0", A, registered_nbytes_max=96 * MIB), connectx("mlx5_1", "10.10.1.1"))
    engine = hosts.engine("a")
    memory = np.zeros(97 * MIB, np.uint8)
    first = engine.register(memory[: 64 * MIB])

    with pytest.raises(RegistrationError, match="EIO") as caught:
        engine.register(memory[64 * MIB :])

    assert (caught.value.values["chunk_index"], caught.value.values["nbytes_done"]) == (0, 0)
    assert [device.live["mr"] for device in hosts.libraries["a"].devices] == [1, 1]
    assert engine.regions == (first,)


def test_a_thousand_transfers_register_once_with_the_device(hosts: FakeHosts) -> None:
    """B93."""
    pair = open_pair(hosts)
    before = hosts.libraries["a"].calls["ibv_reg_mr"]

    for _ in range(1000):
        pair.a.write(pair.segment, pair.local.address, pair.remote.address, 64)

    assert hosts.libraries["a"].calls["ibv_reg_mr"] == before
    assert hosts.libraries["a"].live["mr"] == 1


def test_the_device_refuses_a_write_to_read_only_memory(hosts: FakeHosts) -> None:
    """B90: even to a peer that believes it may."""
    pair = open_pair(hosts)
    frozen = np.arange(4096, dtype=np.uint8)
    frozen.flags.writeable = False
    there = pair.b.register(frozen, rights=Rights.REMOTE_READ)
    pair.segment.refresh()
    _believe_all_is_allowed(pair.segment)

    with pytest.raises(RemoteAccessError, match="REM_ACCESS_ERR"):
        pair.a.write(pair.segment, pair.local.address, there.address, 64)

    assert (frozen == np.arange(4096, dtype=np.uint8)).all()


def _believe_all_is_allowed(segment: Segment) -> None:
    from dataclasses import replace

    segment._transfers.table = RemoteTable([replace(one, rights=Rights.ALL) for one in segment.regions])


def test_unregistered_memory_here_is_refused_before_anything_is_posted(hosts: FakeHosts) -> None:
    """B176: with its range and the region next to it."""
    pair = open_pair(hosts)
    stranger = np.zeros(4096, np.uint8)

    with pytest.raises(NotRegisteredError, match=rf"local \[{stranger.ctypes.data:#x}.*nearest"):
        pair.a.write(pair.segment, stranger.ctypes.data, pair.remote.address, 4096)

    assert hosts.libraries["a"].calls["ibv_post_send"] == 0


def test_memory_that_is_registered_anew_has_its_new_keys_used_unasked(hosts: FakeHosts) -> None:
    """B134: at the same address, and nobody refreshes."""
    pair = open_pair(hosts)
    pair.write()

    for _ in range(3):
        pair.b.unregister(pair.remote)
        pair.remote = pair.b.register(pair.there)

        pair.write()


# Connections.


def test_nothing_is_posted_before_the_peer_has_answered(hosts: FakeHosts) -> None:
    """B99: the answer takes longer than all retries of a packet would; B97."""
    pair = hosts.pair(connectx(address=A), connectx(address=B))
    go_on, asked = threading.Event(), threading.Event()

    def hold_back() -> None:
        asked.set()
        go_on.wait(5.0)

    pair.libraries[1].before["ibv_modify_qp"] = hold_back

    def move() -> None:
        pair.open()
        pair.write()

    moving = threading.Thread(target=move)
    moving.start()
    asked.wait(5.0)
    (ours,) = pair.queue_pairs()[0]

    assert ours.state is QueuePairState.INIT
    assert hosts.libraries["a"].calls["ibv_post_send"] == 0
    go_on.set()
    moving.join(5.0)

    assert (pair.there == pair.here).all()
    assert pair.here.any()
    assert pair.rails[0]["trouble"] == ""


@pytest.mark.slow
def test_many_peers_that_connect_at_once_all_stand_and_move(hosts: FakeHosts) -> None:
    """B99: no more are made at once than the service has threads for, and none is lost."""
    count = 16
    hosts.add("b", connectx(address=B))
    target = hosts.engine("b")
    memory = np.zeros((count, 4096), np.uint8)
    there = target.register(memory)
    for row in range(count):
        hosts.add(f"a{row}", connectx(address=f"10.10.1.{row + 1}"))
    engines = [hosts.engine(f"a{row}") for row in range(count)]
    failed: list[BaseException] = []

    def move(row: int) -> None:
        try:
            here = engines[row].register(np.full(4096, row + 1, np.uint8))
            engines[row].write(
                engines[row].open_segment(target.address), here.address, there.address + 4096 * row, 4096
            )
        except KvxferError as error:
            failed.append(error)

    threads = [threading.Thread(target=move, args=(row,)) for row in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failed
    assert (memory == np.arange(1, count + 1, dtype=np.uint8)[:, None]).all()
    assert len(hosts.libraries["b"].queue_pairs) == count


def test_a_connection_that_replaces_another_leaves_one_at_the_peer(hosts: FakeHosts) -> None:
    """B101, B103: the peer believes the old one stands."""
    pair = open_pair(hosts)
    numbers = set()

    for _ in range(5):
        sender(pair).inject(Status.RETRY_EXC_ERR)
        pair.write()
        (ours,), (theirs,) = pair.queue_pairs()
        assert ours.attributes["dest_qp_num"] == theirs.number
        numbers.add(theirs.number)

    assert len(numbers) == 5


@pytest.mark.parametrize("kind", [EventType.PORT_ERR, EventType.PORT_ACTIVE, EventType.GID_CHANGE])
def test_an_event_of_a_port_that_is_not_used_touches_no_connection(hosts: FakeHosts, kind: EventType) -> None:
    """B36: a flap of port 2, where port 1 is used."""
    ports = [FakePort({0: gid(address)}) for address in (A, "10.11.0.1")]
    pair = hosts.pair(erdma("mlx_0", ports=ports), erdma("mlx_0", B), rdma_devices="mlx_0:1")
    pair.open()
    pair.write()
    library, number = pair.libraries[0], sender(pair).number
    asked = library.calls["ibv_query_port"]

    with capture_logs() as events:
        library.raise_event("mlx_0", kind, 2)
        library.raise_event("mlx_0", EventType.PKEY_CHANGE, 1)  # they are read in order
        until(lambda: any(event["event"] == "rdma.event" for event in events))
        pair.write()

    assert sender(pair).number == number
    assert library.calls["ibv_query_port"] == asked
    assert [event["port"] for event in events if event["event"] == "rdma.event"] == [1]
    assert not [event for event in events if event["event"] in ("rdma.port_down", "rdma.rail_broken")]


def test_a_port_that_goes_down_here_is_not_the_fault_of_the_peers_port(hosts: FakeHosts) -> None:
    """B34: another port of ours reaches the same one."""
    hosts.fabric.delivery = "manual"
    pair = hosts.pair(
        [connectx("mlx_0", "10.0.0.1"), connectx("mlx_1", "10.0.0.2")], connectx("mlx_0", "10.0.0.11"), nbytes=1 << 16
    )
    pair.open()
    (first,) = pair.connected
    pair.fill()
    rows = np.arange(8, dtype=np.int64) * 8192
    batch = pair.a.submit_write(pair.segment, pair.local.address + rows, pair.remote.address + rows, 4096)
    until(lambda: not batch.poll() and bool(hosts.fabric.pending))

    pair.libraries[0].set_port(first[:5], 1, PortState.DOWN)
    hosts.fabric.delivery = "post"
    hosts.fabric.run()
    batch.wait(5.0)

    other = {"mlx_0": "mlx_1", "mlx_1": "mlx_0"}[first[:5]]
    assert pair.connected == [f"{other}:1 to mlx_0:1"]
    assert batch.rows_done.all()
    assert all((pair.there[row : row + 4096] == pair.here[row : row + 4096]).all() for row in rows)


def test_a_port_that_goes_down_gives_back_requests_that_would_never_end(hosts: FakeHosts) -> None:
    """B34: the event is enough, no completion has to come; those of a device with retry count 7 never do."""
    hosts.fabric.separate_subnets()
    ours, theirs = (
        [erdma(f"mlx_{row}", f"10.{row}.0.{host}", f"eth{row}", retry_7_is_for_ever=True) for row in range(2)]
        for host in (1, 2)
    )
    pair = hosts.pair(ours, theirs, nbytes=4 * MIB, rdma_retry_count=7)
    pair.open()
    pair.write(65536)
    assert len(pair.connected) == 2
    hosts.fabric.set_path("a/mlx_0", "b/mlx_0", is_lost=True, rtr_errno=errno.ETIMEDOUT)
    pair.fill()
    rows = pair.rows(65536)
    batch = pair.a.submit_write(
        pair.segment, pair.local.address + rows, pair.remote.address + rows, 65536, timeout_s=10.0
    )
    until(lambda: bool(batch.poll() or 0 < batch.nbytes_done < batch.nbytes))

    pair.libraries[0].raise_event("mlx_0", EventType.PORT_ERR, 1)
    batch.wait()

    assert (pair.there == pair.here).all()
    assert pair.connected == ["mlx_1:1 to mlx_1:1"]


@pytest.mark.parametrize(("here", "there"), [(Mtu.MTU_4096, Mtu.MTU_1024), (Mtu.MTU_1024, Mtu.MTU_4096)])
def test_the_smaller_mtu_is_not_found_by_trying(hosts: FakeHosts, here: Mtu, there: Mtu) -> None:
    """B37: a device that takes a larger one than its port carries would not tell."""
    nics = [connectx(address=address, mtu_checked_against="max") for address in (A, B)]
    for nic, mtu in zip(nics, (here, there), strict=True):
        nic.ports[0].active_mtu = mtu
    pair = hosts.pair(*nics, nbytes=MIB)

    pair.open()
    pair.write(MIB)
    pair.read(MIB)

    assert [one.attributes["path_mtu"] for side in pair.queue_pairs() for one in side] == [Mtu.MTU_1024] * 2
    assert pair.rails[0]["attempts"] == []


def test_each_pause_of_a_rail_that_breaks_is_longer(hosts: FakeHosts) -> None:
    """B136."""
    pair = hosts.pair(connectx(address=A), connectx(address=B), connect_timeout_s=0.2)
    pair.open()
    batch = submit(pair)
    hosts.fabric.delivery = "poll"
    hosts.fabric.set_path("a/mlx5_0", "b/mlx5_0", is_lost=True, rtr_errno=errno.EHOSTUNREACH)
    sender(pair).inject(Status.RETRY_EXC_ERR)

    with capture_logs() as events, pytest.raises(CompletionError):
        pair.a.write(pair.segment, pair.local.address, pair.remote.address, 64)

    pauses = [event["pause_s"] for event in events if event["event"] == "rdma.rail_broken"]
    assert len(pauses) >= 2
    assert pauses == sorted(set(pauses))
    batch.cancel()


def test_each_row_has_one_outcome_where_both_ends_write_and_connections_break(hosts: FakeHosts) -> None:
    """B105: one pair of NICs, both ways."""
    hosts.fabric.delivery = "poll"
    pair = open_pair(hosts)
    back = pair.b.open_segment(pair.a.address)
    size = 512 * 256
    failed: list[object] = []
    is_over = threading.Event()

    def move(us: Any, segment: Segment, source: Any, target: Any, seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not is_over.is_set():
                source.array[:] = rng.integers(0, 256, size, np.uint8)
                rows = rng.permutation(512) * 256
                batch = us.submit_write(segment, source.address + rows, target.address + rows, 250, timeout_s=20.0)
                batch.wait()
                same = (source.array.reshape(-1, 256)[:, :250] == target.array.reshape(-1, 256)[:, :250]).all()
                if not same or not batch.rows_done.all() or batch.nbytes_done != 512 * 250:
                    failed.append((seed, batch))
        except KvxferError as error:
            failed.append(error)

    regions = [[us.register(np.zeros(size, np.uint8)) for us in (pair.a, pair.b)] for _ in range(2)]
    threads = [
        threading.Thread(target=move, args=(pair.a, pair.segment, regions[0][0], regions[0][1], 1)),
        threading.Thread(target=move, args=(pair.b, back, regions[1][1], regions[1][0], 2)),
    ]
    for thread in threads:
        thread.start()
    for _ in range(4):
        time.sleep(0.03)
        with hosts.fabric.lock:
            for pairs in pair.queue_pairs():
                for one in pairs:
                    if one.caps["max_send_wr"] > 1:
                        one.inject(Status.RETRY_EXC_ERR, after=3)
    is_over.set()
    for thread in threads:
        thread.join()

    assert not failed


def break_new_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first request of each connection that "a" makes from now on end with RETRY_EXC."""
    modify = FakeQueuePair.modify

    def break_new(self: FakeQueuePair, attr: Any, mask: int) -> int:
        error = modify(self, attr, mask)
        if self.state is QueuePairState.RTS and self.device.library.name == "a" and not self.injections:
            self.inject(Status.RETRY_EXC_ERR)
        return error

    monkeypatch.setattr(FakeQueuePair, "modify", break_new)


def test_a_row_is_posted_four_times_and_no_more(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """B114: every request ends with RETRY_EXC; each connection is broken by its first one."""
    hosts.fabric.trace = []
    pair = open_pair(hosts)
    sender(pair).inject(Status.RETRY_EXC_ERR)
    break_new_connections(monkeypatch)

    with pytest.raises(CompletionError):
        submit(pair, 5).wait(10.0)

    assert set(Counter(one.remote for one in hosts.fabric.trace).values()) == {4}


def test_a_batch_that_is_flushed_first_fails_with_what_the_device_said_later(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B115: a flush is no cause; soft RoCE may tell one before the time-out that it stands for."""
    pair = open_pair(hosts)
    sender(pair).inject(Status.WR_FLUSH_ERR)
    break_new_connections(monkeypatch)

    with pytest.raises(CompletionError, match="RETRY_EXC_ERR"):
        submit(pair, 5).wait(10.0)


def test_a_stuck_device_does_not_hold_a_call_beyond_its_deadline(hosts: FakeHosts) -> None:
    """B118."""
    hosts.fabric.delivery = "manual"
    pair = open_pair(hosts)

    with pytest.raises(TransferTimeoutError, match=r"limit 0\.2 s"):
        pair.a.write(pair.segment, pair.local.address, pair.remote.address, 4096, timeout_s=0.2)

    hosts.fabric.delivery = "post"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_device_that_gives_nothing_back_after_err_is_waited_for_a_while_only(hosts: FakeHosts, how: str) -> None:
    """B183: iWARP has such; the batch fails once, and the queue pair is destroyed as it is."""
    hosts.fabric.delivery = "manual"
    pair = hosts.pair(connectx(address=A, flushes_on_error=False), connectx(address=B, flushes_on_error=False))
    pair.open()
    batch = submit(pair)

    if how == "cancel":
        batch.cancel()
        assert isinstance(batch.exception, TransferCancelledError)
    else:
        pair.a.close()

    assert batch.is_done
    first = batch.exception
    until(lambda: pair.queue_pairs() == ([], []))
    assert batch.exception is first
    hosts.fabric.delivery = "post"
    if how == "cancel":
        pair.write()


def _config(host: str, **settings: Any) -> EngineConfig:
    return EngineConfig.resolve(name=host, transports=("rdma",), **settings)
