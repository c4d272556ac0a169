"""Every test here may look at the library's warnings, whatever level another test has left the logger at."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Let them through; pytest puts the level back."""
    caplog.set_level(logging.WARNING, "kvxfer")
