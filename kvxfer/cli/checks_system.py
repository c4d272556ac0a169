"""The doctor's checks of the interpreter, the environment, limits, memory and what one process may do to another.

Each takes a Machine and returns a Check. They never raise for what the machine lacks.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from importlib import metadata

from kvxfer import __version__
from kvxfer.cli.check import Check, Machine
from kvxfer.cli.environment import known_variables
from kvxfer.cli.table import format_size
from kvxfer.config import EngineConfig, closest_variable
from kvxfer.errors import KvxferError
from kvxfer.memory.shared import SharedMemory, available_nbytes
from kvxfer.setting import PREFIX
from kvxfer.transports.shm import ptrace_remedy, ptrace_scope

__all__ = ["SYSTEM_CHECKS"]

PYTHON_MIN = (3, 10)
FILES_FEW = 1024
FILES_TOO_FEW = 32
MEMORY_LOW_NBYTES = 1 << 30
CLOCK_SLOW_S = 1e-6
"""A read of a good clock takes 50 ns; a clock that leaves the vDSO costs a system call and shows in every wait."""
TRIAL_TIMEOUT_S = 10.0
SECRET_WORDS = ("KEY", "SECRET", "TOKEN", "PASSWORD")

# The two programs of the process_vm trial: siblings, as engines are; a child would be allowed more (ptrace_scope 1).
HOLDER = """
import ctypes, sys
buffer = ctypes.create_string_buffer(b"kvxfer", 8)
print(ctypes.addressof(buffer), flush=True)
sys.stdin.read()
"""
READER = """
import ctypes, sys
class iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
call = libc.process_vm_readv
call.restype = ctypes.c_ssize_t
call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
buffer = ctypes.create_string_buffer(6)
local, remote = iovec(ctypes.addressof(buffer), 6), iovec(int(sys.argv[2]), 6)
done = call(int(sys.argv[1]), ctypes.addressof(local), 1, ctypes.addressof(remote), 1, 0)
print("ok" if buffer.raw == b"kvxfer" else ctypes.get_errno() if done < 0 else "other bytes")
"""


def check_python(machine: Machine) -> Check:
    """The interpreter and the platform that kvxfer is written for."""
    del machine
    value = f"{platform.python_implementation()} {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.version_info < PYTHON_MIN or sys.platform != "linux" or sys.maxsize < 2**32:
        return Check("python", "fail", value, "kvxfer needs Python 3.10 or later on 64-bit Linux.")
    return Check("python", "ok", value)


def check_packages(machine: Machine) -> Check:
    """The packages kvxfer stands on."""
    del machine
    found, missing = [f"kvxfer {__version__}"], []
    for package in ("numpy", "cffi", "structlog"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        remedy = f"Run `python -m pip install {' '.join(missing)}`."
        return Check("packages", "fail", f"{', '.join(found)}; missing: {', '.join(missing)}", remedy)
    return Check("packages", "ok", ", ".join(found))


def check_environment(machine: Machine) -> Check:
    """The variables that are set for kvxfer: its own, those in vain, and those of Mooncake that supply a setting.

    Values of secrets are not shown, nor those of unknown variables: one may be a secret whose name is misspelt.
    """
    known = known_variables()
    names = sorted(name for name in machine.environ if name.startswith(PREFIX))
    unknown = [name for name in names if name not in known]
    told = [_shown(name, machine.environ[name], is_known=name in known) for name in names]
    for row in EngineConfig.settings():
        variable = row.find_variable(machine.environ)
        if variable in row.synonyms:
            told.append(f"{variable}={machine.environ[variable]} (sets {row.name})")
    shown = ", ".join(told) or "no KVXFER_* variable is set"
    if unknown:
        return Check("environment", "warn", shown, " ".join(_unknown_text(name) for name in unknown))
    return Check("environment", "ok", shown)


def check_cpus(machine: Machine) -> Check:
    """The CPUs this process may use."""
    del machine
    count = len(os.sched_getaffinity(0))
    if count == 1:
        remedy = "A transfer and its peer then take turns on one CPU: give the container or the task set at least two."
        return Check("cpus", "warn", "1 usable", remedy)
    return Check("cpus", "ok", f"{count} usable")


def check_clock(machine: Machine) -> Check:
    """What it costs to look at the clock, which every wait does."""
    count = 2000
    started = time.perf_counter()
    for _ in range(count):
        time.monotonic()
    each = (time.perf_counter() - started) / count
    source = machine.read("sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown source"
    value = f"{source}, {each * 1e9:.0f} ns a read"
    if each > CLOCK_SLOW_S:
        remedy = (
            "The clock is read by system call: boot with clocksource=tsc, or use the hypervisor's paravirtual clock."
        )
        return Check("clock", "warn", value, remedy)
    return Check("clock", "ok", value)


def check_files(machine: Machine) -> Check:
    """The limit on open files: a connected peer takes two to six."""
    del machine
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_limit(soft)} (hard limit {_limit(hard)})"
    remedy = "Raise it: `ulimit -n 65536`, LimitNOFILE=65536 in the unit, or docker run --ulimit nofile=65536."
    if soft != resource.RLIM_INFINITY and soft < FILES_TOO_FEW:
        return Check("open files", "fail", value, remedy)
    if soft != resource.RLIM_INFINITY and soft < FILES_FEW:
        return Check("open files", "warn", value, remedy)
    return Check("open files", "ok", value)


def check_memory(machine: Machine) -> Check:
    """The memory that pools can be made of: what is free, and what the control group leaves."""
    available = available_nbytes(machine.root)
    limit = machine.read_int("sys/fs/cgroup/memory.max") or machine.read_int(
        "sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    group = f", control group limit {format_size(limit)}" if limit is not None and limit < 1 << 60 else ""
    value = f"{format_size(available)} available{group}"
    if available < MEMORY_LOW_NBYTES:
        remedy = (
            "Pools larger than this are refused, and touching memory that is not there kills the process: raise the "
            "memory limit of the container (docker run --memory, resources.limits.memory)."
        )
        return Check("memory", "warn", value, remedy)
    return Check("memory", "ok", value)


def check_memfd(machine: Machine) -> Check:
    """Whether allocate() can make sealed shared memory, by making some."""
    del machine
    try:
        SharedMemory(4096).close()
    except KvxferError as error:
        return Check("memfd", "warn", error.message, error.remedy)
    return Check("memfd", "ok", "memfd_create and sealing work")


def check_dev_shm(machine: Machine) -> Check:
    """The size of /dev/shm, which kvxfer does not use: said, because it is the usual suspect."""
    try:
        stat = os.statvfs(machine.root / "dev/shm")
    except OSError:
        return Check("/dev/shm", "ok", "not there; kvxfer does not need it (it uses memfd)")
    free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    return Check("/dev/shm", "ok", f"{format_size(free)} of {format_size(total)} free; kvxfer does not need it (memfd)")


def check_ptrace_scope(machine: Machine) -> Check:
    """Yama's rule on who may read another process's memory."""
    scope = ptrace_scope(machine.root / "proc/sys/kernel/yama/ptrace_scope")
    if scope is None:
        return Check("ptrace_scope", "ok", "this kernel has no such rule")
    meanings = {0: "same user may", 1: "descendants only", 2: "CAP_SYS_PTRACE only", 3: "nobody may"}
    value = f"{scope} ({meanings.get(scope, 'unknown')})"
    return (
        Check("ptrace_scope", "ok", value) if scope == 0 else Check("ptrace_scope", "warn", value, ptrace_remedy(scope))
    )


def check_process_vm(machine: Machine) -> Check:
    """Whether one process may read another's memory, by doing it between two that know nothing of each other."""
    name = "process_vm_readv"
    answer = _try_process_vm()
    if answer == "ok":
        return Check(name, "ok", "works between two processes of this user")
    scope = ptrace_scope(machine.root / "proc/sys/kernel/yama/ptrace_scope")
    remedy = (
        ptrace_remedy(scope)
        if scope
        else "Allow process_vm_readv(2) in the seccomp profile (docker run --cap-add SYS_PTRACE), or use memory from "
        "allocate(), which is mapped and does not need it."
    )
    reason = os.strerror(int(answer)) if answer.isdecimal() else answer
    return Check(name, "warn", f"refused: {reason}; register()ed memory goes by tcp", remedy)


