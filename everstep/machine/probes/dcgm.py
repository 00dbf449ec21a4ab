"""The DCGM probe: GPUs as NVIDIA's DCGM exporter shows them over HTTP, where one runs.

The exporter's page becomes the same readings that NVML gives, and the same judge judges them. Its
own silence is a sign too (the paper's "DCGM service status"), but never a GPU's fault. Whatever
answers is given a bounded time and a bounded number of bytes.

Not here: the judgement (``gpu_judge``).
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from everstep.decide.observation import Observation
from everstep.decide.words import Action, Confidence, Symptom, Verdict
from everstep.machine.probes.gpu_judge import Finding, GpuJudge
from everstep.machine.probes.gpu_rules import GPU_RULES
from everstep.machine.probes.gpu_xids import JudgeXid
from everstep.spec.policy import ProbesPolicy

PROBE = "dcgm"
BODY_BYTES_MAX = 8 * 1024 * 1024
"""Eight GPUs with every field that the exporter knows are well under 1 MiB."""
GPUS_MAX = 256

LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
PREFIX = "DCGM_FI_"

READINGS: dict[str, str] = {
    "DCGM_FI_DEV_GPU_TEMP": "temperature_c",
    "DCGM_FI_DEV_MEMORY_TEMP": "memory_temperature_c",
    "DCGM_FI_DEV_MEM_MAX_OP_TEMP": "memory_max_c",
    "DCGM_FI_DEV_SLOWDOWN_TEMP": "slowdown_c",
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": "slowdown_reasons",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "slowdown_reasons",
    "DCGM_FI_DEV_GPU_UTIL": "busy_percent",
    "DCGM_FI_DEV_POWER_USAGE": "power_w",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "ecc_volatile",
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": "ecc_aggregate",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "rows_remapped",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "remap_failed",
    "DCGM_FI_DEV_ROW_REMAP_PENDING": "remap_pending",
    "DCGM_FI_DEV_RETIRED_PENDING": "pages_pending",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "pcie_replays",
    "DCGM_FI_DEV_PCIE_LINK_WIDTH": "pcie_width",
    "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH": "pcie_width_max",
    "DCGM_FI_DEV_PCIE_LINK_GEN": "pcie_generation",
    "DCGM_FI_DEV_PCIE_MAX_LINK_GEN": "pcie_generation_max",
    "DCGM_FI_DEV_XID_ERRORS": "xid",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "tensor_active",
}
NVLINK_TOTALS = frozenset(
    f"DCGM_FI_DEV_NVLINK_{what}_ERROR_COUNT_TOTAL"
    for what in ("CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY")
)
MEMORY = ("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE")
SHARES = frozenset({"tensor_active", "power_w"})
"""Readings that are no whole numbers."""


class DcgmProbe:
    """All GPUs of one exporter. For one thread at a time."""

    name = PROBE
    interval = "gpu"

    def __init__(
        self, policy: ProbesPolicy, *, judge_xid: JudgeXid = lambda _: GPU_RULES["xid"]
    ) -> None:
        """Nothing is asked before the first look.

        Args:
            policy: where the exporter is, its time limit, and the thresholds.
            judge_xid: the catalogue of Xids.
        """
        self._policy = policy
        self._judge = GpuJudge(policy)
        self._judge_xid = judge_xid
        self._known: set[str] = set()
        self._xids: dict[str, int] = {}
        self._misses = 0
        self._why = ""

    def not_here(self) -> Mapping[str, str]:
        """Why there is no exporter to ask, if so."""
        return {"DCGM exporter": self._why} if self._why else {}

    def not_looked_at(self) -> Mapping[str, Sequence[str]]:
        """Nothing: the exporter's own configuration says what it shows."""
        return {}

    def look(self, now_s: float) -> Sequence[Observation]:
        """Ask for one page; back within little more than the policy's timeout."""
        self._why = ""
        if not self._policy.dcgm_url:
            self._why = "the policy names no address (probes.dcgm_url)"
            return []
        url, timeout_s = self._policy.dcgm_url, self._policy.dcgm_timeout.total_seconds()
        try:
            if not self._known:
                _knock(url, timeout_s)
            page = readings_of(_fetch(url, timeout_s))
        except ConnectionRefusedError as error:
            if urlsplit(url).hostname in LOCAL:
                self._why = f"nothing listens at {url}"
                return []
            return self._missed(str(error))
        except _NoPageError as error:
            return self._missed(str(error))
        if not page and not self._known:
            self._why = f"what answers at {url} shows no GPU"
            return []
        self._misses = 0
        service = Observation(
            probe=PROBE,
            target="exporter",
            verdict=Verdict.HEALTHY,
            reason=f"the exporter shows {len(page)} GPUs",
            values={"gpus": len(page)},
        )
        seen = [service]
        for gpu in sorted(self._known | page.keys()):
            seen += self._gpu(gpu, page.get(gpu), now_s)
        self._known |= page.keys()
        return seen

    def close(self) -> None:
        """Nothing is held between two looks."""

    def _gpu(self, gpu: str, readings: Mapping[str, Any] | None, now_s: float) -> list[Observation]:
        label = f"gpu {gpu}"
        if readings is None:
            text = f"{label}: the exporter does not show it any more"
            return [Observation(probe=PROBE, target=label, verdict=Verdict.UNKNOWN, reason=text)]
        self._note_xid(label, readings.get("xid"), now_s)
        name = str(readings.get("name", ""))
        seen = self._judge.judge(label, readings, {}, now_s, name)
        return [
            replace(
                one,
                probe=PROBE,
                values={**one.values, **_shown(readings)},
            )
            for one in seen
        ]

    def _note_xid(self, label: str, number: int | None, now_s: float) -> None:
        """The exporter shows the last Xid for ever: only one that was not there before is news."""
        if number is None:
            return
        before = self._xids.get(label)
        self._xids[label] = number
        if before is None or number in (0, before):
            return
        rule = self._judge_xid(number)
        if rule is not None:
            text = f"Xid {number}: {rule.when}"
            self._judge.hold(
                label, Finding(f"xid_{number}", text, {"xid": number}, judged=rule), now_s
            )

    def _missed(self, why: str) -> list[Observation]:
        self._misses += 1
        lasting = bool(self._known) and self._misses >= self._policy.dcgm_misses_min
        targets = ["exporter", *(f"gpu {gpu}" for gpu in sorted(self._known))]
        unknown = [
            Observation(
                probe=PROBE,
                target=target,
                verdict=Verdict.UNKNOWN,
                reason=f"the exporter could not be asked: {why}",
                values={"misses": self._misses},
            )
            for target in targets
        ]
        if not lasting:
            return unknown
        fault = replace(
            unknown[0],
            verdict=Verdict.FAULTY,
            rule="dcgm_service",
            reason=f"the exporter has not answered {self._misses} times in a row: {why}",
            symptom=Symptom.GPU_UNAVAILABLE,
            action=Action.WARN_ONLY,
            confidence=Confidence.LOW,
        )
        return [fault, *unknown[1:]]


