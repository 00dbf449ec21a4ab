"""Diagnosis, isolation, code versions, records, notification and the policy's source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.contracts import PERMANENT_FAILURE, TEMPORARY_FAILURE
from activities.diagnosis import EVIDENCE_MAX, RANKS_MAX, Diagnosis, ranks_to_read
from activities.hot_update import HotUpdate
from activities.isolation import Isolation
from activities.ledger import Records
from activities.notification import TRIES_MAX, Notification
from activities.policy_source import FleetPolicy, apply_own_policy
from everstep.decide.words import IncidentState, LogClass
from everstep.ledger import LedgerConflict, LedgerUnavailable, PolicyRow
from everstep.machine.client import AgentRefused
from everstep.machine.code import hash_directory
from everstep.spec import messages as m
from everstep.spec.agent_api import ErrorCode
from everstep.spec.load import LoadedPolicy, load_policy, policy_from_text
from everstep.spec.policy import PolicySnapshot
from tests.activity.fakes import (
    GENERATION,
    JOB,
    RUN,
    FakeAgent,
    FakeAgents,
    FakeLocations,
    FixedPolicy,
    exited,
    policy,
    refs,
    report,
)

NOW = datetime(2026, 1, 2, tzinfo=UTC)

# --- diagnosis


def diagnose(*reports: Any) -> m.DiagnoseRun:
    return m.DiagnoseRun(
        job_id=JOB,
        run_id=RUN,
        generation=GENERATION,
        incident_id="job-1",
        reports=reports,
        observations=(),
    )


TRACEBACK = """step 1
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: shapes do not fit
"""


async def test_a_silent_rank_is_understood_from_its_log() -> None:
    agent = FakeAgent("m1", logs={0: TRACEBACK})
    request = diagnose(report("m1", exited(0, 1, log_class=LogClass.SILENT)))
    result = await ActivityEnvironment().run(
        Diagnosis(FakeLocations(), FakeAgents(agent)).diagnose_run, request
    )
    assert result.finding.side == "user_code"
    assert result.finding.culprit_ranks == (0,)
    assert any("shapes do not fit" in line for line in result.evidence)


@pytest.mark.parametrize(
    "log", [AgentRefused(ErrorCode.NOT_FOUND, "no such rank"), RuntimeError("garbage")]
)
async def test_a_log_that_cannot_be_read_is_a_line_of_evidence(log: Exception) -> None:
    agent = FakeAgent("m1", logs={0: log})
    request = diagnose(report("m1", exited(0, 1)))
    result = await ActivityEnvironment().run(
        Diagnosis(FakeLocations(), FakeAgents(agent)).diagnose_run, request
    )
    assert result.finding.rule
    assert any("not read" in line for line in result.evidence)


async def test_a_machine_that_is_gone_costs_a_line_each_rank_and_no_more() -> None:
    agent = FakeAgent("m1", down=True)
    ranks = [exited(rank, 1) for rank in range(200)]
    result = await ActivityEnvironment().run(
        Diagnosis(FakeLocations(), FakeAgents(agent)).diagnose_run, diagnose(report("m1", *ranks))
    )
    assert agent.asked["log_tail"] == RANKS_MAX
    assert 0 < len(result.evidence) <= EVIDENCE_MAX


def test_what_says_least_is_read_first_and_our_own_doing_never() -> None:
    reports = [
        report(
            "m1",
            exited(0, 1, log_class=LogClass.PEER_LOST),
            exited(1, 1, log_class=LogClass.PYTHON_EXCEPTION),
            exited(2, 1, log_class=LogClass.SILENT),
            exited(3, 0),
            exited(4, None, signal=15, stopped_by_us=True),
            exited(5, None, signal=9, exited_ago_s=5.0),
        )
    ]
    assert [rank.rank for rank in ranks_to_read(reports)] == [5, 2, 1, 0]


async def test_a_class_that_the_agent_found_is_not_worsened() -> None:
    agent = FakeAgent("m1", logs={0: "nothing of interest\n"})
    request = diagnose(report("m1", exited(0, 1, log_class=LogClass.OUT_OF_MEMORY)))
    result = await ActivityEnvironment().run(
        Diagnosis(FakeLocations(), FakeAgents(agent)).diagnose_run, request
    )
    assert "oom" in result.finding.symptom


# --- isolation and records


class OneCall:
    """Remembers the one request, or fails."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.requests: list[Any] = []

    def _call(self, request: Any, /, **_: Any) -> Any:
        self.requests.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    evict = record_progress = record_incident = close_incident = remember_policy = _call


