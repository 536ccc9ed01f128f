"""The run folder: its lock, its resolved configuration, and the state from which a run goes on.

Everything in it is whole or absent: files are written beside their place and renamed.
"""

from __future__ import annotations

import copy
import dataclasses
import fcntl
import json
import os
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, ClassVar, TextIO

from pydantic import ConfigDict, TypeAdapter, ValidationError

from evergrad.config import ConfigError
from evergrad.loop.config import RunConfig
from evergrad.types import EvergradError

WAITING = "waiting_groups.jsonl"
"""In the folder of a checkpoint: the groups that had been rolled out and not trained."""
_KEEP_CHECKPOINTS = 2


class Stage(StrEnum):
    """Where a cycle stands; each stage can be entered again after a crash."""

    DECIDE = "decide"
    WARM_START = "warm_start"
    LEARN = "learn"
    MERGE = "merge"
    MEASURE = "measure"
    RELEASE = "release"
    WATCH = "watch"
    DONE = "done"


@dataclass
class LoopState:
    """What a run knows about itself, saved at every change of stage and with every checkpoint."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    cycle: int = 1
    stage: Stage = Stage.DECIDE
    step: int = 0
    """Optimizer steps done in this stage."""
    group: int = 0
    """Groups of this cycle that have begun; the next one is planned from it."""
    live_tasks: int = 0
    """Number of the last live task that this cycle's RL may draw; those that come later wait for the next cycle."""
    rl_step: int = 0
    """RL steps of the whole run; names the rollout files."""
    slices: dict[str, list[float]] = field(default_factory=dict)
    """Slice to discounted successes, failures and tokens of this cycle's rollouts; for ``rl.tasks = "informative"``."""
    slices_taken: dict[str, int] = field(default_factory=dict)
    """Slice to groups of this cycle that took a task of it."""
    policy_version: int = 0
    incumbent: str | None = None
    """What ``production`` served when this cycle's candidate was measured."""
    trigger: str = "first start"
    arm: str | None = None
    """Which of the configured ways this cycle tries; ``None`` for the first cycle, and for trials."""
    base_model: str = ""
    """What this cycle trains is on; empty for the run's ``model``. ``checkpoint`` is of it."""
    system_prompt: str = ""
    """Of this cycle's candidate: the one that is tried, or else that of the version that it is trained from."""
    merge: dict[str, Any] = field(default_factory=dict)
    """What this cycle merges, where it does: the ids ``parent`` and ``other``, and the ``share`` of the way between them."""
    trigger_kinds: list[str] = field(default_factory=list)
    """By name, what set this cycle off."""
    deployed: dict[str, Any] = field(default_factory=dict)
    """Settings of the environment as the world runs it now."""
    environments: dict[str, str] = field(default_factory=dict)
    """Suite to fingerprint of the environment's file and settings, as the run last saw them."""
    known: list[dict[str, Any]] = field(default_factory=list)
    """Earlier deployed settings, oldest first: what must not be forgotten."""
    checkpoint: str | None = None
    """Folder name under ``checkpoints/`` that belongs to this state."""
    serving: str | None = None
    """What this run last put behind ``production``, or found there: another version there was moved by hand."""
    customers: dict[str, Any] = field(default_factory=dict)
    """Settings by which the tasks of customers differ from ``deployed``."""
    live: dict[str, Any] = field(default_factory=dict)
    """``version_id``, ``suite``, ``successes`` and ``requests`` of all live traffic that this version has had on this suite."""
    new_failures: int = 0
    """Verified failures of live traffic in this cycle."""
    customers_failed: list[str] = field(default_factory=list)
    """Ids of stored conversations that were counted among the failures of a cycle."""
    customers_seen: int = 0
    """Number of the last stored conversation that was looked at for drift."""
    watch_checks: int = 0
    changes_applied: int = 0
    audited: list[list[float]] = field(default_factory=list)
    """Reward and gold of the rollouts of this cycle that were judged by both."""
    distrusted: dict[str, dict[str, str]] = field(default_factory=dict)
    """Suite to ``fingerprint`` and ``why`` of a verifier that a gold audit convicted."""
    wall_s: float = 0.0
    """Seconds of earlier sessions."""
    cycle_started: dict[str, float | None] = field(default_factory=dict)
    """``cycle``, ``usd`` and ``wall_s`` when it began; ``usd`` is ``None`` when something was unpriced by then."""
    cycles: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    """How each stage ended, and on what evidence; see ``decisions.py``."""


