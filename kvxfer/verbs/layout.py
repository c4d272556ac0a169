"""How an open libibverbs context lies in memory, beyond what its header declares, and whether it does.

kvxfer calls no compiler, so that nothing else would notice a library that is laid out otherwise: a call through a table
that is none ends the process. Looked at before the first such call, and only read. Read next: `library.py`.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from kvxfer.errors import VerbsLayoutError
from kvxfer.verbs.abi import ffi

__all__ = ["QUERY_PORT_OFFSET", "check_layout", "check_platform", "extended_member"]

ABI_COMPAT_OFFSETS = {"x86_64": 320, "aarch64": 328}
"""Where ibv_context keeps `abi_compat`: behind a mutex, whose size is the platform's."""
SIZE_OFFSET = -8
QUERY_PORT_OFFSET = -320
"""Members of verbs_context, which lies before ibv_context and grows away from it (container-of in verbs.h)."""
CONTEXT_SIZES = range(600, 2001)
"""Sizes of verbs_context that are believable: 648 in rdma-core 44, 696 in 65."""


def check_platform(path: str) -> None:
    """Raise VerbsLayoutError where nobody knows how libibverbs lies in memory on this machine. path: the library's."""
    machine = platform.machine()
    if machine not in ABI_COMPAT_OFFSETS:
        known = " and ".join(ABI_COMPAT_OFFSETS)
        raise VerbsLayoutError(
            f"this machine is {machine or 'unknown'}; how libibverbs lies in memory kvxfer knows on {known}.",
            remedy="Nothing to do: transports other than rdma go on.",
            path=path,
            check="platform",
        )


def check_layout(context: Any) -> str:
    """Look whether an open ibv_context is laid out as declared, without calling through it."""
    if not _is_extended(context):
        return "ibv_context.abi_compat is not all ones: a library before rdma-core 1, or another layout"
    size = _word(context, SIZE_OFFSET)
    if size not in CONTEXT_SIZES:
        return f"verbs_context.sz is {size}, believable are {CONTEXT_SIZES[0]} to {CONTEXT_SIZES[-1]}"
    for name in ("cmd_fd", "async_fd"):
        try:
            os.fstat(getattr(context, name))
        except OSError:
            return f"ibv_context.{name} is {getattr(context, name)}, which is no open file"
    code = _executable_ranges()
    for name in ("post_send", "post_recv", "poll_cq", "req_notify_cq"):
        address = int(ffi.cast("uintptr_t", getattr(context.ops, name)))
        if not any(start <= address < end for start, end in code):
            return f"ibv_context.ops.{name} is {address:#x}, which is no code"
    return ""


def extended_member(context: Any, offset: int) -> int:
    """Return the address that a member of verbs_context holds; 0 where the library is older than the member."""
    if not _is_extended(context):
        return 0
    context_nbytes = ABI_COMPAT_OFFSETS[platform.machine()] + 8
    return _word(context, offset) if _word(context, SIZE_OFFSET) >= context_nbytes - offset else 0


def _is_extended(context: Any) -> bool:
    """Whether a verbs_context lies before the context; verbs.h marks that with all ones in `abi_compat`."""
    offset = ABI_COMPAT_OFFSETS.get(platform.machine())
    return offset is not None and _word(context, offset) == 2**64 - 1


def _word(context: Any, offset: int) -> int:
    base = int(ffi.cast("uintptr_t", context))
    return int(ffi.cast("uint64_t *", base + offset)[0])


def _executable_ranges() -> list[tuple[int, int]]:
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        if "x" in rights:
            start, end = span.split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges
