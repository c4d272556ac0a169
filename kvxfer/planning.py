"""From the caller's columns to a Transfer: every row is checked on both sides before anything is sent.

Pure but for the counts it takes: reads the local region table and the peer's, asks the peer once about regions that
are not known yet, joins adjacent rows. Next: `batch.TransferBatch`, then `transports.base.Endpoint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvxfer.errors import AccessDeniedError, NotRegisteredError, UsageError
from kvxfer.memory import Region, RegionSnapshot, RegionTable, Rows, as_rows, coalesce, distinct, locate
from kvxfer.memory.access import access_denied
from kvxfer.memory.slices import IndexColumn
from kvxfer.peer_connection import PeerConnection
from kvxfer.remote_table import RemoteTable
from kvxfer.text import format_count, name_kind, show
from kvxfer.transports.base import Endpoint, Transfer
from kvxfer.types import AddressColumn, Opcode, RegionDescriptor

__all__ = ["Addresses", "block_addresses", "check_block_counts", "plan"]

Addresses = int | Sequence[int] | npt.NDArray[np.integer[Any]]
"""One address, or a column of them."""

RegionT_co = TypeVar("RegionT_co", Region, RegionDescriptor, covariant=True)


class _Table(Protocol[RegionT_co]):
    """The regions of one side, ascending in address."""

    @property
    def regions(self) -> tuple[RegionT_co, ...]: ...
    @property
    def starts(self) -> AddressColumn: ...
    @property
    def ends(self) -> AddressColumn: ...
    def find(self, address: int, nbytes: int) -> RegionT_co | None: ...


def plan(
    table: RegionTable,
    opcode: Opcode,
    peer: PeerConnection,
    local: Addresses,
    remote: Addresses,
    nbytes: Addresses,
    notify: bytes | None,
    deadline: float,
) -> tuple[Transfer, Endpoint]:
    """Return the transfer, its regions pinned, and the endpoint that will carry it.

    deadline: monotonic seconds; bounds asking the peer and connecting to it anew, where that is needed.
    Raises UsageError for columns that are none, NotRegisteredError or AccessDeniedError naming the first bad row.
    """
    while True:
        if type(local) is int and type(remote) is int and type(nbytes) is int:
            remote_table = peer.transfers.table
            planned = _plan_row(table, remote_table, opcode, peer, local, remote, nbytes, notify, deadline)
            if planned is not None:
                planned[0].endpoint, planned[0].deadline = planned[1], deadline  # as below
                if peer.transfers.begin(planned[0], remote_table):
                    return planned
        transfer, endpoint, remote_table = _plan_rows(table, opcode, peer, local, remote, nbytes, notify, deadline)
        transfer.endpoint, transfer.deadline = endpoint, deadline  # Ctrl-C after it has begun leaves it to the deadline
        if peer.transfers.begin(transfer, remote_table):
            return transfer, endpoint


def _plan_row(
    table: RegionTable,
    remote_table: RemoteTable,
    opcode: Opcode,
    peer: PeerConnection,
    local: int,
    remote: int,
    nbytes: int,
    notify: bytes | None,
    deadline: float,
) -> tuple[Transfer, Endpoint] | None:
    """The short way for one row, without numpy; None for anything unusual, which the long way explains."""
    here = table.snapshot().find(local, nbytes)
    there = remote_table.find(remote, nbytes)
    if here is None or there is None or not there.rights.allows(opcode):
        return None
    if opcode is Opcode.READ and here.view.read_only:
        return None
    regions = (there,)
    transfer = Transfer(opcode, regions, (here,), notify, nbytes, peer.transfers.end)
    transfer.single = (local, remote, nbytes)
    return transfer, peer.endpoint_for(regions, deadline)


def _plan_rows(
    table: RegionTable,
    opcode: Opcode,
    peer: PeerConnection,
    local: Addresses,
    remote: Addresses,
    nbytes: Addresses,
    notify: bytes | None,
    deadline: float,
) -> tuple[Transfer, Endpoint, RemoteTable]:
    rows = as_rows(local, remote, nbytes)
    snapshot = table.snapshot()
    try:
        used, here = _find_regions(rows.local, rows.local_bounds, rows, snapshot, "local")
    except NotRegisteredError as exc:
        _refuse_swapped(exc, rows, snapshot, peer)
        raise
    if opcode is Opcode.READ:
        for index, region in enumerate(used):
            if region.view.read_only:
                row = 0 if here is None else int(np.flatnonzero(here == index)[0])
                raise AccessDeniedError(
                    f"row {row}: the local {region} is read-only memory, and a READ writes into it.",
                    remedy="Read into writeable memory.",
                    row=row,
                    rows=(row,),
                )
    peer.transfers.raise_if_void()
    side = f"remote ({peer.address})"
    remote_table = peer.transfers.table
    try:
        regions, there = _find_regions(rows.remote, rows.remote_bounds, rows, remote_table, side)
    except NotRegisteredError:  # the peer may have registered it meanwhile: ask, then judge
        peer.refresh(deadline)
        remote_table = peer.transfers.table
        regions, there = _find_regions(rows.remote, rows.remote_bounds, rows, remote_table, side)
    for index, region_there in enumerate(regions):
        if not region_there.rights.allows(opcode):
            row = 0 if there is None else int(np.flatnonzero(there == index)[0])
            raise access_denied(opcode, row, region_there, peer.address)
    *joined, first_row = coalesce(rows.local, rows.remote, rows.nbytes, local_region=here, remote_region=there)
    transfer = Transfer.of_columns(
        opcode,
        regions,
        used,
        notify,
        peer.transfers.end,
        columns=(joined[0], joined[1], joined[2]),
        region_rows=None if there is None else there[first_row],
        first_row=first_row,
        row_count=len(rows.local),
        nbytes_total=rows.nbytes_total,
    )
    return transfer, peer.endpoint_for(regions, deadline), remote_table


def _find_regions(
    addresses: AddressColumn, span: tuple[int, int], rows: Rows, table: _Table[RegionT_co], side: str
) -> tuple[tuple[RegionT_co, ...], IndexColumn | None]:
    """Return which regions of a table the rows lie in, and for each row its place among them; None: in the only one.

    addresses, span: the rows' addresses on that side and the bounds of them.
    """
    lowest, highest = span
    one = table.find(lowest, highest - lowest + rows.nbytes_bounds[1])  # the longest row taken to be everywhere
    if one is not None:
        return (one,), None
    index = locate(addresses, rows.nbytes, table.starts, table.ends, side=side, regions=table.regions)
    at = distinct(index, len(table.regions))
    found = tuple([table.regions[i] for i in at.tolist()])
    return found, None if len(found) == 1 else at.searchsorted(index)


def _refuse_swapped(exc: NotRegisteredError, rows: Rows, snapshot: RegionSnapshot, peer: PeerConnection) -> None:
    """Raise an error that says more where each address of a row lies in a region of the other side."""
    row = int(exc.values["row"])
    local, remote, nbytes = (column.item(row) for column in (rows.local, rows.remote, rows.nbytes))
    there, here = peer.transfers.table.find(local, nbytes), snapshot.find(remote, nbytes)
    if there is not None and here is not None:
        raise NotRegisteredError(
            f"row {row}: local {local:#x} lies in {peer.address}'s {there}, and remote {remote:#x} in {here} of this "
            "engine: the two are swapped.",
            remedy="Pass the addresses of this process before those of the peer, to write and to read alike.",
            **exc.values,
        ) from None


def block_addresses(
    argument: str, region: Region | RegionDescriptor, ids: Addresses, block_nbytes: int
) -> AddressColumn:
    """Return the addresses of blocks; raises UsageError naming the first that is not in the region."""
    if isinstance(block_nbytes, bool) or not isinstance(block_nbytes, (int, np.integer)) or block_nbytes < 1:
        raise UsageError(
            f"block_nbytes is {show(block_nbytes)}; it must be a whole number of at least 1.",
            remedy="Pass the size of one block in bytes.",
        )
    block_nbytes = int(block_nbytes)
    if isinstance(ids, (Region, RegionDescriptor)):
        raise UsageError(
            f"{argument} is {name_kind(ids)}, not a column of block numbers.",
            remedy="Pass each region before the numbers of its blocks.",
        )
    numbers = np.asarray(ids)
    if numbers.ndim != 1 or numbers.size == 0 or numbers.dtype.kind not in "iu":
        raise UsageError(
            f"{argument} is not a column of block numbers: shape {numbers.shape}, dtype {numbers.dtype}.",
            remedy="Pass a sequence or a 1-D array of integers, at least one.",
        )
    count = region.nbytes // block_nbytes
    bad = np.flatnonzero((numbers < 0) | (numbers >= count))
    if bad.size:
        row = int(bad[0])
        raise NotRegisteredError(
            f"row {row}: {argument} has block {int(numbers[row])}; {region} has {count} of {block_nbytes} bytes.",
            remedy="Check the block number and block_nbytes.",
            row=row,
            rows=tuple(bad[:1000].tolist()),
        )
    return region.address + numbers.astype(np.int64) * block_nbytes


def check_block_counts(src: AddressColumn, dst: AddressColumn) -> None:
    """Raise UsageError where there is not one block to write for each block to read."""
    if len(src) != len(dst):
        raise UsageError(
            f"src_ids has {format_count(len(src), 'block')}, dst_ids has {len(dst)}.",
            remedy="Give every block of the source its block of the destination.",
            src_count=len(src),
            dst_count=len(dst),
        )
