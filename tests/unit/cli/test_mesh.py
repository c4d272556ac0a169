"""`kvxfer mesh` over fake NICs: every rail between all engines is tried, and what is wrong with one is told."""

from __future__ import annotations

import errno
import io
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvxfer import TransferEngine
from kvxfer.cli.mesh import MeshHost, find_problems, measure, read_hosts
from kvxfer.cli.mesh_agent import MeshAgent, MeshRequest, TargetReport
from kvxfer.cli.mesh_text import draw_mesh
from kvxfer.cli.rail_check import REGION_NAME, RailReport, Share
from kvxfer.cli.table import Progress, Style
from kvxfer.errors import UsageError
from kvxfer.types import Rights
from kvxfer.verbs.routes import Route
from tests.support.fake_engines import FakeHosts, fake_hosts
from tests.support.fake_verbs import FakeNic, connectx
from tests.support.gid_rows import interface

TIMEOUT_S = 30.0
POOL_NBYTES = 1 << 20


class FakeServe:
    """What `kvxfer serve` does, in a thread."""

    def __init__(self, hosts: FakeHosts, name: str, **settings: Any) -> None:
        self.engine = hosts.engine(name, **{"transports": ("rdma", "tcp"), "connect_timeout_s": 2.0, **settings})
        self.engine.allocate(POOL_NBYTES, name=REGION_NAME)
        self.events: list[dict[str, Any]] = []
        self.agent = MeshAgent(self.engine, self.events.append)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for note in self.engine.notifications(timeout_s=0.02):
                assert self.agent.take(note.peer, note.payload)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.agent.close()


class Mesh:
    """Hosts with NICs, a serve on each, and a desk from which the mesh is asked for."""

    def __init__(self, hosts: FakeHosts, **settings: Any) -> None:
        self.hosts = hosts
        self.serves: list[FakeServe] = []
        self._settings = settings
        hosts.add("desk")
        self.desk = hosts.engine("desk", transports=("tcp",), connect_timeout_s=2.0, **settings)

    def add(self, name: str, *nics: FakeNic, **settings: Any) -> TransferEngine:
        self.hosts.add(name, *nics)
        self.serves.append(FakeServe(self.hosts, name, **self._settings, **settings))
        return self.serves[-1].engine

    def run(self, *more: str, parallel: int = 2, timeout_s: float = TIMEOUT_S) -> list[MeshHost]:
        addresses = [*(serve.engine.address for serve in self.serves), *more]
        progress = Progress(io.StringIO(), "mesh", total=1)
        return measure(self.desk, addresses, parallel=parallel, timeout_s=timeout_s, progress=progress)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    with fake_hosts(tmp_path) as hosts:
        found = Mesh(hosts)
        yield found
        for serve in found.serves:
            serve.close()


def by_subnet(source: Any, destination: Any, **_: Any) -> Route:
    """Routes of a machine whose rails are subnets of their own: /24, and nothing between them."""
    same = str(source).rpartition(".")[0] == str(destination).rpartition(".")[0]
    return Route() if same else Route(f"no route from {source} to {destination}")


def rails_of(hosts: list[MeshHost]) -> list[RailReport]:
    return [rail for host in hosts for target in host.targets for rail in target.rails]


def two_rails(host: int) -> list[FakeNic]:
    return [connectx(f"mlx5_{rail}", f"10.10.{rail}.{host}", f"eth{rail}") for rail in range(2)]


def test_every_rail_is_connected_written_and_compared(mesh: Mesh) -> None:
    mesh.add("a", *two_rails(1))
    mesh.add("b", *two_rails(2))

    hosts = mesh.run()

    rails = rails_of(hosts)
    assert [rail.status for rail in rails] == ["ok"] * 8
    assert {(rail.local, rail.remote) for rail in hosts[0].targets[0].rails} == {
        (f"mlx5_{one}:1", f"mlx5_{other}:1") for one in range(2) for other in range(2)
    }
    assert all(rail.nbytes > 0 and rail.path_mtu == 4096 and rail.connect_ms > 0 for rail in rails)
    assert all(rail.write_gbps > 0 and rail.read_gbps > 0 and rail.gids for rail in rails)
    assert find_problems(hosts) == []


