"""RDMA: one RC queue pair for each rail to a peer, one-sided reads and writes by the devices.

`RdmaTransport` owns the open ports, the registrations and the answering side; an endpoint holds the rails to one peer.
libibverbs is opened by `probe`, never at import. Read next: `rdma_endpoint.py` (a batch's way), `rdma_connect.py` (how
a connection is made), docs/rdma.md (what an operator sees).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from kvxfer.errors import (
    KvxferError,
    RegistrationError,
    RemoteProtocolError,
    TransportUnavailableError,
    VerbsUnavailableError,
)
from kvxfer.log import get_logger
from kvxfer.system.numa import find_memory_node, find_process_node
from kvxfer.transports.base import Endpoint, PeerLink, Transport
from kvxfer.types import Probe, Rights

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.transports.loop import Loop
    from kvxfer.transports.rdma_endpoint import RdmaEndpoint
    from kvxfer.transports.rdma_nic import Nic, NicSurvey
    from kvxfer.verbs.library import VerbsLibrary
    from kvxfer.verbs.port_offer import PortOffer

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
        from kvxfer.transports.rdma_memory import RdmaMemory
        from kvxfer.transports.rdma_nic import open_nics
        from kvxfer.transports.rdma_service import RdmaService
        from kvxfer.transports.rdma_watch import PortWatch
        from kvxfer.verbs.rails import find_shared_gids

        self._config = config
        source = self.library_for(config)
        survey = open_nics(config, *source)
        self.nics: tuple[Nic, ...] = survey.nics
        """The ports that are in use; those that come up later are added."""
        self._memory = RdmaMemory(self.nics, config.rdma_chunk_nbytes_max)
        self._lock = threading.Lock()
        self._endpoints: WeakKeyDictionary[RdmaEndpoint, tuple[list[tuple[str, PortOffer]], str]] = WeakKeyDictionary()
        """What was offered by the peer of each, and its name."""
        for port, warning in survey.warnings.items():
            log.warning("rdma.port_doubtful", port=port, warning=warning)
        for warning in find_shared_gids([nic.offer() for nic in self.nics]):
            log.warning("rdma.shared_gid", warning=warning)
        self._watch = PortWatch(survey, config, loop, source, self._take)
        self.service = RdmaService(self.nics, loop, self._watch.add_reader)

    @classmethod
    def probe(cls, config: EngineConfig) -> Probe:
        """Open the devices, look, and close them again; never raises."""
        from kvxfer.transports.rdma_nic import open_nics

        try:
            survey = open_nics(config, *cls.library_for(config))
        except KvxferError as error:
            return Probe("rdma", usable=False, reason=error.message, remedy=error.remedy, details=_details(error))
        probe = _survey_probe(survey)
        survey.close()
        return probe

    @classmethod
    def library_for(cls, config: EngineConfig) -> tuple[VerbsLibrary | None, Path]:
        """Return the library to use, None for the system's, and where sys/ and dev/ are; tests put another here."""
        del config
        return None, Path("/")

    def card(self) -> dict[str, Any]:
        self._watch.look_for_devices()
        return {"ports": [{"kind": nic.kind, "offer": nic.offer().to_json()} for nic in self.nics if not nic.is_down]}

    def register(self, address: int, nbytes: int, *, rights: Rights, read_only: bool = False) -> dict[str, Any]:
        from kvxfer.memory.registration import access_for

        try:
            keys = self._memory.register(address, nbytes, access_for(rights, is_read_only=read_only))
        except RegistrationError as error:
            raise RegistrationError(
                error.message,
                remedy=f"{error.remedy} Or leave rdma out (transports=('shm', 'tcp'), KVXFER_TRANSPORTS=shm,tcp).",
                **error.values,
            ) from error
        # Only now: what is registered is there, page by page. Where no two devices differ, nobody asks.
        if len({nic.numa_node for nic in self.nics} - {None}) > 1:
            node = find_memory_node(address, nbytes)
            if node is not None:
                keys["numa_node"] = node
        return keys

    def deregister(self, address: int, nbytes: int, keys: Mapping[str, Any]) -> None:
        self._memory.deregister(address, nbytes)

    def open_endpoint(self, card: Mapping[str, Any], link: PeerLink, deadline: float) -> Endpoint:
        from kvxfer.transports.rdma_endpoint import RdmaEndpoint
        from kvxfer.transports.rdma_pairing import pair_rails

        offers = _keep_wanted(read_card(card, link.label), self._config, link.label)
        with self._lock:  # a port that is added meanwhile finds the endpoint
            rails = pair_rails(self.nics, offers, link.label, numa_node=find_process_node())
            endpoint = RdmaEndpoint(rails, link, self._config)
            self._endpoints[endpoint] = (offers, link.label)
        return endpoint

    def _take(self, nic: Nic) -> None:
        """Use a port more: register all memory with its device, offer it to peers, give rails to those that are open.

        Raises RegistrationError, and the port is not used then.
        """
        from kvxfer.transports.rdma_pairing import pair_rails

        self._memory.add(nic)
        self.service.add(nic)
        with self._lock:
            self.nics = (*self.nics, nic)
            endpoints = list(self._endpoints.items())
            nics = self.nics
        for endpoint, (offers, peer) in endpoints:
            with contextlib.suppress(TransportUnavailableError):  # no port here reaches this peer now
                endpoint.add_rails([rail for rail in pair_rails(nics, offers, peer) if rail.nic is nic])

    def accept(
        self, peer: str, session: str, body: Mapping[str, Any], answer: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        self.service.accept(peer, session, body, answer)

    def hang_up(self, session: str, number: int) -> None:
        self.service.hang_up(session, number)

    def drop(self, session: str) -> None:
        self.service.drop(session)

    def await_fences(self, session: str, fences: Mapping[int, int], then: Callable[[bool], None]) -> None:
        self.service.await_fences(session, fences, then)

    def abandon(self) -> None:
        """The devices are the parent's: nothing of them may be touched here."""

    def close(self) -> None:
        from kvxfer.transports.rdma_nic import close_devices

        is_idle = self._watch.stop(IDLE_TIMEOUT_S)
        self.service.close()
        if is_idle:
            self._memory.close()
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        endpoints = list(self._endpoints)
        if not is_idle or not all(one.wait_idle(max(0.0, deadline - time.monotonic())) for one in endpoints):
            log.warning("rdma.close_failed", error="a connection or a port is still being made; the devices stay open.")
            return
        close_devices(self._watch.contexts, lambda error: log.warning("rdma.close_failed", error=error.message))


def read_card(card: Mapping[str, Any], peer: str) -> list[tuple[str, Any]]:
    """Return (kind, offer) for each port that a peer offers; one that makes no sense is left out, with a warning.

    Raises RemoteProtocolError where none of them makes sense.
    """
    from kvxfer.verbs.peer_json import take_list

    found = []
    problem: RemoteProtocolError | None = None
    for number, row in enumerate(take_list(card, "ports", PORTS_MAX), 1):
        try:
            found.append(_read_port(row, peer))
        except RemoteProtocolError as error:
            log.warning("rdma.port_doubtful", port=f"{peer}, port {number} of its list", warning=error.message)
            problem = problem or error
    if problem is not None and not found:
        raise problem
    return found


def _read_port(row: Any, peer: str) -> tuple[str, Any]:
    from kvxfer.verbs.peer_json import take_object
    from kvxfer.verbs.port_offer import PortOffer

    port = take_object(row, "ports")
    kind = port.get("kind")
    if not isinstance(kind, str) or len(kind) > 128:
        raise RemoteProtocolError(f"{peer} offers an RDMA port of no kind.", field="kind")
    return kind, PortOffer.from_json(take_object(port.get("offer"), "offer"))


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
            remedy="Nothing to do: kvxfer uses shm on one host and tcp between hosts. In a container on a host "
            "that has some: `rdma dev set DEVICE netns NAME`, or the network of the host.",
            details=details,
        )
    return Probe(
        "rdma",
        usable=False,
        reason=f"no RDMA port can be used: {refused}",
        remedy=survey.remedy or "`kvxfer devices` shows each port and its GIDs; `kvxfer doctor` says what to change.",
        details=details,
    )


def _details(error: KvxferError) -> dict[str, Any]:
    kind = "unavailable" if isinstance(error, VerbsUnavailableError | TransportUnavailableError) else "error"
    return {kind: type(error).__name__, **{name: str(value) for name, value in error.values.items()}}
