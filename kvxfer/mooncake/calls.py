"""Questions to a Mooncake process: one control message over a connection of its own, and the answer.

A refused connection is final here, unlike to a kvxfer peer: a Mooncake process that is back has another port.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from kvxfer.acceptor import resolve
from kvxfer.addresses import HostPort, format_host_port
from kvxfer.errors import PeerClosedError, PeerRefusedError, PeerUnreachableError, RemoteProtocolError
from kvxfer.mooncake.wire.descriptor import SegmentDescriptor
from kvxfer.mooncake.wire.frames import LENGTH_MAX, MessageDecoder, MessageKind, encode
from kvxfer.text import clean

__all__ = ["ask", "ask_descriptor", "open_connection", "send_notify", "send_probe"]

RECEIVE_NBYTES = 1 << 18
ANSWER_NBYTES_MAX = 1 << 20
"""Bound on every answer but a descriptor; Mooncake's own default for all."""


def ask_descriptor(host: str, port: int, own: SegmentDescriptor, *, deadline: float) -> SegmentDescriptor:
    """Return what the process behind a control port has registered; it is told of `own`.

    deadline: monotonic seconds. Raises PeerUnreachableError, PeerClosedError or RemoteProtocolError.
    """
    fields = ask(host, port, MessageKind.METADATA, own.to_json(), deadline=deadline)
    return SegmentDescriptor.from_json(fields)


def send_notify(host: str, port: int, name: str, message: str, *, deadline: float) -> None:
    """Hand a notification to the process behind a control port, before `deadline` (monotonic seconds)."""
    fields = {"name": name, "notify_msg": message}
    answer = ask(host, port, MessageKind.NOTIFY, fields, deadline=deadline).get("notify_msg")
    if answer != "success":
        label = format_host_port(host, port)
        raise PeerRefusedError(f"{label} did not take a notification: {clean(str(answer))}", peer=label)


def send_probe(host: str, port: int, *, deadline: float) -> None:
    """Return if a Mooncake process answers at a control port before `deadline` (monotonic seconds)."""
    answer = ask(host, port, MessageKind.PROBE, {}, deadline=deadline).get("status")
    if answer != "success":
        label = format_host_port(host, port)
        raise PeerRefusedError(f"{label} answers a probe with {clean(str(answer))!r}.", peer=label)


def ask(host: str, port: int, kind: MessageKind, fields: Mapping[str, Any], *, deadline: float) -> dict[str, Any]:
    """Return the JSON object that answers a message.

    Raises PeerUnreachableError where nobody answers before `deadline` (monotonic seconds), PeerClosedError where the
    process closes the connection instead, RemoteProtocolError where the answer cannot be one.
    """
    label = format_host_port(host, port)
    decoder = MessageDecoder(LENGTH_MAX if kind is MessageKind.METADATA else ANSWER_NBYTES_MAX)
    with open_connection(host, port, deadline=deadline) as connection:
        try:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.sendall(encode(kind, fields))
            while True:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                data = connection.recv(RECEIVE_NBYTES)
                if not data:
                    raise PeerClosedError(
                        f"{label} closed the connection instead of answering a {kind.name} message.",
                        remedy="Another program may listen there, or it refused what it was sent: see its log.",
                        peer=label,
                    )
                answer = decoder.feed(data)
                if answer is not None:
                    break
        except OSError as exc:
            raise _no_answer(exc, label, kind) from exc
    if answer.kind is not kind:
        raise RemoteProtocolError(f"{label} answered {kind.name} with {answer.kind.name}.", peer=label)
    return answer.fields()


def _no_answer(exc: OSError, label: str, kind: MessageKind) -> PeerUnreachableError:
    code = errno.ETIMEDOUT if isinstance(exc, TimeoutError) else exc.errno
    return PeerUnreachableError(
        f"{label} did not answer a {kind.name} message: {os.strerror(code or 0)}.",
        remedy="The process may be stopped, overloaded or gone.",
        peer=label,
        errno=code,
    )


def open_connection(host: str, port: int, *, deadline: float) -> socket.socket:
    """Return a connection to the first of the host's addresses that takes one, before `deadline` (monotonic seconds).

    Raises PeerUnreachableError naming the last errno.
    """
    label = format_host_port(host, port)
    begun = time.monotonic()
    last = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    for family, kind, protocol, _, address in resolve(HostPort(host, port), passive=False):
        connection = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        try:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.connect(address)
            if connection.getsockname() == connection.getpeername():
                raise OSError(errno.ECONNREFUSED, "the kernel connected the socket to itself: nobody listens there")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except OSError as exc:
            connection.close()
            last = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) if isinstance(exc, TimeoutError) else exc
        except BaseException:
            connection.close()
            raise
    raise PeerUnreachableError(
        f"connecting to {label} failed after {time.monotonic() - begun:.1f} s: {last.strerror}.",
        remedy="Check that the process runs and that its port is still the same: Mooncake takes another at each start.",
        peer=label,
        errno=last.errno,
    )