def test_rails_without_a_path_are_not_tried_and_no_problem(mesh: Mesh) -> None:
    known = [interface(f"eth{rail}", f"10.10.{rail}.1/24", f"10.10.{rail}.2/24") for rail in range(2)]
    with (
        mock.patch("kvxfer.transports.rdma_pairing.find_route", by_subnet),
        mock.patch("kvxfer.transports.rdma_nic.list_interfaces", return_value=known),
    ):
        mesh.add("a", *two_rails(1))
        mesh.add("b", *two_rails(2))
        hosts = mesh.run()

    assert sorted(rail.status for rail in rails_of(hosts)) == ["no path"] * 4 + ["ok"] * 4
    assert find_problems(hosts) == []
    text = draw_mesh(hosts, [], Style())
    assert "4 without a path" in text
    assert "no route from 10.10.0.1 to 10.10.1.2" in text


def test_rail_that_should_work_and_does_not_is_a_problem_with_the_reason(mesh: Mesh) -> None:
    mesh.add("a", *two_rails(1))
    mesh.add("b", *two_rails(2))
    mesh.hosts.fabric.set_path("a/mlx5_0", "b/mlx5_0", rtr_errno=errno.EHOSTUNREACH)

    hosts = mesh.run()

    broken = [rail for rail in rails_of(hosts) if rail.status == "failed"]
    assert [(rail.local, rail.remote) for rail in broken] == [("mlx5_0:1", "mlx5_0:1")] * 2
    problems = find_problems(hosts)
    assert len(problems) == 2
    assert "EHOSTUNREACH" in problems[0][0]
    assert "10.10.0." in problems[0][0]  # of the best pair of GIDs, not of the link-local one that was tried last
    assert "Given:" not in problems[0][0]
    assert len(broken[0].attempts) > 1
    assert "2 problems" in draw_mesh(hosts, problems, Style())


def test_device_that_takes_less_than_it_says_works_and_tells_the_rung(mesh: Mesh) -> None:
    mesh.add("a", connectx("mlx5_0", "10.10.0.1"))
    mesh.add("b", connectx("mlx5_0", "10.10.0.2", read_depth_max=4))

    hosts = mesh.run()

    (there,) = hosts[0].targets[0].rails
    assert there.status == "lowered"
    assert there.read_depth == 4
    assert there.lowered == "read_depth 16 -> 4"
    # The host that refused first remembers it: the connection that comes the other way needs no second try.
    (back,) = hosts[1].targets[0].rails
    assert any("read_depth 16 -> 4" in attempt for attempt in (*there.attempts, *back.attempts))
    assert find_problems(hosts) == []
    assert "read_depth 16 -> 4" in draw_mesh(hosts, [], Style())


def test_bytes_that_come_back_different_fail_the_rail(mesh: Mesh) -> None:
    mesh.add("a", connectx("mlx5_0", "10.10.0.1"))
    mesh.add("b", connectx("mlx5_0", "10.10.0.2"))
    mesh.hosts.fabric.moves_data = False

    hosts = mesh.run()

    assert all(rail.status == "failed" and "came back different" in rail.reason for rail in rails_of(hosts))


def test_engine_that_is_no_serve_is_tried_by_the_others(mesh: Mesh) -> None:
    mesh.add("a", *two_rails(1))
    mesh.hosts.add("b", *two_rails(2))
    plain = mesh.hosts.engine("b", transports=("rdma", "tcp"))

    hosts = mesh.run(plain.address)

    assert [host.acts for host in hosts] == [True, False]
    assert [rail.status for rail in rails_of(hosts)] == ["ok"] * 4
    assert all(rail.nbytes == 0 for rail in rails_of(hosts))
    assert find_problems(hosts) == []
    assert "tried nothing" in draw_mesh(hosts, [], Style())


