"""Each check on a machine made for it: what it says, and that its remedy names what to change."""

from __future__ import annotations

import json
import os
import resource
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.cli import checks_network, checks_rdma, checks_system, doctor
from kvxfer.cli.check import Check, Machine
from kvxfer.cli.environment import known_variables, load_config
from kvxfer.config import EngineConfig
from kvxfer.errors import AllocationError
from kvxfer.types import Probe

WriteFile = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> WriteFile:
    """Put a file under the root of the machine."""

    def write_file(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return write_file


def machine(root: Path, environ: dict[str, str] | None = None, **settings: object) -> Machine:
    return Machine(EngineConfig(**settings), root, environ or {})  # type: ignore[arg-type]


def test_every_check_answers_on_a_machine_without_any_file(tmp_path: Path) -> None:
    bare = machine(tmp_path)

    checks = [
        *doctor.run_checks(bare, checks_system.SYSTEM_CHECKS),
        *doctor.run_checks(bare, checks_network.NETWORK_CHECKS),
        *checks_rdma.rdma_checks(bare),
    ]

    assert len({check.name for check in checks}) == len(checks) > 15
    assert all(check.value for check in checks)
    assert all(check.remedy for check in checks if check.status in ("warn", "fail"))


def test_check_that_cannot_look_is_a_warning_with_the_reason(tmp_path: Path) -> None:
    def check_moon(_: Machine) -> Check:
        raise PermissionError(13, "Permission denied")

    (check,) = doctor.run_checks(machine(tmp_path), (check_moon,))

    assert (check.name, check.status) == ("moon", "warn")
    assert "Permission denied" in check.value


def test_unknown_variable_is_flagged_with_the_nearest_name(tmp_path: Path) -> None:
    check = checks_system.check_environment(machine(tmp_path, {"KVXFER_PROT": "1", "KVXFER_FOO": "2", "HOME": "/"}))

    assert check.status == "warn"
    assert "KVXFER_PROT means nothing to kvxfer: did you mean KVXFER_PORT?" in check.remedy
    assert "KVXFER_FOO means nothing to kvxfer: unset it." in check.remedy
    assert "HOME" not in check.value


def test_known_variables_are_shown_and_the_key_is_not(tmp_path: Path) -> None:
    check = checks_system.check_environment(machine(tmp_path, {"KVXFER_PORT": "7777", "KVXFER_KEY": "hunter2hunter2"}))

    assert check == Check("environment", "ok", "KVXFER_KEY=(set), KVXFER_PORT=7777")


@pytest.mark.parametrize("name", ["KVXFER_KEEY", "KVXFER_KYE", "KVXFER_X"])
def test_value_of_an_unknown_variable_is_not_shown(tmp_path: Path, name: str) -> None:
    check = checks_system.check_environment(machine(tmp_path, {name: "hunter2hunter2"}))

    assert check.value == f"{name}=(set)"
    assert "hunter2" not in json.dumps(check.to_json())


def test_variable_of_mooncake_that_supplies_a_setting_is_shown(tmp_path: Path) -> None:
    environ = {"MC_GID_INDEX": "3", "MC_MTU": "1024", "KVXFER_PATH_MTU_NBYTES_MAX": "4096", "MC_OTHER": "1"}

    check = checks_system.check_environment(machine(tmp_path, environ))

    assert check.value == "KVXFER_PATH_MTU_NBYTES_MAX=4096, MC_GID_INDEX=3 (sets gid_index)"


def test_every_setting_and_the_library_path_are_known_variables() -> None:
    assert {"KVXFER_HOST", "KVXFER_KEY", "KVXFER_LIBIBVERBS", "KVXFER_TRACEBACK"} <= known_variables()


def test_broken_setting_gives_the_default_configuration_and_the_problem() -> None:
    config, problem = load_config({"KVXFER_PORT": "many"})

    assert config == EngineConfig()
    assert problem is not None
    assert "KVXFER_PORT" in problem.message


@pytest.mark.parametrize(
    ("scope", "status", "meaning"),
    [("0", "ok", "same user"), ("1", "warn", "descendants"), ("2", "warn", "CAP_SYS_PTRACE"), ("3", "warn", "nobody")],
)
def test_ptrace_scope_is_read_and_explained(
    tmp_path: Path, write: WriteFile, scope: str, status: str, meaning: str
) -> None:
    write("proc/sys/kernel/yama/ptrace_scope", f"{scope}\n")

    check = checks_system.check_ptrace_scope(machine(tmp_path))

    assert check.status == status
    assert meaning in check.value
    assert ("allocate()" in check.remedy) is (status == "warn")


def test_kernel_without_yama_has_no_ptrace_scope(tmp_path: Path) -> None:
    assert checks_system.check_ptrace_scope(machine(tmp_path)).status == "ok"


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [("ok", "ok", "works"), ("1", "warn", "Operation not permitted"), ("other bytes", "warn", "other bytes")],
)
def test_process_vm_trial_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, status: str, reason: str
) -> None:
    monkeypatch.setattr(checks_system, "_try_process_vm", lambda: answer)

    check = checks_system.check_process_vm(machine(tmp_path))

    assert check.status == status
    assert reason in check.value


