"""The trainer: a batch in, new weights out.

The walk of one step::

    TrainingBatch ──trained_tokens──▶ which positions carry a loss ──plant──▶ forests of distinct tokens (micro-batches)
      each forest: score_forest ──log-probabilities [T]──▶ loss, its part of the whole batch's
      ──backward──▶ gradients add up ──optim_step──▶ clip, AdamW

Several updates on a batch repeat it per mini-batch, with the policy before the first of them scored once.
Over several ranks each computes its share of the forests with the whole of one layer at a time, and the gradients add up over
ranks, too. What differs is behind :class:`~evergrad.training.ranks.Ranks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evergrad.training.checkpoint import Checkpoint
from evergrad.training.config import LossConfig, TrainerConfig, TrainerError, UpdatesConfig
from evergrad.training.critic import Critic
from evergrad.training.forest import TrainedTokens
from evergrad.training.losses import Loss
from evergrad.training.memory import BudgetedMemory, Memory
from evergrad.training.meter import Meter, memory_gib
from evergrad.training.model import load_model, sequence_logprobs
from evergrad.training.parts import fill, here, like, whole
from evergrad.training.passes import Passes
from evergrad.training.ranks import Ranks, RanksLost, on_all_ranks, start_ranks
from evergrad.training.reading import Columns, in_order, read_off
from evergrad.training.selection import kept_together, scored_tokens, totals_of, trained_tokens
from evergrad.training.updates import merged, mini_batches, with_proximal
from evergrad.training.weights import FullWeights, LoraWeights, Weights
from evergrad.transfer import BoxWriter, Publisher, whole_folder
from evergrad.transfer.placements import held_shards
from evergrad.transfer.process import keep_freed_memory
from evergrad.transfer.proof import all_finite
from evergrad.types import TrainingBatch, TrainingSample


class Trainer:
    """Owns the model that learns, its optimizer, and its place in the run.

    Seeds torch's generator, and sets its number of threads when the configuration names one; on a CPU the whole process keeps
    the memory that it frees (see :func:`~evergrad.transfer.process.keep_freed_memory`). The same batches in the same order
    from the same checkpoint give the same weights bit for bit on the CPUs of one machine with one number of threads and ranks.
    On a GPU they agree to rounding: some of its kernels add up in an order that is free.

    With ``config.ranks`` above 1 this process is the first rank: it starts the others, which do what is asked of it, and
    :meth:`close` ends them. Make it on a thread that lives as long. When a rank dies, what is under way and whatever is asked
    later raises :class:`~evergrad.training.ranks.RanksLost`; the last checkpoint is what is left.
    """

    def __init__(self, config: TrainerConfig, ranks: Ranks | None = None) -> None:
        """
        Args:
            config: The same on every rank.
            ranks: Where this process stands; only a rank that another started says so itself.

        Raises:
            TrainerError: the model does not load, is of an architecture that is not computed exactly, or a LoRA target
                matches nothing; the other ranks do not start, or cannot split the model.
        """
        self.config = config
        self._ranks = start_ranks(config) if ranks is None else ranks
        with self._ranks.starting():
            self._build()
        self.updates = 0
        """Optimizer updates that were applied since the start or the last :meth:`reset`."""
        self.policy_version = 0
        """Of the weights that were published last."""
        self._boxes: BoxWriter | None = None
        """Into the slots that were written last."""

    def _build(self) -> None:
        config = self.config
        if config.threads is not None:
            torch.set_num_threads(max(1, config.threads // config.ranks))
        # Nothing draws from it today; what a checkpoint holds is then the same on every rank and in every process.
        torch.manual_seed(config.seed)
        self._device = self._ranks.device(config.device)
        if self._device.type == "cpu":
            keep_freed_memory()
        dtype = getattr(torch, config.dtype)
        master = torch.promote_types(dtype, torch.float32)
        loaded = self._ranks.load_device or self._device
        self._model: Any = load_model(config.model, dtype if config.method == "lora" else master, loaded)
        lora = config.method == "lora"
        self._weights: Weights = LoraWeights(self._model, config, master) if lora else FullWeights(self._model, config)
        mixed = self._device.type == "cuda" if config.mixed_precision is None else config.mixed_precision
        self._score = self._ranks.place(self._model, torch.bfloat16 if mixed else None)
        self._parameters = self._weights.parameters
        self._memory = Memory(config.micro_batch_tokens)
        if config.memory_gib is not None:
            self._memory = BudgetedMemory(config, self._model, self._score, list(self._parameters.values()))
        self._passes = Passes(self._model, self._weights, self._score, self._memory, self._device)
        self._optimizer = self._fresh_optimizer()
        self._critic = self._fresh_critic()

    def close(self) -> None:
        """Ends the other ranks; the trainer must not be used afterwards. Does nothing when there are none."""
        self._ranks.close()
        if self._boxes is not None:
            self._boxes.close()

    def watch(self, on_loss: Callable[[RanksLost], None]) -> None:
        """Calls ``on_loss`` once, from another thread, when a rank has died."""
        self._ranks.watch(on_loss)

    def _fresh_critic(self) -> Critic | None:
        if self.config.critic is None:
            return None
        wide = torch.promote_types(self._model.dtype, torch.float32)
        width = self._model.get_output_embeddings().weight.shape[1]
        return Critic(self.config.critic, width, self.config.seed, self._device, wide)

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        settings = self.config.optimizer
        return torch.optim.AdamW(
            [{"params": group} for group in self._ranks.parameter_groups(self._parameters.values())],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @on_all_ranks
    def step(
        self, batch: TrainingBatch, loss: LossConfig, lr: float | None = None, updates: UpdatesConfig | None = None
    ) -> dict[str, float]:
        """One optimizer update on ``batch``, or several: each is :meth:`forward_backward`, then :meth:`optim_step`.

        Before the first of several updates the policy is scored once, if the loss takes its ratio to it and the samples bring
        no ``proximal_logprobs``.

        Returns the metrics of both, ``seconds``, ``tokens_per_s`` (of ``batch_tokens``) and ``memory_gib`` of this process; of
        several updates the sum of work, ``updated``, ``skipped_nonfinite`` and ``critic_skipped``, the largest ``grad_norm``,
        and ``ratio_max_error``, the mean of the rest. An update whose loss or gradient is not finite is not applied, and
        counted in ``skipped_nonfinite``.

        Raises:
            TrainerError: the batch cannot be trained on (see :meth:`forward_backward`), or not be cut into mini-batches;
                nothing has changed.
        """
        started = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        if self._critic is not None:
            self._critic.zero_grad()
        updates = updates or UpdatesConfig()
        parts = mini_batches(batch, updates, seed=f"{self.config.seed}/{self.updates}")
        if updates.total > 1:
            parts = self._anchored(batch, parts, loss.build())
        reports = []
        for part in parts:
            metrics = self.forward_backward(part, loss)
            reports.append(metrics | self.optim_step(lr))
        found, seconds = merged(reports, batch), time.perf_counter() - started
        return {**found, "seconds": seconds, "tokens_per_s": found["batch_tokens"] / seconds, "memory_gib": memory_gib()}

    def _anchored(self, batch: TrainingBatch, parts: Sequence[TrainingBatch], rule: Loss) -> list[TrainingBatch]:
        """The parts with ``proximal_logprobs`` of the policy of now, if the loss reads them and nobody brought any."""
        trained = self._trained(batch, rule)  # the whole batch, before the first update changes anything
        if not rule.needs_proximal or any(sample.proximal_logprobs is not None for sample in batch.samples):
            return list(parts)
        scored = self._read_off(trained, self._passes.logprobs)
        return [with_proximal(part, {key: row for key, (row,) in scored.items()}) for part in parts]

    @on_all_ranks
    def forward_backward(self, batch: TrainingBatch, loss: LossConfig) -> dict[str, float]:
        """Adds the gradient of the batch's loss to what is there, without moving the weights.

        The loss divides by what the whole batch holds (see the loss), so the gradient is the same however the batch is cut
        into micro-batches and dealt over ranks. To cut it into several calls, give each ``num_valid_tokens`` and
        ``num_rollouts`` of the whole.

        Metrics: ``loss``; ``valid_tokens`` (positions with a mask), ``gradient_tokens`` (those with a gradient),
        ``trained_tokens`` (distinct tokens computed, forward and backward), ``batch_tokens`` (all positions of all samples),
        ``useful_token_share`` (of these, those with a gradient), ``micro_batches``; for losses of sampled tokens also
        ``ratio_mean``, ``ratio_max_error`` (largest |π/μ − 1|) and ``mismatch_kl`` (of behaviour and current policy, a trained
        token); and the loss's own figures, such as ``clipped_share``, ``reference_kl``, ``entropy``, ``margin`` and
        ``pair_accuracy``.

        Raises:
            TrainerError: a trained position is a sample's first, has a log-probability or advantage that the loss reads and
                that is not finite, or a token that the model does not know; a sample is longer than its context; more masked
                positions than ``num_valid_tokens``;
                a preference pair that is none; a reference that nobody has; a sample that no budget of memory has room for.
                Named by sample and position; nothing changed.
        """
        rule = loss.build()
        trained = self._trained(batch, rule)
        totals = totals_of(batch, rule)
        share = self._ranks.share(trained, self._memory.nodes_at_once(trained), keep=kept_together(rule))
        meter = Meter(batch, rule)
        if share.forests and self.config.ranks == 1:
            self._take_room_for_gradients()
        for forest in share.forests:
            self._passes.backward(forest, rule, totals, meter, self._critic)
        for forest in share.idle:
            self._passes.idle(forest, rule)
        return meter.metrics(self._ranks.everyones(meter.sums))

    def _take_room_for_gradients(self) -> None:
        """Before there are activations: what autograd would make among them stays when they go, and the next micro-batch's do
        not fit into the gaps. That is a third of a micro-batch of a small model. Several ranks hold parts, which FSDP makes."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _trained(self, batch: TrainingBatch, rule: Loss) -> list[TrainedTokens]:
        has_critic = self._critic is not None
        trained = trained_tokens(batch, rule, computes_reference=self.config.method == "lora", has_critic=has_critic)
        for item in trained:
            self._check_tokens(item.sample.token_ids, item.sample.rollout_id)
        self._memory.nodes_at_once(trained)  # also before the first of several updates: what cannot fit changes nothing
        return trained

    @on_all_ranks
    def score(self, samples: Sequence[TrainingSample], *, reference: bool = False) -> list[tuple[float, ...]]:
        """Log-probability of each sample's masked tokens under the current policy, or under the frozen reference: one number
        per token, 0.0 where the mask is 0.

        What it returns before the first update is what ``reference_logprobs`` (of a full fine-tuning) and
        ``proximal_logprobs`` (of several updates on one batch) hold.

        Raises:
            TrainerError: a masked token is a sample's first or unknown to the model, or the reference of a full fine-tuning
                was asked for.
        """
        computed = self._weights.as_reference() if reference else nullcontext()
        wanted = scored_tokens(samples)
        for item in wanted:
            self._check_tokens(item.sample.token_ids, item.sample.rollout_id)
        with computed:
            scored = self._read_off(wanted, self._passes.logprobs)
        return [row[0] for row in in_order(samples, scored, 1)]

    @on_all_ranks
    def values(self, samples: Sequence[TrainingSample]) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        """Of each sample's masked tokens under the current policy, in one pass: log-probabilities, as :meth:`score`, and what
        the critic expects before each; 0.0 where the mask is 0.

        Raises:
            TrainerError: there is no critic, or a masked token that cannot be scored.
        """
        critic = self._critic
        if critic is None:
            raise TrainerError("the trainer has no critic", hint="configure one: critic = {}")
        wanted = scored_tokens(samples)
        for item in wanted:
            self._check_tokens(item.sample.token_ids, item.sample.rollout_id)
        found = self._read_off(wanted, lambda forest: self._passes.logprobs_and_values(forest, critic))
        rows = in_order(samples, found, 2)
        return [row[0] for row in rows], [row[1] for row in rows]

    def _read_off(self, wanted: Sequence[TrainedTokens], columns: Columns) -> dict[int, list[tuple[float, ...]]]:
        return read_off(self._ranks, self._memory.nodes_at_once(wanted, backward=False), wanted, columns)

    @on_all_ranks
    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Clips the gradient, applies it, and forgets it; the critic's too, where samples had ``returns``.

        Metrics: ``grad_norm`` (before clipping), ``lr``, ``updated`` (1 when the weights moved), ``skipped_nonfinite`` (1 when
        they did not for that reason), and the critic's, whose update is skipped for itself (see ``Critic.optim_step``).
        Without any gradient, or with one that is not finite, weights and optimizer state stay as they are.
        """
        settings = self.config.optimizer
        rate = settings.lr if lr is None else lr
        self._ranks.complete_gradients()
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = self._ranks.norm(grads) if grads else 0.0
        finite = bool(np.isfinite(norm))
        if grads and finite:
            for group in self._optimizer.param_groups:
                if norm > settings.grad_clip:  # else it would multiply every gradient by 1
                    torch.nn.utils.clip_grads_with_norm_(group["params"], settings.grad_clip, torch.tensor(norm))
                group["lr"] = rate
            self._optimizer.step()
            self.updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        critic = self._critic.optim_step(self._ranks) if self._critic is not None else {}
        return {
            "grad_norm": norm,
            "lr": rate,
            "updated": float(bool(grads) and finite),
            "skipped_nonfinite": float(not finite),
            **critic,
        }

    @on_all_ranks
    def logprobs(self, token_ids: tuple[int, ...], temperature: float = 1.0) -> list[float]:
        """Log-probability of each token but the first given those before it: ``len(token_ids) - 1`` numbers."""
        if len(token_ids) < 2:
            raise TrainerError("log-probabilities need at least two tokens")
        self._check_tokens(token_ids)
        return sequence_logprobs(self._score, tuple(token_ids), temperature)

    def _check_tokens(self, token_ids: Sequence[int], rollout_id: str = "") -> None:
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and len(token_ids) > positions:
            raise TrainerError(
                f"a sample of {len(token_ids)} tokens, and the model has {positions} positions",
                where=rollout_id or None,
                hint="shorten it, or train a model of a longer context",
            )
        size = self._model.get_input_embeddings().weight.shape[0]
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < size:
                raise TrainerError(f"the model knows no token {token}; it has {size}", where=rollout_id or None)

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and dtypes of what :meth:`write_weights` writes."""
        return self._weights.layout()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that training can change, whole, adapters merged, under Hugging Face names; tied ones once."""
        return self._weights.named(self._whole)

    def write_weights(self, publisher: Publisher) -> None:
        """Begins a version of ``publisher``, which is made for :meth:`layout`, and fills it with :meth:`named_weights`, without
        making them first; or with the adapter under PEFT's names, where the configuration says so.

        Where several ranks hold what is written, each writes its boxes of it, and nothing is gathered.

        Raises:
            TransferError: the publisher has no room for it.
        """
        views = publisher.begin()
        if self.config.ranks > 1 and self._weights.published() is not None:
            self._write_boxes(publisher.slots, publisher.writing)
        else:
            self._weights.write(publisher, views, self._whole)

    @on_all_ranks
    def _write_boxes(self, slots: Mapping[str, Any], slot: int) -> None:
        named = self._weights.published()
        assert named is not None
        if self._boxes is None or self._boxes.slots != slots:
            if self._boxes is not None:
                self._boxes.close()
            _, shards = held_shards(named.items(), self._ranks.rank)
            self._boxes = BoxWriter(slots, self._ranks.all_values(shards), self._ranks.rank)
        self._boxes.write(slot, named.items())

    def adapter(self) -> dict[str, Any] | None:
        """PEFT's configuration of the adapter, where its parts are what is published."""
        return self._weights.adapter()

    @on_all_ranks
    def _whole(self, name: str) -> Tensor:
        # One parameter a call: whoever reads the weights may stop at any of them, and no rank waits for the next.
        return whole(self._model.get_parameter(name))

    @on_all_ranks
    def check_finite(self) -> None:
        """
        Raises:
            TrainerError: a weight is not finite; names it.
        """
        odd = next((name for name, p in self._parameters.items() if not all_finite(here(p).detach())), None)
        odd = next(filter(None, self._ranks.all_values(odd)), None)
        if odd is not None:
            raise TrainerError(f"'{odd}' is not finite", hint="load the last checkpoint and lower the learning rate")

    def save(self, folder: Path | str) -> None:
        """Writes all that :meth:`load` needs to go on exactly from here; whole or not at all.

        Raises:
            TransferError: the disk refused; what was at ``folder`` is untouched.
        """
        self.begin_save(folder).result()

    @on_all_ranks
    def begin_save(self, folder: Path | str) -> Future[None]:
        """As :meth:`save`, but several ranks write while training goes on: the future ends when ``folder`` is there.

        Raises:
            TransferError: as for :meth:`save`, here or in the future.
        """
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        state = {names[id(p)]: dict(values) for p, values in self._optimizer.state.items()}
        checkpoint = Checkpoint(
            self._identity(),
            self.updates,
            self.policy_version,
            dict(self._parameters),
            state,
            torch.get_rng_state(),
            self._weights.reference(),
            self._critic.state() if self._critic is not None else {},
        )
        return self._ranks.write_checkpoint(folder, checkpoint)

    @on_all_ranks
    def load(self, folder: Path | str) -> None:
        """Goes on from a checkpoint of :meth:`save`: weights, optimizer, random state, counters.

        Raises:
            TrainerError: the checkpoint is of another model or method.
            TransferError: it is missing or damaged. In both cases the trainer is as it was.
        """
        checkpoint = self._ranks.read_checkpoint(folder, self._parameters)
        if checkpoint.identity != self._identity():
            raise TrainerError(
                "the checkpoint is of another model or method",
                where=str(folder),
                hint=_difference(checkpoint.identity, self._identity()),
            )
        for name, parameter in self._parameters.items():
            fill(parameter, checkpoint.weights[name])
        self._weights.load_reference(checkpoint.reference)
        self._optimizer = self._fresh_optimizer()
        for name, values in checkpoint.optimizer.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = {key: like(parameter, value) for key, value in values.items()}
        if self._critic is not None:
            self._critic.load_state(checkpoint.critic)
        torch.set_rng_state(checkpoint.rng_state)
        self.updates, self.policy_version = checkpoint.updates, checkpoint.policy_version

    def export(self, folder: Path | str) -> None:
        """Writes a model that other tools load: a PEFT adapter whose configuration names its base, or a whole Hugging Face
        folder with tokenizer; whole or not at all.

        Raises:
            TransferError: the disk refused; what was at ``folder`` is untouched.
        """
        with whole_folder(folder) as partial:
            self._weights.export(partial, self._whole)

    @on_all_ranks
    def reset(self, weights_uri: str | None = None) -> None:
        """Starts anew, with a fresh optimizer and critic, from an export of :meth:`export`, or from the base when None.

        Where it starts from is the frozen reference of a LoRA from then on.

        Raises:
            TrainerError, TransferError: the export does not fit or is damaged; the trainer is as it was.
        """
        self._weights.restart(weights_uri)
        self._optimizer = self._fresh_optimizer()
        self._critic = self._fresh_critic()
        self.updates = 0

    def _identity(self) -> dict[str, Any]:
        shapes = {name: list(parameter.shape) for name, parameter in self._parameters.items()}
        identity = {**self._weights.identity(), "model": Path(self.config.model).name, "shapes": shapes}
        return identity if self.config.critic is None else {**identity, "critic": self.config.critic.hidden}


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    odd = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    return f"{', '.join(odd)} differ; use the configuration it was saved with"