def test_mesh_of_engines_with_a_key_proves_it_everywhere(tmp_path: Path) -> None:
    with fake_hosts(tmp_path) as hosts:
        mesh = Mesh(hosts, key=b"correct horse battery")
        mesh.add("a", *two_rails(1))
        mesh.add("b", *two_rails(2))

        found = mesh.run()

        assert [rail.status for rail in rails_of(found)] == ["ok"] * 8
        for serve in mesh.serves:
            serve.close()


@pytest.mark.parametrize("pool_nbytes", [0, 4096, 100_000, 1 << 20, 1 << 30])
@pytest.mark.parametrize(("count", "parallel"), [(1, 1), (2, 4), (6, 4), (32, 8)])
def test_slots_of_all_hosts_lie_in_the_pool_and_never_meet(pool_nbytes: int, count: int, parallel: int) -> None:
    slots = [slot for index in range(count) for slot in Share(index, count).cut(pool_nbytes, parallel) if slot]

    ordered = sorted(slots, key=lambda slot: slot.start)
    assert all(before.stop <= after.start for before, after in itertools.pairwise(ordered))
    assert all(slot.stop <= pool_nbytes for slot in slots)
    assert len(slots) in (0, count * parallel)
    assert bool(slots) == (pool_nbytes >= count * parallel * 4096)


def test_pool_that_may_not_be_written_is_no_pool(mesh: Mesh) -> None:
    mesh.add("a", *two_rails(1))
    mesh.hosts.add("b", *two_rails(2))
    plain = mesh.hosts.engine("b", transports=("rdma", "tcp"))
    plain.allocate(POOL_NBYTES, name=REGION_NAME, rights=Rights.REMOTE_READ)

    hosts = mesh.run(plain.address)

    assert [host.acts for host in hosts] == [True, False]
    assert all((rail.status, rail.nbytes) == ("ok", 0) for rail in rails_of(hosts))


def test_engine_without_rdma_is_a_problem_of_its_rails_only(mesh: Mesh) -> None:
    mesh.add("a", *two_rails(1))
    mesh.add("b", *two_rails(2))
    mesh.add("c")

    hosts = mesh.run()

    assert [rail.status for rail in rails_of(hosts)] == ["ok"] * 8
    assert hosts[2].ports == ()
    ((told, remedy),) = find_problems(hosts)
    assert told.startswith(f"{hosts[2].address} tries no rail; it says: ")
    assert "RDMA" in told
    assert remedy


def test_two_engines_without_rdma_are_each_told_once_and_by_name(mesh: Mesh) -> None:
    mesh.add("a")
    mesh.add("b")

    hosts = mesh.run()

    problems = find_problems(hosts)
    assert [what.partition(" tries no rail")[0] for what, _ in problems] == [host.address for host in hosts]
    text = draw_mesh(hosts, problems, Style(width=1000))
    assert [text.count(host.address) for host in hosts] == [1, 1]


def test_engine_without_rdma_beside_one_that_has_it_is_one_problem(mesh: Mesh) -> None:
    mesh.add("a", *two_rails(1))
    mesh.add("b")

    hosts = mesh.run()

    ((told, _),) = find_problems(hosts)
    assert told.startswith(f"{hosts[1].address} tries no rail; ")


def test_engines_that_refuse_the_key_are_not_said_to_be_no_serves_or_without_rdma(tmp_path: Path) -> None:
    with fake_hosts(tmp_path) as hosts:
        keyless = Mesh(hosts)
        keyless.add("a", *two_rails(1))
        keyless.add("b", *two_rails(2))
        keyless.desk = hosts.engine("desk", transports=("tcp",), key=b"correct horse battery")

        found = keyless.run()

        for serve in keyless.serves:
            serve.close()
    problems = find_problems(found)
    assert len(problems) == 2
    assert all("pre-shared key" in what for what, _ in problems)
    assert "whether they offer RDMA ports is not known" in draw_mesh(found, problems, Style())


