"""A device is taken away while engines use it. In a module of its own: no other test may have it open meanwhile."""

from __future__ import annotations

import subprocess

import pytest

from tests.lab.wire import LONG, Hosts, into_the_middle, run

pytestmark = [pytest.mark.rdma, pytest.mark.topology("wire"), pytest.mark.slow]


@pytest.mark.parametrize("device", ["rxa1", "rxb1"])
def test_a_device_that_is_unplugged_harms_no_batch_and_goes_with_the_engine(device: str) -> None:
    """soft RoCE waits for the programs that have it open; a driver that does not takes the rail away."""
    with Hosts(rdma_timeout=14) as hosts:
        hosts.warm()
        batch = hosts.submit("write", times=LONG)
        into_the_middle(batch)
        unplugged = subprocess.Popen(["rdma", "link", "delete", device])
        try:
            batch.wait()

            hosts.check()
            hosts.move("read")
        finally:
            hosts.close()
            assert unplugged.wait(30.0) == 0
            run("rdma", "link", "add", device, "type", "rxe", "netdev", device.replace("rx", "v"))
