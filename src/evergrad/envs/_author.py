"""Code that an environment's author wrote and that runs outside of a rollout: whatever it raises is said with file and line."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from evergrad.envs._bounded import TimeLimitError, bounded_call
from evergrad.envs._environment import EnvError, Environment

T = TypeVar("T")

AUTHOR_S = 30.0
"""Seconds for what is asked outside of a rollout: a new task, a demonstration, an instance."""


def ask_author(
    environment: type[Environment], what: str, call: Callable[[], T], expected: str, *, seconds: float = AUTHOR_S
) -> T:
    """What ``call`` returns, which runs the author's method ``what``.

    Raises:
        EnvError: it raised, whatever it raised, or took more than ``seconds``; says where, and what is ``expected``.
    """
    try:
        return bounded_call(call, seconds)
    except (EnvError, KeyboardInterrupt):
        raise
    except TimeLimitError as error:
        where = place(environment, error.__cause__ or error, what)
        raise EnvError(f"{what}() {error}", where=where, hint=expected) from error
    except BaseException as error:
        cause = f"{type(error).__name__}: {error}".rstrip(": ")[:300]
        raise EnvError(f"{what}() raised {cause}", where=place(environment, error, what), hint=expected) from error


def place(environment: type[Environment], error: BaseException | None, what: str) -> str:
    """``file:line`` of the author's own code in the error's traceback, or of the method's definition."""
    try:
        path = Path(inspect.getfile(environment))
    except (TypeError, OSError):
        return environment.name
    if error is not None and (line := line_in(path, error)):
        return f"{path}:{line}"
    code = getattr(getattr(getattr(environment, what, None), "__func__", getattr(environment, what, None)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else str(path)


def line_in(path: Path, error: BaseException) -> int | None:
    """The innermost line of ``path`` that an error went through."""
    if isinstance(error, SyntaxError) and error.lineno and error.filename == str(path):
        return error.lineno
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return frames[-1].lineno if frames else None
