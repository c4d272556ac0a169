"""libibverbs as one typed table of functions under their C names.

A third of <infiniband/verbs.h> is no exported symbol: posting and polling are inline functions that go through the
context's table of operations, and some calls are macros. They get their C names back here, so that everything above,
and every fake, sees one plain table. Failing calls behave as in C: NULL with `ffi.errno`, or an error number returned.
The library is the system's own, opened at first use; its drivers must match it, so none is ever shipped.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvxfer.errors import VerbsLibraryError, VerbsLibraryOldError
from kvxfer.verbs.abi import ffi
from kvxfer.verbs.enums import OPTIONAL_ACCESS
from kvxfer.verbs.layout import QUERY_PORT_OFFSET, check_layout, check_platform, extended_member

__all__ = ["CData", "FastCalls", "VerbsLibrary", "errno_name", "errno_of", "errno_text", "ffi", "load_library"]

CData = Any
"""A cffi pointer or struct; cffi has no static type for them."""

LIBRARY_NAME = "libibverbs.so.1"  # the soname of every rdma-core
LIBRARY_VARIABLE = "KVXFER_LIBIBVERBS"

NEEDED_SYMBOLS = (
    "ibv_ack_async_event",
    "ibv_ack_cq_events",
    "ibv_alloc_pd",
    "ibv_close_device",
    "ibv_create_ah",
    "ibv_create_comp_channel",
    "ibv_create_cq",
    "ibv_create_qp",
    "ibv_dealloc_pd",
    "ibv_dereg_mr",
    "ibv_destroy_ah",
    "ibv_destroy_comp_channel",
    "ibv_destroy_cq",
    "ibv_destroy_qp",
    "ibv_fork_init",
    "ibv_free_device_list",
    "ibv_get_async_event",
    "ibv_get_cq_event",
    "ibv_get_device_guid",
    "ibv_get_device_list",
    "ibv_get_device_name",
    "ibv_modify_qp",
    "ibv_open_device",
    "ibv_query_device",
    "ibv_query_gid",
    "ibv_query_pkey",
    "ibv_query_port",
    "ibv_query_qp",
    "ibv_reg_mr",
)
"""IBVERBS_1.0 and 1.1, which are as old as 2008."""
OPTIONAL_SYMBOLS = {
    "ibv_reg_mr_iova2": "28",
    "ibv_get_device_index": "30",
    "_ibv_query_gid_table": "32",
    "ibv_reg_dmabuf_mr": "34",
    "ibv_is_fork_initialized": "35",
}
"""Calls that a library may lack, and the rdma-core that brought them (debian/libibverbs1.symbols). Without them: no
relaxed ordering, no device index, GIDs one by one with their types from sysfs, no GPU memory, fork status unknown."""

PORT_ATTR_NBYTES = 56


class FastCalls(NamedTuple):
    """The calls of the data path of one device, as its driver has them."""

    post_send: Callable[[CData, CData, CData], int]
    """(qp, wr, bad_wr**)"""
    post_recv: Callable[[CData, CData, CData], int]
    """(qp, wr, bad_wr**)"""
    poll_cq: Callable[[CData, int, CData], int]
    """(cq, count, wc*)"""
    req_notify_cq: Callable[[CData, int], int]
    """(cq, solicited_only)"""


class VerbsLibrary(Protocol):
    """The table; names, argument order and results as in C. Source: the man pages ibv_*(3)."""

    path: str
    version: str
    """The file it is, such as libibverbs.so.1.14.44.0, whose last numbers are the release of rdma-core; or empty."""

    def ibv_get_device_list(self, count: CData) -> CData: ...
    def ibv_free_device_list(self, devices: CData) -> None: ...
    def ibv_get_device_name(self, device: CData) -> CData: ...
    def ibv_get_device_guid(self, device: CData) -> int: ...
    def ibv_get_device_index(self, device: CData) -> int: ...
    def ibv_open_device(self, device: CData) -> CData: ...
    def ibv_close_device(self, context: CData) -> int: ...
    def ibv_query_device(self, context: CData, attributes: CData) -> int: ...
    def ibv_query_port(self, context: CData, port: int, attributes: CData) -> int: ...
    def ibv_query_gid(self, context: CData, port: int, index: int, gid: CData) -> int: ...
    def ibv_query_gid_table(self, context: CData, entries: CData, count_max: int) -> int: ...
    def ibv_query_pkey(self, context: CData, port: int, index: int, pkey: CData) -> int: ...
    def ibv_alloc_pd(self, context: CData) -> CData: ...
    def ibv_dealloc_pd(self, pd: CData) -> int: ...
    def ibv_reg_mr(self, pd: CData, address: int, nbytes: int, access: int) -> CData: ...
    def ibv_reg_dmabuf_mr(self, pd: CData, offset: int, nbytes: int, iova: int, fd: int, access: int) -> CData: ...
    def ibv_dereg_mr(self, mr: CData) -> int: ...
    def ibv_create_comp_channel(self, context: CData) -> CData: ...
    def ibv_destroy_comp_channel(self, channel: CData) -> int: ...
    def ibv_create_cq(self, context: CData, cqe: int, cq_context: CData, channel: CData, comp_vector: int) -> CData: ...
    def ibv_destroy_cq(self, cq: CData) -> int: ...
    def ibv_get_cq_event(self, channel: CData, cq: CData, cq_context: CData) -> int: ...
    def ibv_ack_cq_events(self, cq: CData, count: int) -> None: ...
    def ibv_req_notify_cq(self, cq: CData, solicited_only: int) -> int: ...
    def ibv_poll_cq(self, cq: CData, count: int, wc: CData) -> int: ...
    def ibv_create_qp(self, pd: CData, attributes: CData) -> CData: ...
    def ibv_destroy_qp(self, qp: CData) -> int: ...
    def ibv_modify_qp(self, qp: CData, attributes: CData, mask: int) -> int: ...
    def ibv_query_qp(self, qp: CData, attributes: CData, mask: int, init: CData) -> int: ...
    def ibv_post_send(self, qp: CData, wr: CData, bad_wr: CData) -> int: ...
    def ibv_post_recv(self, qp: CData, wr: CData, bad_wr: CData) -> int: ...
    def ibv_create_ah(self, pd: CData, attributes: CData) -> CData: ...
    def ibv_destroy_ah(self, ah: CData) -> int: ...
    def ibv_get_async_event(self, context: CData, event: CData) -> int: ...
    def ibv_ack_async_event(self, event: CData) -> None: ...
    def ibv_fork_init(self) -> int: ...
    def ibv_is_fork_initialized(self) -> int: ...

    def check_layout(self, context: CData) -> str:
        """Look whether an open context is laid out as kvxfer believes: empty, or what is wrong."""

    def fast_calls(self, context: CData) -> FastCalls:
        """Return the data path of a device, to be kept by who posts and polls."""


class LoadedLibrary:
    """The system's libibverbs; satisfies VerbsLibrary."""

    def __init__(self, path: str, lib: CData) -> None:
        self.path = path
        self._lib = lib
        self.version = _file_name(path)
        self._has = {name: _has(lib, name) for name in OPTIONAL_SYMBOLS}

    def __repr__(self) -> str:
        return f"<LoadedLibrary {self.version or self.path}>"

    # What is exported as it is.

    def ibv_get_device_list(self, count: CData) -> CData:
        return self._lib.ibv_get_device_list(count)

    def ibv_free_device_list(self, devices: CData) -> None:
        self._lib.ibv_free_device_list(devices)

    def ibv_get_device_name(self, device: CData) -> CData:
        return self._lib.ibv_get_device_name(device)

    def ibv_get_device_guid(self, device: CData) -> int:
        return int(self._lib.ibv_get_device_guid(device))

    def ibv_open_device(self, device: CData) -> CData:
        return self._lib.ibv_open_device(device)

    def ibv_close_device(self, context: CData) -> int:
        return int(self._lib.ibv_close_device(context))

    def ibv_query_device(self, context: CData, attributes: CData) -> int:
        return int(self._lib.ibv_query_device(context, attributes))

    def ibv_query_gid(self, context: CData, port: int, index: int, gid: CData) -> int:
        return int(self._lib.ibv_query_gid(context, port, index, gid))

    def ibv_query_pkey(self, context: CData, port: int, index: int, pkey: CData) -> int:
        return int(self._lib.ibv_query_pkey(context, port, index, pkey))

    def ibv_alloc_pd(self, context: CData) -> CData:
        return self._lib.ibv_alloc_pd(context)

    def ibv_dealloc_pd(self, pd: CData) -> int:
        return int(self._lib.ibv_dealloc_pd(pd))

    def ibv_dereg_mr(self, mr: CData) -> int:
        return int(self._lib.ibv_dereg_mr(mr))

    def ibv_create_comp_channel(self, context: CData) -> CData:
        return self._lib.ibv_create_comp_channel(context)

    def ibv_destroy_comp_channel(self, channel: CData) -> int:
        return int(self._lib.ibv_destroy_comp_channel(channel))

    def ibv_create_cq(self, context: CData, cqe: int, cq_context: CData, channel: CData, comp_vector: int) -> CData:
        return self._lib.ibv_create_cq(context, cqe, cq_context, channel, comp_vector)

    def ibv_destroy_cq(self, cq: CData) -> int:
        return int(self._lib.ibv_destroy_cq(cq))

    def ibv_get_cq_event(self, channel: CData, cq: CData, cq_context: CData) -> int:
        return int(self._lib.ibv_get_cq_event(channel, cq, cq_context))

    def ibv_ack_cq_events(self, cq: CData, count: int) -> None:
        self._lib.ibv_ack_cq_events(cq, count)

    def ibv_create_qp(self, pd: CData, attributes: CData) -> CData:
        return self._lib.ibv_create_qp(pd, attributes)

    def ibv_destroy_qp(self, qp: CData) -> int:
        return int(self._lib.ibv_destroy_qp(qp))

    def ibv_modify_qp(self, qp: CData, attributes: CData, mask: int) -> int:
        return int(self._lib.ibv_modify_qp(qp, attributes, mask))

    def ibv_query_qp(self, qp: CData, attributes: CData, mask: int, init: CData) -> int:
        return int(self._lib.ibv_query_qp(qp, attributes, mask, init))

    def ibv_create_ah(self, pd: CData, attributes: CData) -> CData:
        return self._lib.ibv_create_ah(pd, attributes)

    def ibv_destroy_ah(self, ah: CData) -> int:
        return int(self._lib.ibv_destroy_ah(ah))

    def ibv_get_async_event(self, context: CData, event: CData) -> int:
        return int(self._lib.ibv_get_async_event(context, event))

    def ibv_ack_async_event(self, event: CData) -> None:
        self._lib.ibv_ack_async_event(event)

    def ibv_fork_init(self) -> int:
        return int(self._lib.ibv_fork_init())

    # What an older library may lack.

    def ibv_get_device_index(self, device: CData) -> int:
        return int(self._lib.ibv_get_device_index(device)) if self._has["ibv_get_device_index"] else -1

    def ibv_query_gid_table(self, context: CData, entries: CData, count_max: int) -> int:
        if not self._has["_ibv_query_gid_table"]:
            return -errno.EOPNOTSUPP
        return int(self._lib._ibv_query_gid_table(context, entries, count_max, 0, ffi.sizeof("struct ibv_gid_entry")))

    def ibv_reg_mr(self, pd: CData, address: int, nbytes: int, access: int) -> CData:
        # In C a macro: optional access bits need the newer symbol, and a kernel that lacks them ignores them.
        if access & OPTIONAL_ACCESS and self._has["ibv_reg_mr_iova2"]:
            return self._lib.ibv_reg_mr_iova2(pd, address, nbytes, address, access)
        return self._lib.ibv_reg_mr(pd, address, nbytes, access & ~OPTIONAL_ACCESS)

    def ibv_reg_dmabuf_mr(self, pd: CData, offset: int, nbytes: int, iova: int, fd: int, access: int) -> CData:
        if not self._has["ibv_reg_dmabuf_mr"]:
            ffi.errno = errno.EOPNOTSUPP
            return ffi.NULL
        return self._lib.ibv_reg_dmabuf_mr(pd, offset, nbytes, iova, fd, access)

    def ibv_is_fork_initialized(self) -> int:
        return int(self._lib.ibv_is_fork_initialized()) if self._has["ibv_is_fork_initialized"] else -1

    # What is inline in C.

    def ibv_query_port(self, context: CData, port: int, attributes: CData) -> int:
        # The exported symbol fills the first 48 bytes only, as in the first release.
        ffi.buffer(attributes, PORT_ATTR_NBYTES)[:] = bytes(PORT_ATTR_NBYTES)
        extended = extended_member(context, QUERY_PORT_OFFSET)
        if extended:
            call = ffi.cast("int (*)(struct ibv_context *, uint8_t, struct ibv_port_attr *, size_t)", extended)
            return int(call(context, port, attributes, PORT_ATTR_NBYTES))
        return int(self._lib.ibv_query_port(context, port, attributes))

    def ibv_post_send(self, qp: CData, wr: CData, bad_wr: CData) -> int:
        return int(qp.context.ops.post_send(qp, wr, bad_wr))

    def ibv_post_recv(self, qp: CData, wr: CData, bad_wr: CData) -> int:
        return int(qp.context.ops.post_recv(qp, wr, bad_wr))

    def ibv_poll_cq(self, cq: CData, count: int, wc: CData) -> int:
        return int(cq.context.ops.poll_cq(cq, count, wc))

    def ibv_req_notify_cq(self, cq: CData, solicited_only: int) -> int:
        return int(cq.context.ops.req_notify_cq(cq, solicited_only))

    def fast_calls(self, context: CData) -> FastCalls:
        ops = context.ops
        return FastCalls(ops.post_send, ops.post_recv, ops.poll_cq, ops.req_notify_cq)

    def check_layout(self, context: CData) -> str:
        return check_layout(context)


