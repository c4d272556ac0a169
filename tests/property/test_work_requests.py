"""Any sequence of uses of one batch gives chains that a driver reads back row for row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.errors import UsageError
from kvxfer.verbs.enums import SendFlags, WorkOpcode
from kvxfer.verbs.work_request import WorkRequestBatch
from tests.support.chain import Range, Request, walk

CAPACITY = 9
SIGNALED = int(SendFlags.SIGNALED)
addresses = st.integers(0, 2**63 - 1)
words = st.integers(0, 2**32 - 1)
opcodes = st.sampled_from([WorkOpcode.RDMA_WRITE, WorkOpcode.RDMA_WRITE, WorkOpcode.RDMA_READ])
flags = st.sampled_from([0, 0, 0, int(SendFlags.FENCE)])
spacings = st.sampled_from([2, 2, 0, 3])  # few, because what is left alone when two chains are alike must be tried too
rows = st.lists(st.tuples(addresses, words, words, addresses, words), min_size=1, max_size=CAPACITY)
wr_ids = st.integers(0, 2**62)


@dataclass
class Model:
    """What the chain should be: requests, and whether each asks for a completion by itself."""

    chain: list[Request] = field(default_factory=list)

    def expected(self) -> list[Request]:
        *body, last = self.chain
        return [*body, last._replace(send_flags=last.send_flags | SIGNALED)]


class BatchMachine(RuleBasedStateMachine):
    """One batch in long use beside a list of tuples.

    Mutants it caught: the cut link not restored; the mark on the last request not taken back; the opcode under an
    appended request left there; the marks of a longer chain counted from where the shorter one ended; stale views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batch = WorkRequestBatch(CAPACITY)
        self.model = Model()

    @rule(
        table=rows,
        opcode=opcodes,
        extra=flags,
        every=spacings,
        wr_id=wr_ids,
        dtype=st.sampled_from([np.uint32, np.int64, np.uint64]),
    )
    def fill(
        self,
        table: list[tuple[int, int, int, int, int]],
        opcode: WorkOpcode,
        extra: int,
        every: int,
        wr_id: int,
        dtype: type,
    ) -> None:
        local, nbytes, lkey, remote, rkey = zip(*table, strict=True)
        self.batch.fill(
            opcode,
            local_addr=np.array(local, np.int64),
            lkey=np.array(lkey, dtype),
            remote_addr=np.array(remote, np.int64),
            rkey=np.array(rkey, dtype),
            nbytes=np.array(nbytes, dtype),
            wr_id=wr_id,
            signal_every=every,
            send_flags=extra,
        )
        self.model.chain = [
            Request(
                wr_id + row,
                opcode,
                extra | (SIGNALED if every and (row + 1) % every == 0 else 0),
                0,
                [Range(local, nbytes, lkey)],
                remote,
                rkey,
            )
            for row, (local, nbytes, lkey, remote, rkey) in enumerate(table)
        ]

    @precondition(lambda self: len(self.model.chain) < CAPACITY)
    @rule(row=st.tuples(addresses, words, words, addresses, words), opcode=opcodes, extra=flags, wr_id=wr_ids)
    def append(self, row: tuple[int, int, int, int, int], opcode: WorkOpcode, extra: int, wr_id: int) -> None:
        local, nbytes, lkey, remote, rkey = row
        self.batch.append(
            opcode,
            local_addr=local,
            lkey=lkey,
            remote_addr=remote,
            rkey=rkey,
            nbytes=nbytes,
            wr_id=wr_id,
            send_flags=extra,
        )
        self.model.chain.append(Request(wr_id, opcode, extra, 0, [Range(local, nbytes, lkey)], remote, rkey))

    @precondition(lambda self: len(self.model.chain) < CAPACITY)
    @rule(imm=words, extra=flags, wr_id=wr_ids)
    def append_notice(self, imm: int, extra: int, wr_id: int) -> None:
        self.batch.append_notice(imm, wr_id=wr_id, send_flags=extra)
        self.model.chain.append(Request(wr_id, WorkOpcode.RDMA_WRITE_WITH_IMM, extra, imm, [], 0, 0))

    @rule()
    def clear(self) -> None:
        self.batch.clear()
        self.model.chain = []

    @precondition(lambda self: len(self.model.chain) > 1)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.model.chain)))
        self.batch.truncate(count)
        self.model.chain = self.model.chain[:count]

    @rule(nbytes=st.one_of(st.integers(2**32, 2**62), st.integers(-(2**62), -1)))
    def fail_to_fill(self, nbytes: int) -> None:
        one = np.array([1])
        with pytest.raises(UsageError):
            self.batch.fill(0, local_addr=one, lkey=one, remote_addr=one, rkey=one, nbytes=np.array([nbytes]))

    @rule()
    def fill_columns_that_differ(self) -> None:
        one = np.array([1])
        with pytest.raises(ValueError, match="broadcast"):
            self.batch.fill(0, local_addr=one, lkey=1, remote_addr=np.arange(2), rkey=1, nbytes=1)
        self.model.chain = []

    @invariant()
    def a_driver_reads_the_model(self) -> None:
        assert self.batch.count == len(self.model.chain)
        if self.model.chain:
            assert walk(self.batch) == self.model.expected()


TestBatch = pytest.mark.slow(BatchMachine.TestCase)


@given(count=st.integers(1, 200), every=st.integers(0, 201))
def test_no_gap_between_completions_is_longer_than_asked(count: int, every: int) -> None:
    batch = WorkRequestBatch(200)
    column = np.arange(count)

    batch.fill(0, local_addr=column, lkey=1, remote_addr=column, rkey=2, nbytes=3, signal_every=every)

    signalled = [row for row, request in enumerate(walk(batch)) if request.send_flags & SIGNALED]
    assert signalled[-1] == count - 1
    gaps = np.diff([-1, *signalled])
    assert gaps.max() <= (every or count)
