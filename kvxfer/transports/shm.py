"""The same-host transport: the side that submits copies, the other side does nothing.

Memory from `allocate` is mapped from the peer and copied directly. Any other registered memory goes by
process_vm_readv/writev where the kernel permits it. Which way a region takes is in `Endpoint.describe()`.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from kvxfer.config import EngineConfig
from kvxfer.errors import KvxferError, TransferError, TransportUnavailableError
from kvxfer.limits import remedy_for
from kvxfer.memory.shared import SharedMemory
from kvxfer.system.held import memmove
from kvxfer.transports.base import Delivery, Endpoint, PeerLink, Transfer, Transport, is_delivered
from kvxfer.transports.loop import Loop
from kvxfer.transports.shm_copy import CopyJob, MappedCopy, ProcessIdentity, ProcessVmCopy
from kvxfer.transports.shm_handover import HandoverClient, HandoverServer, SharedFile
from kvxfer.transports.shm_helpers import CopyHelpers
from kvxfer.types import AddressColumn, Opcode, Probe, RegionDescriptor, Rights

__all__ = ["ShmEndpoint", "ShmTransport"]

TOKEN_NBYTES = 32
MAP_POLL_S = 0.002
"""How long `poll` may wait for a peer on the same host to hand over a descriptor; it answers in under 1 ms."""
MAP_TICK_S = 0.05
"""How long who waits may be deaf to a cancel meanwhile."""


class ShmTransport(Transport):
    """What this engine shares with processes on its host."""

    name = "shm"

    def __init__(self, config: EngineConfig, loop: Loop, generation: str) -> None:
        self._loop = loop
        self._generation = generation
        self._token = os.urandom(TOKEN_NBYTES)
        self._token_memory = ctypes.create_string_buffer(self._token, TOKEN_NBYTES)
        self._lock = threading.Lock()
        self._files: dict[int, SharedFile] = {}
        self._file_count = 0
        self._memories: list[SharedMemory] = []
        self._server = HandoverServer(self._token, self._files.get)
        loop.call_soon(lambda: self._server.serve(loop))
        self.helpers = CopyHelpers(config.shm_copy_threads - 1) if config.shm_copy_threads > 1 else None

    @classmethod
    def probe(cls, config: EngineConfig) -> Probe:
        """Try what the transport needs: a memfd, an abstract Unix socket. process_vm_* is tried per peer."""
        try:
            SharedMemory(4096).close()
            HandoverServer(os.urandom(TOKEN_NBYTES), lambda _: None).close()
        except (KvxferError, OSError) as exc:
            code = getattr(exc, "errno", None)
            return Probe(
                "shm",
                usable=False,
                reason=f"shared memory cannot be set up: {getattr(exc, 'message', exc)}",
                remedy=remedy_for(code)
                or "Allow memfd_create(2) and AF_UNIX sockets in the container's seccomp profile, or use tcp.",
                details={"errno": code},
            )
        scope = ptrace_scope()
        return Probe(
            "shm",
            usable=True,
            reason="memory can be shared with processes of the same user in the same network namespace",
            remedy="" if scope in (None, 0) else ptrace_remedy(scope),
            details={"ptrace_scope": scope, "process_vm": "tried with each peer"},
        )

    def card(self) -> dict[str, Any]:
        return {
            "socket": self._server.name,
            "token": self._token.hex(),
            "token_address": ctypes.addressof(self._token_memory),
        }

    def share(self, memory: SharedMemory) -> None:
        """Note memory from `allocate`, so that `register` of it hands out its file."""
        with self._lock:
            self._memories.append(memory)

    def unshare(self, memory: SharedMemory) -> None:
        """Forget memory from `allocate`."""
        with self._lock:
            self._memories.remove(memory)

    def register(self, address: int, nbytes: int, *, rights: Rights, read_only: bool = False) -> dict[str, Any]:
        with self._lock:
            for memory in self._memories:
                offset = address - memory.address
                if offset >= 0 and offset + nbytes <= memory.nbytes:
                    self._file_count += 1
                    writable = bool(rights & Rights.REMOTE_WRITE)
                    reopen = functools.partial(memory.reopen, writable=writable)
                    self._files[self._file_count] = SharedFile(reopen, offset, nbytes)
                    return {"file": self._file_count}
        return {}

    def deregister(self, address: int, nbytes: int, keys: Mapping[str, Any]) -> None:
        with self._lock:
            self._files.pop(keys.get("file", 0), None)

    def open_endpoint(self, card: Mapping[str, Any], link: PeerLink, deadline: float) -> ShmEndpoint:
        return ShmEndpoint(card, link, deadline, self.helpers, self._generation)

    def holders(self, live: Collection[str]) -> list[str]:
        """Return the processes that may still copy although their engine is none of `live` (generations)."""
        return self._server.holders(live)

    def abandon(self) -> None:
        self._server.abandon()
        for memory in self._memories:
            memory.close()

    def close(self) -> None:
        self._loop.call_soon(self._server.close)
        if self.helpers is not None:
            self.helpers.close()


class ShmEndpoint(Endpoint):
    """A peer on this host."""

    transport = "shm"
    copies_rows = True
    needs_session = True

    def __init__(
        self,
        card: Mapping[str, Any],
        link: PeerLink,
        deadline: float,
        helpers: CopyHelpers | None,
        generation: str,
    ) -> None:
        name, token, address = card.get("socket"), card.get("token"), card.get("token_address")
        if not (isinstance(name, str) and _is_token(token) and isinstance(address, int) and 0 <= address < 2**63):
            raise TransportUnavailableError(f"{link.label} sent no usable shm card.", peer=link.label)
        self._link = link
        self._helpers = helpers
        self._lock = threading.Lock()
        self._mappings: dict[int, tuple[npt.NDArray[np.uint8], int]] = {}
        self._closed: KvxferError | None = None
        self._client = HandoverClient(name, token, link.label, deadline, engine=generation)
        try:
            self._identity = ProcessIdentity(self._client.pid, address, bytes.fromhex(token), link.label)
        except BaseException:
            self._client.close()
            raise
        self._process_vm_refusal = self._try_process_vm()
        self.reaches_all = self._process_vm_refusal is None

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def unreachable(self, region: RegionDescriptor) -> str | None:
        if self._process_vm_refusal is None or "file" in region.keys.get("shm", {}):
            return None
        return self._process_vm_refusal

    def copy_row(self, opcode: Opcode, local: int, remote: int, nbytes: int, region: RegionDescriptor) -> bool:
        if self._closed is not None:
            return False
        mapping = self._mappings.get(region.region_id)
        if mapping is not None:
            if opcode is Opcode.WRITE:
                memmove(remote + mapping[1], local, nbytes)
            else:
                memmove(local, remote + mapping[1], nbytes)
            return True
        if self._process_vm_refusal is None and "file" not in region.keys.get("shm", {}):
            return self._identity.copy_row(opcode, local, remote, nbytes)
        return False

    def post(self, transfer: Transfer) -> None:
        """The copy is made by who waits."""

    def progress(self, transfer: Transfer, until: float) -> None:
        try:
            while transfer.work is None:
                try:
                    transfer.work = self._plan(transfer, until)
                except TimeoutError:
                    if transfer.stop is not None or time.monotonic() >= until:
                        return
            work: _Work = transfer.work
            while work.jobs:
                if self._closed is not None:
                    raise self._closed
                job = work.jobs[0]
                before = job.nbytes_done
                try:
                    job.run(transfer, until)
                finally:
                    transfer.nbytes_done += job.nbytes_done - before
                    transfer.nbytes_moved = transfer.nbytes_done
                if job.is_done:
                    del work.jobs[0]
                elif transfer.stop is not None or time.monotonic() >= until:
                    return
            if self._closed is not None:
                raise self._closed
            if transfer.notify is not None:
                if work.delivery is None:
                    work.delivery = self._link.deliver(transfer.notify)
                if not is_delivered(work.delivery, transfer, until):
                    return
            transfer.finish()
        except KvxferError as error:
            self._note_left(transfer)
            transfer.finish(self._closed or error)  # where we closed it, a dead pidfd is only how that shows

    def abort(self, transfer: Transfer, deadline: float) -> None:
        """Copies are made by the caller under the transfer's lock, so none is running; only a notification may be."""
        self._note_left(transfer)
        work = transfer.work
        if work is not None and work.delivery is not None:
            work.delivery.abandon()

    @staticmethod
    def _note_left(transfer: Transfer) -> None:
        if transfer.work is not None:
            left = [job.slices_left() for job in transfer.work.jobs]
            transfer.slices_left = np.concatenate(left) if left else np.zeros(0, np.int64)

    def forget(self, region_ids: Sequence[int]) -> None:
        with self._lock:
            for region_id in region_ids:
                self._mappings.pop(region_id, None)

    def describe(self) -> Mapping[str, Any]:
        return {
            "pid": self._client.pid,
            "mapped_regions": len(self._mappings),
            "process_vm": self._process_vm_refusal or "permitted",
        }

    def abandon(self, error: KvxferError) -> None:
        self._closed = error
        self._mappings = {}
        self._client.close()
        self._identity.abandon()

    def close(self, error: KvxferError) -> None:
        with self._lock:
            self._closed = self._closed or error
            self._mappings.clear()
            self._client.close()
            self._identity.close()

    def _plan(self, transfer: Transfer, until: float) -> _Work:
        """Split the rows by how their region is reached; map what is not mapped yet. Raises TimeoutError where the peer
        takes its time to hand a mapping over."""
        local, remote, nbytes = transfer.columns
        slices = np.arange(len(nbytes))
        work = _Work()
        if transfer.region_rows is None:
            self._plan_region(work, transfer, until, transfer.regions[0], local, remote, nbytes, slices)
            return work
        for index, region in enumerate(transfer.regions):
            pick = slices[transfer.region_rows == index]
            self._plan_region(work, transfer, until, region, local[pick], remote[pick], nbytes[pick], pick)
        return work

    def _plan_region(
        self,
        work: _Work,
        transfer: Transfer,
        until: float,
        region: RegionDescriptor,
        local: AddressColumn,
        remote: AddressColumn,
        nbytes: AddressColumn,
        slices: AddressColumn,
    ) -> None:
        mapping = self._map(region, until)
        if mapping is None:
            work.jobs.append(
                ProcessVmCopy(transfer.opcode, local, remote, nbytes, slices, self._identity, self._helpers)
            )
            return
        work.keep.append(mapping[0])
        there = remote + mapping[1]
        pair = (there, local) if transfer.opcode is Opcode.WRITE else (local, there)
        work.jobs.append(MappedCopy(*pair, nbytes, slices))

    def _map(self, region: RegionDescriptor, until: float) -> tuple[npt.NDArray[np.uint8], int] | None:
        """Return the mapping of the region, and what to add to its addresses to reach them here; None where it cannot
        be mapped. Who uses the addresses holds the array: it is what keeps the mapping alive."""
        mapping = self._mappings.get(region.region_id)
        if mapping is None:
            file_id = region.keys.get("shm", {}).get("file")
            if not isinstance(file_id, int):
                return None
            with self._lock:
                if self._closed is not None:
                    raise self._closed
                mapping = self._mappings.get(region.region_id)
                if mapping is None:
                    array = self._hand_over(file_id, region, until)
                    mapping = (array, int(array.ctypes.data) - region.address)
                    self._mappings[region.region_id] = mapping
        return mapping

    def _hand_over(self, file_id: int, region: RegionDescriptor, until: float) -> npt.NDArray[np.uint8]:
        now = time.monotonic()
        deadline = min(max(until, now + MAP_POLL_S), now + MAP_TICK_S)
        try:
            array = self._client.map_file(
                file_id, writable=bool(region.rights & Rights.REMOTE_WRITE), deadline=deadline
            )
        except TimeoutError:
            raise
        except OSError as exc:
            raise TransferError(
                f"mapping {region} of {self._link.label} failed: {exc.strerror}.",
                remedy=remedy_for(exc.errno) or "Look at the peer's log.",
                peer=self._link.label,
                errno=exc.errno,
            ) from exc
        if array.nbytes < region.nbytes:
            raise TransferError(
                f"{self._link.label} shares {array.nbytes} bytes for {region}: too few.", peer=self._link.label
            )
        return array

    def _try_process_vm(self) -> str | None:
        """Return None where process_vm_* reaches the peer, else why not."""
        if self._client.pid == 0:
            return "the peer lives in a pid namespace that is not visible here"
        failure = self._identity.check()
        if not failure:
            return None
        if failure == errno.EPERM:
            scope = ptrace_scope()
            remedy = f"; {ptrace_remedy(scope)}" if scope else ""
            return f"process_vm_readv of process {self._client.pid} is not permitted (ptrace_scope {scope}){remedy}"
        if failure == errno.ESRCH:
            return f"process {self._client.pid} as seen from here is another process (pid namespaces differ)"
        return f"process_vm_readv of process {self._client.pid} fails: {os.strerror(failure)}"


def _is_token(text: Any) -> TypeGuard[str]:
    return isinstance(text, str) and re.fullmatch(f"[0-9a-f]{{{2 * TOKEN_NBYTES}}}", text) is not None


class _Work:
    """How far a transfer is: the copies still to make, then the notification; and the mappings they run on."""

    __slots__ = ("delivery", "jobs", "keep")

    def __init__(self) -> None:
        self.jobs: list[CopyJob] = []
        self.keep: list[npt.NDArray[np.uint8]] = []
        self.delivery: Delivery | None = None


def ptrace_scope(path: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> int | None:
    """Return Yama's ptrace_scope (ptrace(2)), None on a kernel without Yama."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def ptrace_remedy(scope: int) -> str:
    """Say what to do about a ptrace_scope that keeps process_vm_* from working."""
    in_mooncakes_place = " (in Mooncake's place: KVXFER_ALLOW_PTRACE=1 in every process)" if scope == 1 else ""
    return (
        f"kernel.yama.ptrace_scope is {scope}: set it to 0 (sysctl kernel.yama.ptrace_scope=0), give the container "
        f"CAP_SYS_PTRACE, or use memory from allocate(), which is mapped and needs neither{in_mooncakes_place}"
    )
