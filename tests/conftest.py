"""What holds for every test: hypothesis profiles, a clean environment, only known log events, structlog as found."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvxfer import log
from kvxfer.config import OTHER_VARIABLES
from kvxfer.setting import PREFIX

# deadline=None: the machines that run these are shared. print_blob: a failure prints what reproduces it.
_COMMON: dict[str, Any] = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **_COMMON)
settings.register_profile("ci", max_examples=200, **_COMMON)
settings.register_profile("night", max_examples=5000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

for _name in [name for name in os.environ if name.startswith(PREFIX) and name not in OTHER_VARIABLES]:
    del os.environ[_name]  # settings of whoever runs the tests must not change what they find

# A shell starts background jobs with SIGINT ignored; that is inherited, and no child of a test would see Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

_logger = logging.getLogger("kvxfer")
_unknown_events: set[str] = set()
_emit = log.Logger._emit


def _emit_known(self: log.Logger, level: int, method: str, event: str, fields: dict[str, Any]) -> None:
    if event not in log.EVENTS:
        _unknown_events.add(event)  # seen by the fixture below: raised here, a background thread would swallow it
    _emit(self, level, method, event, fields)


log.Logger._emit = _emit_known  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def only_known_events() -> Iterator[None]:
    """Fail a test in which the library logs an event that `kvxfer.log.EVENTS` does not list."""
    _unknown_events.clear()
    yield
    unknown = sorted(_unknown_events)
    assert not unknown, f"log events missing from kvxfer.log.EVENTS: {unknown}"


@pytest.fixture(autouse=True)
def no_lines_counted_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier tests have logged must not leave out lines of this one."""
    monkeypatch.setattr(log, "_limiter", log.RateLimiter())


@pytest.fixture(autouse=True)
def structlog_as_found() -> Iterator[None]:
    """Undo what a test configured: capture_logs, too, leaves structlog configured; `doctor` and `mesh` set a level."""
    level = _logger.level
    yield
    _logger.setLevel(level)
    structlog = sys.modules.get("structlog")
    if structlog is not None and structlog.is_configured():
        structlog.reset_defaults()


def pytest_report_header() -> str:
    return f"hypothesis examples: {settings().max_examples} (HYPOTHESIS_PROFILE=dev, ci or night)"
