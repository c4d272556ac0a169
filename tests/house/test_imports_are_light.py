"""`import kvxfer` loads no native helper, no framework, and works in any order, twice, and from several threads.

Each test asks a fresh process; one that tries many orders loads numpy once and forks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROLOGUE = """
import importlib, os, pkgutil, random, sys, threading, traceback
import numpy, structlog  # heavy, and not what is tested
MODULES = []
for folder, _, files in os.walk("kvxfer"):
    if "__init__.py" in files:
        for file in files:
            if file.endswith(".py") and file != "__main__.py":  # those are programs
                name = os.path.join(folder, file[:-3]).replace(os.sep, ".").removesuffix(".__init__")
                MODULES.append(name)
MODULES.sort()
assert len(MODULES) > 20
assert "kvxfer" not in sys.modules

def in_fork(work, *arguments):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(f"failed: {arguments}")

def import_all(names):
    for name in names:
        importlib.import_module(name)
"""


def run_child(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_native_helper_and_no_framework() -> None:  # B57
    out = run_child(
        "import kvxfer, kvxfer.cli, kvxfer.transports, sys\n"
        "print(*sys.modules)\n"
        "print(open('/proc/self/maps').read())\n"
    )
    modules, _, maps = out.partition("\n")

    for heavy in ("torch", "cupy", "matplotlib", "asyncio", "multiprocessing", "structlog", "cffi", "pycparser"):
        assert heavy not in modules.split(), heavy
    for library in ("libibverbs", "librdmacm", "libcuda", "libmlx5"):
        assert library not in maps, library


def test_import_starts_no_thread_and_opens_no_file() -> None:
    run_child(
        "import os, numpy\n"
        "files, tasks = len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))\n"
        "import kvxfer\n"
        "assert len(os.listdir('/proc/self/fd')) == files\n"
        "assert len(os.listdir('/proc/self/task')) == tasks\n"
    )


def test_import_prints_nothing() -> None:
    assert run_child("import kvxfer") == ""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_module_can_be_the_first_to_be_imported() -> None:
    run_child(PROLOGUE + "for name in MODULES: in_fork(import_all, [name])")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_modules_can_be_imported_in_any_order() -> None:
    run_child(
        PROLOGUE + "in_fork(import_all, MODULES[::-1])\n"
        "for seed in range(15): in_fork(import_all, random.Random(seed).sample(MODULES, len(MODULES)))"
    )


@pytest.mark.slow
def test_modules_can_be_imported_by_several_threads_at_once() -> None:
    # Packages first: while one thread is inside a package's __init__, importing a submodule by its full name in another
    # ends in CPython's _DeadlockError for any package whose __init__ imports submodules (importlib takes the lock of
    # the submodule before that of its parent).
    run_child(
        PROLOGUE
        + """
def import_in_threads(seed):
    failed = []
    def work(names):
        try:
            import_all(names)
        except BaseException as error:
            failed.append(repr(error))
    packages = [name for name in MODULES if any(other.startswith(name + ".") for other in MODULES)]
    orders = [random.Random(seed * 100 + n).sample(MODULES, len(MODULES)) for n in range(8)]
    threads = [threading.Thread(target=work, args=(packages + order,)) for order in orders]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not failed, failed
for seed in range(5): in_fork(import_in_threads, seed)
"""
    )


@pytest.mark.slow
def test_modules_can_be_reloaded_and_imported_anew() -> None:
    run_child(
        PROLOGUE
        + """
import_all(MODULES)
for name in MODULES: importlib.reload(sys.modules[name])
for name in reversed(MODULES): importlib.reload(sys.modules[name])
for name in MODULES: del sys.modules[name]
import kvxfer
assert kvxfer.__version__
"""
    )
