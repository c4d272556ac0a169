"""The public names: a change here is a change for users, and belongs in CHANGELOG.md."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types

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
