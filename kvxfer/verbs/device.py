"""RDMA devices: which there are, what they can do, what their ports are like, what happens to them.

`list_devices` -> `Device` (a name) -> `open` -> `Context` (the open device), from which everything else is made. What
it says of itself is in `attributes.py`. Read next: `gid_choice.py` and `port.py`, which choose; `protection_domain.py`,
`completion_queue.py`, `queue_pair.py`, which are made from a Context.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvxfer.errors import (
    DeviceNotFoundError,
    VerbsDeviceFilesError,
    VerbsError,
    VerbsKernelError,
    VerbsLayoutError,
    VerbsProviderError,
)
from kvxfer.verbs.attributes import DeviceLimits, Port
from kvxfer.verbs.enums import EventType, LinkLayer, Mtu, NodeType, PortState, TransportType
from kvxfer.verbs.handle import Handle
from kvxfer.verbs.library import VerbsLibrary, errno_of, errno_text, ffi, load_library

if TYPE_CHECKING:
    from kvxfer.verbs.completion_queue import CompletionChannel, CompletionQueue
    from kvxfer.verbs.gid import GidTable
    from kvxfer.verbs.library import CData
    from kvxfer.verbs.protection_domain import ProtectionDomain

__all__ = ["AsyncEvent", "Context", "Device", "DeviceLimits", "Port", "list_devices", "open_device"]


@dataclass(frozen=True)
class AsyncEvent:
    """Something that happened to a device. port: its number, 0 where it is about no port. qp_num likewise."""

    type: EventType
    port: int = 0
    qp_num: int = 0


class Device:
    """A device that libibverbs knows, not open."""

    def __init__(self, library: VerbsLibrary, pointer: CData, keeper: object, root: Path) -> None:
        self.library = library
        self.pointer = pointer
        self._keeper = keeper  # the device list: the pointer lives as long as it does
        self.root = root
        self.name: str = ffi.string(library.ibv_get_device_name(pointer)).decode()
        self.guid: str = _guid_text(library.ibv_get_device_guid(pointer))
        self.index = library.ibv_get_device_index(pointer)
        self.device_file: Path = root / "dev/infiniband" / ffi.string(pointer.dev_name).decode()
        self.node_type = NodeType(pointer.node_type)
        self.transport_type = TransportType(pointer.transport_type)

    def open(self) -> Context:
        """Open the device.

        Raises VerbsDeviceFilesError where its file is missing or may not be opened, VerbsLayoutError where the library
        is laid out as kvxfer does not know it, VerbsError for the rest.
        """
        pointer = self.library.ibv_open_device(self.pointer)
        if pointer == ffi.NULL:
            raise self._open_error(ffi.errno)
        wrong = self.library.check_layout(pointer)
        if not wrong and pointer.device != self.pointer:
            wrong = "ibv_context.device is not the device that was opened"
        if wrong:
            # Not closed: a library that cannot be trusted is not called again.
            raise VerbsLayoutError(
                f"{self.library.version or self.library.path} is not laid out as kvxfer knows libibverbs: {wrong}.",
                remedy="Use the rdma-core of your distribution (28 to 65 are known), or transports other than rdma.",
                path=self.library.path,
                check=wrong,
            )
        return Context(self, pointer)

    def _open_error(self, number: int) -> VerbsDeviceFilesError | VerbsError:
        file = self.device_file
        if not file.exists():
            return VerbsDeviceFilesError(
                f"{self.name} cannot be opened: there is no {file}.",
                remedy="In a container: start it with --device=/dev/infiniband (docker), or with the RDMA device "
                "plugin (Kubernetes). On a host: modprobe ib_uverbs.",
                device=self.name,
                path=str(file),
            )
        if number in (errno.EACCES, errno.EPERM):
            return VerbsDeviceFilesError(
                f"{self.name} cannot be opened: {file}: {errno_text(number)}.",
                remedy="Let this user read and write it (group rdma, or chmod 666), or allow it in the container's "
                "device rules.",
                device=self.name,
                path=str(file),
            )
        return VerbsError(
            f"ibv_open_device({self.name}) failed: {errno_text(number)}.",
            remedy="The kernel's log says more: dmesg | grep -i -e rdma -e ib_.",
            verb="ibv_open_device",
            errno=number,
            device=self.name,
        )

    def __repr__(self) -> str:
        return f"<Device {self.name} guid={self.guid} {self.node_type} {self.transport_type}>"


class Context(Handle):
    """An open device; everything else is made from it."""

    noun: ClassVar[str] = "device context"

    def __init__(self, device: Device, pointer: CData) -> None:
        super().__init__(device.library, pointer, device.library.ibv_close_device, "ibv_close_device")
        self.device = device
        self.name = device.name
        self.fast_calls = device.library.fast_calls(pointer)
        try:
            self.limits = self._query_limits()
            os.set_blocking(int(pointer.async_fd), False)
        except BaseException:
            self.close()
            raise

    def _query_limits(self) -> DeviceLimits:
        attributes = ffi.new("struct ibv_device_attr *")
        self._check("ibv_query_device", errno_of(self.library.ibv_query_device(self.pointer, attributes)))
        values = {field.name: getattr(attributes, field.name) for field in dataclasses.fields(DeviceLimits)}
        for name in ("node_guid", "sys_image_guid"):
            values[name] = _guid_text(values[name])
        values["fw_ver"] = ffi.string(attributes.fw_ver).decode(errors="replace")
        return DeviceLimits(**values)

    @property
    def async_fd(self) -> int:
        """Readable when `get_async_event` has something."""
        return int(self.pointer.async_fd)

    def query_port(self, number: int) -> Port:
        """Return what port `number` (from 1) is like now."""
        attributes = ffi.new("struct ibv_port_attr *")
        error = errno_of(self.library.ibv_query_port(self.pointer, number, attributes))
        self._check("ibv_query_port", error, port=number)
        values = {
            field.name: getattr(attributes, field.name)
            for field in dataclasses.fields(Port)
            if field.name not in ("device", "number")
        }
        for name, kind in (("state", PortState), ("max_mtu", Mtu), ("active_mtu", Mtu), ("link_layer", LinkLayer)):
            values[name] = kind(values[name])
        return Port(device=self.name, number=number, **values)

    def ports(self) -> list[Port]:
        """Return all ports as they are now."""
        return [self.query_port(number) for number in range(1, self.limits.phys_port_cnt + 1)]

    def query_gid_table(self, port: int) -> GidTable:
        """Return the rows of a port's GID table that hold something, with the network interface of each."""
        from kvxfer.verbs.gid import read_gid_table

        return read_gid_table(self, self.query_port(port))

    def query_pkey(self, port: int, index: int) -> int:
        """Return a partition key; its high bit says whether the membership is full."""
        value = ffi.new("uint16_t *")
        if self.library.ibv_query_pkey(self.pointer, port, index, value) != 0:
            self._check("ibv_query_pkey", ffi.errno or errno.EINVAL, port=port, index=index)
        return int.from_bytes(ffi.buffer(value)[:], "big")

    def alloc_pd(self) -> ProtectionDomain:
        """Return a new protection domain."""
        from kvxfer.verbs.protection_domain import ProtectionDomain

        return ProtectionDomain(self)

    def create_comp_channel(self) -> CompletionChannel:
        """Return a new completion channel."""
        from kvxfer.verbs.completion_queue import CompletionChannel

        return CompletionChannel(self)

    def create_cq(
        self, cqe: int, channel: CompletionChannel | None = None, *, comp_vector: int = 0, poll_count: int = 64
    ) -> CompletionQueue:
        """Return a new completion queue for at least `cqe` completions; `poll_count` are taken by one poll."""
        from kvxfer.verbs.completion_queue import CompletionQueue

        return CompletionQueue(self, cqe, channel, comp_vector=comp_vector, poll_count=poll_count)

    def get_async_event(self) -> AsyncEvent | None:
        """Return the next event of the device, acknowledged; None where there is none. Never waits."""
        event = ffi.new("struct ibv_async_event *")
        if self.library.ibv_get_async_event(self.pointer, event) != 0:
            number = ffi.errno
            if number in (errno.EAGAIN, errno.EINTR):
                return None
            self._check("ibv_get_async_event", number or errno.EIO)
        kind = EventType(event.event_type)
        port = event.element.port_num if kind.is_of_port else 0
        qp_num = event.element.qp.qp_num if kind.is_of_queue_pair else 0
        self.library.ibv_ack_async_event(event)
        return AsyncEvent(kind, port, qp_num)

    def _check(self, verb: str, number: int, **values: Any) -> None:
        if number:
            given = "".join(f", {name} {value}" for name, value in values.items())
            raise VerbsError(
                f"{verb}({self.name}{given}) failed: {errno_text(number)}.",
                remedy="The device is gone or its driver is at fault; the kernel's log says more (dmesg).",
                verb=verb,
                errno=number,
                device=self.name,
                **values,
            )

    def _facts(self) -> dict[str, Any]:
        return {"device": self.name}


