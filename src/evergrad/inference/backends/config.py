"""Which engine rolls out, as a run's configuration names it."""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import Field, field_validator, model_validator

from evergrad.config import Config, found_model
from evergrad.transfer import TransferConfig

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of the adapters that vLLM has kernels for: an adapter takes the next one that is not less than its own."""

_OURS = ("--model", "--host", "--port", "--dtype", "--logprobs-mode", "--api-key", "--middleware", "--weight-transfer-config")
"""Arguments of ``vllm serve`` without which what is sampled could not be trained on, or which this side sets."""


class BackendConfig(Config):
    """The engine that rolls out.

    >>> BackendConfig(backend="vllm").starts_server, BackendConfig(backend="sglang", url="http://gpu1:30000").starts_server
    (True, False)
    """

    backend: Literal["evergrad", "vllm", "sglang"] = "evergrad"
    """The house's own engine, vLLM, or SGLang."""
    url: str | None = None
    """Of a server that runs already and has read the run's model; when absent, vLLM is started by the run."""
    command: str = "vllm"
    """The program ``vllm``, by path where it is not on PATH: it lives in an environment of its own."""
    arguments: tuple[str, ...] = Field(default=(), max_length=64)
    """More words for ``vllm serve``, such as ``["--tensor-parallel-size", "2"]``."""
    quantization: Literal["int8"] | None = None
    """Of the house's own engine in reinforcement learning: ``int8`` samples faster from a policy that is near to the trainer's,
    for a loss that corrects the difference. What is measured and served is not quantized."""

    _found_command = field_validator("command")(found_model)

    @property
    def starts_server(self) -> bool:
        """Whether the run starts a server of another make."""
        return self.backend == "vllm" and self.url is None

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"'{url}' is no address of a server; write http://HOST:PORT")
        return url

    @model_validator(mode="after")
    def _fits(self) -> BackendConfig:
        if self.backend == "evergrad" and self.url is not None:
            raise ValueError("the house's own engine is started by the run; leave url out, or set backend = 'vllm' or 'sglang'")
        if self.backend == "sglang" and self.url is None:
            raise ValueError(
                "SGLang is not started by the run; start it, and set url = 'http://HOST:PORT', or backend = 'vllm'"
            )
        if self.quantization is not None and self.backend != "evergrad":
            raise ValueError(
                f"quantization = '{self.quantization}' is of the house's own engine; set backend = 'evergrad', or leave it out"
            )
        if self.arguments and not self.starts_server:
            raise ValueError(
                "arguments are for a vLLM that the run starts; set backend = 'vllm' without url, or leave them out"
            )
        for word in self.arguments:
            if word.partition("=")[0] in _OURS:
                raise ValueError(f"'{word.partition('=')[0]}' is set by the run; leave it out of arguments")
        return self


class Adapter(Protocol):
    """What a server must know of adapters before it is asked to take one; ``LoraConfig`` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def rslora(self) -> bool: ...

    @property
    def dora(self) -> bool: ...


def require_servable(engine: BackendConfig, transfer: TransferConfig, adapter: Adapter, replicas: int) -> None:
    """
    Raises:
        ValueError: the engine cannot take what would be published, or there is not as many of it; says what would do instead.
    """
    if engine.url is not None and replicas > 1:
        raise ValueError(
            f"engine.url names one server, and placement.replicas = {replicas} wants several; set replicas = 1, and give that "
            "server more GPUs"
        )
    if engine.backend == "evergrad" or not transfer.adapter_only:
        return
    name = {"vllm": "vLLM", "sglang": "SGLang"}[engine.backend]
    if adapter.dora:
        raise ValueError(f"{name} serves no DoRA adapters; set transfer.adapter_only = false, and merged weights are published")
    if adapter.rslora and engine.backend == "sglang":
        raise ValueError(
            f"{name} scales adapters by alpha/rank alone; set trainer.lora.rslora = false, or transfer.adapter_only = false"
        )
    if engine.backend == "vllm" and adapter.rank > LORA_RANKS[-1]:
        raise ValueError(
            f"{name} serves adapters up to rank {LORA_RANKS[-1]}; lower trainer.lora.rank, or set transfer.adapter_only = false"
        )
