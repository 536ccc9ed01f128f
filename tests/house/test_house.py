"""The promises of the house: what is imported, what is public, how long functions are, what a wheel holds."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.house.long_functions import LONGEST, long_functions

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "evergrad"
ROOMS = ("envs", "transfer", "registry", "ledger", "inference", "training", "rollouts", "evals", "loop", "service")
HEAVY = ("torch", "transformers", "fastapi", "matplotlib")


def python(code: str, *, cwd: Path | None = None) -> str:
    """Runs ``code`` in an interpreter of its own, outside of the source tree if ``cwd`` says so."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_by(imports: str) -> set[str]:
    """The heavy packages that are loaded once ``imports`` has run."""
    code = f"import json, sys\n{imports}\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    return set(json.loads(python(code).splitlines()[-1]))


# ── Imports ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_help_loads_nothing_heavy_and_answers_at_once() -> None:
    code = "from evergrad.service.cli import command; assert command(['--help']) == 0"
    assert loaded_by(code) == set()
    # Seconds of the processor, not of the wall: what else the machine does is no matter.
    before = os.times()
    subprocess.run([sys.executable, "-m", "evergrad.service.cli", "--help"], check=True, capture_output=True, timeout=60)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.5


@pytest.mark.parametrize("module", ["types", "config", *ROOMS, "service.client", "service.cli"])
def test_a_room_loads_without_torch(module: str) -> None:
    assert "torch" not in loaded_by(f"import evergrad.{module}")


def test_the_client_needs_nothing_but_the_nouns() -> None:
    code = "import sys, evergrad.service.client; print(sorted(m for m in sys.modules if m.startswith('evergrad.')))"
    assert python(code) == "['evergrad.service', 'evergrad.service.client', 'evergrad.types']"


def test_imports_keep_to_the_contract() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], capture_output=True, text=True, check=False, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_room_imports_another_rooms_private_module() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                if parts[0] == "evergrad" and len(parts) > 1 and parts[1] != room and any(p.startswith("_") for p in parts[1:]):
                    found.append(f"{path.relative_to(ROOT)}: {name}")
    assert found == []


# ── What is public ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_lists_what_others_may_use(room: str) -> None:
    module = importlib.import_module(f"evergrad.{room}")
    assert module.__doc__
    listed = list(module.__all__)
    assert listed == sorted(listed, key=lambda name: (not name.isupper(), name[0].islower(), name)), "sorted as ruff sorts it"
    assert len(set(listed)) == len(listed)
    for name in listed:
        assert getattr(module, name) is not None


def test_there_are_ten_rooms_and_nothing_deeper_than_two_folders() -> None:
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert {folder.parts[0] for folder in folders if folder.parts} == set(ROOMS)
    assert max(len(folder.parts) for folder in folders) <= 2
    assert not [path for path in PACKAGE.rglob("*") if path.stem in ("utils", "misc", "helpers", "common")]


# ── Functions ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_function_is_too_long() -> None:
    found = [line for path in PACKAGE.rglob("*.py") for line in long_functions(path.read_text(encoding="utf-8"), path.name)]
    assert found == []


def test_the_length_check_finds_a_long_function() -> None:
    source = "async def endless():\n" + "    pass\n" * LONGEST
    assert long_functions(source, "x.py") == [f"x.py:1 endless ({LONGEST + 1} lines)"]


# ── The package ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("evergrad-*.whl"))


def test_the_wheel_holds_code_data_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*") if path.is_file()}
    expected = {name for name in expected if "__pycache__" not in name}
    assert expected <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "docs", "examples"))]


def test_the_wheel_runs_outside_of_the_tree(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
import evergrad
assert evergrad.__file__.startswith({str(tmp_path)!r}), evergrad.__file__
from evergrad.ledger import PriceBook
assert PriceBook.load().unit_price("cpu_core_s")
from evergrad.service.cli import command
assert command(["env", "list"]) == 0
"""
    assert "support_desk" in python(code, cwd=tmp_path)


def test_pins_cover_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {_plain(line.split("==")[0]) for line in pins.splitlines() if "==" in line}
    assert {_plain(re.split(r"[<>=!~\[ ]", each)[0]) for each in needed} <= pinned
    assert "torch==2.13.0\n" in pins
    assert not re.search(r"://|file:|/home/|\+cpu|^-", pins, flags=re.MULTILINE)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_no_file_names_a_place_of_one_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    ).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    place = str(Path.home()) if len(str(Path.home())) > 5 else str(ROOT)
    assert [name for name in listed if place in (ROOT / name).read_text(encoding="utf-8", errors="replace")] == []
