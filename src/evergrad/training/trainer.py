"""The trainer: a batch in, new weights out.

The walk of one step::

    TrainingBatch ──trained_tokens──▶ which positions carry a loss ──plant──▶ forests of distinct tokens (micro-batches)
      each forest: pair_logprobs ──[P]──▶ spread to the (sample, position)s that share it ──[T]──▶ loss, summed,
      over num_valid_tokens of the whole batch ──backward──▶ gradients add up ──optim_step──▶ clip, AdamW
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evergrad.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from evergrad.training.config import LossConfig, TrainerConfig, TrainerError
from evergrad.training.forest import Forest, TrainedTokens, plant
from evergrad.training.lora import LoraLinear, add_lora, load_adapter_tensors, write_adapter
from evergrad.training.losses import Loss, TokenTensors
from evergrad.training.meter import Meter
from evergrad.training.model import check_faithful, load_model, pair_logprobs, sequence_logprobs
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

    def forward_backward(self, batch: TrainingBatch, loss: LossConfig) -> dict[str, float]:
        """Adds the gradient of ``Σ loss / batch.num_valid_tokens`` to what is there, without moving the weights.

        Metrics: ``loss``; ``sampled_tokens`` (positions with a mask), ``gradient_tokens`` (those with a gradient),
        ``trained_tokens`` (distinct tokens computed, forward and backward), ``batch_tokens`` (all positions of all samples),
        ``micro_batches``; for losses of sampled tokens also ``ratio_mean``, ``ratio_max_error`` (largest |π/μ − 1|),
        ``mismatch_kl`` (of behaviour and current policy, per trained token) and ``clipped_share``.

        Raises:
            TrainerError: a trained position is a sample's first, or has a log-probability or advantage that is not finite, a
                token that the model does not know, or more masked positions than ``num_valid_tokens``. Named by sample and
                position; nothing changed.
        """
        rule = loss.build()
        trained = trained_tokens(batch, rule.needs_advantage)
        for item in trained:
            self._check_tokens(item.sample.token_ids, item.sample.rollout_id)
        forests = plant(trained, self.config.micro_batch_tokens)
        meter = Meter(batch, rule)
        for forest in forests:
            self._backward(forest, rule, batch.num_valid_tokens, meter)
        return meter.metrics(forests)

    def _backward(self, forest: Forest, rule: Loss, denominator: int, meter: Meter) -> None:
        pairs = pair_logprobs(self._model, forest)
        tokens = TokenTensors(
            logprobs=pairs.index_select(0, torch.from_numpy(forest.pair_of_token).to(pairs.device)),
            behaviour_logprobs=torch.from_numpy(forest.behaviour_logprobs).to(pairs),
            advantages=torch.from_numpy(forest.advantages).to(pairs),
        )
        loss = rule(tokens).sum() / denominator
        loss.backward()  # type: ignore[no-untyped-call]
        meter.add(loss, tokens)

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Clips the gradient, applies it, and forgets it.

        Metrics: ``grad_norm`` (before clipping), ``lr``, ``updated`` (1 when the weights moved) and ``skipped_nonfinite``.
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
        return {
            "grad_norm": norm,
            "lr": rate,
            "updated": float(bool(grads) and finite),
            "skipped_nonfinite": float(not finite),
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
            self._identity(), self.updates, self.policy_version, dict(self._parameters), state, torch.get_rng_state()
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
        self._optimizer = self._fresh_optimizer()
        for name, values in checkpoint.optimizer.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in values.items()}
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
        """Starts anew, with a fresh optimizer, from an export of :meth:`export`, or from the base when None.

        Raises:
            TrainerError, TransferError: the export does not fit or is damaged; the trainer is as it was.
        """
        if self.config.method == "lora":
            if weights_uri is None:
                self._reset_lora()
            else:
                load_adapter_tensors(self._lora, *load_adapter(weights_uri))
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
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[name])

    def _identity(self) -> dict[str, Any]:
        shapes = {name: list(parameter.shape) for name, parameter in self._parameters.items()}
        lora = self.config.lora.model_dump(mode="json") if self.config.method == "lora" else None
        return {"method": self.config.method, "lora": lora, "model": Path(self.config.model).name, "shapes": shapes}


def trained_tokens(batch: TrainingBatch, needs_advantage: bool) -> list[TrainedTokens]:
    """Which positions of which samples carry a loss; samples without any are left out.

    Raises:
        TrainerError: see :meth:`Trainer.forward_backward`.
    """
    masked = sum(sum(1 for value in sample.loss_mask if value) for sample in batch.samples)
    if masked > batch.num_valid_tokens:
        raise TrainerError(f"{masked} positions carry a loss, but num_valid_tokens is {batch.num_valid_tokens}")
    found = []
    for number, sample in enumerate(batch.samples):
        _check_lengths(number, sample)
        mask = np.asarray(sample.loss_mask, dtype=bool)
        if needs_advantage:
            mask &= np.asarray(sample.advantages, dtype=np.float64) != 0.0
        positions = np.flatnonzero(mask)
        if len(positions):
            _check_values(number, sample, positions, needs_advantage)
            found.append(TrainedTokens(sample, positions))
    return found


def _check_lengths(number: int, sample: TrainingSample) -> None:
    lengths = {len(sample.token_ids), len(sample.loss_mask), len(sample.logprobs), len(sample.advantages)}
    if len(lengths) != 1:
        raise TrainerError(
            f"sample {number}: tokens, mask, logprobs and advantages differ in length", where=sample.rollout_id or None
        )


def _check_values(number: int, sample: TrainingSample, positions: np.ndarray[Any, Any], needs_advantage: bool) -> None:
    where = sample.rollout_id or None
    if positions[0] == 0:
        raise TrainerError(f"sample {number}: the first token has no context to be predicted from", where=where)
    if not sample.temperature > 0.0:
        raise TrainerError(f"sample {number}: temperature {sample.temperature} has no gradient", where=where)
    for field in ("logprobs", "advantages") if needs_advantage else ():
        values = np.asarray(getattr(sample, field), dtype=np.float64)[positions]
        if not np.isfinite(values).all():
            position = int(positions[np.flatnonzero(~np.isfinite(values))[0]])
            raise TrainerError(f"sample {number}, position {position}: {field} is not finite", where=where)


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    odd = [key for key in ours if theirs.get(key) != ours[key]]
    return f"{', '.join(odd)} differ; use the configuration it was saved with"
