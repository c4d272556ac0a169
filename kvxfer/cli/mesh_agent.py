"""What `kvxfer serve` does for `kvxfer mesh`: try the rails from here to other engines, and keep the answer for it.

A request comes as a notification; the answer is a region named after the request, which the asker reads. So the one
who asks needs no way back to it, and nothing new is in the protocol. Requests are dealt with one after the other.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.addresses import parse_host_port
from kvxfer.cli.rail_check import RailReport, Share, check_rails
from kvxfer.errors import KvxferError
from kvxfer.text import clean
from kvxfer.transports.rdma import RdmaTransport
from kvxfer.types import Rights

if TYPE_CHECKING:
    from kvxfer.engine import TransferEngine
    from kvxfer.memory import Region

__all__ = ["ANSWER_PREFIX", "TRANSPORT", "MeshAgent", "MeshRequest", "TargetReport"]

REQUEST_KEY = "kvxfer.mesh"
ANSWER_PREFIX = "kvxfer.mesh."
TRANSPORT = "rdma"
"""What an engine that has no RDMA at all names among its unused ports."""
VERSION = 1
ANSWERS_MAX = 16
TARGETS_MAX = 1024
PARALLEL_MAX = 64
TIMEOUT_MAX_S = 3600.0
ID_LENGTH_MAX = 64


@dataclass(frozen=True)
class MeshRequest:
    """What an agent is asked. targets: the addresses to try. share: of their memory, for this agent."""

    id: str
    targets: tuple[str, ...]
    share: Share
    parallel: int
    timeout_s: float

    def to_payload(self) -> bytes:
        """Return the notification."""
        fields = {
            REQUEST_KEY: VERSION,
            "id": self.id,
            "targets": list(self.targets),
            "share": [self.share.index, self.share.count],
            "parallel": self.parallel,
            "timeout_s": self.timeout_s,
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_payload(cls, payload: bytes) -> MeshRequest | None:
        """Return the request in a notification; None for one that is something else. Raises ValueError."""
        if not payload.startswith(b'{"' + REQUEST_KEY.encode()):
            return None
        fields = json.loads(payload)
        if fields.get(REQUEST_KEY) != VERSION:
            raise ValueError(f"version {fields.get(REQUEST_KEY)!r:.20} of a mesh request is not known here")
        try:
            index, count = map(int, fields["share"])
            request = cls(
                str(fields["id"]),
                tuple(str(one) for one in fields["targets"]),
                Share(index, count),
                int(fields["parallel"]),
                float(fields["timeout_s"]),
            )
        except (KeyError, TypeError) as exc:
            raise ValueError(f"a mesh request without what it needs: {exc!r}") from None
        if not (
            request.id.isalnum()
            and len(request.id) <= ID_LENGTH_MAX
            and len(request.targets) <= TARGETS_MAX
            and 0 <= index < count <= TARGETS_MAX
            and 1 <= request.parallel <= PARALLEL_MAX
            and 0.0 < request.timeout_s <= TIMEOUT_MAX_S
        ):
            raise ValueError("a mesh request with a value out of range")
        for target in request.targets:
            parse_host_port(target)
        return request


@dataclass(frozen=True)
class TargetReport:
    """The rails to one engine. error: why there are none, with remedy."""

    target: str
    rails: tuple[RailReport, ...] = ()
    error: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        rails = [rail.to_json() for rail in self.rails]
        return {"target": self.target, "rails": rails, "error": self.error, "remedy": self.remedy}

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> TargetReport:
        """Return a report that another process made; raises ValueError where it is none."""
        try:
            rails = tuple(RailReport.from_json(one) for one in obj["rails"])
            target, error, remedy = (clean(str(obj[name]), 4000) for name in ("target", "error", "remedy"))
            return cls(target, rails, error, remedy)
        except (KeyError, TypeError) as exc:
            raise ValueError(f"it is no report of a target: {exc!r}") from None


class MeshAgent:
    """Answers mesh requests for one engine, in a thread of its own."""

    def __init__(self, engine: TransferEngine, tell: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        self._engine = engine
        self._tell = tell
        self._requests: queue.SimpleQueue[tuple[MeshRequest, str, float] | None] = queue.SimpleQueue()
        self._answers: deque[tuple[Region, bytearray]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvxfer-mesh", daemon=True)
        self._thread.start()

    def take(self, peer: str, payload: bytes) -> bool:
        """Whether the notification is a mesh request; it is then dealt with in time."""
        try:
            request = MeshRequest.from_payload(payload)
        except (ValueError, KvxferError) as exc:
            self._tell({"event": "mesh.refused", "peer": peer, "reason": str(exc)})
            return True
        if request is None:
            return False
        self._tell({"event": "mesh.asked", "peer": peer, "targets": len(request.targets)})
        self._requests.put((request, peer, time.monotonic() + request.timeout_s))
        return True

    def close(self) -> None:
        """Begin nothing more. What is being tried ends by itself, within its own time-outs."""
        self._is_closed = True
        self._requests.put(None)

    def _run(self) -> None:
        while (item := self._requests.get()) is not None and not self._is_closed:
            request, peer, deadline = item
            targets = [self._try(target, request, deadline) for target in request.targets]
            statuses = [rail.status for target in targets for rail in target.rails]
            try:
                self._keep(request.id, targets)
            except KvxferError as error:  # closed meanwhile
                self._tell({"event": "mesh.refused", "peer": peer, "reason": error.message})
                continue
            counts = {name: statuses.count(name) for name in ("ok", "lowered", "no path", "failed", "not tried")}
            self._tell(
                {"event": "mesh.answered", "peer": peer, **{name: count for name, count in counts.items() if count}}
            )

    def _try(self, target: str, request: MeshRequest, deadline: float) -> TargetReport:
        try:
            rails = check_rails(
                self._engine,
                target,
                share=request.share,
                parallel=request.parallel,
                deadline=deadline,
                is_stopped=lambda: self._is_closed,
            )
        except KvxferError as error:
            return TargetReport(target, error=error.message, remedy=error.remedy)
        except Exception as exc:  # a bug: who asked must not wait for nothing
            return TargetReport(target, error=f"this end failed: {exc!r}.", remedy="Please report it.")
        return TargetReport(target, tuple(rails))

    def _keep(self, request_id: str, targets: list[TargetReport]) -> None:
        """Offer the answer for reading; the oldest of many is forgotten."""
        body: dict[str, Any] = {"targets": [target.to_json() for target in targets], **_own_ports(self._engine)}
        memory = bytearray(json.dumps(body).encode())
        region = self._engine.register(memory, name=ANSWER_PREFIX + request_id, rights=Rights.REMOTE_READ)
        self._answers.append((region, memory))
        if len(self._answers) > ANSWERS_MAX:
            self._engine.unregister(self._answers.popleft()[0])


def _own_ports(engine: TransferEngine) -> dict[str, Any]:
    """Return the ports that an engine uses, and why not the others."""
    try:
        transport = engine._transports.find(TRANSPORT)
    except KvxferError as error:
        return {"ports": [], "unused": {TRANSPORT: error.message}}
    assert isinstance(transport, RdmaTransport)
    refusals = RdmaTransport.probe(engine.config).details.get("refusals", {})
    return {"ports": [nic.name for nic in transport.nics], "unused": dict(refusals)}
