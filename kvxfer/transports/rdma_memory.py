"""Registered memory on all open RDMA ports, also on those that come later: each region has its keys on each of them.

Registering is `memory/registration.py`'s; here is which regions there are and which ports must have them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvxfer.errors import VerbsError
from kvxfer.log import get_logger
from kvxfer.memory.registration import DeviceRegistration, Registration, register

if TYPE_CHECKING:
    from kvxfer.transports.rdma_nic import Nic
    from kvxfer.verbs.enums import Access
    from kvxfer.verbs.protection_domain import ProtectionDomain

__all__ = ["RdmaMemory"]

log = get_logger(__name__)


class RdmaMemory:
    """The regions of one engine on its ports. All methods may be called from any thread."""

    def __init__(self, nics: Sequence[Nic], chunk_nbytes_max: int | None) -> None:
        self._chunk_nbytes_max = chunk_nbytes_max
        self._lock = threading.Lock()
        self._nics = list(nics)
        self._regions: dict[tuple[int, int], _Region] = {}

    def register(self, address: int, nbytes: int, access: Access) -> dict[str, Any]:
        """Register a range on every port and return what a peer needs for it. That changes when a port is added.

        Raises RegistrationError, with nothing registered.
        """
        region = _Region(address, nbytes, access, self._chunk_nbytes_max)
        try:
            while True:
                with self._lock:
                    missing = region.missing(self._nics)
                    if not missing:
                        self._regions[address, nbytes] = region
                        return region.keys
                region.extend(missing)  # a port that is added meanwhile is missing in the next round
        except BaseException:
            region.close(log_only=True)
            raise

    def deregister(self, address: int, nbytes: int) -> None:
        """Undo `register`. Raises VerbsError where a device refuses; what is left is tried again by the next call."""
        with self._lock:
            region = self._regions.get((address, nbytes))
        if region is not None:
            region.close()
            with self._lock:
                del self._regions[address, nbytes]

    def add(self, nic: Nic) -> None:
        """Register everything on one port more. Raises RegistrationError, and nothing is on it then."""
        with self._lock:
            self._nics.append(nic)  # from now on new regions are on it too
            regions = list(self._regions.values())
        try:
            for region in regions:
                region.extend([nic])
        except BaseException:
            with self._lock:
                self._nics.remove(nic)
                regions = list(self._regions.values())
            for region in regions:
                region.shrink(nic)
            raise

    def close(self) -> None:
        """Deregister everything; a device that refuses is told in the log."""
        for region in self._regions.values():
            region.close(log_only=True)
        self._regions.clear()


class _Region:
    """One region: what it is on each device. `keys` is what a peer needs; it is shared with the engine's table, so the
    tables in it are replaced, never changed."""

    def __init__(self, address: int, nbytes: int, access: Access, chunk_nbytes_max: int | None) -> None:
        self.keys: dict[str, Any] = {"nics": {}}
        self._address = address
        self._nbytes = nbytes
        self._access = access
        self._chunk_nbytes_max = chunk_nbytes_max
        self._lock = threading.Lock()
        self._nics: list[Nic] = []
        self._devices: dict[ProtectionDomain, tuple[DeviceRegistration, Registration]] = {}
        self._is_closed = False

    def missing(self, nics: Sequence[Nic]) -> list[Nic]:
        """Return those of the ports that it is not on."""
        return [nic for nic in nics if nic not in self._nics]

    def extend(self, nics: Sequence[Nic]) -> None:
        """Register it on more ports; on one that it is on already, and once it is closed, nothing is done."""
        with self._lock:
            if self._is_closed:
                return
            nics = self.missing(nics)
            domains = [domain for domain in dict.fromkeys(nic.domain for nic in nics) if domain not in self._devices]
            if domains:
                registration = register(
                    domains,
                    self._address,
                    self._nbytes,
                    self._access,
                    chunk_nbytes_max=self._chunk_nbytes_max,
                    trusts_device=self._chunk_nbytes_max is None,
                )
                for domain, device in zip(domains, registration.devices, strict=True):
                    self._devices[domain] = (device, registration)
                    if len(device.chunks) > 1:
                        self._note_chunks(device)
            for nic in nics:
                chunks = self._devices[nic.domain][0].chunks
                nic.add_keys(self._address, self._nbytes, chunks[["address", "nbytes", "lkey"]].tolist())
                rows = [list(row) for row in chunks[["address", "nbytes", "rkey"]].tolist()]
                self.keys["nics"] = {**self.keys["nics"], nic.name: rows}
                self._nics.append(nic)

    def _note_chunks(self, device: DeviceRegistration) -> None:
        """Say that a device has it in pieces, and whose limit that is; for a person."""
        facts = {
            "count": len(device.chunks),
            "limit_nbytes": device.limit_nbytes,
            "limit_origin": device.limit_origin,
        }
        self.keys["chunked"] = {**self.keys.get("chunked", {}), device.device: facts}

    def shrink(self, nic: Nic) -> None:
        """Take it off a port that was added alone."""
        with self._lock:
            if nic in self._nics:
                self._nics.remove(nic)
                nic.remove_keys(self._address, self._nbytes)
                self.keys["nics"] = {name: rows for name, rows in self.keys["nics"].items() if name != nic.name}
            if all(nic.domain is not one.domain for one in self._nics) and nic.domain in self._devices:
                _close(self._devices.pop(nic.domain)[1])

    def close(self, *, log_only: bool = False) -> None:
        """Deregister it everywhere. Raises the first refusal, unless log_only; a second call tries again what is
        left."""
        with self._lock:
            self._is_closed = True
            for nic in self._nics:
                nic.remove_keys(self._address, self._nbytes)
            errors = [
                error
                for registration in dict.fromkeys(one for _, one in self._devices.values())
                if (error := _close(registration, log_only=log_only)) is not None
            ]
        if errors and not log_only:
            raise errors[0]


def _close(registration: Registration, *, log_only: bool = True) -> VerbsError | None:
    try:
        registration.close()
    except VerbsError as error:  # the device may be gone: the rest is closed all the same
        if log_only:
            log.warning("rdma.close_failed", error=error.message)
        return error
    return None
