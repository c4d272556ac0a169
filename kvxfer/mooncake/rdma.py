"""RDMA with processes that run the real Mooncake: their handshake, their keys, our queue pairs.

Mooncake connects a fixed number of queue pairs for each two devices (MC_NUM_QP_PER_EP) by one CONNECTION message and
its answer, and says with a second one that it is ready. It exchanges no MTU, no packet numbers and no read depth: both
ends assume 0 for the first packet, their own port's MTU, and 16 reads. So those are not ours to choose here.

`MooncakeRdmaPeer` reads and writes such a process; `MooncakeRdmaAnswer` lets it read and write our memory. Everything
behind a connected queue pair is the rdma transport's.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvxfer.addresses import parse_host_port
from kvxfer.errors import (
    ClosedError,
    DeviceUnusableError,
    KvxferError,
    PeerRefusedError,
    RemoteProtocolError,
    TransferTimeoutError,
    TransportUnavailableError,
    VerbsError,
)
from kvxfer.log import get_logger
from kvxfer.memory.columns import Integers, as_columns
from kvxfer.memory.slices import IndexColumn, coalesce, locate
from kvxfer.mooncake.calls import ask
from kvxfer.mooncake.wire.descriptor import BufferDescriptor, DeviceDescriptor, SegmentDescriptor
from kvxfer.mooncake.wire.frames import MessageKind
from kvxfer.text import clean
from kvxfer.transports.base import PeerLink, Transfer
from kvxfer.transports.rdma_endpoint import RdmaEndpoint
from kvxfer.transports.rdma_ladder import QueuePairAttributes
from kvxfer.transports.rdma_queue import SendQueue, close_all
from kvxfer.transports.rdma_rail import Rail
from kvxfer.types import AddressColumn, Opcode, RegionDescriptor, Rights
from kvxfer.verbs.enums import Access, GidType, LinkLayer, Mtu
from kvxfer.verbs.gid_candidate import GidCandidate
from kvxfer.verbs.gid_choice import GidPair, rank_gid_pairs
from kvxfer.verbs.port import AddressVector, build_address_vector
from kvxfer.verbs.port_offer import PortOffer, ReadDepth
from kvxfer.verbs.queue_pair import QueuePair, QueuePairCapabilities
from kvxfer.verbs.rails import find_conflict

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.transports.rdma_nic import Nic

__all__ = ["MooncakeRdmaAnswer", "MooncakeRdmaPeer", "rdma_buffers", "rdma_devices"]

QUEUE_PAIRS_MAX = 255
QP_NUM_MAX = (1 << 24) - 1
READ_DEPTH = 16
"""What Mooncake sets at both ends, whatever the device; we stay below our own device's limit."""
TIMEOUT, RETRY_COUNT, MIN_RNR_TIMER = 14, 6, 12  # Mooncake's, but for its 7 retries, which some devices take for ever
PSN = 0
ENDPOINTS_MAX = 4096
"""Connections that Mooncake processes may hold here; the oldest makes way, for dead processes do not say goodbye."""
GIVE_UP_S = 1.0
CLOSE_S = 5.0
"""How long `close` waits for connections that are being made: one that came later would be made on a closed device."""

log = get_logger(__name__)


def rdma_devices(nics: Sequence[Nic]) -> tuple[DeviceDescriptor, ...]:
    """Return the ports as devices of a segment descriptor. Mooncake has one port a device: the first one."""
    return tuple(DeviceDescriptor(nic.context.name, nic.port.lid, _gid_text(nic.choice.best.value)) for nic in nics)


def rdma_buffers(nics: Sequence[Nic], regions: Sequence[Any]) -> tuple[BufferDescriptor, ...]:
    """Return the regions with their keys on each device: one buffer for each chunk."""
    found = []
    for region in regions:
        told: Mapping[str, Any] = region.keys.get("rdma", {}).get("nics", {})
        columns = [told.get(nic.name, []) for nic in nics]
        if not region.rights or not columns or any(len(rows) != len(columns[0]) for rows in columns):
            continue  # for its owner only, or cut otherwise on another device, which a descriptor cannot tell
        for chunks in zip(*columns, strict=True):
            keys = tuple(chunk[2] for chunk in chunks)
            found.append(BufferDescriptor("*", chunks[0][0], chunks[0][1], rkeys=keys, lkeys=keys))
    return tuple(found)


