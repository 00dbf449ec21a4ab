"""Attribution: who failed first, on stories as they happen and on every set of reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from everstep.decide import machine_rules
from everstep.decide.attribution import (
    REASON_CHARS_MAX,
    RULES,
    Finding,
    MachineReport,
    RankReport,
    Trigger,
    attribute,
)
from everstep.decide.evidence import all_succeeded
from everstep.decide.faults import FAULTS, fault_of, is_witness
from everstep.decide.stack_report import (
    ProcessRole,
    StackGroup,
    StackReport,
    StackSource,
    Wait,
    spans_of,
)
from everstep.decide.words import Action, Cause, Confidence, LogClass, RankState, Side, Symptom

KILL, SEGV, ABRT, TERM = 9, 11, 6, 15
ERROR = ("  File 'train.py'", "ValueError: bad batch")


def _rank(rank: int, *, machine: str | None = None, **more: Any) -> RankReport:
    """A rank of two per machine, ended by our SIGTERM at step 7 unless told otherwise."""
    values: dict[str, Any] = {
        "rank": rank,
        "machine_id": machine or f"m-{rank // 2 + 1}",
        "state": RankState.EXITED,
        "step": 7,
    }
    if not {"exit_code", "signal", "state"} & more.keys():
        values |= {"signal": TERM, "stopped_by_us": True}
    return RankReport(**{**values, **more})


def _witness(rank: int, log_class: LogClass = LogClass.PEER_LOST, **more: Any) -> RankReport:
    return _rank(rank, exit_code=1, log_class=log_class, **more)


def _raised(rank: int, **more: Any) -> RankReport:
    return _rank(rank, exit_code=1, log_class=LogClass.PYTHON_EXCEPTION, log_lines=ERROR, **more)


def _machines(*ranks: RankReport, **machines: Any) -> list[MachineReport]:
    """Reports of the machines of some ranks; ``m_1={"lost": True}`` says more about one."""
    names = sorted({r.machine_id for r in ranks} | {name.replace("_", "-") for name in machines})
    out = []
    for name in names:
        more = machines.get(name.replace("-", "_"), {})
        mine = tuple(r for r in ranks if r.machine_id == name)
        out.append(MachineReport(**{"machine_id": name, "reachable": True, "ranks": mine, **more}))
    return out


def _with_stacks(
    reports: list[MachineReport],
    elsewhere: Sequence[int],
    axes: tuple[tuple[str, int], ...] | None = None,
) -> list[MachineReport]:
    """Machines that also tell where their ranks stood: in a collective, or elsewhere."""
    ranks = {r.rank for report in reports for r in report.ranks}
    out = []
    for report in reports:
        mine = {r.rank for r in report.ranks}
        groups = tuple(
            StackGroup(
                role=ProcessRole.RANK,
                fingerprint=place,
                frames=(f"{place} (train.py:3)",),
                source=StackSource.PY_SPY,
                waits_for=wait,
                spans=spans_of(those),
                processes=len(those),
            )
            for place, wait, those in (
                ("all_reduce", Wait.PEERS, mine - set(elsewhere)),
                ("read", Wait.NOTHING, mine & set(elsewhere)),
            )
            if those
        )
        stacks = StackReport(
            machine_id=report.machine_id,
            groups=groups,
            axes=axes or (("dp", len(ranks)),),
            ranks_per_machine=2,
        )
        out.append(replace(report, stacks=stacks))
    return out


GONE = {"reachable": False}
LOST = {"reachable": False, "lost": True}

STORIES: dict[str, tuple[list[MachineReport], list[Trigger], dict[str, Any]]] = {
    "a rank is killed and the others lose it": (
        _machines(_witness(0), _rank(1, signal=KILL), _witness(2), _rank(3)),
        [],
        {
            "rule": "crashed",
            "symptom": Symptom.UNKNOWN,
            "side": Side.UNCLEAR,
            "cause": Cause.UNCLEAR,
            "confidence": Confidence.HIGH,
            "first_failed_rank": 1,
            "culprit_ranks": (1,),
            "witnesses": (0, 2),
            "step": 7,
        },
    ),
    "a shell reports the signal as an exit code": (
        _machines(_rank(0, exit_code=139), _witness(1)),
        [],
        {"rule": "crashed", "cause": Cause.UNCLEAR, "first_failed_rank": 0},
    ),
    "SIGKILL with a sign of memory pressure": (
        _machines(_rank(0, signal=KILL, log_class=LogClass.OUT_OF_MEMORY), _witness(1)),
        [],
        {"rule": "out_of_memory", "symptom": Symptom.CPU_OOM, "cause": Cause.USER_CODE},
    ),
    "the GPU is out of memory": (
        _machines(
            _rank(
                0,
                exit_code=1,
                log_class=LogClass.OUT_OF_MEMORY,
                log_lines=("torch.cuda.OutOfMemoryError: CUDA out of memory",),
            )
        ),
        [],
        {"symptom": Symptom.GPU_OOM, "side": Side.USER_CODE, "cause": Cause.USER_CODE},
    ),
    "an exception in one rank": (
        _machines(_witness(0), _witness(1), _raised(2), _witness(3)),
        [],
        {
            "rule": "python_exception",
            "symptom": Symptom.USER_CODE,
            "side": Side.USER_CODE,
            "cause": Cause.USER_CODE,
            "first_failed_rank": 2,
            "suspects": (),
        },
    ),
    "the same exception in all ranks of two machines": (
        _machines(*(_raised(r) for r in range(4))),
        [],
        {"culprit_ranks": (0, 1, 2, 3), "first_failed_rank": None, "confidence": Confidence.HIGH},
    ),
    "the same exception on one machine: its own clock tells who was first": (
        _machines(_raised(0, exited_ago_s=1.0), _raised(1, exited_ago_s=1.5)),
        [],
        {"culprit_ranks": (0, 1), "first_failed_rank": 1},
    ),
    "a crash and an exception at once": (
        _machines(_raised(0), _rank(2, signal=SEGV), _witness(3)),
        [],
        {
            "rule": "crashed",
            "culprit_ranks": (2,),
            "confidence": Confidence.LOW,
            "reason": "rank 2 on machine m-2 was ended by SIGSEGV; also: rank 0 raised an "
            "exception: ValueError: bad batch",
        },
    ),
    "a rank that aborts itself after an exception elsewhere is not the first": (
        _machines(_raised(0), _rank(1, signal=ABRT)),
        [],
        {"rule": "python_exception", "culprit_ranks": (0,)},
    ),
    "a rank aborts itself": (
        _machines(_rank(0, signal=ABRT), _witness(1)),
        [],
        {"rule": "aborted", "cause": Cause.UNCLEAR, "first_failed_rank": 0},
    ),
    "a disk is full: people can mend it, so it is not charged to the owner": (
        _machines(_rank(0, exit_code=1, log_class=LogClass.DISK_FULL), _witness(1)),
        [],
        {"symptom": Symptom.DISK_FULL, "side": Side.USER_CODE, "cause": Cause.UNCLEAR},
    ),
    "the port is taken": (
        _machines(_rank(0, exit_code=1, log_class=LogClass.PORT_TAKEN), _witness(1)),
        [],
        {"symptom": Symptom.NETWORK_HOST, "cause": Cause.INFRASTRUCTURE, "suspects": ()},
    ),
    "a fenced run's commit is refused": (
        _machines(_rank(0, exit_code=1, log_class=LogClass.CHECKPOINT_REFUSED), _witness(1)),
        [],
        {"rule": "fenced_off", "side": Side.INFRASTRUCTURE, "suspects": ()},
    ),
    "a refused commit beside a real fault": (
        _machines(_rank(0, exit_code=1, log_class=LogClass.CHECKPOINT_REFUSED), _raised(1)),
        [],
        {"rule": "python_exception", "culprit_ranks": (1,)},
    ),
    "a damaged checkpoint": (
        _machines(_rank(0, exit_code=1, log_class=LogClass.CHECKPOINT_UNREADABLE)),
        [],
        {"symptom": Symptom.CHECKPOINT_ERROR, "cause": Cause.UNCLEAR},
    ),
    "a module is missing everywhere": (
        _machines(*(_rank(r, exit_code=1, log_class=LogClass.IMPORT_FAILED) for r in range(4))),
        [],
        {"symptom": Symptom.ENVIRONMENT_MISMATCH, "cause": Cause.USER_CODE},
    ),
    "a module is missing on one machine only": (
        _machines(
            *(_rank(r, exit_code=1, log_class=LogClass.IMPORT_FAILED) for r in (0, 1)),
            *(_witness(r) for r in (2, 3)),
        ),
        [],
        {"symptom": Symptom.ENVIRONMENT_MISMATCH, "cause": Cause.UNCLEAR, "suspects": ()},
    ),
    "a command that does not exist": (
        _machines(_rank(0, exit_code=127), _rank(1, exit_code=127)),
        [],
        {"symptom": Symptom.CONFIG_ERROR, "cause": Cause.USER_CODE},
    ),
    "an exit code without a reason": (
        _machines(_rank(0, exit_code=3, log_lines=("step 7",)), _witness(1)),
        [],
        {
            "symptom": Symptom.UNKNOWN,
            "confidence": Confidence.LOW,
            "reason": "rank 0 on machine m-1 ended with exit code 3: step 7",
        },
    ),
    "somebody else sent SIGTERM": (
        _machines(_rank(0, signal=TERM, stopped_by_us=False), _witness(1)),
        [],
        {"rule": "stopped_from_outside", "cause": Cause.UNCLEAR, "confidence": Confidence.LOW},
    ),
    "a rank ends with 0 too early": (
        _machines(_rank(0, exit_code=0), _witness(1), _witness(2), _rank(3)),
        [],
        {"rule": "exited_early", "symptom": Symptom.USER_CODE, "culprit_ranks": (0,)},
    ),
    "a rank ends with 0 too early and the others wait": (
        _machines(_rank(0, exit_code=0), _rank(1, stalled_for_s=5.0)),
        [],
        {"rule": "exited_early", "cause": Cause.USER_CODE},
    ),
    "an early exit that only the watch has seen": (
        _machines(_rank(0, exit_code=0), _rank(1), _rank(2)),
        [Trigger(kind="early_exit", machine_id="m-1", rank=0, reason="30 s apart")],
        {"rule": "exited_early", "culprit_ranks": (0,)},
    ),
    "all ranks but one have finished: the last one hangs": (
        _machines(*(_rank(r, exit_code=0, step=9) for r in range(3)), _rank(3, stalled_for_s=5.0)),
        [],
        {"rule": "hang_with_culprit", "culprit_ranks": (3,)},
    ),
    "a stopped process": (
        _machines(_rank(0, stalled_for_s=5.0), _rank(1, stalled_for_s=5.0, process_state="T")),
        [],
        {
            "rule": "frozen",
            "symptom": Symptom.HANG,
            "culprit_ranks": (1,),
            "confidence": Confidence.HIGH,
            "suspects": (),
        },
    ),
    "a stopped process that its peers time out on": (
        _machines(
            _witness(0, LogClass.COLLECTIVE_TIMEOUT),
            _rank(1, process_state="T"),
            _witness(2),
        ),
        [],
        {"rule": "frozen", "culprit_ranks": (1,), "witnesses": (0, 2)},
    ),
    "the others time out on a silent rank": (
        _machines(
            _witness(0, LogClass.COLLECTIVE_TIMEOUT),
            _witness(1, LogClass.COLLECTIVE_TIMEOUT),
            _rank(2),
        ),
        [],
        {"rule": "hang_with_culprit", "symptom": Symptom.HANG, "culprit_ranks": (2,)},
    ),
    "everybody times out": (
        _machines(*(_witness(r, LogClass.COLLECTIVE_TIMEOUT, signal=ABRT) for r in range(4))),
        [],
        {"rule": "hang_without_culprit", "symptom": Symptom.HANG, "culprit_ranks": ()},
    ),
    "stacks of a hang lead to one rank": (
        _with_stacks(_machines(*(_rank(r, stalled_for_s=5.0) for r in range(4)), _rank(4)), (2,)),
        [],
        {"rule": "hang_by_stacks", "culprit_ranks": (2,), "suspects": (), "action": None},
    ),
    "stacks of a hang lead to one pipeline": (
        _with_stacks(
            _machines(*(_rank(r, stalled_for_s=5.0) for r in range(12))),
            (4, 5, 6, 7),
            (("tp", 2), ("pp", 2), ("dp", 3)),
        ),
        [],
        {
            "rule": "hang_by_stacks",
            "culprit_ranks": (4, 5, 6, 7),
            "suspects": (),
            "action": Action.OVER_EVICT_GROUP,
            "confidence": Confidence.LOW,
        },
    ),
    "stacks of a hang are all alike, and so are the ranks": (
        _with_stacks(_machines(*(_rank(r, stalled_for_s=5.0) for r in range(4))), ()),
        [],
        {"rule": "hang_without_culprit", "culprit_ranks": ()},
    ),
    "stacks say who stood where, and a rank had failed": (
        _with_stacks(_machines(_raised(0), _rank(1, stalled_for_s=5.0), _rank(2)), (1,)),
        [],
        {"rule": "python_exception", "culprit_ranks": (0,)},
    ),
    "a rank is behind the others": (
        _machines(*(_rank(r, stalled_for_s=5.0, step=7 if r else 6) for r in range(4))),
        [],
        {"rule": "hang_with_culprit", "culprit_ranks": (0,), "confidence": Confidence.LOW},
    ),
    "a rank is still saving while the others wait": (
        _machines(*(_rank(r, stalled_for_s=5.0, section=None if r else "save") for r in range(4))),
        [],
        {"rule": "hang_with_culprit", "culprit_ranks": (0,)},
    ),
    "a rank is blocked in the kernel": (
        _machines(
            *(_rank(r, stalled_for_s=5.0, process_state="S" if r else "D") for r in range(4))
        ),
        [],
        {"rule": "hang_with_culprit", "culprit_ranks": (0,)},
    ),
    "nobody moves and nobody differs": (
        _machines(*(_rank(r, stalled_for_s=5.0) for r in range(4))),
        [],
        {"rule": "hang_without_culprit", "culprit_ranks": ()},
    ),
    "a hang that only the watch has seen": (
        _machines(_rank(0), _rank(1)),
        [Trigger(kind="rank_stalled", machine_id="m-1", rank=0, reason="60 s")],
        {"rule": "hang_without_culprit"},
    ),
    "a rank that raised but could not end": (
        _machines(
            _rank(0, log_class=LogClass.PYTHON_EXCEPTION, log_lines=ERROR),
            _witness(1),
            _witness(2),
            _witness(3),
        ),
        [],
        {
            "rule": "python_exception",
            "culprit_ranks": (0,),
            "confidence": Confidence.LOW,
        },
    ),
    "most ranks take our SIGTERM with an exception": (
        _machines(
            *(_rank(r, stalled_for_s=5.0, log_class=LogClass.PYTHON_EXCEPTION) for r in range(4))
        ),
        [],
        {"rule": "hang_without_culprit", "culprit_ranks": ()},
    ),
    "NaN in all ranks, since the loss is reduced": (
        _machines(*(_rank(r, nonfinite_step=8, step=8) for r in range(4))),
        [],
        {
            "rule": "nonfinite",
            "symptom": Symptom.NAN_VALUE,
            "side": Side.UNCLEAR,
            "cause": Cause.UNCLEAR,
            "culprit_ranks": (),
            "step": 8,
        },
    ),
    "NaN in one rank that the others do not have": (
        _machines(_rank(0, nonfinite_step=8, step=8), _rank(1, step=8), _rank(2, step=9)),
        [],
        {"rule": "nonfinite", "culprit_ranks": (0,), "suspects": ()},
    ),
    "NaN in the rank that is ahead proves nothing about the others": (
        _machines(_rank(0, nonfinite_step=8, step=8), _rank(1, step=7)),
        [],
        {"rule": "nonfinite", "culprit_ranks": ()},
    ),
    "NaN that only the watch has seen": (
        _machines(_rank(0)),
        [Trigger(kind="nonfinite", machine_id="m-1", rank=0, reason="step 8")],
        {"rule": "nonfinite", "symptom": Symptom.NAN_VALUE},
    ),
    "NaN of a machine that is lost by now": (
        _machines(_rank(2, step=8), m_1={"lost": True, "reachable": False}),
        [Trigger(kind="nonfinite", machine_id="m-1", rank=0, reason="step 6", step=6)],
        {"nonfinite_step": 6},
    ),
    "an assertion after NaN is not the first failure": (
        _machines(_rank(0, nonfinite_step=8, step=8, exit_code=1, log_class=LogClass.OTHER)),
        [],
        {"rule": "nonfinite", "symptom": Symptom.NAN_VALUE},
    ),
    "a machine is lost": (
        _machines(_witness(0), _witness(1), m_2=LOST),
        [],
        {
            "rule": "machine_lost",
            "symptom": Symptom.KERNEL_PANIC,
            "cause": Cause.INFRASTRUCTURE,
            "confidence": Confidence.HIGH,
            "suspects": ("m-2",),
            "witnesses": (0, 1),
        },
    ),
    "a machine is lost and a rank elsewhere was killed": (
        _machines(_rank(0, signal=KILL), _rank(1), m_2=LOST),
        [],
        {
            "suspects": ("m-2",),
            "reason": "machine m-2 did not come back while training had stopped; also: rank 0 was "
            "ended by SIGKILL",
        },
    ),
    "two machines are lost": (
        _machines(_witness(0), m_2=LOST, m_3=LOST),
        [],
        {"suspects": ("m-2", "m-3")},
    ),
    "a machine cannot be reached, which proves nothing": (
        _machines(_witness(0), _witness(1), m_2=GONE),
        [],
        {"rule": "only_witnesses", "suspects": (), "confidence": Confidence.LOW},
    ),
    "timeouts towards a machine out of reach are no hang": (
        _machines(_witness(0, LogClass.COLLECTIVE_TIMEOUT), m_2=GONE),
        [],
        {"rule": "only_witnesses", "symptom": Symptom.NETWORK_NCCL},
    ),
    "nothing is known but that a machine is out of reach": (
        _machines(_rank(0), m_2=GONE),
        [Trigger(kind="unreachable", machine_id="m-2", rank=None, reason="timeout")],
        {"rule": "out_of_reach", "suspects": (), "symptom": Symptom.UNKNOWN},
    ),
    "a process does not die": (
        _machines(_raised(0), _rank(2), m_2={"teardown_clean": False}),
        [],
        {
            "rule": "teardown_not_clean",
            "suspects": ("m-2",),
            "cause": Cause.INFRASTRUCTURE,
            "confidence": Confidence.HIGH,
        },
    ),
    "a machine's processes have vanished": (
        _machines(
            _witness(0),
            _rank(2, state=RankState.UNKNOWN),
            _rank(3, state=RankState.UNKNOWN),
            m_2={"processes_vanished": True},
        ),
        [],
        {
            "rule": "processes_vanished",
            "cause": Cause.INFRASTRUCTURE,
            "culprit_ranks": (2, 3),
            "suspects": (),
        },
    ),
    "a machine is shut down on purpose": (
        _machines(_rank(0), _witness(2), m_1={"planned_stop": "kernel update"}),
        [],
        {
            "rule": "planned_stop",
            "symptom": Symptom.PREEMPTION,
            "side": Side.EXTERNAL,
            "cause": Cause.PLANNED,
            "reason": "planned stop of m-1: kernel update",
        },
    ),
    "a machine that announced its stop is not lost when it is gone": (
        _machines(_witness(0), m_2=LOST),
        [Trigger(kind="planned_stop", machine_id="m-2", rank=None, reason="drained")],
        {"rule": "planned_stop", "cause": Cause.PLANNED, "suspects": ()},
    ),
    "a planned stop does not hide a lost machine": (
        _machines(_rank(0), m_1={"planned_stop": "update"}, m_2=LOST),
        [],
        {"rule": "machine_lost", "suspects": ("m-2",)},
    ),
    "connections are lost and nobody failed": (
        _machines(*(_witness(r) for r in range(4))),
        [],
        {
            "rule": "only_witnesses",
            "symptom": Symptom.NETWORK_NCCL,
            "cause": Cause.UNCLEAR,
            "first_failed_rank": None,
            "witnesses": (0, 1, 2, 3),
        },
    ),
    "one of the witnesses was ended by a signal": (
        _machines(_witness(0), _rank(1, signal=SEGV, log_class=LogClass.PEER_LOST), _witness(2)),
        [],
        {"rule": "witness_crashed", "culprit_ranks": (1,), "confidence": Confidence.LOW},
    ),
    "nothing at all": (
        [],
        [Trigger(kind="probe", machine_id=None, rank=None, reason="somebody asked")],
        {
            "rule": "unknown",
            "reason": "the run stopped without evidence of a cause: somebody asked",
            "step": None,
        },
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_story(story: str) -> None:
    reports, triggers, expected = STORIES[story]
    finding = attribute(reports, triggers=triggers)

    assert expected == {name: getattr(finding, name) for name in expected}, finding


def test_the_stories_cover_every_rule_and_every_kind_of_fault() -> None:
    seen = {attribute(reports, triggers=t).rule for reports, t, _ in STORIES.values()}
    of_machines = {r.name for r in RULES if r.find.__module__ == machine_rules.__name__}
    rules = {rule.name for rule in RULES} - {"rank_fault", "stuck_after_error"} - of_machines

    # These two rules give the finding the name of the fault.
    assert rules | {kind.name for kind in FAULTS} == seen


RANKS = st.builds(
    RankReport,
    rank=st.just(0),
    machine_id=st.just(""),
    state=st.sampled_from(RankState),
    exit_code=st.sampled_from([None, 0, 1, 127, 137, 139, 255]),
    signal=st.sampled_from([None, None, KILL, SEGV, ABRT, TERM, 64]),
    stopped_by_us=st.booleans(),
    step=st.sampled_from([None, 6, 7]),
    nonfinite_step=st.sampled_from([None, None, None, 6, 7]),
    stalled_for_s=st.sampled_from([None, None, 5.0]),
    process_state=st.sampled_from([None, "S", "T", "D", "R"]),
    section=st.sampled_from([None, "save"]),
    log_class=st.sampled_from(LogClass),
    log_lines=st.sampled_from([(), ERROR, ("x" * 300,) * 8]),
    exited_ago_s=st.sampled_from([None, 0.5, 1.5]),
)
TRIGGERS = st.builds(
    Trigger,
    kind=st.sampled_from(
        [
            "rank_exited",
            "rank_stalled",
            "nonfinite",
            "early_exit",
            "processes_vanished",
            "planned_stop",
            "unreachable",
            "probe",
        ]
    ),
    machine_id=st.sampled_from([None, "m-1", "m-9"]),
    rank=st.sampled_from([None, 0, 99]),
    reason=st.sampled_from(["", "told"]),
)


@st.composite
def _reports(draw: st.DrawFn, *, quiet: bool = False) -> list[MachineReport]:
    """Some machines with one to three ranks each; ``quiet``: nothing about machines themselves."""
    out: list[MachineReport] = []
    first = 0
    for number in range(draw(st.integers(0, 4))):
        name = f"m-{number + 1}"
        drawn = draw(st.lists(RANKS, min_size=1, max_size=3))
        ranks = tuple(replace(r, rank=first + i, machine_id=name) for i, r in enumerate(drawn))
        first += len(ranks)
        rare = st.just(False) if quiet else st.sampled_from([False, False, False, True])
        lost = draw(rare)
        out.append(
            MachineReport(
                machine_id=name,
                reachable=not lost and not draw(rare),
                lost=lost,
                planned_stop="told" if draw(rare) else None,
                processes_vanished=draw(rare),
                teardown_clean=not draw(rare),
                ranks=ranks,
            )
        )
    return out


@given(_reports(), st.lists(TRIGGERS, max_size=3), st.integers())
def test_the_order_of_reports_does_not_matter(
    reports: list[MachineReport], triggers: list[Trigger], seed: int
) -> None:
    random = Random(seed)
    mixed = [replace(m, ranks=tuple(random.sample(m.ranks, len(m.ranks)))) for m in reports]
    random.shuffle(mixed)

    assert attribute(reports, triggers=triggers) == attribute(
        mixed, triggers=random.sample(triggers, len(triggers))
    )


@given(_reports(), st.lists(TRIGGERS, max_size=3))
def test_suspects_come_from_evidence_about_the_machine_only(
    reports: list[MachineReport], triggers: list[Trigger]
) -> None:
    finding = attribute(reports, triggers=triggers)
    lost = {m.machine_id for m in reports if m.lost}
    dirty = {m.machine_id for m in reports if m.reachable and not m.teardown_clean}
    merely_unreachable = {m.machine_id for m in reports if not m.reachable and not m.lost}

    assert set(finding.suspects) <= lost | dirty
    assert not set(finding.suspects) & merely_unreachable
    if finding.suspects:
        assert (finding.cause, finding.confidence) == (Cause.INFRASTRUCTURE, Confidence.HIGH)
    if finding.cause is Cause.PLANNED:
        assert finding.suspects == ()


@given(_reports(), st.lists(TRIGGERS, max_size=3))
def test_victims_are_never_culprits_when_somebody_failed_by_itself(
    reports: list[MachineReport], triggers: list[Trigger]
) -> None:
    finding = attribute(reports, triggers=triggers)
    ranks = [r for m in reports for r in m.ranks]
    victims = {r.rank for r in ranks if r.stopped_by_us or is_witness(r)}
    if any(fault_of(r) is not None for r in ranks):
        assert not victims & set(finding.culprit_ranks)
        assert finding.first_failed_rank not in victims
    assert not set(finding.witnesses) & set(finding.culprit_ranks)


@given(_reports(quiet=True))
def test_of_ranks_that_failed_by_themselves_at_least_one_is_a_culprit(
    reports: list[MachineReport],
) -> None:
    ranks = [r for m in reports for r in m.ranks]
    own = {r.rank for r in ranks if fault_of(r) is not None}
    finding = attribute(reports)
    if own and finding.symptom is not Symptom.NAN_VALUE:
        assert set(finding.culprit_ranks) <= own
        assert finding.culprit_ranks


@given(_reports(), st.lists(TRIGGERS, max_size=3))
def test_every_finding_is_complete_and_survives_json(
    reports: list[MachineReport], triggers: list[Trigger]
) -> None:
    finding = attribute(reports, triggers=triggers)
    ranks = {r.rank: r for m in reports for r in m.ranks}
    findings: TypeAdapter[Finding] = TypeAdapter(Finding)

    assert finding.rule in {rule.name for rule in RULES} | {kind.name for kind in FAULTS}
    assert 0 < len(finding.reason) <= REASON_CHARS_MAX
    assert set(finding.culprit_ranks) <= set(ranks)
    assert finding.first_failed_rank is None or finding.first_failed_rank in finding.culprit_ranks
    assert finding.step == max((r.step for r in ranks.values() if r.step is not None), default=None)
    assert finding == findings.validate_json(findings.dump_json(finding))


@given(_reports(), st.lists(TRIGGERS, max_size=3))
def test_user_code_is_charged_only_for_what_its_ranks_did(
    reports: list[MachineReport], triggers: list[Trigger]
) -> None:
    finding = attribute(reports, triggers=triggers)
    if finding.cause is Cause.USER_CODE:
        assert finding.culprit_ranks


@pytest.mark.parametrize(
    ("ranks", "finished"),
    [
        ([_rank(0, exit_code=0), _rank(1, exit_code=0)], True),
        ([_rank(0, exit_code=0)], False),
        ([_rank(0, exit_code=0), _rank(0, exit_code=0)], False),
        ([_rank(0, exit_code=0), _rank(1, exit_code=1)], False),
        ([_rank(0, exit_code=0), _rank(1, exit_code=0, stopped_by_us=True)], False),
        ([_rank(0, exit_code=0), _rank(1, exit_code=0, nonfinite_step=7)], False),
    ],
)
def test_a_run_has_succeeded_when_all_of_its_ranks_have(
    ranks: list[RankReport], finished: bool
) -> None:
    assert all_succeeded(_machines(*ranks), 2) is finished
