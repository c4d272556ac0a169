"""What happens to RDMA devices while an engine lives: their events, and ports that were down, or not there, at first.

A port that comes up raises an event of its device, which is open for that; a device that appears is seen when a peer is
opened, or opens us. Taking a port into use may take long (all memory is registered with its device), so that a thread
does it, which lives no longer than that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer.errors import KvxferError, VerbsError
from kvxfer.log import get_logger
from kvxfer.transports.rdma_nic import Nic, NicSurvey, close_devices, find_nics
from kvxfer.verbs.device import Context, Device, list_devices
from kvxfer.verbs.enums import EventType
from kvxfer.verbs.sysfs import list_sysfs_devices

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.transports.loop import Handler, Loop
    from kvxfer.verbs.library import VerbsLibrary

__all__ = ["PortWatch"]

CARRYING = (EventType.PORT_ACTIVE, EventType.GID_CHANGE, EventType.LID_CHANGE)
"""After which a port may carry data that did not before."""

log = get_logger(__name__)


class PortWatch:
    """The open devices of one engine, and whoever looks after them. All methods may be called from any thread.

    take: takes a new port into use, in the watch's own thread; what it raises keeps the port out.
    """

    def __init__(
        self,
        survey: NicSurvey,
        config: EngineConfig,
        loop: Loop,
        source: tuple[VerbsLibrary | None, Path],
        take: Callable[[Nic], None],
    ) -> None:
        self._config = config
        self._loop = loop
        self._library, self._root = source
        self._take = take
        self._lock = threading.Lock()
        self._contexts: list[Context] = []
        self._nics = list(survey.nics)
        self._readers: list[Handler] = []
        self._known = {one.name for one in list_sysfs_devices(self._root)} | {one.name for one in survey.contexts}
        """Devices that were there when somebody looked, used or not; none is ever opened twice."""
        self._told = dict(survey.warnings)
        self._thread: threading.Thread | None = None
        self._is_wanted = False
        self._is_closed = False
        for context in survey.contexts:
            self._add(context)

    def nics_of(self, context: Context) -> list[Nic]:
        """Return the ports of a device that are in use."""
        return [nic for nic in self._nics if nic.context is context]

    def look_for_devices(self) -> None:
        """Have a device taken into use that is new here. Costs the listing of one folder."""
        if not {one.name for one in list_sysfs_devices(self._root)} <= self._known:
            self.look_soon()

    def look_for_port(self, device: str, port: int) -> None:
        """Have a port taken into use that may carry data now, unless the settings leave it out."""
        wanted = self._config.rdma_devices
        if wanted is None or any(item.includes(device, port) for item in wanted):
            self.look_soon()

    def look_soon(self) -> None:
        """Have all ports looked at that are not in use."""
        with self._lock:
            self._is_wanted = True
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="kvxfer-ports", daemon=True)
                self._thread.start()

    @property
    def contexts(self) -> list[Context]:
        """The open devices."""
        with self._lock:
            return list(self._contexts)

    def stop(self, timeout_s: float) -> bool:
        """Look after nothing any more; whether nothing of this touches a device when it returns."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            thread = self._thread
        are_removed = threading.Event()

        def remove_readers() -> None:
            for reader in self._readers:
                self._loop.remove(reader)
            are_removed.set()

        self._loop.call_soon(remove_readers)
        if self._loop.is_running and not self._loop.is_current:
            are_removed.wait(timeout_s)  # the loop may be reading an event of a device that is closed next
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
            return not thread.is_alive()
        return True

    def _add(self, context: Context) -> None:
        with self._lock:
            self._contexts.append(context)
        self.add_reader(_EventReader(context, self))

    def add_reader(self, reader: Handler) -> None:
        """Have the loop look after a descriptor of a device, until `stop`."""
        with self._lock:
            if not self._is_closed:
                self._readers.append(reader)
                self._loop.call_soon(lambda: self._loop.add(reader))

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_wanted or self._is_closed:
                    self._thread = None
                    return
                self._is_wanted = False
            try:
                self._look()
            except Exception as error:  # a bug: the next event starts another thread
                log.error("rdma.port_doubtful", port="", warning=repr(error))

    def _look(self) -> None:
        for context in self.contexts:
            with contextlib.suppress(VerbsError):  # it is gone, or refuses what every device must do: it stays out
                self._use(find_nics(context, self._config, self.nics_of(context)))
        for device in self._find_new():
            try:
                self._use_device(device)
            except KvxferError as error:
                log.warning("rdma.port_doubtful", port=device.name, warning=error.message)

    def _use_device(self, device: Device) -> None:
        context = device.open()
        try:
            found = find_nics(context, self._config)
        except BaseException:
            close_devices([context])
            raise
        if not found.contexts:
            close_devices([context])
            return
        self._add(context)
        self._use(found)

    def _find_new(self) -> list[Device]:
        names = {one.name for one in list_sysfs_devices(self._root)} - self._known
        self._known |= names
        wanted = self._config.rdma_devices
        if wanted is not None:
            names &= {item.device for item in wanted}
        if not names:
            return []
        try:
            return [device for device in list_devices(self._library, root=self._root) if device.name in names]
        except KvxferError as error:
            log.warning("rdma.port_doubtful", port=", ".join(sorted(names)), warning=error.message)
            return []

    def _use(self, found: NicSurvey) -> None:
        for port, warning in found.warnings.items():
            if self._told.get(port) != warning:  # the next event of the device is no news of it
                self._told[port] = warning
                log.warning("rdma.port_doubtful", port=port, warning=warning)
        for nic in found.nics:
            try:
                self._take(nic)
            except KvxferError as error:
                log.warning("rdma.port_doubtful", port=nic.name, warning=error.message)
                nic.close()
                if not nic.domain.children:
                    nic.domain.close()
                continue
            with self._lock:
                self._nics.append(nic)
            log.info("rdma.port_added", nic=nic.name, gid=str(nic.choice.best))


class _EventReader:
    """Handler of the loop: reads what happens to one device, for all its ports."""

    def __init__(self, context: Context, watch: PortWatch) -> None:
        self._context = context
        self._watch = watch
        self._fd = context.async_fd

    def fileno(self) -> int:
        return self._fd

    def ready(self, events: int, now: float) -> bool:
        while (event := self._context.get_async_event()) is not None:
            nics = self._watch.nics_of(self._context)
            for nic in nics:
                nic.note_event(event)
            if event.type in CARRYING and event.port not in [nic.port.number for nic in nics]:
                self._watch.look_for_port(self._context.device.name, event.port)
        return True

    def timer(self, now: float) -> None:
        """It has none."""

    def failed(self, error: BaseException) -> None:
        """The loop has logged it."""