def test_low_memory_of_the_control_group_is_a_warning(tmp_path: Path, write: WriteFile) -> None:
    write("proc/meminfo", "MemTotal: 99999999 kB\nMemAvailable: 99999999 kB\nSwapFree: 0 kB\n")
    write("sys/fs/cgroup/memory.max", str(256 << 20))
    write("sys/fs/cgroup/memory.current", str(56 << 20))

    check = checks_system.check_memory(machine(tmp_path))

    assert check.status == "warn"
    assert check.value == "200 MiB available, control group limit 256 MiB"
    assert "docker run --memory" in check.remedy


def test_control_group_without_limit_is_not_mentioned(tmp_path: Path, write: WriteFile) -> None:
    write("proc/meminfo", f"MemAvailable: {4 << 20} kB\nSwapFree: 0 kB\n")
    write("sys/fs/cgroup/memory.max", "max\n")

    check = checks_system.check_memory(machine(tmp_path))

    assert (check.status, check.value) == ("ok", "4 GiB available")


def test_refused_memfd_carries_the_remedy_of_allocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise AllocationError(f"allocate({nbytes}) failed: Operation not permitted.", remedy="Change the profile.")

    monkeypatch.setattr(checks_system, "SharedMemory", refuse)

    check = checks_system.check_memfd(machine(tmp_path))

    assert (check.status, check.remedy) == ("warn", "Change the profile.")


@pytest.mark.parametrize(
    ("soft", "status"), [(16, "fail"), (256, "warn"), (1024, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_few_open_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soft: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))

    check = checks_system.check_files(machine(tmp_path))

    assert check.status == status
    assert ("ulimit -n" in check.remedy) is (status != "ok")


def test_one_cpu_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})

    assert checks_system.check_cpus(machine(tmp_path)).status == "warn"


@pytest.mark.parametrize(
    ("addresses", "host", "status"),
    [
        (["192.0.2.7"], "127.0.0.1", "ok"),
        (["127.0.1.1"], "127.0.0.1", "ok"),
        (["127.0.1.1"], "node-7", "warn"),
        ([], "127.0.0.1", "warn"),
    ],
)
def test_host_name_on_loopback_matters_only_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, addresses: list[str], host: str, status: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-7")

    check = checks_network.check_host_name(machine(tmp_path, host=host), lambda _: addresses)

    assert check.status == status
    assert bool(check.remedy) is (status != "ok")


@pytest.mark.parametrize(
    ("host", "addresses", "status", "words"),
    [
        ("0.0.0.0", [], "warn", "every interface"),
        ("192.0.2.7", [], "warn", "192.0.2.7"),
        ("127.0.0.1", [], "ok", "this machine only"),
        ("node-7", ["127.0.1.1"], "warn", "loopback"),
        ("node-7", ["192.0.2.7"], "warn", "which is 192.0.2.7"),
        ("nowhere", [], "fail", "does not resolve"),
    ],
)
def test_listen_host_is_judged_by_where_it_leads(
    tmp_path: Path, host: str, addresses: list[str], status: str, words: str
) -> None:
    check = checks_network.check_listen_host(machine(tmp_path, host=host), lambda _: addresses)

    assert check.status == status
    assert words in check.value


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "node-7"])
def test_listening_to_other_hosts_needs_a_key(tmp_path: Path, host: str) -> None:
    def judge(**settings: object) -> Check:
        return checks_network.check_listen_host(machine(tmp_path, host=host, **settings), lambda _: ["192.0.2.7"])

    assert judge().status == "warn"
    assert "KVXFER_KEY" in judge().remedy
    assert judge(key=b"correct horse battery").status == "ok"


@pytest.mark.parametrize(("port", "status"), [(0, "ok"), (7777, "ok"), (40000, "warn")])
def test_port_among_the_ephemeral_ones_is_a_warning(tmp_path: Path, write: WriteFile, port: int, status: str) -> None:
    write("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")

    check = checks_network.check_ports(machine(tmp_path, port=port))

    assert check.status == status
    assert (f"ip_local_reserved_ports={port}" in check.remedy) is (status == "warn")


