"""Whether the forecast's 90% intervals keep their promise: on recorded learning curves, and on simulated ones.

1. Recorded: phases of reinforcement learning of our own runs (``curves/recorded.jsonl``; rewards of batches over dollars). The
   forecast sees the first half, two thirds or three quarters of the steps, six at least; then each later step is either within
   its interval or not. Runs end early when their reward is high, so the last steps are higher than the curve alone would be.
2. Simulated: sigmoids of dollars with noise, seen up to a point; does the interval hold the true reward at twice the money?

The picture shows a few recorded curves with what was forecast. The last line is one JSON object; ``coverage`` is the smaller of
the two shares.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks import record

from evergrad.ledger import Curve, Forecast, fit_forecast

RECORDED = Path(__file__).parent / "curves" / "recorded.jsonl"
SEEN_SHARES = (1 / 2, 2 / 3, 3 / 4)
FEWEST_SEEN, FEWEST_LATER = 6, 3


@dataclass(frozen=True)
class Recorded:
    """One phase of reinforcement learning."""

    name: str
    usd: tuple[float, ...]
    """Since the phase began, after each step."""
    reward: tuple[float, ...]

    def forecast(self, seen: int) -> Forecast:
        found = fit_forecast(self.usd[:seen], self.reward[:seen])
        assert found is not None
        return found


def recorded_curves() -> list[Recorded]:
    rows = map(json.loads, RECORDED.read_text(encoding="utf-8").splitlines())
    return [Recorded(f"{row['run']}, cycle {row['cycle']}", tuple(row["usd"]), tuple(row["reward"])) for row in rows]


def recorded_hits(curves: Sequence[Recorded], share: float) -> list[bool]:
    """For each step after the first ``share`` of each curve: whether it is within the interval of the forecast from those."""
    hits = []
    for curve in curves:
        seen = max(FEWEST_SEEN, round(share * len(curve.usd)))
        if len(curve.usd) - seen < FEWEST_LATER:
            continue
        forecast = curve.forecast(seen)
        for usd, reward in zip(curve.usd[seen:], curve.reward[seen:], strict=True):
            expected = forecast.observed(usd)
            hits.append(expected.low <= reward <= expected.high)
    return hits


def simulated_hits(count: int, seed: int = 0) -> list[bool]:
    """For each of ``count`` curves of random shape: whether the interval at twice the money holds the true reward there."""
    draws, hits = np.random.default_rng(seed), []
    for _ in range(count):
        start, steps = draws.uniform(0.05, 0.5), int(draws.integers(8, 31))
        ceiling = start + (1 - start) * draws.uniform(0.1, 0.98)
        truth = Curve(start, ceiling, draws.uniform(0.15, 1.5), draws.uniform(0.8, 3.0))
        usd = np.linspace(1 / steps, 1.0, steps) * draws.uniform(0.3, 1.0)
        noise = draws.normal(0.0, draws.uniform(0.03, 0.1), steps)
        reward = np.clip([truth.reward(amount) for amount in usd] + noise, 0.0, 1.0)
        forecast = fit_forecast(usd.tolist(), reward.tolist())
        assert forecast is not None
        later = forecast.reward(2 * forecast.spent_usd)
        hits.append(later.low <= truth.reward(2 * forecast.spent_usd) <= later.high)
    return hits


def draw(curves: Sequence[Recorded], path: Path) -> None:
    """Six recorded curves, what the forecast had seen of each, and the interval of single steps that it gave for the rest."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(2, 3, figsize=(12, 6), sharey=True, layout="constrained")
    for place, curve in zip(places.flat, curves, strict=False):
        seen = max(FEWEST_SEEN, round(SEEN_SHARES[0] * len(curve.usd)))
        forecast = curve.forecast(seen)
        grid = np.linspace(curve.usd[0] / 2, curve.usd[-1], 80)
        step, mean = [forecast.observed(usd) for usd in grid], [forecast.reward(usd) for usd in grid]
        place.fill_between(grid, [e.low for e in step], [e.high for e in step], color="#0f766e", alpha=0.12, lw=0)
        place.fill_between(grid, [e.low for e in mean], [e.high for e in mean], color="#0f766e", alpha=0.25, lw=0)
        place.plot(grid, [e.value for e in mean], color="#0f766e")
        place.plot(curve.usd[:seen], curve.reward[:seen], "o", color="#1b1f24", ms=4)
        place.plot(curve.usd[seen:], curve.reward[seen:], "o", mfc="white", mec="#1b1f24", ms=4)
        place.set_title(curve.name, fontsize=10)
        place.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    figure.supxlabel("dollars since reinforcement learning began; filled: seen, open: came later; 90% bands of mean and step")
    figure.supylabel("mean reward of a step")
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Coverage of the forecast's intervals.")
    parser.add_argument("--simulated", type=int, default=400, help="simulated curves")
    parser.add_argument("--picture", type=Path, default=record.RESULTS / "forecast.svg", help="where to draw")
    arguments = parser.parse_args()
    curves = recorded_curves()
    by_share = {f"{share:.2f}": recorded_hits(curves, share) for share in SEEN_SHARES}
    for share, hits in by_share.items():
        print(f"recorded, {share} seen: {np.mean(hits):.3f} of {len(hits)} later steps within the 90% interval")
    recorded = float(np.mean([hit for hits in by_share.values() for hit in hits]))
    simulated = float(np.mean(simulated_hits(arguments.simulated)))
    print(f"simulated: {simulated:.3f} of {arguments.simulated}")
    draw([curve for curve in curves if len(curve.usd) >= 15][:6], arguments.picture)
    result = {
        "benchmark": "forecast",
        "coverage": round(min(recorded, simulated), 4),
        "recorded": round(recorded, 4),
        "recorded_by_share_seen": {share: round(float(np.mean(hits)), 4) for share, hits in by_share.items()},
        "recorded_curves": len(curves),
        "later_steps": sum(map(len, by_share.values())),
        "simulated": round(simulated, 4),
        "simulated_curves": arguments.simulated,
    }
    record.keep(result, threads=1)


if __name__ == "__main__":
    main()
