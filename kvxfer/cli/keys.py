"""The pre-shared key of a command: taken from an environment variable, because a command line can be read by everybody.

Never printed, never logged.
"""

from __future__ import annotations

import os

from kvxfer.errors import AuthenticationError, ConfigError, KvxferError

__all__ = ["key_settings", "remedy_of"]


def key_settings(variable: str | None) -> dict[str, str]:
    """Return the settings for an engine whose key is in `variable`; none where no variable is named."""
    if variable is None:
        return {}
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(
            f"--key-env {variable}: the environment has no such variable, or it is empty.",
            remedy=f"Set it on both sides to the same secret: export {variable}=$(openssl rand -hex 32).",
            variable=variable,
        )
    return {"key": key}


def remedy_of(error: KvxferError) -> str:
    """Return the remedy of an error; where keys differ, with the option that gives a command one."""
    if not isinstance(error, AuthenticationError):
        return error.remedy
    return f"{error.remedy} Here: --key-env NAME, with the variable NAME set to the key; `kvxfer serve` takes it too."
