"""The serving side of an engine: what peers that opened it may ask, and how it answers.

Regions and notifications over their control connections, requests over tcp through `admit`. Called in the loop's
threads by `control.Listener`, `session.Session` and `transports.tcp_service`; never moves a byte itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvxfer.addresses import parse_host_port
from kvxfer.answers import Pending, split_fences, split_number
from kvxfer.config import EngineConfig
from kvxfer.control import Dialect
from kvxfer.errors import (
    ConfigError,
    KvxferError,
    PeerRefusedError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransportUnavailableError,
    UsageError,
)
from kvxfer.handshake.frames import ASKING_KINDS, Frame, FrameKind
from kvxfer.handshake.machine import Handshake, Role
from kvxfer.log import get_logger
from kvxfer.memory import Region, RegionTable, locate
from kvxfer.memory.access import access_denied
from kvxfer.notifications import NBYTES_MAX, Notification, NotificationQueue
from kvxfer.session import Session
from kvxfer.transport_set import TransportSet
from kvxfer.transports.loop import Loop
from kvxfer.transports.tcp import TcpTransport
from kvxfer.types import AddressColumn, Opcode

__all__ = ["PeerService"]

REFUSAL_NBYTES_MAX = 800
"""How much of a reason fits the answer to a notification."""

ADDRESS_LENGTH_MAX = 300
"""A host name has at most 253 characters (RFC 1035); an address with its brackets, scope and port is shorter."""

TOLD_TIMEOUT_S = 0.25
"""How long a peer over tcp has to say that it knows of a region's end; a live one answers within 1 ms."""


