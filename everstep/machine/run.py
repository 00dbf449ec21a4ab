"""One run on this machine as the agent sees it: what happened to its ranks, and its end.

The run's own task is to notice and to say so once. Exits come from ``processes``, at once; progress
from the monitor, ten times a second. After the first failed rank it waits for the settle window, so
that the others can fail by themselves and leave their evidence, and then ends the rest without
asking anybody.

Not here: which runs there are (``runs``), and how a run is described to others (``report``).
"""

from __future__ import annotations

import asyncio
import math
import time

from everstep.machine.facts import Evidence, FactsFile, Stopping
from everstep.machine.folder import RankExit, RunFolder, RunRecord
from everstep.machine.logtail import RankLog, within
from everstep.machine.monitor import NS, Observed, RunMonitor
from everstep.machine.proc import Scope, boot_id
from everstep.machine.processes import RESOLVE_MAX_S, Listener, RunProcesses
from everstep.machine.reporter import REASON_MAX, Emit, Reporter
from everstep.machine.senses import Senses
from everstep.machine.stacks.evidence import StackEvidence
from everstep.machine.stacks.of_run import stack_target
from everstep.machine.teardown import Teardown
from everstep.spec.agent_api import EventKind

_LOG_BYTES_IN_EVENT = 900
_RANKS_NAMED_MAX = 64
_UNCLEAN_WAIT_S = 0.5


