"""Losses against their closed forms, and configuration errors that name the nearest valid spelling."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from evergrad.training import LossConfig
from evergrad.training.losses import LOSSES, TokenTensors


def tokens(logprobs: list[float], behaviour: list[float], advantages: list[float]) -> TokenTensors:
    def double(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return TokenTensors(double(logprobs).requires_grad_(), double(behaviour), double(advantages))


def test_cross_entropy_is_minus_logprob() -> None:
    given = tokens([math.log(0.25), -3.0], [-9.0, 9.0], [7.0, 0.0])
    loss = LossConfig(name="cross_entropy").build()(given)
    assert loss.tolist() == [math.log(4.0), 3.0]
    loss.sum().backward()
    assert given.logprobs.grad is not None
    assert given.logprobs.grad.tolist() == [-1.0, -1.0]


def test_policy_gradient_weighs_truncates_and_does_not_differentiate_the_weight() -> None:
    # Ratios 1, 1/2, 4 (truncated to 2), 4 with a negative advantage (truncated as well: the cap is one-sided).
    given = tokens(
        [-1.0, -1.0 - math.log(2), -1.0, -1.0], [-1.0, -1.0, -1.0 - math.log(4), -1.0 - math.log(4)], [1.0, 2.0, 1.0, -3.0]
    )
    rule = LossConfig(name="policy_gradient").build()
    loss = rule(given)
    expected = [1.0, 0.5 * 2.0 * (1.0 + math.log(2)), 2.0, 2.0 * -3.0]
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    loss.sum().backward()
    assert given.logprobs.grad is not None
    assert given.logprobs.grad.tolist() == pytest.approx([-1.0, -1.0, -2.0, 6.0], abs=1e-12)
    assert rule.clipped(given).tolist() == [False, False, True, True]


def test_an_absurd_behaviour_logprob_is_bounded_by_the_cap() -> None:
    loss = LossConfig(options={"ratio_cap": 5.0}).build()(tokens([-1.0], [-1e6], [1.0]))
    assert loss.tolist() == [5.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("policy_gradiant", {}, "did you mean 'policy_gradient'"),
        ("policy_gradient", {"ratio_cp": 2.0}, "did you mean 'ratio_cap'"),
        ("policy_gradient", {"ratio_cap": 0.0}, "greater than 0"),
        ("cross_entropy", {"ratio_cap": 2.0}, "it has none"),
    ],
)
def test_bad_configurations_are_refused_at_once(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LossConfig(name=name, options=options)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_keeps_the_contract(name: str) -> None:
    """One number per token, gradient to the log-probabilities alone, and none through a token that says nothing."""
    rule = LOSSES[name]()
    given = tokens([-0.5, -1.5, -2.5], [-0.4, -1.5, -9.0], [1.0, 0.0, -1.0])
    loss = rule(given)
    assert loss.shape == (3,)
    loss.sum().backward()
    assert given.logprobs.grad is not None
    assert torch.isfinite(given.logprobs.grad).all()
    if rule.needs_advantage:
        assert given.logprobs.grad[1] == 0.0
    assert rule.clipped(given).dtype == torch.bool
    assert rule.clipped(given).shape == (3,)
