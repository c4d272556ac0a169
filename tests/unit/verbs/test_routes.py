"""Routes of this machine, as its kernel has them: loopback is there everywhere, documentation networks nowhere."""

from __future__ import annotations

import ipaddress

import pytest

from kvxfer.verbs import routes
from kvxfer.verbs.routes import find_route

LOOPBACK = ipaddress.ip_address("127.0.0.1")


def test_loopback_reaches_itself() -> None:
    route = find_route(LOOPBACK, ipaddress.ip_address("127.0.0.2"))

    assert route.is_reachable
    assert (route.interface, route.gateway) == ("lo", None)
    assert str(route) == "by lo"


def test_interface_that_has_no_route_there_says_so() -> None:
    route = find_route(LOOPBACK, ipaddress.ip_address("192.0.2.1"), interface="lo")

    assert not route.is_reachable
    assert route.problem.startswith("no route from 127.0.0.1 to 192.0.2.1 by lo: ")


def test_source_that_is_no_address_of_this_host_has_no_route() -> None:
    assert not find_route(ipaddress.ip_address("203.0.113.77"), LOOPBACK).is_reachable


def test_families_are_not_mixed() -> None:
    route = find_route(LOOPBACK, ipaddress.ip_address("::1"))

    assert route.problem == "127.0.0.1 and ::1 are addresses of different families"


def test_interface_that_is_not_here_is_named() -> None:
    assert find_route(LOOPBACK, LOOPBACK, interface="nosuch0").problem == "there is no interface nosuch0 here"


def test_kernel_that_may_not_be_asked_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: bytes) -> bytes:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(routes, "_ask", refuse)

    route = find_route(LOOPBACK, LOOPBACK)

    assert route.is_reachable
    assert not route.problem
    assert str(route) == "unknown: the kernel does not tell its routes: Operation not permitted"
