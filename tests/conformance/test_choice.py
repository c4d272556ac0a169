"""Which transport carries a batch, and that whoever asks is told why."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import TransferEngine, TransportUnavailableError
from kvxfer.transports import shm_handover
from tests.support.peer import Peer, pattern, run_script

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def check_moves(engine: TransferEngine, peer: Peer, transport: str, *, allocate: bool = True) -> None:
    there = peer.allocate(4096) if allocate else peer.register(4096)
    here = engine.register(pattern(4096, 1))
    segment = engine.open_segment(peer.address)

    batch = engine.submit_write(segment, here.address, there.address, 4096).wait()

    assert batch.transport == transport
    assert there.bytes() == pattern(4096, 1).tobytes()


@pytest.mark.parametrize(
    ("ours", "theirs", "chosen"),
    [
        (("shm", "tcp"), ("shm", "tcp"), "shm"),
        (("tcp", "shm"), ("shm", "tcp"), "tcp"),
        (("shm", "tcp"), ("tcp",), "tcp"),
        (("tcp",), ("shm", "tcp"), "tcp"),
        (("shm",), ("shm", "tcp"), "shm"),
    ],
)
def test_best_common_transport_is_taken_and_shown(
    ours: tuple[str, ...], theirs: tuple[str, ...], chosen: str
) -> None:  # B51
    with Peer(transports=theirs) as peer, TransferEngine(transports=ours) as engine:
        segment = engine.open_segment(peer.address)

        assert segment.transport == chosen
        assert chosen in repr(segment)
        assert set(segment.passed_over) == set(ours[: ours.index(chosen)])
        assert all("does not offer" in reason for reason in segment.passed_over.values())
        assert segment.describe()["transport"] == chosen
        check_moves(engine, peer, chosen)


@pytest.mark.parametrize(("ours", "theirs"), [(("shm",), ("tcp",)), (("tcp",), ("shm",))])
def test_no_common_transport_is_told_with_both_lists(ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:  # B51
    with Peer(transports=theirs) as peer, TransferEngine(transports=ours) as engine:
        with pytest.raises(TransportUnavailableError, match=rf"(?i){ours[0]}.*{theirs[0]}") as caught:
            engine.open_segment(peer.address)

        assert ours[0] in str(caught.value)


def test_transports_of_one_segment_may_be_given() -> None:
    with Peer() as peer, TransferEngine() as engine:
        first, second = engine.open_segment(peer.address), engine.open_segment(peer.address, transports=("tcp",))

        assert (first.transport, second.transport) == ("shm", "tcp")
        assert first is not second


@pytest.mark.parametrize("allowed", [True, False])
def test_shm_is_passed_over_where_its_socket_does_not_answer(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # B158: as from another network namespace
    connect = shm_handover.HandoverClient.__init__

    def elsewhere(self: shm_handover.HandoverClient, name: str, *rest: Any, **named: Any) -> None:
        connect(self, name + "-elsewhere", *rest, **named)

    monkeypatch.setattr(shm_handover.HandoverClient, "__init__", elsewhere)
    with Peer() as peer, TransferEngine(transports=("shm", "tcp") if allowed else ("shm",)) as engine:
        if not allowed:
            with pytest.raises(TransportUnavailableError, match="network namespace"):
                engine.open_segment(peer.address)
            return

        assert engine.open_segment(peer.address).transport == "tcp"
        assert "network namespace" in engine.open_segment(peer.address).passed_over["shm"]
        check_moves(engine, peer, "tcp")


@needs_root
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("ip"), reason="needs iproute2")
def test_peer_in_another_network_namespace_is_reached_by_tcp() -> None:  # B158
    name, ours, theirs = f"kvx{os.getpid() % 100000}", f"kva{os.getpid() % 100000}", f"kvb{os.getpid() % 100000}"

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0

    if not ip("netns", "add", name):
        pytest.skip("network namespaces cannot be made here")
    try:
        if not ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name):
            pytest.skip("veth devices cannot be made here")
        assert ip("addr", "add", "198.18.77.1/24", "dev", ours)
        assert ip("link", "set", ours, "up")
        assert ip("-n", name, "addr", "add", "198.18.77.2/24", "dev", theirs)
        assert ip("-n", name, "link", "set", theirs, "up")
        with (
            Peer(prefix=("ip", "netns", "exec", name), host="198.18.77.2") as peer,
            TransferEngine(transports=("shm", "tcp")) as engine,
        ):
            segment = engine.open_segment(peer.address)

            assert segment.transport == "tcp"
            assert "network namespace" in segment.passed_over["shm"]
            check_moves(engine, peer, "tcp")
    finally:
        ip("link", "del", ours)
        ip("netns", "del", name)


@needs_root
@pytest.mark.parametrize("allowed", [True, False])
def test_peer_of_another_user_is_reached_by_tcp_with_the_reason(allowed: bool) -> None:  # B158
    with Peer(uid=NOBODY) as peer, TransferEngine(transports=("shm", "tcp") if allowed else ("shm",)) as engine:
        if not allowed:
            with pytest.raises(TransportUnavailableError, match=f"user 0.*user {NOBODY}"):
                engine.open_segment(peer.address)
            return

        segment = engine.open_segment(peer.address)

        assert segment.transport == "tcp"
        assert f"user {NOBODY}" in segment.passed_over["shm"]
        check_moves(engine, peer, "tcp")


PLAIN_USER = """
import os, sys
import numpy as np
import kvxfer
kvxfer.TransferEngine().close()  # imports what it needs while it may still be read
os.setgroups([]); os.setgid(65534); os.setuid(65534)
address, remote_any, remote_shared, transports = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(",")
engine = kvxfer.TransferEngine(transports=transports)
segment = engine.open_segment(address)
here = engine.register(np.ones(4096, np.uint8))
print(engine.submit_write(segment, here.address, remote_shared, 4096).wait().transport)
try:
    print(engine.submit_write(segment, here.address, remote_any, 4096).wait().transport)
