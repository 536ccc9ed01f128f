"""Every example in a docstring gives what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import evergrad

MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(evergrad.__path__, "evergrad.")
    if not found.name.endswith("__main__")  # importing one runs it
)


def test_there_are_examples() -> None:
    assert sum(len(test.examples) for test in doctest.DocTestFinder().find(importlib.import_module("evergrad.types"))) > 10


NOT_HERE = {"evergrad.inference.backends.evergrad_vllm_slots": "vllm"}
"""Modules that are loaded by another program, in whose environment they find what they need."""


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name: str) -> None:
    if name in NOT_HERE:
        pytest.importorskip(NOT_HERE[name])
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
