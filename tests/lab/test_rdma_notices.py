"""Notifications on soft RoCE: behind fences over both rails, and without fences where they are turned off."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.lab.wire import IS_EMULATED, Hosts, netem
from tests.support.peer import wait_until

pytestmark = [pytest.mark.rdma, pytest.mark.topology("wire")]

FAST: dict[str, Any] = {"rdma_timeout": 16 if IS_EMULATED else 14, "connect_timeout_s": 3.0}
SLOT_NBYTES = 1024
COUNT = 1000
LARGE_NBYTES = 1 << 20
LARGE = (0, 250, 500, 750)
"""Those that are spread over both rails; they write behind the slots of the others."""
THREADS = 8
CHECK = """
seen, wrong = [], []
while len(seen) < count:
    found = engine.notifications(20.0)
    if not found:
        break
    for one in found:
        at, offset, nbytes = (int(word) for word in one.payload.split())
        seen.append(at)
        if (arrays[region_id][offset : offset + nbytes] != at % 251 + 1).any():
            wrong.append(at)
result = seen + [one.payload for one in engine.notifications(0.1)], wrong
"""


@pytest.mark.slow
@pytest.mark.parametrize("fences_max", [64, 2, 0])
def test_a_thousand_notifications_over_two_rails_come_once_and_after_their_bytes(fences_max: int) -> None:
    nbytes = COUNT * SLOT_NBYTES + len(LARGE) * LARGE_NBYTES
    with Hosts(rdma_fences_max=fences_max) as hosts, capture_logs() as events:
        hosts.warm()
        mine, theirs = hosts.engine.register(np.zeros(nbytes, np.uint8)), hosts.peer.register(nbytes)
        hosts.segment.refresh()
        before = hosts.segment.describe()["rdma"]["notifications"]
        hosts.peer.begin("run", CHECK, {"count": COUNT, "region_id": theirs.region_id})

        def notify(numbers: range) -> None:
            for at in numbers:
                offset, length = at * SLOT_NBYTES, SLOT_NBYTES
                if at in LARGE:
                    offset, length = COUNT * SLOT_NBYTES + LARGE.index(at) * LARGE_NBYTES, LARGE_NBYTES
                mine.array[offset : offset + length] = at % 251 + 1
                words = b"%d %d %d" % (at, offset, length)
                hosts.engine.write(
                    hosts.segment, mine.address + offset, theirs.address + offset, length, notify=words, timeout_s=20.0
                )

        threads = [threading.Thread(target=notify, args=(range(one, COUNT, THREADS),)) for one in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen, wrong = hosts.peer.finish()
        counts = hosts.segment.describe()["rdma"]["notifications"]

    assert sorted(seen) == list(range(COUNT))
    assert wrong == []
    how = "fenced" if fences_max else "unfenced"
    assert counts == {**before, how: before[how] + COUNT}
    assert [event["event"] for event in events if event["event"] == "rdma.rail_broken"] == []


def test_both_rails_have_fences_and_the_second_batch_too() -> None:
    with Hosts() as hosts:
        hosts.warm()

        for turn in (b"one", b"two"):
            hosts.move("write", notify=turn)

        assert [rail["fences_max"] for rail in hosts.rails().values()] == [64, 64]
        assert [payload for _, payload in hosts.peer.call("notifications", 5.0)] == [b"one", b"two"]
        assert hosts.segment.describe()["rdma"]["notifications"] == {"fenced": 2, "unfenced": 0}


def test_packets_that_are_lost_behind_the_rows_cost_the_fence_and_not_the_notification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each side tells of it; the control connection has a wire of its own."""
    with Hosts(**FAST) as hosts:
        hosts.warm()
        notices: Any = hosts.segment._transfers.endpoints[0]._notices
        begin, may_begin = notices.begin, threading.Event()
        monkeypatch.setattr(notices, "begin", lambda transfer: may_begin.is_set() and begin(transfer))
        batch = hosts.submit("write", notify=b"there")
        wait_until(lambda: batch.poll() or batch.nbytes_done == batch.nbytes)

        with netem("loss", "100%"), capture_logs() as events:
            may_begin.set()
            batch.wait(30.0)

        hosts.check()
        assert [payload for _, payload in hosts.peer.call("notifications", 5.0)] == [b"there"]
        assert notices.describe() == {"fenced": 0, "unfenced": 1}
        assert "rdma.fence_missed" in [event["event"] for event in events]
        hosts.warm()
        hosts.move("write", notify=b"and on")
        assert notices.describe() == {"fenced": 1, "unfenced": 1}
