"""What one run gained and what it cost: ``report.json`` for programs, ``report.html`` for people.

Both hold the same data, and either may be written while the run goes on: what is not known yet is absent or ``null``.

Keys of the data (money in USD, time in seconds, scores between 0 and 1, an interval is a pair ``[low, high]``):

``seed``, ``wall_s``
    The run's seed; how long it has taken, waiting included.
``cycles[]``
    ``trigger``, ``suite``, ``score_before``, ``score_after``, ``ci95`` (of the paired difference), ``n`` (pairs), ``verdict``
    (``promoted`` or ``refused``; with a canary ``passed``, and when that has ended ``promoted`` or ``rolled back``),
    ``reasons``, ``usd`` (of this cycle until then), ``other_suites`` (name → ``{before, after}``: what must not be forgotten),
    ``arm`` (which way of getting better it tried), ``merge`` (``parent``, ``other``, ``share``; ``null`` where nothing was
    merged), ``aim`` (``score``, or ``cost`` where a smaller base model was tried), ``base_model``, ``saved_usd_per_attempt``
    (by turns; ``null`` without any), ``error_reduction`` (share of the errors that are gone), ``candidate``, ``incumbent``,
    ``evidence``, ``release`` (how the canary ended: ``share``, ``actor``, ``reason``, ``evidence``).
``cost``
    ``total_usd``, ``by_phase`` (name → USD, ``null`` when unpriced), ``by_cycle``, ``entries`` (their number), ``coverage``.
``budget``
    ``usd`` and ``unspent_usd``; both ``null`` without a budget in dollars.
``usd_per_million_tokens``, ``usd_per_success``, ``intelligence_per_dollar {value, ci95}``
    As the ledger defines them, for the version that serves, from its evaluation that ``priced_on`` names.
``usd_per_success_at_least``
    Without a success: what one costs at least, with 95% confidence.
``all_in``
    The same three with all that was spent on learning, refused candidates too, spread over ``attempts``: those that the
    ``[worth]`` gives to every version that has served, or those served so far (``basis``). ``null`` while there are none.
``index``
    ``version`` (a hash: only equal ones can be compared), ``suites``, ``retired`` (saturated: they tell nothing apart),
    ``values`` (version id to normalized mean).
``serving``
    What production scores on the deployed suite now: ``version_id``, ``suite``, ``score`` (the mean), ``n``, ``live`` (whether
    of live traffic, where it was never evaluated on this suite); ``null`` while nothing serves or was measured.
``frontier[]``
    ``version_id``, ``suite`` (the deployed one), ``score``, ``usd_per_success``, ``on_front``, ``dominated_by`` (version ids).
``steps[]``
    ``cycle``, ``step``, ``reward``, ``reward_ci95`` (half its width; ``null`` of few groups), ``usd`` and ``wall_s`` (both
    since the run began), and further figures; ``mismatch_kl`` (nats a token) and ``ratio_max_error`` say how far the policy
    that sampled and the one that was trained were apart.
``timeline[]``
    ``at_s``, ``event``, ``cycle``, ``usd`` (since the run began).
``decisions[]``
    How each stage ended: ``number``, ``cycle``, ``stage``, ``decided``, ``why``, ``following`` (the next stage), ``evidence``,
    ``at`` (UTC), ``at_s``, ``usd``.
``scores[]``
    ``label`` (the event after which it was measured), ``suite``, ``version_id``, ``mean``, ``ci95`` (of the mean),
    ``success_rate``, ``n``, ``slices`` (name → mean), ``usd_per_success``; of live traffic also ``cycle`` and ``check``.
``versions[]``, optional
    ``version_id``, ``parent_id``, ``merged_id`` (the other parent of a merge), ``policy_version``, ``created_at``, ``aliases``.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

from evergrad.loop import _report_plots as plots
from evergrad.loop._figures import clock, count, percent, usd
from evergrad.loop._timeline_plot import timeline_png, timeline_svg
from evergrad.types import EvergradError

__all__ = [
    "clock",
    "count",
    "headline",
    "percent",
    "read_report",
    "render_html",
    "to_plain",
    "usd",
    "write_report",
    "write_timeline",
]

Data = Mapping[str, Any]
_ANEW = "remove it and run 'evergrad run' with the configuration of this run, which writes it anew"


def write_report(run_dir: Path, data: Data, *, page: bool = True) -> None:
    """Writes ``report.json`` and ``report.html`` into ``run_dir``; each appears whole or stays as it was.

    The JSON is strict: NaN and infinities become ``null``, decimals become numbers.

    Args:
        run_dir: The run folder.
        data: All that is known of the run.
        page: Whether the page is written, too; drawing its pictures takes a second.

    Raises:
        OSError: the folder is missing, not writable, or its disk is full; earlier reports are left as they were.
    """
    plain = to_plain(data)
    _replace(run_dir / "report.json", json.dumps(plain, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    if page:
        _replace(run_dir / "report.html", render_html(plain))


def write_timeline(run_dir: Path) -> None:
    """Draws the run's ``timeline.png`` from its report; a run of one cycle has none."""
    picture = timeline_png(read_report(run_dir))
    if picture:
        beside = run_dir / "timeline.png.tmp"
        beside.write_bytes(picture)
        beside.replace(run_dir / "timeline.png")


