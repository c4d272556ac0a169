"""Batches over two rails while requests fail, rails break, ports flap, batches are cancelled, one step at a time.

Model: each batch has rows of its own, filled with bytes that no other batch has. Invariants: a batch that went well has
every byte in place; of one that failed, the rows that it says are done are in place, and after its end not one byte of
its rows changes any more. In the end all faults are gone: then every batch ends, and those that nobody cancelled and no
request of which was refused for good have gone well. Mutants that this caught: a batch was stopped on its first rail
only; a broken request was counted as done; slices that were posted and not done were forgotten with their connection.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer import TransferBatch
from kvxfer.errors import CompletionError, KvxferError, RemoteAccessError, TransferCancelledError
from kvxfer.verbs.enums import CompletionStatus, PortState
from tests.support.fake_engines import Pair, fake_hosts
from tests.support.fake_verbs import FakeFabric, erdma

Status = CompletionStatus
BATCHES_MAX = 6
PART_NBYTES = 2 << 20
SLOT = 8192
END_S = 20.0
FOR_GOOD = (Status.REM_ACCESS_ERR, Status.LOC_PROT_ERR)
OF_PATH = (Status.RETRY_EXC_ERR, Status.WR_FLUSH_ERR, Status.GENERAL_ERR)

ROW_NBYTES = st.sampled_from([1, 100, 4096, 8000])
STEP = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from(["write", "read"]), st.sampled_from([1, 7, 100, 256]), ROW_NBYTES),
    st.tuples(st.just("step"), st.integers(1, 60)),
    st.tuples(st.just("poll"), st.integers(0, BATCHES_MAX - 1)),
    st.tuples(st.just("cancel"), st.integers(0, BATCHES_MAX - 1)),
    st.tuples(st.just("inject"), st.integers(0, 1), st.sampled_from(FOR_GOOD + OF_PATH), st.integers(0, 80)),
    st.tuples(st.just("port"), st.integers(0, 1)),
    st.tuples(st.just("refuse post"), st.integers(0, 5)),
)


class Run:
    """Two hosts with two rails, and the batches so far."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.batches: list[tuple[TransferBatch, npt.NDArray[np.int64], int, str]] = []
        self.frozen: dict[int, npt.NDArray[np.uint8]] = {}
        self.faults = 0
        self.rng = np.random.default_rng(1)

    def target(self, at: int) -> npt.NDArray[np.uint8]:
        """The memory that a batch changes."""
        memory = self.pair.there if self.batches[at][3] == "write" else self.pair.here
        return memory[at * PART_NBYTES : (at + 1) * PART_NBYTES]

    def source(self, at: int) -> npt.NDArray[np.uint8]:
        """The memory that it takes the bytes from."""
        memory = self.pair.here if self.batches[at][3] == "write" else self.pair.there
        return memory[at * PART_NBYTES : (at + 1) * PART_NBYTES]

    def submit(self, how: str, count: int, nbytes: int) -> None:
        at = len(self.batches)
        if at == BATCHES_MAX:
            return
        pair = self.pair
        part = slice(at * PART_NBYTES, (at + 1) * PART_NBYTES)
        for memory in (pair.here, pair.there):
            memory[part] = self.rng.integers(0, 256, PART_NBYTES, np.uint8)
        rows = at * PART_NBYTES + SLOT * np.arange(count, dtype=np.int64)
        begin = pair.a.submit_write if how == "write" else pair.a.submit_read
        batch = begin(pair.segment, pair.local.address + rows, pair.remote.address + rows, nbytes, timeout_s=END_S)
        self.batches.append((batch, rows - at * PART_NBYTES, nbytes, how))

    def inject(self, rail: int, status: CompletionStatus, after: int) -> None:
        found = list(self.pair.libraries[0].devices[rail].queue_pairs.values())
        if found and self.faults < 3:
            self.faults += 1
            found[0].inject(status, after=after)

    def flip_port(self, rail: int) -> None:
        library, name = self.pair.libraries[0], f"mlx_{rail}"
        is_up = library.device(name).nic.ports[0].state is PortState.ACTIVE
        library.set_port(name, 1, PortState.DOWN if is_up else PortState.ACTIVE)

    def do(self, step: tuple[Any, ...]) -> None:
        pair = self.pair
        if step[0] == "submit":
            self.submit(*step[1:])
        elif step[0] == "step":
            for _ in range(step[1]):
                pair.fabric.step()
        elif step[0] in ("poll", "cancel") and step[1] < len(self.batches):
            batch = self.batches[step[1]][0]
            batch.poll() if step[0] == "poll" else batch.cancel()
        elif step[0] == "inject":
            self.inject(*step[1:])
        elif step[0] == "port":
            self.flip_port(step[1])
        elif step[0] == "refuse post":
            pair.libraries[0].fail("ibv_post_send", 12, row=step[1])
        self.check()

    def check(self) -> None:
        """What has ended is right, and stays as it is."""
        for at, (batch, rows, nbytes, _) in enumerate(self.batches):
            if not batch.is_done:
                continue
            target, source = self.target(at), self.source(at)
            if at not in self.frozen:
                for row in np.flatnonzero(batch.rows_done):
                    start = int(rows[row])
                    assert (target[start : start + nbytes] == source[start : start + nbytes]).all()
                assert batch.exception is not None or batch.rows_done.all()
                self.frozen[at] = target.copy()
                source[:] = ~source  # what is still on its way would show
            assert (target == self.frozen[at]).all()

    def finish(self) -> None:
        """No fault any more: all must end."""
        fabric = self.pair.fabric
        for library in self.pair.libraries:
            library._faults.clear()
            for qp in library.queue_pairs:
                qp.injections.clear()
        for rail in (0, 1):
            if self.pair.libraries[0].devices[rail].nic.ports[0].state is not PortState.ACTIVE:
                self.flip_port(rail)
        fabric.delivery = "poll"
        for batch, *_ in self.batches:
            try:
                batch.wait(END_S)
            except (TransferCancelledError, CompletionError, RemoteAccessError) as error:
                assert isinstance(error, TransferCancelledError) or error.status in [  # noqa: PT017
                    one.name for one in FOR_GOOD
                ], error
            except KvxferError:
                raise
        fabric.run()
        self.check()


