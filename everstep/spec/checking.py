"""Whether the files that an operator edits would be accepted: policy and catalogues.

Which of them a file is, its keys tell. Not here: what is accepted (each one's own loader).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.spec.errors import SpecError
from everstep.spec.load import load_policy, read_text
from everstep.spec.log_catalogue import is_signature_file, signatures_from_text
from everstep.spec.log_places import signature_files
from everstep.spec.yaml_text import plain_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What came of checking one file."""

    file: str
    what: str
    """Which of them it is, and what says that it is the same one (hash, number of rows)."""
    problems: tuple[str, ...] = ()
    hash: str | None = None

    def as_data(self) -> dict[str, Any]:
        """For programs; the keys of a policy's answer are older than the others."""
        known = {"hash": self.hash} if self.hash is not None else {}
        ok = not self.problems
        return {"file": self.file, "ok": ok, **known, "problems": list(self.problems)}

    def fine(self) -> str:
        """One line for a file without problems."""
        return f"{self.file}: fine ({self.what})"


def check_file(path: Path) -> Checked:
    """Check one file.

    Raises:
        SpecError: it cannot be read at all.
    """
    data = None
    try:
        data = plain_data(read_text(path), str(path))
    except SpecError as error:
        if not path.is_file():
            raise
        return Checked(file=str(path), what="unreadable", problems=error.lines)
    if is_signature_file(data):
        return _checked(path, _signatures)
    if _is_kernel_catalogue(data):
        return _checked(path, _kernel)
    return _policy(path)


def check_all() -> list[Checked]:
    """Check every file that would be used here: policy, kernel catalogue, log signatures."""
    main, site = signature_files()
    files = [main, *([site] if site is not None else [])]
    results = [_policy(None), *(_checked(path, _signatures) for path in files)]
    kernel = _kernel_files()
    return [*results, *(_checked(path, _kernel) for path in kernel)]


def _policy(path: Path | None) -> Checked:
    try:
        loaded = load_policy(path)
    except SpecError as error:
        return Checked(file=str(path or "policy"), what="policy", problems=error.lines)
    shown = str(path) if path is not None else loaded.source
    return Checked(file=shown, what=f"policy {loaded.hash}", hash=loaded.hash)


def _checked(path: Path, look: Callable[[Path], str]) -> Checked:
    try:
        return Checked(file=str(path), what=look(path))
    except SpecError as error:
        return Checked(file=str(path), what="", problems=error.lines)


def _signatures(path: Path) -> str:
    return f"{len(signatures_from_text(read_text(path), str(path)))} log signatures"


def _kernel(path: Path) -> str:
    from everstep.spec.kernel_catalogue import load_kernel_catalogue

    load_kernel_catalogue(path)
    return "kernel catalogue"


def _kernel_files() -> list[Path]:
    from everstep.spec.kernel_catalogue import catalogue_files

    return [path for path in catalogue_files() if path.is_file()]


def _is_kernel_catalogue(data: Any) -> bool:
    from everstep.spec.kernel_rows import KernelCatalogue
    from everstep.spec.policy import Policy

    own = set(KernelCatalogue.model_fields) - set(Policy.model_fields)
    return isinstance(data, dict) and bool(own & set(data))
