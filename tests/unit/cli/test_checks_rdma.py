"""The doctor's checks of RDMA on machines made for it: what each says, and that its remedy names what to change."""

from __future__ import annotations

import dataclasses
import errno
import resource
from pathlib import Path

import pytest

from kvxfer.cli import rdma_survey
from kvxfer.cli.check import Check, Machine
from kvxfer.cli.checks_rdma import check_libibverbs, check_memlock, rdma_checks
from kvxfer.config import EngineConfig
from kvxfer.system.interfaces import Interface
from kvxfer.verbs.enums import Mtu, PortState
from tests.support.fake_fabric import FakeFabric
from tests.support.fake_nic import FakeNic, connectx, infiniband, iwarp
from tests.support.fake_sysfs import write_sysfs
from tests.support.fake_verbs import FakeLibrary
from tests.support.gid_rows import interface


class Host:
    """A machine with fake devices, and what the doctor says of it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *nics: FakeNic, files: bool = True) -> None:
        self.library = FakeLibrary(FakeFabric(), *nics)
        self.root = root
        self.interfaces = [interface("eth0", "10.10.0.1/24", "fe80::ff:fe0a:0a00:1/64")]
        write_sysfs(root, self.library, with_device_files=files)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        monkeypatch.setattr(rdma_survey, "list_interfaces", lambda _root: tuple(self.interfaces))

    def checks(self, **settings: object) -> dict[str, Check]:
        machine = Machine(EngineConfig(**settings), self.root, {}, self.library)  # type: ignore[arg-type]
        found = list(rdma_checks(machine))
        names = [check.name for check in found]
        assert len(set(names)) == len(names)
        assert all(check.remedy for check in found if check.status in ("warn", "fail"))
        return {check.name: check for check in found}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch, connectx())


def test_healthy_device_has_nothing_to_look_at(host: Host) -> None:
    checks = host.checks()

    assert [name for name, check in checks.items() if check.status != "ok"] == []
    assert checks["rdma devices"].value == "1 (mlx5_0); ports that carry data: mlx5_0:1"
    assert checks["mlx5_0 memory"].value == "a trial registration of 16 MiB worked"
    assert checks["mlx5_0:1 port"].value == "ACTIVE, Ethernet, 400 Gb/s (4X NDR)"
    assert "index 3, the best of 4 usable rows" in checks["mlx5_0:1 gid"].value
    assert "0: fe80::ff:fe0a:a00:1/64 (RoCE v1, eth0): after row 3: RoCE v1" in checks["mlx5_0:1 gid"].value
    assert "256 requests with 16 READs asked and 16 answered" in checks["mlx5_0:1 limits"].value


def test_limits_are_those_that_connections_begin_with(host: Host) -> None:
    checks = host.checks(rdma_read_depth=4, rdma_attributes="mlx5_0:1:send_depth=64", rdma_chunk_nbytes_max=1 << 20)

    assert "64 requests with 4 READs asked and 4 answered" in checks["mlx5_0:1 limits"].value
    assert "regions of at most 1 MiB" in checks["mlx5_0:1 limits"].value


def test_nothing_is_left_open_or_registered(host: Host) -> None:
    host.checks()

    assert host.library.leaks == {}


def test_machine_without_device_has_three_checks_and_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, monkeypatch)
    assert list(host.checks()) == ["libibverbs", "rdma devices", "locked memory"]

    host.library.list_errno = errno.ENOSYS
    checks = host.checks()

    assert checks["rdma devices"] == Check("rdma devices", "off", "none: this kernel has no RDMA")
    assert checks["libibverbs"].status == checks["locked memory"].status == "ok"


def test_container_without_device_files_names_the_docker_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B23."""
    checks = Host(tmp_path, monkeypatch, connectx(), files=False).checks()

    assert checks["device files"].status == "warn"
    assert "--device=/dev/infiniband" in checks["device files"].remedy


def test_devices_that_the_library_does_not_list_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B23."""
    host = Host(tmp_path, monkeypatch, connectx())
    host.library = FakeLibrary(FakeFabric())

    check = host.checks()["rdma devices"]

    assert check.status == "warn"
    assert "the kernel has mlx5_0" in check.value
    assert "ibverbs-providers" in check.remedy


def test_port_that_is_down_is_told_with_what_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B22."""
    nic = connectx()
    nic.ports[0].state = PortState.DOWN

    checks = Host(tmp_path, monkeypatch, nic).checks()

    assert checks["mlx5_0:1 port"].status == "warn"
    assert checks["mlx5_0:1 port"].value.startswith("DOWN, Ethernet")
    assert "cable" in checks["mlx5_0:1 port"].remedy
    assert checks["rdma devices"].value.endswith("none")


