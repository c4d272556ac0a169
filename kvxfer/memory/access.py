"""The error for a row whose region does not have the right that it needs, on whichever side it was found."""

from __future__ import annotations

from kvxfer.errors import AccessDeniedError
from kvxfer.memory.region import Region
from kvxfer.types import Opcode, RegionDescriptor

__all__ = ["access_denied"]


def access_denied(opcode: Opcode, row: int, region: Region | RegionDescriptor, where: str) -> AccessDeniedError:
    """Return the error for a row whose region does not allow `opcode`. where: the address of the region's owner."""
    return AccessDeniedError(
        f"row {row}: {region} of {where} does not allow a {opcode.name}; its rights are {region.rights}.",
        remedy="Let the owner register it with the right (rights=kvxfer.Rights.ALL), or use another region.",
        row=row,
        rows=(row,),
    )
