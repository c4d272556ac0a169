"""The names of `mooncake.engine`, made of kvxfer; and `last_error`, which Mooncake does not have.

Use it by name, by `kvxfer.compat.install()`, or by PYTHONPATH=$(kvxfer shim-path). There is no `transfer_write_on_cuda`
and its like, as in Mooncake's builds without CUDA. Read next: `engine.py`, docs/mooncake.md.
"""

from __future__ import annotations

from kvxfer.compat.mooncake.codes import last_error
from kvxfer.compat.mooncake.engine import TransferEngine
from kvxfer.compat.mooncake.types import (
    InnerTransferEngine,
    ReceivedData,
    ReceivedTensor,
    RpcInterface,
    SharedSegment,
    TransferNotify,
    TransferOpcode,
    create_rpc_client,
    create_rpc_server,
)

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "CoroRPCInterface",
    "InnerTransferEngine",
    "Read",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SharedSegment",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
    "create_rpc_client",
    "create_rpc_server",
    "last_error",
]

Read = TransferOpcode.Read
Write = TransferOpcode.Write
CoroRPCInterface = RpcInterface

SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False
