"""Audits a certificate against the run it is about: signature, every hash, the ruling made again, aliases, the traffic since.

Nothing here trusts the certificate: each line is computed from the files of the run and compared with what was signed. An
environment of a file is code of whoever signed, so it is run only for a signer that the auditor named or is.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergrad.envs import ENVIRONMENTS, Taskset
from evergrad.evals import (
    AuditConfig,
    Costs,
    GateConfig,
    Latencies,
    content_hash,
    gate,
    plan_from_json,
    report_from_json,
    report_hash,
    suite_hash,
)
from evergrad.ledger import Ledger
from evergrad.loop._announcing import report_path, verdicts_before
from evergrad.loop._folder import LoopState, read_state
from evergrad.loop._scores import p_of_so_few, row_of, task_costs, task_seconds
from evergrad.loop._turns import turns_on_record
from evergrad.loop.certificate import (
    base_models_of,
    code_hash,
    config_hash,
    folder_hash,
    installation,
    merge_of,
    own_public_key,
    statement,
    verify,
    weighed,
)
from evergrad.registry import AliasEvent, Registry
from evergrad.types import EvalReport, EvergradError, Verdict, plain, strict_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_RARE = 0.01
"""A live success rate is told as fallen when so few successes would be rarer than this at the rate of the gate's tasks."""


class State(StrEnum):
    """How one check of an audit ended."""

    HOLDS = "holds"
    FAILS = "fails"
    NOTE = "note"
    """Differs without being wrong, such as a newer installation."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of an audit."""

    check: str
    state: State
    told: str = ""


Told = str | tuple[State, str]
"""What a check found: the words alone where it holds."""


def read_certificate(path: Path) -> dict[str, Any]:
    """
    Raises:
        EvergradError: the file is no certificate.
    """
    hint = "put back a copy of it; a run issues a certificate once"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EvergradError(f"not a certificate: {error}", where=str(path), hint=hint) from error
    if not isinstance(data, dict) or not isinstance(data.get("content"), dict) or data["content"].get("certificate") != 1:
        raise EvergradError("not a certificate: no content of a kind that is known here", where=str(path), hint=hint)
    return data


def audit(run: Path, certificate: Mapping[str, Any], public_key: Ed25519PublicKey | None = None) -> list[Finding]:
    """All checks of one certificate; a check that cannot be made fails with the reason.

    Args:
        run: The run folder.
        certificate: As :func:`read_certificate` gives it.
        public_key: Who must have signed; without one, the signature is checked against the key that it names.
    """
    content = certificate["content"]
    by_whom = "by the key given" if public_key else f"by the key it names, {_named_key(certificate)}"
    known = public_key is not None or _signed_by(certificate, own_public_key())
    findings = [_checked("signature", lambda: _signed(certificate, public_key, by_whom))]
    if findings[0].state is State.FAILS:
        return findings  # what nobody vouches for is not worth comparing
    checks: dict[str, Callable[[], Told]] = {
        "plan": lambda: _same(content["hashes"]["plan"], plan_from_json(content["plan"]).hash),
        "verdict on record": lambda: _same(content["hashes"]["verdict"], content_hash(_recorded(run, content))),
        "what it says": lambda: _says(run, content),
        "reports": lambda: _reports(run, content),
        "ruling made again": lambda: _ruled_again(run, content),
        "weights": lambda: _weights(run, content),
        "system prompts": lambda: _system_prompts(run, content),
        "configuration": lambda: _same(content["hashes"]["configuration"], config_hash(run)),
        "price book": lambda: _price_book(run, content),
        "environment and tasks": lambda: _tasks(content, known),
        "code": lambda: _noted(content["hashes"]["code"], code_hash()),
        "installation": lambda: _noted(content["installation"], installation()),
        "alias": lambda: _aliases(run, content),
        "traffic since": lambda: _traffic(run, content),
    }
    return findings + [_checked(name, check) for name, check in checks.items()]


