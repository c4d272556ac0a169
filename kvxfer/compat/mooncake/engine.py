"""`mooncake.engine.TransferEngine` on kvxfer: its methods, their integers, and nothing that gets out but a TypeError.

Every method takes what Mooncake's takes. Arguments become texts, ints and rows first; the rest is work that `answer`
turns into a code. Read next: `running.py`, what does the work; docs/mooncake.md, what is different.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from kvxfer import EngineConfig, KvxferError, MemoryArgumentError, Opcode, UnsupportedError, UsageError
from kvxfer.compat.mooncake.arguments import Rows, take_column, take_columns, take_int, take_row, take_text
from kvxfer.compat.mooncake.codes import Answer, Code, answer
from kvxfer.compat.mooncake.memory import copy_bytes
from kvxfer.compat.mooncake.running import Running, close_with
from kvxfer.compat.mooncake.settings import P2P, Wish
from kvxfer.compat.mooncake.topology import NO_TOPOLOGY, local_topology
from kvxfer.compat.mooncake.types import InnerTransferEngine, TransferNotify, TransferOpcode, take_notify, take_opcode
from kvxfer.system.iovec import address_of
from kvxfer.types import ADDRESS_MAX

__all__ = ["TransferEngine"]


class TransferEngine:
    """One engine; `initialize` starts it, and again replaces it. All methods may be called from any thread.

    0 is success, a negative int is a failure; `kvxfer.compat.mooncake.last_error()` gives the exception behind it.
    Wrong types raise TypeError.
    """

    TransferOpcode: TypeAlias = TransferOpcode

    def __init__(self) -> None:
        self._running: Running | None = None
        self._refusal: KvxferError | None = None  # why the last `initialize` failed
        self._initializing = threading.Lock()
        self._finalizer: weakref.finalize[[Running], TransferEngine]

    # Life.

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, /) -> int:
        """Start the engine.

        local_hostname: the host that peers reach this process by, kept as it is; with P2PHANDSHAKE its port is ignored
        and a free one taken (`get_rpc_port`). protocol: "tcp" or "rdma". device_name: RDMA devices, "" for all.
        """
        return self._initialize("initialize", local_hostname, metadata_server, protocol, device_name)

    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, metadata_type: str, /
    ) -> int:
        """As `initialize`; metadata_type is the scheme of a metadata server that has none: "http", "redis", "etcd"."""
        server = take_text("initialize_ext", "metadata_server", metadata_server, none_is_null=True)
        scheme = take_text("initialize_ext", "metadata_type", metadata_type, none_is_null=True)
        if server != P2P and "://" not in server:
            server = f"{scheme}://{server}"
        return self._initialize("initialize_ext", local_hostname, server, protocol, device_name)

    def get_rpc_port(self) -> int:
        """Return the port of this process; f"{host}:{port}" is what peers call it with P2PHANDSHAKE."""
        return self._answer("get_rpc_port", None, lambda running: running.port)

    def _initialize(
        self, call: str, local_hostname: object, metadata_server: object, protocol: object, device_name: object
    ) -> int:
        wish = Wish(
            take_text(call, "local_hostname", local_hostname, none_is_null=True),
            take_text(call, "metadata_server", metadata_server, none_is_null=True),
            take_text(call, "protocol", protocol, none_is_null=True),
            take_text(call, "device_name", device_name, none_is_null=True),
        )

        def start() -> int:
            with self._initializing:  # else one of two would be started and forgotten
                before, self._running, self._refusal = self._running, None, None
                if before is not None:  # first, as Mooncake does it: the new one may want its name or its port
                    before.close()
                    self._finalizer.detach()
                try:
                    running = Running(wish, os.environ)
                except KvxferError as error:
                    self._refusal = error
                    raise
                self._finalizer = close_with(self, running)
                self._running = running
            return Code.OK

        return int(answer(call, None, start))

    # Memory.

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Make memory available to transfers and peers. location: ignored; the memory itself tells where it is."""
        call = "register_memory"
        ranges = [(take_int(call, "buffer_addr", buffer_addr), take_int(call, "capacity", capacity))]
        take_text(call, "location", location)
        return self._do(call, lambda running: running.register(ranges))

    def unregister_memory(self, buffer_addr: int, /) -> int:
        """Take memory back, by the address that was registered."""
        address = take_int("unregister_memory", "buffer_addr", buffer_addr)
        return self._do("unregister_memory", lambda running: running.unregister([address]))

    def batch_register_memory(self, buffer_addresses: list[int], capacities: list[int], location: str = "*") -> int:
        """Register several ranges, all or none."""
        call = "batch_register_memory"
        addresses = take_column(call, "buffer_addresses", buffer_addresses).tolist()
        sizes = take_column(call, "capacities", capacities).tolist()
        take_text(call, "location", location)

        def register(running: Running) -> None:
            if len(addresses) != len(sizes):
                raise UsageError(
                    f"the lists differ in length: {len(addresses)} buffer addresses, {len(sizes)} capacities.",
                    remedy="Give every buffer its size.",
                )
            running.register(list(zip(addresses, sizes, strict=True)))

        return self._do(call, register)

    def batch_unregister_memory(self, buffer_addresses: list[int], /) -> int:
        """Take several ranges back; what can be is, then the first error is returned."""
        addresses = take_column("batch_unregister_memory", "buffer_addresses", buffer_addresses).tolist()
        return self._do("batch_unregister_memory", lambda running: running.unregister(addresses))

    def allocate_managed_buffer(self, length: int, /) -> int:
        """Return the address of new registered memory; 0 where there is none."""
        nbytes = take_int("allocate_managed_buffer", "length", length)
        return self._answer("allocate_managed_buffer", 0, lambda running: running.managed.allocate(nbytes))

    def free_managed_buffer(self, buffer_addr: int, length: int, /) -> int:
        """Give back what `allocate_managed_buffer` returned. length: ignored; it is known."""
        address = take_int("free_managed_buffer", "buffer_addr", buffer_addr)
        take_int("free_managed_buffer", "length", length)
        return self._do("free_managed_buffer", lambda running: running.managed.free(address))

    def write_bytes_to_buffer(self, dest_address: int, src: bytes, length: int, /) -> int:
        """Copy the first `length` bytes of `src` to memory of this process, registered or not."""
        call = "write_bytes_to_buffer"
        address, nbytes = take_int(call, "dest_address", dest_address), take_int(call, "length", length)
        data = bytes(src) if isinstance(src, bytes | bytearray) else take_text(call, "src", src).encode()

        def write() -> int:
            if nbytes > len(data):
                raise UsageError(f"{nbytes} bytes are to be written, of {len(data)}.", remedy="Pass len(src).")
            if nbytes:
                copy_bytes(address, address_of(data), nbytes)
            return Code.OK

        return int(answer(call, None, write))

    def read_bytes_from_buffer(self, source_address: int, length: int, /) -> bytes:
        """Return a copy of memory of this process. Raises MemoryArgumentError where there is none: no code says so."""
        call = "read_bytes_from_buffer"
        address, nbytes = take_int(call, "source_address", source_address), take_int(call, "length", length)
        if not nbytes:
            return b""
        if nbytes > ADDRESS_MAX:
            raise MemoryArgumentError(
                f"{nbytes} bytes are to be read; no process has so many.",
                remedy="Check how the length is computed.",
                nbytes=nbytes,
            )
        data = bytearray(nbytes)
        copy_bytes(address_of(data), address, nbytes)
        return bytes(data)

    # Transfers that return when they are done.

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Write one row of local memory to a peer's. transport_hint: ignored."""
        row = (target_hostname, buffer, peer_buffer_address, length)
        return self._move_row("transfer_sync_write", Opcode.WRITE, row, transport_hint)

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Read one row of a peer's memory into local memory."""
        row = (target_hostname, buffer, peer_buffer_address, length)
        return self._move_row("transfer_sync_read", Opcode.READ, row, transport_hint)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Move one row; `notify` reaches the peer after all bytes, or never."""
        call = "transfer_sync"
        native, told = take_opcode(call, opcode), take_notify(call, notify)
        row = (target_hostname, buffer, peer_buffer_address, length)
        return self._move_row(call, native, row, transport_hint, told)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int:
        """Write rows of local memory to a peer's; any number of them."""
        rows = (target_hostname, buffers, peer_buffer_addresses, lengths)
        return self._move("batch_transfer_sync_write", Opcode.WRITE, rows, transport_hint)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int:
        """Read rows of a peer's memory into local memory."""
        rows = (target_hostname, buffers, peer_buffer_addresses, lengths)
        return self._move("batch_transfer_sync_read", Opcode.READ, rows, transport_hint)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Move rows; `notify` reaches the peer after all of them, or never."""
        call = "batch_transfer_sync"
        native, told = take_opcode(call, opcode), take_notify(call, notify)
        rows = (target_hostname, buffers, peer_buffer_addresses, lengths)
        return self._move(call, native, rows, transport_hint, told)

    # Transfers that go on behind the call, whether somebody asks for their status or not.

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Begin to write one row; returns the number of the batch, 0 where it could not begin."""
        call = "transfer_submit_write"
        name, rows = take_row(call, (target_hostname, buffer, peer_buffer_address, length), transport_hint)
        return self._answer(call, 0, lambda running: running.submit(Opcode.WRITE, name, rows))

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int:
        """Begin to write rows; returns the number of the batch, 0 where it could not begin."""
        rows = (target_hostname, buffers, peer_buffer_addresses, lengths)
        return self._submit("batch_transfer_async_write", Opcode.WRITE, rows, transport_hint)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int:
        """Begin to read rows; returns the number of the batch, 0 where it could not begin."""
        rows = (target_hostname, buffers, peer_buffer_addresses, lengths)
        return self._submit("batch_transfer_async_read", Opcode.READ, rows, transport_hint)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        opcode: TransferOpcode,
        transport_hint: str = "",
    ) -> int:
        """Begin to move rows; returns the number of the batch, 0 where it could not begin."""
        call = "batch_transfer_async"
        native = take_opcode(call, opcode)
        rows = (target_hostname, buffers, peer_buffer_addresses, lengths)
        return self._submit(call, native, rows, transport_hint)

    def transfer_check_status(self, batch_id: int, /) -> int:
        """Return how a batch is. 1: all of it is done, 0: it runs, -1: it failed, -2: it ran out of time.

        An end is told once; the number is unknown then, which is -1.
        """
        call = "transfer_check_status"
        number = take_int(call, "batch_id", batch_id)
        code = self._answer(call, None, lambda running: int(running.poll(number)))
        return code if code in (0, 1, Code.TIMED_OUT) else int(Code.INVALID_ARGUMENT)

    def get_batch_transfer_status(self, batch_ids: list[int], /) -> int:
        """Wait for batches, all at once; 0 where every one went well."""
        call = "get_batch_transfer_status"
        numbers = take_column(call, "batch_ids", batch_ids).tolist()
        return self._do(call, lambda running: running.wait(numbers))

    # Peers.

    def send_probe(self, peer_server_name: str) -> int:
        """Ask a peer for a sign of life; answers within 2 s. -101: its name does not resolve, -102: nobody answers."""
        name = take_text("send_probe", "peer_server_name", peer_server_name)
        return self._do("send_probe", lambda running: running.probe(name))

    def get_notifies(self) -> list[TransferNotify]:
        """Return and forget the notifications that have come in, oldest first."""
        none: list[tuple[str, str]] = []
        found = self._answer("get_notifies", none, lambda running: running.notifications())
        return [TransferNotify(*one) for one in found]

    def get_first_buffer_address(self, segment_name: str, /) -> int:
        """Return where the first buffer of a peer begins; 0 where it has none or is not there."""
        name = take_text("get_first_buffer_address", "segment_name", segment_name)
        return self._answer("get_first_buffer_address", 0, lambda running: running.first_address(name))

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Return 0: there is no EFA to warm up."""
        take_text("warmup_efa_segment", "segment_name", segment_name)
        return int(Code.OK)

    # This machine, and what is behind.

    def get_local_topology(self, device_name: str | None = None) -> str:
        """Return which RDMA devices are near which CPUs, as JSON text: {"cpu:0": [[near], [others]]}."""
        call = "get_local_topology"
        devices = None if device_name is None else take_text(call, "device_name", device_name)

        def look() -> str:
            chosen: dict[str, Any] = {"rdma_devices": devices} if devices else {}
            return local_topology(EngineConfig.resolve(**chosen), os.environ)

        return answer(call, NO_TOPOLOGY, look)

    def get_engine(self) -> InnerTransferEngine:
        """Return an opaque object: no Mooncake Store can be set up with it."""
        return object.__new__(InnerTransferEngine)

    def get_engine_ptr(self) -> int:
        """Return 0: no C++ object stands behind this engine."""

        def refuse() -> int:
            raise UnsupportedError(
                "get_engine_ptr: no C++ engine stands behind kvxfer's.",
                remedy="mooncake.pg and mooncake.store need the real Mooncake.",
            )

        return answer("get_engine_ptr", 0, refuse)

    # Inside.

    def _move_row(
        self,
        call: str,
        opcode: Opcode,
        row: tuple[object, object, object, object],
        hint: object,
        notify: tuple[str, str] | None = None,
    ) -> int:
        name, rows = take_row(call, row, hint)
        return self._do(call, lambda running: running.transfer(opcode, name, rows, notify))

    def _move(
        self,
        call: str,
        opcode: Opcode,
        rows: tuple[object, object, object, object],
        hint: object,
        notify: tuple[str, str] | None = None,
    ) -> int:
        name, columns = take_columns(call, rows, hint)
        return self._do(call, lambda running: running.transfer(opcode, name, Rows.of_columns(*columns), notify))

    def _submit(self, call: str, opcode: Opcode, rows: tuple[object, object, object, object], hint: object) -> int:
        name, columns = take_columns(call, rows, hint)
        return self._answer(call, 0, lambda running: running.submit(opcode, name, Rows.of_columns(*columns)))

    def _do(self, call: str, work: Callable[[Running], None]) -> int:
        """Return 0, or the code of what the work raises."""

        def done(running: Running) -> int:
            work(running)
            return 0

        return self._answer(call, None, done)

    def _answer(self, call: str, failed: Answer | None, work: Callable[[Running], Answer]) -> Answer:
        return answer(call, failed, self._with_running, work)

    def _with_running(self, work: Callable[[Running], Answer]) -> Answer:
        running = self._running
        if running is None:
            refusal = self._refusal
            if refusal is not None:
                raise UsageError(
                    f"the engine is not initialised, because initialize failed: {refusal.message}",
                    remedy=refusal.remedy,
                    is_told=True,
                )
            raise UsageError(
                "the engine is not initialised.",
                remedy="Call initialize first, and look at what it returns.",
            )
        running.check_owner()
        return work(running)
