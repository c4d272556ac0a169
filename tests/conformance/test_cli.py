"""The commands as a person runs them: processes of their own, real engines, real exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvxfer

KVXFER = [sys.executable, "-m", "kvxfer"]
SMALL = ["--blocks", "32", "--block-size", "16KiB", "--rounds", "2"]
TIMEOUT_S = 60.0


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    package = str(Path(kvxfer.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, kept.get("PYTHONPATH", "")]))
    return {**kept, "PYTHONPATH": path, "LANG": "C.UTF-8", **extra}


def run(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVXFER, *words], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(**extra), check=False
    )


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def wait_until(condition: Any, timeout_s: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def holds_a_pool(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any("memfd:kvxfer" in os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir())
    return False


class Serve:
    """A `kvxfer serve` that is ready."""

    def __init__(self, *words: str, **extra: str) -> None:
        self.process = subprocess.Popen(
            [*KVXFER, "serve", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**extra),
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        assert first, self.process.communicate()
        found = re.search(r"127\.0\.0\.1:\d+", first)
        assert found is not None
        self.first = first
        self.address = found[0]

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.fixture
def serve() -> Iterator[Serve]:
    server = Serve("--size", "8MiB", "--json")
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.communicate()


def test_demo_moves_verifies_and_reports_every_transport_once() -> None:
    done = run("demo", "--json", *SMALL)

    assert (done.returncode, done.stderr) == (0, "")
    shm, rdma, tcp = objects(done.stdout)
    assert [item["transport"] for item in (shm, rdma, tcp)] == ["shm", "rdma", "tcp"]
    for item in (shm, tcp):
        assert item["verified"] is True
        assert item["usable"] is True
        for name in (
            "write_gbps",
            "read_gbps",
            "latency_4k_p50_us",
            "memcpy_ratio_write",
            "memcpy_ratio_read",
        ):
            assert item[name] > 0
    assert rdma["usable"] is False
    assert rdma["reason"]
    assert rdma["remedy"]


def test_demo_shows_a_table_without_colour_when_piped() -> None:
    done = run("demo", *SMALL)

    assert done.returncode == 0
    assert "shm (registered memory)" in done.stdout
    assert "every byte" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("option", ["--transports", "--transport"])
def test_demo_of_one_transport_shows_it_alone(option: str) -> None:
    done = run("demo", "--json", option, "tcp", *SMALL)

    (tcp,) = objects(done.stdout)
    assert done.returncode == 0
    assert tcp["verified"] is True


def test_demo_of_rdma_alone_fails_and_says_why() -> None:
    done = run("demo", "--json", "--transports", "rdma", *SMALL)

    (rdma,) = objects(done.stdout)
    assert done.returncode == 1
    assert (rdma["transport"], rdma["usable"]) == ("rdma", False)
    assert rdma["remedy"]


def test_interrupted_demo_leaves_no_child() -> None:
    demo = subprocess.Popen(
        [*KVXFER, "demo", "--rounds", "1000000", "--blocks", "32"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    (child,) = wait_until(lambda: children_of(demo.pid))

    demo.send_signal(signal.SIGINT)
    _, err = demo.communicate(timeout=20)

    assert demo.returncode == 130
    assert err == "interrupted\n"
    assert not is_running(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_demo_leaves_no_child(number: int) -> None:
    demo = subprocess.Popen(
        [*KVXFER, "demo", "--rounds", "1000000", "--blocks", "32"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    (child,) = wait_until(lambda: children_of(demo.pid))
    wait_until(lambda: holds_a_pool(child))

    demo.send_signal(number)
    demo.wait(20)

    wait_until(lambda: not is_running(child), timeout_s=3)


def test_child_that_dies_fails_the_demo_with_a_message() -> None:
    demo = subprocess.Popen(
        [*KVXFER, "demo", "--rounds", "1000000", "--blocks", "32"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    (child,) = wait_until(lambda: children_of(demo.pid))
    wait_until(lambda: holds_a_pool(child))

    os.kill(child, signal.SIGKILL)
    out, err = demo.communicate(timeout=60)

    assert demo.returncode == 1
    assert "Traceback" not in err
    assert "second process" in out + err or "is gone" in out + err or "closed" in out + err


def test_serve_tells_its_address_and_its_peers_and_stops_at_once(serve: Serve) -> None:
    ready = json.loads(serve.first)

    done = run("bench", "--peer", serve.address, "--json", "--sizes", "4KiB,64KiB", "--blocks", "4", "--rounds", "2")
    status, out, err = serve.stop()

    assert (ready["event"], ready["region"], ready["nbytes"]) == ("ready", "kvxfer.serve", 8 << 20)
    rows = objects(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert {(row["op"], row["block_nbytes"]) for row in rows} == {
        (operation, size) for operation in ("write", "read") for size in (4096, 65536)
    }
    assert all(row["verified"] and row["peer"] == serve.address and row["gbps"] > 0 for row in rows)
    assert (status, err) == (0, "")
    events = [item["event"] for item in objects(out)]
    assert events[0] == "peer.connected"
    assert "peer.disconnected" in events
    assert events[-1] == "stopped"


def test_serve_that_other_hosts_reach_without_a_key_says_so_once() -> None:
    words = ("--host", "0.0.0.0", "--size", "4MiB", "--json")
    exposed = Serve(*words, KVXFER_ADVERTISE_HOST="127.0.0.1")
    guarded = Serve(*words, KVXFER_ADVERTISE_HOST="127.0.0.1", KVXFER_KEY="correct horse battery")
    for server in (exposed, guarded):
        server.stop()

    assert "KVXFER_KEY" in json.loads(exposed.first)["warning"]
    assert json.loads(guarded.first)["warning"] == ""


def test_serve_ends_cleanly_on_ctrl_c(serve: Serve) -> None:
    status, out, err = serve.stop(signal.SIGINT)

    assert (status, err) == (0, "")
    assert objects(out)[-1]["event"] == "stopped"


def test_bench_over_a_chosen_transport_against_a_peer(serve: Serve) -> None:
    done = run("bench", "--peer", serve.address, "--transport", "tcp", "--json", "--sizes", "4KiB", "--blocks", "4")

    assert done.returncode == 0
    assert {row["transport"] for row in objects(done.stdout)} == {"tcp"}


def test_bench_larger_than_the_peer_says_how_to_serve_more(serve: Serve) -> None:
    done = run("bench", "--peer", serve.address, "--sizes", "1MiB")

    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "kvxfer serve --size 128MiB" in done.stderr


def test_bench_here_measures_every_transport_and_draws_bars() -> None:
    done = run("bench", "--sizes", "4KiB,16KiB", "--blocks", "8", "--rounds", "2")

    assert done.returncode == 0
    assert all(word in done.stdout for word in ("shm", "tcp", "write", "read", "8 x 16 KiB", "█"))


def test_bench_in_the_c_locale_draws_in_ascii() -> None:
    done = run("bench", "--sizes", "4KiB", "--blocks", "8", "--rounds", "1", "--transport", "tcp", LANG="C", LC_ALL="")

    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "#" in done.stdout


def test_bench_of_memory_the_caller_owns() -> None:
    words = ["--memory", "registered", "--sizes", "16KiB", "--blocks", "8", "--rounds", "1", "--json"]

    done = run("bench", *words)

    assert done.returncode == 0
    assert all(row["verified"] for row in objects(done.stdout))


def test_key_from_the_environment_lets_the_right_peer_in_and_no_other() -> None:
    server = Serve("--size", "4MiB", "--key-env", "SECRET", SECRET="correct horse battery")
    words = [
        "bench",
        "--peer",
        server.address,
        "--sizes",
        "4KiB",
        "--blocks",
        "2",
        "--rounds",
        "1",
        "--key-env",
        "SECRET",
    ]

    right = run(*words, SECRET="correct horse battery")
    wrong = run(*words, SECRET="incorrect horse battery")
    server.stop()

    assert right.returncode == 0
    assert wrong.returncode == 1
    assert "key" in wrong.stderr
    assert "--key-env NAME" in wrong.stderr
    assert "horse" not in wrong.stderr + wrong.stdout


def test_doctor_gives_one_object_per_check() -> None:
    done = run("doctor", "--json")

    checks = objects(done.stdout)
    assert done.stderr == ""
    assert all(sorted(check) == ["name", "remedy", "status", "value"] for check in checks)
    assert done.returncode == any(check["status"] == "fail" for check in checks)
    names = [check["name"] for check in checks]
    assert len(set(names)) == len(names)
    assert {"python", "memfd", "process_vm_readv", "transport shm", "transport rdma", "transport tcp"} <= set(names)


def test_doctor_opens_a_peer_and_names_what_carries(serve: Serve) -> None:
    done = run("doctor", "--json", "--peer", serve.address)

    (peer,) = [check for check in objects(done.stdout) if check["name"] == "peer"]
    assert (done.returncode, peer["status"]) == (0, "ok")
    assert "shm carries" in peer["value"]


def test_mesh_of_engines_without_rdma_says_so_for_each_and_fails(serve: Serve, tmp_path: Path) -> None:
    other = Serve("--size", "8MiB", "--json")
    file = tmp_path / "hosts.txt"
    file.write_text(f"{serve.address}  # one\n{other.address}\n")

    done = run("mesh", str(file), "--json")
    text = run("mesh", str(file))
    other.stop()
    _, out, _ = serve.stop()

    hosts = objects(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert [host["host"] for host in hosts] == [serve.address, other.address]
    assert all(host["acts"] and not host["error"] and host["failed_targets"] for host in hosts)
    assert text.returncode == 1
    assert "2 problems" in text.stdout
    assert {"mesh.asked", "mesh.answered"} <= {item["event"] for item in objects(out)}


def test_help_of_the_drop_in_says_what_matters_without_the_source() -> None:
    done = run("shim-path", "--help")

    for name in ("last_error()", "KVXFER_ALLOW_FALLBACK=1", "MC_FORCE_TCP=1", "MC_LOG_LEVEL=INFO"):
        assert name in done.stdout


def test_doctor_says_why_a_transport_to_the_peer_was_passed_over() -> None:
    server = Serve("--size", "4MiB", "--transport", "tcp")

    done = run("doctor", "--json", "--peer", server.address)
    server.stop()

    checks = {check["name"]: check for check in objects(done.stdout)}
    assert "tcp carries" in checks["peer"]["value"]
    assert "passed over" in checks["peer shm"]["value"]


def test_doctor_fails_for_a_peer_that_is_not_there() -> None:
    done = run("doctor", "--json", "--peer", "127.0.0.1:1", KVXFER_CONNECT_TIMEOUT_S="0.3")

    (peer,) = [check for check in objects(done.stdout) if check["name"] == "peer"]
    assert (done.returncode, peer["status"]) == (1, "fail")
    assert peer["remedy"]


def test_doctor_reports_a_broken_setting_and_goes_on() -> None:
    done = run("doctor", "--json", KVXFER_PORT="many")

    checks = objects(done.stdout)
    assert done.returncode == 1
    assert checks[0]["name"] == "settings"
    assert "KVXFER_PORT" in checks[0]["value"]
    assert len(checks) > 15


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["demo", "--transports", "efa"], 2, "'efa'"),
        (["demo", "--block-size", "12Q"], 2, "64KiB"),
        (["demo", "--block-size", "12"], 2, "multiple of 8"),
        (["demo", "--blocks", "0"], 2, "at least 1"),
        (["demo", "--pool-size", "64KiB"], 2, "larger pool"),
        (["serve", "--port", "70000"], 2, "65535"),
        (["serve", "--size", "4000TiB"], 2, "1024TiB"),
        (["serve", "--size", "1000TiB"], 1, "Ask for less"),
        (["serve", "--transport", "rdma"], 1, "no RDMA"),
        (["bench", "--peer", "nohost"], 2, "192.0.2.10:PORT"),
        (["bench", "--peer", "127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["bench", "--transport", "rdma"], 1, "no RDMA"),
        (["bench", "--op", "append"], 2, "write, read"),
        (["bench", "--plot", "x.jpg"], 2, ".png or .svg"),
        (["bench", "--key-env", "NOT_SET_ANYWHERE"], 2, "export NOT_SET_ANYWHERE="),
        (["mesh", "/nowhere/hosts.txt"], 2, "cannot be read"),
        (["mesh", "/dev/null"], 2, "a mesh has two at least"),
        (["mesh", "hosts.txt", "--timeout", "0"], 2, "1 to 3600"),
        (["mesh", "hosts.txt", "--parallel", "65"], 2, "1 to 64"),
        (["frobnicate"], 2, "invalid choice"),
        (["demo", "--frobnicate"], 2, "kvxfer demo --help"),
        (["demo", "foo"], 2, "unexpected argument foo"),
        (["bench", "--transports", "rdma"], 1, "no RDMA"),
    ],
)
def test_mistake_is_told_in_one_line_with_what_to_do(words: list[str], status: int, told: str) -> None:
    done = run(*words, KVXFER_CONNECT_TIMEOUT_S="0.3")

    assert done.returncode == status
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert told in done.stderr


@pytest.mark.parametrize("words", [["devices"], ["bench", "--transport", "rdma"], ["bench", "--peer", "127.0.0.1:1"]])
def test_failure_of_a_command_with_json_is_one_object(words: list[str]) -> None:
    done = run(*words, "--json", KVXFER_CONNECT_TIMEOUT_S="0.3")

    (told,) = objects(done.stdout)
    assert done.returncode == 1
    assert set(told) == {"error", "remedy"}
    assert told["error"] in done.stderr
    assert told["remedy"] in done.stderr


def test_port_in_use_is_told_with_the_port(serve: Serve) -> None:
    port = serve.address.rpartition(":")[2]

    done = run("serve", "--port", port)

    assert done.returncode in (1, 2)
    assert done.stderr.count("\n") == 1
    assert port in done.stderr


def test_traceback_is_shown_when_asked_for() -> None:
    done = run("demo", "--block-size", "12", KVXFER_TRACEBACK="1")

    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "UsageError" in done.stderr


def test_reader_that_goes_away_is_no_error() -> None:
    doctor = subprocess.Popen(
        [*KVXFER, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert doctor.stdout is not None
    assert doctor.stderr is not None
    doctor.stdout.close()

    err = doctor.stderr.read()
    doctor.wait(20)
    doctor.stderr.close()

    assert (doctor.returncode, err) == (141, "")


@pytest.mark.parametrize("command", ["", "demo", "serve", "bench", "devices", "doctor", "mesh"])
def test_help_teaches_by_example(command: str) -> None:
    done = run(*command.split(), "--help")

    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert f"kvxfer {command}" in done.stdout


def test_version_is_that_of_the_package() -> None:
    done = run("--version")

    assert done.stdout == f"kvxfer {kvxfer.__version__}\n"


@pytest.mark.parametrize(("extra", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_on_a_terminal_only_where_it_is_wanted(extra: dict[str, str], coloured: bool) -> None:
    leader, follower = pty.openpty()
    env = environment(**{"TERM": "xterm-256color", **extra})
    if "NO_COLOR" not in extra:
        env.pop("NO_COLOR", None)
    process = subprocess.Popen([*KVXFER, "doctor"], stdout=follower, stderr=follower, stdin=follower, env=env)
    os.close(follower)

    text = b""
    while select.select([leader], [], [], TIMEOUT_S)[0]:
        try:
            data = os.read(leader, 65536)
        except OSError:  # EIO: the last writer has gone
            break
        if not data:
            break
        text += data
    os.close(leader)

    assert process.wait(20) == 0
    assert (b"\x1b[" in text) is coloured


BENCH_SMALL = [
    "bench",
    "--transport",
    "shm,tcp",
    "--sizes",
    "4KiB,16KiB",
    "--bytes-per-batch",
    "256KiB",
    "--rounds",
    "2",
]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plot_of_a_bench_has_a_line_for_each_transport_and_operation(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install '.[plot]'")
    file = tmp_path / f"speed.{suffix}"

    done = run(*BENCH_SMALL, "--plot", str(file), MPLCONFIGDIR=str(tmp_path))

    assert done.returncode == 0, done.stderr
    assert f"plot written to {file}" in done.stderr
    if suffix == "png":
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert data.endswith(b"IEND\xaeB`\x82")
        return
    texts = set(re.findall("<!-- (.*?) -->", file.read_text()))  # matplotlib writes beside each text what it is
    lines = {f"{transport} {operation}" for transport in ("shm", "tcp") for operation in ("write", "read")}
    assert lines | {"memcpy of the same blocks", "4 KiB", "16 KiB", "block size", "GB/s (10^9 bytes)"} <= texts


def test_plot_where_nothing_can_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install '.[plot]'")
    full = tmp_path / "full.svg"
    full.symlink_to("/dev/full")

    done = run(*BENCH_SMALL, "--plot", str(full), MPLCONFIGDIR=str(tmp_path))

    assert done.returncode == 1
    assert "GB/s" in done.stdout, "what was measured is not lost"
    assert done.stderr.splitlines()[-1].startswith(f"kvxfer: --plot {full}: No space left on device.")


@pytest.mark.parametrize(
    "words", [["doctor"], ["doctor", "--json"], ["devices", "--json"], ["shim-path"], ["demo", *SMALL]]
)
def test_full_disk_under_the_output_is_told_in_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*KVXFER, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            env=environment(),
            check=False,
        )

    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", [["demo", *SMALL], ["shim-path"], ["bench", *BENCH_SMALL[1:]]])
def test_closed_standard_streams_are_as_dev_null(words: list[str], closed: str) -> None:
    """A socket got the number of standard output, and what was printed would have gone into it."""
    line = f'"$@" {closed}'

    done = subprocess.run(
        ["sh", "-c", line, "sh", *KVXFER, *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(),
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
