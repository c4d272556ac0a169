"""What a review found, one test for each: exceptions at the worst moment, ends that come from elsewhere, races.

Time limits here tell a hang from an answer, nothing finer. Where a moment matters it is held by an event, not a sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvxfer import Region, Rights, Segment, TransferEngine
from kvxfer.batch import TransferBatch
from kvxfer.errors import (
    AccessDeniedError,
    ClosedError,
    KvxferError,
    PeerClosedError,
    PeerError,
    RegionBusyError,
    RemoteAccessError,
    ResourceLimitError,
    TransferCancelledError,
    TransferError,
    UsageError,
)
from kvxfer.handshake.events import CardWanted, Failed, TransportChosen
from kvxfer.handshake.frames import FrameKind
from kvxfer.handshake.machine import Role
from kvxfer.peer_connection import PeerConnection
from kvxfer.peer_transfers import PeerTransfers
from kvxfer.session import Session
from kvxfer.system.calls import Messenger
from kvxfer.transports.loop import Loop
from tests.faults.test_final import Bench
from tests.support.fault_peer import (
    FAKE_ADDRESS,
    FakeHandover,
    FakePeer,
    RawClient,
    data_connections,
    make_machine,
    memory_of,
    respond,
    response,
)
from tests.support.peer import Peer, pattern, run_script, wait_until

NBYTES = 1 << 20
LARGE_NBYTES = 64 << 20
JOIN_S = 20.0


class Pair:
    """Two engines in this process, the first with the second's segment, and memory on either side."""

    def __init__(self, transport: str, **settings: Any) -> None:
        self.engine = TransferEngine(transports=(transport,), **settings)
        self.owner = TransferEngine(transports=(transport,))
        self.here: Region = self.engine.allocate(NBYTES)
        self.there: Region = self.owner.allocate(NBYTES)
        self.here.array[:] = pattern(NBYTES, 1)
        self.segment: Segment = self.engine.open_segment(self.owner.address)

    def close(self) -> None:
        self.engine.close()
        self.owner.close()


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **settings: stack.enter_context(contextlib.closing(Pair(*arguments, **settings)))


