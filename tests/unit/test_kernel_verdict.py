"""What a verdict says where nothing was found, and whom a line is about that names another."""

from __future__ import annotations

import json

import pytest

from everstep.decide.kernel import KernelJudge, judge
from everstep.decide.words import Action, Confidence, Symptom
from everstep.spec.kernel_catalogue import load_kernel_catalogue

RULES = load_kernel_catalogue(environ={})
LOST = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
QUOTES = ", but line 1 has an Xid in a form that is not known as the kernel's own"
KILLED = "total-vm:9000kB, anon-rss:8000kB, file-rss:0kB, shmem-rss:0kB, UID:0 oom_score_adj:0"


def xid(number: int, rest: str, at: float = 10.0, gpu: str = "0000:3b:00") -> str:
    return f"[{at:12.6f}] NVRM: Xid (PCI:{gpu}): {number}, {rest}"


# --- Nothing found is not nothing read


@pytest.mark.parametrize(
    "lines, why",
    [
        ([], "the log is empty"),
        (["", "  "], "the log is empty"),
        (["epoch 3 done"], "no kernel line was recognised in 1 line"),
        (["epoch 3 done", "", "loss 2.1"], "no kernel line was recognised in 2 lines"),
        (["[   12.500000] usb 1-1: new device"], "no line calls for an action"),
        (["usb 1-1: new device"], "no line calls for an action"),
        (["NVRM: loading NVIDIA UNIX Open Kernel Module"], "no line calls for an action"),
        (["igb 0000:3b:00.0 eth0: renamed"], "no line calls for an action"),
        (["{", '"fac": "kern",', '"msg": "usb 1-1: new"', "}"], "no line calls for an action"),
        (
            ["Mar  3 11:02:17 gpu-a dcgm[7]: " + LOST, "Mar  3 11:02:18 gpu-a dcgm[7]: " + LOST],
            f"no kernel line was recognised in 2 lines{QUOTES}",
        ),
        (
            ["[   12.500000] usb 1-1: new device", "gpu-a says: " + LOST],
            "no line calls for an action" + QUOTES.replace("line 1", "line 2"),
        ),
        (
            [json.dumps({"log": LOST})],
            f"no kernel line was recognised in 1 line{QUOTES}",
        ),
    ],
)
def test_the_reason_says_how_far_the_log_could_be_read(lines: list[str], why: str) -> None:
    verdict = judge(lines, RULES)

    assert verdict.why == why
    assert (verdict.action, verdict.symptom) == (Action.WARN_ONLY, Symptom.UNKNOWN)
    assert verdict.confidence is Confidence.LOW
    assert bool(verdict.evidence) is ("an Xid" in why)


def test_further_lines_of_a_switch_s_report_are_the_kernel_s() -> None:
    line = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): Severity 0 Engine instance 3"

    assert judge([line], RULES).why == "no kernel line was recognised in 1 line"
    assert judge([f"[ 12.5] {line}"], RULES).why == "no line calls for an action"


# --- A line that names the Xid that caused it


@pytest.mark.parametrize(
    "number, action",
    [(79, Action.EVICT_MACHINE), (95, Action.EVICT_MACHINE), (31, Action.WARN_ONLY)],
)
def test_a_cleanup_is_judged_as_the_xid_that_it_names(number: int, action: Action) -> None:
    verdict = judge([xid(45, f"pid=7, name=x, Ch 01 caused by previous Xid {number}")], RULES)

    assert (verdict.action, verdict.rule) == (action, f"xid_{number}")
    assert verdict.symptom is judge([xid(number, "pid=7, name=x, y")], RULES).symptom
    (seen,) = verdict.observations
    assert seen.values["xid"] == number
    assert seen.values["named_by_xid"] == 45
    assert (seen.values["pid"], seen.target) == (7, "gpu 0000:3b:00")


def test_cleanups_of_several_programs_do_not_make_their_cause_the_gpu_s() -> None:
    lines = [
        xid(45, f"pid={n}, name=p{n}, Ch 01 caused by previous Xid 31", at=100.0 * n)
        for n in range(1, 6)
    ]

    assert judge(lines, RULES).action is Action.WARN_ONLY


def test_in_a_teardown_a_cleanup_counts_only_if_its_cause_does() -> None:
    judge_ = KernelJudge(RULES)
    judge_.teardown(0.0, 50.0)

    assert judge_.feed(xid(45, "pid=7, name=x, Ch 01 caused by previous Xid 31"), 1.0) == []
    (seen,) = judge_.feed(xid(45, "pid=7, name=x, Ch 02 caused by previous Xid 79"), 2.0)
    assert seen.action is Action.EVICT_MACHINE


def test_a_recovery_action_is_not_taken_from_a_line_that_prints_none() -> None:
    assert judge([xid(45, "Ch 01 caused by previous Xid 154")], RULES).rule == "xid_45"


# --- Whom the kernel ended


@pytest.mark.parametrize(
    "line, program",
    [
        (f"Out of memory: Killed process 4711 (pt_data_worker) {KILLED}", "pt_data_worker"),
        ("Out of memory: Killed process 4711, UID 500, (python3) total-vm:9kB", "python3"),
        ("Out of memory: Kill process 4711 (python3) score 912 or sacrifice child", "python3"),
        (f"Memory cgroup out of memory: Killed process 4711 (python3), UID 0, {KILLED}", "python3"),
        (f"Memory cgroup out of memory: Killed process 4711 (a (b) c) {KILLED}", "a (b) c"),
        ("oom_reaper: reaped process 4711 (python3), now anon-rss:0kB, file-rss:0kB", "python3"),
        (
            "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/a/b,task=x y,pid=4711,uid=0",
            "x y",
        ),
    ],
)
def test_out_of_memory_names_the_process_that_was_ended(line: str, program: str) -> None:
    (seen,) = judge([f"[   99.100000] {line}"], RULES).observations

    assert (seen.values["pid"], seen.values["program"]) == (4711, program)


def test_each_ended_process_is_told_once() -> None:
    judge_ = KernelJudge(RULES)
    lines = [
        "[   99.100000] python3 invoked oom-killer: gfp_mask=0xcc0, order=0, oom_score_adj=0",
        f"[   99.200000] Out of memory: Killed process 4711 (python3) {KILLED}",
        "[   99.250000] oom_reaper: reaped process 4711 (python3), now anon-rss:0kB",
        f"[   99.300000] Out of memory: Killed process 4712 (worker) {KILLED}",
    ]

    told = [[seen.values.get("pids") for seen in judge_.feed(line, 0.0)] for line in lines]

    assert told == [[None], ["4711"], [], ["4711, 4712"]]
    (seen,) = judge_.verdict().observations
    assert (seen.values["pid"], seen.values["program"]) == (4712, "worker")


def test_who_asked_for_memory_is_not_who_was_ended() -> None:
    (seen,) = judge(
        ["[ 9.5] python3 invoked oom-killer: gfp_mask=0xcc0, order=0"], RULES
    ).observations

    assert "pid" not in seen.values
