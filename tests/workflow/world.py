"""A fleet in memory: every activity of the contracts, scripted, for workflow tests.

It keeps the invariants the real ledger keeps (one open run, one lease a machine, evicted stays
evicted) and counts what was done, so that tests assert effects and not calls. Faults are scripted
as what a watch reports for each run; a script that was not used up fails the test (``unused``).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from temporalio import activity

from everstep.decide.attribution import Finding, MachineReport, RankReport, attribute
from everstep.decide.restore import CheckpointId, LineageEntry, newest_restorable
from everstep.decide.words import LogClass, RankState, Verdict
from everstep.spec import messages as m
from everstep.spec.agent_api import EventKind, RestorePointPlan
from everstep.spec.policy import Policy, PolicySnapshot

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Say:
    """One answer of a watch: what it reports, after how much (virtual) time."""

    kind: str
    step: int | None = None
    observations: tuple[m.ObservationRecord, ...] = ()
    after_s: float = 0.0


@dataclass
class Script:
    """What happens in one run."""

    watches: list[Say] = field(default_factory=list)
    """What its watches report, one after another."""
    ranks: dict[int, RankReport] = field(default_factory=dict)
    """Reports of ranks at the stop; the others were running and are stopped by us."""
    unreachable: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)
    teardown_dirty: frozenset[str] = frozenset()
    shards: dict[int, list[Say]] = field(default_factory=dict)
    """The same for each shard of a large job, by its first group rank."""

    def says(self, request: m.WatchRun) -> list[Say]:
        """What the watch of a shard has still to report."""
        return self.shards.get(request.machines[0].group_rank, self.watches)


def exited(
    rank: int,
    *,
    exit_code: int | None = None,
    signal: int | None = None,
    log_class: LogClass = LogClass.SILENT,
    line: str = "",
    step: int | None = None,
    **more: object,
) -> RankReport:
    """A rank that ended by itself."""
    return RankReport(
        rank=rank,
        machine_id="?",
        state=RankState.EXITED,
        exit_code=exit_code,
        signal=signal,
        log_class=log_class,
        log_lines=(line,) if line else (),
        step=step,
        **more,  # type: ignore[arg-type]
    )


def rank_exit(rank: int, reason: str = "exited") -> m.ObservationRecord:
    """What a watch says about a failed rank."""
    return m.ObservationRecord(
        kind=EventKind.RANK_EXITED,
        verdict=Verdict.FAULTY,
        machine_id=None,
        rank=rank,
        reason=reason,
    )


class World:
    """The fake fleet."""

    def __init__(self, policy: Policy, *, machines: int = 4, ranks_per_machine: int = 2) -> None:
        self.policy = PolicySnapshot(policy=policy, hash="p1", source="test")
        self.ranks_per_machine = ranks_per_machine
        self.idle = [f"m{i}" for i in range(1, machines + 1)]
        self.leased: list[str] = []
        self.blocked: dict[str, str] = {}
        self.scripts: dict[int, Script] = {}
        self.checkpoints: dict[int, int] = {}
        """Step of the checkpoint that each generation left behind."""
        self.lineage: list[LineageEntry] = []
        self.choices: list[m.ChooseRestorePoint] = []
        self.no_port: set[int] = set()
        """Generations whose first machine cannot be reached for a port, once each."""
        self.generation = 0
        self.live_run: m.LiveRun | None = None
        self.problem: str | None = None
        self.counts: dict[str, int] = defaultdict(int)
        self.started: list[m.StartRanks] = []
        self.stopped: list[m.StopRanks] = []
        self.evictions: list[m.EvictMachines] = []
        self.incidents: dict[str, m.RecordIncident] = {}
        self.closed_incidents: list[m.CloseIncident] = []
        self.closed_jobs: list[m.CloseJob] = []
        self.phases: list[m.RecordPhase] = []
        self.notes: list[m.Notify] = []
        self.running: set[int] = set()
        self.answers: dict[str, m.OpenedRun] = {}
        self.held_watches = 0
        self.on_stop: Callable[[m.StopRanks], None] | None = None
        self.gates: dict[str, asyncio.Event] = {}
        """Activities that wait before they do anything; ``watch_end``: watches that were told to
        end, before they do."""
        self.slow = m.FoundSlowRanks()
        """What a look at the stacks of a slow run finds."""
        self.failing: dict[str, str] = {}
        """Activities that fail for good, and why (``conftest.OnlyMine``)."""

    def activities(self) -> list[Callable[..., object]]:
        """All implementations, for a worker."""
        return [
            getattr(self, name)
            for name in dir(self)
            if hasattr(getattr(self, name), "__temporal_activity_definition")
        ]

    def unused(self) -> list[str]:
        """Scripted events that never happened."""
        return [
            f"run {g}: {say.kind}"
            for g, s in self.scripts.items()
            for says in (s.watches, *s.shards.values())
            for say in says
        ]

    async def _pass(self, name: str) -> None:
        """Count the call, and wait where the test wants that."""
        self.counts[name] += 1
        if name in self.gates:
            while not self.gates[name].is_set():
                activity.heartbeat()
                await asyncio.sleep(0.05)

    # --- launch

    @activity.defn
    async def register_job(self, request: m.RegisterJob) -> m.RegisteredJob:
        self.counts["register_job"] += 1
        return m.RegisteredJob(
            policy=self.policy, live_run=self.live_run, created_at=EPOCH, problem=self.problem
        )

    @activity.defn
    async def open_run(self, request: m.OpenRun) -> m.OpenedRun:
        self.counts["open_run"] += 1
        if request.request_key in self.answers:
            return self.answers[request.request_key]
        keep: list[str | None] = [k if k not in self.blocked else None for k in request.keep]
        keep += [None] * (request.machines_needed - len(keep))
        free = [i for i in sorted(self.idle) if i not in request.avoid and i not in self.blocked]
        missing = keep.count(None)
        if len(free) < missing:
            return m.OpenedRun(shortfall=missing - len(free))
        chosen = [k if k is not None else free.pop(0) for k in keep]
        for machine in chosen:
            if machine in self.idle:
                self.idle.remove(machine)
        self.leased = chosen
        self.generation += 1
        opened = m.OpenedRun(
            run_id=f"job/{self.generation}",
            generation=self.generation,
            machines=tuple(
                m.MachineRef(machine_id=c, address="127.0.0.1", group_rank=i)
                for i, c in enumerate(chosen)
            ),
        )
        self.answers[request.request_key] = opened
        return opened

    @activity.defn
    async def prepare_run(self, request: m.PrepareRunInput) -> m.PreparedRunResult:
        if request.generation in self.no_port:
            self.no_port.discard(request.generation)
            return m.PreparedRunResult(
                master_addr="", master_port=0, unreachable="no answer in 5 s"
            )
        return m.PreparedRunResult(master_addr="127.0.0.1", master_port=20000 + request.generation)

    @activity.defn
    async def start_ranks(self, request: m.StartRanks) -> m.StartedRanks:
        await self._pass("start_ranks")
        self.started.append(request)
        script = self.scripts.get(request.generation, Script())
        started = tuple(
            r.machine_id for r in request.machines if r.machine_id not in script.refused
        )
        assert not (set(started) & set(self.blocked)), "a blocked machine was started"
        assert self.running <= {request.generation}, "two runs at once"
        self.running.add(request.generation)
        return m.StartedRanks(started=started, refused=script.refused)

    @activity.defn
    async def stop_ranks(self, request: m.StopRanks) -> m.StoppedRanks:
        await self._pass("stop_ranks")
        self.stopped.append(request)
        self.running.discard(request.generation)
        if self.on_stop:
            self.on_stop(request)
        script = self.scripts.get(request.generation, Script())
        return m.StoppedRanks(reports=tuple(self._report(ref, script) for ref in request.machines))

    def _report(self, ref: m.MachineRef, script: Script) -> MachineReport:
        if ref.machine_id in script.unreachable:
            return MachineReport(machine_id=ref.machine_id, reachable=False, note="refused")
        first = ref.group_rank * self.ranks_per_machine
        ranks = []
        for rank in range(first, first + self.ranks_per_machine):
            given = script.ranks.get(rank)
            if given is None:
                given = RankReport(
                    rank=rank, machine_id="?", state=RankState.EXITED, signal=15, stopped_by_us=True
                )
            values = {f: getattr(given, f) for f in RankReport.__slots__}
            ranks.append(RankReport(**{**values, "machine_id": ref.machine_id}))
        return MachineReport(
            machine_id=ref.machine_id,
            reachable=True,
            teardown_clean=ref.machine_id not in script.teardown_dirty,
            ranks=tuple(ranks),
        )

    @activity.defn
    async def close_run(self, request: m.CloseRun) -> m.Done:
        self.counts[f"close_run:{request.outcome}"] += 1
        return m.Done()

    @activity.defn
    async def close_job(self, request: m.CloseJob) -> m.Done:
        await self._pass("close_job")
        self.closed_jobs.append(request)
        self.idle += [x for x in self.leased if x not in self.blocked]
        self.leased = []
        return m.Done()

    # --- detection and the rest

    @activity.defn
    async def watch_run(self, request: m.WatchRun) -> m.WatchResult:
        self.counts["watch_run"] += 1
        script = self.scripts.get(request.generation)
        cursors = {ref.machine_id: f"ring:{self.counts['watch_run']}" for ref in request.machines}
        says = script.says(request) if script is not None else []
        say = says.pop(0) if says else Say("hold")
        if say.kind == "hold":
            self.held_watches += 1
            try:
                while True:
                    activity.heartbeat()
                    await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                await self._pass("watch_end")
                return m.WatchResult(
                    kind="cancelled", cursors=cursors, progress=m.Progress(step=say.step)
                )
        if say.after_s:
            await asyncio.sleep(say.after_s)
        if say.kind == "succeeded":
            self.running.discard(request.generation)
        return m.WatchResult.model_validate(
            {
                "kind": say.kind,
                "observations": [o.model_dump() for o in say.observations],
                "cursors": cursors,
                "progress": {"step": say.step},
            }
        )

    @activity.defn
    async def confirm_machines(self, request: m.ConfirmMachines) -> m.ConfirmedMachines:
        await self._pass("confirm_machines")
        self.running.discard(request.generation)  # who answers is stopped
        script = self.scripts.get(request.generation, Script())
        return m.ConfirmedMachines(
            reports=tuple(
                MachineReport(machine_id=ref.machine_id, reachable=False, lost=True)
                if ref.machine_id in script.lost
                else self._report(ref, Script(ranks=script.ranks))
                for ref in request.machines
            )
        )

    @activity.defn
    async def diagnose_run(self, request: m.DiagnoseRun) -> m.DiagnosedRun:
        await self._pass("diagnose_run")
        finding: Finding = attribute(
            request.reports,
            triggers=[observation.as_trigger() for observation in request.observations],
        )
        return m.DiagnosedRun(finding=finding, evidence=("looked closer",))

    @activity.defn
    async def find_slow_ranks(self, request: m.FindSlowRanks) -> m.FoundSlowRanks:
        await self._pass("find_slow_ranks")
        assert request.generation == self.generation
        return self.slow

    @activity.defn
    async def evict_machines(self, request: m.EvictMachines) -> m.EvictedMachines:
        self.evictions.append(request)
        for machine in request.machines:
            self.blocked[machine] = request.incident_id
            if machine in self.leased:
                self.leased.remove(machine)
        return m.EvictedMachines(evicted=request.machines)

    @activity.defn
    async def materialise_code(self, request: m.MaterialiseCodeInput) -> m.MaterialisedCodeResult:
        await self._pass("materialise_code")
        return m.MaterialisedCodeResult(
            code_version=request.code_version or "dir-1", path="/code/dir-1"
        )

    @activity.defn
    async def choose_restore_point(self, request: m.ChooseRestorePoint) -> m.RestorePoint:
        self.choices.append(request)
        newest = newest_restorable(
            (
                CheckpointId(step=step, generation=generation)
                for generation, step in self.checkpoints.items()
            ),
            self.lineage,
            before_step=request.before_step,
        )
        self.lineage.append(LineageEntry(generation=request.generation, restored=newest))
        if newest is None:
            return m.RestorePoint(checkpoint_dir="/ckpt")
        return m.RestorePoint(
            restore=RestorePointPlan(
                step=newest.step, generation=newest.generation, path=f"/ckpt/{newest.step}"
            ),
            checkpoint_dir="/ckpt",
        )

    @activity.defn
    async def record_progress(self, request: m.RecordProgress) -> m.Done:
        self.phases += request.phases
        return m.Done()

    @activity.defn
    async def record_incident(self, request: m.RecordIncident) -> m.Done:
        self.counts["record_incident"] += 1
        self.incidents[f"{request.incident_id}-r{request.round_number}"] = request
        return m.Done()

    @activity.defn
    async def close_incident(self, request: m.CloseIncident) -> m.Done:
        self.closed_incidents.append(request)
        return m.Done()

    @activity.defn
    async def read_policy(self, request: m.ReadPolicy) -> PolicySnapshot:
        return self.policy

    @activity.defn
    async def notify(self, request: m.Notify) -> m.Done:
        self.notes.append(request)
        return m.Done()
