"""`kvxfer shim-path`: print the folder that puts kvxfer in Mooncake's place, for PYTHONPATH."""

from __future__ import annotations

import argparse

from kvxfer.compat import shim_path

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Print the folder."""
    del options
    print(shim_path())
    return 0
