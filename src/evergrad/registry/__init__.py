"""Remembers every model version, its parents, and what each alias serves; finds base models by name."""

from evergrad.registry.base_models import ModelError, Progress, base_model, check_model_folder, default_cache, find_smollm2_gguf
from evergrad.registry.store import AliasEvent, Registry, RegistryError
from evergrad.registry.tiny import make_tiny

__all__ = [
    "AliasEvent",
    "ModelError",
    "Progress",
    "Registry",
    "RegistryError",
    "base_model",
    "check_model_folder",
    "default_cache",
    "find_smollm2_gguf",
    "make_tiny",
]
