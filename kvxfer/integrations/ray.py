"""A tensor transport for Ray: tensors that actors return or pass on move by kvxfer, from memory to memory.

    import kvxfer.integrations.ray
    kvxfer.integrations.ray.register()  # before the decorators below, in the process that makes the actors

    @ray.remote(enable_tensor_transport=True)
    class Worker:
        @ray.method(tensor_transport="kvxfer")
        def make(self): return torch.zeros(1 << 20)

The tensor stays where it was made; only its address travels through Ray. Whoever needs it reads it: through shared
memory on one host, over RDMA or TCP between hosts. CPU tensors of torch, contiguous. Needs `pip install 'kvxfer[ray]'`
and torch. Ray calls its interface alpha; written against Ray 2.60.
Source: https://docs.ray.io/en/latest/ray-core/direct-transport/custom-tensor-transport.html
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer import (
    KvxferError,
    MemoryArgumentError,
    PeerRestartedError,
    Region,
    RegionBusyError,
    RemoteProtocolError,
    Rights,
    TransferBatch,
    TransferCancelledError,
    TransferEngine,
    UnsupportedError,
)
from kvxfer.log import get_logger

if TYPE_CHECKING:
    import torch

try:
    from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata
except ImportError as _exc:  # the module can be read without Ray, and `register` says what is missing
    CommunicatorMetadata = TensorTransportManager = TensorTransportMetadata = object
    _missing: ImportError | None = _exc
else:
    _missing = None

__all__ = ["NAME", "KvxferTensorTransport", "KvxferTransportMetadata", "register"]

NAME = "KVXFER"
ABORTED_MAX = 1024
"""Aborts of transfers that have not begun are remembered, no more than that: most of them never begin."""


def register() -> None:
    """Make the transport "kvxfer" known to Ray in this process, and with that to the actors that it makes.

    Tolerated twice. Raises UnsupportedError where Ray or torch is missing or too old.
    """
    if _missing is not None:
        raise UnsupportedError(
            f"Ray's tensor transports cannot be imported: {_missing}.", remedy="pip install 'kvxfer[ray]'"
        ) from _missing
    try:
        import torch
    except ImportError as exc:
        raise UnsupportedError(
            f"Ray moves tensors of torch, which cannot be imported: {exc}.", remedy="pip install torch"
        ) from exc
    from ray.experimental import register_tensor_transport

    try:
        register_tensor_transport(NAME, ["cpu"], KvxferTensorTransport, torch.Tensor)
    except ValueError as exc:
        if "already registered" not in str(exc):
            raise


@dataclass
class KvxferTransportMetadata(TensorTransportMetadata):  # type: ignore[misc]
    """What the reading side must know; Ray takes it there.

    address: of the engine that has the tensors; "" if there is nothing to read. generation: of that engine, so that
    another process at the same address is not taken for it. rows: (address, nbytes) of each tensor.
    """

    address: str = ""
    generation: str = ""
    rows: list[tuple[int, int]] = field(default_factory=list)


@dataclass(eq=False)
class _Fetch:
    """A read on its way. Ray asks for `obj_id` and `tensors` of it."""

    obj_id: str
    tensors: list[Any]
    transport: KvxferTensorTransport | None = None
    regions: list[Region] = field(default_factory=list)
    batch: TransferBatch | None = None

    def close(self) -> None:
        """Give up what runs, and let go of the memory."""
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.end_fetch(self)

    def __del__(self) -> None:
        self.close()


class KvxferTensorTransport(TensorTransportManager):  # type: ignore[misc]
    """What Ray calls, in the owner of a task, in the actor that makes tensors and in the one that needs them.

    Each process has one engine, made at the first use. Settings come from the environment (`KVXFER_...`); without
    KVXFER_HOST it listens on the address by which Ray knows this node.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a fetch that is dropped comes here from wherever it is dropped
        self._engine: TransferEngine | None = None
        self._offered: dict[str, tuple[KvxferTransportMetadata, list[Region]]] = {}
        self._lingering: list[Region] = []
        self._fetches: dict[str, weakref.WeakSet[_Fetch]] = {}  # who drops one gives it up
        self._aborted: dict[str, None] = {}
        self._log = get_logger(__name__)

    @property
    def engine(self) -> TransferEngine:
        """The engine of this process."""
        with self._lock:
            if self._engine is None:
                self._engine = TransferEngine(**({} if "KVXFER_HOST" in os.environ else {"host": _node_host()}))
            return self._engine

    # What kind of transport this is.

    def tensor_transport_backend(self) -> str:
        """Return the name that methods give as tensor_transport."""
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        """Whether the reading side does it alone: yes."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Whether a transfer can be given up: yes, and not one byte more is written after that."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Whether an actor can use it: an actor without kvxfer could not even have been told of it."""
        return True

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        """Return nothing of use: peers meet by the address in the metadata of the object."""
        return CommunicatorMetadata()

    # The side that has the tensors.

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: Sequence[torch.Tensor]) -> Any:
        """Register the tensors for peers to read, until `garbage_collect`. Called again for one object, it tells the
        same."""
        with self._lock:
            known = self._offered.get(obj_id)
        if known is not None:
            return known[0]
        tensors = list(rdt_object)
        for index, tensor in enumerate(tensors):
            _check_tensor(tensor, index)
        metadata = KvxferTransportMetadata(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in tensors],
            tensor_device="cpu" if tensors else None,
            rows=[(tensor.data_ptr(), _nbytes(tensor)) for tensor in tensors],
        )
        regions: list[Region] = []
        if any(nbytes for _, nbytes in metadata.rows):
            self._release_lingering()
            metadata.address, metadata.generation = self.engine.address, self.engine.generation
            regions = self._register(tensors)
        with self._lock:
            self._offered[obj_id] = (metadata, regions)
        return metadata

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Take the tensors back from peers."""
        with self._lock:
            _, regions = self._offered.pop(obj_id, (None, []))
        self._release(regions)

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        """Never called by Ray: the other side reads."""
        raise NotImplementedError("the receiver of a one-sided transport reads; nothing is sent.")

    # The side that needs them.

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: Sequence[torch.Tensor] | None = None,
    ) -> Any:
        """Begin to read; `wait_fetch_complete` moves it on and ends it."""
        import torch

        metadata = tensor_transport_metadata
        if target_buffers is None:
            tensors = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in metadata.tensor_meta]
        else:
            tensors = list(target_buffers)
        for index, tensor in enumerate(tensors):
            _check_tensor(tensor, index)
        if [_nbytes(tensor) for tensor in tensors] != [nbytes for _, nbytes in metadata.rows]:
            raise RemoteProtocolError(f"object {obj_id}: the lengths of its tensors are not those of their shapes.")
        fetch = _Fetch(obj_id, tensors, self)
        with self._lock:
            if obj_id in self._aborted:
                del self._aborted[obj_id]
                raise TransferCancelledError(f"the transfer of object {obj_id} was aborted before it began.")
            self._fetches.setdefault(obj_id, weakref.WeakSet()).add(fetch)
        try:
            self._begin(fetch, metadata)
        except BaseException:
            fetch.close()
            raise
        return fetch

    def wait_fetch_complete(self, fetch_request: Any, timeout: float = -1) -> list[Any]:
        """Return the tensors. timeout: -1 keeps kvxfer's own (transfer_timeout_s), 0 only looks.

        Raises TimeoutError when the time is over; the fetch can be waited for again.
        """
        fetch: _Fetch = fetch_request
        batch = fetch.batch
        if batch is not None:
            deadline = time.monotonic() + timeout
            nbytes_done = 0
            while timeout >= 0 and not batch.poll():
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{batch} has not ended after {timeout:g} s.")
                if nbytes_done == batch.nbytes_done:
                    time.sleep(0.0005)  # nothing came: leave the processor to who sends
                nbytes_done = batch.nbytes_done
            batch.wait()
        fetch.close()
        return fetch.tensors

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: Sequence[torch.Tensor] | None = None,
    ) -> list[Any]:
        """Read tensors and return them."""
        fetch = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(fetch)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Give up what is read for an object; what has not begun will be refused."""
        with self._lock:
            fetches = list(self._fetches.get(obj_id, ()))
            if not fetches:
                self._aborted[obj_id] = None
                while len(self._aborted) > ABORTED_MAX:
                    del self._aborted[next(iter(self._aborted))]
        for fetch in fetches:
            if fetch.batch is not None:
                fetch.batch.cancel()

    def _begin(self, fetch: _Fetch, metadata: KvxferTransportMetadata) -> None:
        rows = [
            (tensor.data_ptr(), address, nbytes)
            for tensor, (address, nbytes) in zip(fetch.tensors, metadata.rows, strict=True)
            if nbytes
        ]
        if not rows:
            return
        engine = self.engine
        fetch.regions = self._register(fetch.tensors)
        segment = engine.open_segment(metadata.address)
        if segment.generation != metadata.generation:
            raise PeerRestartedError(
                f"object {fetch.obj_id} was in a process that has ended; another one answers at {metadata.address}.",
                remedy="Make the object again.",
                peer=metadata.address,
            )
        local, remote, nbytes = (list(column) for column in zip(*rows, strict=True))
        fetch.batch = engine.submit_read(segment, local, remote, nbytes)

    def end_fetch(self, fetch: _Fetch) -> None:
        """Forget a fetch and what it holds."""
        with self._lock:
            mine = self._fetches.get(fetch.obj_id)
            if mine is not None:
                mine.discard(fetch)
                if not mine:
                    del self._fetches[fetch.obj_id]
        if fetch.batch is not None and not fetch.batch.is_done:
            fetch.batch.cancel()
        self._release(fetch.regions)
        fetch.regions = []

    # Memory.

    def _register(self, tensors: Sequence[torch.Tensor]) -> list[Region]:
        """Register whole storages, so that views of one storage are one region; for peers to read, on either side: a
        tensor that was read may be offered next, and one region has one kind of rights."""
        import torch

        regions: list[Region] = []
        storages = {one.data_ptr(): one for one in (tensor.untyped_storage() for tensor in tensors) if one.nbytes()}
        try:
            for storage in storages.values():
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload, unused-ignore]
                regions.append(self.engine.register(whole, rights=Rights.REMOTE_READ))
        except BaseException:
            self._release(regions)
            raise
        return regions

    def _release(self, regions: Sequence[Region]) -> None:
        for region in regions:
            try:
                self.engine.unregister(region)
            except RegionBusyError as exc:
                self._log.warning("ray.region_busy", error=exc.message)
                with self._lock:
                    self._lingering.append(region)
            except KvxferError as exc:  # the engine is closed: the process ends
                self._log.debug("ray.region_left", error=exc.message)

    def _release_lingering(self) -> None:
        with self._lock:
            lingering, self._lingering = self._lingering, []
        self._release(lingering)


def _node_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _check_tensor(tensor: torch.Tensor, index: int) -> None:
    problem = ""
    if tensor.device.type != "cpu":
        problem = f"is on {tensor.device}; kvxfer moves tensors on the CPU"
    elif not tensor.is_contiguous():
        problem = "is not contiguous"
    if problem:
        raise MemoryArgumentError(
            f"tensor {index} of a Ray object {problem}.",
            remedy="Return tensor.cpu().contiguous(), or use another tensor_transport for it.",
            index=index,
        )