except kvxfer.TransportUnavailableError as error:
    print(error)
engine.close()
"""


@needs_root
@pytest.mark.parametrize("transports", ["shm,tcp", "shm"])
def test_memory_that_ptrace_rules_forbid_goes_by_tcp_or_is_told(transports: str) -> None:  # B158
    with Peer(uid=NOBODY) as peer:
        # setuid left the peer undumpable: another process of the same user may map what it hands over, not ptrace it
        there, shared = peer.register(4096), peer.allocate(4096)
        script = run_script(PLAIN_USER, peer.address, str(there.address), str(shared.address), transports)
        out, err = script.communicate(timeout=20)

        assert script.returncode == 0, err
        first, second = out.splitlines()
        assert first == "shm"
        assert (shared.array() == 1).all()
        assert err.count("segment.region_unreachable") == (transports != "shm")  # the error tells
        if transports == "shm":
            assert "not permitted" in second
            assert "allocate()" in second
            assert not there.array().any()
        else:
            assert second == "tcp"
            assert (there.array() == 1).all()


def test_unusable_transports_leave_stderr_alone_and_can_be_asked_for() -> None:  # B54
    with TransferEngine() as engine:
        probes = {probe.transport: probe for probe in engine.probe()}

    assert probes["tcp"].usable
    assert probes["shm"].usable
    assert all(probe.reason for probe in probes.values())


def test_tcp_alone_touches_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:  # B49
    monkeypatch.setattr(shm_handover.HandoverClient, "__init__", None)
    with Peer(transports=("shm", "tcp")) as peer, TransferEngine(transports=("tcp",)) as engine:
        here, there = engine.register(np.ones(64, np.uint8)), peer.allocate(64)

        engine.write(engine.open_segment(peer.address), here.address, there.address, 64)

        assert there.bytes() == b"\1" * 64


VERBS_ASIDE = """
import sys
from pathlib import Path
import numpy as np
import kvxfer
address, remote, transports = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with kvxfer.TransferEngine(**({"transports": transports} if transports else {})) as engine:
    here = engine.register(np.full(4096, 7, np.uint8))
    segment = engine.open_segment(address)
    engine.write(segment, here.address, remote, 4096)
    print(segment.transport, "libibverbs" in Path("/proc/self/maps").read_text())
    print(*(one.reason for one in engine.probe() if one.transport == "rdma"))
