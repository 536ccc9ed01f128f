"""Paths in configurations follow one rule: under the current folder, or else beside the configuration file."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from evergrad.config import Config, ConfigError, load_config
from evergrad.loop.config import RunConfig
from evergrad.loop.offline import TrainConfig

RUN = 'name = "x"\nmodel = "tiny"\n\n[environment]\nname = "reasoning"\n'
TRAIN = 'name = "x"\nmodel = "tiny"\n\n[data]\nfile = "/dev/null"\n'
DISTILL = ["learn.rl.loss.name=reverse_kl", "learn.rl.advantage=constant", "learn.rl.distill.hint=true"]
KEYS = [
    (RunConfig, RUN, "environment.name", "mine.py", []),
    (RunConfig, RUN, "price_book", "mine.toml", []),
    (RunConfig, RUN, "model", "./models/mine", []),
    (RunConfig, RUN, "learn.rl.distill.model", "models/mine", DISTILL),
    (TrainConfig, TRAIN, "data.file", "mine.jsonl", []),
    (TrainConfig, TRAIN, "data.heldout_file", "data/mine.jsonl", []),
    (TrainConfig, TRAIN, "price_book", "mine.toml", []),
    (TrainConfig, TRAIN, "model", "../mine", []),
]


@pytest.mark.parametrize(("model", "text", "key", "path", "more"), KEYS, ids=[f"{each[0].__name__} {each[2]}" for each in KEYS])
def test_a_path_is_found_here_or_else_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: type[Config], text: str, key: str, path: str, more: list[str]
) -> None:
    here, there = tmp_path / "a" / "here", tmp_path / "b" / "there"
    for folder in (here, there):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    (there / "my.toml").write_text(text)

    def found() -> Any:
        config = load_config(model, there / "my.toml", [*more, f"{key}={path}"])
        return reduce(getattr, key.split("."), config)

    def put(folder: Path) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()

    with pytest.raises(ConfigError) as refusal:
        found()
    for told in (key, str(Path(path).absolute()), str((there / path).resolve()), "my.toml"):
        assert told in str(refusal.value)
    put(there)
    assert found() == str((there / path).resolve())
    put(here)
    assert Path(found()) == Path(path), "the current folder comes first, and its path stays as it was written"


def test_a_name_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "tiny").mkdir()
    (tmp_path / "my" / "reasoning").touch()
    (tmp_path / "my" / "run.toml").write_text(RUN)
    config = load_config(RunConfig, tmp_path / "my" / "run.toml")
    assert (config.model, config.environment.name) == ("tiny", "reasoning")


def test_what_a_run_has_settled_is_not_looked_for_again() -> None:
    """The configuration in a run folder names what was found when the run began."""
    data = {"name": "x", "model": "./gone", "environment": {"name": "gone.py"}, "price_book": "gone.toml"}
    assert RunConfig.model_validate(data).price_book == "gone.toml"
