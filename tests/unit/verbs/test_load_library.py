"""A libibverbs that cannot be used is told apart by what is wrong with it; none is opened before it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.errors import VerbsLibraryError
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
