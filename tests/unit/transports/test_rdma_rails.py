"""Many NICs over fakes: who is paired with whom, how bytes are shared out, and what happens when a rail breaks."""

from __future__ import annotations

import errno
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvxfer import TransferBatch
from kvxfer.errors import CompletionError, KvxferError, TransferCancelledError, TransportUnavailableError
from kvxfer.transports.rdma import RdmaTransport
from kvxfer.transports.rdma_nic import Nic
from kvxfer.transports.rdma_queue import SendQueue
from kvxfer.transports.rdma_service import RdmaService
from kvxfer.verbs.enums import CompletionStatus, EventType, PortState
from kvxfer.verbs.routes import Route
from tests.support.fake_engines import FakeHosts, Pair, fake_hosts
from tests.support.fake_verbs import FakeDevice, FakeFabric, FakeGid, FakeNic, FakePort, connectx, erdma, gid
from tests.support.fake_verbs import Path as FabricPath
from tests.support.gid_rows import interface
from tests.support.peer import wait_until

Status = CompletionStatus
LARGE_NBYTES = 4 << 20

pytestmark = pytest.mark.usefixtures("short_pauses")

until = functools.partial(wait_until, timeout_s=2.0)


def rails(count: int, host: int, *, kind: Callable[..., FakeNic] = erdma, prefix: str = "mlx_") -> list[FakeNic]:
    """NICs "mlx_0" ..., each in a subnet of its own."""
    return [kind(f"{prefix}{row}", f"10.{row}.0.{host}", ndev=f"eth{row}") for row in range(count)]


def open_pair(hosts: FakeHosts, count: int = 2, *, nbytes: int = LARGE_NBYTES, **options: Any) -> Pair:
    """Two hosts with `count` rails in separate subnets."""
    hosts.fabric.separate_subnets()
    pair = hosts.pair(rails(count, 1), rails(count, 2), nbytes=nbytes, **options)
    pair.open()
    return pair


def nics(pair: Pair) -> tuple[Nic, ...]:
    transport = pair.a._transports.find("rdma")
    assert isinstance(transport, RdmaTransport)
    return transport.nics


def sent(pair: Pair) -> dict[str, int]:
    """Bytes by port of ours."""
    return {nic.name: nic.nbytes_sent for nic in nics(pair)}


def whole(pair: Pair, nbytes: int = 65536, **options: Any) -> TransferBatch:
    """Submit all memory in rows."""
    pair.fill()
    rows = pair.rows(nbytes)
    return pair.a.submit_write(pair.segment, pair.local.address + rows, pair.remote.address + rows, nbytes, **options)


def sender(pair: Pair, device: str) -> Any:
    (found,) = pair.libraries[0].device(device).queue_pairs.values()
    return found


# Pairing.


def test_only_ports_of_one_subnet_talk_and_no_cross_pair_is_tried(hosts: FakeHosts) -> None:
    """B27: 100 slices, cross pairs would time out."""
    pair = open_pair(hosts, nbytes=100 * 65536)

    with capture_logs() as events:
        pair.write(65536)

    assert sorted(pair.connected) == ["mlx_0:1 to mlx_0:1", "mlx_1:1 to mlx_1:1"]
    assert not [event for event in events if event["event"] == "rdma.rail_broken"]
    assert [len(side) for side in pair.queue_pairs()] == [2, 2]


def test_a_cross_pair_is_tried_once_at_most_where_its_own_fails(hosts: FakeHosts) -> None:
    """B27: mlx_0 to mlx_0 is broken, mlx_1 to mlx_1 works."""
    hosts.fabric.separate_subnets()
    hosts.fabric.set_path("a/mlx_0", "b/mlx_0", rtr_errno=errno.ETIMEDOUT, is_lost=True)
    no_limit = {"connect_timeout_s": 600.0, "handshake_timeout_s": 600.0}  # the pair that is lost holds nothing up
    pair = hosts.pair(rails(2, 1), rails(2, 2), nbytes=100 * 65536, **no_limit)
    tries: Counter[tuple[str, str]] = Counter()
    resolve = hosts.fabric.path

    def path(source: Any, row: Any, target: Any, dgid: bytes) -> Any:
        tries[source.nic.name, target.nic.name] += 1
        return resolve(source, row, target, dgid)

    hosts.fabric.path = path  # type: ignore[method-assign]

    pair.open()
    tried = Counter(tries)
    for _ in range(3):
        pair.write(65536)

    assert tried["mlx_0", "mlx_1"] <= 1
    assert tried["mlx_1", "mlx_0"] <= 1
    assert pair.connected == ["mlx_1:1 to mlx_1:1"]


