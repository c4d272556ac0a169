"""`kvxfer devices`: what a person and a program read of devices that are made for it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from kvxfer.cli import devices, rdma_survey
from kvxfer.errors import UsageError, VerbsKernelError
from kvxfer.verbs.enums import PortState
from tests.support.fake_fabric import FakeFabric
from tests.support.fake_nic import FakeNic, FakePort, connectx, gid, infiniband, ionic, iwarp, mlx5_gids, rxe
from tests.support.fake_sysfs import write_sysfs
from tests.support.fake_verbs import FakeLibrary
from tests.support.gid_rows import interface

WIDTH = 110


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (interface("eth0", "10.10.0.1/24"), interface("eth1", "10.10.1.1/24"))
    monkeypatch.setattr(rdma_survey, "list_interfaces", lambda _root: found)


def show(
    root: Path, *nics: FakeNic, names: tuple[str, ...] = (), to: str | None = None, as_json: bool = False
) -> tuple[int, FakeLibrary]:
    library = FakeLibrary(FakeFabric(), *nics)
    write_sysfs(root, library)
    return devices.run(Namespace(names=list(names), to=to, json=as_json), library, root), library


def test_table_names_port_state_link_speed_mtu_and_what_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, library = show(tmp_path, connectx("mlx5_0", "10.10.0.1", "eth0"), infiniband("mlx5_1", 0x11))

    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert next(line for line in lines if "mlx5_0:1  ACTIVE" in line).split()[2:] == (
        ["ACTIVE", "Ethernet", "400", "Gb/s", "(4X", "NDR)", "4096", "-", "10.10.0.1", "on", "eth0"]
    )
    assert any("InfiniBand" in line and line.endswith("LID 17, partition 0xffff in row 0") for line in lines)
    assert any("10.10.0.1/24" in line and line.endswith("chosen") for line in lines)
    assert any(line.endswith("after row 3: RoCE v1") for line in lines)
    assert max(map(len, lines)) <= WIDTH
    assert library.leaks == {}


def test_limits_are_those_that_connections_begin_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's, within the settings, and its share of a budget for all connections."""
    monkeypatch.setenv("KVXFER_RDMA_ATTRIBUTES", "mlx5_0:send_depth=32")
    monkeypatch.setenv("KVXFER_RDMA_READ_DEPTH", "8")
    monkeypatch.setenv("KVXFER_PATH_MTU_NBYTES_MAX", "1024")
    monkeypatch.setenv("KVXFER_RDMA_CHUNK_NBYTES_MAX", str(1 << 20))

    show(tmp_path, connectx("mlx5_0", "10.10.0.1", "eth0"), ionic("ionic_0", "10.10.1.1", "eth1"))

    lines = capsys.readouterr().out.split("limits that kvxfer keeps to")[1].splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("mlx5", "ionic"))}
    assert rows["mlx5_0:1"][1:] == ["1", "MiB", "1", "GiB", "131,072", "32", "8", "8"]
    assert rows["ionic_0:1"][-2:] == ["8", "1"]
    assert rows["ionic_0:1"][-3] == "256"


def test_partitions_of_an_infiniband_port_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nic = infiniband("mlx5_1", 0x11)
    nic.ports[0].pkeys = [0x7FFF, 0, 0x8001]

    show(tmp_path / "as text", nic)
    text = " ".join(capsys.readouterr().out.split())
    show(tmp_path / "as json", nic, as_json=True)
    (port,) = json.loads(capsys.readouterr().out)["ports"]

    assert "partition 0x8001 in row 2; also 0x7fff in row 0, limited member" in text
    assert port["pkeys"] == [
        {"index": 0, "pkey": "0x7fff", "full": False, "chosen": False},
        {"index": 2, "pkey": "0x8001", "full": True, "chosen": True},
    ]


def test_erdma_that_is_in_its_iwarp_mode_says_how_to_change_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(tmp_path, iwarp("erdma_0", vendor_id=0x1DED))

    assert "load erdma with compat_mode=1" in " ".join(capsys.readouterr().out.split())


