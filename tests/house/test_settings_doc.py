"""docs/settings.md is the table of settings, as the code has it. Run as a program this file writes it."""

from __future__ import annotations

from pathlib import Path

from kvxfer.config import OTHER_VARIABLES, EngineConfig
from kvxfer.setting import Setting

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"
HEAD = """# Settings

An argument of `TransferEngine` wins over the environment variable, which wins over the default.
A value outside its range raises `ConfigError` with the range.
A variable named after "or" is Mooncake's; it is read where kvxfer's own is not set.
A `KVXFER_*` variable that is no setting is told in the log with the closest name.
The few variables that are no settings are at the end of this page.
This file is generated from `kvxfer/config.py`.

| setting | variable | unit and range | default | meaning | why this default |
|---|---|---|---|---|---|
"""
OTHERS = {
    "KVXFER_ALLOW_FALLBACK": "1: in Mooncake's place, go on over tcp where RDMA was asked for and cannot be had; "
    "[mooncake.md](mooncake.md#without-an-rdma-device)",
    "KVXFER_ALLOW_PTRACE": "1: in Mooncake's place, let every process of this user reach this one's memory where "
    "ptrace_scope is 1; [mooncake.md](mooncake.md#shared-memory-under-ptrace_scope)",
    "KVXFER_LIBIBVERBS": "file name or soname of the libibverbs to open, in place of `libibverbs.so.1`",
    "KVXFER_TRACEBACK": "1: the commands show the traceback of an error, not only its message",
    "KVXFER_UML_KERNEL": "the kernel that `tests/lab/run-in-uml.sh` and `LAB=uml make lab` boot; read by the lab only; "
    "[lab.md](lab.md)",
}
FOOT = """
## Variables that are no settings

They are no arguments of `TransferEngine`, and their values are not checked.

| variable | meaning |
|---|---|
"""
COMPUTED = {"shm_copy_threads": "2, or 1 on one CPU"}


def render() -> str:
    rows = [
        f"| `{row.name}` | {_variables(row)} | {row.allowed} | {COMPUTED.get(row.name) or _show(row.default)} "
        f"| {row.meaning} | {row.source} |\n"
        for row in EngineConfig.settings()
    ]
    others = [f"| `{name}` | {meaning} |\n" for name, meaning in OTHERS.items()]
    return "".join([HEAD, *rows, FOOT, *others])


def _variables(row: Setting) -> str:
    return ", or ".join(f"`{name}`" for name in (row.variable, *row.synonyms))


def _show(default: object) -> str:
    if default is None:
        return "none"
    return ", ".join(default) if isinstance(default, tuple) else str(default)


def test_settings_document_is_fresh() -> None:
    assert DOCUMENT.read_text() == render(), f"run: python {Path(__file__).name}"


def test_variables_that_are_no_settings_are_all_there() -> None:
    theirs = {
        name for name in OTHER_VARIABLES if not name.startswith("KVXFER_CI_")
    }  # told by the script that reads them

    assert set(OTHERS) == theirs


if __name__ == "__main__":
    DOCUMENT.write_text(render())
