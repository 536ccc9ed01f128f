"""``python -m evergrad.training``: one trainer as a process of its own.

Says ``{"ready": true, "port": N, "pid": P}`` on standard output, in one line, once it answers; everything else it says goes
to standard error. With several ranks this process is the first, and the others are its children. When one of them dies, it
ends with exit code 1 and the reason, so that whoever placed it knows. Routes want the bearer token of the environment
variable ``EVERGRAD_TOKEN``, when it is set.
"""

from __future__ import annotations

import os
import socket
import sys

from evergrad.training.config import TrainerConfig, TrainerError, require_model_folder
from evergrad.transfer.worker import announce, run_worker


def main() -> int:
    """Runs until it is told to stop; returns the exit code."""
    return run_worker("evergrad.training", "Trains one model, told over HTTP.", TrainerConfig, _serve)


def _serve(config: TrainerConfig, listener: socket.socket) -> None:
    require_model_folder(config.model)
    import uvicorn
    from transformers.utils import logging

    from evergrad.training.server import TrainerService, trainer_app
    from evergrad.training.trainer import Trainer

    logging.disable_progress_bar()
    losses: list[TrainerError] = []

    def end(loss: TrainerError) -> None:
        losses.append(loss)
        http.should_exit = True

    trainer = Trainer(config)
    app = trainer_app(TrainerService(trainer), os.environ.get("EVERGRAD_TOKEN"), lambda: announce(listener))
    http = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_keep_alive=120))
    trainer.watch(end)
    http.run(sockets=[listener])
    trainer.close()
    if losses:
        raise losses[0]


if __name__ == "__main__":
    sys.exit(main())
