"""etcd as a store of values, over its own JSON gateway (etcd 3.4 and newer, on the client port).

No client library: those on PyPI are unmaintained for years (etcd3) or for asyncio only (aetcd), and three calls are all
that is needed. The extra `kvxfer[etcd]` exists and is empty, so that a deployment may name it.
Source: https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/. Keys and values travel in base64.
"""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from typing import Any

from kvxfer.addresses import parse_host_port
from kvxfer.errors import ConfigError, DirectoryAnswerError, DirectoryUnreachableError
from kvxfer.mooncake.directory.http import ANSWER_NBYTES_MAX, NOT_FOUND, OK, HttpEndpoint
from kvxfer.text import clean

__all__ = ["EtcdStore"]

DEFAULT_PORT = 2379


class EtcdStore:
    """One or more members of a cluster, `host:port` separated by `;` or `,`; the first that answers is asked."""

    def __init__(self, server: str) -> None:
        self.server = server
        names = [name.strip() for name in server.removeprefix("etcd://").replace(",", ";").split(";")]
        self._endpoints = [
            HttpEndpoint(server, parse_host_port(name, DEFAULT_PORT), "/v3/kv") for name in names if name
        ]
        if not self._endpoints:
            raise ConfigError(
                f"{server!r} names no etcd server.",
                remedy="Write it as etcd://192.0.2.10:2379, several separated by semicolons.",
                setting="metadata_server",
                value=server,
            )

    def get(self, key: str, *, deadline: float) -> bytes | None:
        answer = self._call("range", {"key": _encode(key.encode())}, deadline)
        rows = answer.get("kvs") or []
        try:
            return b64decode(rows[0].get("value", "")) if rows else None
        except (AttributeError, TypeError, ValueError, KeyError):
            raise self._refuse("range", repr(rows)) from None

    def put(self, key: str, value: bytes, *, deadline: float) -> None:
        self._call("put", {"key": _encode(key.encode()), "value": _encode(value)}, deadline)

    def delete(self, key: str, *, deadline: float) -> None:
        self._call("deleterange", {"key": _encode(key.encode())}, deadline)

    def _call(self, name: str, fields: dict[str, str], deadline: float) -> dict[str, Any]:
        body = json.dumps(fields).encode()
        for count, endpoint in enumerate(self._endpoints):
            share = (deadline - time.monotonic()) / (len(self._endpoints) - count)  # a dead member costs its part only
            try:
                status, answer = endpoint.request(
                    "POST",
                    f"{endpoint.path}/{name}",
                    body,
                    deadline=time.monotonic() + share,
                    nbytes_max=ANSWER_NBYTES_MAX * 4 // 3 + 4096,
                )
            except DirectoryUnreachableError:
                if endpoint is self._endpoints[-1]:
                    raise
                continue
            self._endpoints.insert(0, self._endpoints.pop(count))
            return self._decode(name, status, answer)
        raise AssertionError("the last endpoint returns or raises")

    def _decode(self, name: str, status: int, body: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if status == OK and isinstance(answer, dict):
            return answer
        told = answer.get("message") or answer.get("error") if isinstance(answer, dict) else None
        raise self._refuse(name, str(told or body[:400].decode(errors="replace")), status)

    def _refuse(self, name: str, told: str, status: int = OK) -> DirectoryAnswerError:
        remedy = "Is this an etcd server's client port?"
        if status == NOT_FOUND:
            remedy = "Its JSON gateway is missing: etcd 3.4 or newer with --enable-grpc-gateway (the default) has it."
        elif "too large" in told:
            remedy = "Register fewer, larger regions, or raise etcd's --max-request-bytes."
        elif "auth" in told or "user name is empty" in told:
            remedy = "etcd's authentication is not supported; neither is it by Mooncake."
        return DirectoryAnswerError(
            f"the metadata server {self.server} answered {name} with status {status}: {clean(told, 100)!r}.",
            remedy=remedy,
            server=self.server,
            status=status,
        )


def _encode(value: bytes) -> str:
    return b64encode(value).decode("ascii")
