"""The model: transformers' own definition, with its attention and its linear layers replaced, and weights that can be rebound.

Weights are bound, not copied: a change of version replaces the parameters of the modules by other tensors, which may be views
of memory that another process wrote. A version is always the base, as loaded at the start, with some or all of its tensors
replaced; so it depends on nothing that was served in between.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evergrad.config import nearest
from evergrad.inference._adapters import Adapter, AdapterLayers
from evergrad.inference._attention import ATTENTION_NAME, PagedCache, chunks_positions, paged_attention, plan_step
from evergrad.inference._decoder import Decoder, recognize
from evergrad.inference._linear import Packed, PackedLinear, can_pack, pack
from evergrad.inference._quantized import QuantizedWeight
from evergrad.inference._rows import Row
from evergrad.inference._schedule import Chunk
from evergrad.inference.config import EngineConfig, EngineError
from evergrad.transfer.adapters import LoraPart
from evergrad.transfer.proof import all_finite
from evergrad.transfer.worker import pick_device

_loading = threading.Lock()


@dataclass(frozen=True)
class Staged:
    """A version, ready for :meth:`Model.bind`."""

    tensors: Mapping[str, torch.Tensor]
    """By canonical name; the others are the base's."""
    packed: Mapping[str, Packed | None]
    """By canonical name of the weights of :class:`PackedLinear` that change."""
    full_precision: bool
    """Not quantized."""


