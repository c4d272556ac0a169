"""One setting: its unit, range and default, and how a value that is given becomes one that can be meant.

`setting`, `seconds` and `count` declare one as a field of a dataclass. Pure: looks at no environment. The table of all
settings is `config.EngineConfig`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.text import clean, name_kind, show
from kvxfer.types import as_whole_number

__all__ = ["PREFIX", "Setting", "count", "seconds", "setting"]

PREFIX = "KVXFER_"
BARE_UNITS = ("exponent", "index", "number", "port")  # what the setting is, not what it is counted in


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings."""

    name: str
    unit: str
    default: Any
    meaning: str
    source: str
    """Where the default comes from."""
    low: float = -math.inf
    high: float = math.inf
    parse: Callable[[str], Any] = str
    synonyms: tuple[str, ...] = ()
    """Variables of other engines that mean the same."""
    convert: Callable[[Any], Any] | None = None
    """Makes the value of what was given; raises ValueError with what is wrong with it."""
    choices: tuple[int, ...] = ()

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.upper()

    def find_variable(self, environment: Mapping[str, str]) -> str | None:
        """Return the variable that sets it here: its own before those of other engines."""
        return next((name for name in (self.variable, *self.synonyms) if name in environment), None)

    @property
    def allowed(self) -> str:
        """The range in words."""
        if self.choices:
            *others, last = self.choices
            return f"{', '.join(map(str, others))} or {last} {self.unit}"
        if self.low == -math.inf:
            return self.unit
        high = _amount(self.high)
        if self.unit == "bytes":
            high = _size(self.high)
            return f"0 to {high}" if not self.low else f"{_size(self.low)} to {high}"
        unit = "" if self.unit in BARE_UNITS else f" {self.unit}"
        return f"{_amount(self.low)} to {high}{unit}"

    @property
    def default_text(self) -> str:
        """The default in words; where there is none, what is done without."""
        return f"None ({self.source})" if self.default is None else repr(self.default)

    def check(self, value: Any) -> Any:
        """Return the value in the type of its setting, so that numpy's numbers become Python's; raises ConfigError."""
        if value is None and self.default is None:
            return None
        problem = ""
        if self.convert is not None:
            try:
                return self.convert(value)
            except (ValueError, TypeError) as exc:
                fits, problem = False, f": {clean(str(exc), 300)}"
        elif self.parse in (int, float):
            number = _number(value, self.parse)
            fits = number is not None and self.low <= number <= self.high
            fits = fits and (not self.choices or number in self.choices)
            problem = f": it is {name_kind(value)}, not {_kind(self.parse, value)}" if number is None else ""
            value = number if fits else value
        elif self.name == "key":
            fits = isinstance(value, bytes)
        elif self.name == "transports":
            fits = isinstance(value, tuple)  # check_transports has looked at the names
        else:
            problem = _fault_of_text(value)
            fits = not problem
        if not fits:
            shown = name_kind(value) if self.name == "key" else show(value, 200)
            raise ConfigError(
                f"{self.name} is {shown}{problem}; it takes {self.allowed}.",
                remedy=f"{self.meaning[:1].upper()}{self.meaning[1:]}; the default is {self.default_text}.",
                setting=self.name,
                value=None if self.name == "key" else value,
                problem=problem,
            )
        return value

    def read_variable(self, variable: str, text: str) -> Any:
        """Return the value of an environment variable; raises ConfigError that names it."""
        try:
            return self.check(self.parse(text))
        except (ValueError, ConfigError) as exc:
            shown = "..." if self.name == "key" else show(text, 200)
            known = exc.values.get("problem", "") if isinstance(exc, ConfigError) else None
            problem = f": it is not {_kind(self.parse, text)}" if known is None else known
            raise ConfigError(
                f"the environment variable {variable} is {shown}{problem}; {self.name} takes {self.allowed}.",
                remedy=f"Set it to such a value, or unset it: the default is {self.default_text}.",
                setting=self.name,
                value=None if self.name == "key" else text,
                variable=variable,
            ) from None


def setting(
    unit: str,
    default: Any,
    meaning: str,
    source: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    parse: Callable[[str], Any] = str,
    secret: bool = False,
    synonyms: tuple[str, ...] = (),
    convert: Callable[[Any], Any] | None = None,
    choices: tuple[int, ...] = (),
) -> Any:
    """Return the field of a dataclass that is a setting; `Setting` says what the arguments mean. secret: not shown."""
    row = Setting(
        "", unit, None if callable(default) else default, meaning, source, low, high, parse, synonyms, convert, choices
    )
    factory = {"default_factory": default} if callable(default) else {"default": default}
    return dataclasses.field(**factory, repr=not secret, metadata={"setting": row})


def seconds(default: float, meaning: str, source: str, low: float = 0.001) -> Any:
    """Return a setting that is a time, up to a day."""
    return setting("s", default, meaning, source, low=low, high=86400.0, parse=float)


def count(
    unit: str,
    default: Any,
    meaning: str,
    source: str,
    *,
    low: int,
    high: int,
    synonyms: tuple[str, ...] = (),
    choices: tuple[int, ...] = (),
) -> Any:
    """Return a setting that is a whole number."""
    return setting(unit, default, meaning, source, low=low, high=high, parse=int, synonyms=synonyms, choices=choices)


def _kind(parse: object, value: object) -> str:
    """Return what a value should be, in words."""
    if parse is int:
        return "a whole number"
    return "a finite number" if isinstance(value, float) else "a number"


def _fault_of_text(value: object) -> str:
    """Return what is wrong with a text, as a clause for its error; "" where nothing is."""
    if not isinstance(value, str):
        return f": it is {name_kind(value)}, not text"
    if not value.strip():
        return ": it is empty"
    return ": it has a NUL character in it" if "\0" in value else ""


def _number(value: Any, kind: object) -> int | float | None:
    """Return the whole number, or the finite one, that a value is; None where it is none."""
    if kind is int:
        return as_whole_number(value)
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except (TypeError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _amount(value: float) -> str:
    """Return a bound in whole digits: 1048576, 0.01."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _size(nbytes: float) -> str:
    """Return a bound in the largest unit that keeps it whole: 4 EiB, 256 bytes."""
    power = next(power for power in range(6, -1, -1) if not nbytes % (1 << 10 * power))
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")[power]
    return f"{int(nbytes) >> 10 * power} {unit}"
