"""Losses against their closed forms, and configuration errors that name the reason and the nearest sound setting."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError

from evergrad.training import LossConfig
from evergrad.training.losses import LOSSES, Loss, TokenTensors, Totals

EXAMPLES: dict[str, dict[str, object]] = {"dr_grpo": {"constant_length": 8}}
"""Options of the losses that have no default for one."""


def double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(
    logprobs: list[float],
    behaviour: list[float],
    advantages: list[float],
    rollouts: list[int] | None = None,
    **fields: torch.Tensor,
) -> TokenTensors:
    """One rollout unless ``rollouts`` says how many tokens each has; two rollouts in a row are a group."""
    counts = rollouts or [len(logprobs)]
    return TokenTensors(
        logprobs=double(logprobs).requires_grad_(),
        behaviour_logprobs=double(behaviour),
        advantages=double(advantages),
        rollout=torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
        lengths=torch.tensor(counts),
        group=torch.arange(len(counts)) // 2,
        **fields,
    )


def build(name: str, **options: object) -> Loss:
    return LossConfig(name=name, options=EXAMPLES.get(name, {}) | options).build()


def gradient(loss: Loss, given: TokenTensors, totals: Totals | None = None) -> list[float]:
    """Of the total with respect to the log-probabilities; of the bare sum without totals."""
    value = loss(given).sum() if totals is None else loss.total(given, totals)
    (found,) = torch.autograd.grad(value, given.logprobs)
    return list(found.tolist())


def slope(function: Callable[[float], float], at: float) -> float:
    """Central difference: exact to about 1e-9."""
    return (function(at + 1e-6) - function(at - 1e-6)) / 2e-6


def test_cross_entropy_is_minus_weighted_logprob() -> None:
    given = tokens([math.log(0.25), -3.0], [-9.0, 9.0], [1.0, 0.5])
    loss = build("cross_entropy")
    assert loss(given).tolist() == [math.log(4.0), 1.5]
    assert gradient(loss, given) == [-1.0, -0.5]


@pytest.mark.parametrize(("name", "options"), [("policy_gradient", {}), ("cispo", {"ratio_cap": 2.0})])
def test_policy_gradient_weighs_truncates_and_does_not_differentiate_the_weight(name: str, options: dict[str, float]) -> None:
    # Ratios 1, 1/2, 4 (truncated to 2), 4 with a negative advantage (truncated as well: the cap is one-sided).
    given = tokens(
        [-1.0, -1.0 - math.log(2), -1.0, -1.0], [-1.0, -1.0, -1.0 - math.log(4), -1.0 - math.log(4)], [1.0, 2.0, 1.0, -3.0]
    )
    rule = build(name, **options)
    assert rule(given).tolist() == pytest.approx([1.0, 0.5 * 2.0 * (1.0 + math.log(2)), 2.0, 2.0 * -3.0], abs=1e-12)
    assert gradient(rule, given) == pytest.approx([-1.0, -1.0, -2.0, 6.0], abs=1e-12)
    assert rule.figures(given)["clipped_share"].tolist() == [False, False, True, True]


def test_an_absurd_behaviour_logprob_is_bounded_by_the_cap() -> None:
    loss = LossConfig(options={"ratio_cap": 5.0}).build()(tokens([-1.0], [-1e6], [1.0]))
    assert loss.tolist() == [5.0]


@pytest.mark.parametrize("ratio", [0.5, 0.79, 1.0, 1.19, 1.21, 1.5, 4.0])
@pytest.mark.parametrize("advantage", [1.0, -2.0])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_ppo_is_its_closed_form_in_value_and_slope(ratio: float, advantage: float, dual: float | None) -> None:
    def closed(logprob: float) -> float:
        r = math.exp(logprob + 1.0)
        outer = min(r, dual) if dual and advantage < 0 else r
        return -min(outer * advantage, min(max(r, 0.8), 1.2) * advantage)

    given = tokens([-1.0 + math.log(ratio)], [-1.0], [advantage])
    rule = build("ppo", dual_clip=dual)
    assert rule(given).item() == pytest.approx(closed(-1.0 + math.log(ratio)), abs=1e-12)
    assert gradient(rule, given) == pytest.approx([slope(closed, -1.0 + math.log(ratio))], abs=1e-6)
    outside = ratio > 1.2 if advantage > 0 else ratio < 0.8
    assert rule.figures(given)["clipped_share"].tolist() == [outside]


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("grpo", [1 / 6, 1 / 6, 1 / 4, 1 / 4]),  # 3 valid tokens, of which one is not here; 2 rollouts
        ("dapo", [1 / 5] * 4),
        ("dr_grpo", [1 / 16] * 4),
    ],
)
def test_what_the_clipped_losses_divide_by(name: str, weights: list[float]) -> None:
    given = tokens([-1.0] * 4, [-1.0] * 4, [1.0, 1.0, -1.0, -1.0], [2, 2])
    given = TokenTensors(**{f: getattr(given, f) for f in TokenTensors.__slots__} | {"lengths": torch.tensor([3, 2])})
    expected = [-w * a for w, a in zip(weights, [1.0, 1.0, -1.0, -1.0], strict=True)]
    assert gradient(build(name), given, Totals(tokens=5, rollouts=2)) == pytest.approx(expected, abs=1e-12)


def test_gspo_clips_whole_answers_by_their_mean_log_ratio() -> None:
    # Mean log-ratios 0.1 (inside) and 0.4 (outside, positive advantage: no gradient).
    given = tokens([-1.0, -1.0, -1.0], [-1.3, -0.9, -1.4], [2.0, 2.0, 1.0], [2, 1])
    rule = build("gspo", clip_low=0.2, clip_high=0.2)
    assert rule(given).tolist() == pytest.approx([-2.0 * math.exp(0.1)] * 2 + [-1.2], abs=1e-12)
    # d/d logprob of −s·A, s = exp(mean): −s·A/|o| for each token, over 2 rollouts.
    expected = [-2.0 * math.exp(0.1) / 2 / 2] * 2 + [0.0]
    assert gradient(rule, given, Totals(3, 2)) == pytest.approx(expected, abs=1e-12)


def test_dppo_drops_what_moved_too_far_along_its_advantage() -> None:
    new = [0.9, 0.9, 0.1, 0.1, 0.012]
    old = [0.6, 0.6, 0.4, 0.4, 0.002]
    given = tokens([math.log(p) for p in new], [math.log(p) for p in old], [1.0, -1.0, -1.0, 1.0, 1.0])
    for name in ("dppo_tv", "dppo_kl"):
        rule = build(name)
        assert rule.figures(given)["clipped_share"].tolist() == [True, False, True, False, False], name
        expected = [0.0, 1.5, 0.0, -0.25, -6.0]  # −m·A·r; a rare token may still rise sixfold
        assert gradient(rule, given) == pytest.approx(expected, abs=1e-9)
    kl = 0.002 * math.log(0.002 / 0.012) + 0.998 * math.log(0.998 / 0.988)
    assert build("dppo_kl", threshold=kl * 0.999).figures(given)["clipped_share"].tolist()[-1]
    assert not build("dppo_kl", threshold=kl * 1.001).figures(given)["clipped_share"].tolist()[-1]


def test_dppo_survives_tokens_that_are_certain() -> None:
    given = tokens([0.0, -1e-12, -40.0], [0.0, -2.0, 0.0], [1.0, -1.0, 1.0])
    for name in ("dppo_tv", "dppo_kl"):
        assert all(math.isfinite(each) for each in gradient(build(name), given))


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ({"kind": "truncate", "cap": 2.0}, [0.5, 2.0, 1.0, 2.0]),
        ({"kind": "mask", "cap": 2.0}, [0.5, 0.0, 1.0, 0.0]),
        ({"kind": "mask", "cap": 5.0, "floor": 0.6}, [0.0, 4.0, 1.0, 4.0]),  # IcePop
        ({"kind": "truncate", "level": "sequence", "cap": 3.0}, [2.0, 2.0, 3.0, 3.0]),
        ({"kind": "mask", "level": "sequence", "cap": 3.0}, [2.0, 2.0, 0.0, 0.0]),
    ],
)
def test_corrections_weigh_by_proximal_over_behaviour(correction: dict[str, object], weights: list[float]) -> None:
    proximal = double([-1.0 + math.log(w) for w in (0.5, 4.0, 1.0, 4.0)])
    given = tokens([-1.0] * 4, [-1.0] * 4, [1.0, -1.0, 1.0, 1.0], [2, 2], proximal_logprobs=proximal)
    rule = build("decoupled_ppo", correction=correction, clip_low=0.9, clip_high=9.0)
    ratios = [2.0, 0.25, 1.0, 0.25]  # π/π₀, inside the clip
    expected = [-w * r * a for w, r, a in zip(weights, ratios, [1.0, -1.0, 1.0, 1.0], strict=True)]
    assert rule(given).tolist() == pytest.approx(expected, abs=1e-12)
    assert gradient(rule, given) == pytest.approx(expected, abs=1e-12)  # the weight is a constant


def test_without_proximal_logprobs_the_current_policy_is_the_proximal_one() -> None:
    given = tokens([-1.0, -2.0], [-1.5, -2.5], [1.0, -1.0])
    rule = build("ppo", anchor="proximal", correction={"cap": 10.0})
    assert gradient(rule, given) == pytest.approx([-math.exp(0.5), math.exp(0.5)], abs=1e-12)


ESTIMATORS: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize(("estimator", "weighted"), [("k1", True), ("k2", False), ("k3", False), ("k3", True)])
def test_kl_to_the_reference(estimator: str, weighted: bool) -> None:
    given = tokens([-1.0, -2.0], [-1.2, -1.7], [0.0, 0.0], reference_logprobs=double([-1.5, -1.0]))
    rule = build("policy_gradient", kl_coef=0.5, kl_estimator=estimator, kl_weighted=weighted)

    def closed(logprob: float, behaviour: float, reference: float) -> float:
        return 0.5 * ESTIMATORS[estimator](logprob - reference) * (math.exp(logprob - behaviour) if weighted else 1.0)

    assert rule(given).tolist() == pytest.approx([closed(-1.0, -1.2, -1.5), closed(-2.0, -1.7, -1.0)], abs=1e-12)
    slopes = [slope(lambda x: closed(x, -1.2, -1.5), -1.0), slope(lambda x: closed(x, -1.7, -1.0), -2.0)]
    assert gradient(rule, given) == pytest.approx(slopes, abs=1e-8)
    assert not rule.silent_at_zero


@pytest.mark.parametrize(("estimator", "weighted", "fresh"), [("k1", True, False), ("k2", False, True), ("k3", True, False)])
def test_every_kl_that_is_allowed_has_the_gradient_of_the_kl_itself(estimator: str, weighted: bool, fresh: bool) -> None:
    """Over a whole distribution, where expectations are sums; under another policy's samples too, if not only for fresh ones.
    GRPO's own k3 without the ratio is the exception that its users ask for by name."""
    logits = double([0.3, -1.0, 0.8, 0.1]).requires_grad_()
    policy = torch.log_softmax(logits, -1)
    behaviour = policy.detach() if fresh else torch.log_softmax(double([0.0, 0.5, 0.4, -1.0]), -1)
    reference = torch.log_softmax(double([1.0, 0.0, -0.5, 0.2]), -1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    given = tokens([0.0] * 4, behaviour.tolist(), [0.0] * 4, reference_logprobs=reference)
    given = TokenTensors(**{f: getattr(given, f) for f in TokenTensors.__slots__} | {"logprobs": policy})
    rule = build("policy_gradient", kl_coef=1.0, kl_estimator=estimator, kl_weighted=weighted)
    (found,) = torch.autograd.grad((behaviour.exp() * rule(given)).sum(), logits)
    torch.testing.assert_close(found, exact)


def test_the_entropy_bonus_is_a_mean_over_all_valid_tokens_whatever_the_normalization() -> None:
    entropies = double([0.5, 1.5, 2.0]).requires_grad_()
    given = tokens([-1.0] * 3, [-1.0] * 3, [0.0] * 3, [2, 1], entropies=entropies)
    for name in ("policy_gradient", "grpo", "dr_grpo"):
        rule = build(name, entropy_coef=0.1)
        total = rule.total(given, Totals(tokens=3, rollouts=2))
        assert total.item() == pytest.approx(-0.1 * 4.0 / 3, abs=1e-12)
        assert torch.autograd.grad(total, entropies)[0].tolist() == pytest.approx([-0.1 / 3] * 3)
        assert rule.needs_entropy
        assert not rule.silent_at_zero


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


# One pair: chosen [-1, -2] against reference [-1.5, -2.5] (log-ratio 1), rejected [-1] against [-0.75] (log-ratio −0.25).
PAIR = ([-1.0, -2.0, -1.0], [0.0] * 3, [1.0, 1.0, -1.0], [2, 1])
REFERENCE = [-1.5, -2.5, -0.75]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("dpo", {"beta": 0.5}, -math.log(sigmoid(0.5 * 1.25))),
        (
            "dpo",
            {"beta": 0.5, "label_smoothing": 0.2},
            -0.8 * math.log(sigmoid(0.625)) - 0.2 * math.log(sigmoid(-0.625)),
        ),
        ("dpo", {"beta": 2.0, "length_normalized": True}, -math.log(sigmoid(2.0 * 0.75))),
        ("dpo", {"beta": 0.5, "rpo_alpha": 0.3}, -math.log(sigmoid(0.625)) + 0.3 * 1.5),
        ("dpo", {"beta": 0.5, "reference_free": True}, -math.log(sigmoid(0.5 * (-3.0 + 1.0)))),
        ("ipo", {"beta": 0.4, "reference_free": True}, (-1.5 + 1.0 - 1.25) ** 2),
        ("ipo", {"beta": 0.4}, (0.75 - 1.25) ** 2),
        ("ipo", {"beta": 0.4, "length_normalized": False}, (1.25 - 1.25) ** 2),
        ("simpo", {"beta": 2.0, "gamma": 1.5}, -math.log(sigmoid(2.0 * (-1.5 + 1.0) - 1.5))),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_preference_losses_are_their_closed_forms(name: str, options: dict[str, float], expected: float, swapped: bool) -> None:
    logprobs, behaviour, advantages, counts = PAIR
    reference = REFERENCE
    if swapped:  # the rejected answer stands first
        logprobs, advantages, reference = ([*each[2:], *each[:2]] for each in (logprobs, advantages, reference))
        counts = counts[::-1]
    given = tokens(logprobs, behaviour, advantages, counts, reference_logprobs=double(reference))
    rule = build(name, **options)
    assert rule(given).tolist() == pytest.approx([expected], abs=1e-12)
    assert rule.total(given, Totals(3, 2)).item() == pytest.approx(expected, abs=1e-12)
    assert rule.needs_reference == (name != "simpo" and not options.get("reference_free"))
    assert rule.figures(given)["pair_accuracy"].tolist() == [rule.needs_reference]
    if name != "ipo":  # there the margin is already what it should be
        chosen = [g for g, a in zip(gradient(rule, given), advantages, strict=True) if a > 0]
        assert all(each < 0 for each in chosen)


def test_distillation_has_the_gradient_of_the_reverse_kl() -> None:
    """Over a whole distribution, where expectations are sums; and −(log π_T − log π) per token, as one is sampled."""
    given = tokens([-1.0, -2.0], [-1.0, -2.0 - math.log(3)], [0.0, 0.0], reference_logprobs=double([-0.5, -3.0]))
    rule = build("reverse_kl")
    assert gradient(rule, given) == pytest.approx([-0.5, 2.0 * 1.0], abs=1e-12)
    assert rule.figures(given)["teacher_kl"].tolist() == pytest.approx([-0.5, 1.0])
    logits = double([0.3, -1.0, 0.8]).requires_grad_()
    teacher = torch.log_softmax(double([1.0, 0.0, -0.5]), -1)
    policy = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    each = tokens([0.0] * 3, policy.tolist(), [0.0] * 3, reference_logprobs=teacher)
    each = TokenTensors(**{f: getattr(each, f) for f in TokenTensors.__slots__} | {"logprobs": policy})
    (found,) = torch.autograd.grad((policy.detach().exp() * rule(each)).sum(), logits)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("policy_gradiant", {}, "did you mean 'policy_gradient'"),
        ("policy_gradient", {"ratio_cp": 2.0}, "did you mean 'ratio_cap'"),
        ("policy_gradient", {"ratio_cap": 0.0}, "greater than 0"),
        ("cross_entropy", {"ratio_cap": 2.0}, "it has none"),
        ("ppo", {"correction": {"kap": 2.0}}, "did you mean 'cap'"),
        ("ppo", {"correction": {"cap": 2.0}}, "correct twice; set anchor = 'proximal' or leave correction out"),
        ("ppo", {"normalization": "constant"}, "needs constant_length"),
        ("ppo", {"constant_length": 9}, "set normalization = 'constant' or leave it out"),
        ("dr_grpo", {}, "constant_length"),
        ("grpo", {"normalization": "token"}, "'rollout'"),
        ("ppo", {"dual_clip": 1.1}, "set it above 1 \\+ clip_high = 1.2"),
        ("dppo_tv", {"anchor": "proximal"}, "'behaviour'"),
        ("decoupled_ppo", {"anchor": "behaviour"}, "'proximal'"),
        ("grpo", {"kl_coef": 0.1, "kl_estimator": "k1", "kl_weighted": False}, "gradient 0 on average .* kl_weighted = true"),
        ("grpo", {"kl_coef": 0.1, "kl_estimator": "k2"}, "set kl_weighted = false, or kl_estimator = 'k3'"),
        ("dpo", {"gamma": 1.0}, "gamma"),
        ("dpo", {"label_smoothing": 0.5}, "less than 0.5"),
    ],
)
def test_bad_configurations_are_refused_at_once(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LossConfig(name=name, options=options)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_keeps_the_contract(name: str) -> None:
    """One number per unit, a finite gradient to the log-probabilities alone, none through a token that says nothing, and
    parts that add up to the whole."""
    rule = build(name)
    signs = [1.0, 1.0, -1.0] if rule.unit == "pair" else [1.0, 0.0, -1.0]
    given = tokens([-0.5, -1.5, -2.5], [-0.4, -1.5, -9.0], signs, [2, 1], reference_logprobs=double([-1.0, -1.0, -2.0]))
    loss = rule(given)
    assert loss.shape == ({"token": 3, "pair": 1}[rule.unit],)
    found = gradient(rule, given, Totals(3, 2))
    assert all(math.isfinite(each) for each in found)
    assert any(found)
    if rule.silent_at_zero and not rule.whole_rollouts:
        assert found[1] == 0.0
    for values in rule.figures(given).values():
        assert torch.isfinite(values.double()).all()
    twice = rule.total(given, Totals(6, 4))
    assert 2 * twice.item() == pytest.approx(rule.total(given, Totals(3, 2)).item(), abs=1e-12)
    assert LOSSES[name].__doc__
    assert "``" in (LOSSES[name].__doc__ or "")  # the formula
