"""Writes the reference pages from the code: ``python docs/generate.py``. With ``--check`` it only says which are stale."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

REFERENCE = Path(__file__).parent / "reference"
_NOTE = "<!-- Made by `make docs` from the code; a change here is lost. -->\n\n"


def pages() -> dict[str, str]:
    """File name to content of each generated page."""
    return {"cli.md": cli_page(), "config.md": config_page(), "train.md": train_page()}


# ── The command line ─────────────────────────────────────────────────────────────────────────────────────────────────────


def cli_page() -> str:
    """Every command with its arguments and options."""
    import typer

    from evergrad.service.cli import app

    parts = [
        f"# The command line\n\n{_NOTE}{app.info.help}\n",
        "Exit codes: 0 done, 1 a failure, 2 what was given cannot be used, 130 ended by Ctrl-C. What is refused is named on "
        "one line of standard error, with the next step; `--debug`, anywhere on the line, adds the traceback.\n",
    ]
    parts += [_command_section(path, command) for path, command in _commands("evergrad", typer.main.get_command(app))]
    return "\n".join(parts)


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
    for name, child in (children or {}).items():
        yield from _commands(f"{path} {name}", child)


def _command_section(path: str, command: Any) -> str:
    shown = [each for each in command.params if "--help" not in each.opts]
    usage = " ".join([path, *(_usage(each) for each in shown)])
    rows = [f"| `{_names(each)}` | {_cell(each.help or '')} | {_default(each)} |" for each in shown]
    table = "\n".join(["| | | default |", "|---|---|---|", *rows]) + "\n" if rows else ""
    return f"## {path}\n\n{inspect.cleandoc(command.help or '')}\n\n```\n{usage}\n```\n\n{table}"


def _is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def _usage(parameter: Any) -> str:
    if _is_argument(parameter):
        return str(parameter.metavar or parameter.name.upper())
    return f"[{_names(parameter)}]" + ("…" if parameter.multiple else "")


def _names(parameter: Any) -> str:
    if _is_argument(parameter):
        return str(parameter.metavar or parameter.name.upper())
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    return f"{', '.join(parameter.opts)}{value}"


def _default(parameter: Any) -> str:
    value = parameter.default
    return "" if value is None or value is False or parameter.required or value == "" else f"`{value}`"


# ── Configuration ────────────────────────────────────────────────────────────────────────────────────────────────────────


def config_page() -> str:
    """Every key of a run's configuration, then the settings of the built-in environments and the options of losses."""
    from evergrad.envs import environment_names, load_environment
    from evergrad.loop.config import RunConfig
    from evergrad.training.losses import LOSSES

    parts = [
        f"# Configuration of a run\n\n{_NOTE}A run is one TOML file: `evergrad run my.toml`. Each key can be changed on the "
        "command line: `--set learn.rl.steps=20`. An unknown key is an error that names the nearest one. A path is looked for "
        "under the current folder, and else beside the configuration file. The run folder keeps the resolved result as "
        "`config.toml`.\n",
        *_model_sections(RunConfig, "", set()),
        "# Settings of the built-in environments\n\nThey stand under `[environment.settings]`.\n",
    ]
    for name in environment_names():
        settings = load_environment(name).Config
        parts.append(f"## {name}\n\n{_summary(load_environment(name))}\n\n{_table(settings)}")
    parts += loss_sections(LOSSES)
    return "\n".join(parts)


def train_page() -> str:
    """Every key of a training's configuration, then the options of sinks."""
    from evergrad.loop.offline import TrainConfig
    from evergrad.training.sinks import SINKS

    parts = [
        f"# Configuration of a training\n\n{_NOTE}A training is one TOML file: `evergrad train my.toml`. Each key "
        "can be changed on the command line: `--set schedule.lr=1e-4`. An unknown key is an error that names the nearest one. "
        "Paths follow [the rule of a run](config.md). The options of the methods' losses stand with [those of the "
        "loop](config.md).\n",
        *_model_sections(TrainConfig, "", set()),
        "# Options of the sinks\n\nThey stand under `options` of `[[sinks]]`, here and in a run of the loop.\n",
    ]
    for name, sink in SINKS.items():
        need = f" Needs `pip install {sink.package}`." if sink.package else ""
        parts.append(f"## {name}\n\n{_summary(sink)}{need}\n\n{_table(sink)}")
    return "\n".join(parts)


