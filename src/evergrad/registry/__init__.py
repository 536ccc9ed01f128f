"""Remembers every model version, its parents, what each alias serves and what is on its way there.

Finds base models by name."""

from evergrad.registry._moves import AliasEvent, RegistryError
from evergrad.registry.base_models import (
    ModelError,
    Progress,
    base_model,
    check_model_folder,
    default_cache,
    find_smollm2_gguf,
    parameter_count,
)
from evergrad.registry.releases import ReleaseEvent, Releases
from evergrad.registry.store import Registry
from evergrad.registry.tiny import make_tiny

__all__ = [
    "AliasEvent",
    "ModelError",
    "Progress",
    "Registry",
    "RegistryError",
    "ReleaseEvent",
    "Releases",
    "base_model",
    "check_model_folder",
    "default_cache",
    "find_smollm2_gguf",
    "make_tiny",
    "parameter_count",
]