class _NoPageError(Exception):
    """What came back is no page; the text says why."""


def readings_of(text: str) -> dict[str, dict[str, Any]]:
    """By GPU number, the readings on an exporter's page, under the names that NVML's have.

    Raises:
        _NoPageError: it is no page of Prometheus metrics.
    """
    page: dict[str, dict[str, Any]] = {}
    for name, gpu, value, labels in _samples(text):
        if gpu not in page and len(page) >= GPUS_MAX:
            continue
        found = page.setdefault(gpu, {})
        if labels.get("modelName"):
            found["name"] = labels["modelName"][:80]
        if name in NVLINK_TOTALS:
            found["nvlink_errors"] = found.get("nvlink_errors", 0) + int(value)
        elif name in MEMORY:
            mib = found.setdefault("mib", {})
            mib[name] = max(value, mib.get(name, 0.0))
        elif name in READINGS:
            key = READINGS[name]
            number = value if key in SHARES else int(value)
            # With MIG a GPU has a line for each instance.
            found[key] = max(number, found.get(key, number))
    for found in page.values():
        mib = found.pop("mib", {})
        if len(mib) == len(MEMORY):
            found["memory_used_bytes"] = int(mib[MEMORY[0]]) << 20
            found["memory_total_bytes"] = int(sum(mib.values())) << 20
    return page


def _samples(text: str) -> Iterator[tuple[str, str, float, Mapping[str, str]]]:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                gpu = sample.labels.get("gpu", "")
                if sample.name.startswith(PREFIX) and gpu.isdecimal() and len(gpu) <= 4:
                    value = float(sample.value)
                    if math.isfinite(value) and value >= 0 and not _blank(value):
                        yield sample.name, gpu, value, sample.labels
    except Exception as error:  # noqa: BLE001 - the library raises several types for no page
        text = " ".join(str(error).split())[:100]
        raise _NoPageError(f"its answer is no page of metrics ({text})") from None


def _blank(value: float) -> bool:
    """DCGM's "no value": the last few numbers of an int32 or int64, or of a double's integers."""
    return (
        0x7FFFFFF0 <= value <= 0x7FFFFFFF
        or 140_737_488_355_328 <= value <= 140_737_488_355_344
        or value >= 0x7FFFFFFFFFFFFFF0
    )


def _knock(url: str, timeout_s: float) -> None:
    """See whether anything listens. Most machines end here, and need no client library then.

    Raises:
        ConnectionRefusedError: nothing listens there.
        _NoPageError: it is not known.
    """
    try:
        where = urlsplit(url)
        port = where.port or (443 if where.scheme == "https" else 80)
        socket.create_connection((where.hostname or "", port), timeout_s).close()
    except ConnectionRefusedError:
        raise
    except (OSError, ValueError) as error:
        raise _NoPageError(f"{url}: {error}") from None


def _fetch(url: str, timeout_s: float) -> str:
    """The page at ``url``.

    Raises:
        _NoPageError: anything else than a page of bounded size in time.
    """
    deadline = time.monotonic() + timeout_s
    import httpx

    body = bytearray()
    try:
        with (
            httpx.Client(trust_env=False, timeout=timeout_s) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                raise _NoPageError(f"{url} answers {answer.status_code}")
            for part in answer.iter_bytes():
                body += part
                if len(body) > BODY_BYTES_MAX:
                    raise _NoPageError(f"its answer is over {BODY_BYTES_MAX >> 20} MiB")
                if time.monotonic() > deadline:
                    raise _NoPageError(f"its answer is not complete after {timeout_s:g} s")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _NoPageError(f"{url}: {str(error) or type(error).__name__}") from None
    return body.decode("utf-8", "replace")


def _shown(readings: Mapping[str, Any]) -> dict[str, Any]:
    return {"tensor_active": readings["tensor_active"]} if "tensor_active" in readings else {}
