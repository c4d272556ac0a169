"""RDMA: one RC queue pair for each rail to a peer, one-sided reads and writes by the devices.

`RdmaTransport` owns the open ports, the registrations and the answering side; an endpoint holds the rails to one peer.
libibverbs is opened by `probe`, never at import. Read next: `rdma_endpoint.py` (a batch's way), `rdma_connect.py` (how
a connection is made), docs/rdma.md (what an operator sees).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

from kvxfer.errors import (
    KvxferError,
    RegistrationError,
    RemoteProtocolError,
    TransportUnavailableError,
    VerbsError,
    VerbsUnavailableError,
)
from kvxfer.log import get_logger
from kvxfer.system.numa import find_memory_node, find_process_node
from kvxfer.transports.base import Endpoint, PeerLink, Transport
from kvxfer.types import Probe, Rights

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.memory.registration import Registration
    from kvxfer.transports.loop import Loop
    from kvxfer.transports.rdma_endpoint import RdmaEndpoint
    from kvxfer.transports.rdma_nic import Nic, NicSurvey
    from kvxfer.verbs.library import VerbsLibrary

__all__ = ["RdmaTransport", "read_card"]

PORTS_MAX = 64
"""Ports of one peer: more is no card that a kvxfer sends."""

IDLE_TIMEOUT_S = 5.0
"""How long a step of a queue pair may take, in the kernel, when the engine is closed: it must not lose its device."""

log = get_logger(__name__)


class RdmaTransport(Transport):
    """What this engine does over its RDMA ports."""

    name: ClassVar[str] = "rdma"

    def __init__(self, config: EngineConfig, loop: Loop) -> None:
        from kvxfer.transports.rdma_nic import open_nics
        from kvxfer.transports.rdma_service import RdmaService
        from kvxfer.verbs.rails import find_shared_gids

        self._config = config
        self._loop = loop
        survey = open_nics(config, *self.library_for(config))
        self.nics: tuple[Nic, ...] = survey.nics
        self._registrations: dict[tuple[int, int], Registration] = {}
        self.service = RdmaService(self.nics, config)
        self._endpoints: WeakSet[RdmaEndpoint] = WeakSet()
        for port, warning in survey.warnings.items():
            log.warning("rdma.port_doubtful", port=port, warning=warning)
        for warning in find_shared_gids([nic.offer() for nic in self.nics]):
            log.warning("rdma.shared_gid", warning=warning)
        self._watchers = [_EventReader(nics) for nics in _by_device(self.nics)]
        for watcher in self._watchers:
            loop.call_soon(lambda one=watcher: loop.add(one))  # type: ignore[misc]

    @classmethod
    def probe(cls, config: EngineConfig) -> Probe:
        """Open the devices, look, and close them again; never raises."""
        from kvxfer.transports.rdma_nic import close_nics, open_nics

        try:
            survey = open_nics(config, *cls.library_for(config))
        except KvxferError as error:
            return Probe("rdma", usable=False, reason=error.message, remedy=error.remedy, details=_details(error))
        probe = _survey_probe(survey)
        close_nics(survey.nics)
        return probe

    @classmethod
    def library_for(cls, config: EngineConfig) -> tuple[VerbsLibrary | None, Path]:
        """Return the library to use, None for the system's, and where sys/ and dev/ are; tests put another here."""
        del config
        return None, Path("/")

    def card(self) -> dict[str, Any]:
        return {"ports": [{"kind": nic.kind, "offer": nic.offer().to_json()} for nic in self.nics if not nic.is_down]}

    def register(self, address: int, nbytes: int, *, rights: Rights, read_only: bool = False) -> dict[str, Any]:
        from kvxfer.memory.registration import access_for, register

        domains = list(dict.fromkeys(nic.domain for nic in self.nics))
        try:
            registration = register(
                domains,
                address,
                nbytes,
                access_for(rights, is_read_only=read_only),
                chunk_nbytes_max=self._config.rdma_chunk_nbytes_max,
                trusts_device=self._config.rdma_chunk_nbytes_max is None,
            )
        except RegistrationError as error:
            raise RegistrationError(
                error.message,
                remedy=f"{error.remedy} Or leave rdma out (transports=('shm', 'tcp'), KVXFER_TRANSPORTS=shm,tcp).",
                **error.values,
            ) from error
        keys: dict[str, list[list[int]]] = {}
        for nic in self.nics:
            chunks = registration.devices[domains.index(nic.domain)].chunks
            nic.add_keys(address, nbytes, chunks[["address", "nbytes", "lkey"]].tolist())
            keys[nic.name] = [list(row) for row in chunks[["address", "nbytes", "rkey"]].tolist()]
        self._registrations[address, nbytes] = registration
        # Only now: what is registered is there, page by page. Where no two devices differ, nobody asks.
        is_wanted = len({nic.numa_node for nic in self.nics} - {None}) > 1
        node = find_memory_node(address, nbytes) if is_wanted else None
        return {"nics": keys} if node is None else {"nics": keys, "numa_node": node}

    def deregister(self, address: int, nbytes: int, keys: Mapping[str, Any]) -> None:
        for nic in self.nics:
            nic.remove_keys(address, nbytes)
        registration = self._registrations.get((address, nbytes))
        if registration is not None:
            registration.close()
            del self._registrations[address, nbytes]

    def open_endpoint(self, card: Mapping[str, Any], link: PeerLink, deadline: float) -> Endpoint:
        from kvxfer.transports.rdma_endpoint import RdmaEndpoint
        from kvxfer.transports.rdma_pairing import pair_rails

        offers = _keep_wanted(read_card(card, link.label), self._config, link.label)
        rails = pair_rails(self.nics, offers, link.label, numa_node=find_process_node())
        endpoint = RdmaEndpoint(rails, link, self._config)
        self._endpoints.add(endpoint)
        return endpoint

    def accept(
        self, peer: str, session: str, body: Mapping[str, Any], answer: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        self.service.accept(peer, session, body, answer)

    def hang_up(self, session: str, number: int) -> None:
        self.service.hang_up(session, number)

    def drop(self, session: str) -> None:
        self.service.drop(session)

    def abandon(self) -> None:
        """The devices are the parent's: nothing of them may be touched here."""

    def close(self) -> None:
        from kvxfer.transports.rdma_nic import close_nics

        are_removed = threading.Event()

        def remove_watchers() -> None:
            for watcher in self._watchers:
                self._loop.remove(watcher)
            are_removed.set()

        self._loop.call_soon(remove_watchers)
        self.service.close()
        if self._loop.is_running and not self._loop.is_current:
            are_removed.wait(IDLE_TIMEOUT_S)  # the loop may be reading an event of a device that is closed below
        for registration in self._registrations.values():
            try:
                registration.close()
            except VerbsError as error:  # the device may be gone: the rest is closed all the same
                log.warning("rdma.close_failed", error=error.message)
        self._registrations.clear()
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        if not all(one.wait_idle(max(0.0, deadline - time.monotonic())) for one in list(self._endpoints)):
            log.warning("rdma.close_failed", error="a connection is still being made; the devices stay open.")
            return
        close_nics(self.nics, lambda error: log.warning("rdma.close_failed", error=error.message))


class _EventReader:
    """Handler of the loop: reads what happens to one device, for all its ports."""

    def __init__(self, nics: list[Nic]) -> None:
        self._nics = nics
        self._context = nics[0].context
        self._fd = self._context.async_fd

    def fileno(self) -> int:
        return self._fd

    def ready(self, events: int, now: float) -> bool:
        while (event := self._context.get_async_event()) is not None:
            for nic in self._nics:
                nic.note_event(event)
        return True

    def timer(self, now: float) -> None:
        """It has none."""

    def failed(self, error: BaseException) -> None:
        """The loop has logged it."""


def _by_device(nics: tuple[Nic, ...]) -> list[list[Nic]]:
    groups: dict[int, list[Nic]] = {}
    for nic in nics:
        groups.setdefault(id(nic.context), []).append(nic)
    return list(groups.values())


def read_card(card: Mapping[str, Any], peer: str) -> list[tuple[str, Any]]:
    """Return (kind, offer) for each port that a peer offers. Raises RemoteProtocolError."""
    from kvxfer.verbs.peer_json import take_list, take_object
    from kvxfer.verbs.port_offer import PortOffer

    found = []
    for row in take_list(card, "ports", PORTS_MAX):
        port = take_object(row, "ports")
        kind = port.get("kind")
        if not isinstance(kind, str) or len(kind) > 128:
            raise RemoteProtocolError(f"{peer} offers an RDMA port of no kind.", field="kind")
        found.append((kind, PortOffer.from_json(take_object(port.get("offer"), "offer"))))
    return found


def _keep_wanted(offers: list[tuple[str, Any]], config: EngineConfig, peer: str) -> list[tuple[str, Any]]:
    """Return what the settings allow of a peer's ports. Raises TransportUnavailableError where that is nothing."""
    wanted = config.rdma_peer_devices
    if wanted is None or not offers:
        return offers
    kept = [one for one in offers if any(item.includes(one[1].device, one[1].port) for item in wanted)]
    if kept:
        return kept
    there = ", ".join(f"{offer.device}:{offer.port}" for _, offer in offers)
    raise TransportUnavailableError(
        f"{peer} offers none of the RDMA ports {', '.join(map(str, wanted))}; it offers {there}.",
        remedy="Correct rdma_peer_devices (KVXFER_RDMA_PEER_DEVICES), or unset it.",
        peer=peer,
    )


def _survey_probe(survey: NicSurvey) -> Probe:
    details = {"ports": [nic.name for nic in survey.nics], "refusals": dict(survey.refusals)}
    refused = "; ".join(f"{name}: {reason}" for name, reason in survey.refusals.items())
    if survey.nics:
        used = ", ".join(f"{nic.name} ({nic.choice.best})" for nic in survey.nics)
        return Probe(
            "rdma",
            usable=True,
            reason=f"{used} can be used" + (f"; not used: {refused}" if refused else ""),
            details=details,
        )
    if not survey.refusals:
        return Probe(
            "rdma",
            usable=False,
            reason="this machine has no RDMA device",
            remedy="Nothing to do: kvxfer uses shm on one host and tcp between hosts.",
            details=details,
        )
    return Probe(
        "rdma",
        usable=False,
        reason=f"no RDMA port can be used: {refused}",
        remedy="`kvxfer devices` shows each port and its GIDs; `kvxfer doctor` says what to change.",
        details=details,
    )


def _details(error: KvxferError) -> dict[str, Any]:
    kind = "unavailable" if isinstance(error, VerbsUnavailableError | TransportUnavailableError) else "error"
    return {kind: type(error).__name__, **{name: str(value) for name, value in error.values.items()}}