def test_engine_that_answers_and_does_not_act_is_named() -> None:
    hosts = [MeshHost("h1:1", error="refused."), MeshHost("h2:1")]

    problems = find_problems(hosts)

    assert [what for what, _ in problems] == ["h1:1: refused.", "no engine that answered acts: h2:1."]
    assert "no engine that answered offers" in draw_mesh(hosts, problems, Style())


@pytest.mark.slow
def test_engine_that_is_not_there_is_a_problem_and_the_others_go_on(mesh: Mesh) -> None:
    mesh.add("a", *two_rails(1))
    mesh.add("b", *two_rails(2))

    hosts = mesh.run("127.0.0.1:1")

    assert hosts[2].error
    assert [rail.status for rail in rails_of(hosts)] == ["ok"] * 8
    ((told, _),) = find_problems(hosts)  # that the others do not reach it either is no news
    assert told.startswith("127.0.0.1:1: ")


@pytest.mark.slow
def test_rails_whose_turn_comes_after_the_deadline_are_told_as_not_tried(mesh: Mesh) -> None:
    for number, name in enumerate("ab", 1):
        mesh.add(name, *two_rails(number), connect_timeout_s=30.0)  # so that the first rail takes all the time there is
    path = {f"{host}/mlx5_{rail}" for host in "ab" for rail in range(2)}
    for source in path:
        for target in path:
            mesh.hosts.fabric.set_path(source, target, rtr_errno=errno.ETIMEDOUT)

    hosts = mesh.run(parallel=1, timeout_s=1.0)

    statuses = {rail.status for rail in rails_of(hosts)}
    assert statuses == {"failed", "not tried"}
    assert len(find_problems(hosts)) == 8


def test_answer_is_read_once_it_is_there_and_junk_is_refused(mesh: Mesh) -> None:
    mesh.add("a", *two_rails(1))
    (serve,) = mesh.serves

    assert not serve.agent.take("peer", b"hello")
    assert serve.agent.take("peer", b'{"kvxfer.mesh": 1}')
    assert serve.agent.take("peer", b'{"kvxfer.mesh": 9}')
    assert serve.agent.take("peer", b'{"kvxfer.mesh')

    assert [event["event"] for event in serve.events] == ["mesh.refused"] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "../etc"},
        {"id": "x" * 65},
        {"share": [2, 2]},
        {"parallel": 0},
        {"parallel": 10**9},
        {"timeout_s": -1},
        {"timeout_s": float("nan")},
        {"targets": ["nohost"]},
        {"targets": ["127.0.0.1:1"] * 2000},
        {"share": "all"},
    ],
)
def test_request_with_a_value_that_cannot_be_meant_is_refused(changes: dict[str, Any]) -> None:
    payload = json.loads(MeshRequest("a1", ("127.0.0.1:1",), Share(0, 2), 4, 10.0).to_payload())

    with pytest.raises(ValueError):
        MeshRequest.from_payload(json.dumps({**payload, **changes}).encode())


def test_request_and_reports_are_the_same_after_a_trip() -> None:
    request = MeshRequest("a1", ("127.0.0.1:1", "[::1]:2"), Share(1, 2), 4, 10.0)
    rail = RailReport("a:1", "b:1", "lowered", "r", "m", "l", "g", 4096, 4, "x", ("x -> y",), 1.5, 65536, 1.0, 2.0)
    target = TargetReport("127.0.0.1:1", (rail,), "", "")

    assert MeshRequest.from_payload(request.to_payload()) == request
    assert TargetReport.from_json(json.loads(json.dumps(target.to_json()))) == target
    with pytest.raises(ValueError, match="no report"):
        TargetReport.from_json({"target": "x", "rails": [{}]})
    with pytest.raises(ValueError, match="no status"):
        RailReport.from_json({**rail.to_json(), "status": "great"})


