"""Where an engine listens, what it tells its peers, and that an address stands for one process only."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from kvxfer import ConfigError, KvxferError, PeerRestartedError, PeerUnreachableError, TransferEngine
from tests.support.peer import Peer


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