def know_interfaces(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> None:
    """Let these interfaces, of all hosts, be here, each with addresses such as "10.0.0.1/24 10.1.0.1/24"."""
    known = [interface(name, *text.split()) for name, text in addresses.items()]
    monkeypatch.setattr("kvxfer.transports.rdma_nic.list_interfaces", lambda: known)


def know_routes(monkeypatch: pytest.MonkeyPatch, *pairs: tuple[str, str]) -> None:
    """Let there be a route between these addresses only, both ways."""

    def find(source: Any, destination: Any, **_: Any) -> Route:
        there_is = any({str(source), str(destination)} == set(pair) for pair in pairs)
        return Route() if there_is else Route(problem=f"there is no route from {source} to {destination}")

    monkeypatch.setattr("kvxfer.transports.rdma_pairing.find_route", find)


def test_pairs_without_a_route_are_never_tried(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """B27: what the kernel's tables say; the error has the whole matrix."""
    know_interfaces(monkeypatch, eth0="10.0.0.1/24", eth1="10.1.0.1/24")
    know_routes(monkeypatch)
    pair = hosts.pair(rails(2, 1), [erdma("mlx_0", "10.8.0.2"), erdma("mlx_1", "10.9.0.2")])

    with pytest.raises(TransportUnavailableError) as caught:
        pair.open()

    assert str(caught.value).count("there is no route from") >= 4
    assert "or routes" in caught.value.remedy
    assert [library.calls["ibv_create_qp"] for library in pair.libraries] == [0, 0]


def test_routes_of_this_namespace_say_nothing_of_a_gid_whose_interface_is_in_another(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with the device and without its interface: the kernel resolves in the other namespace."""
    know_interfaces(monkeypatch, eth7="172.17.0.2/16")
    know_routes(monkeypatch)
    pair = hosts.pair(rails(1, 1), [erdma("mlx_0", "10.8.0.2")])

    pair.open()

    pair.write()


def test_the_gids_with_a_route_are_taken_where_the_best_ones_have_none(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two networks on one port, and the peer is behind a router of the second one."""
    know_interfaces(monkeypatch, eth0="10.0.0.1/24 10.1.0.1/24", eth1="10.2.0.2/24 10.3.0.2/24")
    know_routes(monkeypatch, ("10.1.0.1", "10.3.0.2"))
    here = erdma("mlx_0", ports=[FakePort({0: gid("10.0.0.1", ndev="eth0"), 1: gid("10.1.0.1", ndev="eth0")})])
    there = erdma("mlx_0", ports=[FakePort({0: gid("10.2.0.2", ndev="eth1"), 1: gid("10.3.0.2", ndev="eth1")})])
    pair = hosts.pair(here, there)

    with capture_logs() as events:
        pair.open()

    assert pair.rails[0]["gids"].startswith("10.1.0.1/24")
    assert not [event for event in events if event["event"] == "rdma.attribute_lowered"]
    assert pair.libraries[0].calls["ibv_create_qp"] == 1


def test_ports_are_matched_among_those_that_reach_each_other(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cables are crossed, through routers: two rails of full value, not two spares."""
    know_interfaces(monkeypatch, eth0="10.0.0.1/24", eth1="10.1.0.1/24")
    know_routes(monkeypatch, ("10.0.0.1", "10.9.0.2"), ("10.1.0.1", "10.8.0.2"))
    pair = hosts.pair(rails(2, 1), [erdma("mlx_0", "10.8.0.2"), erdma("mlx_1", "10.9.0.2")], nbytes=LARGE_NBYTES)

    pair.open()
    pair.write(65536)

    assert sorted(pair.connected) == ["mlx_0:1 to mlx_1:1", "mlx_1:1 to mlx_0:1"]
    assert [rail["spare"] for rail in pair.rails] == [False, False]


def test_ports_with_one_name_are_paired_whatever_their_place(hosts: FakeHosts) -> None:
    """B28: mlx_5 with mlx_5."""
    here = [connectx(name, f"10.0.0.{row}") for row, name in enumerate(("mlx_0", "mlx_1", "mlx_5"), 1)]
    there = [connectx(name, f"10.0.0.{row}") for row, name in enumerate(("mlx_5", "mlx_0", "mlx_1"), 11)]
    pair = hosts.pair(here, there, nbytes=LARGE_NBYTES)
    pair.open()

    pair.write(65536)

    assert sorted(pair.connected) == ["mlx_0:1 to mlx_0:1", "mlx_1:1 to mlx_1:1", "mlx_5:1 to mlx_5:1"]


def test_one_subnet_comes_before_one_name(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """B28: the cables are crossed, and the interfaces tell the subnets. Nothing is tried in vain."""
    here, there = rails(2, 1), [erdma("mlx_0", "10.1.0.2", "eth3"), erdma("mlx_1", "10.0.0.2", "eth2")]
    know_interfaces(monkeypatch, eth0="10.0.0.1/24", eth1="10.1.0.1/24", eth2="10.0.0.2/24", eth3="10.1.0.2/24")
    hosts.fabric.separate_subnets()
    pair = hosts.pair(here, there, nbytes=LARGE_NBYTES)

    with capture_logs() as events:
        pair.open()
        pair.write(65536)

    assert sorted(pair.connected) == ["mlx_0:1 to mlx_1:1", "mlx_1:1 to mlx_0:1"]
    assert not [event for event in events if event["event"] == "rdma.rail_broken"]


def test_one_nic_here_and_four_there_work(hosts: FakeHosts) -> None:
    pair = hosts.pair(
        [connectx("mlx_0", "10.0.0.1")], [connectx(f"mlx_{row}", f"10.0.0.{row + 2}") for row in range(4)]
    )

    pair.open()

    pair.write()
    pair.read()


# Sharing out.


@pytest.fixture
def set_rates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Speeds are as they are set: those of fakes say nothing."""
    monkeypatch.setattr(SendQueue, "take_pace", lambda self: (0, 0.0))

    def set_rates(pair: Pair, *rates: float) -> None:
        for rail, rate in zip(pair.segment._transfers.endpoints[0]._rails, rates, strict=False):  # type: ignore[attr-defined]
            rail.rate = rate

    return set_rates


@pytest.mark.usefixtures("set_rates")
def test_each_of_four_nics_carries_its_part_of_a_large_batch(hosts: FakeHosts) -> None:
    """B44: 64 MiB in 64 KiB slices; each has 20 to 30 % of the bytes."""
    hosts.fabric.moves_data = False
    pair = open_pair(hosts, 4, nbytes=64 << 20)

    rows = pair.rows(65536)
    pair.a.write(pair.segment, pair.local.address + rows, pair.remote.address + rows, 65536)

    total = 64 << 20
    assert sum(sent(pair).values()) == total
    for nic, nbytes in sent(pair).items():
        assert 0.2 * total <= nbytes <= 0.3 * total, nic


@pytest.mark.usefixtures("set_rates")
def test_one_row_is_shared_out_too(hosts: FakeHosts) -> None:
    """Neighbouring blocks are joined to one row: it must not go over one rail."""
    pair = open_pair(hosts, 4)
    pair.fill()

    pair.a.write(pair.segment, pair.local.address, pair.remote.address, LARGE_NBYTES)

    assert (pair.there == pair.here).all()
    assert all(0.2 * LARGE_NBYTES <= nbytes <= 0.3 * LARGE_NBYTES for nbytes in sent(pair).values())


def test_a_large_read_is_shared_out(hosts: FakeHosts) -> None:
    pair = open_pair(hosts, 2)

    pair.read(65536)

    assert all(sent(pair).values())


def test_small_batches_need_one_rail_and_take_turns_where_there_are_more(hosts: FakeHosts) -> None:
    pair = open_pair(hosts)
    pair.a.write(pair.segment, pair.local.address, pair.remote.address, 64)
    assert len(pair.connected) == 1

    pair.write(65536)
    before = sent(pair)
    for _ in range(10):
        pair.a.write(pair.segment, pair.local.address, pair.remote.address, 64)

    assert {nic: sent(pair)[nic] - before[nic] for nic in before} == {"mlx_0:1": 320, "mlx_1:1": 320}


def test_many_small_batches_at_once_have_the_other_rails_connected(tmp_path: Path) -> None:
    with fake_hosts(tmp_path, FakeFabric(delivery="manual")) as made:
        pair = open_pair(made, nbytes=32 * 65536)
        rows = [row * 65536 for row in range(32)]
        small = [
            pair.a.submit_write(pair.segment, pair.local.address + row, pair.remote.address + row, 65536)
            for row in rows[:8]
        ]
        assert len(pair.connected) == 1

        small += [
            pair.a.submit_write(pair.segment, pair.local.address + row, pair.remote.address + row, 65536)
            for row in rows[8:]
        ]

        until(lambda: len(pair.connected) == 2)
        made.fabric.delivery = "post"
        made.fabric.run()
        pair.a.wait_all(small)


def hold_drains(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Have a queue that is stopped not be empty: set by the first look at one, and to be set to let them end."""
    is_draining, may_end = threading.Event(), threading.Event()
    drain = SendQueue.drain

    def slow_drain(queue: SendQueue) -> bool:
        is_draining.set()
        return may_end.is_set() and drain(queue)

    monkeypatch.setattr(SendQueue, "drain", slow_drain)
    monkeypatch.setattr("kvxfer.transports.rdma_endpoint.STOP_S", 30.0)
    return is_draining, may_end


def test_a_rail_that_is_being_stopped_holds_no_batch_up_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hosts(tmp_path, FakeFabric(delivery="manual")) as made:
        pair = open_pair(made)
        made.fabric.delivery = "post"
        pair.write(65536)  # both rails are connected
        made.fabric.delivery = "manual"
        at = pair.local.address, pair.remote.address
        stopped, other = (pair.a.submit_write(pair.segment, *at, 4096) for _ in range(2))  # they take turns
        is_draining, may_end = hold_drains(monkeypatch)
        canceller = threading.Thread(target=stopped.cancel)
        canceller.start()
        is_draining.wait(2.0)

        made.fabric.delivery = "post"
        made.fabric.run()
        other.wait(timeout_s=2.0)

        assert canceller.is_alive()
        assert not stopped.is_done
        may_end.set()
        canceller.join(2.0)
        assert isinstance(stopped.exception, TransferCancelledError)


def test_a_batch_on_a_queue_that_another_is_stopping_does_not_end_before_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hosts(tmp_path, FakeFabric(delivery="manual")) as made:
        pair = open_pair(made, 1)
        at = pair.local.address, pair.remote.address
        batches = [pair.a.submit_write(pair.segment, *at, 4096) for _ in range(2)]
        is_draining, may_end = hold_drains(monkeypatch)
        cancellers = [threading.Thread(target=batch.cancel) for batch in batches]
        cancellers[0].start()
        is_draining.wait(2.0)
        cancellers[1].start()
        cancellers[1].join(0.05)

        assert not any(batch.is_done for batch in batches)

        may_end.set()
        for canceller in cancellers:
            canceller.join(2.0)
        assert all(isinstance(batch.exception, TransferCancelledError) for batch in batches)


def test_a_faster_rail_gets_more(hosts: FakeHosts, set_rates: Callable[..., None]) -> None:
    pair = open_pair(hosts)
    pair.write(65536)
    set_rates(pair, 3e9, 1e9)
    before = sent(pair)

    pair.write(65536)

    share = (sent(pair)["mlx_0:1"] - before["mlx_0:1"]) / LARGE_NBYTES
    assert 0.7 < share < 0.8


def test_a_rail_that_has_become_slow_leaves_rows_to_the_other(hosts: FakeHosts, set_rates: Callable[..., None]) -> None:
    """It was as fast as the other one, and stands still."""
    pair = open_pair(hosts)
    pair.write(65536)
    set_rates(pair, 1e8, 1e8)
    before = sent(pair)
    hosts.fabric.delivery = "manual"
    batch = whole(pair)

    while not batch.poll() and hosts.fabric.step(sender(pair, "mlx_1")):
        pass

    assert sent(pair)["mlx_1:1"] - before["mlx_1:1"] > 0.6 * LARGE_NBYTES
    assert sent(pair)["mlx_0:1"] == before["mlx_0:1"]
    hosts.fabric.delivery = "post"
    hosts.fabric.run()
    batch.wait(2.0)
    assert (pair.there == pair.here).all()


def test_rails_whose_shares_are_known_have_a_short_batch_at_once(
    hosts: FakeHosts, set_rates: Callable[..., None]
) -> None:
    """It is over before the next rows could be posted: each rail is posted to once."""
    pair = open_pair(hosts)
    pair.write(65536)
    set_rates(pair, 5e10, 5e10)
    posts = pair.libraries[0].calls["ibv_post_send"]

    pair.write(65536)

    assert pair.libraries[0].calls["ibv_post_send"] - posts == 2


def test_spare_rails_carry_nothing_while_others_stand(hosts: FakeHosts) -> None:
    pair = hosts.pair(
        [connectx(f"mlx_{row}", f"10.0.0.{row + 1}") for row in range(2)],
        [connectx(f"mlx_{row}", f"10.0.0.{row + 11}") for row in range(2)],
        nbytes=LARGE_NBYTES,
    )
    pair.open()

    for _ in range(3):
        pair.write(65536)

    assert sorted(pair.connected) == ["mlx_0:1 to mlx_0:1", "mlx_1:1 to mlx_1:1"]


def test_a_rail_more_that_does_not_come_does_not_hold_a_batch_up(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for a while, and then no more; and its late reply leaves nothing behind."""
    monkeypatch.setattr("kvxfer.transports.rdma_placement.MORE_S", 0.05)
    monkeypatch.setattr("kvxfer.transports.rdma_mender.MORE_S", 0.1)
    pair = open_pair(hosts)
    go_on = threading.Event()
    pair.libraries[1].before["ibv_modify_qp"] = lambda: go_on.wait(20.0) and None

    pair.write(65536)
    pair.write(65536)

    assert pair.libraries[1].running["ibv_modify_qp"] > 0, "it was waited for"
    go_on.set()
    until(lambda: len(pair.queue_pairs()[1]) == len(pair.queue_pairs()[0]))


# Breaking.


def test_a_broken_rails_slices_go_over_another_rail(hosts: FakeHosts) -> None:
    pair = open_pair(hosts)
    pair.write(65536)
    sender(pair, "mlx_0").inject(Status.RETRY_EXC_ERR, after=5)
    before = sent(pair)

    with capture_logs() as events:
        pair.write(65536)

    assert [event["rail"] for event in events if event["event"] == "rdma.rail_broken"] == ["mlx_0:1 to mlx_0:1"]
    assert sent(pair)["mlx_1:1"] - before["mlx_1:1"] > LARGE_NBYTES // 2


def test_a_lost_path_moves_its_slices_and_comes_back(hosts: FakeHosts) -> None:
    pair = open_pair(hosts)
    pair.write(65536)
    hosts.fabric.set_path("a/mlx_0", "b/mlx_0", is_lost=True, rtr_errno=errno.ETIMEDOUT)
    pair.write(65536)
    assert pair.connected == ["mlx_1:1 to mlx_1:1"]

    hosts.fabric.set_path("a/mlx_0", "b/mlx_0", is_lost=False, rtr_errno=0)
    until(lambda: bool(pair.write(65536) or len(pair.connected) == 2))
    before = sent(pair)
    pair.write(65536)

    assert sent(pair)["mlx_0:1"] > before["mlx_0:1"]


def test_a_port_that_goes_down_moves_its_queued_slices(hosts: FakeHosts) -> None:
    """B34: a local fault: the peer's port is not to blame, and its rails with others stay."""
    hosts.fabric.delivery = "manual"
    pair = open_pair(hosts)
    batch = whole(pair)
    until(lambda: not batch.poll() and len(pair.connected) == 2 and len(hosts.fabric.pending) == 2)

    with capture_logs() as events:
        pair.libraries[0].set_port("mlx_0", 1, PortState.DOWN)
        hosts.fabric.delivery = "post"
        hosts.fabric.run()
        batch.wait(2.0)

    assert (pair.there == pair.here).all()
    assert pair.connected == ["mlx_1:1 to mlx_1:1"]
    assert any(event["event"] == "rdma.port_down" and event["nic"] == "mlx_0:1" for event in events)


def test_a_port_that_returns_is_used_again(hosts: FakeHosts) -> None:
    """B34, B13: and its address is in another row."""
    pair = open_pair(hosts)
    pair.libraries[0].device("mlx_0").nic.ports[0].gid_tbl_len = 8
    pair.write(65536)
    pair.libraries[0].set_port("mlx_0", 1, PortState.DOWN)
    until(lambda: nics(pair)[0].is_down)
    pair.write(65536)
    assert pair.connected == ["mlx_1:1 to mlx_1:1"]

    pair.libraries[0].move_gid("mlx_0", 1, 0, 5)
    pair.libraries[0].set_port("mlx_0", 1, PortState.ACTIVE)
    until(lambda: not nics(pair)[0].is_down)
    until(lambda: bool(pair.write(65536) or len(pair.connected) == 2))

    assert sender(pair, "mlx_0").address["sgid_index"] == 5


def test_a_port_that_returns_and_cannot_connect_rests(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """B34: PORT_ACTIVE, then one failing connect: it stays out for a while."""
    monkeypatch.setattr("kvxfer.transports.rdma_rail.PAUSE_S", 0.2)
    pair = open_pair(hosts)
    pair.write(65536)
    pair.libraries[0].set_port("mlx_0", 1, PortState.DOWN)
    until(lambda: nics(pair)[0].is_down)
    pair.write(65536)
    hosts.fabric.set_path("a/mlx_0", "b/mlx_0", rtr_errno=errno.EHOSTUNREACH)
    pair.libraries[0].set_port("mlx_0", 1, PortState.ACTIVE)
    until(lambda: not nics(pair)[0].is_down)
    rail = pair.segment._transfers.endpoints[0]._rails[0]  # type: ignore[attr-defined]
    rail.paused_until = 0.0
    tried = pair.libraries[1].calls["ibv_create_qp"]
    until(lambda: bool(pair.write(65536) or pair.libraries[1].calls["ibv_create_qp"] > tried))
    tried = pair.libraries[1].calls["ibv_create_qp"]

    for _ in range(5):
        pair.write(65536)

    assert pair.libraries[1].calls["ibv_create_qp"] == tried
    assert pair.connected == ["mlx_1:1 to mlx_1:1"]


def test_an_event_of_another_port_changes_nothing(hosts: FakeHosts) -> None:
    """B36: PORT_ERR of port 2, we use port 1."""
    ports = [FakePort({0: gid(address)}) for address in ("10.0.0.1", "10.9.0.1")]
    pair = hosts.pair(erdma("mlx_0", ports=ports), erdma("mlx_0", "10.0.0.2"), rdma_devices="mlx_0:1")
    pair.open()

    pair.libraries[0].set_port("mlx_0", 2, PortState.DOWN)
    pair.libraries[0].raise_event("mlx_0", EventType.PORT_ERR, 2)
    time.sleep(0.01)
    pair.write()

    assert not nics(pair)[0].is_down
    assert pair.connected == ["mlx_0:1 to mlx_0:1"]


def test_events_of_two_ports_of_one_device_reach_the_right_one(hosts: FakeHosts) -> None:
    """B36: one reader for the device."""
    hosts.fabric.separate_subnets()
    here, there = (
        [erdma("mlx_0", ports=[FakePort({0: gid(f"10.{row}.0.{host}")}) for row in range(2)])] for host in (1, 2)
    )
    pair = hosts.pair(here, there, nbytes=LARGE_NBYTES)
    pair.open()
    pair.write(65536)

    pair.libraries[0].set_port("mlx_0", 2, PortState.DOWN)
    until(lambda: nics(pair)[1].is_down)
    pair.write(65536)

    assert [nic.is_down for nic in nics(pair)] == [False, True]
    assert pair.connected == ["mlx_0:1 to mlx_0:1"]


def test_a_device_that_is_removed_leaves_its_slices_to_the_others(hosts: FakeHosts) -> None:
    hosts.fabric.delivery = "manual"
    pair = open_pair(hosts)
    batch = whole(pair)
    until(lambda: not batch.poll() and len(hosts.fabric.pending) == 2)

    pair.libraries[0].remove_device("mlx_1")
    hosts.fabric.delivery = "post"
    hosts.fabric.run()
    batch.wait(2.0)

    assert (pair.there == pair.here).all()
    pair.write(65536)
    assert pair.connected == ["mlx_0:1 to mlx_0:1"]


def test_a_peers_device_that_is_removed_leaves_its_slices_to_the_others(hosts: FakeHosts) -> None:
    pair = open_pair(hosts)
    pair.write(65536)

    pair.libraries[1].remove_device("mlx_0")
    pair.write(65536)
    pair.write(65536)

    assert pair.connected == ["mlx_1:1 to mlx_1:1"]


def test_the_only_port_may_go_down_for_a_moment(hosts: FakeHosts) -> None:
    """A link flaps; the batch waits for it, within its deadline and connect_timeout_s."""
    pair = open_pair(hosts, 1)
    pair.libraries[0].set_port("mlx_0", 1, PortState.DOWN)
    until(lambda: nics(pair)[0].is_down)
    back = threading.Timer(0.05, lambda: pair.libraries[0].set_port("mlx_0", 1, PortState.ACTIVE))
    back.start()

    pair.write(65536)

    back.join()


def test_a_port_that_stays_down_is_the_reason_of_the_error(hosts: FakeHosts) -> None:
    pair = open_pair(hosts, 1, connect_timeout_s=0.1)
    pair.libraries[0].set_port("mlx_0", 1, PortState.DOWN)
    until(lambda: nics(pair)[0].is_down)

    with pytest.raises((CompletionError, TransportUnavailableError), match="DOWN"):
        whole(pair).wait(20.0)


def test_spare_rails_are_used_where_the_others_cannot(hosts: FakeHosts) -> None:
    """mlx_0 fails here, mlx_1 at the peer: what is left is mlx_1 with mlx_0."""
    pair = hosts.pair(
        [connectx(f"mlx_{row}", f"10.0.0.{row + 1}") for row in range(2)],
        [connectx(f"mlx_{row}", f"10.0.0.{row + 11}") for row in range(2)],
        nbytes=LARGE_NBYTES,
    )
    pair.open()
    pair.write(65536)

    pair.libraries[0].remove_device("mlx_0")
    pair.libraries[1].remove_device("mlx_1")
    pair.write(65536)
    pair.write(65536)

    assert pair.connected == ["mlx_1:1 to mlx_0:1"]


def test_a_spare_rail_rests_again_when_the_others_are_back(hosts: FakeHosts) -> None:
    pair = hosts.pair(
        [connectx("mlx_0", "10.0.0.1")],
        [connectx(f"mlx_{row}", f"10.0.0.{row + 11}") for row in range(2)],
        nbytes=LARGE_NBYTES,
    )
    pair.open()
    (main,) = pair.connected
    hosts.fabric.set_path("a/mlx_0", f"b/{main.split()[-1][:5]}", is_lost=True, rtr_errno=errno.ETIMEDOUT)
    pair.write(65536)
    (spare,) = pair.connected
    assert spare != main

    hosts.fabric.set_path("a/mlx_0", f"b/{main.split()[-1][:5]}", is_lost=False, rtr_errno=0)
    until(lambda: bool(pair.write(65536) or main in pair.connected))
    hosts.fabric.trace = []
    pair.write(65536)

    numbers = {one.qp_number for one in hosts.fabric.trace}
    dest = {qp.number: qp.attributes["dest_qp_num"] for qp in pair.queue_pairs()[0]}
    used = {qp.device.nic.name for qp in pair.queue_pairs()[1] if qp.number in {dest[number] for number in numbers}}
    assert used == {main.split()[-1][:5]}


def test_a_batch_on_two_rails_is_stopped_on_both(hosts: FakeHosts) -> None:
    hosts.fabric.delivery = "manual"
    pair = open_pair(hosts)
    batch = whole(pair)
    until(lambda: not batch.poll() and len(hosts.fabric.pending) == 2)
    for _ in range(10):
        hosts.fabric.step()

    batch.cancel()

    assert pair.queue_pairs() == ([], [])
    seen = pair.there.copy()
    pair.here[:] = ~pair.here
    hosts.fabric.run()
    assert (pair.there == seen).all()


def test_a_batch_is_not_over_while_a_rail_that_broke_under_it_may_still_write(
    hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes are there by the other rail; packets of the broken one would write over what comes later."""
    pair = open_pair(hosts)
    pair.write(65536)
    gone, asked = threading.Event(), threading.Event()
    hang_up = RdmaService.hang_up

    def slowly(self: RdmaService, session: str, number: int) -> None:
        asked.set()
        gone.wait(5.0)
        hang_up(self, session, number)

    monkeypatch.setattr(RdmaService, "hang_up", slowly)
    sender(pair, "mlx_0").inject(Status.RETRY_EXC_ERR, after=5)
    batch = whole(pair)
    waiting = threading.Thread(target=batch.wait)
    waiting.start()
    until(lambda: asked.is_set() and batch.nbytes_done == LARGE_NBYTES)

    assert not batch.is_done

    gone.set()
    waiting.join(2.0)
    assert batch.is_done
    assert batch.exception is None


def test_a_rail_that_cannot_be_connected_leaves_nothing_at_the_peer(hosts: FakeHosts) -> None:
    """The peer's end stood already when ours failed."""
    pair = open_pair(hosts)
    pair.libraries[0].fail("ibv_modify_qp", errno.EPERM, nth=2, times=100, device="mlx_1")

    pair.write(65536)

    until(lambda: len(pair.queue_pairs()[1]) == 1)
    assert pair.connected == ["mlx_0:1 to mlx_0:1"]


def test_rails_that_break_again_and_again_lose_nothing(hosts: FakeHosts) -> None:
    """Each second batch loses a connection somewhere in the middle; from time to time both."""
    pair = open_pair(hosts)
    pair.write(65536)
    rng = np.random.default_rng(7)

    for _ in range(12):
        for library in pair.libraries[:1]:
            for qp in library.queue_pairs:
                if rng.random() < 0.5:
                    qp.inject(Status.RETRY_EXC_ERR, after=int(rng.integers(0, 40)))
        pair.write(65536)
        pair.read(65536)


def test_threads_with_breaking_rails_lose_nothing(tmp_path: Path) -> None:
    """Several batches on two rails, and connections that break under all of them."""
    with fake_hosts(tmp_path, FakeFabric(delivery="poll")) as hosts:
        pair = open_pair(hosts, nbytes=6 << 20)
        wrong: list[object] = []
        part_nbytes = 2 << 20

        def run(part: int) -> None:
            rng = np.random.default_rng(part)
            start = part * part_nbytes
            rows = start + 16384 * np.arange(128, dtype=np.int64)
            try:
                for _ in range(4):
                    pair.here[start : start + part_nbytes] = rng.integers(0, 256, part_nbytes, np.uint8)
                    pair.a.write(
                        pair.segment, pair.local.address + rows, pair.remote.address + rows, 16000, timeout_s=9
                    )
                    ours = pair.here[start : start + part_nbytes].reshape(-1, 16384)[:, :16000]
                    theirs = pair.there[start : start + part_nbytes].reshape(-1, 16384)[:, :16000]
                    if (ours != theirs).any():
                        wrong.append(part)
            except KvxferError as error:
                wrong.append(error)

        threads = [threading.Thread(target=run, args=(part,)) for part in range(3)]
        for thread in threads:
            thread.start()
        for at in range(3):
            time.sleep(0.01)
            with hosts.fabric.lock:
                for qp in pair.queue_pairs()[0][at % 2 :: 2]:
                    qp.inject(Status.RETRY_EXC_ERR, after=3)
        for thread in threads:
            thread.join()

        assert not wrong


# Devices that are no good.


def test_a_device_that_cannot_make_a_completion_queue_is_left_out(hosts: FakeHosts) -> None:
    """B33: the 3rd of 4; nothing of it stays."""
    library = hosts.add("a", *rails(4, 1))
    library.fail("ibv_create_cq", errno.ENOMEM, device="mlx_2", times=100)
    hosts.add("b", *rails(4, 2))

    engine, peer = hosts.engine("a"), hosts.engine("b")

    assert library.device("mlx_2").live.total() == 0
    probe = next(one for one in engine.probe() if one.transport == "rdma")
    assert "mlx_2" in probe.reason
    assert "ENOMEM" in probe.reason
    memory = np.zeros(64, np.uint8)
    engine.register(memory)
    segment = engine.open_segment(peer.address)
    assert "mlx_2" not in {rail["rail"].split(":")[0] for rail in segment.describe()["rdma"]["rails"]}


def test_devices_that_share_an_address_are_told_and_work(hosts: FakeHosts) -> None:
    """B46: a bond over two cards."""
    hosts.add("a", *(connectx(f"mlx5_{row}", "10.0.0.1", ndev="bond0") for row in range(2)))
    hosts.add("b", connectx("mlx5_bond_0", "10.0.0.2"))

    with capture_logs() as events:
        engine, peer = hosts.engine("a"), hosts.engine("b")

    (warning,) = [event["warning"] for event in events if event["event"] == "rdma.shared_gid"]
    assert "mlx5_0" in warning
    assert "mlx5_1" in warning
    assert "10.0.0.1" in warning
    here, there = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    local, remote = engine.register(here), peer.register(there)
    engine.write(engine.open_segment(peer.address), local.address, remote.address, 64)
    assert (there == here).all()


@pytest.mark.parametrize("device", ["mlx5_0", "mlx5_1"])
def test_either_of_two_devices_with_one_address_works(hosts: FakeHosts, device: str) -> None:
    """B46."""
    bond = [connectx(f"mlx5_{row}", "10.0.0.1", ndev="bond0") for row in range(2)]
    if device == "mlx5_1":
        bond.reverse()  # the fabric finds the first that has the address
    pair = hosts.pair(
        bond, connectx("mlx5_bond_0", "10.0.0.2"), peer_settings={"rdma_devices": None}, rdma_devices=device
    )
    pair.open()

    pair.write()


def test_no_reset_of_a_fresh_queue_pair_and_no_second_use(hosts: FakeHosts) -> None:
    """B41: connect, disconnect, connect again; INIT, RTR, RTS, and ERR at the end, each once for a queue pair."""
    steps: dict[int, list[str]] = {}
    from tests.support.fake_verbs import FakeQueuePair, irdma

    original = FakeQueuePair.modify

    def modify(self: FakeQueuePair, attr: Any, mask: int) -> int:
        error = original(self, attr, mask)
        steps.setdefault(self.number, []).append(f"{self.state.name}{'!' if error else ''}")
        return error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FakeQueuePair, "modify", modify)
        pair = hosts.pair(irdma("i0", "10.0.0.1"), irdma("i0", "10.0.0.2"))
        for _ in range(2):
            pair.open()
            pair.write()
            pair.segment.close()

    assert len(steps) == 4
    assert all(one in (["INIT", "RTR", "RTS"], ["INIT", "RTR", "RTS", "ERR"]) for one in steps.values())


# Connections that stand, and carry nothing: the kernel resolves the address, and the packets do not come through.


def lose(hosts: FakeHosts, is_lost: Callable[[FakeDevice, FakeGid | None], bool]) -> None:
    """Let packets from such GIDs be lost on the way; the kernel knows nothing of it."""
    hosts.fabric.rules.append(
        lambda source, row, _target, _dgid: FabricPath(is_lost=True) if is_lost(source, row) else None
    )


def is_ipv4(_source: FakeDevice, row: FakeGid | None) -> bool:
    return row is not None and row.is_ipv4


def test_other_gids_are_tried_where_a_connection_stands_and_carries_nothing(hosts: FakeHosts) -> None:
    """A firewall, or a router that drops the packets: IPv4 does not come through, IPv6 does."""
    lose(hosts, is_ipv4)
    pair = hosts.pair(connectx(address="10.0.0.1"), connectx(address="10.0.0.2"))
    pair.open()
    assert pair.rails[0]["gids"].startswith("10.0.0.1")

    pair.write()

    assert pair.rails[0]["gids"].startswith("fe80")
    pair.read()


def test_gids_that_failed_are_tried_again_where_no_others_work(hosts: FakeHosts) -> None:
    """All are silent for a while: the peer was stopped, say."""
    failing = [True]
    lose(hosts, lambda *_: failing[0])
    pair = hosts.pair(erdma(address="10.0.0.1"), erdma(address="10.0.0.2"))
    pair.open()
    with pytest.raises(CompletionError, match="RETRY_EXC_ERR"):
        pair.write()

    failing[0] = False

    pair.write()
    pair.read()


def test_a_silent_path_names_the_settings_that_may_help(hosts: FakeHosts) -> None:
    lose(hosts, lambda *_: True)
    pair = hosts.pair(erdma(address="10.0.0.1"), erdma(address="10.0.0.2"))
    pair.open()

    with pytest.raises(CompletionError) as caught:
        pair.write()

    assert "path_mtu_nbytes_max" in caught.value.remedy
    assert "rdma_hop_limit" in caught.value.remedy
    assert caught.value.hop_limit == 64


def test_a_silent_rail_rests_longer_than_it_took_to_find_out(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch loses 7.5 s on it each time, by the usual time-out; so it is not put back every 5 s."""
    pair = open_pair(hosts)
    rail = pair.segment._transfers.endpoints[0]._rails[0]  # type: ignore[attr-defined]
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("kvxfer.transports.rdma_rail.time", clock)
    rests = []
    for now in (1000.0, 2000.0, 3000.0):
        queue = SimpleNamespace(has_carried=False, busy_since=now - 7.5, lanes=list, fault=None)
        monkeypatch.setattr(rail, "queue", queue)
        rail.note_failure(CompletionError("silent", status="RETRY_EXC_ERR"), is_of_path=True)
        rests.append(rail.rests_until - now)
        assert rail.paused_until - now < 1.0  # where nothing else stands it is tried soon
    monkeypatch.undo()

    assert rests == [7.5, 22.5, 52.5]
