"""Table 3 of the paper: from a fault to its observation at the controller's side.

Each fault hits a machine of its own: a real agent process with all of its probes and the default
policy, and a reader of its event stream in the way of ``watch_run``. The clock is one process's: it
runs from just before the fault is made to the arrival of the event that tells of it. Faults come at
random instants, one in each part of the probe's interval. All machines run side by side.

Machines with a network are namespaces, which needs root; GPUs are a stand-in for NVIDIA's library
under the real pynvml, which needs a C compiler. What cannot run here says so and has no numbers.

    python benchmarks/bench_detection.py [--repetitions N]
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import common
from benchmarks.detection_cases import CASES, COMPILER, LIMIT_S, NAMESPACES, Case
from tests.support import nvml

PAPER = "paper, with inspection"
END_LIMIT_S = 20.0
APART = (
    *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
    # The first process of a pid namespace has to take in orphans: a shell does.
    *("sh", "-c", '"$@"; exit $?', "sh"),
)
TRIED = "ip link add everstep-a type veth peer name everstep-b && mount -t sysfs sysfs /sys"
REMARKS = (
    (
        "Without inspection the paper names T_timeout (10 min in the table's caption, 30 min in "
        "its text) for every row but high temperature, and T_monitor, without a value, for that."
    ),
    (
        "`evicts`: the first observation is a warning; this is the one that calls for the "
        "machine's eviction: the second alert within five minutes (paper, 3.4) of a NIC or port, "
        "and of high temperature the sixth look in a row (`probes.gpu_slow_looks_min`). A "
        "GPU's or kernel's fault evicts at once; a gateway that does not answer does not by "
        "itself, since it may be the switch (low confidence)."
    ),
    (
        "The paper calls heat a fault when MFU drops with it; here it is one when NVML says that "
        "clocks are lowered for heat and the GPU is hot."
    ),
    (
        "What is polled is seen at the next look, so at worst it takes the interval and the look "
        "itself. For the switch that is 61 s by design: two looks, and the second waits for its "
        "answer until `probes.gateway_deadline` (1 s)."
    ),
    (
        "A driver that hangs is not asked again: one call has a deadline (5 s), and each GPU gets "
        "one every 2 s. So a hang, and a GPU that is lost, need not wait for the interval."
    ),
    (
        "A machine whose only NIC dies can send nothing: what is timed is until the watch takes "
        "its stream for lost (6 s: three heartbeats). 15 s later it counts as lost."
    ),
    "The hang of a rank waits for `detection.hang_min` (60 s); the paper has no row for ranks.",
)


def main() -> int:
    """Measure."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    options = common.arguments(__doc__, repetitions=3, at_least=1)
    load_before, missing = common.load(), _missing()
    cases = [case for case in CASES if case.needs not in missing]
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        if COMPILER not in missing:
            nvml.build(folder)
        _measure(folder, options.repetitions, cases, apart=NAMESPACES not in missing)
        seen = json.loads((folder / "seen.json").read_text(encoding="utf-8"))
    rows = list(_rows(seen))
    common.publish("detection", rows, _notes(rows, seen, missing), load_before=load_before)
    return 0


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)  # through all that has to be cleaned up


def _missing() -> Mapping[str, str]:
    """What this box does not have, with the reason."""
    missing = {}
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        missing[COMPILER] = "there is no C compiler"
    if os.geteuid() != 0:
        missing[NAMESPACES] = "only root can make network namespaces"
    elif shutil.which("unshare") is None or shutil.which("ip") is None:
        missing[NAMESPACES] = "there is no unshare or no ip program"
    else:
        tried = subprocess.run(
            [*APART, "sh", "-c", TRIED], capture_output=True, text=True, check=False
        )
        if tried.returncode:
            missing[NAMESPACES] = f"no network namespaces: {tried.stderr.strip()}"
    return missing


def _measure(folder: Path, repetitions: int, cases: Sequence[Case], *, apart: bool) -> None:
    """Run them, in namespaces that end with their program."""
    argv = [sys.executable, "-m", "benchmarks.detection_cases", str(folder), str(repetitions)]
    process = subprocess.Popen(
        [*(APART if apart else ()), *argv, *(case.name for case in cases)],
        stdin=subprocess.PIPE,
        cwd=common.CHECKOUT,
    )
    try:
        code = process.wait()
    finally:
        assert process.stdin is not None
        process.stdin.close()  # tells it to end
        try:
            process.wait(END_LIMIT_S)
        finally:
            process.kill()
            process.wait()
    if code:
        sys.exit(code)


# --- the result


def _rows(seen: Sequence[Mapping[str, Any]]) -> Iterator[common.Row]:
    """Each case of ours, and below it the paper's."""
    for case in CASES:
        mine = [one for one in seen if one["case"] == case.name]
        system = f"everstep, {case.kind}"
        yield common.row_of(system, case.name, "s", [one["first_s"] for one in mine])
        if case.hint is not None and mine:
            metric = f"{case.name}: first miss"
            yield common.row_of(system, metric, "s", [one["hint_s"] for one in mine])
        if case.evicts_later and mine:
            metric = f"{case.name}: evicts"
            yield common.row_of(system, metric, "s", [one["evict_s"] for one in mine])
        if case.paper_s is not None:
            yield common.row_of(PAPER, case.name, "s", [case.paper_s])


def _notes(
    rows: Sequence[common.Row], seen: Sequence[Mapping[str, Any]], missing: Mapping[str, str]
) -> common.Notes:
    remarks = []
    for case in CASES:
        if case.needs in missing:
            how = f"not run here: {missing[case.needs]}"
        else:
            rules = sorted({one["rule"] for one in seen if one["case"] == case.name} - {""})
            how = f"{case.kind}: {case.made}; told by {', '.join(f'`{r}`' for r in rules)}"
        remarks.append(f"{case.name}, {how}.")
    remarks.append(_beside_the_paper({row.metric: row for row in rows if row.system != PAPER}))
    return common.Notes(
        title="Detection times",
        text="Table 3 of the paper: from a fault to the arrival of the event that tells of it at "
        "the controller's side of the agent's stream. Real agents with all probes and the default "
        "intervals (network 30 s, GPU 10 s, host 2 s); faults at random instants of them.",
        remarks=[*remarks, *REMARKS],
    )


def _beside_the_paper(ours: Mapping[str, common.Row]) -> str:
    slower = []
    for case in CASES:
        row = ours[case.name]
        if case.paper_s is None or row.n == 0 or (row.max or LIMIT_S) <= case.paper_s:
            continue
        worst = "never" if row.max is None else f"{row.max:g} s"
        slower.append(f"{case.name} ({worst} against {case.paper_s:g} s)")
    if slower:
        return f"Slower than the paper at worst: {', '.join(slower)}."
    return "No repetition was slower than the paper."


if __name__ == "__main__":
    sys.exit(main())
