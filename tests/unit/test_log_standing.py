"""What a line may claim: zeros, advice, quotes and remarks never lead to the loss of a machine."""

from __future__ import annotations

import pytest

from everstep.decide.diagnosis.types import Diagnosis, LogLine, LogSource, RankEnd
from everstep.decide.diagnosis.verdict import diagnose
from everstep.decide.words import Action, Confidence, Symptom
from everstep.spec.log_catalogue import load_signatures

CATALOGUE = load_signatures(environ={})
BUG = [
    "[rank4]: Traceback (most recent call last):",
    '[rank4]:   File "/code/fit.py", line 8, in run',
    "[rank4]:     return table[name]",
    "[rank4]: KeyError: 'name'",
]
HANG = [
    f"[rank{rank}]:[E203 11:00:00.1 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, "
    "Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
    for rank in range(3)
]


def judged(lines: list[str], end: RankEnd | None = None) -> Diagnosis:
    numbered = tuple(LogLine(number, line) for number, line in enumerate(lines, 1))
    source = LogSource(file="job.log", lines=numbered, lines_total=len(lines))
    return diagnose(CATALOGUE, [source], [] if end is None else [end])


@pytest.mark.parametrize(
    "line",
    [
        "    Double Bit ECC        : 0",
        "    Remapping Failure Occurred    : No",
        "| row remap failure | N/A |",
        "| Uncorrectable ECC | 0 | Page retirement pending | No |",
        "check: uncorrectable ECC errors: 0, lost: none => PASS",
        '{"uncorrectable ECC": 0, "GPU is lost": false}',
        "no uncorrectable ECC errors found",
        "0 uncorrectable ECC errors",
        "without any out of memory kill",
        "GPU is lost ........ OK",
    ],
)
@pytest.mark.parametrize("failure", [BUG, HANG])
def test_a_value_of_none_is_no_fault(line: str, failure: list[str]) -> None:
    assert judged([line, *failure]).symptom in (Symptom.USER_CODE, Symptom.HANG)
    assert judged([line]).rule == "nothing_found"


@pytest.mark.parametrize(
    "line",
    [
        "GPU 3: uncorrectable ECC errors: 2",
        "    Double Bit ECC        : 1",
        "    Remapping Failure Occurred    : Yes",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "GPU 0 uncorrectable ECC error",
    ],
)
def test_a_value_that_counts_is_a_fault(line: str) -> None:
    assert judged([line]).action is Action.EVICT_MACHINE


@pytest.mark.parametrize(
    "line",
    [
        "m1:7:9 [2] NCCL INFO NET/Plugin: libnccl-net.so: cannot open shared object file",
        "WARNING: fast_norm is not there: No module named 'fast_norm'",
        "2024-05-01 10:00:00,120 [WARNING] loader: cannot identify image file, record 7 left out",
        "bash: /etc/profile.d/site.sh: Permission denied",
        "ulimit: open files: cannot modify limit: Operation not permitted",
        (
            "[W203 10:00:00.1 socket.cpp:601] [c10d] The client socket has failed to connect to "
            "[m0]:29500 (errno: 111 - Connection refused)."
        ),
        "m1:7:9 [2] transport/net_ib.cc:93 NCCL WARN NET/IB : Got async event : LID change",
        "  docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864",
    ],
)
@pytest.mark.parametrize("failure", [BUG, HANG])
def test_a_remark_loses_against_a_real_end(line: str, failure: list[str]) -> None:
    assert judged([line, *failure]).symptom in (Symptom.USER_CODE, Symptom.HANG)
    alone = judged([line])
    assert alone.confidence is Confidence.LOW
    assert alone.action is not Action.EVICT_MACHINE
    killed = judged([line], RankEnd(signal=9))
    assert killed.symptom is Symptom.UNKNOWN


def test_a_traceback_that_was_logged_as_a_warning_was_caught() -> None:
    caught = ["WARNING: scoring failed, left out", "Traceback (most recent call last):"]
    caught += ['  File "/code/score.py", line 3, in score', "ZeroDivisionError: division by zero"]
    assert judged([*caught, *HANG]).symptom is Symptom.HANG
    assert judged([*caught, *BUG]).first_failed_rank == 4


@pytest.mark.parametrize("line", ["INFO skipping 40 batches", "WARNING: slow disk", "step 4"])
def test_any_line_may_stand_before_the_traceback_that_ends_a_process(line: str) -> None:
    ecc = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    found = judged([line, "Traceback (most recent call last):", '  File "a.py", line 1, in f', ecc])
    assert (found.action, found.confidence) == (Action.EVICT_MACHINE, Confidence.HIGH)


