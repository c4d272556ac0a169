"""Who may import whom. A module knows the floors below it; docs/architecture.md tells why.

6  doors       cli, compat, integrations, __main__      nothing imports them
5  engine      every other module: engine, batch, segment, control ..., and mooncake, which reaches and answers Mooncake
4  transports  base, loop <- shm, rdma, tcp: siblings, each with helper modules of its own name
3  handshake, mooncake.wire    import floor 0 only; no socket, no thread, no clock
2  memory      regions, slices, shared memory
1  machine     verbs and system: the only ones that know cffi; verbs may ask system, never the other way
0  ground      errors, types, log, addresses, setting, config, rdma_names, text, limits
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kvxfer"
GROUND = ("errors", "types", "log", "addresses", "config", "limits", "rdma_names", "setting", "text")
FLOORS = {
    **dict.fromkeys(GROUND, 0),
    "system": 1,
    "verbs": 1,
    "memory": 2,
    "handshake": 3,
    "mooncake.wire": 3,
    "transports": 4,
}
DOORS = ("cli", "compat", "integrations", "__main__")
ENGINE_FLOOR, DOOR_FLOOR = 5, 6
SIBLINGS = ("shm", "rdma", "tcp")
PURE = ("memory.chunks", "memory.columns", "memory.slices")
CFFI = ("cffi", "_cffi_backend")
WORLD = ("socket", "selectors", "threading", "time", "asyncio", "multiprocessing", "concurrent")
WORLD_ALLOWED = {
    ("log", "time"),  # a rate has a clock
    ("memory.regions", "threading"),  # the region table is shared by the threads of its callers
    ("memory.registration_work", "concurrent"),  # chunks and devices at the same time: hundreds of GiB take minutes
    ("system.calls", "socket"),  # for the numbers of MSG_* flags; opens none
    ("verbs.handle", "threading"),  # a queue pair may be closed while another thread closes its device
    ("verbs.routes", "socket"),  # asks the kernel's routing tables over netlink; sends no packet
}


@dataclass(frozen=True)
class Import:
    """One import statement: `name` is a dotted module of kvxfer without the prefix, or one of another package."""

    name: str
    is_ours: bool
    for_types_only: bool
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def floor(module: str) -> int:
    top = module.partition(".")[0]
    return DOOR_FLOOR if top in DOORS else FLOORS.get(top, FLOORS.get(protocol(module), ENGINE_FLOOR))


def protocol(module: str) -> str:
    """Return handshake or mooncake.wire for a module of these; the top of any other module's name."""
    return "mooncake.wire" if module.startswith("mooncake.wire") else module.partition(".")[0]


def find_imports(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(), str(path))
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = str(node.module)
            # `from kvxfer.memory import slices` may mean a module or a name
            names = [
                f"{base}.{alias.name}" if f"{base}.{alias.name}".removeprefix("kvxfer.") in MODULES else base
                for alias in node.names
            ]
        for name in dict.fromkeys(names):
            ours = name == "kvxfer" or name.startswith("kvxfer.")
            yield Import(
                name.removeprefix("kvxfer").removeprefix(".") if ours else name, ours, id(node) in typed, node.lineno
            )  # type: ignore[attr-defined]


IMPORTS = {module: list(find_imports(path)) for module, path in MODULES.items()}


def transport_family(module: str) -> str | None:
    """Return shm, rdma or tcp for a transport and its helpers; None for base, loop and all else."""
    top, _, name = module.partition(".")
    family = name.partition("_")[0]
    return family if top == "transports" and family in SIBLINGS else None