class Model:
    """A causal language model over a paged cache."""

    reuses_blocks = True
    """What a block holds, another row can go on from."""

    def __init__(self, config: EngineConfig) -> None:
        """
        Raises:
            EngineError: the folder holds no model, or one that cannot be computed this way.
        """
        self.device = pick_device(config.device)
        self.dtype = _dtype(config.dtype)
        self._module = _load_module(Path(config.model), self.dtype, self.device)
        text = self._module.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.sample_logprobs = self._sample_logprobs()
        """(tokens, logprob of each but the first) as transformers computes them, before anything is replaced."""
        limit = int(getattr(text, "max_position_embeddings", None) or config.kv_cache_tokens)
        self.max_len = min(config.max_model_len or limit, limit, config.kv_cache_tokens)
        self.has_windows = getattr(text, "sliding_window", None) is not None
        self.eos_token_ids = _eos_token_ids(self._module)
        self._places = _parameter_places(self._module)
        self._base = {name: _get(places[0]) for name, places in self._places.items()}
        self._aliases = {alias: name for name, places in self._places.items() for alias in _names(places)}
        self.adapters = AdapterLayers(self._module)
        self._packed: dict[str, list[PackedLinear]] = {}
        """By canonical name of their weight."""
        self._may_quantize = config.quantization is not None
        if self._may_quantize and (self.device.type, self.dtype) != ("cpu", torch.float32):
            raise EngineError(
                f"quantization '{config.quantization}' is for float32 on a CPU, and this engine computes in {config.dtype} on "
                f"{self.device}",
                hint="leave quantization out, or set device = 'cpu' and dtype = 'float32'",
            )
        self._live = Staged({}, {}, full_precision=not self._may_quantize)
        self.decoder: Decoder | None = None
        """What computes a step in place of transformers' definition, where it can."""
        self._attach(config)

    @property
    def quantizes(self) -> bool:
        """Whether the live version's products are of integers."""
        return not self._live.full_precision

    @property
    def architecture(self) -> str:
        return str(self._module.config.model_type)

    @property
    def base(self) -> Mapping[str, torch.Tensor]:
        """The tensors of the folder that the engine started from, by every name that they have."""
        return {alias: self._base[name] for alias, name in self._aliases.items()}

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], wanted: list[int]) -> torch.Tensor:
        """Logits [len(wanted), V] after the tokens at the places ``wanted`` of the flat batch of all chunks."""
        self.adapters.plan(chunks, wanted, self.device)
        token_ids = torch.tensor([token for chunk in chunks for token in chunk.token_ids], device=self.device)
        positions = torch.as_tensor(chunks_positions(chunks), device=self.device)
        self.cache.plan = plan_step(chunks, self.device, self.has_windows)
        try:
            if self.decoder is not None:
                return self.decoder.forward(token_ids, positions, wanted)
            keep = torch.tensor(wanted, dtype=torch.long, device=self.device)
            output = self._module(input_ids=token_ids[None], position_ids=positions[None], logits_to_keep=keep, use_cache=False)
        finally:
            self.cache.plan = None
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def score(self, row: Row, step: int, *, exact: bool = False) -> list[float]:
        """Log-probability of each of the row's tokens but the first, at temperature 1; its blocks have room for them all.

        Args:
            step: Tokens that are computed at once.
            exact: Under the live weights themselves, not under what quantization made of them.
        """
        if exact:
            with self._exactly():
                return self.score(row, step)
        found: list[float] = []
        for start in range(0, len(row.tokens), step):
            chunk = Chunk(row, start, min(len(row.tokens), start + step))
            logits = self.forward([chunk], list(range(chunk.end - start)))
            targets = torch.tensor(row.tokens[start + 1 : chunk.end + 1], dtype=torch.long, device=logits.device)
            logprobs = torch.log_softmax(logits[: len(targets)].float(), dim=-1)
            found += logprobs.gather(1, targets[:, None])[:, 0].tolist()
        return found

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """Copies what is kept of ``count`` consecutive tokens from one place of the cache to another."""
        self.cache.copy_tokens(source, target, count)

    def adopt(self, name: str, parts: Mapping[str, LoraPart]) -> Adapter:
        """An adapter as this model needs it, for :meth:`AdapterLayers.cover`. May run while steps go on.

        Raises:
            EngineError: it cannot be added to the base.
        """
        return self.adapters.adopt(name, parts, self.dtype, self.device)

    def fork(self, row: Row, child: Row) -> None:
        """``child`` goes on from all that ``row`` has computed; its blocks say where that is."""

    def check(self, tensors: Mapping[str, torch.Tensor], *, whole: bool, known_finite: bool = False) -> dict[str, torch.Tensor]:
        """For :meth:`stage`: by canonical name, on the engine's device, in its dtype; no copy where that holds already.

        Args:
            whole: Every parameter must be there; else those that are not are the base's.
            known_finite: The values have been looked at.

        Raises:
            EngineError: an unknown name, another shape, a missing tensor, or a value that is not finite.
        """
        checked: dict[str, torch.Tensor] = {}
        for alias, tensor in tensors.items():
            name = self._aliases.get(alias)
            if name is None:
                raise EngineError(f"the model has no tensor '{alias}'", hint=nearest(alias, self._aliases))
            if tensor.shape != self._base[name].shape:
                raise EngineError(f"'{alias}' is {tuple(tensor.shape)}, the model needs {tuple(self._base[name].shape)}")
            if not known_finite and not all_finite(tensor):
                raise EngineError(f"'{alias}' has values that are not finite")
            checked[name] = tensor.detach().to(device=self.device, dtype=self.dtype)
        if not checked:
            raise EngineError("an update without tensors")
        missing = sorted(self._base.keys() - checked.keys()) if whole else []
        if missing:
            raise EngineError(f"{len(missing)} tensors are missing, first '{missing[0]}'")
        return checked

    @torch.inference_mode()
    def stage(self, tensors: Mapping[str, torch.Tensor], *, full_precision: bool = False) -> Staged:
        """The base, with ``tensors`` (as :meth:`check` returned them) in place of their namesakes, for :meth:`bind`.

        May run in another thread while steps go on.

        Args:
            full_precision: Not quantized, whatever the configuration says.
        """
        full_precision = full_precision or not self._may_quantize
        changing = set(self._packed)
        if full_precision == self._live.full_precision:
            changing &= tensors.keys() | self._live.tensors.keys()
        packed = {name: self._pack(tensors.get(name, self._base[name]), full_precision) for name in changing}
        return Staged(tensors, packed, full_precision)

    def bind(self, staged: Staged) -> None:
        """Makes a version the live weights; it must have been staged since the last one became so."""
        for name, places in self._places.items():
            parameter = nn.Parameter(staged.tensors.get(name, self._base[name]), requires_grad=False)
            for module, attribute, _ in places:
                module._parameters[attribute] = parameter
        for name, packed in staged.packed.items():
            for layer in self._packed[name]:
                layer.packed = packed
        self._live = staged

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        """Inside, products are by the weights themselves, whatever was made of them."""
        layers = [layer for sharing in self._packed.values() for layer in sharing if layer.quantizes]
        for layer in layers:
            layer.exact = True
        try:
            yield
        finally:
            for layer in layers:
                layer.exact = False

    @torch.inference_mode()
    def _sample_logprobs(self) -> tuple[tuple[int, ...], list[float]]:
        # The eager one is complete; faster ones leave out what their kernels do not know, such as a cap on scores.
        self._module.config._attn_implementation = "eager"
        tokens = tuple(7919 * place % self.vocab_size for place in range(1, 25))
        logits = self._module(torch.tensor([tokens], device=self.device), use_cache=False).logits[0, :-1]
        targets = torch.tensor(tokens[1:], device=self.device)
        return tokens, torch.log_softmax(logits.float(), dim=-1).gather(1, targets[:, None])[:, 0].tolist()

    def _attach(self, config: EngineConfig) -> None:
        text = self._module.config.get_text_config()
        heads = text.num_attention_heads
        self.cache = PagedCache(
            num_layers=text.num_hidden_layers,
            num_slots=config.kv_cache_tokens // config.block_size * config.block_size,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            dtype=self.dtype,
            device=self.device,
        )
        self._module.config._attn_implementation = ATTENTION_NAME
        layers = 0
        for module in self._module.modules():
            if hasattr(module, "layer_idx"):
                module.paged_cache = self.cache
                layers += hasattr(module, "k_proj") or hasattr(module, "qkv_proj")
        if layers != self.cache.memory.shape[0]:
            raise EngineError(
                f"{layers} attention layers where {self.cache.memory.shape[0]} were expected",
                hint="only models whose every layer is standard attention can be served",
            )
        self._pack_layers()
        self.decoder = recognize(self._module, self.cache)

    @torch.inference_mode()
    def _pack_layers(self) -> None:
        for name, weight in self._base.items():
            owners = [owner for owner, attribute, _ in self._places[name] if type(owner) is nn.Linear and attribute == "weight"]
            if owners and (self._may_quantize or can_pack(weight)):
                self._packed[name] = PackedLinear.replace(owners, self._pack(weight, self._live.full_precision))

    def _pack(self, weight: torch.Tensor, full_precision: bool) -> Packed | None:
        if not full_precision:
            return QuantizedWeight.of(weight)
        return pack(weight) if can_pack(weight) else None


