"""Jobs that run for months must survive an upgrade: recorded histories replay on today's code.

Histories come from ``scripts/record_histories.py``. When a test here fails, running jobs would park
at their next task: put the change behind ``workflow.patched`` (CONTRIBUTING.md), do not re-record.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from tests.workflow.scenarios import SCENARIOS
from workers.runtime import WORKFLOWS, workflow_runner

HISTORIES = Path(__file__).parent / "histories"
FILES = sorted(HISTORIES.glob("*/*.json"))
OF_OLDER_CODE = {"slow-steps-before-looks"}
"""What code before a ``workflow.patched`` has written; today's code cannot record it again."""
WANTED = ("clean", "rank-failure", "machine-loss", "continue-as-new-in-incident")


def _replayer() -> Replayer:
    return Replayer(
        workflows=WORKFLOWS,
        data_converter=pydantic_data_converter,
        workflow_runner=workflow_runner(),
    )


def _history(path: Path) -> WorkflowHistory:
    text = path.read_text(encoding="utf-8")
    first = json.loads(text)["events"][0]["workflowExecutionStartedEventAttributes"]
    return WorkflowHistory.from_json(first["workflowId"], text)


def test_every_situation_is_recorded() -> None:
    recorded = {path.name.split(".")[0] for path in FILES}
    assert set(WANTED) <= set(SCENARIOS)
    assert recorded - OF_OLDER_CODE == set(SCENARIOS)
    assert recorded >= OF_OLDER_CODE
    assert {path.parent.name for path in FILES} == {"TrainingJob", "Incident"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
async def test_recorded_history_replays(path: Path) -> None:
    await _replayer().replay_workflow(_history(path))


def test_continue_as_new_is_really_in_the_recording() -> None:
    runs = sorted(HISTORIES.glob("TrainingJob/continue-as-new-in-incident.*.json"))
    assert len(runs) == 2
    last = json.loads(runs[0].read_text(encoding="utf-8"))["events"][-1]
    assert last["eventType"] == "EVENT_TYPE_WORKFLOW_EXECUTION_CONTINUED_AS_NEW"


async def test_a_changed_command_is_noticed() -> None:
    """The guard itself: a history whose first activity has another name must not replay."""
    path = next(iter(sorted(HISTORIES.glob("TrainingJob/clean.*.json"))))
    text = path.read_text(encoding="utf-8").replace('"register_job"', '"enter_job"')
    first = json.loads(text)["events"][0]["workflowExecutionStartedEventAttributes"]
    with pytest.raises(NondeterminismError):
        await _replayer().replay_workflow(WorkflowHistory.from_json(first["workflowId"], text))
