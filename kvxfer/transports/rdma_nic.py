"""One RDMA port of this host, open: what it offers to peers, its memory keys, and what happens to it.

`open_nics` opens every port that the settings allow and that carries data, and says of each other one why not.
Read next: `rdma_rail.py`, which is one of them with a port of the peer; `rdma_watch.py`, which finds those that come
up later.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.errors import DeviceUnusableError, KvxferError, RegistrationError
from kvxfer.log import get_logger
from kvxfer.memory.chunks import CHUNK_DTYPE
from kvxfer.memory.registration import register
from kvxfer.system.interfaces import Interface, list_interfaces
from kvxfer.transports.rdma_attributes import PortAttributes
from kvxfer.transports.rdma_keys import KeyTable
from kvxfer.verbs.device import AsyncEvent, Context, Port, list_devices
from kvxfer.verbs.enums import Access, EventType, GidType, PortState
from kvxfer.verbs.gid_candidate import GidCandidate
from kvxfer.verbs.gid_choice import GidChoice, GidPreference, choose_gid
from kvxfer.verbs.library import VerbsLibrary
from kvxfer.verbs.partition import Partition, choose_partition
from kvxfer.verbs.port import check_wanted, judge_ports
from kvxfer.verbs.port_offer import PortOffer
from kvxfer.verbs.sysfs import SysfsDevice

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.verbs.completion_queue import CompletionQueue
    from kvxfer.verbs.protection_domain import ProtectionDomain

__all__ = ["Nic", "NicSurvey", "close_devices", "find_nics", "open_nics"]

TRIAL_NBYTES = 1 << 20
"""Registered and given back when a device is opened: no KV cache is smaller."""

log = get_logger(__name__)


@dataclass(frozen=True)
class NicSurvey:
    """What `open_nics` found.

    refusals: for each port that is not used, or each device, the reason. warnings: what a person should know of: a port
    that was wanted and is not used, a choice that may not carry. contexts: the devices that are open: those of `nics`,
    and those of which a port may come up later. remedy: what to do about a device that takes no memory, or "".
    """

    nics: tuple[Nic, ...]
    refusals: dict[str, str]
    warnings: dict[str, str]
    contexts: tuple[Context, ...]
    remedy: str = ""

    def close(self, on_error: Callable[[KvxferError], None] = lambda error: None) -> None:
        """Close the devices with everything that was made from them."""
        close_devices(self.contexts, on_error)


class Nic:
    """One port of one device, ready to carry data. All methods may be called from any thread."""

    def __init__(
        self,
        context: Context,
        domain: ProtectionDomain,
        port: Port,
        config: EngineConfig,
        interfaces: Sequence[Interface] | None,
    ) -> None:
        self.context = context
        self.domain = domain
        self.port = port
        self.name = f"{context.name}:{port.number}"
        self.numa_node = SysfsDevice(context.name, context.device.root).numa_node
        """None where it is not known: near to all memory."""
        limits = context.limits
        self.kind = f"{limits.vendor_id:#x}/{limits.vendor_part_id}/{limits.fw_ver}"
        """Vendor, part and firmware: devices of one kind take the same attributes."""
        self.attributes = PortAttributes.of(config, limits, context.name, port.number)
        self.fences_max = min(config.rdma_fences_max, limits.max_qp_wr, limits.max_cqe)
        """Fences that may be on their way on one queue pair of it; 0 for none."""
        self.is_down = False
        """Whether its port went down, or the device was removed, since it was opened."""
        self.nbytes_sent = 0
        self._config = config
        self._lock = threading.Lock()
        self._rows: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self._keys: KeyTable | None = None
        self.choice: GidChoice = self._choose(interfaces)
        self.partition: Partition = choose_partition(context, port, config.pkey_index)
        self._passive_queue: CompletionQueue | None = None

    def offer(self) -> PortOffer:
        """Return what a peer is told of the port."""
        return PortOffer.of(
            self.port,
            self.choice.offered,
            read_depth=self.attributes.read_depth,
            pkey=self.partition.pkey,
            mtu_nbytes_max=self.attributes.path_mtu_nbytes_max,
            numa_node=self.numa_node,
        )

    def refresh(self) -> None:
        """Look at the port, its partition and its GIDs again: links flap, and what a table has moves to other rows."""
        self.port = self.context.query_port(self.port.number)
        self.partition = choose_partition(self.context, self.port, self._config.pkey_index)
        self.choice = self._choose(_find_interfaces())
        self.is_down = self.port.state is not PortState.ACTIVE

    def find_candidate(self, value: bytes, kind: GidType) -> GidCandidate | None:
        """Return the candidate with this GID of this type, with the row where it is now."""
        return next((one for one in self.choice.offered if (one.value, one.type) == (value, kind)), None)

    def _choose(self, interfaces: Sequence[Interface] | None) -> GidChoice:
        config = self._config
        preference = GidPreference.of(config, self.context.name)
        return choose_gid(self.context.query_gid_table(self.port.number), interfaces, preference)

    # Memory.

    def local_keys(self) -> KeyTable:
        """Return the local keys of all registered memory."""
        keys = self._keys
        if keys is None:
            with self._lock:
                rows = [row for chunks in self._rows.values() for row in chunks]
                keys = self._keys = KeyTable.of_rows(rows) if rows else _EMPTY
        return keys

    def add_keys(self, address: int, nbytes: int, rows: list[tuple[int, int, int]]) -> None:
        """Note the chunks (address, nbytes, lkey) of a region that was registered."""
        with self._lock:
            self._rows[address, nbytes] = rows
            self._keys = None

    def remove_keys(self, address: int, nbytes: int) -> None:
        """Forget a region."""
        with self._lock:
            self._rows.pop((address, nbytes), None)
            self._keys = None

    # Events.

    def note_event(self, event: AsyncEvent) -> None:
        """Take an event of the device into account; one of another port of it is none of ours."""
        kind = event.type
        if event.port not in (0, self.port.number):
            return
        log.info("rdma.event", nic=self.name, kind=str(kind), port=event.port, qp_num=event.qp_num)
        if kind in (EventType.PORT_ERR, EventType.DEVICE_FATAL):
            self.is_down = True
            with contextlib.suppress(KvxferError):  # a device that is gone tells nothing
                self.port = self.context.query_port(self.port.number)
            log.warning("rdma.port_down", nic=self.name, kind=str(kind))
        elif kind in (EventType.PORT_ACTIVE, EventType.GID_CHANGE, EventType.LID_CHANGE):
            try:
                self.refresh()
            except KvxferError as error:  # not back after all
                log.warning("rdma.port_down", nic=self.name, kind=str(kind), error=error.message)
                self.is_down = True

    def passive_queue(self) -> CompletionQueue:
        """Return the completion queue of queue pairs that send nothing: nothing ever completes on it."""
        with self._lock:
            if self._passive_queue is None:
                self._passive_queue = self.context.create_cq(1)
            return self._passive_queue

    def close(self) -> None:
        """Give back what it alone has; the device stays open, with what other ports of it have."""
        with self._lock:
            if self._passive_queue is not None:
                self._passive_queue.close()

    def __repr__(self) -> str:
        return f"<Nic {self.name} {self.choice.best}>"


_EMPTY = KeyTable(np.zeros(0, CHUNK_DTYPE), np.zeros(0, np.uint32))


def open_nics(config: EngineConfig, library: VerbsLibrary | None = None, root: Path = Path("/")) -> NicSurvey:
    """Open every port that the settings allow and that carries data.

    Raises VerbsUnavailableError where RDMA cannot be used at all, DeviceNotFoundError where the settings name only
    devices that are not here. What cannot be used is left out, with its reason in `refusals`.
    """
    devices = list_devices(library, root=root)
    names = [device.name for device in devices]
    wanted = config.rdma_devices
    nics: list[Nic] = []
    refusals: dict[str, str] = {}
    warnings: dict[str, str] = {}
    remedy = ""
    if wanted is not None:
        if not any(item.device in names for item in wanted):
            check_wanted(wanted, names)
        for item in wanted:
            if item.device not in names:
                refusals[str(item)] = warnings[str(item)] = f"there is no such device; there is {', '.join(names)}"
    contexts: list[Context] = []
    for device in devices:
        context: Context | None = None
        try:
            context = device.open()
            found = find_nics(context, config)
        except KvxferError as error:
            refusals[device.name] = warnings[device.name] = error.message
            if context is not None:
                context.close()
            continue
        nics += found.nics
        refusals |= found.refusals
        warnings |= found.warnings
        remedy = remedy or found.remedy
        contexts += found.contexts
        if not found.contexts:
            context.close()
    return NicSurvey(tuple(nics), refusals, warnings, tuple(contexts), remedy)


def find_nics(context: Context, config: EngineConfig, used: Sequence[Nic] = ()) -> NicSurvey:
    """Return what `open_nics` does, of one open device. used: those of its ports that are open already, left out.

    Raises VerbsError where the device does not do what every device must; nothing of this call is left then.
    """
    refusals: dict[str, str] = {}
    warnings: dict[str, str] = {}
    nics: list[Nic] = []
    numbers = [nic.port.number for nic in used]
    ports = [port for port in context.ports() if port.number not in numbers]
    verdicts = judge_ports(
        ports, context.device.transport_type, config.rdma_devices, vendor_id=context.limits.vendor_id
    )
    refusals |= {f"{context.name}:{one.port.number}": one.reason for one in verdicts if not one.is_usable}
    usable = [one.port for one in verdicts if one.is_usable]
    remedy = ""
    if usable:
        interfaces = _find_interfaces()
        domain = used[0].domain if used else context.alloc_pd()
        try:
            if not used:
                _try_registration(domain)
            for port in usable:
                try:
                    nic = Nic(context, domain, port, config, interfaces)
                    nic.passive_queue()  # one that cannot make a completion queue is of no use
                    nics.append(nic)
                    if nic.choice.warning:
                        warnings[nic.name] = nic.choice.warning
                except DeviceUnusableError as error:
                    refusals[f"{context.name}:{port.number}"] = error.message
                    warnings[f"{context.name}:{port.number}"] = error.message
        except RegistrationError as error:
            for port in usable:
                refusals[f"{context.name}:{port.number}"] = error.message
                warnings[f"{context.name}:{port.number}"] = f"{error.message} {error.remedy}"
            remedy = error.remedy
        except BaseException:
            for nic in nics:
                nic.close()
            if not used:
                domain.close()
            raise
        if not nics and not used:
            domain.close()
    may_carry = bool(usable) or any(one.may_change for one in verdicts)
    return NicSurvey(tuple(nics), refusals, warnings, (context,) if may_carry else (), remedy)


def _try_registration(domain: ProtectionDomain) -> None:
    """Raise RegistrationError where a device takes no memory at all: with too low a limit of locked memory no region
    could ever be registered, also for those who would do with another transport."""
    with mmap.mmap(-1, TRIAL_NBYTES) as memory:
        view = np.frombuffer(memory, np.uint8)
        address = int(view.__array_interface__["data"][0])
        del view
        access = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
        register([domain], address, TRIAL_NBYTES, access).close()


def _find_interfaces() -> Sequence[Interface] | None:
    """Return the interfaces of this host; None where the kernel does not tell them now (EMFILE, a sandbox)."""
    try:
        return list_interfaces()
    except OSError as error:
        log.warning("rdma.interfaces_unknown", error=str(error))
        return None


def close_devices(contexts: Sequence[Context], on_error: Callable[[KvxferError], None] = lambda error: None) -> None:
    """Close devices with everything that was made from them."""
    for context in contexts:
        try:
            context.close()
        except KvxferError as error:
            on_error(error)
