"""The drop-in between processes that are killed, stopped, restarted and forked, and under many threads."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mooncake_programs import NBYTES, Pair, Program
from tests.support.peer import wait_until

pytestmark = pytest.mark.slow
MEDIA = ("shm,tcp", "tcp")
ONE_WRITE = "E.transfer_sync_write(S, A, B, 64)"
LAST_ERROR = "type(m.last_error()).__name__"


@pytest.fixture(params=MEDIA)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with contextlib.closing(Pair(KVXFER_TRANSPORTS=request.param)) as pair:
        yield pair


def test_killed_peer_is_told_at_once_and_by_its_error(pair: Pair) -> None:
    assert pair.run(ONE_WRITE) == 0
    pair.target.kill()

    codes = [pair.run(ONE_WRITE) for _ in range(3)]

    assert all(code < 0 for code in codes)
    assert -2 not in codes, "it was waited for"
    assert codes[-1] == -102
    assert pair.run(LAST_ERROR) == "PeerUnreachableError"
    assert pair.initiator.log().count("mooncake.call_failed") == 3


@pytest.mark.parametrize("transports", MEDIA)
def test_peer_restarted_at_its_session_id_works_at_the_next_call(transports: str) -> None:
    with contextlib.closing(Pair(KVXFER_TRANSPORTS=transports)) as pair:
        assert pair.run(ONE_WRITE) == 0
        port = pair.session.rpartition(":")[2]
        for _ in range(5):
            pair.target.kill()
            pair.target.close()
            pair.target = Program(KVXFER_TRANSPORTS=transports, MC_MIN_RPC_PORT=port, MC_MAX_RPC_PORT=port)
            assert pair.target.initialize() == pair.session
            _, address = pair.target.run("B = memory(N); result = (E.register_memory(B, N), B)", N=NBYTES)

            codes = [pair.run("E.transfer_sync_write(S, A, B, 64)", B=address) for _ in range(2)]

            assert codes[1] == 0, pair.initiator.log()[-2000:]
            assert codes[0] in (0, -201, -102)


def test_stopped_peer_fails_a_transfer_after_the_timeout_and_nothing_comes_late() -> None:
    with contextlib.closing(Pair(KVXFER_TRANSPORTS="tcp", MC_TRANSFER_TIMEOUT="1")) as pair:
        assert pair.run(ONE_WRITE) == 0
        with pair.target.stopped():
            code, told = pair.run(
                "poke(A, b'1' * N); result = (E.transfer_sync_write(S, A, B, N), str(m.last_error())); "
                "poke(A, b'7' * N)",
                N=NBYTES,
            )

        assert code == -2
        assert "(limit 5 s, " in told  # Mooncake's least
        time.sleep(0.3)
        assert b"7" not in bytes.fromhex(pair.target.run("peek(A, N)", N=NBYTES)["bytes"])
        assert pair.run(ONE_WRITE) == 0, pair.initiator.log()


def test_own_transfer_timeout_wins_and_has_no_floor() -> None:
    own = {"KVXFER_TRANSPORTS": "tcp", "KVXFER_TRANSFER_TIMEOUT_S": "0.5"}
    with contextlib.closing(Pair(**own, MC_TRANSFER_TIMEOUT="60")) as pair:
        assert pair.run(ONE_WRITE) == 0
        with pair.target.stopped():
            code, told = pair.run("result = (E.transfer_sync_write(S, A, B, N), str(m.last_error()))", N=NBYTES)

    assert code == -2
    assert "(limit 0.501 s, " in told  # and 1 ns for each byte


def test_peer_that_holds_the_gil_longer_than_a_native_engine_waits_is_not_given_up(tmp_path: Path) -> None:
    """A call into C that does not release it, such as the loading of weights: no thread of kvxfer's runs there then."""
    with contextlib.closing(Pair(KVXFER_TRANSPORTS="tcp")) as pair:
        assert pair.run(ONE_WRITE) == 0
        mark = tmp_path / "held"
        pair.target.begin(
            "import ctypes, pathlib, time\npathlib.Path(MARK).touch()\nctypes.PyDLL(None).sleep(12)\n"
            "result = time.monotonic()",
            MARK=str(mark),
        )
        wait_until(mark.exists)

        begun, code, ended = pair.run(
            "begun = time.monotonic()\ncode = E.transfer_sync_write(S, A, B, N)\n"
            "result = begun, code, time.monotonic()",
            N=NBYTES,
        )
        let_go = pair.target.finish()

        assert code == 0
        assert begun < let_go < ended, "it was written while nothing ran there, or after all"