def complaint(module: str, imported: Import) -> str | None:
    """Return what is wrong with an import; None if nothing is."""
    ours, other = floor(module), floor(imported.name)
    if not imported.is_ours:
        top = imported.name.partition(".")[0]
        if top in CFFI and module.partition(".")[0] not in ("verbs", "system") and module != "memory.cuda":
            return "only floor 1 and memory.cuda know cffi"
        if top in WORLD and ours <= 3 and not imported.for_types_only and (module, top) not in WORLD_ALLOWED:
            return "no sockets, threads or clocks below floor 4"
        return None
    if imported.name == "" and ours < DOOR_FLOOR:
        return "only the doors import the package by its public names"
    if other == DOOR_FLOOR and ours != DOOR_FLOOR:
        return "nothing imports a door"
    if other > ours:
        return f"floor {ours} imports floor {other}"
    if module.partition(".")[0] == "system" and imported.name.partition(".")[0] == "verbs":
        return "verbs asks system, not the other way"
    if ours == 3 and other not in (0, 3):
        return "a protocol imports floor 0 only"
    if ours == 4 and other == 3:
        return "transports never import handshake or mooncake.wire"
    if {protocol(module), protocol(imported.name)} == {"handshake", "mooncake.wire"}:
        return "two protocols know nothing of each other"
    if module in PURE and other != 0 and imported.name not in PURE:
        return "pure: imports floor 0 only"
    if ours == other == 4 and module != "transports":
        mine, its = transport_family(module), transport_family(imported.name)
        if imported.name == "transports" or (its is not None and its != mine):
            return "transports are siblings: what two of them need moves to base, loop or down"
    return None


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_module_imports_only_what_is_below_it(module: str) -> None:
    wrong = [
        f"{MODULES[module].relative_to(PACKAGE.parent)}:{imported.line}: imports {imported.name or 'kvxfer'}: {words}"
        for imported in IMPORTS[module]
        if (words := complaint(module, imported))
    ]

    assert not wrong, "\n".join(wrong)


def test_modules_of_one_floor_import_each_other_in_one_direction() -> None:
    edges = {
        module: {imported.name for imported in found if imported.is_ours and not imported.for_types_only} - {module}
        for module, found in IMPORTS.items()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' -> '.join((*path, module))}"
        if module not in done:
            for name in sorted(edges.get(module, ())):
                if name:  # the package's own __init__ is entered from everywhere
                    visit(name, (*path, module))
            done.add(module)

    for module in sorted(edges):
        visit(module, ())


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("errors", "kvxfer.engine"),
        ("memory.slices", "kvxfer.memory.regions"),
        ("memory.slices", "kvxfer.system.calls"),
        ("handshake.machine", "kvxfer.memory"),
        ("handshake.machine", "time"),
        ("mooncake.wire.frames", "kvxfer.handshake.frames"),
        ("mooncake.wire.frames", "socket"),
        ("mooncake.wire.frames", "kvxfer.mooncake.service"),
        ("transports.tcp", "kvxfer.mooncake.rows"),
        ("transports.tcp", "kvxfer.handshake.frames"),
        ("transports.tcp", "kvxfer.transports.shm_copy"),
        ("transports.base", "kvxfer.transports.tcp"),
        ("transports.loop", "kvxfer.engine"),
        ("transports.tcp", "cffi"),
        ("engine", "kvxfer.cli"),
        ("engine", "kvxfer"),
        ("system.interfaces", "kvxfer.verbs.gid"),
        ("system.interfaces", "socket"),
        ("verbs.gid", "socket"),
        ("config", "threading"),
    ],
)
def test_planted_fault_is_found(module: str, imported: str) -> None:
    ours = imported.startswith("kvxfer")
    name = imported.removeprefix("kvxfer").removeprefix(".") if ours else imported

    assert complaint(module, Import(name, ours, False, 1))


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("log", "time"),  # a rate has a clock
        ("memory.regions", "threading"),
        ("memory.shared", "kvxfer.system.calls"),
        ("memory.slices", "kvxfer.memory.chunks"),
        ("transports.tcp", "kvxfer.transports.tcp_wire"),
        ("transports.tcp", "kvxfer.transports.base"),
        ("transports.shm_copy", "kvxfer.memory.slices"),
        ("engine", "kvxfer.control"),
        ("mooncake.service", "kvxfer.acceptor"),
        ("mooncake.service", "kvxfer.mooncake.wire.frames"),
        ("cli.demo", "kvxfer"),
        ("transports", "kvxfer.transports.tcp"),
        ("verbs.library", "cffi"),
        ("verbs.gid", "kvxfer.system.interfaces"),
        ("verbs.routes", "socket"),
    ],
)
def test_what_the_rules_allow_is_allowed(module: str, imported: str) -> None:
    ours = imported.startswith("kvxfer")
    name = imported.removeprefix("kvxfer").removeprefix(".") if ours else imported

    assert complaint(module, Import(name, ours, False, 1)) is None
