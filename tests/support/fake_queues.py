"""The objects behind a fake library's pointers: devices, memory regions, channels, completion queues.

The lock of the fabric is held by whoever calls in here. Read next: `fake_queue_pair.py`.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

from kvxfer.verbs.abi import ffi
from kvxfer.verbs.enums import (
    Access,
    EventType,
)
from tests.support.fake_nic import FakeNic, FakePort

if TYPE_CHECKING:
    from tests.support.fake_library import LibraryBase
    from tests.support.fake_queue_pair import FakeQueuePair

REMOTE_RIGHTS = Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC


class FakeObject:
    """One object that the library gave out. users: how many objects refer to it; it cannot be destroyed meanwhile."""

    kind = ""

    def __init__(self, struct: Any, device: FakeDevice, *parents: FakeObject) -> None:
        self.struct = struct
        self.device = device
        self.parents = parents
        self.users = 0
        self.is_destroyed = False
        for parent in parents:
            parent.users += 1


class FakeDevice:
    """A device while a process has it open: the numbers it gives out, and what exists on it."""

    def __init__(self, library: LibraryBase, nic: FakeNic, ordinal: int) -> None:
        self.library = library
        self.nic = nic
        self.index = ordinal
        self.is_dead = False
        self.keys: dict[int, FakeMemoryRegion] = {}
        self.queue_pairs: dict[int, FakeQueuePair] = {}
        self.contexts: list[FakeContext] = []
        self.live: Counter[str] = Counter()
        self.registered_nbytes = 0
        self.read_depth_used = 0
        place = len(library.fabric.libraries) * 16 + ordinal  # the numbers of no two devices are alike
        self._key_count = 0x11 + 0x10000 * place
        self._qp_count = 0x10 + 0x1000 * place
        self.struct = ffi.new("struct ibv_device *")
        self.struct.node_type = nic.node_type
        self.struct.transport_type = nic.transport_type
        self.struct.name = nic.name.encode()
        self.struct.dev_name = f"uverbs{ordinal}".encode()
        self.struct.dev_path = f"/sys/class/infiniband_verbs/uverbs{ordinal}".encode()
        self.struct.ibdev_path = f"/sys/class/infiniband/{nic.name}".encode()
        self.name_chars = ffi.new("char[]", nic.name.encode())

    @property
    def full_name(self) -> str:
        """Host and device: what rules of the fabric name."""
        return f"{self.library.name}/{self.nic.name}"

    def __repr__(self) -> str:
        return f"<FakeDevice {self.full_name}>"

    def new_keys(self, access: int) -> tuple[int, int]:
        """Return a local and a remote key that were never given out before."""
        self._key_count += 1
        local = (self._key_count << 8 | (self._key_count * 37 & 0x7F)) & 0xFFFFFFFF
        if self.nic.has_one_key:
            return local, local if access & REMOTE_RIGHTS else 0
        return local, local | 0x80

    def new_qp_number(self) -> int:
        self._qp_count += 1
        return self._qp_count

    def port(self, number: int) -> FakePort | None:
        return self.nic.ports[number - 1] if 1 <= number <= len(self.nic.ports) else None

    def raise_event(self, kind: EventType, element: Any, context: FakeContext | None = None) -> None:
        """Tell one context, or all of the device."""
        for each in [context] if context else self.contexts:
            each.events.put((kind, element))


class EventQueue:
    """Events that a file descriptor announces: readable as long as one waits (eventfd(2), one count per event)."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._waiting: deque[Any] = deque()
        self._is_closed = False

    def put(self, event: Any) -> None:
        if not self._is_closed:
            self._waiting.append(event)
            os.eventfd_write(self.fd, 1)

    def get(self) -> Any:
        """Return the oldest event; blocks, or raises BlockingIOError where the caller made the fd non-blocking.

        The one call here without the fabric's lock: who waits must not keep others from raising the event.
        """
        while True:
            os.eventfd_read(self.fd)
            try:
                return self._waiting.popleft()
            except IndexError:
                continue  # the event was dropped after it had been announced

    def drop(self, subject: object) -> None:
        """Forget events about `subject`. Their announcements are taken back with them."""
        kept = [event for event in self._waiting if event is not subject]
        dropped_count = len(self._waiting) - len(kept)
        self._waiting = deque(kept)
        was_blocking = os.get_blocking(self.fd)
        os.set_blocking(self.fd, False)
        for _ in range(dropped_count):
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                break  # a reader was faster; it will find nothing and wait on
        os.set_blocking(self.fd, was_blocking)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.close(self.fd)

    def __del__(self) -> None:
        self.close()  # a test that leaves its objects behind must not use up descriptors


class FakeContext(FakeObject):
    """An opened device."""

    kind = "context"

    def __init__(self, struct: Any, device: FakeDevice) -> None:
        super().__init__(struct, device)
        self.events = EventQueue()


class FakeDomain(FakeObject):
    """A protection domain."""

    kind = "pd"


class FakeAddress(FakeObject):
    """An address handle."""

    kind = "ah"


class FakeMemoryRegion(FakeObject):
    """A registration."""

    kind = "mr"

    def __init__(
        self, struct: Any, domain: FakeObject, address: int, nbytes: int, access: int, keys: tuple[int, int]
    ) -> None:
        super().__init__(struct, domain.device, domain)
        self.domain = domain
        self.address = address
        self.nbytes = nbytes
        self.access = access
        self.lkey, self.rkey = keys

    def covers(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes


class FakeChannel(FakeObject):
    """A completion channel."""

    kind = "channel"

    def __init__(self, struct: Any, context: FakeContext) -> None:
        super().__init__(struct, context.device, context)
        self.events = EventQueue()


class Completion(NamedTuple):
    """One entry of a completion queue. seq: slots of the queue up to this one are free once it is polled."""

    qp: FakeQueuePair
    seq: int
    is_receive: bool
    wr_id: int
    status: int
    opcode: int
    byte_len: int = 0
    imm_data: int = 0
    src_qp: int = 0
    wc_flags: int = 0
    vendor_err: int = 0


class FakeCompletionQueue(FakeObject):
    """A completion queue of `capacity` entries; one more and it is broken, with all its queue pairs."""

    kind = "cq"

    def __init__(self, struct: Any, context: FakeContext, channel: FakeChannel | None, capacity: int) -> None:
        super().__init__(struct, context.device, context, *([channel] if channel else []))
        self.context = context
        self.channel = channel
        self.capacity = capacity
        self.entries: deque[Completion] = deque()
        self.queue_pairs: list[FakeQueuePair] = []
        self.is_overrun = False
        self.armed: str = ""  # "", "all" or "solicited"
        self.events_got = 0
        self.events_acked = 0

    def put(self, entry: Completion, *, is_solicited: bool = False) -> None:
        if self.is_overrun:
            return
        if len(self.entries) >= self.capacity:
            self._overrun()
            return
        self.entries.append(entry)
        if self.armed == "all" or (self.armed and (is_solicited or entry.status)):
            self.armed = ""
            if self.channel is not None:
                self.channel.events.put(self)

    def _overrun(self) -> None:
        self.is_overrun = True
        self.device.raise_event(EventType.CQ_ERR, self.struct, self.context)
        for qp in list(self.queue_pairs):
            qp.fail(EventType.QP_FATAL)

    def forget(self, qp: FakeQueuePair) -> None:
        self.entries = deque(entry for entry in self.entries if entry.qp is not qp)
