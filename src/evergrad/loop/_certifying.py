"""Issues the certificate of each verdict: gathers what it rests on and what it cost, signs it, writes it down for ever."""

from __future__ import annotations

import datetime
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evergrad.evals import GIVEN_UP, Plan, content_hash
from evergrad.ledger import Arm, compare_intelligence, intelligence_per_dollar, marginal_intelligence, payback
from evergrad.loop._announcing import GateSuite, hash_of
from evergrad.loop._certificate_page import render_certificate
from evergrad.loop._folder import LoopState, write_json, write_text
from evergrad.loop._scores import row_of
from evergrad.loop._session import Session
from evergrad.loop.certificate import (
    base_models_of,
    code_hash,
    config_hash,
    folder_hash,
    installation,
    merge_of,
    run_signing_key,
    sign,
    statement,
    weighed,
)
from evergrad.loop.config import WorthConfig
from evergrad.types import Verdict, plain


def certificate_path(run: Path, plan: Plan) -> Path:
    return run / "certificates" / f"{plan.candidate_id}-{plan.hash}.json"


def certify(session: Session, verdict: Verdict, plan: Plan, suites: Sequence[GateSuite]) -> None:
    """Writes certificate and page, unless they are there: once issued, a certificate stays as it is."""
    path = certificate_path(session.folder.path, plan)
    if not path.exists():
        with session.clock.phase("gate"):
            signed = sign(_content(session, verdict, plan, suites), run_signing_key(session.folder.path))
        write_text(path.with_suffix(".html"), render_certificate(signed))
        # Last, for it says that both are there.
        write_json(path, signed)


def _content(session: Session, verdict: Verdict, plan: Plan, suites: Sequence[GateSuite]) -> dict[str, Any]:
    run, versions = session.folder.path, (verdict.candidate_id, str(verdict.incumbent_id))
    candidate = session.registry.get(verdict.candidate_id)
    again = shlex.join(["evergrad", "run", str(run / "config.toml"), "--run-dir", f"{run}-again"])
    return {
        "certificate": 1,
        "issued_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "run": session.config.name,
        "cycle": session.state.cycle,
        "trigger": session.state.trigger,
        **statement(verdict, plan),
        "system_prompt": candidate.system_prompt,
        "merge": merge_of(candidate),
        "base_models": base_models_of(candidate, session.registry.get(versions[1])),
        "suites": {each.name: _suite(session, each) for each in suites},
        "costs": _costs(session.state, verdict, plan.primary, session.config.worth),
        "hashes": {
            "plan": plan.hash,
            "verdict": content_hash(verdict),
            "reports": verdict.evidence["reports"],
            "weights": {
                each: folder_hash(run / session.registry.get(each).weights_uri) for each in weighed(candidate, versions[1])
            },
            "system_prompts": {each: content_hash(session.registry.get(each).system_prompt) for each in versions},
            "recipe": candidate.recipe_hash,
            "configuration": config_hash(run),
            "price_book": plan.price_book,
            "code": code_hash(),
        },
        "installation": installation(),
        "reproduce": {
            "the run": again,
            "the ruling": shlex.join(["evergrad", "audit", verdict.candidate_id, "--run", str(run)]),
        },
    }


def _suite(session: Session, suite: GateSuite) -> dict[str, Any]:
    """Enough to draw the same tasks again."""
    taskset = session.taskset(suite.settings)
    return {
        "environment": session.config.environment.name,
        "settings": plain(suite.settings),
        "fingerprint": taskset.fingerprint,
        "contract_hash": taskset.contract_hash,
        "tasks": session.config.eval.n,
        "seed": session.config.seed,
        "draw": suite.draw,
        "suite_hash": hash_of(session, suite.settings, suite.draw),
    }


