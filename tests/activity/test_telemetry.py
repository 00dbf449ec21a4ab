"""Whether polling works, read from what the SDK counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from temporalio.runtime import (
    BUFFERED_METRIC_KIND_COUNTER,
    BUFFERED_METRIC_KIND_GAUGE,
    BUFFERED_METRIC_KIND_HISTOGRAM,
)

from workers.telemetry import POLL_GAP_MAX_S, SERIES_MAX, Telemetry

WORKFLOW = (("everstep", "workflow"),)


@dataclass
class Metric:
    name: str
    kind: Any = BUFFERED_METRIC_KIND_COUNTER
    description: str | None = "what it is"
    unit: str | None = None


@dataclass
class Update:
    metric: Metric
    value: float = 1
    attributes: dict[str, Any] = field(default_factory=dict)


POLL = {"operation": "PollWorkflowTaskQueue", "task_queue": "everstep"}
SENT = Update(Metric("temporal_long_request"), 1, POLL)
ENDED = Update(Metric("temporal_long_request_latency", BUFFERED_METRIC_KIND_HISTOGRAM), 0.2, POLL)


class Buffer:
    def __init__(self) -> None:
        self.waiting: list[Update] = []

    def retrieve_updates(self) -> list[Update]:
        taken, self.waiting = self.waiting, []
        return taken


def telemetry() -> tuple[Telemetry, Buffer]:
    made, buffer = Telemetry(), Buffer()
    made.buffer = buffer  # type: ignore[assignment]
    return made, buffer


def test_nothing_polls_before_the_first_poll() -> None:
    made, _ = telemetry()
    made.drain(0.0)
    assert made.not_polling(WORKFLOW, 0.0) == ["everstep/workflow"]


def test_an_open_poll_is_the_proof_for_as_long_as_it_is_open() -> None:
    made, buffer = telemetry()
    buffer.waiting = [SENT]
    made.drain(0.0)
    made.drain(1000.0)
    assert made.not_polling(WORKFLOW, 1000.0) == []


def test_polls_that_fail_at_once_are_no_proof() -> None:
    made, buffer = telemetry()
    buffer.waiting = [SENT]
    made.drain(0.0)
    buffer.waiting = [ENDED]
    made.drain(1.0)
    for second in range(2, 20):
        buffer.waiting = [SENT, ENDED] * 5
        made.drain(float(second))
    assert made.not_polling(WORKFLOW, 19.0) == ["everstep/workflow"]


def test_the_gap_between_two_polls_is_no_outage() -> None:
    made, buffer = telemetry()
    buffer.waiting = [SENT]
    made.drain(0.0)
    buffer.waiting = [ENDED]
    made.drain(1.0)
    assert made.not_polling(WORKFLOW, POLL_GAP_MAX_S) == []
    assert made.not_polling(WORKFLOW, POLL_GAP_MAX_S + 0.1) == ["everstep/workflow"]


def test_polls_of_another_queue_prove_nothing() -> None:
    made, buffer = telemetry()
    buffer.waiting = [Update(Metric("temporal_long_request"), 1, POLL | {"task_queue": "other"})]
    made.drain(0.0)
    assert made.not_polling(WORKFLOW, 0.0) == ["everstep/workflow"]


def test_prometheus_gets_counters_gauges_and_sums() -> None:
    made, buffer = telemetry()
    gauge = Metric("temporal_num_pollers", BUFFERED_METRIC_KIND_GAUGE)
    buffer.waiting = [SENT, SENT, ENDED, Update(gauge, 3, {"a": "x"}), Update(gauge, 4, {"b": "y"})]
    made.drain(0.0)
    registry = CollectorRegistry()
    registry.register(made)
    text = generate_latest(registry).decode()
    assert 'temporal_long_request_total{operation="PollWorkflowTaskQueue"' in text
    assert "} 2.0" in text
    assert 'temporal_num_pollers{a="",b="y"} 4.0' in text
    assert "temporal_long_request_latency_count" in text


def test_series_are_bounded() -> None:
    made, buffer = telemetry()
    buffer.waiting = [Update(Metric("x"), 1, {"label": str(n)}) for n in range(SERIES_MAX + 100)]
    made.drain(0.0)
    (family,) = made.collect()
    assert len(family.samples) == SERIES_MAX
