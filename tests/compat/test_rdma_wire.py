"""RDMA with a process that is no kvxfer, over fake NICs: both ends are ours, one of them passes for Mooncake's."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvxfer
from kvxfer.addresses import HostPort, parse_host_port
from kvxfer.compat.mooncake.arguments import Rows
from kvxfer.compat.mooncake.memory import BufferPool
from kvxfer.compat.mooncake.own import Own, rdma_nics
from kvxfer.compat.mooncake.settings import P2P, Wish, open_engine
from kvxfer.compat.mooncake.target import MooncakeTarget
from kvxfer.compat.mooncake.targets import Targets
from kvxfer.mooncake.calls import ask_descriptor
from kvxfer.mooncake.rdma import MooncakeRdmaAnswer
from kvxfer.mooncake.rdma import answer as mooncake_answer
from kvxfer.mooncake.wire.descriptor import SegmentDescriptor
from kvxfer.types import Rights
from tests.support.fake_engines import FakeHosts, fake_hosts
from tests.support.fake_verbs import connectx

NBYTES = 1 << 16


class Directory:
    """Asks the process, and hides the mark that tells a kvxfer."""

    server = "P2PHANDSHAKE"

    def __init__(self) -> None:
        self.found: SegmentDescriptor | None = None

    def find(self, name: str, *, deadline: float) -> SegmentDescriptor:
        at = parse_host_port(name)
        found = ask_descriptor(at.host, at.port, SegmentDescriptor("a"), deadline=deadline)
        self.found = dataclasses.replace(found, kvxfer=None)
        return self.found

    def find_control(self, name: str, *, deadline: float) -> HostPort:
        return parse_host_port(name)

    def stale_hint(self, descriptor: SegmentDescriptor) -> str:
        return ""

    def publish(self, descriptor: SegmentDescriptor) -> None:
        """Nothing is kept."""

    def withdraw(self) -> None:
        """Nothing was kept."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[FakeHosts]:
    with fake_hosts(tmp_path) as hosts:
        hosts.add("a", connectx("mlx5_0", "192.0.2.1"))
        hosts.add("b", connectx("mlx5_0", "192.0.2.2"), connectx("mlx5_1", "192.0.2.3"))
        yield hosts


