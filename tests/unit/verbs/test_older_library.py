"""Calls that are macros in C, and symbols that an older libibverbs lacks: what is called instead, with which bits."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.verbs.enums import Access
from kvxfer.verbs.library import LoadedLibrary

WRITE = int(Access.LOCAL_WRITE | Access.REMOTE_WRITE)
RELAXED = WRITE | int(Access.RELAXED_ORDERING)


class Symbols:
    """What cffi sees of a libibverbs, as far as registration goes: one that refuses every bit it does not know."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def ibv_reg_mr(self, pd: Any, address: int, nbytes: int, access: int) -> str:
        self.calls.append(("ibv_reg_mr", access))
        return "" if access >> 20 else "mr"


class NewerSymbols(Symbols):
    """It has what came with rdma-core 28 too."""

    def ibv_reg_mr_iova2(self, pd: Any, address: int, nbytes: int, iova: int, access: int) -> str:
        assert iova == address
        self.calls.append(("ibv_reg_mr_iova2", access))
        return "mr"


@pytest.mark.parametrize(
    ("symbols", "access", "called"),
    [
        (Symbols, WRITE, ("ibv_reg_mr", WRITE)),
        (Symbols, RELAXED, ("ibv_reg_mr", WRITE)),
        (NewerSymbols, WRITE, ("ibv_reg_mr", WRITE)),
        (NewerSymbols, RELAXED, ("ibv_reg_mr_iova2", RELAXED)),
    ],
)
def test_optional_access_goes_by_the_newer_symbol_or_is_left_out(
    symbols: type[Symbols], access: int, called: tuple[str, int]
) -> None:
    """B60: an older library works, without the bit."""
    lib = symbols()

    made = LoadedLibrary("libibverbs.so.1", lib).ibv_reg_mr(None, 0x1000, 4096, access)

    assert made == "mr"
    assert lib.calls == [called]


def test_table_of_an_older_library_is_told_as_unsupported() -> None:
    """B58: whoever asks goes on row by row (test_gid_table.py)."""
    import errno

    assert LoadedLibrary("libibverbs.so.1", Symbols()).ibv_query_gid_table(None, None, 8) == -errno.EOPNOTSUPP


def test_relaxed_ordering_is_not_asked_for_by_itself() -> None:
    """B60: with it, data may arrive in any order."""
    from kvxfer.memory.registration import access_for
    from kvxfer.types import Rights

    assert not access_for(Rights.ALL) & Access.RELAXED_ORDERING
