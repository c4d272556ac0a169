"""What `initialize` was given becomes the settings of an engine, and the engine.

`open_engine` is the one way in. Where RDMA is asked for and there is no device for it, it says which were looked at and
why none will do, and fails: see docs/mooncake.md, "Without an RDMA device". Read next: `engine.py`.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer import ConfigError, DeviceNotFoundError, EngineConfig, Probe, TransferEngine
from kvxfer.addresses import is_wildcard, parse_host_port
from kvxfer.compat.mooncake.environment import is_on, read_number
from kvxfer.log import get_logger
from kvxfer.system.calls import permit_ptrace
from kvxfer.transport_set import TransportSet
from kvxfer.transports.shm import ptrace_remedy, ptrace_scope

__all__ = ["P2P", "Wish", "listen_ports", "open_engine", "queue_pair_count", "transfer_timeout_s"]

P2P = "P2PHANDSHAKE"
ALLOW_FALLBACK = "KVXFER_ALLOW_FALLBACK"
ALLOW_PTRACE = "KVXFER_ALLOW_PTRACE"
PORT_RANGE = (15000, 17000)  # Mooncake's
PORT_TRIES = 500  # Mooncake's
LANES = 4  # Mooncake's
QUEUE_PAIRS = 2  # Mooncake's
HANDSHAKE_PORT = 12001  # Mooncake's
TIMEOUT_S, TIMEOUT_S_MIN, TIMEOUT_S_MAX = 30.0, 5.0, 86000.0  # the first two are Mooncake's
CONNECT_TIMEOUT_S = 5.0  # Mooncake's
KEEPALIVE_ADDED_S = 10.0
"""A peer that is silent because a call there holds the GIL is not dead before transfers to it have had their time."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Wish:
    """What `initialize` was given."""

    local_hostname: str
    metadata_server: str
    protocol: str
    device_name: str

    @property
    def is_p2p(self) -> bool:
        """Whether peers are asked for their memory, and no server."""
        return self.metadata_server == P2P

    @property
    def host(self) -> str:
        """The host of `local_hostname`, as it was written; without brackets and port."""
        return _split(self.local_hostname)[0]

    @property
    def port(self) -> int | None:
        """Its port, if it has one."""
        return _split(self.local_hostname)[1]


def transfer_timeout_s(environment: Mapping[str, str]) -> float:
    """Return how long a transfer may take, without what its bytes add."""
    return max(TIMEOUT_S_MIN, read_number(environment, ("MC_TRANSFER_TIMEOUT",), TIMEOUT_S, 0.0, TIMEOUT_S_MAX))


def queue_pair_count(environment: Mapping[str, str]) -> int:
    """Return how many queue pairs a real Mooncake is asked for between two NICs: as many as it has itself."""
    return read_number(environment, ("MC_NUM_QP_PER_EP",), QUEUE_PAIRS, 1, 255)


def listen_ports(environment: Mapping[str, str]) -> list[int]:
    """Return the ports to try, in random order: processes that start at the same time begin at different ones."""
    low = read_number(environment, ("MC_MIN_RPC_PORT", "MC_MIN_PRC_PORT"), PORT_RANGE[0], 1, 65535)
    high = read_number(environment, ("MC_MAX_RPC_PORT", "MC_MAX_PRC_PORT"), max(low, PORT_RANGE[1]), 1, 65535)
    if high < low:
        raise ConfigError(
            f"the ports to listen on end, at {high}, before they begin, at {low}.",
            remedy=f"Set MC_MIN_RPC_PORT ({PORT_RANGE[0]} if not set) to at most MC_MAX_RPC_PORT.",
            low=low,
            high=high,
        )
    return random.sample(range(low, high + 1), min(PORT_TRIES, high + 1 - low))


def open_engine(wish: Wish, environment: Mapping[str, str]) -> TransferEngine:
    """Return a running engine as `initialize` asks for it.

    Raises ConfigError for what cannot be meant; DeviceNotFoundError where RDMA is asked for, no device can carry it and
    nothing allows another transport.
    """
    protocol = "tcp" if "MC_FORCE_TCP" in environment else wish.protocol
    if protocol not in ("tcp", "rdma"):
        raise ConfigError(
            f"there is no protocol {wish.protocol!r} here; available: tcp, rdma.",
            remedy='Use "rdma" for RDMA devices of any maker, "tcp" without; both use shared memory on one host.',
            setting="protocol",
            value=wish.protocol,
        )
    wants_rdma = protocol == "rdma"
    timeout_s = transfer_timeout_s(environment)
    settings: dict[str, Any] = {
        "host": _listen_host(wish.host, environment),
        "transfer_timeout_s": timeout_s,
        "keepalive_timeout_s": timeout_s + KEEPALIVE_ADDED_S,
        "transports": ("shm", "rdma") if wants_rdma else ("shm", "tcp"),
        "connect_timeout_s": read_number(
            environment, ("MC_HANDSHAKE_CONNECT_TIMEOUT",), CONNECT_TIMEOUT_S, 0.001, 86400.0
        ),
        **(_rdma_settings(wish.device_name, environment) if wants_rdma else {}),
    }
    if "MC_TCP_LANES_PER_PEER" in environment:
        settings["tcp_streams_max"] = read_number(environment, ("MC_TCP_LANES_PER_PEER",), LANES, 1, 256)
    if wants_rdma and is_on(environment, ALLOW_FALLBACK):
        settings["transports"] += ("tcp",)
    advertised = wish.host if wish.is_p2p else environment.get("MC_TCP_BIND_ADDRESS", wish.host)
    if advertised and not is_wildcard(advertised):
        settings["advertise_host"] = advertised
    settings = {name: value for name, value in settings.items() if f"KVXFER_{name.upper()}" not in environment}
    config = EngineConfig.resolve(**settings)
    needs_rdma = wants_rdma and "rdma" in config.transports and "tcp" not in config.transports
    if needs_rdma and config.rdma_devices is not None:  # before an engine warns of what the error will tell
        _check_device(wish, TransportSet(config).probe())
    engine = _listen(settings, wish, environment)
    if needs_rdma and "rdma" not in engine.transports:
        try:
            _check_device(wish, engine.probe())
        finally:
            engine.close()
    refusal = engine._transports.refusals.get("rdma")
    if wants_rdma and refusal is not None and config.rdma_devices is None:  # else the engine has told
        names = engine.transports
        log.warning("mooncake.rdma_unusable", reason=refusal.reason, remedy=refusal.remedy, transports=names)
    if "transports" in settings:  # peers on other hosts have no shm, and nobody asked for it
        engine._transports.asked_for = frozenset({"rdma"} if wants_rdma and refusal is None else ())
    if is_on(environment, ALLOW_PTRACE):
        _allow_ptrace()
    return engine


