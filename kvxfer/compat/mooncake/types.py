"""The small types of `mooncake.engine`, and the names of it that have nothing behind them here.

Read next: `engine.py`.
"""

from __future__ import annotations

import enum
from typing import Any, NoReturn

from kvxfer.compat.mooncake.arguments import take_text
from kvxfer.errors import UnsupportedError
from kvxfer.types import Opcode

__all__ = [
    "InnerTransferEngine",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SharedSegment",
    "TransferNotify",
    "TransferOpcode",
    "create_rpc_client",
    "create_rpc_server",
    "take_notify",
    "take_opcode",
]


class TransferOpcode(enum.Enum):
    """What a transfer does, seen from the side that submits it; an int in `int()` and in order, but equal to none."""

    Read = 0
    Write = 1

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__

    def __lt__(self, other: object) -> bool:
        return int(self) < int(other) if isinstance(other, TransferOpcode) else NotImplemented

    def __le__(self, other: object) -> bool:
        return int(self) <= int(other) if isinstance(other, TransferOpcode) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return int(self) > int(other) if isinstance(other, TransferOpcode) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return int(self) >= int(other) if isinstance(other, TransferOpcode) else NotImplemented


class TransferNotify:
    """A notification: a name and a message, both text."""

    __slots__ = ("_msg", "_name")

    def __init__(self, *arguments: Any, **named: Any) -> None:
        values = dict(zip(("name", "msg"), arguments, strict=False)) | named
        if len(arguments) > 2 or (values and set(values) != {"name", "msg"}) or len(values) < len(arguments):
            raise TypeError("TransferNotify() takes a name and a msg, or nothing.")
        self._name = take_text("TransferNotify", "name", values.get("name", ""))
        self._msg = take_text("TransferNotify", "msg", values.get("msg", ""))

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        self._name = take_text("TransferNotify", "name", value)

    @property
    def msg(self) -> str:
        """What it says."""
        return self._msg

    @msg.setter
    def msg(self, value: str) -> None:
        self._msg = take_text("TransferNotify", "msg", value)

    def __repr__(self) -> str:
        return f"<TransferNotify {self._name!r}: {self._msg!r}>"


def take_opcode(call: str, opcode: object) -> Opcode:
    """Return an opcode argument as kvxfer's own; raises TypeError for anything but a TransferOpcode."""
    if not isinstance(opcode, TransferOpcode):
        raise TypeError(
            f"{call}(): incompatible function arguments: opcode must be a TransferOpcode, not {type(opcode).__name__}."
        )
    return Opcode.READ if opcode is TransferOpcode.Read else Opcode.WRITE


def take_notify(call: str, notify: object) -> tuple[str, str] | None:
    """Return a notify argument as (name, message), None for none; raises TypeError for anything else."""
    if notify is None:
        return None
    if not isinstance(notify, TransferNotify):
        raise TypeError(
            f"{call}(): incompatible function arguments: notify must be a TransferNotify, not {type(notify).__name__}."
        )
    return notify.name, notify.msg


class InnerTransferEngine:
    """What `get_engine()` returns: opaque, as in Mooncake. No C++ object stands behind it."""

    def __init__(self) -> None:
        raise TypeError("InnerTransferEngine: No constructor defined!")


def _refuse(name: str) -> NoReturn:
    raise UnsupportedError(
        f"mooncake.engine.{name} is not on kvxfer.",
        remedy="kvxfer moves memory; remote calls and segments shared by ranks need the real Mooncake.",
        name=name,
    )


class _Missing:
    """A class of Mooncake's that has no counterpart; making one raises UnsupportedError."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse(type(self).__name__)


class RpcInterface(_Missing):
    """Remote calls of Mooncake's: not here."""


class ReceivedData(_Missing):
    """What comes in by RpcInterface: not here."""


class ReceivedTensor(_Missing):
    """What comes in by RpcInterface: not here."""


class SharedSegment(_Missing):
    """Memory that the ranks of one host share: not here, and `supported` says so."""

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        """Whether it can be used: no."""
        del mmap, host_register
        return False

    @staticmethod
    def create(*_: Any, **__: Any) -> NoReturn:
        """Raises UnsupportedError."""
        _refuse("SharedSegment")


def create_rpc_client(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """Raises UnsupportedError."""
    del local_rank, world_size
    return RpcInterface()


def create_rpc_server(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """Raises UnsupportedError."""
    del local_rank, world_size
    return RpcInterface()