def load_library(path: str | None = None) -> VerbsLibrary:
    """Open libibverbs and return its table; the same one for the same path.

    path: file name or soname; by default the environment variable KVXFER_LIBIBVERBS, else libibverbs.so.1.

    Raises VerbsLibraryError where there is none, where it cannot be loaded and where it is another library,
    VerbsLibraryOldError where it lacks calls that kvxfer needs, and VerbsLayoutError on a platform whose layout of the
    library kvxfer does not know.
    """
    check_platform(path or LIBRARY_NAME)
    variable = os.environ.get(LIBRARY_VARIABLE)
    chosen = path or variable or LIBRARY_NAME
    origin = f" (from {LIBRARY_VARIABLE})" if path is None and variable else ""
    return _load(chosen, origin)


@functools.cache
def _load(path: str, origin: str) -> LoadedLibrary:
    is_file_path = "/" in path
    install = "Install it: apt-get install libibverbs1 ibverbs-providers (Debian, Ubuntu), dnf install libibverbs."
    if is_file_path and not Path(path).exists():
        raise VerbsLibraryError(f"there is no file {path}{origin}.", remedy=install, path=path)
    try:
        lib = ffi.dlopen(path)
    except OSError as exc:
        if not is_file_path and "No such file" in str(exc):
            raise VerbsLibraryError(f"{path} is not installed{origin}.", remedy=install, path=path) from None
        raise VerbsLibraryError(
            f"{path}{origin} cannot be loaded: {_loader_text(exc, path)}.", remedy=install, path=path
        ) from None
    missing = tuple(name for name in NEEDED_SYMBOLS if not _has(lib, name))
    if len(missing) == len(NEEDED_SYMBOLS):
        raise VerbsLibraryError(
            f"{path}{origin} is a shared library, but not libibverbs: no {', '.join(missing[:2])}, ...",
            remedy=f"Unset {LIBRARY_VARIABLE}, or name the system's {LIBRARY_NAME}.",
            path=path,
        )
    if missing:
        raise VerbsLibraryOldError(
            f"{path}{origin} lacks {', '.join(missing)}.",
            remedy="Install rdma-core 28 or newer.",
            path=path,
            missing=missing,
        )
    return LoadedLibrary(path, lib)


