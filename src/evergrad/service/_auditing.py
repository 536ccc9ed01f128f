"""``evergrad audit``: are a run's certificates true, and do they still fit what lies beside them?"""

from __future__ import annotations

from pathlib import Path

from evergrad.config import nearest
from evergrad.loop.auditing import Finding, State, audit, read_certificate
from evergrad.loop.certificate import public_key
from evergrad.service._models import open_registry
from evergrad.service._screen import cell, console, print_json, table
from evergrad.types import InputError

_STYLE = {State.HOLDS: "green", State.FAILS: "bold red", State.NOTE: "yellow"}


def audit_certificates(run: Path, name: str | None, *, key: Path | None = None, as_json: bool = False) -> int:
    """Audits the certificates of one version, or of the whole run; returns the exit code: 1 when some check fails.

    Raises:
        InputError: there is no such certificate, or the key cannot be read.
    """
    signer = public_key(key) if key is not None else None
    results: dict[str, list[Finding]] = {}
    for path in _certificates(run, name):
        results[path.stem] = audit(run, read_certificate(path), signer)
    if as_json:
        print_json(results)
    else:
        for title, findings in results.items():
            rows = [(each.check, cell(each.state.value, _STYLE[each.state]), each.told) for each in findings]
            console().print(table(("check", "", ""), rows, title=title))
    return int(any(each.state is State.FAILS for findings in results.values() for each in findings))


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
    chosen = [path for path in found if read_certificate(path)["content"].get("candidate_id") == version_id]
    if not chosen:
        what = f"no certificate of {version_id}: a first version serves without a contest"
        raise InputError(what, where=str(run), hint=nearest(version_id, issued))
    return chosen
