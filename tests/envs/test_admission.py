"""Verifiers with known defects are found out."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from evergrad.envs import AdmissionReport
from evergrad.envs import test_environment as admit
from evergrad.envs._admission import estimate_tokens

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
    return {check.name for check in report.failed}


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
    assert all(len(row) == 4 and row[1] in ("pass", "FAIL", "skip") for row in report.rows())
    assert len({row[0] for row in report.rows()}) == len(report.checks)


def test_time_has_its_unit(write: Write) -> None:
    rows = {row[0]: row for row in admit(write(BODY % "answer == self.facts['sum']"), n=5).rows()}
    assert rows["time per try"][2].endswith(" ms")


def test_what_was_not_tried_is_skipped_and_no_pass(write: Write) -> None:
    body = BODY.replace("def demonstrate", "def show") % "answer == self.facts['sum']"
    report = admit(write(body), n=10)
    assert report.passed
    skipped = {row[0] for row in report.rows() if row[1] == "skip"}
    assert skipped == {check.name for check in report.skipped}
    assert {"gold passes", "demonstrations fit the limits", "another task's answer", "hedge: two answers"} <= skipped


TOOLS = BODY.replace(
    "        return [self.facts",
    "        return ['%s', self.facts",
).replace(
    "    @reward",
    """    @tool
    async def add(self, first: int) -> str:
        if first == 13:
            raise ToolError("not 13")
        return "yes"

    @reward""",
)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ("add(first=1)", None),
        ("sum(first=1)", "error: tools are add"),
        ("add(frist=1)", "error: use add(first)"),
        ("add(first=one)", "error: first must be int"),
        ("add(first=13)", None),  # what the tool itself finds wrong may be shown
        ("add(first=1", "error: use add(first)"),
    ],
)
def test_demonstrations_call_tools_that_exist(write: Write, call: str, complaint: str | None) -> None:
    report = admit(write(TOOLS % ("answer == self.facts['sum']", call)), n=5)
    (check,) = [check for check in report.checks if check.name == "demonstrated calls are accepted"]
    assert check.passed is (complaint is None), check
    assert (complaint or "") in check.detail


@pytest.mark.parametrize(
    ("limits", "texts", "complaint"),
    [
        ("", "[self.facts['sum']]", None),
        ("", "['x ' * 40]", "raise limits.max_tokens_per_turn"),
        ("", "['add(first=1)'] * 6 + ['1']", "raise limits.max_turns"),
        ("max_turns=9", "['add(first=1)'] * 6 + ['1']", None),
        ("max_tokens_per_turn=90", "['x ' * 40]", None),
    ],
)
def test_demonstrations_are_held_against_the_limits_of_a_run(
    write: Write, limits: str, texts: str, complaint: str | None
) -> None:
    body = TOOLS.replace("return ['%s', self.facts[\"sum\"]]", f"return {texts}") % "answer == self.facts['sum']"
    head = f"from evergrad.types import Limits\n{body}    limits = Limits({limits})\n"
    report = admit(write(head), n=5, counted_by="the tokenizer of a test")
    (check,) = [check for check in report.checks if check.name == "demonstrations fit the limits"]
    assert check.passed is (complaint is None), check
    assert (complaint or "by the tokenizer of a test" if "max_turns" not in (complaint or "") else complaint) in check.detail


@pytest.mark.parametrize(
    ("reply", "at_least"),
    [("refund(id=U79, amount=27)", 15), ("find(item=paint 87)", 11), ("", 1), ("\U0001f600", 4), ("\ud800", 1)],
)
def test_an_estimate_is_rather_too_high(reply: str, at_least: int) -> None:
    assert at_least <= estimate_tokens(reply) <= len(reply.encode("utf-8", "replace")) + 1


@pytest.mark.parametrize("where", ["tool", "reward"])
def test_code_that_blocks_is_tried_three_times_and_no_more(write: Write, where: str) -> None:
    verifier = "__import__('time').sleep(9) or True" if where == "reward" else "answer == self.facts['sum']"
    body = TOOLS % (verifier, "add(first=1)")
    if where == "tool":
        body = body.replace('return "yes"', "__import__('time').sleep(9)")
    body = f"from evergrad.types import Limits\n{body}    limits = Limits(tool_timeout_s=0.1, score_timeout_s=0.1)\n"
    started = time.monotonic()
    report = admit(write(body), n=20)
    assert time.monotonic() - started < 10
    assert "nothing raises" in failed(report)
    assert {"junk", "echo of the request"} <= {check.name for check in report.skipped}
    assert "stopped after 3 time-outs" in report.skipped[0].detail


def test_the_first_interrupt_ends_code_that_blocks(write: Write) -> None:
    path = write(BODY % "__import__('time').sleep(60)")
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from evergrad.service.cli import command\n"
        f"print('go', flush=True)\nraise SystemExit(command(['env', 'test', {path!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(5)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert time.monotonic() - started < 5
    assert "Traceback" not in error
