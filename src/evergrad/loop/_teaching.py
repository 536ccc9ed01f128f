"""Teachers: models that grade the sampled tokens of a batch, between its rollouts and its update.

Each is one more worker of the trainer's kind, which is only asked to score; the frozen reference of a LoRA needs none, for the
trainer itself keeps it. A worker starts when a stage first needs it, and stays; one serves all versions of the run that are on
one base model in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evergrad.loop.config import RunConfig
from evergrad.loop.distill import DistillConfig
from evergrad.loop.placement import LocalPlacement
from evergrad.registry import Registry, base_model
from evergrad.rollouts import for_teacher, taught
from evergrad.training import TrainerClient, TrainerConfig
from evergrad.types import InputError, TrainingBatch

_VERSIONS = "a version of the run"


def scorer_of(config: RunConfig, cycle: int, arm: str | None = None) -> DistillConfig | None:
    """Who besides the policy scores what a cycle samples: its teacher; or for a loss with a KL term under full fine-tuning,
    which keeps no frozen reference, the version that the stage begins with; or nobody."""
    rl = config.recipe(cycle, arm).rl
    if rl.distill is not None or config.trainer.method == "lora" or not rl.loss.build().needs_reference:
        return rl.distill
    return DistillConfig(version=f"{config.name}-c{cycle}-sft")


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
        self._holder = ""
        """Name of the worker that was last started for a version of the run."""
        self._versions: dict[str, str] = {}
        """What each of these workers holds."""

    async def start(self, distill: DistillConfig) -> None:
        """Starts the teacher, if it is not there yet.

        Raises:
            EvergradError: its model does not load, or the registry has no such version.
        """
        if distill.model is not None:
            # "full" is the model as it is, without an adapter around each layer; nobody asks it for a gradient, so that the
            # student's budget of memory, which counts one, would be the wrong one.
            own: dict[str, Any] = {"model": str(base_model(distill.model)), "method": "full", "memory_gib": None}
            await self._worker(distill.model, own)
        elif distill.version is not None:
            version = self._registry.get(distill.version)
            self._holder = f"{_VERSIONS} on {version.base_model}"
            client = await self._worker(self._holder, {"model": str(base_model(version.base_model))})
            if self._versions.get(self._holder) != distill.version:
                await client.reset(str(self._root / version.weights_uri))
                self._versions[self._holder] = distill.version

    async def _worker(self, name: str, changes: Mapping[str, Any]) -> TrainerClient:
        if name not in self._clients:
            config = self._student.model_copy(update={"critic": None, **changes})
            worker = await self._placement.start("teacher", "evergrad.training", config)
            self._clients[name] = TrainerClient(worker.base_url, worker.token)
        return self._clients[name]

    async def teach(self, batch: TrainingBatch, distill: DistillConfig) -> TrainingBatch:
        """The batch with what the teacher, which was started, says of each trained token."""
        samples = for_teacher(batch.samples)
        if distill.frozen:
            return taught(batch, await self._trainer.score(samples, reference=True))
        return taught(batch, await self._clients[distill.model or self._holder].score(samples))

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