def test_memory_that_was_freed_before_it_was_unregistered_is_told_at_its_owner() -> None:
    with contextlib.closing(Pair(KVXFER_TRANSPORTS="tcp")) as pair:
        freed = pair.target.run(
            "import ctypes\nC = memory(N); E.register_memory(C, N)\n"
            "result = C if ctypes.CDLL(None).mprotect(ctypes.c_void_p(C), ctypes.c_size_t(N), 0) == 0 else 0",
            N=NBYTES,
        )

        codes = [pair.run(f"E.transfer_sync_{call}(S, A, C, N)", C=freed, N=NBYTES) for call in ("write", "read")]

        assert codes == [-201, -201]
        assert pair.run(ONE_WRITE) == 0
        told = [line for line in pair.target.log().splitlines() if "data.memory_gone" in line]
        assert len(told) == 2
        assert all(hex(freed) in line and "127.0.0.1" in line for line in told)


def test_probe_of_a_stopped_peer_is_given_up(pair: Pair) -> None:
    with pair.target.stopped():
        code = pair.run("E.send_probe(S)")

    assert code == -102
    assert pair.run("E.send_probe(S)") == 0


def test_memory_registered_later_is_found_and_taken_back_is_refused(pair: Pair) -> None:
    assert pair.run(ONE_WRITE) == 0
    later = pair.target.run("memory(N)", N=NBYTES)
    write = "E.batch_transfer_sync_write(S, [A, A + 64], [C, C + 64], [64, 64])"

    codes = []
    for call in ("E.register_memory(C, N)", "E.unregister_memory(C)", "E.register_memory(C, N)"):
        codes.append((pair.target.run(call, C=later, N=NBYTES), pair.run(write, C=later)))

    assert codes == [(0, 0), (0, -3), (0, 0)]


def test_notification_comes_after_the_bytes_and_not_after_a_failure(pair: Pair) -> None:
    notify = "E.batch_transfer_sync(S, [A], [{}], [64], m.Write, notify=m.TransferNotify('{}', 'text'))"

    assert pair.run(notify.format("17", "bad")) == -3
    assert pair.run(notify.format("B", "good")) == 0

    assert pair.target.run("[(n.name, n.msg) for n in E.get_notifies()]") == [["good", "text"]]


def test_sixteen_threads_share_one_engine(pair: Pair) -> None:
    codes = pair.run(
        """
def work(n):
    for i in range(50):
        at = 4096 * n + 64 * i
        poke(A + at, bytes([n + 1]) * 64)
        codes.append(E.batch_transfer_sync_write(S, [A + at, A + at + 32], [B + at, B + at + 32], [32, 32]))
codes = []
threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
for one in threads: one.start()
for one in threads: one.join()
result = codes
"""
    )

    assert codes == [0] * 800
    for n in range(16):
        there = bytes.fromhex(pair.target.run("peek(A + at, 3200)", at=4096 * n)["bytes"])
        assert there == bytes([n + 1]) * 3200


@pytest.mark.parametrize("count", [8192, 100_000])
def test_long_batches(pair: Pair, count: int) -> None:
    found = pair.run(
        """
import random
order = list(range(count)); random.seed(1); random.shuffle(order)
poke(A, os.urandom(8 * count)); source = [A + 8 * i for i in range(count)]; there = [B + 8 * i for i in order]
write = E.batch_transfer_sync_write(S, source, there, [8] * count)
sent = peek(A, 8 * count)
poke(A, bytes(8 * count))
result = (write, E.batch_transfer_sync_read(S, source, there, [8] * count), peek(A, 8 * count) == sent)
""",
        count=count,
    )

    assert found == [0, 0, True]


def test_many_asynchronous_batches_are_waited_for_at_once(pair: Pair) -> None:
    found = pair.run(
        "ids = [E.batch_transfer_async_write(S, [A + 64 * i], [B + 64 * i], [64]) for i in range(500)]\n"
        "result = (len(set(ids)), min(ids) > 0, E.get_batch_transfer_status(ids), E.get_batch_transfer_status(ids))"
    )

    assert found == [500, True, 0, -1]


def test_interrupt_ends_a_call() -> None:
    """Without one it would take ten minutes."""
    with contextlib.closing(Pair(KVXFER_TRANSPORTS="tcp", MC_TRANSFER_TIMEOUT="600")) as pair:
        assert pair.run(ONE_WRITE) == 0
        with pair.target.stopped():
            pair.initiator.begin(
                "try:\n    result = E.transfer_sync_write(S, A, B, N)\n"
                "except KeyboardInterrupt:\n    result = 'interrupted'",
                N=NBYTES,
            )
            time.sleep(0.5)
            pair.initiator.process.send_signal(signal.SIGINT)
            assert pair.initiator.finish() == "interrupted"

        assert pair.run(ONE_WRITE) == 0


def test_forked_child_gets_codes_and_the_parent_goes_on(pair: Pair) -> None:
    code = """
pid = os.fork()
if pid == 0:
    good = E.transfer_sync_write(S, A, B, 64) == -1 and type(m.last_error()).__name__ == "ForkedError"
    good = good and E.register_memory(X, 64) == -1 and E.send_probe(S) == -1 and E.get_notifies() == []
    own = m.TransferEngine()
    good = good and own.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    good = good and own.transfer_sync_write(S, X, B, 64) == 0
    os._exit(0 if good else 1)
result = os.waitpid(pid, 0)[1]
"""
    assert pair.run(ONE_WRITE) == 0

    assert pair.run(code) == 0, pair.initiator.log()[-3000:]
    assert [pair.run(ONE_WRITE) for _ in range(100)] == [0] * 100


