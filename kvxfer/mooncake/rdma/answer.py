"""`MooncakeRdmaAnswer`: our end of the connections that Mooncake processes ask for, over which they reach our memory.

Read next: `handshake.py`, what they ask with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvxfer.errors import PeerRefusedError
from kvxfer.log import get_logger
from kvxfer.mooncake.rdma.handshake import (
    bring_up,
    connection_message,
    gid_text,
    offer_of,
    pair_attributes,
    parse_gid,
    take_qp_numbers,
    take_text,
)
from kvxfer.mooncake.wire.descriptor import DeviceDescriptor
from kvxfer.text import clean
from kvxfer.transports.rdma_queue import close_all
from kvxfer.verbs.gid_choice import rank_gid_pairs
from kvxfer.verbs.port import build_address_vector
from kvxfer.verbs.queue_pair import QueuePair, QueuePairCapabilities

if TYPE_CHECKING:
    from kvxfer.transports.rdma_nic import Nic

__all__ = ["MooncakeRdmaAnswer"]

ENDPOINTS_MAX = 4096
"""Connections that Mooncake processes may hold here; the oldest makes way, for dead processes do not say goodbye."""
CLOSE_S = 5.0
"""How long `close` waits for connections that are being made: one that came later would be made on a closed device."""

log = get_logger(__name__)


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
        own, other = take_text(asked, "peer_nic_path"), take_text(asked, "local_nic_path")
        server, _, device = own.rpartition("@")
        nic = self._nics.get(device)
        if nic is None or server != self._own_name():
            there = ", ".join(f"{self._own_name()}@{name}" for name in self._nics)
            raise PeerRefusedError(f"there is no {clean(own)} here; there is {there}.")
        numbers = take_qp_numbers(asked, None, other)
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
        gid = parse_gid(take_text(asked, "local_gid"))
        lid = asked.get("local_lid", 0)
        if type(lid) is not int or not 0 <= lid <= 0xFFFF or (gid is None and not lid):
            raise PeerRefusedError(f"a connection without a usable local_gid or local_lid: {str(asked)[:200]}")
        offer = offer_of(DeviceDescriptor("peer", lid, gid_text(gid) if gid else ""), nic)
        pairs = rank_gid_pairs(nic.choice.offered, offer.gids)
        attributes = pair_attributes(nic)
        address = build_address_vector(nic.offer(), offer, pairs[0] if pairs else None, hop_limit=attributes.hop_limit)
        made: list[QueuePair] = []
        try:
            for number in numbers:
                queue_pair = nic.domain.create_qp(
                    nic.passive_queue(), capabilities=QueuePairCapabilities(max_send_wr=1)
                )
                made.append(queue_pair)
                bring_up(queue_pair, nic, address, number, attributes)
        except BaseException:
            close_all(*made)
            raise
        return made

    @staticmethod
    def _reply(nic: Nic, own: str, other: str, queue_pairs: Sequence[QueuePair], *, is_ready: bool) -> dict[str, Any]:
        return connection_message(
            local=own,
            peer=other,
            lid=nic.port.lid,
            gid=gid_text(nic.choice.best.value),
            numbers=[one.number for one in queue_pairs],
            is_ready=is_ready,
        )
