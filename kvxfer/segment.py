"""A Segment: one peer as this engine sees it. Its regions, the transport in use, the session behind it.

A segment belongs to one process at the other end, told by its generation. The connections behind it may break and are
made anew at the next use; when another process answers at the address, the segment is void for good, because every
address in it was the old process's.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvxfer.addresses import HostPort, format_host_port
from kvxfer.control import connect, dial_data
from kvxfer.errors import (
    ClosedError,
    KvxferError,
    NotRegisteredError,
    PeerClosedError,
    PeerRestartedError,
    PeerUnreachableError,
    RemoteAccessError,
    RemoteProtocolError,
    TransferTimeoutError,
    TransportUnavailableError,
)
from kvxfer.handshake.frames import ANSWERING_KINDS, Frame, FrameKind
from kvxfer.handshake.machine import Handshake, Role
from kvxfer.log import get_logger
from kvxfer.memory.regions import RegionTable
from kvxfer.remote_table import RemoteTable, parse_regions
from kvxfer.session import Pending, Session, split_number
from kvxfer.text import clean, join_reasons
from kvxfer.transports.base import Endpoint, PeerLink, Transfer
from kvxfer.types import Opcode, RegionDescriptor

if TYPE_CHECKING:
    import socket

    from kvxfer.engine import TransferEngine

__all__ = ["Segment"]


class Segment:
    """A peer's memory, opened by `TransferEngine.open_segment`. All methods may be called from any thread."""

    def __init__(
        self, engine: TransferEngine, table: RegionTable, target: HostPort, transports: tuple[str, ...]
    ) -> None:
        self.engine = engine
        self._local_table = table
        self._target = target
        self.address = format_host_port(target.host, target.port)
        self.wanted = transports
        self.name = ""
        self.generation = ""
        self.passed_over: dict[str, str] = {}
        """Transports that were preferred to the one in use, and why each was passed over."""
        self._endpoints: list[Endpoint] = []
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self.table = RemoteTable(())
        """The peer's regions as now known."""
        self._table_version = -1
        self._transfers: set[Transfer] = set()
        self._revocations: list[_Revocation] = []
        self._revoked: set[int] = set()
        self._void: KvxferError | None = None
        self._failed_transports: dict[str, TransportUnavailableError] = {}

    # What a user sees.

    @property
    def transport(self) -> str:
        """The name of the transport that carries batches to this peer."""
        return self._endpoints[0].transport if self._endpoints else ""

    @property
    def regions(self) -> tuple[RegionDescriptor, ...]:
        """The peer's regions as last heard, ascending in address; `refresh` asks again."""
        return self.table.regions

    @property
    def is_open(self) -> bool:
        """Whether the segment can be used; False once closed, or when the peer has restarted."""
        return self._void is None

    @property
    def is_connected(self) -> bool:
        """Whether the control connection stands; where it does not, the next use connects anew."""
        session = self._session
        return self._void is None and session is not None and session.error is None

    def region(self, name: str) -> RegionDescriptor:
        """Return the peer's region of that name, asking the peer if it is not known yet."""
        found = self.table.find_name(name)
        if found is None:
            self.refresh()
            found = self.table.find_name(name)
        if found is None:
            names = sorted(region.name for region in self.table.regions if region.name)
            raise NotRegisteredError(
                f"{self.address} has no region named {name!r}; it has {names[:20] or 'no named region'}.",
                remedy="Let the peer register it first (register(..., name=...)), or use one of these names.",
                name=name,
                peer=self.address,
            )
        return found

    def refresh(self, deadline: float = math.inf) -> None:
        """Ask the peer for its regions. deadline: monotonic seconds; handshake_timeout_s from now at most."""
        self._ask_regions(self.session(deadline), deadline)

    def describe(self) -> dict[str, Any]:
        """Return facts for a person: the transport, how it reaches the peer, why others were passed over."""
        facts: dict[str, Any] = {"address": self.address, "name": self.name, "generation": self.generation}
        facts |= {"transport": self.transport, "passed_over": dict(self.passed_over)}
        return facts | {endpoint.transport: dict(endpoint.describe()) for endpoint in self._endpoints}

    def offer_of(self, transport: str) -> Mapping[str, Any] | None:
        """Return what the peer told of one of its transports when it was connected; None where it does not offer it."""
        offers = self.session().card.get("transports")
        offer = offers.get(transport) if isinstance(offers, dict) else None
        return offer if isinstance(offer, dict) else None

    def close(self) -> None:
        """Close the connections to this peer; batches still running fail. Tolerated twice."""
        self._make_void(
            ClosedError(f"the segment {self.address} was closed.", remedy="Open it again."), goodbye="segment closed"
        )

    def __repr__(self) -> str:
        return f"<Segment {self.address} over {self.transport or 'nothing yet'}, {len(self.regions)} regions>"

    # Connecting.

    def session(self, deadline: float = math.inf) -> Session:
        """Return the live session, connecting anew where it is lost, until `deadline`; raises why that fails."""
        session = self._session
        if session is not None and session.error is None:
            return session
        if not self._connecting.acquire(timeout=min(threading.TIMEOUT_MAX, max(0.0, deadline - time.monotonic()))):
            raise PeerUnreachableError(
                f"{self.address} was not connected anew in time; another thread is still trying.",
                remedy="Look at the peer, or allow more time (timeout_s).",
                peer=self.address,
            )
        try:
            if self._void is not None:
                raise self._void.with_traceback(None)
            if self._session is None or self._session.error is not None:
                self._connect(deadline)
            assert self._session is not None
            return self._session
        finally:
            self._connecting.release()

    def _connect(self, deadline: float) -> None:
        """Connect, and once more without a transport that was agreed on and then could not be established."""
        self._failed_transports = {}
        while True:
            now = time.monotonic()
            session = self._open_session(deadline)
            try:
                for endpoint in self._endpoints:
                    carrier = endpoint.transport
                    endpoint.establish(min(deadline, time.monotonic() + self.engine.config.connect_timeout_s))
                break
            except TransportUnavailableError as error:
                self._failed_transports[carrier] = error
                session.close(f"{carrier} could not be established")
            except BaseException as error:
                session.reset(PeerClosedError(f"{self.address} was given up: {error}.", peer=self.address))
                raise
        self.raise_if_void()
        news = self.passed_over.keys() - self.engine.quiet_about
        level = "warning" if news and not self.engine.is_default_order(self.wanted) else "info"
        if self._failed_transports:
            level = "warning"  # it should have worked
        getattr(get_logger(__name__), level)(
            "segment.opened",
            peer=self.address,
            transport=self.transport,
            passed_over=dict(self.passed_over),
            region_count=len(self.regions),
            elapsed_ms=round((time.monotonic() - now) * 1e3, 2),
        )

    def _open_session(self, deadline: float) -> Session:
        engine, config = self.engine, self.engine.config
        now = time.monotonic()
        lost = self._session.error if self._session is not None else None
        try:
            connection = connect(self._target, config, min(now + config.connect_timeout_s, deadline))
        except PeerUnreachableError as exc:
            if lost is None:
                raise
            raise PeerUnreachableError(
                f"{lost.message} Since then {exc.message}", remedy=exc.remedy, **exc.values
            ) from None
        machine = Handshake(
            role=Role.INITIATOR,
            generation=engine.generation,
            name=engine.name,
            nonce=os.urandom(16),
            now=time.monotonic(),
            deadline_s=min(config.handshake_timeout_s, max(0.001, deadline - time.monotonic())),
            key=config.key,
            expected_generation=self.generation or None,
            transports=self.wanted,
            session_kinds=ANSWERING_KINDS,
        )
        session = Session(
            connection,
            self.address,
            machine,
            self,
            engine.loop,
            is_initiator=True,
            config=config,
        )
        before = self._endpoints
        try:
            established = session.run_handshake(min(time.monotonic() + config.handshake_timeout_s, deadline))
        except BaseException as exc:
            failed = PeerClosedError(f"the handshake with {self.address} failed.", peer=self.address)
            session.reset(failed)
            for endpoint in self._endpoints:
                if endpoint not in before:
                    endpoint.close(failed)
            if isinstance(exc, KvxferError):
                exc = self._located(exc)
            if isinstance(exc, PeerRestartedError):
                self._make_void(self._restarted(exc))
                raise self._void or exc from exc
            raise exc
        with self._lock:
            if self._void is None:
                self.generation = session.generation
                self.name = established.peer.name
                self.passed_over = dict(established.passed_over)
                self._session = session
        if self._void is not None:  # closed while it was being connected
            session.close("segment closed")
            for endpoint in self._endpoints:
                endpoint.close(self._void)
            raise self._void.with_traceback(None)
        session.join_loop()
        try:
            self._ask_regions(session, deadline)
            self.raise_if_void()
        except BaseException:
            session.reset(PeerClosedError(f"{self.address} did not tell its regions.", peer=self.address))
            raise
        return session

    def _ask_regions(self, session: Session, deadline: float) -> None:
        answer = session.ask(FrameKind.REGIONS_GET, FrameKind.REGIONS, {})
        timeout_s = min(self.engine.config.handshake_timeout_s, max(0.0, deadline - time.monotonic()))
        self._take_regions(answer.result(timeout_s, "the question for its regions"))

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

    def reap(self, now: float) -> None:
        """Close connections that have been idle for too long; end batches whose deadline has passed and whom nobody
        moves: they would pin memory on both sides for ever."""
        for endpoint in self._endpoints:
            endpoint.reap(now)
        with self._lock:
            late = [transfer for transfer in self._transfers if now >= transfer.deadline]
        for transfer in late:
            if transfer.lock.acquire(blocking=False):
                try:
                    if not transfer.finished and transfer.endpoint is not None:
                        transfer.endpoint.abort(transfer, 0.0)
                        transfer.finish(
                            TransferTimeoutError(
                                f"a batch to {self.address} passed its deadline while nobody moved it.",
                                remedy="A batch moves while somebody waits for it, polls it or awaits it.",
                                peer=self.address,
                            )
                        )
                finally:
                    transfer.lock.release()

    # SessionOwner.

    def card_for_peer(self, session: Session) -> dict[str, Any]:
        """For the session: what the peer is told of this engine."""
        return self.engine.service.card_for_peer(session)

    def choose(self, session: Session, card: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        """Try the wanted transports in order; the first that works is in use, later ones stay in reserve."""
        offers = card.get("transports")
        if not isinstance(offers, dict):
            raise RemoteProtocolError(f"{self.address} sent a card without transports.", peer=self.address)
        reasons: dict[str, str] = {}
        remedies: list[str] = []
        attempts: list[Any] = []
        # Streams of tcp outlive the control connection; shm's endpoint was closed with it.
        old = {endpoint.transport: endpoint for endpoint in self._endpoints if not endpoint.is_closed}
        opened: list[Endpoint] = []
        deadline = time.monotonic() + self.engine.config.handshake_timeout_s / 2
        link = PeerLink(
            self.address, session.generation, self._dial, self._hang_up, self._deliver, self._ask_connection
        )
        for name in self.wanted:
            if opened and name != "tcp":
                continue  # in reserve is only what costs nothing to hold and reaches every region
            try:
                if name in self._failed_transports:
                    raise self._failed_transports[name]
                transport = self.engine.transport(name)
                if name not in offers:
                    reasons[name] = _not_offered(name, card)
                    continue
                if not isinstance(offers[name], dict):
                    raise RemoteProtocolError(f"{self.address} describes {name} as {str(offers[name])[:80]}.")
                kept = old.pop(name, None)
                opened.append(transport.open_endpoint(offers[name], link, deadline) if kept is None else kept)
            except KvxferError as error:
                reasons[name] = error.message
                remedies.append(error.remedy)
                attempts += error.values.get("attempts", ())
        if opened:
            self._endpoints = opened
            for endpoint in old.values():
                endpoint.close(PeerClosedError(f"{self.address} was connected anew.", peer=self.address))
            used = self.wanted.index(opened[0].transport)
            return opened[0].transport, {name: why for name, why in reasons.items() if self.wanted.index(name) < used}
        ours = ", ".join(self.wanted)
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
        """For the session: the peer takes regions back."""
        if frame.kind is FrameKind.REVOKE:
            number, body = split_number(frame)
            ids = body.get("ids")
            if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
                raise RemoteProtocolError(f"{self.address} took back regions {ids!r:.80}.", peer=self.address)
            answer = {"number": number}
            self._revoke(set(ids), lambda: session.answer(FrameKind.REVOKED, answer))

    def session_ended(self, session: Session, error: KvxferError) -> None:
        """For the session: it is over; what depends on it alone fails now."""
        if session is not self._session:
            return
        get_logger(__name__).info("segment.disconnected", peer=self.address, error=str(error))
        dead = isinstance(error, PeerUnreachableError)
        with self._lock:
            for transfer in self._transfers:  # a copy that runs stops at the next window
                if transfer.endpoint is not None and (transfer.endpoint.needs_session or dead):
                    transfer.stop = transfer.stop or error
        for endpoint in self._endpoints:
            if endpoint.needs_session or dead:
                endpoint.close(error)

    # PeerLink.

    def _dial(self, deadline: float) -> tuple[socket.socket, int]:
        session = self.session(deadline)
        token = session.card.get("data_token")
        if not isinstance(token, str):
            raise RemoteProtocolError(f"{self.address} gave no token for data connections.", peer=self.address)
        return dial_data(self._target, self.engine.config, deadline, token=token, generation=self.generation)

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
        session = self._session
        if session is None:
            raise PeerClosedError(f"{self.address} is not connected.", peer=self.address)
        pending = session.ask(FrameKind.CONNECT, FrameKind.CONNECTED, {**body, "transport": transport})
        timeout_s = max(0.0, deadline - time.monotonic())
        answer: Mapping[str, Any] = pending.result(timeout_s, f"the request for a connection over {transport}")
        return answer

    def _deliver(self, payload: bytes) -> Pending:
        session = self._session
        if session is None:
            raise PeerClosedError(f"{self.address} is not connected.", peer=self.address)
        return session.ask(FrameKind.NOTIFY, FrameKind.NOTIFY_ACK, payload)  # raises why, if the session is over

    # Transfers.

    def begin(self, transfer: Transfer, table: RemoteTable) -> bool:
        """Take a transfer on, pin what it uses here; False where the peer's regions have changed since `table`, so that
        its rows must be checked anew."""
        self._local_table.acquire(transfer.used, "local")
        try:
            with self._lock:
                if table is self.table and self._void is None:
                    self._transfers.add(transfer)
                    return True
        finally:
            if transfer not in self._transfers:
                self._local_table.release(transfer.used, "local")
        self.raise_if_void()
        return False

    def end(self, transfer: Transfer) -> None:
        """A transfer has ended, one way or the other. A second call does nothing: an interrupted first is repeated."""
        with self._lock:
            if transfer not in self._transfers:
                return
            self._local_table.release(transfer.used, "local")
            self._transfers.discard(transfer)
            if not self._revocations:
                return
            done = [one for one in self._revocations if one.discard(transfer)]
            for one in done:
                self._revocations.remove(one)
        for one in done:
            one.done()

    def copy_row(self, opcode: Opcode, local: int, remote: int, nbytes: int) -> bool:
        """Move one short row here and now, without a batch; False where that is not possible or something is wrong,
        which the long way then finds out."""
        endpoint = self._endpoints[0] if self._endpoints else None
        if endpoint is None or not endpoint.copies_rows:
            return False
        here = self._local_table.snapshot().find(local, nbytes)
        table = self.table
        there = table.find(remote, nbytes)
        if here is None or there is None or not there.rights.allows(opcode):
            return False
        if opcode is Opcode.READ and here.view.read_only:
            return False
        with self._local_table.guard:
            if not here.is_live or table is not self.table or self._void is not None:
                return False
            return endpoint.copy_row(opcode, local, remote, nbytes, there)

    def endpoint_for(self, regions: tuple[RegionDescriptor, ...], deadline: float) -> Endpoint:
        """Return the endpoint that reaches all these regions: the first in order of preference."""
        if self._session is None or self._session.error is not None:
            self.session(deadline)
        first = self._endpoints[0]
        if len(regions) == 1 and first.unreachable(regions[0]) is None:
            return first
        refusals: dict[str, str] = {}
        for endpoint in self._endpoints:
            refusal = next((why for region in regions if (why := endpoint.unreachable(region))), None)
            if refusal is None:
                return endpoint
            refusals[endpoint.transport] = refusal
        why = refusals[first.transport].removesuffix(".")
        raise TransportUnavailableError(
            f"{first.transport} does not reach {regions[0]} of {self.address}: {why}.",
            remedy="Let the peer use allocate() for that memory, or allow tcp (transports=...).",
            reasons=refusals,
            peer=self.address,
        )

    def raise_if_void(self) -> None:
        """Raise why the segment cannot be used any more, if so."""
        if self._void is not None:
            raise self._void.with_traceback(None)

    def _take_regions(self, body: Mapping[str, Any]) -> None:
        version, regions = parse_regions(body, self.address)
        with self._lock:
            if version >= self._table_version:
                self._table_version = version
                self.table = RemoteTable([region for region in regions if region.region_id not in self._revoked])

    def _revoke(self, ids: set[int], done: Callable[[], None]) -> None:
        """The peer takes regions back: no new transfer may use them, waiting ones fail, running ones end first."""
        with self._lock:
            self._revoked |= ids
            self.table = RemoteTable([region for region in self.table.regions if region.region_id not in ids])
            touched = {one for one in self._transfers if any(region.region_id in ids for region in one.regions)}
            revocation = _Revocation(set(touched), done)
            if touched:
                self._revocations.append(revocation)
        with self._local_table.guard:
            pass  # a `copy_row` that began before the table changed has ended
        for endpoint in self._endpoints:
            endpoint.forget(sorted(ids))
        for transfer in touched:
            if transfer.nbytes_moved == 0 and transfer.lock.acquire(blocking=False):
                try:
                    if not transfer.finished and transfer.nbytes_moved == 0:
                        for endpoint in self._endpoints:
                            endpoint.abort(transfer, 0.0)  # it may hold a stream on which nothing was sent yet
                        transfer.finish(
                            RemoteAccessError(
                                f"{self.address} has unregistered a region before the batch began.",
                                remedy="Agree with the peer on who unregisters when.",
                                peer=self.address,
                            )
                        )
                finally:
                    transfer.lock.release()
        if not touched:
            done()

    def _make_void(self, error: KvxferError, goodbye: str = "") -> None:
        with self._lock:
            if self._void is not None:
                return
            self._void = error
            session = self._session
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.stop = transfer.stop or error
        if goodbye:
            self._give_up(transfers, error)
        for endpoint in self._endpoints:
            endpoint.close(error)
        if session is not None and goodbye:
            session.close(goodbye)
        self.engine.forget_segment(self)

    def _give_up(self, transfers: list[Transfer], error: KvxferError) -> None:
        """End transfers while the peer can still be told to let go of them."""
        deadline = time.monotonic() + self.engine.config.close_timeout_s / 2
        for transfer in transfers:
            if transfer.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                try:
                    if not transfer.finished:
                        for endpoint in self._endpoints:
                            endpoint.abort(transfer, deadline)
                        transfer.finish(error)
                finally:
                    transfer.lock.release()

    def abandon(self, error: KvxferError) -> None:
        """In a forked child: close the copies of the descriptors; every later use of the segment, and of the parent's
        batches, raises `error`. Takes no lock: a thread of the parent may have held it."""
        self._void = error
        session, self._session = self._session, None
        self._connecting = threading.Lock()
        for transfer in self._transfers:
            transfer.error, transfer.finished = transfer.error or error, True
        for endpoint in self._endpoints:
            endpoint.abandon(error)
        if session is not None:
            session.abandon()


def _not_offered(name: str, card: Mapping[str, Any]) -> str:
    """Say why a peer does not offer a transport, in its own words if it gave any."""
    told = card.get("passed_over")
    why = told.get(name) if isinstance(told, dict) else None
    return f"the peer does not offer it{f': {clean(why)}' if isinstance(why, str) else ''}"


class _Revocation:
    """Regions that the peer takes back, and the transfers that must end before it is told so."""

    def __init__(self, transfers: set[Transfer], done: Callable[[], None]) -> None:
        self._transfers = transfers
        self.done = done

    def discard(self, transfer: Transfer) -> bool:
        """Whether this was the last one."""
        if transfer not in self._transfers:
            return False
        self._transfers.discard(transfer)
        return not self._transfers
