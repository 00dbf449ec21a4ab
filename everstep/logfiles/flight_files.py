"""Flight-recorder dumps of PyTorch, read safely: anybody may have written the file.

A dump is JSON, or a pickle of plain containers. A pickle can run any program when it is loaded the
usual way; here one that names any class or function is refused, so that it can only hold dicts,
lists, texts and numbers.

Not here: what dumps say (``everstep.decide.diagnosis.flight``).
"""

from __future__ import annotations

import io
import json
import pickle
import re
from pathlib import Path
from typing import Any, NoReturn

from everstep.decide.diagnosis.flight import FlightDump, dump_of
from everstep.logfiles.find import owner

BYTES_MAX = 256 * 1024 * 1024
_NAMES = re.compile(r"(?i:nccl_trace|comm_lib_trace|flight|fr_trace|trace)_?(rank)?_?(\d+)?")
_RANK_AT_END = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle))?$")


class NotADump(Exception):
    """The file is no flight-recorder dump; the text says why."""


class _Plain(pickle.Unpickler):
    """Builds plain containers only."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise NotADump(f"it names {module[:40]}.{name[:40]}, and a dump names nothing")

    def persistent_load(self, _pid: Any, /) -> NoReturn:
        raise NotADump("it refers to something outside of it")


def looks_like_dump(path: Path) -> bool:
    """True for a name that PyTorch or its users give to dumps."""
    return (
        path.suffix in ("", ".json", ".pkl", ".pickle")
        and _NAMES.match(path.name) is not None
        and _RANK_AT_END.search(path.name) is not None
    )


def read_dump(path: Path) -> FlightDump:
    """Read one dump.

    Raises:
        NotADump: it is not one, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise NotADump(error.strerror or str(error)) from None
    if len(raw) > BYTES_MAX:
        raise NotADump(f"larger than {BYTES_MAX // 1024 // 1024} MiB")
    dump = dump_of(_rank(path), plain(raw))
    if dump is None:
        raise NotADump("it has no `entries`")
    return dump


def plain(raw: bytes) -> Any:
    """The data of a dump's bytes.

    Raises:
        NotADump: they are neither JSON nor a pickle of plain containers.
    """
    if raw.lstrip()[:1] in (b"{", b"["):
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise NotADump("it is not whole JSON") from None
    try:
        return _Plain(io.BytesIO(raw)).load()
    except NotADump:
        raise
    except Exception as error:  # noqa: BLE001 - damaged pickles raise nearly everything
        raise NotADump(f"it is not a whole pickle ({type(error).__name__})") from None


def _rank(path: Path) -> int:
    rank, _ = owner(path.name)
    if rank is not None:
        return rank
    found = _RANK_AT_END.search(path.name)
    return int(found[1]) if found else 0
