"""The same calls on the real Mooncake and on kvxfer: equal, but for what the table says and docs/mooncake.md explains.

tests/compat holds kvxfer to the table; here the real engine is held to it, so that neither column is a mere belief.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.interop.environments import mooncake_python
from tests.support.mooncake_behaviour import CALLS, CRASH, Call
from tests.support.mooncake_programs import DiedError, Pair, RaisedError

pytestmark = [pytest.mark.interop, pytest.mark.slow]


@pytest.fixture(scope="module")
def real_pair() -> Iterator[Pair]:
    with contextlib.closing(Pair(mooncake_python())) as pair:
        yield pair


@pytest.mark.parametrize("call", [one for one in CALLS if one.mooncake != CRASH], ids=lambda call: call.name)
def test_the_real_engine_returns_what_the_table_says(real_pair: Pair, call: Call) -> None:
    try:
        found = real_pair.run(call.code)
    except RaisedError as raised:
        found = raised.kind

    assert found == call.mooncake


@pytest.mark.parametrize("call", [one for one in CALLS if one.mooncake == CRASH], ids=lambda call: call.name)
def test_the_real_engine_dies_where_the_table_says_so(call: Call) -> None:
    with contextlib.closing(Pair(mooncake_python())) as pair, pytest.raises(DiedError) as died:
        pair.run(call.code)

    assert died.value.status < 0
