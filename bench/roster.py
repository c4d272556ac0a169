"""Who takes part: how each contender is started, what it lacks here, and which ratios are asked of whom.

Tables and look-ups only; `peers.py` starts and measures them, `report.py` prints what came out.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from processes import BENCH_FOLDER

PEERS_FOLDER: Final = BENCH_FOLDER / ".peers"  # filled by install_peers.sh


@dataclass(frozen=True)
class Contender:
    """One way to move the blocks.

    settings, environment: what its module's peer gets besides side, name and pool_nbytes.
    needs: a file under bench/, the package's folder in the tree or a program in PATH, without which it cannot run.
    spins_when_idle: its threads poll without sleeping, so it is stopped while others are measured.
    """

    name: str
    module: str
    needs: Path | str
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    has_target: bool = True
    carries_data: bool = True
    has_latency: bool = True
    spins_when_idle: bool = False

    def is_installed(self) -> bool:
        return self.needs.exists() if isinstance(self.needs, Path) else shutil.which(self.needs) is not None


def _kvxfer(name: str, transport: str, memory: str) -> Contender:
    settings = {"transport": transport, "memory": memory}
    return Contender(name, "contenders.kvxfer_peer", BENCH_FOLDER.parent / "kvxfer" / "__init__.py", settings)


def _memcpy(name: str, memory: str) -> Contender:
    settings = {"memory": memory}
    return Contender(name, "contenders.memcpy_peer", "cc", settings, has_target=False, has_latency=False)


def _nixl(name: str, *, is_tuned: bool, environment: Mapping[str, str]) -> Contender:
    python = PEERS_FOLDER / "nixl" / "bin" / "python"
    return Contender(
        name,
        "contenders.nixl_peer",
        python,
        {"is_tuned": is_tuned},
        {"UCX_LOG_LEVEL": "error", **environment},
        python=str(python),
        spins_when_idle=True,
    )


_MOONCAKE_PYTHON = PEERS_FOLDER / "mooncake" / "bin" / "python"

CONTENDERS: Final = {
    contender.name: contender
    for contender in (
        _kvxfer("kvxfer-shm", "shm", "allocated"),
        _kvxfer("kvxfer-shm-any", "shm", "anonymous"),
        _kvxfer("kvxfer-tcp", "tcp", "allocated"),
        _memcpy("memcpy-shared", "shared"),
        _memcpy("memcpy-anonymous", "anonymous"),
        Contender("mooncake-tcp", "contenders.mooncake_peer", _MOONCAKE_PYTHON, python=str(_MOONCAKE_PYTHON)),
        _nixl("nixl-default-tuned", is_tuned=True, environment={}),
        _nixl("nixl-default-installed", is_tuned=False, environment={}),
        _nixl("nixl-tcp-tuned", is_tuned=True, environment={"UCX_TLS": "tcp"}),
        _nixl("nixl-tcp-installed", is_tuned=False, environment={"UCX_TLS": "tcp"}),
        Contender("iperf3", "contenders.iperf3_peer", "iperf3", carries_data=False, has_latency=False),
    )
}


_TREE = BENCH_FOLDER.parent
_SHIM = _TREE / "kvxfer" / "compat" / "shim"


def _drop_in(name: str, *, is_async: bool = False, **environment: str) -> Contender:
    """Mooncake's contender, with kvxfer under Mooncake's name."""
    path = os.pathsep.join(str(folder) for folder in (_SHIM, BENCH_FOLDER, _TREE))
    environment = {"PYTHONPATH": path, **environment}
    settings = {"is_async": is_async}
    return Contender(name, "contenders.mooncake_peer", _SHIM / "mooncake" / "engine.py", settings, environment)


DROP_INS: Final = {
    contender.name: contender
    for contender in (
        _drop_in("drop-in"),
        _drop_in("drop-in-tcp", KVXFER_TRANSPORTS="tcp"),
        CONTENDERS["mooncake-tcp"],
        _drop_in("drop-in-async", is_async=True),
        _drop_in("drop-in-tcp-async", is_async=True, KVXFER_TRANSPORTS="tcp"),
        dataclasses.replace(CONTENDERS["mooncake-tcp"], name="mooncake-tcp-async", settings={"is_async": True}),
    )
}
"""Who takes part in `dropin.py`."""

for _busy in ("python", "numpy"):
    for _name in ("drop-in", "drop-in-tcp", "mooncake-tcp"):
        DROP_INS[f"{_name}-{_busy}"] = dataclasses.replace(
            DROP_INS[_name], name=f"{_name}-{_busy}", settings={"busy": _busy}, spins_when_idle=True
        )


@dataclass(frozen=True)
class Pair:
    """`who / rival`, and the least ratio asked for by workload; a workload without one is printed without judgement."""

    who: str
    rival: str
    required: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.who} / {self.rival}"


PAIRS: Final = (
    Pair("kvxfer-shm", "memcpy-shared", {"64KiB": 0.9, "4KiB": 0.5}),
    Pair("kvxfer-shm", "nixl-default-tuned", {"64KiB": 1.1, "4KiB": 1.6}),
    Pair("kvxfer-shm", "nixl-default-installed", {"64KiB": 2.3, "4KiB": 5.0}),
    Pair("kvxfer-shm-any", "memcpy-anonymous", {"64KiB": 0.8, "4KiB": 0.5}),
    Pair("kvxfer-shm-any", "nixl-default-tuned"),
    Pair("kvxfer-tcp", "mooncake-tcp", {"64KiB": 1.9, "4KiB": 9.0}),
    Pair("kvxfer-tcp", "nixl-tcp-tuned", {"64KiB": 1.2, "4KiB": 3.5}),
    Pair("kvxfer-tcp", "nixl-tcp-installed", {"64KiB": 2.5, "4KiB": 8.0}),
    Pair("kvxfer-tcp", "iperf3", {"64KiB": 1.0, "4KiB": 0.9}),
    Pair("drop-in", "mooncake-tcp", {"64KiB": 3.5, "4KiB": 9.0}),
    Pair("drop-in-tcp", "mooncake-tcp", {"64KiB": 1.9, "4KiB": 9.0}),
    Pair("drop-in-async", "mooncake-tcp-async", {"64KiB": 3.5, "4KiB": 9.0}),
    Pair("drop-in-tcp-async", "mooncake-tcp-async", {"64KiB": 1.9, "4KiB": 9.0}),
    *(
        Pair(f"{who}-{busy}", f"mooncake-tcp-{busy}", {"64KiB": 1.0, "4KiB": 1.0})
        for busy in ("python", "numpy")
        for who in ("drop-in", "drop-in-tcp")
    ),
)

LATENCY_REQUIRED_US: Final = {"kvxfer-shm": 3.0, "kvxfer-shm-any": 6.0}  # the most the median transfer may take
EIGHT_PEERS_REQUIRED: Final = {"tcp": 1.1, "shm": 1.0}  # 8 targets at once / one target
