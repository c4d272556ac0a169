"""Every exception kvxfer raises.

KvxferError
├─ UsageError (ValueError)            the call is wrong; nothing was started
│  ├─ ConfigError                     a setting has a value that cannot be meant
│  ├─ MemoryArgumentError             this object cannot be registered (read-only, strided, empty, on a GPU ...)
│  ├─ NotRegisteredError              a row of a batch leaves the registered memory (.rows)
│  ├─ AccessDeniedError               the memory is registered without the right that the call needs (.rows)
│  ├─ RegionOverlapError              the new region overlaps one that exists
│  ├─ RegionBusyError                 the region still carries transfers
│  ├─ ClosedError                     we closed the engine, the segment or the region
│  └─ ForkedError                     the engine belongs to the parent of this process
├─ UnsupportedError                   this machine cannot
│  ├─ TransportUnavailableError       no transport of the wanted ones can carry this (.reasons)
│  ├─ VerbsUnavailableError           RDMA cannot be used here at all
│  │  ├─ VerbsLibraryError            libibverbs is absent, cannot be loaded, or is another library (.path)
│  │  ├─ VerbsLibraryOldError         it lacks calls that kvxfer needs (.missing)
│  │  ├─ VerbsLayoutError             its memory layout is not the one kvxfer knows (.check)
│  │  ├─ VerbsKernelError             this kernel has no RDMA
│  │  ├─ VerbsProviderError           there are devices, but no driver library for them
│  │  └─ VerbsDeviceFilesError        there are devices, but no /dev/infiniband (a container)
│  ├─ DeviceNotFoundError             the device that was named does not exist
│  ├─ DeviceUnusableError             the device exists and cannot carry data (.device, .reason)
│  ├─ AllocationError                 the memory asked for is not there
│  └─ ResourceLimitError              there is no file descriptor, thread or kernel memory left (.errno)
├─ VerbsError (OSError)               a libibverbs call failed (.verb, .errno)
│  ├─ RegistrationError               a memory registration failed
│  ├─ QueuePairStateError             a queue pair did not take a step (.transition, .attributes, .culprit)
│  └─ PostError                       work requests were not taken (.posted_count)
├─ ProtocolError
│  ├─ LocalProtocolError              our side called out of turn: a bug in kvxfer
│  └─ RemoteProtocolError             the peer sent bytes that the protocol does not allow
├─ PeerError                          the peer is the reason (.peer)
│  ├─ PeerUnreachableError            it cannot be reached, or stopped answering
│  ├─ PeerClosedError                 it closed the connection, or died
│  ├─ PeerRestartedError              another process answers at its address
│  ├─ PeerRefusedError                it said no, in its own words (.code)
│  ├─ AuthenticationError             the pre-shared keys differ, or only one side has one
│  └─ HandshakeTimeoutError           it did not finish the handshake in time
├─ DirectoryError                     a metadata server is the reason (.server)
│  ├─ DirectoryUnreachableError       it cannot be reached, or did not answer in time
│  ├─ DirectoryAnswerError            it answered with something else than metadata, or said no
│  └─ SegmentNotFoundError            it knows no segment of that name (.segment)
└─ TransferError                      a batch failed; not one byte more is written (.rows, .nbytes_done)
   ├─ TransferTimeoutError            its deadline passed
   ├─ TransferCancelledError          the caller cancelled it
   ├─ CompletionError                 an RDMA device gave a request back failed (.status, .vendor_err, .device)
   └─ RemoteAccessError               the peer refused rows: not registered there, or without the right

A message says what failed with which values, why that usually happens, and what to do; the last part is
`remedy`, and every value is an attribute too. `retryable` says whether the same call may work later without
a change to the program. All of them survive pickling.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "AccessDeniedError",
    "AllocationError",
    "AuthenticationError",
    "ClosedError",
    "CompletionError",
    "ConfigError",
    "DeviceNotFoundError",
    "DeviceUnusableError",
    "DirectoryAnswerError",
    "DirectoryError",
    "DirectoryUnreachableError",
    "ForkedError",
    "HandshakeTimeoutError",
    "KvxferError",
    "LocalProtocolError",
    "MemoryArgumentError",
    "NotRegisteredError",
    "PeerClosedError",
    "PeerError",
    "PeerRefusedError",
    "PeerRestartedError",
    "PeerUnreachableError",
    "PostError",
    "ProtocolError",
    "QueuePairStateError",
    "RegionBusyError",
    "RegionOverlapError",
    "RegistrationError",
    "RemoteAccessError",
    "RemoteProtocolError",
    "ResourceLimitError",
    "SegmentNotFoundError",
    "TransferCancelledError",
    "TransferError",
    "TransferTimeoutError",
    "TransportUnavailableError",
    "UnsupportedError",
    "UsageError",
    "VerbsDeviceFilesError",
    "VerbsError",
    "VerbsKernelError",
    "VerbsLayoutError",
    "VerbsLibraryError",
    "VerbsLibraryOldError",
    "VerbsProviderError",
    "VerbsUnavailableError",
]


def _rebuild(cls: type[KvxferError], message: str, remedy: str, values: dict[str, Any]) -> KvxferError:
    return cls(message, remedy=remedy, **values)


class KvxferError(Exception):
    """Base of all; `values` holds what the message names, and each value is an attribute as well."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, remedy: str = "", **values: Any) -> None:
        super().__init__(f"{message} {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy
        self.values: Mapping[str, Any] = values
        for name, value in values.items():
            setattr(self, name, value)

    def note(self, **values: Any) -> None:
        """Add values that were not known where it was made; one that is there already stays."""
        for name, value in values.items():
            if name not in self.values:
                self.values = {**self.values, name: value}
                setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.remedy, dict(self.values))