class Caller(threading.Thread):
    """A thread that keeps what its call returned or raised, Ctrl-C too."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self.join(JOIN_S)
        assert not self.is_alive(), "it hangs"


@pytest.mark.parametrize("call", ["submit_write", "submit_read"])
def test_ctrl_c_right_after_a_notification_was_sent_takes_it_back(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """It was sent before anybody who gives the batch up knew of it."""
    ask = Session.ask

    def ask_and_interrupt(self: Session, kind: FrameKind, *arguments: Any) -> Any:
        ask(self, kind, *arguments)
        raise KeyboardInterrupt

    with Peer(transports=("shm",)) as peer, TransferEngine(transports=("shm",)) as engine:
        here, there = engine.allocate(NBYTES), peer.allocate(NBYTES)
        row = engine.open_segment(peer.address), here.address, there.address, NBYTES
        engine.write(*row, timeout_s=5.0)
        batch = getattr(engine, call)(*row, notify=b"never")
        with peer.stopped(), monkeypatch.context() as patch:
            patch.setattr(Session, "ask", ask_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                batch.wait()

        assert isinstance(batch.exception, TransferCancelledError)
        engine.write(*row, notify=b"after")
        assert [payload for _, payload in peer.call("notifications")] == [b"after"]


def is_unregistered(engine: TransferEngine, region: Region) -> bool:
    try:
        engine.unregister(region)
    except RegionBusyError:
        return False
    return True


def raising_once_after_a_send(kind: type[BaseException]) -> Callable[..., int]:
    """Return a `Messenger.send` that, the first time bytes were really sent, raises instead of saying how many."""
    send, fired = Messenger.send, threading.Event()

    def send_and_raise(self: Messenger, *arguments: Any) -> int:
        sent = send(self, *arguments)
        if sent > 0 and not fired.is_set():
            fired.set()
            raise kind("after the send")
        return sent

    return send_and_raise


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_exception_while_another_batch_is_helped_ends_that_batch(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """Nobody knows any more how far it is: going on would send bytes twice, and shift all that follow."""
    with TransferEngine(transports=("tcp",), tcp_streams_max=1) as engine, Peer(transports=("tcp",)) as peer:
        here, there = engine.register(pattern(LARGE_NBYTES, 1)), peer.register(LARGE_NBYTES)
        small = peer.register(4096)
        segment = engine.open_segment(peer.address)
        engine.write(segment, here.address, small.address, 64)
        helped = engine.submit_write(segment, here.address, there.address, LARGE_NBYTES)  # takes the only stream
        helped.poll()
        assert not helped.is_done
        waiter = engine.submit_write(segment, here.address, small.address, 4096)
        with monkeypatch.context() as patch:
            patch.setattr(Messenger, "send", raising_once_after_a_send(kind))
            with pytest.raises(kind, match="after the send"):
                waiter.wait()

        reported = memory_of(peer.pid, there.address, LARGE_NBYTES)
        assert helped.is_done, "it goes on, with bytes sent twice"
        with pytest.raises(TransferError):
            helped.wait()
        assert isinstance(waiter.exception, TransferCancelledError)
        wait_until(lambda: data_connections(peer) == 0)
        assert memory_of(peer.pid, there.address, LARGE_NBYTES) == reported
        engine.write(segment, here.address, there.address, LARGE_NBYTES)
        assert there.bytes() == here.array.tobytes()


ENDS = {
    "engine closed": "engine.close()",
    "session ended": "for one in list(engine._service._sessions.values()): one.reset(kvxfer.errors.KvxferError('cut'))",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", list(ENDS))
@pytest.mark.parametrize("opcode", ["write", "read"])
def test_a_mapped_copy_ends_with_the_session_of_the_owner(opcode: str, how: str) -> None:
    with contextlib.closing(Bench("shm")) as bench:
        batch = bench.submit(opcode, timeout_s=60.0)
        assert set(bench.look(opcode)) == {1}  # what warming up wrote; rows of the batch have other values

        def end_when_it_runs() -> None:
            wait_until(lambda: bench.look(opcode)[0] != 1)
            bench.peer.run(ENDS[how])

        ender = Caller(end_when_it_runs)
        with pytest.raises((PeerError, TransferError)):
            batch.wait()
        reported, nbytes_done = bench.look(opcode), batch.nbytes_done
        ender.finish()
        assert ender.error is None
        time.sleep(0.02)

        assert nbytes_done < batch.nbytes, "copied to its end into memory that the owner has taken back"
        assert bench.look(opcode) == reported
        assert batch.nbytes_done == nbytes_done


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ctrl_c_between_planning_and_start_leaves_no_region_in_use(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, transport: str, rows: int
) -> None:
    pair = make_pair(transport)
    offsets = np.arange(rows) * 8192
    columns: Any = (pair.here.address, pair.there.address, 4096)
    if rows > 1:
        columns = (pair.here.address + offsets, pair.there.address + offsets, 4096)

    def interrupt(_: TransferBatch) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TransferBatch, "_start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.engine.submit_write(pair.segment, *columns)

    assert pair.here.local_use_count == 0
    pair.engine.unregister(pair.here)
    pair.owner.unregister(pair.there)
    assert pair.engine.regions == pair.owner.regions == ()


@pytest.mark.slow
@pytest.mark.parametrize("side", ["here", "there"])
@pytest.mark.parametrize("medium", ["tcp", "shm"])
def test_a_dropped_batch_is_failed_after_its_deadline_without_a_waiter(medium: str, side: str) -> None:
    with contextlib.closing(Bench(medium)) as bench:
        batch = bench.write(64, timeout_s=0.3)  # few rows: the peer has seen their addresses, and pinned them
        batch.poll()
        del batch
        gc.collect()

        if side == "here":
            wait_until(lambda: is_unregistered(bench.engine, bench.source), 5.0)
        else:
            bench.far_window.unregister()


@pytest.mark.slow
def test_a_cancelled_await_that_no_thread_has_begun_ends_the_batch() -> None:
    async def cancel_before_it_runs(batch: TransferBatch) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        free = threading.Event()
        busy = loop.run_in_executor(None, free.wait)
        try:

            async def wait() -> None:
                await batch

            task = asyncio.create_task(wait())
            await asyncio.sleep(0.02)
            assert not batch.is_done
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            until = time.monotonic() + 5.0
            while not batch.is_done and time.monotonic() < until:
                await asyncio.sleep(0.005)
            assert batch.is_done, "nobody waits for it, and it has not ended"
        finally:
            free.set()
            await busy

    with contextlib.closing(Bench("shm")) as bench:
        batch = bench.write()
        asyncio.run(cancel_before_it_runs(batch))

        assert isinstance(batch.exception, TransferCancelledError)
        bench.engine.unregister(bench.source)
        bench.far_window.unregister()


@pytest.mark.parametrize("changed", ["local", "remote", "nbytes"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_columns_may_be_changed_after_submit(make_pair: Callable[..., Pair], transport: str, changed: str) -> None:
    pair = make_pair(transport)
    offsets = np.arange(8, dtype=np.int64) * 8192  # with gaps: nothing is joined, so the columns would be used as given
    columns = {
        "local": pair.here.address + offsets,
        "remote": pair.there.address + offsets,
        "nbytes": np.full(8, 4096, np.int64),
    }
    for column in columns.values():
        assert column.dtype == np.int64

    batch = pair.engine.submit_write(pair.segment, **columns)
    columns[changed][:] = {
        "local": pair.here.address + NBYTES // 2 + offsets,
        "remote": pair.there.address + NBYTES // 2 + offsets,
        "nbytes": 512,
    }[changed]
    batch.wait()

    expected = np.zeros(NBYTES, np.uint8)
    for offset in offsets.tolist():
        expected[offset : offset + 4096] = pair.here.array[offset : offset + 4096]
    assert np.array_equal(pair.there.array, expected)
    assert batch.nbytes_done == batch.nbytes == 8 * 4096


@pytest.mark.slow
def test_of_two_threads_that_unregister_a_region_one_succeeds(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("tcp")
    with RawClient(pair.engine.address) as silent:  # it does not answer that it has let go, which takes both some time
        silent.ask_regions()
        barrier = threading.Barrier(2)

        def unregister() -> None:
            barrier.wait(JOIN_S)
            pair.engine.unregister(pair.here)

        callers = [Caller(unregister) for _ in range(2)]
        for caller in callers:
            caller.finish()

    errors = [caller.error for caller in callers if caller.error is not None]
    assert len(errors) == 1
    assert isinstance(errors[0], (ClosedError, RegionBusyError))
    assert pair.engine.regions == ()
    with pytest.raises(ClosedError):
        pair.engine.unregister(pair.here)


@pytest.mark.slow
def test_dials_whose_thread_cannot_start_use_up_no_stream(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair("tcp")
    start, failures = threading.Thread.start, []

    def start_or_fail(self: threading.Thread) -> None:
        if self.name == "kvxfer-dial" and len(failures) < 5:
            failures.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    rows = [pair.here.address], [pair.there.address], [4096]
    for _ in range(5):
        with contextlib.suppress(KvxferError, RuntimeError):
            pair.engine.write(pair.segment, *rows, timeout_s=0.2)

    pair.engine.write(pair.segment, *rows, timeout_s=5.0)
    assert np.array_equal(pair.there.array[:4096], pair.here.array[:4096])
    assert failures


class CutAfterChoice(FakePeer):
    """Tells its card and goes as soon as it hears which transport was chosen."""

    cuts = 0

    def _serve_control(self, connection: Any, first: bytes) -> None:
        machine = make_machine(Role.RESPONDER, transports=("shm",))
        machine.receive_data(first, time.monotonic())
        while True:
            while (event := machine.next_event()) is not None:
                if isinstance(event, CardWanted):
                    machine.offer(self._card)
                elif isinstance(event, TransportChosen):
                    self.cuts += 1
                    return
                elif isinstance(event, Failed):
                    return
            connection.sendall(machine.data_to_send())
            machine.receive_data(connection.recv(65536), time.monotonic())


@pytest.mark.slow
def test_an_open_that_fails_after_the_choice_of_transport_leaves_no_descriptor() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    shm = {"token": "ab" * 32, "token_address": 4096, "uid": os.geteuid()}
    with FakeHandover(lambda _: (b'{"ok": true}', [])) as handover:
        card = {"address": "fake", "data_token": "00", "transports": {"shm": shm | {"socket": handover.name}}}
        with CutAfterChoice(card=card, transport="shm") as fake, TransferEngine(transports=("shm",)) as engine:
            before = descriptors()
            for _ in range(10):
                with pytest.raises(KvxferError):
                    engine.open_segment(fake.address)
            assert fake.cuts == 10
            wait_until(lambda: descriptors() <= before, 5.0)


@pytest.mark.slow
def test_poll_does_not_block_while_the_session_for_a_notification_is_lost() -> None:
    is_stopped, goes_on = threading.Event(), threading.Event()

    def hello(said: bytes) -> bytes:
        if is_stopped.is_set():
            goes_on.wait(JOIN_S)
        return said

    payload = pattern(4096, 3).tobytes()
    serve = respond(response(0, 1, 4096), payload, then=respond(response(0, 2, 4096), payload))
    with (
        FakePeer(hello=hello, data=serve) as fake,
        TransferEngine(transports=("tcp",), handshake_timeout_s=600.0) as engine,  # a poll that waited would hang
    ):
        here = engine.register(np.zeros(4096, np.uint8))
        segment = engine.open_segment(fake.address)
        engine.read(segment, here.address, FAKE_ADDRESS, 4096)  # a stream: it outlives the session
        batch = engine.submit_read(segment, here.address, FAKE_ADDRESS, 4096, notify=b"read", timeout_s=30.0)
        is_stopped.set()
        segment._connection.session().reset(PeerClosedError("cut by the test"))
        polls_in_place, until = 0, time.monotonic() + 5.0
        while not batch.is_done and polls_in_place < 50 and time.monotonic() < until:
            batch.poll()
            polls_in_place += batch.nbytes_done == 4096
            time.sleep(0.002)
        is_read = batch.nbytes_done == 4096
        goes_on.set()
        batch.cancel()

        assert is_read


def is_waiting_in(thread: threading.Thread, function: str) -> bool:
    """Whether the thread waits for something, called from a function of that name."""
    frame = sys._current_frames().get(thread.ident or 0)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return function in names and "wait" in names


@pytest.mark.slow
def test_ctrl_c_in_who_opens_is_not_raised_in_who_waits_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with TransferEngine(transports=("tcp",)) as engine, TransferEngine(transports=("tcp",)) as owner:
        session, begun, interrupted, tries = PeerConnection.session, threading.Event(), threading.Event(), []

        def interrupt_once(self: PeerConnection, *arguments: Any) -> Session:
            tries.append(self)
            if len(tries) == 1:
                begun.set()
                interrupted.wait(JOIN_S)
                raise KeyboardInterrupt
            return session(self, *arguments)

        monkeypatch.setattr(PeerConnection, "session", interrupt_once)
        leader = Caller(lambda: engine.open_segment(owner.address))
        assert begun.wait(JOIN_S)
        follower = Caller(lambda: engine.open_segment(owner.address))
        until = time.monotonic() + 1.0
        while not is_waiting_in(follower, "result") and time.monotonic() < until:
            time.sleep(0.002)
        interrupted.set()
        leader.finish()
        follower.finish()

        assert isinstance(leader.error, KeyboardInterrupt)
        assert follower.error is None or isinstance(follower.error, KvxferError)
        segment = engine.open_segment(owner.address)
        segment.refresh()
        assert follower.result in (None, segment)


def test_ctrl_c_while_a_batch_ends_leaves_its_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with TransferEngine(transports=("tcp",)) as engine, TransferEngine(transports=("tcp",)) as owner:
        here, there = engine.allocate(4096), owner.allocate(4096)
        segment = engine.open_segment(owner.address)
        table = engine._runtime.table
        release = table.release

        def interrupt_once(*arguments: Any) -> None:
            monkeypatch.setattr(table, "release", release)
            release(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(table, "release", interrupt_once)
        batch = engine.submit_write(segment, here.address, there.address, 4096)

        with pytest.raises(KeyboardInterrupt):
            batch.wait(5.0)

        assert batch.is_done
        engine.write(segment, here.address, there.address, 4096, notify=b"next")
        engine.unregister(here)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_ctrl_c_between_the_submit_and_its_batch_pins_memory_until_the_deadline_only(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    with TransferEngine(transports=("tcp",)) as engine, TransferEngine(transports=("tcp",)) as owner:
        here, there = engine.allocate(4096), owner.allocate(4096)
        segment = engine.open_segment(owner.address)
        begin = PeerTransfers.begin

        def interrupt(self: PeerTransfers, *arguments: Any) -> bool:
            assert begin(self, *arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(PeerTransfers, "begin", interrupt)
        local, remote = (one.address if rows == 1 else [one.address] * rows for one in (here, there))
        with pytest.raises(KeyboardInterrupt):
            engine.submit_write(segment, local, remote, 64, timeout_s=0.05)
        assert here.local_use_count == 1

        wait_until(lambda: here.local_use_count == 0)

        engine.unregister(here)


def test_a_batch_whose_region_is_taken_back_while_it_is_submitted_is_never_posted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TransferEngine(transports=("tcp",)) as engine, TransferEngine(transports=("tcp",)) as owner:
        here, there = engine.allocate(4096), owner.allocate(4096)
        segment = engine.open_segment(owner.address)
        begin, posted = PeerTransfers.begin, []

        def take_back(self: PeerTransfers, *arguments: Any) -> bool:
            has_begun = begin(self, *arguments)
            owner.unregister(there)
            return has_begun

        monkeypatch.setattr(PeerTransfers, "begin", take_back)
        monkeypatch.setattr(segment._transfers.endpoints[0], "post", posted.append)
        batch = engine.submit_write(segment, here.address, there.address, 4096)

        with pytest.raises(RemoteAccessError):
            batch.wait(5.0)
        assert not posted


FORK = """
import json, os, sys, warnings
import numpy as np
import kvxfer

