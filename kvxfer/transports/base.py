"""What every transport is: `Transport` (one per engine), `Endpoint` (one per peer), `Transfer` (one per batch).

A transfer's life: the engine checks every row, makes a `Transfer` and hands it to `Endpoint.post`; whoever waits calls
`Endpoint.progress` under the transfer's lock until it is finished. Nothing moves behind the caller's back.

What a finished transfer promises. Without error: every byte of every row is in place at its destination, and the
notification, if any, was handed to the peer after them. With an error: from the moment it can be seen, not one byte
more is written on either side on account of this transfer.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from kvxfer.errors import KvxferError, RemoteProtocolError
from kvxfer.memory.regions import Region
from kvxfer.types import AddressColumn, Opcode, Probe, RegionDescriptor, Rights

if TYPE_CHECKING:
    import socket

    from kvxfer.config import EngineConfig

__all__ = ["Delivery", "Endpoint", "PeerLink", "Transfer", "Transport", "is_delivered", "is_owned"]

DELIVERY_LOOK_S = 0.05
"""How often a wait for a notification looks whether it is still wanted."""


class Transfer:
    """The work of one batch: columns of rows, how far it is, how it ended.

    local, remote, nbytes: shape (n,), int64, joined where adjacent; `first_row[i]` is the caller's row that slice i
    begins with.
    nbytes_done: known to be in place. nbytes_moved: handed to the medium or taken from it, to see whether it moves.
    slices_left: after a failure, the slices that are not wholly in place (None: none is known to be).
    region_rows gives for each slice its place in `regions`, the peer's regions as they were at submit (None: all in the
    one there is); `used` are the local regions, pinned until the end.
    A batch of one row keeps its three numbers as they are, in `single`, and makes columns only if asked.
    """

    # Defaults of the class: a transfer of one row sets six attributes, not twenty, and that is a third of its cost.
    _columns: tuple[AddressColumn, AddressColumn, AddressColumn] | None = None
    region_rows: AddressColumn | None = None
    first_row: AddressColumn | None = None
    row_count: int = 1
    single: tuple[int, int, int] | None = None
    nbytes_done: int = 0
    nbytes_moved: int = 0
    slices_left: AddressColumn | None = None
    work: Any = None
    stop: KvxferError | None = None
    deadline: float = math.inf
    error: KvxferError | None = None
    finished: bool = False
    endpoint: Endpoint | None = None
    """What carries it; set by the engine."""

    def __init__(
        self,
        opcode: Opcode,
        regions: tuple[RegionDescriptor, ...],
        used: tuple[Region, ...],
        notify: bytes | None,
        nbytes_total: int,
        on_finish: Callable[[Transfer], None],
    ) -> None:
        self.opcode = opcode
        self.regions = regions
        self.used = used
        self.notify = notify
        self.nbytes_total = nbytes_total
        self.on_finish = on_finish
        self.lock = (
            threading.RLock()
        )  # knows its owner, so that a thread interrupted anywhere can tell that it holds it

    @classmethod
    def of_columns(
        cls,
        opcode: Opcode,
        regions: tuple[RegionDescriptor, ...],
        used: tuple[Region, ...],
        notify: bytes | None,
        on_finish: Callable[[Transfer], None],
        *,
        columns: tuple[AddressColumn, AddressColumn, AddressColumn],
        region_rows: AddressColumn | None,
        first_row: AddressColumn,
        row_count: int,
        nbytes_total: int,
    ) -> Transfer:
        """Return a transfer of many rows."""
        transfer = cls(opcode, regions, used, notify, nbytes_total, on_finish)
        transfer._columns = columns
        transfer.region_rows = region_rows
        transfer.first_row = first_row
        transfer.row_count = row_count
        return transfer

    @property
    def columns(self) -> tuple[AddressColumn, AddressColumn, AddressColumn]:
        """The rows as three columns: local addresses, remote addresses, byte counts."""
        if self._columns is None:
            assert self.single is not None
            local, remote, nbytes = np.array([[value] for value in self.single], np.int64)
            self._columns = (local, remote, nbytes)
        return self._columns

    def first_row_of(self, at: int) -> int:
        """Return the caller's row that row `at` of the columns begins with."""
        return 0 if self.first_row is None else int(self.first_row[at])

    def finish(self, error: KvxferError | None = None) -> None:
        """Set the one and only end of this transfer; the caller holds `lock`."""
        assert not self.finished, "a transfer ends once"
        if error is None:
            self.nbytes_done = self.nbytes_total
        else:
            self.error = error
        self.work = None
        self.on_finish(self)  # before `finished` shows: whoever sees the end finds nothing pinned
        self.finished = True


