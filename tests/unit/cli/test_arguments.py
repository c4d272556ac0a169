"""Words of a command line become values, or say what would be right."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cli import arguments
from kvxfer.cli.table import format_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("65536", 65536),
        ("64KiB", 65536),
        ("64 kib", 65536),
        ("64K", 65536),
        ("64k", 65536),
        ("1.5GiB", 3 << 29),
        ("1MB", 1_000_000),
        ("1B", 1),
        ("1TiB", 1 << 40),
    ],
)
def test_size_reads_binary_and_decimal_units(text: str, nbytes: int) -> None:
    assert arguments.size(text) == nbytes


@pytest.mark.parametrize("text", ["", "KiB", "12Q", "-4KiB", "0", "1.0000001KiB", "1e9", "0x10", "9999TiB", "64KiB,1"])
def test_size_refuses_and_quotes_the_word(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"size|bytes|range") as caught:
        arguments.size(text)

    assert repr(text) in str(caught.value)


@given(st.integers(1, (1 << 20) - 1), st.sampled_from([1, 1 << 10, 1 << 20, 1 << 30]))
def test_size_reads_what_format_size_writes_where_that_is_whole(number: int, unit: int) -> None:
    text = format_size(number * unit)

    if "." not in text:
        assert arguments.size(text) == number * unit


def test_list_drops_doubles_and_spaces_and_keeps_the_order() -> None:
    parse = arguments.listed(arguments.size)

    assert parse(" 64KiB, 4KiB ,64KiB,, 65536") == (65536, 4096)


def test_list_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="empty"):
        arguments.listed(arguments.transport)(" , ")


def test_unknown_transport_lists_those_there_are() -> None:
    with pytest.raises(ArgumentTypeError, match=r"'efa'.*shm, rdma, tcp"):
        arguments.listed(arguments.transport)("tcp,efa")


@pytest.mark.parametrize("text", ["192.0.2.7:7777", "gpu-node-3:1", "[2001:db8::7]:65535"])
def test_peer_is_taken_as_it_is(text: str) -> None:
    assert arguments.peer(text) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":7777", "host:x", "host:70000", "2001:db8::7:7777", "host:0"])
def test_peer_without_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        arguments.peer(text)


@pytest.mark.parametrize("text", ["-1", "65536", "http", "", "1.0"])
def test_port_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="65535"):
        arguments.port(text)


@pytest.mark.parametrize("text", ["0", "-3", "many", ""])
def test_counts_start_at_one(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="at least 1"):
        arguments.positive(text)