def ruling(content: Mapping[str, Any]) -> str:
    """
    >>> ruling({"promoted": False, "reasons": ["guard letters@v1: 3 of 12 pairs lost"]})
    'REFUSED: guard letters@v1: 3 of 12 pairs lost'
    """
    word = "PROMOTED" if content.get("promoted") is True else "REFUSED"
    return f"{word}: {'; '.join(map(str, content.get('reasons', ())))}"


def alias_finding(promotion: AliasEvent) -> Finding:
    """Whether a verdict that promotes stands behind what an alias serves; ``promotion`` is the move that it rests on."""
    verdict, told = promotion.verdict, f"{promotion.alias}: {{}} at {promotion.at}"
    if promotion.action == "bootstrap":
        return Finding("alias", State.HOLDS, told.format("the first version, served without a contest,"))
    if verdict.get("promote") is True and "suite_hashes" in verdict.get("evidence", {}):
        return Finding("alias", State.HOLDS, told.format("promoted by a verdict of the gate"))
    return Finding("alias", State.FAILS, f"{told.format('set by hand')}, no verdict behind it ({promotion.reason})")


def _checked(name: str, check: Callable[[], Told]) -> Finding:
    """A check's finding; what raises, for want of a file or of a key in the certificate, fails."""
    try:
        found = check()
    except (EvergradError, OSError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = str(error) if isinstance(error, (EvergradError, OSError)) else f"{type(error).__name__}: {error}"
        return Finding(name, State.FAILS, f"cannot be checked: {what}")
    return Finding(name, State.HOLDS, found) if isinstance(found, str) else Finding(name, *found)


def _named_key(certificate: Mapping[str, Any]) -> str:
    signature = certificate.get("signature")
    return str(signature.get("public_key")) if isinstance(signature, Mapping) else "none"


def _signed_by(certificate: Mapping[str, Any], key: Ed25519PublicKey | None) -> bool:
    return key is not None and _named_key(certificate) == base64.b64encode(key.public_bytes_raw()).decode()


def _signed(certificate: Mapping[str, Any], public_key: Ed25519PublicKey | None, by_whom: str) -> Told:
    try:
        verify(certificate, public_key)
    except EvergradError as error:
        return State.FAILS, str(error)
    return by_whom


def _same(signed: object, found: object) -> Told:
    if signed == found:
        return str(found)
    return State.FAILS, f"is {found} now, certified was {signed}"


def _noted(signed: Any, found: Any) -> Told:
    if signed == found:
        return "the same as when it was issued"
    if isinstance(signed, Mapping):
        told = ", ".join(f"{key} {signed[key]} → {found.get(key)}" for key in signed if signed[key] != found.get(key))
        return State.NOTE, told
    return State.NOTE, "has changed since; the ruling is made again with what is here now"


def _recorded(run: Path, content: Mapping[str, Any]) -> Verdict:
    """The verdict in the registry.

    Raises:
        EvergradError: there is none of this plan.
    """
    with Registry(run / "registry.sqlite") as registry:
        for verdict in registry.verdicts(content["candidate_id"]):
            if verdict.evidence.get("plan_hash") == content["hashes"]["plan"]:
                return verdict
    raise EvergradError(f"the registry has no verdict on {content['candidate_id']} by this plan", where=str(run))


def _says(run: Path, content: Mapping[str, Any]) -> Told:
    """Whether the words and figures for people are those of the verdict on record, its plan and its candidate."""
    recorded, plan, hashes = _recorded(run, content), plan_from_json(content["plan"]), content["hashes"]
    with Registry(run / "registry.sqlite") as registry:
        candidate = registry.get(recorded.candidate_id)
        bases = base_models_of(candidate, registry.get(str(recorded.incumbent_id)))
    found = {
        **plain(statement(recorded, plan), "null"),
        "plan": recorded.evidence["plan_hash"],
        "suites": plan.suites,
        "reports": recorded.evidence["reports"],
        "merge": merge_of(candidate),
        "base_models": bases if "base_models" in content else None,
        "weights": sorted(weighed(candidate, str(recorded.incumbent_id))),
        "recipe": candidate.recipe_hash,
        "price book": plan.price_book,
    }
    said = {
        **content,
        "plan": plan.hash,
        "suites": {name: suite["suite_hash"] for name, suite in content["suites"].items()},
        "reports": hashes["reports"],
        "weights": sorted(hashes["weights"]),
        "recipe": hashes["recipe"],
        "price book": hashes["price_book"],
    }
    wrong = [key for key in found if strict_json(said.get(key)) != strict_json(found[key])]
    if wrong:
        return State.FAILS, f"not what is on record: {', '.join(wrong)}"
    return "as the verdict on record and its plan"


def _report_files(run: Path, content: Mapping[str, Any]) -> Iterator[tuple[str, str, str, EvalReport]]:
    """Role, suite, signed hash and report on file of everything that the verdict rests on."""
    versions = {"candidate": content["candidate_id"], "incumbent": content["incumbent_id"]}
    for role, suites in content["hashes"]["reports"].items():
        for suite, signed in suites.items():
            version_id = versions.get(role) or content["plan"]["anchors"][suite]
            path = report_path(run, version_id, suite)
            yield role, suite, signed, report_from_json(json.loads(path.read_text(encoding="utf-8")))


def _reports(run: Path, content: Mapping[str, Any]) -> Told:
    files = list(_report_files(run, content))
    changed = [f"{role} on {suite}" for role, suite, signed, report in files if report_hash(report) != signed]
    if changed:
        return State.FAILS, f"not those that were certified: {', '.join(changed)}"
    return f"all {len(files)} as certified"


def _ruled_again(run: Path, content: Mapping[str, Any]) -> Told:
    """The whole gate once more, on the reports, the plan and the verdicts before it."""
    reports: dict[str, dict[str, EvalReport]] = {"candidate": {}, "incumbent": {}, "anchor": {}}
    for role, suite, _, report in _report_files(run, content):
        reports[role][suite] = report
    plan, state = plan_from_json(content["plan"]), read_state(run / "state.json")
    costs = Costs(
        task_costs(state, plan.candidate_id, plan.primary),
        task_costs(state, plan.incumbent_id, plan.primary),
    )
    latencies = Latencies(*(task_seconds(state, each, plan.primary) for each in (plan.candidate_id, plan.incumbent_id)))
    with Registry(run / "registry.sqlite") as registry:
        history = verdicts_before(registry, plan.candidate_id, plan.incumbent_id)
    again = gate(
        reports["candidate"],
        reports["incumbent"],
        GateConfig(**plan.gate),
        primary=plan.primary,
        anchor=reports["anchor"],
        costs=costs,
        latencies=latencies,
        aim=plan.aim,
        turns=turns_on_record(run, plan.candidate_id, plan.incumbent_id, plan.primary) if plan.aim == "cost" else None,
        history=history,
        plan=plan,
        audit=AuditConfig(**plan.audit) if plan.audit else None,
    )
    if content_hash(again) == content["hashes"]["verdict"]:
        return "the same to the last digit"
    recorded = _recorded(run, content)
    if again.promote == recorded.promote:
        differing = [
            key for key in again.evidence if strict_json(again.evidence[key]) != strict_json(recorded.evidence.get(key))
        ]
        told = f"the same word, other figures: {', '.join(differing) or 'reasons'}"
        if content["hashes"]["code"] != code_hash():
            return State.NOTE, f"{told}; the code has changed since, and may compute or say them another way"
        return State.FAILS, told
    return State.FAILS, f"comes out the other way: {'; '.join(again.reasons)}"


def _weights(run: Path, content: Mapping[str, Any]) -> Told:
    with Registry(run / "registry.sqlite") as registry:
        places = {name: registry.get(name).weights_uri for name in content["hashes"]["weights"]}
    changed = [name for name, signed in content["hashes"]["weights"].items() if folder_hash(run / places[name]) != signed]
    if changed:
        return State.FAILS, f"not those that were measured: {', '.join(changed)}"
    return f"of {' and '.join(places)} as measured"


def _system_prompts(run: Path, content: Mapping[str, Any]) -> Told:
    signed = content["hashes"].get("system_prompts")
    if signed is None:
        return "none: it was issued when versions had none"
    with Registry(run / "registry.sqlite") as registry:
        texts = {name: registry.get(name).system_prompt for name in signed}
    changed = [name for name, text in texts.items() if content_hash(text) != signed[name]]
    if texts[content["candidate_id"]] != content["system_prompt"]:
        changed.append("the text in it")
    if changed:
        return State.FAILS, f"not those that were measured: {', '.join(dict.fromkeys(changed))}"
    return "as measured" if any(texts.values()) else "none"


def _price_book(run: Path, content: Mapping[str, Any]) -> Told:
    signed = content["hashes"]["price_book"]
    with Ledger.for_reading(run / "ledger.sqlite") as ledger:
        book = ledger.price_books().get(signed)
    return _same(signed, book.hash if book else "missing from the ledger")


def _tasks(content: Mapping[str, Any], known_signer: bool) -> Told:
    """Draws the tasks again and asks the verifier for its fingerprint, which runs the environment's code."""
    for name, suite in content["suites"].items():
        if not known_signer and suite["environment"] not in ENVIRONMENTS:
            return State.NOTE, f"{name}: not drawn again, for that runs {suite['environment']}: give --key"
        taskset, n = Taskset(suite["environment"], suite["settings"]), suite["tasks"]
        if (taskset.fingerprint, taskset.contract_hash) != (suite["fingerprint"], suite["contract_hash"]):
            return State.FAILS, f"{name}: the environment's source or settings have changed since"
        tasks = taskset.tasks("gate", n * (suite["draw"] + 1), seed=suite["seed"])[-n:]
        if suite_hash(tasks, fingerprint=taskset.fingerprint) != suite["suite_hash"]:
            return State.FAILS, f"{name}: other tasks are drawn now"
    return f"{', '.join(content['suites'])}: the same tasks, the same verifier"


def _aliases(run: Path, content: Mapping[str, Any]) -> Told:
    """What stands behind each alias that serves the candidate, whatever this certificate says of it."""
    version_id = content["candidate_id"]
    with Registry(run / "registry.sqlite") as registry:
        promotions = [registry.promotion(alias) for alias in registry.aliases()]
    served = [each for each in promotions if each is not None and each.version_id == version_id]
    findings = [alias_finding(each) for each in served]
    told = "; ".join(each.told for each in findings) or "none serves it"
    return (State.FAILS, told) if any(each.state is State.FAILS for each in findings) else told


def _traffic(run: Path, content: Mapping[str, Any]) -> Told:
    """Live success of the candidate, suite by suite: beside that on the gate's tasks where it was measured on them."""
    state, version_id = read_state(run / "state.json"), content["candidate_id"]
    served: dict[str, list[Mapping[str, Any]]] = {}
    for row in state.scores:
        if row["label"].startswith("live") and row["n"] and row["version_id"] == version_id:
            served.setdefault(row["suite"], []).append(row)
    certified = {name.partition("#")[0]: name for name in (*content["suites"], content["plan"]["primary"])}
    found = [_live(state, version_id, suite, rows, certified.get(suite)) for suite, rows in served.items()]
    if not found:
        return State.NOTE, "none on record"
    told = "; ".join(each if isinstance(each, str) else each[1] for each in found)
    return told if all(isinstance(each, str) for each in found) else (State.NOTE, told)


def _live(state: LoopState, version_id: str, suite: str, rows: Sequence[Mapping[str, Any]], certified: str | None) -> Told:
    """Traffic on one suite; ``certified`` is the name under which the gate measured it, ``None`` for a later contract."""
    requests, successes = sum(row["n"] for row in rows), round(sum(row["n"] * row["success_rate"] for row in rows))
    if certified is None:
        return State.NOTE, f"since the change, {suite}: {successes} of {requests} succeed (not certified)"
    told, measured = f"{suite}: {successes} of {requests} succeed", row_of(state, version_id, certified)
    if measured is None:
        return State.NOTE, f"{told} (never measured)"
    expected = measured["success_rate"]
    p_value = p_of_so_few(successes, requests, expected, measured["n"])
    told += f", of the gate's tasks {expected:.3f} (p of so few {p_value:.2g})"
    return told if p_value >= _RARE else (State.NOTE, f"{told}: it has fallen")
