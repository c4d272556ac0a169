"""The same calls on the real Mooncake and on kvxfer: equal, but for what the table says and docs/mooncake.md explains.

tests/compat holds kvxfer to the table; here the real engine is held to it, so that neither column is a mere belief.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator

import pytest

from kvxfer.compat import mooncake
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


def test_methods_take_the_arguments_that_the_real_ones_take(real_pair: Pair) -> None:
    """pybind11 writes each signature into the docstring; arg0, arg1 are those that have no name."""
    texts = real_pair.run(
        "[(n, getattr(m.TransferEngine, n).__doc__.splitlines()[0]) for n in dir(m.TransferEngine) "
        "if callable(getattr(m.TransferEngine, n)) and '(self' in (getattr(m.TransferEngine, n).__doc__ or '')[:60] "
        "and n[0] != '_']"
    )

    theirs = {name: re.findall(r", (\w+): [^,=]+(?: = ([^,)]+))?(?=[,)])", text) for name, text in texts}

    assert len(theirs) == 30
    for name, parameters in theirs.items():
        method = inspect.signature(getattr(mooncake.TransferEngine, name))
        ours = list(method.parameters.values())[1:]
        found = [
            (
                f"arg{at}" if one.kind is inspect.Parameter.POSITIONAL_ONLY else one.name,
                "" if one.default is inspect.Parameter.empty else repr(one.default),
            )
            for at, one in enumerate(ours)
        ]
        assert found == [tuple(one) for one in parameters], name