def test_iwarp_is_called_unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B21."""
    checks = Host(tmp_path, monkeypatch, iwarp()).checks()

    assert checks["siw0:1 port"].status == "warn"
    assert "iWARP" in checks["siw0:1 port"].value
    assert "siw0:1 gid" not in checks


@pytest.mark.parametrize(
    ("interface_mtu", "active", "status", "words"),
    [
        (4200, Mtu.MTU_4096, "ok", ""),
        (9000, Mtu.MTU_4096, "ok", ""),
        (1500, Mtu.MTU_1024, "ok", "Faster with 4096"),
        (1500, Mtu.MTU_4096, "warn", "Larger packets are lost"),
    ],
)
def test_active_mtu_is_compared_with_that_of_the_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interface_mtu: int, active: Mtu, status: str, words: str
) -> None:
    """B37."""
    nic = connectx()
    nic.ports[0].active_mtu = active
    host = Host(tmp_path, monkeypatch, nic)
    host.interfaces = [dataclasses.replace(one, mtu=interface_mtu) for one in host.interfaces]

    check = host.checks()["mlx5_0:1 mtu"]

    assert check.status == status
    assert words in check.remedy


def test_gid_of_another_network_namespace_is_told(host: Host) -> None:
    """B02, B186."""
    host.interfaces = [Interface("eth0")]

    check = host.checks()["mlx5_0:1 gid"]

    assert check.status == "warn"
    assert check.value.startswith("eth0 does not have 10.10.0.1\nindex 3")


def test_fixed_index_that_is_not_there_is_told(host: Host) -> None:
    """B09."""
    checks = host.checks(gid_index=9)

    assert checks["mlx5_0:1 gid"].status == "warn"
    assert checks["mlx5_0:1 gid"].value.startswith("GID index 9 was fixed (gid_index), and that row is empty\n0: fe80")
    assert checks["mlx5_0:1 port"].status == "warn"


def test_infiniband_shows_its_lid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Host(tmp_path, monkeypatch, infiniband(lid=0x11)).checks()

    assert checks["mlx5_0:1 port"].value == "ACTIVE, InfiniBand, LID 17, 400 Gb/s (4X NDR)"
    assert "mlx5_0:1 mtu" not in checks


def test_devices_that_share_an_address_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B46."""
    check = Host(tmp_path, monkeypatch, connectx("mlx5_0"), connectx("mlx5_1")).checks()["rdma devices"]

    assert check.status == "warn"
    assert "mlx5_0 port 1 and mlx5_1 port 1 have the same address 10.10.0.1" in check.value


def test_device_outside_the_filter_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nics = connectx("mlx5_0"), connectx("mlx5_1", "10.10.1.1")

    checks = Host(tmp_path, monkeypatch, *nics).checks(rdma_devices="mlx5_0")

    assert checks["mlx5_1:1 port"].value == "not in rdma_devices: not looked at"
    assert "mlx5_1:1 gid" not in checks


def test_device_of_the_filter_that_is_not_here_is_told(host: Host) -> None:
    assert "there is no RDMA device mlx5_9 here" in host.checks(rdma_devices="mlx5_9")["rdma devices"].value


def test_refused_trial_registration_carries_the_remedy_of_the_error(host: Host) -> None:
    host.library.fail("ibv_reg_mr", errno.ENOMEM)

    check = host.checks()["mlx5_0 memory"]

    assert check.status == "warn"
    assert "ulimit -l unlimited" in check.remedy
    assert host.library.leaks == {}


def test_relaxed_ordering_is_tried_and_its_refusal_is_no_fault(host: Host) -> None:
    taken = host.checks()["mlx5_0 ordering"]
    host.library.fail("ibv_reg_mr", errno.EINVAL, nth=2)
    refused = host.checks()["mlx5_0 ordering"]

    assert (taken.status, taken.value) == ("ok", "relaxed ordering is taken; kvxfer does not ask for it")
    assert (refused.status, "refused (EINVAL" in refused.value) == ("ok", True)


def test_gpu_memory_is_asked_for_without_registering_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    able = Host(tmp_path / "a", monkeypatch, dataclasses.replace(connectx(), has_dmabuf=True)).checks()
    unable = Host(tmp_path / "b", monkeypatch, dataclasses.replace(connectx(), has_dmabuf=False)).checks()

    assert able["mlx5_0 dma-buf"].value == "GPU memory is taken by dma-buf; kvxfer moves memory of the host only"
    assert unable["mlx5_0 dma-buf"].value.startswith("no dma-buf (")


@pytest.mark.parametrize(("status", "verdict"), [(2, "ok"), (1, "ok"), (0, "warn"), (-1, "warn")])
def test_fork_that_would_break_memory_is_told(host: Host, status: int, verdict: str) -> None:
    host.library.fork_status = status

    check = host.checks()["fork"]

    assert check.status == verdict
    assert ("spawn" in check.remedy) is (verdict == "warn")


def test_device_that_cannot_be_opened_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path, monkeypatch, connectx("mlx5_0"), connectx("mlx5_1", "10.10.1.1"))
    host.library.fail("ibv_open_device", errno.EACCES, device="mlx5_0", times=9)

    checks = host.checks()

    assert checks["mlx5_0 open"].status == "warn"
    assert "group rdma" in checks["mlx5_0 open"].remedy
    assert checks["mlx5_1 layout"].status == "ok"


def test_broken_library_path_is_told_although_there_is_no_device(tmp_path: Path) -> None:
    check = check_libibverbs(Machine(EngineConfig(), tmp_path, {"KVXFER_LIBIBVERBS": "/nowhere.so"}))

    assert check.status == "warn"
    assert "/nowhere.so" in check.value


def test_small_locked_memory_matters_only_with_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    machine = Machine(EngineConfig(), tmp_path, {})
    before = check_memlock(machine)

    write_sysfs(tmp_path, FakeLibrary(FakeFabric(), connectx()))

    assert before.status == "ok"
    assert check_memlock(machine).status == "warn"