def _costs(state: LoopState, verdict: Verdict, primary: str, worth: WorthConfig | None) -> dict[str, Any]:
    """What the cycle cost, and what it bought, at the prices of the run; ``None`` where something has no price."""
    spent = state.cycles[-1]["usd"]
    before, after = (_whole_row(state, str(name), primary) for name in (verdict.incumbent_id, verdict.candidate_id))
    gain, ci95 = verdict.evidence.get("delta"), verdict.evidence.get("ci95")
    interval = tuple(ci95) if ci95 else None
    bought = marginal_intelligence(gain or 0.0, None if gain is None else spent, ci95=interval)
    costs: dict[str, Any] = {
        "cycle_usd": spent,
        "points_per_1000_usd": bought.value,
        "points_per_1000_usd_ci95": bought.ci95,
        "before": _unit_costs(before),
        "after": _unit_costs(after),
        "intelligence_per_dollar_ratio": None,
        "intelligence_per_dollar_ratio_ci95": None,
        "payback": None,
    }
    if before is None or after is None or not before["task_usd"] or not after["task_usd"]:
        return costs
    if set(before["task_ids"]) == set(after["task_ids"]):
        compared = compare_intelligence(_by_task(before), _by_task(after))
        costs["intelligence_per_dollar_ratio"] = compared.ratio
        costs["intelligence_per_dollar_ratio_ci95"] = compared.ci95
    costs["payback"] = _payback(_arm(before), _arm(after), spent, worth, interval)
    return costs


def _whole_row(state: LoopState, version_id: str, primary: str) -> dict[str, Any] | None:
    """The row of a measurement that was not given up: the tries until then say nothing of what a success costs."""
    row = row_of(state, version_id, primary)
    return None if row is None or GIVEN_UP in row.get("outcomes", {}) else row


def _payback(
    before: Arm, after: Arm, spent: float | None, worth: WorthConfig | None, interval: tuple[float, float] | None
) -> dict[str, Any] | None:
    """When the cycle has paid for itself; JSON has no infinity, so ``never`` says what a null would not.

    Without a worth, from lower cost alone.
    """
    attempts, value = (worth.attempts, worth.usd_per_success) if worth else (1.0, 0.0)
    found = payback(before, after, spent, attempts=attempts, value_per_success=value, gain_ci95=interval)
    if found is None:
        return None
    by_cost = {"successes": found.break_even_successes, "never": math.isinf(found.break_even_successes)}
    if worth is None:
        return {"by_lower_cost": by_cost, "by_worth": None}
    by_worth = {
        "usd_per_success": worth.usd_per_success,
        "attempts_served": worth.attempts,
        "gain_per_attempt_usd": found.gain_per_attempt,
        "break_even_attempts": found.break_even_attempts,
        "break_even_attempts_ci95": found.break_even_ci95,
        "never": math.isinf(found.break_even_attempts),
        "return": found.roi,
        "return_ci95": found.roi_ci95,
    }
    return {"by_lower_cost": by_cost, "by_worth": by_worth}


def _by_task(row: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Scores and costs in the order of task ids; a row has them in the order in which its tries ended."""
    pairs = sorted(zip(row["task_ids"], row["task_scores"], row["task_usd"], strict=True))
    return [score for _, score, _ in pairs], [usd for *_, usd in pairs]


def _unit_costs(row: Mapping[str, Any] | None) -> dict[str, Any]:
    if row is None or not row["task_usd"]:
        return {"usd_per_success": None, "intelligence_per_dollar": None, "intelligence_per_dollar_ci95": None}
    worth = intelligence_per_dollar(row["task_scores"], row["task_usd"])
    return {
        "usd_per_success": row["usd_per_success"],
        "intelligence_per_dollar": worth.value,
        "intelligence_per_dollar_ci95": worth.ci95,
    }


def _arm(row: Mapping[str, Any]) -> Arm:
    n = len(row["task_scores"])
    return Arm(math.fsum(row["task_scores"]) / n, math.fsum(row["task_usd"]) / n)
