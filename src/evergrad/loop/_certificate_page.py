"""A certificate as a page for people: self-contained, printable, every text in it escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from evergrad.loop._figures import count, percent, usd

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1c2530;max-width:46rem;margin:2.5rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.05rem;margin:1.8rem 0 .4rem}
.verdict{font-weight:700}.promoted{color:#0a6b3d}.refused{color:#9a2b1f}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.25rem .8rem .25rem 0;border-bottom:1px solid #dde3ea;
vertical-align:top}td:first-child{color:#5a6675;white-space:nowrap}
code{font:12.5px ui-monospace,monospace;overflow-wrap:anywhere}footer{margin-top:2rem;color:#5a6675;font-size:.85rem}
"""


def render_certificate(certificate: Mapping[str, Any]) -> str:
    """The page of a signed certificate."""
    content = certificate["content"]
    word = "promoted" if content["promoted"] else "refused"
    title = f"{content['candidate_id']}: {word}"
    parts = [
        f"<h1>Certificate: {_e(content['candidate_id'])} <span class='verdict {word}'>{word}</span></h1>",
        f"<p>Run {_e(content['run'])}, cycle {_e(content['cycle'])} ({_e(content['trigger'])}), {_e(content['issued_at'])}</p>",
        "<ul>" + "".join(f"<li>{_e(reason)}</li>" for reason in content["reasons"]) + "</ul>",
        _table("What was compared", _compared(content)),
        _table("Effect", _effect(content["effect"])),
        _table("Guards: shown to be no worse", _guards(content["guards"])),
        _table("Money", _money(content["costs"])),
        _table("What it rests on", _hashes(content)),
        _table("Again", [(name, _code(command)) for name, command in content["reproduce"].items()]),
    ]
    signature = certificate["signature"]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_e(title)}</title><style>{_STYLE}</style></head>\n<body>\n{''.join(parts)}\n"
        f"<footer>Signed with {_e(signature['algorithm'])}, key <code>{_e(signature['public_key'])}</code>. This page is for "
        "reading; the signature is on the JSON file beside it.</footer></body></html>\n"
    )


def _compared(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("candidate", _code(content["candidate_id"])), ("incumbent", _code(content["incumbent_id"]))]
    rows += [(f"anchor on {suite}", _code(name)) for suite, name in content["plan"]["anchors"].items()]
    if content.get("system_prompt"):
        rows.append(("system prompt of the candidate", _code(content["system_prompt"])))
    if merge := content.get("merge"):
        told = f"{percent(merge['share'])} of the way from {merge['parent']} to {merge['other']}"
        rows.append(("weights of the candidate", _e(f"a merge: {told}")))
    bases = content.get("base_models") or {}
    if len(set(bases.values())) > 1:
        rows += [(f"base model of {name}", _code(base)) for name, base in bases.items()]
    aim = "must be no worse, and cheaper, on" if content["plan"].get("aim") == "cost" else "must be better on"
    for name, suite in content["suites"].items():
        role = aim if name == content["plan"]["primary"] else "guard"
        rows.append((role, f"{_e(name)}, {_e(suite['tasks'])} tasks {_code(suite['suite_hash'])}"))
    return rows


