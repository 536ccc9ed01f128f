"""The trainer: a batch in, new weights out.

The walk of one step::

    TrainingBatch ──trained_tokens──▶ which positions carry a loss ──plant──▶ forests of distinct tokens (micro-batches)
      each forest: score_forest ──log-probabilities [T]──▶ loss, its part of the whole batch's
      ──backward──▶ gradients add up ──optim_step──▶ clip, AdamW

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
from evergrad.training.config import LossConfig, TrainerConfig, TrainerError
from evergrad.training.forest import FloatArray, Forest
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
from evergrad.training.model import check_faithful, load_model, sequence_logprobs
from evergrad.training.parts import fill, here, like, whole
from evergrad.training.ranks import Ranks, RanksLost, on_all_ranks, start_ranks
from evergrad.training.selection import scored_tokens, totals_of, trained_tokens
from evergrad.transfer import load_adapter, load_tensors, merge_lora, whole_folder
from evergrad.transfer.files import write_safetensors
from evergrad.types import TrainingBatch, TrainingSample

_NOT_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of a model folder that go along with an export."""


class Trainer:
    """Owns the model that learns, its optimizer, and its place in the run.

    Sets torch's number of threads when the configuration names one. The same batches in the same order from the same
    checkpoint give the same weights bit for bit on one machine with one number of threads and ranks.

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

    def _build(self) -> None:
        config = self.config
        if config.threads is not None:
            torch.set_num_threads(max(1, config.threads // config.ranks))
        self._device = self._ranks.device(config.device)
        dtype = getattr(torch, config.dtype)
        master = torch.promote_types(dtype, torch.float32)
        loaded = self._ranks.load_device or self._device
        self._model: Any = load_model(config.model, dtype if config.method == "lora" else master, loaded)
        check_faithful(self._model, config.model)
        self._lora: dict[str, LoraLinear] = {}
        if config.method == "lora":
            self._lora = self._add_lora(master)
        self._score = self._ranks.place(self._model)
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._optimizer = self._fresh_optimizer()

    def close(self) -> None:
        """Ends the other ranks; the trainer must not be used afterwards. Does nothing when there are none."""
        self._ranks.close()

    def watch(self, on_loss: Callable[[RanksLost], None]) -> None:
        """Calls ``on_loss`` once, from another thread, when a rank has died."""
        self._ranks.watch(on_loss)

    def _add_lora(self, dtype: torch.dtype) -> dict[str, LoraLinear]:
        head = self._model.get_output_embeddings()
        layers = add_lora(self._model, self.config.lora, self.config.seed, dtype)
        if self._model.get_output_embeddings() is not head:
            raise TrainerError("the output embedding cannot be a LoRA target", hint="remove it from lora.targets")
        return layers

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
    def step(self, batch: TrainingBatch, loss: LossConfig, lr: float | None = None) -> dict[str, float]:
        """One optimizer step on ``batch``: :meth:`forward_backward`, then :meth:`optim_step`.

        Returns the metrics of both and ``seconds``. When a loss or gradient is not finite nothing is applied, and
        ``skipped_nonfinite`` is 1.

        Raises:
            TrainerError: the batch cannot be trained on (see :meth:`forward_backward`); nothing has changed.
        """
        started = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        metrics = self.forward_backward(batch, loss)
        metrics |= self.optim_step(lr)
        return {**metrics, "seconds": time.perf_counter() - started}

    @on_all_ranks
    def forward_backward(self, batch: TrainingBatch, loss: LossConfig) -> dict[str, float]:
        """Adds the gradient of the batch's loss to what is there, without moving the weights.

        The loss divides by what the whole batch holds (see the loss), so the gradient is the same however the batch is cut
        into micro-batches and dealt over ranks. To cut it into several calls, give each ``num_valid_tokens`` and
        ``num_samples`` of the whole.

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
        trained = trained_tokens(batch, rule, computes_reference=self.config.method == "lora")
        for item in trained:
            self._check_tokens(item.sample.token_ids, item.sample.rollout_id)
        totals = totals_of(batch)
        share = self._ranks.share(trained, self.config.micro_batch_tokens, keep_groups=rule.unit == "pair")
        meter = Meter(batch, rule)
        for forest in share.forests:
            self._backward(forest, rule, totals, meter)
        for forest in share.idle:
            self._pass_idly(forest, rule)
        return meter.metrics(self._ranks.everyones(meter.sums))

    def _backward(self, forest: Forest, rule: Loss, totals: Totals, meter: Meter) -> None:
        reference = self._reference(forest) if rule.needs_reference else None
        logprobs, entropies = self._score(forest, entropies=rule.needs_entropy)

        def column(field: str) -> Tensor:
            return torch.from_numpy(forest.column(field)).to(logprobs)

        has_proximal = rule.needs_proximal and forest.items[0].sample.proximal_logprobs is not None
        tokens = TokenTensors(
            logprobs=logprobs,
            behaviour_logprobs=column("logprobs"),
            advantages=column("advantages"),
            sample=torch.from_numpy(forest.sample_of_token).to(self._device),
            lengths=torch.tensor([item.num_valid for item in forest.items], device=self._device),
            group=torch.from_numpy(forest.group_of_sample).to(self._device),
            reference_logprobs=reference,
            proximal_logprobs=column("proximal_logprobs") if has_proximal else None,
            entropies=entropies,
        )
        loss = rule.total(tokens, totals)
        loss.backward()  # type: ignore[no-untyped-call]
        meter.add(loss, tokens, forest)

    def _pass_idly(self, forest: Forest, rule: Loss) -> None:
        """As many forward and backward passes as :meth:`_backward` makes, with a gradient of zero."""
        if rule.needs_reference:
            self._reference(forest)
        logprobs, _ = self._score(forest)
        logprobs.backward(torch.zeros_like(logprobs))  # type: ignore[no-untyped-call]

    def _reference(self, forest: Forest) -> Tensor:
        """Log-probabilities of the frozen reference, [T]: the samples' own, or computed here."""
        if forest.items[0].sample.reference_logprobs is not None:
            wide = torch.promote_types(self._model.dtype, torch.float32)
            return torch.from_numpy(forest.column("reference_logprobs")).to(self._device, wide)
        with as_reference(self._lora):
            return self._score(forest)[0]

    @on_all_ranks
    @torch.no_grad()
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
        scored = scored_tokens(samples)
        for item in scored:
            self._check_tokens(item.sample.token_ids, item.sample.rollout_id)
        number_of = {id(item.sample): number for number, item in enumerate(scored)}
        found: dict[int, FloatArray] = {}
        share = self._ranks.share(scored, self.config.micro_batch_tokens)
        with as_reference(self._lora) if reference else nullcontext():
            for forest in share.forests:
                logprobs = self._score(forest)[0].cpu().double().numpy()
                for index, item in enumerate(forest.items):
                    found[number_of[id(item.sample)]] = logprobs[forest.sample_of_token == index]
            for forest in share.idle:
                self._score(forest)
        for others in self._ranks.everyones(found):
            found |= others
        values = {id(sample): np.zeros(len(sample.token_ids)) for sample in samples}
        for item in scored:
            values[id(item.sample)][item.positions] = found[number_of[id(item.sample)]]
        return [tuple(values[id(sample)].tolist()) for sample in samples]

    @on_all_ranks
    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Clips the gradient, applies it, and forgets it.

        Metrics: ``grad_norm`` (before clipping), ``lr``, ``updated`` (1 when the weights moved) and ``skipped_nonfinite``.
        Without any gradient, or with one that is not finite, weights and optimizer state stay as they are.
        """
        settings = self.config.optimizer
        rate = settings.lr if lr is None else lr
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = self._ranks.norm(grads) if grads else 0.0
        finite = bool(np.isfinite(norm))
        if grads and finite:
            for group in self._optimizer.param_groups:
                torch.nn.utils.clip_grads_with_norm_(group["params"], settings.grad_clip, torch.tensor(norm))
                group["lr"] = rate
            self._optimizer.step()
            self.updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": norm,
            "lr": rate,
            "updated": float(bool(grads) and finite),
            "skipped_nonfinite": float(not finite),
        }

    @on_all_ranks
    def logprobs(self, token_ids: tuple[int, ...], temperature: float = 1.0) -> list[float]:
        """Log-probability of each token but the first given those before it: ``len(token_ids) - 1`` numbers."""
        if len(token_ids) < 2:
            raise TrainerError("log-probabilities need at least two tokens")
        self._check_tokens(token_ids)
        return sequence_logprobs(self._score, tuple(token_ids), temperature)

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
        """The weights that training can change, whole, adapters merged, under Hugging Face names; tied ones once."""
        if self.config.method == "full":
            yield from ((name, self._whole(name)) for name in self._parameters)
        for name, layer in self._lora.items():
            yield f"{name}.weight", merge_lora(*self._lora_parts(name), layer.scale)

    def write_weights(self, views: Mapping[str, Tensor]) -> None:
        """Writes :meth:`named_weights` into ``views`` (same names and shapes) without making them first."""
        if self.config.method == "full":
            for name in self._parameters:
                views[name].copy_(self._whole(name))
        for name, layer in self._lora.items():
            merge_lora(*self._lora_parts(name), layer.scale, out=views[f"{name}.weight"])

    def _lora_parts(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        return self._whole(f"{name}.weight"), self._whole(f"{name}.lora_a"), self._whole(f"{name}.lora_b")

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
        odd = next((name for name, p in self._parameters.items() if not bool(torch.isfinite(here(p)).all())), None)
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
            dict(reference_tensors(self._lora)),
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
        load_reference_tensors(self._lora, checkpoint.reference)
        self._optimizer = self._fresh_optimizer()
        for name, values in checkpoint.optimizer.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = {key: like(parameter, value) for key, value in values.items()}
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
                write_adapter(partial, self._lora, self._whole, self.config.lora, str(Path(self.config.model).absolute()))
                return
            for pattern in _NOT_WEIGHTS:
                for path in Path(self.config.model).glob(pattern):
                    if not path.name.endswith(".index.json"):
                        (partial / path.name).write_bytes(path.read_bytes())
            self._model.config.save_pretrained(partial)  # the trained dtype, not the base's
            write_safetensors(partial / "model.safetensors", self.named_weights())

    @on_all_ranks
    def reset(self, weights_uri: str | None = None) -> None:
        """Starts anew, with a fresh optimizer, from an export of :meth:`export`, or from the base when None.

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
        for name, parameter in self._parameters.items():
            fill(parameter, tensors[name])

    def _identity(self) -> dict[str, Any]:
        shapes = {name: list(parameter.shape) for name, parameter in self._parameters.items()}
        lora = self.config.lora.model_dump(mode="json") if self.config.method == "lora" else None
        return {"method": self.config.method, "lora": lora, "model": Path(self.config.model).name, "shapes": shapes}


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    odd = [key for key in ours if theirs.get(key) != ours[key]]
    return f"{', '.join(odd)} differ; use the configuration it was saved with"
