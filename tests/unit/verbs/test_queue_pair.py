"""RC queue pairs over the fake library: steps, what is said where one fails, posting."""

from __future__ import annotations

import errno
import pickle
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvxfer.errors import ClosedError, PostError, QueuePairStateError, UsageError, VerbsError, VerbsLayoutError
from kvxfer.verbs.device import Context, list_devices
from kvxfer.verbs.enums import (
    Access,
    CompletionOpcode,
    CompletionStatus,
    Mtu,
    QueuePairMask,
    QueuePairState,
    WorkOpcode,
)
from kvxfer.verbs.library import errno_name, ffi
from kvxfer.verbs.port import AddressVector
from kvxfer.verbs.protection_domain import MemoryRegion
from kvxfer.verbs.queue_pair import QueuePair, QueuePairCapabilities
from kvxfer.verbs.work_request import WorkRequestBatch
from tests.support.fake_verbs import (
    FakeFabric,
    FakeLibrary,
    FakeNic,
    connectx,
    efa_like,
    gid,
    infiniband,
    ionic,
    irdma,
    iwarp,
    rxe,
)

INIT, RTR, RTS, ERR = QueuePairState.INIT, QueuePairState.RTR, QueuePairState.RTS, QueuePairState.ERR
CAPABILITIES = QueuePairCapabilities(max_send_wr=16, max_recv_wr=4)
PSN_A, PSN_B = 0x123456, 0xFFFFFE
MEMORY_NBYTES = 4096


class End:
    """One device of one host, with a queue pair and 4 KiB of registered memory."""

    def __init__(self, fabric: FakeFabric, nic: FakeNic, stack: ExitStack, **capabilities: int) -> None:
        self.library = FakeLibrary(fabric, nic, name=nic.name)
        stack.callback(self.keep)
        self.context: Context = stack.enter_context(list_devices(self.library)[0].open())
        self.completions = self.context.create_cq(64)
        self.domain = self.context.alloc_pd()
        self.memory = np.zeros(MEMORY_NBYTES, np.uint8)
        access = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
        self.region: MemoryRegion = self.domain.register(self.memory.ctypes.data, MEMORY_NBYTES, access)
        self.made: list[QueuePair] = []
        self.queue_pair = self.make(**capabilities)

    def keep(self) -> None:
        """Be referred to: what a test drops lives until its context is closed."""

    def make(self, **capabilities: int) -> QueuePair:
        wanted = QueuePairCapabilities(**{"max_send_wr": 16, "max_recv_wr": 4, **capabilities})
        self.made.append(self.domain.create_qp(self.completions, capabilities=wanted))
        return self.made[-1]

    def address_of(self, peer: End, index: int = 1, **changes: Any) -> AddressVector:
        gids = peer.library.devices[0].nic.port(1).gids
        value = gids[max(gids)].value if gids else bytes(16)
        fields: dict[str, Any] = {"port": 1, "is_global": True, "dgid": value, "sgid_index": index, "hop_limit": 64}
        return AddressVector(**{**fields, **changes})

    def to_rtr(self, peer: End, **changes: Any) -> None:
        given: dict[str, Any] = {
            "address": self.address_of(peer),
            "dest_qp_num": peer.queue_pair.number,
            "path_mtu": Mtu.MTU_4096,
            "rq_psn": 1,
            "max_dest_rd_atomic": 4,
        }
        self.queue_pair.to_rtr(**{**given, **changes})

    def batch(self, peer: End, count: int = 3, opcode: WorkOpcode = WorkOpcode.RDMA_WRITE) -> WorkRequestBatch:
        """Return `count` blocks of 64 bytes each."""
        batch = WorkRequestBatch(16)
        at = np.arange(count) * 64
        batch.fill(
            opcode,
            local_addr=self.region.address + at,
            lkey=self.region.lkey,
            remote_addr=peer.region.address + at,
            rkey=peer.region.rkey,
            nbytes=64,
            wr_id=100,
        )
        return batch

    def complete(self) -> list[tuple[int, int]]:
        """Return (wr_id, status) of what has completed."""
        rows = self.completions.poll()
        return [(int(row["wr_id"]), int(row["status"])) for row in rows]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_pair(stack: ExitStack, a: FakeNic | None = None, b: FakeNic | None = None, **capabilities: int) -> list[End]:
    fabric = FakeFabric()
    nics = (a or rxe("rxa0", "10.0.0.1", "va0"), b or rxe("rxb0", "10.0.0.2", "vb0"))
    return [End(fabric, nic, stack, **capabilities) for nic in nics]


