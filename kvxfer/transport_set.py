"""The transports of one engine: which of the wanted ones work on this machine, and what the probes of the others said.

Opens, closes and finds them, and registers memory with all of them. What carries data is theirs: `transports/base.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvxfer.config import EngineConfig
from kvxfer.errors import TransportUnavailableError
from kvxfer.limits import is_shortage, shortage
from kvxfer.log import get_logger
from kvxfer.memory.buffers import BufferView
from kvxfer.memory.region import RegionKeys
from kvxfer.text import join_reasons
from kvxfer.transports import TRANSPORTS
from kvxfer.transports.base import Transport
from kvxfer.transports.loop import Loop
from kvxfer.transports.rdma import RdmaTransport
from kvxfer.transports.shm import ShmTransport
from kvxfer.transports.tcp import TcpTransport
from kvxfer.transports.tcp_service import Gate
from kvxfer.types import Probe, Rights

__all__ = ["TransportSet"]


class TransportSet(Mapping[str, Transport]):
    """The working transports by name, in order of preference; empty until `open`."""

    def __init__(self, config: EngineConfig) -> None:
        self.refusals: dict[str, Probe] = {}
        """Wanted transports that do not work here, and what their probes said."""
        self.asked_for: frozenset[str] | None = None
        """Transports that are not passed over without a warning; None: those that were chosen by name, if any were."""
        self._config = config
        self._found: dict[str, Transport] = {}

    def __getitem__(self, name: str) -> Transport:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def shm(self) -> ShmTransport | None:
        """The shm transport, where it works."""
        found = self._found.get("shm")
        return found if isinstance(found, ShmTransport) else None

    @property
    def tcp(self) -> TcpTransport | None:
        """The tcp transport, where it works."""
        found = self._found.get("tcp")
        return found if isinstance(found, TcpTransport) else None

    def open(self, loop: Loop, generation: str, gate: Gate) -> None:
        """Open every wanted transport that works; raises TransportUnavailableError where none does, ResourceLimitError
        where one does not for want of descriptors or memory."""
        makers: dict[str, Callable[[], Transport]] = {
            "shm": lambda: ShmTransport(self._config, loop, generation),
            "rdma": lambda: RdmaTransport(self._config, loop),
            "tcp": lambda: TcpTransport(self._config, gate),
        }
        log = get_logger(__name__)
        for name in self._config.transports:
            probe = TRANSPORTS[name].probe(self._config)
            if is_shortage(probe.details.get("errno")):  # a moment later it would work: nothing to start without
                raise shortage(f"opening {name}", probe.details["errno"])
            if probe.usable:
                self._found[name] = makers[name]()
            else:
                self.refusals[name] = probe
                was_asked_for = name == "rdma" and self._config.rdma_devices is not None
                tell = log.warning if was_asked_for else log.debug
                tell("transport.unusable", transport=name, reason=probe.reason, remedy=probe.remedy)
        if not self._found:
            reasons = {name: probe.reason for name, probe in self.refusals.items()}
            remedies = " ".join(probe.remedy for probe in self.refusals.values() if probe.remedy)
            raise TransportUnavailableError(
                f"none of the wanted transports works on this machine. {join_reasons(reasons)}.",
                remedy=remedies,
                reasons=reasons,
            )

    def find(self, name: str) -> Transport:
        """Return a working transport; raises TransportUnavailableError with what its probe said."""
        found = self._found.get(name)
        if found is None:
            probe = self._probe(name)
            raise TransportUnavailableError(probe.reason, remedy=probe.remedy, reasons={name: probe.reason})
        return found

    def probe(self) -> list[Probe]:
        """Say of each wanted transport whether it works on this machine, and if not why and what to do."""
        return [self._probe(name) for name in self._config.transports]

    def _probe(self, name: str) -> Probe:
        return self.refusals.get(name) or TRANSPORTS[name].probe(self._config)

    def cards(self) -> dict[str, dict[str, Any]]:
        """Return what a peer must know of each."""
        return {name: transport.card() for name, transport in self._found.items()}

    def register(self, view: BufferView, rights: Rights) -> RegionKeys:
        """Make memory reachable over every transport and return the keys of each, all or nothing."""
        keys: dict[str, dict[str, Any]] = {}
        try:
            for name, transport in self._found.items():
                keys[name] = transport.register(view.address, view.nbytes, rights=rights, read_only=view.read_only)
        except BaseException:
            self.deregister(view.address, view.nbytes, keys)
            raise
        return keys

    def deregister(self, address: int, nbytes: int, keys: RegionKeys) -> None:
        """Undo `register`."""
        for name, one in keys.items():
            self._found[name].deregister(address, nbytes, one)

    def drop(self, session: str) -> None:
        """Drop all connections of a session that has ended."""
        for transport in self._found.values():
            transport.drop(session)

    def close(self) -> None:
        """Release everything; tolerated twice."""
        for transport in self._found.values():
            transport.close()

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors only."""
        for transport in self._found.values():
            transport.abandon()
