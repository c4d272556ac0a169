"""The transfers with one peer that run, and what they run on: the endpoints, the peer's regions, ours that they pin.

What must be decided at one moment is decided here, under one lock: whether a transfer may begin, or its regions were
taken back, or the peer is gone. Makes no connection: that is `peer_connection.py`. Read next: `transports/base.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvxfer.errors import KvxferError, RemoteAccessError, TransferTimeoutError
from kvxfer.memory.regions import RegionTable
from kvxfer.remote_table import RemoteTable, parse_regions
from kvxfer.transports.base import Endpoint, Transfer
from kvxfer.types import Opcode

__all__ = ["PeerTransfers"]


class PeerTransfers:
    """The running transfers with one process. All methods may be called from any thread.

    address: the peer's, for messages. local_table: the regions of this engine.
    """

    def __init__(self, address: str, local_table: RegionTable) -> None:
        self.address = address
        self.endpoints: list[Endpoint] = []
        """What reaches the peer, the preferred one first; empty until it is connected."""
        self.table = RemoteTable(())
        """The peer's regions as now known."""
        self.void: KvxferError | None = None
        """Why the peer cannot be used any more: it is closed, or another process answers in its place."""
        self._local_table = local_table
        self._lock = threading.Lock()
        self._table_version = -1
        self._running: set[Transfer] = set()
        self._revocations: list[_Revocation] = []
        self._revoked: set[int] = set()

    def raise_if_void(self) -> None:
        """Raise why the peer cannot be used any more, if so."""
        if self.void is not None:
            raise self.void.with_traceback(None)

    # One transfer.

    def copy_row(self, opcode: Opcode, local: int, remote: int, nbytes: int) -> bool:
        """Move one short row here and now, without a batch; False where that is not possible or something is wrong,
        which the long way then finds out."""
        endpoint = self.endpoints[0] if self.endpoints else None
        if endpoint is None or not endpoint.copies_rows:
            return False
        here = self._local_table.snapshot().find(local, nbytes)
        table = self.table
        there = table.find(remote, nbytes)
        if here is None or there is None or not there.rights.allows(opcode):
            return False
        if opcode is Opcode.READ and here.view.read_only:
            return False
        with self._local_table.guard:
            if not here.is_live or table is not self.table or self.void is not None:
                return False
            return endpoint.copy_row(opcode, local, remote, nbytes, there)

    def begin(self, transfer: Transfer, table: RemoteTable) -> bool:
        """Take a transfer on, pin what it uses here; False where the peer's regions have changed since `table`, so that
        its rows must be checked anew."""
        self._local_table.acquire(transfer.used, "local")
        try:
            with self._lock:
                if table is self.table and self.void is None:
                    self._running.add(transfer)
                    return True
        finally:
            if transfer not in self._running:
                self._local_table.release(transfer.used, "local")
        self.raise_if_void()
        return False

    def end(self, transfer: Transfer) -> None:
        """A transfer has ended, one way or the other. A second call does nothing: an interrupted first is repeated."""
        with self._lock:
            if transfer not in self._running:
                return
            used, transfer.used = transfer.used, ()  # an interrupted call must not release twice
            self._local_table.release(used, "local")
            self._running.discard(transfer)
            if not self._revocations:
                return
            done = [one for one in self._revocations if one.discard(transfer)]
            for one in done:
                self._revocations.remove(one)
        for one in done:
            one.done()

    # The peer's regions.

    def take_regions(self, body: Mapping[str, Any]) -> None:
        """The peer has told its regions; an answer that was overtaken by a later one is dropped."""
        version, regions = parse_regions(body, self.address)
        with self._lock:
            if version >= self._table_version:
                self._table_version = version
                self.table = RemoteTable([region for region in regions if region.region_id not in self._revoked])

    def revoke(self, ids: set[int], done: Callable[[], None]) -> None:
        """The peer takes regions back: no new transfer may use them, waiting ones fail, running ones end first; then
        `done` is called."""
        with self._lock:
            self._revoked |= ids
            self.table = RemoteTable([region for region in self.table.regions if region.region_id not in ids])
            touched = {one for one in self._running if any(region.region_id in ids for region in one.regions)}
            revocation = _Revocation(set(touched), done)
            if touched:
                self._revocations.append(revocation)
        with self._local_table.guard:
            pass  # a `copy_row` that began before the table changed has ended
        for endpoint in self.endpoints:
            endpoint.forget(sorted(ids))
        for transfer in touched:
            if transfer.nbytes_moved == 0 and transfer.lock.acquire(blocking=False):
                try:
                    if not transfer.finished and transfer.nbytes_moved == 0:
                        for endpoint in self.endpoints:
                            endpoint.abort(transfer, 0.0)  # it may hold a stream on which nothing was sent yet
                        transfer.finish(
                            RemoteAccessError(
                                f"{self.address} has unregistered a region before the batch began.",
                                remedy="Agree with the peer on who unregisters when.",
                                peer=self.address,
                            )
                        )
                finally:
                    transfer.lock.release()
        if not touched:
            done()

    # All transfers.

    def reap(self, now: float) -> None:
        """Close connections that have been idle for too long; end batches whose deadline has passed and whom nobody
        moves: they would pin memory on both sides for ever."""
        for endpoint in self.endpoints:
            endpoint.reap(now)
        with self._lock:
            late = [transfer for transfer in self._running if now >= transfer.deadline]
        for transfer in late:
            if transfer.lock.acquire(blocking=False):
                try:
                    if not transfer.finished and transfer.endpoint is not None:
                        transfer.endpoint.abort(transfer, 0.0)
                        transfer.finish(
                            TransferTimeoutError(
                                f"a batch to {self.address} passed its deadline while nobody moved it.",
                                remedy="A batch moves while somebody waits for it, polls it or awaits it.",
                                peer=self.address,
                            )
                        )
                finally:
                    transfer.lock.release()

    def disconnected(self, error: KvxferError, *, is_dead: bool) -> None:
        """The control connection is lost: what depends on it fails now, and all of it where the peer is dead."""
        with self._lock:
            for transfer in self._running:  # a copy that runs stops at the next window
                if transfer.endpoint is not None and (transfer.endpoint.needs_session or is_dead):
                    transfer.stop = transfer.stop or error
        for endpoint in self.endpoints:
            if endpoint.needs_session or is_dead:
                endpoint.close(error)

    def make_void(self, error: KvxferError) -> bool:
        """No transfer begins any more, and the running ones stop; False where that was so already."""
        with self._lock:
            if self.void is not None:
                return False
            self.void = error
            running = list(self._running)
        for transfer in running:
            transfer.stop = transfer.stop or error
        return True

    def give_up(self, error: KvxferError, deadline: float) -> None:
        """End the running transfers while the peer can still be told to let go of them; until `deadline` (monotonic
        seconds)."""
        with self._lock:
            running = list(self._running)
        for transfer in running:
            if transfer.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                try:
                    if not transfer.finished:
                        for endpoint in self.endpoints:
                            endpoint.abort(transfer, deadline)
                        transfer.finish(error)
                finally:
                    transfer.lock.release()

    def close(self, error: KvxferError) -> None:
        """Drop the endpoints; transfers that still run end with `error` when they are next looked at."""
        for endpoint in self.endpoints:
            endpoint.close(error)

    def abandon(self, error: KvxferError) -> None:
        """In a forked child: close the copies of the descriptors; every later use, and the parent's batches, raise
        `error`. Takes no lock: a thread of the parent may have held it."""
        self.void = error
        for transfer in self._running:
            transfer.error, transfer.finished = transfer.error or error, True
        for endpoint in self.endpoints:
            endpoint.abandon(error)


class _Revocation:
    """Regions that the peer takes back, and the transfers that must end before it is told so."""

    def __init__(self, transfers: set[Transfer], done: Callable[[], None]) -> None:
        self._transfers = transfers
        self.done = done

    def discard(self, transfer: Transfer) -> bool:
        """Whether this was the last one."""
        if transfer not in self._transfers:
            return False
        self._transfers.discard(transfer)
        return not self._transfers
