"""MooncakeService: an engine that Mooncake processes open, read and write as one of theirs.

Their control messages come in on the engine's own port, beside kvxfer's; rows come in on a data port of their own
(`rows.py`). Read next: `wire/frames.py`, `wire/descriptor.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvxfer.acceptor import Acceptor
from kvxfer.addresses import parse_host_port
from kvxfer.errors import ConfigError, KvxferError, PeerRefusedError, RemoteProtocolError, UsageError
from kvxfer.log import get_logger
from kvxfer.mooncake.rows import RowStream
from kvxfer.mooncake.wire.descriptor import BufferDescriptor, KvxferMark, SegmentDescriptor
from kvxfer.mooncake.wire.frames import (
    LENGTH_NBYTES,
    Message,
    MessageDecoder,
    MessageKind,
    encode,
    may_be_message,
    pack_notify,
    unpack_notify,
)
from kvxfer.text import clean
from kvxfer.transports.loop import READABLE, WRITABLE, Loop
from kvxfer.transports.tcp import tune
from kvxfer.transports.tcp_service import DataService

if TYPE_CHECKING:
    from kvxfer.engine import TransferEngine
    from kvxfer.memory import Region

__all__ = ["Connect", "MooncakeService"]

MESSAGE_NBYTES_MAX = 8 << 20
"""Bound on what a message may make this side keep: a notification of 1 MiB whose every byte is escaped. Descriptors of
peers are not kept at all."""
RECEIVE_NBYTES = 1 << 16

Connect = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answers a CONNECTION message, an rdma handshake descriptor, in a thread of its own: the kernel may take seconds to
find a neighbour. Raises KvxferError to refuse."""
CONNECTING_MAX = 8
"""CONNECTION messages that are answered at once; more than these are refused, and Mooncake tries again."""


