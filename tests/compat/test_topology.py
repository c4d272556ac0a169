"""Which devices are near which memory, as Mooncake's callers are told."""

from __future__ import annotations

from pathlib import Path

from kvxfer.compat.mooncake.topology import build_matrix, numa_nodes


def test_device_is_preferred_for_memory_of_its_node() -> None:  # B30
    assert build_matrix({"mlx_0": 0, "mlx_1": 1}, [0, 1]) == {
        "cpu:0": [["mlx_0"], ["mlx_1"]],
        "cpu:1": [["mlx_1"], ["mlx_0"]],
    }


def test_device_of_unknown_node_is_near_all_memory() -> None:  # B31: numa_node is -1 in a virtual machine
    assert build_matrix({"mlx_0": None}, [0, 1]) == {"cpu:0": [["mlx_0"], []], "cpu:1": [["mlx_0"], []]}


def test_machine_that_names_no_node_has_one(tmp_path: Path) -> None:  # B31
    assert numa_nodes(tmp_path) == [0]
    for name in ("node0", "node1", "nodes", "has_cpu"):
        (tmp_path / "sys/devices/system/node" / name).mkdir(parents=True)
    assert numa_nodes(tmp_path) == [0, 1]
