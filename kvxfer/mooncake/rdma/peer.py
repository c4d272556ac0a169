"""`MooncakeRdmaPeer`: the memory of one process that runs the real Mooncake, read and written over RDMA.

Of the queue pairs that Mooncake wants for each two devices one is used; the process may come over the others. Rails,
posting and failures are the rdma transport's (`transports/rdma_endpoint.py`). Read next: `handshake.py`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.addresses import parse_host_port
from kvxfer.errors import (
    ClosedError,
    DeviceUnusableError,
    KvxferError,
    PeerRefusedError,
    TransferTimeoutError,
    TransportUnavailableError,
    VerbsError,
)
from kvxfer.memory.columns import Integers, as_columns
from kvxfer.memory.slices import IndexColumn, coalesce, locate
from kvxfer.mooncake.calls import ask
from kvxfer.mooncake.rdma.descriptor import PeerMemory, read_memory
from kvxfer.mooncake.rdma.handshake import (
    bring_up,
    connection_message,
    gid_text,
    offer_of,
    pair_attributes,
    take_qp_numbers,
)
from kvxfer.mooncake.wire.descriptor import SegmentDescriptor
from kvxfer.mooncake.wire.frames import MessageKind
from kvxfer.text import clean
from kvxfer.transports.base import PeerLink, Transfer
from kvxfer.transports.rdma_endpoint import RdmaEndpoint
from kvxfer.transports.rdma_queue import SendQueue, close_all
from kvxfer.transports.rdma_rail import Rail
from kvxfer.types import Opcode
from kvxfer.verbs.enums import LinkLayer
from kvxfer.verbs.gid_choice import GidPair, rank_gid_pairs
from kvxfer.verbs.port import build_address_vector
from kvxfer.verbs.queue_pair import QueuePair, QueuePairCapabilities
from kvxfer.verbs.rails import find_conflict

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.transports.rdma_nic import Nic

__all__ = ["MooncakeRdmaPeer"]

GIVE_UP_S = 1.0
"""How long a batch that is given up waits for the device to give its requests back."""


class MooncakeRdmaPeer:
    """The memory of one Mooncake process, reached over RDMA. All methods may be called from any thread.

    name: of the process, for messages and as its server name. own_name: ours, which our device is told under.
    queue_pairs: how many for each two devices, as many as the process has; one of them is used. refresh: asks for the
    descriptor anew.
    """

    def __init__(
        self,
        name: str,
        descriptor: SegmentDescriptor,
        *,
        own_name: str,
        nics: Sequence[Nic],
        queue_pairs: int,
        config: EngineConfig,
        refresh: Callable[[], SegmentDescriptor],
    ) -> None:
        self.name = name
        self._own_name = own_name
        self._nics = tuple(nics)
        self._queue_pairs = queue_pairs
        self._config = config
        self._refresh = refresh
        self._lock = threading.Lock()
        self._passive: dict[str, list[QueuePair]] = {}
        """By the label of their rail: the queue pairs beside the one that is used, over which the process may come."""
        self._closed: KvxferError | None = None
        self._numbers = itertools.count(1)
        self._region_ids = itertools.count()  # never used twice: an endpoint remembers keys by them
        self._memory = read_memory(name, descriptor, self._region_ids)
        self._endpoint = self._make_endpoint(descriptor)

    def transfer(self, opcode: Opcode, local: Integers, remote: Integers, nbytes: Integers, *, deadline: float) -> None:
        """Move rows between registered local memory and the peer's; returns when every byte is in place.

        local, remote, nbytes: as in `TransferEngine.submit_write`. deadline: monotonic seconds.

        Raises NotRegisteredError naming a row, TransportUnavailableError, TransferError; a failure is final.
        """
        columns = as_columns(local, remote, nbytes)
        transfer = self._plan(opcode, columns)
        with transfer.lock:
            try:
                while not transfer.finished and time.monotonic() < deadline:
                    self._endpoint.progress(transfer, deadline)
            finally:
                if not transfer.finished:
                    self._endpoint.abort(transfer, time.monotonic() + GIVE_UP_S)
                    transfer.finish(self._timeout(transfer))
        if transfer.error is not None:
            raise transfer.error

    def reap(self, now: float) -> None:
        """Nothing is idle."""

    def close(self) -> None:
        """Drop the connections; transfers that run fail. Tolerated twice."""
        with self._lock:
            self._closed = self._closed or ClosedError(f"{self.name} was closed.", remedy="Open it again.")
            passive, self._passive = self._passive, {}
        self._endpoint.close(self._closed)
        for queue_pairs in passive.values():
            close_all(*queue_pairs)

    def _plan(self, opcode: Opcode, columns: tuple[Any, Any, Any]) -> Transfer:
        memory = self._memory
        try:
            index = self._locate(memory, columns)
        except KvxferError:
            memory = self._memory = read_memory(self.name, self._refresh(), self._region_ids)
            index = self._locate(memory, columns)
        local, remote, nbytes, first_row = coalesce(*columns, remote_region=index)
        used = np.unique(index)
        regions = tuple(memory.regions[at] for at in used)
        return Transfer.of_columns(
            opcode,
            regions,
            (),
            None,
            lambda _: None,
            columns=(local, remote, nbytes),
            region_rows=None if len(used) == 1 else np.searchsorted(used, index[first_row]),
            first_row=first_row,
            row_count=len(columns[0]),
            nbytes_total=int(nbytes.sum()),
        )

    def _locate(self, memory: PeerMemory, columns: tuple[Any, Any, Any]) -> IndexColumn:
        return locate(
            columns[1],
            columns[2],
            memory.starts,
            memory.ends,
            side=f"remote ({self.name})",
            regions=memory.regions,
        )

    # Connecting.

    def _make_endpoint(self, descriptor: SegmentDescriptor) -> RdmaEndpoint:
        rails: list[Rail] = []
        conflicts: list[str] = []
        used: set[str] = set()
        pairs = [(nic, device) for nic in self._nics for device in descriptor.devices]
        for nic, device in sorted(pairs, key=lambda pair: pair[0].context.name != pair[1].name):
            offer = offer_of(device, nic)
            conflict = find_conflict(nic.offer(), offer)
            ranked = rank_gid_pairs(nic.choice.offered, offer.gids)
            if conflict or (offer.link_layer is LinkLayer.ETHERNET and not ranked):
                conflicts.append(f"{nic.name} to {device.name}: {conflict or 'no common kind of GID'}")
                continue
            is_spare = nic.name in used or device.name in used
            used |= {nic.name, device.name}
            rails.append(
                Rail(
                    nic,
                    offer,
                    "mooncake",
                    order=len(rails),
                    gids=ranked[0] if ranked else None,
                    is_spare=is_spare,
                )
            )
        if not rails:
            raise TransportUnavailableError(
                f"no RDMA port here reaches one of {self.name}: {'; '.join(conflicts) or 'no port'}.",
                remedy="`kvxfer devices` shows the ports here; Mooncake's log shows its devices.",
                peer=self.name,
            )
        link = PeerLink(self.name, "", _no_socket, lambda *_: True, _no_notification, _no_question)
        return RdmaEndpoint(rails, link, self._config, self._connect)

    def _connect(self, rail: Rail, link: PeerLink, deadline: float) -> SendQueue:
        """Connect by Mooncake's handshake; the first of its queue pairs is the one that is used.

        Raises TransportUnavailableError with what either end said.
        """
        rail.nic.refresh()
        pairs = rank_gid_pairs(rail.nic.choice.offered, rail.remote.gids)
        gids = pairs[0] if pairs else None
        attributes = pair_attributes(rail.nic)
        channel = completions = None
        queue_pairs: list[QueuePair] = []
        try:
            address = build_address_vector(rail.nic.offer(), rail.remote, gids, hop_limit=attributes.hop_limit)
            channel = rail.nic.context.create_comp_channel()
            completions = rail.nic.context.create_cq(attributes.send_depth, channel)
            for at in range(self._queue_pairs):
                queue = completions if at == 0 else rail.nic.passive_queue()
                depth = attributes.send_depth if at == 0 else 1
                queue_pairs.append(
                    rail.nic.domain.create_qp(queue, capabilities=QueuePairCapabilities(max_send_wr=depth))
                )
            answer = self._ask(rail, gids, queue_pairs, deadline, is_ready=False)
            numbers = take_qp_numbers(answer, len(queue_pairs), self.name)
            for queue_pair, number in zip(queue_pairs, numbers, strict=True):
                bring_up(queue_pair, rail.nic, address, number, attributes)
            self._ask(rail, gids, queue_pairs, deadline, is_ready=True)
        except BaseException as error:
            close_all(*queue_pairs, completions, channel)
            if isinstance(error, VerbsError | DeviceUnusableError | PeerRefusedError):
                raise TransportUnavailableError(
                    f"{rail.label}: {error.message}",
                    remedy=error.remedy,
                    peer=self.name,
                    reasons={"rdma": error.message},
                ) from error
            raise
        self._hold(rail, queue_pairs[1:])
        rail.number = next(self._numbers)
        rail.note_connected(gids, attributes, ())
        return SendQueue(queue_pairs[0], completions, channel)

    def _hold(self, rail: Rail, queue_pairs: list[QueuePair]) -> None:
        """Keep the queue pairs beside the one that is used, in place of those of the rail's last connection."""
        with self._lock:
            if self._closed is None:
                unused = self._passive.get(rail.label, [])
                self._passive[rail.label] = queue_pairs
            else:  # closed meanwhile: the mender closes the one that would have been used
                unused = queue_pairs
        close_all(*unused)

    def _ask(
        self, rail: Rail, gids: GidPair | None, queue_pairs: Sequence[QueuePair], deadline: float, *, is_ready: bool
    ) -> dict[str, Any]:
        descriptor = self._memory.descriptor
        server = descriptor.rdma_server_name or descriptor.name
        at = parse_host_port(self.name)
        candidate = gids.local if gids is not None else rail.nic.choice.best
        answer = ask(
            at.host,
            at.port,
            MessageKind.CONNECTION,
            connection_message(
                local=f"{self._own_name}@{rail.nic.context.name}",
                peer=f"{server}@{rail.remote.device}",
                lid=rail.nic.port.lid,
                gid=gid_text(candidate.value),
                numbers=[one.number for one in queue_pairs],
                is_ready=is_ready,
            ),
            deadline=deadline,
        )
        refusal = answer.get("reply_msg")
        if isinstance(refusal, str) and refusal:
            raise PeerRefusedError(
                f"{self.name} refused the connection: {clean(refusal, 1000)}",
                remedy=f"Look at its log. MC_NUM_QP_PER_EP must be the same at both ends ({self._queue_pairs} here).",
                peer=self.name,
            )
        return answer

    def _timeout(self, transfer: Transfer) -> TransferTimeoutError:
        return TransferTimeoutError(
            f"a batch with {self.name} did not end in time: {transfer.nbytes_done} of {transfer.nbytes_total} bytes "
            f"are known to be in place.",
            remedy="The peer or the network may be stopped or overloaded, or the time too short.",
            peer=self.name,
            nbytes_done=transfer.nbytes_done,
        )


def _no_socket(deadline: float) -> Any:
    raise TransportUnavailableError("a Mooncake process takes no data connection of kvxfer's.")


def _no_notification(payload: bytes) -> Any:
    raise TransportUnavailableError("a Mooncake process is notified by a message of its own.")


def _no_question(transport: str, body: Mapping[str, Any], deadline: float) -> Mapping[str, Any]:
    raise TransportUnavailableError("a Mooncake process is connected by its own handshake.")
