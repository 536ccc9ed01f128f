"""``evergrad audit``: are a run's certificates true, and do they still fit what lies beside them?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergrad.config import nearest
from evergrad.loop.auditing import Finding, State, alias_finding, audit, read_certificate, ruling
from evergrad.loop.certificate import public_key
from evergrad.service._models import open_registry
from evergrad.service._screen import cell, console, print_json, table
from evergrad.types import InputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_STYLE = {State.HOLDS: "green", State.FAILS: "bold red", State.NOTE: "yellow"}
_NOTHING = "no ruling to rely on"


@dataclass(frozen=True, slots=True)
class Audit:
    """One certificate, or one version that serves without any, and what was found."""

    ruling: str | None
    """Word and reasons of the gate; ``None`` where nobody vouches for them."""
    findings: list[Finding]


def audit_certificates(run: Path, name: str | None, *, key: Path | None = None, as_json: bool = False) -> int:
    """Audits the certificates of one version, or of the whole run; returns the exit code: 1 when some check fails.

    Raises:
        InputError: there is no such certificate, or the key cannot be read.
    """
    signer = public_key(key) if key is not None else None
    certificates = {path.stem: read_certificate(path) for path in _certificates(run, name)}
    results = {stem: _audited(run, certificate, signer) for stem, certificate in certificates.items()}
    if name is None:
        results |= _served_without(run, {each["content"].get("candidate_id") for each in certificates.values()})
    if as_json:
        print_json(results)
    else:
        for title, each in results.items():
            rows = [(found.check, cell(found.state.value, _STYLE[found.state]), found.told) for found in each.findings]
            console().print(table(("check", "", ""), rows, title=f"{title}: {each.ruling or _NOTHING}"))
    return int(any(found.state is State.FAILS for each in results.values() for found in each.findings))


def _audited(run: Path, certificate: dict[str, Any], signer: Ed25519PublicKey | None) -> Audit:
    findings = audit(run, certificate, signer)
    signed = findings[0].state is not State.FAILS
    return Audit(ruling(certificate["content"]) if signed else None, findings)


def _served_without(run: Path, certified: Iterable[str]) -> dict[str, Audit]:
    """What stands behind the aliases of versions that no certificate is about, such as the first that served."""
    with open_registry(run) as registry:
        promotions = [each for alias in registry.aliases() if (each := registry.promotion(alias)) is not None]
    found: dict[str, Audit] = {}
    for each in promotions:
        if each.version_id not in certified:
            found.setdefault(each.version_id, Audit(None, [])).findings.append(alias_finding(each))
    return found


def _certificates(run: Path, name: str | None) -> list[Path]:
    """Those of the version that ``name`` is or stands for, in the order in which they were issued."""
    found = sorted((run / "certificates").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    issued = {str(read_certificate(path)["content"].get("candidate_id")): path for path in found}
    if not found:
        raise InputError("no certificate yet", where=str(run), hint="each verdict of the gate has one; let a cycle be measured")
    if name is None:
        return found
    with open_registry(run) as registry:
        version_id = registry.find(name).version_id
        promotion = registry.promotion(name)
    chosen = [path for path in found if read_certificate(path)["content"].get("candidate_id") == version_id]
    if not chosen:
        why = alias_finding(promotion).told if promotion else "a first version serves without a contest"
        raise InputError(f"no certificate of {version_id}: {why}", where=str(run), hint=nearest(version_id, issued))
    return chosen