def connect(a: End, b: End) -> None:
    for one, other, own_psn, other_psn in ((a, b, PSN_A, PSN_B), (b, a, PSN_B, PSN_A)):
        one.queue_pair.to_init(port=1)
        one.to_rtr(other, rq_psn=other_psn)
        one.queue_pair.to_rts(sq_psn=own_psn, max_rd_atomic=4, retry_cnt=6)


# Making one.


def test_a_queue_pair_is_made_with_what_was_granted(stack: ExitStack) -> None:
    nic = rxe(granted_send_wr_max=8)
    end = make_pair(stack, nic)[0]

    assert end.queue_pair.capabilities == QueuePairCapabilities(max_send_wr=8, max_recv_wr=4)
    assert end.queue_pair.state is QueuePairState.RESET
    assert end.queue_pair.number == end.library.queue_pairs[0].number


def test_one_that_the_device_does_not_grant_says_what_was_asked_and_what_is_allowed(stack: ExitStack) -> None:
    end = make_pair(stack, connectx())[0]

    with pytest.raises(VerbsError) as caught:
        end.make(max_send_wr=100_000)

    error = caught.value
    assert "max_send_wr 100000, the device allows 32768 (max_qp_wr)" in str(error)
    assert "max_sge 30 and 131072 queue pairs" in str(error)
    assert (error.verb, error.errno, error.device) == ("ibv_create_qp", errno.EINVAL, "mlx5_0")
    assert str(error).endswith("Ask for 32768 at most.")


@pytest.mark.parametrize(
    ("nic", "capabilities", "word"),
    [
        (irdma(), {"max_inline_data": 220}, "max_inline_data 220"),
        (efa_like(), {}, "no RC queue pairs"),
        (connectx(send_queue_sges_max=100), {"max_send_sge": 30}, "do not fit any more"),
    ],
)
def test_a_refused_queue_pair_has_a_culprit(nic: FakeNic, capabilities: dict[str, int], word: str) -> None:
    library = FakeLibrary(FakeFabric(), nic)
    with list_devices(library)[0].open() as context:
        domain, completions = context.alloc_pd(), context.create_cq(8)
        with pytest.raises(VerbsError, match=word):
            domain.create_qp(completions, capabilities=QueuePairCapabilities(**{"max_send_wr": 16, **capabilities}))
    assert not library.leaks


def test_a_library_with_another_layout_is_refused_before_anything_is_posted(stack: ExitStack) -> None:
    end = make_pair(stack)[0]
    create = end.library.ibv_create_qp

    def shifted(pd: Any, attributes: Any) -> Any:
        pointer = create(pd, attributes)
        pointer.recv_cq = ffi.NULL
        return pointer

    end.library.ibv_create_qp = shifted  # type: ignore[method-assign]

    with pytest.raises(VerbsLayoutError, match=r"ibv_qp\.recv_cq is not what"):
        end.make()


def test_a_device_that_begins_in_init_is_taken_as_it_is(stack: ExitStack) -> None:
    nic = iwarp()
    nic.port(1).gids[0] = gid("10.0.0.1", ndev="eth0")
    nic.port(1).gid_tbl_len = 1
    end = make_pair(stack, nic)[0]

    assert end.queue_pair.state is INIT
    end.queue_pair.to_init(port=1)
    assert end.queue_pair.state is INIT


