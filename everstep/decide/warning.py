"""What is worth a record while training goes on, and under which symptom.

A warning stops no run: checks of a stopped job would have to say whose fault it is, or the fault is
not sure. Not here: recording it (``workflows.warnings_beside``), telling it once
(``activities.watch_probes``), and what does stop a run.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.decide.logs import classify_lines
from everstep.decide.reports import Trigger
from everstep.decide.words import LogClass, Symptom, Verdict

SIGNALS: Mapping[str, Symptom] = {
    "loss_spike": Symptom.LOSS_SPIKE,
    "step_time_decline": Symptom.MFU_DECLINE,
    "log_silent": Symptom.HANG,
    "rdma_silent": Symptom.HANG,
}
"""Signals of a job itself, by the kind of their event."""


def symptom_of_warning(seen: Trigger) -> Symptom | None:
    """The symptom of a job's signal or of what a probe saw; None: it is no warning."""
    if seen.observation is None:
        return SIGNALS.get(seen.kind)
    observation = seen.observation
    if observation.verdict is not Verdict.FAULTY or observation.calls_for_eviction:
        return None  # nothing is known, or it is trouble and an incident of its own
    return observation.symptom or Symptom.UNKNOWN


def symptom_of_failed_save(reason: str) -> Symptom:
    """What a checkpoint save that failed says by its error, while training goes on."""
    full = classify_lines([reason])[0] is LogClass.DISK_FULL
    return Symptom.DISK_FULL if full else Symptom.CHECKPOINT_ERROR
