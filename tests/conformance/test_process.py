"""Processes as they are: forked, interrupted, left without close(), ended by a signal, killed."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import ForkedError, KvxferError, TransferEngine
from tests.conformance.conftest import Link
from tests.support.peer import Peer, pattern, run_script, wait_until

MIB = 1 << 20
EXIT_S = 20.0
"""A hang guard for a process that ends: below the 30 s that its batch would run."""


# Fork.


def in_child(work: Callable[[], None], leave: Callable[[], None] = lambda: os._exit(0)) -> int:
    """Run `work` in a forked child that ends by `leave`; return its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(10)  # a child that hangs fails its test, not the whole run
            work()
            leave()
        except SystemExit as exc:
            os._exit(exc.code if isinstance(exc.code, int) else 99)
        except BaseException as exc:
            os.write(2, f"child: {exc!r}\n".encode())
        os._exit(98)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_forked(link: Link, here: Any, there: Any, batch: Any) -> None:
    """Every call says at once whose engine it is."""
    calls: list[Callable[[], Any]] = [
        lambda: link.engine.write(link.segment, here.address, there.address, 64),
        lambda: link.engine.write(link.segment, [here.address], [there.address], 64),
        lambda: link.engine.read(link.segment, here.address, there.address, 64),
        lambda: link.engine.submit_write(link.segment, here.address, there.address, 64),
        lambda: link.engine.allocate(4096),
        lambda: link.engine.register(bytearray(16)),
        lambda: link.engine.unregister(here),
        lambda: link.engine.open_segment(link.peer.address),
        link.engine.notifications,
        lambda: link.engine.write_blocks(link.segment, here, [0], link.segment.regions[0], [0], block_nbytes=64),
        link.segment.refresh,
        lambda: link.segment.region("no such name"),
        lambda: batch.wait(2.0),
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except ForkedError as error:
            said = str(error)
        else:
            raise AssertionError(f"call {number} did not raise")
        assert str(os.getppid()) in said
        assert str(os.getpid()) in said
    link.engine.close()
    link.segment.close()


@pytest.mark.parametrize("how", ["os._exit", "sys.exit"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_after_fork_is_told_and_harms_nothing(own_link: Link, how: str) -> None:  # B160
    link = own_link
    here, there = link.here(MIB), link.there(MIB)
    link.engine.write(link.segment, here.address, there.address, MIB)
    batch = link.engine.submit_write(link.segment, [here.address], [there.address], [64])

    status = in_child(
        lambda: check_forked(link, here, there, batch), (lambda: os._exit(0)) if how == "os._exit" else sys.exit
    )

    assert status in (0, 99 if how == "sys.exit" else 0)  # sys.exit() has no code
    batch.wait()
    for turn in range(100):
        here.array[:4096] = turn + 1
        offsets = np.arange(4) * 8192
        link.engine.write(link.segment, here.address + offsets // 8, there.address + offsets, 1024, notify=b"%d" % turn)
    assert there.bytes(0, 1024) == bytes([100]) * 1024
    assert len(link.peer.call("notifications")) == 100
    assert link.segment.is_open


FORK_IN_FLIGHT = """
import multiprocessing, os, subprocess, sys, threading
import numpy as np
import kvxfer
transport, address, mode = sys.argv[1:4]
remote, nbytes = int(sys.argv[4]), int(sys.argv[5])

def child(queue):
    queue.put(os.getpid())

if __name__ == "__main__":
    engine = kvxfer.TransferEngine(transports=(transport,))
    segment = engine.open_segment(address)
    here = engine.allocate(nbytes)
    here.array[:] = 1
    order = np.random.default_rng(0).permutation(nbytes // 4096) * 4096
    stop = threading.Event()
    failures = []
    def move():
        while not stop.is_set():
            try:
                engine.write(segment, here.address + order, remote + order, 4096)
            except BaseException as exc:
                failures.append(repr(exc))
                return
    thread = threading.Thread(target=move)
    thread.start()
    for _ in range(5):
        if mode == "popen":
            subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
        else:
            context = multiprocessing.get_context("fork")
            queue = context.SimpleQueue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            queue.get()
            process.join()
            assert process.exitcode == 0, process.exitcode
    stop.set()
    thread.join()
    assert not failures, failures
    here.array[:] = 2
    for _ in range(100):
        engine.write(segment, here.address + order, remote + order, 4096)
    engine.close()
    print("good")
"""


@pytest.mark.parametrize("mode", ["fork", "popen"])
def test_fork_and_popen_while_a_batch_runs(link: Link, mode: str) -> None:  # B160
    there = link.there(4 * MIB)

    script = run_script(FORK_IN_FLIGHT, link.transport, link.peer.address, mode, str(there.address), str(there.nbytes))
    out, err = script.communicate(timeout=30)

    assert (script.returncode, out, err) == (0, "good\n", "")
    assert (there.array() == 2).all()


def move_by_spawn(transport: str, address: str, remote: int, queue: Any) -> None:
    with TransferEngine(transports=(transport,)) as engine:
        here = engine.allocate(4096)
        here.array[:] = 3
        engine.write(engine.open_segment(address), here.address, remote, 4096)
        queue.put("good")


@pytest.mark.slow
def test_multiprocessing_spawn(link: Link) -> None:  # B160
    there = link.there(4096)
    source = (
        "import multiprocessing, sys\n"
        "sys.path.insert(0, sys.argv[4])\n"
        "from tests.conformance.test_process import move_by_spawn\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=move_by_spawn, args=(*sys.argv[1:3], int(sys.argv[3]), queue))\n"
        "    process.start()\n"
        "    print(queue.get(timeout=20))\n"
        "    process.join()\n"
        "    sys.exit(process.exitcode)\n"
    )

    script = run_script(
        source, link.transport, link.peer.address, str(there.address), str(Path(__file__).resolve().parents[2])
    )
    out, err = script.communicate(timeout=30)

    assert (script.returncode, out, err) == (0, "good\n", "")
    assert there.bytes() == b"\3" * 4096


def test_a_new_engine_in_a_forked_child_works() -> None:  # B160
    source = (
        "import multiprocessing, sys, kvxfer\n"
        "def child(address, remote, queue):\n"
        "    with kvxfer.TransferEngine() as engine:\n"
        "        here = engine.allocate(4096)\n"
        "        here.array[:] = 4\n"
        "        engine.write(engine.open_segment(address), here.address, remote, 4096)\n"
        "    queue.put('good')\n"
        "with kvxfer.TransferEngine() as engine:\n"
        "    region = engine.allocate(4096)\n"
        "    context = multiprocessing.get_context('fork')\n"
        "    queue = context.SimpleQueue()\n"
        "    process = context.Process(target=child, args=(engine.address, region.address, queue))\n"
        "    process.start()\n"
        "    print(queue.get(), int(region.array.min()))\n"
        "    process.join()\n"
        "    sys.exit(process.exitcode)\n"
    )

    script = run_script(source)
    out, err = script.communicate(timeout=20)

    assert (script.returncode, out, err) == (0, "good 4\n", "")


# Interrupts.


INTERRUPTED = """
import sys, time
import numpy as np
import kvxfer
transport, address, remote, nbytes, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
engine = kvxfer.TransferEngine(transports=(transport,), transfer_timeout_s=600.0, keepalive_timeout_s=600.0)
segment = engine.open_segment(address)
here = engine.register(np.ones(nbytes, np.uint8))
order = np.random.default_rng(0).permutation(nbytes // 65536) * 65536
engine.write(segment, here.address, remote, 1)
batch = engine.submit_write(segment, here.address + order, remote + order, 65536, notify=b"never")
print("ready", flush=True)
sys.stdin.readline()
print("waiting", flush=True)
try:
    if how == "wait":
        batch.wait()
    elif how == "wait_all":
        engine.wait_all([batch])
    else:
        engine.write(segment, here.address + order, remote + order, 65536, notify=b"never")
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
if how == "write":
    batch.cancel()
assert batch.is_done or how == "wait_all", batch
batch.cancel()
assert batch.exception is not None
here.array[:] = 2
engine.write(segment, here.address, remote, nbytes, notify=b"after")
engine.unregister(here)
engine.close()
print("usable", flush=True)
"""


@pytest.mark.parametrize("how", ["wait", "wait_all", "write"])
def test_interrupt_ends_a_stuck_wait_and_the_engine_stays_usable(own_link: Link, how: str) -> None:  # B163
    link, nbytes = own_link, 32 * MIB
    there = link.there(nbytes)
    script = run_script(INTERRUPTED, link.transport, link.peer.address, str(there.address), str(nbytes), how)
    assert script.stdin is not None
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"

    with link.stalled():
        script.stdin.write("\n")
        script.stdin.flush()
        assert script.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        script.send_signal(signal.SIGINT)
        assert said_within(script, 20.0) == "interrupted\n"  # while the peer is still: nothing else could end it

    out, err = script.communicate("\n", timeout=20)
    assert (script.returncode, out, err) == (0, "usable\n", "")
    assert [payload for _, payload in link.peer.call("notifications")] == [b"after"]
    assert (there.array() == 2).all()


BLOCKED = """
import sys
import threading
import kvxfer
transport, address, remote, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
names = "handshake_timeout_s connect_timeout_s transfer_timeout_s unregister_timeout_s keepalive_timeout_s".split()
engine = kvxfer.TransferEngine(transports=(transport,), **dict.fromkeys(names, 600.0))
other = kvxfer.TransferEngine(transports=(transport,), **dict.fromkeys(names, 600.0))
here = engine.allocate(4096)
if how != "open_segment":
    segment = engine.open_segment(address)
    engine.write(segment, here.address, remote, 4096)
print("ready", engine.address, flush=True)
sys.stdin.readline()
print("waiting", flush=True)
try:
    if how == "notifications":
        engine.notifications(600.0)
    elif how == "notifications of a peer":
        engine.notifications(600.0, peer="127.0.0.1:1")
    elif how == "open_segment":
        engine.open_segment(address)
    elif how == "refresh":
        segment.refresh()
    elif how == "region":
        segment.region("none of that name")
    elif how == "unregister":
        engine.unregister(here)
    elif how == "await":
        import asyncio

        async def move():
            await engine.submit_write(segment, here.address, remote, 4096, notify=b"x")

        asyncio.run(move())
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
if how != "open_segment":
    engine.write(segment, here.address, remote, 4096, notify=b"after")
other.close()
engine.close()
print("usable", flush=True)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    "how", ["notifications", "notifications of a peer", "open_segment", "refresh", "region", "await"]
)
def test_interrupt_ends_every_call_that_waits(transport: str, how: str) -> None:  # B163
    """Every limit is 10 minutes and the peer stands still: only the interrupt can end the call."""
    with Peer(transports=(transport,), keepalive_timeout_s=600.0) as peer:
        there = peer.allocate(4096)
        script = run_script(BLOCKED, transport, peer.address, str(there.address), how)
        assert script.stdin is not None
        assert script.stdout is not None
        assert script.stdout.readline().startswith("ready ")

        with peer.stopped():
            script.stdin.write("\n")
            script.stdin.flush()
            assert script.stdout.readline() == "waiting\n"
            time.sleep(0.3)
            script.send_signal(signal.SIGINT)
            assert said_within(script, 20.0) == "interrupted\n"

        out, err = script.communicate("\n", timeout=20)
        assert (script.returncode, out, err) == (0, "usable\n", "")


def test_interrupt_ends_an_unregister_that_waits_for_a_peer() -> None:  # B163
    """The region is half taken back: no new transfer begins, and unregister can be called again."""
    with Peer(transports=("shm",)) as peer, TransferEngine(transports=("shm",), unregister_timeout_s=600.0) as engine:
        region = engine.allocate(4096)
        peer.run(
            "segment = engine.open_segment(address)\nhere = engine.allocate(4096)\n"
            "engine.write(segment, here.address, there, 4096)\nimport builtins\nbuiltins.kept = segment",
            address=engine.address,
            there=region.address,
        )
        with peer.stopped():
            threading.Timer(0.3, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                engine.unregister(region)
            assert not region.is_live

        engine.unregister(region)
        assert engine.regions == ()


def said_within(script: subprocess.Popen[str], timeout_s: float) -> str:
    """Return the next line of a script, "" where it says nothing in time."""
    assert script.stdout is not None
    return script.stdout.readline() if select.select([script.stdout], [], [], timeout_s)[0] else ""


# The end of a process.


ENDING = """
import os, signal, sys, threading, time
import numpy as np
import kvxfer
transport, address, remote, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
engine = kvxfer.TransferEngine(transports=(transport,))
segment = engine.open_segment(address)
here = engine.allocate(4096)
engine.write(segment, here.address, remote, 4096, notify=b"begun")
engine.write(segment, [here.address], [remote], 64)
def wait():
    try:
        engine.notifications(60.0)
        batch = engine.submit_write(segment, here.address, remote, 64, notify=b"x")
        batch.wait()
    except kvxfer.ClosedError:
        pass
print("ready", flush=True)
if how == "exception":
    raise SystemExit("on purpose")
elif how == "sigterm":
    time.sleep(60)
elif how == "handled":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(60)
elif how == "daemon":
    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.1)
elif how == "batch":
    batch = engine.submit_write(segment, here.address, remote, 64)
elif how == "global":
    keep = engine, segment, here.array
elif how == "_exit":
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("plain", 0, ""),
        ("exception", 1, "on purpose\n"),
        ("sigterm", -signal.SIGTERM, ""),
        ("handled", 0, ""),
        ("daemon", 0, ""),
        ("batch", 0, ""),
        ("global", 0, ""),
        ("_exit", 0, ""),
    ],
)
def test_script_that_never_closes_ends_quietly(link: Link, how: str, status: int, said: str) -> None:  # B163
    there = link.there(4096)
    script = run_script(ENDING, link.transport, link.peer.address, str(there.address), how)
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"
    if status == -signal.SIGTERM or how == "handled":
        time.sleep(0.1)
        script.terminate()

    out, err = script.communicate(timeout=EXIT_S)

    assert (script.returncode, out, err) == (status, "", said)
    wait_until(lambda: link.peer.run("result = not engine._service._sessions or len(engine._service._sessions) == 1"))


STUCK = """
import sys, threading, time
import numpy as np
import kvxfer
transport, address, remote, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
engine = kvxfer.TransferEngine(transports=(transport,))
segment = engine.open_segment(address)
here = engine.register(np.ones(nbytes, np.uint8))
engine.write(segment, here.address, remote, 1)
batch = engine.submit_write(segment, here.address, remote, nbytes, notify=b"never")
print("ready", flush=True)
sys.stdin.readline()
def wait():
    try:
        batch.wait()
    except kvxfer.KvxferError:
        pass
threading.Thread(target=wait, daemon=sys.argv[5] == "daemon").start()
time.sleep(0.2)
if sys.argv[5] == "closed":
    engine.close()
"""


@pytest.mark.parametrize("how", ["daemon", "closed"])
def test_thread_stuck_in_wait_does_not_keep_the_process(own_link: Link, how: str) -> None:  # B163
    link = own_link
    there = link.there(32 * MIB)
    script = run_script(STUCK, link.transport, link.peer.address, str(there.address), str(there.nbytes), how)
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"

    with link.stalled():
        out, err = script.communicate("\n", timeout=EXIT_S)

        assert (script.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("how", ["close", "exit", "kill"])
def test_nothing_is_left_behind(own_link: Link, how: str) -> None:  # B155, B156
    link = own_link
    before = set(os.listdir("/dev/shm"))
    here, there = link.here(MIB), link.there(MIB, name="pool")
    link.engine.write(link.segment, here.address, there.address, MIB)

    assert set(os.listdir("/dev/shm")) <= before  # nothing has a name in a file system, so nothing can stay
    if how == "kill":
        link.peer.kill()
    elif how == "exit":
        link.peer.begin("run", "os._exit(0)", {})
        link.peer.process.wait()
    else:
        link.peer.close()

    assert not [name for name in set(os.listdir("/dev/shm")) - before if "kvxfer" in name]
    with pytest.raises(KvxferError):
        link.engine.write(link.segment, [here.address], [there.address], 4096, timeout_s=2.0)


def test_memory_of_a_killed_peer_is_given_back() -> None:  # B156
    nbytes = 256 * MIB

    def shmem_kb() -> int:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("Shmem:"):
                return int(line.split()[1])
        raise AssertionError

    with TransferEngine(transports=("shm",)) as engine:
        peer = Peer(transports=("shm",))
        there, here = peer.allocate(nbytes), engine.allocate(4096)
        segment = engine.open_segment(peer.address)
        engine.write(segment, here.address, there.address, 4096)
        peer.run("arrays[one][:] = 1", one=there.region_id)
        full = shmem_kb()
        peer.kill()
        peer.close()

        wait_until(lambda: shmem_kb() < full - (nbytes >> 10) // 2)


def test_peer_that_attached_and_ended_takes_nothing_with_it() -> None:  # B155
    with Peer(transports=("shm",)) as owner:
        there = owner.allocate(4096)
        there.fill(pattern(4096, 1))
        for end in ("exit", "os._exit", "kill"):
            user = Peer(transports=("shm",))
            seen = user.run(
                "here = engine.allocate(4096)\n"
                "engine.read(engine.open_segment(address), here.address, remote, 4096)\n"
                "result = here.array.tobytes()",
                address=owner.address,
                remote=there.address,
            )
            assert seen == pattern(4096, 1).tobytes()
            if end == "kill":
                user.kill()
            elif end == "os._exit":
                user.begin("run", "os._exit(0)", {})
            with contextlib.suppress(Exception):
                user.close()

        with TransferEngine(transports=("shm",)) as engine:
            here = engine.allocate(4096)
            engine.read(engine.open_segment(owner.address), here.address, there.address, 4096)
            assert here.array.tobytes() == pattern(4096, 1).tobytes()


@pytest.mark.slow
def test_submodules_may_be_imported_in_any_order() -> None:  # B165
    names = sorted(
        ".".join(path.with_suffix("").parts)
        for path in (Path("kvxfer") / one.relative_to(Path(sys.modules["kvxfer"].__file__ or "").parent)
                     for one in Path(sys.modules["kvxfer"].__file__ or "").parent.rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py")
    )  # fmt: skip
    source = (
        "import importlib, os, sys\n"
        "for name in sys.argv[1:]:\n"
        "    pid = os.fork()\n"  # a process without any of them for each
        "    if pid == 0:\n"
        "        importlib.import_module(name)\n"
        "        import kvxfer\n"
        "        os._exit(0 if kvxfer.TransferEngine else 1)\n"
        "    assert os.waitpid(pid, 0)[1] == 0, name\n"
        "print('good')\n"
    )

    script = run_script("import numpy, cffi\n" + source, *names)
    out, err = script.communicate(timeout=50)

    assert (script.returncode, out, err) == (0, "good\n", "")
    assert len(names) > 30


def test_plain_thread_stuck_in_wait_does_not_keep_the_process(own_link: Link) -> None:  # B163
    link = own_link
    there = link.there(32 * MIB)
    script = run_script(STUCK, link.transport, link.peer.address, str(there.address), str(there.nbytes), "plain")
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"

    with link.stalled():
        try:
            out, err = script.communicate("\n", timeout=EXIT_S)
        finally:
            script.kill()

        assert (script.returncode, out, err) == (0, "", "")


def test_engine_that_is_lost_is_told_and_still_serves() -> None:
    with TransferEngine(transports=("tcp",)) as user:
        lost: TransferEngine | None = TransferEngine(transports=("tcp",))
        assert lost is not None
        there = lost.allocate(4096)
        there.array[:] = pattern(4096, 3)
        address, remote = lost.address, there.address
        runtime = lost._runtime
        del there

        with pytest.warns(ResourceWarning, match=f"unclosed <TransferEngine {re.escape(address)}"):
            del lost

        here = user.allocate(4096)
        user.read(user.open_segment(address), here.address, remote, 4096)
        assert here.array.tobytes() == pattern(4096, 3).tobytes()
        runtime.close()
