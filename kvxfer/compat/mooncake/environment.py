"""Mooncake's environment variables: which of them mean something here, and what becomes of it.

`VARIABLES` is the one list; the table of docs/mooncake.md is checked against it. Pure but for `warn_of_ignored`, which
tells once in a process what is set in vain. Read next: `settings.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from kvxfer.errors import ConfigError
from kvxfer.log import get_logger

__all__ = ["VARIABLES", "is_on", "read_number", "warn_of_ignored"]

Number = TypeVar("Number", int, float)

VARIABLES: dict[str, str] = {
    "MC_TRANSFER_TIMEOUT": "seconds a transfer may take, at least 5, and 1 ns for each byte; 30 if not set",
    "MC_FORCE_TCP": "set to anything: tcp (and shm) whatever protocol is asked for; no RDMA device is opened",
    "MC_MIN_RPC_PORT": "least port to listen on; 15000 if not set (MC_MIN_PRC_PORT is read too)",
    "MC_MAX_RPC_PORT": "highest port to listen on; 17000 if not set (MC_MAX_PRC_PORT is read too)",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "seconds to connect to a peer: connect_timeout_s",
    "MC_HANDSHAKE_PORT": "with MC_LEGACY_RPC_PORT_BINDING the port to listen on where the host name has none",
    "MC_LEGACY_RPC_PORT_BINDING": "set to anything, with a metadata server: listen on the port of the host name",
    "MC_TCP_BIND_ADDRESS": "with a metadata server: the address that is told to peers",
    "MC_USE_IPV6": "set to anything: listen on IPv6 as well",
    "MC_LOG_LEVEL": "level of the `kvxfer` logger of `logging`: TRACE, INFO, WARNING or ERROR; on stderr where no "
    "logging is configured",
    "MC_CUSTOM_TOPO_JSON": "file that get_local_topology returns",
    "MC_TE_FILTERS": "RDMA devices to use where device_name is empty: rdma_devices",
    "MC_IB_PORT": "the one port of each RDMA device to use; every active one if not set",
    "MC_GID_INDEX": "row of the GID table: gid_index",
    "NCCL_IB_GID_INDEX": "the same, where MC_GID_INDEX is not set",
    "MC_PKEY_INDEX": "row of the partition key table: pkey_index",
    "MC_NUM_QP_PER_EP": "queue pairs for each two NICs to a real Mooncake, which must have as many; 2 if not set",
    "MC_MTU": "upper bound on the path MTU: path_mtu_nbytes_max",
    "MC_MAX_WR": "requests in one send queue: rdma_send_depth",
    "MC_IB_TC": "traffic class: rdma_traffic_class",
    "MC_IB_SL": "service level: rdma_service_level",
    "MC_MAX_MR_SIZE": "longest memory region on a device: rdma_chunk_nbytes_max",
    "MC_METADATA_CLUSTER_ID": "part of the keys on a metadata server",
    "MC_REDIS_USERNAME": "user at a redis server",
    "MC_REDIS_PASSWORD": "password at a redis server",
    "MC_REDIS_DB_INDEX": "database of a redis server",
    "MC_TCP_LANES_PER_PEER": "data connections to one peer over tcp: tcp_streams_max",
}
"""What is honoured, and as what. The settings of kvxfer's own that are named here win where both are set."""

