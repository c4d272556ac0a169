"""None left: of descriptors, threads, memory. What comes out is typed and names the limit; nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer import KvxferError, PeerRefusedError, ResourceLimitError, TransferEngine, TransferError
from kvxfer.limits import shortages_told
from kvxfer.transports.shm_copy import PARALLEL_NBYTES
from tests.support.peer import Peer, pattern, run_script

NBYTES = 1 << 20

# Runs all that an engine does with ever fewer descriptors left, and tells what came out and how many stayed open.
LADDER = """
import gc, json, os, resource, sys, time, traceback
import numpy as np
import kvxfer

transport, address, there = sys.argv[1], sys.argv[2], int(sys.argv[3])

def open_files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

def use():
    with kvxfer.TransferEngine(transports=(transport,)) as engine:
        memory = engine.allocate(1 << 16)
        own = engine.register(np.zeros(4096, np.uint8))
        segment = engine.open_segment(address)
        engine.write(segment, memory.address, there, 4096)
        rows = [memory.address, memory.address + 8192], [there, there + 8192], 4096
        engine.submit_write(segment, *rows, notify=b"done").wait()
        engine.read(segment, *rows)
        engine.wait_all([engine.submit_write(segment, *rows) for _ in range(6)])
        engine.unregister(memory)

use()
before = open_files()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for free in range(24):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + free, hard))
    told, remedy = "", ""
    try:
        use()
    except BaseException as error:
        told, remedy = type(error).__name__, getattr(error, "remedy", repr(error))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    deadline = time.monotonic() + 5
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    print(json.dumps([free, told, remedy, open_files() - before]), flush=True)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_process_out_of_descriptors_is_told_the_limit_and_keeps_nothing(transport: str) -> None:
    with Peer(transports=(transport,)) as peer:
        there = peer.allocate(NBYTES)
        process = run_script(LADDER, transport, peer.address, str(there.address))
        out, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    steps = [json.loads(line) for line in out.splitlines()]
    assert not [step for step in steps if step[3]], "descriptors stayed open"
    failed = [step for step in steps if step[1]]
    assert {step[1] for step in failed} <= {"ResourceLimitError", "TransferError"}
    assert not [step for step in failed if "`ulimit -n`" not in step[2]]
    assert failed[0][0] == 0
    assert steps[-1][1] == "", "with enough of them it works"


# Has no more room for a large region: neither for one of its own nor to map one of the peer's. With the limit gone both
# work.
NO_ROOM = """
import json, resource, sys
from pathlib import Path
import kvxfer

address, there, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with kvxfer.TransferEngine(transports=("shm",)) as engine:
    small = engine.allocate(4096)
    segment = engine.open_segment(address)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + nbytes // 2, resource.RLIM_INFINITY))
    for work in (lambda: engine.allocate(nbytes), lambda: engine.write(segment, small.address, there, 4096)):
        try:
            work()
        except kvxfer.KvxferError as error:
            print(json.dumps([type(error).__name__, error.message, error.remedy, error.values["errno"]]), flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    engine.allocate(nbytes)
    engine.write(segment, small.address, there, 4096)
"""


def test_a_process_without_room_for_memory_is_told_the_size_and_the_limit() -> None:
    nbytes = 128 * NBYTES
    with Peer(transports=("shm",)) as peer:
        there = peer.allocate(nbytes, name="large")
        process = run_script(NO_ROOM, peer.address, str(there.address), str(nbytes))
        out, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (0, "")
    allocated, mapped = [json.loads(line) for line in out.splitlines()]
    assert allocated[:2] == ["AllocationError", f"allocate({nbytes}) failed: Cannot allocate memory."]
    assert mapped[0] == "TransferError"
    assert f"mapping region 'large' [{there.address:#x}, {there.address + nbytes:#x})" in mapped[1]
    for _, _, remedy, number in (allocated, mapped):
        assert number == errno.ENOMEM
        assert "(`ulimit -v`)" in remedy


