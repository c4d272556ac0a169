"""Processes with `mooncake.engine`, driven by a test; see `mooncake_program.py`, which is what runs over there."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvxfer.compat import shim_path
from tests.support.peer import ROOT, wait_until

PROGRAM = Path(__file__).with_name("mooncake_program.py")
REPLY_TIMEOUT_S = 50.0
NBYTES = 1 << 20


class RaisedError(Exception):
    """What the code over there raised; `kind` is the name of its type."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class DiedError(Exception):
    """The process over there is gone; `status` is its exit status, negative for a signal."""

    def __init__(self, status: int, log: str) -> None:
        super().__init__(f"exit status {status}\n{log[-3000:]}")
        self.status = status


class Program:
    """One process. `python`: the interpreter with the real Mooncake; None for this one with kvxfer in its place."""

    def __init__(self, python: Path | None = None, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVXFER_", "MC_", "NCCL_"))}
        if python is None:
            kept["PYTHONPATH"] = os.pathsep.join([str(shim_path()), str(ROOT)])
        else:
            kept |= {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in close
        self.process = subprocess.Popen(
            [str(python or sys.executable), str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**kept, **environment},
        )

    def run(self, code: str, **names: Any) -> Any:
        """Evaluate an expression, or run statements and return their `result`; raises RaisedError, or DiedError."""
        self.begin(code, **names)
        return self.finish()

    def begin(self, code: str, **names: Any) -> None:
        """Send code; `finish` has its answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"code": code, "names": names}) + "\n")
            self.process.stdin.flush()

    def finish(self, timeout_s: float = REPLY_TIMEOUT_S) -> Any:
        """Wait for the answer to `begin`."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], timeout_s)[0], f"no answer\n{self.log()}"
        line = self.process.stdout.readline()
        if not line:
            raise DiedError(self.process.wait(10), self.log())
        answer: Mapping[str, Any] = json.loads(line)
        if "raised" in answer:
            raise RaisedError(answer["raised"], answer["text"])
        return answer["value"]

    def initialize(self, protocol: str = "tcp") -> str:
        """Start its engine; returns the session id."""
        code = self.run("E.initialize('127.0.0.1', 'P2PHANDSHAKE', protocol, '')", protocol=protocol)
        assert code == 0, self.log()
        return f"127.0.0.1:{self.run('E.get_rpc_port()')}"

    def log(self) -> str:
        """What it printed so far."""
        self._log.seek(0)
        return self._log.read()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep it from running meanwhile."""
        self.process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as nothing can catch."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Let it end, or end it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()
        self._log.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pair:
    """An initiator and a target, each with NBYTES registered.

    In the initiator's names: S the target's session id, B its memory, U memory of it that is not registered; A own
    memory that is registered, X own memory that is not, OWN the own session id, DEAD one of nobody.
    """

    def __init__(self, python: Path | None = None, **environment: str) -> None:
        self.target = Program(python, **environment)
        self.initiator = Program(python, **environment)
        try:
            self.session = self.target.initialize()
            own = self.initiator.initialize()
            prepare = "A = memory(N); X = memory(N); result = (E.register_memory(A, N), A, X)"
            code, address, other = self.target.run(prepare, N=NBYTES)
            assert code == 0
            self.target_address: int = address
            names = {"S": self.session, "B": address, "U": other, "OWN": own, "DEAD": "127.0.0.1:1"}
            assert self.initiator.run(prepare, N=NBYTES, **names)[0] == 0
        except BaseException:
            self.close()
            raise

    def run(self, code: str, **names: Any) -> Any:
        """Run code in the initiator."""
        return self.initiator.run(code, **names)

    def close(self) -> None:
        """End both."""
        self.initiator.close()
        self.target.close()