def test_a_closed_queue_pair_takes_no_calls(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    batch = a.batch(b)
    a.queue_pair.close()
    a.queue_pair.close()

    for call in (
        lambda: a.queue_pair.to_init(port=1),
        a.queue_pair.to_error,
        a.queue_pair.query,
        lambda: a.queue_pair.post_send(batch),
        lambda: a.queue_pair.post_receives(1),
    ):
        with pytest.raises(ClosedError, match="queue pair is closed"):
            call()


# Steps.


def test_each_step_is_given_exactly_the_attributes_it_needs(stack: ExitStack) -> None:
    a, b = make_pair(stack, irdma())
    given: list[tuple[QueuePairState, QueuePairMask]] = []
    modify = a.library.ibv_modify_qp

    def record(qp: Any, attributes: Any, mask: int) -> int:
        given.append((QueuePairState(attributes.qp_state), QueuePairMask(mask)))
        return modify(qp, attributes, mask)

    a.library.ibv_modify_qp = record  # type: ignore[method-assign]
    for _ in range(2):  # connect, disconnect, connect again: a device that refuses RESET->RESET is never asked for it
        connect(a, b)
        a.queue_pair.to_error()
        a.queue_pair.close()
        b.queue_pair.close()
        a.queue_pair, b.queue_pair = a.make(), b.make()

    mask = QueuePairMask
    assert given[:4] == given[4:]
    assert given[:4] == [
        (INIT, mask.STATE | mask.PORT | mask.PKEY_INDEX | mask.ACCESS_FLAGS),
        (
            RTR,
            mask.STATE | mask.AV | mask.PATH_MTU | mask.DEST_QPN | mask.RQ_PSN | mask.MAX_DEST_RD_ATOMIC
            | mask.MIN_RNR_TIMER,
        ),
        (
            RTS,
            mask.STATE | mask.SQ_PSN | mask.TIMEOUT | mask.RETRY_CNT | mask.RNR_RETRY | mask.MAX_QP_RD_ATOMIC,
        ),
        (ERR, mask.STATE),
    ]  # fmt: skip


def test_the_device_gets_every_value_as_given(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    address = a.address_of(
        b, traffic_class=104, flow_label=0xABCDE, sl=3, src_path_bits=1, static_rate=2, hop_limit=255, dlid=0
    )
    a.queue_pair.to_init(port=1, pkey_index=0, access=Access.REMOTE_WRITE)
    a.to_rtr(b, address=address, path_mtu=Mtu.MTU_1024, rq_psn=0xFFFFFF, max_dest_rd_atomic=7, min_rnr_timer=31)
    a.queue_pair.to_rts(sq_psn=0xABCDEF, max_rd_atomic=5, timeout=31, retry_cnt=3, rnr_retry=2)

    told = a.queue_pair.query()

    assert told["ah_attr"] == address
    expected = {
        "qp_state": RTS,
        "port_num": 1,
        "pkey_index": 0,
        "qp_access_flags": Access.REMOTE_WRITE,
        "path_mtu": Mtu.MTU_1024,
        "dest_qp_num": b.queue_pair.number,
        "rq_psn": 0xFFFFFF,
        "max_dest_rd_atomic": 7,
        "min_rnr_timer": 31,
        "sq_psn": 0xABCDEF,
        "max_rd_atomic": 5,
        "timeout": 31,
        "retry_cnt": 3,
        "rnr_retry": 2,
        "cap": a.queue_pair.capabilities,
    }
    assert {name: told[name] for name in expected} == expected
    assert a.queue_pair.attributes["ah_attr"] == address


def test_a_missing_attribute_is_named_and_nothing_is_called(stack: ExitStack) -> None:
    end = make_pair(stack)[0]

    with pytest.raises(QueuePairStateError) as caught:
        end.queue_pair.modify(INIT, port_num=1, pkey_index=0)

    error = caught.value
    assert "qp_access_flags is missing" in str(error)
    assert "RESET->INIT needs port_num, pkey_index, qp_access_flags." in str(error)
    assert (error.culprit, error.transition, error.called) == ("qp_access_flags", "RESET->INIT", False)  # type: ignore[attr-defined]
    assert error.attributes == {"port_num": 1, "pkey_index": 0}
    assert end.library.calls["ibv_modify_qp"] == 0
    assert end.queue_pair.state is QueuePairState.RESET


def test_a_peer_without_a_gid_is_refused_before_the_call(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    a.queue_pair.to_init(port=1)

    with pytest.raises(QueuePairStateError, match="dgid is zero"):
        a.to_rtr(b, address=a.address_of(b, dgid=bytes(16)))
    with pytest.raises(QueuePairStateError, match="Ethernet"):
        a.to_rtr(b, address=a.address_of(b, is_global=False))

    assert a.library.calls["ibv_modify_qp"] == 1


def test_an_address_on_another_port_is_refused_before_the_call(stack: ExitStack) -> None:
    nic = rxe("rxa0", "10.0.0.1", "va0")
    nic.ports.append(nic.ports[0])
    a, b = make_pair(stack, nic)
    a.queue_pair.to_init(port=1)

    with pytest.raises(QueuePairStateError, match="address vector is on port 2, the queue pair on port 1"):
        a.to_rtr(b, address=a.address_of(b, port=2))


def test_an_unknown_attribute_is_a_wrong_call(stack: ExitStack) -> None:
    end = make_pair(stack)[0]

    with pytest.raises(UsageError, match=r"'qkey' is no attribute.*path_mtu"):
        end.queue_pair.modify(INIT, qkey=1)


def test_infiniband_without_a_global_route_connects_by_lid(stack: ExitStack) -> None:
    a, b = make_pair(stack, infiniband("mlx5_0", 1), infiniband("mlx5_1", 2))
    a.queue_pair.to_init(port=1)

    a.to_rtr(b, address=AddressVector(port=1, is_global=False, dlid=2))

    assert a.queue_pair.state is RTR


def test_a_step_is_logged_and_remembered_whole(stack: ExitStack) -> None:
    a, b = make_pair(stack)

    with capture_logs() as events:
        connect(a, b)

    mine = [event for event in events if event["device"] == "rxa0"]
    assert [event["transition"] for event in mine] == ["RESET->INIT", "INIT->RTR", "RTR->RTS"]
    assert {event["event"] for event in events} == {"queue_pair.modified"}
    assert mine[1]["ah_attr"]["dgid"] == "::ffff:10.0.0.2"
    assert (mine[1]["path_mtu"], mine[2]["sq_psn"]) == (4096, PSN_A)
    told = repr(a.queue_pair)
    assert told.startswith(f"<QueuePair device=rxa0 number={a.queue_pair.number} state=RTS max_send_wr=16")
    assert "INIT->RTR=(ah_attr (port 1, is_global True, dgid ::ffff:10.0.0.2, sgid_index 1, hop_limit 64" in told
    assert f"RTR->RTS=(sq_psn {PSN_A}, max_rd_atomic 4, timeout 18, retry_cnt 6, rnr_retry 7)" in told


# Steps that fail.


def fail_rtr(stack: ExitStack, nic: FakeNic | None = None, error: int = 0, **changes: Any) -> QueuePairStateError:
    """Return the error of a step to RTR that the device refuses."""
    a, b = make_pair(stack, nic)
    a.queue_pair.to_init(port=1)
    if error:
        a.library.fail("ibv_modify_qp", error)
    address = a.address_of(b, **changes.pop("address", {}))
    with pytest.raises(QueuePairStateError) as caught:
        a.to_rtr(b, address=address, **changes)
    assert a.queue_pair.state is INIT
    return caught.value


def test_a_failed_step_tells_the_whole_story(stack: ExitStack) -> None:
    error = fail_rtr(stack, rxe("rxa0", "10.0.0.1", "va0", max_qp_rd_atom=4), max_dest_rd_atomic=16)

    told = str(error)
    assert re.match(r"ibv_modify_qp\(queue pair \d+ on rxa0, INIT->RTR\) failed: EINVAL \(Invalid argument\)\.", told)
    assert "Likely: max_dest_rd_atomic 16, the device allows 4 (max_qp_rd_atom)." in told
    for given in ("path_mtu 4096", "rq_psn 1", "min_rnr_timer 12", "sgid_index 1", "hop_limit 64", "traffic_class 0"):
        assert given in told
    for allowed in ("active MTU 4096 of 4096", "GID table of 1024 rows", "GID row 1 is ::ffff:10.0.0.1 on "):
        assert allowed in told
    assert told.endswith("Give 4 at most, and no more than the peer offers.")
    assert (error.culprit, error.transition, error.errno) == ("max_dest_rd_atomic", "INIT->RTR", errno.EINVAL)
    assert error.attributes["max_dest_rd_atomic"] == 16
    assert error.attributes["ah_attr"]["dgid"] == "::ffff:10.0.0.2"


def test_the_error_survives_pickling(stack: ExitStack) -> None:
    error = fail_rtr(stack, error=errno.ETIMEDOUT)

    again = pickle.loads(pickle.dumps(error))

    assert str(again) == str(error)
    assert again.attributes == error.attributes
    assert again.suspects == error.suspects  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("index", "why"), [(5, "sgid_index 5 is an empty row"), (200, "sgid_index 200 is an empty row")]
)
def test_a_source_row_that_is_empty_is_blamed(stack: ExitStack, index: int, why: str) -> None:
    error = fail_rtr(stack, address={"sgid_index": index})

    assert error.culprit == "sgid_index"
    assert why in str(error)
    assert re.search(r"0 \(fe80::ff:fe0a:0:1 on \w+, RoCE v2\), 1 \(::ffff:10\.0\.0\.1 on \w+, RoCE v2\)", error.remedy)


def test_a_source_row_beyond_the_table_is_blamed(stack: ExitStack) -> None:
    error = fail_rtr(stack, irdma("rxa0", "10.0.0.1", "va0"), address={"sgid_index": 99})

    assert "sgid_index 99 is beyond the 32 rows of the GID table" in str(error)


def test_a_hop_limit_that_a_device_refuses_is_a_suspect(stack: ExitStack) -> None:
    nic = rxe("rxa0", "10.0.0.1", "va0", hop_limits=(2, 255))
    error = fail_rtr(stack, nic, address={"hop_limit": 0})

    assert "hop_limit" in [culprit for culprit, _, _ in error.suspects]  # type: ignore[attr-defined]


def test_a_peer_that_does_not_answer_is_named_with_both_gids(stack: ExitStack) -> None:
    error = fail_rtr(stack, address={"dgid": gid("10.9.9.9").value})

    assert error.errno == errno.ETIMEDOUT
    assert error.culprit == "dgid"
    assert "peer GID ::ffff:10.9.9.9" in str(error)
    assert "from ::ffff:10.0.0.1 on " in str(error)


@pytest.mark.parametrize(
    ("error", "culprit"),
    [
        (errno.ETIMEDOUT, "dgid"),
        (errno.ENETUNREACH, "dgid"),
        (errno.EHOSTUNREACH, "dgid"),
        (errno.ENOMEM, "max_dest_rd_atomic"),
        (errno.ENODEV, "sgid_index"),
        (errno.EOPNOTSUPP, errno_name(errno.EOPNOTSUPP)),
        (errno.EIO, "EIO"),
    ],
)
def test_every_error_number_has_its_likely_culprit(stack: ExitStack, error: int, culprit: str) -> None:
    caught = fail_rtr(stack, error=error)

    assert (caught.errno, caught.culprit) == (error, culprit)


def test_a_library_that_leaves_the_number_in_errno_is_understood(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    a.queue_pair.to_init(port=1)

    def fail(qp: Any, attributes: Any, mask: int) -> int:
        ffi.errno = errno.ETIMEDOUT
        return -1

    a.library.ibv_modify_qp = fail  # type: ignore[method-assign]

    with pytest.raises(QueuePairStateError, match="ETIMEDOUT"):
        a.to_rtr(b)


def test_the_second_queue_pair_of_a_device_with_16_reads_is_told_who_has_them(stack: ExitStack) -> None:
    nic = ionic()
    a, b = make_pair(stack, nic)
    own = a.address_of(b, index=0, dgid=b.library.devices[0].nic.port(1).gids[0].value)
    a.queue_pair.to_init(port=1)
    a.to_rtr(b, address=own, max_dest_rd_atomic=16)
    second = a.make()
    second.to_init(port=1)

    with pytest.raises(QueuePairStateError) as caught:
        second.to_rtr(address=own, dest_qp_num=1, path_mtu=Mtu.MTU_4096, rq_psn=0, max_dest_rd_atomic=16)

    assert caught.value.culprit == "max_dest_rd_atomic"
    assert "the whole device has 16 (max_res_rd_atom), and this process's other queue pairs hold 16" in str(
        caught.value
    )


def test_eight_queue_pairs_share_16_reads(stack: ExitStack) -> None:
    a, b = make_pair(stack, ionic())
    own = a.address_of(b, index=0, dgid=b.library.devices[0].nic.port(1).gids[0].value)
    share = a.context.limits.max_res_rd_atom // 8

    for _ in range(8):
        one = a.make()
        one.to_init(port=1)
        one.to_rtr(address=own, dest_qp_num=1, path_mtu=Mtu.MTU_4096, rq_psn=0, max_dest_rd_atomic=share)
        one.to_rts(sq_psn=0, max_rd_atomic=share)
        assert one.state is RTS


def test_reset_to_reset_on_intel_says_that_intel_refuses_it(stack: ExitStack) -> None:
    end = make_pair(stack, irdma())[0]

    with pytest.raises(QueuePairStateError, match=r"RESET->RESET.*irdma.*straight to INIT"):
        end.queue_pair.modify(QueuePairState.RESET)


def test_a_partition_key_index_beyond_the_table_is_told_with_both_numbers(stack: ExitStack) -> None:
    end = make_pair(stack)[0]

    with pytest.raises(QueuePairStateError, match="pkey_index 7, the port's table has 1 rows"):
        end.queue_pair.to_init(port=1, pkey_index=7)


def test_a_port_that_does_not_exist_is_told_with_the_number_of_ports(stack: ExitStack) -> None:
    end = make_pair(stack)[0]

    with pytest.raises(QueuePairStateError, match="port 2, the device has 1"):
        end.queue_pair.to_init(port=2)


def test_a_queue_pair_that_the_device_has_stopped_says_so(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    connect(a, b)
    a.library.queue_pairs[0].to_error()

    assert a.queue_pair.query()["qp_state"] is ERR
    with pytest.raises(QueuePairStateError, match="is in ERR, no longer in RTS"):
        a.queue_pair.modify(RTS, min_rnr_timer=14)


def test_a_device_that_died_fails_with_what_is_known(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    a.queue_pair.to_init(port=1)
    a.library.remove_device("rxa0")

    with pytest.raises(QueuePairStateError, match="EIO") as caught:
        a.to_rtr(b)
    with pytest.raises(VerbsError, match="ibv_query_qp"):
        a.queue_pair.query()

    assert caught.value.culprit == "EIO"


# Posting.


@pytest.mark.parametrize("opcode", [WorkOpcode.RDMA_WRITE, WorkOpcode.RDMA_READ])
def test_a_batch_moves_its_blocks_and_completes_once(stack: ExitStack, opcode: WorkOpcode) -> None:
    a, b = make_pair(stack)
    connect(a, b)
    source, target = (a, b) if opcode is WorkOpcode.RDMA_WRITE else (b, a)
    source.memory[:] = np.arange(MEMORY_NBYTES) % 251

    a.queue_pair.post_send(a.batch(b, 3, opcode))

    assert a.complete() == [(102, CompletionStatus.SUCCESS)]
    assert np.array_equal(target.memory[:192], source.memory[:192])
    assert not target.memory[192:].any()
    assert a.library.calls["ibv_post_send"] == 1


def test_a_notice_arrives_after_the_data_with_its_number(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    connect(a, b)
    b.queue_pair.post_receives(2)
    a.memory[:] = 7
    batch = a.batch(b, 2)
    batch.append_notice(0xDEADBEEF, wr_id=5)

    a.queue_pair.post_send(batch)

    (told,) = b.completions.poll()
    assert (told["opcode"], told["imm_data"]) == (CompletionOpcode.RECV_RDMA_WITH_IMM, 0xDEADBEEF)
    assert (b.memory[:128] == 7).all()
    assert a.complete() == [(5, CompletionStatus.SUCCESS)]


def test_only_the_first_of_a_chain_can_be_posted_and_later_the_rest(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    connect(a, b)
    a.memory[:] = 9

    a.queue_pair.post_send(a.batch(b, 3), 2)

    assert a.complete() == [(101, CompletionStatus.SUCCESS)]
    assert (b.memory[:128] == 9).all()
    assert not b.memory[128:].any()
    a.queue_pair.post_send(a.batch(b, 3), start=2)
    assert a.complete() == [(102, CompletionStatus.SUCCESS)]
    assert (b.memory[128:192] == 9).all()


def test_a_full_send_queue_says_how_many_were_taken(stack: ExitStack) -> None:
    a, b = make_pair(stack, max_send_wr=4)
    connect(a, b)
    batch = a.batch(b, 6)

    with pytest.raises(PostError) as caught:
        a.queue_pair.post_send(batch)

    error = caught.value
    assert (error.posted_count, error.bad_index, error.errno) == (4, 4, errno.ENOMEM)  # type: ignore[attr-defined]
    assert "number 4 (RDMA_WRITE, 64 bytes, local 0x" in str(error)
    assert "the 4 before it were taken" in str(error)
    assert "it holds 4" in error.remedy


@pytest.mark.parametrize("row", [0, 1, 4])
@pytest.mark.parametrize("start", [0, 2])
def test_a_request_refused_in_the_middle_is_found(stack: ExitStack, row: int, start: int) -> None:
    a, b = make_pair(stack)
    connect(a, b)
    a.library.fail("ibv_post_send", errno.EINVAL, row=row)

    with pytest.raises(PostError) as caught:
        a.queue_pair.post_send(a.batch(b, 8), start=start)

    error = caught.value
    assert (error.posted_count, error.bad_index) == (row, start + row)  # type: ignore[attr-defined]
    assert f"local {a.region.address + 64 * (start + row):#x}" in str(error)


def test_a_driver_that_does_not_say_where_it_stopped_is_not_guessed_at(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    connect(a, b)
    batch = a.batch(b)
    a.library.fail("ibv_post_send", errno.EINVAL, row=1)
    with pytest.raises(PostError, match="the 1 before it"):
        a.queue_pair.post_send(batch)
    a.queue_pair._post_send = lambda qp, wr, bad: errno.EINVAL

    with pytest.raises(PostError, match="does not say how many") as caught:
        a.queue_pair.post_send(batch)

    assert caught.value.bad_index == -1  # type: ignore[attr-defined]


def test_posting_before_rts_says_what_is_missing(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    a.queue_pair.to_init(port=1)

    with pytest.raises(PostError, match=r"brought to INIT; sending needs RTS"):
        a.queue_pair.post_send(a.batch(b))
    with pytest.raises(UsageError, match="nothing to post"):
        a.queue_pair.post_send(WorkRequestBatch(4))
    with pytest.raises(UsageError, match="nothing to post"):
        a.queue_pair.post_send(a.batch(b, 3), start=3)


def test_a_full_receive_queue_says_how_many_were_taken(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    connect(a, b)
    b.queue_pair.post_receives(3)

    with pytest.raises(PostError, match="receive queue is full") as caught:
        b.queue_pair.post_receives(2)
    with pytest.raises(UsageError, match="5 receives"):
        b.queue_pair.post_receives(5)
    with pytest.raises(UsageError, match="0 receives"):
        b.queue_pair.post_receives(0)

    assert caught.value.posted_count == 1


def test_receives_can_be_posted_in_any_portions(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    connect(a, b)

    for count in (1, 4, 2, 4, 3):
        b.queue_pair.post_receives(count)
        for imm in range(count):
            batch = WorkRequestBatch(1)
            batch.append_notice(imm)
            a.queue_pair.post_send(batch)
            a.complete()
        assert [int(row["imm_data"]) for row in b.completions.poll()] == list(range(count))


def test_the_error_state_flushes_what_was_posted(stack: ExitStack) -> None:
    a, b = make_pair(stack)
    connect(a, b)
    b.queue_pair.post_receives(3)

    b.queue_pair.to_error()

    assert b.queue_pair.state is ERR
    assert [status for _, status in b.complete()] == [CompletionStatus.WR_FLUSH_ERR] * 3
