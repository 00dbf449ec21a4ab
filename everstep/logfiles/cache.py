"""The catalogue as it was checked last time, so that a start neither parses nor checks it again.

Kept by ``everstep.spec.yaml_cache`` under the text of the files it was made of and of the code that
made it: whoever edits one of them gets it read and checked anew.

Not here: checking (``everstep.spec.log_catalogue``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everstep.decide.diagnosis.catalogue import Catalogue
from everstep.decide.diagnosis.types import Role, Signature, Weight
from everstep.decide.words import Action, Confidence, Side, Symptom
from everstep.spec.log_places import signature_files
from everstep.spec.yaml_cache import remembered

_KINDS = {
    "symptom": Symptom,
    "side": Side,
    "action": Action,
    "role": Role,
    "weight": Weight,
    "confidence": Confidence,
}
_PACKAGE = Path(__file__).resolve().parent.parent
_MAKERS = (
    _PACKAGE / "decide" / "diagnosis" / "literals.py",
    _PACKAGE / "decide" / "diagnosis" / "types.py",
    _PACKAGE / "spec" / "log_catalogue.py",
)
"""The code that makes a catalogue of the files: its defaults are part of the result."""


def cached_signatures(
    flag: Path | None = None, *, environ: Mapping[str, str] = os.environ
) -> Catalogue:
    """The catalogue by the order of lookup, from the cache when its files have not changed.

    Raises:
        SpecError: the files are not accepted.
    """
    made: list[Catalogue] = []

    def make() -> dict[str, Any]:
        from everstep.spec.log_catalogue import load_signatures

        catalogue = load_signatures(flag, environ=environ)
        made.append(catalogue)
        return {
            "signatures": [asdict(signature) for signature in catalogue.signatures],
            "literals": catalogue.literals,
        }

    text = _text(signature_files(flag, environ=environ))
    data = remembered(text, make) if text is not None else make()
    if made:
        return made[0]
    return Catalogue([_signature(row) for row in data["signatures"]], data["literals"])


def _text(files: tuple[Path, Path | None]) -> str | None:
    """What the catalogue is made of; None: something of it cannot be read."""
    try:
        parts = [
            path.read_bytes().decode("utf-8", "surrogateescape") if path is not None else ""
            for path in (*_MAKERS, *files)
        ]
    except OSError:
        return None
    return "".join(f"{len(part)}\n{part}" for part in parts)


def _signature(row: dict[str, Any]) -> Signature:
    typed: dict[str, Any] = {k: _KINDS[k](v) if k in _KINDS else v for k, v in row.items()}
    return Signature(**typed)
