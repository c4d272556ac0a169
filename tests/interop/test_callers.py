"""Who calls Mooncake today runs on kvxfer unchanged: files of SGLang, vLLM, LMCache and checkpoint-engine.

The files come out of the packages' wheels, which are downloaded and neither installed nor unpacked; what they import
and is not needed for transfers are stubs (wheel_modules.py). `callers.py` says what is done with them. The same is done
with the real Mooncake, and the differences must be those that are listed here.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.interop.environments import download, frameworks_python, mooncake_python
from tests.interop.processes import clean_environment, shim_path

DOCUMENT = Path(__file__).parents[2] / "docs" / "mooncake.md"
pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(900)]
PACKAGES = {  # fixed, so that a release of theirs does not fail our tests; raise them, and look at what changed
    "sglang": "sglang==0.5.23",
    "checkpoint_engine": "checkpoint-engine==0.4.2",
    "lmcache": "lmcache==0.5.6",
    "vllm_ec": "vllm==0.33.0",
    "vllm": "vllm==0.33.0",
}
DIFFERENT = {
    "rdma": "Mooncake goes over tcp without a word where there is no RDMA device",
    "ib_device": "SGLang itself: Mooncake needs MC_FORCE_TCP, with which SGLang leaves the device out",
    "dead": "a code that tells the reason, where Mooncake's is -1",
    "outside": "a code that tells the reason, where Mooncake's is -1",
    "asleep": "a code that tells the reason, where Mooncake's is -1",
    "uneven": "the message holds a port",
    "unknown_id": "Mooncake crashes",
}
DIFFERENT_OF = {"lmcache": {"arrived": "Mooncake's transfer_check_status looks at the first row only, and is early"}}


@functools.cache
def run(caller: str, engine: str = "kvxfer") -> dict[str, Any]:
    wheel, python = download(PACKAGES[caller]), frameworks_python()
    environment = dict(clean_environment())
    if engine == "kvxfer":
        environment["PYTHONPATH"] = shim_path()
    else:
        packages = sorted(mooncake_python().parents[1].glob("lib/python3.*/site-packages"))[0]
        if not (python.parents[1] / packages.relative_to(mooncake_python().parents[1])).exists():
            pytest.skip(f"the real Mooncake is installed for another Python: {packages}")
        environment |= {"PYTHONPATH": str(packages), "MC_FORCE_TCP": "1", "CALLERS_ENGINE": "mooncake"}
    done = subprocess.run(
        [python, Path(__file__).with_name("callers.py"), caller, wheel],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    seen["log"] = done.stderr
    return seen


@pytest.mark.parametrize("caller", PACKAGES)
def test_it_sees_what_it_sees_of_mooncake(caller: str) -> None:
    ours, theirs = run(caller), run(caller, "mooncake")

    different = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)} - {"log"}

    assert different <= DIFFERENT.keys() | DIFFERENT_OF.get(caller, {}).keys(), {
        name: (ours.get(name), theirs.get(name)) for name in different
    }


def test_sglang() -> None:
    seen = run("sglang")

    assert seen["session"] is True
    assert seen["ib_device"] == "mlx5_0"
    assert seen["register"] == 0
    assert seen["batch_write"] == 0
    assert seen["arrived"] is True
    assert seen["threads"] == [0]
    assert seen["read"] == 0
    assert seen["probe"] == [0, True]
    assert seen["dead"] is True
    assert seen["outside"] is True
    assert seen["after_failure"] == 0
    assert seen["register_again"] == "RuntimeError: Mooncake memory registration failed (ret=-7)"
    assert seen["deregister_again"] == "RuntimeError: Mooncake memory deregistration failed (ret=-3)"


def test_checkpoint_engine() -> None:
    seen = run("checkpoint_engine")

    assert seen["arrived"] is True
    assert seen["dead"] == seen["twice"] == "AssertionError: "
    assert seen["unregistered"] == 20


def test_lmcache() -> None:
    seen = run("lmcache")

    assert seen["read"] == seen["after_failure"] == [True, True]
    assert seen["arrived"] is True
    assert seen["refused"] == [False, False]
    assert seen["dead"].startswith("RuntimeError: Failed to submit async read.")
    assert seen["unknown_id"] is True


def test_vllm_encoder_cache() -> None:
    seen = run("vllm_ec")

    assert seen["arrived"] is True
    assert (seen["acquired"], seen["acquired_again"]) == (4, 2)
    assert "failed with status -" in seen["dead"]
    assert (seen["released"], seen["unregistered"], seen["unregistered_again"]) == (True, True, False)


def test_vllm_connector() -> None:
    seen = run("vllm")

    assert seen["engine"] is True
    assert seen["regions"] == 4
    assert seen["sends"] == [0]
    assert seen["arrived"] is True
    assert seen["dead"] < 0
    assert seen["outside"] < 0
    assert seen["after_failure"] == 0
    assert seen["asleep"] < 0
    assert seen["awake"] == 0


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this machine has an RDMA device")
@pytest.mark.parametrize("caller", ["sglang", "vllm_ec", "vllm"])
def test_rdma_without_a_device_fails_with_the_reason_in_the_log(caller: str) -> None:
    seen = run(caller)

    assert "RuntimeError" in seen["rdma"]
    assert 'protocol "rdma"' in seen["log"]
    assert "KVXFER_ALLOW_FALLBACK=1" in seen["log"]


def sources(package: str) -> str:
    """All Python of a package's wheel."""
    with zipfile.ZipFile(download(package)) as archive:
        return "".join(archive.read(name).decode() for name in archive.namelist() if name.endswith(".py"))


@pytest.mark.parametrize(
    ("program", "package"),
    [
        ("vllm serve", "vllm"),
        ("sglang.launch_server", "sglang"),
        ("lmcache server", "lmcache"),
        ("lmcache coordinator", "lmcache"),
    ],
)
def test_commands_of_the_document_have_options_that_the_package_knows(program: str, package: str) -> None:
    commands = [line for line in DOCUMENT.read_text().splitlines() if program in line and not line.startswith("#")]
    text = sources(PACKAGES[package])

    options = {word for line in commands for word in re.findall(r"(?<= )--[a-z0-9-]+", line)}
    values = {
        word
        for line in commands
        for word in re.findall(r"mooncake_te\b|mooncake_tcp|mooncake_protocol|MC_TE_\w+", line)
    }
    assert options
    missing = [word for word in options | values if word not in text and word[2:].replace("-", "_") not in text]
    assert not missing
