"""Read what `ibv_devinfo -v` prints: the second oracle for the facts of a device.

Pure: text in, dataclasses out; `run_devinfo` gets the text.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field

_DEVICE = re.compile(r"hca_id:\s+(\S+)")
_PORT = re.compile(r"\t\tport:\s+(\d+)")
_GID = re.compile(r"\t+GID\[\s*(\d+)\]:\s+(\S+?)(?:,\s*(.+))?$")
_FACT = re.compile(r"(\t+)(\w+):\s+(\S.*?)\s*$")
_CODE = re.compile(r"\((\d+)\)$")
_DEVICE_DEPTH, _PORT_DEPTH = 1, 3  # tabs before a fact of the device, of a port


@dataclass(frozen=True)
class GidRow:
    """One row of a GID table. gid: as inet_ntop writes IPv6 addresses. type: "RoCE v2", or "" where none is printed."""

    index: int
    gid: str
    type: str


@dataclass
class PortInfo:
    """A port's facts as printed, by the names of <infiniband/verbs.h>, and its GIDs."""

    number: int
    facts: dict[str, str] = field(default_factory=dict)
    gids: list[GidRow] = field(default_factory=list)


@dataclass
class DeviceInfo:
    """A device's facts as printed, and its ports."""

    name: str
    facts: dict[str, str] = field(default_factory=dict)
    ports: list[PortInfo] = field(default_factory=list)


def parse_devinfo(text: str) -> dict[str, DeviceInfo]:
    """Return the devices of `ibv_devinfo -v`, by name.

    Flags by name, and the lines below headings such as `rc_odp_caps:`, are left out.
    """
    devices: dict[str, DeviceInfo] = {}
    device, port = DeviceInfo(""), None
    for line in text.splitlines():
        if found := _DEVICE.match(line):
            device, port = DeviceInfo(found[1]), None
            devices[device.name] = device
        elif found := _PORT.match(line):
            port = PortInfo(int(found[1]))
            device.ports.append(port)
        elif port is not None and (found := _GID.match(line)):
            port.gids.append(GidRow(int(found[1]), found[2], found[3] or ""))
        elif found := _FACT.match(line):
            depth, name, value = len(found[1]), found[2], found[3]
            if port is None and depth == _DEVICE_DEPTH:
                device.facts[name] = value
            elif port is not None and depth == _PORT_DEPTH:
                port.facts[name] = value
    return devices


def as_number(value: str) -> int:
    """Return the number of a printed value: "PORT_ACTIVE (4)" is 4, "0x80000000" is 2**31."""
    code = _CODE.search(value)
    return int(code[1]) if code else int(value, 0)


def run_devinfo() -> dict[str, DeviceInfo]:
    """Return what `ibv_devinfo -v` says of this machine."""
    done = subprocess.run(["ibv_devinfo", "-v"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ibv_devinfo -v failed: {done.stderr}"
    return parse_devinfo(done.stdout)
