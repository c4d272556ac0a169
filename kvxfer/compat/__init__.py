"""Other engines' names on kvxfer. `install()` puts kvxfer in the place of `mooncake.engine` in this process.

For programs that are not to be changed, `PYTHONPATH=$(kvxfer shim-path)` does the same from outside.
Read next: `mooncake/`, the names; docs/mooncake.md, what is different.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

__all__ = ["install", "shim_path"]


def shim_path() -> Path:
    """Return the folder that holds a package `mooncake` made of kvxfer; for PYTHONPATH."""
    return Path(__file__).parent / "shim"


def install() -> None:
    """Make `import mooncake.engine` give kvxfer's in this process, whatever is installed. Tolerated twice.

    Raises ImportError where another `mooncake.engine` is imported already: its classes are in use.
    """
    present = sys.modules.get("mooncake.engine")
    if present is not None and not hasattr(present, "last_error"):
        raise ImportError(
            f"mooncake.engine was imported already, from {getattr(present, '__file__', 'an unknown place')}; "
            "call kvxfer.compat.install() before that.",
            name="mooncake.engine",
        )
    folder = str(shim_path())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    package = sys.modules.get("mooncake")
    if package is not None and present is None:  # the real package without its engine: ours goes before it
        package.__path__ = [str(shim_path() / "mooncake"), *package.__path__]
    importlib.import_module("mooncake.engine")
