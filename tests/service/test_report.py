"""The report is strict JSON and a page that no text of a model can break out of."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.loop.compare import compare
from evergrad.loop.report import clock, headline, read_report, render_html, to_plain, usd, write_report
from evergrad.types import EvergradError, Outcome

EVIL = "</title></script><script>alert('x')</script><img src=x onerror=alert(1)>&\"' $x_{1}$ \x1b[31m"


def whole(text: str = "support_desk@v1/gate") -> dict[str, Any]:
    """A report with every part, ``text`` wherever a run puts its own words."""
    score = {"label": text, "suite": text, "version_id": text, "mean": 0.5, "ci95": (0.4, 0.6), "n": 96, "slices": {text: 0.1}}
    return {
        "name": text,
        "seed": 0,
        "wall_s": 432.0,
        "cycles": [
            {
                "trigger": text,
                "score_before": 0.48,
                "score_after": 0.96,
                "ci95": [0.39, 0.57],
                "n": 96,
                "verdict": "promoted",
                "arm": text,
                "merge": {"parent": text, "other": text, "share": 0.5},
                "reasons": [text],
                "evidence": {"p_value": math.nan},
                "usd": Decimal("0.0123"),
            }
        ],
        "cost": {"total_usd": Decimal("0.02"), "by_phase": {text: Decimal("0.02"), "idle": None}, "entries": 12},
        "usd_per_million_tokens": math.inf,
        "usd_per_success": 0.0001,
        "intelligence_per_dollar": {"value": 10000.0, "ci95": [9000.0, 11000.0]},
        "steps": [
            {"cycle": 1, "step": 0, "reward": 0.3, "reward_ci95": 0.1, "usd": 0.001, "wall_s": 30.0, "loss": math.nan},
            {"cycle": 1, "step": 1, "reward": math.nan, "reward_ci95": None, "usd": 0.002, "wall_s": 60.0},
            {"cycle": 2, "step": 0, "reward": 0.6, "reward_ci95": 0.1, "usd": 0.003, "wall_s": 90.0},
        ],
        "timeline": [{"at_s": 12.0, "event": text, "usd": Decimal("0.001")}],
        "scores": [{**score, "usd_per_success": 0.0002}, {**score, "label": "after", "mean": 0.9, "usd_per_success": 0.000001}],
        "versions": [{"version_id": text, "parent_id": None, "policy_version": 3, "created_at": text, "aliases": [text]}],
    }


class _Page(HTMLParser):
    """Collects the elements and the visible text, as a browser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def parse(page: str) -> _Page:
    parser = _Page()
    parser.feed(page)
    return parser


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_json_is_strict_and_holds_what_was_given(tmp_path: Path) -> None:
    write_report(tmp_path, whole())
    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse_constant)
    assert data["steps"][0]["loss"] is None
    assert data["usd_per_million_tokens"] is None
    assert data["cycles"][0]["usd"] == 0.0123
    assert data["cycles"][0]["evidence"] == {"p_value": None}
    assert data["cost"]["by_phase"]["idle"] is None
    assert read_report(tmp_path) == data


def test_page_has_no_script_whatever_a_model_wrote(tmp_path: Path) -> None:
    write_report(tmp_path, whole(EVIL))
    page = (tmp_path / "report.html").read_text()
    parsed = parse(page)
    assert "script" not in parsed.tags
    assert "img" not in parsed.tags
    assert parsed.handlers == []
    assert "<script>alert('x')</script>" in parsed.text, "the text itself must still be readable"
    assert not re.search(r"(src|href)=['\"]?(https?:)?//", page.replace("http://www.w3.org", "")), (
        "the page needs nothing from elsewhere"
    )


def test_plots_are_well_formed_and_share_no_id(tmp_path: Path) -> None:
    pictures = re.findall(r"<svg.*?</svg>", render_html(to_plain(whole(EVIL))), flags=re.DOTALL)
    assert len(pictures) == 5
    ids = [set(re.findall(r'\bid="([^"]+)"', picture)) for picture in pictures]
    assert sum(map(len, ids)) == len(set().union(*ids))
    for picture in pictures:
        ElementTree.fromstring(picture)
        assert "mathdefault" not in picture, "a tick that was meant for a mathematical typesetter"
        for target in re.findall(r"url\(#([^)]+)\)", picture):
            assert f'id="{target}"' in picture


