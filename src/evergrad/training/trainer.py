"""The trainer: a batch in, new weights out.

The walk of one step::

    TrainingBatch ──trained_tokens──▶ which positions carry a loss ──plant──▶ forests of distinct tokens (micro-batches)
      each forest: score_forest ──log-probabilities [T]──▶ loss, its part of the whole batch's
      ──backward──▶ gradients add up ──optim_step──▶ clip, AdamW

Several updates on a batch repeat it per mini-batch, with the policy before the first of them scored once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evergrad.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from evergrad.training.config import LossConfig, TrainerConfig, TrainerError, UpdatesConfig
from evergrad.training.critic import Critic
from evergrad.training.forest import Forest, TrainedTokens, plant
from evergrad.training.lora import (
    LoraLinear,
    add_lora,
    as_reference,
    load_adapter_tensors,
    load_reference_tensors,
    reference_tensors,
    write_adapter,
)
from evergrad.training.losses import Loss, TokenTensors, Totals
from evergrad.training.meter import Meter
from evergrad.training.model import check_faithful, load_model, score_forest, sequence_logprobs
from evergrad.training.selection import kept_together, scored_tokens, totals_of, trained_tokens
from evergrad.training.updates import merged, mini_batches, with_proximal
from evergrad.transfer import load_adapter, load_tensors, merge_lora, whole_folder
from evergrad.transfer.files import write_safetensors
from evergrad.transfer.worker import pick_device
from evergrad.types import TrainingBatch, TrainingSample

_NOT_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of a model folder that go along with an export."""


