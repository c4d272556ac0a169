"""redis as a store of values, by redis-py (the extra `kvxfer[redis]`).

A connection lives for one request: metadata moves once in a peer's life, and a server may restart between two requests.
Read next: `__init__.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from kvxfer.addresses import HostPort, parse_host_port
from kvxfer.errors import (
    ConfigError,
    DirectoryAnswerError,
    DirectoryUnreachableError,
    PeerUnreachableError,
    UnsupportedError,
)
from kvxfer.mooncake.directory.http import ANSWER_NBYTES_MAX, resolve_by
from kvxfer.text import clean

__all__ = ["RedisStore"]

DEFAULT_PORT = 6379
DB_INDEX_MAX = 255  # Mooncake's bound


class RedisStore:
    """A redis server. MC_REDIS_USERNAME, MC_REDIS_PASSWORD and MC_REDIS_DB_INDEX say how to log in."""

    def __init__(self, server: str, environment: Mapping[str, str]) -> None:
        self.server = server
        self._at = _parse(server)
        self._username = environment.get("MC_REDIS_USERNAME") or None
        self._password = environment.get("MC_REDIS_PASSWORD") or None
        self._db = _parse_db(environment.get("MC_REDIS_DB_INDEX", "0"))
        _import()  # now, not at the first request

    def get(self, key: str, *, deadline: float) -> bytes | None:
        nbytes, value = self._call(deadline, ("STRLEN", key), ("GETRANGE", key, 0, ANSWER_NBYTES_MAX - 1))
        if isinstance(nbytes, int) and nbytes > ANSWER_NBYTES_MAX:
            raise self._refuse(f"a value of {nbytes} bytes for {key!r}", "No segment descriptor is so long.")
        return bytes(value) if value else None  # STRLEN and GETRANGE tell no difference between absent and empty

    def put(self, key: str, value: bytes, *, deadline: float) -> None:
        self._call(deadline, ("SET", key, value))

    def delete(self, key: str, *, deadline: float) -> None:
        self._call(deadline, ("DEL", key))

    def _call(self, deadline: float, *commands: tuple[Any, ...]) -> list[Any]:
        """Return the answers to commands, all on one connection, by the first address of the host that answers."""
        redis = _import()
        begun = time.monotonic()
        try:
            hosts = [address[0] for *_, address in resolve_by(self._at, deadline)]
            for host in hosts:
                try:
                    return self._call_at(host, deadline, commands)
                except (redis.ConnectionError, OSError) as exc:
                    if isinstance(exc, redis.AuthenticationError) or host == hosts[-1]:
                        raise
            raise AssertionError("the last host returns or raises")
        except redis.AuthenticationError as exc:
            raise self._refuse(str(exc), "Set MC_REDIS_PASSWORD, and MC_REDIS_USERNAME where it has users.") from exc
        except (redis.ConnectionError, redis.TimeoutError, PeerUnreachableError, OSError, ValueError) as exc:
            # ValueError: cut by the watchdog while it read
            now = time.monotonic()
            is_late = now >= deadline or isinstance(exc, (redis.TimeoutError, TimeoutError))
            what = f"did not answer within {now - begun:.1f} s" if is_late else f"cannot be reached: {clean(str(exc))}"
            raise DirectoryUnreachableError(
                f"the metadata server {self.server} {what.removesuffix('.')}.",
                remedy="It is overloaded or stopped." if is_late else "Check that it runs, and its host and port.",
                server=self.server,
            ) from exc
        except redis.RedisError as exc:
            remedy = "MC_REDIS_DB_INDEX may name a database that it does not have." if self._db else ""
            raise self._refuse(str(exc), remedy or "Is this a redis server, and writable?") from exc

    def _call_at(self, host: str, deadline: float, commands: tuple[tuple[Any, ...], ...]) -> list[Any]:
        redis = _import()
        left = max(0.001, deadline - time.monotonic())
        connection = redis.Connection(
            host=host,
            port=self._at.port,
            db=self._db,
            username=self._username if self._password else None,
            password=self._password,
            socket_timeout=left,
            socket_connect_timeout=left,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            protocol=2,
        )
        # redis-py's timeouts count anew with every packet; this one is for all of them.
        watchdog = threading.Timer(left, connection.disconnect)
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.connect()
            answers = []
            for command in commands:
                connection.send_command(*command)
                answers.append(connection.read_response())
            return answers
        finally:
            watchdog.cancel()
            connection.disconnect()

    def _refuse(self, told: str, remedy: str) -> DirectoryAnswerError:
        return DirectoryAnswerError(
            f"the metadata server {self.server} answered with {clean(told, 100)!r}.", remedy=remedy, server=self.server
        )


def _import() -> Any:
    try:
        import redis
    except ImportError as exc:
        raise UnsupportedError(
            f"metadata servers redis://... need the package redis, which cannot be imported: {exc}.",
            remedy="pip install 'kvxfer[redis]'",
            setting="metadata_server",
        ) from exc
    return redis


def _parse(server: str) -> HostPort:
    rest = server.removeprefix("redis://")
    if "@" in rest or "/" in rest:
        raise ConfigError(
            f"the metadata server redis://{rest.rpartition('@')[2]} has more than a host and a port.",
            remedy="Name user, password and database with MC_REDIS_USERNAME, MC_REDIS_PASSWORD and MC_REDIS_DB_INDEX.",
            setting="metadata_server",
        )
    return parse_host_port(rest, DEFAULT_PORT)


def _parse_db(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) <= DB_INDEX_MAX:
        return int(text)
    raise ConfigError(
        f"MC_REDIS_DB_INDEX is {text!r}, not a number from 0 to {DB_INDEX_MAX}.",
        remedy="Mooncake would take database 0 instead, where this process finds no peer and is not found.",
        setting="MC_REDIS_DB_INDEX",
        value=text,
    )
