"""Protection domains and memory regions: which memory a device may touch, and for whom.

A memory region here is one ibv_mr: one range that the device took whole. Regions of a caller that are larger than what
a device takes are cut by `memory/registration.py`.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, ClassVar

from kvxfer.errors import RegistrationError, VerbsError
from kvxfer.verbs.enums import Access
from kvxfer.verbs.handle import Handle
from kvxfer.verbs.library import errno_text, ffi

if TYPE_CHECKING:
    from kvxfer.verbs.completion_queue import CompletionQueue
    from kvxfer.verbs.device import Context
    from kvxfer.verbs.queue_pair import QueuePair, QueuePairCapabilities

__all__ = ["MemoryRegion", "ProtectionDomain"]

_REMEDIES = {
    errno.ENOMEM: "The locked-memory limit is too low, or the device has no room: `ulimit -l unlimited`, LimitMEMLOCK= "
    "in the unit, --ulimit memlock=-1 (docker).",
    errno.EFAULT: "The memory is not mapped, was freed, is read-only although local writing was asked for, or is a "
    "GPU's: register read-only memory without the right to be written.",
    errno.EINVAL: "The device does not take this length or these access flags: see max_mr_size in `kvxfer devices`.",
    errno.EOPNOTSUPP: "The driver does not register such memory, or not with these rights: leave the device out "
    "(rdma_devices), or update its driver.",
    errno.EPERM: "The locked-memory limit is 0: `ulimit -l unlimited`, or CAP_IPC_LOCK.",
}


class ProtectionDomain(Handle):
    """Memory and queue pairs that may be used together."""

    noun: ClassVar[str] = "protection domain"

    def __init__(self, context: Context) -> None:
        pointer = context.library.ibv_alloc_pd(context.pointer)
        if pointer == ffi.NULL:
            number = ffi.errno
            raise VerbsError(
                f"ibv_alloc_pd({context.name}) failed: {errno_text(number)}.",
                remedy=f"The device has {context.limits.max_pd} protection domains for all processes; close some.",
                verb="ibv_alloc_pd",
                errno=number,
                device=context.name,
            )
        super().__init__(context.library, pointer, context.library.ibv_dealloc_pd, "ibv_dealloc_pd", context)
        self.context = context

    def register(self, address: int, nbytes: int, access: Access) -> MemoryRegion:
        """Let the device use `[address, address + nbytes)`, whole or not at all.

        The memory belongs to the caller and must stay mapped until the region is closed.

        Raises RegistrationError with the address, the length, the access and the device's limit.
        """
        pointer = self.library.ibv_reg_mr(self.pointer, address, nbytes, int(access))
        if pointer == ffi.NULL:
            number = ffi.errno
            limits = self.context.limits
            raise RegistrationError(
                f"ibv_reg_mr({nbytes} bytes at {address:#x}, {access}) on {self.context.name} failed: "
                f"{errno_text(number)}; the device says it takes {limits.max_mr_size} bytes at most.",
                remedy=_REMEDIES.get(number, "The kernel's log says more (dmesg)."),
                verb="ibv_reg_mr",
                errno=number,
                device=self.context.name,
                address=address,
                nbytes=nbytes,
                access=str(access),
                max_mr_size=limits.max_mr_size,
            )
        return MemoryRegion(self, pointer, address, nbytes, access)

    def create_qp(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue | None = None,
        *,
        capabilities: QueuePairCapabilities,
    ) -> QueuePair:
        """Return a new RC queue pair; `recv_cq` is `send_cq` where it is not given."""
        from kvxfer.verbs.queue_pair import QueuePair

        return QueuePair(self, send_cq, recv_cq or send_cq, capabilities=capabilities)

    def _facts(self) -> dict[str, Any]:
        return {"device": self.context.name}


class MemoryRegion(Handle):
    """One registration: `[address, address + nbytes)` under a local and a remote key."""

    noun: ClassVar[str] = "memory region"

    def __init__(self, domain: ProtectionDomain, pointer: Any, address: int, nbytes: int, access: Access) -> None:
        super().__init__(domain.library, pointer, domain.library.ibv_dereg_mr, "ibv_dereg_mr", domain)
        self.domain = domain
        self.address = address
        self.nbytes = nbytes
        self.access = access
        self.lkey = int(pointer.lkey)
        self.rkey = int(pointer.rkey)

    def _facts(self) -> dict[str, Any]:
        return {
            "device": self.domain.context.name,
            "address": hex(self.address),
            "nbytes": self.nbytes,
            "lkey": hex(self.lkey),
            "rkey": hex(self.rkey),
            "access": self.access,
        }
