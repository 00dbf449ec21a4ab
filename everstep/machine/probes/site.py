"""Checks of a site's own: whatever writes small JSON files into a folder is a probe of the machine.

A cron job, a vendor's tool or a test puts ``NAME.json`` there and takes it away when all is well
again; ``{"verdict": "faulty", "reason": "..."}`` is enough, and the keys are those of an
observation. A file that cannot be read is *unknown*, never faulty. ``docs/table1.md`` has an
example. Not here: running a site's programs; they have their own schedules and rights.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from everstep.decide.observation import Observation
from everstep.decide.words import Action, Confidence, Symptom, Verdict
from everstep.spec.probe_events import observation_of

FILES_MAX = 64
BYTES_MAX = 8192


class SiteProbe:
    """The files of one folder; a folder that is not there yields nothing."""

    name = "site"
    interval = "host"

    def __init__(self, folder: Path) -> None:
        """``folder`` need not exist yet."""
        self._folder = folder

    def look(self, now_s: float) -> Sequence[Observation]:
        """One observation for each file, in the order of their names."""
        del now_s
        try:
            names = sorted(n for n in os.listdir(self._folder) if n.endswith(".json"))  # noqa: PTH208
        except FileNotFoundError:
            return ()
        except OSError as error:
            return (self._unknown("", f"{self._folder}: {error.strerror}"),)
        found = [self._read(name) for name in names[:FILES_MAX]]
        if len(names) > FILES_MAX:
            found.append(self._unknown("", f"{len(names)} files, only {FILES_MAX} are read"))
        return [one for one in found if one is not None]

    def close(self) -> None:
        """Nothing is held."""

    def _read(self, name: str) -> Observation | None:
        target = name.removesuffix(".json")
        try:
            fd = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    return self._unknown(target, f"{name}: not a plain file")
                raw = os.read(fd, BYTES_MAX + 1)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return None  # taken away meanwhile: all is well
        except OSError as error:
            return self._unknown(target, f"{name}: {error.strerror}")
        if len(raw) > BYTES_MAX:
            return self._unknown(target, f"{name}: more than {BYTES_MAX} bytes")
        try:
            data = json.loads(raw)
        except ValueError:
            return self._unknown(target, f"{name}: not JSON")
        return self._observation(name, target, data)

    def _observation(self, name: str, target: str, data: Any) -> Observation:
        if not isinstance(data, Mapping):
            return self._unknown(target, f"{name}: must be an object")
        wrong = _first_wrong(data)
        if wrong is not None:
            return self._unknown(target, f"{name}: {wrong}")
        fields = {"confidence": "high", "target": target, **data, "probe": self.name}
        observation = observation_of(str(data.get("reason") or name), fields)
        if observation is None:
            return self._unknown(target, f"{name}: verdict is missing")
        if observation.verdict is not Verdict.FAULTY:
            return observation
        return replace(
            observation,
            rule=observation.rule or f"site_{target}",
            symptom=observation.symptom or Symptom.UNKNOWN,
            action=observation.action or Action.WARN_ONLY,
        )

    def _unknown(self, target: str, reason: str) -> Observation:
        return Observation(probe=self.name, target=target, verdict=Verdict.UNKNOWN, reason=reason)


def _first_wrong(data: Mapping[str, Any]) -> str | None:
    """The first key whose word is none of ours: a typing error must not become a milder verdict."""
    for key, words in (
        ("verdict", Verdict),
        ("symptom", Symptom),
        ("action", Action),
        ("confidence", Confidence),
    ):
        value = data.get(key)
        if value is not None and value not in list(words):
            accepted = ", ".join(word.value for word in words)
            return f"{key}: {str(value)[:40]!r} is none of {accepted}"
    return None