_Place = tuple[nn.Module, str, str]
"""Module, attribute, and full name of a parameter."""


def _load_module(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise EngineError("no model here", where=str(folder), hint="give a Hugging Face folder with config.json and weights")
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    with _loading:
        try:
            module, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
        except Exception as error:
            raise EngineError(f"the model cannot be loaded: {error}", where=str(folder)) from error
    if report["missing_keys"] or report["mismatched_keys"]:
        odd = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        raise EngineError(f"{len(odd)} tensors are missing or misshapen, first '{odd[0]}'", where=str(folder))
    module.to(device).eval().requires_grad_(False)
    return module


def _parameter_places(module: nn.Module) -> dict[str, list[_Place]]:
    """Canonical name → everywhere that parameter is used; tied weights are one parameter with several places."""
    by_identity: dict[int, str] = {}
    places: dict[str, list[_Place]] = {}
    for prefix, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            canonical = by_identity.setdefault(id(parameter), name)
            places.setdefault(canonical, []).append((owner, attribute, name))
    return places


def _names(places: list[_Place]) -> list[str]:
    return [name for _, _, name in places]


def _get(place: _Place) -> torch.Tensor:
    module, attribute, _ = place
    parameter = module._parameters[attribute]
    assert parameter is not None
    return parameter.detach()


def _eos_token_ids(module: Any) -> tuple[int, ...]:
    found = getattr(module.generation_config, "eos_token_id", None)
    if found is None:
        found = module.config.eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)


def _dtype(name: str) -> torch.dtype:
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in names:
        raise EngineError(f"dtype '{name}' is not known", hint=nearest(name, names))
    return names[name]
