"""Configuration: pydantic models next to what they configure, read from TOML, changed by ``--set key=value``.

A key that no model knows is an error that names the nearest one that exists.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from evergrad.types import InputError

ConfigT = TypeVar("ConfigT", bound="Config")

_FOLDER = "folder of the configuration file"
DEEPEST = 32
"""Levels of tables and lists in each other; no configuration needs more, and recursion ends somewhere."""


class ConfigError(InputError):
    """A configuration that cannot be used: names the key, the file and the nearest valid spelling.

    ``key`` is the dotted name of the first key that does not fit, where it is one that does not.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None, key: str | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.key = key


class Config(BaseModel):
    """Base of all configuration models: frozen, and strict about unknown keys; numbers are finite, and true is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name:
            types = set(_leaves(cls.model_fields[info.field_name].annotation))
            if types & {int, float} and not types & {bool, Any}:
                raise ValueError(f"{str(value).lower()} is not a number")
        return value


def load_config(model: type[ConfigT], path: Path | None, overrides: Iterable[str] = ()) -> ConfigT:
    """Reads ``path`` (TOML), applies ``a.b=value`` overrides in order, and validates.

    Raises:
        ConfigError: missing file, bad TOML, unknown key (with the nearest one), or a value that does not fit.
    """
    where = str(path) if path else "command line"
    return parse_config(model, read_config(path, overrides), where=where, folder=path.parent if path else None)


def read_config(path: Path | None, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The plain data of ``path`` (TOML) with ``a.b=value`` overrides in order, as no model has seen it.

    Values of overrides are TOML values; what does not parse as one is taken as a string.

    Raises:
        ConfigError: missing file, bad TOML, or an override that goes nowhere.
    """
    where = str(path) if path else "command line"
    data: dict[str, Any] = {}
    if path is not None:
        if not path.is_file():
            raise ConfigError("configuration file not found", where=where, hint="check the path; examples are in examples/")
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"not valid TOML: {error}", where=where) from error
        except RecursionError:
            raise ConfigError(f"nested more than {DEEPEST} levels deep", where=where) from None
    for override in overrides:
        _apply_override(data, override)
    return data


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """``a.b=value`` words as nested data, as :func:`load_config` reads them.

    >>> parse_overrides(["contract=v2", "limits.turns=3"])
    {'contract': 'v2', 'limits': {'turns': 3}}
    """
    return read_config(None, overrides)


def parse_config(model: type[ConfigT], data: Mapping[str, Any], *, where: str, folder: Path | None = None) -> ConfigT:
    """Validates plain data as ``model``; errors read like those of :func:`load_config`.

    Args:
        folder: That of the configuration file, where :func:`found_path` looks; without one, paths are left as they are.
    """
    _require_plain(data, where)
    try:
        return model.model_validate(data, context={_FOLDER: folder})
    except ValidationError as error:
        errors = error.errors()
        raise ConfigError(
            "; ".join(_describe(model, item) for item in errors), where=where, key=_key(data, errors[0])
        ) from error


def found_path(value: str | None, info: ValidationInfo) -> str | None:
    """The one rule for paths in a configuration: under the current folder, or else beside the configuration file.

    For a field validator of every key that holds the path of a file or folder that must be there.

    Raises:
        ValueError: it is in neither place; names both.
    """
    folder = (info.context or {}).get(_FOLDER)
    if value is None or folder is None:
        return value
    path = Path(value).expanduser()
    beside = (folder / path).resolve()
    if path.exists():
        return str(path) if value.startswith("~") else value
    if beside.exists():
        return str(beside)
    if path.is_absolute():
        raise ValueError(f"not found: {path}; check the path")
    tried = f"neither {path.absolute()} nor {beside}"
    raise ValueError(f"not found: {tried}; give it relative to the current folder or to the configuration file")


