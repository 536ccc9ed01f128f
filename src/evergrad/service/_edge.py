"""The edge of the command line: every failure becomes one line for a person and a code for a script.

0 done, 1 a failure, 2 what was given cannot be used, 130 ended by Ctrl-C. A traceback is shown only with ``--debug``.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from evergrad.types import EvergradError

DONE, FAILURE, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

_OS_HINTS = {
    errno.ENOSPC: "free some space and run the command again",
    errno.EDQUOT: "free some of your disk quota and run the command again",
    errno.EACCES: "check the permissions, or choose another folder",
    errno.EROFS: "choose a folder on a disk that can be written",
    errno.EADDRINUSE: "stop what listens there, or choose another --port",
    errno.EMFILE: "raise the limit on open files (ulimit -n) and run the command again",
}


def guarded(call: Callable[[], Any], *, debug: bool = False, stderr: TextIO | None = None) -> int:
    """Runs ``call`` and returns the exit code; a whole number that it returns is taken as the code."""
    out = stderr or sys.stderr
    try:
        result = call()
        sys.stdout.flush()
        if result == INTERRUPTED:  # the parser has made a code of Ctrl-C
            print("interrupted", file=out)
        return result if isinstance(result, int) else DONE
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # also what is no Exception, such as a stray CancelledError: one line, as for all others
        if debug:
            traceback.print_exception(error, file=out)
        line, code = explain(error)
        print(_red("error:", out) if code != INTERRUPTED else "", line, file=out, sep=" " if code != INTERRUPTED else "")
        return code


def explain(error: BaseException) -> tuple[str, int]:
    """The line that a person reads, and the exit code.

    >>> from evergrad.types import InputError
    >>> explain(InputError("run folder not found", where="runs/x", hint="check the path"))
    ('run folder not found (runs/x). Next: check the path', 2)
    """
    from evergrad.types import EvergradError, InputError  # when there is an error to explain: --help has none

    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":
        return "interrupted", INTERRUPTED
    if isinstance(error, EvergradError):
        return one_line(str(error)), BAD_INPUT if isinstance(error, InputError) else FAILURE
    if hasattr(error, "format_message"):  # whatever the parser raises; its classes are not public
        return one_line(str(_usage(error))), BAD_INPUT
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("evergrad"):
        missing = EvergradError(
            f"the package '{error.name}' is not installed", hint="make setup, or pip install evergrad again"
        )
        return one_line(str(missing)), FAILURE
    if isinstance(error, OSError) and error.strerror:
        place = error.filename if isinstance(error.filename, str) else None
        return one_line(str(EvergradError(error.strerror, where=place, hint=_OS_HINTS.get(error.errno or 0)))), FAILURE
    unexpected = EvergradError(
        f"{type(error).__name__}: {error}".rstrip(": "), hint="run it again with --debug for the traceback"
    )
    return one_line(str(unexpected)), FAILURE


def printable(text: str) -> str:
    """``text`` with everything escaped that could steer a terminal; line breaks and tabs stay.

    >>> printable("red \\x1b[31m and \\u202e backwards")
    'red \\\\x1b[31m and \\\\u202e backwards'
    """
    return "".join(char if char in "\n\t" or char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def one_line(text: str) -> str:
    """``text`` on one line, safe for a terminal.

    >>> one_line("two\\n  lines")
    'two lines'
    """
    return printable(" ".join(text.split()))


def _usage(error: Any) -> EvergradError:
    """A parser's error in the house's words: what was wrong, and the nearest thing that exists."""
    from evergrad.config import nearest
    from evergrad.types import InputError

    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context else "evergrad"
    option = getattr(error, "option_name", None)
    if option and "No such option" in error.message:
        known = (
            [name for parameter in context.command.params for name in parameter.opts if name.startswith("-")] if context else []
        )
        return InputError(f"unknown option '{option}' of '{command}'", hint=nearest(option, [*known, "--help"]))
    if error.message.startswith("No such command"):
        name = error.message.split("'")[1]
        return InputError(f"unknown command '{command} {name}'", hint=nearest(name, context.command.commands))
    message = error.format_message().rstrip(".")
    return InputError(message[:1].lower() + message[1:], hint=f"'{command} --help' says what it takes")


def _red(text: str, out: TextIO) -> str:
    return f"\x1b[1;31m{text}\x1b[0m" if out.isatty() and "NO_COLOR" not in os.environ else text