def is_owned(lock: threading.RLock) -> bool:
    """Whether this thread holds the lock. threading.Condition relies on the same method."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]


class Delivery(Protocol):
    """A notification on its way to the peer by the control connection. The first `wait` sends it."""

    fences: dict[int, int]
    """What the peer must have seen before it takes it: for each connection, by number, the number of a fence."""

    @property
    def is_settled(self) -> bool:
        """Whether it was sent and the peer has answered, or never will."""

    def wait(self, timeout_s: float) -> bool:
        """Whether the peer has it; raises what went wrong."""

    def abandon(self) -> None:
        """Make sure that the peer does not take it any more."""


def is_delivered(delivery: Delivery, transfer: Transfer, until: float) -> bool:
    """Wait for a notification until the peer has it: True; False at `until` (monotonic seconds) or when the transfer is
    asked to stop."""
    while not delivery.wait(min(DELIVERY_LOOK_S, max(0.0, until - time.monotonic()))):
        if transfer.stop is not None or time.monotonic() >= until:
            return False
    return True


@dataclass(frozen=True)
class PeerLink:
    """What an endpoint may ask of the control plane about its peer."""

    label: str
    generation: str
    dial: Callable[[float], tuple[socket.socket, int]]
    """Open an authenticated data connection to the peer before a deadline (monotonic seconds), and say its number."""
    hang_up: Callable[[str, int, float], bool]
    """Have the peer drop the connection of that transport and number; True once it has said so, False at the
    deadline."""
    deliver: Callable[[bytes], Delivery]
    """Have a notification for the peer, by the control connection; the first `wait` for it sends it."""
    connect: Callable[[str, Mapping[str, Any], float], Mapping[str, Any]]
    """Ask the peer's transport of that name to make its end of a connection, before a deadline (monotonic seconds);
    returns its answer. Both are plain JSON values. Raises PeerUnreachableError where none comes."""


class Endpoint(ABC):
    """This process's side of one peer, for one transport. All methods may be called from any thread."""

    transport: ClassVar[str]
    copies_rows: ClassVar[bool] = False
    """Whether `copy_row` is worth asking."""
    reaches_all: bool = True
    """Whether it reaches whatever memory the peer registers; `unreachable` tells of one region."""
    needs_session: ClassVar[bool] = False
    """Whether it ends with the control connection: where nothing else would tell that the peer is gone."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether it was closed, by us or because the peer is gone."""

    def establish(self, deadline: float) -> None:  # noqa: B027  most are there once they are made
        """Make the first connection, once the session stands and `PeerLink.connect` can be used; before `deadline`
        (monotonic seconds). Raises TransportUnavailableError with the reason: the next transport is tried then."""

    @abstractmethod
    def unreachable(self, region: RegionDescriptor) -> str | None:
        """Return why this endpoint cannot reach `region`, or None where it can. Cheap: called for each batch."""

    def copy_row(self, opcode: Opcode, local: int, remote: int, nbytes: int, region: RegionDescriptor) -> bool:
        """Move one short row here and now, if that takes a few microseconds and can wait for nobody; else return False.

        The caller has checked the row and holds the region table's guard, which keeps both regions in place.
        """
        return False

    @abstractmethod
    def post(self, transfer: Transfer) -> None:
        """Take the transfer on and start it as far as that does not block. The caller holds `transfer.lock`."""

    @abstractmethod
    def progress(self, transfer: Transfer, until: float) -> None:
        """Move the transfer until it is finished or until `until` (monotonic seconds; 0.0: what can be done at once).

        The caller holds `transfer.lock`. Returns early when `transfer.stop` is set. Finishes the transfer, with an
        error where the medium failed.
        """

    def waits_for(self, transfer: Transfer) -> tuple[int, int] | None:
        """Return the descriptor and the poll(2) events that the transfer cannot move without; None where there is none,
        and it moves whenever it is given time."""
        return None

    @abstractmethod
    def abort(self, transfer: Transfer, deadline: float) -> None:
        """Give the transfer up; when this returns not one byte more is written. The caller holds `transfer.lock` and
        finishes the transfer with its error afterwards."""

    def forget(self, region_ids: Sequence[int]) -> None:  # noqa: B027  most transports hold nothing for a region
        """The peer took these regions back: drop what was held for them."""

    def reap(self, now: float) -> None:  # noqa: B027  most transports have nothing idle
        """Close what has been idle for longer than the configuration allows."""

    def describe(self) -> Mapping[str, Any]:
        """Facts for a person: streams, mappings, the way memory is reached."""
        return {}

    def abandon(self, error: KvxferError) -> None:  # noqa: B027  not all hold descriptors
        """In a forked child: close the copies of the descriptors, without a word to the peer and without a lock."""

    @abstractmethod
    def close(self, error: KvxferError) -> None:
        """Drop the peer; transfers still running end with `error` when they are next looked at."""


