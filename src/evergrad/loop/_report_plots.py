"""The report's plots, each as one inline SVG; an empty string when there is nothing to draw.

matplotlib is imported when the first plot is drawn, never with the module. Texts stay texts in the SVG, so they can be
searched, and no ``$`` in a label is taken for mathematics.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

Row = Mapping[str, Any]

_NEXT_TO = {"textcoords": "offset points", "va": "center", "parse_math": False}
"""Of a label that stands beside its mark, at an offset in points."""

COLORS = ("#0f766e", "#b45309", "#4338ca", "#be185d", "#4d7c0f", "#0369a1")
INK, SOFT, LINE, IDLE = "#1b1f24", "#5b6572", "#e4e7eb", "#b8c0ca"
_SIZE, _WIDE = (6.4, 3.5), (13.0, 3.9)
"""Inches, for one column of the page and for both; the page scales the picture to its place."""


def reward(steps: Sequence[Row], axis: str) -> str:
    """Reward against ``axis`` (``step``: steps of all cycles counted on, ``usd``: money), one colour per cycle."""
    known = [(index + 1, row) for index, row in enumerate(steps) if row.get("reward") is not None]
    points = [(index if axis == "step" else row.get("usd"), row) for index, row in known]
    points = [(at, row) for at, row in points if at is not None]
    if not points:
        return ""
    with opened_figure() as (figure, axes):
        cycles = list(dict.fromkeys(row.get("cycle") for _, row in points))
        for number, cycle in enumerate(cycles):
            color = COLORS[number % len(COLORS)]
            mine = [(at, row) for at, row in points if row.get("cycle") == cycle]
            label = None if len(cycles) == 1 else _text(f"cycle {cycle}")
            axes.plot(
                [at for at, _ in mine], [row["reward"] for _, row in mine], color=color, lw=1.8, marker="o", ms=3, label=label
            )
            banded = [(at, pair) for at, row in mine if (pair := _band(row))]
            if banded:
                lows, highs = zip(*(pair for _, pair in banded), strict=True)
                axes.fill_between([at for at, _ in banded], lows, highs, color=color, alpha=0.14, lw=0)
        axes.locator_params(axis="x", nbins=7, integer=axis == "step")
        axes.set_xlabel("step" if axis == "step" else "spent")
        if axis == "usd":
            axes.xaxis.set_major_formatter(_formatter(_dollars))
        axes.set_ylabel("reward")
        if len(cycles) > 1:
            axes.legend(frameon=False, loc="lower right")
        return as_svg(figure, f"reward over {axis}")


def success(scores: Sequence[Row]) -> str:
    """Mean score with its interval, by event and suite; slices as small hollow marks."""
    rows = [row for row in scores if row.get("mean") is not None]
    if not rows:
        return ""
    labels = list(dict.fromkeys(_event(row) for row in rows))
    suites = list(dict.fromkeys(_text(row.get("suite")) for row in rows))
    measured = {(_event(row), _text(row.get("suite"))) for row in rows}
    with opened_figure(_WIDE) as (figure, axes):
        beside = {label: [suite for suite in suites if (label, suite) in measured] for label in labels}
        for number, suite in enumerate(suites):
            mine = [row for row in rows if _text(row.get("suite")) == suite]
            places = [labels.index(label) + _shift(beside[label], suite) for label in (_event(row) for row in mine)]
            _draw_suite(axes, suite, places, mine, COLORS[number % len(COLORS)])
        axes.set_xticks(range(len(labels)), [_wrapped(label) for label in labels], parse_math=False)
        axes.set_xlim(-0.4, len(labels) - 0.4)
        axes.set_ylim(-0.04, 1.06)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
        if len(suites) > 1:
            _legend_below(axes)
        return as_svg(figure, "success before and after each event")


def _shift(suites: Sequence[str], suite: str) -> float:
    """How far beside its event's tick a suite's mark stands, so that suites measured at one event do not overlap."""
    return (suites.index(suite) - (len(suites) - 1) / 2) * min(0.42, 0.75 / len(suites))


def _draw_suite(axes: Any, suite: str, places: Sequence[float], rows: Sequence[Row], color: str) -> None:
    axes.plot(places, [row["mean"] for row in rows], color=color, lw=1, alpha=0.3)
    for place, row in zip(places, rows, strict=True):
        pair = _pair(row.get("ci95"))
        if pair:
            axes.plot([place, place], pair, color=color, lw=2.4, solid_capstyle="round", alpha=0.5)
        axes.plot([place], [row["mean"]], marker="o", ms=7.5, color=color, lw=0, label=suite if row is rows[0] else None)
        axes.annotate(f"{100 * row['mean']:.0f}%", (place, row["mean"]), (-8, 0), ha="right", **_NEXT_TO, size=9, color=color)
        for name, mean in (row.get("slices") or {}).items():
            if mean is not None:
                axes.plot([place + 0.05], [mean], marker="o", ms=3.5, mfc="white", mec=color, lw=0)
                axes.annotate(_text(name), (place + 0.05, mean), (5, 0), **_NEXT_TO, size=8, color=SOFT)


def cost_by_phase(phases: Mapping[str, float | None]) -> str:
    """One bar a phase, the dearest on top; idle time in grey."""
    known = sorted(((_text(name), amount) for name, amount in phases.items() if amount), key=lambda item: item[1] or 0.0)
    if not known:
        return ""
    names = [name for name, _ in known]
    amounts = [float(amount or 0.0) for _, amount in known]
    total = sum(amounts)
    with opened_figure() as (figure, axes):
        colors = [IDLE if name.startswith(("idle", "unattributed")) else COLORS[0] for name in names]
        axes.barh(range(len(names)), amounts, color=colors, height=0.66)
        for place, amount in enumerate(amounts):
            axes.annotate(f"{100 * amount / total:.0f}%", (amount, place), (5, 0), **_NEXT_TO, color=SOFT, size=9)
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.set_xlim(0, max(amounts) * 1.12)
        axes.locator_params(axis="x", nbins=6)
        axes.xaxis.set_major_formatter(_formatter(_dollars))
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        return as_svg(figure, "cost by phase")


def pareto(scores: Sequence[Row]) -> str:
    """Mean score against cost per success; the line joins the rows that no other beats on both."""
    rows = [row for row in scores if row.get("mean") is not None and (row.get("usd_per_success") or 0) > 0]
    if not rows:
        return ""
    suites = list(dict.fromkeys(_text(row.get("suite")) for row in rows))
    with opened_figure() as (figure, axes):
        costs = [float(row["usd_per_success"]) for row in rows]
        if max(costs) > 8 * min(costs):
            axes.set_xscale("log")
        for number, suite in enumerate(suites):
            color = COLORS[number % len(COLORS)]
            mine = [row for row in rows if _text(row.get("suite")) == suite]
            axes.scatter(
                [row["usd_per_success"] for row in mine],
                [row["mean"] for row in mine],
                s=38,
                color=color,
                label=suite,
                zorder=3,
            )
            front = front_of([(float(row["usd_per_success"]), float(row["mean"])) for row in mine])
            axes.plot(
                [cost for cost, _ in front], [mean for _, mean in front], color=color, lw=1.2, alpha=0.5, drawstyle="steps-post"
            )
        axes.margins(x=0.12, y=0.14)
        _label_apart(axes, rows, suites)
        _mark_dollars(axes)
        axes.set_xlabel("cost per success")
        axes.yaxis.set_major_formatter(_formatter(lambda value: f"{100 * value:.0f}%"))
        if len(suites) > 1:
            _legend_below(axes)
        return as_svg(figure, "score against cost per success")


def _label_apart(axes: Any, rows: Sequence[Row], suites: Sequence[str]) -> None:
    """Labels the points, from the top down, each line below those that stand close by; to the left at the right edge."""
    axes.autoscale_view()
    taken: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: -float(row["mean"])):
        at = (float(row["usd_per_success"]), float(row["mean"]))
        across, up = axes.transAxes.inverted().transform(axes.transData.transform(at))
        line = up
        for other_across, other_line in taken:
            if abs(across - other_across) < 0.25 and line > other_line - 0.065:
                line = other_line - 0.065
        taken.append((across, line))
        left = across > 0.75
        place = (across + (-0.018 if left else 0.018), line)
        color = COLORS[suites.index(_text(row.get("suite"))) % len(COLORS)]
        style = {"ha": "right" if left else "left", "va": "center", "size": 8, "color": color, "parse_math": False}
        label = axes.annotate(_event(row), place, xycoords="axes fraction", **style)
        label.set_in_layout(False)


def front_of(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (cost, score) points that no other one beats on both, cheapest first.

    >>> front_of([(3.0, 0.9), (1.0, 0.5), (2.0, 0.4)])
    [(1.0, 0.5), (3.0, 0.9)]
    """
    front: list[tuple[float, float]] = []
    for cost, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or score > front[-1][1]:
            front.append((cost, score))
    return front


