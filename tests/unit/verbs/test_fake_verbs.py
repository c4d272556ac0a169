"""What the fake promises to those who test with it: the rules of a real device, at the level of C calls."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.verbs.abi import ffi
from kvxfer.verbs.enums import (
    Access,
    CompletionStatus,
    EventType,
    GidType,
    PortState,
    QueuePairState,
    SendFlags,
    WorkOpcode,
)
from tests.support.fake_endpoint import ALL_RIGHTS, INIT_MASK, RTR_MASK, RTS_MASK, Endpoint, Polled
from tests.support.fake_sysfs import write_sysfs
from tests.support.fake_verbs import (
    FakeFabric,
    FakeGid,
    FakeLibrary,
    FakeNic,
    connectx,
    erdma,
    gid,
    infiniband,
    ionic,
    irdma,
    iwarp,
    rxe,
)

WRITE, WRITE_IMM, READ, SEND = (
    WorkOpcode.RDMA_WRITE,
    WorkOpcode.RDMA_WRITE_WITH_IMM,
    WorkOpcode.RDMA_READ,
    WorkOpcode.SEND,
)
Status = CompletionStatus
SIZE = 4096


class Pair:
    """Two hosts with a device each, a queue pair between them, a page registered on both."""

    def __init__(
        self,
        make: Callable[..., FakeNic] = connectx,
        *,
        delivery: Any = "post",
        connect: bool = True,
        **changes: Any,
    ) -> None:
        self.fabric = FakeFabric(delivery=delivery)
        self.libraries = [
            FakeLibrary(self.fabric, make(**_place(make, number), **changes), name=name)
            for number, name in ((1, "a"), (2, "b"))
        ]
        self.a, self.b = (Endpoint(library) for library in self.libraries)
        if connect:
            self.a.connect(self.b)
        self.here, self.there = np.arange(SIZE, dtype=np.uint8), np.zeros(SIZE, np.uint8)
        self.mine, self.theirs = self.a.register(self.here), self.b.register(self.there)

    def request(self, opcode: WorkOpcode = WRITE, nbytes: int | None = None, **more: Any) -> dict[str, Any]:
        return self.a.rdma(opcode, self.mine, self.theirs, nbytes, **more)

    def statuses(self) -> list[CompletionStatus]:
        return [done.status for done in self.a.poll()]


def _place(make: Callable[..., FakeNic], number: int) -> dict[str, Any]:
    if make is infiniband:
        return {"lid": number}
    return {} if make is iwarp else {"address": f"10.0.0.{number}"}


# Bytes.


@pytest.mark.parametrize("make", [connectx, rxe, irdma, ionic, erdma, infiniband])
def test_write_read_and_notice_arrive(make: Callable[..., FakeNic]) -> None:
    pair = Pair(make)

    assert pair.a.post(pair.request()) == (0, 1)
    assert (pair.there == pair.here).all()
    pair.here[:] = 0
    assert pair.a.post(pair.request(READ, wr_id=5)) == (0, 1)
    assert (pair.there == pair.here).all()
    assert pair.b.post_receive(wr_id=9) == 0
    assert pair.a.post(pair.request(WRITE_IMM, 0, imm=0x01020304)) == (0, 1)

    assert [(done.wr_id, done.opcode, done.byte_len) for done in pair.a.poll()] == [(0, 1, 0), (5, 2, SIZE), (0, 1, 0)]
    assert [(done.wr_id, done.opcode, done.imm_data) for done in pair.b.poll()] == [(9, 129, 0x01020304)]


def test_send_scatters_over_the_receive() -> None:
    pair = Pair()
    address = int(ffi.cast("uintptr_t", pair.theirs.addr))
    pair.b.post_receive(pieces=[(address, 100, pair.theirs.lkey), (address + 1000, 100, pair.theirs.lkey)])

    pair.a.post(pair.request(SEND, 150))

    assert (pair.there[:100] == pair.here[:100]).all()
    assert (pair.there[1000:1050] == pair.here[100:150]).all()
    assert [done.byte_len for done in pair.b.poll()] == [150]


def test_inline_data_is_copied_at_post() -> None:
    pair = Pair(delivery="manual", connect=False)
    pair.a.library.ibv_destroy_qp(pair.a.qp)
    pair.a.create_qp(max_inline_data=64)
    pair.a.connect(pair.b)

    pair.a.post(pair.request(WRITE, 64, flags=SendFlags.SIGNALED | SendFlags.INLINE))
    pair.here[:] = 0
    pair.fabric.run()

    assert pair.there[:64].tolist() == list(range(64))


def test_memory_that_was_unmapped_is_left_alone() -> None:
    pair = Pair()
    block = mmap.mmap(-1, SIZE)
    array = np.frombuffer(block, np.uint8)
    region = pair.b.register(array)
    del array
    block.close()

    pair.a.post(pair.a.rdma(WRITE, pair.mine, region))

    assert pair.statuses() == [Status.SUCCESS]


# States.


def test_each_step_needs_each_of_its_attributes() -> None:
    pair = Pair(connect=False)
    bits = {"INIT": INIT_MASK, "RTR": RTR_MASK, "RTS": RTS_MASK}
    state_bit = 1

    for name, mask in bits.items():
        for bit in (1 << shift for shift in range(26)):
            if bit & mask and bit != state_bit:
                assert pair.a.modify(mask & ~bit, qp_state=QueuePairState[name]) == errno.EINVAL, (name, bit)
        steps = {"INIT": pair.a.to_init, "RTR": lambda: pair.a.to_rtr(pair.b), "RTS": pair.a.to_rts}
        assert steps[name]() == 0
    assert pair.a.state is QueuePairState.RTS


def test_steps_out_of_order_are_refused() -> None:
    pair = Pair(connect=False)

    assert pair.a.to_rts() == errno.EINVAL
    assert pair.a.post(pair.request()) == (errno.EINVAL, 0)
    assert pair.a.to_init() == 0
    assert pair.a.to_rtr(pair.b) == 0
    assert pair.a.to_init() == errno.EINVAL
    assert pair.a.to_rtr(pair.b) == errno.EINVAL


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"path_mtu": 6}, errno.EINVAL),
        ({"max_dest_rd_atomic": 17}, errno.EINVAL),
        ({"ah": {"is_global": 0}}, errno.EINVAL),
        ({"ah": {"sgid_index": 255}}, errno.EINVAL),
        ({"ah": {"sgid_index": 9}}, errno.ENODATA),
        ({"ah": {"port_num": 2}}, errno.EINVAL),
        ({"ah": {"dgid": bytes(16)}}, errno.EINVAL),
        ({"ah": {"sgid_index": 3, "dgid": gid("fe80::1").value}}, errno.EINVAL),
        ({"ah": {"sgid_index": 3, "dgid": gid("10.9.9.9").value}}, errno.ETIMEDOUT),
    ],
)
def test_rtr_is_refused_with_the_kernels_error(changes: dict[str, Any], expected: int) -> None:
    pair = Pair(connect=False)
    pair.a.to_init()

    assert pair.a.to_rtr(pair.b, **changes) == expected
    assert pair.a.state is QueuePairState.INIT
    assert pair.a.to_rtr(pair.b) == 0


def test_misbehaviour_of_a_device_is_a_field() -> None:
    changes: dict[str, Any] = {"read_depth_max": 1, "hop_limits": (0, 16), "refuses_reset_to_reset": True}
    pair = Pair(connect=False, **changes)

    assert pair.a.modify(1, qp_state=QueuePairState.RESET) == errno.EINVAL
    pair.a.to_init()
    assert pair.a.to_rtr(pair.b, max_dest_rd_atomic=2) == errno.EINVAL
    assert pair.a.to_rtr(pair.b, ah={"hop_limit": 64}) == errno.EINVAL
    assert pair.a.to_rtr(pair.b, ah={"hop_limit": 16}) == 0
    assert pair.a.to_rts(max_rd_atomic=2) == errno.EINVAL
    assert pair.a.to_rts() == 0


def test_read_budget_is_the_devices_and_comes_back() -> None:
    pair = Pair(ionic, connect=False)
    first = pair.a.qp
    pair.a.to_init()
    assert pair.a.to_rtr(pair.b, max_dest_rd_atomic=16) == 0
    pair.a.create_qp()
    pair.a.to_init()

    assert pair.a.to_rtr(pair.b, max_dest_rd_atomic=1) == errno.EINVAL
    assert pair.libraries[0].ibv_destroy_qp(first) == 0
    assert pair.a.to_rtr(pair.b, max_dest_rd_atomic=16) == 0


def test_iwarp_queue_pair_starts_in_init_and_is_not_flushed() -> None:
    library = FakeLibrary(None, iwarp())
    end = Endpoint(library)

    assert end.state is QueuePairState.INIT
    assert end.post_receive() == 0
    assert end.to_error() == 0
    assert end.poll() == []


# Failures.


def _no_key(pair: Pair) -> None:
    pair.b.regions.remove(pair.theirs)
    assert pair.b.library.ibv_dereg_mr(pair.theirs) == 0


def _no_right(pair: Pair) -> None:
    pair.theirs = pair.b.register(pair.there, Access.LOCAL_WRITE | Access.REMOTE_READ)


def _no_right_of_queue_pair(pair: Pair) -> None:
    pair.b.fake.attributes["qp_access_flags"] = int(Access.REMOTE_READ)


def _no_local_key(pair: Pair) -> None:
    pair.a.regions.remove(pair.mine)
    assert pair.a.library.ibv_dereg_mr(pair.mine) == 0


def _too_long(pair: Pair) -> None:
    pair.libraries[0].devices[0].nic.ports[0].max_msg_sz = 100


def _lost(pair: Pair) -> None:
    pair.fabric.set_path("a/mlx5_0", "b/mlx5_0", is_lost=True)


def _far(pair: Pair) -> None:
    pair.fabric.set_path("a/mlx5_0", "b/mlx5_0", hops=64)


def _died(pair: Pair) -> None:
    pair.libraries[1].die()


def _peer_in_error(pair: Pair) -> None:
    assert pair.b.to_error() == 0


def _peer_port_down(pair: Pair) -> None:
    pair.libraries[1].set_port("mlx5_0", 1, PortState.DOWN)


def _wrong_psn(pair: Pair) -> None:
    pair.a.fake.attributes["sq_psn"] += 1


def _wrong_number(pair: Pair) -> None:
    pair.b.fake.attributes["dest_qp_num"] += 1


def _wrong_gid_type(pair: Pair) -> None:
    row = pair.b.fake.source
    assert row is not None
    pair.b.fake.source = FakeGid(row.value, GidType.ROCE_V1)


def _unlike_mtu(pair: Pair) -> None:
    pair.b.fake.attributes["path_mtu"] = 3


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_no_key, Status.REM_ACCESS_ERR),
        (_no_right, Status.REM_ACCESS_ERR),
        (_no_right_of_queue_pair, Status.REM_INV_REQ_ERR),
        (_no_local_key, Status.LOC_PROT_ERR),
        (_too_long, Status.LOC_LEN_ERR),
        (_lost, Status.RETRY_EXC_ERR),
        (_far, Status.RETRY_EXC_ERR),
        (_died, Status.RETRY_EXC_ERR),
        (_peer_in_error, Status.RETRY_EXC_ERR),
        (_peer_port_down, Status.RETRY_EXC_ERR),
        (_wrong_psn, Status.RETRY_EXC_ERR),
        (_wrong_number, Status.RETRY_EXC_ERR),
        (_wrong_gid_type, Status.RETRY_EXC_ERR),
        (_unlike_mtu, Status.REM_INV_REQ_ERR),
    ],
)
def test_failure_has_its_true_status_and_flushes_the_rest(
    spoil: Callable[[Pair], None], expected: CompletionStatus
) -> None:
    pair = Pair()
    pair.there[:] = 0
    pair.a.post_receive(wr_id=3)
    spoil(pair)

    assert pair.a.post(pair.request(wr_id=1, flags=0), pair.request(wr_id=2, flags=0)) == (0, 2)

    done = pair.a.poll()
    assert [(each.wr_id, each.status) for each in done] == [
        (1, expected),
        (2, Status.WR_FLUSH_ERR),
        (3, Status.WR_FLUSH_ERR),
    ]
    assert pair.a.state is QueuePairState.ERR
    assert pair.a.post(pair.request(wr_id=4)) == (0, 1)
    assert [(each.wr_id, each.status) for each in pair.a.poll()] == [(4, Status.WR_FLUSH_ERR)]
    assert pair.there.any() == (spoil is _wrong_number)  # done, but never acknowledged


def test_responder_that_refuses_goes_to_error_and_says_so() -> None:
    pair = Pair()
    pair.b.post_receive()

    pair.a.post(pair.request(to=1))

    assert pair.b.state is QueuePairState.ERR
    assert [done.status for done in pair.b.poll()] == [Status.WR_FLUSH_ERR]
    event = ffi.new("struct ibv_async_event *")
    assert pair.b.library.ibv_get_async_event(pair.b.context, event) == 0
    assert (event.event_type, event.element.qp) == (EventType.QP_ACCESS_ERR, pair.b.qp)
    pair.b.library.ibv_ack_async_event(event)


def test_receiver_not_ready() -> None:
    pair = Pair()
    pair.a.post(pair.request(WRITE_IMM, 0))

    assert pair.statuses() == []  # rnr_retry 7 waits for ever
    pair.b.post_receive()
    assert pair.statuses() == [Status.SUCCESS]

    pair.a.fake.attributes["rnr_retry"] = 6
    pair.a.post(pair.request(WRITE_IMM, 0))
    assert pair.statuses() == [Status.RNR_RETRY_EXC_ERR]


def test_message_longer_than_its_receive() -> None:
    pair = Pair()
    address = int(ffi.cast("uintptr_t", pair.theirs.addr))
    pair.b.post_receive(pieces=[(address, 10, pair.theirs.lkey)])

    pair.a.post(pair.request(SEND, 11))

    assert pair.statuses() == [Status.REM_INV_REQ_ERR]
    assert [done.status for done in pair.b.poll()] == [Status.LOC_LEN_ERR]


def test_more_reads_than_the_responder_allows() -> None:
    pair = Pair(connect=False)
    pair.b.to_init()
    pair.b.to_rtr(pair.a, max_dest_rd_atomic=1)
    pair.b.to_rts()
    pair.a.to_init()
    pair.a.to_rtr(pair.b)
    pair.a.to_rts(max_rd_atomic=4)

    pair.a.post(pair.request(READ), pair.request(READ))

    assert pair.statuses()[0] is Status.REM_INV_REQ_ERR


def test_soft_roce_retries_for_ever_with_count_7() -> None:
    pair = Pair(rxe)
    pair.fabric.set_path("a/rxe0", "b/rxe0", is_lost=True)
    pair.a.fake.attributes["retry_cnt"] = 7
    pair.a.post(pair.request())

    assert pair.statuses() == []
    pair.fabric.set_path("a/rxe0", "b/rxe0", is_lost=False)
    assert pair.statuses() == [Status.SUCCESS]


def test_status_can_be_ordered() -> None:
    pair = Pair()
    pair.a.fake.inject(Status.RETRY_EXC_ERR, vendor_err=7, after=1)

    pair.a.post(pair.request(), pair.request())

    assert [(done.status, done.vendor_err) for done in pair.a.poll()] == [
        (Status.SUCCESS, 0),
        (Status.RETRY_EXC_ERR, 7),
    ]


# Queues.


def test_slots_come_back_by_polling_a_signalled_completion() -> None:
    pair = Pair(connect=False)
    pair.libraries[0].ibv_destroy_qp(pair.a.qp)
    pair.a.create_qp(max_send_wr=4)
    pair.a.connect(pair.b)
    quiet = pair.request(flags=0)

    assert pair.a.post(quiet, quiet, pair.request(), quiet, quiet) == (errno.ENOMEM, 4)
    assert pair.a.post(quiet) == (errno.ENOMEM, 0)
    assert len(pair.a.poll()) == 1
    assert pair.a.post(quiet, quiet, quiet, quiet) == (errno.ENOMEM, 3)


def test_overrun_kills_the_queue_and_its_queue_pairs() -> None:
    pair = Pair(rxe, connect=False)
    library = pair.libraries[0]
    small = Endpoint(library, cqe=2)
    small.connect(pair.b)
    mine = small.register(pair.here)

    small.post(*[small.rdma(WRITE, mine, pair.theirs)] * 4)

    assert small.state is QueuePairState.ERR
    event = ffi.new("struct ibv_async_event *")
    assert library.ibv_get_async_event(small.context, event) == 0
    assert event.event_type == EventType.CQ_ERR
    library.ibv_ack_async_event(event)


def test_event_comes_once_for_each_request_and_epoll_sees_it() -> None:
    pair = Pair()
    library, end = pair.libraries[0], pair.a
    os.set_blocking(end.channel.fd, False)
    poller = select.poll()
    poller.register(end.channel.fd, select.POLLIN)
    cq, cq_context = ffi.new("struct ibv_cq **"), ffi.new("void **")

    end.post(pair.request())
    assert poller.poll(0) == []  # nobody asked
    library.ibv_req_notify_cq(end.cq, 0)
    assert poller.poll(0) == []  # what is there already gives none
    end.post(pair.request())
    end.post(pair.request())
    assert poller.poll(0) == [(end.channel.fd, select.POLLIN)]
    assert library.ibv_get_cq_event(end.channel, cq, cq_context) == 0
    assert cq[0] == end.cq
    assert poller.poll(0) == []
    assert library.ibv_get_cq_event(end.channel, cq, cq_context) == -1
    assert ffi.errno == errno.EAGAIN

    library.ibv_destroy_qp(end.qp)
    with pytest.raises(AssertionError, match="not acknowledged"):
        library.ibv_destroy_cq(end.cq)
    library.ibv_ack_cq_events(end.cq, 1)
    assert library.ibv_destroy_cq(end.cq) == 0


def test_solicited_only_waits_for_a_solicited_receive() -> None:
    pair = Pair()
    os.set_blocking(pair.b.channel.fd, False)
    pair.libraries[1].ibv_req_notify_cq(pair.b.cq, 1)
    pair.b.post_receive()
    pair.b.post_receive()

    pair.a.post(pair.request(WRITE_IMM, 0))
    assert select.select([pair.b.channel.fd], [], [], 0)[0] == []
    pair.a.post(pair.request(WRITE_IMM, 0, flags=SendFlags.SIGNALED | SendFlags.SOLICITED))
    assert select.select([pair.b.channel.fd], [], [], 0)[0] == [pair.b.channel.fd]


def test_blocking_wait_is_woken_by_another_thread() -> None:
    pair = Pair()
    library, end = pair.libraries[0], pair.a
    cq, cq_context = ffi.new("struct ibv_cq **"), ffi.new("void **")
    library.ibv_req_notify_cq(end.cq, 0)
    results: list[int] = []
    waiter = threading.Thread(
        target=lambda: results.append(library.ibv_get_cq_event(end.channel, cq, cq_context)), daemon=True
    )
    waiter.start()

    end.post(pair.request())
    waiter.join(10)

    assert results == [0]
    library.ibv_ack_cq_events(end.cq, 1)


# Order.


def test_manual_delivery_keeps_order_within_a_queue_pair_only() -> None:
    pair = Pair(delivery="manual")
    second_a, second_b = Endpoint(pair.libraries[0]), Endpoint(pair.libraries[1])
    second_a.connect(second_b)
    mine, theirs = second_a.register(pair.here), second_b.register(pair.there)
    pair.a.post(pair.request(wr_id=1), pair.request(wr_id=2))
    second_a.post(second_a.rdma(WRITE, mine, theirs, 10, wr_id=3))

    assert pair.fabric.step(second_a.fake)
    assert [done.wr_id for done in second_a.poll()] == [3]
    assert pair.there[:10].any()
    assert not pair.there[10:].any()
    assert pair.fabric.deliver(pair.a.fake)
    assert pair.there[10:].any()
    assert pair.a.poll() == []  # the data is there, the completion held back
    assert pair.fabric.complete(pair.a.fake)
    assert pair.fabric.run() == 1
    assert [done.wr_id for done in pair.a.poll()] == [1, 2]
    assert not pair.fabric.step()


def test_poll_delivery_moves_nothing_before_a_poll() -> None:
    pair = Pair(delivery="poll")

    pair.a.post(pair.request())
    assert not pair.there.any()

    assert pair.statuses() == [Status.SUCCESS]
    assert pair.there.any()


def test_delivered_request_may_still_be_flushed() -> None:
    pair = Pair(delivery="manual")
    pair.a.post(pair.request())
    pair.fabric.deliver(pair.a.fake)

    pair.a.to_error()

    assert pair.statuses() == [Status.WR_FLUSH_ERR]
    assert pair.there.any()


# Memory.


def test_registration_is_refused_as_a_kernel_does() -> None:
    library = FakeLibrary(None, connectx(max_mr_size=8 * SIZE, registered_nbytes_max=12 * SIZE), memlock_nbytes=2**20)
    end = Endpoint(library)
    block = np.zeros(16 * SIZE, np.uint8)
    address = block.ctypes.data

    def attempt(at: int = address, nbytes: int = SIZE, access: int = ALL_RIGHTS) -> int:
        found = library.ibv_reg_mr(end.pd, at, nbytes, int(access))
        if found != ffi.NULL:
            end.regions.append(found)
            return 0
        return int(ffi.errno)

    assert attempt(nbytes=0) == errno.EINVAL
    assert attempt(access=Access.REMOTE_WRITE) == errno.EINVAL
    assert attempt(nbytes=8 * SIZE + 1) == errno.EINVAL
    assert attempt(at=SIZE) == errno.EFAULT  # page 1 is never mapped
    library.read_only.append((address, SIZE))
    assert attempt() == errno.EFAULT
    assert attempt(access=Access.REMOTE_READ) == 0
    assert attempt(at=address + SIZE, nbytes=8 * SIZE) == 0
    assert attempt(at=address + SIZE, nbytes=4 * SIZE) == errno.EIO
    library.memlock_nbytes = 0
    assert attempt(at=address + SIZE) == errno.ENOMEM
    assert library.device("mlx5_0").registered_nbytes == 9 * SIZE
    end.close()
    assert library.leaks == {}


# Faults, events, lives.


def test_nth_call_fails_and_the_row_of_a_chain() -> None:
    pair = Pair()
    library = pair.libraries[0]
    library.fail("ibv_alloc_pd", errno.ENOMEM, nth=2)
    library.fail("ibv_post_send", errno.ENOMEM, row=6)

    assert library.ibv_alloc_pd(pair.a.context) != ffi.NULL
    assert library.ibv_alloc_pd(pair.a.context) == ffi.NULL
    assert ffi.errno == errno.ENOMEM
    assert library.ibv_alloc_pd(pair.a.context) != ffi.NULL
    assert pair.a.post(*[pair.request()] * 10) == (errno.ENOMEM, 6)
    assert len(pair.a.poll()) == 6


def test_asynchronous_events_reach_every_context_of_the_device() -> None:
    library = FakeLibrary(None, connectx(), connectx("mlx5_1"))
    first, second, other = Endpoint(library), Endpoint(library), Endpoint(library, 1)
    event = ffi.new("struct ibv_async_event *")

    library.set_port("mlx5_0", 1, PortState.DOWN)

    for end, expected in ((first, 0), (second, 0), (other, -1)):
        os.set_blocking(end.context.async_fd, False)
        assert library.ibv_get_async_event(end.context, event) == expected
        if expected == 0:
            assert (event.event_type, event.element.port_num) == (EventType.PORT_ERR, 1)
            library.ibv_ack_async_event(event)
    assert library.leaks.get("async event") is None


def test_removed_device_flushes_and_answers_eio_but_can_be_closed() -> None:
    pair = Pair()
    pair.a.post_receive()

    pair.libraries[0].remove_device("mlx5_0")

    assert pair.statuses() == [Status.WR_FLUSH_ERR]
    assert pair.libraries[0].ibv_alloc_pd(pair.a.context) == ffi.NULL
    assert ffi.errno == errno.EIO
    pair.a.close()
    assert pair.libraries[0].leaks == {}


def test_objects_in_use_are_not_destroyed_and_none_twice() -> None:
    pair = Pair()
    library, end = pair.libraries[0], pair.a

    assert library.ibv_dealloc_pd(end.pd) == errno.EBUSY
    assert library.ibv_destroy_cq(end.cq) == errno.EBUSY
    assert library.ibv_destroy_comp_channel(end.channel) == errno.EBUSY
    assert library.ibv_close_device(end.context) == errno.EBUSY
    end.close()
    with pytest.raises(AssertionError, match="after it was destroyed"):
        library.ibv_dealloc_pd(end.pd)
    with pytest.raises(AssertionError, match="was not given out"):
        library.ibv_dealloc_pd(pair.b.pd)
    assert library.leaks == {}
    pair.b.close()
    assert pair.libraries[1].leaks == {}


def test_rails_in_separate_subnets_do_not_resolve() -> None:
    fabric = FakeFabric()
    fabric.separate_subnets()
    a = FakeLibrary(fabric, connectx(address="10.0.0.1"), connectx("mlx5_1", "10.0.1.1", "eth1"), name="a")
    b = FakeLibrary(fabric, connectx(address="10.0.0.2"), connectx("mlx5_1", "10.0.1.2", "eth1"), name="b")

    for (left, x), (right, y) in itertools.product(enumerate((a, a)), enumerate((b, b))):
        here, there = Endpoint(x, left), Endpoint(y, right)
        here.gid_index = there.gid_index = 3
        here.to_init()
        assert here.to_rtr(there) == (0 if left == right else errno.ETIMEDOUT)


def test_every_profile_shows_itself_in_sysfs(tmp_path: Path) -> None:
    library = FakeLibrary(None, connectx(), rxe(), infiniband("ib0"), irdma(), ionic(), erdma(), iwarp())

    write_sysfs(tmp_path, library)

    folder = tmp_path / "sys/class/infiniband"
    assert (folder / "mlx5_0/ports/1/gids/3").read_text() == "0000:0000:0000:0000:0000:ffff:0a0a:0001\n"
    assert (folder / "mlx5_0/ports/1/gid_attrs/types/3").read_text() == "RoCE v2\n"
    assert (folder / "ib0/ports/1/lid").read_text() == "0x11\n"
    assert len(list((tmp_path / "dev/infiniband").iterdir())) == 7


def test_completion_of_a_failure_has_no_opcode_to_read() -> None:
    pair = Pair()
    pair.a.post(pair.request(to=1))

    done: Polled = pair.a.poll()[0]

    assert done.opcode not in (0, 1, 2, 128, 129)