class MooncakeService:
    """Serves Mooncake processes from an engine's memory, until `close` or the engine's end. Dialect of its listener.

    describe: what Mooncake processes are told of this one; `descriptor(engine.address)` if not given. data_ports: the
    first of them that is free becomes the tcp data port. connect: takes part in rdma handshakes; without it they are
    refused with a reason.

    Raises ConfigError where no data port can be bound, UsageError where the engine has such a service already.
    """

    head_nbytes = LENGTH_NBYTES

    def __init__(
        self,
        engine: TransferEngine,
        describe: Callable[[], SegmentDescriptor] | None = None,
        *,
        data_ports: Iterable[int] = (0,),
        connect: Connect | None = None,
    ) -> None:
        if engine._service.dialect is not None:
            raise UsageError(
                f"the engine at {engine.address} answers Mooncake processes already.",
                remedy="Close its other MooncakeService first.",
            )
        self._engine = engine
        self._config = engine.config
        self._describe = describe or (lambda: self.descriptor(engine.address))
        self._connect = connect
        # No spinning: an initiator of Mooncake's keeps a core busy while it waits, and on few cores a second one that
        # spins takes the time of the threads that move the bytes (bench/mooncake_wire.py: half of the rate at 16 KiB).
        self._data = DataService(dataclasses.replace(engine.config, spin_s=0.0), engine._service)
        self._exchanges: set[_Exchange] = set()
        self._connecting = threading.BoundedSemaphore(CONNECTING_MAX)
        self._closed = False
        self._built: tuple[str, tuple[Region, ...], SegmentDescriptor] | None = None
        self._told: tuple[SegmentDescriptor, bytes] | None = None
        self._log = get_logger(__name__)
        self._acceptor = _bind_one(data_ports, lambda port: Acceptor(engine.config, port, engine._loop, self._adopt))
        self.tcp_data_port = self._acceptor.port
        self._acceptor.start()
        engine._service.dialect = self

    def descriptor(self, name: str) -> SegmentDescriptor:
        """Return what a Mooncake process must know to reach this one over tcp.

        name: "host:port" of the engine where processes ask each other, else the name under which it is published.
        """
        regions = self._engine.regions
        built = self._built
        if built is None or built[0] != name or built[1] is not regions:
            built = self._built = (name, regions, self._build(name, regions))
        return built[2]

    def _build(self, name: str, regions: tuple[Region, ...]) -> SegmentDescriptor:
        return SegmentDescriptor(
            name=name,
            buffers=tuple(BufferDescriptor(name, one.address, one.nbytes) for one in regions if one.rights),
            tcp_data_host=parse_host_port(self._engine.address).host,
            tcp_data_port=self.tcp_data_port,
            tcp_proto_version=2,
            timestamp=datetime.datetime.now().isoformat(" ", "microseconds"),
            kvxfer=KvxferMark(self._engine.address, self._engine.generation),
        )

    def notifies(self) -> list[tuple[str, str]]:
        """Return and forget the notifications that have come in, as (name, message), oldest first.

        They share the engine's queue. One that a kvxfer peer sent without `pack_notify` has its address as name.
        """
        found = []
        for one in self._engine.notifications():
            try:
                found.append(unpack_notify(one.payload))
            except RemoteProtocolError:
                found.append((one.peer, one.payload.decode(errors="replace")))
        return found

    def close(self) -> None:
        """Stop serving: when this returns no Mooncake process writes anything more here. Tolerated twice."""
        if self._closed:
            return
        self._closed = True
        if self._engine._service.dialect is self:
            self._engine._service.dialect = None
        is_over = threading.Event()

        def stop() -> None:
            self._acceptor.close()
            for exchange in list(self._exchanges):
                exchange.close()
            is_over.set()

        self._engine._loop.call_soon(stop)
        if not self._engine._loop.is_current:
            is_over.wait(self._config.close_timeout_s)
        self._data.close(self._config.close_timeout_s)

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors only."""
        self._acceptor.abandon()
        for exchange in self._exchanges:
            exchange.abandon()
        self._data.abandon()

    # Dialect.

    def may_begin_with(self, data: bytes) -> bool:
        """Whether these first bytes may be a control message's."""
        return may_be_message(data)

    def accept(self, connection: socket.socket, label: str, data: bytes) -> None:
        """Answer the message that a connection brings."""
        if self._closed or len(self._exchanges) >= self._config.connections_max:
            self._log.warning("listener.full", peer=label, connections_max=self._config.connections_max)
            connection.close()
            return
        exchange = _Exchange(connection, label, self, self._engine._loop)
        self._exchanges.add(exchange)
        exchange.begin(data, time.monotonic() + self._config.handshake_timeout_s)

    def forget(self, exchange: _Exchange) -> None:
        """A control connection is closed."""
        self._exchanges.discard(exchange)

    def _adopt(self, connection: socket.socket, label: str, now: float) -> None:
        """Serve a new connection to the data port."""
        number = self._data.next_number()

        def make(loop: Loop) -> RowStream:
            return RowStream(
                connection,
                label,
                loop,
                lambda: self._data.forget(number),
                gate=self._data.gate,
                stall_s=self._config.transfer_timeout_s,
            )

        try:
            tune(connection, self._config)
        except OSError:  # gone already
            connection.close()
            return
        if not self._data.serve(number, make):
            self._log.warning("data.full", peer=label, tcp_connections_max=self._config.tcp_connections_max)
            connection.close()

    # Answers.

    def answer(self, message: Message, label: str, reply: Callable[[bytes], None]) -> None:
        """Have `reply` called with the bytes that answer a message, now or later, in any thread; raises KvxferError
        where it gets no answer."""
        if message.kind is MessageKind.METADATA:
            reply(self._own_descriptor())
        elif message.kind is MessageKind.NOTIFY:
            self._engine._service.notify(label, pack_notify(*unpack_notify(message.body)))
            reply(encode(MessageKind.NOTIFY, {"name": "", "notify_msg": "success"}))
        elif message.kind is MessageKind.PROBE:
            reply(encode(MessageKind.PROBE, {"status": "success"}))
        else:
            self._connect_in_thread(message, message.fields(), label, reply)

    def _connect_in_thread(
        self, message: Message, asked: Mapping[str, Any], label: str, reply: Callable[[bytes], None]
    ) -> None:
        if self._connect is None or not self._connecting.acquire(blocking=False):
            reply(self._answer_connection(message, asked, label))
            return

        def connect() -> None:
            try:
                reply(self._answer_connection(message, asked, label, self._connect))
            finally:
                self._connecting.release()

        try:
            threading.Thread(target=connect, name="kvxfer-mooncake-connect", daemon=True).start()
        except BaseException:  # no more threads: the next message may find one
            self._connecting.release()
            raise

    def _answer_connection(
        self, message: Message, asked: Mapping[str, Any], label: str, connect: Connect | None = None
    ) -> bytes:
        """Return what `connect` answers, or why nothing did."""
        answer: Mapping[str, Any]
        try:
            if connect is None:
                raise self._refusal()
            answer = connect(asked)
        except KvxferError as error:
            self._log.warning("mooncake.message_refused", peer=label, kind="CONNECTION", error=str(error))
            answer = {
                "local_nic_path": asked.get("peer_nic_path", ""),
                "peer_nic_path": asked.get("local_nic_path", ""),
                "local_lid": 0,
                "local_gid": "",
                "payload": "",
                "qp_num": [],
                "reply_msg": str(error),
            }
        return encode(MessageKind.CONNECTION, answer, is_old=message.is_old)

    def _refusal(self) -> PeerRefusedError:
        address = self._engine.address
        if self._connect is None:
            return PeerRefusedError(
                f"kvxfer at {address} takes no rdma connection of Mooncake's.",
                remedy="Start the initiator with protocol tcp, or with MC_FORCE_TCP=1.",
            )
        return PeerRefusedError(
            f"kvxfer at {address} is making {CONNECTING_MAX} connections already.", remedy="Try again in a moment."
        )

    def _own_descriptor(self) -> bytes:
        """The answer to METADATA, made anew only where the descriptor has changed."""
        descriptor = self._describe()
        told = self._told
        if told is None or told[0] is not descriptor:
            told = self._told = (descriptor, encode(MessageKind.METADATA, descriptor.to_json()))
        return told[1]


