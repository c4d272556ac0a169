"""HTTP requests with one deadline and one bound each, and Mooncake's http metadata server by them.

Not urllib: its timeout counts anew with every packet, so a server that sends one byte a second holds a caller for
hours. Every request has a connection of its own, as in Mooncake, so that a server may restart between two of them.
Proxies are not used: a metadata server stands beside the processes that it serves.
"""

from __future__ import annotations

import http.client
import io
import queue
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from kvxfer.addresses import HostPort, format_host_port
from kvxfer.control import resolve
from kvxfer.errors import (
    ConfigError,
    DirectoryAnswerError,
    DirectoryUnreachableError,
    KvxferError,
    PeerUnreachableError,
)
from kvxfer.text import clean

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["ANSWER_NBYTES_MAX", "HttpEndpoint", "HttpStore", "parse_url", "resolve_by"]

ANSWER_NBYTES_MAX = 32 << 20
"""Longest value: about 400,000 buffers. Mooncake's etcd client has the same bound."""
NOT_FOUND = 404
OK = 200


@dataclass(frozen=True)
class HttpEndpoint:
    """Where requests go. server: as the user wrote it, for messages; path: without the query."""

    server: str
    at: HostPort
    path: str
    is_tls: bool = False

    def request(
        self, method: str, target: str, body: bytes | None, *, deadline: float, nbytes_max: int = ANSWER_NBYTES_MAX
    ) -> tuple[int, bytes]:
        """Return (status, body) of one request; target: path and query, encoded.

        Raises DirectoryUnreachableError when it cannot be reached or is not done by the deadline, DirectoryAnswerError
        when what comes back is not HTTP or longer than `nbytes_max`.
        """
        begun = time.monotonic()
        try:
            with self._connect(deadline) as connection:
                connection.settimeout(_remaining(deadline))
                connection.sendall(self._head(method, target, body) + (body or b""))
                return _read(connection, method, deadline, nbytes_max)
        except ssl.SSLCertVerificationError as exc:
            raise DirectoryUnreachableError(
                f"the metadata server {self.server} shows a certificate that is not trusted: {exc.verify_message}.",
                remedy="Name the authority that signed it: SSL_CERT_FILE=/path/to/ca.pem.",
                server=self.server,
            ) from exc
        except TimeoutError as exc:
            raise DirectoryUnreachableError(
                f"the metadata server {self.server} did not answer within {time.monotonic() - begun:.1f} s.",
                remedy="It is overloaded, stopped, or behind a firewall that drops packets.",
                server=self.server,
            ) from exc
        except OSError as exc:
            raise DirectoryUnreachableError(
                f"the metadata server {self.server} cannot be reached: {exc.strerror or exc}.",
                remedy="Check that it runs, and its host and port.",
                server=self.server,
                errno=exc.errno,
            ) from exc
        except PeerUnreachableError as exc:  # the name does not resolve
            raise DirectoryUnreachableError(
                f"the metadata server {self.server} cannot be reached: {exc.message}",
                remedy=exc.remedy,
                server=self.server,
            ) from exc
        except _TooLongError as exc:
            raise DirectoryAnswerError(
                f"the metadata server {self.server} answered {method} with more than {nbytes_max} bytes.",
                remedy="No segment descriptor is so long: is this URL a metadata server?",
                server=self.server,
            ) from exc
        except (http.client.HTTPException, ValueError) as exc:
            raise DirectoryAnswerError(
                f"the metadata server {self.server} answered {method} with something that is not HTTP: "
                f"{clean(str(exc) or type(exc).__name__)}.",
                remedy="Is this the port of a metadata server?",
                server=self.server,
            ) from exc

    def _head(self, method: str, target: str, body: bytes | None) -> bytes:
        lines = [f"{method} {target} HTTP/1.1", f"Host: {format_host_port(self.at.host, self.at.port)}"]
        lines += ["Accept: application/json", "Connection: close"]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def _connect(self, deadline: float) -> socket.socket:
        error: OSError = TimeoutError()
        for family, kind, protocol, _, address in resolve_by(self.at, deadline):
            connection = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
            try:
                connection.settimeout(_remaining(deadline))
                connection.connect(address)
                return self._wrap(connection)
            except OSError as exc:
                connection.close()
                error = exc
        raise error

    def _wrap(self, connection: socket.socket) -> socket.socket:
        if not self.is_tls:
            return connection
        return ssl.create_default_context().wrap_socket(connection, server_hostname=self.at.host)


