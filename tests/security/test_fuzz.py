"""schemathesis over the agent's own OpenAPI document: as a stranger, and as a careless friend."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from everstep.spec.agent_api import ErrorCode
from tests.security.conftest import CONTROLLER, METRICS, Served, Target, refused, serving

BOUNDED = settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ENDLESS = "GET /v1/events"
OPERATIONS = {
    "GET /healthz": "none",
    "GET /v1/machine": "controller",
    ENDLESS: "controller",
    "GET /v1/runs/{job_id}/{generation}": "controller",
    "GET /v1/runs/{job_id}/{generation}/ranks/{rank}/log": "controller",
    "GET /v1/runs/{job_id}/{generation}/stacks": "controller",
    "GET /metrics": "metrics",
    "POST /v1/commands/prepare_run": "controller",
    "POST /v1/commands/start_run": "controller",
    "POST /v1/commands/stop_run": "controller",
    "POST /v1/commands/fence_job": "controller",
    "POST /v1/commands/materialise_code": "controller",
    "POST /v1/commands/shutdown": "controller",
}
"""Every operation of the document, and the token that opens it."""


def document(url: str, token: str) -> Any:
    """The agent's own description of itself."""
    answer = requests.get(
        f"{url}/openapi.json", headers={"authorization": f"Bearer {token}"}, timeout=10
    )
    answer.raise_for_status()
    return schemathesis.openapi.from_dict(answer.json())


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as one:
        yield one


def fuzz(schema: Any, operation: str, check: Callable[[Any], None]) -> None:
    """Call ``check`` with right and with wrong requests for an operation; each kind must come."""
    method, path = operation.split()
    tried = Counter[GenerationMode]()

    def one_kind(mode: GenerationMode) -> None:
        @BOUNDED
        @given(case=schema[path][method].as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            tried[mode] += 1
            check(case)

        # Nothing can be wrong with a request that takes no parameters.
        with contextlib.suppress(Unsatisfiable, SkipTest):
            run()

    for mode in GenerationMode:
        one_kind(mode)
    assert tried[GenerationMode.POSITIVE] > 0
    assert tried[GenerationMode.NEGATIVE] > 0 or path in {"/healthz", "/v1/machine", "/metrics"}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_stranger_learns_and_moves_nothing(operation: str, target: Target) -> None:
    def check(case: Any) -> None:
        case.headers.pop("Authorization", None)
        answer = case.call(base_url=target.url, timeout=10)
        if operation == "GET /healthz" and answer.status_code == 200:
            assert answer.json() == {"ok": True}
        elif operation == "GET /healthz":
            refused(answer.status_code, answer.content)
        else:
            refused(answer.status_code, answer.content, ErrorCode.UNAUTHORIZED)

    fuzz(document(target.url, target.token), operation, check)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != ENDLESS])
def test_whatever_a_friend_sends_gets_a_described_answer(operation: str, target: Target) -> None:
    """A random envelope is never the right one, so nothing is executed either."""
    token = target.process.secrets.metrics if "metrics" in operation else target.token

    def check(case: Any) -> None:
        answer = case.call(
            base_url=target.url, headers={"authorization": f"Bearer {token}"}, timeout=10
        )
        case.validate_response(answer, checks=CHECKS)
        if answer.status_code >= 400:
            refused(answer.status_code, answer.content)
        assert answer.status_code >= 400 or not operation.startswith("POST")

    fuzz(document(target.url, target.token), operation, check)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name.startswith("POST")])
def test_bodies_behind_a_right_envelope_are_answered_or_refused(
    operation: str, fake: Served
) -> None:
    """Behind this one is a machine that only remembers: a right envelope really gets through."""
    codes = Counter[int]()

    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            number = next(COMMAND_IDS)
            case.body |= fake.envelope(job_id=f"job-{number}", command_id=f"c{number}")
        answer = case.call(
            base_url=fake.url, headers={"authorization": f"Bearer {CONTROLLER}"}, timeout=10
        )
        case.validate_response(answer, checks=CHECKS)
        codes[answer.status_code] += 1
        if answer.status_code >= 400:
            refused(answer.status_code, answer.content)

    fuzz(document(fake.url, CONTROLLER), operation, check)
    # Plans and sources that make sense are not found by chance.
    hard = {"POST /v1/commands/start_run", "POST /v1/commands/materialise_code"}
    assert codes[200] > 0 or operation in hard


COMMAND_IDS = itertools.count(1)


def test_the_fuzzing_got_through_the_gate(tmp_path: Path) -> None:
    """The envelope that the test above writes is a right one (else it would test nothing)."""
    with serving(tmp_path) as one:
        answer = requests.post(
            f"{one.url}/v1/commands/prepare_run",
            json=one.envelope(),
            headers={"authorization": f"Bearer {CONTROLLER}"},
            timeout=10,
        )
        assert answer.status_code == 200
        assert one.runs.calls == [("prepare", "job", 1)]


def test_the_document_names_the_token_of_every_path(target: Target) -> None:
    answer = requests.get(
        f"{target.url}/openapi.json",
        headers={"authorization": f"Bearer {target.token}"},
        timeout=10,
    )
    found = {}
    for path, operations in answer.json()["paths"].items():
        for method, operation in operations.items():
            schemes = operation.get("security") or [{"none": []}]
            found[f"{method.upper()} {path}"] = next(iter(schemes[0]))
    assert found == OPERATIONS
    assert METRICS not in answer.text
