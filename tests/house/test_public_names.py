"""The public names: a change here is a change for users, and belongs in CHANGELOG.md."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
import types
from pathlib import Path
from typing import NamedTuple

import pytest

import kvxfer
from kvxfer import errors

NAMES = {
    "EngineConfig",
    "Notification",
    "Opcode",
    "Probe",
    "Region",
    "RegionDescriptor",
    "Rights",
    "Segment",
    "TransferBatch",
    "TransferEngine",
    *errors.__all__,
}
MODULES = [
    found.name for found in pkgutil.walk_packages(kvxfer.__path__, "kvxfer.") if not found.name.endswith("__main__")
]


def test_all_lists_the_public_names() -> None:
    assert set(kvxfer.__all__) == NAMES
    assert len(kvxfer.__all__) == len(NAMES)


def test_nothing_else_is_public() -> None:
    found = {
        name
        for name, value in vars(kvxfer).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }

    assert found == NAMES


def test_public_names_are_explained() -> None:
    for name in NAMES:
        assert inspect.getdoc(getattr(kvxfer, name)), name


def test_public_methods_are_explained() -> None:
    for name in NAMES - set(errors.__all__):
        for method, value in vars(getattr(kvxfer, name)).items():
            if not method.startswith("_") and (callable(value) or isinstance(value, (property, classmethod))):
                assert inspect.getdoc(value), f"{name}.{method}"


def section_of_api_page(title: str) -> set[str]:
    """Return the names in the first column under a heading of docs/api.md, and those told in its sentences."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    first = " ".join(line.partition(" | ")[0] if line.startswith("|") else line for line in section.splitlines())
    return set(re.findall(r"`(?:await )?(\w+)[^`]*`", first))


@pytest.mark.parametrize(
    ("title", "classes"),
    [
        ("TransferEngine", [kvxfer.TransferEngine]),
        ("Segment", [kvxfer.Segment]),
        ("TransferBatch", [kvxfer.TransferBatch]),
        ("Region and RegionDescriptor", [kvxfer.Region, kvxfer.RegionDescriptor]),
    ],
)
def test_api_page_has_every_public_name_and_no_other(title: str, classes: list[type]) -> None:
    fields = {name for one in classes if dataclasses.is_dataclass(one) for name in one.__dataclass_fields__}
    public = {name for one in classes for name in dir(one) if not name.startswith("_")} | fields

    assert section_of_api_page(title) - {one.__name__ for one in classes} - {"with", "batch"} == public


def test_api_page_has_every_name_of_the_package() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    named = {word for title in titles for word in re.findall(r"\w+", title)}

    assert not set(kvxfer.__all__) - named - set(errors_of_api_page())


@pytest.mark.parametrize("one", [kvxfer.Notification, kvxfer.Probe])
def test_api_page_has_every_field_of_a_plain_type(one: type) -> None:
    assert section_of_api_page(one.__name__) >= set(one.__dataclass_fields__)


@pytest.mark.parametrize("one", [kvxfer.Rights, kvxfer.Opcode])
def test_api_page_has_every_member_of_an_enum(one: type[enum.IntEnum | enum.IntFlag]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()

    assert set(re.findall(rf"`{one.__name__}\.([A-Z_]+)`", page)) == set(one.__members__)


def test_api_page_has_every_method_of_the_settings() -> None:
    methods = {name for name, value in vars(kvxfer.EngineConfig).items() if not name.startswith("_")}
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()

    for name in methods - set(kvxfer.EngineConfig.__dataclass_fields__):
        assert re.search(rf"`(EngineConfig\.)?{name}\(", page), name


class ErrorRow(NamedTuple):
    """A row of the table of errors; depth: 0 for the base of all."""

    depth: int
    attributes: frozenset[str]
    remedy: str


def errors_of_api_page() -> dict[str, ErrorRow]:
    """Return the rows of the table of errors in docs/api.md, in its order."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text().partition("## Errors\n")[2]
    found = {}
    for line in page.splitlines():
        if (match := re.match(r"\| ((?:· )*)`(\w+)`", line)) is not None:
            _, _, meaning, attributes, remedy, _ = (cell.strip() for cell in line.split("|"))
            assert meaning
            found[match[2]] = ErrorRow(match[1].count("·"), frozenset(re.findall(r"`(\w+)`", attributes)), remedy)
    return found


def test_api_page_has_every_error_with_its_place_attributes_and_remedy() -> None:
    rows = errors_of_api_page()

    assert set(rows) == set(errors.__all__)
    above: list[str] = []
    for name, row in rows.items():
        one = getattr(errors, name)
        above = [*above[: row.depth], name]
        assert row.depth == 0 or one.__bases__[0].__name__ == above[-2], name
        assert row.remedy, name
        own = {
            key for key in vars(one) if not key.startswith("_") and key != "retryable" and not callable(vars(one)[key])
        }
        told = row.attributes - {"message", "remedy", "values", "retryable"}
        assert told == own | ({"errno"} if one is errors.VerbsError else set()), name
        assert one.retryable == bool(re.search(r"\bagain\b", row.remedy)), name


def test_help_of_the_engine_names_the_commonest_settings() -> None:
    told = inspect.getdoc(kvxfer.TransferEngine) or ""

    assert "docs/settings.md" in told
    for name in ("host", "port", "advertise_host", "transports", "key", "transfer_timeout_s", "connect_timeout_s"):
        assert name in kvxfer.EngineConfig.__dataclass_fields__
        assert re.search(rf"\b{name}\b", told), name


def test_every_error_is_exported_and_drawn() -> None:
    classes = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.KvxferError)
    }

    assert classes == set(errors.__all__)
    assert not [name for name in classes if name not in str(errors.__doc__)]


@pytest.mark.parametrize("name", MODULES)
def test_module_says_what_it_owns_and_lists_only_what_it_has(name: str) -> None:
    module = importlib.import_module(name)

    assert name in ("kvxfer.system.abi", "kvxfer.verbs.abi") or module.__doc__
    assert not [public for public in getattr(module, "__all__", ()) if not hasattr(module, public)]
