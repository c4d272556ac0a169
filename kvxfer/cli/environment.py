"""The settings of an engine as the command line and the environment give them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvxfer.config import OTHER_VARIABLES, EngineConfig
from kvxfer.errors import KvxferError

__all__ = ["given", "known_variables", "load_config"]


def given(**settings: Any) -> dict[str, Any]:
    """Return the settings given on the command line: the others stay with the environment and the defaults."""
    return {name: value for name, value in settings.items() if value is not None}


def load_config(environ: Mapping[str, str] | None = None) -> tuple[EngineConfig, KvxferError | None]:
    """Return the configuration an engine would get, and what is wrong with it; then it is the default one."""
    variables = os.environ if environ is None else environ
    known = known_variables()  # an unknown one would be logged, and is a check of its own
    try:
        return EngineConfig.resolve(environment={name: variables[name] for name in known if name in variables}), None
    except KvxferError as error:
        return EngineConfig(), error


def known_variables() -> frozenset[str]:
    """Return the names of all environment variables that kvxfer reads."""
    rows = EngineConfig.settings()
    return OTHER_VARIABLES | {name for row in rows for name in (row.variable, *row.synonyms)}