def test_an_engine_does_not_go_without_shm_because_descriptors_are_short_for_a_moment() -> None:
    script = """
import os, resource, kvxfer
kvxfer.TransferEngine().close()
for free in range(1, 30):
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + free, 4096))
    try:
        with kvxfer.TransferEngine(transports=("shm", "tcp")) as engine:
            print(engine.transports)
    except kvxfer.ResourceLimitError:
        print("short")
"""
    process = run_script(script)
    out, err = process.communicate(timeout=30)

    assert process.returncode == 0, err
    assert set(out.split("\n")) == {"short", "('shm', 'tcp')", ""}


@contextlib.contextmanager
def no_thread_named(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let no thread start whose name begins like this; gives the names of those that were refused."""
    start, refused = threading.Thread.start, []

    def start_or_fail(self: threading.Thread) -> None:
        if self.name.startswith(name):
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_fail)
        yield refused


def test_a_stream_whose_thread_cannot_start_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with Peer(transports=("tcp",)) as peer, TransferEngine(transports=("tcp",)) as engine:
        there, here = peer.allocate(NBYTES), engine.allocate(NBYTES)
        segment = engine.open_segment(peer.address)

        with (
            no_thread_named("kvxfer-dial", monkeypatch),
            pytest.raises(ResourceLimitError, match="ulimit -u") as caught,
        ):
            engine.write(segment, here.address, there.address, NBYTES)

        assert caught.value.values["peer"] == peer.address
        engine.write(segment, here.address, there.address, NBYTES)


def test_a_server_without_a_thread_for_data_says_so_to_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with Peer(transports=("tcp",)) as peer, TransferEngine(transports=("tcp",)) as server:
        there = server.allocate(NBYTES)
        write = f"""
import kvxfer, numpy as np
here = engine.allocate({NBYTES})
try:
    engine.write(engine.open_segment({server.address!r}), here.address, {there.address}, {NBYTES})
    result = ""
except kvxfer.KvxferError as error:
    result = type(error).__name__ + ": " + str(error)
"""

        with no_thread_named("kvxfer-data", monkeypatch):
            told = peer.run(write)

        assert told.startswith(PeerRefusedError.__name__)
        assert "no thread could be started" in told
        assert "ulimit -u" in told
        assert peer.run(write) == ""


def test_await_without_a_thread_names_the_limit_and_loses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with Peer(transports=("shm",)) as peer, TransferEngine(transports=("shm",)) as engine:
        there, here = peer.allocate(NBYTES), engine.allocate(NBYTES)
        batch = engine.submit_write(engine.open_segment(peer.address), here.address, there.address, NBYTES)

        async def wait() -> None:
            await batch

        with no_thread_named("asyncio", monkeypatch), pytest.raises(ResourceLimitError, match="ulimit -u"):
            asyncio.run(wait())

        batch.wait()


def test_a_copy_that_was_queued_for_a_helper_without_a_thread_is_never_made_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`submit` of a thread pool keeps the call when its thread cannot start; the next thread would run it."""
    with Peer(transports=("shm",)) as peer, TransferEngine(transports=("shm",), shm_copy_threads=2) as engine:
        nbytes = 8 * PARALLEL_NBYTES
        there = peer.register(nbytes).address  # no shared file: the kernel copies, with a helper
        here = engine.register(pattern(nbytes, 1).copy())
        segment = engine.open_segment(peer.address)
        with no_thread_named("kvxfer-copy", monkeypatch) as refused:
            batch = engine.submit_write(segment, here.address, there, nbytes)
            with pytest.raises(TransferError):
                batch.wait(timeout_s=0.0)
        assert refused

        seen = peer.run(f"import ctypes; result = ctypes.string_at({there}, {nbytes})")
        other = engine.register(np.zeros(nbytes, np.uint8))
        engine.read(segment, other.address, there, nbytes)  # its helper's thread starts, and finds the old call

        assert seen.endswith(b"\0")
        assert peer.run(f"import ctypes; result = ctypes.string_at({there}, {nbytes})") == seen


def test_what_is_no_shortage_passes_unchanged() -> None:
    for error in (OSError(13, "Permission denied"), RuntimeError("something else"), KvxferError("ours")):
        with pytest.raises(type(error)) as caught, shortages_told("opening"):
            raise error
        assert caught.value is error
    with pytest.raises(ResourceLimitError, match="opening failed"), shortages_told("opening"):
        raise MemoryError