class RunFolder:
    """Opens ``path`` for one process, new or to go on.

    Raises:
        EvergradError: another process runs in it, or it holds a run of another configuration.
    """

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        self._lock = lock_folder(path)
        self._check_config(config)

    def close(self) -> None:
        self._lock.close()

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def versions(self) -> Path:
        return self.path / "versions"

    def prune_checkpoints(self, newest: str) -> None:
        """Removes all but the last two, of which ``newest`` is one whatever the clock says."""
        others = sorted(
            (each for each in self.checkpoints.iterdir() if each.name != newest), key=lambda each: each.stat().st_mtime
        )
        for old in others[: 1 - _KEEP_CHECKPOINTS]:
            shutil.rmtree(old, ignore_errors=True)

    def load_state(self, initial: LoopState) -> LoopState:
        """The saved state, or ``initial`` in a new folder.

        Raises:
            EvergradError: the file is no state of a run.
        """
        path = self.path / "state.json"
        return read_state(path) if path.exists() else initial

    def save_state(self, state: LoopState) -> None:
        # Not ``asdict``, which copies all of it once more; it holds JSON values alone.
        write_json(self.path / "state.json", {each.name: getattr(state, each.name) for each in dataclasses.fields(state)})

    def save_wall_time(self, wall_s: float) -> None:
        """Puts the seconds up to now into the state as it was last saved, and changes nothing else of it."""
        if (self.path / "state.json").exists():
            state = self.load_state(LoopState())
            state.wall_s = wall_s
            self.save_state(state)

    def write_metrics(self, records: Sequence[Mapping[str, Any]]) -> None:
        """``metrics.jsonl`` as the state knows it: without the steps that a crash took back."""
        write_text(self.path / "metrics.jsonl", "".join(_metrics_line(record) for record in records))

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """One line to ``metrics.jsonl``."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(_metrics_line(record))

    def _check_config(self, config: RunConfig) -> None:
        resolved = config.model_dump(mode="json", exclude_none=True)
        path = self.path / "config.toml"
        text = _resolved_text(resolved)
        if not path.exists():
            write_text(path, text)
            return
        try:
            before = tomllib.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise EvergradError(f"not valid TOML: {error}", where=str(path), hint=_ANEW) from error
        # A budget may grow when a run goes on, and figures may go elsewhere; everything else is the recipe, and stays.
        free = {key: resolved.get(key) for key in ("budget", "sinks")}
        before = {**before, **free}
        changed = differences(before, resolved)
        if not changed:
            write_text(path, text)
            return
        _require_same_recipe(before, resolved, changed, self.path)
        # The file keeps the keys that it has, for the certificates so far have its hash.
        write_text(path, _resolved_text({key: value for key, value in before.items() if value is not None}))


_ANEW = "put back a copy of this file, or choose another --run-dir to start anew"
_OTHER = "go on with the version that wrote it, or choose another --run-dir to start anew"


def _require_same_recipe(before: Mapping[str, Any], now: Mapping[str, Any], changed: set[str], path: Path) -> None:
    """A key that an earlier version did not know is no change while it has its default.

    Args:
        before: The resolved configuration of the folder.
        now: That of this run.
        changed: Dotted names of what differs between them.

    Raises:
        EvergradError: the folder holds another recipe, or one that only another version of Evergrad can go on with.
    """
    defaults, unknown = _read_today(before)
    different = changed & (differences(defaults, now) | unknown)
    new = {name for name in different - unknown if not _has(before, name) and _has(defaults, name)}
    if different - new - unknown:
        raise EvergradError(
            f"this folder holds a run of another configuration: {', '.join(sorted(different))} changed",
            where=str(path),
            hint="choose another --run-dir (or remove the folder) to start anew, or undo the change to go on",
        )
    if different:
        told = [
            f"{who} not know {', '.join(sorted(names))}"
            for who, names in (("it does", new), ("this one does", unknown))
            if names
        ]
        raise EvergradError(
            f"this folder was made by another version of Evergrad ({'; '.join(told)})",
            where=str(path),
            hint="use that version, or choose another --run-dir",
        )


def _read_today(before: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """A resolved configuration with today's defaults for what it lacks, and the dotted names that are unknown today."""
    data, unknown = copy.deepcopy(dict(before)), set[str]()
    try:
        RunConfig.model_validate(data)
    except ValidationError as error:
        errors = error.errors()
        if any(each["type"] != "extra_forbidden" for each in errors):
            return data, unknown
        for each in errors:
            *parents, last = each["loc"]
            reduce(getitem, parents, data).pop(last)  # type: ignore[arg-type]
            unknown.add(".".join(map(str, each["loc"])))
    try:
        return RunConfig.model_validate(data).model_dump(mode="json", exclude_none=True), unknown
    except ValidationError:
        return data, unknown


