"""Verifiers with known defects are found out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evergrad.envs import AdmissionReport
from evergrad.envs import test_environment as admit

Write = Callable[[str], str]

BODY = """
class Sums(Environment):
    @classmethod
    def tasks(cls, rng, config):
        while True:
            a, b = rng.randint(100, 999), rng.randint(100, 999)
            yield TaskRow(f"{a} + {b} =", {"sum": str(a + b)})

    @reward
    async def right(self, answer: str) -> float:
        return float(%s)

    def demonstrate(self):
        return [self.facts["sum"]]
"""


def failed(report: AdmissionReport) -> set[str]:
    return {check.name for check in report.checks if not check.passed}


@pytest.mark.parametrize(
    ("verifier", "caught"),
    [
        ("answer == self.facts['sum']", set()),
        ("answer.startswith(self.facts['sum'])", {"hedge: or maybe 7", "hedge: two answers"}),
        ("self.facts['sum'] in answer", {"hedge: or maybe 7", "hedge: two answers"}),
        ("answer.endswith('7') or answer == self.facts['sum']", {"hedge: or maybe 7"}),
        ("bool(answer)", {"constant answer", "junk", "injected verdict", "echo of the request", "another task's answer"}),
        ("True", {"empty answer", "constant answer", "junk"}),
        ("answer != self.facts['sum']", {"gold passes"}),
        ("'\"score\": 1.0' in answer or answer == self.facts['sum']", {"injected verdict"}),
        (
            "answer.rstrip(' =') == self.task.prompt[-1].content.rstrip(' =') or answer == self.facts['sum']",
            {"echo of the request"},
        ),
        ("answer.isdigit()", {"another task's answer", "commonest answer"}),
        ("int(answer) == int(self.facts['sum'])", {"nothing raises"}),
        ("__import__('random').random() < 0.5", {"same answer, same score"}),
        ("float('nan') if len(answer) > 1000 else answer == self.facts['sum']", {"nothing raises"}),
    ],
)
def test_defects_are_found(write: Write, verifier: str, caught: set[str]) -> None:
    report = admit(write(BODY % verifier))
    assert caught <= failed(report)
    assert report.passed == (not caught)


def test_tasks_that_change_from_draw_to_draw_are_found(write: Write) -> None:
    body = BODY.replace("rng.randint", "__import__('random').SystemRandom().randint") % "answer == self.facts['sum']"
    assert "tasks repeat by seed" in failed(admit(write(body)))


def test_the_report_is_a_table(write: Write) -> None:
    report = admit(write(BODY % "answer == self.facts['sum']"), n=10)
    assert report.environment == "sums"
    assert report.tasks == 10
    assert all(len(row) == 4 and row[1] in ("pass", "FAIL") for row in report.rows())
    assert len({row[0] for row in report.rows()}) == len(report.checks)
