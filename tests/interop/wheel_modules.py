"""Load single modules out of a wheel that is not installed, with stubs for all that they import and that is not there.

Nothing is unpacked. A stub is a class that can be subclassed, called, subscripted and asked for any attribute.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        stub = make_stub(name)
        setattr(cls, name, stub)
        return stub

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__


class Stub(metaclass=_AnyAttribute):
    """Base of all stubs: takes any arguments, and is true."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __init_subclass__(cls, **_: object) -> None:
        pass

    def __class_getitem__(cls, item: object) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(type(self), name)

    def __call__(self, *arguments: Any, **_: object) -> Any:
        """As a decorator it changes nothing."""
        return arguments[0] if arguments and callable(arguments[0]) else Stub()


def make_stub(name: str) -> Any:
    """Return a new stub class: two bases of one class must differ."""
    return _AnyAttribute(name, (Stub,), {})


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        stub = make_stub(name)
        setattr(self, name, stub)
        return stub


class WheelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """real: modules to load from the wheel. values: what stub modules have, by module name. packages: top-level names,
    all of whose other modules are stubs."""

    def __init__(
        self,
        wheel: Path,
        *,
        real: Collection[str],
        packages: Sequence[str],
        values: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._wheel = wheel
        self._real = frozenset(real)
        self._packages = tuple(packages)
        self._values = dict(values)

    def install(self) -> None:
        """From now on imports find them."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name not in self._real)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        if spec.name in self._real:
            return None
        module = _StubModule(spec.name)
        vars(module).update(self._values.get(spec.name, {}))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ not in self._real:
            return
        inside = module.__name__.replace(".", "/") + ".py"
        with zipfile.ZipFile(self._wheel) as archive:
            source = archive.read(inside)
        exec(compile(source, f"{self._wheel.name}/{inside}", "exec"), vars(module))