class HttpStore:
    """Mooncake's http metadata server as a store of values: `?key=` and GET, PUT, DELETE."""

    def __init__(self, url: str) -> None:
        self._endpoint = parse_url(url)
        self.server = self._endpoint.server

    def get(self, key: str, *, deadline: float) -> bytes | None:
        status, body = self._request("GET", key, None, deadline)
        if status == NOT_FOUND:
            return None
        self._check(status, body, "GET", key)
        return body

    def put(self, key: str, value: bytes, *, deadline: float) -> None:
        status, body = self._request("PUT", key, value, deadline)
        self._check(status, body, "PUT", key)

    def delete(self, key: str, *, deadline: float) -> None:
        status, body = self._request("DELETE", key, None, deadline)
        if status != NOT_FOUND:
            self._check(status, body, "DELETE", key)

    def _request(self, method: str, key: str, value: bytes | None, deadline: float) -> tuple[int, bytes]:
        target = f"{self._endpoint.path}?key={quote(key, safe='')}"
        return self._endpoint.request(method, target, value, deadline=deadline)

    def _check(self, status: int, body: bytes, method: str, key: str) -> None:
        if status == OK:
            return
        raise DirectoryAnswerError(
            f"the metadata server {self.server} answered {method} of {key!r} with status {status}: "
            f"{clean(body[:400].decode(errors='replace'), 100)!r}.",
            remedy="Mooncake's own server answers under /metadata, such as http://192.0.2.10:8080/metadata; "
            "a proxy or another program answers otherwise.",
            server=self.server,
            status=status,
        )


def parse_url(url: str) -> HttpEndpoint:
    """Return where an http or https URL points; raises ConfigError for one that cannot be meant."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise _refuse(url, str(exc)) from None
    if not host:
        raise _refuse(url, "it names no host")
    if parts.username is not None or parts.password is not None:
        shown = f"{parts.scheme}://...@{url.rpartition('@')[2]}"  # a password must not end in a log
        raise _refuse(shown, "a user name and password in it are not supported")
    if parts.query or parts.fragment:
        raise _refuse(url, "the key is added behind ?, so it cannot have a query of its own")
    is_tls = parts.scheme == "https"
    at = HostPort(host, port if port is not None else 443 if is_tls else 80)
    return HttpEndpoint(url, at, quote(parts.path or "/", safe="/%"), is_tls)


def resolve_by(at: HostPort, deadline: float) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    """Return the addresses of a name, in a thread of its own: the resolver knows no deadline and takes half a minute
    where no name server answers. Raises TimeoutError, PeerUnreachableError."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            found.put(resolve(at, passive=False))
        except KvxferError as exc:
            found.put(exc)

    threading.Thread(target=work, name="kvxfer-resolve", daemon=True).start()
    try:
        answer = found.get(timeout=_remaining(deadline))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, KvxferError):
        raise answer
    return answer  # type: ignore[no-any-return]


def _refuse(url: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{url!r} is not the URL of a metadata server: {reason}.",
        remedy="Write it as http://192.0.2.10:8080/metadata.",
        setting="metadata_server",
        value=url,
    )


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _read(connection: socket.socket, method: str, deadline: float, nbytes_max: int) -> tuple[int, bytes]:
    received = _Received(connection, deadline, nbytes_max + (64 << 10))  # for the head, which http.client bounds too
    response = http.client.HTTPResponse(received, method=method)  # type: ignore[arg-type]  # it asks for makefile only
    with response:
        response.begin()
        body = response.read(nbytes_max + 1)
    if len(body) > nbytes_max:
        raise _TooLongError
    return response.status, body


class _TooLongError(Exception):
    """More was sent than any answer has."""


class _Received(io.RawIOBase):
    """What a connection receives, up to a deadline and a number of bytes."""

    def __init__(self, connection: socket.socket, deadline: float, nbytes_max: int) -> None:
        self._connection = connection
        self._deadline = deadline
        self._left = nbytes_max

    def makefile(self, mode: str) -> io.BufferedReader:
        """What HTTPResponse reads."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._connection.settimeout(_remaining(self._deadline))
        count = self._connection.recv_into(buffer)
        self._left -= count
        if self._left < 0:
            raise _TooLongError
        return count
