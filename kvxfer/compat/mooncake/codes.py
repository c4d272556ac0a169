"""Mooncake's integers: which error becomes which, and the error behind the last failing call of a thread.

`answer` is the way of every call of the drop-in: it returns what the work returns, or the code of what it raised.
Source of the numbers: Mooncake's include/error.h. Read next: `engine.py`.
"""

from __future__ import annotations

import enum
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from kvxfer import errors
from kvxfer.log import get_logger
from kvxfer.text import clean

__all__ = ["Answer", "Code", "answer", "code_of", "last_error", "report"]

Answer = TypeVar("Answer")
TEXT_LENGTH_MAX = 4000
"""Of a message in the log: names that callers give may have any length."""

log = get_logger(__name__)
_of_thread = threading.local()


class Code(enum.IntEnum):
    """Codes that calls return; the names are Mooncake's, but for TIMED_OUT, which is transfer_check_status's."""

    OK = 0
    INVALID_ARGUMENT = -1
    TIMED_OUT = -2
    ADDRESS_NOT_REGISTERED = -3
    BATCH_BUSY = -4
    DEVICE_NOT_FOUND = -6
    ADDRESS_OVERLAPPED = -7
    DNS = -101
    SOCKET = -102
    MALFORMED_JSON = -103
    REJECT_HANDSHAKE = -104
    METADATA = -200
    ENDPOINT = -201
    CONTEXT = -202
    MEMORY = -302


_CODES: tuple[tuple[type[BaseException], Code], ...] = (
    (errors.RegionOverlapError, Code.ADDRESS_OVERLAPPED),
    (errors.NotRegisteredError, Code.ADDRESS_NOT_REGISTERED),
    (errors.AccessDeniedError, Code.ADDRESS_NOT_REGISTERED),
    (errors.RemoteAccessError, Code.ADDRESS_NOT_REGISTERED),
    (errors.RegionBusyError, Code.BATCH_BUSY),
    (errors.AllocationError, Code.MEMORY),
    (errors.UnsupportedError, Code.DEVICE_NOT_FOUND),
    (errors.RegistrationError, Code.CONTEXT),
    (errors.VerbsError, Code.ENDPOINT),
    (errors.TransferTimeoutError, Code.TIMED_OUT),
    (errors.CompletionError, Code.ENDPOINT),
    (errors.PeerUnreachableError, Code.SOCKET),
    (errors.HandshakeTimeoutError, Code.SOCKET),
    (errors.PeerRefusedError, Code.REJECT_HANDSHAKE),
    (errors.AuthenticationError, Code.REJECT_HANDSHAKE),
    (errors.PeerError, Code.ENDPOINT),
    (errors.DirectoryError, Code.METADATA),
    (errors.ProtocolError, Code.MALFORMED_JSON),
    (MemoryError, Code.MEMORY),
    (OSError, Code.SOCKET),
)
"""The first that fits; what is not here is INVALID_ARGUMENT, Mooncake's generic -1."""


def code_of(error: BaseException) -> Code:
    """Return the code of an error; one that knows its own (`mooncake_code`) keeps it."""
    known = getattr(error, "mooncake_code", None)
    if isinstance(known, int):
        return Code(known)
    return next((code for kind, code in _CODES if isinstance(error, kind)), Code.INVALID_ARGUMENT)


def last_error() -> BaseException | None:
    """Return the error behind the last call of this thread that failed; None where none has. Success leaves it."""
    return getattr(_of_thread, "error", None)


def report(call: str, error: Exception) -> Code:
    """Keep the error for `last_error`, put its message into the log, once, and return its code.

    One that only repeats what the log has (`is_told`) is not written again.
    """
    code = code_of(error)
    _of_thread.error = error
    if isinstance(error, errors.KvxferError):
        _forget_frames(error)
        if not error.values.get("is_told"):
            text = clean(str(error), TEXT_LENGTH_MAX)
            log.warning("mooncake.call_failed", call=call, code=int(code), kind=type(error).__name__, error=text)
    else:
        log.error("mooncake.call_broke", call=call, code=int(code), error=repr(error), trace=traceback.format_exc())
    return code


def answer(call: str, failed: Answer | None, work: Callable[..., Answer], *arguments: Any) -> Answer:
    """Return what `work(*arguments)` returns; where it raises, `failed`, or the code of the error if that is None.

    Nothing but an interrupt gets out: callers of Mooncake look at integers.
    """
    try:
        return work(*arguments)
    except Exception as error:
        code: Any = int(report(call, error))
        return code if failed is None else failed


def _forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that is kept: their frames would hold the columns of the batch."""
    seen: BaseException | None = error
    while seen is not None and seen.__traceback__ is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
