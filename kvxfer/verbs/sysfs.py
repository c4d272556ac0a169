"""What /sys/class/infiniband says of a device: the facts that libibverbs does not give, or gives only when it is new.

Nothing here opens a device or loads a library. A file that is missing, empty or refuses to be read means "unknown",
never an error: containers hide some, empty slots of the GID table answer EINVAL, and drivers leave others out.
Read next: `gid.py`, which reads the GID table, and `gid_candidate.py`, which judges its rows.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvxfer.system.kernel_file import read_kernel_file
from kvxfer.verbs.enums import GidType, LinkLayer

__all__ = ["SysfsDevice", "SysfsGid", "list_sysfs_devices", "parse_gid_type"]

GID_NBYTES = 16
ZERO_GID = bytes(GID_NBYTES)


@dataclass(frozen=True)
class SysfsGid:
    """One row of a port's GID table that is not empty. type: None where sysfs does not say."""

    index: int
    value: bytes
    type: GidType | None
    netdev: str


class SysfsDevice:
    """One RDMA device in sysfs; every property reads its file when it is asked for.

    root: where sys/ and dev/ are looked for.
    """

    def __init__(self, name: str, root: Path = Path("/")) -> None:
        self.name = name
        self._root = root
        self._folder = root / "sys/class/infiniband" / name

    def __repr__(self) -> str:
        return f"SysfsDevice({self.name!r})"

    @property
    def exists(self) -> bool:
        """Whether sysfs has the device."""
        return self._folder.is_dir()

    @property
    def numa_node(self) -> int | None:
        """The NUMA node the device is attached to; None where the firmware does not say (-1, in most guests)."""
        text = read_kernel_file(self._folder / "device/numa_node")
        return int(text) if text.isdecimal() else None

    @property
    def pci_address(self) -> str:
        """Such as 0000:3b:00.0; "" for a software device."""
        name = self._device_folder.name
        return name if name.count(":") == 2 and "." in name else ""

    @property
    def pci_path(self) -> str:
        """The way from the root complex to the device, such as pci0000:3a/0000:3a:00.0/0000:3b:00.0; "" as above."""
        if not self.pci_address:
            return ""
        parts = self._device_folder.parts
        start = next((at for at, part in enumerate(parts) if part.startswith("pci")), len(parts) - 1)
        return "/".join(parts[start:])

    @property
    def firmware(self) -> str:
        """The version of the firmware; "" where there is none."""
        return read_kernel_file(self._folder / "fw_ver")

    @property
    def device_file(self) -> Path | None:
        """/dev/infiniband/uverbsN of this device, whether or not it is there; None where sysfs does not name one."""
        for entry in _entries(self._root / "sys/class/infiniband_verbs"):
            if read_kernel_file(entry / "ibdev") == self.name:
                return self._root / "dev/infiniband" / entry.name
        return None

    @property
    def ports(self) -> tuple[int, ...]:
        """The numbers of its ports."""
        return tuple(sorted(int(entry.name) for entry in _entries(self._folder / "ports") if entry.name.isdecimal()))

    def link_layer(self, port: int) -> LinkLayer:
        """What is under the port."""
        text = read_kernel_file(self._port(port) / "link_layer")
        return {"InfiniBand": LinkLayer.INFINIBAND, "Ethernet": LinkLayer.ETHERNET}.get(text, LinkLayer.UNSPECIFIED)

    def rate(self, port: int) -> str:
        """The speed in the kernel's words, such as 100 Gb/sec (4X EDR); "" where it is not known."""
        return read_kernel_file(self._port(port) / "rate")

    def netdev(self, port: int, index: int) -> str:
        """The network interface of a row of the GID table; "" where the row is empty or has none that can be seen."""
        return read_kernel_file(self._port(port) / "gid_attrs/ndevs" / str(index))

    def gid_type(self, port: int, index: int) -> GidType | None:
        """The kind of a row of the GID table; None where it cannot be read (EINVAL: an empty slot, or a container)."""
        text = read_kernel_file(self._port(port) / "gid_attrs/types" / str(index))
        return parse_gid_type(text, self.link_layer(port)) if text else None

    def gid(self, port: int, index: int) -> bytes:
        """The value of a row of the GID table, zero where it is empty or cannot be read."""
        try:
            return ipaddress.IPv6Address(read_kernel_file(self._port(port) / "gids" / str(index))).packed
        except ipaddress.AddressValueError:
            return ZERO_GID

    def gid_rows(self, port: int) -> Iterator[SysfsGid]:
        """Yield the rows of the GID table that are not empty, in the order of their index."""
        numbers = sorted(int(entry.name) for entry in _entries(self._port(port) / "gids") if entry.name.isdecimal())
        for index in numbers:
            value = self.gid(port, index)
            if value != ZERO_GID:
                yield SysfsGid(index, value, self.gid_type(port, index), self.netdev(port, index))

    @property
    def _device_folder(self) -> Path:
        link = self._folder / "device"
        try:
            return link.resolve(strict=True)
        except OSError:
            return Path()

    def _port(self, number: int) -> Path:
        return self._folder / "ports" / str(number)


def list_sysfs_devices(root: Path = Path("/")) -> list[SysfsDevice]:
    """Return the devices that the kernel has, by name; libibverbs may know fewer, for want of a provider."""
    return [SysfsDevice(entry.name, root) for entry in _entries(root / "sys/class/infiniband")]


def parse_gid_type(text: str, link_layer: LinkLayer) -> GidType | None:
    """Return the kind of a row from sysfs's words: "IB/RoCE v1" is one or the other by the link layer."""
    if text == "RoCE v2":
        return GidType.ROCE_V2
    if text == "IB/RoCE v1":
        return GidType.IB if link_layer is LinkLayer.INFINIBAND else GidType.ROCE_V1
    return None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
