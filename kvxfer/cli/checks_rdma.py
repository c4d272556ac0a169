"""The doctor's checks of RDMA: the library and its drivers, devices, ports, MTU, GIDs, limits, and trial registrations.

On a machine without an RDMA device nothing of it is a fault, and most of it is not asked. With one, a check that is not
"ok" means that kvxfer passes RDMA over, or that it is slower than it could be: "fail" is never said here, because other
transports carry on. The facts are those of `rdma_survey.py`; each device is opened once more for the trials.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvxfer.cli.check import Check, Machine
from kvxfer.cli.rdma_survey import DeviceSurvey, PortSurvey, find_warnings, survey_devices
from kvxfer.cli.table import format_size
from kvxfer.errors import KvxferError, RegistrationError, VerbsKernelError, VerbsUnavailableError
from kvxfer.verbs.device import Context
from kvxfer.verbs.enums import Access, ForkStatus, GidType, LinkLayer
from kvxfer.verbs.gid_candidate import GidCandidate, GidScope, NetdevState
from kvxfer.verbs.library import LIBRARY_VARIABLE, VerbsLibrary, errno_text, ffi, load_library
from kvxfer.verbs.port_offer import mtu_of_interface
from kvxfer.verbs.sysfs import list_sysfs_devices

__all__ = ["check_libibverbs", "check_memlock", "rdma_checks"]

TRIAL_NBYTES = 16 << 20
MEMLOCK_SMALL_NBYTES = 64 << 20
ROWS_SHOWN_MAX = 8
JUMBO_MTU = 4200
"""An interface MTU that carries RDMA packets of 4096 bytes with every header (`mtu_of_interface`)."""


def rdma_checks(machine: Machine) -> Iterator[Check]:
    """Yield what holds for RDMA here: three checks without a device, about a dozen and four for each port with one."""
    yield check_libibverbs(machine)
    has_devices = bool(list_sysfs_devices(machine.root))
    try:
        library = machine.library or load_library(machine.environ.get(LIBRARY_VARIABLE))
        found = survey_devices(machine.config, library, root=machine.root)
    except VerbsUnavailableError as error:
        yield _unavailable(error, has_devices=has_devices)
        yield check_memlock(machine)
        return
    except KvxferError as error:
        yield Check("rdma devices", "warn", error.message, error.remedy)
        yield check_memlock(machine)
        return
    if not found:
        yield Check("rdma devices", "off", "none")
        yield check_memlock(machine)
        return
    yield _providers_check(library)
    yield _devices_check(found)
    yield _files_check(found)
    yield check_memlock(machine)
    yield _fork_check(library)
    for device in found:
        yield from _device_checks(device)


def check_libibverbs(machine: Machine) -> Check:
    """Whether the verbs library can be opened; missing it is no fault where there is no device."""
    try:
        library = machine.library or load_library(machine.environ.get(LIBRARY_VARIABLE))
    except VerbsUnavailableError as error:
        if LIBRARY_VARIABLE in machine.environ:
            return Check("libibverbs", "warn", error.message, f"Correct {LIBRARY_VARIABLE}, or unset it.")
        if list_sysfs_devices(machine.root):
            return Check("libibverbs", "warn", error.message, error.remedy)
        return Check("libibverbs", "off", f"{error.message.rstrip('.')}; not needed without an RDMA device")
    version = f" ({library.version})" if library.version else ""
    return Check("libibverbs", "ok", f"{library.path} can be loaded{version}")


def check_memlock(machine: Machine) -> Check:
    """The locked-memory limit, which only RDMA registrations count against."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if limit == resource.RLIM_INFINITY else format_size(limit)
    if list_sysfs_devices(machine.root) and 0 <= limit < MEMLOCK_SMALL_NBYTES:
        remedy = "Raise it for RDMA: `ulimit -l unlimited`, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1."
        return Check("locked memory", "warn", text, remedy)
    return Check("locked memory", "ok", f"{text}; shm and tcp lock none")


