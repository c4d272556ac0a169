"""Start the processes of a contender, call functions in them over pipes, and read what CPU time they used.

The pipes carry control messages only (pickles between our own processes); nothing that is timed goes over them.
`Worker` is the orchestrator's end, `serve` the other one. Linux only: CPU clocks of other processes, SIGSTOP, prctl.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

BENCH_FOLDER: Final = Path(__file__).resolve().parent
LOG_FOLDER: Final = BENCH_FOLDER / "build" / "logs"
CALL_TIMEOUT_S: Final = 120.0  # far above the slowest honest call; a contender that hangs must not hang the bench
PR_SET_PDEATHSIG: Final = 1  # prctl(2)
CPUCLOCK_SCHED: Final = 2  # linux/posix-timers.h: the process CPU clock of pid is (~pid << 3) | CPUCLOCK_SCHED


class WorkerError(Exception):
    """A process of a contender failed, hung or went away; the message says which and what it said last."""


class Worker:
    """A child process that answers calls. It lives as long as the run, so interleaving costs no process start."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        LOG_FOLDER.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._log_path = LOG_FOLDER / f"{name.replace(' ', '.')}.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests: BinaryIO = self._process.stdin  # type: ignore[assignment]
        self._replies: BinaryIO = self._process.stdout  # type: ignore[assignment]

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, function: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Return what the function of that name in the worker returns.

        Raises WorkerError when it raised, when the process ended, or when no reply came in time (it is killed then).
        """
        try:
            _send(self._requests, (function, arguments))
            if not select.select([self._replies], [], [], timeout_s)[0]:
                self._process.kill()
                raise WorkerError(f"{self.name}: {function} did not return within {timeout_s:g} s; process killed")
            error, result = _receive(self._replies)
        except (EOFError, BrokenPipeError) as exc:
            code = self._process.wait(timeout=10)
            raise WorkerError(f"{self.name}: process ended (exit {code}) in {function}. {self.last_words()}") from exc
        if error is not None:
            raise WorkerError(f"{self.name}: {function} failed: {error}")
        return result

    def last_words(self) -> str:
        """Return the end of what the process wrote to its standard error, and where the rest is."""
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        place = self._log_path.relative_to(BENCH_FOLDER.parent)
        return f"Its last line: {lines[-1]!r} (all of it: {place})" if lines else "It said nothing"

    def pause(self) -> None:
        """Stop the process: a contender whose idle threads spin would slow down whoever is measured next."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process; a second call does nothing."""
        self.resume()
        if not self._requests.closed:
            with contextlib.suppress(BrokenPipeError):
                self._requests.close()  # the worker's loop ends at the end of its input
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()


def python_worker(
    name: str, python: str, module: str, settings: Mapping[str, Any], environment: Mapping[str, str]
) -> Worker:
    """Start `python -m module` with `settings` as keyword arguments of its `main`."""
    paths = [str(BENCH_FOLDER), str(BENCH_FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [python, "-m", module, json.dumps(dict(settings))]
    return Worker(name, command, {"PYTHONPATH": os.pathsep.join(paths), **environment})


# ---- the worker's side -----------------------------------------------------


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls until the orchestrator closes the pipe.

    The real standard output is the reply pipe; whatever a library prints goes to standard error instead.
    """
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb")
    while True:
        try:
            function, arguments = _receive(requests)
        except EOFError:
            return
        error, result = None, None
        try:
            result = functions[function](*arguments)
        except Exception as exc:
            traceback.print_exc()
            error = f"{type(exc).__name__}: {exc}"
        _send(replies, (error, result))


def public_methods(instance: object) -> dict[str, Callable[..., Any]]:
    """Return the methods a worker offers to `serve`: those of its class without a leading underscore."""
    names = [name for name, value in vars(type(instance)).items() if callable(value) and not name.startswith("_")]
    return {name: getattr(instance, name) for name in names}


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends, even while this one is stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def cpu_time_s(*pids: int) -> float:
    """Return the CPU time of whole processes, user and system, of all threads they have or had."""
    return sum(time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED) for pid in pids)


def memory_nbytes(field: str, pid: int | None = None) -> int:
    """Return a size from /proc/PID/status, such as VmRSS or RssAnon."""
    for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/{pid or 'self'}/status has no {field}")


def machine_words() -> str:
    """Return the machine in a few words, to stand beside figures."""
    uname = os.uname()
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{uname.machine}, {os.cpu_count()} cores, {uname.sysname} {uname.release}, Python {python}"


def _send(pipe: BinaryIO, message: Any) -> None:
    content = pickle.dumps(message)
    pipe.write(struct.pack("<I", len(content)) + content)
    pipe.flush()


def _receive(pipe: BinaryIO) -> Any:
    header = pipe.read(4)
    if len(header) < 4:
        raise EOFError("the other process closed the pipe")
    return pickle.loads(pipe.read(struct.unpack("<I", header)[0]))