def check_pidfd(machine: Machine) -> Check:
    """Whether a process can be held by descriptor; kvxfer tells processes apart by a token and works without."""
    del machine
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as exc:
        return Check("pidfd", "ok", f"not available ({exc.strerror}); kvxfer works without")
    return Check("pidfd", "ok", "available; kvxfer works without")


def _try_process_vm() -> str:
    """Return "ok", an errno as digits, or what else went wrong."""
    python = [sys.executable, "-I", "-S", "-c"]
    try:
        with subprocess.Popen(
            [*python, HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
        ) as holder:
            try:
                assert holder.stdout is not None
                address = holder.stdout.readline().strip()
                reader = subprocess.run(
                    [*python, READER, str(holder.pid), address],
                    capture_output=True,
                    text=True,
                    timeout=TRIAL_TIMEOUT_S,
                    check=False,
                )
            finally:
                holder.kill()
    except (OSError, subprocess.SubprocessError) as exc:
        return f"the trial could not be run ({exc})"
    return reader.stdout.strip() or "the trial gave no answer"


def _unknown_text(name: str) -> str:
    near = closest_variable(name)
    return f"{name} means nothing to kvxfer: " + (f"did you mean {near}?" if near else "unset it.")


def _shown(name: str, value: str, *, is_known: bool) -> str:
    is_secret = not is_known or any(word in name for word in SECRET_WORDS)
    return f"{name}={'(set)' if is_secret else value}"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


SYSTEM_CHECKS = (
    check_python,
    check_packages,
    check_environment,
    check_cpus,
    check_clock,
    check_files,
    check_memory,
    check_memfd,
    check_dev_shm,
    check_ptrace_scope,
    check_process_vm,
    check_pidfd,
)
