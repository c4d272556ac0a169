"""The version of kvxfer as it is installed, without importing the engine."""

from __future__ import annotations

from importlib import metadata

__all__ = ["installed_version"]


def installed_version() -> str:
    """Return the version of the installed distribution; "(not installed)" in a bare source tree."""
    try:
        return metadata.version("kvxfer")
    except metadata.PackageNotFoundError:
        return "(not installed)"