class Run:
    """A run whose shim has been started, by us or by an agent before us."""

    def __init__(self, folder: RunFolder, record: RunRecord, emit: Emit) -> None:
        self.folder = folder
        self.record = record
        self.reporter = Reporter(record, FactsFile(folder.facts), emit)
        self.facts = self.reporter.facts
        self.exits: dict[int, RankExit] = {}
        self.same_boot = record.boot_id == boot_id()
        self.processes = RunProcesses(
            folder,
            Listener(
                exited=self._exited,
                lost=self._lost,
                all_gone=self._all_gone,
                shim_lost=self._shim_lost,
            ),
        )
        self.monitor: RunMonitor
        self._senses = Senses(folder, record)
        self.stacks = StackEvidence(folder.stacks_taken)
        self.logs = {rank: RankLog(folder.log(rank), folder.error(rank)) for rank in record.ranks}
        self._settle_timer: asyncio.TimerHandle | None = None
        self._teardown: Teardown | None = None
        self._grace_max_s = math.inf
        """Of the teardown that is going on or about to begin: what a later stop has asked for."""
        self._winding: asyncio.Task[None] | None = None
        self.torn_down_s: tuple[float, float] | None = None
        """From when until when we have ended its ranks; until is infinity while that goes on."""

    # --- taking over ---------------------------------------------------------------------------

    def attach(self, *, fresh: bool) -> None:
        """Find the run's processes and follow them; ``fresh`` when this agent has started them."""
        self.processes.attach(
            same_boot=self.same_boot,
            shim_lost=self.facts.shim_lost,
            settled=self.facts.unknown_exits,
        )
        self.monitor = RunMonitor(
            policy=self.record.plan.policy,
            ranks=self.record.ranks,
            started_ns=min(
                (start.started_ns for start in self.processes.starts.values()),
                default=self.record.created_ns,
            ),
            facts=self.facts,
        )
        self._senses.follow_logs(fresh=fresh)
        if self.facts.ended:
            self._remember_the_end()
            return
        # First of all events, also where a rank has ended already.
        if fresh:
            self._announce_start()
        else:
            self._announce_adoption()
        self.processes.collect()
        if self.facts.stopping is not None:
            self._begin_wind_down("an earlier agent had begun to stop this run", planned=False)

    def _remember_the_end(self) -> None:
        records = self.folder.read_exits()
        self.exits = {r: e for r, e in records.items() if r not in self.facts.unknown_exits}
        self._senses.look(self.monitor, 0, (), judged=(), process_state=lambda _: None)
        self.processes.detach()
        self._senses.close()

    def _announce_start(self) -> None:
        ranks = len(self.processes.starts)
        self.reporter.emit(
            EventKind.RUN_STARTED,
            reason=f"{ranks} ranks started ({self.record.plan.start_reason})",
            data={"ranks": ranks},
        )

    def _announce_adoption(self) -> None:
        live = self.processes.live
        recorded = self.folder.read_exits()
        unrecorded = [rank for rank in self.processes.starts if rank not in recorded]
        if unrecorded and not live and not self.processes.shim_alive:
            return  # what there is to say is that it vanished
        self.facts.adopted_total += 1
        self.reporter.save()
        self.reporter.emit(
            EventKind.RUN_ADOPTED,
            reason=f"{len(live)} of {len(self.record.ranks)} ranks are alive",
            data={"live_ranks": len(live), "adopted_total": self.facts.adopted_total},
        )

    def detach(self) -> None:
        """Stop following; the ranks are left alone."""
        if self._settle_timer is not None:
            self._settle_timer.cancel()
        if self._winding is not None:
            self._winding.cancel()
        self.processes.detach()
        self._senses.close()

    # --- what is known -------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether anything of the run may still be there."""
        return not self.facts.ended

    @property
    def succeeded(self) -> bool:
        """Whether every rank has ended with 0 by itself."""
        return all(
            (ended := self.exits.get(rank)) is not None
            and ended.code == 0
            and not self.stopped_by_us(rank)
            for rank in self.record.ranks
        )

    def stopped_by_us(self, rank: int) -> bool:
        """Whether the rank was alive when we began to stop the run."""
        stopping = self.facts.stopping
        return stopping is not None and rank in stopping.ranks

    def process_state(self, rank: int) -> str | None:
        """State letter of a live rank."""
        progress = self.monitor.progress(rank)
        return self.processes.process_state(rank, progress.pid if progress is not None else None)

    @property
    def settling(self) -> bool:
        """Whether a rank has failed, and the others may yet fail by themselves."""
        return self._settle_timer is not None and self._winding is None

    def _is_failure(self, rank: int) -> bool:
        ended = self.exits.get(rank)
        if ended is not None:
            return ended.code != 0
        progress = self.monitor.progress(rank)
        # Nobody knows how it ended. If it had said that it was done, that is no failure.
        return progress is None or not progress.finished

    # --- exits ---------------------------------------------------------------------------------

    def _exited(self, ended: RankExit) -> None:
        rank = ended.rank
        self.exits[rank] = ended
        now_ns = time.monotonic_ns()
        self._observe(now_ns)
        if self.stopped_by_us(rank):
            return
        evidence = self._evidence(rank, now_ns)
        if evidence != Evidence():
            self.facts.exit_evidence[rank] = evidence
        how = f"signal {ended.signal}" if ended.code is None else f"exit code {ended.code}"
        self._report_exit(rank, ended, f"ended with {how}")
        if self._is_failure(rank):
            self._settle(ended.at_ns)

    def _lost(self, ranks: list[int], together: bool) -> None:
        now_ns = time.monotonic_ns()
        self._observe(now_ns)
        for rank in ranks:
            self.facts.unknown_exits.setdefault(rank, now_ns)
        by_itself = [rank for rank in ranks if not self.stopped_by_us(rank)]
        if by_itself and together:
            self.reporter.emit(
                EventKind.PROCESSES_VANISHED,
                reason="shim and ranks are gone without a record of their exit",
                data={"ranks": by_itself[:_RANKS_NAMED_MAX], "ranks_total": len(by_itself)},
            )
            self.facts.vanished = True
        elif not together:
            for rank in by_itself:
                self._report_exit(rank, None, "ended; how is unknown, since its shim was killed")
        self.reporter.save()
        if any(self._is_failure(rank) for rank in by_itself):
            self._settle(now_ns)

    def _shim_lost(self) -> None:
        self.facts.shim_lost = True
        self.reporter.save()
        self.reporter.note("the shim was killed: how its ranks end will not be known")

    def _report_exit(self, rank: int, ended: RankExit | None, reason: str) -> None:
        if rank in self.facts.exits_reported:
            return
        log_class, lines = self.logs[rank].says()
        progress = self.monitor.progress(rank)
        self.reporter.emit(
            EventKind.RANK_EXITED,
            rank=rank,
            reason=reason,
            data={
                "exit_code": ended.code if ended is not None else None,
                "signal": ended.signal if ended is not None else None,
                "log_class": log_class.value,
                "log_lines": list(within(lines, _LOG_BYTES_IN_EVENT)),
                "step": progress.step if progress is not None else None,
            },
            at_ns=ended.at_ns if ended is not None and self.same_boot else None,
        )
        self.facts.exits_reported.append(rank)
        self.reporter.save()

    def _settle(self, failed_at_ns: int) -> None:
        if self._settle_timer is not None or self._winding is not None:
            return
        gone_s = max(0, time.monotonic_ns() - failed_at_ns) / NS
        self._settle_timer = asyncio.get_running_loop().call_later(
            max(0.0, self.record.plan.policy.settle_window_s - gone_s),
            lambda: self._begin_wind_down("a rank failed", planned=False),
        )

    # --- progress ------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Look at progress; called about ten times a second while the run is live."""
        if self.processes.handles:
            self._observe(now_ns)
            if self._winding is None:
                self._tell(self._senses.traffic(self.monitor, now_ns))
            self._check_exit_skew(now_ns)

    def _observe(self, now_ns: int) -> None:
        handles = self.processes.handles
        # Once the end has begun, silence is expected.
        judged = () if self._winding is not None else tuple(handles)
        self._tell(
            self._senses.look(
                self.monitor, now_ns, handles, judged=judged, process_state=self.process_state
            )
        )

    def _tell(self, facts: list[Observed]) -> None:
        for fact in facts:
            self.reporter.emit(
                fact.kind, rank=fact.rank, reason=fact.reason, data=fact.data, at_ns=fact.at_ns
            )
        if self.monitor.changed:
            self.monitor.changed = False
            self.reporter.save()

    def _check_exit_skew(self, now_ns: int) -> None:
        done = [e for e in self.exits.values() if e.code == 0 and not self.stopped_by_us(e.rank)]
        if not done or self.facts.early_exit_reported or self._winding is not None:
            return
        first = min(done, key=lambda e: e.at_ns)
        waited_s = (now_ns - first.at_ns) / NS
        if waited_s > self.record.plan.policy.exit_skew_max_s:
            running = list(self.processes.live)
            self.reporter.emit(
                EventKind.EARLY_EXIT,
                rank=first.rank,
                reason=f"ended with 0; {len(running)} local ranks still run {waited_s:.1f} s later",
                data={"waited_s": round(waited_s, 3), "running": running[:_RANKS_NAMED_MAX]},
            )
            self.facts.early_exit_reported = True
            self.reporter.save()

    # --- the end -------------------------------------------------------------------------------

    async def stop(self, *, reason: str, grace_s: float, kill_wait_s: float, planned: bool) -> None:
        """End the run, verified; joins a teardown that is going on, repeats one that failed."""
        was_over = self.facts.ended
        if self._winding is not None and not self._winding.done():
            self._hasten(grace_s)
        again = False
        while not self.facts.ended or not self.facts.teardown_clean:
            fresh = self._winding is None or again
            await asyncio.shield(
                self._begin_wind_down(
                    reason, planned=planned, grace_s=grace_s, kill_wait_s=kill_wait_s, again=again
                )
            )
            if fresh:
                break
            again = True
        if not was_over:
            self.reporter.emit(
                EventKind.RUN_STOPPED,
                reason=reason,
                data={
                    "teardown_clean": self.facts.teardown_clean,
                    "planned": planned,
                    "note": self.facts.note[:REASON_MAX],
                },
            )

    def _hasten(self, grace_s: float) -> None:
        """Shorten the teardown that goes on, or is about to begin."""
        self._grace_max_s = min(self._grace_max_s, grace_s)
        if self._teardown is not None:
            self._teardown.hasten(grace_s)

    def _all_gone(self) -> None:
        self._begin_wind_down("every rank has ended", planned=False)

    def _begin_wind_down(
        self,
        reason: str,
        *,
        planned: bool,
        grace_s: float | None = None,
        kill_wait_s: float | None = None,
        again: bool = False,
    ) -> asyncio.Task[None]:
        if self._winding is None or again:
            policy = self.record.plan.policy
            self._teardown, self._grace_max_s = None, math.inf
            self._winding = asyncio.get_running_loop().create_task(
                self._wind_down(
                    reason,
                    planned=planned,
                    grace_s=policy.failure_grace_s if grace_s is None else grace_s,
                    kill_wait_s=policy.kill_wait_s if kill_wait_s is None else kill_wait_s,
                )
            )
            self._winding.add_done_callback(self._wound_down)
        return self._winding

    def _wound_down(self, task: asyncio.Task[None]) -> None:
        if self.torn_down_s is not None:
            self.torn_down_s = (self.torn_down_s[0], time.monotonic())
        if not task.cancelled() and (error := task.exception()) is not None:
            self.reporter.note("teardown failed", error=repr(error))

    async def _wind_down(
        self, reason: str, *, planned: bool, grace_s: float, kill_wait_s: float
    ) -> None:
        self._note_stopping(reason, planned=planned)
        if self.stacks.wanted(self.facts.stopping):
            await self.stacks.take(lambda: stack_target(self))
        if self.facts.stopping is not None:  # else all have ended by themselves
            self.torn_down_s = (time.monotonic(), math.inf)
        self._teardown = Teardown(
            self.scope,
            self.processes.handles,
            grace_s=min(grace_s, self._grace_max_s),
            kill_wait_s=kill_wait_s,
        )
        result = await self._teardown.run()
        self.facts.teardown_clean, self.facts.note = result.clean, result.note
        self.reporter.save()
        if not self.processes.starts:
            self.processes.resolved.set()
        try:
            # Exits of ranks that are gone come at once; one that cannot be ended never comes.
            limit_s = RESOLVE_MAX_S if result.clean else _UNCLEAN_WAIT_S
            await asyncio.wait_for(self.processes.resolved.wait(), limit_s)
        except TimeoutError:
            self.reporter.note("ranks could not be ended", details=result.note)
            return
        await self.processes.end_shim(by_force=result.clean)
        if not self.facts.ended:
            self._report_end()

    def _note_stopping(self, reason: str, *, planned: bool) -> None:
        """Evidence first: what the ranks looked like when we began to end them."""
        live = self.processes.live
        if not live or self.facts.stopping is not None:
            return
        now_ns = time.monotonic_ns()
        self._observe(now_ns)
        self.facts.stopping = Stopping(
            reason=reason[:REASON_MAX],
            planned=planned,
            ranks=list(live),
            evidence={rank: self._evidence(rank, now_ns) for rank in live},
        )
        self.reporter.save()
        if planned:
            self.reporter.emit(EventKind.PLANNED_STOP, reason=reason)

    def _evidence(self, rank: int, now_ns: int) -> Evidence:
        progress = self.monitor.progress(rank)
        return Evidence(
            process_state=self.process_state(rank),
            stalled_for_s=self.monitor.stalled_for_s(rank, now_ns),
            section=progress.section if progress is not None else None,
        )

    @property
    def scope(self) -> Scope:
        """What may be ended in this run's name."""
        starts = self.processes.starts.values()
        leaders = {s.pid: s.start_ticks for s in starts} if self.same_boot else {}
        return Scope(mark=self.record.mark, leaders=leaders, shim=self.processes.shim_name)

    def _report_end(self) -> None:
        self._observe(time.monotonic_ns())
        self.reporter.emit(
            EventKind.RUN_ENDED,
            reason="every rank has ended with 0" if self.succeeded else "no rank is left",
            data={"succeeded": self.succeeded, "teardown_clean": self.facts.teardown_clean},
        )
        self.facts.ended = True
        self.reporter.save()
        self._senses.close()
