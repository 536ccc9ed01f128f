"""Whether the gate keeps its promises over a long series, by simulation with fixed seeds.

1. A hundred candidates in a row, thirty of them better: what share of the promotions is false (FDR), and what share of the
   better ones is promoted (power), under each rule. A try sees 100 discordant pairs; a better candidate wins 68% of them.
2. E-processes looked at after each of 400 pairs, with no difference to find: how often do they ever cross 20?
3. Twenty candidates, each truly one point worse, against a margin of two points (n = 600): how much is lost when each is
   guarded against the version before it, and how much when each is guarded against a frozen anchor?
4. Releases through a canary of 5% and 25% of the sessions, 50 outcomes each: how often is a candidate rolled back that is as
   good as what serves, how often one that succeeds less, and how many sessions has it met by then?

The last line is one JSON object; the first three figures are those of the gate's default rule.
"""

from __future__ import annotations

import argparse
import math
from functools import cache
from typing import get_args

import numpy as np
from benchmarks import record

from evergrad.evals import (
    CanaryConfig,
    GateConfig,
    HarmTest,
    PairedDifference,
    Rule,
    Trial,
    betting_e_process,
    mcnemar_p,
    mixture_e_value,
    next_level,
    non_inferiority_p,
)
from evergrad.types import SessionOutcome, Side

TRIES, BETTER_SHARE, DISCORDANT, WIN_RATE = 100, 0.3, 100, 0.68
LOOKS, CROSSING = 400, 20.0
CANARY, SERVED, HARMFUL = CanaryConfig(shares=(0.05, 0.25), outcomes=50), 0.9, (0.75, 0.6, 0.3)
CREEP_TRIES, CREEP_N, CREEP_LOSS, CREEP_MARGIN, CREEP_DISCORDANCE = 20, 600, 0.01, 0.02, 0.08


@cache
def p_value(wins: int) -> float:
    """One-sided, of so many wins among the discordant pairs."""
    return mcnemar_p(wins, DISCORDANT - wins, "greater")


@cache
def p_by_e_value(wins: int) -> float:
    """1/E of the same."""
    return min(1.0, 1 / mixture_e_value(wins, DISCORDANT - wins))


def series(rule: Rule, repeats: int, alpha: float, seed: int = 0) -> dict[str, float]:
    """False discovery rate and power of one rule; every rule sees the same candidates."""
    draws = np.random.default_rng(seed)
    evidence = p_by_e_value if rule == "e_lond" else p_value
    false_shares, found_shares = [], []
    for _ in range(repeats):
        better = draws.random(TRIES) < BETTER_SHARE
        wins = draws.binomial(DISCORDANT, np.where(better, WIN_RATE, 0.5))
        trials: list[Trial] = []
        for count in wins:
            p = evidence(int(count))
            trials.append(Trial(p, p <= next_level(rule, alpha, trials)))
        promoted = np.array([trial.promoted for trial in trials])
        false_shares.append((promoted & ~better).sum() / max(1, promoted.sum()))
        found_shares.append((promoted & better).sum() / max(1, better.sum()))
    return {
        "fdr": round(float(np.mean(false_shares)), 4),
        "fdr_se": round(float(np.std(false_shares)) / math.sqrt(repeats), 4),
        "power": round(float(np.mean(found_shares)), 4),
    }


def mixture_crossing(repeats: int, seed: int = 1) -> float:
    """Share of series of fair coins in which the mixture e-process is ever at or above 20."""
    # Crossing depends on the counts alone: the fewest wins that cross, for each number of pairs.
    need = np.full(LOOKS, LOOKS + 1)
    for n in range(1, LOOKS + 1):
        need[n - 1] = next((wins for wins in range(n + 1) if mixture_e_value(wins, n - wins) >= CROSSING), n + 1)
    wins = np.cumsum(np.random.default_rng(seed).random((repeats, LOOKS)) < 0.5, axis=1)
    return round(float((wins >= need).any(axis=1).mean()), 4)


