"""What the queue pairs of one port begin with: the settings, those for the port alone before those for all.

Pure. Read next: `rdma_connect.py`, which agrees on them with the peer, and `rdma_ladder.py`, which lowers them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.verbs.port_offer import ReadDepth, plan_read_depth

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.verbs.device import DeviceLimits

__all__ = ["PortAttributes"]

QUEUE_PAIRS_PLANNED = 64
"""Connections that a device with one read budget for all of them is planned for; Ionic has 16 reads in all."""


@dataclass(frozen=True)
class PortAttributes:
    """The best that a port gives its queue pairs.

    path_mtu_nbytes_max: a bound, beside the active MTUs. read_depth, send_depth: within what the device says.
    """

    path_mtu_nbytes_max: int
    read_depth: ReadDepth
    send_depth: int
    timeout: int
    retry_count: int
    hop_limit: int
    traffic_class: int
    service_level: int

    @classmethod
    def of(cls, config: EngineConfig, limits: DeviceLimits, device: str, port: int) -> PortAttributes:
        """Return those of port `port` of a device with these limits."""

        def value(name: str) -> int:
            return config.rdma_attribute(name, device, port)

        # Who names the depth of a port has done the sharing of the device's budget.
        is_named = config.rdma_attributes is not None and config.rdma_attributes.of("read_depth", device, port)
        return cls(
            path_mtu_nbytes_max=value("path_mtu"),
            read_depth=plan_read_depth(
                limits, queue_pairs=1 if is_named else QUEUE_PAIRS_PLANNED, depth_max=value("read_depth")
            ),
            send_depth=min(value("send_depth"), limits.max_qp_wr, limits.max_cqe),
            timeout=value("timeout"),
            retry_count=value("retry_count"),
            hop_limit=value("hop_limit"),
            traffic_class=value("traffic_class"),
            service_level=value("service_level"),
        )
