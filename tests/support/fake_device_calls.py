"""The calls of a fake library about devices, ports, events, protection domains and memory."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import Any

from kvxfer.verbs.abi import ffi
from kvxfer.verbs.enums import Access, EventType
from tests.support.fake_fabric import PAGE_NBYTES, is_mapped
from tests.support.fake_library import LibraryBase
from tests.support.fake_queues import (
    FakeAddress,
    FakeContext,
    FakeDomain,
    FakeMemoryRegion,
)

DEVICE_FIELDS = (
    "max_mr_size", "page_size_cap", "vendor_id", "vendor_part_id", "hw_ver", "max_qp", "max_qp_wr",
    "device_cap_flags", "max_sge", "max_sge_rd", "max_cq", "max_cqe", "max_mr", "max_pd", "max_qp_rd_atom",
    "max_res_rd_atom", "max_qp_init_rd_atom", "max_ah", "max_pkeys", "local_ca_ack_delay",
)  # fmt: skip
PORT_FIELDS = (
    "state", "max_mtu", "active_mtu", "gid_tbl_len", "max_msg_sz", "lid", "sm_lid", "lmc", "subnet_timeout",
    "active_width", "active_speed", "phys_state", "link_layer", "flags", "active_speed_ex",
)  # fmt: skip


class DeviceCalls(LibraryBase):
    """ibv_get_device_list to ibv_destroy_ah."""

    # Devices.

    def ibv_get_device_list(self, count: Any) -> Any:
        with self._lock:
            error = self._count("ibv_get_device_list") or self.list_errno
            if error:
                ffi.errno = error
                return ffi.NULL
            alive = [device for device in self.devices if not device.is_dead]
            array = ffi.new("struct ibv_device *[]", [*(device.struct for device in alive), ffi.NULL])
            pointer = ffi.cast("struct ibv_device **", array)
            self._lists[pointer] = (array, alive)
            if count != ffi.NULL:
                count[0] = len(alive)
            return pointer

    def ibv_free_device_list(self, devices: Any) -> None:
        with self._lock:
            assert devices in self._lists, "a device list is freed that was not given out, or twice"
            del self._lists[devices]

    def ibv_get_device_name(self, device: Any) -> Any:
        return self._devices[device].name_chars

    def ibv_get_device_guid(self, device: Any) -> int:
        return _big_endian(self._devices[device].nic.guid)

    def ibv_get_device_index(self, device: Any) -> int:
        return self._devices[device].index

    def ibv_open_device(self, device: Any) -> Any:
        with self._lock:
            found = self._devices[device]
            if error := self._ask("ibv_open_device", found):
                ffi.errno = error
                return ffi.NULL
            struct = ffi.new("struct ibv_context *")
            context = FakeContext(struct, found)
            struct.device = found.struct
            struct.async_fd = context.events.fd
            struct.cmd_fd = context.events.fd
            struct.num_comp_vectors = found.nic.num_comp_vectors
            found.contexts.append(context)
            return self._new(context)

    def ibv_close_device(self, context: Any) -> int:
        with self._lock:
            found = self._find(context, FakeContext)
            if error := self._refuse_destroy("ibv_close_device", found):
                return error
            found.device.contexts.remove(found)
            found.events.close()
            self._destroy(found)
            return 0

    def ibv_query_device(self, context: Any, attributes: Any) -> int:
        with self._lock:
            device = self._find(context, FakeContext).device
            if error := self._ask("ibv_query_device", device):
                return error
            nic = device.nic
            clear(attributes, "struct ibv_device_attr")
            for name in DEVICE_FIELDS:
                setattr(attributes, name, getattr(nic, name))
            attributes.fw_ver = nic.fw_ver.encode()
            attributes.node_guid = attributes.sys_image_guid = _big_endian(nic.guid)
            attributes.phys_port_cnt = len(nic.ports)
            return 0

    def ibv_query_port(self, context: Any, port: int, attributes: Any) -> int:
        with self._lock:
            device = self._find(context, FakeContext).device
            if error := self._ask("ibv_query_port", device):
                return error
            found = device.port(port)
            if found is None:
                return errno.EINVAL
            clear(attributes, "struct ibv_port_attr")
            for name in PORT_FIELDS:
                setattr(attributes, name, getattr(found, name))
            attributes.pkey_tbl_len = len(found.pkeys)
            attributes.max_vl_num = 1
            return 0

    def ibv_query_gid(self, context: Any, port: int, index: int, gid: Any) -> int:
        with self._lock:
            device = self._find(context, FakeContext).device
            error = self._ask("ibv_query_gid", device)
            found = device.port(port)
            if not error and (found is None or not 0 <= index < found.gid_tbl_len):
                error = errno.EINVAL
            if error or found is None:
                ffi.errno = error
                return -1
            row = found.gids.get(index)
            ffi.buffer(gid, 16)[:] = row.value if row else bytes(16)
            return 0

    def ibv_query_gid_table(self, context: Any, entries: Any, count_max: int) -> int:
        with self._lock:
            device = self._find(context, FakeContext).device
            if not self.has_gid_table:
                return -errno.EOPNOTSUPP
            if error := self._ask("ibv_query_gid_table", device):
                return -error
            if count_max < sum(port.gid_tbl_len for port in device.nic.ports):
                return -errno.EINVAL
            count = 0
            for number, port in enumerate(device.nic.ports, 1):
                for index, row in sorted(port.gids.items()):
                    entry = entries[count]
                    ffi.buffer(ffi.addressof(entry.gid), 16)[:] = row.value
                    entry.gid_index, entry.port_num, entry.gid_type = index, number, int(row.type)
                    entry.ndev_ifindex = row.ifindex if row.ndev else 0
                    count += 1
            return count

    def ibv_query_pkey(self, context: Any, port: int, index: int, pkey: Any) -> int:
        with self._lock:
            device = self._find(context, FakeContext).device
            found = device.port(port)
            if self._ask("ibv_query_pkey", device) or found is None or not 0 <= index < len(found.pkeys):
                ffi.errno = errno.EINVAL
                return -1
            pkey[0] = int.from_bytes(found.pkeys[index].to_bytes(2, "big"), sys.byteorder)
            return 0

    def ibv_get_async_event(self, context: Any, event: Any) -> int:
        found = self._find(context, FakeContext)
        try:
            kind, element = found.events.get()
        except BlockingIOError as exc:
            ffi.errno = exc.errno or errno.EAGAIN
            return -1
        with self._lock:
            clear(event, "struct ibv_async_event")
            event.event_type = int(kind)
            if kind is EventType.CQ_ERR:
                event.element.cq = element
            elif EventType(kind).is_of_queue_pair:
                event.element.qp = element
            else:
                event.element.port_num = element
            self.live["async event"] += 1
            return 0

    def ibv_ack_async_event(self, event: Any) -> None:
        with self._lock:
            assert self.live["async event"], "an event is acknowledged that was not got"
            self.live["async event"] -= 1

    # Protection domains, memory, address handles.

    def ibv_alloc_pd(self, context: Any) -> Any:
        with self._lock:
            found = self._find(context, FakeContext)
            error = self._ask("ibv_alloc_pd", found.device)
            if error or found.device.live["pd"] >= found.device.nic.max_pd:
                ffi.errno = error or errno.ENOMEM
                return ffi.NULL
            return self._new(FakeDomain(self._new_struct("ibv_pd", context), found.device, found))

    def ibv_dealloc_pd(self, pd: Any) -> int:
        with self._lock:
            found = self._find(pd, FakeDomain)
            if error := self._refuse_destroy("ibv_dealloc_pd", found):
                return error
            self._destroy(found)
            return 0

    def ibv_reg_mr(self, pd: Any, address: int, nbytes: int, access: int) -> Any:
        domain = self._find(pd, FakeDomain)
        with self._slowly("ibv_reg_mr", domain.device.nic.reg_mr_s), self._lock:
            error = self._ask("ibv_reg_mr", domain.device) or self._refuse_region(domain, address, nbytes, access)
            if error:
                ffi.errno = error
                return ffi.NULL
            return self._register(pd, domain, address, nbytes, access)

    def _register(self, pd: Any, domain: FakeDomain, address: int, nbytes: int, access: int) -> Any:
        device = domain.device
        lkey, rkey = device.new_keys(access)
        struct = self._new_struct("ibv_mr", pd.context, pd=pd, length=nbytes, lkey=lkey, rkey=rkey)
        struct.addr = ffi.cast("void *", address)
        region = FakeMemoryRegion(struct, domain, address, nbytes, access, (lkey, rkey))
        device.keys[lkey] = device.keys[rkey or lkey] = region
        device.registered_nbytes += nbytes
        self.locked_nbytes += _page_nbytes(address, nbytes)
        return self._new(region)

    def _refuse_region(self, domain: FakeDomain, address: int, nbytes: int, access: int) -> int:
        nic, device = domain.device.nic, domain.device
        if nbytes < 1 or address + nbytes > 2**63:
            return errno.EINVAL
        if access & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC) and not access & Access.LOCAL_WRITE:
            return errno.EINVAL  # ib_check_mr_access
        if access & nic.refused_access:
            return nic.refused_access_errno
        if access & Access.ON_DEMAND and not nic.has_on_demand:
            return errno.EOPNOTSUPP
        if nbytes > (nic.max_mr_size if nic.mr_nbytes_max is None else nic.mr_nbytes_max):
            return nic.mr_errno
        if device.live["mr"] >= nic.max_mr:
            return errno.ENOMEM
        if nic.registered_nbytes_max is not None and device.registered_nbytes + nbytes > nic.registered_nbytes_max:
            return nic.registered_errno
        locked = self.locked_nbytes + _page_nbytes(address, nbytes)
        if self.memlock_nbytes is not None and locked > self.memlock_nbytes:
            return errno.ENOMEM
        if _overlaps(self.unmapped, address, nbytes) or (
            access & Access.LOCAL_WRITE and _overlaps(self.read_only, address, nbytes)
        ):
            return errno.EFAULT
        return errno.EFAULT if self.checks_mapping and not is_mapped(address, nbytes) else 0

    def ibv_reg_dmabuf_mr(self, pd: Any, offset: int, nbytes: int, iova: int, fd: int, access: int) -> Any:
        with self._lock:
            device = self._find(pd, FakeDomain).device
            error = self._ask("ibv_reg_dmabuf_mr", device)
            if not error:  # no fake memory is a dma-buf, so no fd is right
                error = errno.EBADF if device.nic.has_dmabuf else errno.EOPNOTSUPP
            ffi.errno = error
            return ffi.NULL

    def ibv_dereg_mr(self, mr: Any) -> int:
        region = self._find(mr, FakeMemoryRegion)
        with self._slowly("ibv_dereg_mr"), self._lock:
            self._find(mr, FakeMemoryRegion)
            if error := self._refuse_destroy("ibv_dereg_mr", region):
                return error
            device = region.device
            for key in {region.lkey, region.rkey or region.lkey}:
                del device.keys[key]
            device.registered_nbytes -= region.nbytes
            self.locked_nbytes -= _page_nbytes(region.address, region.nbytes)
            self._destroy(region)
            return 0

    def ibv_create_ah(self, pd: Any, attributes: Any) -> Any:
        with self._lock:
            domain = self._find(pd, FakeDomain)
            error = self._ask("ibv_create_ah", domain.device) or self.fabric.resolve(domain.device, attributes)
            if error:
                ffi.errno = error
                return ffi.NULL
            struct = self._new_struct("ibv_ah", pd.context, pd=pd)
            return self._new(FakeAddress(struct, domain.device, domain))

    def ibv_destroy_ah(self, ah: Any) -> int:
        with self._lock:
            found = self._find(ah, FakeAddress)
            if error := self._refuse_destroy("ibv_destroy_ah", found):
                return error
            self._destroy(found)
            return 0


def clear(pointer: Any, kind: str) -> None:
    """Fill a struct with zeros."""
    ffi.buffer(pointer, ffi.sizeof(kind))[:] = bytes(ffi.sizeof(kind))


def _big_endian(number: int) -> int:
    """Return the value of a uint64 that holds a number in network order."""
    return int.from_bytes(number.to_bytes(8, "big"), sys.byteorder)


def _page_nbytes(address: int, nbytes: int) -> int:
    """Return how much a registration locks: whole pages."""
    return -(-(address + nbytes) // PAGE_NBYTES) * PAGE_NBYTES - address // PAGE_NBYTES * PAGE_NBYTES


def _overlaps(ranges: Sequence[tuple[int, int]], address: int, nbytes: int) -> bool:
    return any(start < address + nbytes and address < start + size for start, size in ranges)