class _DeviceList:
    """ibv_get_device_list's array, freed when the last device of it is dropped."""

    def __init__(self, library: VerbsLibrary) -> None:
        count = ffi.new("int *")
        self.pointer = library.ibv_get_device_list(count)
        self.errno = (ffi.errno or errno.EIO) if self.pointer == ffi.NULL else 0
        self.count = 0 if self.errno else count[0]
        self._free = library.ibv_free_device_list

    def __del__(self) -> None:
        if self.pointer != ffi.NULL:
            self._free(self.pointer)


def list_devices(library: VerbsLibrary | None = None, *, root: Path = Path("/")) -> list[Device]:
    """Return the RDMA devices of this machine, by name; an empty list where the kernel has RDMA and no device.

    root: where sys/ and dev/ are looked at for the reason of a failure; for tests.

    Raises VerbsLibraryError, VerbsLibraryOldError (no usable libibverbs), VerbsKernelError (no RDMA in the kernel),
    VerbsDeviceFilesError (devices, but no /dev/infiniband), VerbsProviderError (devices, but no driver library).
    """
    library = load_library() if library is None else library
    found = _DeviceList(library)
    if found.errno == errno.ENOSYS:
        raise VerbsKernelError(
            "this kernel has no RDMA: ibv_get_device_list gives ENOSYS.",
            remedy="Load it (modprobe ib_uverbs, and the driver of the device), or use transports other than rdma. A "
            "container sees what its host's kernel has.",
        )
    if found.errno:
        raise VerbsError(
            f"ibv_get_device_list failed: {errno_text(found.errno)}.",
            remedy="The kernel's log says more (dmesg).",
            verb="ibv_get_device_list",
            errno=found.errno,
        )
    devices = [Device(library, found.pointer[at], found, root) for at in range(found.count)]
    if not devices:
        _explain_absence(library, root)
    return sorted(devices, key=lambda device: device.name)


