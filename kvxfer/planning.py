"""From the caller's columns to a Transfer: every row is checked on both sides before anything is sent.

Pure but for the counts it takes: reads the local region table and the segment's, asks the peer once about regions that
are not known yet, joins adjacent rows. Next: `batch.TransferBatch.start`, then `transports.base.Endpoint`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import AccessDeniedError, NotRegisteredError, UsageError
from kvxfer.memory import Region, RegionTable, as_columns, coalesce, distinct, locate
from kvxfer.remote_table import RemoteTable
from kvxfer.segment import Segment
from kvxfer.transports.base import Endpoint, Transfer
from kvxfer.types import AddressColumn, Opcode, RegionDescriptor

__all__ = ["Addresses", "access_denied", "block_addresses", "plan"]

Addresses = int | Sequence[int] | npt.NDArray[np.integer[Any]]
"""One address, or a column of them."""


def plan(
    table: RegionTable,
    opcode: Opcode,
    segment: Segment,
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
            remote_table = segment.table
            planned = _plan_row(table, remote_table, opcode, segment, local, remote, nbytes, notify, deadline)
            if planned is not None and segment.begin(planned[0], remote_table):
                return planned
        transfer, endpoint, remote_table = _plan_rows(table, opcode, segment, local, remote, nbytes, notify, deadline)
        if segment.begin(transfer, remote_table):
            return transfer, endpoint


def _plan_row(
    table: RegionTable,
    remote_table: RemoteTable,
    opcode: Opcode,
    segment: Segment,
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
    transfer = Transfer(opcode, regions, (here,), notify, nbytes, segment.end)
    transfer.single = (local, remote, nbytes)
    return transfer, segment.endpoint_for(regions, deadline)


def _plan_rows(
    table: RegionTable,
    opcode: Opcode,
    segment: Segment,
    local: Addresses,
    remote: Addresses,
    nbytes: Addresses,
    notify: bytes | None,
    deadline: float,
) -> tuple[Transfer, Endpoint, RemoteTable]:
    columns = as_columns(local, remote, nbytes)
    snapshot = table.snapshot()
    here = locate(columns[0], columns[2], snapshot.starts, snapshot.ends, side="local", regions=snapshot.regions)
    used = snapshot.find_used(here)
    if opcode is Opcode.READ:
        for region in used:
            if region.view.read_only:
                row = int(np.flatnonzero(snapshot.starts[here] == region.address)[0])
                raise AccessDeniedError(
                    f"row {row}: the local {region} is read-only memory, and a READ writes into it.",
                    remedy="Read into writeable memory.",
                    row=row,
                    rows=(row,),
                )
    segment.raise_if_void()
    remote_table = segment.table
    there: npt.NDArray[np.intp] | None = None
    with contextlib.suppress(NotRegisteredError):  # the peer may have registered it meanwhile: ask, then judge
        there = _locate_there(columns[1], columns[2], remote_table, segment)
    if there is None:
        segment.refresh(deadline)
        remote_table = segment.table
        there = _locate_there(columns[1], columns[2], remote_table, segment)
    touched = distinct(there, len(remote_table.regions))
    regions = tuple(remote_table.regions[index] for index in touched.tolist())
    for index, region_there in zip(touched.tolist(), regions, strict=True):
        if not region_there.rights.allows(opcode):
            raise access_denied(opcode, int(np.flatnonzero(there == index)[0]), region_there, segment.address)
    *joined, first_row = coalesce(*columns, local_region=here, remote_region=there)
    transfer = Transfer.of_columns(
        opcode,
        regions,
        used,
        notify,
        segment.end,
        columns=(joined[0], joined[1], joined[2]),
        region_rows=None if len(regions) == 1 else np.searchsorted(touched, there[first_row]),
        first_row=first_row,
        row_count=len(columns[0]),
    )
    return transfer, segment.endpoint_for(regions, deadline), remote_table


def _locate_there(
    addresses: AddressColumn, nbytes: AddressColumn, table: RemoteTable, segment: Segment
) -> npt.NDArray[np.intp]:
    side = f"remote ({segment.address})"
    return locate(addresses, nbytes, table.starts, table.ends, side=side, regions=table.regions)


def access_denied(opcode: Opcode, row: int, region: Region | RegionDescriptor, where: str) -> AccessDeniedError:
    """Return the error for a row whose region does not have the right."""
    return AccessDeniedError(
        f"row {row}: {region} of {where} does not allow a {opcode.name}; its rights are {region.rights}.",
        remedy="Let the owner register it with the right (rights=kvxfer.Rights.ALL), or use another region.",
        row=row,
        rows=(row,),
    )


def block_addresses(
    argument: str, region: Region | RegionDescriptor, ids: Addresses, block_nbytes: int
) -> AddressColumn:
    """Return the addresses of blocks; raises UsageError naming the first that is not in the region."""
    if isinstance(block_nbytes, bool) or not isinstance(block_nbytes, int) or block_nbytes < 1:
        raise UsageError(f"block_nbytes is {block_nbytes!r}; it must be a whole number of at least 1.")
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
