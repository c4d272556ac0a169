"""host:port has one spelling: parsing and formatting undo each other, for names and both families, for every port."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.addresses import HostPort, check_host, choose_advertised_host, format_host_port, parse_host_port
from kvxfer.errors import ConfigError

PORTS = st.integers(0, 65535)
LABEL = st.from_regex(r"[a-zA-Z0-9]([a-zA-Z0-9_-]{0,20}[a-zA-Z0-9])?", fullmatch=True)
NAMES = st.lists(LABEL, min_size=1, max_size=4).map(".".join)
SCOPES = st.from_regex(r"[a-zA-Z0-9_.-]{1,15}", fullmatch=True)
IPV6 = st.ip_addresses(v=6).map(str)
HOSTS = st.one_of(
    NAMES,
    st.ip_addresses(v=4).map(str),
    IPV6,
    st.builds("{}%{}".format, IPV6, SCOPES),
)


@given(HOSTS, PORTS)
def test_parse_undoes_format_and_format_undoes_parse(host: str, port: int) -> None:
    text = format_host_port(host, port)

    parsed = parse_host_port(text)

    assert parsed == HostPort(host, port)
    assert format_host_port(parsed.host, parsed.port) == text


@given(HOSTS | st.text(max_size=40))
@example("[::1]")
@example("a:1")
def test_host_that_a_setting_takes_is_an_address_with_any_port(host: str) -> None:
    try:
        taken = check_host(host)
    except ValueError:
        return

    assert parse_host_port(format_host_port(taken, 1)) == HostPort(host, 1)


@given(HOSTS)
def test_host_without_a_port_is_taken_as_it_is(host: str) -> None:
    assert check_host(host) == host


@given(HOSTS, PORTS)
def test_default_port_fills_in_and_is_overruled(host: str, port: int) -> None:
    bare = f"[{host}]" if ":" in host else host

    assert parse_host_port(bare, default_port=port) == HostPort(host, port)
    assert parse_host_port(format_host_port(host, port), default_port=1) == HostPort(host, port)
    with pytest.raises(ConfigError, match="it has no port"):
        parse_host_port(bare)


@given(st.text(max_size=40) | st.from_regex(r"\[?[0-9a-f:.%]*\]?:?[0-9+ -]*", fullmatch=True))
@example("host:" + "9" * 5000)  # int() refuses so many digits with an error of its own
@example("host:٣")  # a digit to str.isdigit
@example("[fe80::1%]:1")
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        parsed = parse_host_port(text)
    except ConfigError as error:
        told = str(error)
    else:
        told = format_host_port(parsed.host, parsed.port)

    assert told == text or "Write it with the peer's port: 192.0.2.10:PORT, [2001:db8::1]:PORT" in told


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "its host is empty"),
        (":80", "its host is empty"),
        ("host", "no port"),
        ("host:", "no port follows the colon"),
        ("host:65536", "0 to 65535"),
        ("host:-1", "0 to 65535"),
        ("host:+1", "0 to 65535"),
        ("host: 1", "0 to 65535"),
        ("host:007", "0 to 65535"),
        ("host:http", "0 to 65535"),
        ("2001:db8::1", "needs brackets"),
        ("2001:db8::1:80", "needs brackets"),
        ("[2001:db8::1", "brackets"),
        ("[192.0.2.1]:80", "brackets"),
        ("[]:80", "brackets"),
        ("[::1]80", "follows the bracket"),
        ("tcp://host:80", "leave out tcp://"),
        ("http://127.0.0.1:4000", "leave out http://"),
        ("ho st:80", "its host has ' ' in it"),
        ("user@host:80", "its host has '@' in it"),
        ("192.0.2.1:80,192.0.2.2:80", "more than one address"),
        (None, "it is None, not text"),
        (b"host:80", "bytes"),
    ],
)
def test_what_is_no_address_says_why(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_host_port(text)


INTERFACES = [
    ("lo", "127.0.0.1"),
    ("docker0", "172.17.0.1"),
    ("eth0", "192.0.2.10"),
    ("lo", "::1"),
    ("eth0", "fe80::1"),
    ("eth0", "2001:db8::10"),
]


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.99", "::1", "node-3.example"])
def test_host_that_was_named_is_advertised_as_it_is(host: str) -> None:
    assert choose_advertised_host(host, INTERFACES, "192.0.2.10")[0] == host


@pytest.mark.parametrize(("wildcard", "route"), [("0.0.0.0", "192.0.2.10"), ("::", "2001:db8::10")])
def test_wildcard_becomes_the_source_of_the_default_route(wildcard: str, route: str) -> None:
    assert choose_advertised_host(wildcard, INTERFACES, route) == (
        route,
        "the source address of the default route",
        [],
    )


@pytest.mark.parametrize(("wildcard", "expected"), [("0.0.0.0", "192.0.2.10"), ("::", "2001:db8::10")])
def test_without_a_route_bridges_loopback_and_link_local_are_passed_over(wildcard: str, expected: str) -> None:
    host, _, warnings = choose_advertised_host(wildcard, INTERFACES, None)

    assert host == expected
    assert not warnings


def test_two_candidates_without_a_route_warn_with_both() -> None:
    host, _, warnings = choose_advertised_host("0.0.0.0", [*INTERFACES, ("eth1", "198.51.100.7")], None)

    assert host == "192.0.2.10"
    assert "192.0.2.10 (eth0), 198.51.100.7 (eth1)" in warnings[0]


def test_bridge_is_taken_when_nothing_else_is_left_and_loopback_last() -> None:
    host, _, warnings = choose_advertised_host("0.0.0.0", INTERFACES[:2], None)
    assert host == "172.17.0.1"
    assert warnings

    host, _, warnings = choose_advertised_host("0.0.0.0", INTERFACES[:1], None)
    assert host == "127.0.0.1"
    assert warnings


ADDRESSES = st.ip_addresses().map(str)


@example("0.0.0.0", [("lo", "0.0.0.0")], None)
@given(
    st.sampled_from(["0.0.0.0", "::"]),
    st.lists(st.tuples(st.sampled_from(["lo", "eth0", "docker0", "br-1"]), ADDRESSES), max_size=6),
    st.none() | ADDRESSES,
)
def test_a_wildcard_is_never_advertised(wildcard: str, interfaces: list[tuple[str, str]], route: str | None) -> None:
    host, reason, _ = choose_advertised_host(wildcard, interfaces, route)

    assert not ipaddress.ip_address(host).is_unspecified
    assert reason


@pytest.mark.parametrize("own", [[], [("eth0", "fe80::1")]])
def test_dual_stack_wildcard_without_a_global_ipv6_address_takes_the_ipv4_one(own: list[tuple[str, str]]) -> None:
    interfaces = [("lo", "127.0.0.1"), ("eth0", "192.0.2.10"), ("lo", "::1"), *own]  # B65, B71

    assert choose_advertised_host("::", interfaces, None)[0] == "192.0.2.10"
