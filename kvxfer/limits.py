"""What the kernel has none left of: file descriptors, threads, memory. Says which limit it is, and how to raise it.

Pure but for reading the limits. Where such an error can come up, its caller wraps the step in `shortages_told`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

from kvxfer.errors import KvxferError, ResourceLimitError

__all__ = ["is_shortage", "remedy_for", "shortage", "shortages_told"]

_NO_THREAD = "can't start new thread"  # what threading raises as a RuntimeError, without the errno


@contextlib.contextmanager
def shortages_told(what: str, **values: Any) -> Iterator[None]:
    """Raise ResourceLimitError, saying that `what` failed, in place of an OSError, RuntimeError or MemoryError that
    means that the kernel has none left of something. Everything else passes. values: more attributes of the error."""
    try:
        yield
    except KvxferError:
        raise
    except OSError as exc:
        if not is_shortage(exc.errno):
            raise
        raise shortage(what, exc.errno, **values) from exc
    except MemoryError as exc:
        raise shortage(what, errno.ENOMEM, **values) from exc
    except RuntimeError as exc:
        if _NO_THREAD not in str(exc):
            raise
        raise ResourceLimitError(
            f"{what} failed: no thread could be started.", remedy=_threads(), errno=errno.EAGAIN, **values
        ) from exc


def shortage(what: str, code: int | None, **values: Any) -> ResourceLimitError:
    """Return the error for an errno that is a shortage."""
    return ResourceLimitError(
        f"{what} failed: {os.strerror(code or 0)}.", remedy=remedy_for(code), errno=code, **values
    )


def is_shortage(code: int | None) -> bool:
    """Whether an errno says that there is none left of something, rather than that the call is wrong."""
    return code in _REMEDIES


def remedy_for(code: int | None) -> str:
    """Return the limit behind an errno and how to raise it; "" for an errno that is no shortage."""
    tell = _REMEDIES.get(code or 0)
    return tell() if tell is not None else ""


def _open_files() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "" if hard == resource.RLIM_INFINITY else f"; up to {hard} without privileges"
    return (
        f"This process may have {soft} files open at once, sockets and shared memory among them: raise that "
        f"(`ulimit -n`, LimitNOFILE= in the unit{most}), or close engines, segments and files that are not used."
    )


def _system_files() -> str:
    return "All processes of this host together have as many files open as it allows: raise fs.file-max (sysctl)."


def _threads() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"a limit of {soft}"
    return (
        f"This user has {limit} on processes and threads (`ulimit -u`); a container has one of its own (pids.max, "
        "docker run --pids-limit). Raise the one that is reached, or end threads that are not used."
    )


def _memory() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = "" if soft == resource.RLIM_INFINITY else f" This process may map {soft} bytes (`ulimit -v`)."
    return (
        f"Neither this host nor its limits leave memory for it.{limit} Free some, or raise the limit of the container."
    )


_REMEDIES: dict[int, Callable[[], str]] = {
    errno.EMFILE: _open_files,
    errno.ENFILE: _system_files,
    errno.ENOMEM: _memory,
    errno.ENOBUFS: _memory,
}