def loss_sections(losses: Mapping[str, type[BaseModel]]) -> list[str]:
    """What many losses share, once; then of each loss what is its own, or has another default."""
    from evergrad.training.losses.pairs import PairLoss
    from evergrad.training.losses.policy import Correction, PolicyLoss

    parts = [
        "# Options of the losses\n\nThey stand under `options` of `[learn.rl.loss]`.\n",
        f"## All losses of reinforcement learning\n\n{_summary(PolicyLoss)}\n\n{_table(PolicyLoss)}",
        f"### correction = {{ … }}\n\n{_summary(Correction)}\n\n{_table(Correction)}",
        f"## All losses of preference pairs\n\n{_summary(PairLoss)}\n\n{_table(PairLoss)}",
    ]
    for name, loss in losses.items():
        shared = next((parent for parent in (PolicyLoss, PairLoss) if issubclass(loss, parent)), None)
        own = _table(loss, without=_rows(shared) if shared else [])
        instead = f"No more than [those it shares](#{_anchor(shared)}).\n" if shared else "It has none.\n"
        parts.append(f"## {name}\n\n{_summary(loss)}\n\n{own or instead}")
    return parts


def _anchor(shared: type[BaseModel]) -> str:
    return f"all-losses-of-{'preference-pairs' if shared.__name__ == 'PairLoss' else 'reinforcement-learning'}"


def _model_sections(model: type[BaseModel], path: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    """The model's own keys, then its tables in order; a table that was described before is only named."""
    if model in seen:
        yield f"## {_heading(path)}\n\nThe same keys as [{model.__name__}](#{model.__name__.lower()}).\n"
        return
    seen.add(model)
    title = f"## {_heading(path)}" if path else "## Top level"
    yield f"{title}\n\n<a id='{model.__name__.lower()}'></a>{_summary(model)}\n\n{_table(model)}"
    for name, field in model.model_fields.items():
        inner = _table_of(field.annotation)
        if inner is not None:
            many = "[]" if typing.get_origin(field.annotation) in (list, tuple) else ""
            yield from _model_sections(inner, f"{path}.{name}{many}".lstrip("."), seen)


def _heading(path: str) -> str:
    """How TOML writes the table: ``[a.b]``, or ``[[a.b]]`` for each of many."""
    return f"[[{path.removesuffix('[]')}]]" if path.endswith("[]") else f"[{path}]"


def _table(model: type[BaseModel], without: Sequence[str] = ()) -> str:
    rows = [row for row in _rows(model) if row not in without]
    return "\n".join(["| key | type | default | |", "|---|---|---|---|", *rows]) + "\n" if rows else ""


def _rows(model: type[BaseModel]) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        if _table_of(field.annotation) is not None:
            continue
        default = "required" if field.is_required() else _toml(field.get_default(call_default_factory=True))
        rows.append(f"| `{name}` | {_cell(_type(field.annotation))} | {default} | {_cell(field.description or '')} |")
    return rows


def _table_of(annotation: Any) -> type[BaseModel] | None:
    """The configuration model inside an annotation: itself, optional, or the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        found = _table_of(inner)
        if found is not None:
            return found
    return None


def _type(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(inner) for inner in typing.get_args(annotation) if inner is not type(None))
    if origin is typing.Annotated:
        return _type(typing.get_args(annotation)[0])
    if origin in (list, tuple):
        inner = [each for each in typing.get_args(annotation) if each is not Ellipsis]
        return f"list of {_type(inner[0])}" if len(set(inner)) == 1 else "list"
    if origin is dict or annotation is dict:
        return "table"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(
        getattr(annotation, "__name__", ""), str(annotation)
    )


def _toml(value: Any) -> str:
    if value is None or value is PydanticUndefined:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (str, int, float)):
        return f"`{value!r}`".replace("'", '"')
    if isinstance(value, (list, tuple)):
        return "`[" + ", ".join(_toml(item).strip("`") for item in value) + "]`"
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{key} = {_toml(item).strip('`')}" for key, item in value.items()) + "}`"
    return f"`{value}`"


def _summary(described: Any) -> str:
    return _cell((inspect.getdoc(described) or "").split("\n\n")[0])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


def main(arguments: list[str]) -> int:
    stale = []
    for name, text in pages().items():
        path = REFERENCE / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            REFERENCE.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if "--check" not in arguments:
        print(f"docs/reference: {', '.join(stale) or 'nothing'} written, the rest was current")
        return 0
    if stale:
        print(f"out of date: {', '.join(stale)}. Next: make docs", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