def test_rows_are_written_and_read_over_mooncakes_handshake(hosts: FakeHosts) -> None:
    a, b = hosts.engine("a"), hosts.engine("b")
    here, there = np.arange(NBYTES, dtype=np.uint64).view(np.uint8)[:NBYTES].copy(), np.zeros(NBYTES, np.uint8)
    local, remote = a.register(here), b.register(there)
    own, directory = Own(b, b.address, [0]), Directory()
    targets = Targets(a, a.address, directory, BufferPool(a, Rights.NONE))
    offsets = np.arange(NBYTES // 4096)[::-1].astype(np.int64) * 4096
    rows = Rows.of_columns(local.address + offsets, remote.address + offsets, np.full(len(offsets), 4096))
    try:
        target = targets.find(b.address)
        target.transfer(kvxfer.Opcode.WRITE, rows, ("n", "done"), 10.0)
        assert (there == here).all()
        there[:] = 7
        target.submit(kvxfer.Opcode.READ, rows, None, 10.0).wait()
        assert (here == 7).all()

        assert isinstance(target, MooncakeTarget)
        assert target.first_address() == remote.address
        assert own.notifies() == [("n", "done")]
        with pytest.raises(kvxfer.NotRegisteredError):
            target.transfer(kvxfer.Opcode.WRITE, Rows.of_one(local.address, 17, 4), None, 10.0)
    finally:
        targets.close()
        own.close()


def test_descriptor_names_devices_and_a_key_for_each(hosts: FakeHosts) -> None:
    b = hosts.engine("b")
    own = Own(b, "b", [0])
    try:
        memory = np.zeros(NBYTES, np.uint8)
        b.register(memory)

        found = own.descriptor()

        assert SegmentDescriptor.from_json(found.to_json()) == found
        assert found is own.descriptor()
        assert found.protocols == ("rdma",)
        assert [device.name for device in found.devices] == ["mlx5_0", "mlx5_1"]
        assert [len(buffer.rkeys) for buffer in found.buffers] == [2]
        assert all(set(near + far) == {"mlx5_0", "mlx5_1"} for near, far in found.priority_matrix.values())
        assert found.kvxfer is not None
    finally:
        own.close()


def test_peer_with_tcp_alone_is_refused_where_tcp_is_not_wanted(hosts: FakeHosts) -> None:
    a = hosts.engine("a")
    with kvxfer.TransferEngine(transports=("tcp",)) as c:
        own = Own(c, c.address, [0])
        targets = Targets(a, a.address, Directory(), BufferPool(a, Rights.NONE))

        with pytest.raises(kvxfer.TransportUnavailableError, match="is reached over tcp; wanted here: rdma"):
            targets.find(c.address)

        targets.close()
        own.close()


def test_name_of_nobody_is_told_at_once(hosts: FakeHosts) -> None:
    a = hosts.engine("a", connect_timeout_s=600.0, handshake_timeout_s=600.0)
    targets = Targets(a, a.address, Directory(), BufferPool(a, Rights.NONE))

    with pytest.raises(kvxfer.PeerUnreachableError, match="refused"):
        targets.find("127.0.0.1:1")

    targets.close()


def test_new_connections_leave_nothing_of_the_old_ones(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two queue pairs one is used; the other must go with it, or each link flap leaks one."""
    monkeypatch.setattr("kvxfer.transports.rdma_rail.PAUSE_S", 0.001)
    a, b = hosts.engine("a"), hosts.engine("b")
    here, there = np.zeros(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
    local, remote = a.register(here), b.register(there)
    own, targets = Own(b, b.address, [0]), Targets(a, a.address, Directory(), BufferPool(a, Rights.NONE))
    rows = Rows.of_one(local.address, remote.address, NBYTES)
    try:
        target = targets.find(b.address)
        for number in range(1, 7):
            here[:] = number
            target.transfer(kvxfer.Opcode.WRITE, rows, None, 10.0)
            assert (there == number).all()
            with hosts.fabric.lock:
                for queue_pair in hosts.libraries["a"].queue_pairs:
                    queue_pair.to_error()

        assert len(hosts.libraries["a"].queue_pairs) <= 2 * 2  # two rails: "b" has two ports
    finally:
        targets.close()
        own.close()
    assert not hosts.libraries["a"].queue_pairs


@pytest.mark.parametrize("count", [1, 2, 5])
def test_as_many_queue_pairs_are_connected_as_mooncake_has(hosts: FakeHosts, count: int) -> None:
    a, b = hosts.engine("a"), hosts.engine("b")
    here, there = np.full(NBYTES, 7, np.uint8), np.zeros(NBYTES, np.uint8)
    local, remote = a.register(here), b.register(there)
    own = Own(b, b.address, [0])
    targets = Targets(a, a.address, Directory(), BufferPool(a, Rights.NONE), queue_pairs=count)
    try:
        target = targets.find(b.address)
        target.transfer(kvxfer.Opcode.WRITE, Rows.of_one(local.address, remote.address, NBYTES), None, 10.0)

        assert (there == 7).all()
        made = [len(hosts.libraries[host].queue_pairs) for host in ("a", "b")]
        assert made in (
            [count, count],
            [2 * count, 2 * count],
        )  # "b" has two ports: by now one rail may be there, or two
    finally:
        targets.close()
        own.close()


def test_peer_that_only_tcp_reaches_is_warned_of_with_the_reasons(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """KVXFER_ALLOW_FALLBACK must not hide that two hosts have RDMA and no way between them."""
    with fake_hosts(tmp_path) as hosts:
        hosts.add("", connectx("mlx5_0", "192.0.2.1"))
        hosts.add("b")
        peer = hosts.engine("b", transports=("rdma", "tcp"))
        engine = open_engine(Wish("127.0.0.1", P2P, "rdma", ""), {"KVXFER_ALLOW_FALLBACK": "1"})
        caplog.clear()
        try:
            segment = engine.open_segment(peer.address)
            assert segment.transport == "tcp"
        finally:
            engine.close()

    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert segment.passed_over["rdma"] in told[0]
    assert "RDMA" in segment.passed_over["rdma"].partition("does not offer it")[2]


def ask_for(name: str, *numbers: int, is_ready: bool = False) -> dict[str, object]:
    """What a Mooncake process at 192.0.2.1 asks of the device mlx5_0 of "b"."""
    gid = ":".join(f"{byte:02x}" for byte in ipaddress.IPv6Address("::ffff:192.0.2.1").packed)
    return {
        "local_nic_path": f"{name}@mlx5_0",
        "peer_nic_path": "b@mlx5_0",
        "local_lid": 0,
        "local_gid": gid,
        "qp_num": list(numbers),
        "ready_ack": is_ready,
    }


@pytest.fixture
def answers(hosts: FakeHosts) -> Iterator[MooncakeRdmaAnswer]:
    b = hosts.engine("b")
    answers = MooncakeRdmaAnswer(rdma_nics(b), lambda: "b")
    yield answers
    answers.close()


def test_process_that_connects_anew_takes_its_own_place_and_another_one_the_oldest(
    hosts: FakeHosts, answers: MooncakeRdmaAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_answer, "ENDPOINTS_MAX", 1)
    first = answers.answer(ask_for("one", 17, 18))

    second = answers.answer(ask_for("one", 19, 20))

    assert first["qp_num"] != second["qp_num"]
    assert answers.answer(ask_for("one", 19, 20, is_ready=True))["qp_num"] == second["qp_num"]
    assert sorted(one.number for one in hosts.libraries["b"].queue_pairs) == sorted(second["qp_num"])

    other = answers.answer(ask_for("two", 17, 18))  # dead processes do not say goodbye: the oldest makes way

    assert sorted(one.number for one in hosts.libraries["b"].queue_pairs) == sorted(other["qp_num"])


def test_close_waits_for_a_connection_that_is_being_made(hosts: FakeHosts, answers: MooncakeRdmaAnswer) -> None:
    """The device is closed next: nothing may be in a call on it, or come later."""
    library, begun, may_end = hosts.libraries["b"], threading.Event(), threading.Event()
    refused: list[kvxfer.KvxferError] = []

    def wait() -> None:
        begun.set()
        assert may_end.wait(5.0)

    def answer() -> None:
        try:
            answers.answer(ask_for("one", 17, 18))
        except kvxfer.KvxferError as error:
            refused.append(error)

    library.before["ibv_modify_qp"] = wait
    maker = threading.Thread(target=answer)
    maker.start()
    assert begun.wait(5.0)
    closer = threading.Thread(target=answers.close)
    closer.start()
    closer.join(0.02)
    assert closer.is_alive()

    may_end.set()
    for thread in (maker, closer):
        thread.join(5.0)

    assert [type(error) for error in refused] == [kvxfer.PeerRefusedError]
    assert not library.queue_pairs


@pytest.mark.parametrize(("field", "value"), [("local_lid", True), ("local_lid", 1 << 16), ("qp_num", [True, 2])])
def test_request_with_a_value_that_no_mooncake_sends_is_refused(
    hosts: FakeHosts, answers: MooncakeRdmaAnswer, field: str, value: object
) -> None:
    with pytest.raises(kvxfer.PeerRefusedError):
        answers.answer({**ask_for("one", 17, 18), field: value})

    assert not hosts.libraries["b"].queue_pairs
