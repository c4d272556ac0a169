"""What this process tells real Mooncake processes of itself, and its end of their RDMA connections.

`MooncakeService` knows tcp; with protocol "rdma" the descriptor names devices and keys instead, and CONNECTION messages
are answered. kvxfer's own peers read only the mark in it. Read next: `kvxfer/mooncake/service.py` and `rdma/` there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer import TransferEngine
from kvxfer.compat.mooncake.topology import build_matrix, numa_nodes
from kvxfer.mooncake.service import MooncakeService
from kvxfer.mooncake.wire.descriptor import SegmentDescriptor
from kvxfer.transports.rdma import RdmaTransport

if TYPE_CHECKING:
    from kvxfer.mooncake.rdma import MooncakeRdmaAnswer
    from kvxfer.transports.rdma_nic import Nic

__all__ = ["Own", "rdma_nics"]


def rdma_nics(engine: TransferEngine) -> tuple[Nic, ...]:
    """Return the RDMA ports that the engine uses; none where it has no RDMA."""
    if "rdma" not in engine.transports:
        return ()
    transport = engine._transports.find("rdma")
    assert isinstance(transport, RdmaTransport)
    return transport.nics


class Own:
    """This process, as real Mooncake processes see it, under a name. All methods may be called from any thread."""

    def __init__(self, engine: TransferEngine, name: str, data_ports: Iterable[int]) -> None:
        self.name = name
        self._engine = engine
        self._nics = rdma_nics(engine)
        self._answer: MooncakeRdmaAnswer | None = None
        if self._nics:
            from kvxfer.mooncake.rdma import MooncakeRdmaAnswer

            self._answer = MooncakeRdmaAnswer(self._nics, lambda: name)
        self._told: tuple[SegmentDescriptor, SegmentDescriptor] | None = None
        self._service = MooncakeService(
            engine,
            describe=self.descriptor,
            data_ports=data_ports,
            connect=None if self._answer is None else self._answer.answer,
        )

    def descriptor(self) -> SegmentDescriptor:
        """Return the descriptor; the same object as long as nothing has changed."""
        base = self._service.descriptor(self.name)
        if not self._nics:
            return base
        told = self._told
        if told is None or told[0] is not base:
            told = self._told = (base, self._with_rdma(base))
        return told[1]

    def notifies(self) -> list[tuple[str, str]]:
        """Return and forget the notifications that have come in, as (name, message), oldest first."""
        return self._service.notifies()

    def close(self) -> None:
        """Serve Mooncake processes no more."""
        self._service.close()
        if self._answer is not None:
            self._answer.close()

    def _with_rdma(self, base: SegmentDescriptor) -> SegmentDescriptor:
        from kvxfer.mooncake.rdma import rdma_buffers, rdma_devices

        matrix = build_matrix({nic.context.name: nic.numa_node for nic in self._nics}, numa_nodes(Path("/")))
        return dataclasses.replace(
            base,
            protocols=("rdma",),
            devices=rdma_devices(self._nics),
            buffers=rdma_buffers(self._nics, self._engine.regions),
            priority_matrix={place: (tuple(near), tuple(far)) for place, (near, far) in matrix.items()},
        )
