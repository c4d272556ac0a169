"""Reading a GID table from a device: by one call, row by row from an older library, and where there is none."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest

from kvxfer.system.interfaces import Interface
from kvxfer.verbs.device import Context, list_devices
from kvxfer.verbs.enums import GidType
from kvxfer.verbs.gid import GidTable, read_gid_table
from tests.support.fake_fabric import FakeFabric
from tests.support.fake_nic import FakeNic, FakePort, connectx, gid, infiniband, iwarp, rxe
from tests.support.fake_sysfs import write_sysfs
from tests.support.fake_verbs import FakeLibrary


def old_library(nic: FakeNic) -> FakeLibrary:
    """Return a library that has no call for the table: before rdma-core 32."""
    library = FakeLibrary(FakeFabric(), nic)
    library.has_gid_table = False
    return library


def open_one(library: FakeLibrary, root: Path) -> Context:
    return list_devices(library, root=root)[0].open()


def read(library: FakeLibrary, root: Path, interfaces: list[Interface] | None = None) -> GidTable:
    with open_one(library, root) as context:
        return read_gid_table(context, context.query_port(1), interfaces)


def test_rows_have_index_value_type_and_interface(tmp_path: Path) -> None:
    library = FakeLibrary(FakeFabric(), connectx(address="10.0.0.1", ndev="eth5"))
    write_sysfs(tmp_path, library)

    table = read(library, tmp_path)

    assert [(entry.index, entry.type, entry.netdev) for entry in table] == [
        (0, GidType.ROCE_V1, "eth5"),
        (1, GidType.ROCE_V2, "eth5"),
        (2, GidType.ROCE_V1, "eth5"),
        (3, GidType.ROCE_V2, "eth5"),
    ]
    assert (table.device, table.port, table.length) == ("mlx5_0", 1, 255)
    assert str(table.entries[3]) == "3: ::ffff:10.0.0.1 RoCE v2 eth5"


@pytest.mark.parametrize("nic", [connectx(), rxe(), infiniband()], ids=lambda nic: nic.name)
def test_library_without_the_call_gives_the_same_table(nic: FakeNic, tmp_path: Path) -> None:
    """B58."""
    new, old = FakeLibrary(FakeFabric(), nic), old_library(nic)
    write_sysfs(tmp_path, new)

    assert read(old, tmp_path) == read(new, tmp_path)


def test_rows_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    """B06: an older library; rows 0 to 5 are refused, and their type too."""
    port = FakePort({6: gid("192.0.2.9", GidType.ROCE_V1, "eth0"), 7: gid("192.0.2.9", GidType.ROCE_V2, "eth0")})
    library = old_library(FakeNic(ports=[port]))
    write_sysfs(tmp_path, library)
    library.fail("ibv_query_gid", 22, times=6)

    assert [entry.index for entry in read(library, tmp_path)] == [6, 7]


def test_types_that_nobody_tells_are_those_of_the_order_of_the_rows(tmp_path: Path) -> None:
    """An older library in a container without the types in sysfs: twice is v1 and v2, once is v2."""
    v1, v2 = GidType.ROCE_V1, GidType.ROCE_V2
    port = FakePort({0: gid("fe80::1", v1), 1: gid("fe80::1", v2), 4: gid("192.0.2.9", v1), 5: gid("192.0.2.9", v2)})
    both = read(old_library(FakeNic(ports=[port])), tmp_path)
    single = read(old_library(rxe()), tmp_path)

    assert [(entry.index, entry.type) for entry in both] == [(0, v1), (1, v2), (4, v1), (5, v2)]
    assert [entry.type for entry in single] == [v2, v2]


def test_name_of_an_interface_that_sysfs_hides_is_looked_up_by_its_number(tmp_path: Path) -> None:
    port = FakePort({0: gid("192.0.2.9", ndev="x", ifindex=7), 1: gid("192.0.2.8", ndev="y", ifindex=8)})
    library = FakeLibrary(FakeFabric(), FakeNic(ports=[port]))
    interfaces = [Interface("eth3", index=7)]

    assert [entry.netdev for entry in read(library, tmp_path, interfaces)] == ["eth3", "ifindex8"]


def test_the_kernel_is_asked_for_such_a_name_where_nobody_listed_the_interfaces(tmp_path: Path) -> None:
    number, name = socket.if_nameindex()[0]
    port = FakePort({0: gid("192.0.2.9", ndev="x", ifindex=number), 1: gid("192.0.2.8", ndev="y", ifindex=1 << 30)})
    library = FakeLibrary(FakeFabric(), FakeNic(ports=[port]))

    assert [entry.netdev for entry in read(library, tmp_path)] == [name, f"ifindex{1 << 30}"]


def test_device_without_gid_table_has_no_rows_and_no_error(tmp_path: Path) -> None:
    """B21."""
    library = old_library(iwarp())
    library.fail("ibv_query_gid", 22, times=100)

    assert len(read(library, tmp_path)) == 0


def test_each_port_has_its_own_table(tmp_path: Path) -> None:
    ports = [FakePort({0: gid("192.0.2.1", ndev="eth0")}), FakePort({2: gid("198.51.100.1", ndev="eth1")})]
    library = FakeLibrary(FakeFabric(), dataclasses.replace(connectx(), ports=ports))

    with open_one(library, tmp_path) as context:
        tables = [context.query_gid_table(number) for number in (1, 2)]

    assert [[entry.index for entry in table] for table in tables] == [[0], [2]]
