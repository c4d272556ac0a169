"""Look at every RDMA device of this machine: what it is, what its ports are like, which GIDs kvxfer would use and why.

Opens each device and closes it again; makes nothing on it. `kvxfer devices` and the doctor show what is found here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer.errors import DeviceUnusableError, KvxferError
from kvxfer.system.interfaces import Interface, IpAddress, list_interfaces
from kvxfer.transports.rdma_attributes import PortAttributes
from kvxfer.verbs.device import Context, Device, DeviceLimits, Port, list_devices
from kvxfer.verbs.gid import GidTable, format_gid, read_gid_table
from kvxfer.verbs.gid_candidate import GidCandidate, find_candidates
from kvxfer.verbs.gid_choice import GidChoice, GidPreference, choose_gid
from kvxfer.verbs.partition import DEFAULT_PKEY, Partition, choose_partition, read_partitions
from kvxfer.verbs.port import NOT_WANTED, check_wanted, judge_ports
from kvxfer.verbs.port_offer import PortOffer
from kvxfer.verbs.rails import find_shared_gids
from kvxfer.verbs.routes import Route, find_route
from kvxfer.verbs.sysfs import SysfsDevice

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.verbs.library import VerbsLibrary

__all__ = ["DeviceSurvey", "GidRow", "PortSurvey", "find_warnings", "survey_device", "survey_devices"]


ANY_SIZE_NBYTES = 1 << 50
UNUSED = "would be chosen, but the port is not used"


@dataclass(frozen=True)
class GidRow:
    """One row of a GID table as it is shown. route: to the address that was asked about."""

    index: int
    candidate: GidCandidate
    verdict: str
    is_chosen: bool
    is_usable: bool
    route: Route | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        one = self.candidate
        found: dict[str, Any] = {
            "index": self.index,
            "gid": format_gid(one.value),
            "type": str(one.type),
            "netdev": one.netdev,
            "netdev_state": one.state.name.lower(),
            "family": "infiniband" if one.is_infiniband else f"ipv{one.address.version}",
            "scope": str(one.scope),
            "prefix_nbits": one.prefix_nbits,
            "is_vlan": one.is_vlan,
            "chosen": self.is_chosen,
            "usable": self.is_usable,
            "verdict": self.verdict,
        }
        if self.route is not None:
            found["route"] = {"reachable": self.route.is_reachable, "how": str(self.route)}
        return found


@dataclass(frozen=True)
class PortSurvey:
    """One port.

    attributes: what its queue pairs would begin with. is_carrier: it could carry data, whatever its GIDs and
    partitions. problem: why kvxfer cannot use it, or "".
    partition: the row of its partition key table that is used. partitions: all rows that are in use.
    interfaces: those that its GIDs are addresses of.
    """

    port: Port
    attributes: PortAttributes
    is_carrier: bool
    problem: str
    warning: str
    rate: str
    table: GidTable
    choice: GidChoice | None
    partition: Partition | None
    partitions: tuple[Partition, ...]
    rows: tuple[GidRow, ...]
    interfaces: tuple[Interface, ...]

    @property
    def is_wanted(self) -> bool:
        """Whether the settings allow it."""
        return self.problem != NOT_WANTED

    @property
    def name(self) -> str:
        """As settings name it: mlx5_0:1."""
        return f"{self.port.device}:{self.port.number}"

    def to_json(self) -> dict[str, Any]:
        """Return the port as a JSON object."""
        port = self.port
        return {
            "port": port.number,
            "usable": not self.problem,
            "problem": self.problem,
            "warning": self.warning,
            "state": str(port.state),
            "link_layer": str(port.link_layer),
            "lid": port.lid,
            "sm_lid": port.sm_lid,
            "mtu_active": port.active_mtu.nbytes,
            "mtu_max": port.max_mtu.nbytes,
            "gbps": port.gbps,
            "rate": self.rate,
            "max_msg_sz": port.max_msg_sz,
            "attributes": dataclasses.asdict(self.attributes),
            "gid_tbl_len": port.gid_tbl_len,
            "pkey_tbl_len": port.pkey_tbl_len,
            "needs_grh": port.needs_grh,
            "gid_index": self.choice.index if self.choice else None,
            "pkeys": [
                {"index": one.index, "pkey": f"{one.pkey:#06x}", "full": one.is_full, "chosen": one == self.partition}
                for one in self.partitions
            ],
            "gids": [row.to_json() for row in self.rows],
            "interfaces": [
                {
                    "name": one.name,
                    "up": one.is_usable,
                    "mtu": one.mtu,
                    "kind": one.kind,
                    "addresses": list(map(str, one.addresses)),
                }
                for one in self.interfaces
            ],
        }


@dataclass(frozen=True)
class DeviceSurvey:
    """One device. problem: why it could not be opened, with remedy; then it has no limits and no ports.

    region_nbytes_max: the longest memory that is registered with it at once.
    """

    device: Device
    sysfs: SysfsDevice
    problem: str = ""
    remedy: str = ""
    limits: DeviceLimits | None = None
    region_nbytes_max: int = 0
    ports: tuple[PortSurvey, ...] = ()

    @property
    def name(self) -> str:
        """The name of the device."""
        return self.device.name

    @property
    def takes_any_size(self) -> bool:
        """Whether its limit on a region is none that memory could reach."""
        return self.region_nbytes_max >= ANY_SIZE_NBYTES

    def to_json(self) -> dict[str, Any]:
        """Return the device as a JSON object."""
        return {
            "device": self.name,
            "guid": self.device.guid,
            "node_type": str(self.device.node_type),
            "transport_type": str(self.device.transport_type),
            "firmware": self.sysfs.firmware,
            "pci_address": self.sysfs.pci_address,
            "numa_node": self.sysfs.numa_node,
            "device_file": str(self.device.device_file),
            "problem": self.problem,
            "remedy": self.remedy,
            "limits": dataclasses.asdict(self.limits) if self.limits else None,
            "ports": [port.to_json() for port in self.ports],
        }


def survey_devices(
    config: EngineConfig,
    library: VerbsLibrary | None = None,
    *,
    root: Path = Path("/"),
    destination: IpAddress | None = None,
) -> list[DeviceSurvey]:
    """Return what is known of every device. destination: an address to look for routes to, from each GID.

    Raises VerbsUnavailableError where RDMA cannot be used at all, DeviceNotFoundError where the settings name a device
    that is not here.
    """
    devices = list_devices(library, root=root)
    if config.rdma_devices is not None:
        check_wanted(config.rdma_devices, [device.name for device in devices])
    try:
        interfaces: tuple[Interface, ...] | None = list_interfaces(root)
    except OSError:
        interfaces = None
    return [survey_device(device, config, interfaces, root=root, destination=destination) for device in devices]


def survey_device(
    device: Device,
    config: EngineConfig,
    interfaces: Sequence[Interface] | None,
    *,
    root: Path = Path("/"),
    destination: IpAddress | None = None,
) -> DeviceSurvey:
    """Return what is known of one device; never raises for what is wrong with it."""
    sysfs = SysfsDevice(device.name, root)
    try:
        with device.open() as context:
            verdicts = judge_ports(
                context.ports(), device.transport_type, config.rdma_devices, vendor_id=context.limits.vendor_id
            )
            ports = tuple(
                _survey_port(context, verdict.port, verdict.reason, sysfs, config, interfaces, destination)
                for verdict in verdicts
            )
            region_nbytes_max = config.rdma_chunk_nbytes_max or context.limits.max_mr_size
            return DeviceSurvey(device, sysfs, limits=context.limits, region_nbytes_max=region_nbytes_max, ports=ports)
    except KvxferError as error:
        return DeviceSurvey(device, sysfs, problem=error.message, remedy=error.remedy)


def find_warnings(found: Sequence[DeviceSurvey]) -> list[str]:
    """Return what is odd about the ports together: those that share an address."""
    offers = [
        PortOffer.of(one.port, one.choice.offered, read_depth=one.attributes.read_depth, pkey=DEFAULT_PKEY)
        for device in found
        for one in device.ports
        if one.choice is not None and not one.problem
    ]
    return find_shared_gids(offers)


def _survey_port(
    context: Context,
    port: Port,
    problem: str,
    sysfs: SysfsDevice,
    config: EngineConfig,
    interfaces: Sequence[Interface] | None,
    destination: IpAddress | None,
) -> PortSurvey:
    table = read_gid_table(context, port, interfaces)
    is_carrier = not problem
    choice = partition = None
    try:
        partition = choose_partition(context, port, config.pkey_index)
    except DeviceUnusableError as error:
        problem = problem or error.reason
    try:
        choice = choose_gid(table, interfaces, GidPreference.of(config, context.name))
        rows = [
            GidRow(one.index, one.candidate, one.reason, one.candidate is choice.best, one.is_usable)
            for one in choice.verdicts
        ]
        if problem:
            rows = [dataclasses.replace(row, verdict=UNUSED, is_chosen=False) if row.is_chosen else row for row in rows]
    except DeviceUnusableError as error:
        problem = problem or error.reason
        rows = [GidRow(one.index or 0, one, "not used", False, False) for one in find_candidates(table, interfaces)]
    if destination is not None:
        rows = [dataclasses.replace(row, route=_find_route(row.candidate, destination)) for row in rows]
    names = {row.candidate.netdev for row in rows}
    return PortSurvey(
        port=port,
        attributes=PortAttributes.of(config, context.limits, context.name, port.number),
        is_carrier=is_carrier,
        problem=problem,
        warning=choice.warning if choice else "",
        rate=sysfs.rate(port.number).replace("Gb/sec", "Gb/s") or (f"{port.gbps:g} Gb/s" if port.gbps else ""),
        table=table,
        choice=choice,
        partition=partition,
        partitions=tuple(read_partitions(context, port)),
        rows=tuple(rows),
        interfaces=tuple(one for one in interfaces or () if one.name in names),
    )


def _find_route(candidate: GidCandidate, destination: IpAddress) -> Route:
    if candidate.is_infiniband:
        return Route("InfiniBand has no routes by address")
    return find_route(candidate.address, destination, interface=candidate.netdev)