def eviction() -> m.EvictMachines:
    return m.EvictMachines(
        incident_id="job-1",
        job_id=JOB,
        generation=GENERATION,
        step=1,
        machines=("m1", "m2"),
        reason="lost",
        decided_at=NOW,
    )


async def test_evict_passes_the_ledgers_answer_on() -> None:
    answer = m.EvictedMachines(evicted=("m1",), already={"m2": "evicted before"})
    ledger = OneCall(answer)
    result = await ActivityEnvironment().run(Isolation(ledger).evict_machines, eviction())
    assert result == answer
    assert ledger.requests == [eviction()]


async def test_evict_of_an_unknown_job_is_final() -> None:
    ledger = OneCall(LedgerConflict("job job: not in this ledger"))
    with pytest.raises(ApplicationError) as raised:
        await ActivityEnvironment().run(Isolation(ledger).evict_machines, eviction())
    assert raised.value.non_retryable


async def test_records_are_written_or_tried_again() -> None:
    request = m.CloseIncident(
        incident_id="job-1", state=IncidentState.STABLE, closed_at=NOW, summary="fine"
    )
    ledger = OneCall(None)
    records = Records(ledger, FixedPolicy())
    await ActivityEnvironment().run(records.close_incident, request)
    assert ledger.requests == [request]
    ledger.answer = LedgerUnavailable("ledger: locked")
    with pytest.raises(ApplicationError) as raised:
        await ActivityEnvironment().run(records.close_incident, request)
    assert raised.value.type == TEMPORARY_FAILURE
    assert not raised.value.non_retryable


async def test_read_policy_keeps_what_decisions_will_name() -> None:
    ledger = OneCall(None)
    request = m.ReadPolicy(job_id=JOB, overrides={"detection": {"hang_min": "7s"}})
    snapshot = await ActivityEnvironment().run(Records(ledger, FixedPolicy()).read_policy, request)
    assert snapshot.policy.detection.hang_min.total_seconds() == 7
    assert ledger.requests == [snapshot]


async def test_overrides_that_are_not_accepted_are_final_and_named() -> None:
    request = m.ReadPolicy(job_id=JOB, overrides={"detection": {"hang_mni": "7s"}})
    with pytest.raises(ApplicationError) as raised:
        await ActivityEnvironment().run(Records(OneCall(None), FixedPolicy()).read_policy, request)
    assert raised.value.type == PERMANENT_FAILURE
    assert "detection.hang_mni" in raised.value.message


# --- code versions


class CodeLedger(FakeLocations):
    def __init__(self) -> None:
        super().__init__()
        self.versions: list[tuple[str, str]] = []

    def record_code_version(self, job_id: str, code_version: str, **_: Any) -> bool:
        self.versions.append((job_id, code_version))
        return True


def bring(source: str | None, *machine_ids: str, **fields: Any) -> m.MaterialiseCodeInput:
    return m.MaterialiseCodeInput(
        command_id="run/3",
        job_id=JOB,
        generation=GENERATION,
        source=source,
        machines=refs(*machine_ids),
        policy=policy(),
        **fields,
    )


async def test_a_job_without_code_has_the_version_none() -> None:
    agent = FakeAgent("m1")
    update = HotUpdate(CodeLedger(), FakeAgents(agent))
    result = await ActivityEnvironment().run(update.materialise_code, bring(None, "m1"))
    assert result == m.MaterialisedCodeResult(code_version="none")
    assert agent.commands == []


