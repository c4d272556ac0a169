"""The serving side of tcp, in a process whose other threads hold the GIL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

import kvxfer
from kvxfer.system.calls import Messenger
from kvxfer.system.iovec import CData
from kvxfer.transports import tcp_stream

NBYTES = 32 << 20
BUFFER_NBYTES = 64 << 10


@pytest.fixture
def pair() -> Iterator[tuple[kvxfer.TransferEngine, kvxfer.TransferEngine]]:
    settings: dict[str, Any] = {"transports": ("tcp",), "tcp_socket_buffer_nbytes": BUFFER_NBYTES}
    with kvxfer.TransferEngine(**settings) as engine, kvxfer.TransferEngine(**settings) as peer:
        yield engine, peer


class CountingMessenger(Messenger):
    """Notes what each call has moved."""

    moved: ClassVar[list[int]] = []

    def send(self, fd: int, iov: CData, count: int, flags: int) -> int:
        self.moved.append(super().send(fd, iov, count, flags))
        return self.moved[-1]

    def receive(self, fd: int, iov: CData, count: int, flags: int) -> int:
        self.moved.append(super().receive(fd, iov, count, flags))
        return self.moved[-1]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each call of a serving thread has moved; an errno, negative, of one that found nothing."""
    monkeypatch.setattr(CountingMessenger, "moved", [])
    monkeypatch.setattr(tcp_stream, "Messenger", CountingMessenger)
    return CountingMessenger.moved


@pytest.mark.parametrize("operation", ["write", "read"])
def test_calls_that_come_back_late_move_much_at_once(
    pair: Any, served: list[int], operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a wait for the GIL, of 5 ms: with what a socket holds at a time that is 0.1 GB/s at best."""
    monkeypatch.setattr(sys, "getswitchinterval", lambda: 0.0)  # every call comes late
    engine, peer = pair
    here, there = np.full(NBYTES, 7, np.uint8), np.full(NBYTES, 5, np.uint8)
    local, remote = engine.register(here), peer.register(there)
    segment = engine.open_segment(peer.address)

    getattr(engine, operation)(segment, local.address, remote.address, NBYTES)

    assert (here == there).all()
    assert max(served) >= 32 * BUFFER_NBYTES


def test_connection_that_is_slow_meanwhile_holds_up_no_other(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits for bytes ends without them, so that a request that stopped in its middle is passed by."""
    monkeypatch.setattr(sys, "getswitchinterval", lambda: 0.0)
    engine, peer = pair
    here, there = np.full(NBYTES, 7, np.uint8), np.zeros(NBYTES, np.uint8)
    local, remote = engine.register(here), peer.register(there)
    segment = engine.open_segment(peer.address)
    engine.write(segment, local.address, remote.address, NBYTES)  # now there is a stream
    stuck = engine.submit_write(segment, local.address, remote.address, NBYTES // 2)
    sends = Messenger.send
    monkeypatch.setattr(Messenger, "send", lambda *arguments: -11 if stuck_is(arguments) else sends(*arguments))

    def stuck_is(arguments: tuple[Any, ...]) -> bool:
        work = stuck._transfer.work
        return work is not None and arguments[0] is work.stream._messenger

    for row in range(10):
        engine.write(segment, local.address + row, remote.address + NBYTES // 2 + 4096 * row, 64)

    monkeypatch.setattr(Messenger, "send", sends)
    stuck.wait()
    assert (there[: NBYTES // 2] == 7).all()