def _explain_absence(library: VerbsLibrary, root: Path) -> None:
    """Raise where the kernel has devices that the library did not list."""
    names = _names(root / "sys/class/infiniband")
    if not names:
        return
    files = [name for name in _names(root / "dev/infiniband") if name.startswith("uverbs")]
    listed = ", ".join(names)
    if not files:
        raise VerbsDeviceFilesError(
            f"the kernel has {listed}, but /dev/infiniband has no device file here.",
            remedy="In a container: start it with --device=/dev/infiniband (docker), or with the RDMA device plugin "
            "(Kubernetes). On a host: modprobe ib_uverbs.",
            devices=names,
        )
    raise VerbsProviderError(
        f"the kernel has {listed}, but {library.version or library.path} lists no device: their driver library is not "
        f"installed, or belongs to another release of rdma-core; or the devices belong to another network namespace.",
        remedy="Install it: apt-get install ibverbs-providers (Debian, Ubuntu), dnf install libibverbs; with the stack "
        "of a vendor, all of it from that vendor. In a container, if `rdma system` on its host says exclusive: "
        "`rdma dev set DEVICE netns NAME`, or the network of the host.",
        devices=names,
        path=library.path,
    )


def open_device(name: str, library: VerbsLibrary | None = None, *, root: Path = Path("/")) -> Context:
    """Open the device called `name`; raises DeviceNotFoundError that names those there are."""
    devices = list_devices(library, root=root)
    for device in devices:
        if device.name == name:
            return device.open()
    there = ", ".join(device.name for device in devices) or "none"
    raise DeviceNotFoundError(
        f"there is no RDMA device {name!r}; there is {there}.",
        remedy="`kvxfer devices` shows what they are like.",
        device=name,
        devices=tuple(device.name for device in devices),
    )


def _guid_text(number: int) -> str:
    """Return a GUID as ibv_devinfo prints it: 0002:c903:0027:1234. The library gives it in network order."""
    digits = number.to_bytes(8, "little").hex()
    return ":".join(digits[at : at + 4] for at in range(0, 16, 4))


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError:
        return ()
