"""An engine with Mooncake's interface in a process of its own: the real one, or kvxfer under its name (PYTHONPATH).

Reads one JSON list a line, [method, argument ...], and answers with one JSON value. Methods of its own: `allocate`
gives the address of new memory, `poke` and `peek` write and read it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from mooncake.engine import TransferEngine

kept: list[Any] = []


def allocate(nbytes: int) -> int:
    kept.append(ctypes.create_string_buffer(nbytes))
    return ctypes.addressof(kept[-1])


def poke(address: int, nbytes: int, value: int) -> int:
    ctypes.memset(address, value, nbytes)
    return 0


def peek(address: int, nbytes: int) -> list[int]:
    """The different bytes there."""
    return sorted(set(ctypes.string_at(address, nbytes)))


def main() -> None:
    own = {"allocate": allocate, "poke": poke, "peek": peek}
    engine = TransferEngine()
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        function = own.get(method) or getattr(engine, method)
        sys.stdout.write(json.dumps(function(*arguments)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
