"""Certificates: signed and unforgeable, issued once, and an audit that finds whatever was changed afterwards."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from evergrad.envs import Taskset
from evergrad.evals import GIVEN_UP, Costs, GateConfig, gate
from evergrad.ledger import Ledger
from evergrad.loop._announcing import (
    anchor_reports,
    gate_suites,
    gate_tasks,
    hash_of,
    report_path,
    suite_name,
    verdicts_before,
    write_plan,
)
from evergrad.loop._certificate_page import render_certificate
from evergrad.loop._certifying import _costs, certificate_path, certify
from evergrad.loop._folder import LoopState, write_json, write_text
from evergrad.loop._scores import task_costs
from evergrad.loop.auditing import Finding, State, audit, read_certificate, ruling
from evergrad.loop.certificate import CertificateError, folder_hash, public_key, run_signing_key, sign, signing_key, verify
from evergrad.loop.config import WorthConfig
from evergrad.registry import Registry
from evergrad.types import EvalReport, EvergradError, InputError, ModelVersion, Verdict, strict_json
from tests.loop.conftest import LETTERS

V1 = {"contract": "v1"}
N = 12

# ── Signatures ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def test_what_was_signed_verifies_also_after_a_round_through_a_file(key: Ed25519PrivateKey) -> None:
    certificate = sign({"b": 0.1 + 0.2, "a": [1, None], "é": float("inf")}, key)
    assert certificate["content"]["é"] is None, "strict JSON has no infinity"
    verify(json.loads(json.dumps(certificate, indent=3)))
    verify(certificate, key.public_key())


def test_any_change_is_found(key: Ed25519PrivateKey) -> None:
    certificate = sign({"promoted": False, "n": 96, "ci95": [0.1, 0.2]}, key)

    def changed(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        other = copy.deepcopy(certificate)
        change(other)
        return other

    for forged in (
        changed(lambda c: c["content"].update(promoted=True)),
        changed(lambda c: c["content"].update(more=1)),
        changed(lambda c: c["content"]["ci95"].reverse()),
        changed(lambda c: c["signature"].update(public_key=sign({}, Ed25519PrivateKey.generate())["signature"]["public_key"])),
    ):
        with pytest.raises(CertificateError, match="does not fit"):
            verify(forged)
    for broken in (
        changed(lambda c: c["signature"].update(value="?")),
        changed(lambda c: c["signature"].update(algorithm="none")),
        changed(lambda c: c.pop("signature")),
        {"content": {}},
    ):
        with pytest.raises(CertificateError):
            verify(broken)


def test_another_key_is_not_the_one_that_must_have_signed(key: Ed25519PrivateKey) -> None:
    forged = sign({"promoted": True}, Ed25519PrivateKey.generate())
    verify(forged)
    with pytest.raises(CertificateError, match="another key"):
        verify(forged, key.public_key())


def test_the_key_is_made_once_for_the_owners_eyes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key.pem"
    first, second = signing_key(path), signing_key(path)
    assert first.private_bytes_raw() == second.private_bytes_raw()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert public_key(path.with_name("key.pem.pub")).public_bytes_raw() == first.public_key().public_bytes_raw()
    assert sorted(each.name for each in path.parent.iterdir()) == ["key.pem", "key.pem.pub"]
    path.write_text("not a key")
    with pytest.raises(InputError, match="no key to sign"):
        signing_key(path)
    with pytest.raises(InputError, match="no public key"):
        public_key(path)
    with pytest.raises(InputError, match="EVERGRAD_SIGNING_KEY"):
        signing_key(Path("/proc/no/such/place.pem"))


def home_is_a_file(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_text(tmp_path / "home", "no folder")
    patch.setenv("HOME", str(tmp_path / "home"))


def home_is_read_only(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setenv("HOME", "/proc/self")  # for the superuser, too


def home_is_unknown(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.delenv("HOME")
    patch.setattr("os.getuid", lambda: 2**31 - 7)


def key_is_broken(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_text(tmp_path / ".config" / "evergrad" / "signing-key.pem", "no key")
    patch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("spoil", [home_is_a_file, home_is_read_only, home_is_unknown, key_is_broken])
def test_without_a_home_for_it_the_key_stays_in_the_run_folder(
    spoil: Callable[[pytest.MonkeyPatch, Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("EVERGRAD_SIGNING_KEY")
    spoil(monkeypatch, tmp_path)
    run, told = tmp_path / "run", list[str]()
    keys = {run_signing_key(run, told.append).private_bytes_raw() for _ in range(2)}
    assert len(keys) == len(told) == 1, told
    assert str(run / "signing-key.pem") in told[0]
    assert stat.S_IMODE((run / "signing-key.pem").stat().st_mode) == 0o600
    monkeypatch.setenv("HOME", str(tmp_path / "repaired"))
    assert run_signing_key(run).private_bytes_raw() in keys, "one key for all certificates of a run"


def test_a_run_signs_with_the_users_key_and_a_chosen_one_must_be_usable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVERGRAD_SIGNING_KEY", str(tmp_path / "file" / "key.pem"))
    write_text(tmp_path / "file", "no folder")
    with pytest.raises(InputError, match="EVERGRAD_SIGNING_KEY"):
        run_signing_key(tmp_path / "run")
    monkeypatch.delenv("EVERGRAD_SIGNING_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    own = run_signing_key(tmp_path / "run").private_bytes_raw()
    assert own == signing_key(tmp_path / ".config" / "evergrad" / "signing-key.pem").private_bytes_raw()
    assert not (tmp_path / "run").exists()


def test_the_public_half_is_put_back(tmp_path: Path) -> None:
    first, public = signing_key(tmp_path / "key.pem"), tmp_path / "key.pem.pub"
    public.unlink()
    signing_key(tmp_path / "key.pem")
    assert public_key(public).public_bytes_raw() == first.public_key().public_bytes_raw()


def test_two_processes_that_make_the_key_at_once_have_the_same(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from evergrad.loop.certificate import signing_key; "
    code += "print(signing_key(Path(sys.argv[1])).private_bytes_raw().hex())"
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "key.pem")], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert len({process.communicate()[0] for process in started}) == 1


def test_a_folders_hash_sees_names_contents_and_cuts(tmp_path: Path) -> None:
    def made(**files: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            write_text(folder / name, text)
        return folder_hash(folder)

    assert made(a="1", b="2") == made(b="2", a="1")
    assert len({made(a="1", b="2"), made(a="12", b=""), made(a="1", c="2"), made(a="1", b="3"), made(a="1")}) == 5
    with pytest.raises(FileNotFoundError):
        folder_hash(tmp_path / "absent")


# ── A certificate of a run ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Any]:
    """What a run has on record after its first contest: "new" succeeds on all twelve tasks, "old" on three."""
    run, taskset = tmp_path / "run", Taskset(str(LETTERS), V1)
    write_text(run / "config.toml", f'name = "r"\nseed = 3\n\n[environment]\nname = "{LETTERS}"\n\n[budget]\ncycles = 1\n')
    with Registry(run / "registry.sqlite") as registry, Ledger(run / "ledger.sqlite") as ledger:
        for name in ("old", "new"):
            write_text(run / "versions" / name / "weights", f"weights of {name}")
            registry.register(ModelVersion(name, None, 1, f"versions/{name}", "tiny", "re", "", {"suite": "letters@v1"}))
        registry.promote("production", "old", bootstrap=True)
        yield SimpleNamespace(
            known=[],
            config=SimpleNamespace(
                audit=None,
                name="r",
                eval=SimpleNamespace(n=N),
                seed=3,
                gate=GateConfig(min_n=N, max_cost_increase=1.0),
                environment=SimpleNamespace(name=str(LETTERS)),
                worth=WorthConfig(usd_per_success=0.10, attempts=1000),
            ),
            state=LoopState(deployed=V1, cycles=[{"usd": 0.5}]),
            registry=registry,
            traffic=None,
            ledger=ledger,
            folder=SimpleNamespace(path=run),
            clock=SimpleNamespace(phase=lambda name: nullcontext()),
            taskset=lambda settings: taskset,
            suite=lambda settings: "letters@v1",
        )


def measured(session: Any, version_id: str, successes: int, usd: float, draw: int) -> EvalReport:
    suite, tasks = suite_name(session, V1, draw), gate_tasks(session, V1, draw)
    scores = {task.task_id: float(index < successes) for index, task in enumerate(tasks)}
    report = EvalReport(version_id, suite, scores, hash_of(session, V1, draw))
    write_json(report_path(session.folder.path, version_id, suite), dataclasses.asdict(report))
    row = {"label": f"{version_id} on {suite}", "suite": suite, "suite_hash": report.suite_hash, "version_id": version_id}
    ended = sorted(scores, reverse=version_id == "old")  # each in an order of its own, as tries end
    row |= {"mean": report.mean, "n": N, "task_ids": ended, "task_scores": [scores[each] for each in ended]}
    row |= {"task_usd": [usd] * N}
    share = successes / N
    session.state.scores.append(row | {"success_rate": share, "usd_per_success": usd / share if share else None})
    return report


def issue(session: Any, candidate: str = "new", incumbent: str = "old", after: int = N, before: int = 3) -> Path:
    """Measures, rules, records and certifies, as the loop does."""
    new, old = session.registry.get(candidate), session.registry.get(incumbent)
    history = verdicts_before(session.registry, candidate, incumbent)
    suites = gate_suites(session, history)
    anchors = anchor_reports(session, suites, new, old)
    plan = write_plan(session, new, old, suites, anchors, history)
    reports = [
        {each.name: measured(session, name, count, usd, each.draw) for each in suites}
        for name, count, usd in ((candidate, after, 0.01), (incumbent, before, 0.02))
    ]
    paid = Costs(*(task_costs(session.state, name, suites[0].name) for name in (candidate, incumbent)))
    config = session.config.gate
    verdict = gate(
        reports[0], reports[1], config, primary=suites[0].name, anchor=anchors, costs=paid, history=history, plan=plan
    )
    if verdict.promote:
        session.registry.promote("production", candidate, verdict)
    else:
        session.registry.record_verdict(verdict)
    certify(session, verdict, plan, suites)
    write_json(session.folder.path / "state.json", dataclasses.asdict(session.state))
    return certificate_path(session.folder.path, plan)


def states(session: Any, path: Path) -> dict[str, State]:
    return {each.check: each.state for each in audit(session.folder.path, read_certificate(path))}


def test_a_promotion_is_certified_with_what_it_rests_on(session: Any) -> None:
    path = issue(session)
    content = read_certificate(path)["content"]
    verify(read_certificate(path), signing_key().public_key())
    assert (content["candidate_id"], content["incumbent_id"], content["promoted"]) == ("new", "old", True)
    assert (content["effect"]["wins"], content["effect"]["losses"], content["effect"]["delta"]) == (9, 0, 0.75)
    assert content["effect"]["series"]["rule"] == "saffron"
    assert content["costs"]["cycle_usd"] == 0.5
    assert content["costs"]["points_per_1000_usd"] == pytest.approx(75 * 1000 / 0.5)
    assert content["costs"]["before"]["usd_per_success"] == pytest.approx(0.08)
    assert content["costs"]["after"]["usd_per_success"] == pytest.approx(0.01)
    paid = content["costs"]["payback"]
    assert paid["by_lower_cost"] == {"successes": pytest.approx(0.5 / (0.08 - 0.01)), "never": False}
    gained = 0.10 * 0.75 + 0.02 - 0.01
    assert paid["by_worth"]["break_even_attempts"] == pytest.approx(0.5 / gained)
    assert paid["by_worth"]["return"] == pytest.approx((1000 * gained - 0.5) / 0.5)
    assert content["costs"]["intelligence_per_dollar_ratio"] == pytest.approx(8)
    assert set(content["hashes"]["weights"]) == {"new", "old"}
    assert content["suites"]["letters@v1"]["fingerprint"] == session.taskset(V1).fingerprint
    assert content["reproduce"]["the ruling"].startswith("evergrad audit new --run ")
    page = path.with_suffix(".html").read_text()
    for told in ("new", "promoted", "25.0% → 100.0%", content["hashes"]["plan"], content["hashes"]["code"], "evergrad run"):
        assert told in page
    assert set(states(session, path).values()) <= {State.HOLDS, State.NOTE}
    assert [check for check, state in states(session, path).items() if state is State.NOTE] == ["traffic since"]


def test_what_never_pays_is_said_in_words(session: Any) -> None:
    session.config.worth = None
    content = read_certificate(issue(session, after=3))["content"]
    paid = content["costs"]["payback"]
    assert paid["by_worth"] is None
    assert not paid["by_lower_cost"]["never"], "as many successes at half the cost"
    session.registry.register(ModelVersion("newer", "old", 2, "versions/new", "tiny", "re", "", {"suite": "letters@v1"}))
    path = issue(session, candidate="newer", after=1)
    assert read_certificate(path)["content"]["costs"]["payback"]["by_lower_cost"] == {"successes": None, "never": True}
    assert "<td>pays by lower cost alone</td><td>never</td>" in path.with_suffix(".html").read_text()


def test_a_refusal_is_certified_too_and_later_ones_rest_on_it(session: Any) -> None:
    refused = issue(session, after=3)
    assert read_certificate(refused)["content"]["promoted"] is False
    assert State.FAILS not in states(session, refused).values()
    session.registry.register(ModelVersion("newer", "old", 2, "versions/new", "tiny", "re", "", {"suite": "letters@v1"}))
    later = issue(session, candidate="newer")
    assert read_certificate(later)["content"]["plan"]["trial"] == 2
    assert State.FAILS not in states(session, later).values()
    assert State.FAILS not in states(session, refused).values(), "verdicts after it change nothing"


def test_a_system_prompt_is_certified_with_the_weights(session: Any) -> None:
    prompted = dataclasses.replace(
        session.registry.get("old"), version_id="told", parent_id="old", recipe_hash="p", system_prompt="Be <careful>."
    )
    session.registry.register(prompted)
    path = issue(session, candidate="told")
    content = read_certificate(path)["content"]
    weights, prompts = content["hashes"]["weights"], content["hashes"]["system_prompts"]
    assert weights["told"] == weights["old"]
    assert prompts["told"] != prompts["old"]
    assert content["system_prompt"] == "Be <careful>."
    assert "Be &lt;careful&gt;." in path.with_suffix(".html").read_text()
    assert states(session, path)["system prompts"] is State.HOLDS
    with sqlite3.connect(session.folder.path / "registry.sqlite") as connection:
        connection.execute("UPDATE versions SET system_prompt = 'Be careless.' WHERE version_id = 'told'")
    assert states(session, path)["system prompts"] is State.FAILS


def test_a_merge_is_certified_with_both_its_parents(session: Any) -> None:
    registry = session.registry
    registry.register(ModelVersion("other", "old", 2, "versions/other", "tiny", "o", "", {"suite": "letters@v1"}))
    write_text(session.folder.path / "versions/other/model.safetensors", "other")
    merged = dataclasses.replace(
        registry.get("new"),
        version_id="merged",
        parent_id="old",
        merged_id="other",
        recipe_hash="m",
        metadata={"merged_share": 0.25},
    )
    registry.register(merged)
    path = issue(session, candidate="merged")
    content = read_certificate(path)["content"]
    assert content["merge"] == {"parent": "old", "other": "other", "share": 0.25}
    assert content["hashes"]["weights"].keys() == {"merged", "old", "other"}
    assert "a merge: 25.0% of the way from old to other" in path.with_suffix(".html").read_text()
    assert State.FAILS not in states(session, path).values()
    write_text(session.folder.path / "versions/other/model.safetensors", "changed")
    assert states(session, path)["weights"] is State.FAILS
    with sqlite3.connect(session.folder.path / "registry.sqlite") as connection:
        connection.execute("""UPDATE versions SET metadata = '{"merged_share": 0.75}' WHERE version_id = 'merged'""")
    assert states(session, path)["what it says"] is State.FAILS


def by_hand(session: Any, candidate: str) -> None:
    promoted = Verdict(True, ("by hand, without the gate: it was Friday",), {"by_hand": True}, candidate, "old")
    session.registry.promote("production", candidate, promoted)


def alias_row(session: Any, path: Path) -> Finding:
    (found,) = (each for each in audit(session.folder.path, read_certificate(path)) if each.check == "alias")
    return found


def test_an_alias_that_was_set_by_hand_over_a_refusal_fails_the_audit(session: Any) -> None:
    path = issue(session, after=3)
    assert ruling(read_certificate(path)["content"]).startswith("REFUSED: ")
    assert alias_row(session, path) == Finding("alias", State.HOLDS, "none serves it")
    by_hand(session, "new")
    found = alias_row(session, path)
    assert found.state is State.FAILS
    assert re.fullmatch(r"production: set by hand at \S+, no verdict behind it \(by hand, .* Friday\)", found.told)
    session.registry.rollback("production")
    assert alias_row(session, path).state is State.HOLDS
    session.registry.promote("staging", "new", bootstrap=True)
    assert "staging: the first version" in alias_row(session, path).told


def test_an_alias_rests_on_the_gates_verdict_until_a_hand_moves_it(session: Any) -> None:
    path = issue(session)
    assert ruling(read_certificate(path)["content"]).startswith("PROMOTED: ")
    assert "production: promoted by a verdict of the gate at " in alias_row(session, path).told
    session.registry.rollback("production")
    assert alias_row(session, path).told == "none serves it"
    by_hand(session, "new")
    assert alias_row(session, path).state is State.FAILS, "the gate promoted it once, but not this time"


def test_a_certificate_is_issued_once(session: Any) -> None:
    path = issue(session)
    first = path.read_text()
    (verdict,) = session.registry.verdicts("new")
    history = verdicts_before(session.registry, "new", "old")
    suites = gate_suites(session, history)
    plan = write_plan(session, session.registry.get("new"), session.registry.get("old"), suites, {}, history)
    session.state.cycles[-1]["usd"] = 99
    certify(session, verdict, plan, suites)
    assert path.read_text() == first
    assert len(list(path.parent.iterdir())) == 2


def change_report(run: Path) -> None:
    path = run / "evals" / "new--letters@v1.json"
    report = json.loads(path.read_text())
    report["scores"][next(iter(report["scores"]))] = 0.0
    write_json(path, report)


def rewrite(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    return lambda run: write_text(run / name, change((run / name).read_text()))


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        (change_report, {"reports", "ruling made again"}),
        (lambda run: (run / "evals" / "new--letters@v1.json").unlink(), {"reports", "ruling made again"}),
        (rewrite("versions/new/weights", lambda text: text + "!"), {"weights"}),
        (lambda run: (run / "versions/old/weights").rename(run / "versions/old/other"), {"weights"}),
        (rewrite("config.toml", lambda text: text.replace("seed = 3", "seed = 4")), {"configuration"}),
        (rewrite("config.toml", lambda text: text.replace("cycles = 1", "cycles = 9")), set()),
        (rewrite("state.json", lambda text: text.replace("    0.01", "    0.5")), {"ruling made again"}),
        (lambda run: (run / "state.json").unlink(), {"ruling made again", "traffic since"}),
    ],
    ids=["score", "report gone", "weights", "renamed", "seed", "budget", "costs", "state gone"],
)  # fmt: skip
def test_an_audit_finds_what_was_changed(session: Any, change: Callable[[Path], None], fails: set[str]) -> None:
    path = issue(session)
    before = (session.folder.path / "state.json").read_text()
    change(session.folder.path)
    found = states(session, path)
    assert {check for check, state in found.items() if state is State.FAILS} == fails, before[:600]


def test_an_audit_finds_a_forged_certificate_and_looks_no_further(session: Any) -> None:
    path = issue(session, after=3)
    certificate = read_certificate(path)
    certificate["content"]["promoted"] = True
    findings = audit(session.folder.path, certificate)
    assert [(each.check, each.state) for each in findings] == [("signature", State.FAILS)]
    # Whoever signs anew with a key of their own is caught by the registry, and by the key.
    forged = sign(certificate["content"] | {"hashes": {**certificate["content"]["hashes"], "verdict": "0" * 16}}, signing_key())
    failed = {each.check for each in audit(session.folder.path, forged) if each.state is State.FAILS}
    assert failed == {"what it says", "verdict on record", "ruling made again"}
    stranger = Ed25519PrivateKey.generate().public_key()
    assert audit(session.folder.path, read_certificate(path), stranger)[0].state is State.FAILS


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "promoted": lambda c: c.update(promoted=True),
    "reasons": lambda c: c["reasons"].append("it is very good"),
    "candidate_id": lambda c: c.update(candidate_id="newer"),
    "incumbent_id": lambda c: c.update(incumbent_id="older"),
    "effect": lambda c: c["effect"].update(delta=0.9),
    "effect, level": lambda c: c["effect"]["series"].update(level=0.9),
    "effect, less": lambda c: c["effect"].pop("ci95"),
    "guards": lambda c: c.update(guards=[]) if c["guards"] else c["guards"].append({"suite": "letters@v1", "holds": True}),
    "plan": lambda c: c["plan"].update(level=0.9),
    "suites": lambda c: c["suites"]["letters@v1"].update(suite_hash="0" * 16),
    "suites, more": lambda c: c["suites"].update({"letters@v9": c["suites"]["letters@v1"]}),
    "suites, none": lambda c: c.update(suites={}),
    "reports": lambda c: c["hashes"].update(reports={}),
    "weights": lambda c: c["hashes"].update(weights={}),
    "recipe": lambda c: c["hashes"].update(recipe="0" * 16),
    "price book": lambda c: c["hashes"].update(price_book="0" * 16),
}


@pytest.mark.parametrize("field", FORGERIES)
def test_an_audit_holds_every_word_against_the_record(session: Any, field: str) -> None:
    """Also when the forger has the very key that signs."""
    content = read_certificate(issue(session, after=3))["content"]
    FORGERIES[field](content)
    forged = sign(content, signing_key())
    found = {each.check: each for each in audit(session.folder.path, forged)}
    assert found["signature"].state is State.HOLDS
    assert found["what it says"].state is State.FAILS
    if field != "candidate_id":  # on that one there is no verdict at all
        assert found["what it says"].told == f"not what is on record: {field.partition(',')[0]}"


def test_an_audit_runs_the_code_of_no_stranger(session: Any, tmp_path: Path, key: Ed25519PrivateKey) -> None:
    """The environment named is a file that leaves a trace when it is imported."""
    content, trace = read_certificate(issue(session))["content"], tmp_path / "trace"
    write_text(tmp_path / "evil.py", f"open({str(trace)!r}, 'w')\n")
    content["suites"]["letters@v1"]["environment"] = str(tmp_path / "evil.py")
    found = {each.check: each for each in audit(session.folder.path, sign(content, key))}
    assert not trace.exists()
    assert found["environment and tasks"].state is State.NOTE
    assert "give --key" in found["environment and tasks"].told
    found = {each.check: each for each in audit(session.folder.path, sign(content, key), key.public_key())}
    assert trace.exists()
    assert found["environment and tasks"].state is State.FAILS


def test_an_audit_tells_of_an_environment_that_changed(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = issue(session)
    monkeypatch.setattr(Taskset, "fingerprint", "another")
    found = {each.check: each for each in audit(session.folder.path, read_certificate(path))}
    assert found["environment and tasks"].state is State.FAILS
    assert "have changed since" in found["environment and tasks"].told


def test_an_audit_holds_the_promise_against_the_traffic_since(session: Any) -> None:
    path = issue(session)

    def served(successes: int) -> Any:
        session.state.scores = [each for each in session.state.scores if not each["label"].startswith("live")]
        row = {"label": "live, cycle 1", "suite": "letters@v1", "version_id": "new", "n": 24, "success_rate": successes / 24}
        session.state.scores.append(row)
        write_json(session.folder.path / "state.json", dataclasses.asdict(session.state))
        return next(each for each in audit(session.folder.path, read_certificate(path)) if each.check == "traffic since")

    kept, fallen = served(20), served(2)
    assert (kept.state, fallen.state) == (State.HOLDS, State.NOTE)
    assert "letters@v1: 20 of 24 succeed, of the gate's tasks 1.000" in kept.told
    assert fallen.told.endswith("it has fallen")
    measured_row = next(each for each in session.state.scores if each["label"] == "new on letters@v1")
    measured_row["success_rate"] = 0.25  # graded scores: a mean far above the share of tasks that succeed whole
    assert served(6).state is State.HOLDS


@pytest.mark.parametrize("after", [N, 3], ids=["promoted", "refused, and set by hand"])
def test_an_audit_tells_the_traffic_of_every_suite_that_the_version_served(session: Any, after: int) -> None:
    path = issue(session, after=after)

    def row(cycle: int, suite: str, version_id: str, n: int, rate: float | None) -> dict[str, Any]:
        label = f"live, cycle {cycle}"
        return {"label": label, "suite": suite, "version_id": version_id, "n": n, "success_rate": rate}

    session.state.scores += [
        row(1, "letters@v1", "old", 24, 0.0),
        row(1, "letters@v1", "new", 24, after / N),
        row(2, "letters@v2", "new", 24, 0.0),
        row(3, "letters@v2", "new", 24, 0.0),
        row(4, "letters@v3", "new", 0, None),
    ]
    write_json(session.folder.path / "state.json", dataclasses.asdict(session.state))
    found = next(each for each in audit(session.folder.path, read_certificate(path)) if each.check == "traffic since")
    certified, changed = found.told.split("; ")
    assert certified.startswith(f"letters@v1: {24 * after // N} of 24 succeed, of the gate's tasks")
    assert changed == "since the change, letters@v2: 0 of 48 succeed (not certified)"
    assert found.state is State.NOTE


def test_a_measurement_that_was_given_up_has_no_costs(session: Any) -> None:
    state = session.state
    for name in ("old", "new"):
        measured(session, name, 3, 0.02, 0)
    (verdict,) = [Verdict(False, (), {"delta": None}, "new", "old")]
    assert _costs(state, verdict, "letters@v1", None)["after"]["usd_per_success"] is not None
    state.scores[-1]["outcomes"] = {GIVEN_UP: 4}
    costs = _costs(state, verdict, "letters@v1", None)
    assert costs["before"]["usd_per_success"] is not None
    assert costs["after"] == {"usd_per_success": None, "intelligence_per_dollar": None, "intelligence_per_dollar_ci95": None}
    assert costs["intelligence_per_dollar_ratio"] is costs["payback"] is None


@pytest.mark.parametrize(
    ("rule", "uses", "promise"),
    [
        ("saffron", 0, "at most 5.0% of all promotions false"),
        ("lord", 0, "at most 5.0% of all promotions false"),
        ("e_lond", 3, "at most 5.0% of all promotions false"),
        ("alpha_spending", 0, "at most 5.0% chance of even one false promotion"),
        ("fixed", 0, None),
        ("saffron", 1, None),
        ("alpha_spending", 1, None),
    ],
)
def test_the_page_promises_what_the_rule_keeps(session: Any, rule: str, uses: int, promise: str | None) -> None:
    certificate = read_certificate(issue(session))
    certificate["content"]["effect"]["series"]["rule"] = rule
    certificate["content"]["effect"]["holdout"]["uses_before"] = uses
    page = render_certificate(certificate)
    assert f"({rule}{', ' + promise if promise else ''})" in page
    assert ("promotions false" in page or "false promotion" in page) == (promise is not None)


def test_what_is_no_certificate_is_named(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"content": 3}', '{"content": {"certificate": 2}}', "[" * 100_000):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(EvergradError, match="not a certificate"):
            read_certificate(tmp_path / "c.json")


def test_an_audit_of_odd_content_fails_and_does_not_fall(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    Registry(tmp_path / "registry.sqlite").close()
    for content in ({"certificate": 1}, {"certificate": 1, "hashes": 3, "plan": [], "suites": {"x": None}}):
        findings = audit(tmp_path, sign(content, key))
        assert findings[0].state is State.HOLDS
        assert all(each.state is State.FAILS for each in findings[1:]), strict_json(findings)
