"""Which probes an agent runs: all of its machine, some by name, or none, and a site's own.

Several agents on one host (``everstep up``) would all report the one host's condition as their own
machine's, and all of them be evicted for it; so they run none of the host's probes unless told to.

Not here: the probes (``everstep.machine.probes``), running them (``everstep.machine.probing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from everstep.errors import ConfigurationProblem
from everstep.machine.probes.base import Probe
from everstep.machine.probes.catalogue import Surroundings, probes_of_machine
from everstep.machine.probes.site import SiteProbe
from everstep.machine.probing import MakeProbes
from everstep.machine.run_places import RunPlaces
from everstep.spec.policy import ProbesPolicy

ALL, NONE = "all", "none"


class ProbeChoice(BaseModel):
    """What the agent's flags say about probes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    probes: tuple[str, ...] = (ALL,)
    """``all``, ``none``, or names of probes."""
    kernel_log: Path | None = None
    """A file to follow in the place of the kernel's own log."""
    site_checks: Path | None = None
    """Folder of a site's own checks."""
    own_folder: Path | None = None
    """A folder of the agent's own: its disk is looked at too, and written to."""


def maker(choice: ProbeChoice, places: RunPlaces) -> MakeProbes:
    """How this agent makes its probes under a policy."""

    def make(policy: ProbesPolicy) -> Sequence[Probe]:
        return probes_of(choice, policy, places)

    return make


def probes_of(choice: ProbeChoice, policy: ProbesPolicy, places: RunPlaces) -> list[Probe]:
    """The probes that were chosen.

    Raises:
        ConfigurationProblem: a name is none of a probe.
    """
    found: list[Probe] = []
    if choice.site_checks is not None:
        found.append(SiteProbe(choice.site_checks))
    if choice.probes == (NONE,):
        return found
    known = _of_machine(choice, policy, places)
    if choice.probes == (ALL,):
        return found + known
    wanted = set(choice.probes)
    unknown = sorted(wanted - {probe.name for probe in known})
    if unknown:
        names = ", ".join(sorted(probe.name for probe in known))
        raise ConfigurationProblem(
            f"--probes {unknown[0]}: there is no such probe; accepted here: all, none, {names}"
        )
    for probe in known:
        if probe.name in wanted:
            found.append(probe)
        else:
            probe.close()
    return found


def _of_machine(choice: ProbeChoice, policy: ProbesPolicy, places: RunPlaces) -> list[Probe]:
    if choice.kernel_log is not None:
        policy = policy.model_copy(update={"kernel_log": str(choice.kernel_log.absolute())})
    around = Surroundings(
        paths=places.paths,
        pids=places.pids,
        cgroups=places.cgroups,
        teardowns=places.teardowns,
        gpu_pids=lambda: set(places.pids()),
        own_folder=choice.own_folder,
        boot_id_file=choice.own_folder / "boot_id" if choice.own_folder else None,
    )
    return probes_of_machine(policy, around)
