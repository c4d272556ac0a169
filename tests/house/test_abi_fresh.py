"""The generated ABI module is what its declarations say, and nothing in the package needs a compiler."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from kvxfer.system import cdef as system_cdef
from kvxfer.verbs import cdef as verbs_cdef

PACKAGE = Path(__file__).parents[2] / "kvxfer"
NATIVE = {".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".pyx", ".pxd", ".so", ".o", ".a", ".rs"}
BUILDERS = ("distutils", "setuptools", "Cython", "pybind11", "numba")


@pytest.mark.parametrize(("folder", "cdef"), [("system", system_cdef), ("verbs", verbs_cdef)])
def test_generated_module_is_fresh(folder: str, cdef: ModuleType) -> None:
    on_disk = (PACKAGE / folder / "abi.py").read_text()

    assert on_disk == cdef.generate(), f"run `python -m kvxfer.{folder}.cdef`"


def test_package_holds_python_only() -> None:
    assert [path for path in PACKAGE.rglob("*") if path.suffix in NATIVE] == []


def test_nothing_calls_a_compiler() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
                assert not [name for name in names if name.partition(".")[0] in BUILDERS], path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in ("verify", "compile_c"), f"{path}:{node.lineno}"
                if node.func.attr == "set_source":  # None as source: ABI mode
                    assert isinstance(node.args[1], ast.Constant), f"{path}:{node.lineno}"
                    assert node.args[1].value is None, f"{path}:{node.lineno}"
