"""Facts from sysfs; what is missing, empty or refuses to be read is unknown, never an error."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvxfer.verbs.enums import GidType, LinkLayer
from kvxfer.verbs.sysfs import SysfsDevice, list_sysfs_devices, parse_gid_type
from tests.support.fake_fabric import FakeFabric
from tests.support.fake_nic import connectx, infiniband
from tests.support.fake_sysfs import write_sysfs
from tests.support.fake_verbs import FakeLibrary
from tests.support.gid_rows import gid


@pytest.fixture
def device(tmp_path: Path) -> SysfsDevice:
    nic = dataclasses.replace(connectx("mlx5_0", "192.0.2.1", "eth0"), numa_node=1)
    write_sysfs(tmp_path, FakeLibrary(FakeFabric(), nic))
    return SysfsDevice("mlx5_0", tmp_path)


def test_device_is_described(device: SysfsDevice, tmp_path: Path) -> None:
    assert device.exists
    assert (device.numa_node, device.firmware) == (1, "28.39.1002")
    assert device.ports == (1,)
    assert device.link_layer(1) is LinkLayer.ETHERNET
    assert device.rate(1) == "400 Gb/sec (4X NDR)"
    assert device.pci_address.endswith(":00.0")
    assert device.pci_path == f"pci0000:{device.pci_address[5:7]}/{device.pci_address}"
    assert device.device_file is not None
    assert device.device_file.parent == tmp_path / "dev/infiniband"


@pytest.mark.parametrize(("text", "node"), [("-1\n", None), ("", None), (None, None), ("3\n", 3), ("junk", None)])
def test_numa_node_that_is_not_given_is_unknown(
    device: SysfsDevice, tmp_path: Path, text: str | None, node: int
) -> None:
    """B31."""
    file = tmp_path / "sys/class/infiniband/mlx5_0/device/numa_node"
    file.unlink()
    if text is not None:
        file.write_text(text)

    assert device.numa_node == node


def test_rows_of_the_gid_table_are_those_with_a_value(device: SysfsDevice) -> None:
    rows = list(device.gid_rows(1))

    assert [(one.index, one.type, one.netdev) for one in rows] == [
        (0, GidType.ROCE_V1, "eth0"),
        (1, GidType.ROCE_V2, "eth0"),
        (2, GidType.ROCE_V1, "eth0"),
        (3, GidType.ROCE_V2, "eth0"),
    ]
    assert rows[3].value == gid("192.0.2.1")


def test_row_whose_type_cannot_be_read_stays_a_row(device: SysfsDevice, tmp_path: Path) -> None:
    """B06: EINVAL in a container. A folder cannot be read as a file either."""
    file = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/3"
    file.unlink()
    file.mkdir()

    assert [one.type for one in device.gid_rows(1)][3] is None
    assert device.gid_type(1, 9) is None
    assert device.gid(1, 9) == bytes(16)


def test_device_that_does_not_exist_has_no_facts(tmp_path: Path) -> None:
    nothing = SysfsDevice("mlx5_9", tmp_path)

    assert not nothing.exists
    assert (nothing.numa_node, nothing.pci_address, nothing.pci_path, nothing.firmware) == (None, "", "", "")
    assert (nothing.ports, nothing.device_file, nothing.rate(1)) == ((), None, "")
    assert list(nothing.gid_rows(1)) == []
    assert list_sysfs_devices(tmp_path) == []


def test_devices_are_listed_by_name(tmp_path: Path) -> None:
    write_sysfs(tmp_path, FakeLibrary(FakeFabric(), connectx("mlx5_1"), infiniband("mlx5_0")))

    assert [device.name for device in list_sysfs_devices(tmp_path)] == ["mlx5_0", "mlx5_1"]


@pytest.mark.parametrize(
    ("text", "link_layer", "kind"),
    [
        ("RoCE v2", LinkLayer.ETHERNET, GidType.ROCE_V2),
        ("IB/RoCE v1", LinkLayer.ETHERNET, GidType.ROCE_V1),
        ("IB/RoCE v1", LinkLayer.INFINIBAND, GidType.IB),
        ("RoCE v3", LinkLayer.ETHERNET, None),
        ("", LinkLayer.ETHERNET, None),
    ],
)
def test_both_texts_of_the_kernel_are_read(text: str, link_layer: LinkLayer, kind: GidType | None) -> None:
    """B05."""
    assert parse_gid_type(text, link_layer) is kind
