"""``docs/agent-api.md`` names every endpoint, refusal and limit as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstep.machine import guard, ring, stream, wire
from everstep.spec.agent_api import ErrorCode
from tests.security.test_fuzz import OPERATIONS

TEXT = (Path(__file__).parents[2] / "docs" / "agent-api.md").read_text("utf-8")


def test_every_endpoint_and_its_token() -> None:
    rows = re.findall(r"^\| `(GET|POST) ([^`?]+)[^`]*` \| (\w+) \|", TEXT, re.MULTILINE)
    found = {f"{method} {path}": token for method, path, token in rows}
    assert found.pop("GET /openapi.json") == "controller"
    assert found == OPERATIONS


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_refusal(code: ErrorCode) -> None:
    row = re.search(rf"^\| `{code.value}` \| (\d{{3}}(?:, \d{{3}})*) \|", TEXT, re.MULTILINE)
    assert row is not None
    assert str(guard.STATUS[code]) in row[1].split(", ")


@pytest.mark.parametrize(
    "said",
    [
        f"| {wire.HEADERS_MAX_S:g} s |",
        f"| {wire.HEADERS_BYTES_MAX // 1024} KiB |",
        f"{guard.BODY_BYTES_MAX // 1024**2} MiB in {guard.BODY_MAX_S:g} s",
        f"{guard.STRANGERS_BODY_BYTES_MAX // 1024} KiB for `/healthz`",
        f"| {wire.STRANGERS_MAX}; a new one",
        f"| {wire.PEER_SILENT_MAX_MS // 1000} s |",
        f"At most {stream.STREAMS_MAX} streams",
        f"({ring.RING.slots} of them",
    ],
)
def test_every_limit(said: str) -> None:
    assert said in TEXT