"""


@pytest.mark.parametrize(
    ("broken", "reason"),
    [("missing", "there is no file"), ("text", "invalid ELF header"), ("libc.so.6", "not libibverbs")],
)
def test_broken_verbs_library_is_silent_and_hinders_nobody(
    tmp_path: Path, broken: str, reason: str
) -> None:  # B54, B55
    library = broken if broken == "libc.so.6" else str(tmp_path / "libibverbs.so.1")
    if broken == "text":
        (tmp_path / "libibverbs.so.1").write_text("this is no library\n" * 100)
    with Peer() as peer:
        there = peer.allocate(4096)

        script = run_script(VERBS_ASIDE, peer.address, str(there.address), "", KVXFER_LIBIBVERBS=library)
        out, err = script.communicate(timeout=20)

        assert (script.returncode, err) == (0, "")
        assert out.startswith("shm False\n")
        assert reason in out
        assert there.bytes() == b"\7" * 4096


def test_tcp_alone_never_asks_for_verbs() -> None:  # B49
    forbid = (
        "import kvxfer.transports.rdma as rdma, kvxfer.verbs.library as library\n"
        "def never(*_, **__): raise AssertionError('verbs were asked for')\n"
        "rdma.RdmaTransport.probe = library.load_library = never\n"
    )
    with Peer(transports=("tcp",)) as peer:
        there = peer.register(4096)

        script = run_script(forbid + VERBS_ASIDE, peer.address, str(there.address), "tcp")
        out, err = script.communicate(timeout=20)

        assert (script.returncode, out, err) == (0, "tcp False\n\n", "")
        assert there.bytes() == b"\7" * 4096


def test_rdma_asked_for_is_an_error_alone_and_a_warning_beside_tcp(
    caplog: pytest.LogCaptureFixture,
) -> None:  # B48, B50, B51
    with pytest.raises(TransportUnavailableError, match="rdma: ") as caught:
        TransferEngine(transports=("rdma",))
    assert set(caught.value.reasons) == {"rdma"}
    assert ".." not in str(caught.value)

    with Peer(transports=("tcp",)) as peer, TransferEngine(transports=("rdma", "tcp")) as engine:
        assert engine.transports == ("tcp",)

        segment = engine.open_segment(peer.address)

        assert segment.transport == "tcp"
        assert set(segment.passed_over) == {"rdma"}
        warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert any("segment.opened" in one and "rdma" in one for one in warned)
        with pytest.raises(TransportUnavailableError, match=r"Wanted here: rdma; offered there: tcp"):
            engine.open_segment(peer.address, transports=("rdma",))
        with pytest.raises(TransportUnavailableError) as told:
            engine.open_segment(peer.address, transports=("rdma", "shm"))
        assert ".;" not in str(told.value)
        assert ".." not in str(told.value)


@needs_root
@pytest.mark.parametrize("namespace", ["--mount", "--ipc", "--pid"])
@pytest.mark.parametrize("allocate", [True, False])
def test_peer_in_another_namespace_gets_its_bytes(namespace: str, allocate: bool) -> None:  # B158
    if subprocess.run(["unshare", namespace, "--fork", "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces cannot be made here")
    with (
        Peer(prefix=("unshare", namespace, "--fork", "--kill-child")) as peer,
        TransferEngine(transports=("shm", "tcp")) as engine,
    ):
        check_moves(engine, peer, "shm", allocate=allocate)  # the other way, whichever works is fine
        mine = engine.allocate(4096) if allocate else engine.register(np.zeros(4096, np.uint8))
        peer.run(
            "here = engine.register(np.full(4096, 5, np.uint8))\n"
            "engine.write(engine.open_segment(address), here.address, remote, 4096)",
            address=engine.address,
            remote=mine.address,
        )
        assert (mine.array == 5).all()
