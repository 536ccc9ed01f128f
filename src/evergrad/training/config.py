"""Settings of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from evergrad.config import Config
from evergrad.training.losses import Loss, build_loss
from evergrad.transfer.config import TransferConfig
from evergrad.types import EvergradError

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class TrainerError(EvergradError):
    """Training that did not happen, and why; the weights are as they were."""


class LoraConfig(Config):
    """Low-rank updates of linear layers: ``W + scale · B A`` with ``scale = alpha/rank`` (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: tuple[str, ...] = Field(default=LORA_TARGETS, min_length=1)
    """Last parts of the names of the linear layers to adapt."""
    rslora: bool = False
    """``scale = alpha/√rank`` instead, which does not shrink the update as the rank grows (arXiv 2312.03732)."""
    dora: bool = False
    """Learns the length of each row of the adapted matrix apart from its direction (DoRA, arXiv 2402.09353)."""


class OptimizerConfig(Config):
    """AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101) with a constant learning rate unless a step gives its own."""

    lr: float = Field(default=4e-4, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest L2 norm of the whole gradient; a longer one is scaled down to it."""


class LossConfig(Config):
    """Which loss, and its options.

    >>> LossConfig(name="policy_gradient", options={"ratio_cap": 3.0}).build().ratio_cap
    3.0
    """

    name: str = "policy_gradient"
    """A line of ``training/losses``, such as ``policy_gradient``, ``grpo``, ``gspo``, ``dpo`` or ``cross_entropy``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The loss's own fields."""

    @model_validator(mode="after")
    def _known(self) -> LossConfig:
        self.build()
        return self

    def build(self) -> Loss:
        """The loss itself.

        Raises:
            ValueError: no such loss or option; names the nearest.
        """
        return build_loss(self.name, self.options)


class UpdatesConfig(Config):
    """How many optimizer updates are made on one batch: ``epochs × mini_batches``.

    The policy before the first of them is the proximal one, to which a loss with ``anchor = "proximal"`` takes its ratio.
    """

    epochs: int = Field(default=1, ge=1)
    """How often the whole batch is gone through."""
    mini_batches: int = Field(default=1, ge=1)
    """Parts that the groups of a batch are dealt into, in an order of its own each epoch; each part makes one update, and its
    loss divides by what the part holds."""

    @property
    def total(self) -> int:
        """Updates per batch."""
        return self.epochs * self.mini_batches


class CriticConfig(Config):
    """PPO's critic: a head of one hidden layer on the policy's hidden states, with an optimizer of its own."""

    hidden: int = Field(default=256, ge=1)
    """Width of its layer."""
    lr: float = Field(default=1e-3, gt=0)
    """Of its AdamW, constant."""
    clip: float = Field(default=0.2, gt=0)
    """Farther than this from the value before the first update on a batch, an error does not fall by moving on."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest L2 norm of its gradient; a longer one is scaled down to it."""


class TrainerConfig(Config):
    """What is trained, how, and with how much of the machine."""

    model: str
    """A local Hugging Face folder with a causal language model."""
    method: Literal["lora", "full"] = "lora"
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig | None = None
    """For advantages that come from a critic; none when absent."""
    micro_batch_tokens: int = Field(default=1024, ge=1)
    """Distinct tokens computed at once; bounds memory, changes no gradient. Where samples share next to nothing, half of
    it is taken, if that is enough for fast products."""
    memory_gib: float | None = Field(default=None, gt=0)
    """What the tensors of each rank may take: weights, gradients, optimizer and activations; the libraries take their share
    besides. Micro-batches become smaller to fit, then activations are computed twice instead of kept. Changes no gradient."""
    seed: int = 0
    """Of the first weights of a LoRA and a critic."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the whole trainer, shared out over its ranks; torch's choice when absent."""
    ranks: int = Field(default=1, ge=1)
    """Processes of this machine that hold the model in parts and share out each batch; with CUDA, one GPU each."""
    tensor_parallel: int = Field(default=1, ge=1)
    """How many of the ranks split every layer's matrices between them and compute the same samples; divides ``ranks`` and the
    model's heads."""
    device: str = "auto"
    """``auto`` (CUDA when there is one), ``cpu``, ``cuda``, ``cuda:1``, …"""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of the frozen base; what is trained, and its optimizer state, is never narrower than float32."""
    mixed_precision: bool | None = None
    """Computes with weights rounded to bfloat16, and keeps them, their gradients and the optimizer as they are. When absent:
    on CUDA, not on a CPU, where it is slower."""

    transfer: TransferConfig = TransferConfig()

    @model_validator(mode="after")
    def _fits(self) -> TrainerConfig:
        require_ranks(self.ranks, self.tensor_parallel, self.lora)
        require_adapter(self.method, self.transfer)
        return self


def require_ranks(ranks: int, tensor_parallel: int, lora: LoraConfig) -> None:
    """
    Raises:
        ValueError: the ranks, or the layers, cannot be split like that.
    """
    if ranks % tensor_parallel:
        raise ValueError(f"{ranks} ranks cannot be split by tensor_parallel = {tensor_parallel}; choose a divisor of ranks")
    if tensor_parallel > 1 and lora.dora:
        raise ValueError(
            "tensor_parallel would cut the rows whose lengths DoRA learns; set tensor_parallel = 1, or lora.dora = false"
        )


def require_adapter(method: str, transfer: TransferConfig) -> None:
    """
    Raises:
        ValueError: an adapter is to be published, and none is trained.
    """
    if transfer.adapter_only and method != "lora":
        raise ValueError("transfer.adapter_only publishes an adapter, and none is trained; set method = 'lora'")


def require_model_folder(path: str) -> None:
    """
    Raises:
        TrainerError: ``path`` is no Hugging Face folder; said before anything heavy is loaded.
    """
    if not (Path(path) / "config.json").is_file():
        raise TrainerError("no model here", where=path, hint="give a folder with config.json and safetensors weights")
