"""The controller's endpoint: who may register, what a stranger gets, when it says that it works."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import httpx
import pytest

from everstep.ledger import LedgerError, LedgerUnavailable, MachineStanding
from everstep.secrets import Secrets
from everstep.spec.agent_api import Registration
from workers.endpoint import EndpointParts, Intervals, create_app

REGISTRATION: dict[str, Any] = {
    "api_version": 1,
    "machine_id": "m1",
    "agent_boot_id": "boot",
    "url": "http://10.0.0.7:7710",
    "address": "10.0.0.7",
    "slots": 8,
    "version": "0.1.0",
    "jobs": {"job": 3},
}


class Machines:
    """``register_machine`` that answers, or fails."""

    def __init__(self) -> None:
        self.answer: MachineStanding | Exception = MachineStanding(fences={"job": 4})
        self.registrations: list[Registration] = []

    def __call__(self, request: Registration, *, now: datetime) -> MachineStanding:
        self.registrations.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Bench:
    def __init__(self, secrets: Secrets) -> None:
        self.secrets = secrets
        self.machines = Machines()
        self.parts = EndpointParts()
        self.parts.register = self.machines
        self.parts.intervals = lambda: Intervals(register_interval_s=5, heartbeat_interval_s=2)
        self.parts.problems = lambda: ()
        transport = httpx.ASGITransport(create_app(self.parts, secrets))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://controller")

    async def register(self, token: str | None = None, **changes: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token or self.secrets.enrol}"}
        return await self.http.post(
            "/v1/agents/register", json=REGISTRATION | changes, headers=headers
        )


@pytest.fixture
def bench(tmp_path: Any) -> Bench:
    return Bench(Secrets.create(tmp_path / "secrets"))


async def test_a_machine_registers_and_learns_its_fences(bench: Bench) -> None:
    answer = await bench.register()
    assert answer.status_code == 200
    assert answer.json() == {
        "accepted": True,
        "message": "",
        "register_interval_s": 5,
        "heartbeat_interval_s": 2,
        "fences": {"job": 4},
        "evicted": False,
        "probes": None,
    }
    assert bench.machines.registrations[0].jobs == {"job": 3}


@pytest.mark.parametrize("which", ["controller", "peer", "metrics"])
async def test_only_the_enrolment_token_registers(bench: Bench, which: str) -> None:
    answer = await bench.register(getattr(bench.secrets, which))
    assert answer.status_code == 401
    assert bench.machines.registrations == []


async def test_no_token_reads_nothing(bench: Bench) -> None:
    answer = await bench.http.post("/v1/agents/register", content=b"{")
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"api_version": 2}, 400, "api_version"),
        ({"machine_id": "../../etc"}, 400, "bad_request"),
        ({"machine_id": ""}, 400, "bad_request"),
        ({"slots": "many"}, 400, "bad_request"),
        ({"url": "file:///etc/passwd"}, 400, "bad_request"),
        ({"url": "http://user:password@host:1"}, 400, "bad_request"),
        ({"url": "http://host:1/path?query"}, 400, "bad_request"),
        ({"url": "x" * 5000}, 400, "bad_request"),
        ({"jobs": {"job": "three"}}, 400, "bad_request"),
    ],
)
async def test_what_makes_no_sense_is_refused_in_one_line(
    bench: Bench, changes: dict[str, Any], status: int, code: str
) -> None:
    answer = await bench.register(**changes)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.text.count("\n") == 1
    assert bench.machines.registrations == []


async def test_an_endless_body_is_refused(bench: Bench) -> None:
    answer = await bench.register(version="x" * 2_000_000)
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("problem", "status"),
    [(LedgerUnavailable("ledger: locked"), 429), (LedgerError("damaged: /secret/path"), 500)],
)
async def test_a_ledger_that_fails_is_said_without_its_details(
    bench: Bench, problem: Exception, status: int
) -> None:
    bench.machines.answer = problem
    answer = await bench.register()
    assert answer.status_code == status
    assert "secret" not in answer.text


async def test_before_the_ledger_is_there_agents_try_again(bench: Bench) -> None:
    bench.parts.register = None
    assert (await bench.register()).status_code == 429


async def test_a_namesake_is_refused_with_the_reason(bench: Bench) -> None:
    bench.machines.answer = MachineStanding(accepted=False, message="used by another agent")
    answer = await bench.register()
    assert (answer.status_code, answer.json()["accepted"]) == (200, False)
    assert answer.json()["message"] == "used by another agent"


async def test_health_stands_open_and_tells_what_does_not_work(bench: Bench) -> None:
    assert (await bench.http.get("/healthz")).status_code == 200
    bench.parts.problems = lambda: ("no poll is open for everstep/workflow",)
    answer = await bench.http.get("/healthz")
    assert (answer.status_code, answer.json()["ok"]) == (503, False)
    assert "everstep/workflow" in answer.text


async def test_metrics_need_their_own_token_and_count_refusals(bench: Bench) -> None:
    assert (await bench.http.get("/metrics")).status_code == 401
    headers = {"authorization": f"Bearer {bench.secrets.metrics}"}
    answer = await bench.http.get("/metrics", headers=headers)
    assert answer.status_code == 200
    assert 'everstep_controller_refusals_total{code="unauthorized"} 1.0' in answer.text
    assert "everstep_controller_working 1.0" in answer.text


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/v2/agents/register", "/x" * 500])
async def test_there_is_nothing_else(bench: Bench, path: str) -> None:
    headers = {"authorization": f"Bearer {bench.secrets.enrol}"}
    answer = await bench.http.get(path, headers=headers)
    assert answer.status_code == 404
    assert answer.json()["code"] == "not_found"
