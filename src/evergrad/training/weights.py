"""What of a model learns, and the forms in which it is handed on: as named weights, as an export, as a reference.

There are two: all of it, or a LoRA on some layers. Where a method takes ``whole``, that is what makes a parameter whole, given
its name, when several ranks hold parts of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evergrad.training.config import TrainerConfig, TrainerError
from evergrad.training.lora import (
    LoraLinear,
    adapter_names,
    add_lora,
    as_reference,
    load_adapter_tensors,
    load_reference_tensors,
    peft_settings,
    reference_tensors,
    write_adapter,
)
from evergrad.training.parts import fill
from evergrad.transfer import Publisher, load_adapter, load_tensors, merge_lora, require_base
from evergrad.transfer.files import write_safetensors

Whole = Callable[[str], Tensor]
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]

_NOT_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of a model folder that go along with an export."""


class Weights(ABC):
    """The part of ``model`` that learns; its parameters by name."""

    def __init__(self, model: Any, config: TrainerConfig) -> None:
        self._model, self._config = model, config

    @property
    def parameters(self) -> dict[str, Tensor]:
        """As they are now: placing a model over ranks puts others in their place."""
        return {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}

    def published(self) -> dict[str, Tensor] | None:
        """The parameters that :meth:`write` writes as they are, by the names that it gives them; None when it makes what it
        writes of several."""
        return None

    @abstractmethod
    def layout(self) -> Layout:
        """Names, shapes and dtypes of what :meth:`write` writes."""

    @abstractmethod
    def named(self, whole: Whole) -> Iterator[tuple[str, Tensor]]:
        """The weights that training can change, whole, adapters merged, under Hugging Face names; tied ones once."""

    @abstractmethod
    def write(self, publisher: Publisher, views: Mapping[str, Tensor], whole: Whole) -> None:
        """Fills a version that ``publisher`` has begun, and whose ``views`` are as :meth:`layout` says, with :meth:`named`,
        without making them first; or with the adapter's parts, where the configuration says so."""

    def adapter(self) -> dict[str, Any] | None:
        """PEFT's configuration of the adapter, where its parts are what is written."""
        return None

    @abstractmethod
    def export(self, folder: Path, whole: Whole) -> None:
        """Fills ``folder`` with a model that other tools load. Call inside ``whole_folder``."""

    @abstractmethod
    def restart(self, weights_uri: str | None) -> None:
        """Starts from an export, or from the base when None; all or nothing.

        Raises:
            TrainerError, TransferError: the export does not fit or is damaged.
        """

    @abstractmethod
    def as_reference(self) -> AbstractContextManager[None]:
        """Inside, the model computes what the frozen reference does, and nothing has a gradient.

        Raises:
            TrainerError: there is no reference.
        """

    @abstractmethod
    def reference(self) -> dict[str, Tensor]:
        """Tensors of the frozen reference, where there is one and it is not the base model."""

    @abstractmethod
    def load_reference(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over what :meth:`reference` gave."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must have in common with a trainer to load into it; JSON values."""


class FullWeights(Weights):
    """Everything learns."""

    def published(self) -> dict[str, Tensor]:
        return self.parameters

    def layout(self) -> Layout:
        return _layout_of(self.parameters)

    def named(self, whole: Whole) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, whole(name)) for name in self.parameters)

    def write(self, publisher: Publisher, views: Mapping[str, Tensor], whole: Whole) -> None:
        for name in self.parameters:
            publisher.write(name, whole(name))

    def export(self, folder: Path, whole: Whole) -> None:
        """A whole Hugging Face folder with tokenizer."""
        for pattern in _NOT_WEIGHTS:
            for path in Path(self._config.model).glob(pattern):
                if not path.name.endswith(".index.json"):
                    (folder / path.name).write_bytes(path.read_bytes())
        self._model.config.save_pretrained(folder)  # the trained dtype, not the base's
        write_safetensors(folder / "model.safetensors", self.named(whole))

    def restart(self, weights_uri: str | None) -> None:
        folder = weights_uri or self._config.model
        tensors, parameters = load_tensors(folder), self.parameters
        for name, parameter in parameters.items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise TrainerError(f"'{name}' is missing or of another shape", where=folder)
        for name, parameter in parameters.items():
            fill(parameter, tensors[name])

    def as_reference(self) -> AbstractContextManager[None]:
        raise TrainerError("full fine-tuning keeps no reference", hint="score without reference=True before the first update")

    def reference(self) -> dict[str, Tensor]:
        return {}

    def load_reference(self, tensors: Mapping[str, Tensor]) -> None:
        pass

    def identity(self) -> dict[str, Any]:
        return {"method": "full", "lora": None}