@given(st.lists(STEP, min_size=3, max_size=25))
@example(
    [("submit", "write", 256, 8000), ("inject", 0, Status.RETRY_EXC_ERR, 40), ("step", 60), ("step", 60), ("poll", 0)]
)
@example(
    [("submit", "write", 256, 8000), ("step", 60), ("inject", 0, Status.RETRY_EXC_ERR, 3), ("step", 60), ("cancel", 0)]
)
@example(
    [
        ("submit", "write", 256, 8000),
        ("submit", "write", 256, 8000),
        ("step", 40),
        ("inject", 1, Status.REM_ACCESS_ERR, 3),
        ("step", 60),
        ("poll", 1),
        ("port", 0),
        ("submit", "read", 7, 100),
        ("poll", 0),
    ]
)
def test_whatever_breaks_each_batch_tells_the_truth(steps: list[tuple[Any, ...]]) -> None:
    fabric = FakeFabric(delivery="poll", seed=len(steps))
    with (
        tempfile.TemporaryDirectory() as root,
        mock.patch("kvxfer.transports.rdma_rail.PAUSE_S", 0.002),
        mock.patch("kvxfer.transports.rdma_rail.PAUSE_MAX_S", 0.02),
        fake_hosts(Path(root), fabric) as hosts,
    ):
        fabric.separate_subnets()
        pair = hosts.pair(
            [erdma(f"mlx_{row}", f"10.{row}.0.1") for row in range(2)],
            [erdma(f"mlx_{row}", f"10.{row}.0.2") for row in range(2)],
            nbytes=BATCHES_MAX * PART_NBYTES,
            rdma_send_depth=64,
        )
        pair.open()
        while len(pair.connected) < 2:
            pair.write(65536)
        fabric.delivery = "manual"
        run = Run(pair)
        for step in steps:
            run.do(step)
        run.finish()
