"""The way to one peer: the control connection, the transports chosen over it, and both made anew where they are lost.

Belongs to one process at the other end, told by its generation. When another process answers at the address, all is
void for good, because every address that is known was the old process's. Owns no transfer: `peer_transfers.py`.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvxfer.addresses import HostPort
from kvxfer.answers import Notice, split_number
from kvxfer.config import TRANSPORT_NAMES
from kvxfer.control import connect, dial_data
from kvxfer.errors import (
    KvxferError,
    PeerClosedError,
    PeerRestartedError,
    PeerUnreachableError,
    RemoteProtocolError,
    ResourceLimitError,
    TransportUnavailableError,
)
from kvxfer.handshake.frames import ANSWERING_KINDS, Frame, FrameKind
from kvxfer.handshake.machine import Handshake, Role
from kvxfer.limits import shortages_told
from kvxfer.log import get_logger
from kvxfer.peer_transfers import PeerTransfers
from kvxfer.serving import PeerService
from kvxfer.session import Session
from kvxfer.text import clean, join_reasons
from kvxfer.transports.base import Endpoint, PeerLink
from kvxfer.types import RegionDescriptor

if TYPE_CHECKING:
    import socket

__all__ = ["PeerConnection"]


class PeerConnection:
    """The connection to one process; SessionOwner of its session. All methods may be called from any thread.

    service: this engine as peers see it. wanted: the transports to try, in order of preference. transfers: what runs
    over the connection. forget: called once, when the peer cannot be used any more.
    """

    def __init__(
        self,
        service: PeerService,
        target: HostPort,
        wanted: tuple[str, ...],
        transfers: PeerTransfers,
        forget: Callable[[], None],
    ) -> None:
        self.address = transfers.address
        self.name = ""
        self.generation = ""
        self.passed_over: dict[str, str] = {}
        """Transports that were preferred to the one in use, and why each was passed over."""
        self.transfers = transfers
        self._service = service
        self._config = service.config
        self._target = target
        self._wanted = wanted
        self._forget = forget
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._failure: KvxferError | None = None
        """Why the last attempt to connect failed, and when that began."""
        self._failed_from = 0.0
        self._failed_transports: dict[str, TransportUnavailableError] = {}
        self._told: set[str] = set()

    @property
    def is_connected(self) -> bool:
        """Whether the control connection stands."""
        session = self._session
        return self.transfers.void is None and session is not None and session.error is None

    def session(self, deadline: float = math.inf) -> Session:
        """Return the live session, connecting anew where it is lost, until `deadline`; raises why that fails."""
        session = self._session
        if session is not None and session.error is None:
            return session
        asked_at = time.monotonic()
        if not self._connecting.acquire(timeout=min(threading.TIMEOUT_MAX, max(0.0, deadline - time.monotonic()))):
            raise PeerUnreachableError(
                f"{self.address} was not connected anew in time; another thread is still trying.",
                remedy="Look at the peer, or allow more time (timeout_s).",
                peer=self.address,
            )
        try:
            self.transfers.raise_if_void()
            if self._session is None or self._session.error is not None:
                self._connect_for_all(asked_at, deadline)
            assert self._session is not None
            return self._session
        finally:
            self._connecting.release()

    def refresh(self, deadline: float = math.inf) -> None:
        """Ask the peer for its regions. deadline: monotonic seconds; handshake_timeout_s from now at most."""
        self._ask_regions(self.session(deadline), deadline)

    def endpoint_for(self, regions: tuple[RegionDescriptor, ...], deadline: float) -> Endpoint:
        """Return the endpoint that reaches all these regions: the first in order of preference."""
        if self._session is None or self._session.error is not None:
            self.session(deadline)
        endpoints = self.transfers.endpoints
        first = endpoints[0]
        if len(regions) == 1 and first.unreachable(regions[0]) is None:
            return first
        refusals: dict[str, str] = {}
        for endpoint in endpoints:
            refusal = next((why for region in regions if (why := endpoint.unreachable(region))), None)
            if refusal is None:
                self._tell_of_unreachable(refusals, endpoint.transport)
                return endpoint
            refusals[endpoint.transport] = refusal
        why = refusals[first.transport].removesuffix(".")
        raise TransportUnavailableError(
            f"{first.transport} does not reach {regions[0]} of {self.address}: {why}.",
            remedy="Let the peer use allocate() for that memory, or allow tcp (transports=...).",
            reasons=refusals,
            peer=self.address,
        )

    def _tell_of_unreachable(self, refusals: Mapping[str, str], transport: str) -> None:
        """Say once that a transport is there and does not reach what a batch names; `transport` carries it."""
        if not refusals.keys() <= self._told:
            self._told.update(refusals)
            get_logger(__name__).warning(
                "segment.region_unreachable", peer=self.address, transport=transport, passed_over=dict(refusals)
            )

    def make_void(self, error: KvxferError, goodbye: str = "") -> None:
        """End all use of the peer with `error`; a second call does nothing. goodbye: what the peer is told, if it is
        still there."""
        with self._lock:
            if not self.transfers.make_void(error):
                return
            session = self._session
        if goodbye:
            self.transfers.give_up(error, time.monotonic() + self._config.close_timeout_s / 2)
        self.transfers.close(error)
        if session is not None and goodbye:
            session.close(goodbye)
        self._forget()

    def abandon(self, error: KvxferError) -> None:
        """In a forked child: as `PeerTransfers.abandon`, and the session with it."""
        session, self._session = self._session, None
        self._connecting = threading.Lock()
        self.transfers.abandon(error)
        if session is not None:
            session.abandon()

    # Connecting.

    def _connect_for_all(self, asked_at: float, deadline: float) -> None:
        """Connect, for all threads that wait for it: who asked before an attempt began has its failure too, instead of
        trying for as long again. The caller holds `_connecting`."""
        if self._failure is not None and self._failed_from >= asked_at:
            raise self._failure.with_traceback(None)
        began_at = time.monotonic()
        try:
            self._connect(deadline)
        except KvxferError as error:
            if deadline - began_at >= self._config.connect_timeout_s:  # it had all the time that others would have
                self._failure, self._failed_from = error, began_at
            raise

    def _connect(self, deadline: float) -> None:
        """Connect, and once more without a transport that was agreed on and then could not be established."""
        self._failed_transports = {}
        while True:
            now = time.monotonic()
            session = self._open_session(deadline)
            try:
                for endpoint in self.transfers.endpoints:
                    carrier = endpoint.transport
                    endpoint.establish(min(deadline, time.monotonic() + self._config.connect_timeout_s))
                break
            except TransportUnavailableError as error:
                self._failed_transports[carrier] = error
                session.close(f"{carrier} could not be established: {error.message.rstrip('.')}")
            except BaseException as error:
                session.reset(PeerClosedError(f"{self.address} was given up: {error}.", peer=self.address))
                raise
        self.transfers.raise_if_void()
        asked_for = self._service.transports.asked_for
        if asked_for is None:
            asked_for = frozenset(() if self._wanted == TRANSPORT_NAMES else self._wanted)  # else: nobody's choice
        level = "info" if asked_for.isdisjoint(self.passed_over) else "warning"
        if self._failed_transports:
            level = "warning"  # it should have worked
        getattr(get_logger(__name__), level)(
            "segment.opened",
            peer=self.address,
            transport=self.transfers.endpoints[0].transport,
            passed_over=dict(self.passed_over),
            region_count=len(self.transfers.table.regions),
            elapsed_ms=round((time.monotonic() - now) * 1e3, 2),
        )

    def _open_session(self, deadline: float) -> Session:
        session = self._begin_session(deadline)
        before = self.transfers.endpoints
        try:
            handshake_until = time.monotonic() + self._config.handshake_timeout_s
            established = session.run_handshake(min(handshake_until, deadline))
        except BaseException as exc:
            failed = PeerClosedError(f"the handshake with {self.address} failed.", peer=self.address)
            session.reset(failed)
            for endpoint in self.transfers.endpoints:
                if endpoint not in before:
                    endpoint.close(failed)
            if isinstance(exc, KvxferError):
                exc = self._located(exc)
            if isinstance(exc, PeerRestartedError):
                self.make_void(self._restarted(exc))
                raise self.transfers.void or exc from exc
            raise exc
        with self._lock:
            void = self.transfers.void
            if void is None:
                self.generation = session.generation
                self.name = established.peer.name
                self.passed_over = dict(established.passed_over)
                self._session = session
        if void is not None:  # closed while it was being connected
            session.close("segment closed")
            self.transfers.close(void)
            raise void.with_traceback(None)
        session.join_loop()
        try:
            self._ask_regions(session, deadline)
            self.transfers.raise_if_void()
        except BaseException:
            session.reset(PeerClosedError(f"{self.address} did not tell its regions.", peer=self.address))
            raise
        return session

    def _begin_session(self, deadline: float) -> Session:
        """Return a session over a new connection, at the start of its handshake."""
        config = self._config
        lost = self._session.error if self._session is not None else None
        try:
            connection = connect(self._target, config, min(time.monotonic() + config.connect_timeout_s, deadline))
        except PeerUnreachableError as exc:
            if lost is None:
                raise
            raise PeerUnreachableError(
                f"{lost.message} Since then {exc.message}", remedy=exc.remedy, **exc.values
            ) from None
        machine = Handshake(
            role=Role.INITIATOR,
            generation=self._service.generation,
            name=self._service.name,
            nonce=os.urandom(16),
            now=time.monotonic(),
            deadline_s=min(config.handshake_timeout_s, max(0.001, deadline - time.monotonic())),
            key=config.key,
            expected_generation=self.generation or None,
            transports=self._wanted,
            session_kinds=ANSWERING_KINDS,
        )
        return Session(connection, self.address, machine, self, self._service.loop, is_initiator=True, config=config)

    def _ask_regions(self, session: Session, deadline: float) -> None:
        answer = session.ask(FrameKind.REGIONS_GET, FrameKind.REGIONS, {})
        timeout_s = min(self._config.handshake_timeout_s, max(0.0, deadline - time.monotonic()))
        self.transfers.take_regions(answer.result(timeout_s, "the question for its regions"))

    def _located(self, error: KvxferError) -> KvxferError:
        """Return an error of the handshake with the peer's address in it: the machine knows no address."""
        if error.values.get("peer"):
            return error
        values = {name: value for name, value in error.values.items() if name != "peer"}
        return type(error)(f"{self.address}: {error.message}", remedy=error.remedy, **values, peer=self.address)

    def _restarted(self, exc: KvxferError) -> PeerRestartedError:
        return PeerRestartedError(
            f"another process answers at {self.address}: {exc.message}",
            remedy="Open the segment again and ask the peer for its new addresses; those of the old process are void.",
            peer=self.address,
            **{name: value for name, value in exc.values.items() if name != "peer"},
        )

    # SessionOwner.

    def card_for_peer(self, session: Session) -> dict[str, Any]:
        """What the peer is told of this engine."""
        return self._service.card_for_peer(session)

    def choose(self, session: Session, card: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        """Try the wanted transports in order; the first that works is in use, later ones stay in reserve."""
        offers = card.get("transports")
        if not isinstance(offers, dict):
            raise RemoteProtocolError(f"{self.address} sent a card without transports.", peer=self.address)
        reasons: dict[str, str] = {}
        remedies: list[str] = []
        attempts: list[Any] = []
        # Streams of tcp outlive the control connection; shm's endpoint was closed with it.
        old = {endpoint.transport: endpoint for endpoint in self.transfers.endpoints if not endpoint.is_closed}
        opened: list[Endpoint] = []
        deadline = time.monotonic() + self._config.handshake_timeout_s / 2
        link = PeerLink(
            self.address, session.generation, self._dial, self._hang_up, self._deliver, self._ask_connection
        )
        for name in self._wanted:
            if name != "tcp" and any(endpoint.reaches_all for endpoint in opened):
                continue  # in reserve is what is needed, and what costs nothing to hold
            try:
                if name in self._failed_transports:
                    raise self._failed_transports[name]
                transport = self._service.transports.find(name)
                if name not in offers:
                    reasons[name] = _not_offered(name, card)
                    continue
                if not isinstance(offers[name], dict):
                    raise RemoteProtocolError(f"{self.address} describes {name} as {str(offers[name])[:80]}.")
                kept = old.pop(name, None)
                if kept is None:
                    with shortages_told(f"opening {name} to {self.address}", peer=self.address):
                        kept = transport.open_endpoint(offers[name], link, deadline)
                opened.append(kept)
            except ResourceLimitError as error:  # a moment later it would work: nothing to fall back for
                for endpoint in opened:
                    if endpoint not in self.transfers.endpoints:
                        endpoint.close(error)
                raise
            except KvxferError as error:
                reasons[name] = error.message
                remedies.append(error.remedy)
                attempts += error.values.get("attempts", ())
        if opened:
            self.transfers.endpoints = opened
            for endpoint in old.values():
                endpoint.close(PeerClosedError(f"{self.address} was connected anew.", peer=self.address))
            used = self._wanted.index(opened[0].transport)
            passed_over = {name: why for name, why in reasons.items() if self._wanted.index(name) < used}
            return opened[0].transport, passed_over
        ours = ", ".join(self._wanted)
        raise TransportUnavailableError(
            f"no transport to {self.address} works. Wanted here: {ours}; "
            f"offered there: {', '.join(offers) or 'none'}. {join_reasons(reasons)}.",
            remedy=" ".join(dict.fromkeys(remedies)) or "Allow a common transport on both sides (transports=...).",
            reasons=reasons,
            peer=self.address,
            attempts=tuple(attempts),
        )

    def session_established(self, session: Session) -> None:
        """Only the opened side is told: the opening one knows from its call."""

    def frame_received(self, session: Session, frame: Frame) -> None:
        """The peer takes regions back."""
        if frame.kind is FrameKind.REVOKE:
            number, body = split_number(frame)
            ids = body.get("ids")
            if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
                raise RemoteProtocolError(f"{self.address} took back regions {ids!r:.80}.", peer=self.address)
            answer = {"number": number}
            self.transfers.revoke(set(ids), lambda: session.answer(FrameKind.REVOKED, answer))

    def session_ended(self, session: Session, error: KvxferError) -> None:
        """The session is over; what depends on it alone fails now."""
        if session is self._session:
            get_logger(__name__).info("segment.disconnected", peer=self.address, error=str(error))
            self.transfers.disconnected(error, is_dead=isinstance(error, PeerUnreachableError))

    # PeerLink.

    def _dial(self, deadline: float) -> tuple[socket.socket, int]:
        session = self.session(deadline)
        token = session.card.get("data_token")
        if not isinstance(token, str):
            raise RemoteProtocolError(f"{self.address} gave no token for data connections.", peer=self.address)
        return dial_data(self._target, self._config, deadline, token=token, generation=self.generation)

    def _hang_up(self, transport: str, number: int, deadline: float) -> bool:
        session = self._session
        if session is None or session.error is not None:
            return False
        try:
            body = {"transport": transport, "connection": number}
            pending = session.ask(FrameKind.ABORT, FrameKind.ABORTED, body)
            return pending.wait(deadline - time.monotonic())
        except KvxferError:
            return False

    def _ask_connection(self, transport: str, body: Mapping[str, Any], deadline: float) -> Mapping[str, Any]:
        pending = self._known_session().ask(FrameKind.CONNECT, FrameKind.CONNECTED, {**body, "transport": transport})
        timeout_s = max(0.0, deadline - time.monotonic())
        answer: Mapping[str, Any] = pending.result(timeout_s, f"the request for a connection over {transport}")
        return answer

    def _deliver(self, payload: bytes) -> Notice:
        return Notice(self._known_session(), payload)

    def _known_session(self) -> Session:
        """Return the session; one that is over raises why when it is used."""
        if self._session is None:
            raise PeerClosedError(f"{self.address} is not connected.", peer=self.address)
        return self._session


def _not_offered(name: str, card: Mapping[str, Any]) -> str:
    """Say why a peer does not offer a transport, in its own words if it gave any."""
    told = card.get("passed_over")
    why = told.get(name) if isinstance(told, dict) else None
    return f"the peer does not offer it{f': {clean(why)}' if isinstance(why, str) else ''}"
