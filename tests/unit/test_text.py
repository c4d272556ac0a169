"""Texts for messages: reasons are joined without doubled stops, times have three digits."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.text import format_count, format_seconds, guess_protocol, join_reasons, name_kind


def test_reasons_are_joined_with_and_without_their_stops() -> None:
    assert join_reasons({"rdma": "it gives ENOSYS.", "tcp": "not offered"}) == "rdma: it gives ENOSYS; tcp: not offered"
    assert join_reasons({}) == ""


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(2.99956, "3"), (0.0123456, "0.0123"), (30.0, "30"), (0.5, "0.5"), (999.7, "1000"), (86400.0, "86400")],
)
def test_times_have_three_digits(seconds: float, told: str) -> None:
    assert format_seconds(seconds) == told


def test_protocols_are_known_by_their_first_bytes() -> None:
    assert guess_protocol(b"HTTP/1.1 400") == "an HTTP server"
    assert guess_protocol(b"\0\0\0") == ""


@pytest.mark.parametrize(
    ("value", "told"), [(1, "an int"), ("", "a str"), (b"", "bytes"), (None, "None"), (np.zeros(1), "an ndarray")]
)
def test_kinds_have_their_article(value: object, told: str) -> None:
    assert name_kind(value) == told


def test_one_is_counted_in_the_singular() -> None:
    assert [format_count(count, "row") for count in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