class UsageError(KvxferError, ValueError):
    """The call is wrong; nothing was started."""


class ConfigError(UsageError):
    """A setting has a value that cannot be meant."""


class MemoryArgumentError(UsageError, TypeError):
    """The object given as memory cannot be registered."""


class NotRegisteredError(UsageError):
    """Rows of a batch leave the registered memory."""

    rows: tuple[int, ...] = ()


class AccessDeniedError(UsageError):
    """The memory is registered without the right that the call needs."""

    rows: tuple[int, ...] = ()


class RegionOverlapError(UsageError):
    """A region would overlap one that is registered."""


class RegionBusyError(UsageError):
    """A region still carries transfers and cannot be unregistered now."""

    retryable = True


class ClosedError(UsageError):
    """The engine, segment or region was closed by this process."""


class ForkedError(UsageError):
    """The engine belongs to another process: the parent of this one."""


class UnsupportedError(KvxferError):
    """This machine cannot do what was asked."""


class TransportUnavailableError(UnsupportedError):
    """None of the wanted transports can be used."""

    reasons: Mapping[str, str] = {}


class VerbsUnavailableError(UnsupportedError):
    """RDMA cannot be used here at all; which kind it is says what is missing."""


class VerbsLibraryError(VerbsUnavailableError):
    """libibverbs is not installed, cannot be loaded, or is another library."""

    path: str = ""


class VerbsLibraryOldError(VerbsUnavailableError):
    """The library lacks calls that kvxfer needs."""

    path: str = ""
    missing: tuple[str, ...] = ()


class VerbsLayoutError(VerbsUnavailableError):
    """The library's memory layout is not the one kvxfer knows: using it would crash the process."""

    path: str = ""
    check: str = ""


class VerbsKernelError(VerbsUnavailableError):
    """This kernel has no RDMA."""


class VerbsProviderError(VerbsUnavailableError):
    """The kernel has RDMA devices, but libibverbs has no driver library for them."""


class VerbsDeviceFilesError(VerbsUnavailableError):
    """The kernel has RDMA devices, but their files in /dev/infiniband are not here or may not be opened."""


class DeviceNotFoundError(UnsupportedError):
    """The device that was named does not exist here."""


class DeviceUnusableError(UnsupportedError):
    """The device exists and cannot carry data: no active port, no usable GID, a service that kvxfer does not speak."""

    device: str = ""
    reason: str = ""


class AllocationError(UnsupportedError):
    """The memory asked for is not there."""


class ResourceLimitError(UnsupportedError):
    """The kernel has none left of what is needed: file descriptors, threads, memory; the remedy names the limit."""

    errno: int = 0
    retryable = True


class VerbsError(KvxferError, OSError):
    """A call into libibverbs failed."""

    verb: str = ""
    device: str = ""


class RegistrationError(VerbsError):
    """A memory registration failed; nothing of it stays."""


class QueuePairStateError(VerbsError):
    """A queue pair did not take a step; `attributes` is all that ibv_modify_qp was given."""

    transition: str = ""
    attributes: Mapping[str, Any] = {}
    culprit: str = ""


class PostError(VerbsError):
    """Work requests were not taken; the first `posted_count` of the chain were, and will complete."""

    posted_count: int = 0

    @property
    def is_for_want_of_room(self) -> bool:
        """Whether the queue was full: the same request is taken once others have completed."""
        return self.values.get("errno") in (errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS)


class ProtocolError(KvxferError):
    """The control or data protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This side called out of turn: a bug in kvxfer."""


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that the protocol does not allow."""


class PeerError(KvxferError):
    """The peer is the reason."""

    peer: str = ""
    retryable = True


class PeerUnreachableError(PeerError):
    """The peer cannot be reached, or stopped answering."""


class PeerClosedError(PeerError):
    """The peer closed the connection, or died."""


class PeerRestartedError(PeerError):
    """Another process answers at the peer's address: what was known of the old one is void."""


class PeerRefusedError(PeerError):
    """The peer said no; `code` and the message are its own words."""

    code: str = ""
    retryable = False


class AuthenticationError(PeerError):
    """The pre-shared keys differ, or only one side has one."""

    retryable = False


class HandshakeTimeoutError(PeerError):
    """The peer did not finish the handshake in time."""


class DirectoryError(KvxferError):
    """A metadata server is the reason: peers could not be found there, or this process not be published."""

    server: str = ""


class DirectoryUnreachableError(DirectoryError):
    """The metadata server cannot be reached, or did not answer in time."""

    retryable = True


class DirectoryAnswerError(DirectoryError):
    """The metadata server refused the request, or answered with something that is no metadata."""


class SegmentNotFoundError(DirectoryError):
    """The metadata server knows no segment of that name."""

    segment: str = ""
    retryable = True


class TransferError(KvxferError):
    """A batch failed, finally: after this is raised not one byte more is written on its account."""

    rows: tuple[int, ...] = ()
    nbytes_done: int = 0
    retryable = True


class TransferTimeoutError(TransferError):
    """The deadline of a batch passed."""


class TransferCancelledError(TransferError):
    """The caller cancelled the batch."""

    retryable = False


class CompletionError(TransferError):
    """An RDMA device gave a request back failed; `status` is the name of its completion status."""

    status: str = ""
    vendor_err: int = 0
    device: str = ""


class RemoteAccessError(TransferError):
    """The peer refused rows: not registered there, or registered without the right."""

    retryable = False