def test_answer_of_a_stranger_does_nothing_to_the_terminal() -> None:
    bad = "\x1b[2J\x07evil"
    rail = {**RailReport("a:1", "b:1", "failed").to_json(), "reason": bad, "local": bad, "attempts": [bad]}

    report = TargetReport.from_json({"target": bad, "rails": [rail], "error": bad, "remedy": bad})

    texts = [report.target, report.error, report.remedy, report.rails[0].reason, report.rails[0].local]
    assert [text.isprintable() and "evil" in text for text in [*texts, *report.rails[0].attempts]] == [True] * 6


def test_host_file_is_read_with_comments_and_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text("# the decode nodes\n192.0.2.1:7777\n\n  node-2:7777  # rack 3\n[2001:db8::3]:7777\n")

    assert read_hosts(file) == ["192.0.2.1:7777", "node-2:7777", "[2001:db8::3]:7777"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no engine"),
        ("192.0.2.1:7777\n", "1 engine;"),
        ("192.0.2.1:7777\nnode\n", "line 2"),
        ("192.0.2.1:7777\n192.0.2.1:7777\n", "twice"),
    ],
)
def test_host_file_that_names_no_mesh_is_told_by_line(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text(text)

    with pytest.raises(UsageError, match=told):
        read_hosts(file)


def test_one_engine_under_two_names_is_told_by_line_before_any_is_asked(mesh: Mesh) -> None:
    address = mesh.add("a", *two_rails(1)).address
    mesh.add("b", *two_rails(2))

    with pytest.raises(UsageError, match=f"lines 1 and 3 name the same engine: {address} and localhost:"):
        mesh.run(f"localhost:{address.rpartition(':')[2]}")

    assert mesh.serves[0].events == []


def test_host_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none cannot be read: No such file or directory\. Name a file"):
        read_hosts(tmp_path / "none")


def test_two_engines_without_one_rail_are_a_problem() -> None:
    rails = (RailReport("a:1", "b:1", "no path", "no route"),)
    hosts = [MeshHost("h1:1", acts=True, targets=(TargetReport("h2:1", rails),)), MeshHost("h2:1", acts=False)]

    ((what, remedy),) = find_problems(hosts)

    assert "not one rail: no route" in what
    assert "subnets" in remedy


def test_many_rails_are_summed_up_and_only_odd_ones_listed() -> None:
    good = [RailReport(f"a{at}:1", f"b{at}:1", "ok", path_mtu=4096, nbytes=1, write_gbps=9.0) for at in range(50)]
    odd = RailReport("a:1", "b:1", "lowered", path_mtu=1024, lowered="path_mtu 4096 -> 1024")
    hosts = [MeshHost("h1:1", acts=True, ports=("a:1",), targets=(TargetReport("h2:1", (*good, odd)),))]

    text = draw_mesh(hosts, [], Style())

    assert "51 of 51" in text
    assert "1024 4096" in text
    assert "path_mtu 4096 -> 1024" in text
    assert "a7:1" not in text


@pytest.mark.slow
def test_six_hosts_with_four_nics_each_have_480_rails(mesh: Mesh) -> None:
    for host in range(6):
        nics = [connectx(f"mlx5_{rail}", f"10.10.{rail}.{host + 1}", f"eth{rail}") for rail in range(4)]
        mesh.add(f"node{host}", *nics, connect_timeout_s=20.0)
    mesh.hosts.fabric.set_path("node2/mlx5_1", "node4/mlx5_3", rtr_errno=errno.EHOSTUNREACH, both_ways=False)

    hosts = mesh.run(parallel=4, timeout_s=120.0)

    rails = rails_of(hosts)
    assert len(rails) == 480
    broken = [
        (host.address, target.target, rail.local, rail.remote)
        for host in hosts
        for target in host.targets
        for rail in target.rails
        if rail.status != "ok"
    ]
    addresses = [serve.engine.address for serve in mesh.serves]
    assert {(*sorted((source, target)), *sorted((one, other))) for source, target, one, other in broken} == {
        (*sorted((addresses[2], addresses[4])), "mlx5_1:1", "mlx5_3:1")
    }
    assert f"{480 - len(broken)} work" in draw_mesh(hosts, find_problems(hosts), Style())
