"""The transports by name. This table is the only registry; each module says what it carries and when it can."""

from __future__ import annotations

from kvxfer.transports.base import Endpoint, Transfer, Transport
from kvxfer.transports.rdma import RdmaTransport
from kvxfer.transports.shm import ShmTransport
from kvxfer.transports.tcp import TcpTransport

__all__ = ["TRANSPORTS", "Endpoint", "RdmaTransport", "ShmTransport", "TcpTransport", "Transfer", "Transport"]

TRANSPORTS: dict[str, type[ShmTransport] | type[RdmaTransport] | type[TcpTransport]] = {
    "shm": ShmTransport,
    "rdma": RdmaTransport,
    "tcp": TcpTransport,
}
"""In the default order of preference."""