def _effect(effect: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "delta" not in effect:
        return [("effect", "not measured: see the reasons")]
    low, high = effect["ci95"]
    rows = [
        ("score", _e(f"{percent(effect['score_before'])} → {percent(effect['score_after'])}")),
        ("gain", _e(f"{percent(effect['delta'], signed=True)}, 95% {percent(low)} to {percent(high)} ({effect['interval']})")),
        ("pairs", _e(f"{effect['n']}: {effect['wins']} won, {effect['losses']} lost")),
        *_shown(effect),
    ]
    series = effect.get("series")
    if series:
        rows.append(
            (
                "in the series",
                _e(
                    f"try {series['trial']}: p = {series['p_value']:.3g} against the level {series['level']:.3g} "
                    f"({series['rule']}{_promise(series, effect['holdout']['uses_before'])})"
                ),
            )
        )
    rows.append(("earlier looks at these tasks", _e(effect["holdout"]["uses_before"])))
    return rows


def _shown(effect: Mapping[str, Any]) -> list[tuple[str, str]]:
    """By which test; with the aim of a lower cost there are two."""
    not_worse, saving = effect.get("non_inferiority"), effect.get("saving")
    if not_worse is None or saving is None:
        return [("p, two-sided", _e(f"{effect['p_value']:.3g} ({effect['test']})"))] if "test" in effect else []
    before, after = (count(saving[key]) for key in ("seconds_per_success_before", "seconds_per_success_after"))
    ratio = f"× {count(saving['cost_per_success_ratio'])}, at most × {count(saving['upper_bound'])}"
    turns = f"{before} → {after} s of the machine, {saving['turns']} turns each"
    return [
        ("no worse", _e(f"by a margin of {percent(not_worse['margin'])}: p = {not_worse['p_value']:.3g}")),
        ("cost per success", _e(f"{ratio} ({turns}): below × {saving['limit']:g}, p = {saving['p_value']:.3g}")),
    ]


_PROMISES = {
    **dict.fromkeys(("saffron", "lord", "e_lond"), "at most {} of all promotions false"),
    "alpha_spending": "at most {} chance of even one false promotion",
}
"""What a rule bounds over all tries of a series; ``fixed`` bounds nothing."""


def _promise(series: Mapping[str, Any], uses_before: int) -> str:
    """What the rule promises; all but ``e_lond`` do so only on tasks that no earlier try has looked at."""
    rule = series["rule"]
    if rule not in _PROMISES or (uses_before and rule != "e_lond"):
        return ""
    return f", {_PROMISES[rule].format(percent(series['alpha']))}"


def _guards(guards: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [
        (
            f"{guard['suite']} against the {guard['against']}",
            _e(
                f"{percent(guard['delta'], signed=True)}, margin {percent(guard['margin'])}, p = {guard['p_value']:.3g}: "
                f"{'holds' if guard['holds'] else 'not shown'}"
            ),
        )
        for guard in guards
    ]


def _money(costs: Mapping[str, Any]) -> list[tuple[str, str]]:
    before, after = costs["before"], costs["after"]
    return [
        ("this cycle", _e(usd(costs["cycle_usd"]))),
        ("cost per success", _e(f"{usd(before['usd_per_success'])} → {usd(after['usd_per_success'])}")),
        (
            "score per dollar",
            _e(f"{count(before['intelligence_per_dollar'])} → {count(after['intelligence_per_dollar'])}")
            + _e(_ratio(costs["intelligence_per_dollar_ratio"], costs["intelligence_per_dollar_ratio_ci95"])),
        ),
        ("points per $1,000", _e(count(costs["points_per_1000_usd"]))),
        *_paid(costs["payback"]),
    ]


def _paid(payback: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if payback is None:
        return [("pays for itself", "–")]
    cheaper, worth = payback["by_lower_cost"], payback["by_worth"]
    told = "never" if cheaper["never"] else f"after {count(cheaper['successes'])} successes"
    rows = [("pays by lower cost alone", _e(told))]
    if worth is not None:
        told = "never" if worth["never"] else f"after {count(worth['break_even_attempts'])} attempts"
        rows.append(("pays for itself", _e(f"{told}, at {usd(worth['usd_per_success'])} a success")))
        rows.append(("return", _e(f"{percent(worth['return'], signed=True)} over {count(worth['attempts_served'])} attempts")))
    return rows


def _ratio(ratio: float | None, ci95: list[float | None] | None) -> str:
    """An end of the interval that is unknown has no bound: some resamples of the incumbent have no success at all."""
    if ratio is None:
        return ""
    low, high = ("∞" if end is None else f"{end:.2f}" for end in ci95 or (None, None))
    return f" (× {ratio:.2f}, 95% {low} to {high})" if ci95 else f" (× {ratio:.2f})"


def _hashes(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    hashes = content["hashes"]
    rows = [(f"weights of {name}", _code(value)) for name, value in hashes["weights"].items()]
    rows += [(name.replace("_", " "), _code(hashes[name])) for name in ("plan", "verdict", "recipe", "configuration")]
    rows += [(f"environment of {name}", _code(suite["fingerprint"])) for name, suite in content["suites"].items()]
    rows += [("price book", _code(hashes["price_book"])), ("code", _code(hashes["code"]))]
    rows.append(("installation", _e(", ".join(f"{name} {version}" for name, version in content["installation"].items()))))
    return rows


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    """Names are escaped here, values by whoever made them."""
    if not rows:
        return ""
    cells = "".join(f"<tr><td>{_e(name)}</td><td>{value}</td></tr>" for name, value in rows)
    return f"<h2>{_e(title)}</h2><table>{cells}</table>"


def _code(value: Any) -> str:
    return f"<code>{_e(value)}</code>"


def _e(value: Any) -> str:
    return html.escape(str(value))
