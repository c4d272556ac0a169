"""Hosts with fake RDMA devices, for the tests of the transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_engines import FakeHosts, fake_hosts
from tests.support.fake_verbs import FakeFabric


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rail that broke rests for 10 ms, 20, 40."""
    monkeypatch.setattr("kvxfer.transports.rdma_rail.PAUSE_S", 0.01)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[FakeHosts]:
    with fake_hosts(tmp_path) as made:
        yield made


@pytest.fixture
def held(tmp_path: Path) -> Iterator[FakeHosts]:
    """Nothing moves but by `step`, `deliver`, `complete` and `run` of the fabric."""
    with fake_hosts(tmp_path, FakeFabric(delivery="manual")) as made:
        yield made
        made.fabric.delivery = "post"
