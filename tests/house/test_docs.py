"""Docs say what is there: generated pages are current, and commands, links, keys and imports in them exist."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = ("cli.md", "config.md", "train.md")
WRITTEN = [page for page in PAGES if page.name not in GENERATED]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language; ``""`` for those without one."""
    text = page.read_text(encoding="utf-8")
    # All fences are matched and one language kept: the end of one block would pass for the beginning of another.
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def shell_lines(page: Path) -> list[str]:
    """Lines of a page that a reader may type."""
    found = [
        line for language in ("", "sh", "bash", "console") for block in blocks(page, language) for line in block.splitlines()
    ]
    found += re.findall(r"`((?:make|evergrad|\.venv/bin/evergrad) [^`\n]+)`", page.read_text(encoding="utf-8"))
    return [line.strip().removeprefix("$ ") for line in found]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_current(generate: ModuleType, name: str) -> None:
    written = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert written == generate.pages()[name], "next: make docs"


def test_generated_pages_name_every_command_and_key(generate: ModuleType) -> None:
    pages = generate.pages()
    assert "## evergrad model rollback" in pages["cli.md"]
    for key in ("max_off_policy_steps", "demonstrations", "group_size", "alpha", "difficulty"):
        assert f"| `{key}` |" in pages["config.md"]
    assert not re.search(r"PydanticUndefined|<class|typing\.|evergrad\.\w+\.", pages["config.md"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name_of(page)}: {target}"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    for line in shell_lines(page):
        match = re.match(r"(?:\w+=\S+ )*make ([a-z-]+(?: [a-z-]+)*)", line)
        if match:
            assert set(match.group(1).split()) <= targets, f"{name_of(page)}: {line}"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_commands_and_their_options_exist(page: Path) -> None:
    from evergrad.service.cli import app

    for line in shell_lines(page):
        words = shlex.split(line, comments=True) if re.match(r"(\S*/)?evergrad ", line) else []
        if words:
            _check_command(typer.main.get_command(app), words[1:], f"{name_of(page)}: {line}")


def _check_command(command: Any, words: list[str], where: str) -> None:
    """Parses the line as the shell would hand it over, and runs nothing."""
    while words and getattr(command, "commands", None) and not words[0].startswith("-"):
        assert words[0] in command.commands, where
        command, words = command.commands[words[0]], words[1:]
    try:
        command.make_context("evergrad", [word for word in words if word not in ("--debug", "--help")])
    except Exception as error:
        if type(error).__name__ == "MissingParameter":
            return  # prose names commands without their arguments
        raise AssertionError(f"{where}: {getattr(error, 'message', error)}") from error


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_overrides_fit_the_configuration_that_they_change(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of commands on examples; keys that need each other, such as ``eval.n`` and ``gate.min_n``, are all there."""
    from evergrad.config import load_config
    from evergrad.loop.config import RunConfig
    from evergrad.loop.offline import TrainConfig

    monkeypatch.chdir(ROOT)
    for line in shell_lines(page):
        match = re.match(r"(?:\S*/)?evergrad (run|train) (examples/\S+\.toml)( .*)?$", line)
        if match:
            words = shlex.split(match[3] or "", comments=True)
            overrides = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
            load_config(RunConfig if match[1] == "run" else TrainConfig, ROOT / match[2], overrides)


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_python_blocks_import_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, name_of(page), "exec")
        for module, names in re.findall(r"^from (evergrad[\w.]*) import ([\w, ]+)$", block, flags=re.MULTILINE):
            for name in names.split(","):
                assert hasattr(importlib.import_module(module), name.strip()), f"{name_of(page)}: {module}.{name}"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_configuration_in_docs_is_valid(page: Path) -> None:
    from evergrad.config import parse_config
    from evergrad.ledger import OtherModels, PriceBook
    from evergrad.loop.config import RunConfig
    from evergrad.loop.offline import TrainConfig

    files = {"data": TrainConfig, "prices": PriceBook, "models": OtherModels}
    for block in blocks(page, "toml"):
        data = tomllib.loads(block)
        kind = next((files[key] for key in files if key in data), None)
        if kind is not None:
            parse_config(kind, data, where=name_of(page))
        else:
            parse_config(RunConfig, {"environment": {"name": "support_desk"}, **data}, where=name_of(page))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_example_configurations_are_valid(path: Path) -> None:
    from evergrad.config import load_config
    from evergrad.envs import Taskset
    from evergrad.loop.config import RunConfig

    config = load_config(RunConfig, path)
    assert Taskset(config.environment.name, config.environment.settings).tasks("train", 1)


@pytest.mark.parametrize(("name", "language"), [("my_environment.py", "python"), ("my_environment.toml", "toml")])
def test_the_tutorial_shows_the_example_as_it_is(name: str, language: str) -> None:
    page = ROOT / "docs" / "tutorials" / "your-own-environment.md"
    assert (ROOT / "examples" / name).read_text(encoding="utf-8") in blocks(page, language)


def test_the_commands_of_training_on_data_do_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evergrad.service.cli import command

    page = ROOT / "docs" / "how-to" / "train-on-your-data.md"
    assert (ROOT / "examples" / "train" / "sft.toml").read_text(encoding="utf-8").endswith(blocks(page, "toml")[0])
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    lines = [line for line in shell_lines(page) if re.match("evergrad (data|train) .*examples/", line)]
    assert len(lines) == 5
    for line in lines:
        assert command(shlex.split(line)[1:]) == 0, line
    for run in ("sft", "dpo"):
        assert (tmp_path / "runs" / run / "final" / "adapter_model.safetensors").is_file()


def test_every_method_of_the_table_is_a_valid_configuration() -> None:
    from evergrad.config import parse_config
    from evergrad.loop.config import RunConfig

    text = (ROOT / "docs" / "how-to" / "choose-a-method.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (.*) \|$", text, flags=re.MULTILINE)[1:]
    assert len(rows) >= 10
    for method, takes in rows:
        keys = "\n".join(each for each in re.findall(r"`([^`]+)`", takes) if "=" in each)
        data: dict[str, Any] = {"environment": {"name": "support_desk"}, "learn": {"rl": tomllib.loads(keys)}}
        if "[critic]" in takes:
            data["critic"] = {}
        if "several updates" in takes:
            data["learn"]["rl"]["updates"] = {"epochs": 2, "mini_batches": 4}
        parse_config(RunConfig, data, where=method)
