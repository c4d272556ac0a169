"""What this host's network looks like: addresses of its interfaces, and the one that packets leave from by default."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

__all__ = ["default_route_host", "list_interfaces"]

_SIOCGIFCONF = 0x8912  # netdevice(7)
_IFREQ_NBYTES = 40


def list_interfaces(root: Path = Path("/")) -> list[tuple[str, str]]:
    """Return (interface, address) for each address of this host; one that cannot be read is left out."""
    found: list[tuple[str, str]] = []
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            names = array.array("B", bytes(_IFREQ_NBYTES * 512))
            asked = struct.pack("iL", len(names), names.buffer_info()[0])
            (filled,) = struct.unpack_from("i", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, asked))
            data = names.tobytes()[:filled]
            for at in range(0, filled, _IFREQ_NBYTES):
                name = data[at : at + 16].split(b"\0", 1)[0].decode(errors="replace")
                found.append((name, socket.inet_ntoa(data[at + 20 : at + 24])))
    except OSError:
        pass
    try:
        for line in (root / "proc/net/if_inet6").read_text().splitlines():
            value, _, _, _, _, name = line.split()
            found.append((name, str(ipaddress.IPv6Address(int(value, 16)))))
    except (OSError, ValueError):
        pass
    return found


def default_route_host(family: int) -> str | None:
    """Return the address that packets to the outside leave from; None without a default route. Sends nothing."""
    outside = ("2001:db8::1", 9) if family == socket.AF_INET6 else ("192.0.2.1", 9)  # documentation networks
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(outside)
            return str(probe.getsockname()[0])
    except OSError:
        return None
