"""One training run on a data file, from the file to the adapter.

The walk::

    file ──load_dataset──▶ rows ──hold_out──▶ trained ──Plan──▶ batch ──Trainer.step──▶ figures ──▶ sinks
                                  └─▶ held out ──every checkpoint──▶ held-out loss ──▶ which checkpoints stay

Everything that can be refused is refused before the run folder is written: the configuration, each line of the data, the model,
the sinks. From there on the step is the run's whole state besides what the trainer saves, so a run that was killed goes on, bit
for bit on one CPU with one number of threads, as if it had not been.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from contextlib import ExitStack
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from typing import Any

from evergrad.config import load_config
from evergrad.ledger import Ledger, PhaseClock, PriceBook
from evergrad.loop._folder import write_json
from evergrad.loop._learning import NONFINITE_STEPS
from evergrad.loop.offline.config import TrainConfig
from evergrad.loop.offline.encoder import fingerprint
from evergrad.loop.offline.folder import TrainFolder, is_number
from evergrad.loop.offline.measure import heldout_figures, reference_logprobs, with_references
from evergrad.loop.offline.plan import Plan
from evergrad.loop.offline.rows import Data
from evergrad.loop.offline.screen import TrainScreen
from evergrad.loop.offline.stopping import Stop
from evergrad.registry import base_model
from evergrad.registry.tiny import quiet_transformers
from evergrad.training import TrainerConfig
from evergrad.training.meter import memory_gib
from evergrad.training.sinks import RunInfo, SinkFan
from evergrad.training.sinks.jsonl import Jsonl
from evergrad.training.trainer import Trainer
from evergrad.types import EvergradError, TrainingBatch


def train(config_path: Path, overrides: list[str] | None = None, run_dir: Path | None = None) -> Path:
    """Runs or goes on with the training that ``config_path`` describes; returns its folder.

    Raises:
        InputError: a configuration, data file, model or sink that cannot be used, or a folder of another run; said before the
            first step.
        EvergradError: a folder in use, a gradient that is not finite several times in a row, a full disk.
        KeyboardInterrupt: Ctrl-C, or SIGTERM; the step that was being made is saved by then, unless there were two.
    """
    config = load_config(TrainConfig, config_path, overrides or ())
    screen = TrainScreen()
    for sink in config.sinks:
        sink.build().check()
    data = Data(config, screen)
    folder = TrainFolder(run_dir or Path("runs") / config.name, config, {**data.identity(), "model": fingerprint(config.model)})
    try:
        if folder.report.exists():
            from evergrad.loop.report import read_report

            screen.note(f"{folder.path} is finished; to train anew choose another --run-dir")
            screen.summary(read_report(folder.path), str(folder.path))
            return folder.path
        with ExitStack() as open_things:
            _Run(config, data, folder, screen, open_things).go()
    except KeyboardInterrupt:
        steps = folder.steps()
        there = f"goes on from step {steps[-1]}" if steps else "starts again, for no step was saved yet"
        screen.note(f"stopped; the same command {there}")
        raise
    except OSError as error:
        raise EvergradError(
            f"could not write: {error}",
            where=str(folder.path),
            hint="free space, then run again: it goes on from the last checkpoint",
        ) from error
    finally:
        folder.close()
    return folder.path


class _Run:
    """One session of a run: from the last checkpoint to the end, or to where it is stopped or killed."""

    def __init__(
        self, config: TrainConfig, data: Data, folder: TrainFolder, screen: TrainScreen, open_things: ExitStack
    ) -> None:
        self.config, self.data, self.folder, self.screen = config, data, folder, screen
        book = PriceBook.load(Path(config.price_book) if config.price_book else None)
        self.ledger = open_things.enter_context(Ledger(folder.path / "ledger.sqlite", book))
        # Time and cost are of the same attempts: both come from the ledger, which no kill takes back.
        self._earlier_s = self.ledger.elapsed_s()
        self._started = time.monotonic() - self._earlier_s
        self.clock = open_things.enter_context(PhaseClock(self.ledger, subject=config.name, cores=config.trainer.threads))
        self.plan = Plan(
            rows=len(data.trained),
            batch_size=config.batch_size,
            seed=config.seed,
            epochs=config.epochs,
            steps=config.steps,
        )
        self.loss = config.loss()
        with self.clock.phase("setup"), quiet_transformers():
            self.trainer = Trainer(_trainer_config(config))
            open_things.callback(self.trainer.close)
            self._references = self._reference()
            self.progress = folder.load(self.trainer)
        self._skipped: list[bool] = []
        self._session = (time.monotonic(), self.progress.step)
        self._saved = (time.monotonic(), self.progress.step)
        self._saving: Future[None] | None = None
        self._stop = Stop(lambda text: screen.note(text, style="yellow"))
        info = RunInfo(config.name, folder.path, config.model_dump(mode="json"), self.progress.step)
        self.sinks = SinkFan([Jsonl(), *(sink.build() for sink in config.sinks)], info, screen.note)

    def go(self) -> None:
        done = False
        try:
            self._announce()
            self._train()
            self._settle()
            self._finish()
            done = True
        finally:
            if self._saving is not None:
                wait([self._saving])
            self.sinks.close(done)

    def _announce(self) -> None:
        config, trained = self.config, self.data.trained
        tokens = sum(len(each.token_ids) for row in trained for each in row)
        held = f", {len(self.data.heldout)} held out" if self.data.heldout else ""
        self.screen.note(
            f"{config.name}: {config.method} of {config.model} on {len(trained)} rows ({tokens:,} tokens{held}), "
            f"{self.plan.steps} steps in {self.folder.path}",
            style="bold",
        )
        if self.progress.step:
            self.screen.note(f"going on from the checkpoint of step {self.progress.step}")
        elif self._earlier_s:
            self.screen.note("no checkpoint to go on from: it starts again; time and cost count on from those of before")

    def _train(self) -> None:
        if self.progress.step == 0 and self.data.heldout:
            self._measure()
        with self.screen.training(self.plan.steps, self.progress.step), self._stop.listening():
            while self.progress.step < self.plan.steps:
                if self._saving is not None and self._saving.done():
                    self._settle()  # a full disk is told at the next step, not at the next checkpoint
                self._step()
                if self._stop.asked:
                    self._save()
                    self._settle()
                    raise KeyboardInterrupt

    def _step(self) -> None:
        progress, number = self.progress, self.progress.step
        started = time.monotonic()
        with self.clock.phase("train"):
            batch = self._batch(number)
            figures: dict[str, Any] = self.trainer.step(batch, self.loss, self.config.schedule.at(number, self.plan.steps))
        seconds = time.monotonic() - started
        progress.step += 1
        progress.tokens += int(figures["batch_tokens"])
        progress.train_s += seconds
        progress.last_loss = figures["loss"]
        progress.first_loss = figures["loss"] if progress.first_loss is None else progress.first_loss
        figures |= {
            "epoch": self.plan.epoch(number),
            "tokens": progress.tokens,
            "seconds": seconds,
            "wall_s": time.monotonic() - self._started,
        }
        due = self._due(progress.step)
        if due and self.data.heldout:
            figures |= {f"heldout_{name}": value for name, value in self._measure().items() if name != "step"}
        self.sinks.log(progress.step, figures)
        self.screen.step(progress.step, figures, self._left_s())
        self._require_finite(bool(figures["skipped_nonfinite"]))
        if due or time.monotonic() - self._saved[0] > self.config.checkpoint.every_s:
            self._save()

    def _reference(self) -> tuple[list[Any], list[Any]] | None:
        """Log-probabilities of the reference for each sequence, trained and held out, if the loss compares with one."""
        if not self.loss.build().needs_reference:
            return None
        trained, heldout = self.data.trained_samples(), self.data.heldout_samples()
        if not self.folder.reference.is_dir():
            self.screen.note(f"scoring {len(trained) + len(heldout)} answers under the reference, once")
        found = reference_logprobs(self.trainer, [*trained, *heldout], self.folder.reference)
        return found[: len(trained)], found[len(trained) :]

    def _batch(self, step: int) -> TrainingBatch:
        rows = self.plan.batch(step)
        references = None
        if self._references is not None:  # two sequences a row
            references = [self._references[0][2 * row + side] for row in rows for side in (0, 1)]
        samples = tuple(with_references(self.data.batch(rows), references))
        return TrainingBatch(samples, sum(sum(sample.loss_mask) for sample in samples))

    def _due(self, step: int) -> bool:
        settings = self.config.checkpoint
        return step % settings.every == 0 or step in settings.pinned or step == self.plan.steps

    def _measure(self) -> dict[str, float]:
        """The loss of the held-out rows under the weights of now, on record under their step."""
        with self.clock.phase("eval"):
            samples = with_references(self.data.heldout_samples(), self._references and self._references[1])
            found = {"step": self.progress.step, **heldout_figures(self.trainer, self.loss, samples)}
        self.progress.heldout.append(found)
        return found

    def _save(self) -> None:
        settings, progress = self.config.checkpoint, self.progress
        if progress.step == self._saved[1]:
            return
        self._settle()
        progress.wall_s = time.monotonic() - self._started
        keep = (*progress.best(settings.keep_best), *settings.pinned)
        self._saving = self.folder.begin_save(self.trainer, progress, keep)
        self._saved = (time.monotonic(), progress.step)

    def _settle(self) -> None:
        """Waits for the checkpoint that is being written, if one is; what became of it is raised here."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _require_finite(self, skipped: bool) -> None:
        self._skipped.append(skipped)
        in_a_row = len(list(takewhile(bool, reversed(self._skipped))))
        if in_a_row == 1:
            self.screen.note("a step was left out: its gradient is not finite, and the weights are as before", style="yellow")
        if in_a_row >= NONFINITE_STEPS:
            raise EvergradError(
                f"{in_a_row} steps in a row had a gradient that is not finite; nothing is being learned",
                where=f"step {self.progress.step}",
                hint="lower schedule.lr, and start anew with another --run-dir",
            )

    def _left_s(self) -> float:
        """Seconds to go at the pace of this session."""
        began, first = self._session
        pace = (time.monotonic() - began) / max(1, self.progress.step - first)
        return pace * (self.plan.steps - self.progress.step)

    def _finish(self) -> None:
        """The final weights, then the report: once it is there the run is finished."""
        with self.clock.phase("export"):
            self.trainer.check_finite()
            self.trainer.export(self.folder.final)
        self.progress.wall_s = time.monotonic() - self._started
        self.clock.settle()
        report = self._report()
        write_json(self.folder.report, report)
        self.screen.summary(report, str(self.folder.path))

    def _report(self) -> dict[str, Any]:
        config, progress, summary = self.config, self.progress, self.ledger.summary()
        measured = [entry for entry in progress.heldout if is_number(entry["loss"])]
        return {
            "name": config.name,
            "method": config.method,
            "model": config.model,
            "base": str(base_model(config.model)),
            "trained": config.trainer.method,
            "seed": config.seed,
            "steps": progress.step,
            "epochs": progress.step / self.plan.steps_per_epoch,
            "data": self.data.identity(),
            "loss": {"first": progress.first_loss, "last": progress.last_loss},
            "heldout": {
                "rows": len(self.data.heldout),
                "history": progress.heldout,
                "best": min(measured, key=lambda entry: entry["loss"], default=None),
            },
            "tokens": progress.tokens,
            "tokens_per_s": progress.tokens / progress.train_s if progress.train_s else None,
            "peak_memory_gib": memory_gib(peak=True),
            "wall_s": progress.wall_s,
            "checkpoints": self.folder.steps(),
            "final": self.folder.final.name,
            "cost": {
                "total_usd": None if summary.usd is None else float(summary.usd),
                "by_phase": {phase: None if usd is None else float(usd) for phase, usd in summary.by_phase.items()},
                "coverage": float(Decimal(str(summary.coverage))),
            },
        }


def _trainer_config(config: TrainConfig) -> TrainerConfig:
    settings = config.trainer.model_dump()
    settings["optimizer"]["lr"] = config.schedule.lr
    return TrainerConfig.model_validate({"model": str(base_model(config.model)), "seed": config.seed, **settings})
