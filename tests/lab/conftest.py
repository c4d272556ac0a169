"""In which guest a test of the lab runs, and that none is passed over there.

A test that needs a device is marked `rdma` and `topology("wire", ...)`: the guests in which it runs, by the names of
topologies/*.sh; `machine="qemu"` or "uml" where it needs that kernel. `make lab` boots a guest for each topology and
runs the tests meant for it; the others are deselected. Outside the lab they are skipped; in the lab a skip fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TOPOLOGIES = sorted({path.stem for path in (HERE / "topologies").glob("*.sh")} - {"common"})
# Set in a guest. Not KVXFER_...: engines warn of such variables where they do not know them.
TOPOLOGY = os.environ.get("LAB_TOPOLOGY", "")
MACHINE = os.environ.get("LAB_MACHINE", "")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "topology(*names, machine=''): the guests of the lab in which a test runs; see tests/lab/conftest.py"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here, elsewhere = [], []
    for item in items:
        if HERE not in item.path.parents or item.get_closest_marker("rdma") is None:
            here.append(item)
            continue
        if not TOPOLOGY:
            item.add_marker(pytest.mark.skip(reason="runs in a guest with soft-RoCE devices: make lab"))
        (here if not TOPOLOGY or _is_meant_for_this_guest(item) else elsewhere).append(item)
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = here


def _is_meant_for_this_guest(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("topology")
    if marker is None or not marker.args:
        raise pytest.UsageError(f"{item.nodeid} does not say in which guest it runs: @pytest.mark.topology(...)")
    unknown = set(marker.args) - set(TOPOLOGIES)
    if unknown:
        raise pytest.UsageError(f"{item.nodeid}: no topology {sorted(unknown)}; there are {TOPOLOGIES}")
    return TOPOLOGY in marker.args and marker.kwargs.get("machine", MACHINE) == MACHINE


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if TOPOLOGY and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped in the lab, where every test must run: {report.longrepr}"


def pytest_report_header() -> str:
    return f"lab: topology {TOPOLOGY}, {MACHINE}" if TOPOLOGY else "lab: not in a guest"


@pytest.fixture(scope="session")
def topology() -> str:
    """The name of this guest's topology."""
    return TOPOLOGY