@contextmanager
def opened_figure(size: tuple[float, float] = _SIZE, rows: tuple[int, ...] = (1,)) -> Iterator[tuple[Any, Any]]:
    """A figure that belongs to no global state, so that a report can be drawn from any thread; and its axes.

    Args:
        size: Inches.
        rows: Heights of the axes above one another, in proportion.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "evergrad",
        "font.family": "sans-serif",
        "font.size": 9.5,
        "axes.edgecolor": LINE,
        "axes.labelcolor": SOFT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": LINE,
        "text.color": INK,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(len(rows), height_ratios=rows)


def as_svg(figure: Any, name: str) -> str:
    out = io.StringIO()
    with warnings.catch_warnings():
        # The page's font has the glyphs that matplotlib's own lacks, and long labels are clipped, not an error.
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    picture = out.getvalue()
    picture = picture[picture.index("<svg") :]
    # Several pictures share one page: without a prefix, one's clip paths would cut another's marks.
    prefix = re.sub(r"[^a-z]+", "-", name.lower())
    picture = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", picture)
    return picture.replace("<svg", f'<svg role="img" aria-label="{prefix.replace("-", " ")}"', 1)


def _formatter(show: Any) -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _position: show(value))


def _mark_dollars(axes: Any) -> None:
    """Ticks of a money axis, few enough to be read, on a logarithmic scale too."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if axes.get_xscale() == "log":
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high < 300 * low else (1.0,), numticks=8))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(_formatter(_dollars))


