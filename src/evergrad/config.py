"""Configuration: pydantic models next to what they configure, read from TOML, changed by ``--set key=value``.

A key that no model knows is an error that names the nearest one that exists.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from evergrad.types import InputError

ConfigT = TypeVar("ConfigT", bound="Config")


class ConfigError(InputError):
    """A configuration that cannot be used: names the key, the file and the nearest valid spelling."""


class Config(BaseModel):
    """Base of all configuration models: frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def load_config(model: type[ConfigT], path: Path | None, overrides: Iterable[str] = ()) -> ConfigT:
    """Reads ``path`` (TOML), applies ``a.b=value`` overrides in order, and validates.

    Values of overrides are TOML values; what does not parse as one is taken as a string.

    Raises:
        ConfigError: missing file, bad TOML, unknown key (with the nearest one), or a value that does not fit.
    """
    where = str(path) if path else "command line"
    data: dict[str, Any] = {}
    if path is not None:
        if not path.is_file():
            raise ConfigError("configuration file not found", where=where, hint="check the path; examples are in examples/")
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"not valid TOML: {error}", where=where) from error
    for override in overrides:
        _apply_override(data, override)
    return parse_config(model, data, where=where)


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """``a.b=value`` words as nested data, as :func:`load_config` reads them.

    >>> parse_overrides(["contract=v2", "limits.turns=3"])
    {'contract': 'v2', 'limits': {'turns': 3}}
    """
    data: dict[str, Any] = {}
    for override in overrides:
        _apply_override(data, override)
    return data


def parse_config(model: type[ConfigT], data: Mapping[str, Any], *, where: str) -> ConfigT:
    """Validates plain data as ``model``; errors read like those of :func:`load_config`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [_describe(model, item) for item in error.errors()]
        raise ConfigError("; ".join(lines), where=where) from error


def nearest(name: str, valid: Iterable[str]) -> str:
    """The closest valid spelling as a hint, or the whole list when none is close.

    >>> nearest("temprature", ["temperature", "seed"])
    "did you mean 'temperature'?"
    """
    options = sorted(valid)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(options)}"


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override '{override}' is not key=value", where="command line", hint="write --set section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    node: Any = data
    for name in parents:
        node = node[int(name)] if isinstance(node, list) and name.isdigit() else node.setdefault(name, {})
        if not isinstance(node, (dict, list)):
            raise ConfigError(f"'{key}' goes through '{name}', which is not a table", where="command line")
    if isinstance(node, list):
        node[int(last)] = value
    else:
        node[last] = value


def _describe(model: type[BaseModel], item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] != "extra_forbidden":
        return f"{path or 'configuration'}: {item['msg'].removeprefix('Value error, ')}"
    owner = _model_at(model, item["loc"][:-1])
    hint = nearest(str(item["loc"][-1]), owner.model_fields) if owner else ""
    return f"unknown key '{path}': {hint}".rstrip(": ")


def _model_at(model: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel] | None:
    current: type[BaseModel] | None = model
    for part in loc:
        if current is None:
            return None
        if not isinstance(part, str) or part not in current.model_fields:
            continue
        current = _inner_model(current.model_fields[part].annotation)
    return current


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _inner_model(argument)
        if found is not None:
            return found
    return None
