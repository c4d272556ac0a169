"""Memory of a process is written only while it is the process that was met: not after its end, its exec, its number."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvxfer.transports.shm_copy import TOKEN_FRESH_S, ProcessIdentity
from kvxfer.types import Opcode
from tests.support.peer import wait_until

TOKEN = bytes(range(1, 33))
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


class Shared:
    """Memory that every child of this process has at one address, with the token in it: all children look alike."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory[: len(TOKEN)] = TOKEN
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def seen_in(self, pid: int, offset: int) -> bytes:
        with Path(f"/proc/{pid}/mem").open("rb") as memory:
            memory.seek(self.address + offset)
            return memory.read(8)


SHARED = Shared()


@contextlib.contextmanager
def child(then: Callable[[], object] = signal.pause) -> Iterator[int]:
    """Fork a process that does `then`."""
    pid = os.fork()
    if pid == 0:
        try:
            then()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def write(identity: ProcessIdentity, offset: int = 1024) -> bool:
    row = ctypes.create_string_buffer(b"written!", 8)
    return identity.copy_row(Opcode.WRITE, ctypes.addressof(row), SHARED.address + offset, 8)


def fork_as(pid: int) -> int:
    """Fork a child with a process number that was used before."""
    for _ in range(1000):
        LAST_PID.write_text(str(pid - 1))
        again = os.fork()
        if again == 0:
            signal.pause()
            os._exit(0)
        if again == pid:
            return again
        os.kill(again, signal.SIGKILL)  # somebody else on this machine was faster
        os.waitpid(again, 0)
    pytest.skip("the number was not to be had again")


def test_a_process_that_was_met_is_written_to() -> None:
    with child() as pid:
        identity = ProcessIdentity(pid, SHARED.address, TOKEN, "peer")

        assert identity.check() == 0
        assert write(identity)
        assert SHARED.seen_in(pid, 1024) == b"written!"
        identity.close()


@pytest.mark.skipif(
    not os.access(LAST_PID, os.W_OK) or os.geteuid() != 0, reason="needs root, to choose a process number"
)
def test_another_process_with_its_number_and_the_same_memory_is_not_written_to() -> None:
    with child() as pid:
        identity = ProcessIdentity(pid, SHARED.address, TOKEN, "peer")
        assert identity.check() == 0

    again = fork_as(pid)
    try:
        assert SHARED.seen_in(again, 0) == TOKEN[:8], "it looks like the one that was met"
        assert identity.check() == errno.ESRCH
        assert not write(identity)
        assert SHARED.seen_in(again, 1024) == bytes(8)
    finally:
        os.kill(again, signal.SIGKILL)
        os.waitpid(again, 0)
        identity.close()


def test_the_same_process_with_another_program_is_not_written_to() -> None:
    hears, says = os.pipe()
    with child(lambda: (os.read(hears, 1), os.execv("/bin/sleep", ["sleep", "60"]))) as pid:
        identity = ProcessIdentity(pid, SHARED.address, TOKEN, "peer")
        assert identity.check() == 0
        os.write(says, b"x")
        wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
        time.sleep(2 * TOKEN_FRESH_S)

        assert identity.check() == errno.ESRCH
        assert not write(identity)
        identity.close()
    os.close(hears)
    os.close(says)
