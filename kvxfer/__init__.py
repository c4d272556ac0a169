"""kvxfer moves KV-cache blocks between processes and hosts: shared memory and TCP, in pure Python.

Start with `TransferEngine`; `kvxfer demo` and `kvxfer doctor` on the command line show and check a machine.
"""

from kvxfer.batch import TransferBatch
from kvxfer.config import EngineConfig
from kvxfer.engine import TransferEngine
from kvxfer.errors import (
    AccessDeniedError,
    AllocationError,
    AuthenticationError,
    ClosedError,
    ConfigError,
    DeviceNotFoundError,
    ForkedError,
    HandshakeTimeoutError,
    KvxferError,
    LocalProtocolError,
    MemoryArgumentError,
    NotRegisteredError,
    PeerClosedError,
    PeerError,
    PeerRefusedError,
    PeerRestartedError,
    PeerUnreachableError,
    ProtocolError,
    RegionBusyError,
    RegionOverlapError,
    RegistrationError,
    RemoteAccessError,
    RemoteProtocolError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    TransportUnavailableError,
    UnsupportedError,
    UsageError,
    VerbsError,
)
from kvxfer.memory.regions import Region
from kvxfer.segment import Segment
from kvxfer.serving import Notification
from kvxfer.types import Opcode, Probe, RegionDescriptor, Rights

__version__ = "0.1.0"

__all__ = [
    "AccessDeniedError",
    "AllocationError",
    "AuthenticationError",
    "ClosedError",
    "ConfigError",
    "DeviceNotFoundError",
    "EngineConfig",
    "ForkedError",
    "HandshakeTimeoutError",
    "KvxferError",
    "LocalProtocolError",
    "MemoryArgumentError",
    "NotRegisteredError",
    "Notification",
    "Opcode",
    "PeerClosedError",
    "PeerError",
    "PeerRefusedError",
    "PeerRestartedError",
    "PeerUnreachableError",
    "Probe",
    "ProtocolError",
    "Region",
    "RegionBusyError",
    "RegionDescriptor",
    "RegionOverlapError",
    "RegistrationError",
    "RemoteAccessError",
    "RemoteProtocolError",
    "Rights",
    "Segment",
    "TransferBatch",
    "TransferCancelledError",
    "TransferEngine",
    "TransferError",
    "TransferTimeoutError",
    "TransportUnavailableError",
    "UnsupportedError",
    "UsageError",
    "VerbsError",
]
