"""A process with the real Mooncake, driven by a test: `Mooncake` here, `_Child` over there.

Commands are the public methods of `_Child`. Started as a plain script by the Python that has Mooncake.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

QUIET = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "3"}


def pattern(nbytes: int, seed: int) -> Any:
    """Return bytes that differ from those of every other seed; never zero, so that an untouched byte shows."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)


class Mooncake:
    """The process at the other end, with one registered buffer of `nbytes`; a context manager."""

    def __init__(self, python: Path, *, nbytes: int = 8 << 20, **environment: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
        self.process = subprocess.Popen(
            [python, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**clean, **QUIET, **environment},
        )
        self.nbytes = nbytes
        try:
            self.port, self.address = self.call("start", nbytes)
        except BaseException:
            self.kill()
            raise
        self.name = f"127.0.0.1:{self.port}"

    def call(self, command: str, *arguments: Any) -> Any:
        """Return what the command returns over there."""
        self.begin(command, *arguments)
        return self.finish()

    def begin(self, command: str, *arguments: Any) -> None:
        """Send a command; `finish` has its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()

    def finish(self) -> Any:
        """Wait for the answer to `begin`."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process with Mooncake ended: {self.process.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def fill(self, seed: int) -> Any:
        """Put a pattern into the buffer over there; returns it."""
        self.call("fill", seed)
        return pattern(self.nbytes, seed)

    def digest(self, nbytes: int | None = None) -> str:
        """Return `digest` of the buffer over there."""
        return str(self.call("digest", self.nbytes if nbytes is None else nbytes))

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep the process from running (SIGSTOP) meanwhile."""
        os.kill(self.process.pid, signal.SIGSTOP)
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)  # nothing where it was killed and waited for

    def kill(self) -> None:
        """End the process as nothing can catch."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Mooncake:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def digest(data: Any) -> str:
    """Return what two ends compare instead of the bytes."""
    return hashlib.sha256(data).hexdigest()


class _Child:
    """The commands, over there."""

    def start(self, nbytes: int) -> tuple[int, int]:
        from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode  # type: ignore[import-not-found]

        self.notify_kind, self.opcodes = TransferNotify, {"write": TransferOpcode.Write, "read": TransferOpcode.Read}
        self.engine = TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self.buffer = np.zeros(nbytes, np.uint8)
        self.address = int(self.buffer.ctypes.data)
        assert self.register() == 0
        return self.engine.get_rpc_port(), self.address

    def register(self) -> int:
        return int(self.engine.register_memory(self.address, self.buffer.nbytes))

    def unregister(self) -> int:
        return int(self.engine.unregister_memory(self.address))

    def fill(self, seed: int) -> None:
        self.buffer[:] = pattern(self.buffer.nbytes, seed)

    def digest(self, nbytes: int) -> str:
        return digest(self.buffer[:nbytes])

    def move(self, opcode: str, target: str, local: list[int], remote: list[int], nbytes: list[int]) -> int:
        """Move rows; `local` are offsets in the buffer."""
        addresses = [self.address + offset for offset in local]
        return int(self.engine.batch_transfer_sync(target, addresses, remote, nbytes, self.opcodes[opcode]))

    def time_moves(
        self, opcode: str, target: str, local: list[int], remote: list[int], nbytes: list[int], times: int
    ) -> float:
        """Move rows so many times; return the seconds of one."""
        addresses = [self.address + offset for offset in local]
        started = time.perf_counter()
        for _ in range(times):
            assert self.engine.batch_transfer_sync(target, addresses, remote, nbytes, self.opcodes[opcode]) == 0
        return (time.perf_counter() - started) / times

    def write_and_notify(self, target: str, remote: int, nbytes: int, name: str, message: str) -> int:
        notify = self.notify_kind(name, message)
        return int(self.engine.transfer_sync(target, self.address, remote, nbytes, self.opcodes["write"], notify))

    def notifies(self) -> list[tuple[str, str]]:
        return [(one.name, one.msg) for one in self.engine.get_notifies()]

    def probe(self, target: str) -> int:
        return int(self.engine.send_probe(target))

    def first_buffer(self, target: str) -> int:
        return int(self.engine.get_first_buffer_address(target))


def main() -> None:
    """Answer commands until the pipe ends."""
    child = _Child()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(child, command)(*arguments)}
        except Exception as exc:
            answer = {"error": repr(exc)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