@pytest.mark.parametrize(
    "line",
    [
        "sample: User: my GPU has fallen off the bus, what can I do?",
        "[rank0]: prompt 3: CUDA error: uncorrectable ECC error encountered, explain it",
        "I asked: why is it that my GPU is lost",
    ],
)
def test_quoted_text_is_no_evidence(line: str) -> None:
    assert judged([line]).rule == "nothing_found"
    assert judged([line, *BUG]).symptom is Symptom.USER_CODE


def test_what_many_ranks_meet_alike_has_no_first_rank() -> None:
    lines = [f"[rank{rank}]: ModuleNotFoundError: No module named 'fast_norm'" for rank in (2, 5)]
    assert judged(lines).first_failed_rank is None
    assert judged(lines[:1]).first_failed_rank == 2


def test_srun_names_the_task_and_its_machine() -> None:
    before = "[rank0]: step 4"
    one = judged([before, "srun: error: m7: task 6: Out Of Memory"])
    assert (one.first_failed_rank, one.machines) == (6, ("m7",))
    assert judged([before, "srun: error: m7: tasks 2-5: Out Of Memory"]).first_failed_rank is None


def test_a_traceback_of_another_rank_is_that_ranks() -> None:
    head = "[rank5]: Traceback (most recent call last): (RANK 11)"
    frame = '[rank5]:   File "/code/plan.py", line 3, in plan'
    found = judged([head, frame, "[rank5]: RuntimeError: Missing key in checkpoint state_dict: a"])
    assert found.first_failed_rank == 11


def test_the_kernel_killed_something_else() -> None:
    lines = ["Out of memory: Killed process 311 (updatedb) total-vm:8kB"]
    lines += ["E0801 failed (exitcode: -9) local_rank: 6 (pid: 99) of binary: python3"]
    found = judged(lines)
    assert (found.confidence, found.first_failed_rank) == (Confidence.LOW, None)


def test_a_person_who_interrupts_is_no_failure() -> None:
    found = judged(["step 4 loss 2.0", "KeyboardInterrupt"], RankEnd(exit_code=130))
    assert (found.rule, found.action) == ("interrupted", Action.WARN_ONLY)


def test_bars_that_are_redrawn_in_one_line_count_as_progress() -> None:
    bar = "\r".join(f" {i}%|#   | {i}/90 [00:0{i}<01:00, 1.2it/s]" for i in range(1, 6))
    assert judged([BUG[-1], bar, *HANG]).symptom is Symptom.HANG


def test_a_traceback_inside_a_torchrun_block_is_read() -> None:
    rule = "-" * 40
    lines = ["Root Cause (first observed failure):", "[0]:", "  rank      : 12 (local_rank: 4)"]
    lines += ["  exitcode  : 1 (pid: 5)", "  traceback : Traceback (most recent call last):"]
    lines += ['    File "/code/fit.py", line 2, in fit', "      x = options.rate"]
    lines += ["  AttributeError: 'Options' object has no attribute 'rate'", rule]
    found = judged(lines)
    assert (found.symptom, found.first_failed_rank) == (Symptom.USER_CODE, 12)


@pytest.mark.parametrize(
    ("times", "rule"),
    [
        ([1.0] * 100 + [3.5] * 20, "step_time_decline"),
        ([1.0] * 30 + [3.5] * 30, "step_time_decline"),
        ([1.5] * 20 + [0.5] * 20, "nothing_found"),
        (([0.5] * 9 + [2.5]) * 4, "step_time_beat"),
        ([9.0] + [0.5] * 30, "nothing_found"),
    ],
)
def test_only_a_lasting_decline_is_one(times: list[float], rule: str) -> None:
    assert judged([f"step {n} | {time} s/it" for n, time in enumerate(times)]).rule == rule


@pytest.mark.parametrize(
    ("line", "symptom"),
    [
        ("[m7:1:0] ib_mlx5_log.c:177 Transport retry count exceeded on mlx5_1:1", "network_nccl"),
        ("RuntimeError: Timed out initializing process group in store based barrier", "hang"),
        ("AssertionError: bad header, cannot read: /set/part.idx", "data_error"),
    ],
)
def test_kinds_of_text(line: str, symptom: str) -> None:
    assert judged([line], RankEnd(exit_code=1)).symptom.value == symptom
