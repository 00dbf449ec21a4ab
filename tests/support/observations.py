"""What probes say, for tests of whatever takes it in."""

from __future__ import annotations

from dataclasses import replace

from everstep.decide.observation import Observation
from everstep.decide.words import Action, Symptom, Verdict

XID = Observation(
    probe="kernel_log",
    target="gpu 3",
    verdict=Verdict.FAULTY,
    reason="GPU 3 has fallen off the bus (Xid 79)",
    rule="xid_79",
    symptom=Symptom.GPU_UNAVAILABLE,
    action=Action.EVICT_MACHINE,
    values={"xid": 79},
)
"""A sure fault of the machine."""
WARNING = replace(
    XID,
    probe="gpu",
    rule="pcie_replay",
    reason="many PCIe replays",
    symptom=Symptom.NVLINK_PCIE,
    action=Action.WARN_ONLY,
)
"""Worth a record, and no more."""
HOT = replace(WARNING, rule="thermal_slowdown", reason="hot", symptom=Symptom.MFU_DECLINE)
"""A machine that runs slower than it could."""
BLIND = replace(
    XID, verdict=Verdict.UNKNOWN, reason="cannot be read", symptom=None, action=None, values={}
)


def gone(observation: Observation) -> Observation:
    """The end of it."""
    return replace(observation, verdict=Verdict.HEALTHY, reason="nothing new")
