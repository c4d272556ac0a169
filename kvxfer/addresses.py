"""Hosts, and host:port as text and back; the choice of the address that an engine tells its peers. Resolves nothing."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.errors import ConfigError
from kvxfer.text import clean, name_kind, show

__all__ = [
    "HostPort",
    "check_advertised_host",
    "check_host",
    "choose_advertised_host",
    "format_host_port",
    "is_wildcard",
    "parse_host_port",
]

EXAMPLES = (
    "Write it with the peer's port: 192.0.2.10:PORT, [2001:db8::1]:PORT, [fe80::1%eth0]:PORT or name.example:PORT."
)

_PORT = re.compile("0|[1-9][0-9]{0,4}")
"""No sign, blank or leading zero: a port has one spelling, so that parsing and formatting undo each other."""


@dataclass(frozen=True)
class HostPort:
    """A host (name or address, an IPv6 one without brackets) and a port."""

    host: str
    port: int


def parse_host_port(text: str, default_port: int | None = None) -> HostPort:
    """Return the host and port of an address; `format_host_port` gives back the same text.

    Raises ConfigError that says what is wrong with it.
    """
    if not isinstance(text, str):
        raise _refuse(text, f"it is {name_kind(text)}, not text")
    scheme, is_url, _ = text.partition("://")
    if is_url:
        raise _refuse(text, f"it is a URL; leave out {scheme}://")
    if "," in text:
        raise _refuse(text, "it is more than one address")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not _is_ipv6(host):
            raise _refuse(text, "the brackets do not hold an IPv6 address")
        if rest and not rest.startswith(":"):
            raise _refuse(text, "something other than :PORT follows the bracket")
        port_text = rest[1:] if rest else None
    else:
        if text.count(":") > 1:
            raise _refuse(text, "an IPv6 address needs brackets")
        host, colon, tail = text.partition(":")
        port_text = tail if colon else None
    if fault := _find_fault(host):
        raise _refuse(text, f"its host {fault}")
    if port_text is None:
        if default_port is None:
            raise _refuse(text, "it has no port")
        return HostPort(host, default_port)
    if not port_text:
        raise _refuse(text, "no port follows the colon")
    if not _PORT.fullmatch(port_text) or int(port_text) > 65535:
        raise _refuse(text, f"the port is {port_text!r}, not a number from 0 to 65535")
    return HostPort(host, int(port_text))


def check_host(value: object) -> str:
    """Return a host without a port, an IPv6 address without brackets; raises ValueError with what is wrong with it."""
    if not isinstance(value, str):
        raise ValueError(f"it is {name_kind(value)}, not text")
    scheme, is_url, _ = value.partition("://")
    if is_url:
        raise ValueError(f"it is a URL; leave out {scheme}://")
    if value.count(":") == 1 or "]:" in value:
        raise ValueError("it has a port in it, which is the setting port (KVXFER_PORT)")
    if value.startswith("[") and value.endswith("]"):
        raise ValueError("leave out the brackets")
    if ":" in value and not _is_ipv6(value):
        raise ValueError("it has colons and is no IPv6 address")
    if fault := _find_fault(value):
        raise ValueError(f"it {fault}")
    return value


def check_advertised_host(value: object) -> str:
    """Return a host that peers can be told; raises ValueError as `check_host`, and for all addresses."""
    host = check_host(value)
    if is_wildcard(host):
        raise ValueError("it means all addresses, and no peer can open them")
    return host


def format_host_port(host: str, port: int) -> str:
    """Return the text of an address; IPv6 addresses get brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def choose_advertised_host(
    listen_host: str, interfaces: Sequence[tuple[str, str]], default_route_host: str | None
) -> tuple[str, str, list[str]]:
    """Return (host, reason, warnings): the address under which peers reach an engine that listens on `listen_host`.

    A concrete listen host is the answer itself. A wildcard is never published: the source address of the default route
    is, else an address of an interface that is not loopback, link-local or a container bridge, else loopback.
    interfaces: (name, address) pairs.
    """
    address = _address(listen_host)
    if address is None or not address.is_unspecified:
        return listen_host, "the address it listens on", []
    if default_route_host and not _is_useless(default_route_host):
        return default_route_host, "the source address of the default route", []
    same_family = [(name, host) for name, host in interfaces if _is_concrete(host, address.version)]
    good = _usable(same_family)
    if not good and address.version == 6:  # "::" listens on IPv4 as well: better than an IPv6 address of no use
        good = _usable([(name, host) for name, host in interfaces if _is_concrete(host, 4)])
    if good:
        warnings = []
        if len({host for _, host in good}) > 1:
            told = ", ".join(f"{host} ({name})" for name, host in good)
            warnings.append(
                f"no default route and several addresses: {told}. Set advertise_host (KVXFER_ADVERTISE_HOST)."
            )
        return good[0][1], f"the address of {good[0][0]}", warnings
    rest = [(name, host) for name, host in same_family if not (_address(host) or address).is_loopback]
    if rest:
        told = f"only {rest[0][1]} ({rest[0][0]}) is left; peers may not reach it. Set advertise_host."
        return rest[0][1], f"the address of {rest[0][0]}, for want of a better one", [told]
    loopback = "::1" if address.version == 6 else "127.0.0.1"
    return loopback, "this host has no other address", ["only peers on this host can reach a loopback address."]


def _usable(interfaces: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, host) for name, host in interfaces if not _is_useless(host) and not _is_bridge(name)]


def _find_fault(host: str) -> str:
    """Return what no host is or has, in words; "" where nothing is wrong."""
    if not host.strip():
        return "is empty"
    bad = next((letter for letter in host if letter.isspace() or not letter.isprintable() or letter in "[]/@,"), None)
    return f"has {bad!r} in it" if bad else ""


def _refuse(text: object, reason: str) -> ConfigError:
    return ConfigError(f"{show(text)} is not an address of a peer: {clean(reason)}.", remedy=EXAMPLES, value=text)


def is_wildcard(host: str) -> bool:
    """Whether the host means all addresses."""
    address = _address(host)
    return address is not None and address.is_unspecified


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_ipv6(host: str) -> bool:
    address = _address(host)
    return address is not None and address.version == 6


def _is_concrete(host: str, version: int) -> bool:
    address = _address(host)
    return address is not None and address.version == version and not address.is_unspecified


def _is_useless(host: str) -> bool:
    address = _address(host)
    return address is None or address.is_loopback or address.is_link_local or address.is_unspecified


def _is_bridge(name: str) -> bool:
    """Interfaces that container runtimes make: nothing outside the host reaches their addresses."""
    return name.startswith(("docker", "br-", "virbr", "cni", "flannel", "veth", "podman", "lxc"))
