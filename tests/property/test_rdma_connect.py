"""Connections between any two fake NICs, whatever they refuse and whichever calls fail.

After `open_segment` either both ends agree and bytes arrive, or one error shows every try; nothing is ever left behind,
and it always ends in time. Mutants that this caught: a try did not replace the one before it at the peer; either side
kept the queue pair of a try that failed; the opening side set its own read depth, not the agreed one. It found that the
diagnosis of a time-out on InfiniBand fell over.
"""

from __future__ import annotations

import errno
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.errors import KvxferError, RemoteProtocolError, TransportUnavailableError
from kvxfer.transports.rdma_ladder import QueuePairAttributes
from kvxfer.transports.rdma_wire import ConnectFailure, ConnectReply, ConnectRequest
from kvxfer.verbs.enums import Mtu, QueuePairState
from tests.support.fake_engines import Pair, fake_hosts
from tests.support.fake_verbs import FakeFabric, FakeNic, connectx, erdma, infiniband, ionic, irdma, rxe

ROCE: tuple[Callable[..., FakeNic], ...] = (connectx, rxe, irdma, ionic, erdma)
VERBS = (
    "ibv_create_comp_channel",
    "ibv_create_cq",
    "ibv_create_qp",
    "ibv_modify_qp",
    "ibv_query_qp",
    "ibv_query_port",
    "ibv_query_gid_table",
    "ibv_req_notify_cq",
    "ibv_poll_cq",
    "ibv_post_send",
)
POLLED = {"ibv_req_notify_cq", "ibv_poll_cq"}
ERRNOS = (errno.EINVAL, errno.ENOMEM, errno.ETIMEDOUT, errno.EPERM, errno.ENETUNREACH, errno.EIO)
CONNECT_S = 0.15
TRANSFER_S = 0.4
SLACK_S = 10.0
"""Much more than it takes: a busy machine stands still now and then."""

LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "max_qp_rd_atom": st.sampled_from([0, 1, 2, 16, 128]),
        "max_qp_init_rd_atom": st.sampled_from([0, 1, 4, 128]),
        "read_depth_max": st.sampled_from([0, 1, 3, 8]),
        "read_budget": st.sampled_from([1, 5, 16]),
        "read_budget_errno": st.sampled_from([errno.EINVAL, errno.ENOMEM]),
        "hop_limits": st.sampled_from([(0, 255), (0, 1), (255, 255), (65, 254)]),
        "max_qp_wr": st.sampled_from([2, 16, 100, 32768]),
        "granted_send_wr_max": st.sampled_from([1, 3, 60]),
        "send_queue_sges_max": st.sampled_from([8, 33, 255]),
        "max_cqe": st.sampled_from([15, 63, 4194303]),
        "cqe_is_rounded": st.booleans(),
        "create_state": st.sampled_from([QueuePairState.RESET, QueuePairState.INIT]),
        "refuses_reset_to_reset": st.booleans(),
        "destroy_cleans_completions": st.booleans(),
        "retry_7_is_for_ever": st.booleans(),
        "has_one_key": st.booleans(),
    },
)
FAULT = st.tuples(
    st.integers(0, 1), st.sampled_from(VERBS), st.sampled_from(ERRNOS), st.integers(1, 6), st.integers(1, 2)
)


@st.composite
def nics(draw: st.DrawFn) -> tuple[FakeNic, FakeNic]:
    is_infiniband = draw(st.booleans())
    found: list[FakeNic] = []
    for row in (1, 2):
        limits = draw(LIMITS)
        if is_infiniband:
            nic = infiniband(lid=0x10 + row, **limits)
            nic.ports[0].flags = draw(st.integers(0, 1))
        else:
            nic = draw(st.sampled_from(ROCE))(address=f"10.10.0.{row}", **limits)
        nic.ports[0].active_mtu = draw(st.sampled_from([Mtu.MTU_256, Mtu.MTU_1024, Mtu.MTU_4096]))
        nic.ports[0].max_msg_sz = draw(st.sampled_from([4096, 4097, 2**30]))
        found.append(nic)
    return found[0], found[1]


