"""Engines over fake NICs in one process: each with a library of its own, all on one fabric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from kvxfer import TransferEngine
from kvxfer.config import EngineConfig
from kvxfer.transports.rdma import RdmaTransport
from kvxfer.transports.rdma_rail import forget_what_worked
from kvxfer.verbs.routes import Route
from tests.support.fake_verbs import FakeFabric, FakeLibrary, FakeNic

__all__ = ["FakeHosts", "fake_hosts"]


class FakeHosts:
    """Hosts with fake NICs; `engine` makes an engine on one."""

    def __init__(self, root: Path, fabric: FakeFabric | None = None) -> None:
        self.fabric = fabric or FakeFabric()
        self.libraries: dict[str, FakeLibrary] = {}
        self._root = root
        self._stack = ExitStack()
        forget_what_worked()
        self._stack.enter_context(mock.patch.object(RdmaTransport, "library_for", self._library_for))
        # the fake GIDs are addresses of no interface of this machine: nobody has looked
        self._stack.enter_context(mock.patch("kvxfer.transports.rdma_nic.list_interfaces", lambda: None))
        self._stack.enter_context(mock.patch("kvxfer.transports.rdma_pairing.find_route", lambda *_, **__: Route()))

    def add(self, host: str, *nics: FakeNic) -> FakeLibrary:
        """Make a host with these NICs."""
        library = self.libraries[host] = FakeLibrary(self.fabric, *nics, name=host)
        return library

    def engine(self, host: str, **settings: Any) -> TransferEngine:
        """Make an engine on a host; closed with the hosts."""
        engine = TransferEngine(**{"transports": ("rdma",), "name": host, **settings})
        self._stack.callback(engine.close)
        return engine

    def close(self) -> None:
        """Close all engines; nothing may be left of any device."""
        self._stack.close()
        left = {host: library.leaks for host, library in self.libraries.items()}
        assert not any(left.values()), left

    def _library_for(self, config: EngineConfig) -> tuple[FakeLibrary, Path]:
        return self.libraries[config.name or ""], self._root


@contextmanager
def fake_hosts(root: Path, fabric: FakeFabric | None = None) -> Iterator[FakeHosts]:
    """Hosts for the duration of a test; leaks fail it."""
    hosts = FakeHosts(root, fabric)
    try:
        yield hosts
    finally:
        hosts.close()
