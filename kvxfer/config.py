"""Every setting of an engine: its unit, its default, its environment variable and where the default comes from.

Order of precedence: an argument of `TransferEngine`, then the environment, then the default. Some settings are also
taken from a variable of Mooncake that means the same, after kvxfer's own. A value that cannot be meant raises
ConfigError when the configuration is made, and names the setting, the value, the range and where the value came from.
`settings()` is the one table of settings: docs/settings.md is made from it. Read next: `setting.py`, one row of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.addresses import check_advertised_host, check_host
from kvxfer.errors import ConfigError
from kvxfer.log import get_logger
from kvxfer.rdma_names import (
    ATTRIBUTE_SETTINGS,
    DevicePort,
    GidIndex,
    PortValues,
    parse_attributes,
    parse_devices,
    parse_gid_index,
    parse_interface,
    parse_subnet,
)
from kvxfer.setting import PREFIX, Setting, count, seconds, setting
from kvxfer.text import format_count, name_kind, show

__all__ = ["EngineConfig", "closest_variable"]

TRANSPORT_NAMES = ("shm", "rdma", "tcp")
CLOSE = 0.75  # difflib's ratio of PROT and PORT: below it two short names have hardly more than a letter in common
KEY_NBYTES_MIN = 8  # what a person would not guess at one attempt per connection
OTHER_VARIABLES = frozenset(
    {
        "KVXFER_ALLOW_FALLBACK",
        "KVXFER_ALLOW_PTRACE",
        "KVXFER_CI_INTEROP",
        "KVXFER_CI_OTHER_PYTHONS",
        "KVXFER_LIBIBVERBS",
        "KVXFER_TRACEBACK",
        "KVXFER_UML_KERNEL",
    }
)
"""Variables that are not settings of an engine: of the drop-in, the loader, the command line, and the project's own
tests (tests/lab, .ci)."""

_reported: set[str] = set()  # unknown variables that have been warned of: once in a process, not once an engine


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _split(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of one engine; `settings()` lists them with unit, range and source."""

    host: str = setting(
        "an address or a name, without a port",
        "127.0.0.1",
        "address or name to listen on",
        "reachable from this host only, until told otherwise",
        convert=check_host,
    )
    port: int = count(
        "port", 0, "port to listen on; 0 takes any free one", "no two engines ever clash", low=0, high=65535
    )
    advertise_host: str | None = setting(
        "an address or a name, without a port",
        None,
        "address told to peers",
        "derived from host and the routes",
        convert=check_advertised_host,
    )
    name: str | None = setting("text", None, "name told to peers", "the engine's address")
    transports: tuple[str, ...] = setting(
        "names", TRANSPORT_NAMES, "transports in order of preference", "fastest first on each distance", parse=_split
    )
    key: bytes | None = setting(
        "bytes, at least 8",
        None,
        "pre-shared key; both sides need the same",
        "no authentication",
        parse=os.fsencode,
        secret=True,
    )
    transfer_timeout_s: float = seconds(30.0, "deadline of a batch", "the peers' own: Mooncake 30 s")
    connect_timeout_s: float = seconds(5.0, "time to connect to a peer, with retries", "a peer restarts in less")
    handshake_timeout_s: float = seconds(
        5.0, "time for a handshake, and for an answer on the control connection", "as connect_timeout_s"
    )
    unregister_timeout_s: float = seconds(5.0, "time peers have to let go of a region", "as connect_timeout_s")
    close_timeout_s: float = seconds(2.0, "bound on close()", "a person waits that long")
    keepalive_interval_s: float = seconds(
        2.0, "silence after which a peer is asked for a sign of life", "a dead peer is noticed in seconds"
    )
    keepalive_timeout_s: float = seconds(
        10.0,
        "silence after which a peer counts as dead",
        "longer than a pause of garbage collection or a debugger's step",
    )
    tcp_socket_buffer_nbytes: int = count(
        "bytes",
        262144,
        "socket buffers of data connections; 0 leaves them to the kernel",
        "measured on loopback, bench/README.md",
        low=0,
        high=1 << 30,
    )
    tcp_streams_max: int = count(
        "connections", 4, "data connections to one peer", "one for each batch that moves at once", low=1, high=256
    )
    tcp_idle_timeout_s: float = seconds(
        60.0, "idle time after which a data connection is closed", "below the usual 5 minutes of firewalls"
    )
    tcp_service_threads: int = count(
        "threads", 2, "threads that serve peers over tcp", "one batch takes one", low=1, high=256
    )
    tcp_connections_max: int = count(
        "connections", 4096, "data connections of all peers", "half of a usual limit on open files", low=1, high=1 << 20
    )
    spin_s: float = setting(
        "s", 50e-6, "time to look again before sleeping", "about what a wake-up costs", low=0.0, high=0.01, parse=float
    )
    shm_copy_threads: int = count(
        "threads",
        lambda: min(2, _usable_cpus()),
        "threads that copy one batch by process_vm_*",
        "measured: 0.68 to 0.83 of memcpy",
        low=1,
        high=64,
    )
    notify_nbytes_max: int = count("bytes", 1 << 20, "longest notification", "messages, not data", low=0, high=1 << 20)
    notifications_pending_max: int = count(
        "notifications", 65536, "notifications kept unread", "bounds memory", low=1, high=1 << 24
    )
    connections_max: int = count(
        "connections", 4096, "control connections of peers", "as tcp_connections_max", low=1, high=1 << 20
    )
    rdma_devices: tuple[DevicePort, ...] | None = setting(
        "devices, such as 'mlx5_0:2,mlx5_1'",
        None,
        "RDMA devices, or single ports of them, to use",
        "every port that is active",
        synonyms=("MC_TE_FILTERS",),
        convert=parse_devices,
    )
    rdma_peer_devices: tuple[DevicePort, ...] | None = setting(
        "devices, such as 'mlx5_0:2,mlx5_1'",
        None,
        "RDMA devices, or single ports of them, of a peer to connect to",
        "every port that the peer offers",
        convert=parse_devices,
    )
    gid_index: GidIndex | None = setting(
        "a row from 0 to 255, or one for each device, such as 'mlx5_1:3,mlx5_2:6', or -1, which leaves the choice",
        None,
        "row of the GID table to use",
        "chosen with the peer from both tables; `kvxfer devices` says why",
        synonyms=("MC_GID_INDEX",),
        convert=parse_gid_index,
    )
    gid_interface: str | None = setting(
        "an interface, such as eth0", None, "network interface whose GIDs are preferred", "any", convert=parse_interface
    )
    gid_subnet: ipaddress.IPv4Network | ipaddress.IPv6Network | None = setting(
        "a subnet, such as 192.0.2.0/24", None, "subnet whose GIDs are preferred", "any", convert=parse_subnet
    )
    pkey_index: int | None = count(
        "index",
        None,
        "row of the partition key table to use on InfiniBand",
        "the first row of a full member, as UCX has it",
        low=0,
        high=65535,
        synonyms=("MC_PKEY_INDEX",),
    )
    path_mtu_nbytes_max: int = count(
        "bytes",
        4096,
        "upper bound on the path MTU of RDMA; the active MTUs of both ports are bounds as well",
        "the largest there is",
        low=256,
        high=4096,
        synonyms=("MC_MTU",),
        choices=(256, 512, 1024, 2048, 4096),
    )
    rdma_read_depth: int = count(
        "requests",
        16,
        "READs of one queue pair on their way at once; the devices' limits are bounds as well",
        "perftest's and Mooncake's value; more brings nothing at 64 KiB",
        low=1,
        high=255,
    )
    rdma_send_depth: int = count(
        "requests",
        256,
        "requests that wait in one send queue; the device's max_qp_wr is a bound as well",
        "UCX's and Mooncake's value",
        low=2,
        high=32768,
        synonyms=("MC_MAX_WR",),
    )
    rdma_fences_max: int = count(
        "fences",
        64,
        "notifications that may be on their way behind the bytes of one queue pair, a receive for each; 0: all go by "
        "the control connection alone",
        "the receives and completions fit a page; more would be threads that notify one peer at once",
        low=0,
        high=4096,
    )
    rdma_timeout: int = count(
        "exponent",
        18,
        "time an acknowledgement may take, 4.096 us * 2**exponent for each try",
        "1.07 s: longer than a link's flap; NCCL's value since 2.14",
        low=1,
        high=31,
    )
    rdma_retry_count: int = count(
        "tries",
        6,
        "how often a packet that is not acknowledged is sent again",
        "7 is for ever on some devices, soft RoCE among them",
        low=0,
        high=7,
    )
    rdma_hop_limit: int = count(
        "hops", 64, "routers that a RoCE packet may cross", "the usual TTL of IP", low=1, high=255
    )
    rdma_traffic_class: int = count(
        "number",
        0,
        "traffic class (DSCP and ECN) of RoCE packets",
        "none marked",
        low=0,
        high=255,
        synonyms=("MC_IB_TC",),
    )
    rdma_service_level: int = count(
        "number",
        0,
        "service level of packets",
        "the default level",
        low=0,
        high=15,
        synonyms=("MC_IB_SL",),
    )
    rdma_attributes: PortValues | None = setting(
        "attributes of devices or ports, such as 'mlx5_0:read_depth=1,mlx5_1:2:path_mtu=1024'",
        None,
        f"what single devices or ports here have in place of the settings for all: {', '.join(ATTRIBUTE_SETTINGS)}",
        "all as the settings above",
        convert=parse_attributes,
    )
    rdma_chunk_nbytes_max: int | None = count(
        "bytes",
        None,
        "longest memory region on a device, whatever the device says: some say less than they take, some more",
        "the device's max_mr_size",
        low=1 << 16,
        high=1 << 62,
        synonyms=("MC_MAX_MR_SIZE",),
    )

    def __post_init__(self) -> None:
        if isinstance(self.key, str):
            with contextlib.suppress(UnicodeError):  # what cannot be bytes is refused below
                object.__setattr__(self, "key", os.fsencode(self.key))
        object.__setattr__(self, "transports", self.check_transports(self.transports))
        for row in self.settings():
            object.__setattr__(self, row.name, row.check(getattr(self, row.name)))
        self._check_attributes()
        if self.key is not None and len(self.key) < KEY_NBYTES_MIN:
            raise ConfigError(
                f"key has {format_count(len(self.key), 'byte')}; it takes at least {KEY_NBYTES_MIN}.",
                remedy="Use 32 random ones, such as `openssl rand -hex 32` prints.",
                setting="key",
            )
        if self.keepalive_timeout_s <= self.keepalive_interval_s:
            raise ConfigError(
                f"keepalive_timeout_s {self.keepalive_timeout_s:g} is not above keepalive_interval_s "
                f"{self.keepalive_interval_s:g}.",
                remedy="A peer must have been asked before it counts as dead.",
                setting="keepalive_timeout_s",
                other_setting="keepalive_interval_s",
                value=self.keepalive_timeout_s,
            )

    def _check_attributes(self) -> None:
        """Raise ConfigError for an attribute of a device that is outside the range of the setting for all."""
        rows = {row.name: row for row in self.settings()}
        for where, name, value in self.rdma_attributes.rows if self.rdma_attributes else ():
            row = rows[ATTRIBUTE_SETTINGS[name]]
            if not row.low <= value <= row.high or (row.choices and value not in row.choices):
                raise ConfigError(
                    f"rdma_attributes has {where}:{name}={value}; {name} takes {row.allowed}.",
                    remedy=f"{row.meaning[:1].upper()}{row.meaning[1:]}; for all devices it is {row.name}.",
                    setting="rdma_attributes",
                    value=value,
                )

    def rdma_attribute(self, name: str, device: str, port: int) -> int:
        """Return an attribute of queue pairs (a key of ATTRIBUTE_SETTINGS) as it is set for a port here."""
        given = self.rdma_attributes.of(name, device, port) if self.rdma_attributes else None
        return int(getattr(self, ATTRIBUTE_SETTINGS[name])) if given is None else given

    @classmethod
    def settings(cls) -> list[Setting]:
        """Return the table of settings."""
        return list(_rows())

    @classmethod
    def resolve(cls, *, environment: Mapping[str, str] | None = None, **arguments: Any) -> EngineConfig:
        """Return the configuration of an engine: arguments, then the environment, then defaults."""
        environment = os.environ if environment is None else environment
        rows = {row.name: row for row in cls.settings()}
        for name in arguments:
            if name not in rows:
                words = set(name.split("_"))
                near = ", ".join(row for row in rows if words <= set(row.split("_"))) or _closest(name, rows)
                hint = f"; did you mean {near}?" if near else "."
                raise ConfigError(
                    f"there is no setting {name!r}{hint}",
                    remedy="EngineConfig.settings() lists all.",
                    setting=name,
                )
        for unknown in cls.unknown_variables(environment):
            if unknown not in _reported:
                _reported.add(unknown)
                near = closest_variable(unknown)
                hint = f"did you mean {near}?" if near else ""
                get_logger(__name__).warning("config.unknown_variable", variable=unknown, hint=hint)
        values = dict(arguments)
        variables = {}
        for row in rows.values():
            variable = row.find_variable(environment)
            if row.name not in arguments and variable is not None:
                values[row.name] = row.read_variable(variable, environment[variable])
                variables[row.name] = variable
        try:
            config = cls(**values)
        except ConfigError as error:
            raise _with_sources(error, rows, arguments, environment) from None
        object.__setattr__(config, "_variables", variables)
        return config

    def source_of(self, name: str) -> str:
        """Return what set a setting: an environment variable, or the setting's own name for an argument or default."""
        variables: dict[str, str] = getattr(self, "_variables", {})
        return variables.get(name, name)

    @classmethod
    def unknown_variables(cls, environment: Mapping[str, str] | None = None) -> list[str]:
        """Return the KVXFER_* variables that no setting has."""
        environment = os.environ if environment is None else environment
        known = {row.variable for row in cls.settings()} | OTHER_VARIABLES
        return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)

    @staticmethod
    def check_transports(names: Sequence[str] | str) -> tuple[str, ...]:
        """Return the names as a tuple; raises ConfigError for an unknown, a doubled, or no name."""
        what = ""
        listed: tuple[str, ...] = ()
        try:
            listed = _split(names) if isinstance(names, str) else tuple(names)
        except TypeError:
            what = f"transports is {name_kind(names)}, not names"
        unknown = [name for name in listed if not (isinstance(name, str) and name in TRANSPORT_NAMES)]
        if unknown:
            what = f"there is no transport {show(unknown[0])}"
        elif len(set(listed)) != len(listed):
            what = f"transports is {show(names)}, which names one twice"
        elif not listed:
            what = what or f"transports is {show(names)}, which names none"
        if what:
            raise ConfigError(
                f"{what}; available: {', '.join(TRANSPORT_NAMES)}.",
                remedy="Name one or more of these, in order of preference, such as ('shm', 'tcp').",
                setting="transports",
                value=listed,
            )
        return listed


