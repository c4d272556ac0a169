"""The doctor's checks of one peer: what carries to it, and where both have RDMA, each rail and its attributes.

A rail that does not work is no failure of the machine, because other transports carry on: it is "warn".
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvxfer.cli.check import Check, Machine
from kvxfer.cli.keys import key_settings, remedy_of
from kvxfer.cli.peer_attributes import ENGINES, AttributeRow, compare_attributes
from kvxfer.cli.rail_check import RailReport, check_rails
from kvxfer.cli.table import Style, draw_table, format_gbps, format_size
from kvxfer.errors import KvxferError, TransportUnavailableError
from kvxfer.transports.rdma import RdmaTransport, read_card
from kvxfer.transports.rdma_connect import best_attributes
from kvxfer.transports.rdma_worked import what_worked

if TYPE_CHECKING:
    from kvxfer.engine import TransferEngine
    from kvxfer.segment import Segment
    from kvxfer.transports.rdma_nic import Nic
    from kvxfer.verbs.port_offer import PortOffer

__all__ = ["peer_checks", "rail_checks"]

RAILS_TIMEOUT_S = 60.0
REFUSED, REMARKED = "!", "*"


def peer_checks(machine: Machine, *, peer: str, key_env: str | None) -> Iterator[Check]:
    """Open the peer as a program would, and say what carries and why the others do not."""
    del machine
    import kvxfer

    try:
        with kvxfer.TransferEngine(port=0, **key_settings(key_env)) as engine:
            segment = engine.open_segment(peer)
            held = format_size(sum(region.nbytes for region in segment.regions))
            yield Check("peer", "ok", f"{peer} answers; {segment.transport} carries; it offers {held}")
            for transport, reason in segment.passed_over.items():
                yield Check(f"peer {transport}", "ok", f"passed over: {reason}")
            if "rdma" in engine.transports and segment.offer_of("rdma") is not None:
                yield from rail_checks(engine, segment)
    except TransportUnavailableError as error:
        yield Check("peer", "fail", error.message, error.remedy)
        for transport, reason in error.reasons.items():
            yield Check(f"peer {transport}", "fail", f"passed over: {reason}")
    except KvxferError as error:
        yield Check("peer", "fail", error.message, remedy_of(error))


def rail_checks(engine: TransferEngine, segment: Segment) -> Iterator[Check]:
    """Try each rail, one after the other, and compare what queue pairs are set to."""
    offer = segment.offer_of("rdma")
    assert offer is not None  # asked for by the caller
    offers = [one for _, one in read_card(offer, segment.address)]
    found = check_rails(engine, segment.address, deadline=time.monotonic() + RAILS_TIMEOUT_S)
    working = [rail for rail in found if rail.is_working]
    tried = [rail for rail in found if rail.status != "no path"]
    value = f"{len(working)} of {len(tried)} rails work; {len(found) - len(tried)} pairs of ports have no path"
    matrix = _draw_matrix(found)
    if working:
        yield Check("peer rails", "ok", f"{value}\n{matrix}")
    else:
        remedy = "`kvxfer devices` on both hosts shows the addresses of the ports; docs/rdma.md lists the usual causes."
        yield Check("peer rails", "warn", f"{value}\n{matrix}", remedy)
    for rail in found:
        yield _rail_check(rail)
    yield from _ladder_checks()
    transport = engine._transports.find("rdma")
    assert isinstance(transport, RdmaTransport)
    yield from _attribute_checks(transport.nics, offers, engine)


def _draw_matrix(found: list[RailReport]) -> str:
    """Return the rails as a table: our ports down, the peer's across."""
    signs = {"ok": "works", "lowered": "lowered", "failed": "FAILS", "no path": "-", "not tried": "not tried"}
    columns = list(dict.fromkeys(rail.remote for rail in found))
    status = {(rail.local, rail.remote): signs[rail.status] for rail in found}
    rows = [
        [local, *(status.get((local, remote), "") for remote in columns)]
        for local in dict.fromkeys(rail.local for rail in found)
    ]
    return draw_table(["here / there", *columns], rows, ["<"] * (len(columns) + 1), Style())


def _rail_check(rail: RailReport) -> Check:
    name = f"{rail.local} to {rail.remote}"
    if rail.status == "no path":
        return Check(name, "ok", f"no path: {rail.reason}")
    if rail.status in ("failed", "not tried"):
        return Check(name, "warn", rail.reason, rail.remedy)
    addresses = f"{rail.local_gid} to {rail.remote_gid}; " if rail.local_gid else ""
    depth = f"{rail.read_depth} READs at once"
    value = f"{addresses}MTU {rail.path_mtu}, {depth}, connected in {rail.connect_ms:.1f} ms"
    if rail.nbytes:
        moved, write, read = format_size(rail.nbytes), format_gbps(rail.write_gbps), format_gbps(rail.read_gbps)
        value += f"; {moved} written, read back and equal, about {write} and {read} GB/s"
    else:
        value += "; nothing moved: the peer offers no pool (start `kvxfer serve` there)"
    if rail.attempts:
        value += "\ntried before: " + "; ".join(rail.attempts)
    if rail.lowered:
        value += f"\nlowered: {rail.lowered}"
        remedy = "It works with less than the devices say they can do: is the firmware the newest?"
        return Check(name, "warn", value, remedy)
    return Check(name, "ok", value)


def _ladder_checks() -> Iterator[Check]:
    """What the ladder ended with for each two kinds of device, where something was lowered."""
    for (local, remote), attributes in what_worked().items():
        values = ", ".join(f"{name} {value}" for name, value in attributes.to_json().items() if value is not None)
        yield Check(
            "rdma ladder", "ok", f"devices {local} to {remote} (vendor/part/firmware) took lower attributes: {values}"
        )


def _attribute_checks(nics: tuple[Nic, ...], offers: list[PortOffer], engine: TransferEngine) -> Iterator[Check]:
    """The attributes of several engines beside each other, once for each kind of device here."""
    kinds = {nic.kind: nic for nic in reversed(nics)}
    for nic in reversed(kinds.values()):
        there = next((one for one in offers if one.link_layer is nic.port.link_layer), None)
        if there is None:
            continue
        attributes = best_attributes(nic, there)
        rows = compare_attributes(nic.context.limits, nic.port, attributes, active_mtu_there=there.mtu.nbytes)
        table, notes = draw_attributes(rows)
        yield Check(
            f"{nic.name} attributes",
            "ok",
            "\n".join(["what queue pairs to this peer are set to, by kvxfer and by others", table, *notes]),
        )


def draw_attributes(rows: tuple[AttributeRow, ...]) -> tuple[str, list[str]]:
    """Return the table, and a note for each value that this device would refuse or that has a remark."""
    users: dict[str, list[str]] = {}
    lines = []
    for row in rows:
        cells = []
        for engine, cell in zip(ENGINES, row.cells, strict=True):
            told = ""
            if cell.refusal:
                told = f"{REFUSED} {row.name} {cell.value} would be refused ({{}}): {cell.refusal}"
            elif cell.remark:
                told = f"{REMARKED} {row.name} {cell.value} ({{}}): {cell.remark}"
            if told:
                users.setdefault(told, []).append(engine)
            cells.append(cell.value + told[:1])
        lines.append([row.name, *cells, row.bound])
    notes = [told.replace("{}", ", ".join(names)) for told, names in users.items()]
    return draw_table(["attribute", *ENGINES, "device"], lines, ["<"] * (len(ENGINES) + 2), Style()), notes
