"""Registering memory: with the region table, with every transport, and back again.

Owns what `TransferEngine.allocate` has made and what is being taken back. Who may use a region when is the region
table's business (`memory/regions.py`); asking peers to let go is `serving.PeerService.take_back`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kvxfer.config import EngineConfig
from kvxfer.errors import MemoryArgumentError, RegionBusyError, UsageError
from kvxfer.memory import Region, RegionTable, buffer_view
from kvxfer.memory.buffers import BufferView
from kvxfer.memory.shared import SharedMemory
from kvxfer.system.calls import is_readable
from kvxfer.text import show
from kvxfer.transport_set import TransportSet
from kvxfer.types import Rights

__all__ = ["Registry"]

NAME_LENGTH_MAX = 1024


class Registry:
    """The registered memory of one engine. All methods may be called from any thread.

    take_back: asks every peer to let go of a region before a deadline (monotonic seconds), and returns those that may
    still use it.
    """

    def __init__(
        self,
        config: EngineConfig,
        table: RegionTable,
        transports: TransportSet,
        take_back: Callable[[Region, float], list[str]],
    ) -> None:
        self._config = config
        self._table = table
        self._transports = transports
        self._take_back = take_back
        self._lock = threading.Lock()
        self._allocated: dict[int, SharedMemory] = {}
        self._retired: set[int] = set()
        self._unregistering: set[int] = set()

    def allocate(self, nbytes: int, name: str, rights: Rights) -> Region:
        """As `TransferEngine.allocate`."""
        _check_rights(rights, name)
        memory = SharedMemory(nbytes, label="kvxfer")
        shm = self._transports.shm
        if shm is not None:
            shm.share(memory)
        try:
            view = BufferView(memory.address, memory.nbytes, read_only=False, owner=memory.array, kind="shared")
            region = self._register(view, name, rights)
        except BaseException:
            self._free(memory)
            raise
        with self._lock:
            self._allocated[region.region_id] = memory
        return region

    def register(self, memory: Any, name: str, rights: Rights) -> Region:
        """As `TransferEngine.register`."""
        _check_rights(rights, name)
        if isinstance(memory, Region):
            raise MemoryArgumentError(
                f"{memory} is registered already.",
                remedy="Use it as it is; to count it once more, or for another engine, register its array.",
                region_id=memory.region_id,
            )
        view = buffer_view(memory)
        if view.kind == "address":
            _check_mapped(view)
        return self._register(view, name, rights)

    def unregister(self, region: Region) -> None:
        """As `TransferEngine.unregister`."""
        if not isinstance(region, Region) or not self._table.owns(region):
            raise UsageError(
                f"{show(region, 120)} is not a region of this engine.",
                remedy="Pass what this engine's register or allocate returned.",
            )
        with self._lock:
            if region.region_id in self._unregistering:
                raise RegionBusyError(
                    f"{region} is being unregistered by another call.",
                    remedy="Wait for that call.",
                    region_id=region.region_id,
                )
            if region.region_id not in self._retired:
                if not self._table.retire(region.region_id):
                    return
                self._retired.add(region.region_id)
            self._unregistering.add(region.region_id)
        try:
            self._unregister(region)
        finally:
            with self._lock:
                self._unregistering.discard(region.region_id)

    def release(self) -> None:
        """Let go of all allocated memory, at the engine's end or in a forked child. Arrays over it stay valid."""
        for memory in self._allocated.values():
            memory.close()

    def _register(self, view: BufferView, name: str, rights: Rights) -> Region:
        reserved = self._table.reserve(view, name, rights)
        if isinstance(reserved, Region):
            return reserved
        with reserved:
            keys = self._transports.register(view, rights)
            try:
                return reserved.commit(keys)
            except BaseException:
                self._transports.deregister(view.address, view.nbytes, keys)
                raise

    def _unregister(self, region: Region) -> None:
        deadline = time.monotonic() + self._config.unregister_timeout_s
        holders = self._take_back(region, deadline)
        if not self._table.wait_idle(region, max(0.0, deadline - time.monotonic())):
            holders.append(f"{region.remote_use_count} requests over tcp")
        if holders:
            raise RegionBusyError(
                f"{region} is still used by {', '.join(holders)} after {self._config.unregister_timeout_s:g} s.",
                remedy="The memory must not be freed yet. Call unregister again when these peers have answered, ended "
                "or been killed; no new transfer can begin meanwhile.",
                region_id=region.region_id,
                peers=tuple(holders),
            )
        self._retired.discard(region.region_id)
        self._transports.deregister(region.address, region.nbytes, region.keys)
        self._table.forget(region)
        with self._lock:
            memory = self._allocated.pop(region.region_id, None)
        if memory is not None:
            self._free(memory)

    def _free(self, memory: SharedMemory) -> None:
        shm = self._transports.shm
        if shm is not None:
            shm.unshare(memory)
        memory.close()


def _check_rights(rights: object, name: object) -> None:
    if not isinstance(rights, Rights):
        raise UsageError(
            f"rights is {show(rights)}.",
            remedy="Use kvxfer.Rights.NONE, REMOTE_READ, REMOTE_WRITE or ALL.",
            rights=rights,
        )
    if not isinstance(name, str) or len(name) > NAME_LENGTH_MAX or not (name.isprintable() or not name):
        raise UsageError(
            f"name is {show(name)}.",
            remedy=f"Use printable text of at most {NAME_LENGTH_MAX} characters.",
            name=name,
        )


def _check_mapped(view: BufferView) -> None:
    """Raise MemoryArgumentError where an address given as numbers is none of this process: copying would kill it."""
    for address in (view.address, view.end - 1):
        if not is_readable(address):
            raise MemoryArgumentError(
                f"({view.address:#x}, {view.nbytes}): there is no memory at {address:#x} in this process.",
                remedy="Check the address and the size; register memory before it is freed.",
                address=view.address,
                nbytes=view.nbytes,
            )