@pytest.mark.parametrize("missing", [*whole(), "everything"])
def test_a_report_of_a_run_that_has_just_begun(missing: str) -> None:
    data = {} if missing == "everything" else {key: value for key, value in whole().items() if key != missing}
    assert "<h1>" in render_html(to_plain(data))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.decimals()
    | st.sampled_from(Outcome),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@given(json_values)
def test_any_value_becomes_strict_json(value: Any) -> None:
    plain = to_plain(value)
    assert json.loads(json.dumps(plain, allow_nan=False), parse_constant=refuse_constant) == plain


@settings(max_examples=5, deadline=None)
@given(st.text(min_size=1, max_size=30).filter(lambda text: text.isprintable() and text.strip() == text))
def test_any_printable_text_survives_the_page(text: str) -> None:
    assert text in parse(render_html(to_plain(whole(text)))).text


def test_a_failed_write_leaves_the_earlier_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(tmp_path, {"seed": 1})
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(tmp_path, {"seed": 2})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_numbers_as_people_read_them() -> None:
    assert [usd(amount) for amount in (0.0, 1234.5, -0.5, 0.0000000123)] == ["$0.00", "$1,234.50", "-$0.5000", "$0.000000012"]
    assert clock(3600) == "1:00:00"
    assert headline({}) == "No cycle has ended yet, for – and – of time."


def cycle(number: int, verdict: str, before: float, after: float) -> dict[str, Any]:
    scores = {"score_before": before, "score_after": after}
    return {"cycle": number, "candidate": f"c{number}-rl", "verdict": verdict, **scores}


def test_the_headline_counts_promotions_alone() -> None:
    """Whichever cycles were refused, and whatever they would have scored."""
    gains = {1: "45.8% → 90.0%", 2: "0.0% → 100.0%", 3: "10.0% → 70.0%"}
    for verdicts in itertools.product(("promoted", "refused"), repeat=3):
        rows = [
            cycle(n, word, *moves)
            for n, word, moves in zip((1, 2, 3), verdicts, ((0.458, 0.9), (0, 1), (0.1, 0.7)), strict=True)
        ]
        told = headline({"cycles": rows, "serving": {"version_id": "v", "suite": "s@v2", "score": 0.0, "live": False}})
        for row in rows:
            counted = gains[row["cycle"]] in told or gains[row["cycle"]].replace(" → ", " to ") in told
            refused = f"{row['candidate']} of cycle {row['cycle']}" in told
            assert (counted, refused) == (row["verdict"] == "promoted", row["verdict"] == "refused"), told
        assert told.startswith("Nothing was promoted") == ("promoted" not in verdicts)
        assert told.endswith(" Production, v, now scores 0.0% on held-out tasks of s@v2.")
    live = headline({"cycles": [], "serving": {"version_id": "v", "suite": "s@v2", "score": 0.5, "live": True}})
    assert live.endswith("now scores 50.0% on live traffic of s@v2.")


def test_comparison_of_seeds_has_a_line_a_cycle_and_means(tmp_path: Path) -> None:
    first = {"suite": "desk@v1", "score_before": 0.48, "score_after": 0.96, "slices_before": {"hard": 0.0}, "usd": 0.002}
    first |= {"slices_after": {"hard": 0.9}, "other_suites": {"desk@v0": {"before": 0.5, "after": 1.0}}, "verdict": "promoted"}
    second = {"suite": "desk@v1", "score_before": 0.5, "score_after": 0.9, "verdict": "refused", "usd": None}
    reports = [{"seed": seed, "wall_s": 60.0 * seed, "cycles": [row]} for seed, row in ((1, first), (2, second))]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in compare(reports).splitlines()]
    assert lines[2][:6] == ["1", "1", "desk@v1", "48.0% → 96.0%", "hard 0.0% → 90.0%", "desk@v0 50.0% → 100.0%"]
    assert lines[3][:2] + lines[3][-1:] == ["1", "all", "1:00"]
    assert lines[4][8:10] == ["refused", "–"]
    assert lines[6][:4] + lines[6][9:10] == ["mean", "1", "desk@v1", "49.0% → 93.0%", "$0.0020"]
    assert lines[7][-1] == "1:30"
    assert {len(line) for line in lines} == {11}


def test_comparison_from_the_shell_names_a_missing_report(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "evergrad.loop.compare", str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no report yet")


def test_a_broken_report_is_an_error_for_the_user(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"seed": ')
    with pytest.raises(EvergradError, match="not valid JSON"):
        read_report(tmp_path)