def found_model(value: str | None, info: ValidationInfo) -> str | None:
    """:func:`found_path` for what may be a name instead: a word without a slash, which its owner knows or does not."""
    path_like = value is not None and (os.sep in value or value.startswith((".", "~")))
    return found_path(value, info) if path_like else value


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
    except ValueError:
        value = text
    except RecursionError:
        raise ConfigError(f"the value of '{key}' is nested more than {DEEPEST} levels deep", where="command line") from None
    *parents, last = key.strip().split(".")
    node: Any = data
    for name in parents:
        node = node[_index(node, name, key)] if isinstance(node, list) else node.setdefault(name, {})
        if not isinstance(node, (dict, list)):
            raise ConfigError(f"'{key}' goes through '{name}', which is not a table", where="command line")
    node[_index(node, last, key) if isinstance(node, list) else last] = value


def _index(items: list[Any], name: str, key: str) -> int:
    """``name`` as the position of an entry that there is."""
    if name.isascii() and name.isdigit() and len(name) < 10 and int(name) < len(items):
        return int(name)
    hint = f"its entries are 0 to {len(items) - 1}" if items else "it is empty"
    raise ConfigError(f"'{key}' goes through a list, which has no entry '{name}'", where="command line", hint=hint)


def _require_plain(value: Any, where: str, path: str = "", depth: int = 0) -> None:
    """
    Raises:
        ConfigError: a number that is not finite, or tables within tables without end.
    """
    if depth > DEEPEST:
        raise ConfigError(f"nested more than {DEEPEST} levels deep", where=where)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: {value} is not a finite number", where=where, key=path)
    if isinstance(value, (Mapping, list)) and not _are_finite(value):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _require_plain(item, where, f"{path}.{key}".lstrip("."), depth + 1)


def _are_finite(values: Mapping[str, Any] | list[Any]) -> bool:
    """Whether this is a list of numbers and nothing is wrong with any of them; a batch has hundreds of thousands."""
    kinds = set(map(type, values)) if isinstance(values, list) else set()
    return kinds == {int} or (kinds == {float} and all(map(math.isfinite, values)))


def _leaves(annotation: Any) -> Iterable[Any]:
    """The types that an annotation is made of.

    >>> set(_leaves(int | None)) == {int, type(None)}
    True
    """
    arguments = get_args(annotation)
    return [leaf for argument in arguments for leaf in _leaves(argument)] if arguments else [_hashable(annotation)]


def _hashable(annotation: Any) -> Any:
    return annotation if isinstance(annotation, type) or annotation is Any else type(annotation)


def _describe(model: type[BaseModel], item: Any) -> str:
    path, kind = ".".join(str(part) for part in item["loc"]), item["type"]
    if kind == "missing":
        return f"{path} is missing"
    if kind == "model_type" and (wanted := _model_at(model, item["loc"])):
        return f"{path or 'configuration'}: {item['input']!r} stands where keys belong: {', '.join(wanted.model_fields)}"
    if kind != "extra_forbidden":
        given = f", not {item['input']!r}" if kind == "literal_error" else ""
        return f"{path or 'configuration'}: {item['msg'].removeprefix('Value error, ')}{given}"
    owner = _model_at(model, item["loc"][:-1])
    hint = nearest(str(item["loc"][-1]), owner.model_fields) if owner else ""
    return f"unknown key '{path}': {hint}".rstrip(": ")


def _key(data: Any, item: Any) -> str | None:
    """Where in ``data`` an error of pydantic's is; its own place may go on into the members of a union.

    >>> _key({"stop": 7}, {"loc": ("stop", "str"), "type": "string_type"}), _key({}, {"loc": ("model",), "type": "missing"})
    ('stop', 'model')
    """
    path: list[str] = []
    for part in item["loc"]:
        inside = part in data if isinstance(data, Mapping) else isinstance(data, list) and part in range(len(data))
        if not inside and not (isinstance(data, Mapping) and item["type"] == "missing"):
            break
        path.append(str(part))
        data = data[part] if inside else None
    return ".".join(path) or None


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
