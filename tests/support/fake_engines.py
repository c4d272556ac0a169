"""Engines over fake NICs in one process: each with a library of its own, all on one fabric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from kvxfer import Segment, TransferEngine
from kvxfer.config import EngineConfig
from kvxfer.transports.rdma import RdmaTransport
from kvxfer.transports.rdma_worked import forget_what_worked
from kvxfer.verbs.routes import Route
from tests.support.fake_verbs import FakeFabric, FakeLibrary, FakeNic, FakeQueuePair

__all__ = ["FakeHosts", "Pair", "fake_hosts"]


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
        self._stack.enter_context(mock.patch("kvxfer.transports.rdma_nic.list_interfaces", return_value=None))
        self._stack.enter_context(mock.patch("kvxfer.transports.rdma_pairing.find_route", return_value=Route()))

    def add(self, host: str, *nics: FakeNic) -> FakeLibrary:
        """Make a host with these NICs."""
        library = self.libraries[host] = FakeLibrary(self.fabric, *nics, name=host)
        return library

    def engine(self, host: str, **settings: Any) -> TransferEngine:
        """Make an engine on a host; closed with the hosts."""
        engine = TransferEngine(**{"transports": ("rdma",), "name": host, **settings})
        self._stack.callback(engine.close)
        return engine

    def pair(
        self,
        here: FakeNic | list[FakeNic],
        there: FakeNic | list[FakeNic],
        *,
        nbytes: int = 1 << 16,
        peer_settings: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Pair:
        """Make hosts "a" and "b" with these NICs, an engine on each, and memory of `nbytes` bytes; nothing is open."""
        for host, nics in (("a", here), ("b", there)):
            self.add(host, *(nics if isinstance(nics, list) else [nics]))
        return Pair(
            self,
            self.engine("a", **settings),
            self.engine("b", **{**settings, **(peer_settings or {})}),
            nbytes,
        )

    def close(self) -> None:
        """Close all engines; nothing may be left of any device."""
        self._stack.close()
        left = {host: library.leaks for host, library in self.libraries.items()}
        assert not any(left.values()), left

    def _library_for(self, config: EngineConfig) -> tuple[FakeLibrary, Path]:
        return self.libraries[config.name or ""], self._root


class Pair:
    """Two engines with memory. `open` connects them; `write` and `read` move all whole rows of it and compare."""

    def __init__(self, hosts: FakeHosts, a: TransferEngine, b: TransferEngine, nbytes: int) -> None:
        self.hosts = hosts
        self.fabric = hosts.fabric
        self.a, self.b = a, b
        self.libraries = hosts.libraries["a"], hosts.libraries["b"]
        self.here: npt.NDArray[np.uint8] = np.zeros(nbytes, np.uint8)
        self.there: npt.NDArray[np.uint8] = np.zeros(nbytes, np.uint8)
        self.local, self.remote = a.register(self.here), b.register(self.there)
        self._round = 0

    def open(self) -> Segment:
        """Open "b" from "a"."""
        self.segment = self.a.open_segment(self.b.address)
        return self.segment

    @property
    def rails(self) -> list[dict[str, Any]]:
        """What the endpoint says of its rails."""
        return list(self.segment.describe()["rdma"]["rails"])

    @property
    def connected(self) -> list[str]:
        """The rails that are connected."""
        return [rail["rail"] for rail in self.rails if rail["connected"]]

    def queue_pairs(self) -> tuple[list[FakeQueuePair], list[FakeQueuePair]]:
        """The queue pairs of both hosts."""
        a, b = self.libraries
        return a.queue_pairs, b.queue_pairs

    def rows(self, nbytes: int) -> npt.NDArray[np.int64]:
        """Offsets of as many rows of `nbytes` bytes as the memory holds, none next to the one before it."""
        count = len(self.here) // nbytes
        order = np.arange(count)
        return np.concatenate([order[::2], order[1::2]]).astype(np.int64) * nbytes

    def fill(self) -> None:
        """Put a new pattern into our memory."""
        self._round += 1
        self.here[:] = np.random.default_rng(self._round).integers(0, 256, len(self.here), np.uint8)

    def write(self, nbytes: int = 4096, **options: Any) -> None:
        """Write all of our memory in rows, and compare."""
        self.fill()
        rows = self.rows(nbytes)
        self.a.write(self.segment, self.local.address + rows, self.remote.address + rows, nbytes, **options)
        self._compare(len(rows) * nbytes)

    def read(self, nbytes: int = 4096, **options: Any) -> None:
        """Read all of the peer's memory in rows, and compare."""
        self._round += 1
        self.there[:] = np.random.default_rng(self._round).integers(0, 256, len(self.there), np.uint8)
        rows = self.rows(nbytes)
        self.a.read(self.segment, self.local.address + rows, self.remote.address + rows, nbytes, **options)
        self._compare(len(rows) * nbytes)

    def _compare(self, nbytes: int) -> None:
        assert (self.there[:nbytes] == self.here[:nbytes]).all()


@contextmanager
def fake_hosts(root: Path, fabric: FakeFabric | None = None) -> Iterator[FakeHosts]:
    """Hosts for the duration of a test; leaks fail it."""
    hosts = FakeHosts(root, fabric)
    try:
        yield hosts
    finally:
        hosts.close()
