"""Batches with notifications over two rails, of which one or the other breaks at any moment, here or at the peer.

Model: each batch fills a part of memory that no other has, and the device shows what was written as late as it may.
Invariants: a notification is there only when every byte of its batch is seen, and never twice; a batch that is done has
been told. In the end all faults are gone: then every batch ends well, and the peer has each notification. Mutants that
this caught: a fence on one rail stood for all; a frame was not let through when the peer dropped the connection of its
fence; a batch was told before the peer had dropped what carried rows of it.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer import TransferBatch
from kvxfer.verbs.enums import CompletionStatus, PortState, QueuePairState
from tests.support.fake_engines import Pair, fake_hosts
from tests.support.fake_verbs import FakeFabric, connectx

BATCHES_MAX = 5
PART_NBYTES = 2 << 20
END_S = 20.0
FAULTS_MAX = 2
"""As many as a batch bears with, and one for its fence."""

RAIL = st.integers(0, 1)
STEP = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from([64, PART_NBYTES])),
    st.tuples(st.just("step"), st.integers(1, 40)),
    st.tuples(st.just("poll"), st.integers(0, BATCHES_MAX - 1)),
    st.tuples(st.just("inject"), RAIL, st.integers(0, 20)),
    st.tuples(st.sampled_from(["peer", "port"]), RAIL),
)


class Run:
    """Two hosts with two rails, the batches so far, and what the peer was told."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.batches: list[tuple[TransferBatch, int]] = []
        self.told: Counter[int] = Counter()
        self.faults = 0

    def do(self, step: tuple[Any, ...]) -> None:
        getattr(self, step[0])(*step[1:])
        self.look()

    def look(self) -> None:
        for note in self.pair.b.notifications():
            at = int(note.payload)
            self.told[at] += 1
            start = at * PART_NBYTES
            assert (self.pair.there[start : start + self.batches[at][1]] == at + 1).all()
        assert all(count == 1 for count in self.told.values())
        assert all(self.told[at] for at, (batch, _) in enumerate(self.batches) if batch.is_done)

    def submit(self, nbytes: int) -> None:
        at = len(self.batches)
        if at < BATCHES_MAX:
            pair, start = self.pair, at * PART_NBYTES
            pair.here[start : start + nbytes] = at + 1
            batch = pair.a.submit_write(
                pair.segment,
                pair.local.address + start,
                pair.remote.address + start,
                nbytes,
                notify=b"%d" % at,
                timeout_s=END_S,
            )
            self.batches.append((batch, nbytes))

    def step(self, count: int) -> None:
        for _ in range(count):
            self.pair.fabric.step()

    def poll(self, at: int) -> None:
        if at < len(self.batches):
            self.batches[at][0].poll()

    def may_break(self) -> bool:
        self.faults += 1
        return self.faults <= FAULTS_MAX

    def inject(self, rail: int, after: int) -> None:
        for qp in list(self.pair.libraries[0].devices[rail].queue_pairs.values()):
            if self.may_break():
                qp.inject(CompletionStatus.RETRY_EXC_ERR, after=after)

    def peer(self, rail: int) -> None:
        """The peer's end goes to ERR, and nobody here is told."""
        with self.pair.fabric.lock:
            for qp in list(self.pair.libraries[1].devices[rail].queue_pairs.values()):
                if qp.state is not QueuePairState.ERR and self.may_break():
                    qp.to_error()

    def port(self, rail: int) -> None:
        library = self.pair.libraries[0]
        is_up = library.devices[rail].nic.ports[0].state is PortState.ACTIVE
        if not is_up or self.may_break():
            library.set_port(f"mlx_{rail}", 1, PortState.DOWN if is_up else PortState.ACTIVE)

    def finish(self) -> None:
        for rail in (0, 1):
            if self.pair.libraries[0].devices[rail].nic.ports[0].state is not PortState.ACTIVE:
                self.port(rail)
        self.pair.fabric.delivery = "poll"
        for batch, _ in self.batches:
            batch.wait(END_S)
        self.look()
        assert sorted(self.told) == list(range(len(self.batches)))
        assert self.pair.b._service._held_nbytes == 0


@given(st.lists(STEP, min_size=3, max_size=25))
@example([("submit", PART_NBYTES), ("poll", 0), ("step", 32), ("poll", 0), ("peer", 0), ("step", 40), ("poll", 0)])
@example([("submit", 64), ("poll", 0), ("step", 1), ("poll", 0), ("inject", 0, 0), ("inject", 1, 0), ("step", 1)])
def test_whatever_breaks_each_notification_comes_once_and_after_its_bytes(steps: list[tuple[Any, ...]]) -> None:
    with (
        tempfile.TemporaryDirectory() as root,
        mock.patch("kvxfer.transports.rdma_rail.PAUSE_S", 0.002),
        mock.patch("kvxfer.transports.rdma_rail.PAUSE_MAX_S", 0.02),
        fake_hosts(Path(root), FakeFabric(delivery="post", seed=len(steps))) as hosts,
    ):
        hosts.fabric.separate_subnets()
        pair = hosts.pair(
            [connectx(f"mlx_{row}", f"10.{row}.0.1") for row in range(2)],
            [connectx(f"mlx_{row}", f"10.{row}.0.2") for row in range(2)],
            nbytes=BATCHES_MAX * PART_NBYTES,
        )
        pair.open()
        while len(pair.connected) < 2:
            pair.write(65536)
        pair.there[:] = np.uint8(0)
        hosts.fabric.delivery, hosts.fabric.hides_writes = "manual", True
        run = Run(pair)
        for step in steps:
            run.do(step)
        run.finish()
