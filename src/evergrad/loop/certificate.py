"""Certificates: what a verdict rests on, in one JSON file that is signed, and one page for people.

A certificate is ``{"content": …, "signature": …}``. What is signed (Ed25519, RFC 8032) is the content as JSON with sorted keys
and without spaces, in UTF-8. The signature names the public key; whether that key is the right one, only whoever knows it
can say (``evergrad audit --key``).

The private key is a PEM file that any other tool reads. It belongs to a person or a machine, not to a run: it lies at
``$EVERGRAD_SIGNING_KEY``, or else in the user's own configuration, and is made when it is first needed. Only where there is
no home directory to keep it in, it lies in the run folder.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergrad.evals import Plan, content_hash
from evergrad.types import EvergradError, InputError, ModelVersion, Verdict, plain, strict_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEY_VARIABLE = "EVERGRAD_SIGNING_KEY"
_KEY_HINT = f"give the path of an Ed25519 key in PEM, or of a file to make, in {KEY_VARIABLE}"
_ALGORITHM = "Ed25519"
_PACKAGES = ("evergrad", "numpy", "safetensors", "scipy", "tokenizers", "torch", "transformers")
_FREE_SETTINGS = ("budget", "sinks")
"""Sections of a configuration that may change while a run goes on, and that no result depends on."""


_EFFECT = (
    *("n", "clusters", "wins", "losses", "score_before", "score_after", "delta", "se", "ci95", "interval"),
    *("test", "p_value", "holdout", "series", "slices", "aim", "non_inferiority", "saving"),
)
"""Keys of a verdict's evidence that say what was found."""


class CertificateError(EvergradError):
    """A certificate that is broken, or was not signed by whom it should."""


def merge_of(candidate: ModelVersion) -> dict[str, Any] | None:
    """Of which two versions the candidate's weights were merged; ``None`` where they were not."""
    if candidate.merged_id is None:
        return None
    return {"parent": candidate.parent_id, "other": candidate.merged_id, "share": candidate.metadata["merged_share"]}


def base_models_of(candidate: ModelVersion, incumbent: ModelVersion) -> dict[str, str]:
    """By id, the base models of the two versions that were compared."""
    return {each.version_id: each.base_model for each in (candidate, incumbent)}


def weighed(candidate: ModelVersion, incumbent_id: str) -> list[str]:
    """Ids of the versions whose weights a certificate names by their hash: the two that were compared, and the parents of a
    merge."""
    parents = candidate.parents if candidate.merged_id is not None else ()
    return list(dict.fromkeys((candidate.version_id, incumbent_id, *parents)))


def statement(verdict: Verdict, plan: Plan) -> dict[str, Any]:
    """What a certificate says of a ruling: all of it follows from the verdict and its plan, and can be checked by them."""
    return {
        "candidate_id": verdict.candidate_id,
        "incumbent_id": verdict.incumbent_id,
        "promoted": verdict.promote,
        "reasons": list(verdict.reasons),
        "plan": dataclasses.asdict(plan),
        "effect": {key: verdict.evidence[key] for key in _EFFECT if key in verdict.evidence},
        "guards": verdict.evidence.get("guards", []),
    }


