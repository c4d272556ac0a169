"""A process with an engine of its own, driven by a test: `Peer` here, `_Child` over there.

Commands are the public methods of `_Child`, called as `peer.call("allocate", 4096)`; what they raise is raised here, so
every exception that crosses has been pickled. Started as a plain script, so that a child imports nothing of the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
REPLY_TIMEOUT_S = 120.0 if os.environ.get("LAB_MACHINE") == "qemu" else 40.0
"""An emulated machine imports for long where two share a host's processors."""


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a child: no settings of whoever runs the tests, this tree first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    return {**kept, "PYTHONPATH": path, **extra}


def run_script(source: str, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    """Start a Python script whose warnings are errors; its stdout, stderr and stdin are pipes."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**extra),
    )


def pattern(nbytes: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes that differ from those of every other seed; never zero, so that an untouched byte shows."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)


@dataclass
class Remote:
    """A region of the peer's, as the test knows it."""

    peer: Peer
    region_id: int
    address: int
    nbytes: int

    def fill(self, data: Any, offset: int = 0) -> None:
        """Put bytes into it, over there."""
        self.peer.call("fill", self.region_id, offset, bytes(data))

    def bytes(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return what is in it, as seen over there."""
        found: bytes = self.peer.call("content", self.region_id, offset, self.nbytes if nbytes is None else nbytes)
        return found

    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The same as an array."""
        return np.frombuffer(self.bytes(), np.uint8)

    def unregister(self) -> None:
        """Take it back, over there."""
        self.peer.call("unregister", self.region_id)


class Peer:
    """The process at the other end. `settings` are those of its TransferEngine; a context manager.

    uid: the user to become before the engine is made. prefix: a command to run the process under, such as
    ("unshare", "-n").
    """

    def __init__(self, *, uid: int | None = None, prefix: tuple[str, ...] = (), **settings: Any) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment(),
                cwd="/",
            )
        self._connection = Connection(ours.detach())
        try:
            self.address: str = self.call("start", settings, uid)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.address.rpartition(":")[2])

    def call(self, name: str, *arguments: Any) -> Any:
        """Run a command over there; returns what it returns, raises what it raises."""
        self.begin(name, *arguments)
        return self.finish()

    def begin(self, name: str, *arguments: Any) -> None:
        """Send a command; `finish` has its answer."""
        self._connection.send((name, arguments))

    def finish(self) -> Any:
        """Wait for the answer to `begin`."""
        assert self._connection.poll(REPLY_TIMEOUT_S), "the peer does not answer"
        is_good, value = self._connection.recv()
        if not is_good:
            raise value
        return value

    def allocate(self, nbytes: int, **settings: Any) -> Remote:
        """Have it allocate memory."""
        return Remote(self, *self.call("allocate", nbytes, settings))

    def register(self, nbytes: int, *, read_only: bool = False, **settings: Any) -> Remote:
        """Have it register a numpy array."""
        return Remote(self, *self.call("register", nbytes, read_only, settings))

    def register_parts(self, *sizes: int) -> list[Remote]:
        """Have it register neighbouring parts of one array as regions of their own."""
        return [Remote(self, *one) for one in self.call("register_parts", sizes)]

    def register_at(self, address: int, nbytes: int) -> Remote:
        """Have it map memory at an address and register it."""
        return Remote(self, *self.call("register_at", address, nbytes))

    def register_aliased(self, nbytes: int, count: int) -> Remote:
        """Have it register a region of `count` times the same memory (`map_aliased`); content is one time's."""
        return Remote(self, *self.call("register_aliased", nbytes, count))

    def run(self, source: str, **names: Any) -> Any:
        """Run statements over there, with `engine` and `names`; returns what they leave in `result`."""
        return self.call("run", source, names)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep the process from running (SIGSTOP) meanwhile."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process as nothing can catch (SIGKILL)."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Let it end in order, or end it."""
        with contextlib.suppress(OSError):
            self._connection.send(("end", ()))
        self._connection.close()
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Return the first true value of the condition; it fails the test if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)
    return found


def map_fixed(address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map anonymous memory at exactly this address; it stays mapped until the process ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fixed_noreplace = 0x100000  # MAP_FIXED_NOREPLACE, mmap(2)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_noreplace
    found = libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert found == address, os.strerror(ctypes.get_errno())
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def map_aliased(nbytes: int, count: int) -> tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Map the same memory `count` times, one behind the other: as many addresses as a test likes, for little memory.

    Returns the address of the first and an array of it; both stay mapped until the process ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fd = os.memfd_create("kvxfer-tests")
    os.truncate(fd, nbytes)
    whole = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, mmap(2)
    base = int(libc.mmap(None, nbytes * count, 0, whole, -1, 0))
    for address in range(base, base + nbytes * count, nbytes):
        flags = mmap.MAP_SHARED | 0x10  # MAP_FIXED
        assert libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) == address
    os.close(fd)
    return base, np.frombuffer((ctypes.c_uint8 * nbytes).from_address(base), np.uint8)


class _Child:
    """The commands, over there."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.names: dict[str, Any] = {"np": np, "os": os, "time": time}
        self._regions: dict[int, Any] = {}
        self._arrays: dict[int, Any] = {}

    def start(self, settings: dict[str, Any], uid: int | None) -> str:
        import kvxfer

        if uid is not None:
            kvxfer.TransferEngine().close()  # imports what it needs: the interpreter may lie where only root may read
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        self.engine = kvxfer.TransferEngine(**settings)
        self.names |= {"engine": self.engine, "kvxfer": kvxfer, "regions": self._regions, "arrays": self._arrays}
        return str(self.engine.address)

    def allocate(self, nbytes: int, settings: dict[str, Any]) -> tuple[int, int, int]:
        region = self.engine.allocate(nbytes, **settings)
        return self._keep(region, region.array)

    def register(self, nbytes: int, read_only: bool, settings: dict[str, Any]) -> tuple[int, int, int]:
        array = np.zeros(nbytes, np.uint8)
        array.flags.writeable = not read_only
        return self._keep(self.engine.register(array, **settings), array)

    def register_parts(self, sizes: tuple[int, ...]) -> list[tuple[int, int, int]]:
        whole = np.zeros(sum(sizes), np.uint8)
        parts = np.split(whole, np.cumsum(sizes)[:-1])
        return [self._keep(self.engine.register(part), part) for part in parts]

    def register_at(self, address: int, nbytes: int) -> tuple[int, int, int]:
        array = map_fixed(address, nbytes)
        return self._keep(self.engine.register((address, nbytes)), array)

    def register_aliased(self, nbytes: int, count: int) -> tuple[int, int, int]:
        address, array = map_aliased(nbytes, count)
        return self._keep(self.engine.register((address, nbytes * count)), array)

    def _keep(self, region: Any, array: Any) -> tuple[int, int, int]:
        self._regions[region.region_id] = region
        self._arrays[region.region_id] = array
        return region.region_id, region.address, region.nbytes

    def fill(self, region_id: int, offset: int, data: bytes) -> None:
        self._arrays[region_id][offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def content(self, region_id: int, offset: int, nbytes: int) -> bytes:
        return bytes(self._arrays[region_id][offset : offset + nbytes])

    def unregister(self, region_id: int) -> None:
        self.engine.unregister(self._regions[region_id])
        del self._regions[region_id], self._arrays[region_id]

    def unregister_all(self) -> None:
        for region_id in list(self._regions):
            self.unregister(region_id)

    def notifications(self, timeout_s: float = 0.0) -> list[tuple[str, bytes]]:
        return [(one.peer, one.payload) for one in self.engine.notifications(timeout_s)]

    def run(self, source: str, names: dict[str, Any]) -> Any:
        space = {**self.names, **names, "result": None}
        exec(source, space)
        return space["result"]


def main() -> None:
    """Answer commands until the pipe ends."""
    import faulthandler

    faulthandler.enable()
    connection = Connection(int(sys.argv[1]))
    child = _Child()
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, ConnectionError):
            break
        if name == "end":
            break
        try:
            answer = True, getattr(child, name)(*arguments)
        except BaseException as exc:
            if isinstance(exc, KeyError | AttributeError | SyntaxError | NameError):
                traceback.print_exc()
            answer = False, exc
        connection.send(answer)
    if child.engine is not None:
        child.engine.close()


if __name__ == "__main__":
    main()
