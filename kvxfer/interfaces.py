"""What the engine asks of this host's network: its addresses, and the one that packets leave from by default."""

from __future__ import annotations

import socket

from kvxfer.system import interfaces as system_interfaces

__all__ = ["default_route_host", "list_interfaces"]


def list_interfaces() -> list[tuple[str, str]]:
    """Return (interface, address) for each address of this host; none where the kernel does not tell them."""
    try:
        found = system_interfaces.list_interfaces()
    except OSError:
        return []
    return [(interface.name, str(address.value)) for interface in found for address in interface.addresses]


def default_route_host(family: int) -> str | None:
    """Return the address that packets to the outside leave from; None without a default route. Sends nothing."""
    outside = ("2001:db8::1", 9) if family == socket.AF_INET6 else ("192.0.2.1", 9)  # documentation networks
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(outside)
            return str(probe.getsockname()[0])
    except OSError:
        return None