def _unavailable(error: VerbsUnavailableError, *, has_devices: bool) -> Check:
    if has_devices:
        return Check("rdma devices", "warn", error.message, error.remedy)
    reason = "none: this kernel has no RDMA" if isinstance(error, VerbsKernelError) else "none"
    return Check("rdma devices", "off", reason)


def _providers_check(library: VerbsLibrary) -> Check:
    """Drivers are libraries of their own, of the same release: libmlx5-rdmav34.so beside a libibverbs of ABI 34."""
    path = _loaded_path(library)
    tag = _private_abi(path)
    if path is None or tag is None:
        return Check("rdma drivers", "ok", f"those of {library.version or library.path}")
    folder = path.parent / "libibverbs"
    names = sorted(file.name for file in folder.glob("*-rdmav*.so")) if folder.is_dir() else []
    fitting = [name.partition("-rdmav")[0].removeprefix("lib") for name in names if name.endswith(f"-rdmav{tag}.so")]
    others = [name for name in names if not name.endswith(f"-rdmav{tag}.so")]
    value = f"{len(fitting)} of ABI {tag} in {folder}: {', '.join(fitting) or 'none'}"
    if others or not fitting:
        told = f"; of another ABI: {', '.join(others)}" if others else ""
        remedy = (
            "Let libibverbs and the drivers come from one release: reinstall rdma-core or the vendor's stack whole."
        )
        return Check("rdma drivers", "warn", value + told, remedy)
    return Check("rdma drivers", "ok", value)


def _devices_check(found: Sequence[DeviceSurvey]) -> Check:
    usable = [one.name for device in found for one in device.ports if not one.problem]
    names = ", ".join(device.name for device in found)
    value = f"{len(found)} ({names}); ports that carry data: {', '.join(usable) or 'none'}"
    warnings = find_warnings(found)
    if not usable:
        return Check("rdma devices", "warn", value, "The checks of each port say why.")
    if warnings:
        remedy = "Such ports add no bandwidth to each other: name one of them in rdma_devices (KVXFER_RDMA_DEVICES)."
        return Check("rdma devices", "warn", f"{value}; {'; '.join(warnings)}", remedy)
    return Check("rdma devices", "ok", value)


def _files_check(found: Sequence[DeviceSurvey]) -> Check:
    files = [device.device.device_file for device in found]
    missing = [str(file) for file in files if not file.exists()]
    closed = [str(file) for file in files if file.exists() and not os.access(file, os.R_OK | os.W_OK)]
    if missing:
        remedy = (
            "Give the container the device files: docker run --device=/dev/infiniband. On a host: modprobe ib_uverbs."
        )
        return Check("device files", "warn", f"missing: {', '.join(missing)}", remedy)
    if closed:
        remedy = "Let this user read and write them: group rdma, or a udev rule."
        return Check("device files", "warn", f"may not be opened: {', '.join(closed)}", remedy)
    return Check("device files", "ok", ", ".join(map(str, files)))


def _fork_check(library: VerbsLibrary) -> Check:
    status = library.ibv_is_fork_initialized()
    if status == ForkStatus.UNNEEDED:
        return Check("fork", "ok", "this kernel copies registered memory for a child: fork is safe")
    if status == ForkStatus.ENABLED:
        return Check("fork", "ok", "registered memory is kept from children (RDMAV_FORK_SAFE)")
    known = (
        "is not known of this libibverbs" if status < 0 else "is off, and this kernel does not copy registered memory"
    )
    remedy = (
        "A child of a process with registered memory may crash either: start children before the engine or by "
        "multiprocessing's spawn, or set RDMAV_FORK_SAFE=1."
    )
    return Check("fork", "warn", f"protection {known}", remedy)


