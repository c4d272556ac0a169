"""RDMA: what this release can say about it. The data path is not in this release.

`probe` tells what the machine has, so that the answer to "why not rdma" is made of facts. Nothing is loaded at import;
libibverbs is opened by `probe` and no call is made into it. The facts come from `verbs/probe.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvxfer.transports.base import Transport
from kvxfer.types import Probe

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.verbs.probe import VerbsReport

__all__ = ["RdmaTransport", "rdma_probe"]


class RdmaTransport(Transport):
    """Reserves the name; its methods stay abstract until the data path exists, so that no engine can hold one."""

    name: ClassVar[str] = "rdma"

    @classmethod
    def probe(cls, config: EngineConfig) -> Probe:
        """Say why kvxfer does not use RDMA here, and what it uses instead; never raises."""
        del config  # nothing of it changes the answer
        from kvxfer.verbs.probe import probe_verbs

        return rdma_probe(probe_verbs())


def rdma_probe(report: VerbsReport) -> Probe:
    """Turn the facts into the probe's words."""
    return Probe(
        transport="rdma",
        usable=False,
        reason=_reason(report),
        remedy=_remedy(report),
        details={
            "library": report.library.path,
            "library_problem": report.library.problem,
            "devices": list(report.devices),
            "ports": [
                {
                    "device": port.device,
                    "port": port.number,
                    "state": port.state,
                    "link_layer": port.link_layer,
                    "rate": port.rate,
                }
                for port in report.ports
            ],
            "device_files": None if report.device_files is None else list(report.device_files),
            "memlock_nbytes": report.memlock_nbytes,
        },
    )


def _reason(report: VerbsReport) -> str:
    from kvxfer.verbs.probe import memlock_text

    if not report.devices:
        return f"{report.device_text}; {report.library}"
    files = (
        "/dev/infiniband does not exist"
        if report.device_files is None
        else f"{len(report.device_files)} files in /dev/infiniband"
    )
    return (
        f"this release of kvxfer carries data over shm and tcp; found {report.device_text}, {files}, {report.library}, "
        f"locked-memory limit {memlock_text(report.memlock_nbytes)}"
    )


def _remedy(report: VerbsReport) -> str:
    if not report.devices:
        return (
            "Nothing to do: kvxfer uses shm on one host and tcp between hosts; this release carries no data over rdma."
        )
    return (
        "Use shm on one host and tcp between hosts; over IPoIB or the RoCE network tcp takes the same cable: pass "
        "host= with the address of that interface."
    )