def read_report(run_dir: Path) -> dict[str, Any]:
    """The run's ``report.json``.

    Raises:
        EvergradError: there is none, or it is not a JSON object.
    """
    path = run_dir / "report.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EvergradError("no report yet", where=str(path), hint="let the run finish its first cycle") from None
    except (ValueError, RecursionError) as error:
        raise EvergradError(f"not valid JSON: {error}", where=str(path), hint=_ANEW) from error
    if not isinstance(data, dict):
        raise EvergradError("a report is a JSON object", where=str(path), hint=_ANEW)
    return data


def to_plain(value: Any) -> Any:
    """``value`` as strict JSON values.

    >>> to_plain({"reward": float("nan"), "usd": Decimal("0.25"), "span": (1, 2)})
    {'reward': None, 'usd': 0.25, 'span': [1, 2]}
    """
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # half of a surrogate pair has no UTF-8
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, (float, Decimal)):
        number = float("nan" if isinstance(value, Decimal) and value.is_nan() else value)
        return number if math.isfinite(number) else None
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        return [to_plain(item) for item in sorted(value, key=str)]
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        return [to_plain(item) for item in value]
    if hasattr(value, "item"):  # a scalar of numpy or torch
        return to_plain(value.item())
    return str(value)


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _interval(pair: Any, show: Callable[..., str], **options: Any) -> str:
    if not isinstance(pair, Sequence) or len(pair) != 2 or None in pair:
        return ""
    return f"[{show(pair[0], **options)}, {show(pair[1], **options)}]"


