"""`kvxfer mesh`, `doctor --peer` and `demo` on real devices: two engines in one guest, two rails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.rdma, pytest.mark.topology("wire")]

KVXFER = [sys.executable, "-m", "kvxfer"]
RAILS = {("rxa0:1", "rxb0:1"), ("rxa1:1", "rxb1:1")}
TIMEOUT_S = 300.0


def run(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVXFER, *words], capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **extra}, check=False
    )


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@contextmanager
def serve(devices: str) -> Iterator[str]:
    """A `kvxfer serve` that uses these devices; yields its address."""
    process = subprocess.Popen(
        [*KVXFER, "serve", "--size", "32MiB", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVXFER_RDMA_DEVICES": devices},
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def hostfile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all tests: an emulated machine starts the two for long."""
    with ExitStack() as stack:
        file = tmp_path_factory.mktemp("mesh") / "hosts.txt"
        file.write_text("\n".join(stack.enter_context(serve(devices)) for devices in ("rxa0,rxa1", "rxb0,rxb1")))
        yield file


def test_mesh_finds_the_two_wires_and_no_path_across(hostfile: Path) -> None:
    done = run("mesh", str(hostfile), "--json")

    found = objects(done.stdout)
    rails = [one for one in found if "from" in one]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [len(one["ports"]) for one in found if "host" in one] == [2, 2]
    assert len(rails) == 8
    for rail in rails:
        works = tuple(sorted((rail["local"], rail["remote"]))) in RAILS
        assert rail["status"] == ("ok" if works else "no path"), rail
        if works:
            assert rail["nbytes"] > 0
            assert rail["path_mtu"] == 4096
            assert rail["write_gbps"] > 0
            assert rail["read_gbps"] > 0
            assert "10.10." in rail["local_gid"]
        else:
            assert "no route" in rail["reason"]


@pytest.mark.slow
def test_mesh_draws_a_matrix(hostfile: Path) -> None:
    done = run("mesh", str(hostfile), "--parallel", "1")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 engines, 4 ports, 8 rails" in done.stdout
    assert "every rail that should work does" in done.stdout


def test_mesh_of_engines_whose_rails_never_meet_fails(tmp_path: Path) -> None:
    with serve("rxa0") as one, serve("rxb1") as other:
        file = tmp_path / "hosts.txt"
        file.write_text(f"{one}\n{other}\n")

        done = run("mesh", str(file))

    assert done.returncode == 1
    assert "not one rail: no route from 10.10.0.1 to 10.10.1.2" in " ".join(done.stdout.split())


def test_doctor_tries_each_rail_to_a_peer_and_compares_attributes() -> None:
    with serve("rxb0,rxb1") as address:
        done = run("doctor", "--json", "--peer", address, KVXFER_RDMA_DEVICES="rxa0,rxa1")

    checks = {check["name"]: check for check in objects(done.stdout)}
    assert done.returncode == 0, done.stdout + done.stderr
    assert checks["peer rails"]["value"].startswith("2 of 2 rails work; 2 pairs")
    assert "read back and equal" in checks["rxa1:1 to rxb1:1"]["value"]
    assert "for ever on soft RoCE" in checks["rxa0:1 attributes"]["value"]


def test_demo_moves_and_verifies_over_rdma() -> None:
    done = run("demo", "--json", "--transport", "rdma", "--blocks", "64", "--block-size", "16KiB", "--rounds", "2")

    assert done.returncode == 0, done.stdout + done.stderr
    (rdma,) = objects(done.stdout)
    assert rdma["transport"] == "rdma"
    assert rdma["verified"] is True
    assert rdma["write_gbps"] > 0