def _check_device(wish: Wish, probes: list[Probe]) -> None:
    """Raise what is told of the probe of RDMA, if no device can be used."""
    probe = next(one for one in probes if one.transport == "rdma")
    if not probe.usable:
        raise _no_device(wish, probe)


def _allow_ptrace() -> None:
    scope = ptrace_scope()
    code = permit_ptrace() if scope == 1 else 0
    if code or scope not in (None, 0, 1):
        reason = (
            f"prctl(PR_SET_PTRACER) failed: {os.strerror(-code)}" if code else f"kernel.yama.ptrace_scope is {scope}"
        )
        log.warning("mooncake.ptrace_refused", reason=reason, remedy=ptrace_remedy(scope or 0))


def _no_device(wish: Wish, probe: Probe) -> DeviceNotFoundError:
    named = f" (device_name {wish.device_name!r})" if wish.device_name else ""
    reason = probe.reason.rstrip(".")
    return DeviceNotFoundError(
        f'protocol "rdma"{named} cannot be had on this machine: {reason}.',
        remedy=f'{probe.remedy} Or ask for protocol "tcp" (vLLM: kv_connector_extra_config {{"mooncake_protocol": '
        f'"tcp"}}), or set {ALLOW_FALLBACK}=1 to go on over tcp.'.strip(),
        protocol=wish.protocol,
        reasons=dict(probe.details.get("refusals", {})),
    )


def _split(local_hostname: str) -> tuple[str, int | None]:
    text = local_hostname.strip()
    if text.count(":") > 1 and not text.startswith("["):
        return text, None  # an IPv6 address as it is
    try:
        found = parse_host_port(text, -1)
    except ConfigError:
        return text, None
    return found.host, None if found.port < 0 else found.port


def _listen_host(host: str, environment: Mapping[str, str]) -> str:
    """Return the wildcard to listen on, as Mooncake does: "::" takes IPv4 as well."""
    try:
        is_ipv6 = ipaddress.ip_address(host.partition("%")[0]).version == 6
    except ValueError:
        is_ipv6 = False
    return "::" if (is_ipv6 or "MC_USE_IPV6" in environment) and socket.has_ipv6 else "0.0.0.0"


def _rdma_settings(device_name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that device_name, MC_IB_PORT and NCCL_IB_GID_INDEX make."""
    from kvxfer.verbs.sysfs import list_sysfs_devices

    settings: dict[str, Any] = {}
    if "NCCL_IB_GID_INDEX" in environment and "MC_GID_INDEX" not in environment:
        settings["gid_index"] = read_number(environment, ("NCCL_IB_GID_INDEX",), -1, -1, 255)
    named = device_name or environment.get("MC_TE_FILTERS", "")
    wanted = [item.strip() for item in named.split(",") if item.strip()]
    present = [device.name for device in list_sysfs_devices()]
    here = [item for item in wanted if item.partition(":")[0] in present]
    if here and len(here) < len(wanted):
        absent = [item for item in wanted if item not in here]
        log.warning("mooncake.devices_absent", absent=absent, used=here, present=present)
        wanted = here
    if "MC_IB_PORT" in environment:
        port = read_number(environment, ("MC_IB_PORT",), 1, 1, 255)
        wanted = [item if ":" in item else f"{item}:{port}" for item in wanted or present]
    if wanted:
        settings["rdma_devices"] = ",".join(dict.fromkeys(wanted))
    return settings


def _listen(settings: dict[str, Any], wish: Wish, environment: Mapping[str, str]) -> TransferEngine:
    """Return an engine on a port of the range that is free."""
    if "KVXFER_PORT" in environment:
        return TransferEngine(**settings)
    if not wish.is_p2p and "MC_LEGACY_RPC_PORT_BINDING" in environment:
        port = wish.port or read_number(environment, ("MC_HANDSHAKE_PORT",), HANDSHAKE_PORT, 1, 65535)
        return TransferEngine(**settings, port=port)
    ports = listen_ports(environment)
    for port in ports:
        try:
            return TransferEngine(**settings, port=port)
        except ConfigError as error:
            if error.values.get("errno") != errno.EADDRINUSE:
                raise
            last = error
    raise ConfigError(
        f"none of the {len(ports)} ports that were tried, from {min(ports)} to {max(ports)}, is free.",
        remedy="Widen the range (MC_MIN_RPC_PORT, MC_MAX_RPC_PORT), or end what listens there (ss -ltnp).",
        errno=errno.EADDRINUSE,
    ) from last
