"""``python -m evergrad.training.follower FD``: a rank but the first, started by it (see ``leader``); never by hand.

It makes the same trainer and does what the leader does. An error that is not the trainer's own refusal ends the process:
the ranks would no longer agree.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from evergrad.transfer.process import die_with_parent
from evergrad.types import EvergradError


def main() -> int:
    """Follows until the leader hangs up; returns the exit code."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the leader, which then ends its followers in order
    connection = Connection(int(sys.argv[1]))
    config, rank, meeting_place = connection.recv()
    from transformers.utils import logging

    from evergrad.training.sharding import ShardedRanks
    from evergrad.training.trainer import Trainer

    logging.disable_progress_bar()
    try:
        trainer = Trainer(config, ShardedRanks(config, rank, meeting_place, lambda: connection.send(None)))
    except EvergradError as error:
        connection.send(str(error))
        return 1
    connection.send(None)
    while True:
        try:
            method, arguments, named = connection.recv()
        except EOFError:
            return 0
        refusal = None
        try:
            getattr(trainer, method)(*arguments, **named)
        except EvergradError as error:
            refusal = str(error)
        connection.send(refusal)


if __name__ == "__main__":
    sys.exit(main())