@given(
    nics(),
    st.lists(FAULT, max_size=4),
    st.sampled_from([16, 100, 256]),
    st.sampled_from(["post", "poll"]),
)
@example((connectx(address="10.10.0.1"), connectx(address="10.10.0.2")), [(0, "ibv_modify_qp", 22, 3, 1)], 256, "post")
@example((connectx(address="10.10.0.1"), connectx(address="10.10.0.2")), [(0, "ibv_modify_qp", 1, 2, 2)], 256, "post")
def test_both_ends_agree_or_one_error_tells_all(
    ends: tuple[FakeNic, FakeNic], faults: list[tuple[int, str, int, int, int]], depth: int, delivery: str
) -> None:
    fabric = FakeFabric(delivery=delivery)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as root, fake_hosts(Path(root), fabric) as hosts:
        pair = hosts.pair(
            *ends,
            nbytes=40_000,
            connect_timeout_s=CONNECT_S,
            transfer_timeout_s=TRANSFER_S,
            handshake_timeout_s=5.0,
            rdma_send_depth=depth,
        )
        for side, verb, number, nth, times in faults:
            pair.libraries[side].fail(verb, number, nth=nth, times=times)

        refusal: TransportUnavailableError | None = None
        try:
            pair.open()
        except TransportUnavailableError as error:
            refusal = error

        if refusal is None:
            check_agreement(pair)
            check_transfer(pair, may_break={verb for _, verb, *_ in faults} & POLLED)
        else:
            assert refusal.reasons["rdma"]
            check_nothing_is_left(pair)


def check_agreement(pair: Pair) -> None:
    """The opening end is ready to send, to a live queue pair of the peer that is ready to receive from it."""
    (ours,), theirs = pair.queue_pairs()
    peers = [qp for qp in theirs if qp.number == ours.attributes["dest_qp_num"]]
    assert len(theirs) == len(peers) == 1
    assert ours.state is QueuePairState.RTS
    assert peers[0].state in (QueuePairState.RTR, QueuePairState.RTS)
    assert peers[0].attributes["dest_qp_num"] == ours.number
    assert ours.attributes["max_rd_atomic"] <= peers[0].attributes["max_dest_rd_atomic"]
    assert ours.attributes["path_mtu"] == peers[0].attributes["path_mtu"]


def check_transfer(pair: Pair, *, may_break: Collection[str]) -> None:
    """A pattern arrives, or the batch fails and nothing moves after that.

    may_break: calls that fail and are made without a batch too: a connection may be gone that has just carried one.
    """
    try:
        pair.write(4000)
        assert pair.connected or may_break
    except KvxferError:
        seen = pair.there.copy()
        pair.fabric.run()
        assert (pair.there == seen).all()


def check_nothing_is_left(pair: Pair) -> None:
    """The peer drops what it made within a moment: it may be making it still."""
    until = time.monotonic() + SLACK_S
    while any(pair.queue_pairs()) and time.monotonic() < until:
        time.sleep(0.001)
    assert pair.queue_pairs() == ([], [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def _request() -> dict[str, Any]:
    offer = {
        "device": "mlx5_0",
        "port": 1,
        "link": 1,
        "lid": 5,
        "grh": False,
        "mtu": 5,
        "initiator_depth": 16,
        "responder_depth": 16,
        "message_max": 2**30,
        "pkey": 0xFFFF,
        "gids": [],
    }
    attributes = QueuePairAttributes(path_mtu=4096, read_depth=16).to_json()
    return {
        "connection": 1,
        "port": "mlx5_0:1",
        "offer": offer,
        "gid": "",
        "lid": 5,
        "qp_num": 17,
        "psn": 1,
        "attributes": attributes,
        "replaces": 0,
    }


@given(st.data())
def test_a_request_with_anything_in_it_is_taken_or_refused_by_name(data: st.DataObject) -> None:
    """B108: only RemoteProtocolError comes out; an unknown field more is ignored."""
    body = _request()
    place = data.draw(st.sampled_from([body, body["offer"], body["attributes"]]))
    name = data.draw(st.sampled_from(sorted(place)) | st.text(max_size=6))
    known = name in place
    place[name] = data.draw(JSON)

    try:
        request = ConnectRequest.from_json(body)
    except RemoteProtocolError:
        assert known
    else:
        assert ConnectRequest.from_json(request.to_json()) == request


@given(st.dictionaries(st.sampled_from(["qp_num", "psn", "failed", "other"]), JSON))
def test_a_reply_with_anything_in_it_is_taken_or_refused(body: dict[str, Any]) -> None:
    try:
        reply = ConnectReply.from_json(body, "peer")
    except (RemoteProtocolError, ConnectFailure):
        return

    assert 0 <= reply.qp_num < 1 << 24
    assert 0 <= reply.psn < 1 << 24
