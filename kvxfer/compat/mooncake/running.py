"""What stands behind one successful `initialize`: a native engine, the peers, the memory, the batches in flight.

Speaks in exceptions; `engine.py` turns them into Mooncake's integers. All methods may be called from any
thread. Read next: `targets.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvxfer import (
    AccessDeniedError,
    ConfigError,
    ForkedError,
    NotRegisteredError,
    Opcode,
    Rights,
    UsageError,
)
from kvxfer.addresses import format_host_port, parse_host_port
from kvxfer.compat.mooncake.arguments import Rows
from kvxfer.compat.mooncake.codes import Code
from kvxfer.compat.mooncake.environment import warn_of_ignored
from kvxfer.compat.mooncake.logs import follow_log_level
from kvxfer.compat.mooncake.memory import BufferPool
from kvxfer.compat.mooncake.own import Own
from kvxfer.compat.mooncake.regions import Registrations
from kvxfer.compat.mooncake.settings import Wish, listen_ports, open_engine, queue_pair_count
from kvxfer.compat.mooncake.target import Notify
from kvxfer.compat.mooncake.targets import Targets
from kvxfer.compat.mooncake.tickets import DoneTicket, Ticket
from kvxfer.errors import DirectoryError
from kvxfer.log import get_logger
from kvxfer.mooncake.directory import open_directory
from kvxfer.mooncake.peer import send_notify, send_probe

__all__ = ["Running", "close_with"]

Owner = TypeVar("Owner")

PROBE_TIMEOUT_S = 2.0
log = get_logger(__name__)

_all: weakref.WeakSet[Running] = weakref.WeakSet()
"""What is initialised in this process: closed at its end."""
ADDED_S_PER_BYTE = 1e-9  # Mooncake's

_numbers = itertools.count(1)  # for the batches of all engines: no number is used twice in a process


class Running:
    """One initialised engine."""

    def __init__(self, wish: Wish, environment: Mapping[str, str]) -> None:
        follow_log_level(environment)
        warn_of_ignored(environment)
        self._pid = os.getpid()
        self._tickets: dict[int, Ticket] = {}
        with contextlib.ExitStack() as undo:
            self.engine = open_engine(wish, environment)
            undo.callback(self.engine.close)
            self._timeout_s = self.engine.config.transfer_timeout_s
            listening = parse_host_port(self.engine.address)
            self.port = listening.port
            host = wish.host if wish.is_p2p and wish.host else listening.host
            self.name = format_host_port(host, self.port) if wish.is_p2p else wish.local_hostname
            self._own = Own(self.engine, self.name, [*listen_ports(environment), 0])
            undo.callback(self._own.close)
            self._directory = open_directory(
                wish.metadata_server,
                own_name=self.name,
                own_host=host,
                own_port=self.port,
                environment=environment,
            )
            self.managed = BufferPool(self.engine, Rights.ALL)
            self._registrations = Registrations(self.engine)
            self._targets = Targets(
                self.engine,
                self.name,
                self._directory,
                BufferPool(self.engine, Rights.NONE),
                queue_pairs=queue_pair_count(environment),
            )
            undo.callback(self._targets.close)
            undo.callback(self._directory.withdraw)
            self._directory.publish(self._own.descriptor())
            self._parts = undo.pop_all()
        _all.add(self)

    def close(self) -> None:
        """End it: peers see it go, batches in flight fail. Bounded; tolerated twice."""
        if self._pid == os.getpid():
            self._parts.close()

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
        """Register ranges (address, nbytes), all or none."""
        self._registrations.add(ranges)
        self._publish()

    def unregister(self, addresses: Sequence[int]) -> None:
        """Take ranges back by the addresses where they begin; as many as can be, then raises the first error."""
        try:
            self._registrations.remove(addresses)
        finally:
            self._publish()

    def _publish(self) -> None:
        """Tell the metadata server, if there is one. One that does not answer hinders nobody here: what it has missed
        is written when it is back, and kvxfer peers ask this process itself."""
        try:
            self._directory.publish(self._own.descriptor())
        except DirectoryError as error:
            log.warning("mooncake.publish_failed", server=self._directory.server, error=error.message)

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
        """Whether a batch has ended well; False while it runs, raises why it failed. Either end is told once, whoever
        asks."""
        ticket = self._tickets.get(number)
        if ticket is not None and not ticket.poll():
            return False
        if ticket is None or self._tickets.pop(number, None) is None:
            raise _no_batch(number)
        ticket.wait()
        return True

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait for the ends of batches and free their numbers; then raises the first failure."""
        first: Exception | None = None
        for number in dict.fromkeys(numbers):
            ticket = self._tickets.get(number)
            try:
                if ticket is None:
                    raise _no_batch(number)
                ticket.wait()
            except Exception as error:
                first = first or error
            self._tickets.pop(number, None)
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


def close_with(owner: Owner, running: Running) -> weakref.finalize[[Running], Owner]:
    """Close it some time after `owner` is gone, unless the handle is detached; returns the handle."""
    global _closer
    handle = weakref.finalize(owner, _dropped.put, running)
    handle.atexit = False  # `_close_all` does it then
    with _closer_lock:
        if _closer is None:
            _closer = threading.Thread(target=_close_dropped, daemon=True, name="kvxfer-closer")
            _closer.start()
    return handle


def _close_dropped() -> None:
    while True:
        _dropped.get().close()


def _forget_closer() -> None:
    """In a forked child: the thread is the parent's, and so is whoever held the lock."""
    global _closer, _closer_lock
    _closer, _closer_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_closer)


def _close_all() -> None:
    for running in list(_all):
        running.close()


# As the native engine does it, and before it: threads that send to real Mooncake processes are waited for by Python.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
