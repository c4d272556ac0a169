"""kvxfer moves KV-cache blocks between processes and hosts: shared memory and TCP, in pure Python.

Start with `TransferEngine`; `kvxfer demo` and `kvxfer doctor` on the command line show and check a machine.
"""

from kvxfer.batch import TransferBatch
from kvxfer.config import EngineConfig
from kvxfer.engine import Notification, TransferEngine
from kvxfer.errors import *  # noqa: F403  the whole tree; errors.__all__ lists it
from kvxfer.errors import __all__ as _errors
from kvxfer.memory.regions import Region
from kvxfer.segment import Segment
from kvxfer.types import Opcode, Probe, RegionDescriptor, Rights

__version__ = "0.1.0"

__all__ = [
    "EngineConfig",
    "Notification",
    "Opcode",
    "Probe",
    "Region",
    "RegionDescriptor",
    "Rights",
    "Segment",
    "TransferBatch",
    "TransferEngine",
]
__all__ += _errors
