"""What goes on record though training goes on, and under which symptom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.decide.observation import Observation
from everstep.decide.reports import Trigger
from everstep.decide.warning import SIGNALS, symptom_of_failed_save, symptom_of_warning
from everstep.decide.words import Action, Confidence, Symptom
from everstep.spec.agent_api import EventKind
from tests.support.observations import BLIND, WARNING, XID, gone


def trigger(kind: EventKind, observation: Observation | None = None) -> Trigger:
    return Trigger(kind=str(kind), machine_id="m1", rank=0, reason="why", observation=observation)


@pytest.mark.parametrize(
    ("observation", "symptom"),
    [
        (WARNING, Symptom.NVLINK_PCIE),
        (replace(WARNING, symptom=None), Symptom.UNKNOWN),
        (replace(XID, confidence=Confidence.LOW), Symptom.GPU_UNAVAILABLE),
        (replace(XID, action=Action.STOP_TIME_CHECK), Symptom.GPU_UNAVAILABLE),
        (XID, None),
        (BLIND, None),
        (gone(WARNING), None),
        (None, None),
    ],
)
def test_a_probe_warns_of_what_is_faulty_and_no_reason_to_stop(
    observation: Observation | None, symptom: Symptom | None
) -> None:
    assert symptom_of_warning(trigger(EventKind.PROBE, observation)) is symptom


@pytest.mark.parametrize("kind", EventKind)
def test_of_events_of_a_run_only_its_signals_are_warnings(kind: EventKind) -> None:
    signals = {
        EventKind.LOSS_SPIKE: Symptom.LOSS_SPIKE,
        EventKind.STEP_TIME_DECLINE: Symptom.MFU_DECLINE,
        EventKind.LOG_SILENT: Symptom.HANG,
        EventKind.RDMA_SILENT: Symptom.HANG,
    }
    assert set(SIGNALS) <= set(EventKind)
    assert symptom_of_warning(trigger(kind)) is signals.get(kind)


def test_a_failed_save_is_a_full_disk_where_its_error_says_so() -> None:
    full = "step 9 was not saved: OSError: [Errno 28] No space left on device"
    assert symptom_of_failed_save(full) is Symptom.DISK_FULL
    assert symptom_of_failed_save("step 9 was not saved: x") is Symptom.CHECKPOINT_ERROR
