"""Settings from the environment, in one place: explicit arguments win, unknown ``RECOVERY_*`` names are errors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, TypeVar, cast, get_type_hints

from recovery.errors import BadConfiguration

PREFIX = "RECOVERY_"

C = TypeVar("C")

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def from_environment(config: type[C], environ: Mapping[str, str] | None = None, **explicit: Any) -> C:
    """Return ``config(**explicit)`` with fields that were not given taken from ``RECOVERY_<FIELD>``.

    A field that is itself such a dataclass takes its own fields from the same environment, unless it was given.

    Args:
        config: A frozen dataclass whose fields are str, int, float, bool, tuples of str (comma-separated), or
            dataclasses of these.
        environ: Where to look; ``os.environ`` if None.
        **explicit: Values that win over the environment. None counts as not given.

    Raises:
        BadConfiguration: a ``RECOVERY_*`` name that no field has, a value that its field's type cannot take, or a field
            without default that nobody gave.
    """
    environ = os.environ if environ is None else environ
    known = _names(config)
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        if variable not in known:
            listed = ", ".join(sorted(known))
            raise BadConfiguration(f"{variable} is set but nothing reads it; known are: {listed}")
    return _build(config, environ, {name: value for name, value in explicit.items() if value is not None})


def _names(config: type) -> set[str]:
    names: set[str] = set()
    for name, hint in get_type_hints(config).items():
        names |= _names(cast(type, hint)) if dataclasses.is_dataclass(hint) else {PREFIX + name.upper()}
    return names


def _build(config: type[C], environ: Mapping[str, str], values: dict[str, Any]) -> C:
    for name, hint in get_type_hints(config).items():
        variable = PREFIX + name.upper()
        if name in values:
            continue
        if dataclasses.is_dataclass(hint):
            values[name] = _build(cast(type, hint), environ, {})
        elif variable in environ:
            values[name] = _parse(variable, environ[variable], hint)
    missing = [
        f"set {PREFIX}{field.name.upper()} or give {field.name}="
        for field in dataclasses.fields(cast(Any, config))
        if field.init
        and field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise BadConfiguration(f"settings are missing: {'; '.join(missing)}")
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