# ── The page ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def render_html(data: Data) -> str:
    """The page as one self-contained document; ``data`` as :func:`to_plain` gives it. Every text in it is escaped."""
    title = f"Evergrad run{_title_of(data)}"
    parts = [
        f"<header><h1>{_e(title)}</h1><p class='lead'>{_e(headline(data))}</p></header>",
        _tiles(data),
        _figures(data),
        _section(
            "Cycles", _cycle_table(data), "What set each cycle off, what it gained on paired held-out tasks, and the ruling."
        ),
        _section("Timeline", _timeline_table(data), "Time and money since the run began."),
        _section("Decisions", _decision_table(data), "How each stage ended; the evidence of one: evergrad loop explain STEP."),
        _section("Scores", _score_table(data), "Success on held-out tasks, with a 95% interval."),
        _section("Versions", _version_table(data), "Each version's parent is the one it was trained from."),
        _section("Cost by phase", _cost_table(data), "Every second of the run is in one phase; unpriced is a dash, not zero."),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_e(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n{body}\n"
        "<footer>The same figures for programs: <a href='report.json'>report.json</a></footer></main></body></html>\n"
    )


def headline(data: Data) -> str:
    """The whole run in a few sentences. Only a promotion is a gain; what was refused is said, and what serves now.

    >>> whole = {"cost": {"total_usd": 0.0123}, "wall_s": 432}
    >>> first = {"score_before": 0.48, "score_after": 0.96, "verdict": "promoted"}
    >>> headline({"cycles": [first], **whole})
    'Held-out success went from 48.0% to 96.0% in one cycle, for $0.0123 and 7:12 of time.'
    >>> second = {"cycle": 2, "candidate": "c2", "score_before": 0.0, "score_after": 1.0, "verdict": "refused"}
    >>> headline({"cycles": [second], **whole})
    'Nothing was promoted in one cycle, for $0.0123 and 7:12 of time. Refused: c2 of cycle 2.'
    """
    cycles = _rows(data, "cycles")
    spent = f"for {usd(_cost(data).get('total_usd'))} and {clock(data.get('wall_s'))} of time"
    if not cycles:
        return f"No cycle has ended yet, {spent}.{_serving_now(data)}"
    number = "one cycle" if len(cycles) == 1 else f"{len(cycles)} cycles"
    promoted = [row for row in cycles if row.get("verdict") == "promoted"]
    refused = [f"{row.get('candidate') or '–'} of cycle {row.get('cycle', '–')}" for row in cycles if row not in promoted]
    told = f" Refused: {', '.join(refused)}." if refused else ""
    return f"{_gains(promoted)} in {number}, {spent}.{told}{_serving_now(data)}"


def _gains(promoted: Sequence[Data]) -> str:
    if not promoted:
        return "Nothing was promoted"
    moves = [(percent(row.get("score_before")), percent(row.get("score_after"))) for row in promoted]
    if len(moves) == 1:
        return "Held-out success went from {} to {}".format(*moves[0])
    return f"Held-out success went {', then '.join(f'{before} → {after}' for before, after in moves)}"


def _serving_now(data: Data) -> str:
    serving = data.get("serving") or {}
    if serving.get("score") is None:
        return ""
    where = f"{'live traffic' if serving.get('live') else 'held-out tasks'} of {serving.get('suite')}"
    return f" Production, {serving.get('version_id')}, now scores {percent(serving['score'])} on {where}."


def _tiles(data: Data) -> str:
    per_dollar = data.get("intelligence_per_dollar") or {}
    tiles = [
        ("Total cost", usd(_cost(data).get("total_usd")), _entries_note(_cost(data).get("entries"))),
        ("Cost per success", usd(data.get("usd_per_success")), "failures included"),
        ("Cost per million tokens", usd(data.get("usd_per_million_tokens")), ""),
        (
            "Intelligence per dollar",
            count(per_dollar.get("value")),
            f"successes per $, 95% {_interval(per_dollar.get('ci95'), count)}" if per_dollar.get("ci95") else "successes per $",
        ),
        ("Time", clock(data.get("wall_s")), f"seed {data['seed']}" if data.get("seed") is not None else ""),
    ]
    cells = "".join(
        f"<div class='tile'><span>{_e(name)}</span><b>{_e(value)}</b><small>{_e(note)}</small></div>"
        for name, value, note in tiles
    )
    return f"<section class='tiles'>{cells}</section>"


def _figures(data: Data) -> str:
    steps, scores = _rows(data, "steps"), _rows(data, "scores")
    line = timeline_svg(data)
    figures = [
        _figure(
            line,
            "Timeline",
            "What set each cycle off, what its candidate scored against what served (▲ promoted, ▼ refused), and live success.",
            wide=True,
        )
        if line
        else "",
        _figure(
            plots.reward(steps, "step"),
            "Reward over steps",
            f"Mean reward of each training batch; the band is its 95% interval.{_mismatch(steps)}",
        ),
        _figure(plots.reward(steps, "usd"), "Reward over dollars", "The same, against what the run had cost by then."),
        _figure(
            plots.success(scores),
            "Success before and after each event",
            "Held-out success with its 95% interval; small marks are slices.",
            wide=True,
        ),
        _figure(plots.cost_by_phase(_cost(data).get("by_phase") or {}), "Cost by phase", "Where the money went."),
        _figure(
            plots.pareto(scores),
            "Score against cost per success",
            "Up and left is better; the line joins what nothing else beats on both.",
        ),
    ]
    return f"<section class='figures'>{''.join(figures)}</section>"


def _mismatch(steps: Sequence[Data]) -> str:
    """How far the policy that sampled and the one that was trained were apart, in the worst steps.

    >>> _mismatch([{"mismatch_kl": 0.0061, "ratio_max_error": 0.42}, {"mismatch_kl": 0.0043, "ratio_max_error": 0.7}])
    ' Sampling and trained policy differ by at most 6.1e-03 nats a token (mismatch KL of a batch), ratios by at most 0.7.'
    """
    known = [step for step in steps if step.get("mismatch_kl") is not None and step.get("ratio_max_error") is not None]
    if not known:
        return ""
    divergence, ratio = (max(step[key] for step in known) for key in ("mismatch_kl", "ratio_max_error"))
    return (
        f" Sampling and trained policy differ by at most {divergence:.1e} nats a token (mismatch KL of a batch), "
        f"ratios by at most {ratio:.2g}."
    )


def _figure(svg: str, title: str, note: str, *, wide: bool = False) -> str:
    picture = svg or "<p class='none'>Nothing to show yet.</p>"
    kind = " class='wide'" if wide else ""
    return f"<figure{kind}><figcaption><b>{_e(title)}</b> {_e(note)}</figcaption>{picture}</figure>"


def _cycle_table(data: Data) -> str:
    rows = []
    for number, row in enumerate(_rows(data, "cycles"), start=1):
        word, reasons = _verdict(row)
        gain = _difference(row.get("score_after"), row.get("score_before"))
        rows.append(
            [
                str(number),
                _e(row.get("trigger")) + _tried(row) + _others(row),
                percent(row.get("score_before")),
                percent(row.get("score_after")),
                f"<b>{percent(gain, signed=True)}</b> <small>{_interval(row.get('ci95'), percent, signed=True)}</small>",
                _e(count(row.get("n"))),
                f"<span class='badge {'yes' if word == 'promoted' else 'no'}'>{_e(word)}</span>"
                + (f"<small>{_e('; '.join(reasons))}</small>" if reasons else ""),
                usd(row.get("usd")),
            ]
        )
    return _table(
        ["#", "Trigger", "Before", "After", "Gain, 95% interval", "Pairs", "Verdict", "Cost"], rows, numeric=(2, 3, 4, 5, 7)
    )


def _tried(cycle: Data) -> str:
    """Which arm the cycle took, and what it merged; nothing where there was no choice."""
    if not cycle.get("arm"):
        return ""
    merge = cycle.get("merge")
    told = f": {percent(merge.get('share'))} of the way from {merge.get('parent')} to {merge.get('other')}" if merge else ""
    if cycle.get("aim") == "cost":
        ratio = ((cycle.get("evidence") or {}).get("saving") or {}).get("cost_per_success_ratio")
        told = f": {cycle.get('base_model')}" + (f", a success costs × {ratio:.2f}" if ratio is not None else "")
    return f"<br><small>{_e(cycle['arm'])}{_e(told)}</small>"


def _others(cycle: Data) -> str:
    """What happened meanwhile to the suites that the cycle was not about."""
    others = cycle.get("other_suites") or {}
    lines = [f"{name}: {percent(move.get('before'))} → {percent(move.get('after'))}" for name, move in others.items()]
    return f"<br><small>{_e('; '.join(lines))}</small>" if lines else ""


def _timeline_table(data: Data) -> str:
    rows = [[clock(row.get("at_s")), _e(row.get("event")), usd(row.get("usd"))] for row in _rows(data, "timeline")]
    return _table(["At", "Event", "Spent"], rows, numeric=(0, 2))


def _decision_table(data: Data) -> str:
    rows = [
        [
            _e(row.get("number")),
            _e(row.get("cycle")),
            _e(row.get("stage")),
            f"<b>{_e(row.get('decided'))}</b>",
            _e(row.get("why")),
            usd(row.get("usd")),
        ]
        for row in _rows(data, "decisions")
    ]
    return _table(["#", "Cycle", "Stage", "Decided", "Why", "Spent"], rows, numeric=(0, 1, 5))


def _score_table(data: Data) -> str:
    rows = []
    for row in _rows(data, "scores"):
        slices = row.get("slices") or {}
        detail = ", ".join(f"{name} {percent(mean)}" for name, mean in slices.items())
        rows.append(
            [
                _e(plots.event_of(row)),
                _e(row.get("suite")),
                f"<code>{_e(row.get('version_id'))}</code>",
                f"<b>{percent(row.get('mean'))}</b> <small>{_interval(row.get('ci95'), percent)}</small>",
                _e(count(row.get("n"))),
                _e(detail),
                usd(row.get("usd_per_success")),
            ]
        )
    return _table(["After", "Suite", "Version", "Success", "Tasks", "Slices", "Cost per success"], rows, numeric=(3, 4, 6))


def _version_table(data: Data) -> str:
    rows = [
        [
            f"<code>{_e(row.get('version_id'))}</code>",
            f"<code>{_e(' + '.join(filter(None, (row.get('parent_id'), row.get('merged_id')))) or '–')}</code>",
            _e(row.get("policy_version")),
            _e(row.get("created_at")),
            _e(", ".join(row.get("aliases") or [])),
        ]
        for row in _rows(data, "versions")
    ]
    return _table(["Version", "Parent", "Policy version", "Made", "Aliases"], rows, numeric=(2,))


def _cost_table(data: Data) -> str:
    phases = _cost(data).get("by_phase") or {}
    total = sum(amount for amount in phases.values() if amount is not None)
    ordered = sorted(phases.items(), key=lambda item: -(item[1] or 0))
    rows = [
        [_e(phase), usd(amount), percent(amount / total) if amount is not None and total else "–"] for phase, amount in ordered
    ]
    return _table(["Phase", "Cost", "Share"], rows, numeric=(1, 2))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Iterable[int] = ()) -> str:
    """``heads`` are plain text, cells are HTML; empty without rows."""
    if not rows:
        return ""
    kinds = [" class='num'" if index in set(numeric) else "" for index in range(len(heads))]
    head = "".join(f"<th{kind}>{_e(name)}</th>" for kind, name in zip(kinds, heads, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>" for row in rows
    )
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _section(title: str, content: str, note: str) -> str:
    return f"<section><h2>{_e(title)}</h2><p class='note'>{_e(note)}</p>{content}</section>" if content else ""


def _verdict(cycle: Data) -> tuple[str, list[str]]:
    verdict, ended = cycle.get("verdict"), cycle.get("release")
    reasons = [*(cycle.get("reasons") or []), *([ended["reason"]] if ended else [])]
    return ("–" if verdict is None else str(verdict)), [str(reason) for reason in reasons]


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def _entries_note(entries: Any) -> str:
    number = len(entries) if isinstance(entries, (list, tuple)) else entries
    return "" if number is None else f"{count(number)} ledger entries"


def _title_of(data: Data) -> str:
    return f": {data['name']}" if data.get("name") else ""


def _rows(data: Data, key: str) -> list[Data]:
    return [row for row in data.get(key) or [] if isinstance(row, Mapping)]


def _cost(data: Data) -> Data:
    cost = data.get("cost")
    return cost if isinstance(cost, Mapping) else {}


def _e(value: Any) -> str:
    return "–" if value is None else html.escape(str(value), quote=True)


_STYLE = """
:root{color-scheme:light;--ink:#1b1f24;--soft:#5b6572;--line:#e4e7eb;--ground:#f6f7f8;--card:#fff;--good:#0f766e;--bad:#b42318}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:36px 24px 48px}
h1{font-size:26px;letter-spacing:-.01em;margin:0}
h2{font-size:17px;margin:0}
.lead{font-size:17px;color:var(--soft);margin:6px 0 22px;max-width:75ch}
.note,figcaption{color:var(--soft);font-size:13px}
.note{margin:2px 0 12px}
section,figure{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin:0 0 16px}
section.tiles,section.figures{background:none;border:0;padding:0;display:grid;gap:16px}
.tiles{grid-template-columns:repeat(auto-fit,minmax(190px,1fr))}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;
  display:flex;flex-direction:column}
.tile span{color:var(--soft);font-size:13px}
.tile b{font-size:24px;letter-spacing:-.01em;font-variant-numeric:tabular-nums}
.tile small{color:var(--soft);min-height:1.5em}
.figures{grid-template-columns:repeat(auto-fit,minmax(min(100%,500px),1fr))}
figure{margin:0}
figure.wide{grid-column:1/-1}
figcaption{margin-bottom:8px}
figcaption b{display:block;color:var(--ink);font-size:15px}
figure svg{width:100%;height:auto;display:block}
figure svg text{font-family:system-ui,-apple-system,"Segoe UI",sans-serif!important}
.none{color:var(--soft);text-align:center;padding:60px 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{font-size:12px;font-weight:600;color:var(--soft);text-align:left;white-space:nowrap}
th,td{padding:7px 14px 7px 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
.num{text-align:right;white-space:nowrap;width:1%}
td small{color:var(--soft)}
.badge{display:inline-block;border-radius:99px;padding:0 9px;font-size:12.5px;font-weight:600;margin-right:6px}
.badge.yes{background:#d7f2ec;color:var(--good)}
.badge.no{background:#fde7e4;color:var(--bad)}
code{font:12.5px ui-monospace,SFMono-Regular,Menlo,monospace}
footer{color:var(--soft);font-size:13px}
a{color:var(--good)}
@media print{body{background:#fff}section,figure{break-inside:avoid}}
"""
