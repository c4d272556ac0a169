"""What stands behind one successful `initialize`: a native engine, the peers, the memory, the batches in flight.

Speaks in exceptions; `mooncake_engine.py` turns them into Mooncake's integers. All methods may be called from any
thread. Read next: `mooncake_targets.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Mapping, Sequence

from kvxfer import (
    AccessDeniedError,
    ConfigError,
    ForkedError,
    KvxferError,
    NotRegisteredError,
    Opcode,
    Region,
    RegionOverlapError,
    Rights,
    UsageError,
)
from kvxfer.addresses import format_host_port, parse_host_port
from kvxfer.compat.mooncake_arguments import Rows
from kvxfer.compat.mooncake_codes import Code
from kvxfer.compat.mooncake_environment import warn_of_ignored
from kvxfer.compat.mooncake_memory import BufferPool
from kvxfer.compat.mooncake_own import Own
from kvxfer.compat.mooncake_settings import Wish, listen_ports, open_engine, transfer_timeout_s
from kvxfer.compat.mooncake_target import Notify
from kvxfer.compat.mooncake_targets import Targets
from kvxfer.compat.mooncake_tickets import BatchTicket, DoneTicket, Ticket
from kvxfer.mooncake_directory import open_directory
from kvxfer.mooncake_peer import send_notify, send_probe

__all__ = ["Running", "close_with"]

PROBE_TIMEOUT_S = 2.0
ADDED_S_PER_BYTE = 1e-9  # Mooncake's

_numbers = itertools.count(1)  # for the batches of all engines: no number is used twice in a process


class Running:
    """One initialised engine."""

    def __init__(self, wish: Wish, environment: Mapping[str, str]) -> None:
        warn_of_ignored(environment)
        self._timeout_s = transfer_timeout_s(environment)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._taken: set[int] = set()
        self._tickets: dict[int, Ticket] = {}
        self.engine = open_engine(wish, environment)
        try:
            listening = parse_host_port(self.engine.address)
            self.port = listening.port
            host = wish.host or listening.host
            self.name = format_host_port(host, self.port) if wish.is_p2p else wish.local_hostname
            self.managed = BufferPool(self.engine, Rights.ALL)
            self._own = Own(self.engine, self.name, [*listen_ports(environment), 0])
            self._directory = open_directory(
                wish.metadata_server,
                own_name=self.name,
                own_host=host,
                own_port=self.port,
                environment=environment,
            )
            self._targets = Targets(self.engine, self.name, self._directory, BufferPool(self.engine, Rights.NONE))
            self._directory.publish(self._own.descriptor())
        except BaseException:
            self.engine.close()
            raise

    def close(self) -> None:
        """End it: peers see it go, batches in flight fail. Bounded; tolerated twice."""
        if self._pid != os.getpid():
            return
        self._directory.withdraw()
        self._targets.close()
        self._own.close()
        self.engine.close()

    def check_owner(self) -> None:
        """Raise ForkedError in a child of the process that initialised it, before any lock is touched: a thread of the
        parent may have held it."""
        if self._pid != os.getpid():
            raise ForkedError(
                f"this engine belongs to process {self._pid}; this is process {os.getpid()}, forked from it.",
                remedy="Make the TransferEngine in the process that uses it, or start processes by 'spawn'.",
                owner_pid=self._pid,
                pid=os.getpid(),
            )

    # Memory.

    def register(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Register ranges (address, nbytes), all or none. A range that is registered already is an overlap: where the
        native engine counts, Mooncake refuses."""
        added: list[int] = []
        made: list[Region] = []
        try:
            with self._lock:
                for address, nbytes in ranges:
                    if address in self._taken and nbytes:
                        raise RegionOverlapError(
                            f"[{address:#x}, {address + nbytes:#x}) overlaps memory that is registered from there on.",
                            remedy="Register memory once, and unregister it before it is registered anew.",
                            address=address,
                            nbytes=nbytes,
                        )
                    self._taken.add(address)
                    added.append(address)
            for one in ranges:
                made.append(self.engine.register(one))
        except BaseException:
            for region in made:
                with contextlib.suppress(KvxferError):
                    self.engine.unregister(region)
            with self._lock:
                self._taken.difference_update(added)
            raise
        with self._lock:
            self._regions.update((region.address, region) for region in made)
        if made:
            self._directory.publish(self._own.descriptor())

    def unregister(self, addresses: Sequence[int]) -> None:
        """Take ranges back by the addresses where they begin; as many as can be, then raises the first error."""
        first: KvxferError | None = None
        for address in addresses:
            try:
                self._unregister(address)
            except KvxferError as error:
                first = first or error
        if addresses:
            self._directory.publish(self._own.descriptor())
        if first is not None:
            raise first

    def _unregister(self, address: int) -> None:
        with self._lock:
            region = self._regions.pop(address, None)
        if region is None:
            raise NotRegisteredError(
                f"no registered range begins at {address:#x}.",
                remedy="Pass the address that was registered, once.",
                address=address,
            )
        try:
            self.engine.unregister(region)
        except BaseException:
            with self._lock:
                self._regions[address] = region  # it is registered still, or must be asked for again
            raise
        with self._lock:
            self._taken.discard(address)

    # Transfers.

    def transfer(self, opcode: Opcode, name: str, rows: Rows, notify: Notify | None) -> None:
        """Move rows to or from the peer of that name; returns when it is done, raises why it failed, finally."""
        if not rows.count:
            self._notify(name, notify)
            return
        try:
            self._targets.find(name).transfer(opcode, rows, notify, self._limit_s(rows))
        except BaseException as error:
            self._targets.forget_after(name, error)
            raise

    def submit(self, opcode: Opcode, name: str, rows: Rows) -> int:
        """Begin to move rows; returns the number of the batch. What a peer refuses shows when its end is asked for, as
        in Mooncake; a peer that is not there is an error now."""
        ticket: Ticket
        if not rows.count:
            ticket = DoneTicket()
        else:
            try:
                ticket = self._targets.find(name).submit(opcode, rows, None, self._limit_s(rows))
            except (NotRegisteredError, AccessDeniedError) as error:
                ticket = DoneTicket(error)
            except BaseException as error:
                self._targets.forget_after(name, error)
                raise
        number = next(_numbers)
        self._tickets[number] = ticket
        return number

    def poll(self, number: int) -> bool:
        """Whether a batch has ended well; False while it runs, raises why it failed. Either end frees its number."""
        ticket = self._tickets.get(number)
        if ticket is None:
            raise _no_batch(number)
        if not ticket.poll():
            return False
        self._tickets.pop(number, None)
        ticket.wait()
        return True

    def wait(self, numbers: Sequence[int]) -> None:
        """Move batches to their ends, all at once, and free their numbers; then raises the first failure."""
        found = [(number, self._tickets.pop(number, None)) for number in dict.fromkeys(numbers)]
        first: Exception | None = None
        with contextlib.suppress(KvxferError):  # told below, by the ticket
            self.engine.wait_all([ticket.batch for _, ticket in found if isinstance(ticket, BatchTicket)])
        for number, ticket in found:
            try:
                if ticket is None:
                    raise _no_batch(number)
                ticket.wait()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _limit_s(self, rows: Rows) -> float:
        return self._timeout_s + rows.nbytes_total * ADDED_S_PER_BYTE

    # Peers.

    def probe(self, name: str) -> None:
        """Return if the process of that name answers; raises within `PROBE_TIMEOUT_S` where it does not."""
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        try:
            at = self._targets.control_of(name, deadline)
        except ConfigError as error:
            error.note(mooncake_code=Code.DNS)  # as Mooncake: it takes anything for a name
            raise
        send_probe(at.host, at.port, deadline=deadline)

    def first_address(self, name: str) -> int:
        """Return where the first buffer of a peer begins; 0 where it has none."""
        try:
            return self._targets.find(name).first_address()
        except BaseException as error:
            self._targets.forget_after(name, error)
            raise

    def notifications(self) -> list[Notify]:
        """Return and forget what has come in, oldest first; one of a native engine has its address for a name."""
        return self._own.notifies()

    def _notify(self, name: str, notify: Notify | None) -> None:
        if notify is not None:
            deadline = time.monotonic() + self._timeout_s
            at = self._targets.control_of(name, deadline)
            send_notify(at.host, at.port, *notify, deadline=deadline)


def _no_batch(number: int) -> UsageError:
    return UsageError(
        f"there is no batch {number}.",
        remedy="A batch is known until its end was told once; a number of 0 says that none was submitted.",
        number=number,
    )


# An engine object that is dropped without a word must give its port and threads back. That cannot be done where the
# garbage collector finds it, which may be under any lock; SimpleQueue.put may be called there, and a thread does it.
_dropped: queue.SimpleQueue[Running] = queue.SimpleQueue()
_closer: threading.Thread | None = None
_closer_lock = threading.Lock()


def _close_dropped() -> None:
    while True:
        _dropped.get().close()


def close_with(owner: object, running: Running) -> None:
    """Close it some time after `owner` is gone; at the end of the process the native engine ends by itself."""
    global _closer
    weakref.finalize(owner, _dropped.put, running).atexit = False
    with _closer_lock:
        if _closer is None or not _closer.is_alive():
            _closer = threading.Thread(target=_close_dropped, daemon=True, name="kvxfer-closer")
            _closer.start()
