"""The table of what calls return, held against kvxfer; two processes, over shared memory and over tcp alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.mooncake_behaviour import CALLS, Call
from tests.support.mooncake_programs import Pair, RaisedError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["shm,tcp", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(KVXFER_TRANSPORTS=request.param)
    yield pair
    pair.close()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_call_returns_what_the_table_says(pair: Pair, call: Call) -> None:
    if "rdma" in call.name:
        pytest.skip("KVXFER_TRANSPORTS decides here; see test_initialize")

    try:
        found = pair.run(call.code)
    except RaisedError as raised:
        found = raised.kind

    assert found == call.kvxfer, pair.initiator.log()[-2000:]


def test_names_of_calls_are_used_once() -> None:
    names = [call.name for call in CALLS]

    assert len(set(names)) == len(names)