class Transport(ABC):
    """One medium in one engine: what it offers to peers, and how peers are reached over it."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def probe(cls, config: EngineConfig) -> Probe:
        """Say whether the medium can be used on this machine, and if not, why and what to do. Loads what it needs
        only here; never raises."""

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """Return what a peer must know to reach this engine: plain JSON values."""

    @abstractmethod
    def register(self, address: int, nbytes: int, *, rights: Rights, read_only: bool = False) -> dict[str, Any]:
        """Make memory reachable and return what a peer needs for it: plain JSON values; all or nothing.

        read_only: the memory itself cannot be written.
        """

    @abstractmethod
    def deregister(self, address: int, nbytes: int, keys: Mapping[str, Any]) -> None:
        """Undo `register`."""

    def accept(
        self, peer: str, session: str, body: Mapping[str, Any], answer: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        """Make this side's end of a connection that a peer asks for, and answer, now or later, from any thread.

        peer: for messages; session: which one asks, for `hang_up` and `drop`. answer: takes plain JSON values, tells
        whether the session is still there. What goes wrong is the answer; raises only RemoteProtocolError, for a body
        that the protocol does not allow. Never blocks.
        """
        raise RemoteProtocolError(f"{peer} asks for a connection over {self.name}, which has none of that kind.")

    def hang_up(self, session: str, number: int) -> None:  # noqa: B027  most have no connection of that kind
        """Drop a connection that `accept` made: when this returns nothing more comes in over it."""

    def drop(self, session: str) -> None:  # noqa: B027  as hang_up
        """Drop all connections of a session that has ended."""

    def await_fences(self, session: str, fences: Mapping[int, int], then: Callable[[bool], None]) -> None:
        """Wait until the bytes behind a notification can be seen here; called in the loop's thread, never blocks.

        fences: for each connection that carried some, by the number that `accept` got, the fence behind them. then:
        called once, in the loop's thread, now or later: True when all have come, False when one cannot come any more.
        Raises RemoteProtocolError for fences that the protocol does not allow, and calls nothing then.
        """
        raise RemoteProtocolError(f"a peer names fences over {self.name}, which has none.")

    @abstractmethod
    def open_endpoint(self, card: Mapping[str, Any], link: PeerLink, deadline: float) -> Endpoint:
        """Reach the peer that `card` describes; raises TransportUnavailableError with the reason where that fails."""

    def abandon(self) -> None:  # noqa: B027  not every transport holds descriptors
        """In a forked child: close the copies of the descriptors, say nothing to anybody, take no lock."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; tolerated twice."""
