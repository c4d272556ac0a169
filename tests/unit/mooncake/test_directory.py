"""Directories: the same behaviour over http, redis and etcd; servers that are down, slow, lost, or liars."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvxfer import errors
from kvxfer.addresses import HostPort
from kvxfer.mooncake.directory import Directory, open_directory
from kvxfer.mooncake.wire.descriptor import BufferDescriptor, KvxferMark, SegmentDescriptor
from tests.support.fake_metadata import Values, fake_etcd, fake_http, fake_redis, liar

NAME = "192.0.2.10:12345"
SERVERS = {"http": fake_http, "redis": fake_redis, "etcd": fake_etcd}
OWN = SegmentDescriptor(NAME, buffers=(BufferDescriptor(NAME, 4096, 100),), tcp_data_port=15001, tcp_proto_version=2)


def ask_nobody(host: str, port: int, own: SegmentDescriptor, *, deadline: float) -> SegmentDescriptor:
    raise errors.PeerUnreachableError("nobody is there.", peer=f"{host}:{port}")


def open_(server: str, name: str = NAME, **options: Any) -> Directory:
    options = {"environment": {}, "ask": ask_nobody, "own_host": "192.0.2.10", "own_port": 16000, **options}
    return open_directory(server, own_name=name, **options)


def soon(seconds: float = 2.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def values() -> Values:
    return {}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, values: Values) -> Iterator[str]:
    if request.param == "redis":
        pytest.importorskip("redis")
    with SERVERS[request.param](values) as address:
        yield address


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    """Directories that are withdrawn at the end, whatever happens."""
    with contextlib.ExitStack() as stack:
        yield stack


def published(stack: contextlib.ExitStack, server: str, descriptor: SegmentDescriptor = OWN, **options: Any) -> Any:
    directory = open_(server, descriptor.name, **options)
    stack.callback(directory.withdraw)
    directory.publish(descriptor)
    return directory


# What is kept, and where.


def test_a_published_segment_is_found_by_others(server: str, opened: contextlib.ExitStack) -> None:
    published(opened, server)
    other = open_(server, "192.0.2.11:12345")

    assert other.find(NAME, deadline=soon()).buffers == OWN.buffers
    assert other.find_control(NAME, deadline=soon()) == HostPort("192.0.2.10", 16000)


def test_keys_and_values_are_those_of_mooncake(server: str, values: Values, opened: contextlib.ExitStack) -> None:
    published(opened, server)

    assert set(values) == {f"mooncake/ram/{NAME}", f"mooncake/rpc_meta/{NAME}"}
    assert json.loads(values[f"mooncake/rpc_meta/{NAME}"]) == {"ip_or_host_name": "192.0.2.10", "rpc_port": 16000}
    segment = json.loads(values[f"mooncake/ram/{NAME}"])
    assert segment["buffers"] == [{"name": NAME, "addr": 4096, "length": 100}]
    assert segment["protocol"] == "tcp"
    assert segment["timestamp"]


@pytest.mark.parametrize("cluster", ["blue", "blue/"])
def test_the_cluster_id_is_part_of_the_keys(cluster: str, values: Values, opened: contextlib.ExitStack) -> None:
    server = opened.enter_context(fake_http(values))
    published(opened, server, environment={"MC_METADATA_CLUSTER_ID": cluster})

    assert set(values) == {f"mooncake/blue/ram/{NAME}", f"mooncake/blue/rpc_meta/{NAME}"}


def test_a_name_with_a_slash_is_a_path_of_its_own(values: Values, opened: contextlib.ExitStack) -> None:
    server = opened.enter_context(fake_http(values))
    published(opened, server, SegmentDescriptor("nvmeof/ä ?&#%"))

    assert set(values) == {"mooncake/nvmeof/ä ?&#%", "mooncake/rpc_meta/nvmeof/ä ?&#%"}
    assert open_(server).find("nvmeof/ä ?&#%", deadline=soon()).name == "nvmeof/ä ?&#%"


def test_what_changes_is_published_again(server: str, opened: contextlib.ExitStack) -> None:
    directory = published(opened, server)
    directory.publish(SegmentDescriptor(NAME, tcp_data_port=15002))

    assert directory.find(NAME, deadline=soon()).tcp_data_port == 15002


def test_withdraw_leaves_nothing_and_may_be_called_twice(server: str, values: Values) -> None:
    directory = open_(server)
    directory.publish(OWN)
    directory.withdraw()
    directory.withdraw()
    directory.publish(OWN)

    assert values == {}


def test_a_forked_child_leaves_the_entries_of_its_parent(values: Values, opened: contextlib.ExitStack) -> None:
    directory = published(opened, opened.enter_context(fake_http(values)))
    directory._pid = os.getpid() + 1

    directory.withdraw()

    assert len(values) == 2
    directory._pid = os.getpid()


def test_a_first_publish_that_fails_half_way_leaves_nothing(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_http(values) as server:
        directory = open_(server)
        put = directory._store.put  # type: ignore[attr-defined]

        def refuse(key: str, value: bytes, *, deadline: float) -> None:
            if "/ram/" in key:
                raise errors.DirectoryAnswerError("no room.", server=server)
            put(key, value, deadline=deadline)

        monkeypatch.setattr(directory._store, "put", refuse)  # type: ignore[attr-defined]
        with pytest.raises(errors.DirectoryAnswerError, match="no room"):
            directory.publish(OWN)

        assert values == {}
        monkeypatch.undo()
        directory.publish(OWN)
        assert len(values) == 2
        directory.withdraw()


# Entries of others.


def test_an_unknown_segment_is_told_with_name_and_key(server: str) -> None:
    with pytest.raises(errors.SegmentNotFoundError, match=r"knows no segment 'nobody' \(key 'mooncake/ram/nobody'\)"):
        open_(server).find("nobody", deadline=soon())
    with pytest.raises(errors.SegmentNotFoundError, match="rpc_meta/nobody"):
        open_(server).find_control("nobody", deadline=soon())


def test_an_empty_name_is_not_asked_for() -> None:
    with pytest.raises(errors.SegmentNotFoundError, match="empty"):
        open_("http://127.0.0.1:1/metadata").find("", deadline=soon())


def test_a_process_that_crashed_comes_back_under_its_name(
    server: str, values: Values, opened: contextlib.ExitStack
) -> None:
    values[f"mooncake/rpc_meta/{NAME}"] = b'{"ip_or_host_name":"192.0.2.10","rpc_port":15999}\n'

    with capture_logs() as logs:
        directory = published(opened, server)

    assert directory.find_control(NAME, deadline=soon()).port == 16000
    assert [log["event"] for log in logs] == ["directory.entry_replaced"]


def test_an_equal_entry_is_left_as_it_is(values: Values, opened: contextlib.ExitStack) -> None:
    values[f"mooncake/rpc_meta/{NAME}"] = b'{"rpc_port": 16000, "ip_or_host_name": "192.0.2.10"}\n'

    with capture_logs() as logs:
        published(opened, opened.enter_context(fake_http(values)))

    assert not logs


@pytest.mark.parametrize("lives", [True, False])
def test_the_name_of_a_kvxfer_process_is_taken_while_it_lives(lives: bool, opened: contextlib.ExitStack) -> None:
    server = opened.enter_context(fake_http({}))
    first = SegmentDescriptor(NAME, kvxfer=KvxferMark("192.0.2.10:41234", "aa"))
    second = SegmentDescriptor(NAME, kvxfer=KvxferMark("192.0.2.10:41235", "bb"))
    published(opened, server, first)

    def ask(host: str, port: int, own: SegmentDescriptor, *, deadline: float) -> SegmentDescriptor:
        assert (host, port) == ("192.0.2.10", 41234)
        return first if lives else SegmentDescriptor("another:1", kvxfer=KvxferMark("192.0.2.10:41234", "cc"))

    if lives:
        with pytest.raises(errors.ConfigError, match=r"name of another process, which answers at 192\.0\.2\.10:41234"):
            published(opened, server, second, ask=ask, own_port=16001)
    else:
        published(opened, server, second, ask=ask, own_port=16001)


def test_withdraw_leaves_the_entries_of_who_took_the_name(values: Values, opened: contextlib.ExitStack) -> None:
    directory = published(opened, opened.enter_context(fake_http(values)))
    values[f"mooncake/rpc_meta/{NAME}"] = b'{"ip_or_host_name":"192.0.2.99","rpc_port":1}'

    directory.withdraw()

    assert len(values) == 2


def test_the_hint_names_server_time_and_key() -> None:
    directory = open_("http://192.0.2.1:8080/metadata")

    hint = directory.stale_hint(SegmentDescriptor("x:1", timestamp="2026-01-02 03:04:05"))

    assert hint == (
        "http://192.0.2.1:8080/metadata lists it since 2026-01-02 03:04:05; a process that crashed leaves its entry "
        "behind. If it is gone, delete the key 'mooncake/ram/x:1'."
    )


# Values that cannot be used.


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (b"<html><body>Welcome to nginx!", "it is not JSON: '<html><body>Welcome"),
        (b"\xff\xfe\x00", "it is not JSON"),
        (b"", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[1,2]", "JSON list, not an object"),
        (b'{"name":"x","protocol":7}', "protocol 7"),
        (b'{"name":"x","protocol":"tcp","buffers":[{"name":"x","addr":0,"length":1}]}', "addr 0"),
    ],
)
def test_a_value_that_is_no_descriptor_is_refused(value: bytes, told: str) -> None:
    with fake_http({"mooncake/ram/x": value}) as server, pytest.raises(errors.DirectoryAnswerError) as caught:
        open_(server).find("x", deadline=soon())

    assert told in str(caught.value)
    assert "mooncake/ram/x" in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "value", [b"{}", b"[]", b'{"ip_or_host_name":"","rpc_port":1}', b'{"ip_or_host_name":"h","rpc_port":65536}']
)
def test_a_value_that_is_no_host_and_port_is_refused(value: bytes) -> None:
    with (
        fake_http({"mooncake/rpc_meta/x": value}) as server,
        pytest.raises(errors.DirectoryAnswerError, match="not a host and a port"),
    ):
        open_(server).find_control("x", deadline=soon())


# Servers that are not there, or late.


@pytest.mark.parametrize("scheme", ["http://127.0.0.1:{}/metadata", "redis://127.0.0.1:{}", "etcd://127.0.0.1:{}"])
def test_a_server_that_is_down_is_told_at_once(scheme: str) -> None:
    if scheme.startswith("redis"):
        pytest.importorskip("redis")
    with liar(None) as port:
        pass
    directory = open_(scheme.format(port))

    with pytest.raises(errors.DirectoryUnreachableError, match=r"cannot be reached.*Check that it runs"):
        directory.publish(OWN)

    directory.withdraw()


@pytest.mark.parametrize("scheme", ["http://127.0.0.1:{}/metadata", "redis://127.0.0.1:{}", "etcd://127.0.0.1:{}"])
@pytest.mark.parametrize("byte_by_byte_s", [None, 0.02])
def test_a_slow_server_is_given_up_at_the_deadline(scheme: str, byte_by_byte_s: float | None) -> None:
    if scheme.startswith("redis"):
        pytest.importorskip("redis")
    slow = None if byte_by_byte_s is None else b"HTTP/1.1 200 OK\r\n" * 100
    with (
        liar(b"+" * 1000 if slow and "redis" in scheme else slow, byte_by_byte_s=byte_by_byte_s) as port,
        pytest.raises(errors.DirectoryUnreachableError, match=r"did not answer within \d+\.\d s"),
    ):
        open_(scheme.format(port)).find("x", deadline=soon(0.1))


@pytest.mark.parametrize("scheme", ["http", "redis", "etcd"])
def test_a_host_name_that_does_not_resolve_is_told(scheme: str) -> None:
    if scheme == "redis":
        pytest.importorskip("redis")
    with pytest.raises(errors.DirectoryUnreachableError, match="does not resolve"):
        open_(f"{scheme}://no-such-host.invalid:80").find("x", deadline=soon())


@pytest.mark.parametrize("scheme", ["http", "redis", "etcd"])
def test_a_name_server_that_is_silent_is_given_up_at_the_deadline(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if scheme == "redis":
        pytest.importorskip("redis")
    released = threading.Event()
    monkeypatch.setattr("kvxfer.mooncake.directory.http.resolve", lambda at, passive: released.wait() and [])

    with pytest.raises(errors.DirectoryUnreachableError, match=r"did not answer within \d+\.\d s"):
        open_(f"{scheme}://somewhere.example:80").find("x", deadline=soon(0.1))

    released.set()


def test_etcd_members_that_are_down_are_passed_over(values: Values) -> None:
    with liar(None) as dead:
        pass
    with fake_etcd(values) as server:
        directory = open_(f"etcd://127.0.0.1:{dead}; {server.removeprefix('etcd://')}")
        directory.publish(OWN)

        assert directory.find(NAME, deadline=soon()).name == NAME
        directory.withdraw()


# Servers that are no metadata servers.


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: " + b"x" * 70000,
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 500 Internal\r\nContent-Length: 4\r\n\r\nboom",
        b"HTTP/1.1 301 Moved\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x0a",
    ],
)
@pytest.mark.parametrize("scheme", ["http://127.0.0.1:{}/metadata", "etcd://127.0.0.1:{}"])
def test_an_answer_that_is_not_expected_is_an_error_of_the_directory(scheme: str, answer: bytes) -> None:
    with liar(answer) as port, pytest.raises(errors.DirectoryError) as caught:
        open_(scheme.format(port)).find("x", deadline=soon())

    assert caught.value.remedy
    assert caught.value.server == scheme.format(port)


def test_a_huge_answer_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.mooncake.directory.http.ANSWER_NBYTES_MAX", 1000)
    monkeypatch.setattr("kvxfer.mooncake.directory.http.HttpEndpoint.request.__kwdefaults__", {"nbytes_max": 1000})
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n" + b"x" * 200_000

    with liar(body) as port, pytest.raises(errors.DirectoryAnswerError, match="more than 1000 bytes"):
        open_(f"http://127.0.0.1:{port}/metadata").find("x", deadline=soon())


def test_a_huge_value_in_redis_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    monkeypatch.setattr("kvxfer.mooncake.directory.redis.ANSWER_NBYTES_MAX", 1000)

    with (
        fake_redis({"mooncake/ram/x": b"x" * 5000}) as server,
        pytest.raises(errors.DirectoryAnswerError, match="5000 bytes"),
    ):
        open_(server).find("x", deadline=soon())


def test_the_wrong_path_is_told_with_the_right_one() -> None:
    answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 14\r\n\r\n404: Not Found"

    with liar(answer) as port, pytest.raises(errors.DirectoryAnswerError, match=r"status 404: '404: Not Found'"):
        open_(f"http://127.0.0.1:{port}").publish(OWN)


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("etcdserver: request is too large", "--max-request-bytes"),
        ("etcdserver: user name is empty", "authentication is not supported"),
    ],
)
def test_etcd_is_quoted_with_a_remedy(message: str, remedy: str) -> None:
    body = json.dumps({"error": message, "message": message, "code": 3}).encode()
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body)

    with liar(head + body) as port, pytest.raises(errors.DirectoryAnswerError) as caught:
        open_(f"etcd://127.0.0.1:{port}").find("x", deadline=soon())

    assert message in str(caught.value)
    assert remedy in caught.value.remedy


def test_redis_answers_that_are_none_are_told() -> None:
    pytest.importorskip("redis")
    with liar(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port, pytest.raises(errors.DirectoryError):
        open_(f"redis://127.0.0.1:{port}").find("x", deadline=soon())


def test_redis_password_is_used_and_its_absence_told(opened: contextlib.ExitStack) -> None:
    pytest.importorskip("redis")
    server = opened.enter_context(fake_redis({}, "secret"))
    published(opened, server, environment={"MC_REDIS_PASSWORD": "secret", "MC_REDIS_USERNAME": "someone"})

    for environment in ({}, {"MC_REDIS_PASSWORD": "wrong"}):
        with pytest.raises(errors.DirectoryAnswerError, match="MC_REDIS_PASSWORD"):
            open_(server, environment=environment).find(NAME, deadline=soon())


def test_redis_without_that_database_is_told(opened: contextlib.ExitStack) -> None:
    pytest.importorskip("redis")
    server = opened.enter_context(fake_redis({}))

    with pytest.raises(errors.DirectoryError, match=r"(?i)database"):
        open_(server, environment={"MC_REDIS_DB_INDEX": "99"}).find(NAME, deadline=soon())


# Servers that go and come.


def wait_for(condition: Any) -> None:
    limit = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.005)


def test_a_server_that_restarts_empty_gets_the_entries_again(values: Values, opened: contextlib.ExitStack) -> None:
    """B145."""
    directory = published(opened, opened.enter_context(fake_http(values)), keep_interval_s=0.01)

    with capture_logs() as logs:
        values.clear()
        wait_for(lambda: len(values) == 2 and logs)

    assert directory.find(NAME, deadline=soon()).buffers == OWN.buffers
    assert logs[0]["event"] == "directory.republished"
    directory.withdraw()


def test_a_lost_server_is_told_once_and_a_missed_change_is_made_up_for(opened: contextlib.ExitStack) -> None:
    values: Values = {}
    with fake_http(values) as server:
        directory = published(opened, server, keep_interval_s=0.01)
    port = int(server.removesuffix("/metadata").rpartition(":")[2])

    with capture_logs() as logs:
        with pytest.raises(errors.DirectoryUnreachableError):
            directory.publish(SegmentDescriptor(NAME, tcp_data_port=15009))
        wait_for(lambda: logs)
        time.sleep(0.05)
        assert [log["event"] for log in logs] == ["directory.lost"]

        with fake_http(values, port):
            wait_for(lambda: len(logs) >= 3)
            assert directory.find(NAME, deadline=soon()).tcp_data_port == 15009
            directory.withdraw()

    assert [log["event"] for log in logs] == ["directory.lost", "directory.republished", "directory.returned"]
    assert values == {}


def test_a_name_that_another_process_took_is_not_fought_over(values: Values, opened: contextlib.ExitStack) -> None:
    published(opened, opened.enter_context(fake_http(values)), keep_interval_s=0.01)
    values[f"mooncake/rpc_meta/{NAME}"] = b'{"ip_or_host_name":"192.0.2.99","rpc_port":1}'
    del values[f"mooncake/ram/{NAME}"]
    time.sleep(0.05)

    assert f"mooncake/ram/{NAME}" not in values


def test_withdraw_without_a_server_ends_and_is_logged() -> None:
    with fake_http({}) as server:
        directory = open_(server)
        directory.publish(OWN)

    with capture_logs() as logs:
        directory.withdraw()

    assert [log["event"] for log in logs] == ["directory.entry_left"]


# No server.


def test_p2p_asks_the_peer_itself() -> None:
    asked = []

    def ask(host: str, port: int, own: SegmentDescriptor, *, deadline: float) -> SegmentDescriptor:
        asked.append((host, port, own.tcp_data_port))
        return SegmentDescriptor("[::1]:15000")

    directory = open_("P2PHANDSHAKE", ask=ask)
    directory.publish(OWN)

    assert directory.find("[::1]:15000", deadline=soon()).name == "[::1]:15000"
    assert directory.find_control("[::1]:15000", deadline=soon()) == HostPort("::1", 15000)
    assert asked == [("::1", 15000, 15001)]
    assert directory.stale_hint(OWN) == ""
    directory.withdraw()


# What the user wrote.


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ("", "empty"),
        ("mysql://host", "scheme 'mysql' is not known"),
        ("p2phandshake://x", "P2PHANDSHAKE"),
        ("http://", "names no host"),
        ("http://host:99999/metadata", "not the URL"),
        ("http://host:x/metadata", "not the URL"),
        ("http://user:secret@host/metadata", "password"),
        ("http://host/metadata?a=b", "query"),
        ("redis://:secret@host:6379", "MC_REDIS_PASSWORD"),
        ("redis://host:6379/3", "MC_REDIS_DB_INDEX"),
        ("redis://host:x", "port"),
        ("etcd://", "names no etcd server"),
        ("etcd://;,", "names no etcd server"),
        ("host:99999", "port"),
    ],
)
def test_a_server_that_cannot_be_meant_is_refused(server: str, told: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        open_(server)

    assert told in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("index", ["-1", "256", "one", "", "²"])
def test_a_database_index_that_cannot_be_meant_is_refused(index: str) -> None:
    with pytest.raises(errors.ConfigError, match="MC_REDIS_DB_INDEX"):
        open_("redis://host", environment={"MC_REDIS_DB_INDEX": index})


def test_no_scheme_is_etcd(values: Values, opened: contextlib.ExitStack) -> None:
    server = opened.enter_context(fake_etcd(values))
    published(opened, server.removeprefix("etcd://"))

    assert f"mooncake/ram/{NAME}" in values


def test_a_missing_redis_library_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)

    with pytest.raises(errors.UnsupportedError, match=r"pip install 'kvxfer\[redis\]'"):
        open_("redis://127.0.0.1:6379")


def test_a_process_without_a_name_is_not_published() -> None:
    with pytest.raises(errors.ConfigError, match="local_hostname"):
        open_("http://host/metadata", "")
