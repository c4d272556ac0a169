"""MC_LOG_LEVEL: how much of kvxfer's log is seen, and where it goes in a program that configures no logging.

Mooncake writes to standard error by itself. `logging` without a handler writes warnings only, so that INFO would change
nothing; a handler of ours writes then, for as long as nobody has set up another.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvxfer.log import get_logger

__all__ = ["follow_log_level"]

LEVELS = {"TRACE": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"

_handler = logging.StreamHandler()  # standard error
_handler.setFormatter(logging.Formatter(FORMAT))
_handler.addFilter(lambda record: not any(one is not _handler for one in _handlers()))
_unknown: set[str] = set()  # that were told: once in a process


def follow_log_level(environment: Mapping[str, str]) -> None:
    """Set the level of the `kvxfer` logger as MC_LOG_LEVEL says, if it is set."""
    text = environment.get("MC_LOG_LEVEL")
    if not text:
        return
    level = LEVELS.get(text.upper())
    if level is None:
        if text not in _unknown:
            _unknown.add(text)
            get_logger(__name__).warning("mooncake.log_level_unknown", value=text, known=list(LEVELS))
        return
    logger = logging.getLogger("kvxfer")
    logger.setLevel(level)
    logger.addHandler(_handler)  # tolerated twice


def _handlers() -> list[logging.Handler]:
    """Return what writes the events of the `kvxfer` logger."""
    logger = logging.getLogger("kvxfer")
    return [*logger.handlers, *(logging.getLogger().handlers if logger.propagate else ())]