class LoraWeights(Weights):
    """Low-rank adapters learn, on linear layers that stay as they are."""

    def __init__(self, model: Any, config: TrainerConfig, dtype: torch.dtype) -> None:
        """Freezes the model and adds the adapters.

        Args:
            dtype: Of the adapters.

        Raises:
            TrainerError: a target matches no linear layer, or the output embedding.
        """
        super().__init__(model, config)
        head = model.get_output_embeddings()
        self._layers: dict[str, LoraLinear] = add_lora(model, config.lora, config.seed, dtype)
        if model.get_output_embeddings() is not head:
            raise TrainerError("the output embedding cannot be a LoRA target", hint="remove it from lora.targets")

    def published(self) -> dict[str, Tensor] | None:
        if not self._config.transfer.adapter_only:
            return None
        return {name: self._model.get_parameter(here) for name, here in adapter_names(self._layers)}

    def layout(self) -> Layout:
        parts = self.published()
        if parts is not None:
            return _layout_of(parts)
        return {f"{name}.weight": (tuple(each.weight.shape), each.weight.dtype) for name, each in self._layers.items()}

    def named(self, whole: Whole) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self._layers.items():
            yield f"{name}.weight", merge_lora(*self._parts(name, layer, whole), scale=layer.scale)

    def write(self, publisher: Publisher, views: Mapping[str, Tensor], whole: Whole) -> None:
        if self._config.transfer.adapter_only:
            for name, here in adapter_names(self._layers):
                publisher.write(name, whole(here))
            return
        for name, layer in self._layers.items():
            merge_lora(*self._parts(name, layer, whole), scale=layer.scale, out=views[f"{name}.weight"])
            publisher.written(f"{name}.weight")

    def adapter(self) -> dict[str, Any] | None:
        if not self._config.transfer.adapter_only:
            return None
        return peft_settings(self._layers, self._config.lora, str(Path(self._config.model).absolute()))

    def _parts(self, name: str, layer: LoraLinear, whole: Whole) -> list[Tensor]:
        return [whole(f"{name}.{part}") for part in ("weight", *layer.trained)]

    def export(self, folder: Path, whole: Whole) -> None:
        """A PEFT adapter whose configuration names its base."""
        write_adapter(folder, self._layers, whole, self._config.lora, str(Path(self._config.model).absolute()))

    def restart(self, weights_uri: str | None) -> None:
        """Where it starts from is the frozen reference from then on."""
        if weights_uri is None:
            generator = torch.Generator().manual_seed(self._config.seed)
            for layer in self._layers.values():
                layer.reset(generator)
            return
        config, tensors = load_adapter(weights_uri)
        require_base(config, self._config.model, weights_uri)
        load_adapter_tensors(self._layers, config, tensors)
        for layer in self._layers.values():
            layer.freeze()

    def as_reference(self) -> AbstractContextManager[None]:
        return as_reference(self._layers)

    def reference(self) -> dict[str, Tensor]:
        return dict(reference_tensors(self._layers))

    def load_reference(self, tensors: Mapping[str, Tensor]) -> None:
        load_reference_tensors(self._layers, tensors)

    def identity(self) -> dict[str, Any]:
        # Without the switches that are off: an earlier version did not know them, and its checkpoints load.
        settings = self._config.lora.model_dump(mode="json")
        return {"method": "lora", "lora": {key: value for key, value in settings.items() if value is not False}}


def _layout_of(named: Mapping[str, Tensor]) -> Layout:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}