class Trainer:
    """Owns the model that learns, its optimizer, and its place in the run.

    Sets torch's number of threads when the configuration names one. The same batches in the same order from the same
    checkpoint give the same weights bit for bit on one machine with one number of threads.
    """

    def __init__(self, config: TrainerConfig) -> None:
        """
        Raises:
            TrainerError: the model does not load, is of an architecture that is not computed exactly, or a LoRA target
                matches nothing.
        """
        self.config = config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._device = pick_device(config.device)
        dtype = getattr(torch, config.dtype)
        master = torch.promote_types(dtype, torch.float32)
        self._model: Any = load_model(config.model, dtype if config.method == "lora" else master, self._device)
        check_faithful(self._model, config.model)
        self._lora: dict[str, LoraLinear] = {}
        if config.method == "lora":
            self._lora = self._add_lora(master)
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._optimizer = self._fresh_optimizer()
        self._critic = self._fresh_critic()
        self.updates = 0
        """Optimizer updates that were applied since the start or the last :meth:`reset`."""
        self.policy_version = 0
        """Of the weights that were published last."""

    def _add_lora(self, dtype: torch.dtype) -> dict[str, LoraLinear]:
        head = self._model.get_output_embeddings()
        layers = add_lora(self._model, self.config.lora, self.config.seed, dtype)
        if self._model.get_output_embeddings() is not head:
            raise TrainerError("the output embedding cannot be a LoRA target", hint="remove it from lora.targets")
        return layers

    def _fresh_critic(self) -> Critic | None:
        if self.config.critic is None:
            return None
        wide = torch.promote_types(self._model.dtype, torch.float32)
        width = self._model.get_output_embeddings().weight.shape[1]
        return Critic(self.config.critic, width, self.config.seed, self._device, wide)

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        settings = self.config.optimizer
        return torch.optim.AdamW(
            self._parameters.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(
        self, batch: TrainingBatch, loss: LossConfig, lr: float | None = None, updates: UpdatesConfig | None = None
    ) -> dict[str, float]:
        """One optimizer update on ``batch``, or several: each is :meth:`forward_backward`, then :meth:`optim_step`.

        Before the first of several updates the policy is scored once, if the loss takes its ratio to it and the samples bring
        no ``proximal_logprobs``.

        Returns the metrics of both and ``seconds``; of several updates the sum of work, ``updated`` and ``skipped_nonfinite``,
        the largest ``grad_norm`` and ``ratio_max_error``, the mean of the rest. An update whose loss or gradient is not finite
        is not applied, and counted in ``skipped_nonfinite``.

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
        return {**merged(reports, batch), "seconds": time.perf_counter() - started}

    def _anchored(self, batch: TrainingBatch, parts: Sequence[TrainingBatch], rule: Loss) -> list[TrainingBatch]:
        """The parts with ``proximal_logprobs`` of the policy of now, if the loss reads them and nobody brought any."""
        trained = self._trained(batch, rule)  # the whole batch, before the first update changes anything
        if not rule.needs_proximal or any(sample.proximal_logprobs is not None for sample in batch.samples):
            return list(parts)
        scored = self._read_off(trained, lambda forest: [score_forest(self._model, forest).logprobs])
        return [with_proximal(part, {key: row for key, (row,) in scored.items()}) for part in parts]

    def forward_backward(self, batch: TrainingBatch, loss: LossConfig) -> dict[str, float]:
        """Adds the gradient of the batch's loss to what is there, without moving the weights.

        The loss divides by what the whole batch holds (see the loss), so the gradient is the same however the batch is cut
        into micro-batches. To cut it into several calls, give each ``num_valid_tokens`` and ``num_rollouts`` of the whole.

        Metrics: ``loss``; ``sampled_tokens`` (positions with a mask), ``gradient_tokens`` (those with a gradient),
        ``trained_tokens`` (distinct tokens computed, forward and backward), ``batch_tokens`` (all positions of all samples),
        ``micro_batches``; for losses of sampled tokens also ``ratio_mean``, ``ratio_max_error`` (largest |π/μ − 1|) and
        ``mismatch_kl`` (of behaviour and current policy, per trained token); and the loss's own figures, such as
        ``clipped_share``, ``reference_kl``, ``entropy``, ``margin`` and ``pair_accuracy``.

        Raises:
            TrainerError: a trained position is a sample's first, has a log-probability or advantage that the loss reads and
                that is not finite, or a token that the model does not know; more masked positions than ``num_valid_tokens``;
                a preference pair that is none; a reference that nobody has. Named by sample and position; nothing changed.
        """
        rule = loss.build()
        trained = self._trained(batch, rule)
        totals = totals_of(batch, rule)
        forests = plant(trained, self.config.micro_batch_tokens, keep=kept_together(rule))
        meter = Meter(batch, rule)
        for forest in forests:
            self._backward(forest, rule, totals, meter)
        return meter.metrics(forests)

    def _trained(self, batch: TrainingBatch, rule: Loss) -> list[TrainedTokens]:
        has_critic = self._critic is not None
        trained = trained_tokens(batch, rule, computes_reference=self.config.method == "lora", has_critic=has_critic)
        for item in trained:
            self._check_tokens(item.sample.token_ids, item.sample.rollout_id)
        return trained

    def _backward(self, forest: Forest, rule: Loss, totals: Totals, meter: Meter) -> None:
        reference = self._reference(forest) if rule.needs_reference else None
        logprobs, entropies, states = score_forest(self._model, forest, entropies=rule.needs_entropy)

        def column(field: str) -> Tensor:
            return torch.from_numpy(forest.column(field)).to(logprobs)

        has_proximal = rule.needs_proximal and forest.items[0].sample.proximal_logprobs is not None
        tokens = TokenTensors(
            logprobs=logprobs,
            behaviour_logprobs=column("logprobs"),
            advantages=column("advantages"),
            rollout=torch.from_numpy(forest.rollout_of_token).to(self._device),
            lengths=torch.from_numpy(forest.rollout_lengths).to(self._device),
            group=torch.from_numpy(forest.group_of_rollout).to(self._device),
            reference_logprobs=reference,
            proximal_logprobs=column("proximal_logprobs") if has_proximal else None,
            entropies=entropies,
        )
        loss = rule.total(tokens, totals)
        loss.backward()  # type: ignore[no-untyped-call]
        meter.add(loss, tokens)
        if self._critic is not None and forest.items[0].sample.returns is not None:
            values = self._values(self._critic, forest, states)
            self._critic.backward(values, column("values"), column("returns"), totals.tokens)

    def _values(self, critic: Critic, forest: Forest, states: Tensor) -> Tensor:
        """[T]"""
        return critic.values(states).index_select(0, torch.from_numpy(forest.row_of_token).to(self._device))

    def _reference(self, forest: Forest) -> Tensor:
        """Log-probabilities of the frozen reference, [T]: the samples' own, or computed here."""
        if forest.items[0].sample.reference_logprobs is not None:
            wide = torch.promote_types(self._model.dtype, torch.float32)
            return torch.from_numpy(forest.column("reference_logprobs")).to(self._device, wide)
        with as_reference(self._lora):
            return score_forest(self._model, forest)[0]

    def score(self, samples: Sequence[TrainingSample], *, reference: bool = False) -> list[tuple[float, ...]]:
        """Log-probability of each sample's masked tokens under the current policy, or under the frozen reference: one number
        per token, 0.0 where the mask is 0.

        What it returns before the first update is what ``reference_logprobs`` (of a full fine-tuning) and
        ``proximal_logprobs`` (of several updates on one batch) hold.

        Raises:
            TrainerError: a masked token is a sample's first or unknown to the model, or the reference of a full fine-tuning
                was asked for.
        """
        if reference and self.config.method == "full":
            raise TrainerError(
                "full fine-tuning keeps no reference", hint="score without reference=True before the first update"
            )
        wanted = scored_tokens(samples)
        for item in wanted:
            self._check_tokens(item.sample.token_ids, item.sample.rollout_id)
        with as_reference(self._lora) if reference else nullcontext():
            scored = self._read_off(wanted, lambda forest: [score_forest(self._model, forest).logprobs])
        return [row[0] for row in _in_order(samples, scored, 1)]

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

        def both(forest: Forest) -> list[Tensor]:
            scores = score_forest(self._model, forest)
            return [scores.logprobs, self._values(critic, forest, scores.states)]

        rows = _in_order(samples, self._read_off(wanted, both), 2)
        return [row[0] for row in rows], [row[1] for row in rows]

    @torch.no_grad()
    def _read_off(
        self, wanted: Sequence[TrainedTokens], columns: Callable[[Forest], list[Tensor]]
    ) -> dict[int, list[tuple[float, ...]]]:
        """By the ``id`` of the sample: what each of the columns, [T], says at the wanted positions, 0.0 elsewhere."""
        found: dict[int, list[tuple[float, ...]]] = {}
        for forest in plant(wanted, self.config.micro_batch_tokens):
            numbers = [column.cpu().double().numpy() for column in columns(forest)]
            for index, item in enumerate(forest.items):
                rows = np.zeros((len(numbers), len(item.sample.token_ids)))
                rows[:, item.positions] = [column[forest.sample_of_token == index] for column in numbers]
                found[id(item.sample)] = [tuple(row) for row in rows.tolist()]
        return found

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Clips the gradient, applies it, and forgets it; the critic's too, where samples had ``returns``.

        Metrics: ``grad_norm`` (before clipping), ``lr``, ``updated`` (1 when the weights moved), ``skipped_nonfinite``, and the
        critic's (see ``Critic.optim_step``).
        Without any gradient, or with one that is not finite, weights and optimizer state stay as they are.
        """
        settings = self.config.optimizer
        rate = settings.lr if lr is None else lr
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
        finite = bool(np.isfinite(norm))
        if grads and finite:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), settings.grad_clip, torch.tensor(norm))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self.updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        critic = self._critic.optim_step() if self._critic is not None else {}
        return {
            "grad_norm": norm,
            "lr": rate,
            "updated": float(bool(grads) and finite),
            "skipped_nonfinite": float(not finite or critic.get("critic_skipped", 0.0) > 0),
            **critic,
        }

    def logprobs(self, token_ids: tuple[int, ...], temperature: float = 1.0) -> list[float]:
        """Log-probability of each token but the first given those before it: ``len(token_ids) - 1`` numbers."""
        if len(token_ids) < 2:
            raise TrainerError("log-probabilities need at least two tokens")
        self._check_tokens(token_ids)
        return sequence_logprobs(self._model, tuple(token_ids), temperature)

    def _check_tokens(self, token_ids: Sequence[int], rollout_id: str = "") -> None:
        size = self._model.get_input_embeddings().weight.shape[0]
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < size:
                raise TrainerError(f"the model knows no token {token}; it has {size}", where=rollout_id or None)

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and dtypes of what :meth:`named_weights` yields."""
        if self.config.method == "full":
            return {name: (tuple(p.shape), p.dtype) for name, p in self._parameters.items()}
        return {f"{name}.weight": (tuple(layer.weight.shape), layer.weight.dtype) for name, layer in self._lora.items()}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that training can change, adapters merged, under Hugging Face names; tied ones once."""
        if self.config.method == "full":
            yield from ((name, p.detach()) for name, p in self._parameters.items())
        for name, layer in self._lora.items():
            yield f"{name}.weight", merge_lora(layer.weight, layer.lora_a.detach(), layer.lora_b.detach(), layer.scale)

    def write_weights(self, views: Mapping[str, Tensor]) -> None:
        """Writes :meth:`named_weights` into ``views`` (same names and shapes) without making them first."""
        if self.config.method == "full":
            for name, parameter in self._parameters.items():
                views[name].copy_(parameter.detach())
        for name, layer in self._lora.items():
            merge_lora(layer.weight, layer.lora_a.detach(), layer.lora_b.detach(), layer.scale, out=views[f"{name}.weight"])

    def check_finite(self) -> None:
        """
        Raises:
            TrainerError: a weight is not finite; names it.
        """
        for name, parameter in self._parameters.items():
            if not bool(torch.isfinite(parameter).all()):
                raise TrainerError(f"'{name}' is not finite", hint="load the last checkpoint and lower the learning rate")

    def save(self, folder: Path | str) -> None:
        """Writes all that :meth:`load` needs to go on exactly from here; whole or not at all.

        Raises:
            TransferError: the disk refused; what was at ``folder`` is untouched.
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
            dict(reference_tensors(self._lora)),
            self._critic.state() if self._critic is not None else {},
        )
        write_checkpoint(folder, checkpoint)

    def load(self, folder: Path | str) -> None:
        """Goes on from a checkpoint of :meth:`save`: weights, optimizer, random state, counters.

        Raises:
            TrainerError: the checkpoint is of another model or method.
            TransferError: it is missing or damaged. In both cases the trainer is as it was.
        """
        checkpoint = read_checkpoint(folder)
        if checkpoint.identity != self._identity():
            raise TrainerError(
                "the checkpoint is of another model or method",
                where=str(folder),
                hint=_difference(checkpoint.identity, self._identity()),
            )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(checkpoint.weights[name])
        load_reference_tensors(self._lora, checkpoint.reference)
        self._optimizer = self._fresh_optimizer()
        for name, values in checkpoint.optimizer.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in values.items()}
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
            if self.config.method == "lora":
                write_adapter(partial, self._lora, self.config.lora, str(Path(self.config.model).absolute()))
                return
            for pattern in _NOT_WEIGHTS:
                for path in Path(self.config.model).glob(pattern):
                    if not path.name.endswith(".index.json"):
                        (partial / path.name).write_bytes(path.read_bytes())
            self._model.config.save_pretrained(partial)  # the trained dtype, not the base's
            write_safetensors(partial / "model.safetensors", self.named_weights())

    def reset(self, weights_uri: str | None = None) -> None:
        """Starts anew, with a fresh optimizer and critic, from an export of :meth:`export`, or from the base when None.

        Where it starts from is the frozen reference of a LoRA from then on.

        Raises:
            TrainerError, TransferError: the export does not fit or is damaged; the trainer is as it was.
        """
        if self.config.method == "lora":
            if weights_uri is None:
                self._reset_lora()
            else:
                load_adapter_tensors(self._lora, *load_adapter(weights_uri))
                for layer in self._lora.values():
                    layer.freeze()
        else:
            self._load_full(weights_uri or self.config.model)
        self._optimizer = self._fresh_optimizer()
        self._critic = self._fresh_critic()
        self.updates = 0

    def _reset_lora(self) -> None:
        generator = torch.Generator().manual_seed(self.config.seed)
        for layer in self._lora.values():
            layer.reset(generator)

    def _load_full(self, weights_uri: str) -> None:
        tensors = load_tensors(weights_uri)
        for name, parameter in self._parameters.items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise TrainerError(f"'{name}' is missing or of another shape", where=weights_uri)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[name])

    def _identity(self) -> dict[str, Any]:
        shapes = {name: list(parameter.shape) for name, parameter in self._parameters.items()}
        lora = self.config.lora.model_dump(mode="json") if self.config.method == "lora" else None
        identity = {"method": self.config.method, "lora": lora, "model": Path(self.config.model).name, "shapes": shapes}
        return identity if self.config.critic is None else {**identity, "critic": self.config.critic.hidden}


def _in_order(
    samples: Sequence[TrainingSample], found: Mapping[int, list[tuple[float, ...]]], columns: int
) -> list[list[tuple[float, ...]]]:
    """What was found of each sample; zeros for those without a masked token."""
    return [found.get(id(sample), [(0.0,) * len(sample.token_ids)] * columns) for sample in samples]


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    odd = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    return f"{', '.join(odd)} differ; use the configuration it was saved with"
