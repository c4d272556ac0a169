"""Try every RDMA rail to one peer: connect it, move a little, compare it, time it.

A rail is a port of this host and a port of the peer. Each is tried by an engine of its own that has these two ports
alone, so that what is tried is what a program does. Pairs that cannot reach each other (another link layer, no route)
are not tried. `kvxfer doctor --peer` and `kvxfer mesh` show what is found here.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvxfer.config import EngineConfig
from kvxfer.errors import KvxferError, PeerRefusedError, TransportUnavailableError, UnsupportedError
from kvxfer.text import clean
from kvxfer.transports.rdma import RdmaTransport, read_card
from kvxfer.transports.rdma_connect import best_attributes
from kvxfer.transports.rdma_pairing import pair_rails
from kvxfer.types import Rights
from kvxfer.verbs.port_offer import PortOffer

if TYPE_CHECKING:
    from kvxfer.engine import TransferEngine
    from kvxfer.segment import Segment
    from kvxfer.transports.rdma_ladder import QueuePairAttributes
    from kvxfer.types import RegionDescriptor

__all__ = ["CONTROL", "REGION_NAME", "RailReport", "Share", "Status", "check_rails", "find_pool"]

REGION_NAME = "kvxfer.serve"
"""The region that `kvxfer serve` offers to be written to."""
CONTROL = ("tcp", "shm", "rdma")
"""How a peer is asked what it has: not by what is to be tried, if there is another way."""
SLOT_NBYTES_MAX = 4 << 20
SLOT_UNIT_NBYTES = 4096
BLOCK_NBYTES = 64 << 10
TIMED_ROUNDS = 3
TEXT_LENGTH_MAX = 4000
MOVE_TIMEOUT_S = 5.0

Status = Literal["ok", "lowered", "no path", "failed", "not tried"]


@dataclass(frozen=True)
class RailReport:
    """What became of one rail.

    status: "lowered" where it works with less than both devices say they can do, "no path" where the two ports cannot
    reach each other and are not meant to, "not tried" where the time was over. lowered: which attributes, to what.
    nbytes: that were written, read back and compared; 0 where the peer offers no memory for that.
    gbps: 10^9 bytes a second, the best of a few small batches: an order of magnitude, no benchmark.
    """

    local: str
    remote: str
    status: Status
    reason: str = ""
    remedy: str = ""
    local_gid: str = ""
    remote_gid: str = ""
    path_mtu: int = 0
    read_depth: int = 0
    lowered: str = ""
    attempts: tuple[str, ...] = ()
    connect_ms: float = 0.0
    nbytes: int = 0
    write_gbps: float = 0.0
    read_gbps: float = 0.0

    @property
    def gids(self) -> str:
        """The pair of addresses, for a person; "" on InfiniBand without a GID."""
        if not self.local_gid:
            return ""
        return f"{self.local_gid.partition(' ')[0]} to {self.remote_gid.partition(' ')[0]}"

    @property
    def is_working(self) -> bool:
        """Whether it carries data."""
        return self.status in ("ok", "lowered")

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> RailReport:
        """Return a report that another process made; raises ValueError where it is none."""
        try:
            values: dict[str, Any] = {name: take(obj[name]) for name, take in _PLAIN.items()}
            attempts = tuple(map(_take_text, obj["attempts"]))
            status = obj["status"]
            if status not in ("ok", "lowered", "no path", "failed", "not tried"):
                raise ValueError(f"there is no status {status!r:.40}")
            return cls(_take_text(obj["local"]), _take_text(obj["remote"]), status, attempts=attempts, **values)
        except (KeyError, TypeError) as exc:
            raise ValueError(f"it is no report of a rail: {exc!r}") from None


def _take_text(value: Any) -> str:
    """Return what another process wrote as text that does nothing to a terminal."""
    return clean(str(value), TEXT_LENGTH_MAX)


_PLAIN: Mapping[str, Callable[[Any], Any]] = {
    one.name: _take_text if isinstance(one.default, str) else type(one.default)
    for one in fields(RailReport)
    if isinstance(one.default, str | int | float)
}


@dataclass(frozen=True)
class Share:
    """Which part of the peer's memory is ours to write: one of `count` equal ones, so that hosts do not meet there."""

    index: int = 0
    count: int = 1

    def cut(self, pool_nbytes: int, parallel: int) -> list[range]:
        """Return the offsets of `parallel` slots in this share of a pool; empty ones where it is too small."""
        most = pool_nbytes // (self.count * parallel) // SLOT_UNIT_NBYTES * SLOT_UNIT_NBYTES
        nbytes = min(SLOT_NBYTES_MAX, most)
        starts = ((self.index * parallel + at) * nbytes for at in range(parallel))
        return [range(start, start + nbytes) for start in starts]


