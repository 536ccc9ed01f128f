"""From a name or a file to an environment class. A new built-in environment is one file and one line here."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

from evergrad.config import nearest
from evergrad.envs._author import line_in
from evergrad.envs._environment import EnvError, Environment

ENVIRONMENTS: dict[str, str] = {
    "support_desk": "evergrad.envs.support_desk:SupportDesk",
    "reasoning": "evergrad.envs.reasoning:Reasoning",
}


def environment_names() -> tuple[str, ...]:
    """The built-in environments."""
    return tuple(sorted(ENVIRONMENTS))


def load_environment(name_or_path: str) -> type[Environment]:
    """The environment class behind a built-in name or the path of a ``.py`` file that defines exactly one.

    Raises:
        EnvError: no such name or file, or the file raises at import, defines none or several.
    """
    if name_or_path.endswith(".py"):
        return _only_environment(_import_file(Path(name_or_path)), name_or_path)
    target = ENVIRONMENTS.get(name_or_path)
    if target is None:
        hint = f"{nearest(name_or_path, ENVIRONMENTS)} or give the path of a .py file"
        raise EnvError(f"no environment '{name_or_path}'", hint=hint)
    module_name, _, class_name = target.partition(":")
    loaded: type[Environment] = getattr(importlib.import_module(module_name), class_name)
    return loaded


def source_hash(environment: type[Environment]) -> str:
    """Over the source that defines a class, as it was when it was loaded."""
    module = sys.modules[environment.__module__]
    known = getattr(module, "__evergrad_source__", None)
    return str(known) if known else hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        hint = f"check the path; built in: {', '.join(environment_names())}"
        raise EnvError("environment file not found", where=str(path), hint=hint)
    source = path.read_bytes()
    # The name holds the content's hash: an edited file is another module, and two files of one name do not meet.
    digest = hashlib.sha256(source + str(path.resolve()).encode()).hexdigest()[:12]
    module_name = f"evergrad_environment_{path.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    module = ModuleType(module_name)
    module.__file__ = str(path)
    module.__dict__["__evergrad_source__"] = hashlib.sha256(source).hexdigest()
    sys.modules[module_name] = module
    try:
        # Not through the import system: its cached bytecode can be that of an edit within the same second.
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (EnvError, KeyboardInterrupt):
        del sys.modules[module_name]
        raise
    except BaseException as error:
        del sys.modules[module_name]
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        line = line_in(path, error)
        where = f"{path}:{line}" if line else str(path)
        raise EnvError(f"environment raised at import: {cause}", where=where, hint="fix that line and try again") from error
    return module


def _only_environment(module: ModuleType, where: str) -> type[Environment]:
    found = [
        each
        for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, Environment) and each.__module__ == module.__name__
    ]
    leaves = [each for each in found if not any(other is not each and issubclass(other, each) for other in found)]
    if len(leaves) != 1:
        names = ", ".join(each.__name__ for each in leaves) or "none"
        raise EnvError(f"expected exactly one Environment class, found {names}", where=where)
    return leaves[0]
