"""Which RDMA devices are near which memory, in Mooncake's form: {"cpu:0": [[preferred], [others]], ...}.

Callers read it to learn whether there is any RDMA device at all, so one that cannot carry data is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvxfer import ConfigError, EngineConfig, KvxferError
from kvxfer.text import show
from kvxfer.transports.rdma_nic import open_nics

__all__ = ["NO_TOPOLOGY", "build_matrix", "local_topology", "numa_nodes"]

NO_TOPOLOGY = '{"cpu:0": [[], []]}\n'


def local_topology(config: EngineConfig, environment: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return the JSON text. MC_CUSTOM_TOPO_JSON names a file that is returned instead; raises ConfigError where it
    cannot be read, or is no JSON.

    The devices are opened for it and closed again. None can be used: every list is empty.
    """
    custom = environment.get("MC_CUSTOM_TOPO_JSON")
    if custom:
        try:
            text = Path(custom).read_text()
            json.loads(text)
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"MC_CUSTOM_TOPO_JSON names {show(custom)}, which cannot be used: {exc}.",
                remedy='Put a file there such as {"cpu:0": [["mlx5_0"], []]}, or unset the variable.',
                variable="MC_CUSTOM_TOPO_JSON",
                value=custom,
            ) from exc
        return text
    matrix = build_matrix(_find_devices(config), numa_nodes(root))
    return json.dumps(matrix, indent="\t") + "\n"


def build_matrix(devices: Mapping[str, int | None], nodes: list[int]) -> dict[str, list[list[str]]]:
    """Return the lists for each NUMA node. devices: the node of each, None where it is not known: near to all."""
    return {
        f"cpu:{node}": [
            [name for name, its in devices.items() if its in (None, node)],
            [name for name, its in devices.items() if its not in (None, node)],
        ]
        for node in nodes
    }


def _find_devices(config: EngineConfig) -> dict[str, int | None]:
    try:
        survey = open_nics(config)
    except KvxferError:
        return {}
    found = {nic.context.name: nic.numa_node for nic in survey.nics}
    survey.close()
    return found


def numa_nodes(root: Path) -> list[int]:
    """Return the NUMA nodes of this machine; one where the kernel names none."""
    folder = root / "sys/devices/system/node"
    nodes = [entry.name[4:] for entry in folder.glob("node[0-9]*")] if folder.is_dir() else []
    return sorted(int(node) for node in nodes if node.isdecimal()) or [0]
