"""What the catalogue of signatures says about a rank, in attribution."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.decide.attribution import Finding, MachineReport, RankReport, attribute
from everstep.decide.words import Action, Cause, LogClass, RankState, Side, Symptom
from everstep.machine.log_findings import LINES_MAX, WHY_CHARS_MAX, finding_of

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def rank(number: int, line: str = "", *, code: int = 1, **more: Any) -> RankReport:
    """A rank that printed a line and ended; without one it was stopped by us."""
    values: dict[str, Any] = {
        "rank": number,
        "machine_id": f"m{number + 1}",
        "state": RankState.EXITED,
    }
    if line:
        found = finding_of([line], rank=number, exit_code=code, signal=None)
        values |= {"exit_code": code, "log_finding": found, "log_class": LogClass.OTHER}
    else:
        values |= {"signal": 15, "stopped_by_us": True}
    return RankReport(**(values | more))


def judged(*ranks: RankReport) -> Finding:
    return attribute(
        [MachineReport(machine_id=r.machine_id, reachable=True, ranks=(r,)) for r in ranks]
    )


def test_a_service_outside_is_nobodys_fault_here() -> None:
    found = judged(rank(0), rank(1, "hdfs.util.HdfsError: namenode:8020 refused the connection"))
    assert (found.symptom, found.side) == (Symptom.FILESYSTEM_IO, Side.EXTERNAL)
    assert (found.cause, found.action) == (Cause.UNCLEAR, Action.WAIT_EXTERNAL)
    assert (found.first_failed_rank, found.suspects) == (1, ())


def test_what_is_surely_one_machines_own_makes_it_a_suspect() -> None:
    found = judged(rank(0), rank(1, ECC))
    assert found.symptom is Symptom.GPU_MEMORY_ECC
    assert (found.action, found.suspects) == (Action.EVICT_MACHINE, ("m2",))
    assert judged(rank(0, ECC), rank(1, ECC)).suspects == ()


def test_what_the_runtime_itself_says_stays() -> None:
    full = "OSError: [Errno 28] No space left on device"
    found = judged(rank(0), rank(1, full, log_class=LogClass.DISK_FULL))
    assert (found.rule, found.cause) == ("disk_full", Cause.UNCLEAR)
    error = "TypeError: f() takes 1 positional argument but 2 were given"
    found = judged(rank(0), rank(1, error, log_class=LogClass.PYTHON_EXCEPTION))
    assert (found.rule, found.symptom) == ("python_exception", Symptom.USER_CODE)


def test_a_line_of_the_network_makes_a_witness_and_names_the_network() -> None:
    line = "NCCL WARN NET/IB : Got completion from peer 10.0.0.7 with error 12, opcode 0, len 0"
    found = judged(rank(0), rank(1, line))
    assert (found.symptom, found.side) == (Symptom.NETWORK_NCCL, Side.INFRASTRUCTURE)
    assert (found.witnesses, found.suspects) == ((1,), ())


@pytest.mark.parametrize("line", ["training", "", "{} {signal} %s", "\ud800", "x" * 10_000])
def test_whatever_a_rank_prints_is_judged_and_small(line: str) -> None:
    found = finding_of([line] * 50, rank=0, exit_code=7, signal=None)
    assert found is None or len(found.evidence) <= LINES_MAX
    assert found is None or len(found.why) <= WHY_CHARS_MAX
    assert judged(rank(0), rank(1, line or " ", code=7)).suspects == ()
