"""Where an engine listens, what it tells its peers, and that an address stands for one process only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kvxfer import ConfigError, KvxferError, PeerRestartedError, PeerUnreachableError, TransferEngine
from kvxfer.addresses import HostPort, format_host_port
from kvxfer.control import resolve
from kvxfer.runtime import KEY_REMEDY, WITHOUT_KEY
from tests.support.peer import Peer, environment, run_script


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


@pytest.mark.parametrize(
    ("host", "open_by"),
    [
        ("127.0.0.1", None),
        ("0.0.0.0", None),
        ("0.0.0.0", "127.0.0.1:{}"),
        ("localhost", None),
        ("127.0.0.1", "localhost:{}"),
        pytest.param("::1", None, marks=needs_ipv6),
        pytest.param("::", None, marks=needs_ipv6),
        pytest.param("::", "[::1]:{}", marks=needs_ipv6),
        pytest.param("::", "127.0.0.1:{}", marks=needs_ipv6),
    ],
)
def test_every_spelling_of_this_host_listens_and_opens(host: str, open_by: str | None) -> None:  # B61, B68, B71
    with Peer(host=host, transports=("tcp",)) as peer, TransferEngine(transports=("tcp",)) as engine:
        there, here = peer.register(4096), engine.register(np.ones(4096, np.uint8))
        address = open_by.format(peer.port) if open_by else peer.address

        engine.write(engine.open_segment(address), here.address, there.address, 4096)

        assert there.bytes() == b"\1" * 4096
        assert not peer.address.startswith(("0.0.0.0:", "[::]:"))
        assert peer.port > 0


@pytest.mark.parametrize(
    "address", ["localhost", "127.0.0.1", "127.0.0.1:70000", "::1:80", "127.0.0.1:http", "", ":80"]
)
def test_address_that_is_none_is_refused_before_anything_is_sent(address: str) -> None:  # B68
    with TransferEngine() as engine, pytest.raises(ConfigError, match=r"192\.0\.2\.10"):
        engine.open_segment(address)


def test_port_that_is_taken_is_named() -> None:  # B63
    with TransferEngine() as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} failed: Address already in use") as caught:
            TransferEngine(port=port)

        assert (caught.value.host, caught.value.port) == ("127.0.0.1", port)
        with pytest.raises(ConfigError, match=str(port)):
            Peer(port=port)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_who_has_a_port_that_is_taken_is_told(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with TransferEngine(host=host) as engine:
        port = int(engine.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match="An engine of this process listens on that port"):
            TransferEngine(port=port)
    with Peer() as peer:
        monkeypatch.setenv("KVXFER_PORT", str(peer.port))
        with pytest.raises(ConfigError, match=r"port comes from the environment variable KVXFER_PORT") as caught:
            TransferEngine()

        assert caught.value.remedy.startswith("Another process listens on that port: set KVXFER_PORT to another")


def test_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.77"):
        TransferEngine(host="192.0.2.77")
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
        TransferEngine(host="no-such-host.invalid")


@pytest.mark.slow
def test_processes_that_start_together_get_ports_of_their_own() -> None:  # B63
    peers: list[Peer] = []
    try:
        peers.extend(Peer() for _ in range(16))
        assert len({peer.address for peer in peers}) == 16
    finally:
        for peer in peers:
            peer.kill()
            peer.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_another_process_at_the_address_is_told_from_the_old_one(transport: str) -> None:  # B64, B138
    settings = {"transports": (transport,)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with TransferEngine(**settings) as engine:
        old = Peer(port=port, **settings)
        there, here = old.register_at(0x6200_0000_0000, 65536), engine.allocate(65536)
        here.array[:] = 1
        segment = engine.open_segment(old.address)
        engine.write(segment, here.address, there.address, 65536)
        old.kill()
        old.close()

        with Peer(port=port, **settings) as new:
            lookalike = new.register_at(0x6200_0000_0000, 65536)  # the very address that B still knows
            for rows in (slice(0, 1), slice(0, 4)):
                offsets = np.array([0, 100, 200, 4096])[rows]
                with pytest.raises(KvxferError) as caught:
                    engine.write(segment, here.address + offsets, there.address + offsets, 64)
            with pytest.raises(PeerRestartedError, match="another process answers"):
                engine.write(segment, here.address, there.address, 64)

            assert isinstance(caught.value, KvxferError)
            assert not segment.is_open
            assert not lookalike.array().any()
            again = engine.open_segment(new.address)
            assert again.generation != segment.generation
            engine.write(again, here.address, lookalike.address, 65536)
            assert lookalike.array().all()


def test_nobody_at_the_address_is_told_with_errno_and_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with TransferEngine(connect_timeout_s=0.2) as engine:
        with pytest.raises(PeerUnreachableError, match=rf"127\.0\.0\.1:{port}.*refused") as caught:
            engine.open_segment(f"127.0.0.1:{port}")
        assert caught.value.retryable
        with pytest.raises(PeerUnreachableError, match=r"no-such-host\.invalid"):
            engine.open_segment("no-such-host.invalid:80")


ISOLATED = """
import sys
import numpy as np
import kvxfer
for host in sys.argv[1:]:
    with kvxfer.TransferEngine(host=host) as one, kvxfer.TransferEngine(transports=("tcp",)) as two:
        there, here = one.register(np.zeros(64, np.uint8)), two.register(np.ones(64, np.uint8))
        two.write(two.open_segment(one.address), here.address, there.address, 64)
        assert there.array.all()
        print(host, one.address.rpartition(":")[0])