class PeerService:
    """Answers peers. ListenerOwner for the listener, SessionOwner for their sessions, Gate for tcp's serving side."""

    def __init__(
        self, config: EngineConfig, generation: str, table: RegionTable, loop: Loop, transports: TransportSet
    ) -> None:
        self.config = config
        self.generation = generation
        self.name = ""
        self.address = ""
        self.loop = loop
        self.transports = transports
        self.dialect: Dialect | None = None
        """The other protocol that is answered on the engine's port."""
        self._table = table
        self._lock = threading.Lock()
        self._closed = False
        self._sessions: dict[str, Session] = {}
        self.notifications = NotificationQueue(config.notifications_pending_max)
        self._held_nbytes = 0
        """What notifications hold of memory that wait for fences; in the loop's thread."""
        self._log = get_logger(__name__)

    def close(self) -> None:
        """Say goodbye to all peers; take no more."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions.values())
        if self.dialect is not None:
            self.dialect.close()
        for session in sessions:
            session.close("engine closed")
        self.notifications.close()

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors only."""
        if self.dialect is not None:
            self.dialect.abandon()
        for session in self._sessions.values():
            session.abandon()

    def take_back(self, region: Region, deadline: float) -> list[str]:
        """Tell every peer that a region is gone; return those that may copy by themselves and did not answer.

        A peer over tcp is told as well, so that it does not take the region's address or name for valid still, but a
        silent one holds nothing up for long: what it sends is checked here.
        """
        asked: list[tuple[Session, Pending]] = []
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            if session.established is not None:
                with contextlib.suppress(KvxferError):  # a peer that is gone holds nothing
                    asked.append(
                        (session, session.ask(FrameKind.REVOKE, FrameKind.REVOKED, {"ids": [region.region_id]}))
                    )
        holders: list[str] = []
        told_until = min(deadline, time.monotonic() + TOLD_TIMEOUT_S)
        for session, pending in asked:
            carrier = session.established.transport if session.established is not None else ""
            copies = carrier in ("shm", "rdma")
            with contextlib.suppress(KvxferError):
                until = deadline if copies else told_until
                if not pending.wait(until - time.monotonic()) and copies:
                    if carrier == "rdma":  # its device obeys ours: without our end of the connection it can do nothing
                        self.transports["rdma"].drop(session.token)
                    else:
                        holders.append(self._peer_address(session))
        return holders + self._wait_for_strays(deadline)

    def _wait_for_strays(self, deadline: float) -> list[str]:
        """Wait until no process that has lost its session may still copy; return those that may at the deadline: a peer
        that was stopped goes on with its copy when it is continued, until it has found its session gone."""
        while (shm := self.transports.shm) is not None:
            with self._lock:
                live = {session.generation for session in self._sessions.values()}
            strays = shm.holders(live)
            if not strays or time.monotonic() >= deadline:
                return strays
            time.sleep(0.005)
        return []

    def card_for_peer(self, session: Session) -> dict[str, Any]:
        """Return what an authenticated peer is told of this engine."""
        return {
            "address": self.address,
            "name": self.name,
            "data_token": session.token,
            "transports": self.transports.cards(),
            "passed_over": {name: probe.reason for name, probe in self.transports.refusals.items()},
        }

    def accept_control(self, connection: socket.socket, label: str) -> Session:
        """ListenerOwner."""
        config = self.config
        with self._lock:
            if self._closed:
                raise PeerRefusedError("the engine is being closed.")
            if len(self._sessions) >= config.connections_max:
                self._log.warning("listener.full", peer=label, connections_max=config.connections_max)
                raise PeerRefusedError(
                    f"there are {len(self._sessions)} control connections already.",
                    remedy="Raise connections_max (KVXFER_CONNECTIONS_MAX) there, or close segments that are not used.",
                )
            machine = Handshake(
                role=Role.RESPONDER,
                generation=self.generation,
                name=self.name,
                nonce=os.urandom(16),
                now=time.monotonic(),
                deadline_s=config.handshake_timeout_s,
                key=config.key,
                transports=tuple(self.transports),
                session_kinds=ASKING_KINDS,
            )
            session = Session(
                connection,
                label,
                machine,
                self,
                self.loop,
                is_initiator=False,
                config=config,
            )
            self._sessions[session.token] = session
        return session

    def accept_data(self, token: str) -> tuple[int, Callable[[socket.socket], None]]:
        """ListenerOwner."""
        session = self._sessions.get(token)
        tcp = self.transports.tcp
        if session is None or session.established is None:
            raise PeerRefusedError("no session has that token: it has ended.", remedy="Open the segment again.")
        if tcp is None:
            raise TransportUnavailableError("tcp is not offered here.", remedy="Allow tcp on both sides.")
        if tcp.service.is_full:
            raise PeerRefusedError(
                f"there are {tcp.service.connection_count} data connections already.",
                remedy="Raise tcp_connections_max (KVXFER_TCP_CONNECTIONS_MAX) there, or open fewer.",
            )
        tcp.service.prepare()
        number, peer, generation = tcp.service.next_number(), self._peer_address(session), session.generation
        return number, lambda connection: tcp.service.adopt(connection, number, peer, generation)

    # SessionOwner: peers that opened us.

    def choose(self, session: Session, card: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        """The opened side never chooses."""
        raise UsageError("the side that is opened does not choose the transport.")

    def session_established(self, session: Session) -> None:
        """A peer is there."""
        assert session.established is not None
        peer, established = self._peer_address(session), session.established
        self.notifications.connected(session.generation, peer, session.token)
        if session.error is not None:  # it has ended meanwhile, in another thread
            self.notifications.disconnected(session.generation, session.token, session.error)
        self._log.info(
            "peer.connected",
            peer=peer,
            label=session.label,
            transport=established.transport,
            passed_over=dict(established.passed_over),
        )

    def frame_received(self, session: Session, frame: Frame) -> None:
        """Answer a peer's question."""
        if frame.kind is FrameKind.REGIONS_GET:
            number, _ = split_number(frame)
            session.send(FrameKind.REGIONS, json.dumps(self._regions_for_peers(number)).encode())
        elif frame.kind is FrameKind.NOTIFY:
            self._take_notice(session, *split_number(frame))
        elif frame.kind is FrameKind.NOTIFY_FENCED:
            self._hold_notice(session, *split_number(frame))
        elif frame.kind is FrameKind.ABORT:
            self._hang_up(session, *split_number(frame))
        elif frame.kind is FrameKind.CONNECT:
            self._connect(session, *split_number(frame))

    def session_ended(self, session: Session, error: KvxferError) -> None:
        """A peer has gone."""
        with self._lock:
            self._sessions.pop(session.token, None)
        self.transports.drop(session.token)
        tcp = self.transports.tcp
        if isinstance(error, PeerUnreachableError) and tcp is not None:
            tcp.service.drop_peer(session.generation)  # dead, not only disconnected: streams outlive their session
        self.notifications.disconnected(session.generation, session.token, error)
        event = "peer.disconnected" if session.established is not None else "peer.refused"
        self._log.info(event, peer=self._peer_address(session), label=session.label, reason=error.message)

    def _take_notice(self, session: Session, number: int, payload: bytes | None) -> None:
        """Queue a notification and say so, or why not. None: there was no room to keep it until now."""
        refusal = b""
        try:
            if payload is None:
                raise self._no_room()
            self.notify(self._peer_address(session), payload, session.generation)
        except UsageError as error:
            refusal = str(error).encode()[:REFUSAL_NBYTES_MAX]
        session.send(FrameKind.NOTIFY_ACK, number.to_bytes(8, "little") + refusal)

    def _hold_notice(self, session: Session, number: int, body: bytes) -> None:
        """Take a notification once its fences have come, or cannot come any more."""
        fences, payload = split_fences(body)
        rdma = self.transports.get("rdma")
        if rdma is None:
            raise RemoteProtocolError(f"{self._peer_address(session)} names fences; there is no rdma here.")
        notify_nbytes = len(payload)  # `take` must not keep a payload that there is no room for
        kept = payload if self._held_nbytes + notify_nbytes <= NBYTES_MAX else None
        nbytes = 0 if kept is None else notify_nbytes

        def take(is_fenced: bool) -> None:
            self._held_nbytes -= nbytes
            if session.was_reset():
                return
            if not is_fenced:
                self._log.warning("rdma.fence_missed", peer=self._peer_address(session), notify_nbytes=notify_nbytes)
            with contextlib.suppress(KvxferError):  # the session ends meanwhile
                self._take_notice(session, number, kept)

        self._held_nbytes += nbytes
        try:
            rdma.await_fences(session.token, fences, take)
        except RemoteProtocolError:
            self._held_nbytes -= nbytes
            raise

    def _hang_up(self, session: Session, number: int, body: Mapping[str, Any]) -> None:
        """Drop a connection that the peer has given up, and say so once nothing more comes in over it."""
        connection, transport = body.get("connection"), self.transports.get(str(body.get("transport")))
        if not isinstance(connection, int) or transport is None:
            return
        if isinstance(transport, TcpTransport):
            transport.service.hang_up(connection, lambda: session.answer(FrameKind.ABORTED, {"number": number}))
        else:
            transport.hang_up(session.token, connection)
            session.answer(FrameKind.ABORTED, {"number": number})

    def _connect(self, session: Session, number: int, body: Mapping[str, Any]) -> None:
        """Have the transport make our end of a connection; it answers when that is done."""
        transport = self.transports.get(str(body.get("transport")))
        peer = self._peer_address(session)
        if transport is None or session.established is None:
            raise RemoteProtocolError(f"{peer} asks for a connection over {str(body.get('transport'))!r:.40}.")

        def answer(made: Mapping[str, Any]) -> bool:
            session.answer(FrameKind.CONNECTED, {**made, "number": number})
            return session.error is None

        transport.accept(peer, session.token, body, answer)

    # Gate: requests over tcp.

    def admit(self, opcode: Opcode, addresses: AddressColumn, nbytes: AddressColumn) -> Callable[[], None]:
        """Check a peer's rows against the regions and pin these; returns the call that lets go of them."""
        snapshot = self._table.snapshot()
        index = locate(
            addresses,
            nbytes,
            snapshot.starts,
            snapshot.ends,
            side=f"address at {self.address}",
            regions=snapshot.regions,
        )
        used = snapshot.find_used(index)
        for region in used:
            if not region.rights.allows(opcode):
                row = int(np.flatnonzero(snapshot.starts[index] == region.address)[0])
                raise access_denied(opcode, row, region, self.address)
        self._table.acquire(used, "remote")
        return lambda: self._table.release(used, "remote")

    def admit_row(self, opcode: Opcode, address: int, nbytes: int) -> Callable[[], None]:
        """The same for one row."""
        region = self._table.snapshot().find(address, nbytes)
        if region is None or not region.rights.allows(opcode):
            return self.admit(opcode, np.array([address]), np.array([nbytes]))
        used = (region,)
        self._table.acquire(used, "remote")
        return lambda: self._table.release(used, "remote")

    def stream_began(self, generation: str, peer: str, number: int) -> None:
        """A peer has a data connection."""
        self.notifications.connected(generation, peer, number)

    def stream_ended(self, generation: str, number: int) -> None:
        """It is closed, and all that came in over it was taken."""
        self.notifications.disconnected(generation, number)

    def check_room(self) -> None:
        """Raise UsageError where the queue of notifications is full."""
        if self.notifications.is_full:
            raise self._no_room()

    def notify(self, peer: str, payload: bytes, generation: str = "") -> None:
        """Queue a notification for the application; raises UsageError where the queue is full."""
        if not self.notifications.put(Notification(peer, payload, generation)):
            raise self._no_room()

    def _no_room(self) -> UsageError:
        count, nbytes = self.notifications.unread
        return UsageError(
            f"{count} notifications, {nbytes} bytes, are unread at {self.address}.",
            remedy="Call notifications() there more often, or raise notifications_pending_max.",
        )

    # Inside.

    def _regions_for_peers(self, number: int) -> dict[str, Any]:
        snapshot = self._table.snapshot()
        rows = [
            [region.region_id, region.name, region.address, region.nbytes, int(region.rights), region.keys]
            for region in snapshot.regions
            if region.rights
        ]
        return {"number": number, "version": snapshot.version, "regions": rows}

    @staticmethod
    def _peer_address(session: Session | None) -> str:
        """Return the address that a peer says it has; where that is none, the one that it comes from.

        What is returned goes into notifications, and `notifications(peer=...)` must take it back.
        """
        if session is None:
            return ""
        address = session.card.get("address")
        with contextlib.suppress(ConfigError):
            if isinstance(address, str) and len(address) <= ADDRESS_LENGTH_MAX and parse_host_port(address):
                return address
        return session.label
