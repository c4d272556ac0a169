"""kvxfer in the place of Mooncake's Python package: `mooncake.engine` is kvxfer's.

Other modules of the package (`mooncake.store`, `mooncake.ep` ...) are the real ones where Mooncake is installed, and
missing where it is not. Read next: `engine.py`.
"""

from __future__ import annotations

import importlib
from pkgutil import extend_path
from typing import Any

__path__ = extend_path(__path__, __name__)


def __getattr__(name: str) -> Any:
    """What the real package has at its top, from the real package."""
    if name in ("BufferPool", "RegisteredBufferPool"):
        return getattr(importlib.import_module("mooncake.buffer_pool"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
