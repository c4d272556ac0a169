"""What a device, or the host under it, refuses at the wrong moment: nothing else of the engine is lost by it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvxfer.transports.rdma import RdmaTransport
from tests.support.fake_engines import FakeHosts, fake_hosts
from tests.support.fake_verbs import connectx

NBYTES = 1 << 16


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[FakeHosts]:
    with fake_hosts(tmp_path) as made:
        made.add("a", connectx(address="192.0.2.1"))
        yield made


def test_engine_is_closed_whole_although_a_region_is_not_deregistered_at_once(hosts: FakeHosts) -> None:
    a, library = hosts.engine("a"), hosts.libraries["a"]
    memories = [np.zeros(NBYTES, np.uint8) for _ in range(2)]
    for memory in memories:
        a.register(memory)
    library.fail("ibv_dereg_mr", errno.EIO)

    with capture_logs() as events:
        a.close()

    assert [event["event"] for event in events if event["log_level"] == "warning"] == ["rdma.close_failed"]
    assert not library.leaks


def test_host_that_does_not_tell_its_interfaces_keeps_its_ports(hosts: FakeHosts) -> None:
    """Out of descriptors for a moment: the reader of the device's events must survive it, and the probe say so."""
    a = hosts.engine("a")
    transport = a._transports.find("rdma")
    assert isinstance(transport, RdmaTransport)
    (nic,) = transport.nics

    with mock.patch("kvxfer.transports.rdma_nic.list_interfaces", side_effect=OSError(errno.EMFILE, "EMFILE")):
        nic.refresh()
        probe = RdmaTransport.probe(a.config)

    assert not nic.is_down
    assert probe.usable
