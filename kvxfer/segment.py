"""A Segment: one peer's memory, as its user holds it.

Belongs to one process at the other end, told by its generation. The connections behind it may break and are made anew
at the next use; when another process answers at the address, the segment is void for good, because every address in it
was the old process's. Read next: `peer_connection.py`, the way there; `peer_transfers.py`, what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.errors import ClosedError, NotRegisteredError, UsageError
from kvxfer.peer_connection import PeerConnection
from kvxfer.text import format_count, show
from kvxfer.types import RegionDescriptor

__all__ = ["Segment"]


class Segment:
    """A peer's memory, opened by `TransferEngine.open_segment`. All methods may be called from any thread."""

    def __init__(self, opener: object, connection: PeerConnection) -> None:
        self._opener = opener
        """What opened it: only that engine can use it."""
        self._connection = connection
        self._transfers = connection.transfers

    @property
    def address(self) -> str:
        """The peer's address, "host:port"."""
        return self._connection.address

    @property
    def name(self) -> str:
        """The peer's name: its setting `name`, else its address."""
        return self._connection.name

    @property
    def generation(self) -> str:
        """The peer's `TransferEngine.generation`: one process, and no other that is started in its place."""
        return self._connection.generation

    @property
    def transport(self) -> str:
        """The name of the transport that carries batches to this peer."""
        endpoints = self._transfers.endpoints
        return endpoints[0].transport if endpoints else ""

    @property
    def passed_over(self) -> Mapping[str, str]:
        """Transports that were preferred to the one in use, and why each was passed over."""
        return self._connection.passed_over

    @property
    def regions(self) -> tuple[RegionDescriptor, ...]:
        """The peer's regions as last heard, ascending in address; `refresh` asks again."""
        return self._transfers.table.regions

    @property
    def is_open(self) -> bool:
        """Whether the segment can be used; False once closed, or when the peer has restarted."""
        return self._transfers.void is None

    @property
    def is_connected(self) -> bool:
        """Whether the control connection stands; where it does not, the next use connects anew."""
        return self._connection.is_connected

    def region(self, name: str) -> RegionDescriptor:
        """Return the peer's region of that name, asking the peer if it is not known yet.

        Raises NotRegisteredError where it has none of that name.
        """
        if not isinstance(name, str):
            raise UsageError(
                f"{show(name)} is no name of a region.",
                remedy="Pass the name that the peer gave it, or what segment.region returned for that name.",
            )
        found = self._transfers.table.find_name(name)
        if found is None:
            self.refresh()
            found = self._transfers.table.find_name(name)
        if found is None:
            names = sorted(region.name for region in self.regions if region.name)
            raise NotRegisteredError(
                f"{self.address} has no region named {show(name)}; it has {names[:20] or 'no named region'}.",
                remedy="Let the peer register it first (register(..., name=...)), or use one of these names.",
                name=name,
                peer=self.address,
            )
        return found

    def refresh(self) -> None:
        """Ask the peer for its regions, connecting anew where the control connection is lost.

        Raises PeerUnreachableError where it does not answer within handshake_timeout_s, PeerRestartedError where
        another process does.
        """
        self._connection.refresh()

    def describe(self) -> dict[str, Any]:
        """Return facts for a person: the transport, how it reaches the peer, why others were passed over."""
        facts: dict[str, Any] = {"address": self.address, "name": self.name, "generation": self.generation}
        facts |= {"transport": self.transport, "passed_over": dict(self.passed_over)}
        return facts | {endpoint.transport: dict(endpoint.describe()) for endpoint in self._transfers.endpoints}

    def offer_of(self, transport: str) -> Mapping[str, Any] | None:
        """Return what the peer told of one of its transports when it was connected; None where it does not offer it."""
        offers = self._connection.session().card.get("transports")
        offer = offers.get(transport) if isinstance(offers, dict) and isinstance(transport, str) else None
        return offer if isinstance(offer, dict) else None

    def close(self) -> None:
        """Close the connections to this peer; batches still running fail. Tolerated twice."""
        error = ClosedError(f"the segment {self.address} was closed.", remedy="Open it again.")
        self._connection.make_void(error, goodbye="segment closed")

    def __repr__(self) -> str:
        regions = format_count(len(self.regions), "region")
        return f"<Segment {self.address} over {self.transport or 'nothing yet'}, {regions}>"
