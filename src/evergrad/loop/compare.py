"""Several runs side by side: ``python -m evergrad.loop.compare RUN…`` prints one Markdown table over run folders."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evergrad.loop.report import clock, percent, read_report, usd
from evergrad.types import EvergradError

Data = Mapping[str, Any]
HEADS = ("seed", "cycle", "suite", "score", "of that", "meanwhile", "gain, 95%", "n", "verdict", "cost", "time")


def compare(reports: Sequence[Data]) -> str:
    """A line for each cycle of each run, one of each run's whole, and of several runs one of means for each cycle."""
    lines = [list(HEADS), ["---"] * len(HEADS)]
    for report in reports:
        seed = str(report.get("seed", "–"))
        lines += [[seed, str(number), *_cycle(row)] for number, row in enumerate(report.get("cycles") or [], start=1)]
        whole = [usd((report.get("cost") or {}).get("total_usd")), clock(report.get("wall_s"))]
        lines.append([seed, "all", *[""] * 7, *whole])
    if len(reports) > 1:
        lines += _means(reports)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cycle(row: Data) -> list[str]:
    before, after = row.get("slices_before") or {}, row.get("slices_after") or {}
    slices = [f"{name} {_move(before.get(name), after[name])}" for name in after]
    others = [
        f"{name} {_move(move.get('before'), move.get('after'))}" for name, move in (row.get("other_suites") or {}).items()
    ]
    low, high = row.get("ci95") or (None, None)
    return [
        str(row.get("suite", "–")),
        _move(row.get("score_before"), row.get("score_after")),
        ", ".join(slices),
        ", ".join(others),
        f"{percent(low, signed=True)} … {percent(high, signed=True)}",
        str(row.get("n", "–")),
        str(row.get("verdict", "–")),
        usd(row.get("usd")),
        clock(row.get("wall_s")),
    ]


def _means(reports: Sequence[Data]) -> list[list[str]]:
    runs = [report.get("cycles") or [] for report in reports]
    lines = []
    for index in range(max(map(len, runs), default=0)):
        rows = [cycles[index] for cycles in runs if len(cycles) > index]
        score, cost, time = (_mean(row.get(key) for row in rows) for key in ("score_after", "usd", "wall_s"))
        move = _move(_mean(row.get("score_before") for row in rows), score)
        suites = ", ".join(dict.fromkeys(str(row.get("suite", "–")) for row in rows))
        lines.append(["mean", str(index + 1), suites, move, *[""] * 5, usd(cost), clock(time)])
    whole = usd(_mean((report.get("cost") or {}).get("total_usd") for report in reports))
    return [*lines, ["mean", "all", *[""] * 7, whole, clock(_mean(report.get("wall_s") for report in reports))]]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _move(before: float | None, after: float | None) -> str:
    return f"{percent(before)} → {percent(after)}"


def main(folders: Sequence[str]) -> int:
    """Prints :func:`compare`; 2 when a folder holds no report."""
    try:
        print(compare([read_report(Path(folder)) for folder in folders]))
    except EvergradError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
