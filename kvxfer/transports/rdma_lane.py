"""How far one batch is: `Work`, and its lanes, the rows that a rail has or that wait for one.

Plain state, guarded by the endpoint's lock. Read next: `rdma_spread.py`, which makes lanes, and `rdma_queue.py`, which
posts them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvxfer.types import AddressColumn

if TYPE_CHECKING:
    from kvxfer.errors import KvxferError
    from kvxfer.transports.base import Delivery, Transfer
    from kvxfer.transports.rdma_queue import SendQueue
    from kvxfer.transports.rdma_rail import Rail
    from kvxfer.verbs.work_request import Column

__all__ = ["Lane", "Work"]


class Work:
    """How far one batch is: its lanes, what broke under it, and its notification."""

    __slots__ = (
        "begun",
        "broken",
        "carriers",
        "delivery",
        "error",
        "faults",
        "first_error",
        "is_given_up",
        "lanes",
        "lost_at",
    )

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.lanes: list[Lane] = []
        self.broken: set[int] = set()
        """Connections that broke with slices of it on them."""
        self.carriers: set[SendQueue] = set()
        """What slices of it were posted to."""
        self.faults = 0
        self.first_error: KvxferError | None = None
        self.error: KvxferError | None = None
        self.lost_at = 0.0
        """Since when it has no connection; 0.0 while it has."""
        self.delivery: Delivery | None = None
        self.is_given_up = False
        """Whether nothing of it may be posted any more."""


class Lane:
    """Slices of one transfer, as columns: how many were posted, how many are done, on one rail or by other lanes.

    rows: for each slice its row in the transfer's columns. lkey, rkey: columns, or one key for all. rail: None while
    they wait for rails to take them.
    """

    __slots__ = (
        "_ends",
        "count",
        "done",
        "lkey",
        "local",
        "nbytes",
        "posted",
        "rail",
        "remote",
        "rkey",
        "rows",
        "transfer",
    )

    def __init__(
        self,
        transfer: Transfer,
        rail: Rail | None,
        local: AddressColumn,
        remote: AddressColumn,
        nbytes: AddressColumn,
        lkey: Column,
        rkey: Column,
        rows: AddressColumn,
    ) -> None:
        self.transfer = transfer
        self.rail = rail
        self.local = local
        self.remote = remote
        self.nbytes = nbytes
        self.lkey = lkey
        self.rkey = rkey
        self.rows = rows
        self.count = len(local)
        self.posted = 0
        self.done = 0
        self._ends: AddressColumn | None = None

    @property
    def ends(self) -> AddressColumn:
        """The sum of `nbytes` up to each slice. Made when first asked for: the first request goes out before."""
        if self._ends is None:
            self._ends = self.nbytes.cumsum()
        return self._ends

    @property
    def nbytes_left(self) -> int:
        """Bytes that are not known to be in place."""
        return int(self.ends[-1]) - (int(self.ends[self.done - 1]) if self.done else 0)

    def take(self, count: int) -> tuple[AddressColumn, AddressColumn, AddressColumn, AddressColumn]:
        """Return local, remote, nbytes and rows of the next `count` slices, which are another lane's from now on."""
        if count == self.count:
            self.done = count
            return self.local, self.remote, self.nbytes, self.rows
        part = slice(self.done, self.done + count)
        self.done += count
        return self.local[part], self.remote[part], self.nbytes[part], self.rows[part]

    def advance(self, count: int) -> int:
        """The next `count` slices are in place; returns how many bytes they are."""
        if count == 0:
            return 0
        before = int(self.ends[self.done - 1]) if self.done else 0
        self.done += count
        nbytes = int(self.ends[self.done - 1]) - before
        self.transfer.nbytes_done += nbytes
        if self.rail is not None:
            self.rail.nic.nbytes_sent += nbytes
        return nbytes
