"""A metadata server that keeps two values of each process. Keys and JSON are Mooncake's: a fleet may hold both.

Owns the own entries from the first `publish` to `withdraw`, and a thread that writes them again where the server has
lost them. Knows nothing of http, redis or etcd: `http.py` and its siblings move values.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

from kvxfer.addresses import HostPort, parse_host_port
from kvxfer.errors import (
    ConfigError,
    DirectoryAnswerError,
    DirectoryError,
    KvxferError,
    RemoteProtocolError,
    SegmentNotFoundError,
)
from kvxfer.log import get_logger
from kvxfer.mooncake.wire.descriptor import SegmentDescriptor
from kvxfer.text import clean

__all__ = ["KEEP_INTERVAL_S", "Ask", "ServerDirectory", "Store"]

REQUEST_TIMEOUT_S = 3.0  # Mooncake's, for a whole request
KEEP_INTERVAL_S = 10.0
"""How often the entries are looked for: a server that lost them (restarted empty) has them again after this time."""
ALIVE_TIMEOUT_S = 1.0
"""How long a kvxfer process that has our name may take to show that it lives."""


class Store(Protocol):
    """A server that keeps values. Raises DirectoryError of all kinds but SegmentNotFoundError."""

    server: str

    def get(self, key: str, *, deadline: float) -> bytes | None:
        """Return a value, None if there is none."""

    def put(self, key: str, value: bytes, *, deadline: float) -> None:
        """Set a value."""

    def delete(self, key: str, *, deadline: float) -> None:
        """Remove a value; an absent one is no error."""


class Ask(Protocol):
    """Asks the process at a host and port for its descriptor; `own` says who asks."""

    def __call__(self, host: str, port: int, own: SegmentDescriptor, *, deadline: float) -> SegmentDescriptor: ...


class ServerDirectory:
    """The Directory of one process at a server: its descriptor, and where it takes control messages."""

    def __init__(
        self, store: Store, *, own_name: str, own_control: HostPort, cluster: str, ask: Ask, keep_interval_s: float
    ) -> None:
        if not own_name:
            raise ConfigError(
                "a process needs a name to be published at a metadata server.",
                remedy="Give initialize() a local_hostname such as '192.0.2.10:12345'.",
                setting="local_hostname",
            )
        self.server = store.server
        self._store = store
        self._name = own_name
        self._prefix = "mooncake/" + (cluster if cluster.endswith("/") or not cluster else cluster + "/")
        self._control = _encode({"ip_or_host_name": own_control.host, "rpc_port": own_control.port})
        self._ask = ask
        self._interval_s = keep_interval_s
        self._pid = os.getpid()
        self._lock = threading.Lock()  # one writer of the own entries at a time; held while the server is asked
        self._wanted: SegmentDescriptor | None = None
        self._is_claimed = False
        self._is_unwritten = False
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        self._log = get_logger(__name__)

    def publish(self, descriptor: SegmentDescriptor) -> None:
        """Write the own entries. After a failure they are written as soon as the server is back, but for the first.

        Raises DirectoryUnreachableError, DirectoryAnswerError; ConfigError where another live process has the name.
        """
        if not descriptor.timestamp:
            descriptor = dataclasses.replace(descriptor, timestamp=f"{datetime.now():%Y-%m-%d %H:%M:%S.%f}")
        with self._lock:
            if self._stop.is_set():
                return
            deadline = time.monotonic() + REQUEST_TIMEOUT_S
            if not self._is_claimed:
                self._claim_name(descriptor, deadline)
                self._is_claimed = True
                atexit.register(self.withdraw)
            self._wanted, self._is_unwritten = descriptor, True
            try:
                self._write_segment(deadline)
            except KvxferError:
                if self._keeper is None:  # the first: nothing of it stays
                    self._take_back()
                raise
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="kvxfer-directory", daemon=True)
                self._keeper.start()

    def withdraw(self) -> None:
        """Take back the entries; what cannot be taken back is logged and stays at the server. Tolerated twice."""
        if self._pid != os.getpid():
            return  # the entries are the parent's
        self._stop.set()
        with self._lock:
            if self._is_claimed:
                self._take_back()

    def find(self, name: str, *, deadline: float) -> SegmentDescriptor:
        """Ask the server for a segment's descriptor.

        Raises SegmentNotFoundError if it has none, DirectoryUnreachableError, DirectoryAnswerError if what it has is
        none.
        """
        key = self._segment_key(name)
        fields = self._read(key, name, deadline)
        try:
            return SegmentDescriptor.from_json(fields)
        except RemoteProtocolError as exc:
            raise self._refuse(key, exc.message) from exc

    def find_control(self, name: str, *, deadline: float) -> HostPort:
        """Ask the server where the process of a segment takes control messages; raises as `find`."""
        key = self._control_key(name)
        fields = self._read(key, name, deadline)
        if isinstance(fields, dict):
            host, port = fields.get("ip_or_host_name"), fields.get("rpc_port")
            if isinstance(host, str) and 0 < len(host) <= 255 and type(port) is int and 0 < port <= 65535:
                return HostPort(host, port)
        raise self._refuse(key, f"it is {fields!r:.80}, not a host and a port.")

    def stale_hint(self, descriptor: SegmentDescriptor) -> str:
        """Return which entry to look at."""
        return (
            f"{self.server} lists it since {clean(descriptor.timestamp, 40) or 'an unknown time'}; a process that "
            f"crashed leaves its entry behind. If it is gone, delete the key {self._segment_key(descriptor.name)!r}."
        )

    # Keys and values.

    def _segment_key(self, name: str) -> str:
        """A name with a slash is a path of its own, as in Mooncake."""
        return self._prefix + (name if "/" in name else f"ram/{name}")

    def _control_key(self, name: str) -> str:
        return f"{self._prefix}rpc_meta/{name}"

    def _read(self, key: str, name: str, deadline: float) -> object:
        if not name:
            raise SegmentNotFoundError("the name of a segment is empty.", server=self.server, segment=name)
        deadline = min(deadline, time.monotonic() + REQUEST_TIMEOUT_S)
        value = self._store.get(key, deadline=deadline)
        if value is None:
            raise SegmentNotFoundError(
                f"the metadata server {self.server} knows no segment {clean(name)!r} (key {clean(key)!r}).",
                remedy="The peer is not up yet, was closed, has another name, or uses another server or "
                "MC_METADATA_CLUSTER_ID.",
                server=self.server,
                segment=name,
            )
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as exc:
            told = clean(value[:200].decode(errors="replace"), 60)
            raise self._refuse(key, f"it is not JSON: {told!r}.") from exc

    def _refuse(self, key: str, why: str) -> DirectoryAnswerError:
        return DirectoryAnswerError(
            f"what the metadata server {self.server} has under {clean(key)!r} cannot be used: {why}",
            remedy="Is this a metadata server? If so, delete the key and restart the process that wrote it.",
            server=self.server,
            key=key,
        )

    # The own entries; with the lock held.

    def _write_segment(self, deadline: float) -> None:
        assert self._wanted is not None
        self._store.put(self._segment_key(self._name), _encode(self._wanted.to_json()), deadline=deadline)
        self._is_unwritten = False

    def _take_back(self) -> None:
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        try:
            control = self._store.get(self._control_key(self._name), deadline=deadline)
            if control is not None and _same_json(control, self._control):  # else another process has the name
                self._store.delete(self._control_key(self._name), deadline=deadline)
                self._store.delete(self._segment_key(self._name), deadline=deadline)
        except KvxferError as exc:
            self._log.warning("directory.entry_left", server=self.server, name=self._name, error=exc.message)
        finally:
            # Last: a thread that does this while the process ends is waited for, by the call of atexit.
            self._is_claimed = False
            atexit.unregister(self.withdraw)

    def _claim_name(self, descriptor: SegmentDescriptor, deadline: float) -> None:
        """Write where this process takes control messages, over the entry of one that crashed, if there is one.

        Mooncake's http server refuses to overwrite such an entry, so a process that crashed could not come back.
        """
        key = self._control_key(self._name)
        old = self._store.get(key, deadline=deadline)
        if old is not None and _same_json(old, self._control):
            return
        if old is not None:
            self._check_abandoned(descriptor, deadline)
            self._store.delete(key, deadline=deadline)
            told = clean(old[:200].decode(errors="replace"), 80)
            self._log.warning("directory.entry_replaced", server=self.server, name=self._name, old=told)
        self._store.put(key, self._control, deadline=deadline)

    def _check_abandoned(self, own: SegmentDescriptor, deadline: float) -> None:
        """Raise ConfigError if a kvxfer process that lives is published under our name.

        Of a Mooncake process that cannot be known: it does not answer for itself where there is a server.
        """
        try:
            mark = self.find(self._name, deadline=deadline).kvxfer
            if mark is None:
                return
            at = parse_host_port(mark.address)
            answer = self._ask(at.host, at.port, own, deadline=time.monotonic() + ALIVE_TIMEOUT_S)
        except KvxferError:
            return
        if answer.name == self._name and answer.kvxfer is not None and answer.kvxfer != own.kvxfer:
            raise ConfigError(
                f"{self._name!r} is the name of another process, which answers at {mark.address}.",
                remedy="Give every process a local_hostname of its own.",
                setting="local_hostname",
                value=self._name,
            )

    def _keep(self) -> None:
        is_lost = False
        while not self._stop.wait(self._interval_s):
            try:
                with self._lock:
                    if self._stop.is_set():
                        return
                    self._restore()
                if is_lost:
                    self._log.info("directory.returned", server=self.server)
                is_lost = False
            except DirectoryError as exc:
                if not is_lost:
                    self._log.warning("directory.lost", server=self.server, error=exc.message)
                is_lost = True

    def _restore(self) -> None:
        """Write what is missing at the server."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        control = self._store.get(self._control_key(self._name), deadline=deadline)
        if control is not None and not _same_json(control, self._control):
            return  # another process has taken the name: to fight over it would help neither
        if control is None:
            self._store.put(self._control_key(self._name), self._control, deadline=deadline)
        if self._is_unwritten or self._store.get(self._segment_key(self._name), deadline=deadline) is None:
            self._write_segment(deadline)
            control = None
        if control is None:
            self._log.info("directory.republished", server=self.server, name=self._name)


def _encode(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False