async def test_code_is_named_by_its_hash_recorded_and_brought(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()")
    ledger, agent, down = CodeLedger(), FakeAgent("m1"), FakeAgent("m2", down=True)
    update = HotUpdate(ledger, FakeAgents(agent, down))
    result = await ActivityEnvironment().run(
        update.materialise_code, bring(str(tmp_path), "m1", "m2")
    )
    version = hash_directory(tmp_path)
    assert result.code_version == version
    assert result.path == f"/state-of-m1/{version}"
    assert set(result.failed) == {"m2"}
    assert ledger.versions == [(JOB, version)]
    assert agent.commands[0]["code_version"] == version


async def test_a_version_that_is_named_is_brought_even_if_the_source_has_changed() -> None:
    agent = FakeAgent("m1")
    update = HotUpdate(CodeLedger(), FakeAgents(agent))
    request = bring("/gone", "m1", code_version="dir-0000000000000000")
    result = await ActivityEnvironment().run(update.materialise_code, request)
    assert result.code_version == "dir-0000000000000000"
    assert result.failed == {}


async def test_code_that_cannot_be_read_is_final_and_named() -> None:
    update = HotUpdate(CodeLedger(), FakeAgents(FakeAgent("m1")))
    with pytest.raises(ApplicationError) as raised:
        await ActivityEnvironment().run(update.materialise_code, bring("/no/such/dir", "m1"))
    assert raised.value.non_retryable
    assert "/no/such/dir" in raised.value.message


# --- notification

SECRET_URL = "https://hooks.example/services/T0P-S3CRET"


class Notes:
    def __init__(self) -> None:
        self.keys: list[str] = []

    def was_notified(self, key: str, /) -> bool:
        return key in self.keys

    def note_notification(self, key: str, /, *, now: datetime) -> bool:
        self.keys.append(key)
        return True


class Webhook:
    def __init__(self, answer: httpx.Response | Exception) -> None:
        self.answer, self.posts = answer, 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.posts += 1
        assert str(request.url) == SECRET_URL
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def notification(webhook: Webhook, notes: Notes, url: str = SECRET_URL) -> Notification:
    http = httpx.AsyncClient(transport=httpx.MockTransport(webhook))
    return Notification(notes, FixedPolicy(), http, {"EVERSTEP_WEBHOOK_URL": url})


NOTE = m.Notify(key="job-1-r1", severity="needs_person", job_id=JOB, text="job: please look")


async def test_people_are_told_once_for_each_key() -> None:
    webhook, notes = Webhook(httpx.Response(200)), Notes()
    activity = notification(webhook, notes)
    with capture_logs() as logs:
        await ActivityEnvironment().run(activity.notify, NOTE)
        await ActivityEnvironment().run(activity.notify, NOTE)
    assert webhook.posts == 1
    assert [entry["event"] for entry in logs] == ["notification"]


async def test_without_a_webhook_the_log_line_is_enough() -> None:
    webhook, notes = Webhook(httpx.Response(200)), Notes()
    result = await ActivityEnvironment().run(notification(webhook, notes, url="").notify, NOTE)
    assert (webhook.posts, notes.keys, result.note) == (0, ["job-1-r1"], "logged")


@pytest.mark.parametrize(
    "answer",
    [httpx.Response(503), httpx.Response(429), httpx.ConnectError(f"cannot reach {SECRET_URL}")],
)
async def test_a_webhook_that_fails_for_now_is_tried_again_and_then_given_up(
    answer: httpx.Response | Exception,
) -> None:
    webhook, notes = Webhook(answer), Notes()
    activity = notification(webhook, notes)
    with capture_logs() as logs, pytest.raises(ApplicationError) as raised:
        await ActivityEnvironment().run(activity.notify, NOTE)
    assert raised.value.type == TEMPORARY_FAILURE
    assert notes.keys == []
    last = ActivityEnvironment()
    last.info = dataclasses.replace(last.info, attempt=TRIES_MAX)
    with capture_logs() as more:
        result = await last.run(activity.notify, NOTE)
    assert result.note.startswith("logged only")
    for text in (str(raised.value), str(logs), str(more), result.note):
        assert "S3CRET" not in text


@pytest.mark.parametrize("url", ["not a url", "ftp://x", "http://", "http://[::1", "http://a:b:c"])
async def test_a_webhook_that_is_no_url_fails_no_recovery(url: str) -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.UnsupportedProtocol("no")

    http = httpx.AsyncClient(transport=httpx.MockTransport(refuse))
    activity = Notification(Notes(), FixedPolicy(), http, {"EVERSTEP_WEBHOOK_URL": url})
    result = await ActivityEnvironment().run(activity.notify, NOTE)
    assert "EVERSTEP_WEBHOOK_URL" in result.note


# --- the policy's source


class PolicyBook:
    """A ledger's policies in memory."""

    def __init__(self) -> None:
        self.applied: list[tuple[str, str, str]] = []

    def active_policy(self) -> tuple[str, str] | None:
        return self.applied[-1][:2] if self.applied else None

    def policy_history(self) -> Sequence[PolicyRow]:
        return [
            PolicyRow(
                hash=policy_hash, author=author, reason="", applied_at=NOW, active=i == 0,
                yaml_text=text,
            )
            for i, (text, policy_hash, author) in enumerate(reversed(self.applied))
        ]  # fmt: skip

    def apply_policy(
        self, snapshot: PolicySnapshot, yaml_text: str, *, author: str, reason: str, now: datetime
    ) -> bool:
        self.applied.append((yaml_text, snapshot.hash, author))
        return True


def own(text: str = "detection:\n  hang_min: 9s\n") -> LoadedPolicy:
    return policy_from_text(text, "site.yaml")


def test_the_applied_policy_is_in_force_at_the_next_look() -> None:
    book = PolicyBook()
    source = FleetPolicy(book, own())
    assert source.snapshot({}).policy.detection.hang_min.total_seconds() == 9
    book.applied.append(("detection:\n  hang_min: 11s\n", "h", "a person"))
    assert source.snapshot({}).policy.detection.hang_min.total_seconds() == 11
    assert source.last.detection.hang_min.total_seconds() == 11


def test_an_applied_policy_that_cannot_be_read_changes_nothing() -> None:
    book = PolicyBook()
    source = FleetPolicy(book, own())
    book.applied.append(("detection:\n  a_key_of_tomorrow: 1\n", "h", "a person"))
    with capture_logs() as logs:
        assert source.snapshot({}).policy.detection.hang_min.total_seconds() == 9
        source.snapshot({})
    assert len(logs) == 1


APPLY: list[tuple[str, Callable[[PolicyBook], None], bool, bool]] = [
    ("nothing was ever applied", lambda _: None, False, True),
    (
        "same file again",
        lambda b: b.applied.append((own().text, own().hash, "controller")),
        True,
        False,
    ),
    (
        "the file has changed",
        lambda b: b.applied.append((own("{}").text, own("{}").hash, "controller")),
        True,
        True,
    ),
    (
        "a person applied since",
        lambda b: b.applied.extend(
            [(own().text, own().hash, "controller"), ("{}", "other", "a person")]
        ),
        True,
        False,
    ),
    (
        "a default never replaces a person's",
        lambda b: b.applied.append(("{}", "x", "eve")),
        False,
        False,
    ),
    ("a named file does", lambda b: b.applied.append(("{}", "x", "eve")), True, True),
]


@pytest.mark.parametrize("name, before, named, applies", APPLY)
def test_a_controller_applies_its_file_only_if_that_was_meant(
    name: str, before: Callable[[PolicyBook], None], named: bool, applies: bool
) -> None:
    book = PolicyBook()
    before(book)
    count = len(book.applied)
    assert apply_own_policy(book, own(), named=named, now=NOW) is applies, name
    assert len(book.applied) == count + applies


def test_the_packaged_default_loads() -> None:
    assert FleetPolicy(PolicyBook(), load_policy(None)).snapshot({}).hash
