"""Where workers run. Nothing else in the house knows."""

from evergrad.loop.placement._local import LocalPlacement, Worker, WorkerDied

__all__ = ["LocalPlacement", "Worker", "WorkerDied"]
