"""The files that the kernel shows for fake devices: /sys/class/infiniband, infiniband_verbs, net, and /dev/infiniband.

`write_sysfs(root, library)` lays them down under `root`, for the `root=` arguments of kvxfer. Empty rows of a GID table
read as zero and have no type file: a real one answers EINVAL, which no plain file can.
"""

from __future__ import annotations

from pathlib import Path

from kvxfer.verbs.enums import GidType, LinkLayer, NodeType, PortState
from tests.support.fake_nic import FakeNic, FakePort
from tests.support.fake_verbs import FakeLibrary

ZERO_ROWS = 2
"""Empty rows written behind the last used one; a real table of 1,024 rows has 1,024 files."""
NODE_TYPES = {NodeType.CA: "1: CA", NodeType.RNIC: "4: RNIC", NodeType.UNSPECIFIED: "7: unspecified"}
STATES = {
    PortState.DOWN: "1: DOWN",
    PortState.INIT: "2: INIT",
    PortState.ARMED: "3: ARMED",
    PortState.ACTIVE: "4: ACTIVE",
}
PHYS_STATES = {3: "3: Disabled", 5: "5: LinkUp"}
LINK_LAYERS = {LinkLayer.ETHERNET: "Ethernet", LinkLayer.INFINIBAND: "InfiniBand", LinkLayer.UNSPECIFIED: "Unknown"}
LANES = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
SPEEDS = {
    1: (2.5, "SDR"),
    2: (5, "DDR"),
    4: (10, "QDR"),
    16: (14, "FDR"),
    32: (25, "EDR"),
    64: (50, "HDR"),
    128: (100, "NDR"),
}


def write_sysfs(root: Path, library: FakeLibrary, *, with_device_files: bool = True) -> None:
    """Write what a machine with the devices of `library` shows.

    with_device_files: False leaves out /dev/infiniband, as in a container that was started without it.
    """
    for device in library.devices:
        _write_device(root, device.nic, device.index)
        if with_device_files:
            _write(root / f"dev/infiniband/uverbs{device.index}", "")


def _write_device(root: Path, nic: FakeNic, ordinal: int) -> None:
    folder = root / "sys/class/infiniband" / nic.name
    _write(folder / "node_type", NODE_TYPES.get(nic.node_type, "0: unknown"))
    guid = nic.guid.to_bytes(8, "big").hex()
    text = ":".join(guid[at : at + 4] for at in range(0, 16, 4))
    _write(folder / "node_guid", text)
    _write(folder / "sys_image_guid", text)
    _write(folder / "fw_ver", nic.fw_ver)
    pci = root / f"sys/devices/pci0000:{ordinal:02x}/0000:{ordinal:02x}:00.0"
    _write(pci / "numa_node", str(nic.numa_node))
    _write(pci / "vendor", f"{nic.vendor_id:#06x}")
    _write(pci / "device", f"{nic.vendor_part_id:#06x}")
    (folder / "device").symlink_to(pci)
    verbs = root / f"sys/class/infiniband_verbs/uverbs{ordinal}"
    _write(verbs / "ibdev", nic.name)
    _write(verbs / "abi_version", "1")
    _write(root / "sys/class/infiniband_verbs/abi_version", "6")
    for number, port in enumerate(nic.ports, 1):
        _write_port(folder / "ports" / str(number), port)
        for row in port.gids.values():
            if row.ndev:
                _write_interface(root, row.ndev, row.ifindex, port)
                (pci / "net" / row.ndev).mkdir(parents=True, exist_ok=True)


def _write_port(folder: Path, port: FakePort) -> None:
    _write(folder / "state", STATES.get(port.state, f"{int(port.state)}: UNKNOWN"))
    _write(folder / "phys_state", PHYS_STATES.get(port.phys_state, f"{port.phys_state}: Polling"))
    _write(folder / "link_layer", LINK_LAYERS[port.link_layer])
    _write(folder / "lid", f"{port.lid:#x}")
    _write(folder / "sm_lid", f"{port.sm_lid:#x}")
    _write(folder / "lid_mask_count", str(port.lmc))
    lanes = LANES[port.active_width]
    lane, name = SPEEDS[port.active_speed]
    _write(folder / "rate", f"{lanes * lane:g} Gb/sec ({lanes}X {name})")
    for index, pkey in enumerate(port.pkeys):
        _write(folder / "pkeys" / str(index), f"{pkey:#06x}")
    for index in range(min(port.gid_tbl_len, max(port.gids, default=-1) + 1 + ZERO_ROWS)):
        row = port.gids.get(index)
        value = row.value if row else bytes(16)
        _write(folder / "gids" / str(index), value.hex(":", 2))
        if row is not None:
            kind = "RoCE v2" if row.type is GidType.ROCE_V2 else "IB/RoCE v1"
            _write(folder / "gid_attrs/types" / str(index), kind)
            if row.ndev:
                _write(folder / "gid_attrs/ndevs" / str(index), row.ndev)


def _write_interface(root: Path, name: str, ifindex: int, port: FakePort) -> None:
    folder = root / "sys/class/net" / name
    if folder.exists():
        return
    is_up = port.state is PortState.ACTIVE
    _write(folder / "ifindex", str(ifindex))
    _write(folder / "operstate", "up" if is_up else "down")
    _write(folder / "carrier", "1" if is_up else "0")
    _write(folder / "flags", "0x1003")
    _write(folder / "mtu", str(port.active_mtu.nbytes + 104))
    _write(folder / "type", "1")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
