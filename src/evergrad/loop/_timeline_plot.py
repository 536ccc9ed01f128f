"""The run as one picture: what set each cycle off, what its candidate scored, how it was ruled, what live traffic said, what it
cost; and between cycles, what changed in the world."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from evergrad.loop._report_plots import COLORS, IDLE, INK, SOFT, Row, as_svg, dollar_axis, opened_figure

GOOD, BAD = "#0f766e", "#b42318"
_RULED = {"promoted": ("^", GOOD), "refused": ("v", BAD), "rolled back": ("v", BAD), "passed": ("^", SOFT)}


def timeline_svg(data: Row) -> str:
    """For the page; empty before the first decision of a second cycle, when there is no line of time yet."""
    if len(_cycles(data)) < 2:
        return ""
    with opened_figure(_size(data), rows=(5, 1)) as (figure, (scores, money)):
        _draw(scores, money, data)
        return as_svg(figure, "timeline")


def timeline_png(data: Row) -> bytes:
    """For everywhere else; empty where :func:`timeline_svg` is."""
    if len(_cycles(data)) < 2:
        return b""
    out = io.BytesIO()
    with opened_figure(_size(data), rows=(5, 1)) as (figure, (scores, money)):
        _draw(scores, money, data)
        figure.savefig(out, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def _size(data: Row) -> tuple[float, float]:
    """Inches: an inch a cycle, within what a page can show."""
    return (min(24.0, max(13.0, 1.15 * len(_cycles(data)))), 5.4)


def _draw(scores: Any, money: Any, data: Row) -> None:
    cycles = _cycles(data)
    last = max(cycles)
    _draw_live(scores, data)
    _draw_rulings(scores, data)
    _draw_changes(scores, data)
    for cycle in cycles:
        told, color = _word(data, cycle)
        scores.text(cycle, 1.17, _trigger(data, cycle), ha="center", va="bottom", size=8, color=SOFT)
        scores.text(cycle, -0.13, told, ha="center", va="top", size=8.5, color=color, fontweight="bold")
    scores.set_ylim(-0.36, 1.34)
    scores.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    scores.set_ylabel("success")
    handles, labels = scores.get_legend_handles_labels()
    if handles:
        scores.legend(handles, labels, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=8, fontsize=8.5)
    spent = data.get("cost", {}).get("by_cycle", {}) if isinstance(data.get("cost"), Mapping) else {}
    money.bar(cycles, [float(spent.get(f"cycle-{cycle}") or 0.0) for cycle in cycles], color=COLORS[0], width=0.5)
    dollar_axis(money.yaxis)
    money.locator_params(axis="y", nbins=3)
    money.set_ylabel("cost")
    money.set_xlabel("cycle")
    for axes in (scores, money):
        axes.set_xlim(0.4, last + 0.9)
        axes.set_xticks(cycles)


def _draw_live(axes: Any, data: Row) -> None:
    """Live success check by check, in the colour of the suite that was deployed."""
    rows = [row for row in _rows(data, "scores") if row.get("check") is not None and row.get("mean") is not None]
    for number, suite in enumerate(dict.fromkeys(row["suite"] for row in rows)):
        mine = [row for row in rows if row["suite"] == suite]
        places = [row["cycle"] + 0.25 + min(0.6, 0.2 * row["check"]) for row in mine]
        color = COLORS[number % len(COLORS)]
        axes.plot(places, [row["mean"] for row in mine], color=color, lw=1.2, marker="o", ms=4.5, label=f"live {suite}")


def _draw_rulings(axes: Any, data: Row) -> None:
    """From what the incumbent scored to what the candidate did, on the same tasks."""
    for row in _rows(data, "cycles"):
        before, after = row.get("score_before"), row.get("score_after")
        if before is None or after is None:
            continue
        marker, color = _RULED.get(str(row.get("verdict")), ("o", INK))
        axes.plot([row["cycle"]] * 2, [before, after], color=color, lw=2, alpha=0.35)
        axes.plot([row["cycle"]], [before], marker="_", ms=11, mew=2, color=SOFT, lw=0)
        axes.plot([row["cycle"]], [after], marker=marker, ms=9, color=color, lw=0)
        gold = ((row.get("evidence") or {}).get("integrity") or {}).get("gold")
        if gold is not None and abs(gold - after) > 0.1:
            axes.plot([row["cycle"]], [gold], marker="D", ms=6, mfc="white", mec=color, lw=0)
            axes.annotate(f"gold {gold:.0%}", (row["cycle"], gold), (7, 0), textcoords="offset points", va="center", size=8)


def _draw_changes(axes: Any, data: Row) -> None:
    """What happened in the world, between two checks of live traffic."""
    for row in _rows(data, "timeline"):
        text = str(row.get("event"))
        if row.get("cycle") is None or not text.startswith("the world changes: "):
            continue
        place = row["cycle"] + 0.35
        axes.axvline(place, color=IDLE, lw=1, ls="--")
        told = text.removeprefix("the world changes: ").replace(" is now ", " → ")
        axes.text(place - 0.02, 0.02, told, rotation=90, ha="right", va="bottom", size=7.5, color=SOFT)


def _trigger(data: Row, cycle: int) -> str:
    """What set a cycle off, a word a line."""
    if cycle == 1:
        return "first start"
    begun = [row for row in _rows(data, "decisions") if row.get("cycle") == cycle - 1 and row.get("following") == "decide"]
    return "\n".join(begun[-1]["evidence"].get("fired", [])) if begun else ""


def _word(data: Row, cycle: int) -> tuple[str, str]:
    """How a cycle was decided, in a few words, and their colour."""
    mine = [row for row in _rows(data, "decisions") if row.get("cycle") == cycle]
    ruled = [row for row in mine if row.get("stage") in ("measure", "release")]
    if ruled:
        word = str(ruled[-1]["decided"])
        return (word if word == "promoted" else f"{word}:\n{_cause(ruled[-1])}"), (GOOD if word == "promoted" else BAD)
    decided = [row for row in mine if row.get("stage") == "decide"]
    return (str(decided[-1]["decided"]), SOFT) if decided else ("", SOFT)


def _cause(decision: Row) -> str:
    """The first thing that stood against a candidate, in a word."""
    evidence = decision.get("evidence") or {}
    if (evidence.get("integrity") or {}).get("alarm"):
        return "reward is\nnot gold"
    if any(not guard.get("holds", True) for guard in evidence.get("guards", [])):
        return "forgets"
    why = str(decision.get("why"))
    return "tied" if ": tied" in why else "harm" if "harm" in why else "no gain"


def _cycles(data: Row) -> list[int]:
    return sorted({row["cycle"] for row in _rows(data, "decisions") if isinstance(row.get("cycle"), int)})


def _rows(data: Row, key: str) -> Sequence[Row]:
    return [row for row in data.get(key) or [] if isinstance(row, Mapping)]
