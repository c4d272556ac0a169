"""Metadata servers in this process: Mooncake's http one, redis and etcd as far as kvxfer speaks to them; and liars."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

Values = dict[str, bytes]


@contextlib.contextmanager
def running(server: socketserver.BaseServer) -> Iterator[int]:
    """Serve in a thread; gives the port."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(**methods: Callable[[Any], None]) -> type:
    return type("Handler", (BaseHTTPRequestHandler,), {"log_message": lambda *_: None, **methods})


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _body(handler: BaseHTTPRequestHandler) -> bytes:
    return handler.rfile.read(int(handler.headers["Content-Length"]))


@contextlib.contextmanager
def fake_http(values: Values, port: int = 0) -> Iterator[str]:
    """Mooncake's own server: only /metadata, 404 for an absent key, 400 for a second rpc_meta."""

    def key_of(handler: BaseHTTPRequestHandler) -> str:
        parts = urlsplit(handler.path)
        assert parts.path == "/metadata"
        return parse_qs(parts.query)["key"][0]

    def get(handler: BaseHTTPRequestHandler) -> None:
        value = values.get(key_of(handler))
        _send(handler, 404 if value is None else 200, b"metadata not found" if value is None else value)

    def put(handler: BaseHTTPRequestHandler) -> None:
        key, value = key_of(handler), _body(handler)
        if "rpc_meta" in key and key in values:
            return _send(handler, 400, b"Duplicate rpc_meta key not allowed")
        values[key] = value
        return _send(handler, 200, b"metadata updated")

    def delete(handler: BaseHTTPRequestHandler) -> None:
        _send(handler, 404 if values.pop(key_of(handler), None) is None else 200, b"")

    server = ThreadingHTTPServer(("127.0.0.1", port), _handler(do_GET=get, do_PUT=put, do_DELETE=delete))
    with running(server) as at:
        yield f"http://127.0.0.1:{at}/metadata"


@contextlib.contextmanager
def fake_etcd(values: Values) -> Iterator[str]:
    """etcd's JSON gateway; answers come in chunks, as the real one's do when they are long."""

    def post(handler: BaseHTTPRequestHandler) -> None:
        fields = {name: b64decode(value) for name, value in json.loads(_body(handler)).items()}
        key = fields["key"].decode()
        answer: dict[str, Any] = {"header": {"revision": "1"}}
        if handler.path == "/v3/kv/put":
            values[key] = fields["value"]
        elif handler.path == "/v3/kv/deleterange":
            values.pop(key, None)
        elif key in values:
            answer["kvs"] = [{"key": _encode(key.encode()), "value": _encode(values[key])}]
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        body = json.dumps(answer).encode()
        for part in (body[:20], body[20:]):
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        handler.wfile.write(b"0\r\n\r\n")

    with running(ThreadingHTTPServer(("127.0.0.1", 0), _handler(do_POST=post))) as port:
        yield f"etcd://127.0.0.1:{port}"


def _encode(value: bytes) -> str:
    return b64encode(value).decode()


class _Redis(socketserver.StreamRequestHandler):
    values: ClassVar[Values]
    password: ClassVar[str]

    def handle(self) -> None:
        known = not self.password
        while line := self.rfile.readline():
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            name, key = words[0].upper(), words[1].decode() if len(words) > 1 else ""
            if name == b"AUTH":
                known = words[-1].decode() == self.password
                self.wfile.write(b"+OK\r\n" if known else b"-WRONGPASS invalid username-password pair\r\n")
            elif not known:
                self.wfile.write(b"-NOAUTH Authentication required.\r\n")
            elif name == b"SELECT":
                self.wfile.write(b"+OK\r\n" if int(key) < 16 else b"-ERR DB index is out of range\r\n")
            elif name == b"STRLEN":
                self.wfile.write(b":%d\r\n" % len(self.values.get(key, b"")))
            elif name == b"GETRANGE":
                value = self.values.get(key, b"")[int(words[2]) : int(words[3]) + 1]
                self.wfile.write(b"$%d\r\n%s\r\n" % (len(value), value))
            elif name == b"SET":
                self.values[key] = words[2]
                self.wfile.write(b"+OK\r\n")
            elif name == b"DEL":
                self.wfile.write(b":%d\r\n" % (self.values.pop(key, None) is not None))
            else:
                self.wfile.write(b"-ERR unknown command\r\n")


@contextlib.contextmanager
def fake_redis(values: Values, password: str = "") -> Iterator[str]:
    """redis with its plain protocol (RESP2)."""
    handler = type("Handler", (_Redis,), {"values": values, "password": password})
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    with running(server) as port:
        yield f"redis://127.0.0.1:{port}"


@contextlib.contextmanager
def liar(answer: bytes | None, *, byte_by_byte_s: float | None = None) -> Iterator[int]:
    """Whatever comes, answer with these bytes and close; None: never answer. Gives the port."""
    done = threading.Event()

    def work() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                if answer is None:
                    done.wait()
                for number in range(len(answer or b"")) if byte_by_byte_s is not None else ():
                    if done.wait(byte_by_byte_s):
                        break
                    connection.sendall(answer[number : number + 1])  # type: ignore[index]
                if answer is not None and byte_by_byte_s is None:
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(65536)

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        done.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