def _bind_one(ports: Iterable[int], bind: Callable[[int], Acceptor]) -> Acceptor:
    last: ConfigError | None = None
    for port in ports:
        try:
            return bind(port)
        except ConfigError as error:
            last = error
            if error.values.get("errno") != errno.EADDRINUSE:
                break
    raise last or ConfigError("no data port is given.", remedy="Leave data_ports out for any free one.")


class _Exchange:
    """Handler of the engine's loop: a control connection. A message comes in, its answer goes out, the peer closes."""

    def __init__(self, connection: socket.socket, label: str, service: MooncakeService, loop: Loop) -> None:
        self._socket = connection
        self._label = label
        self._service = service
        self._loop = loop
        self._decoder = MessageDecoder(MESSAGE_NBYTES_MAX, unread_kinds=(MessageKind.METADATA,))
        self._answer: memoryview | None = None
        self._watching = READABLE
        self._is_asked = False
        self._open = True

    def begin(self, data: bytes, deadline: float) -> None:
        """Start with what has been read already; whatever is not done at `deadline` is dropped."""
        self._loop.add(self)
        self._loop.call_at(deadline, self)
        self._take(data)

    def fileno(self) -> int:
        return self._socket.fileno()

    def ready(self, events: int, now: float) -> bool:
        if self._answer:
            self._send()
            return True
        try:
            data = self._socket.recv(RECEIVE_NBYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
        elif not self._is_asked:
            self._take(data)
        return True

    def timer(self, now: float) -> None:
        if self._open and not self._is_asked:
            get_logger(__name__).warning("listener.silent", peer=self._label, received_nbytes=self._decoder.kept_nbytes)
        self.close()

    def failed(self, error: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection; tolerated twice."""
        if self._open:
            self._open = False
            self._loop.remove(self)
            self._socket.close()
            self._service.forget(self)

    def abandon(self) -> None:
        """In a forked child: close the copy of the descriptor only."""
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())

    def _take(self, data: bytes) -> None:
        try:
            message = self._decoder.feed(data)
            if message is None:
                return
            self._is_asked = True
            self._service.answer(message, self._label, self._reply)
        except KvxferError as error:
            get_logger(__name__).warning("mooncake.message_refused", peer=self._label, error=clean(str(error), 500))
            self.close()

    def _reply(self, answer: bytes) -> None:
        """The answer is there; from any thread."""
        if self._loop.is_current:
            self._begin_answer(answer)
        else:
            self._loop.call_soon(lambda: self._begin_answer(answer))

    def _begin_answer(self, answer: bytes) -> None:
        if self._open:
            self._answer = memoryview(answer)
            self._send()

    def _send(self) -> None:
        assert self._answer is not None
        try:
            sent = self._socket.send(self._answer, socket.MSG_NOSIGNAL)
            self._answer = self._answer[sent:]
            if not self._answer:
                self._socket.shutdown(socket.SHUT_WR)  # as Mooncake does; then the peer closes
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close()
            return
        wanted = WRITABLE if self._answer else READABLE
        if wanted != self._watching:
            self._watching = wanted
            self._loop.watch(self, wanted)
