"""Why RDMA is not used is told in facts: the library, the devices, the device files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.config import EngineConfig
from kvxfer.transports.rdma import RdmaTransport, rdma_probe
from kvxfer.verbs.probe import LibraryReport, VerbsReport, find_ports, memlock_text, probe_library, probe_verbs

LOADABLE = LibraryReport("libibverbs.so.1")


def add_port(root: Path, device: str, number: int, state: str = "4: ACTIVE") -> None:
    port = root / "sys/class/infiniband" / device / "ports" / str(number)
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")


def test_missing_file_text_file_and_other_library_give_three_reasons(tmp_path: Path) -> None:
    text_file = tmp_path / "text.so"
    text_file.write_text("this is no library\n" * 100)

    reports = [
        probe_library(environ={"KVXFER_LIBIBVERBS": path})
        for path in (str(tmp_path / "none.so"), str(text_file), "libc.so.6")
    ]

    assert not any(report.is_loadable for report in reports)
    missing, not_elf, other = (report.problem for report in reports)
    assert "there is no file" in missing
    assert "invalid ELF header" in not_elf
    assert "not libibverbs: no ibv_get_device_list" in other
    assert all("from KVXFER_LIBIBVERBS" in problem for problem in (missing, not_elf, other))


def test_soname_that_is_not_installed_says_so() -> None:
    assert (
        probe_library("libkvxfer-is-not-here.so.1", environ={}).problem == "libkvxfer-is-not-here.so.1 is not installed"
    )


def test_folder_given_as_library_is_explained(tmp_path: Path) -> None:
    assert "cannot be loaded" in probe_library(str(tmp_path), environ={}).problem


def test_importing_and_probing_the_settings_loads_no_libibverbs() -> None:
    program = (
        "import kvxfer.transports.rdma, kvxfer.verbs, kvxfer.cli;print('libibverbs' in open('/proc/self/maps').read())"
    )

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "False"


def test_ports_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2):
        add_port(tmp_path, "mlx5_1", number)
    add_port(tmp_path, "mlx5_0", 1, "1: DOWN")

    assert [str(port) for port in find_ports(tmp_path)] == [
        "mlx5_0 port 1 (DOWN)",
        "mlx5_1 port 2 (ACTIVE)",
        "mlx5_1 port 10 (ACTIVE)",
    ]


def test_port_files_that_cannot_be_read_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)

    (port,) = find_ports(tmp_path)

    assert (port.state, port.link_layer, port.rate) == ("unknown", "unknown", "unknown")


def test_machine_without_device_has_nothing_to_do(tmp_path: Path) -> None:
    probe = rdma_probe(probe_verbs(tmp_path, environ={}))

    assert not probe.usable
    assert "no RDMA device" in probe.reason
    assert "kvxfer uses shm on one host and tcp between hosts" in probe.remedy
    assert probe.details["device_files"] is None


def test_machine_with_devices_is_told_what_was_found(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0", 1)
    add_port(tmp_path, "mlx5_1", 1, "1: DOWN")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()

    probe = rdma_probe(probe_verbs(tmp_path, environ={"KVXFER_LIBIBVERBS": "/nowhere.so"}))

    assert not probe.usable
    assert probe.reason.startswith("this release of kvxfer carries data over shm and tcp; found mlx5_0 (ACTIVE)")
    for fact in ("mlx5_1 (DOWN)", "1 files in /dev/infiniband", "there is no file /nowhere.so", "locked-memory limit"):
        assert fact in probe.reason
    assert "host=" in probe.remedy
    assert probe.details["devices"] == ["mlx5_0", "mlx5_1"]


def test_device_without_device_files_says_so() -> None:
    report = VerbsReport(LOADABLE, ("mlx5_0",), (), None, None)

    reason = rdma_probe(report).reason

    assert "mlx5_0 (no port)" in reason
    assert "/dev/infiniband does not exist" in reason
    assert "unlimited" in reason


def test_transport_probe_never_raises_and_is_not_usable() -> None:
    probe = RdmaTransport.probe(EngineConfig())

    assert (probe.transport, probe.usable) == ("rdma", False)
    assert probe.reason
    assert probe.remedy


@pytest.mark.parametrize(("nbytes", "text"), [(None, "unlimited"), (65536, "64 KiB"), (8 << 20, "8 MiB")])
def test_locked_memory_limit_in_words(nbytes: int | None, text: str) -> None:
    assert memlock_text(nbytes) == text
