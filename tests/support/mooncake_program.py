"""A process with `mooncake.engine` in it, the real one or kvxfer's, that evaluates what it is told. Imports no test.

One JSON object a line comes in, {"code": text, "names": {...}}, and one goes out: {"value": ...} or {"raised": type,
"text": ...}. Code that is no expression is run, and its value is that of `result`. Names it finds: `m` the module, `E`
an engine, `memory(nbytes)` the address of new zeroed memory, `peek`, `poke`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from typing import Any

import mooncake.engine as m

_kept: list[Any] = []


def memory(nbytes: int) -> int:
    """Return the page-aligned address of new memory."""
    _kept.append(ctypes.create_string_buffer(nbytes + 4096))
    return -(-ctypes.addressof(_kept[-1]) // 4096) * 4096


def peek(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def poke(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def plain(value: Any) -> Any:
    """Return a value as JSON can carry it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return repr(value)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no reply
    names: dict[str, Any] = {"m": m, "E": m.TransferEngine(), "memory": memory, "peek": peek, "poke": poke}
    names |= {"os": os, "time": time, "threading": threading, "json": json}
    for line in sys.stdin:
        request = json.loads(line)
        names.update(request["names"])
        try:
            try:
                code = compile(request["code"], "told", "eval")
            except SyntaxError:
                names["result"] = None
                exec(compile(request["code"], "told", "exec"), names)
                answer = {"value": plain(names["result"])}
            else:
                answer = {"value": plain(eval(code, names))}
        except Exception as exc:
            answer = {"raised": type(exc).__name__, "text": str(exc)}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # Mooncake's threads crash now and then in the interpreter's own shutdown
