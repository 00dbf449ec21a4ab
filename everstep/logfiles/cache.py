"""The catalogue as it was checked last time, so that a start does not parse YAML again.

Kept in the user's cache directory under the hash of the files it was made of: whoever edits a file
gets it read and checked anew. Anything wrong with the cache is as if it were not there.

Not here: checking (``everstep.spec.log_catalogue``).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everstep.decide.diagnosis.catalogue import Catalogue
from everstep.decide.diagnosis.types import Role, Signature, Weight
from everstep.decide.words import Action, Confidence, Side, Symptom
from everstep.spec.log_places import signature_files

FORMAT = 1
_KINDS = {
    "symptom": Symptom,
    "side": Side,
    "action": Action,
    "role": Role,
    "weight": Weight,
    "confidence": Confidence,
}


def cached_signatures(
    flag: Path | None = None, *, environ: Mapping[str, str] = os.environ
) -> Catalogue:
    """The catalogue by the order of lookup, from the cache when its files have not changed.

    Raises:
        SpecError: the files are not accepted.
    """
    key = _key(signature_files(flag, environ=environ))
    place = _place(environ)
    known = _load(place, key)
    if known is not None:
        return known
    from everstep.spec.log_catalogue import load_signatures

    catalogue = load_signatures(flag, environ=environ)
    if key is not None:
        _store(place, key, catalogue)
    return catalogue


def _key(files: tuple[Path, Path | None]) -> str | None:
    digest = hashlib.sha256(f"{FORMAT}\n".encode())
    code = Path(__file__).resolve().parent.parent / "decide" / "diagnosis" / "literals.py"
    try:
        for path in (code, *files):
            text = path.read_bytes() if path is not None else b""
            digest.update(f"{len(text)}\n".encode() + text)
    except OSError:
        return None
    return digest.hexdigest()


def _place(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "/")) / ".cache")
    return Path(base) / "everstep" / "log-signatures.json"


def _load(place: Path, key: str | None) -> Catalogue | None:
    try:
        data = json.loads(place.read_bytes())
        if key is None or data["key"] != key:
            return None
        signatures = [_signature(row) for row in data["signatures"]]
        return Catalogue(signatures, data["literals"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _signature(row: dict[str, Any]) -> Signature:
    typed: dict[str, Any] = {k: _KINDS[k](v) if k in _KINDS else v for k, v in row.items()}
    return Signature(**typed)


def _store(place: Path, key: str, catalogue: Catalogue) -> None:
    data = {
        "key": key,
        "signatures": [asdict(signature) for signature in catalogue.signatures],
        "literals": catalogue.literals,
    }
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=".log-signatures-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file)
            Path(name).replace(place)
        except OSError:
            Path(name).unlink(missing_ok=True)