def sign(content: Mapping[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    """The certificate of ``content``; numbers that are not finite become null in it."""
    plain_content = plain(content, "null")
    return {
        "content": plain_content,
        "signature": {
            "algorithm": _ALGORITHM,
            "public_key": base64.b64encode(key.public_key().public_bytes_raw()).decode(),
            "value": base64.b64encode(key.sign(strict_json(plain_content).encode())).decode(),
        },
    }


def verify(certificate: Mapping[str, Any], public_key: Ed25519PublicKey | None = None) -> None:
    """Checks that the content is what was signed, and by ``public_key`` if that is given.

    Raises:
        CertificateError: it is no certificate, was changed after it was signed, or another key signed it.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        signature = certificate["signature"]
        if signature["algorithm"] != _ALGORITHM:
            raise CertificateError(f"signed by {signature['algorithm']!r}, which is not {_ALGORITHM}")
        named = base64.b64decode(signature["public_key"], validate=True)
        signer = Ed25519PublicKey.from_public_bytes(named)
        value, content = base64.b64decode(signature["value"], validate=True), strict_json(certificate["content"]).encode()
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise CertificateError(f"not a signed certificate: {type(error).__name__}: {error}") from error
    try:
        signer.verify(value, content)
    except InvalidSignature:
        raise CertificateError("the signature does not fit the content: one of them was changed") from None
    if public_key is not None and public_key.public_bytes_raw() != named:
        raise CertificateError(f"signed by another key: {base64.b64encode(named).decode()}")


def signing_key(path: Path | None = None) -> Ed25519PrivateKey:
    """The private key at ``path``, by default at :func:`key_path`; made there, for the owner's eyes alone, if there is none.

    Raises:
        InputError: the file is no Ed25519 key without a password, or cannot be made.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    path = path or key_path()
    try:
        if not path.exists():
            _make_key(path)
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"no key to sign certificates with: {error}", where=str(path), hint=_KEY_HINT) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError("the key to sign certificates with is not Ed25519", where=str(path), hint=_KEY_HINT)
    _write_public_half(path, key)
    return key


def run_signing_key(run: Path, tell: Callable[[str], None] = lambda text: None) -> Ed25519PrivateKey:
    """The key for the certificates of the run in ``run``: the user's own, as :func:`signing_key` gives it.

    Where the home directory is missing, read-only or holds no key that can be read, the run folder keeps one, which all later
    certificates of this run are signed with; ``tell`` hears of it once, when it is made.

    Raises:
        InputError: the key that ``EVERGRAD_SIGNING_KEY`` names cannot be used.
    """
    if os.environ.get(KEY_VARIABLE):
        return signing_key()
    own = run / "signing-key.pem"
    if own.exists():
        return signing_key(own)
    try:
        return signing_key()
    except InputError as error:
        key = signing_key(own)
        tell(f"certificates of this run are signed with a key of its own, {own} ({error.what})")
        return key


def public_key(path: Path) -> Ed25519PublicKey:
    """The public key in a PEM file.

    Raises:
        InputError: the file is missing, or no Ed25519 public key.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    hint = "give a public Ed25519 key in PEM; it lies beside the private one, as FILE.pub"
    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"no public key: {error}", where=str(path), hint=hint) from error
    if not isinstance(key, Ed25519PublicKey):
        raise InputError("the public key is not Ed25519", where=str(path), hint=hint)
    return key


def own_public_key() -> Ed25519PublicKey | None:
    """The public half of the user's own key; ``None`` where there is none yet or it cannot be read."""
    try:
        path = key_path()
        return signing_key(path).public_key() if path.is_file() else None
    except (InputError, OSError):
        return None


def key_path() -> Path:
    """``$EVERGRAD_SIGNING_KEY`` or ``~/.config/evergrad/signing-key.pem``.

    Raises:
        InputError: there is no home directory.
    """
    chosen = os.environ.get(KEY_VARIABLE)
    try:
        return Path(chosen).expanduser() if chosen else Path.home() / ".config" / "evergrad" / "signing-key.pem"
    except RuntimeError as error:
        raise InputError(f"no key to sign certificates with: {error}", hint=_KEY_HINT) from error


def _make_key(path: Path) -> None:
    """Puts a new key at ``path``, whole and unreadable for others, unless another process was first."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
    finally:
        os.unlink(beside)


def _write_public_half(path: Path, key: Ed25519PrivateKey) -> None:
    """Puts the public half beside the key at ``path``, unless it is there; a folder of secrets that is read-only has none."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    beside = path.with_name(f"{path.name}.pub")
    with contextlib.suppress(OSError):
        if not beside.exists():
            beside.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


# -- hashes of what a verdict rests on -----------------------------------------------------------------------------------


def folder_hash(folder: Path) -> str:
    """SHA-256 over the names and contents of all files under ``folder``: what its weights are.

    Raises:
        OSError: it is not there.
    """
    digest = hashlib.sha256()
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def code_hash() -> str:
    """SHA-256 over Evergrad's own source files."""
    import evergrad

    root = Path(str(evergrad.__file__)).parent
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.toml")]):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def config_hash(run: Path) -> str:
    """Names the run's resolved configuration, without what may change while it goes on.

    Raises:
        OSError: there is none.
        ValueError: it is not TOML.
    """
    data = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    return content_hash({key: value for key, value in data.items() if key not in _FREE_SETTINGS})


def installation() -> dict[str, str]:
    """Interpreter and packages that figures may depend on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