warnings.simplefilter("ignore")  # fork in a process with threads is what this is about

def links():
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            pass  # of the listing itself
    return found

kvxfer.TransferEngine().close()  # imports what it needs
own = links()
with kvxfer.TransferEngine() as one, kvxfer.TransferEngine() as two:
    here, there = one.allocate(1 << 20), two.allocate(1 << 20)
    plain = two.register(np.zeros(1 << 16, np.uint8))
    near = one.open_segment(two.address, transports=("shm",))
    far = one.open_segment(two.address, transports=("tcp",))
    back = two.open_segment(one.address)
    one.write(near, [here.address], [there.address], [4096])
    one.write(near, [here.address], [plain.address], [4096])
    one.write(far, [here.address], [there.address], [4096])
    two.read(back, [plain.address], [here.address], [4096])
    dropped = one.submit_write(far, here.address, there.address, 1 << 20)
    pid = os.fork()
    if pid == 0:
        try:
            left = [link for fd, link in links().items() if own.get(fd) != link]
            os.write(1, json.dumps(sorted(left)).encode())
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    dropped.wait()
    one.write(near, [here.address], [there.address], [4096])
    two.read(back, [plain.address], [here.address], [4096])
"""


@pytest.mark.slow
def test_a_forked_child_keeps_no_descriptor_of_the_engine() -> None:
    process = run_script(FORK)
    out, err = process.communicate(timeout=JOIN_S)

    assert process.returncode == 0, err
    # Python's mmap keeps a descriptor of its own of each mapping, and the mapping is the child's as well.
    assert [one for one in json.loads(out) if "memfd:kvxfer" not in one] == []


class _Raiser:
    """A handler of the loop whose `ready` or `timer` raises, and then `failed` as well."""

    def __init__(self) -> None:
        self.fd = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.has_failed = threading.Event()

    def fileno(self) -> int:
        return self.fd

    def ready(self, events: int, now: float) -> bool:
        raise ValueError("in ready")

    def timer(self, now: float) -> None:
        raise ValueError("in timer")

    def failed(self, error: BaseException) -> None:
        self.has_failed.set()
        raise ValueError("in failed")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("by", ["ready", "timer"])
def test_a_handler_that_fails_to_fail_does_not_end_the_loop(by: str) -> None:
    loop, raiser, lives = Loop("kvxfer-test"), _Raiser(), threading.Event()
    loop.start()
    try:
        loop.call_soon(lambda: loop.add(raiser) if by == "ready" else loop.call_at(time.monotonic(), raiser))
        assert raiser.has_failed.wait(JOIN_S)
        loop.call_soon(lives.set)

        assert lives.wait(2.0)
    finally:
        assert loop.close(JOIN_S)
        os.close(raiser.fd)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["handshake", "regions"])
@pytest.mark.parametrize("what", ["segment", "engine"])
@pytest.mark.parametrize("use", ["first open", "reconnect"])
def test_close_while_the_segment_connects_closes_the_session(
    monkeypatch: pytest.MonkeyPatch, use: str, what: str, moment: str
) -> None:
    with (
        TransferEngine(transports=("tcp",), handshake_timeout_s=2.0) as engine,
        TransferEngine(transports=("tcp",)) as owner,
    ):
        held, goes_on = threading.Event(), threading.Event()
        connections: list[PeerConnection] = []
        at: Any = (Session, "run_handshake") if moment == "handshake" else (PeerConnection, "_ask_regions")
        real = getattr(*at)

        def hold(self: Any, *arguments: Any) -> Any:
            result = real(self, *arguments)
            connections.append(self if isinstance(self, PeerConnection) else self._owner)
            held.set()
            goes_on.wait(JOIN_S)
            return result

        call: Callable[[], Any] = lambda: engine.open_segment(owner.address)  # noqa: E731
        if use == "reconnect":
            call = call().refresh
            next(iter(engine._segments._open.values()))._connection.session().reset(PeerClosedError("cut by the test"))
            wait_until(lambda: not owner._service._sessions)
        monkeypatch.setattr(*at, hold)
        caller = Caller(call)
        assert held.wait(JOIN_S)
        segment = Segment(engine._segments, connections[0])
        closer = Caller(segment.close if what == "segment" else engine.close)
        closer.join(0.3)  # it may wait for who connects
        goes_on.set()
        closer.finish()
        caller.finish()

        assert closer.error is None
        assert isinstance(caller.error, ClosedError)
        session = connections[0]._session
        assert session is None or session.error is not None
        wait_until(lambda: not owner._service._sessions, 5.0)
        assert not segment.is_open


@pytest.mark.parametrize("call", ["write", "read", "submit_write", "submit_read"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_segment_of_another_engine_is_refused(make_pair: Callable[..., Pair], transport: str, call: str) -> None:
    pair = make_pair(transport)
    with TransferEngine(transports=(transport,)) as other:
        both = np.ones(NBYTES, np.uint8)
        region = other.register(both)
        pair.engine.register(both)
        pair.engine.write(pair.segment, [pair.here.address], [pair.there.address], [64])  # it is mapped now
        before = pair.there.array.tobytes()

        for columns in (
            (region.address, pair.there.address, 64),
            (region.address + np.arange(4) * 256, pair.there.address + np.arange(4) * 256, 64),
        ):
            with pytest.raises(UsageError) as caught:
                getattr(other, call)(pair.segment, *columns)
            assert not isinstance(caught.value, ClosedError)
        assert pair.there.array.tobytes() == before
        assert (both == 1).all()


def test_what_to_do_about_a_missing_right_can_be_pasted(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("tcp")
    pair.owner.unregister(pair.there)
    there = pair.owner.allocate(NBYTES, rights=Rights.REMOTE_READ)

    with pytest.raises(AccessDeniedError) as caught:
        pair.engine.write(pair.segment, pair.here.address, there.address, 64)

    assert re.search(r"rights=(kvxfer\.)?Rights\.ALL\b", str(caught.value))
    assert "<Rights" not in str(caught.value)


def test_an_engine_whose_thread_cannot_start_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One epoll and one eventfd stayed with each try, and the port for as long as the error was kept."""
    TransferEngine().close()
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises(ResourceLimitError, match=r"no thread could be started.*ulimit -u"):
                TransferEngine()

    assert len(os.listdir("/proc/self/fd")) <= len(before)
