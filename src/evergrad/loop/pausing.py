"""A pause: asked for by a file in the run folder, taken at the next safe point, kept until somebody lifts it.

A safe point is a place where the saved state says all: between stages, after each checkpoint, between two evaluations or two
checks of traffic. Taking the pause there ends the controller and its workers, as a kill would, so a paused run costs nothing
and goes on as a killed one does.
"""

from __future__ import annotations

import datetime
import fcntl
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from evergrad.loop._folder import write_json
from evergrad.types import EvergradError


@dataclass(frozen=True, slots=True)
class Pause:
    """One pause, asked for and perhaps not taken yet."""

    at: str
    """UTC, ISO 8601: when it was asked for."""
    reason: str


class Paused(Exception):
    """Raised at a safe point of a run that is to pause; no error, for the run does what it was asked to."""

    def __init__(self, pause: Pause) -> None:
        super().__init__(pause.reason)
        self.pause = pause


def request_pause(run: Path, reason: str) -> Pause:
    """Asks for a pause; one that is asked for already stays as it is."""
    pause = pause_of(run)
    if pause is None:
        pause = Pause(datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), reason)
        write_json(_path(run), asdict(pause))
    return pause


def lift_pause(run: Path) -> Pause | None:
    """Takes the pause back, and returns it; ``None`` where there was none."""
    pause = pause_of(run)
    _path(run).unlink(missing_ok=True)
    return pause


def pause_of(run: Path) -> Pause | None:
    """The pause that was asked for, taken or not.

    Raises:
        EvergradError: the file is broken.
    """
    try:
        return Pause(**json.loads(_path(run).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        hint = "remove it, or lift the pause with 'evergrad loop resume'"
        raise EvergradError(f"not a pause: {error}", where=str(_path(run)), hint=hint) from error


def is_running(run: Path) -> bool:
    """Whether a controller has the run folder now."""
    try:
        with (run / ".lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _path(run: Path) -> Path:
    return run / "pause.json"
