"""The second process of demo and bench: `Child` starts, asks and stops it; `main` is what runs in it.

The two talk in JSON lines over pipes, for control only. The child has a session of its own, so that Ctrl-C reaches the
parent alone, and it cannot outlive the parent: it ends when its standard input does, and the kernel kills it
(prctl(2), PR_SET_PDEATHSIG) should it be too busy to notice.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from kvxfer.cli.workload import Plan, Pool, allocate_plain, plan_fields
from kvxfer.errors import KvxferError, PeerError
from kvxfer.text import format_seconds

__all__ = ["Child", "ChildPool", "main"]

START_TIMEOUT_S = 30.0
REPLY_TIMEOUT_S = 120.0
"""The longest question is to fill or compare a pool: about 1 s a GiB on a slow machine."""
STOP_TIMEOUT_S = 1.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
WORDS_SHOWN_NBYTES = 2000


@dataclass(frozen=True)
class RemoteRegion:
    """One pool of the child, by the kind of its memory: "allocated" or "registered"."""

    address: int
    nbytes: int


class Child:
    """A process with an engine and pools, for as long as the context lasts."""

    def __init__(self, *, pool_nbytes: int, memory: Sequence[str], transports: Sequence[str]) -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        self._buffer = b""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with _interrupts_deferred():  # an interrupt inside of Popen would lose the process it has begun
                self._process = _start_process(self._words)
            self.pid = self._process.pid
            started = self.ask(
                "start",
                timeout_s=START_TIMEOUT_S,
                parent=os.getpid(),
                pool_nbytes=pool_nbytes,
                memory=list(memory),
                transports=list(transports),
            )
        except BaseException:
            self.close()
            raise
        self.address: str = started["address"]
        self.regions = {name: RemoteRegion(**fields) for name, fields in started["regions"].items()}

    def ask(self, command: str, timeout_s: float = REPLY_TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        """Send one command and return the answer; raises PeerError with the child's words if there is none."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **fields}).encode() + b"\n")
        except BrokenPipeError as exc:
            raise self._gone(command) from exc
        answer: dict[str, Any] = json.loads(self._read_line(command, timeout_s))
        if "error" in answer:
            raise PeerError(answer["error"], remedy=answer["remedy"], peer=f"process {self.pid}")
        return answer

    def close(self) -> None:
        """End the process whatever it is doing; tolerated twice."""
        with _interrupts_deferred():
            if self._process is not None:
                _end_process(self._process)
            self._words.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_line(self, command: str, timeout_s: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(descriptor, 1 << 16) if ready else b""
            if not data:
                raise (
                    self._gone(command)
                    if ready
                    else PeerError(
                        f"the second process did not answer {command!r} within {format_seconds(timeout_s)} s.",
                        remedy="Is the machine overloaded or out of memory? Try fewer or smaller blocks.",
                        peer=f"process {self.pid}",
                    )
                )
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _gone(self, command: str) -> PeerError:
        assert self._process is not None
        status = self._process.wait()
        self._words.seek(0)
        words = self._words.read()[-WORDS_SHOWN_NBYTES:].decode(errors="replace").strip()
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return PeerError(
            f"the second process ended {how} at {command!r}" + (f"; its last words: {words}." if words else "."),
            remedy="SIGKILL usually is the memory limit: try smaller pools." if status < 0 else "",
            peer=f"process {self.pid}",
        )


class ChildPool:
    """A pool of the child as `workload.Lane` sees it: the child itself looks at its memory."""

    how = "the other process"

    def __init__(self, child: Child, memory: str) -> None:
        self._child = child
        self._memory = memory

    def use(self, plan: Plan) -> None:
        """Begin with another plan."""
        self._child.ask("use", memory=self._memory, **plan_fields(plan))

    def prepare_write(self) -> None:
        """Make sure that what is going to be written is not there yet."""
        self._child.ask("clear_destination", memory=self._memory)

    def wrong_after_write(self, salt: int, *, check_rest: bool) -> int:
        """Return how many blocks are not as they should be after a WRITE."""
        answer = self._child.ask("verify", memory=self._memory, salt=salt, check_rest=check_rest)
        return int(answer["wrong"])

    def prepare_read(self, salt: int) -> None:
        """Make sure that the source blocks hold the pattern of `salt`."""
        self._child.ask("fill_source", memory=self._memory, salt=salt)


def _start_process(words: IO[bytes]) -> subprocess.Popen[bytes]:
    package_folder = str(Path(__file__).absolute().parents[2])
    search_path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", "kvxfer.cli.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=words,
        bufsize=0,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": search_path},
    )


def _end_process(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    if process.returncode is None:  # not waited for yet, so that the number is still its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process.stdout.close()


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait until the block is through."""
    noticed = []
    try:
        before = signal.signal(signal.SIGINT, lambda *_: noticed.append(True))
    except ValueError:  # not the main thread: no handler runs here anyway
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if noticed:
        raise KeyboardInterrupt


class _Responder:
    """The child's side: an engine, its pools, and one method per command."""

    CHILD_SALT = 1 << 32
    """Far from the parent's salts, which count up from small numbers."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._pools: dict[str, Pool] = {}
        self.commands: dict[str, Callable[..., dict[str, Any]]] = {
            "start": self.start,
            "use": self.use,
            "clear_destination": self.clear_destination,
            "fill_source": self.fill_source,
            "verify": self.verify,
        }

    def start(self, *, parent: int, pool_nbytes: int, memory: list[str], transports: list[str]) -> dict[str, Any]:
        _die_with_parent(parent)
        import kvxfer

        engine = self._stack.enter_context(
            kvxfer.TransferEngine(host="127.0.0.1", port=0, transports=tuple(transports))
        )
        regions = {}
        for at, kind in enumerate(memory):
            if kind == "allocated":
                region = engine.allocate(pool_nbytes, name=f"kvxfer.{kind}")
                array = region.array
            else:
                array = allocate_plain(pool_nbytes)
                region = engine.register(array, name=f"kvxfer.{kind}")
            self._pools[kind] = Pool(array, self.CHILD_SALT + at)
            regions[kind] = {"address": int(region.address), "nbytes": int(region.nbytes)}
        return {"address": engine.address, "regions": regions}

    def use(self, *, memory: str, **plan: int) -> dict[str, Any]:
        self._pools[memory].use(Plan(**plan))
        return {}

    def clear_destination(self, *, memory: str) -> dict[str, Any]:
        self._pools[memory].clear_destination()
        return {}

    def fill_source(self, *, memory: str, salt: int) -> dict[str, Any]:
        self._pools[memory].fill_source(salt)
        return {}

    def verify(self, *, memory: str, salt: int, check_rest: bool) -> dict[str, Any]:
        pool = self._pools[memory]
        return {"wrong": pool.wrong_in_destination(salt) + (pool.wrong_in_rest() if check_rest else 0)}


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(0)


def main() -> int:
    """Answer commands from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    with contextlib.ExitStack() as stack, answers:
        responder = _Responder(stack)
        for line in sys.stdin.buffer:
            fields = json.loads(line)
            try:
                answer = responder.commands[fields.pop("command")](**fields)
            except KvxferError as error:
                answer = {"error": error.message, "remedy": error.remedy}
            print(json.dumps(answer), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
