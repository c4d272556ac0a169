"""Gather what an RDMA transport would need: the verbs library, devices, device files, the locked-memory limit.

Opens libibverbs on demand, never at import, and calls nothing in it: devices are read from sysfs. Never raises for what
the machine lacks. Read next: `transports/rdma.py`, which turns the facts into a Probe, and `cli/doctor.py`.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LibraryReport", "PortReport", "VerbsReport", "find_ports", "memlock_text", "probe_library", "probe_verbs"]

LIBRARY_NAME = "libibverbs.so.1"  # the soname since rdma-core 1; the system's own, because its providers must match it
LIBRARY_VARIABLE = "KVXFER_LIBIBVERBS"
NEEDED_SYMBOLS = ("ibv_get_device_list", "ibv_open_device", "ibv_create_qp", "ibv_reg_mr")
SYMBOLS_SHOWN = 2
"""Missing symbols named in a reason; where two are missing, all of them usually are."""


@dataclass(frozen=True)
class LibraryReport:
    """Whether the verbs library can be opened; `problem` is the loader's own text, empty where it can."""

    path: str
    problem: str = ""

    @property
    def is_loadable(self) -> bool:
        """Whether the library opened and has the calls of libibverbs."""
        return not self.problem

    def __str__(self) -> str:
        return f"{self.path} can be loaded" if self.is_loadable else self.problem


@dataclass(frozen=True)
class PortReport:
    """One port of one RDMA device, in the words of sysfs.

    state: "ACTIVE", "DOWN", ... link_layer: "InfiniBand" or "Ethernet". rate: such as "100 Gb/sec (4X EDR)".
    """

    device: str
    number: int
    state: str
    link_layer: str
    rate: str

    def __str__(self) -> str:
        return f"{self.device} port {self.number} ({self.state})"


@dataclass(frozen=True)
class VerbsReport:
    """All facts together.

    devices: names in /sys/class/infiniband; one may be there without a port. device_files: what /dev/infiniband holds,
    None where the folder does not exist (a container without --device). memlock_nbytes: None for unlimited.
    """

    library: LibraryReport
    devices: tuple[str, ...]
    ports: tuple[PortReport, ...]
    device_files: tuple[str, ...] | None
    memlock_nbytes: int | None

    @property
    def device_text(self) -> str:
        """The devices for a sentence: each with its ports and their states."""
        if not self.devices:
            return "no RDMA device (/sys/class/infiniband is empty or absent)"
        texts = []
        for device in self.devices:
            ports = [port for port in self.ports if port.device == device]
            if len(ports) == 1:
                texts.append(f"{device} ({ports[0].state})")
            else:
                states = ", ".join(f"port {port.number} {port.state}" for port in ports)
                texts.append(f"{device} ({states or 'no port'})")
        return ", ".join(texts)


def probe_verbs(root: Path = Path("/"), *, environ: Mapping[str, str] | None = None) -> VerbsReport:
    """Return what this machine has.

    root: where sys/ and dev/ are looked for; for tests. The library and the limit are always this process's own.
    """
    files = root / "dev/infiniband"
    return VerbsReport(
        library=probe_library(environ=environ),
        devices=_names(root / "sys/class/infiniband"),
        ports=find_ports(root),
        device_files=_names(files) if files.is_dir() else None,
        memlock_nbytes=_memlock_nbytes(),
    )


def probe_library(path: str | None = None, *, environ: Mapping[str, str] | None = None) -> LibraryReport:
    """Try to open the verbs library and say what is wrong with it if that fails.

    path: file name or soname; by default KVXFER_LIBIBVERBS, else the system's libibverbs.so.1. A missing file, a file
    that is no shared library and a library of something else give three different problems.
    """
    variables = os.environ if environ is None else environ
    path = path or variables.get(LIBRARY_VARIABLE) or LIBRARY_NAME
    origin = f" (from {LIBRARY_VARIABLE})" if path == variables.get(LIBRARY_VARIABLE) else ""
    is_file_path = "/" in path
    if is_file_path and not Path(path).exists():
        return LibraryReport(path, f"there is no file {path}{origin}")
    try:
        library = ctypes.CDLL(path)
    except OSError as exc:
        if not is_file_path and "No such file" in str(exc):
            return LibraryReport(path, f"{path} is not installed{origin}")
        return LibraryReport(path, f"{path}{origin} cannot be loaded: {_loader_text(exc, path)}")
    missing = [symbol for symbol in NEEDED_SYMBOLS if not hasattr(library, symbol)]
    if missing:
        more = ", ..." if len(missing) > SYMBOLS_SHOWN else ""
        shown = ", ".join(missing[:SYMBOLS_SHOWN])
        return LibraryReport(path, f"{path}{origin} is a shared library, but not libibverbs: no {shown}{more}")
    return LibraryReport(path)


def find_ports(root: Path = Path("/")) -> tuple[PortReport, ...]:
    """Return the ports of all RDMA devices, ordered by name and number; a file that cannot be read gives "unknown"."""
    found = []
    for device in _names(root / "sys/class/infiniband"):
        ports = root / "sys/class/infiniband" / device / "ports"
        for number in sorted(int(name) for name in _names(ports) if name.isdecimal()):
            port = ports / str(number)
            found.append(
                PortReport(
                    device=device,
                    number=number,
                    state=_read(port / "state").rpartition(":")[2].strip(),  # "4: ACTIVE"
                    link_layer=_read(port / "link_layer"),
                    rate=_read(port / "rate"),
                )
            )
    return tuple(found)


def memlock_text(nbytes: int | None) -> str:
    """The locked-memory limit for a sentence; None is unlimited."""
    if nbytes is None:
        return "unlimited"
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _memlock_nbytes() -> int | None:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _loader_text(exc: OSError, path: str) -> str:
    """Return dlopen's text without the path that it begins with."""
    text = str(exc)
    return text.removeprefix(f"{path}: ") or "dlopen(3) gives no reason"


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError:
        return ()


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return "unknown"
