"""What all calls of a fake library share: its objects, its counters, the faults that a test ordered.

Read next: `fake_verbs.py`, which has the calls.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvxfer.verbs.abi import ffi
from kvxfer.verbs.enums import EventType, PortState
from tests.support.fake_fabric import FakeFabric
from tests.support.fake_nic import (
    FakeNic,
)
from tests.support.fake_queue_pair import FakeQueuePair
from tests.support.fake_queues import (
    FakeChannel,
    FakeContext,
    FakeDevice,
    FakeObject,
)

Found = TypeVar("Found", bound=FakeObject)


@dataclass
class Fault:
    """A call that is to fail: the `skipped_count`-th from now, and as often as told."""

    verb: str
    errno: int
    skipped_count: int
    remaining_count: int
    device: str | None
    row: int


class LibraryBase:
    """One process's libibverbs.

    name: the host, in names such as "a/mlx5_0". has_gid_table: False for a library before rdma-core 32.
    list_errno: what ibv_get_device_list fails with, such as ENOSYS; 0 for not at all.
    memlock_nbytes: the locked-memory limit of the process; None for unlimited.
    read_only, unmapped: ranges (address, nbytes) that ibv_reg_mr shall believe to be so; memory that really has no
    mapping is found without a hint, where `checks_mapping` is on.
    """

    path = "fake"
    version = "libibverbs.so.1.14.44.0"

    def __init__(
        self, fabric: FakeFabric | None = None, *nics: FakeNic, name: str = "host", memlock_nbytes: int | None = None
    ) -> None:
        self.fabric = fabric or FakeFabric()
        self.name = name
        self.devices = [FakeDevice(self, nic, ordinal) for ordinal, nic in enumerate(nics)]
        self.memlock_nbytes = memlock_nbytes
        self.has_gid_table = True
        self.list_errno = 0
        self.fork_status = 2
        self.checks_mapping = True
        self.read_only: list[tuple[int, int]] = []
        self.unmapped: list[tuple[int, int]] = []
        self.live: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.running_max: Counter[str] = Counter()
        """How many calls of a verb ran at the same time, at most; for ibv_reg_mr and ibv_dereg_mr."""
        self.before: dict[str, Callable[[], None]] = {}
        """Called without a lock before ibv_reg_mr, ibv_dereg_mr or ibv_modify_qp does its work: to block it, say."""
        self.locked_nbytes = 0
        self._faults: list[Fault] = []
        self._objects: dict[Any, FakeObject] = {}
        self._lists: dict[Any, tuple[Any, Any]] = {}
        self._handle_count = 0
        ordinals = {device.struct: device for device in self.devices}
        self._devices = ordinals
        self._lock = self.fabric.lock
        with self._lock:
            assert name not in [library.name for library in self.fabric.libraries], f"two hosts are called {name}"
            self.fabric.libraries.append(self)

    def __repr__(self) -> str:
        return f"<FakeLibrary {self.name}: {', '.join(device.nic.name for device in self.devices)}>"

    # For tests.

    def device(self, name: str) -> FakeDevice:
        return next(device for device in self.devices if device.nic.name == name)

    def fail(
        self, verb: str, error: int, *, nth: int = 1, times: int = 1, device: str | None = None, row: int = 0
    ) -> None:
        """Let the n-th call of a verb from now fail with an error number, and the `times` - 1 calls after it.

        device: count calls on this device only. row: of ibv_post_send and ibv_post_recv, the request in the chain that
        is refused; those before it are posted.
        """
        with self._lock:
            self._faults.append(Fault(verb, error, nth - 1, times, device, row))

    def find(self, pointer: Any) -> Any:
        """Return what is behind a pointer: a FakeQueuePair, a FakeMemoryRegion ..."""
        return self._find(pointer, FakeObject)

    @property
    def queue_pairs(self) -> list[FakeQueuePair]:
        return [qp for device in self.devices for qp in device.queue_pairs.values()]

    @property
    def leaks(self) -> dict[str, int]:
        """What still exists, by kind; empty at the end of a good test."""
        return {kind: count for kind, count in self.live.items() if count}

    def set_port(self, device: str, port: int, state: PortState) -> None:
        """Change a port's state and tell: PORT_ACTIVE or PORT_ERR."""
        with self._lock:
            found = self.device(device)
            found.nic.port(port).state = state
            found.nic.port(port).phys_state = 5 if state is PortState.ACTIVE else 3
            kind = EventType.PORT_ACTIVE if state is PortState.ACTIVE else EventType.PORT_ERR
            found.raise_event(kind, port)
            self.fabric.polled()

    def move_gid(self, device: str, port: int, old_index: int, new_index: int) -> None:
        """Let an address reappear in another row, as after an interface went down and up, and tell: GID_CHANGE."""
        with self._lock:
            found = self.device(device)
            gids = found.nic.port(port).gids
            gids[new_index] = gids.pop(old_index)
            found.raise_event(EventType.GID_CHANGE, port)

    def raise_event(self, device: str, kind: EventType, port: int = 0) -> None:
        """Send an asynchronous event of the device, or of one of its ports, and change nothing."""
        with self._lock:
            self.device(device).raise_event(kind, port)

    def remove_device(self, device: str) -> None:
        """Let a device die: DEVICE_FATAL, everything outstanding flushed, EIO for all that is asked of it but close."""
        with self._lock:
            found = self.device(device)
            found.is_dead = True
            for qp in list(found.queue_pairs.values()):
                qp.to_error()
            found.raise_event(EventType.DEVICE_FATAL, 0)
            self.fabric.polled()

    def plug_in(self, nic: FakeNic) -> None:
        """Let a device appear."""
        with self._lock:
            device = FakeDevice(self, nic, len(self.devices))
            self.devices.append(device)
            self._devices[device.struct] = device

    def die(self) -> None:
        """Let the process end as by SIGKILL: the kernel takes back everything, peers are told nothing."""
        with self._lock:
            for device in self.devices:
                device.queue_pairs.clear()
                device.keys.clear()
                device.is_dead = True
            for each in self._objects.values():
                if isinstance(each, (FakeContext, FakeChannel)):
                    each.events.close()
                each.is_destroyed = True
            self.live.clear()
            self.fabric.polled()

    # Helpers of the calls.

    def _find(self, pointer: Any, kind: type[Found]) -> Found:
        found = self._objects.get(pointer)
        assert found is not None, f"{pointer} was not given out by the libibverbs of {self.name}"
        assert isinstance(found, kind), f"{pointer} is a {found.kind}, not a {kind.__name__}"
        assert not found.is_destroyed, f"a {found.kind} is used after it was destroyed"
        return found

    def _new(self, made: FakeObject) -> Any:
        self._objects[made.struct] = made
        self.live[made.kind] += 1
        made.device.live[made.kind] += 1
        return made.struct

    def _new_struct(self, kind: str, context: Any, **fields: Any) -> Any:
        struct = ffi.new(f"struct {kind} *")
        struct.context = context
        for name, value in fields.items():
            setattr(struct, name, value)
        if kind != "ibv_comp_channel":
            self._handle_count += 1
            struct.handle = self._handle_count
        return struct

    def _destroy(self, found: FakeObject) -> None:
        """Forget an object. Its struct stays allocated, so that a late use is noticed."""
        found.is_destroyed = True
        for parent in found.parents:
            parent.users -= 1
        self.live[found.kind] -= 1
        found.device.live[found.kind] -= 1

    def _refuse_destroy(self, verb: str, found: FakeObject) -> int:
        """Return the error number with which a destroying call fails; 0 for none."""
        return self._count(verb, found.device) or (errno.EBUSY if found.users else 0)

    def _count(self, verb: str, device: FakeDevice | None = None) -> int:
        """Count a call; return the error number that a test ordered for it, or 0."""
        fault = self._count_posts(verb, device)
        return fault.errno if fault else 0

    def _count_posts(self, verb: str, device: FakeDevice | None) -> Fault | None:
        self.calls[verb] += 1
        for fault in self._faults:
            if fault.verb != verb or (fault.device and (device is None or device.nic.name != fault.device)):
                continue
            if fault.skipped_count:
                fault.skipped_count -= 1
                continue
            fault.remaining_count -= 1
            if not fault.remaining_count:
                self._faults.remove(fault)
            return fault
        return None

    def _ask(self, verb: str, device: FakeDevice) -> int:
        """As `_count`, for calls that a dead device does not take."""
        return self._count(verb, device) or (errno.EIO if device.is_dead else 0)

    @contextmanager
    def _slowly(self, verb: str, seconds: float = 0.0) -> Iterator[None]:
        """Spend the time of a call that the kernel takes long for, without a lock; count how many do so at once."""
        with self._lock:
            self.running[verb] += 1
            self.running_max[verb] = max(self.running_max[verb], self.running[verb])
        try:
            if verb in self.before:
                self.before[verb]()
            if seconds:
                time.sleep(seconds)
            yield
        finally:
            with self._lock:
                self.running[verb] -= 1
