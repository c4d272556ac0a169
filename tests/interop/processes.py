"""Start real engines and servers, and talk to them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from tests.interop.environments import ROOT, end

SCRIPT = Path(__file__).with_name("engine_process.py")
START_TIMEOUT_S = 30


class EngineProcess:
    """An engine in a process of its own; `call` runs a method there."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what the method returned."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"{method}{arguments} ended the process:\n{self.log()[-3000:]}"
        return json.loads(line)

    def log(self) -> str:
        """What it printed on stderr."""
        return self._log.read_text(errors="replace")


@contextlib.contextmanager
def engine_process(python: Path, log: Path, **environment: str) -> Iterator[EngineProcess]:
    """Run `engine_process.py` with the real Mooncake of that Python."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [python, SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **environment},
        )
    try:
        yield EngineProcess(process, log)
    finally:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # it ends by itself, and takes back what it published
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        end(process)


@contextlib.contextmanager
def shim_process(log: Path, **environment: str) -> Iterator[EngineProcess]:
    """Run `engine_process.py` with kvxfer in Mooncake's place."""
    with engine_process(Path(sys.executable), log, PYTHONPATH=shim_path(), **environment) as process:
        yield process


def shim_path() -> str:
    """What `kvxfer shim-path` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer", "shim-path"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout.strip()


@contextlib.contextmanager
def server_process(command: list[Any], log: IO[str], is_up: Callable[[], bool]) -> Iterator[subprocess.Popen[str]]:
    """Run a server until the end of the block; enters when it is up."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)
    try:
        limit = time.monotonic() + START_TIMEOUT_S
        while not is_up():
            if process.poll() is not None or time.monotonic() > limit:
                pytest.fail(f"{command[0]} did not come up:\n{Path(log.name).read_text()[-3000:]}")
            time.sleep(0.02)
        yield process
    finally:
        end(process)


def accepts(port: int) -> bool:
    """Whether something listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), 0.5).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    """Return a port that nobody has; for servers that cannot choose one themselves."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def clean_environment() -> Mapping[str, str]:
    """The environment without settings of engines."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MC_", "KVXFER_"))}