def test_initialise_again_takes_the_same_port_and_keeps_nothing_of_before() -> None:
    with Program(MC_MIN_RPC_PORT="22222", MC_MAX_RPC_PORT="22222") as program:
        session = program.initialize()

        found = program.run(
            """
import gc, weakref
old = weakref.ref(E._running)
X = memory(4096)
result = [E.register_memory(X, 64), E.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), E.register_memory(X, 64)]
gc.collect()
result += [old() is None, E.get_rpc_port()]
"""
        )

    assert session == "127.0.0.1:22222"
    assert found == [0, 0, 0, True, 22222]


def test_an_engine_that_is_dropped_gives_its_port_and_threads_back() -> None:
    with Program() as program:
        program.initialize()

        found = program.run(
            """
import gc
before = len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd'))
for _ in range(20):
    F = m.TransferEngine()
    assert F.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', '') == 0
    assert E.send_probe(f'127.0.0.1:{F.get_rpc_port()}') == 0
    del F
    gc.collect()
deadline = time.monotonic() + 10
while (now := (len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd')))) > before:
    assert time.monotonic() < deadline, (before, now)
    time.sleep(0.02)
result = True
"""
        )

    assert found


@pytest.mark.timeout(240)
def test_a_thousand_sessions_one_after_the_other_leave_nothing() -> None:
    sizes = "len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))"
    another = (
        "result = (E.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', ''), E.register_memory(A, N), E.get_rpc_port())"
    )
    with contextlib.closing(Pair(MC_TRANSFER_TIMEOUT="5")) as pair:
        assert pair.run(ONE_WRITE) == 0
        before = pair.run(sizes)
        for _ in range(1000):
            code, registered, port = pair.target.run(another, N=NBYTES)
            assert (code, registered) == (0, 0)
            assert pair.run(ONE_WRITE, S=f"127.0.0.1:{port}") == 0
        pair.run("time.sleep(5.1)")
        code, registered, port = pair.target.run(another, N=NBYTES)
        assert pair.run(ONE_WRITE, S=f"127.0.0.1:{port}") == 0

        after = pair.run(sizes)

    assert after[0] <= before[0] + 4
    assert after[1] <= before[1] + 1


@pytest.mark.parametrize("call", ["batch_transfer_async_write", "batch_transfer_async_read", "transfer_submit_write"])
def test_asynchronous_batch_moves_though_nobody_asks_for_its_status(pair: Pair, call: str) -> None:
    """More than a submit call moves by itself, so that the rest is left to somebody."""
    nbytes = 64 << 20
    columns = "C, D, N" if call == "transfer_submit_write" else "[C], [D], [N]"
    there = pair.target.run("D = memory(N); poke(D, b'5' * N); result = (E.register_memory(D, N), D)", N=nbytes)
    assert there[0] == 0
    begin = f"C = memory(N); poke(C, b'4' * N); E.register_memory(C, N); result = E.{call}(S, {columns})"

    number = pair.run(begin, N=nbytes, D=there[1])

    assert number > 0
    side, place, text = (pair.initiator, "C", b"5") if call.endswith("read") else (pair.target, "D", b"4")
    arrived = f"peek({place}, {nbytes}) == {text!r} * {nbytes}"
    wait_until(lambda: side.run(arrived))
    assert pair.run("E.get_batch_transfer_status([number])", number=number) == 0


def test_asynchronous_batch_that_is_asked_for_after_its_timeout_went_well() -> None:
    with contextlib.closing(Pair(KVXFER_TRANSPORTS="tcp", MC_TRANSFER_TIMEOUT="5")) as pair:
        begin = (
            "n = E.batch_transfer_async_write(S, [A], [B], [N])\ntime.sleep(5.5)\nresult = E.transfer_check_status(n)"
        )

        assert pair.run(begin, N=NBYTES) == 1


def test_managed_buffers_take_memory_only_where_they_are_touched() -> None:
    resident = "int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGESIZE')"
    with Program() as program:
        program.initialize()
        code = f"""
before = {resident}
small, large = E.allocate_managed_buffer(1 << 20), E.allocate_managed_buffer(1 << 30)
allocated = {resident}
poke(large, b'1' * (32 << 20))
touched = {resident}
result = (small > 0 and large > 0, allocated - before, touched - allocated,
          E.free_managed_buffer(large, 1 << 30), E.free_managed_buffer(small, 1 << 20))
"""
        is_there, allocated, touched, *codes = program.run(code)

    assert is_there
    assert allocated < 16 << 20
    assert touched >= 31 << 20
    assert codes == [0, 0]