def _device_checks(device: DeviceSurvey) -> Iterator[Check]:
    """What is asked of each device: its layout, trials, and for each port its state, MTU, GIDs and limits."""
    name = device.name
    if device.problem:
        yield Check(f"{name} open", "warn", device.problem, device.remedy)
        return
    yield Check(f"{name} layout", "ok", "the library is laid out as kvxfer knows it")
    try:
        with device.device.open() as context:
            yield from _trial_checks(context)
    except KvxferError as error:
        yield Check(f"{name} trials", "warn", error.message, error.remedy)
    for one in device.ports:
        if not one.is_wanted:
            yield Check(f"{one.name} port", "ok", f"{one.problem}: not looked at")
            continue
        yield _port_check(one)
        if not one.is_carrier:
            continue
        if one.port.link_layer is LinkLayer.ETHERNET:
            yield _mtu_check(one)
        yield _gid_check(one)
        yield _limits_check(device, one)


def _trial_checks(context: Context) -> Iterator[Check]:
    """Register 16 MiB with the rights that peers have, then with relaxed ordering, and ask for GPU memory by a file
    that is none. The last two are facts that operators compare hosts by; kvxfer uses neither."""
    memory = mmap.mmap(-1, TRIAL_NBYTES)
    rights = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
    view = ffi.from_buffer(memory)
    address = int(ffi.cast("uintptr_t", view))
    try:
        with context.alloc_pd() as domain:
            try:
                domain.register(address, TRIAL_NBYTES, rights).close()
                yield Check(
                    f"{context.name} memory", "ok", f"a trial registration of {format_size(TRIAL_NBYTES)} worked"
                )
            except RegistrationError as error:
                yield Check(f"{context.name} memory", "warn", error.message, error.remedy)
                return
            try:
                domain.register(address, TRIAL_NBYTES, rights | Access.RELAXED_ORDERING).close()
                told = "relaxed ordering is taken"
            except RegistrationError as error:
                told = f"relaxed ordering is refused ({errno_text(error.errno or 0)})"
            yield Check(f"{context.name} ordering", "ok", f"{told}; kvxfer does not ask for it")
            yield _dmabuf_check(context, domain.pointer)
    finally:
        ffi.release(view)
        memory.close()


def _dmabuf_check(context: Context, domain: object) -> Check:
    """The kernel looks at the file first where it knows dma-buf: EBADF is a yes. NCCL asks the same way."""
    region = context.library.ibv_reg_dmabuf_mr(domain, 0, mmap.PAGESIZE, 0, -1, int(Access.LOCAL_WRITE))
    number = ffi.errno if region == ffi.NULL else 0
    told = "GPU memory is taken by dma-buf" if number == errno.EBADF else f"no dma-buf ({errno_text(number)})"
    return Check(f"{context.name} dma-buf", "ok", f"{told}; kvxfer moves memory of the host only")


def _port_check(one: PortSurvey) -> Check:
    port = one.port
    lid = f", LID {port.lid}" if port.link_layer is LinkLayer.INFINIBAND else ""
    value = f"{port.state}, {port.link_layer}{lid}, {one.rate or 'speed unknown'}"
    if not one.problem:
        return Check(f"{one.name} port", "ok", value)
    if port.is_active:
        remedy = "Its GIDs are the reason: see below." if one.is_carrier else "Nothing to do: other transports go on."
        return Check(f"{one.name} port", "warn", f"{value}; {one.problem}", remedy)
    remedy = (
        "No data goes through a port that is not ACTIVE: look at cable and switch, on InfiniBand the subnet manager."
    )
    return Check(f"{one.name} port", "warn", value, remedy)


