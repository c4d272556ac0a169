"""A libibverbs that cannot be used is told apart by what is wrong with it; none is opened before it is needed."""

from __future__ import annotations

import ctypes
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvxfer.errors import VerbsLayoutError, VerbsLibraryError, VerbsLibraryOldError
from kvxfer.verbs import layout, library
from kvxfer.verbs.layout import check_layout
from kvxfer.verbs.library import load_library


def test_missing_file_text_file_and_other_library_give_three_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_file = tmp_path / "text.so"
    text_file.write_text("this is no library\n" * 100)

    told = []
    for path in (str(tmp_path / "none.so"), str(text_file), "libc.so.6"):
        monkeypatch.setenv("KVXFER_LIBIBVERBS", path)
        with pytest.raises(VerbsLibraryError) as caught:
            load_library()
        told.append(caught.value.message)
        assert caught.value.values["path"] == path

    missing, not_elf, other = told
    assert "there is no file" in missing
    assert "invalid ELF header" in not_elf
    assert "not libibverbs: no " in other
    assert all("from KVXFER_LIBIBVERBS" in message for message in told)


def test_soname_that_is_not_installed_says_so_with_the_packages() -> None:
    with pytest.raises(VerbsLibraryError, match=r"libkvxfer-is-not-here.so.1 is not installed\. .*ibverbs-providers"):
        load_library("libkvxfer-is-not-here.so.1")


def test_folder_given_as_library_is_explained(tmp_path: Path) -> None:
    with pytest.raises(VerbsLibraryError, match="cannot be loaded"):
        load_library(str(tmp_path))


def test_importing_loads_no_libibverbs() -> None:
    program = (
        "import kvxfer.transports.rdma, kvxfer.verbs.device, kvxfer.verbs.gid_choice, kvxfer.verbs.rails, kvxfer.cli\n"
        "print('libibverbs' in open('/proc/self/maps').read())"
    )

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "False"


class OldLibrary:
    """What dlopen gives of a libibverbs that lacks a call: cffi raises for it, and has an address for all others."""

    def __getattr__(self, name: str) -> object:
        if name in ("ibv_create_comp_channel", "ibv_reg_mr_iova2"):
            raise AttributeError(name)
        return object()


def test_library_that_lacks_a_call_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ffi", SimpleNamespace(dlopen=lambda _: OldLibrary(), error=library.ffi.error))

    with pytest.raises(VerbsLibraryOldError, match="lacks ibv_create_comp_channel") as caught:
        load_library("libibverbs-of-2007.so.1")

    assert caught.value.missing == ("ibv_create_comp_channel",)  # what only some need may be missing
    assert "rdma-core" in caught.value.remedy


def test_every_call_of_the_table_is_looked_for() -> None:
    """What is missing is told when the library is opened, not when it is called."""
    source = Path(library.__file__).read_text()
    used = set(re.findall(r"self\._lib\.(\w+)", source))

    assert used == {*library.NEEDED_SYMBOLS, *library.OPTIONAL_SYMBOLS}


def test_platform_of_another_layout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")

    with pytest.raises(VerbsLayoutError, match=r"this machine is riscv64.*x86_64 and aarch64"):
        load_library("libibverbs.so.1")


# The layout of an open context, as it must be and as it may not.


class Memory:
    """A context in memory as a libibverbs lays it out: verbs_context before it, the table of operations in it."""

    def __init__(self) -> None:
        self.block = library.ffi.new("char[]", 4096)
        self.context = library.ffi.cast("struct ibv_context *", self.block + 2048)
        self.put(layout.ABI_COMPAT_OFFSETS[platform.machine()], 2**64 - 1)
        self.put(layout.SIZE_OFFSET, 648)
        self.context.cmd_fd = self.context.async_fd = 0
        code = int(library.ffi.cast("uintptr_t", ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value or 0))
        for name in ("post_send", "post_recv", "poll_cq", "req_notify_cq"):
            self.point(name, code)

    def put(self, offset: int, value: int) -> None:
        library.ffi.cast("uint64_t *", self.block + 2048 + offset)[0] = value

    def point(self, name: str, address: int) -> None:
        field = library.ffi.addressof(self.context.ops, name)
        library.ffi.cast("uintptr_t *", field)[0] = address


def test_layout_as_declared_is_believed() -> None:
    assert check_layout(Memory().context) == ""


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda memory: memory.put(layout.ABI_COMPAT_OFFSETS[platform.machine()], 7), "abi_compat is not all ones"),
        (lambda memory: memory.put(layout.SIZE_OFFSET, 64), "verbs_context.sz is 64, believable are 600 to 2000"),
        (lambda memory: setattr(memory.context, "cmd_fd", 99999), "cmd_fd is 99999, which is no open file"),
        (lambda memory: setattr(memory.context, "async_fd", -1), "async_fd is -1, which is no open file"),
        (lambda memory: memory.point("post_send", 0), "ops.post_send is 0x0, which is no code"),
        (
            lambda memory: memory.point("poll_cq", int(library.ffi.cast("uintptr_t", memory.block))),
            "which is no code",
        ),
    ],
    ids=["abi", "size", "command file", "event file", "null", "data"],
)
def test_layout_of_another_kind_is_refused_without_calling_it(spoil: Callable[[Memory], None], told: str) -> None:
    """Calling through a table that is not one would be the end of the process."""
    memory = Memory()
    spoil(memory)

    assert told in check_layout(memory.context)
