"""Settings from the environment, in one place: explicit arguments win, unknown ``RECOVERY_*`` names are errors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from recovery.errors import BadConfiguration

PREFIX = "RECOVERY_"

C = TypeVar("C")

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def from_environment(config: type[C], environ: Mapping[str, str] | None = None, **explicit: Any) -> C:
    """Return ``config(**explicit)`` with fields that were not given taken from ``RECOVERY_<FIELD>``.

    Args:
        config: A frozen dataclass whose fields are str, int, float, bool or tuples of str (comma-separated).
        environ: Where to look; ``os.environ`` if None.
        **explicit: Values that win over the environment. None counts as not given.

    Raises:
        BadConfiguration: a ``RECOVERY_*`` name that no field has, or a value that its field's type cannot take.
    """
    environ = os.environ if environ is None else environ
    hints = get_type_hints(config)
    names = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    values = {name: value for name, value in explicit.items() if value is not None}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        field = variable.removeprefix(PREFIX).lower()
        if field not in names:
            known = ", ".join(sorted(PREFIX + name.upper() for name in names))
            raise BadConfiguration(f"{variable} is set but nothing reads it; known are: {known}")
        if field not in values:
            values[field] = _parse(variable, environ[variable], hints[field])
    return config(**values)


def _parse(variable: str, text: str, hint: object) -> object:
    try:
        if hint is bool:
            if text.lower() not in _TRUE | _FALSE:
                raise ValueError
            return text.lower() in _TRUE
        if hint in (int, int | None):
            return int(text)
        if hint in (float, float | None):
            return float(text)
        if hint == tuple[str, ...]:
            return tuple(item.strip() for item in text.split(",") if item.strip())
    except ValueError:
        name = getattr(hint, "__name__", str(hint))
        raise BadConfiguration(f"{variable}={text!r} is not a value of type {name}") from None
    return text