def test_port_that_cannot_be_used_says_why_and_is_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nic = connectx()
    nic.ports[0].state = PortState.DOWN

    status, _ = show(tmp_path, nic, iwarp())

    out = capsys.readouterr().out
    assert status == 1
    assert "DOWN, not ACTIVE" in out
    assert "unsupported (iWARP)" in out
    assert "would be chosen, but the port is not used" in " ".join(out.split())


def test_long_reasons_and_addresses_stay_inside_the_width(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {at: gid(f"2001:db8:1234:5678:9abc:def0:1234:{at + 1:x}", ndev="enp129s0f0np0") for at in range(40)}
    nic = rxe("rocep129s0f0", ports=[FakePort(rows, gid_tbl_len=1024)])

    show(tmp_path, nic)

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "   ... and 8 more rows of rocep129s0f0:1; --json has all" in lines


def test_names_choose_devices_and_ports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ports = [FakePort(mlx5_gids("10.10.0.1", "eth0")), FakePort(mlx5_gids("10.10.1.1", "eth1"))]

    show(tmp_path, FakeNic("mlx5_0", ports), connectx("mlx5_1", "10.10.2.1"), names=("mlx5_0:2",))

    out = capsys.readouterr().out
    assert "mlx5_0:2" in out
    assert "mlx5_0:1" not in out
    assert "mlx5_1" not in out


@pytest.mark.parametrize("name", ["mlx5_9", "mlx5_0:7"])
def test_name_that_is_not_here_is_a_usage_error_with_those_that_are(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"no RDMA device or port {name}; there is mlx5_0:1"):
        show(tmp_path, connectx(), names=(name,))


def test_name_that_cannot_be_meant_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'x' is no port"):
        show(tmp_path, connectx(), names=("mlx5_0:x",))


def test_json_has_every_fact_of_a_device_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(tmp_path, connectx("mlx5_0"), connectx("mlx5_1", "10.10.1.1", "eth1"), as_json=True)

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["device"] for row in rows] == ["mlx5_0", "mlx5_1"]
    (port,) = rows[0]["ports"]
    assert (port["state"], port["link_layer"], port["mtu_active"], port["gid_index"]) == ("ACTIVE", "Ethernet", 4096, 3)
    assert port["gids"][3] == {
        "index": 3,
        "gid": "::ffff:10.10.0.1",
        "type": "RoCE v2",
        "netdev": "eth0",
        "netdev_state": "up",
        "family": "ipv4",
        "scope": "routable",
        "prefix_nbits": 24,
        "is_vlan": False,
        "chosen": True,
        "usable": True,
        "verdict": "chosen",
    }
    assert rows[0]["limits"]["max_qp_rd_atom"] == 16
    assert port["interfaces"][0]["addresses"] == ["10.10.0.1/24"]


def test_routes_to_an_address_are_told_for_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(tmp_path, connectx(), to="10.10.0.9", as_json=True)

    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["route"]["reachable"] for one in row["ports"][0]["gids"]] == [False] * 4

    show(tmp_path / "b", connectx(), to="10.10.0.9")

    out = capsys.readouterr().out
    assert "to 10.10.0.9" in out
    assert "no route" in out


def test_settings_of_the_environment_are_taken_into_account(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_GID_INDEX", "2")
    monkeypatch.setenv("KVXFER_RDMA_DEVICES", "mlx5_0")

    show(tmp_path, connectx("mlx5_0"), connectx("mlx5_1", "10.10.1.1"))

    out = capsys.readouterr().out
    assert "fixed by the user (MC_GID_INDEX)" in out
    assert "not in rdma_devices" in out


def test_machine_whose_kernel_has_no_rdma_gets_the_error_with_its_remedy(tmp_path: Path) -> None:
    library = FakeLibrary(FakeFabric())
    library.list_errno = 38

    with pytest.raises(VerbsKernelError):
        devices.run(Namespace(names=[], to=None, json=False), library, tmp_path)


def test_machine_without_device_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = show(tmp_path)

    assert status == 1
    assert "This machine has no RDMA device" in capsys.readouterr().out
