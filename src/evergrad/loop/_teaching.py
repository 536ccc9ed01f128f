"""Teachers: models that grade the sampled tokens of a batch, between its rollouts and its update.

Each is one more worker of the trainer's kind, which is only asked to score; the frozen reference needs none, for the trainer
itself keeps it. A worker starts when a stage first needs it, and stays.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from evergrad.loop.distill import DistillConfig
from evergrad.loop.placement import LocalPlacement
from evergrad.registry import Registry, base_model
from evergrad.rollouts import for_teacher, taught
from evergrad.training import TrainerClient, TrainerConfig
from evergrad.types import InputError, TrainingBatch


class Teachers:
    """Use as an async context manager.

    Args:
        placement: Where their workers run.
        student: The trainer's configuration; a teacher takes over its threads, ranks and seed.
        trainer: Keeps the frozen reference.
        registry: Knows the versions of the run.
        root: The run folder.
    """

    def __init__(
        self, placement: LocalPlacement, student: TrainerConfig, trainer: TrainerClient, registry: Registry, root: Path
    ) -> None:
        self._placement, self._student, self._trainer = placement, student, trainer
        self._registry, self._root = registry, root
        self._clients: dict[str, TrainerClient] = {}

    async def start(self, distill: DistillConfig) -> None:
        """Starts the teacher, if it is not there yet.

        Raises:
            EvergradError: its model does not load, or the registry has no such version.
        """
        name = distill.model or distill.version
        if name is None or name in self._clients:
            return
        if distill.model is not None:
            # "full" is the model as it is, without an adapter around each layer; nobody asks it for a gradient, so that the
            # student's budget of memory, which counts one, would be the wrong one.
            own: dict[str, Any] = {"model": str(base_model(name)), "method": "full", "critic": None, "memory_gib": None}
            config, uri = self._student.model_copy(update=own), None
        else:
            config = self._student.model_copy(update={"critic": None})
            uri = str(self._root / self._registry.get(name).weights_uri)
        worker = await self._placement.start("teacher", "evergrad.training", config)
        client = self._clients[name] = TrainerClient(worker.base_url, worker.token)
        if uri is not None:
            await client.reset(uri)

    async def teach(self, batch: TrainingBatch, distill: DistillConfig) -> TrainingBatch:
        """The batch with what the teacher, which was started, says of each trained token."""
        samples = for_teacher(batch.samples)
        if distill.frozen:
            return taught(batch, await self._trainer.score(samples, reference=True))
        return taught(batch, await self._clients[distill.model or distill.version or ""].score(samples))

    async def __aenter__(self) -> Teachers:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for client in self._clients.values():
            await client.close()


def require_same_tokens(student: Path, teacher: Path) -> None:
    """
    Raises:
        InputError: a token id means something else to the teacher, so that it would grade another text; names the first.
    """
    from transformers import AutoTokenizer

    load: Callable[[Path], Any] = AutoTokenizer.from_pretrained
    ours, theirs = ({number: token for token, number in load(path).get_vocab().items()} for path in (student, teacher))
    odd = min((number for number in ours.keys() | theirs.keys() if ours.get(number) != theirs.get(number)), default=None)
    if odd is not None:
        raise InputError(
            f"the teacher has another tokenizer: token {odd} is {ours.get(odd)!r} for the student, {theirs.get(odd)!r} for it",
            where=str(teacher),
            hint="name a teacher of the same family in rl.distill.model, whose tokenizer is the student's",
        )
