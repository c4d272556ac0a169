"""RegionTable against a model that keeps one dict entry per byte; at the end everything can be undone."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvxfer.errors import ClosedError, NotRegisteredError, RegionBusyError, RegionOverlapError
from kvxfer.memory import Region, RegionTable, Reservation, buffer_view


@dataclass(eq=False)
class Entry:
    """What the model knows about one range."""

    region: Region
    state: str = "live"
    references: int = 1
    local: int = 0
    remote: int = 0

    @property
    def bytes(self) -> set[int]:
        return set(range(self.region.address, self.region.end))


class RegionTableMachine(RuleBasedStateMachine):
    """Registrations, uses and removals in any order."""

    reservations = Bundle("reservations")
    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.table = RegionTable()
        self.model: list[Entry] = []  # all that are not gone
        self.version = -1

    def outcome_of_reserve(self, address: int, nbytes: int) -> tuple[str, Entry | None]:
        for entry in self.model:
            if (entry.region.address, entry.region.nbytes) == (address, nbytes):
                return ("again" if entry.state == "live" else "busy"), entry
        asked = set(range(address, address + nbytes))
        return ("overlap" if any(asked & entry.bytes for entry in self.model) else "new"), None

    @rule(target=reservations, address=st.integers(1, 24), nbytes=st.integers(1, 6))
    def reserve(self, address: int, nbytes: int) -> tuple[Reservation, Entry] | None:
        expected, entry = self.outcome_of_reserve(address, nbytes)
        try:
            got = self.table.reserve(buffer_view((address, nbytes)))
        except RegionOverlapError:
            assert expected == "overlap"
            return None
        except RegionBusyError:
            assert expected == "busy"
            return None
        if isinstance(got, Region):
            assert expected == "again"
            assert entry is not None
            assert entry.region is got
            entry.references += 1
            return None
        assert expected == "new"
        entry = Entry(got.region, "reserved")
        self.model.append(entry)
        return got, entry

    @rule(target=entries, taken=consumes(reservations))
    def commit(self, taken: tuple[Reservation, Entry] | None) -> Entry | None:
        if taken is None:
            return None
        taken[1].state = "live"
        assert taken[0].commit({}) is taken[1].region
        return taken[1]

    @rule(taken=consumes(reservations))
    def fail(self, taken: tuple[Reservation, Entry] | None) -> None:
        if taken is not None:
            taken[0].release()
            self.model.remove(taken[1])

    @rule(entry=entries, side=st.sampled_from(["local", "remote"]))
    def acquire(self, entry: Entry | None, side: str) -> None:
        if entry is None:
            return
        try:
            self.table.acquire((entry.region,), side)  # type: ignore[arg-type]
        except NotRegisteredError:
            assert entry.state != "live"
        else:
            assert entry.state == "live"
            setattr(entry, side, getattr(entry, side) + 1)

    @rule(entry=entries, side=st.sampled_from(["local", "remote"]))
    def release(self, entry: Entry | None, side: str) -> None:
        if entry is not None and getattr(entry, side):
            self.table.release((entry.region,), side)  # type: ignore[arg-type]
            setattr(entry, side, getattr(entry, side) - 1)

    @rule(entry=entries)
    def retire(self, entry: Entry | None) -> None:
        if entry is None:
            return
        is_last = entry.references == 1
        try:
            assert self.table.retire(entry.region.region_id) == is_last
        except ClosedError:
            assert entry.state != "live"
        except RegionBusyError:
            assert entry.state == "live"
            assert is_last
            assert entry.local
        else:
            assert entry.state == "live"
            assert not (is_last and entry.local)
            entry.references -= 1
            entry.state = "retired" if is_last else "live"

    @rule(entry=entries)
    def forget(self, entry: Entry | None) -> None:
        if entry is None or entry.state != "retired":
            return
        assert self.table.wait_idle(entry.region, 0.0) == (entry.remote == 0)
        try:
            self.table.forget(entry.region)
        except RegionBusyError:
            assert entry.remote
        else:
            assert not entry.remote
            entry.state = "gone"
            self.model.remove(entry)

    @invariant()
    def lookups_see_the_live_regions_only(self) -> None:
        snapshot = self.table.snapshot()
        owner = {byte: entry.region for entry in self.model if entry.state == "live" for byte in entry.bytes}
        for byte in range(32):
            assert snapshot.find(byte, 1) is owner.get(byte)
        assert snapshot.starts.tolist() == sorted(e.region.address for e in self.model if e.state == "live")
        assert snapshot.version >= self.version
        self.version = snapshot.version

    @invariant()
    def counts_agree(self) -> None:
        for entry in self.model:
            region = entry.region
            assert region.reference_count == entry.references
            assert (region.local_use_count, region.remote_use_count) == (entry.local, entry.remote)

    def teardown(self) -> None:
        """Whatever happened, everything can be undone, and the whole range is free again."""
        for entry in list(self.model):
            self.table.release((entry.region,) * entry.local, "local")
            self.table.release((entry.region,) * entry.remote, "remote")
            if entry.state == "reserved":
                Reservation(self.table, entry.region).release()
                continue
            while entry.state == "live" and not self.table.retire(entry.region.region_id):
                pass
            self.table.forget(entry.region)
        assert isinstance(self.table.reserve(buffer_view((1, 64))), Reservation)


TestRegionTable = RegionTableMachine.TestCase
TestRegionTable.settings = settings(stateful_step_count=20)
