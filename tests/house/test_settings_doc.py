"""docs/settings.md is the table of settings, as the code has it. Run as a program this file writes it."""

from __future__ import annotations

from pathlib import Path

from kvxfer.config import EngineConfig, Setting

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"
HEAD = """# Settings

An argument of `TransferEngine` wins over the environment variable, which wins over the default.
A value outside its range raises `ConfigError` with the range.
A variable named after "or" is Mooncake's; it is read where kvxfer's own is not set.
A `KVXFER_*` variable that is no setting is told in the log with the closest name.
This file is generated from `kvxfer/config.py`.

| setting | variable | unit and range | default | meaning | why this default |
|---|---|---|---|---|---|
"""
COMPUTED = {"shm_copy_threads": "2, or 1 on one CPU"}


def render() -> str:
    rows = [
        f"| `{row.name}` | {_variables(row)} | {row.allowed} | {COMPUTED.get(row.name) or _show(row.default)} "
        f"| {row.meaning} | {row.source} |\n"
        for row in EngineConfig.settings()
    ]
    return HEAD + "".join(rows)


def _variables(row: Setting) -> str:
    return ", or ".join(f"`{name}`" for name in (row.variable, *row.synonyms))


def _show(default: object) -> str:
    if default is None:
        return "none"
    return ", ".join(default) if isinstance(default, tuple) else str(default)


def test_settings_document_is_fresh() -> None:
    assert DOCUMENT.read_text() == render(), f"run: python {Path(__file__).name}"


if __name__ == "__main__":
    DOCUMENT.write_text(render())