IGNORED: dict[str, str] = {
    "MC_TCP_PROTO": "the version is what the peer's descriptor says",
    "MC_NUM_CQ_PER_CTX": "queues are sized by what is in flight",
    "MC_NUM_COMP_CHANNELS_PER_CTX": "whoever waits for a batch looks for its completions",
    "MC_MAX_CQE_PER_CTX": "queues are sized by what is in flight",
    "MC_MAX_EP_PER_CTX": "a connection is there as long as its segment",
    "MC_MAX_SGE": "one piece of memory for each request",
    "MC_MAX_INLINE": "blocks are not sent inline",
    "MC_AUTO_GID_MAX_RETRIES": "GIDs are chosen with the peer, from both tables",
    "MC_WORKERS_PER_CTX": "there are no worker threads",
    "MC_SLICE_SIZE": "rows are cut only at the borders of memory regions and messages",
    "MC_FRAGMENT_RATIO": "as MC_SLICE_SIZE",
    "MC_RETRY_CNT": "rdma_retry_count, and other rails",
    "MC_MIN_REG_SIZE": "of another transport",
    "MC_ENABLE_PARALLEL_REG_MR": "large regions are registered in parallel by themselves",
    "MC_MAX_CONCURRENT_REG_MR": "as MC_ENABLE_PARALLEL_REG_MR",
    "MC_IB_PCI_RELAXED_ORDERING": "relaxed ordering is not asked for",
    "MC_MLX5_QP_UDP_SPORTS": "needs mlx5dv",
    "MC_MLX5_QP_LAG_PORT_BALANCE": "needs mlx5dv",
    "MC_ENABLE_DEST_DEVICE_AFFINITY": "rails are paired by reachability",
    "MC_ENABLE_HCA_PEER_AFFINITY": "as MC_ENABLE_DEST_DEVICE_AFFINITY",
    "MC_NIC_PEER_AFFINITY": "as MC_ENABLE_DEST_DEVICE_AFFINITY; rdma_peer_devices chooses",
    "MC_PATH_ROUNDROBIN": "a batch goes over all rails",
    "MC_ENDPOINT_STORE_TYPE": "a connection is there as long as its segment",
    "MC_RDMA_RAIL_PAUSE_SECONDS": "a rail that broke is tried again at the next use",
    "MC_CONN_PAUSE_TTL_MS": "as MC_RDMA_RAIL_PAUSE_SECONDS",
    "MC_SLICE_TIMEOUT": "the deadline is the batch's",
    "MC_TRACK_RDMA_POSTED_SLICES": "diagnostics of Mooncake's",
    "MC_LOG_RDMA_SLICE_AFFINITY": "diagnostics of Mooncake's",
    "MC_RDMA_BIND_ADDRESS": "the control address and the NICs do not depend on each other",
    "MC_HANDSHAKE_LISTEN_BACKLOG": "1024",
    "MC_HANDSHAKE_MAX_LENGTH": "up to 128 MiB is taken",
    "MC_DISABLE_METACACHE": "nothing is kept that the peer does not take back",
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "as MC_DISABLE_METACACHE",
    "MC_FORCE_HCA": 'protocol "rdma" means it',
    "MC_FORCE_MNNVL": "of another transport",
    "MC_INTRANODE_NVLINK": "of another transport",
    "MC_INTRA_NVLINK": "of another transport",
    "WITH_NVIDIA_PEERMEM": "GPU memory is refused",
    "MC_TCP_ENABLE_CONNECTION_POOL": "connections are always kept",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "a batch waits for its turn, however long it is",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "as MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "as MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER",
    "MC_TCP_SLICE_SIZE": "the kernel is given whole batches",
    "MC_TCP_STATUS_TIMEOUT_SEC": "the deadline is the batch's",
    "MC_LOG_DIR": "the application's logging decides",
    "MC_TE_METRIC": "no metrics yet",
    "MC_TE_METRIC_INTERVAL_SECONDS": "as MC_TE_METRIC",
    "MC_USE_TENT": "another engine of Mooncake's",
    "MC_USE_TEV1": "as MC_USE_TENT",
    "MC_TENT_CONF": "as MC_USE_TENT",
}
"""What is ignored, and why nothing is lost by that."""

PREFIX = "MC_"
OLD_NAMES = ("MC_MIN_PRC_PORT", "MC_MAX_PRC_PORT")
CLOSE_ENOUGH = 0.85
"""What `difflib` makes of a letter left out, doubled or swapped in a name of ten. No variable of Mooncake's own that is
not listed here comes as close (those of 0.3.13 were compared), nor do Midnight Commander's or MinIO's MC_ ones."""

_reported: set[str] = set()


def warn_of_ignored(environment: Mapping[str, str]) -> None:
    """Log, once in a process, which variables are set in vain: those of IGNORED, and misspelt ones."""
    found = {name: IGNORED[name] for name in IGNORED if name in environment} | _find_misspelt(environment)
    told = {name: why for name, why in found.items() if name not in _reported}
    if told:
        _reported.update(told)
        get_logger(__name__).warning("mooncake.variables_ignored", variables=told)


def _find_misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose names are close to a known one; others that begin with MC_ are somebody else's."""
    known = {name for name in (*VARIABLES, *IGNORED, *OLD_NAMES) if name.startswith(PREFIX)}
    words = [name.removeprefix(PREFIX) for name in known]  # with it any two names look alike
    found = {}
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            guesses = difflib.get_close_matches(name.removeprefix(PREFIX), words, 1, CLOSE_ENOUGH)
            if guesses:
                found[name] = f"not known: did you mean {PREFIX}{guesses[0]}?"
    return found


def is_on(environment: Mapping[str, str], name: str) -> bool:
    """Whether a switch of kvxfer's own is on: set, and not to 0, false, no or off."""
    return environment.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def read_number(
    environment: Mapping[str, str], names: tuple[str, ...], default: Number, low: Number, high: Number
) -> Number:
    """Return the number that the first of these variables holds; the default where none is set.

    Raises ConfigError for one that is no number, or out of range.
    """
    name = next((one for one in names if one in environment), None)
    if name is None:
        return default
    text = environment[name]
    try:
        value = type(default)(text)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        raise ConfigError(
            f"the environment variable {name} is {text!r}; it takes {low:g} to {high:g}.",
            remedy=f"Set it to such a value, or unset it for the default {default:g}.",
            variable=name,
            value=text,
        )
    return value
