"""What calls of `mooncake.engine` return: the real engine's answer, and kvxfer's, with the reason where they differ.

One table for two tests: kvxfer is held to it in tests/compat, the real engine in tests/interop/test_differential.py.
Every call stands for itself; the names it finds are those of `mooncake_programs.Pair`. The differences are those of
docs/mooncake.md, "Differences from Mooncake".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CALLS", "CRASH", "Call"]

CRASH = "the process dies"
TYPE_ERROR, RUNTIME_ERROR = "TypeError", "RuntimeError"
SAME = object()


@dataclass(frozen=True)
class Call:
    """One line of the table. mooncake, kvxfer: what comes back, or the name of the type that is raised."""

    name: str
    code: str
    mooncake: Any
    kvxfer: Any
    why: str = ""


def call(name: str, code: str, mooncake: Any, kvxfer: Any = SAME, why: str = "") -> Call:
    assert (kvxfer is SAME) == (not why), f"{name}: a difference has a reason"
    return Call(name, code, mooncake, mooncake if kvxfer is SAME else kvxfer, why)


SPECIFIC = "a code that says why, where Mooncake has -1 for everything"
CHECKED = "memory that is none is refused when it is registered"
BEFORE = "the engine is not initialised: a code, not a crash"
UNKNOWN = "an unknown number is a code, not a crash"
NOT_ASKED = "nothing to move needs no peer"

CALLS = (
    # Registering.
    call("register twice", "E.register_memory(A, N)", -7),
    call("register the inside", "E.register_memory(A + 4096, 4096)", -7),
    call("register over the end", "E.register_memory(A + N - 4096, 8192)", -7),
    call("register nothing", "E.register_memory(X, 0)", -1),
    call("register a neighbour", "E.register_memory(X, 4096), E.register_memory(X + 4096, 4096), "
         "E.batch_unregister_memory([X, X + 4096])", [0, 0, 0]),
    call("register by keyword", "E.register_memory(buffer_addr=X, capacity=64, location='cpu:0'), "
         "E.unregister_memory(X)", [0, 0]),
    call("register with a bool", "E.register_memory(X, True), E.unregister_memory(X)", [0, 0]),
    call("any location", "E.register_memory(X, 64, 'bogus'), E.unregister_memory(X)", [0, 0]),
    call("register address 0", "E.register_memory(0, 64), E.unregister_memory(0)", [0, 0], [-1, -3], CHECKED),
    call("register a negative address", "E.register_memory(-1, 10)", TYPE_ERROR),
    call("register a float", "E.register_memory(1.5, 10)", TYPE_ERROR),
    call("register a text", "E.register_memory('x', 10)", TYPE_ERROR),
    call("register beyond 64 bits", "E.register_memory(2**64, 10)", TYPE_ERROR),
    call("register without a size", "E.register_memory(A)", TYPE_ERROR),
    call("location None", "E.register_memory(X, 10, None)", TYPE_ERROR),
    call("unregister an unknown address", "E.unregister_memory(X)", -3),
    call("unregister the inside", "E.unregister_memory(A + 4096)", -3),
    call("unregister twice", "E.register_memory(X, 64), E.unregister_memory(X), E.unregister_memory(X)", [0, 0, -3]),
    call("batch_register a duplicate", "E.batch_register_memory([X, X], [64, 64]), E.unregister_memory(X)", [-7, -3]),
    call("batch_register an overlap", "E.batch_register_memory([X, X + 32], [64, 64]), E.unregister_memory(X)",
         [-7, -3]),
    call("batch_register with an empty one", "E.batch_register_memory([X, X + 64], [64, 0]), E.unregister_memory(X)",
         [-1, -3]),
    call("batch_register nothing", "E.batch_register_memory([], [])", 0),
    call("batch_register a range", "E.batch_register_memory(range(0), [])", 0),
    call("batch_register a generator", "E.batch_register_memory((a for a in [X]), [64])", TYPE_ERROR),
    call("batch_register a text", "E.batch_register_memory('ab', [64])", TYPE_ERROR),
    call("batch_register floats", "E.batch_register_memory([1.0], [64])", TYPE_ERROR),
    call("batch_unregister nothing", "E.batch_unregister_memory([])", 0),
    call("batch_unregister as far as it goes", "E.batch_register_memory((X, X + 64), [64, 64]), "
         "E.batch_unregister_memory([X, 5, X + 64]), E.batch_unregister_memory([X])", [0, -3, -3]),
    # Transfers.
    call("write and look", "poke(A, b'hello'), E.transfer_sync_write(S, A, B, 5), "
         "E.transfer_sync_read(S, A + 8, B, 5), peek(A + 8, 5)", [None, 0, 0, {"bytes": b"hello".hex()}]),
    call("write by keyword", "E.transfer_sync_write(target_hostname=S, buffer=A, peer_buffer_address=B, length=5, "
         "transport_hint='x')", 0),
    call("a target in bytes", "E.transfer_sync_write(S.encode(), A, B, 1)", 0),
    call("localhost is the same peer", "E.transfer_sync_write('localhost:' + S.rpartition(':')[2], A, B, 4)", 0),
    call("transfer_sync", "E.transfer_sync(S, A, B, 5, m.TransferOpcode.Read)", 0),
    call("batch_transfer_sync", "E.batch_transfer_sync(S, [A], [B], [5], m.Write)", 0),
    call("an opcode that is an int", "E.transfer_sync(S, A, B, 5, 1)", TYPE_ERROR),
    call("write nothing", "E.transfer_sync_write(S, A, B, 0)", 0),
    call("write nothing to where nothing is", "E.transfer_sync_write(S, A, 17, 0)", 0),
    call("write nothing to nobody", "E.transfer_sync_write(DEAD, A, 17, 0)", -1, 0, NOT_ASKED),
    call("an empty batch", "E.batch_transfer_sync_write(S, [], [], [])", 0),
    call("an empty batch to nobody", "E.batch_transfer_sync_write(DEAD, [], [], [])", -1, 0, NOT_ASKED),
    call("unequal lists", "E.batch_transfer_sync_write(S, [A], [], [1])", -1),
    call("unequal lists to nobody", "E.batch_transfer_sync_write(DEAD, [A], [], [])", -1),
    call("rows without bytes", "E.batch_transfer_sync_write(S, [A, 3, A + 8], [B, 5, B + 8], [4, 0, 4])", 0),
    call("only rows without bytes", "E.batch_transfer_sync_read(S, [A], [B], [0])", 0),
    call("tuples and ranges", "E.batch_transfer_sync_write(S, (A,), range(B, B + 1), [1])", 0),
    call("a dict", "E.batch_transfer_sync_write(S, {A: 1}, [B], [1])", TYPE_ERROR),
    call("a set", "E.batch_transfer_sync_write(S, {A}, [B], [1])", TYPE_ERROR),
    call("bytes for a list", "E.batch_transfer_sync_write(S, b'a', [B], [1])", TYPE_ERROR),
    call("an int for a list", "E.batch_transfer_sync_write(S, A, [B], [1])", TYPE_ERROR),
    call("None in a list", "E.batch_transfer_sync_write(S, [None], [B], [1])", TYPE_ERROR),
    call("a negative length", "E.transfer_sync_write(S, A, B, -1)", TYPE_ERROR),
    call("a negative length in a list", "E.batch_transfer_sync_write(S, [A], [B], [-1])", TYPE_ERROR),
    call("no target", "E.transfer_sync_write(None, A, B, 1)", RUNTIME_ERROR),
    call("no target for a batch", "E.batch_transfer_sync_read(None, [A], [B], [1])", RUNTIME_ERROR),
    call("a target that is an int", "E.transfer_sync_write(5, A, B, 1)", TYPE_ERROR),
    call("hint None", "E.transfer_sync_write(S, A, B, 1, None)", TYPE_ERROR),
    call("write from memory that is not registered", "poke(X, b'outside'), E.transfer_sync_write(S, X, B + 64, 7), "
         "E.transfer_sync_read(S, X + 64, B + 64, 7), peek(X + 64, 7)", [None, 0, 0, {"bytes": b"outside".hex()}]),
    call("write to memory that is not registered", "E.transfer_sync_write(S, A, U, 4)", -1, -3, SPECIFIC),
    call("write across the end", "E.transfer_sync_write(S, A, B + N - 2, 4)", -1, -3, SPECIFIC),
    call("read across the end", "E.transfer_sync_read(S, A, B + N - 2, 4)", -1, -3, SPECIFIC),
    call("one bad row", "E.batch_transfer_sync_write(S, [A, A], [B, 17], [4, 4])", -1, -3, SPECIFIC),
    call("write to nobody", "E.transfer_sync_write(DEAD, A, B, 4)", -1, -102, SPECIFIC),
    call("write to a name that is none", "E.transfer_sync_write('nosuch.invalid:5', A, B, 4)", -1, -101, SPECIFIC),
    call("write to an empty name", "E.transfer_sync_write('', A, B, 4)", -1),
    call("write to a name without a port", "E.transfer_sync_write('127.0.0.1', A, B, 4)", -1),
    call("write to itself", "poke(A, b'self'), E.transfer_sync_write(OWN, A, A + 128, 4), peek(A + 128, 4)",
         [None, 0, {"bytes": b"self".hex()}]),
    # Asynchronous ones.
    call("async id", "0 < E.batch_transfer_async_write(S, [A], [B], [4]) < 2**63", True),
    call("async to nobody", "E.batch_transfer_async_read(DEAD, [A], [B], [4])", 0),
    call("async with unequal lists", "E.batch_transfer_async_write(S, [A], [], [4])", 0),
    call("async empty", "E.get_batch_transfer_status([E.batch_transfer_async_write(S, [], [], [])])", 0),
    call("async and wait", "E.get_batch_transfer_status([E.batch_transfer_async_read(S, [A], [B], [4]) "
         "for _ in range(20)])", 0),
    call("wait for nothing", "E.get_batch_transfer_status([])", 0),
    call("async to the end by polling", "b = E.transfer_submit_write(S, A, B, N)\nwhile not (result := "
         "E.transfer_check_status(b)): time.sleep(0.001)", 1),
    call("batch_transfer_async", "E.get_batch_transfer_status([E.batch_transfer_async(S, [A], [B], [4], m.Read)])", 0),
    call("async with a bad row, waited for", "b = E.batch_transfer_async_write(S, [A, A], [B, 17], [4, 4])\n"
         "result = (b != 0, E.get_batch_transfer_status([b]))", [True, -1], [True, -3], SPECIFIC),
    call("async with a bad second row, polled", "b = E.batch_transfer_async_write(S, [A, A], [B, 17], [4, 4])\n"
         "while not (result := E.transfer_check_status(b)): time.sleep(0.001)", 1, -1, "the whole batch is looked at"),
    call("poll an unknown number", "E.transfer_check_status(12345)", CRASH, -1, UNKNOWN),
    call("wait for an unknown number", "E.get_batch_transfer_status([12345])", CRASH, -1, UNKNOWN),
    # Notifications and probes.
    call("probe", "E.send_probe(S)", 0),
    call("probe itself", "E.send_probe(OWN)", 0),
    call("probe nobody", "E.send_probe(DEAD)", -102),
    call("probe a name that is none", "E.send_probe('nosuch.invalid:1')", -101),
    call("probe an empty name", "E.send_probe('')", -101),
    call("probe None", "E.send_probe(None)", TYPE_ERROR),
    call("no notification", "E.get_notifies()", []),
    call("a notification to itself", "E.transfer_sync(OWN, A, A + 64, 4, m.Write, m.TransferNotify('n', 'm\\0ä')), "
         "[(n.name, n.msg) for n in E.get_notifies()]", [0, [["n", "m\0ä"]]]),
    call("notify None", "E.transfer_sync(S, A, B, 4, m.Write, None)", 0),
    call("notify a text", "E.transfer_sync(S, A, B, 4, m.Write, 'n')", TYPE_ERROR),
    call("TransferNotify", "(m.TransferNotify().name, m.TransferNotify('a', b'b').msg)", ["", "b"]),
    call("TransferNotify by half", "m.TransferNotify('a')", TYPE_ERROR),
    call("TransferNotify of ints", "m.TransferNotify(1, 2)", TYPE_ERROR),
    # Memory of its own, and bytes.
    call("managed buffers", "(b := E.allocate_managed_buffer(100)) > 0, E.write_bytes_to_buffer(b, b'a\\0b', 3), "
         "E.read_bytes_from_buffer(b, 3), E.transfer_sync_write(S, b, B, 3), E.free_managed_buffer(b, 100)",
         [True, 0, {"bytes": b"a\0b".hex()}, 0, 0]),
    call("a large managed buffer", "(b := E.allocate_managed_buffer(300 << 20)) > 0, "
         "E.free_managed_buffer(b, 300 << 20)", [True, 0]),
    call("a managed buffer of nothing", "E.free_managed_buffer(E.allocate_managed_buffer(0), 0)", 0),
    call("free what is no managed buffer", "E.free_managed_buffer(12345, 100)", 0, -3,
         "Mooncake hands it out again later"),
    call("bytes of a text", "E.write_bytes_to_buffer(X, 'ä', 2), E.read_bytes_from_buffer(X, 2)",
         [0, {"bytes": "ä".encode().hex()}]),
    call("read no bytes", "E.read_bytes_from_buffer(X, 0)", {"bytes": ""}),
    call("write more bytes than there are", "E.write_bytes_to_buffer(X, b'ab', 8)", 0, -1,
         "Mooncake copies what lies behind them"),
    call("write bytes to no memory", "E.write_bytes_to_buffer(16, b'ab', 2)", CRASH, -1, CHECKED),
    call("read bytes of no memory", "E.read_bytes_from_buffer(16, 2)", CRASH, "MemoryArgumentError", CHECKED),
    call("first buffer", "E.get_first_buffer_address(S) == B", True),
    call("first buffer of nobody", "E.get_first_buffer_address(DEAD)", 0),
    # The rest.
    call("topology", "json.loads(E.get_local_topology())", "{'cpu:0': [[], []]}"),
    call("topology of a device", "json.loads(E.get_local_topology('mlx5_0'))", "{'cpu:0': [[], []]}"),
    call("warm up", "E.warmup_efa_segment(S)", 0),
    call("engine pointer", "E.get_engine_ptr() > 0", True, False, "no C++ engine stands behind it"),
    call("opcodes", "(str(m.Read), int(m.Write), m.Read == 0, m.Read < m.Write, m.Read.name, m.Write.value, "
         "m.TransferEngine.TransferOpcode is m.TransferOpcode, m.TransferOpcode(1) == m.Write)",
         ["TransferOpcode.Read", 1, False, True, "Read", 1, True, True]),
    call("flags", "[getattr(m, 'SUPPORT_' + one) for one in ('CUDA', 'EFA', 'HIP', 'MNNVL', 'MUSA', "
         "'INTRA_NVLINK')]", [False] * 6),
    call("no calls for CUDA", "[n for n in dir(m.TransferEngine) if 'cuda' in n]", []),
    call("no inner engine can be made", "m.InnerTransferEngine()", TYPE_ERROR),
    call("initialize again", "F = m.TransferEngine()\nresult = ("
         "F.initialize('127.0.0.1:5000', 'P2PHANDSHAKE', 'tcp', ''), F.register_memory(X, 64), "
         "p := F.get_rpc_port(), F.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', ''), "
         "F.register_memory(X, 64), p != F.get_rpc_port())\nresult = result[:2] + result[3:]", [0, 0, 0, 0, True]),
    call("initialize_ext", "m.TransferEngine().initialize_ext('127.0.0.1', 'P2PHANDSHAKE', 'tcp', '', 'etcd')", 0),
    call("ports of the range", "15000 <= E.get_rpc_port() <= 17000", True),
    call("initialize None", "m.TransferEngine().initialize(None, 'P2PHANDSHAKE', 'tcp', '')", RUNTIME_ERROR),
    call("initialize for xgmi", "m.TransferEngine().initialize('127.0.0.1', 'P2PHANDSHAKE', 'xgmi', '')", -1),
    call("initialize for what is not known", "m.TransferEngine().initialize('127.0.0.1', 'P2PHANDSHAKE', 'foo', '')",
         0, -1, "a protocol that nobody has is no tcp"),
    call("initialize for rdma without a device", "m.TransferEngine().initialize('127.0.0.1', 'P2PHANDSHAKE', 'rdma', "
         "'')", 0, -6, "who asks for RDMA and has none is told"),
    call("IPv6", "[m.TransferEngine().initialize(h, 'P2PHANDSHAKE', 'tcp', '') for h in ('::1', '[::1]:5')]", [0, 0]),
    call("before initialize", "m.TransferEngine().register_memory(X, 64)", CRASH, -1, BEFORE),
    call("write before initialize", "m.TransferEngine().transfer_sync_write(S, A, B, 4)", CRASH, -1, BEFORE),
)  # fmt: skip