def _has(lib: CData, name: str) -> bool:
    try:
        getattr(lib, name)
    except (AttributeError, ffi.error):  # cffi's own where the library, rather than the declaration, lacks it
        return False
    return True


def errno_of(result: int) -> int:
    """Return the error number of a call that gave `result`, 0 for success; to be asked at once.

    The man pages promise the number; some drivers' libraries return -1 and leave it in errno.
    """
    return result if result >= 0 else ffi.errno or errno.EIO


def errno_name(number: int) -> str:
    """Return the name of an error number: EINVAL."""
    if number == errno.EOPNOTSUPP:
        return "EOPNOTSUPP"  # errorcode has the other name of the same number, ENOTSUP
    return errno.errorcode.get(number, f"errno {number}")


def errno_text(number: int) -> str:
    """Return an error number for a message: EINVAL (Invalid argument)."""
    return f"{errno_name(number)} ({os.strerror(number)})"


def _file_name(path: str) -> str:
    """Return the name of the loaded file, which links lead to: libibverbs.so.1.14.44.0."""
    soname = Path(path).name.partition(".so")[0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        file = Path(line.rpartition(" ")[2])
        if file.name.startswith(f"{soname}.so"):
            return file.name
    return ""


def _loader_text(exc: OSError, path: str) -> str:
    """Return dlopen's text without what cffi and the loader put before it."""
    text = str(exc)
    return text.removeprefix(f"cannot load library '{path}': ").removeprefix(f"{path}: ").rstrip(".")
