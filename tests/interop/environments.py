"""Environments of their own for what the interop tests need: made once, in build/interop, by pip.

Nothing of it is in kvxfer's own environment. A test whose environment cannot be made is skipped with pip's own words.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "interop"
MOONCAKE = ROOT / "bench" / ".peers" / "mooncake" / "bin" / "python"
INSTALL_TIMEOUT_S = 600


def mooncake_python(*packages: str) -> Path:
    """Return the Python of the environment with the real Mooncake, as `make peers` makes it, with more packages."""
    if not MOONCAKE.exists():
        pytest.skip("the real Mooncake is not installed here: run `make peers`")
    for package in packages:
        if subprocess.run([MOONCAKE, "-c", f"import {package}"], capture_output=True, check=False).returncode:
            _pip(MOONCAKE, "install", package)
    return MOONCAKE


def frameworks_python() -> Path:
    """Return the Python of an environment with Ray, and with what the callers of Mooncake need beside their stubs."""
    packages = ("torch", "ray==2.60.0", "msgspec", "pyzmq")
    return python_with("frameworks", packages, "import kvxfer, msgspec, ray, torch, zmq")


@functools.cache
def python_with(name: str, packages: Sequence[str], check: str) -> Path:
    """Return the Python of the environment `name`: kvxfer from this checkout, and packages, tried in order.

    check: an import that works when all is there.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    python = FOLDER / name / "bin" / "python"
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if python.exists() and not subprocess.run([python, "-c", check], capture_output=True, check=False).returncode:
            return python
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", FOLDER / name], check=True, timeout=120)
        for package in packages:
            # From a folder of wheels that pip's own settings name, if it is there: the package index has torch only
            # with gigabytes of CUDA.
            if subprocess.run(
                [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", package],
                capture_output=True,
                check=False,
                timeout=INSTALL_TIMEOUT_S,
            ).returncode:
                _pip(python, "install", package)
        _pip(python, "install", "--editable", str(ROOT), *packages)  # and what they depend on
        subprocess.run([python, "-c", check], check=True, timeout=120)
    return python


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet", "--retries", "1"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S)
        said = done.stderr.strip().splitlines()[-1:] if done.returncode else None
    except subprocess.TimeoutExpired:
        said = [f"it did not end within {INSTALL_TIMEOUT_S} s"]
    if said is not None:
        pytest.skip(f"pip {' '.join(arguments)} failed: {' '.join(said)}")


def download(requirement: str, *, is_source: bool = False) -> Path:
    """Return the wheel (or source archive) of a package, kept in build/callers; nothing of it is installed."""
    folder = ROOT / "build" / "callers" / requirement
    if not (found := sorted(folder.glob("*"))):
        kind = ["--no-binary", ":all:"] if is_source else ["--only-binary", ":all:"]
        temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
        _pip(Path(sys.executable), "download", "--no-deps", *kind, "--dest", str(temporary), requirement)
        if not folder.exists():
            temporary.rename(folder)
        found = sorted(folder.glob("*"))
    return found[0]


def program(name: str, package: str) -> str:
    """Return the path of a program of this machine, or skip naming the Debian package that has it."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/bin")
    if found is None:
        pytest.skip(f"{name} is not installed here: apt-get install {package}")
    return found


def end(process: subprocess.Popen[str], with_signal: int = signal.SIGTERM) -> None:
    """End a process and wait for it."""
    if process.poll() is None:
        process.send_signal(with_signal)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
