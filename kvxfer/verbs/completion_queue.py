"""Completion queues and the channels that one sleeps on until a completion comes.

The order that loses no wake-up: sleep on `channel.fd`, `channel.get_event()`, `request_notification()`, then `poll()`
until it returns no rows. (Asking for a notification after the last poll would lose what came in between.)
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from kvxfer.errors import UsageError, VerbsError
from kvxfer.system.memlock import memlock_note
from kvxfer.verbs.handle import Handle
from kvxfer.verbs.library import errno_of, errno_text, ffi

if TYPE_CHECKING:
    from kvxfer.verbs.device import Context
    from kvxfer.verbs.library import CData, VerbsLibrary

__all__ = ["WC_DTYPE", "CompletionChannel", "CompletionQueue"]

WC_DTYPE = np.dtype(
    {
        "names": [
            "wr_id",
            "status",
            "opcode",
            "vendor_err",
            "byte_len",
            "imm_data",
            "qp_num",
            "src_qp",
            "wc_flags",
            "pkey_index",
            "slid",
            "sl",
            "dlid_path_bits",
        ],
        "formats": ["u8", "i4", "i4", "u4", "u4", ">u4", "u4", "u4", "u4", "u2", "u2", "u1", "u1"],
        "offsets": [0, 8, 12, 16, 20, 24, 28, 32, 36, 40, 42, 44, 45],
        "itemsize": 48,
    }
)
"""struct ibv_wc. Of a failed completion only wr_id, status, qp_num and vendor_err mean something."""

ACKNOWLEDGE_EVERY = 128
"""Events acknowledged at once: each acknowledgement takes a mutex (ibv_ack_cq_events(3))."""


class CompletionChannel(Handle):
    """A descriptor that becomes readable when a completion queue that asked for it gets a completion."""

    noun: ClassVar[str] = "completion channel"

    def __init__(self, context: Context) -> None:
        pointer = context.library.ibv_create_comp_channel(context.pointer)
        if pointer == ffi.NULL:
            number = ffi.errno
            raise VerbsError(
                f"ibv_create_comp_channel({context.name}) failed: {errno_text(number)}.",
                remedy="EMFILE: raise the limit on open files (ulimit -n).",
                verb="ibv_create_comp_channel",
                errno=number,
                device=context.name,
            )
        super().__init__(
            context.library, pointer, context.library.ibv_destroy_comp_channel, "ibv_destroy_comp_channel", context
        )
        self.context = context
        self.fd = int(pointer.fd)
        os.set_blocking(self.fd, False)
        self._queues: WeakValueDictionary[int, CompletionQueue] = WeakValueDictionary()
        """By address; weak, because each queue keeps its channel alive."""
        self._event = ffi.new("struct ibv_cq **")
        self._event_context = ffi.new("void **")

    def get_event(self) -> CompletionQueue | None:
        """Return the queue that has a completion, or None; never waits. The queue acknowledges the event."""
        if self.library.ibv_get_cq_event(self.pointer, self._event, self._event_context) != 0:
            number = ffi.errno
            if number in (errno.EAGAIN, errno.EINTR):
                return None
            raise VerbsError(
                f"ibv_get_cq_event({self.context.name}) failed: {errno_text(number)}.",
                remedy="The device was removed, or its descriptor was closed by something else in this process.",
                verb="ibv_get_cq_event",
                errno=number,
                device=self.context.name,
            )
        queue = self._queues[int(ffi.cast("uintptr_t", self._event[0]))]
        queue.count_event()
        return queue

    def _facts(self) -> dict[str, Any]:
        return {"device": self.context.name, "fd": self.fd}


class CompletionQueue(Handle):
    """Where work requests end. One thread at a time may use it."""

    noun: ClassVar[str] = "completion queue"

    def __init__(
        self,
        context: Context,
        cqe: int,
        channel: CompletionChannel | None = None,
        *,
        comp_vector: int = 0,
        poll_count: int = 64,
    ) -> None:
        if poll_count < 1:
            raise UsageError(f"a poll of {poll_count} completions.", remedy="Give a poll_count of 1 at least.")
        pointer = context.library.ibv_create_cq(
            context.pointer, cqe, ffi.NULL, ffi.NULL if channel is None else channel.pointer, comp_vector
        )
        if pointer == ffi.NULL:
            number = ffi.errno
            raise VerbsError(
                f"ibv_create_cq({context.name}, {cqe} completions) failed: {errno_text(number)}; the device allows "
                f"{context.limits.max_cqe} a queue and {context.limits.max_cq} queues{memlock_note(number)}.",
                remedy="EINVAL: ask for fewer completions. ENOMEM: raise the locked-memory limit "
                "(`ulimit -l unlimited`), or close other users of the device.",
                verb="ibv_create_cq",
                errno=number,
                device=context.name,
                cqe=cqe,
            )
        parents = (context,) if channel is None else (context, channel)
        super().__init__(context.library, pointer, context.library.ibv_destroy_cq, "ibv_destroy_cq", *parents)
        self.context = context
        self.channel = channel
        self.cqe = int(pointer.cqe)
        """Completions it holds, as granted: a queue that overruns kills the queue pairs on it."""
        self._completions = np.zeros(poll_count, WC_DTYPE)
        self._buffer = ffi.from_buffer("struct ibv_wc[]", self._completions)
        self._count_max = poll_count
        self._poll = context.fast_calls.poll_cq
        self._request = context.fast_calls.req_notify_cq
        self._events = _Events(context.library)
        self._ownership.before_destroy = self._events.acknowledge
        if channel is not None:
            channel._queues[int(ffi.cast("uintptr_t", pointer))] = self

    def poll(self) -> npt.NDArray[np.void]:
        """Return the completions that are there, at most `poll_count`: rows of WC_DTYPE, valid until the next poll."""
        count = self._poll(self.pointer, self._count_max, self._buffer)
        if count < 0:
            raise VerbsError(
                f"ibv_poll_cq({self.context.name}) failed: it returned {count}.",
                remedy="The completion queue overran or the device failed: the queue pairs on it are lost.",
                verb="ibv_poll_cq",
                errno=errno.EIO,  # the driver's own negative number is none (ibv_poll_cq(3); -2 on mlx5)
                device=self.context.name,
            )
        return self._completions[:count]

    def request_notification(self, *, solicited_only: bool = False) -> None:
        """Have the channel become readable at the next completion, once."""
        error = errno_of(self._request(self.pointer, int(solicited_only)))
        if error:
            raise VerbsError(
                f"ibv_req_notify_cq({self.context.name}) failed: {errno_text(error)}.",
                remedy="The device failed; the kernel's log says more (dmesg).",
                verb="ibv_req_notify_cq",
                errno=error,
                device=self.context.name,
            )

    def count_event(self) -> None:
        """Note an event that the channel gave for this queue; acknowledged in bulk."""
        self._events.count += 1
        if self._events.count >= ACKNOWLEDGE_EVERY:
            self._events.acknowledge(self.pointer)

    def _facts(self) -> dict[str, Any]:
        return {"device": self.context.name, "cqe": self.cqe}


class _Events:
    """The events of one queue that are not acknowledged yet: destroying it waits for that for ever
    (ibv_destroy_cq(3)), also where it is destroyed because it was dropped."""

    def __init__(self, library: VerbsLibrary) -> None:
        self._library = library
        self.count = 0

    def acknowledge(self, pointer: CData) -> None:
        """Acknowledge all so far."""
        if self.count:
            self._library.ibv_ack_cq_events(pointer, self.count)
            self.count = 0
