"""Which transport carries a batch, and that whoever asks is told why."""

from __future__ import annotations

import os
import shutil
import subprocess

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
    monkeypatch.setattr(
        shm_handover.HandoverClient, "__init__", lambda self, name, *rest: connect(self, name + "-elsewhere", *rest)
    )
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

        assert (script.returncode, err) == (0, "")
        first, second = out.splitlines()
        assert first == "shm"
        assert (shared.array() == 1).all()
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
