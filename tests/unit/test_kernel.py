"""The judge of kernel lines, rule by rule, on the shipped catalogue; and on any text at all."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decide.kernel import KernelJudge, judge
from everstep.decide.kernel_findings import PROBE
from everstep.decide.kernel_match import pci_key
from everstep.decide.observation import Observation
from everstep.decide.words import Action, Confidence, Side, Symptom, Verdict
from everstep.spec.kernel_catalogue import load_kernel_catalogue

RULES = load_kernel_catalogue(environ={})
GPU, OTHER = "0000:3b:00", "0000:86:00"


def xid(number: int, text: str = "x", *, gpu: str = GPU, at: float | None = None) -> str:
    stamp = f"[{at:12.6f}] " if at is not None else ""
    return f"{stamp}NVRM: Xid (PCI:{gpu}): {number}, {text}"


def program(pid: int, name: str = "python") -> str:
    return f"pid={pid}, name={name}, Ch 00000010"


def feed(judge_: KernelJudge, *lines: str, at_s: float = 0.0) -> list[Observation]:
    return [seen for line in lines for seen in judge_.feed(line, at_s)]


# --- What an observation says


def test_an_observation_names_rule_target_action_and_evidence() -> None:
    judge_ = KernelJudge(RULES, gpu_names={"00000000:3B:00.0": "gpu 2"})
    line = xid(79, "pid=7, name=train, GPU has fallen off the bus.")

    (seen,) = feed(judge_, line)

    assert (seen.probe, seen.verdict, seen.target, seen.rule) == (
        PROBE,
        Verdict.FAULTY,
        "gpu 2",
        "xid_79",
    )
    assert (seen.symptom, seen.action) == (Symptom.GPU_UNAVAILABLE, Action.EVICT_MACHINE)
    assert seen.confidence is Confidence.HIGH
    assert seen.values["line"] == line
    assert seen.values["pci_address"] == GPU
    assert seen.values["pid"] == 7
    assert "RESTART_BM" in seen.reason


def test_a_name_that_is_learned_late_is_that_of_what_was_found_before() -> None:
    judge_ = KernelJudge(RULES)
    (lost,) = feed(judge_, xid(79))
    (checked,) = feed(judge_, xid(62, gpu="0000:5e:00"))
    assert (lost.target, checked.target) == (f"gpu {GPU}", "gpu 0000:5e:00")

    now = judge_.name_gpus({"00000000:3B:00.0": "gpu 2"})

    assert [now(t) for t in (f"gpu {GPU}", f"pci {GPU}.0", "gpu 0000:5e:00", "disk sda")] == [
        "gpu 2",
        "gpu 2",
        "gpu 0000:5e:00",
        "disk sda",
    ]
    assert {seen.target for seen in judge_.verdict().observations} == {"gpu 2", "gpu 0000:5e:00"}
    (again,) = feed(judge_, xid(79), at_s=50.0)
    assert (again.target, again.values["count"]) == ("gpu 2", 2), "the same finding"
    (over,) = feed(
        judge_, xid(154, "GPU recovery action changed from 0x1 (GPU Reset) to 0x0 (None)")
    )
    assert (over.target, over.values["cleared"]) == ("gpu 2", "xid_79")


def test_names_may_change_and_go() -> None:
    judge_ = KernelJudge(RULES, gpu_names={GPU: "gpu 2"})
    feed(judge_, xid(79))

    assert judge_.name_gpus({GPU: "gpu 3", "0000:5e:00": "gpu 2"})("gpu 2") == "gpu 3"
    assert judge_.verdict().target == "gpu 3"
    assert judge_.name_gpus({})("gpu 3") == f"gpu {GPU}"
    assert judge_.verdict().target == f"gpu {GPU}"


def test_a_gpu_without_a_name_is_called_by_its_address() -> None:
    (seen,) = feed(KernelJudge(RULES), xid(62))

    assert seen.target == f"gpu {GPU}"


@pytest.mark.parametrize(
    "text", ["PCI:0000:3b:00", "0000:3B:00", "00000000:3b:00.0", "3b:00.0", "0000:3b:00 GPU-I:05"]
)
def test_one_gpu_whatever_its_address_looks_like(text: str) -> None:
    assert pci_key(text) == GPU


# --- Bursts and repetition


def test_the_same_xid_within_seconds_is_one() -> None:
    judge_ = KernelJudge(RULES)

    assert len(feed(judge_, *(xid(119, at=100 + i) for i in range(5)))) == 1
    assert feed(judge_, xid(119, at=400)) != []


def test_a_burst_of_one_gpu_hides_no_other() -> None:
    seen = feed(KernelJudge(RULES), xid(119, at=100), xid(119, gpu=OTHER, at=100.1))

    assert {s.target for s in seen} == {f"gpu {GPU}", f"gpu {OTHER}"}


def test_lines_read_long_after_they_were_written_keep_their_distance() -> None:
    """A backlog read at once is not a burst."""
    judge_ = KernelJudge(RULES)

    assert len(feed(judge_, xid(119, at=100), xid(119, at=5000), at_s=77.0)) == 2


@pytest.mark.parametrize("number", [13, 31, 43, 69])
def test_one_program_s_error_is_the_program_s(number: int) -> None:
    verdict = judge([xid(number, program(1), at=10), xid(number, program(1), at=500)], RULES)

    assert verdict.action is Action.WARN_ONLY
    assert verdict.side is Side.USER_CODE
    assert verdict.symptom is Symptom.CUDA_ERROR


@pytest.mark.parametrize("number", [13, 31, 43])
def test_one_program_started_again_and_again_is_worth_a_check_of_the_gpu(number: int) -> None:
    lines = [xid(number, program(pid), at=100.0 * pid) for pid in range(1, 9)]

    assert judge(lines[:2], RULES).action is Action.STOP_TIME_CHECK
    assert judge(lines, RULES).action is Action.STOP_TIME_CHECK


def test_two_programs_of_different_names_are_enough() -> None:
    lines = [xid(31, program(1, "train"), at=100), xid(31, program(2, "bench"), at=900)]

    assert judge(lines, RULES).action is Action.EVICT_MACHINE


def test_programs_that_fail_in_the_same_moment_count_as_one() -> None:
    lines = [xid(31, program(pid), at=100 + pid / 10) for pid in range(9)]

    assert judge(lines, RULES).action is Action.WARN_ONLY


def test_a_program_that_fails_on_every_gpu_is_the_program() -> None:
    lines = [
        xid(31, program(10 * run + rank), gpu=gpu, at=600.0 * run + rank / 10)
        for run in range(1, 5)
        for rank, gpu in enumerate((GPU, OTHER))
    ]

    assert judge(lines, RULES).action is Action.WARN_ONLY


def test_programs_of_another_day_do_not_count() -> None:
    day = 86_400.0
    lines = [xid(31, program(pid), at=2 * day * pid) for pid in (1, 2, 3)]

    assert judge(lines, RULES).action is Action.WARN_ONLY


# --- Teardown


def test_what_our_own_teardown_prints_is_nothing() -> None:
    judge_ = KernelJudge(RULES)
    judge_.teardown(100.0, 120.0)

    assert feed(judge_, xid(45), xid(43, program(1)), at_s=110.0) == []
    assert feed(judge_, xid(79), at_s=111.0) != []
    assert feed(judge_, xid(43, program(1)), at_s=130.0) != []


def test_a_teardown_is_open_until_its_end_is_known_and_a_moment_longer() -> None:
    judge_ = KernelJudge(RULES)
    margin_s = RULES.windows.teardown_s
    judge_.teardown(100.0, math.inf)
    assert feed(judge_, xid(43, program(1)), at_s=99.0) != [], "it came before"
    assert feed(judge_, xid(45), at_s=5000.0) == []

    judge_.teardown(100.0, 6000.0)

    assert feed(judge_, xid(45), at_s=6000.0 + margin_s) == []
    assert feed(judge_, xid(45), at_s=6000.1 + margin_s) != []


def test_programs_that_we_end_do_not_make_it_the_gpu() -> None:
    judge_ = KernelJudge(RULES)
    for number in range(40):
        judge_.teardown(100.0 * number, 100.0 * number + 10)
        line = xid(43, program(number, f"name{number}"))
        assert feed(judge_, line, at_s=100.0 * number + 5) == []
    (seen,) = feed(judge_, xid(43, program(99)), at_s=9999.0)
    assert seen.action is Action.WARN_ONLY


# --- Other lines that change the meaning


def test_a_contained_error_softens_a_double_bit_error() -> None:
    contained = [xid(48, at=1), xid(94, program(1), at=1.1), xid(45, program(1), at=1.2)]

    assert judge(contained, RULES).action is Action.STOP_TIME_CHECK
    assert judge(contained[:1], RULES).action is Action.EVICT_MACHINE
    assert judge([*contained, xid(63, at=1.3)], RULES).action is Action.EVICT_MACHINE
    assert judge([*contained, xid(95, at=9)], RULES).action is Action.EVICT_MACHINE


def test_only_the_same_gpu_s_contained_error_does() -> None:
    lines = [xid(48, at=1), xid(94, gpu=OTHER, at=1.1)]

    assert judge(lines, RULES).action is Action.EVICT_MACHINE


def test_live_a_double_bit_error_waits_a_moment_for_the_word_that_softens_it() -> None:
    judge_ = KernelJudge(RULES)
    assert feed(judge_, xid(48), at_s=10.0) == []
    assert judge_.tick(11.0) == []

    (seen,) = judge_.tick(14.0)
    assert seen.action is Action.EVICT_MACHINE

    judge_ = KernelJudge(RULES)
    feed(judge_, xid(48), xid(94, program(1)), at_s=10.0)
    assert [s.action for s in judge_.tick(14.0)] == [Action.STOP_TIME_CHECK]
    later = feed(judge_, xid(64), at_s=15.0)
    assert {s.rule for s in later if s.action is Action.EVICT_MACHINE} == {"xid_64", "xid_48"}


@pytest.mark.parametrize(
    "text, action",
    [
        ("SAW_MVB Fatal XC0 i0 Link 0 (0x1 0x2)", Action.EVICT_MACHINE),
        ("SAW_MVB Nonfatal XC0 i0 Link 0 (0x1 0x2)", Action.WARN_ONLY),
        ("SAW_MVB Non-fatal XC0 i0 Link 0 (0x1 0x2)", Action.WARN_ONLY),
        ("SAW_MVB i0 Link 0 (0x1 0x2)", Action.STOP_TIME_CHECK),
    ],
)
@pytest.mark.parametrize("number", [74, 144, 145, 146, 147, 148, 149, 150])
def test_nvlink_errors_weigh_as_they_print(number: int, text: str, action: Action) -> None:
    assert judge([xid(number, text)], RULES).action is action


@pytest.mark.parametrize(
    "printed, action",
    [
        ("0x1 (GPU Reset Required)", Action.EVICT_MACHINE),
        ("0x2 (Node Reboot Required)", Action.EVICT_MACHINE),
        ("0x4 (Drain and Reset)", Action.EVICT_MACHINE),
        ("0x3 (Drain P2P)", Action.STOP_TIME_CHECK),
        ("0x9 (Something New)", Action.STOP_TIME_CHECK),
        ("0x0 (None)", Action.WARN_ONLY),
    ],
)
def test_the_printed_recovery_action_is_followed(printed: str, action: Action) -> None:
    line = xid(154, f"GPU recovery action changed from 0x7 (Whatever) to {printed}")

    assert judge([line], RULES).action is action


def test_a_gpu_that_is_well_again_clears_itself_and_no_other() -> None:
    judge_ = KernelJudge(RULES)
    feed(judge_, xid(119), xid(119, gpu=OTHER))

    (over,) = feed(
        judge_, xid(154, "GPU recovery action changed from 0x1 (GPU Reset) to 0x0 (None)")
    )

    assert (over.verdict, over.target) == (Verdict.HEALTHY, f"gpu {GPU}")
    assert over.values["cleared"] == "xid_119"
    verdict = judge_.verdict()
    assert (verdict.action, verdict.target) == (Action.EVICT_MACHINE, f"gpu {OTHER}")


def test_what_follows_a_lost_gpu_is_a_consequence() -> None:
    fatal = "nvidia-nvswitch1: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
    judge_ = KernelJudge(RULES)
    (lost,) = feed(judge_, xid(79, at=50))
    assert (
        feed(judge_, f"[   51.0] {fatal}", xid(74, "NVLink: fatal error", gpu=OTHER, at=52)) == []
    )

    verdict = judge_.verdict()
    assert lost.rule == verdict.rule == "xid_79"
    assert [s.rule for s in verdict.observations] == ["xid_79"]
    assert feed(judge_, f"[  999.0] {fatal}") != []


def test_a_cleanup_that_names_its_cause_is_a_consequence() -> None:
    lines = [xid(95, at=5), xid(45, "pid=1, name=x, Ch 1 caused by previous Xid 95", at=6)]

    assert [s.rule for s in judge(lines, RULES).observations] == ["xid_95"]


@pytest.mark.parametrize("kind", ["Xid", "SXid"])
def test_a_number_that_nobody_knows_is_never_an_eviction(kind: str) -> None:
    head = (
        "NVRM: Xid (PCI:0000:01:00)"
        if kind == "Xid"
        else "nvidia-nvswitch0: SXid (PCI:0000:01:00.0)"
    )

    assert judge([f"{head}: 99999, Fatal, all is lost"], RULES).action is Action.STOP_TIME_CHECK


# --- Counters, clears and time


def down(at: float, nic: str = "eth4") -> str:
    return f"[{at:12.6f}] mlx5_core 0000:1b:00.0 {nic}: Link down"


def up(at: float, nic: str = "eth4") -> str:
    return f"[{at:12.6f}] mlx5_core 0000:1b:00.0 {nic}: Link up"


def test_one_flap_is_tolerated_and_two_within_five_minutes_are_not() -> None:
    once = [down(9000), up(9004)]

    assert judge(once, RULES).action is Action.WARN_ONLY
    assert judge([*once, down(9290), up(9291)], RULES).action is Action.EVICT_MACHINE
    assert judge([*once, down(9310), up(9311)], RULES).action is Action.WARN_ONLY
    assert judge([*once, down(9100, "eth5"), up(9101, "eth5")], RULES).action is Action.WARN_ONLY


def test_flaps_without_times_are_only_worth_a_check() -> None:
    lines = [line.split("] ")[1] for line in (down(1), up(2), down(3), up(4))]

    assert judge(lines, RULES).action is Action.STOP_TIME_CHECK


def test_a_link_that_stays_down_is_reported_when_time_has_passed() -> None:
    judge_ = KernelJudge(RULES)
    (seen,) = feed(judge_, down(9000), at_s=10.0)
    assert seen.action is Action.WARN_ONLY
    assert judge_.tick(200.0) == []
    assert [s.action for s in judge_.tick(311.0)] == [Action.STOP_TIME_CHECK]
    assert judge_.tick(900.0) == []

    judge_ = KernelJudge(RULES)
    feed(judge_, down(9000), up(9004), at_s=10.0)
    assert judge_.tick(900.0) == []


def test_links_come_up_and_down_while_a_machine_boots() -> None:
    assert judge([down(12), up(14), down(15), up(16)], RULES).action is Action.WARN_ONLY
    assert judge([down(12), up(14), down(15), up(16)], RULES).observations == ()


def test_a_server_that_answers_again_clears_only_itself() -> None:
    silent = "[  10.0] nfs: server {} not responding, still trying"
    lines = [silent.format("a"), silent.format("b"), "[  90.0] nfs: server a OK"]

    verdict = judge(lines, RULES)
    assert (verdict.action, verdict.side, verdict.target) == (
        Action.WAIT_EXTERNAL,
        Side.EXTERNAL,
        "server b",
    )
    assert judge([*lines, "[  91.0] nfs: server b OK"], RULES).why == "what was reported is over"


def test_a_hung_process_is_explained_by_the_server_it_waits_for() -> None:
    hung = "[  200.0] INFO: task python3:4412 blocked for more than 120 seconds."

    assert judge([hung], RULES).action is Action.STOP_TIME_CHECK
    assert judge([hung, "[  201.0] nfs: server a not responding, timed out"], RULES).action is (
        Action.WAIT_EXTERNAL
    )


def test_a_storm_of_corrected_errors_deserves_a_check() -> None:
    line = "pcieport 0000:15:00.0: AER: Corrected error received: 0000:16:00.0"
    storm = [f"[{1000 + i / 10:12.6f}] {line}" for i in range(120)]
    slow = [f"[{1000 + i * 60:12.6f}] {line}" for i in range(120)]

    assert judge(storm[:20], RULES).action is Action.WARN_ONLY
    assert judge(storm, RULES).action is Action.STOP_TIME_CHECK
    assert judge(slow, RULES).action is Action.WARN_ONLY


@pytest.mark.parametrize(
    "status, action",
    [
        ("8c00004f000800c2", Action.WARN_ONLY),
        ("cc00004f000800c2", Action.STOP_TIME_CHECK),
        ("bd80000000100134", Action.EVICT_MACHINE),
        ("fd80000000100134", Action.EVICT_MACHINE),
    ],
)
def test_a_machine_check_is_judged_by_its_status_word(status: str, action: Action) -> None:
    line = f"mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: {status}"

    assert judge([line], RULES).action is action


def test_a_message_over_several_lines_counts_whatever_comes_between() -> None:
    lines = [
        "NVRM: The NVIDIA GPU 0000:18:00.0",
        "usb 1-1: new high-speed USB device number 2 using xhci_hcd",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ]

    assert judge(lines, RULES).target == "gpu 0000:18:00"
    assert judge(lines[:3], RULES).action is Action.WARN_ONLY
    assert judge([*lines[:1], *lines[1:2] * 9, *lines[2:]], RULES).action is Action.WARN_ONLY


def test_the_verdict_names_the_worst_first_and_keeps_the_rest() -> None:
    lines = ["nfs: server a not responding, timed out", xid(63), xid(64), xid(79, gpu=OTHER)]

    verdict = judge(lines, RULES)
    assert verdict.rule == "xid_64"
    assert [s.rule for s in verdict.observations] == [
        "xid_64",
        "xid_79",
        "server_not_responding",
        "xid_63",
    ]
    assert [(line.number, line.text) for line in verdict.evidence] == [(3, xid(64))]


def test_nothing_in_a_log_is_nothing() -> None:
    verdict = judge(["", "hello", "usb 1-1: reset"], RULES)

    assert (verdict.action, verdict.symptom, verdict.side) == (
        Action.WARN_ONLY,
        Symptom.UNKNOWN,
        Side.UNCLEAR,
    )
    assert verdict.observations == ()


# --- Any text at all

WORDS = [
    "NVRM: ",
    "Xid (PCI:0000:01:00)",
    "Xid (",
    "): ",
    "79, ",
    "154, ",
    "48, ",
    "to 0x0 (None)",
    "Fatal ",
    "Nonfatal ",
    "pid=7",
    ", name=x",
    "kernel: ",
    "[  12.5] ",
    "[Sun Feb  9 16:24:18 2025] ",
    "nvidia-nvswitch0: SXid (PCI:0000:01:00.0): ",
    "20034, ",
    "nfs: server a ",
    "not responding",
    "OK",
    "Link down",
    "Link up",
    "mlx5_core 0000:1b:00.0 eth4: ",
    "6,1,2,-;",
    "\x00",
    "\n",
    "\\x0a",
    "EDAC MC0: 99999999999 CE ",
    "Bank 7: ",
    "ffffffffffffffff",
    "INFO: task ",
    "blocked for more than",
    "NVRM: The NVIDIA GPU 0000:18:00.0",
    "NVRM: fallen off the bus",
    "é",
    " " * 40,
    "9" * 400,
]

TEXT = st.one_of(
    st.text(max_size=400),
    st.lists(st.sampled_from(WORDS), max_size=8).map("".join),
    st.binary(max_size=200).map(lambda raw: raw.decode("utf-8", "replace")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(TEXT, st.floats(-1e6, 1e6)), max_size=20))
def test_no_text_breaks_it(lines: list[tuple[str, float]]) -> None:
    judge_ = KernelJudge(RULES)
    judge_.teardown(0.0, 5.0)
    for line, at_s in lines:
        judge_.feed(line, at_s)
        judge_.tick(at_s)
    judge_.verdict()


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXT, max_size=12))
def test_no_eviction_without_a_row_of_the_catalogue(lines: list[str]) -> None:
    """Whatever is evicted for is in the catalogue, and in a line that was there."""
    verdict = judge(lines, RULES)
    if verdict.action is not Action.EVICT_MACHINE:
        return
    number = re.fullmatch(r"(s?xid)_(\d+)", verdict.rule)
    if number is not None:
        table = RULES.xids if number[1] == "xid" else RULES.sxids
        assert int(number[2]) in table
    else:
        assert verdict.rule in RULES.by_name
    assert verdict.evidence


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\x1b"), max_size=300), max_size=12))
def test_noise_is_never_an_eviction(lines: list[str]) -> None:
    assert judge(lines, RULES).action is Action.WARN_ONLY


def test_memory_is_bounded() -> None:
    judge_ = KernelJudge(RULES)
    for number in range(6_000):
        judge_.feed(f"nfs: server host-{number} not responding, timed out", float(number))
        judge_.feed(xid(31, program(number), at=float(number)), float(number))

    assert len(judge_._findings) <= 4_096
    assert len(judge_._programs._seen[GPU]) <= 64
