"""Which node memory lies on, and which one a process is bound to. Bnn: faults that other engines had."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvxfer.system import numa
from kvxfer.system.numa import find_memory_node, find_process_node

NBYTES = 1 << 20


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """A machine with two nodes whose memory this process may take; it runs on all CPUs of both."""
    cpus = sorted(os.sched_getaffinity(0))
    machine(tmp_path, "0-1", "0-1", [",".join(map(str, cpus)), "4096-4099"])
    return tmp_path


def machine(root: Path, online: str, allowed: str, cpus: list[str]) -> None:
    folder = root / "sys/devices/system/node"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "online").write_text(f"{online}\n")
    for node, text in enumerate(cpus):
        (folder / f"node{node}").mkdir(exist_ok=True)
        (folder / f"node{node}/cpulist").write_text(f"{text}\n")
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/status").write_text(f"Name:\tx\nMems_allowed_list:\t{allowed}\n")


def answer(monkeypatch: pytest.MonkeyPatch, *nodes: int) -> None:
    """Let the kernel answer these nodes, over and over; none at all: it refuses."""
    monkeypatch.setattr(
        numa, "_ask", lambda pages: [nodes[at % len(nodes)] for at in range(len(pages))] or None if nodes else None
    )


def test_the_kernel_knows_where_memory_is_that_was_touched() -> None:
    memory = np.ones(NBYTES, np.uint8)
    told = numa._ask(np.array([memory.ctypes.data // 4096 * 4096], np.uint64))
    if told is None:
        pytest.skip("this kernel, or container, does not answer move_pages(2)")

    assert find_memory_node(memory.ctypes.data, NBYTES) in told


@pytest.mark.parametrize(("nodes", "found"), [((1,), 1), ((0, 0, 0, 1), 0), ((0, 1), None), ((0, 0, 1), None)], ids=str)
def test_memory_is_on_the_node_that_three_quarters_of_it_are_on(
    monkeypatch: pytest.MonkeyPatch, two_nodes: Path, nodes: tuple[int, ...], found: int | None
) -> None:
    answer(monkeypatch, *nodes)

    assert find_memory_node(1 << 30, NBYTES, two_nodes) == found


def test_memory_that_is_not_there_yet_is_on_no_node(monkeypatch: pytest.MonkeyPatch, two_nodes: Path) -> None:
    monkeypatch.setattr(numa, "_ask", lambda pages: [])

    assert find_memory_node(1 << 30, NBYTES, two_nodes) is None


def test_a_kernel_that_does_not_answer_leaves_the_one_node_that_memory_may_come_from(
    monkeypatch: pytest.MonkeyPatch, two_nodes: Path
) -> None:
    """A container without CAP_SYS_NICE."""
    answer(monkeypatch)
    before = find_memory_node(1 << 30, NBYTES, two_nodes)
    machine(two_nodes, "0-1", "1", [])

    assert before is None
    assert find_memory_node(1 << 30, NBYTES, two_nodes) == 1


def test_a_process_is_on_the_node_of_all_its_cpus_or_of_its_memory(two_nodes: Path) -> None:
    assert find_process_node(two_nodes) == 0  # node 1 has CPUs that it may not run on
    machine(two_nodes, "0-1", "1", [])
    assert find_process_node(two_nodes) == 1
    cpu = min(os.sched_getaffinity(0))
    machine(two_nodes, "0-1", "0-1", [str(cpu), str(cpu)])
    assert find_process_node(two_nodes) is None


def test_a_machine_that_tells_nothing_has_no_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """B31."""
    answer(monkeypatch)

    assert find_process_node(tmp_path) is None
    assert find_memory_node(1 << 30, NBYTES, tmp_path) is None
