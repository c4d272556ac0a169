"""kvxfer as a tensor transport of Ray, with the real Ray."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.interop.environments import frameworks_python

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(900)]


def run(part: str, transports: str = "shm,tcp") -> dict[str, Any]:
    """What `ray_actors.py` saw; it runs once for all tests."""
    return _run(part, transports)


@functools.cache
def _run(part: str, transports: str) -> dict[str, Any]:
    python = frameworks_python()
    with tempfile.TemporaryDirectory(prefix="kvxfer-ray-") as folder:  # short: Ray puts Unix sockets in it
        environment = {
            **os.environ,
            "KVXFER_TRANSPORTS": transports,
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        done = subprocess.run(
            [python, Path(__file__).with_name("ray_actors.py"), part],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_tensor_moves_between_two_actors(transport: str) -> None:
    seen = run("actors", "shm,tcp" if transport == "shm" else "tcp")

    assert seen["total"] == seen["expected"]
    assert seen["transports"] == [transport]


def test_views_empty_tensors_and_other_values_arrive() -> None:
    assert run("actors")["many"] == [True, list(range(10, 20)), [0], 7, "kept"]


def test_the_driver_can_read_a_tensor() -> None:
    assert run("actors")["in_driver"] is True


def test_a_tensor_that_is_not_contiguous_is_refused_with_the_reason() -> None:
    assert "tensor 0 of a Ray object is not contiguous. Return tensor.cpu().contiguous()" in run("actors")["refused"]


def test_memory_is_let_go_when_ray_drops_the_object() -> None:
    seen = run("actors")

    assert seen["regions_held"] is True
    assert seen["regions_left"] == seen["regions_left_at_reader"] == 0


def test_an_actor_that_was_killed_is_told() -> None:
    seen = run("actors")

    assert "PeerClosedError" in seen["after_kill"] or "PeerUnreachableError" in seen["after_kill"]


def test_the_manager_alone_keeps_its_contract() -> None:
    assert run("manager") == {"checked": 7}
