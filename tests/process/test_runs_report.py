"""What belongs into a run's report and what does not: probes' past, and ends that are our doing."""

from __future__ import annotations

from dataclasses import replace

from everstep.decide.reports import Seen
from everstep.decide.words import Symptom
from everstep.machine.health import NoProbes
from tests.process.runs_world import Machine, rank_report, until
from tests.support.observations import XID

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


class Remembers(NoProbes):
    """A machine with a fault that is there, one that has just gone, and one of long ago."""

    def seen(self) -> tuple[Seen, ...]:
        return (
            Seen(observation=XID, age_s=7200.0),
            Seen(observation=replace(XID, rule="xid_48"), age_s=7200.0, cleared_ago_s=0.0),
            Seen(observation=replace(XID, rule="xid_63"), age_s=7200.0, cleared_ago_s=3600.0),
        )


async def test_what_had_gone_before_the_run_began_says_nothing_about_it(machine: Machine) -> None:
    machine.manager = machine.new_manager(health=Remembers())
    await machine.start("mark('ready'); time.sleep(600)")
    await machine.marked("ready")
    rules = [seen.observation.rule for seen in machine.state().report.observations]
    assert rules == ["xid_79", "xid_48"]
    rules = [seen.observation.rule for seen in (await machine.stop()).observations]
    assert rules == ["xid_79", "xid_48"]


async def test_only_who_ended_badly_by_itself_has_suffered_what_its_log_says(
    machine: Machine,
) -> None:
    script = f"""
        print({ECC!r}, flush=True)
        if rank == 0:
            wait("printed")
            sys.exit(1)
        mark("printed"); time.sleep(600)
    """
    await machine.start(script, ranks=2, limits={"settle_window_s": 0.0})
    await until(lambda: machine.state().ended, "the run ends")
    report = machine.state().report
    found = rank_report(report, 0).log_finding
    assert found is not None
    assert found.symptom is Symptom.GPU_MEMORY_ECC
    assert rank_report(report, 1).stopped_by_us
    assert rank_report(report, 1).log_finding is None
