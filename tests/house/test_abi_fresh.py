"""The generated ABI module is what its declarations say, and nothing in the package needs a compiler."""

from __future__ import annotations

import ast
from pathlib import Path

from kvxfer.system import cdef

PACKAGE = Path(__file__).parents[2] / "kvxfer"
NATIVE = {".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".pyx", ".pxd", ".so", ".o", ".a", ".rs"}
BUILDERS = ("distutils", "setuptools", "Cython", "pybind11", "numba")


def test_generated_module_is_fresh() -> None:
    on_disk = (PACKAGE / "system" / "abi.py").read_text()

    assert on_disk == cdef.generate(), "run `python -m kvxfer.system.cdef`"


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