def dollar_axis(axis: Any) -> None:
    """Labels an axis with amounts of money."""
    axis.set_major_formatter(_formatter(_dollars))


def _dollars(amount: float) -> str:
    """As short as a tick must be.

    >>> _dollars(0.0025), _dollars(3e-7), _dollars(0.0)
    ('$0.0025', '$3e-07', '$0')
    """
    return f"${amount:.2g}" if abs(amount) < 10 else f"${amount:,.0f}"


def _legend_below(axes: Any) -> None:
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, handletextpad=0.4, columnspacing=1.4)


def _text(value: Any, width: int = 32) -> str:
    """``value`` as a label: short, and without the control characters that XML forbids."""
    text = "".join(char if char.isprintable() else "\ufffd" for char in str("" if value is None else value))
    return text if len(text) <= width else text[: width - 1] + "…"


def event_of(score: Row) -> str:
    """The label of a score without the suite, which stands beside it wherever it is shown."""
    return str(score.get("label", "")).removesuffix(f" on {score.get('suite')}")


def _event(score: Row) -> str:
    return _text(event_of(score))


def _wrapped(label: str, width: int = 18) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(label, width)[:3]) or label


def _band(step: Row) -> tuple[float, float] | None:
    """The interval of a step's reward, of which the row holds half the width."""
    half = step.get("reward_ci95")
    return None if half is None else (step["reward"] - half, step["reward"] + half)


def _pair(value: Any) -> tuple[float, float] | None:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2 and None not in value:
        return float(value[0]), float(value[1])
    return None