def closest_variable(name: str) -> str:
    """Return the KVXFER_* variable that an unknown one may be meant for; "" where none is close."""
    known = [row.variable for row in EngineConfig.settings()] + sorted(OTHER_VARIABLES)
    near = _closest(name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known])  # with it all look alike
    return near and PREFIX + near


@functools.cache
def _rows() -> tuple[Setting, ...]:
    rows = []
    for field in dataclasses.fields(EngineConfig):
        row: Setting = field.metadata["setting"]
        default = row.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        rows.append(dataclasses.replace(row, name=field.name, default=default))
    return tuple(rows)


def _with_sources(
    error: ConfigError, rows: Mapping[str, Setting], arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> ConfigError:
    """Return the error with where each value it speaks of came from."""
    told = []
    variable = None
    for name in (error.values.get("setting"), error.values.get("other_setting")):
        if name is None:
            continue
        if name in arguments:
            told.append(f"{name} was given as an argument")
        elif (found := rows[name].find_variable(environment)) is not None:
            variable = variable or found
            told.append(f"{name} comes from the environment variable {found}")
        else:
            told.append(f"{name} is the default")
    message = f"{error.message[:-1]} ({', '.join(told)})."
    return ConfigError(message, remedy=error.remedy, **{**error.values, "variable": variable})


def _closest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is close to another; "" where none is."""
    import difflib  # for a message only

    return next(iter(difflib.get_close_matches(name, list(known), 1, CLOSE)), "")