def betting_crossing(repeats: int, seed: int = 2) -> float:
    """The same of the betting e-process, on graded differences."""
    draws = np.random.default_rng(seed)
    crossed = sum(max(betting_e_process(draws.uniform(-1, 1, LOOKS))) >= CROSSING for _ in range(repeats))
    return round(crossed / repeats, 4)


def creep(frozen_anchor: bool, repeats: int, seed: int = 3) -> float:
    """Mean true loss, in points, after all tries of candidates that each lose one."""
    draws, lost = np.random.default_rng(seed), []
    for _ in range(repeats):
        promoted = 0
        for _ in range(CREEP_TRIES):
            deficit = CREEP_LOSS * (promoted + 1 if frozen_anchor else 1)
            discordance = max(CREEP_DISCORDANCE, deficit)
            shares = [(discordance - deficit) / 2, (discordance + deficit) / 2, 1 - discordance]
            wins, losses, _ = draws.multinomial(CREEP_N, shares)
            promoted += non_inferiority_p(counted(int(wins), int(losses), CREEP_N), CREEP_MARGIN) < GateConfig().alpha
        lost.append(100 * CREEP_LOSS * promoted)
    return round(float(np.mean(lost)), 2)


def counted(wins: int, losses: int, n: int) -> PairedDifference:
    """The paired difference of independent 0/1 scores, from its counts."""
    delta, se = (wins - losses) / n, math.sqrt(wins + losses - (wins - losses) ** 2 / n) / n
    sums = (1.0,) * wins + (-1.0,) * losses + (0.0,) * (n - wins - losses)
    return PairedDifference(n, wins, losses, delta, se, (delta - 1.96 * se, delta + 1.96 * se), True, sums, (1,) * n)


def canary(rate: float, repeats: int, seed: int = 4) -> dict[str, float]:
    """Share of releases that are rolled back, of candidates with this success rate, and how many sessions they had met."""
    draws, met = np.random.default_rng(seed), list[int]()
    for _ in range(repeats):
        count = sessions_until_rollback(rate, draws)
        met += [] if count is None else [count]
    median = {"median_sessions": float(np.median(met))} if met else {}
    return {"success_rate": rate, "rolled_back": round(len(met) / repeats, 4), **median}


def sessions_until_rollback(rate: float, draws: np.random.Generator) -> int | None:
    """How many sessions the candidate had met when it was rolled back; None when it was not."""
    test, met = HarmTest(CANARY.margin), 0
    for share in CANARY.shares:
        until = met + CANARY.outcomes
        while met < until:
            side = Side.CANDIDATE if draws.random() < share else Side.INCUMBENT
            met += side is Side.CANDIDATE
            success = draws.random() < (rate if side is Side.CANDIDATE else SERVED)
            if test.see(SessionOutcome("", side, float(success), share)) >= 1 / CANARY.alpha:
                return met
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="The gate's promises, by simulation.")
    parser.add_argument("--repeats", type=int, default=400, help="series per rule")
    arguments = parser.parse_args()
    config = GateConfig()
    rules = {rule: series(rule, arguments.repeats, config.alpha) for rule in get_args(Rule)}
    harmless = canary(SERVED, 2 * arguments.repeats)
    harmful = [canary(rate, arguments.repeats // 4) for rate in HARMFUL]
    crossing = {
        "mixture": mixture_crossing(10 * arguments.repeats),
        "betting": betting_crossing(2 * arguments.repeats),
        "canary": harmless["rolled_back"],
    }
    for rule, found in rules.items():
        print(f"{rule:15} FDR {found['fdr']:.3f} ± {found['fdr_se']:.3f}   power {found['power']:.2f}")
    result = {
        "benchmark": "gate",
        "rule": config.series,
        "fdr": rules[config.series]["fdr"],
        "power": rules[config.series]["power"],
        "null_crossing": max(crossing.values()),
        "rules": rules,
        "crossing": crossing,
        "canary": {"served_success_rate": SERVED, "harmful": harmful},
        "points_lost": {"to_previous_champion": creep(False, arguments.repeats), "to_anchor": creep(True, arguments.repeats)},
        "repeats": arguments.repeats,
    }
    record.keep(result, threads=1)


if __name__ == "__main__":
    main()