def test_socket_buffers_below_what_tcp_asks_for_are_a_warning(tmp_path: Path, write: WriteFile) -> None:
    write("proc/sys/net/core/rmem_max", "212992\n")
    write("proc/sys/net/core/wmem_max", "4194304\n")

    check = checks_network.check_socket_buffers(machine(tmp_path, tcp_socket_buffer_nbytes=262144))

    assert check.status == "warn"
    assert "sysctl -w net.core.rmem_max=262144" in check.remedy
    assert "wmem_max=" not in check.remedy


def test_no_default_route_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_network, "default_route_host", lambda _: None)

    assert checks_network.check_address(machine(tmp_path)).status == "warn"


def test_default_route_names_its_interface(tmp_path: Path, write: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    route = "Iface Destination Gateway Flags RefCnt Use Metric Mask\neth1 0002A8C0 0 1 0 0 0 00FFFFFF\n"
    write("proc/net/route", route + "eth0 00000000 010200C0 0003 0 0 0 00000000\n")
    monkeypatch.setattr(checks_network, "default_route_host", lambda _: "192.0.2.7")

    assert checks_network.check_address(machine(tmp_path)).value == "192.0.2.7 on eth0, by the default route"


@pytest.mark.parametrize(
    ("probe", "status"),
    [
        (Probe("tcp", usable=True, reason="sockets work"), "ok"),
        (Probe("tcp", usable=False, reason="no sockets", remedy="x"), "fail"),
        (Probe("shm", usable=False, reason="no memfd", remedy="x"), "warn"),
        (Probe("rdma", usable=False, reason="no RDMA device", remedy="x", details={"devices": []}), "off"),
        (Probe("rdma", usable=False, reason="found mlx5_0", remedy="x", details={"devices": ["mlx5_0"]}), "warn"),
    ],
)
def test_transports_are_judged_by_what_depends_on_them(probe: Probe, status: str) -> None:
    check = checks_network.probe_check(probe)

    assert check.status == status
    assert probe.reason in check.value
    assert check.remedy == probe.remedy


def test_machine_on_which_no_engine_starts_fails_and_names_what_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Probe("rdma", usable=False, reason="no RDMA device", remedy="x", details={"devices": []})
    monkeypatch.setattr(checks_network.TRANSPORTS["rdma"], "probe", classmethod(lambda cls, config: absent))
    config, _ = load_config({"KVXFER_TRANSPORTS": "rdma"})

    checks = {check.name: check for check in checks_network.transport_checks(Machine(config, tmp_path, {}))}

    assert checks["transport rdma"].status == "fail"
    for name in ("transport shm", "transport tcp"):
        assert checks[name].status == "off"
        assert checks[name].value == "not wanted: KVXFER_TRANSPORTS=rdma"


@pytest.mark.parametrize("settings", [{"transports": ("rdma", "tcp")}, {"rdma_devices": "mlx5_0"}])
def test_rdma_that_a_setting_asks_for_and_is_not_here_is_a_warning(
    tmp_path: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Probe("rdma", usable=False, reason="no RDMA device", remedy="x", details={"devices": []})
    monkeypatch.setattr(checks_network.TRANSPORTS["rdma"], "probe", classmethod(lambda cls, config: absent))

    asked = {check.name: check.status for check in checks_network.transport_checks(machine(tmp_path, **settings))}
    default = {check.name: check.status for check in checks_network.transport_checks(machine(tmp_path))}

    assert asked["transport rdma"] == "warn"
    assert default["transport rdma"] == "off"


def test_failed_check_is_exit_status_one_and_its_remedy_is_in_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("good", "ok", "1"), Check("bad", "fail", "2", "Do this.")]
    monkeypatch.setattr(doctor, "SECTIONS", (("system", lambda _: iter(checks)),))

    status = doctor.run(Namespace(json=True, peer=None, key_env=None))

    assert status == 1
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"name": "good", "status": "ok", "value": "1", "remedy": ""},
        {"name": "bad", "status": "fail", "value": "2", "remedy": "Do this."},
    ]


def test_text_puts_the_remedy_under_the_value_and_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("good", "ok", "1"), Check("so so", "warn", "2", "Do that.")]
    monkeypatch.setattr(doctor, "SECTIONS", (("system", lambda _: iter(checks)),))

    status = doctor.run(Namespace(json=False, peer=None, key_env=None))

    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    at = next(at for at, line in enumerate(lines) if "so so" in line)
    assert lines[at].index("2") == lines[at + 1].index("Do that.")
    assert lines[-1] == "1 ok, 1 to look at, 0 failed"
