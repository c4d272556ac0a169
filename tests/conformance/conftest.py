"""The media every behaviour is run over, and a peer process for each that tests share."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import Region, Segment, TransferEngine
from tests.support.peer import Peer, Remote

MEDIA = ("shm", "shm-any", "tcp")
"""shm: memory from allocate, mapped. shm-any: any registered memory, by process_vm_*. tcp: the same over a socket."""
EVERY_MEDIUM = (*MEDIA, pytest.param("rdma", marks=pytest.mark.rdma))
"""rdma: registered memory by RDMA devices, in the lab (docs/lab.md): two "hosts" with two rails each in one guest."""
LAB_DEVICES = ("rxa0,rxa1", "rxb0,rxb1")
"""What this process and the peer use there."""
LAB_NETDEVS = ("va0", "va1")


class Link:
    """An engine here, a peer process there, and the segment between them."""

    def __init__(self, medium: str) -> None:
        self.medium = medium
        self.transport = medium.partition("-")[0]
        self.settings: dict[str, Any] = {"transports": (self.transport,)}
        self.peer_settings = dict(self.settings)
        if medium == "rdma":
            self.settings["rdma_devices"], self.peer_settings["rdma_devices"] = LAB_DEVICES
        self.open()

    def open(self) -> None:
        """Start both sides."""
        self.engine = TransferEngine(**self.settings)
        try:
            self.peer = Peer(**self.peer_settings)
            self.segment: Segment = self.engine.open_segment(self.peer.address)
        except BaseException:
            self.engine.close()
            raise

    def here(self, nbytes: int, **settings: Any) -> Region:
        """Return memory of this process, zeroed."""
        if self.medium == "shm":
            return self.engine.allocate(nbytes, **settings)
        return self.engine.register(np.zeros(nbytes, np.uint8), **settings)

    def there(self, nbytes: int, **settings: Any) -> Remote:
        """Return memory of the peer, zeroed."""
        make = self.peer.allocate if self.medium == "shm" else self.peer.register
        return make(nbytes, **settings)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Keep batches from moving meanwhile: the peer is stopped; over RDMA, which does not need it to run, the wire
        loses every packet."""
        if self.transport != "rdma":
            with self.peer.stopped():
                yield
            return
        for netdev in LAB_NETDEVS:
            subprocess.run(["tc", "qdisc", "add", "dev", netdev, "root", "netem", "loss", "100%"], check=True)
        try:
            yield
        finally:
            for netdev in LAB_NETDEVS:
                subprocess.run(["tc", "qdisc", "del", "dev", netdev, "root"], check=True)

    def clean(self) -> None:
        """Forget all memory and notifications, so that the next test finds none."""
        for region in self.engine.regions:
            for _ in range(region.reference_count):
                self.engine.unregister(region)
        self.engine.notifications()
        self.peer.call("unregister_all")
        self.peer.call("notifications")

    def close(self) -> None:
        """End both sides."""
        self.engine.close()
        self.peer.close()


@pytest.fixture(scope="module", params=EVERY_MEDIUM)
def module_link(request: pytest.FixtureRequest) -> Iterator[Link]:
    """One link per module and medium."""
    link = Link(request.param)
    yield link
    link.close()


@pytest.fixture
def link(module_link: Link) -> Iterator[Link]:
    """The module's link, without memory of other tests."""
    yield module_link
    try:
        module_link.clean()
    except BaseException:  # a failed test left something behind: it must not fail the next ones too
        module_link.close()
        module_link.open()
        raise


@pytest.fixture(params=EVERY_MEDIUM)
def own_link(request: pytest.FixtureRequest) -> Iterator[Link]:
    """A link that a test may break."""
    link = Link(request.param)
    yield link
    link.close()
