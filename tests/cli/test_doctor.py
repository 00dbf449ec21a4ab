"""``everstep doctor`` on the machine that the tests run on, as it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.commands.doctor import grade, summary
from everstep.commands.doctor_advice import advice
from everstep.decide.words import Action, Symptom
from everstep.machine.probes.host_read import faulty, healthy, unknown
from everstep.machine.probes.runner import Look
from tests.cli.conftest import LIMIT_S, Shell, command
from tests.support.nvml import build

LOST = (
    "[  100.000001] NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, "
    "GPU has fallen off the bus.\n"
)


def by_probe(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in data["observations"]:
        found.setdefault(row["probe"], []).append(row)
    return found


def test_every_probe_looks_once_and_the_answer_fits_together(shell: Shell) -> None:
    quiet = shell.home / "kernel.log"
    quiet.write_text("[    1.000000] Linux version 6.1\n")

    ran = shell.run("doctor", "-o", "json", "--kernel-log", str(quiet))

    data = json.loads(ran.out)
    assert ran.err == ""
    assert ran.code == data["exit_code"] == (data["verdict"] == "faulty")
    rows = by_probe(data)
    here = {"kernel_log", "kernel_state", "oom", "memory", "disk", "load", "hung_tasks"}
    assert here <= set(rows), set(rows)
    for row in data["observations"]:
        assert bool(row["what_to_do"]) == (row["verdict"] != "healthy"), row
        assert row["reason"], row
    assert sum(data["counts"].values()) == len(data["observations"])
    told = {row["probe"] for row in data["not_here"]}
    assert {"rdma", "edac", "link", "gateway"} <= told | set(rows)
    assert all(row["why"] for row in data["not_here"])


def test_the_table_says_the_same_to_a_person(shell: Shell) -> None:
    ran = shell.run("doctor")

    assert ran.code in (0, 1)
    head, *lines = ran.out.splitlines()
    assert head.split()[:3] == ["probe", "target", "verdict"]
    assert any(line.startswith("memory ") for line in lines)
    assert "\x1b" not in ran.out


def test_a_fault_in_the_kernel_log_makes_it_end_with_1(shell: Shell) -> None:
    log = shell.home / "kernel.log"
    log.write_text(LOST)

    ran = shell.run("doctor", "--kernel-log", str(log), "-o", "json")

    assert ran.code == 1
    data = json.loads(ran.out)
    assert data["verdict"] == "faulty"
    found = [row for row in data["observations"] if row["grade"] == "faulty"]
    xid = [row for row in found if row["rule"] == "xid_79"]
    assert [row["action"] for row in xid] == ["evict_machine"]
    page = shell.run("doctor", "--kernel-log", str(log))
    assert "NVRM:" in page.out  # the line itself, folded into its column


def test_the_kernel_log_and_nvml_call_a_gpu_by_one_name(shell: Shell) -> None:
    library = build(shell.home / "nvml")
    library.set(count=2)
    log = shell.home / "kernel.log"
    log.write_text(LOST.replace("0000:05:00", "0000:11:00") + LOST)

    ran = shell.run(
        "doctor", "--kernel-log", str(log), "-o", "json", LD_LIBRARY_PATH=str(library.folder)
    )

    rows = by_probe(json.loads(ran.out))
    assert {row["target"] for row in rows["gpu"]} == {"gpu 0", "gpu 1"}
    xids = [row["target"] for row in rows["kernel_log"] if row["rule"] == "xid_79"]
    assert xids == ["gpu 1", "gpu 0000:05:00"], "the second is not NVML's"


def test_a_path_that_is_not_there_is_unknown(shell: Shell) -> None:
    missing = shell.home / "none"

    data = json.loads(shell.run("doctor", "--path", str(missing), "-o", "json").out)

    rows = [row for row in by_probe(data)["disk"] if row["values"].get("path") == str(missing)]
    assert [row["verdict"] for row in rows] == ["unknown"]


def test_bad_arguments_are_one_line(shell: Shell) -> None:
    missing = shell.run("doctor", "--kernel-log", "none")
    assert (missing.code, "none" in missing.line) == (3, True)
    policy = shell.home / "policy.yaml"
    policy.write_text("probes: {disk_dedline: 5s}\n")
    wrong = shell.run("doctor", "--policy", str(policy))
    assert wrong.code == 3
    assert "disk_deadline" in wrong.line


def test_it_loads_nothing_heavy(shell: Shell) -> None:
    code = (
        "import sys; from everstep import cli; cli.run(['doctor', '-o', 'json']);"
        "heavy = {'temporalio', 'sqlalchemy', 'sqlmodel', 'fastapi', 'torch', 'numpy'}"
        " & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=shell.env(),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.root
def test_without_rights_the_kernel_log_is_unknown_with_what_would_be_needed(shell: Shell) -> None:
    """A mount namespace of its own, in which /dev/kmsg is what containers put there."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for a mount namespace of its own")
    if shutil.which("unshare") is None or not Path("/dev/kmsg").exists():
        pytest.skip("there is no unshare, or no /dev/kmsg to hide")
    doctor = " ".join([*command(), "doctor", "-o", "json"])
    script = "mount --bind /dev/null /dev/kmsg && mount -t tmpfs none /var/log && exec " + doctor
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=shell.env(),
        cwd=shell.home,
    )
    (row,) = by_probe(json.loads(done.stdout))["kernel_log"]

    assert done.stderr == ""
    assert row["verdict"] == "unknown"
    assert "CAP_SYSLOG" in row["reason"]


@pytest.mark.root
def test_an_ordinary_user_gets_answers_and_no_traceback(shell: Shell) -> None:
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv")
    # Nobody, who may only follow paths: the interpreter may lie in root's home.
    follow = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")
    done = subprocess.run(
        [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            *follow,
            *command(),
            *("doctor", "-o", "json"),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=shell.env(TMPDIR="/tmp"),
        cwd="/",
    )
    data = json.loads(done.stdout)

    assert done.returncode in (0, 1)
    assert done.stderr == ""
    assert {"memory", "disk", "load", "kernel_log"} <= set(by_probe(data))


def test_warnings_and_unknowns_do_not_make_it_fail() -> None:
    warning = faulty("load", "cpu_steal", Symptom.MFU_DECLINE, Action.WARN_ONLY, "slow")
    fault = faulty("edac", "new_rule", Symptom.KERNEL_PANIC, Action.EVICT_MACHINE, "broken")
    blind = unknown("disk", "cannot look")
    well = healthy("memory", "fine")

    def said(*seen: Any) -> tuple[str, int]:
        data = summary([Look("x", list(seen), 0.0)])
        return data["verdict"], data["exit_code"]

    assert said(well) == ("healthy", 0)
    assert said(well, blind) == ("healthy", 0)
    assert said(warning, blind) == ("warning", 0)
    assert said(warning, fault) == ("faulty", 1)
    assert [grade(one) for one in (warning, fault, blind, well)] == [
        "warning",
        "faulty",
        "unknown",
        "healthy",
    ]
    assert advice(fault) == "take the machine out of use and repair it"  # by its action
    assert advice(well) == ""