def _mtu_check(one: PortSurvey) -> Check:
    """The active MTU is the interface's less RoCE's headers, in steps; both ends take the smaller one."""
    active = one.port.active_mtu.nbytes
    best = one.choice.best if one.choice else None
    interface = next((held for held in one.interfaces if best is not None and held.name == best.netdev), None)
    if interface is None or interface.mtu is None:
        return Check(f"{one.name} mtu", "ok", f"packets of {active} bytes")
    value = f"packets of {active} bytes; {interface.name} has an MTU of {interface.mtu}"
    fitting = mtu_of_interface(interface.mtu).nbytes
    if active > fitting:
        remedy = (
            f"Larger packets are lost: ip link set {interface.name} mtu {JUMBO_MTU}, on the switch and the peer too."
        )
        return Check(f"{one.name} mtu", "warn", f"{value}, which carries {fitting}", remedy)
    if active < one.port.max_mtu.nbytes:
        most = one.port.max_mtu.nbytes
        remedy = f"Faster with {most}: ip link set {interface.name} mtu {JUMBO_MTU} or more, on every host and switch."
        return Check(f"{one.name} mtu", "ok", value, remedy)
    return Check(f"{one.name} mtu", "ok", value)


def _gid_check(one: PortSurvey) -> Check:
    shown = [f"{row.index}: {row.candidate}: {row.verdict}" for row in one.rows[:ROWS_SHOWN_MAX]]
    more = len(one.rows) - len(shown)
    lines = "\n".join([*shown, *([f"... and {more} more: `kvxfer devices`"] if more else [])])
    if one.choice is None:
        if one.port.link_layer is LinkLayer.INFINIBAND:
            return Check(f"{one.name} gid", "ok", "none; the LID is enough inside one subnet")
        remedy = "Give its interface an address and bring it up, or correct gid_index (KVXFER_GID_INDEX)."
        return Check(f"{one.name} gid", "warn", "\n".join(filter(None, [one.problem, lines])), remedy)
    value = f"index {one.choice.index}, {one.choice.reason}\n{lines}"
    if one.warning:
        return Check(f"{one.name} gid", "warn", f"{one.warning}\n{value}", _gid_remedy(one.choice.best))
    return Check(f"{one.name} gid", "ok", value)


def _gid_remedy(best: GidCandidate) -> str:
    name = best.netdev or "the interface of this port"
    if best.state is NetdevState.DOWN:
        return f"Bring it up: ip link set {name} up."
    if best.state is NetdevState.ELSEWHERE:
        return (
            "Run kvxfer in the network namespace of the interface, or give the container one of its own on this port."
        )
    if best.scope is not GidScope.ROUTABLE or best.state is NetdevState.GONE:
        return f"Give {name} an address that peers reach: ip addr add ADDRESS/PREFIX dev {name}."
    if best.type is GidType.ROCE_V1:
        return "Set the RoCE mode of the port to v2 (cma_roce_mode, or the tool of its vendor)."
    return "Correct gid_interface or gid_subnet, or unset them."


def _limits_check(device: DeviceSurvey, one: PortSurvey) -> Check:
    limits = device.limits
    assert limits is not None  # it was opened
    depth = one.attributes.read_depth
    region = "any size" if device.takes_any_size else f"at most {format_size(device.region_nbytes_max)}"
    return Check(
        f"{one.name} limits",
        "ok",
        f"regions of {region}, messages of at most {format_size(one.port.message_nbytes_max)}, {limits.max_qp:,} queue "
        f"pairs, each of {one.attributes.send_depth:,} requests with {depth.initiator} READs asked and "
        f"{depth.responder} answered at once",
    )


def _loaded_path(library: VerbsLibrary) -> Path | None:
    """Return the file that the library was loaded from."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split()[-1] for line in maps.splitlines() if "libibverbs.so" in line or library.path in line}
    return next((Path(path) for path in sorted(paths) if path.startswith("/")), None)


def _private_abi(path: Path | None) -> str | None:
    """Return the number of the ABI between the library and its drivers: the symbol version IBVERBS_PRIVATE_34."""
    try:
        found = re.search(rb"IBVERBS_PRIVATE_(\d+)", path.read_bytes()) if path else None
    except OSError:
        return None
    return found[1].decode() if found else None