def find_pool(segment: Segment) -> RegionDescriptor | None:
    """Return the region that a peer offers for such trials, if it may be written and read."""
    found = next((region for region in segment.regions if region.name == REGION_NAME), None)
    return found if found is not None and found.rights == Rights.ALL else None


def check_rails(
    engine: TransferEngine,
    address: str,
    *,
    share: Share | None = None,
    parallel: int = 1,
    deadline: float,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[RailReport]:
    """Try each port of `engine` with each port of the peer at `address`, until `deadline` (monotonic seconds).

    parallel: how many at once. Rates are told for rails that ran beside each other, then.
    Raises TransportUnavailableError where one of the two has no RDMA, PeerError where the peer does not answer.
    """
    segment = engine.open_segment(address, transports=CONTROL)
    transport = engine._transports.find("rdma")
    assert isinstance(transport, RdmaTransport)
    offer = segment.offer_of("rdma")
    if offer is None:
        raise TransportUnavailableError(
            f"{address} does not offer rdma.",
            remedy="`kvxfer doctor` there says why; start the peer with rdma among its transports.",
            peer=address,
        )
    offers = read_card(offer, address)
    pool = find_pool(segment)
    slots = (share or Share()).cut(0 if pool is None else pool.nbytes, parallel)
    free: queue.SimpleQueue[range] = queue.SimpleQueue()
    for slot in slots:
        free.put(slot)

    def check(pair: _Pair) -> RailReport:
        if pair.no_path:
            return RailReport(pair.local, pair.remote, "no path", pair.no_path)
        if is_stopped() or time.monotonic() >= deadline:
            return RailReport(pair.local, pair.remote, "not tried", "the time was over before its turn came")
        slot = free.get()
        try:
            return _Trial(engine.config, address, pair, deadline).run(slot)
        finally:
            free.put(slot)

    pairs = list(_find_pairs(transport, offers, address))
    with ThreadPoolExecutor(parallel, thread_name_prefix="kvxfer-rail") as workers:
        return list(workers.map(check, pairs))


@dataclass(frozen=True)
class _Pair:
    """A port here and one there. best: what they say they can do together. no_path: why there is none, or ""."""

    local: str
    remote: str
    best: QueuePairAttributes
    no_path: str = ""


def _find_pairs(transport: RdmaTransport, offers: list[tuple[str, PortOffer]], peer: str) -> Iterator[_Pair]:
    for nic in transport.nics:
        for kind, offer in offers:
            problem = ""
            try:
                pair_rails([nic], [(kind, offer)], peer)
            except UnsupportedError as error:
                problem = next(iter(error.values.get("reasons", {}).values()), error.message)
            yield _Pair(nic.name, f"{offer.device}:{offer.port}", best_attributes(nic, offer), problem)


class _Trial:
    """One rail, tried by an engine that has no other."""

    def __init__(self, config: EngineConfig, address: str, pair: _Pair, deadline: float) -> None:
        self._address = address
        self._pair = pair
        self._deadline = deadline
        own = {row.name: getattr(config, row.name) for row in EngineConfig.settings()}
        self._settings = own | {
            "host": "127.0.0.1",
            "port": 0,
            "advertise_host": None,
            "transports": ("rdma",),
            "rdma_devices": pair.local,
            "rdma_peer_devices": pair.remote,
            "connect_timeout_s": min(config.connect_timeout_s, self._left_s()),
        }

    def run(self, slot: range) -> RailReport:
        """Connect and move. slot: which bytes of the peer's pool may be written."""
        from kvxfer.engine import TransferEngine

        facts: dict[str, Any] = {}
        try:
            with TransferEngine(**self._settings) as engine:
                started = time.monotonic()
                segment = engine.open_segment(self._address)
                facts["connect_ms"] = round((time.monotonic() - started) * 1e3, 2)
                (rail,) = segment.describe()["rdma"]["rails"]
                attributes, best = rail["attributes"], self._pair.best.to_json()
                facts |= {name: rail[name] for name in ("local_gid", "remote_gid")}
                facts["attempts"] = tuple(rail["attempts"])
                facts["lowered"] = ", ".join(
                    f"{name} {best[name]} -> {value}" for name, value in attributes.items() if value != best[name]
                )
                facts |= {"path_mtu": attributes["path_mtu"], "read_depth": attributes["read_depth"]}
                if slot:
                    facts |= self._move(engine, segment, slot)
        except KvxferError as error:
            facts.setdefault("attempts", tuple(dict.fromkeys(map(str, error.values.get("attempts", ())))))
            return RailReport(self._pair.local, self._pair.remote, "failed", _reason_of(error), error.remedy, **facts)
        except Exception as exc:  # a bug: the other rails are worth knowing
            reason = f"this end failed: {exc!r}"
            return RailReport(self._pair.local, self._pair.remote, "failed", reason, "Please report it.", **facts)
        return RailReport(self._pair.local, self._pair.remote, "lowered" if facts["lowered"] else "ok", **facts)

    def _move(self, engine: TransferEngine, segment: Segment, slot: range) -> dict[str, Any]:
        """Write a pattern, read it back, compare, and time both. Raises what went wrong."""
        pool = find_pool(segment)
        if pool is None or slot.stop > pool.nbytes:
            return {}
        nbytes = len(slot)
        memory = np.empty(2 * nbytes, np.uint8)
        region = engine.register(memory)
        sent, received = memory[:nbytes], memory[nbytes:]
        sent[:] = np.frombuffer(np.random.default_rng().bytes(nbytes), np.uint8)
        received[:] = ~sent
        block_nbytes = min(BLOCK_NBYTES, nbytes)
        rows = np.arange(nbytes // block_nbytes, dtype=np.int64) * block_nbytes
        there = pool.address + slot.start + rows
        here = region.address + rows

        def timed(move: Callable[..., None], local: Any) -> float:
            timeout_s = min(MOVE_TIMEOUT_S, self._left_s())
            started = time.perf_counter()
            move(segment, local, there, block_nbytes, timeout_s=timeout_s)
            return time.perf_counter() - started

        timed(engine.write, here)
        timed(engine.read, here + nbytes)
        moved = len(rows) * block_nbytes
        wrong = int((sent[:moved] != received[:moved]).sum())
        if wrong:
            raise PeerRefusedError(
                f"{wrong} of {moved} bytes that were written over this rail came back different.",
                remedy="Does anything else write to that memory, another mesh or a bench? If not, the device or kvxfer "
                "is at fault: please report it.",
                peer=self._address,
            )
        writes = [timed(engine.write, here) for _ in range(TIMED_ROUNDS)]
        reads = [timed(engine.read, here + nbytes) for _ in range(TIMED_ROUNDS)]
        return {
            "nbytes": moved,
            "write_gbps": round(moved / min(writes) / 1e9, 3),
            "read_gbps": round(moved / min(reads) / 1e9, 3),
        }

    def _left_s(self) -> float:
        return max(0.1, self._deadline - time.monotonic())


def _reason_of(error: KvxferError) -> str:
    """Return why a rail failed, in a sentence or two: of the first pair of GIDs that was tried, without all its values.

    Those are in the log of the engine that tried.
    """
    attempts = error.values.get("attempts", ())
    if attempts:
        first = attempts[0]
        reason, _, _ = first.reason.partition(" Given: ")  # queue_pair.py: what follows is every value
        return f"{first.step} ({first.side}): {reason}"
    reason = error.values.get("reasons", {}).get("rdma", error.message)
    return str(reason)
