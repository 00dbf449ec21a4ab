"""Kernel lines that tools write as JSON: ``dmesg --json``, ``journalctl -o json`` and collectors.

A record may stand on one line or on several (``dmesg --json``, ``-o json-pretty``); what it says is
taken when it is complete. Not here: lines that are no JSON (``kernel_text``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from everstep.decide.kernel_text import LINE_CHARS_MAX, ORIGIN, KernelLine, parse, parse_text
from everstep.decide.kernel_times import Clock, Stamp, wall_time

RECORD_CHARS_MAX = 8_000
"""Longer records are not looked at."""
KEYS_MAX = 64

_KEY = re.compile(r'\s*"(?P<key>[\w@.-]{1,80})"\s*:\s*(?P<value>\S.{0,2000}?),?\s*$')
_FRAME = re.compile(r'\s*(?:\{|\[|"\w{1,40}"\s*:\s*[\[{])?[\s\[{]*$')
_END = re.compile(r"\s*\}")
_TEXTS = ("MESSAGE", "message", "msg", "log", "line", "_raw")
_PROGRAMS = ("SYSLOG_IDENTIFIER", "syslog_identifier", "ident", "appname", "app_name", "program")


class Reader:
    """Lines one after the other; remembers the record that is not complete yet."""

    def __init__(self) -> None:
        self._record: dict[str, Any] | None = None

    def read(self, line: str) -> KernelLine | None:
        """Take one line apart; None while a record over several lines goes on."""
        text = line.lstrip("\ufeff \t")
        origin = ORIGIN.match(text)
        if origin is not None and text[origin.end() : origin.end() + 1] in ("{", '"', "}"):
            text = text[origin.end() :]
        if text.startswith("{") or self._record is not None:
            return self._in_record(text, line)
        return parse(line)

    def _in_record(self, text: str, line: str) -> KernelLine | None:
        whole = _loads(text) if text.startswith("{") else None
        if isinstance(whole, dict):
            self._record = None
            return from_record(whole)
        if _END.match(text):
            record, self._record = self._record, {}
            return from_record(record) if record else None
        if _FRAME.match(text):
            self._record = self._record or {}
            return None
        pair = _KEY.match(text) if self._record is not None else None
        if pair is None or self._record is None:
            # It was no record after all.
            self._record = None
            return parse(line)
        if len(self._record) < KEYS_MAX:
            self._record[pair["key"]] = _loads(pair["value"])
        return None


def from_record(record: Mapping[str, Any]) -> KernelLine:
    """The kernel line that a record holds; not the kernel's, where it does not say so."""
    text = next((_text(record[key]) for key in _TEXTS if key in record), "")
    line = parse_text(text)
    says = _says_kernel(record)
    if says is None:
        # A record that does not tell the program: the line in it has to.
        return KernelLine(line.message, line.time, line.from_kernel and line.sure, line.sure)
    if not says:
        return KernelLine(text, Stamp(), from_kernel=False)
    time = line.time if line.time.at_s is not None else _time(record)
    return KernelLine(line.message if line.from_kernel else text, time, from_kernel=True, sure=True)


def _says_kernel(record: Mapping[str, Any]) -> bool | None:
    """Whether the kernel wrote it; None: the record does not tell."""
    facility = record.get("SYSLOG_FACILITY", record.get("fac", record.get("facility")))
    if facility is not None and str(facility) not in ("0", "kern"):
        return False
    pri = record.get("pri")
    if isinstance(pri, int) and pri >> 3:
        return False
    if "_TRANSPORT" in record:
        return bool(record["_TRANSPORT"] == "kernel")
    program = next((record[key] for key in _PROGRAMS if key in record), None)
    if program is not None:
        return str(program) == "kernel"
    return True if facility is not None or ("msg" in record and pri is not None) else None


def _time(record: Mapping[str, Any]) -> Stamp:
    for key, clock in (
        ("_SOURCE_MONOTONIC_TIMESTAMP", Clock.BOOT),
        ("__REALTIME_TIMESTAMP", Clock.WALL),
    ):
        text = str(record.get(key, ""))
        if text.isascii() and text.isdigit() and len(text) <= 18:
            return Stamp(int(text) / 1e6, clock)
    at = record.get("time")
    if isinstance(at, int | float) and 0 <= at < 1e12:
        return Stamp(float(at), Clock.BOOT)
    wall = wall_time(at)[0] if isinstance(at, str) else None
    return wall or Stamp()


def _text(value: Any) -> str:
    """A message; the journal writes one that is no text as a list of its bytes."""
    if isinstance(value, list) and all(isinstance(b, int) and 0 <= b < 256 for b in value):
        value = bytes(value).decode(errors="replace")
    return " ".join(value.split())[:LINE_CHARS_MAX] if isinstance(value, str) else ""


def _loads(text: str) -> Any:
    try:
        return json.loads(text.strip("\ufeff \t\r\n,")) if len(text) <= RECORD_CHARS_MAX else None
    except (ValueError, RecursionError):
        return None