def _has(data: Any, name: str) -> bool:
    """
    >>> _has({"learn": {"lr": 1.0}}, "learn.lr"), _has({"learn": {"lr": 1.0}}, "learn.rl.steps")
    (True, False)
    """
    for key in name.split("."):
        if not isinstance(data, Mapping) or key not in data:
            return False
        data = data[key]
    return True


def read_state(path: Path) -> LoopState:
    """The state in a file ``state.json``.

    Raises:
        EvergradError: the file is no state of a run.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or not {"cycle", "stage"} <= data.keys():
            raise EvergradError("the saved state cannot be read: no cycle and stage in it", where=str(path), hint=_ANEW)
        if unknown := sorted(data.keys() - LoopState.__dataclass_fields__.keys()):
            what = f"the saved state cannot be read: another version of Evergrad wrote it, which knew '{unknown[0]}'"
            raise EvergradError(what, where=str(path), hint=_OTHER)
        return TypeAdapter(LoopState).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        what = str(error)
    raise EvergradError(f"the saved state cannot be read: {what}", where=str(path), hint=_ANEW)


def _resolved_text(resolved: Mapping[str, Any]) -> str:
    """The configuration as TOML that reads back as what it was.

    Raises:
        ConfigError: TOML cannot hold it.
    """
    text = to_toml(resolved)
    try:
        text.encode("utf-8")
        held = tomllib.loads(text) == resolved
    except ValueError:
        held = False
    if not held:
        hint = "write its keys and values in plain characters, without null"
        raise ConfigError("the configuration cannot be written as TOML", where="config.toml", hint=hint)
    return text


def lock_folder(path: Path) -> TextIO:
    """Makes ``path`` if need be and takes it for this process, until the returned file is closed.

    Raises:
        EvergradError: another process has it.
    """
    path.mkdir(parents=True, exist_ok=True)
    lock = (path / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise EvergradError(
            "another process is running in this folder",
            where=str(path),
            hint="wait for it, stop it, or choose another --run-dir",
        ) from None
    return lock


def _metrics_line(record: Mapping[str, Any]) -> str:
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def write_json(path: Path, data: Any) -> None:
    """Strict JSON, whole or absent; non-finite numbers become null."""
    write_text(path, json.dumps(_finite(data), allow_nan=False, indent=1))


def write_text(path: Path, text: str) -> None:
    """Writes beside ``path``, flushes to disk, renames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def to_toml(data: Mapping[str, Any], prefix: str = "") -> str:
    """Plain nested data as TOML; tables after values, lists of tables as ``[[…]]``."""
    lines = [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in data.items() if not _is_table(value)]
    blocks = ["\n".join(lines)] if lines else []
    for key, value in data.items():
        if not _is_table(value):
            continue
        name = f"{prefix}{_toml_key(key)}"
        if isinstance(value, Mapping):
            blocks.append(f"[{name}]\n{to_toml(value, name + '.')}")
        else:
            blocks.extend(f"[[{name}]]\n{to_toml(item, name + '.')}" for item in value)
    return "\n\n".join(block.rstrip() for block in blocks) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
    )


def _toml_key(key: str) -> str:
    """
    >>> _toml_key("contract"), _toml_key("letters@v1")
    ('contract', '"letters@v1"')
    """
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml_key(key)} = {_toml_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def differences(before: Any, now: Any, path: str = "") -> set[str]:
    """Dotted names of what differs; empty, absent and zero are alike, as TOML leaves them out."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = {*before, *now}
        return set().union(*(differences(before.get(k), now.get(k), f"{path}.{k}".lstrip(".")) for k in keys))
    return set() if before == now or (not before and not now) else {path}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