"""


def run_isolated(setup: str, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a network namespace of its own, of which `setup` makes something first."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-n", "ip", "a"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces cannot be made here")
    command = ["unshare", "-n", "sh", "-c", f'{setup} && exec "$@"', "sh", sys.executable, "-W", "error", "-c", source]
    return subprocess.run(
        [*command, *arguments], env=environment(), capture_output=True, text=True, check=False, timeout=50
    )


def test_literals_are_literals_on_a_host_with_loopback_only() -> None:  # B61
    hosts = ["0.0.0.0", "127.0.0.1", *(["::1", "::"] if has_ipv6() else [])]

    done = run_isolated("ip link set lo up", ISOLATED, *hosts)

    assert done.returncode == 0, done.stderr
    told = dict(line.split() for line in done.stdout.splitlines())
    expected = {"0.0.0.0": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "[::1]", "::": "[::1]"}
    assert told == {host: expected[host] for host in hosts}


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "::", "::1"])
@pytest.mark.parametrize("passive", [True, False])
def test_literal_never_reaches_the_resolver(host: str, passive: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # B61
    ask = socket.getaddrinfo

    def literals_only(*arguments: Any, flags: int = 0, **others: Any) -> Any:
        assert flags & socket.AI_NUMERICHOST, "the resolver was asked for a literal"
        assert not flags & socket.AI_ADDRCONFIG
        return ask(*arguments, flags=flags, **others)

    monkeypatch.setattr(socket, "getaddrinfo", literals_only)

    assert resolve(HostPort(host, 0), passive=passive)[0][4][0] == host


BIND_TOGETHER = """
import os, socket, sys
import kvxfer
pipes = []
for _ in range(64):
    go, ready, done = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go[1])
            os.close(done[0])
            os.write(ready[1], b"r")
            os.read(go[0], 1)
            with kvxfer.TransferEngine(transports=("tcp",)) as engine:
                os.write(done[1], engine.address.encode())
                os.read(go[0], 1)
        finally:
            os._exit(0)
    os.close(go[0])
    os.close(done[1])
    os.read(ready[0], 1)
    pipes.append((go[1], done[0]))
for go, _ in pipes:
    os.write(go, b"1")
print(len({os.read(done, 100) for _, done in pipes} - {b""}))
for go, _ in pipes:
    os.close(go)
"""


@pytest.mark.slow
def test_64_processes_that_bind_at_the_same_time_get_64_ports() -> None:  # B63
    """Of 100 there are, so that two that probe for a free one would find the same."""
    few = 'echo "50000 50099" > /proc/sys/net/ipv4/ip_local_port_range'

    done = run_isolated(f"ip link set lo up && {few}", BIND_TOGETHER)

    assert (done.returncode, done.stdout, done.stderr) == (0, "64\n", "")


@pytest.mark.parametrize(
    ("told", "published"),
    [("192.0.2.77", "192.0.2.77"), ("2001:db8::7", "[2001:db8::7]"), ("node-3.example", "node-3.example")],
)
def test_address_that_the_user_tells_is_the_one_published(
    told: str, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # B65
    with TransferEngine(host="0.0.0.0", advertise_host=told) as engine:
        assert engine.address.rpartition(":")[0] == published
    monkeypatch.setenv("KVXFER_ADVERTISE_HOST", told)
    with TransferEngine() as engine:
        assert engine.address.rpartition(":")[0] == published


@pytest.mark.parametrize("told", ["0.0.0.0", "::", "[2001:db8::7]", "192.0.2.10:80", "a b"])
def test_address_that_no_peer_could_use_is_not_published(told: str) -> None:  # B68, B71
    with pytest.raises(ConfigError, match="advertise_host"):
        TransferEngine(advertise_host=told).close()


EXPOSED = """
import sys, kvxfer
settings = dict(pair.split("=") for pair in sys.argv[1:])
for _ in range(2):
    with kvxfer.TransferEngine(**settings, transports=("tcp",)):
        pass
"""


@pytest.mark.parametrize("host", ["0.0.0.0", pytest.param("::", marks=needs_ipv6)])
def test_engine_that_listens_on_all_addresses_without_a_key_is_told_once(host: str) -> None:
    _, told = run_script(EXPOSED, f"host={host}").communicate(timeout=30)

    (line,) = told.splitlines()
    assert line.startswith(f"kvxfer: warning: engine.exposed address='{format_host_port(host, 1)[:-1]}")
    assert WITHOUT_KEY in line
    assert KEY_REMEDY in line


@pytest.mark.parametrize("settings", [("host=0.0.0.0", "key=correct horse"), ("host=127.0.0.1",)])
def test_engine_with_a_key_or_for_this_host_only_is_not_told(settings: tuple[str, ...]) -> None:
    assert run_script(EXPOSED, *settings).communicate(timeout=30) == ("", "")


PUBLISHED = """
import kvxfer
with kvxfer.TransferEngine(host="::", transports=("tcp",)) as one, kvxfer.TransferEngine(transports=("tcp",)) as two:
    two.open_segment("192.0.2.10:" + one.address.rpartition(":")[2])  # it does listen there
    print(one.address.rpartition(":")[0])
"""


def test_dual_stack_wildcard_on_a_host_with_ipv4_only_is_published_by_its_ipv4_address() -> None:  # B65, B71
    done = run_isolated("ip link set lo up && ip addr add 192.0.2.10/32 dev lo", PUBLISHED)

    assert done.stdout == "192.0.2.10\n", done.stderr
