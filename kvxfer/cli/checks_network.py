"""The doctor's checks of names, addresses, ports, socket buffers and transports.

Each takes a Machine and returns a Check (the transports: one each). No packet leaves the machine.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable

from kvxfer.cli.check import Check, Machine
from kvxfer.cli.table import format_size
from kvxfer.config import TRANSPORT_NAMES, EngineConfig
from kvxfer.interfaces import default_route_host
from kvxfer.runtime import KEY_REMEDY, WITHOUT_KEY
from kvxfer.transports import TRANSPORTS
from kvxfer.types import Probe

__all__ = ["NETWORK_CHECKS", "is_exposed", "probe_check", "transport_checks"]

PORT_PRIVILEGED_END = 1024
EVERY_INTERFACE = ("", "0.0.0.0", "::")

Resolve = Callable[[str], "list[str]"]


def check_host_name(machine: Machine, resolve: Resolve | None = None) -> Check:
    """What the host is called and where that name leads; loopback is a mistake only if peers are elsewhere."""
    name = socket.gethostname()
    addresses = (resolve or _resolve)(name)
    host = machine.config.host
    if not addresses:
        remedy = f"Peers that are told {name!r} cannot find this host: pass host= with an address, or add it to DNS."
        return Check("host name", "warn", f"{name} does not resolve", remedy)
    value = f"{name} is {', '.join(addresses)}"
    is_loopback = all(_is_loopback(address) for address in addresses)
    if is_loopback and host == name:
        remedy = (
            f"The engine would listen on loopback, where no other host reaches it: pass host= with this machine's "
            f"address, or take {name} out of the 127.* line of /etc/hosts."
        )
        return Check("host name", "warn", value, remedy)
    note = "; kvxfer does not use the name" if is_loopback else ""
    return Check("host name", "ok", value + note)


def check_listen_host(machine: Machine, resolve: Resolve | None = None) -> Check:
    """Where an engine with these settings listens."""
    host = machine.config.host
    if host in EVERY_INTERFACE:
        return _reached_check(f"{host or 'unset'}: every interface; peers are told the default-route address", machine)
    addresses = [host] if _is_literal(host) else (resolve or _resolve)(host)
    if not addresses:
        remedy = "Pass host= (or KVXFER_HOST) with an address or a name of this machine."
        return Check("listen host", "fail", f"{host} does not resolve", remedy)
    value = host if addresses == [host] else f"{host}, which is {', '.join(addresses)}"
    if not all(_is_loopback(address) for address in addresses):
        return _reached_check(value, machine)
    if _is_literal(host) or host == "localhost":
        return Check("listen host", "ok", f"{value}: loopback, so peers on this machine only")
    remedy = "No other host reaches a loopback address: pass host= with this machine's address."
    return Check("listen host", "warn", f"{value}: loopback", remedy)


def _reached_check(value: str, machine: Machine) -> Check:
    """Say of an engine that other hosts reach whether it asks them for a key."""
    if machine.config.key is None:
        return Check("listen host", "warn", f"{value}; {WITHOUT_KEY}", KEY_REMEDY)
    return Check("listen host", "ok", value)


def is_exposed(config: EngineConfig) -> bool:
    """Whether other hosts reach an engine with these settings, and none of them needs a key."""
    if config.key is not None:
        return False
    host = config.host
    addresses = [host] if host in EVERY_INTERFACE or _is_literal(host) else _resolve(host)
    return not all(_is_loopback(address) for address in addresses)


def check_address(machine: Machine) -> Check:
    """The address peers are told when nothing else is said: the source address of the default route."""
    device = _default_route_device(machine)
    address = default_route_host(socket.AF_INET) or default_route_host(socket.AF_INET6)
    if address is None or _is_loopback(address):
        remedy = "Fine on one host. For other hosts pass host= with the address they reach this machine by."
        return Check("address", "warn", "no default route", remedy)
    return Check("address", "ok", f"{address}" + (f" on {device}" if device else "") + ", by the default route")


def check_ports(machine: Machine) -> Check:
    """The port an engine with these settings takes, and the ports the system gives out by itself."""
    text = machine.read("proc/sys/net/ipv4/ip_local_port_range")
    port = machine.config.port
    low, high = (int(word) for word in text.split()) if text else (32768, 60999)  # ip(7)
    if port == 0:
        return Check("ports", "ok", f"any free one of {low} to {high}")
    if low <= port <= high:
        remedy = (
            f"An outgoing connection may hold it first: reserve it (sysctl -w net.ipv4.ip_local_reserved_ports={port}) "
            f"or choose a port outside {low} to {high}."
        )
        return Check("ports", "warn", f"{port} is among those given out to outgoing connections", remedy)
    if port < PORT_PRIVILEGED_END and os.geteuid():
        return Check("ports", "warn", f"{port} needs privileges", f"Choose a port of {PORT_PRIVILEGED_END} or above.")
    return Check("ports", "ok", f"{port}, outside {low} to {high}")


def check_socket_buffers(machine: Machine) -> Check:
    """Whether the kernel grants the socket buffers that tcp asks for."""
    wanted = int(machine.config.tcp_socket_buffer_nbytes or 0)
    limits = {key: machine.read_int(f"proc/sys/net/core/{key}") for key in ("rmem_max", "wmem_max")}
    known = {key: limit for key, limit in limits.items() if limit is not None}
    shown = ", ".join(f"{key} {format_size(limit)}" for key, limit in known.items()) or "limits cannot be read"
    value = f"tcp asks for {format_size(wanted)}; {shown}" if wanted else f"tcp leaves them to the kernel; {shown}"
    short = [key for key, limit in known.items() if limit < wanted]
    if short:
        settings = " ".join(f"net.core.{key}={wanted}" for key in short)
        return Check("socket buffers", "warn", value, f"tcp will be slower: `sysctl -w {settings}`.")
    return Check("socket buffers", "ok", value)


def transport_checks(machine: Machine) -> list[Check]:
    """One check per transport, made of its probe; of those that are wanted one at least must work."""
    config = machine.config
    probes = {name: TRANSPORTS[name].probe(config) for name in config.transports}
    has_carrier = any(probe.usable for probe in probes.values())
    return [
        probe_check(probes[name], is_asked_for=_is_asked_for(name, config), has_carrier=has_carrier)
        if name in probes
        else _not_wanted(name, config)
        for name in TRANSPORTS
    ]


def _not_wanted(name: str, config: EngineConfig) -> Check:
    wanted = f"{config.source_of('transports')}={','.join(config.transports)}"
    return Check(f"transport {name}", "off", f"not wanted: {wanted}", f"Add {name} there, or unset it, to use {name}.")


def _is_asked_for(name: str, config: EngineConfig) -> bool:
    """Whether a setting names the transport, or devices for it."""
    is_named = config.transports != TRANSPORT_NAMES and name in config.transports
    return is_named or (name == "rdma" and config.rdma_devices is not None)


def probe_check(probe: Probe, *, is_asked_for: bool = False, has_carrier: bool = True) -> Check:
    """Turn a probe into a check: tcp must work, shm should, rdma need not unless there is hardware or a wish for it.

    has_carrier: whether any of the wanted transports works; where none does, no engine starts.
    """
    name = f"transport {probe.transport}"
    if probe.usable:
        return Check(name, "ok", f"usable: {probe.reason}", probe.remedy)
    if not has_carrier:
        return Check(
            name, "fail", f"{probe.reason.rstrip('.')}; no wanted transport works, so no engine starts", probe.remedy
        )
    has_hardware = bool(probe.details.get("devices"))
    if probe.transport == "tcp":
        return Check(name, "fail", probe.reason, probe.remedy)
    if probe.transport == "rdma" and not has_hardware and not is_asked_for:
        return Check(name, "off", f"not used: {probe.reason}", probe.remedy)
    return Check(name, "warn", probe.reason, probe.remedy)


def _resolve(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _default_route_device(machine: Machine) -> str | None:
    for line in (machine.read("proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == words[7] == "00000000":
            return words[0]
    return None


NETWORK_CHECKS = (check_host_name, check_listen_host, check_address, check_ports, check_socket_buffers)
