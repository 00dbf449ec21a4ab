"""The DCGM probe against real HTTP servers on loopback: pages, garbage, silence."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decide.words import Action, Confidence, Symptom, Verdict
from everstep.machine.probes.dcgm import DcgmProbe, _NoPageError, readings_of
from everstep.machine.probes.gpu_rules import GpuRule
from tests.process.gpus import quick_policy, rules

LABELS = 'UUID="GPU-{gpu}",device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="m1"'


def page(*gpus: dict[str, Any]) -> str:
    """What the exporter shows for GPUs that are well but for what is given."""
    well: dict[str, Any] = {
        "DCGM_FI_DEV_GPU_TEMP": 41,
        "DCGM_FI_DEV_MEMORY_TEMP": 50,
        "DCGM_FI_DEV_GPU_UTIL": 97,
        "DCGM_FI_DEV_POWER_USAGE": 612.3,
        "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": 4,
        "DCGM_FI_DEV_XID_ERRORS": 0,
        "DCGM_FI_DEV_ROW_REMAP_FAILURE": 0,
        "DCGM_FI_DEV_ROW_REMAP_PENDING": 0,
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 0,
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 0,
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": 0,
        "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": 0,
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": 0,
        "DCGM_FI_DEV_FB_USED": 40_000,
        "DCGM_FI_DEV_FB_FREE": 41_559,
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.521,
    }
    lines = []
    for name in {name: None for gpu in (well, *gpus) for name in gpu}:
        lines += [f"# HELP {name} a field.", f"# TYPE {name} gauge"]
        for number, gpu in enumerate(gpus):
            value = {**well, **gpu}.get(name)
            if value is not None:
                lines.append(f'{name}{{gpu="{number}",{LABELS.format(gpu=number)}}} {value}')
    return "\n".join(lines) + "\n"


Answer = Callable[[BaseHTTPRequestHandler], None]


class Exporter:
    """A server whose answer a test can change."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: Answer = _text(page({}, {}))
        self.ending = threading.Event()
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                exporter.asked += 1
                exporter.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self._thread.start()

    def show(self, *gpus: dict[str, Any]) -> None:
        self.answer = _text(page(*gpus))

    def close(self) -> None:
        if not self.ending.is_set():
            self.ending.set()
            self.server.shutdown()
            self.server.server_close()
            self._thread.join()


def _text(body: str | bytes, status: int = 200) -> Answer:
    data = body.encode() if isinstance(body, str) else body

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter()
    yield made
    made.close()


def probe_of(exporter: Exporter, **options: Any) -> DcgmProbe:
    return DcgmProbe(quick_policy(dcgm_url=exporter.url, dcgm_timeout="500ms"), **options)


def test_gpus_that_are_well(exporter: Exporter) -> None:
    seen = probe_of(exporter).look(0.0)

    assert rules(seen) == {"exporter": [], "gpu 0": [], "gpu 1": []}
    assert {o.verdict for o in seen} == {Verdict.HEALTHY}
    assert {o.probe for o in seen} == {"dcgm"}
    assert seen[1].values["tensor_active"] == 0.521
    assert seen[1].values["memory_total_gib"] == 79.6
    assert "H100" in seen[1].reason


FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("row_remap_failed", {"DCGM_FI_DEV_ROW_REMAP_FAILURE": 1}),
    ("row_remap_pending", {"DCGM_FI_DEV_ROW_REMAP_PENDING": 1}),
    ("ecc_uncorrectable", {"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2}),
    ("pcie_replays", {"DCGM_FI_DEV_PCIE_REPLAY_COUNTER": 900}),
    ("nvlink_errors", {"DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": 9000}),
    (
        "thermal_slowdown",
        {"DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": 0x40, "DCGM_FI_DEV_GPU_TEMP": 91},
    ),
    ("xid_79", {"DCGM_FI_DEV_XID_ERRORS": 79}),
]


@pytest.mark.parametrize("rule, fields", FAULTS, ids=[rule for rule, _ in FAULTS])
def test_a_fault_is_seen_on_its_gpu(exporter: Exporter, rule: str, fields: dict[str, Any]) -> None:
    gone = Symptom.GPU_UNAVAILABLE, Action.EVICT_MACHINE, Confidence.HIGH
    probe = probe_of(exporter, judge_xid=lambda _: GpuRule(*gone, "off the bus"))
    probe.look(0.0)
    exporter.show({}, fields)

    assert rules(probe.look(10.0)) == {"exporter": [], "gpu 0": [], "gpu 1": [rule]}


def test_an_xid_from_before_we_looked_is_no_news_and_one_is_no_news_twice(
    exporter: Exporter,
) -> None:
    asked: list[int] = []

    def judge(number: int) -> None:
        asked.append(number)

    probe = probe_of(exporter, judge_xid=judge)
    exporter.show({"DCGM_FI_DEV_XID_ERRORS": 79})
    probe.look(0.0)
    probe.look(10.0)
    assert asked == []
    exporter.show({"DCGM_FI_DEV_XID_ERRORS": 48})
    probe.look(20.0)
    probe.look(30.0)
    assert asked == [48]


def test_an_exporter_that_stops_is_unknown_and_after_three_misses_a_warning(
    exporter: Exporter,
) -> None:
    probe = probe_of(exporter)
    probe.look(0.0)
    exporter.close()

    for _ in range(2):
        seen = probe.look(10.0)
        assert {o.verdict for o in seen} == {Verdict.UNKNOWN}
        assert [o.target for o in seen] == ["exporter", "gpu 0", "gpu 1"]
    service, *others = probe.look(20.0)

    assert (service.rule, service.action) == ("dcgm_service", Action.WARN_ONLY)
    assert {o.verdict for o in others} == {Verdict.UNKNOWN}  # the GPUs are none the worse for it


def test_a_gpu_that_is_not_shown_any_more_is_unknown(exporter: Exporter) -> None:
    probe = probe_of(exporter)
    probe.look(0.0)
    exporter.show({})

    *_, last = probe.look(10.0)

    assert (last.target, last.verdict) == ("gpu 1", Verdict.UNKNOWN)


def test_where_no_exporter_runs_there_is_nothing_to_look_at() -> None:
    with socket.socket() as taken:  # bound but not listening: refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/metrics"
        probe = DcgmProbe(quick_policy(dcgm_url=url))
        assert probe.look(0.0) == []
        assert probe.not_here() == {"DCGM exporter": f"nothing listens at {url}"}
    off = DcgmProbe(quick_policy(dcgm_url=""))
    assert off.look(0.0) == []
    assert "probes.dcgm_url" in off.not_here()["DCGM exporter"]


def test_another_program_on_the_port_is_not_the_exporter(exporter: Exporter) -> None:
    exporter.answer = _text("# TYPE up gauge\nup 1\n")
    probe = probe_of(exporter)

    assert probe.look(0.0) == []
    assert "shows no GPU" in probe.not_here()["DCGM exporter"]


@pytest.mark.parametrize(
    "answer, why",
    [
        (_text(b"\x00\xff\xfe garbage {{{ }"), "no page of metrics"),
        (_text('DCGM_FI_DEV_GPU_TEMP{gpu="0"'), "no page of metrics"),
        (_text("gone", 503), "answers 503"),
        (lambda handler: handler.connection.shutdown(socket.SHUT_RDWR), "disconnected"),
    ],
    ids=["garbage", "truncated", "error", "hung up"],
)
def test_what_is_no_page_is_unknown_with_the_reason(
    exporter: Exporter, answer: Answer, why: str
) -> None:
    exporter.answer = answer

    (seen,) = probe_of(exporter).look(0.0)

    assert seen.verdict is Verdict.UNKNOWN
    assert why in seen.reason


def _endless(pause_s: float, part: bytes) -> Callable[[Exporter], Answer]:
    def of(exporter: Exporter) -> Answer:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.end_headers()
            try:
                while not exporter.ending.wait(pause_s):
                    handler.wfile.write(part)
            except OSError:
                pass  # the probe has had enough

        return answer

    return of


@pytest.mark.parametrize(
    "endless, why",
    [
        (_endless(0, b"# more\n" * 20_000), "over 8 MiB"),
        (_endless(0.02, b"# a line\n"), "not complete after 0.5 s"),
    ],
    ids=["fast", "slow"],
)
def test_an_endless_body_is_bounded(
    exporter: Exporter, endless: Callable[[Exporter], Answer], why: str
) -> None:
    exporter.answer = endless(exporter)
    began = time.monotonic()

    (seen,) = probe_of(exporter).look(0.0)

    assert seen.verdict is Verdict.UNKNOWN
    assert why in seen.reason or "not complete" in seen.reason
    assert time.monotonic() - began < 10


def test_a_server_that_never_answers_is_given_up(exporter: Exporter) -> None:
    exporter.answer = lambda _: _wait(exporter)
    (seen,) = probe_of(exporter).look(0.0)

    assert seen.verdict is Verdict.UNKNOWN
    assert "timed out" in seen.reason


def _wait(exporter: Exporter) -> None:
    exporter.ending.wait(20)


@given(st.text(max_size=400))
def test_any_text_is_readings_or_no_page(text: str) -> None:
    with contextlib.suppress(_NoPageError):
        readings_of(text)


@given(st.floats(allow_nan=True), st.sampled_from(sorted(page({}).split())))
def test_any_value_of_any_field_is_judged(value: float, name: str) -> None:
    field = name if name.startswith("DCGM_FI") and "{" not in name else "DCGM_FI_DEV_GPU_TEMP"
    readings = readings_of(f'{field}{{gpu="0"}} {value}\n')
    assert set(readings) <= {"0"}


def test_blank_values_are_no_values() -> None:
    readings = readings_of(
        'DCGM_FI_DEV_GPU_TEMP{gpu="0"} 2147483632\n'
        'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="0"} 9223372036854775792\n'
        'DCGM_FI_DEV_POWER_USAGE{gpu="0"} 140737488355328\n'
        'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 3\n'
    )

    assert readings == {"0": {"busy_percent": 3}}
