"""What a doctor's check is made of: the machine it looks at, and the answer it gives.

`Machine.root` is where /proc, /sys and /dev are looked for, so that tests can hand in another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvxfer.config import EngineConfig
    from kvxfer.verbs.library import VerbsLibrary

__all__ = ["Check", "CheckFunction", "Machine", "Status"]

Status = Literal["ok", "off", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One answer. status: "fail" means that kvxfer does not work, "warn" that it works less well than it could,
    "off" that something is not used, and nobody has asked for it."""

    name: str
    status: Status
    value: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the check as one JSON object."""
        return {"name": self.name, "status": self.status, "value": self.value, "remedy": self.remedy}


@dataclass(frozen=True)
class Machine:
    """Where facts come from. config: the settings as an engine of this environment would have them."""

    config: EngineConfig
    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    library: VerbsLibrary | None = None
    """The verbs library; None for the system's, opened when a check needs it."""

    def read(self, path: str) -> str | None:
        """Return the text of a file under `root`, stripped, or None where it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def read_int(self, path: str) -> int | None:
        """Return the whole number in a file under `root`, or None."""
        text = self.read(path)
        return int(text) if text is not None and text.lstrip("-").isdecimal() else None


CheckFunction = Callable[[Machine], Check]
