"""Any order of leases, evictions, releases and ends keeps the promises about machines and runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from everstep.decide.words import FINAL_PHASES, JobPhase, RunOutcome
from everstep.ledger import Ledger, LedgerConflict, MachineState
from everstep.ledger.tables import Table
from everstep.spec import messages as m
from everstep.spec.policy import PolicySnapshot
from tests.ledger.conftest import MIGRATED
from tests.ledger.postgres import PostgresServer
from tests.ledger.support import Fleet, at, eviction

MACHINES = [f"m{number}" for number in range(5)]
JOBS = ["a", "b"]
machine_ids = st.sampled_from(MACHINES)
several = st.lists(machine_ids, max_size=3).map(tuple)
jobs = st.sampled_from(JOBS)


class LedgerLife(RuleBasedStateMachine):
    """Two jobs and five machines; what was promised once is remembered and asked again."""

    def __init__(self, ledger: Ledger, policy: PolicySnapshot) -> None:
        super().__init__()
        self.ledger = ledger
        self.fleet = Fleet(ledger, policy)
        self.opened: list[tuple[m.OpenRun, m.OpenedRun]] = []
        self.evictions: list[tuple[m.EvictMachines, m.EvictedMachines]] = []
        self.generations: dict[str, int] = dict.fromkeys(JOBS, 0)
        self.ended: set[str] = set()
        self.told_evicted: set[str] = set()
        self.fleet.machines(*MACHINES)
        for job in JOBS:
            self.fleet.job(job)

    def teardown(self) -> None:
        self.ledger.close()

    @rule(job=jobs, needed=st.integers(1, 4), keep=several, avoid=several)
    def open_run(
        self, job: str, needed: int, keep: tuple[str, ...], avoid: tuple[str, ...]
    ) -> None:
        request = self.fleet.request(job, machines_needed=needed, keep=keep, avoid=avoid)
        before = {row.machine_id: row for row in self.ledger.machines()}
        if job in self.ended:
            with pytest.raises(LedgerConflict):
                self.ledger.open_run(request)
            return
        answer = self.ledger.open_run(request)
        self.opened.append((request, answer))
        if answer.shortfall:
            assert not answer.machines
            return
        assert answer.generation == self.generations[job] + 1
        self.generations[job] = answer.generation
        chosen = [ref.machine_id for ref in answer.machines]
        assert len(set(chosen)) == needed
        for machine_id in chosen:
            assert before[machine_id].state is not MachineState.EVICTED
            assert before[machine_id].job_id in (None, job)
            assert machine_id not in avoid
            assert machine_id not in self.told_evicted, "its agent refuses to start"
        assert {name for name, holder in self.fleet.holders().items() if holder == job} == set(
            chosen
        )

    @rule(job=jobs, back=st.integers(0, 2), release=st.booleans())
    def close_run(self, job: str, back: int, release: bool) -> None:
        generation = self.generations[job] - back
        if generation >= 1:
            self.fleet.close(f"{job}.{generation}", RunOutcome.FAILED, release=release)

    @rule(job=jobs, machines=several, step=st.integers(1, 2), behind=st.integers(0, 1))
    def evict(self, job: str, machines: tuple[str, ...], step: int, behind: int) -> None:
        request = eviction(
            *machines,
            job_id=job,
            incident_id=f"{job}-1",
            step=step,
            generation=self.generations[job] - behind,
        )
        before = {row.machine_id: row.state for row in self.ledger.machines()}
        answer = self.ledger.evict(request)
        self.evictions.append((request, answer))
        assert set(answer.evicted) | set(answer.already) == set(machines)
        after = {row.machine_id: row.state for row in self.ledger.machines()}
        changed = {name for name in after if before[name] != after[name]}
        assert changed <= set(answer.evicted)
        if behind and self.generations[job]:
            assert not changed, "a decision about an older run took a machine out"

    @rule(machine_id=machine_ids)
    def release(self, machine_id: str) -> None:
        was = self.fleet.state(machine_id) == MachineState.EVICTED
        assert self.ledger.release(machine_id, reason="r", by="b", now=at(99)) is was
        assert self.fleet.state(machine_id) != MachineState.EVICTED

    @rule(job=jobs, phase=st.sampled_from(sorted(FINAL_PHASES)))
    def end_job(self, job: str, phase: JobPhase) -> None:
        if self.generations[job] >= 2:  # not before the story is worth it
            self.fleet.end(job, phase)
            self.ended.add(job)

    @rule(data=st.data())
    def repeat_a_request(self, data: st.DataObject) -> None:
        """What was answered before is answered the same, and changes nothing."""
        before = self.ledger.machines(), [self.ledger.runs(job) for job in JOBS]
        if self.opened:
            request, answer = data.draw(st.sampled_from(self.opened))
            assert self.ledger.open_run(request) == answer
        if self.evictions:
            eviction_, evicted = data.draw(st.sampled_from(self.evictions))
            assert self.ledger.evict(eviction_) == evicted
        assert before == (self.ledger.machines(), [self.ledger.runs(job) for job in JOBS])

    @rule(machine_id=machine_ids, job=jobs, generation=st.integers(1, 4))
    def come_back_with_ranks(self, machine_id: str, job: str, generation: int) -> None:
        """A machine may go on only with the run that is open and holds it."""
        standing = self.fleet.machine(machine_id, jobs={job: generation})
        assert standing.evicted is (self.fleet.state(machine_id) == MachineState.EVICTED)
        (self.told_evicted.add if standing.evicted else self.told_evicted.discard)(machine_id)
        fence = standing.fences.get(job)
        if self.generations[job] == 0:
            assert fence is None
            return
        run = self.ledger.runs(job)[-1]
        row = next(row for row in self.ledger.machines() if row.machine_id == machine_id)
        rightful = run.closed_at is None and row.run_id == run.run_id
        assert fence == (run.generation if rightful else run.generation + 1)

    @invariant()
    def promises_hold(self) -> None:
        for row in self.ledger.machines():
            assert not (row.blocked_at is not None and row.run_id is not None)
            assert row.job_id not in self.ended
        for job in JOBS:
            runs = self.ledger.runs(job)
            assert [run.generation for run in runs] == list(range(1, len(runs) + 1))
            assert sum(run.closed_at is None for run in runs) <= 1
            live = self.ledger.live_run(job)
            assert (live.generation if live else None) == next(
                (run.generation for run in runs if run.closed_at is None), None
            )


def _run(fresh: Callable[[], Ledger], policy: PolicySnapshot, examples: int) -> None:
    class Life(LedgerLife):
        def __init__(self) -> None:
            super().__init__(fresh(), policy)

    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_life_on_sqlite(tmp_path: Path, migrated_file: Path, policy: PolicySnapshot) -> None:
    lives = iter(range(10**6))

    def fresh() -> Ledger:
        path = tmp_path / f"{next(lives)}.db"
        shutil.copyfile(migrated_file, path)
        return Ledger(f"sqlite:///{path}")

    _run(fresh, policy, 15)


@pytest.mark.slow
@pytest.mark.postgres
def test_life_on_postgres(postgres: PostgresServer, policy: PolicySnapshot) -> None:
    def fresh() -> Ledger:
        postgres.empty(MIGRATED, [table.name for table in Table.metadata.sorted_tables])
        return Ledger(postgres.url(MIGRATED))

    _run(fresh, policy, 8)
