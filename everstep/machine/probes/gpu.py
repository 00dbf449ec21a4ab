"""The GPU probe: NVIDIA GPUs through the real ``pynvml``, in a helper process with deadlines.

Decides when a helper is started, replaced and given up, and who is who: GPUs keep their label
(``gpu 3``) by UUID, whatever numbers the driver gives after one of them is gone. A driver that does
not answer is an observation; a machine without NVIDIA's library or devices has nothing to look at.

Not here: the pipe (``gpu_link``), the questions (``gpu_calls``), the judgement (``gpu_judge``).
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.decide.observation import Observation
from everstep.decide.words import Verdict
from everstep.machine.probes.gpu_judge import PROBE, Finding, GpuJudge, observe
from everstep.machine.probes.gpu_link import Answers, HelperLink, Xid
from everstep.machine.probes.gpu_rules import GPU_RULES
from everstep.machine.probes.gpu_xids import JudgeXid
from everstep.spec.policy import ProbesPolicy

LIBRARY = "libnvidia-ml.so.1"
LEFT_MAX = 3
"""Helpers that hang in the kernel; with so many, no more are started."""
READY_MARGIN_S = 5.0
"""Of a look's deadline, what is kept for asking after the driver has come up."""
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")


class GpuProbe:
    """All NVIDIA GPUs of this machine. For one thread at a time."""

    name = PROBE
    interval = "gpu"

    def __init__(
        self,
        policy: ProbesPolicy,
        *,
        judge_xid: JudgeXid = lambda _: GPU_RULES["xid"],
        expected_pids: Callable[[], Collection[int] | None] = lambda: None,
        environ: Mapping[str, str] | None = None,
        sys_root: Path = Path("/sys"),
        proc_root: Path = Path("/proc"),
    ) -> None:
        """No process is started before the first look.

        Args:
            policy: intervals, deadlines and thresholds.
            judge_xid: the catalogue of Xids.
            expected_pids: processes that may hold GPUs now; None: nothing is said about processes.
            environ: of the helper process; by default this process's own.
            sys_root: where sysfs is, for whether there is an NVIDIA device at all.
            proc_root: where proc is. The driver counts pids as the host does; those that mean
                nothing here (in a container of its own) are not judged.
        """
        self._policy = policy
        self._judge = GpuJudge(policy, expected_pids)
        self._judge_xid = judge_xid
        self._environ = dict(os.environ if environ is None else environ)
        self._find_first = environ is None
        self._sys_root = sys_root
        self._proc_root = proc_root
        self._wake: Callable[[], None] = lambda: None
        self._link: HelperLink | None = None
        self._left: list[HelperLink] = []
        self._absent = ""
        self._skipped: dict[str, Sequence[str]] = {}
        self._labels: dict[str, str] = {}
        """UUID to label of every GPU ever seen."""
        self._names: dict[str, str] = {}
        self._at_index: dict[int, str] = {}
        """The label at each index of the present helper."""
        self._buses: Mapping[str, str] = {}
        """By label, the last PCI address of every GPU ever seen."""
        self._looked = threading.Event()
        self._retry_at_s = 0.0
        self._pause_s = 0.0
        self._trouble: Finding | str = ""
        """Why no helper answers: a fault, or why it is not known."""
        self._silent = 0
        self._xids: dict[tuple[str, int], None] = {}

    def on_news(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when a GPU changes between two looks."""
        self._wake = wake

    def not_here(self) -> Mapping[str, str]:
        """Why there is nothing to look at, if so."""
        return {"gpu": self._absent} if self._absent else {}

    def not_looked_at(self) -> Mapping[str, Sequence[str]]:
        """By GPU, what its driver or the card does not offer."""
        return dict(self._skipped)

    @property
    def helpers_left(self) -> int:
        """Helpers that could not be killed and are still there."""
        return len(self._left)

    @property
    def helper_pid(self) -> int | None:
        """The present helper process."""
        return self._link.pid if self._link is not None else None

    def pci_names(self, wait_s: float = 0.0) -> Mapping[str, str]:
        """What GPUs are called here, by PCI address (``00000000:18:00.0`` -> ``gpu 3``).

        May be called from any thread; waits so long for the first look. GPUs that were never seen
        through NVML are not in it.
        """
        self._looked.wait(wait_s)
        return {bus: label for label, bus in self._buses.items()}

    def look(self, now_s: float) -> Sequence[Observation]:
        """Look at every GPU; back within twice the call's deadline, or the start's share."""
        try:
            return self._look(now_s)
        finally:
            self._looked.set()

    def _look(self, now_s: float) -> Sequence[Observation]:
        self._left = [link for link in self._left if not link.gone()]
        if self._absent:
            return []
        link = self._usable_link(now_s)
        if link is None:
            return self._no_answer(now_s)
        call_s = self._policy.gpu_call_deadline.total_seconds()
        answers = link.ask(2 * call_s, call_s)
        if not answers.taken:
            self._silence(link, now_s)
            return self._no_answer(now_s)
        self._trouble, self._silent = "", 0
        return self._judged(link, answers, now_s)

    def close(self) -> None:
        """End the helper."""
        self._looked.set()
        if self._link is not None:
            self._give_up(self._link)
        self._left = [link for link in self._left if not link.gone()]

    # --- Helpers

    def _news(self) -> None:
        self._wake()

    def _usable_link(self, now_s: float) -> HelperLink | None:
        """A helper whose driver is up, or None; never waits long for one."""
        old = self._link
        if old is not None and old.closed:
            self._trouble = "the helper process has ended"
            self._give_up(old)
            old = None
        if old is not None and old.ready is None:
            return old if self._came_up(old) else None
        if now_s < self._retry_at_s or len(self._left) >= LEFT_MAX:
            return old
        if old is None and self._find_first and not _library_found():
            self._refused("library_not_found", "")
            return None
        if old is not None and self._pause_s == 0:
            return old
        new = self._new_link(now_s)
        if new is None:
            return old
        if old is None:
            self._link = new
            return new if self._came_up(new) else None
        # Some GPUs hang in the old one, the others answer: it goes only when the new one is up.
        if new.wait_ready(self._ready_max_s()):
            self._give_up(old)
            self._link = new
            self._at_index = {}
            return new
        self._give_up(new)
        return old

    def _new_link(self, now_s: float) -> HelperLink | None:
        self._pause_s = min(
            self._policy.gpu_retry_max.total_seconds(),
            2 * self._pause_s or self._policy.gpu_interval.total_seconds(),
        )
        self._retry_at_s = now_s + self._pause_s
        try:
            return HelperLink(
                call_deadline_s=self._policy.gpu_call_deadline.total_seconds(),
                pulse_s=self._policy.gpu_pulse_interval.total_seconds(),
                environ=self._environ,
                on_news=self._news,
            )
        except OSError as error:
            self._trouble = f"no helper process could be started: {error}"
            return None

    def _ready_max_s(self) -> float:
        look_s = self._policy.look_deadline.total_seconds()
        return max(look_s - READY_MARGIN_S, look_s / 2)

    def _came_up(self, link: HelperLink) -> bool:
        """Whether the driver answers in this helper; else notes why not and what to do."""
        if link.wait_ready(self._ready_max_s()):
            self._at_index = {}
            count = link.ready or 0
            if count or self._labels or self._policy.gpus_expected:
                return True
            self._absent = "NVIDIA's driver says that there are no GPUs"
        elif link.failed is not None:
            self._refused(*link.failed)
        elif link.closed:
            self._trouble = "the helper process has ended"
        else:
            waited_s = time.monotonic() - link.born_s
            if waited_s < self._policy.gpu_start_deadline.total_seconds():
                self._trouble = f"the driver has not come up yet, after {waited_s:.0f} s"
                return False  # and wait on in the next look
            text = f"the driver has not answered for {waited_s:.0f} s after a start"
            self._trouble = Finding("driver_hang", text)
        self._give_up(link)
        self._link = None
        return False

    def _refused(self, error: str, text: str) -> None:
        """The driver refused to start; is something wrong, or is there nothing here?"""
        wanted = bool(self._labels or self._policy.gpus_expected)
        if error == "library_not_found":
            text = f"NVIDIA's library {LIBRARY} is not installed"
            if not wanted:
                self._absent = text
                return
            self._trouble = Finding("driver_not_loaded", text)
        elif error == "driver_not_loaded":
            if not wanted and not self._on_the_bus():
                self._absent = "NVIDIA's library is here, but no NVIDIA GPU is on the PCI bus"
                return
            self._trouble = Finding(
                "driver_not_loaded", "the kernel has not loaded NVIDIA's driver"
            )
        elif error == "lib_rm_version_mismatch":
            text = "NVIDIA's library and kernel module are of different versions"
            self._trouble = Finding("driver_version_mismatch", text)
        elif error == "no_permission":
            self._trouble = "the agent may not talk to NVIDIA's driver"
        else:
            self._trouble = Finding("nvml_fails", f"NVML does not start: {text}", {"error": error})

    def _on_the_bus(self) -> bool:
        for device in (self._sys_root / "bus/pci/devices").glob("*"):
            try:
                vendor = (device / "vendor").read_text(encoding="ascii").strip()
                kind = (device / "class").read_text(encoding="ascii").strip()
            except (OSError, ValueError):
                continue
            if vendor == NVIDIA_VENDOR and kind.startswith(DISPLAY_CLASSES):
                return True
        return False

    def _silence(self, link: HelperLink, now_s: float) -> None:
        """The helper itself does not answer: give it up; the second time it is the driver."""
        self._silent += 1
        if not link.closed and (link.sleeps_in_kernel or self._silent > 1):
            text = "the helper process hangs and does not answer"
            self._trouble = Finding("driver_hang", text)
        else:
            self._trouble = "the helper process has ended" if link.closed else "it was silent once"
        self._give_up(link)
        self._link = None
        if self._silent == 1:
            # A helper that was killed or starved comes back at once; the pause is for those that
            # come to nothing again.
            self._retry_at_s, self._pause_s = now_s, 0.0
            self._wake()

    def _give_up(self, link: HelperLink) -> None:
        if not link.kill():
            self._left.append(link)
        if link is self._link:
            self._link = None

    # --- Judgement

    def _no_answer(self, now_s: float) -> list[Observation]:
        """One verdict for each GPU that was ever seen, else for the machine."""
        if self._absent:
            return []
        labels = sorted(self._labels.values()) or [""]
        if isinstance(self._trouble, Finding):
            return [observe(label, self._trouble) for label in labels]
        wait_s = max(0.0, self._retry_at_s - now_s)
        text = f"{self._trouble or 'no helper process'}; next try within {wait_s:.0f} s"
        return [
            Observation(probe=PROBE, target=label, verdict=Verdict.UNKNOWN, reason=text)
            for label in labels
        ]

    def _judged(self, link: HelperLink, answers: Answers, now_s: float) -> list[Observation]:
        self._who_is_who(answers)
        self._note_xids(link, now_s)
        readings: dict[str, dict[str, Any]] = {}
        seen: dict[str, list[Observation]] = {}
        stuck = False
        for index in range(link.ready or 0):
            label = self._at_index[index]
            answer = answers.by_index.get(index)
            if answer is None:
                text = f"{label}: the driver is slow, its look has not come back in time"
                seen[label] = [_unknown(label, text)]
            elif "stuck" in answer:
                stuck = True
                text = (
                    f"the driver call {answer['stuck']} has not returned for {answer['stuck_s']} s"
                )
                finding = Finding("driver_hang", text, {"call": str(answer["stuck"])})
                seen[label] = [observe(label, finding)]
            else:
                who, errors = answer.get("who") or {}, answer.get("errors") or {}
                readings[label] = self._here({**answer.get("values", {}), **who})
                self._skipped[label] = answer.get("skipped", ())
                name = self._names.get(label, "")
                seen[label] = self._judge.judge(label, readings[label], errors, now_s, name)
        for label, finding in self._judge.compare(readings, self._names).items():
            if all(o.rule != "nvlink_down" for o in seen[label]):
                seen[label] = [*_faults(seen[label]), observe(label, finding)]
        # Only trouble keeps the pause between two helpers; it grows while the trouble lasts.
        if not stuck:
            self._pause_s = 0.0
        elif self._pause_s == 0:
            self._pause_s = self._policy.gpu_interval.total_seconds()
            self._retry_at_s = now_s + self._pause_s
        return [*self._missing(link, seen), *(o for found in seen.values() for o in found)]

    def _here(self, readings: dict[str, Any]) -> dict[str, Any]:
        pids = [pid for pid in readings.get("pids", ()) if (self._proc_root / str(pid)).exists()]
        return {**readings, "pids": pids}

    def _who_is_who(self, answers: Answers) -> None:
        """Give every index of this helper its label."""
        present: dict[int, str] = {}
        buses: dict[str, str] = {}
        for index, answer in sorted(answers.by_index.items()):
            who = answer.get("who")
            if who:
                uuid = str(who["uuid"])
                label = self._labels.setdefault(uuid, self._free_label(index))
                self._names[label] = str(who.get("name", ""))
                present[index] = label
                if who.get("bus"):
                    buses[label] = str(who["bus"])
        self._at_index.update(present)
        # A new one for readers in other threads; who is here comes last, and so wins an address.
        self._buses = {n: bus for n, bus in self._buses.items() if n not in buses} | buses
        for index in range(self._link.ready or 0 if self._link else 0):
            if index not in self._at_index:
                # Not identified: likely the one that was here before, unless that one is elsewhere.
                label = f"gpu {index}"
                taken = label in self._at_index.values()
                self._at_index[index] = self._free_label(index) if taken else label

    def _free_label(self, index: int) -> str:
        used = {*self._labels.values(), *self._at_index.values()}
        wanted = f"gpu {index}"
        if self._at_index.get(index) == wanted and wanted not in self._labels.values():
            return wanted  # it was not identified at first and is now
        numbers = (index, *range(len(used) + 1))
        return next(f"gpu {n}" for n in numbers if f"gpu {n}" not in used)

    def _missing(
        self, link: HelperLink, seen: Mapping[str, Sequence[Observation]]
    ) -> list[Observation]:
        count, expected = link.ready or 0, self._policy.gpus_expected
        found = [
            observe(
                label, Finding("gpu_lost", f"it is gone: {count} of {len(self._labels)} are left")
            )
            for label in sorted(set(self._labels.values()) - set(seen))
        ]
        if count < expected:
            text = f"{count} GPUs, the policy expects {expected}"
            found.append(observe("", Finding("gpus_missing", text, {"gpus": count})))
        return found

    def _note_xids(self, link: HelperLink, now_s: float) -> None:
        while link.xids:
            xid: Xid = link.xids.popleft()
            rule = self._judge_xid(xid.number)
            if rule is not None and xid.index is not None and xid.index in self._at_index:
                text = f"Xid {xid.number}: {rule.when}"
                finding = Finding(f"xid_{xid.number}", text, {"xid": xid.number}, judged=rule)
                self._judge.hold(self._at_index[xid.index], finding, now_s)


def _library_found() -> bool:
    """Whether there is a library to load; where there is none, no process need be started."""
    try:
        ctypes.CDLL(LIBRARY)  # its functions are called in the helper only
    except OSError:
        return False
    return True


def _faults(observations: Sequence[Observation]) -> list[Observation]:
    return [o for o in observations if o.verdict is Verdict.FAULTY]


def _unknown(label: str, text: str) -> Observation:
    return Observation(probe=PROBE, target=label, verdict=Verdict.UNKNOWN, reason=text)
