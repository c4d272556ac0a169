"""The declared structs and numbers are those of libibverbs.

ABI mode checks nothing, so this does: against golden offsets (measured with gcc from the headers of rdma-core 44 and 65
on x86_64, and 65 on aarch64) everywhere, and against the header itself where gcc and libibverbs-dev are installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvxfer.verbs import cdef, enums, layout
from kvxfer.verbs.abi import ffi
from kvxfer.verbs.completion_queue import WC_DTYPE

GOLDEN = json.loads(Path(__file__).with_name("verbs_layout.json").read_text())
PLATFORMS = list(GOLDEN)
STRUCTS = sorted(GOLDEN[PLATFORMS[0]]["structs"])
PREFIXES = {"ibv_context", "ibv_cq", "ibv_qp"}
"""Declared up to where platforms differ; the library allocates them."""
CONTAINED = {"ibv_context_ops"}
"""Its members that nothing here calls are declared as gaps."""
GROWN = {("ibv_port_attr", "x86_64/rdma-core-44")}
"""Declared as the newest release has them; an older library writes less."""
HEADER = Path("/usr/include/infiniband/verbs.h")

ENUMS = {
    enums.NodeType: ("ibv_node_type", "IBV_NODE_"),
    enums.TransportType: ("ibv_transport_type", "IBV_TRANSPORT_"),
    enums.Mtu: ("ibv_mtu", "IBV_"),
    enums.PortState: ("ibv_port_state", "IBV_PORT_"),
    enums.QueuePairType: ("ibv_qp_type", "IBV_QPT_"),
    enums.QueuePairState: ("ibv_qp_state", "IBV_QPS_"),
    enums.Access: ("ibv_access_flags", "IBV_ACCESS_"),
    enums.QueuePairMask: ("ibv_qp_attr_mask", "IBV_QP_"),
    enums.WorkOpcode: ("ibv_wr_opcode", "IBV_WR_"),
    enums.SendFlags: ("ibv_send_flags", "IBV_SEND_"),
    enums.CompletionOpcode: ("ibv_wc_opcode", "IBV_WC_"),
    enums.CompletionStatus: ("ibv_wc_status", "IBV_WC_"),
    enums.EventType: ("ibv_event_type", "IBV_EVENT_"),
    enums.GidType: ("ibv_gid_type", "IBV_GID_TYPE_"),
    enums.ForkStatus: ("ibv_fork_status", "IBV_FORK_"),
    enums.LinkLayer: ("", "IBV_LINK_LAYER_"),
}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", STRUCTS)
def test_struct_is_as_measured(name: str, platform: str) -> None:
    golden = GOLDEN[platform]["structs"][name]
    declared = ffi.typeof(f"struct {name}")
    fields = {path: place for path, place in golden["fields"].items() if has_field(name, path)}

    assert {path: offset_and_size(declared, path) for path in fields} == {
        path: tuple(place) for path, place in fields.items()
    }
    if name in PREFIXES:
        assert ffi.sizeof(declared) <= golden["size"]
    elif (name, platform) not in GROWN:
        assert ffi.sizeof(declared) == golden["size"]
        assert name in CONTAINED or set(fields) == set(golden["fields"])


@pytest.mark.parametrize("platform", PLATFORMS)
def test_members_before_the_context_are_where_measured(platform: str) -> None:
    golden = GOLDEN[platform]
    architecture = platform.partition("/")[0]
    abi_compat = layout.ABI_COMPAT_OFFSETS[architecture]

    assert golden["structs"]["ibv_context"]["fields"]["abi_compat"] == [abi_compat, 8]
    assert golden["verbs_context"]["query_port"] == {
        "distance": layout.QUERY_PORT_OFFSET,
        "need_sz": abi_compat + 8 - layout.QUERY_PORT_OFFSET,
    }


def test_completion_rows_lie_on_the_struct() -> None:
    fields = {name: WC_DTYPE.fields[name][1] for name in WC_DTYPE.names}  # type: ignore[index]

    assert fields == {name: ffi.offsetof("struct ibv_wc", name) for name in fields}
    assert WC_DTYPE.itemsize == ffi.sizeof("struct ibv_wc")


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_unknown_number_keeps_its_value(kind: type) -> None:
    value = kind(1 << 29)

    assert int(value) == 1 << 29
    assert str(value)


# ---- against the header -----------------------------------------------------

needs_header = pytest.mark.skipif(
    not HEADER.exists() or shutil.which("gcc") is None, reason="gcc and libibverbs-dev are not installed"
)


@needs_header
def test_compiler_agrees_with_every_declared_field(tmp_path: Path) -> None:
    asked = []
    for name in declared_structs():
        for path in walk(ffi.typeof(f"struct {name}")):
            member = path.rpartition(".")[2]
            is_newer = re.search(rf"\b{member}\b", HEADER.read_text()) is None  # than this header
            if not is_newer and not member.startswith(("_before", "_after", "_ops")):
                asked.append((name, path))

    told = compile_and_run(
        tmp_path,
        [
            f'printf("{name} {path} %zu %zu\\n", offsetof(struct {name}, {path}), '
            f"sizeof(((struct {name} *)0)->{path}));"
            for name, path in asked
        ]
        + [f'printf("{name} . 0 %zu\\n", sizeof(struct {name}));' for name in declared_structs()],
    )

    wrong = []
    for line in told.splitlines():
        name, path, offset, size = line.split()
        if path == ".":
            declared = ffi.sizeof(f"struct {name}")
            fits = declared <= int(size) if name in PREFIXES else declared == int(size)
            # an older header's ibv_port_attr ends earlier
            if not fits and name != "ibv_port_attr":
                wrong.append(f"{line}: declared {declared}")
        elif offset_and_size(ffi.typeof(f"struct {name}"), path) != (int(offset), int(size)):
            wrong.append(f"{line}: declared {offset_and_size(ffi.typeof(f'struct {name}'), path)}")
    assert not wrong, "\n".join(wrong)
    assert len(told.splitlines()) > 150


@needs_header
def test_compiler_agrees_with_every_number(tmp_path: Path) -> None:
    header = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    header += (HEADER.parent / "ib_user_ioctl_verbs.h").read_text()
    pairs = [
        (kind, member.name, prefix + member.name)
        for kind, (_tag, prefix) in ENUMS.items()
        for member in kind
        if re.search(rf"\b{prefix}{member.name}\b", header)
    ]

    told = compile_and_run(tmp_path, [f'printf("%lld\\n", (long long){c});' for _kind, _name, c in pairs])

    wrong = [
        (kind.__name__, name, int(value), int(kind[name]))
        for (kind, name, _c), value in zip(pairs, told.split(), strict=True)
        if int(kind[name]) != int(value)
    ]
    assert wrong == []
    assert len(pairs) > 110


@needs_header
def test_declared_functions_are_in_the_header() -> None:
    header = HEADER.read_text()
    names = re.findall(r"\b(_?ibv_\w+)\(", cdef.FUNCTIONS)

    assert [name for name in names if name not in header] == []


def has_field(name: str, path: str) -> bool:
    try:
        ffi.offsetof(f"struct {name}", *path.split("."))
    except (KeyError, TypeError):
        return False
    return True


def offset_and_size(kind: object, path: str) -> tuple[int, int]:
    inner = kind
    for part in path.split("."):
        inner = find_member(inner, part)
    return ffi.offsetof(kind, *path.split(".")), ffi.sizeof(inner)


def find_member(kind: object, name: str) -> object:
    for key, field in kind.fields:  # type: ignore[attr-defined]
        if key == name:
            return field.type
        if not key:  # an anonymous union
            try:
                return find_member(field.type, name)
            except KeyError:
                continue
    raise KeyError(name)


def walk(kind: object, prefix: str = "") -> list[str]:
    found = []
    for key, field in kind.fields:  # type: ignore[attr-defined]
        if not key:
            found += walk(field.type, prefix)
            continue
        found.append(prefix + key)
        if field.type.kind in ("struct", "union") and "gid" not in field.type.cname:
            found += walk(field.type, f"{prefix}{key}.")
    return found


def declared_structs() -> list[str]:
    return sorted(set(re.findall(r"^struct (ibv_\w+) \{", cdef.SOURCE, flags=re.MULTILINE)))


def compile_and_run(folder: Path, statements: list[str]) -> str:
    source = folder / "probe.c"
    body = "\n  ".join(statements)
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n"
        f"int main(void) {{\n  {body}\n  return 0;\n}}\n"
    )
    subprocess.run(["gcc", "-w", "-o", folder / "probe", source], check=True)
    return subprocess.run([folder / "probe"], check=True, capture_output=True, text=True).stdout
