"""A peer restarted at its old address is a new peer: old handles say so, a new open works, nobody gets old bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer import Region, TransferEngine
from kvxfer.errors import KvxferError, NotRegisteredError, PeerError, PeerRestartedError
from tests.faults.test_kill import free_port
from tests.support.peer import Peer, pattern, wait_until

NBYTES = 1 << 20
MEDIA = ("tcp", "shm", "shm-any")


class Home:
    """An engine here and an address at which peers come and go."""

    def __init__(self, medium: str) -> None:
        self.medium = medium
        self.transport = medium.partition("-")[0]
        self.engine = TransferEngine(transports=(self.transport,))
        self.port = free_port()
        self.here: Region = (
            self.engine.allocate(NBYTES) if medium == "shm" else self.engine.register(np.zeros(NBYTES, np.uint8))
        )

    def start(self) -> Peer:
        return Peer(port=self.port, transports=(self.transport,))

    def there(self, peer: Peer, nbytes: int = NBYTES) -> "Remote":  # type: ignore[name-defined]  # noqa: F821, UP037
        return peer.allocate(nbytes) if self.medium == "shm" else peer.register(nbytes)


@pytest.fixture(params=MEDIA)
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    made = Home(request.param)
    yield made
    made.engine.close()


# B140
def restart_often(home: Home, times: int) -> None:
    """Each time another layout of memory; at most one transfer may fail for each restart."""
    peer, segment, there = home.start(), None, None
    failures = 0
    for number in range(times):
        there = [home.there(peer, NBYTES >> (number + turn) % 3) for turn in range(number % 3 + 1)][-1]
        home.here.array[:] = pattern(NBYTES, number)
        for _ in range(2):
            try:
                segment = segment or home.engine.open_segment(peer.address)
                home.engine.write(segment, home.here.address, there.address, there.nbytes)
                assert there.bytes() == home.here.array[: there.nbytes].tobytes()
            except PeerError:
                failures += 1
                segment = None
        peer.kill()
        peer.close()
        peer = home.start()
    peer.close()
    assert failures <= times


def test_one_transfer_at_most_fails_for_a_restart(home: Home) -> None:
    restart_often(home, 4)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_one_transfer_at_most_fails_for_each_of_20_restarts(home: Home) -> None:
    restart_often(home, 20)


# B137
def test_open_segment_after_a_restart_gives_the_new_process(home: Home) -> None:
    with home.start() as old:
        there = home.there(old)
        segment = home.engine.open_segment(old.address)
        home.engine.write(segment, home.here.address, there.address, NBYTES)
        old.kill()
    with home.start() as new:
        there = home.there(new)

        again = home.engine.open_segment(new.address)  # the old segment was not used since

        assert again is not segment
        assert not segment.is_open
        home.engine.write(again, home.here.address, there.address, NBYTES)


def test_an_old_segment_says_that_the_peer_has_restarted(home: Home) -> None:
    with home.start() as old:
        there = home.there(old)
        segment = home.engine.open_segment(old.address)
        home.engine.write(segment, home.here.address, there.address, NBYTES)
        old.kill()
    with home.start() as new:
        home.there(new)
        wait_until(lambda: segment._connection._session is not None and segment._connection._session.error is not None)

        for _ in range(2):
            with pytest.raises(PeerRestartedError, match="another process"):
                home.engine.write(segment, home.here.address, there.address, NBYTES)
        with pytest.raises(PeerRestartedError):
            segment.refresh()

        assert not segment.is_open


# B138
def test_a_restarted_peer_with_memory_at_the_same_address_is_not_taken_for_the_old_one() -> None:
    address = 0x6200_0000_0000
    for medium in ("tcp", "shm-any"):
        home = Home(medium)
        with home.start() as old:
            old.register_at(address, NBYTES).fill(b"o" * NBYTES)
            segment = home.engine.open_segment(old.address)
            home.engine.read(segment, home.here.address, address, NBYTES)
            old.kill()
        with home.start() as new:
            there = new.register_at(address, NBYTES)
            there.fill(b"n" * NBYTES)
            home.here.array[:] = 7

            with pytest.raises(PeerError):
                home.engine.write(segment, home.here.address, address, NBYTES)
            with pytest.raises(PeerError):
                home.engine.read(segment, home.here.address, address, 64)

            assert there.bytes() == b"n" * NBYTES
            home.engine.read(home.engine.open_segment(new.address), home.here.address, address, NBYTES)
            assert home.here.array.tobytes() == b"n" * NBYTES
        home.engine.close()


# B142
def test_a_peer_opened_before_it_has_memory_can_be_used_once_it_has(home: Home) -> None:
    with home.start() as peer:
        segment = home.engine.open_segment(peer.address)
        with pytest.raises(NotRegisteredError):
            segment.region("pool")

        there = home.there(peer)

        home.engine.write(segment, home.here.address, there.address, NBYTES)


def test_a_segment_heals_after_its_peer_counted_as_dead() -> None:
    """The same process answers again: stopped for longer than keepalive_timeout_s, then continued."""
    for transport in ("tcp", "shm"):
        settings = {"transports": (transport,), "keepalive_interval_s": 0.1, "keepalive_timeout_s": 0.4}
        with TransferEngine(**settings) as engine, Peer(transports=(transport,)) as peer:
            here, there = engine.register(np.zeros(NBYTES, np.uint8)), peer.register(NBYTES)
            segment = engine.open_segment(peer.address)
            engine.write(segment, here.address, there.address, NBYTES)
            with peer.stopped():
                wait_until(
                    lambda segment=segment: (
                        segment._connection._session is not None and segment._connection._session.error is not None
                    )
                )
            deadline = time.monotonic() + 10.0
            while True:
                try:
                    engine.write(segment, here.address, there.address, NBYTES, timeout_s=2.0)
                    break
                except KvxferError:
                    assert time.monotonic() < deadline, "the segment never works again"
                    time.sleep(0.05)

            assert engine.open_segment(peer.address) is segment


# B142
def test_a_transfer_before_the_peer_has_memory_says_so_and_works_afterwards(home: Home) -> None:
    with home.start() as peer:
        segment = home.engine.open_segment(peer.address)
        for remote in (0x7000_0000_0000, [0x7000_0000_0000]):
            with pytest.raises(NotRegisteredError, match=rf"{peer.address}.*no region is registered"):
                home.engine.write(segment, home.here.address, remote, 4096)

        there = home.there(peer)

        home.here.array[:] = 3
        home.engine.write(segment, home.here.address, there.address, NBYTES)
        assert there.bytes() == b"\3" * NBYTES