class _Memory(NamedTuple):
    """What a process told of itself last, replaced whole: regions ascending in address, with their keys by device."""

    descriptor: SegmentDescriptor
    regions: tuple[RegionDescriptor, ...]
    starts: AddressColumn
    ends: AddressColumn


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
        self._memory = self._read(descriptor)
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
            memory = self._memory = self._read(self._refresh())
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

    def _locate(self, memory: _Memory, columns: tuple[Any, Any, Any]) -> IndexColumn:
        return locate(
            columns[1],
            columns[2],
            memory.starts,
            memory.ends,
            side=f"remote ({self.name})",
            regions=memory.regions,
        )

    def _read(self, descriptor: SegmentDescriptor) -> _Memory:
        """Make the descriptor's buffers regions."""
        if "rdma" not in descriptor.protocols or not descriptor.devices:
            raise TransportUnavailableError(
                f"{self.name} is reached over {', '.join(descriptor.protocols)} only, not over rdma.",
                remedy="Look at its log: Mooncake goes over to tcp without a word where it finds no device.",
                reasons={"rdma": "the descriptor has no rdma device"},
            )
        names = [device.name for device in descriptor.devices]
        buffers = sorted((one for one in descriptor.buffers_over("rdma") if one.rkeys), key=lambda one: one.address)
        regions = tuple(
            RegionDescriptor(
                next(self._region_ids),
                "",
                buffer.address,
                buffer.nbytes,
                Rights.ALL,
                {
                    "rdma": {
                        "nics": {
                            f"{name}:1": [[buffer.address, buffer.nbytes, key]]
                            for name, key in zip(names, buffer.rkeys, strict=True)
                        }
                    }
                },
            )
            for buffer in buffers
        )
        starts = np.array([one.address for one in regions], np.int64)
        ends = np.array([one.end for one in regions], np.int64)
        if (starts[1:] < ends[:-1]).any():
            raise RemoteProtocolError(f"buffers in the descriptor of {self.name} overlap.", peer=self.name)
        return _Memory(descriptor, regions, starts, ends)

    # Connecting.

    def _make_endpoint(self, descriptor: SegmentDescriptor) -> RdmaEndpoint:
        rails: list[Rail] = []
        conflicts: list[str] = []
        used: set[str] = set()
        pairs = [(nic, device) for nic in self._nics for device in descriptor.devices]
        for nic, device in sorted(pairs, key=lambda pair: pair[0].context.name != pair[1].name):
            offer = _offer_of(device, nic)
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
        attributes = _attributes(rail.nic)
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
            numbers = _qp_numbers(answer, len(queue_pairs), self.name)
            for queue_pair, number in zip(queue_pairs, numbers, strict=True):
                _bring_up(queue_pair, rail.nic, address, number, attributes)
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
            _handshake(
                local=f"{self._own_name}@{rail.nic.context.name}",
                peer=f"{server}@{rail.remote.device}",
                lid=rail.nic.port.lid,
                gid=_gid_text(candidate.value),
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


class MooncakeRdmaAnswer:
    """Our end of connections that Mooncake processes ask for. All methods may be called from any thread.

    Mooncake does not say when it is gone: a connection lives until its process asks for another in its place, or until
    `close`.
    """

    def __init__(self, nics: Sequence[Nic], own_name: Callable[[], str]) -> None:
        self._nics = {nic.context.name: nic for nic in reversed(nics)}
        self._own_name = own_name
        self._changed = threading.Condition(threading.Lock())
        self._making_count = 0
        self._held: dict[tuple[str, str], tuple[list[int], list[QueuePair]]] = {}
        self._is_closed = False

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a CONNECTION message; may take as long as the kernel takes to find a neighbour.

        Raises KvxferError with the reason to refuse.
        """
        own, other = _text(asked, "peer_nic_path"), _text(asked, "local_nic_path")
        server, _, device = own.rpartition("@")
        nic = self._nics.get(device)
        if nic is None or server != self._own_name():
            there = ", ".join(f"{self._own_name()}@{name}" for name in self._nics)
            raise PeerRefusedError(f"there is no {clean(own)} here; there is {there}.")
        numbers = _qp_numbers(asked, None, other)
        with self._changed:
            held = self._held.get((own, other))
        if held is not None and held[0] == numbers:
            return self._reply(nic, own, other, held[1], is_ready=bool(asked.get("ready_ack")))
        with self._changed:
            self._check_open()
            self._making_count += 1
        try:
            made = self._make(nic, asked, numbers)
            self._hold((own, other), numbers, made)
        finally:
            with self._changed:
                self._making_count -= 1
                self._changed.notify_all()
        log.info("mooncake.connected", nic=nic.name, peer=clean(other), queue_pairs=len(made))
        return self._reply(nic, own, other, made, is_ready=False)

    def close(self) -> None:
        """Destroy all connections; make no more, and wait for those that are being made."""
        with self._changed:
            self._is_closed = True
            held, self._held = self._held, {}
        for _, queue_pairs in held.values():
            close_all(*queue_pairs)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._making_count, CLOSE_S):
                log.warning("rdma.close_failed", error="a connection of a Mooncake process is still being made.")

    def _check_open(self) -> None:
        """Raise PeerRefusedError after `close`; the lock is held."""
        if self._is_closed:
            raise PeerRefusedError("this process takes no connections any more: it is closing.")

    def _hold(self, place: tuple[str, str], numbers: list[int], made: list[QueuePair]) -> None:
        """Keep a connection, in place of the one that the process had here. Raises PeerRefusedError."""
        try:
            with self._changed:
                self._check_open()
                replaced = self._held.pop(place, ([], []))[1]
                if len(self._held) >= ENDPOINTS_MAX:  # the oldest: a process that lives connects anew
                    replaced += self._held.pop(next(iter(self._held)))[1]
                self._held[place] = (numbers, made)
        except PeerRefusedError:
            close_all(*made)
            raise
        close_all(*replaced)

    def _make(self, nic: Nic, asked: Mapping[str, Any], numbers: list[int]) -> list[QueuePair]:
        nic.refresh()
        gid = _parse_gid(_text(asked, "local_gid"))
        lid = asked.get("local_lid", 0)
        if type(lid) is not int or not 0 <= lid <= 0xFFFF or (gid is None and not lid):
            raise PeerRefusedError(f"a connection without a usable local_gid or local_lid: {str(asked)[:200]}")
        offer = _offer_of(DeviceDescriptor("peer", lid, _gid_text(gid) if gid else ""), nic)
        pairs = rank_gid_pairs(nic.choice.offered, offer.gids)
        attributes = _attributes(nic)
        address = build_address_vector(nic.offer(), offer, pairs[0] if pairs else None, hop_limit=attributes.hop_limit)
        made: list[QueuePair] = []
        try:
            for number in numbers:
                queue_pair = nic.domain.create_qp(
                    nic.passive_queue(), capabilities=QueuePairCapabilities(max_send_wr=1)
                )
                made.append(queue_pair)
                _bring_up(queue_pair, nic, address, number, attributes)
        except BaseException:
            close_all(*made)
            raise
        return made

    @staticmethod
    def _reply(nic: Nic, own: str, other: str, queue_pairs: Sequence[QueuePair], *, is_ready: bool) -> dict[str, Any]:
        return _handshake(
            local=own,
            peer=other,
            lid=nic.port.lid,
            gid=_gid_text(nic.choice.best.value),
            numbers=[one.number for one in queue_pairs],
            is_ready=is_ready,
        )


def _attributes(nic: Nic) -> QueuePairAttributes:
    """What both ends of such a connection have, as far as it is ours to say."""
    own = nic.attributes
    return QueuePairAttributes(
        path_mtu=nic.offer().mtu.nbytes,
        read_depth=min(READ_DEPTH, own.read_depth.initiator),
        send_depth=own.send_depth,
        timeout=TIMEOUT,
        retry_count=RETRY_COUNT,
        min_rnr_timer=MIN_RNR_TIMER,
        hop_limit=own.hop_limit,
        traffic_class=own.traffic_class,
        service_level=own.service_level,
    )


def _bring_up(
    queue_pair: QueuePair,
    nic: Nic,
    address: AddressVector,
    number: int,
    attributes: QueuePairAttributes,
) -> None:
    queue_pair.to_init(
        port=nic.port.number, pkey_index=nic.partition.index, access=Access.REMOTE_WRITE | Access.REMOTE_READ
    )
    queue_pair.to_rtr(
        address=address,
        dest_qp_num=number,
        path_mtu=Mtu.of_nbytes(attributes.path_mtu),
        rq_psn=PSN,
        max_dest_rd_atomic=min(READ_DEPTH, nic.attributes.read_depth.responder),
        min_rnr_timer=attributes.min_rnr_timer,
    )
    queue_pair.to_rts(
        sq_psn=PSN,
        max_rd_atomic=attributes.read_depth,
        timeout=attributes.timeout,
        retry_cnt=attributes.retry_count,
        rnr_retry=attributes.rnr_retry,
    )


def _handshake(*, local: str, peer: str, lid: int, gid: str, numbers: list[int], is_ready: bool) -> dict[str, Any]:
    return {
        "local_nic_path": local,
        "peer_nic_path": peer,
        "local_lid": lid,
        "local_gid": gid,
        "payload": "",
        "qp_num": numbers,
        "ready_ack": is_ready,
        "reply_msg": "",
    }


def _offer_of(device: DeviceDescriptor, nic: Nic) -> PortOffer:
    """What a Mooncake device would offer: what its descriptor says, the rest as our own port has it."""
    own = nic.offer()
    gid = _parse_gid(device.gid)
    kind = GidType.IB if own.link_layer is LinkLayer.INFINIBAND else GidType.ROCE_V2
    return PortOffer(
        device=device.name,
        port=1,
        link_layer=own.link_layer,
        lid=device.lid,
        needs_grh=own.link_layer is LinkLayer.ETHERNET,
        mtu=own.mtu,
        read_depth=ReadDepth(READ_DEPTH, READ_DEPTH),
        message_nbytes_max=nic.port.message_nbytes_max,
        pkey=own.pkey,
        gids=() if gid is None else (GidCandidate(gid, kind),),
    )


def _qp_numbers(message: Mapping[str, Any], count: int | None, peer: str) -> list[int]:
    numbers = message.get("qp_num")
    if not isinstance(numbers, list):
        numbers = []
    is_good = all(type(one) is int and 0 < one <= QP_NUM_MAX for one in numbers)
    if not is_good or not 0 < len(numbers) <= QUEUE_PAIRS_MAX or (count is not None and len(numbers) != count):
        raise PeerRefusedError(
            f"{clean(peer)} names the queue pairs {str(numbers)[:80]}; {count or 'at least one'} was expected.",
            remedy=f"MC_NUM_QP_PER_EP must be the same at both ends{f'; here it is {count}' if count else ''}.",
        )
    return list(numbers)


def _text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name, "")
    if not isinstance(value, str) or len(value) > 1024:
        raise PeerRefusedError(f"a CONNECTION message has {name} {str(value)[:80]!r}.")
    return value


def _gid_text(value: bytes) -> str:
    return ":".join(f"{byte:02x}" for byte in value)


def _parse_gid(text: str) -> bytes | None:
    """Return the bytes of Mooncake's form; None where there is none, or zeros."""
    if not re.fullmatch("([0-9a-fA-F]{2}:){15}[0-9a-fA-F]{2}", text):
        return None
    value = bytes.fromhex(text.replace(":", ""))
    return value if any(value) else None


def _no_socket(deadline: float) -> Any:
    raise TransportUnavailableError("a Mooncake process takes no data connection of kvxfer's.")


def _no_notification(payload: bytes) -> Any:
    raise TransportUnavailableError("a Mooncake process is notified by a message of its own.")


def _no_question(transport: str, body: Mapping[str, Any], deadline: float) -> Mapping[str, Any]:
    raise TransportUnavailableError("a Mooncake process is connected by its own handshake.")
