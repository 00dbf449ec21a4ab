"""What the Temporal SDK counts, taken out of its buffer: is polling alive, and what to scrape.

A controller can be alive with no poller (a lost connection, a fatal error inside the SDK) while its
HTTP port still answers, so health is read from the polls themselves: a long poll that the server
holds open is the proof that both sides are there. Process lists and Temporal's own worker listing
are stale after a crash and are not used.

The SDK's built-in Prometheus listener is not used because it knows no token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from temporalio.runtime import (
    BUFFERED_METRIC_KIND_COUNTER,
    BUFFERED_METRIC_KIND_HISTOGRAM,
    BufferedMetricUpdate,
    MetricBuffer,
    MetricBufferDurationFormat,
)

BUFFER_SIZE = 50_000
DRAIN_INTERVAL_S = 1.0
SERIES_MAX = 5000
"""Attribute sets are bounded by queues, activity types and operations; this bounds surprises."""
POLL_GAP_MAX_S = 3.0
"""A poller that got a task asks again at once; no open poll for longer than this is not a gap."""

_POLLS = {
    "PollWorkflowTaskQueue": "workflow",
    "PollActivityTaskQueue": "activity",
}
Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Polls:
    """Long polls of one queue and kind."""

    open: int = 0
    seen_open_at: float | None = None


@dataclass(slots=True)
class _Series:
    kind: int
    description: str
    values: dict[Labels, float] = field(default_factory=dict)
    counts: dict[Labels, int] = field(default_factory=dict)


class Telemetry(Collector):
    """Drains the SDK's metric buffer; ``drain`` must be called about every second."""

    def __init__(self) -> None:
        self.buffer = MetricBuffer(BUFFER_SIZE, MetricBufferDurationFormat.SECONDS)
        self._polls: dict[tuple[str, str], _Polls] = {}
        self._series: dict[str, _Series] = {}
        self._series_total = 0

    def drain(self, now: float) -> None:
        """Take in what has happened since the last call."""
        for update in self.buffer.retrieve_updates():
            self.take(update)
        for polls in self._polls.values():
            if polls.open > 0:
                polls.seen_open_at = now

    def take(self, update: BufferedMetricUpdate) -> None:
        """Take in one update."""
        labels: Labels = tuple(sorted((k, str(v)) for k, v in update.attributes.items()))
        self._note_poll(update.metric.name, dict(labels))
        series = self._series.setdefault(
            update.metric.name, _Series(update.metric.kind, update.metric.description or "")
        )
        if labels not in series.values:
            if self._series_total >= SERIES_MAX:
                return
            self._series_total += 1
        if series.kind == BUFFERED_METRIC_KIND_COUNTER:
            series.values[labels] = series.values.get(labels, 0.0) + update.value
        elif series.kind == BUFFERED_METRIC_KIND_HISTOGRAM:
            series.values[labels] = series.values.get(labels, 0.0) + update.value
            series.counts[labels] = series.counts.get(labels, 0) + 1
        else:
            series.values[labels] = float(update.value)

    def _note_poll(self, name: str, labels: dict[str, str]) -> None:
        kind = _POLLS.get(labels.get("operation", ""))
        if kind is None:
            return
        polls = self._polls.setdefault((labels.get("task_queue", ""), kind), _Polls())
        # A poll is counted when it is sent, and its latency when it has ended in whatever way.
        if name == "temporal_long_request":
            polls.open += 1
        elif name == "temporal_long_request_latency":
            polls.open = max(0, polls.open - 1)

    def not_polling(self, expected: tuple[tuple[str, str], ...], now: float) -> list[str]:
        """Which of the expected (queue, kind) no poll is open for; empty: polling works."""
        missing = []
        for queue, kind in expected:
            polls = self._polls.get((queue, kind))
            alive = polls is not None and (
                polls.seen_open_at is not None and now - polls.seen_open_at <= POLL_GAP_MAX_S
            )
            if not alive:
                missing.append(f"{queue}/{kind}")
        return missing

    def collect(self) -> Iterator[Metric]:
        """What Prometheus scrapes."""
        for name, series in sorted(self._series.items()):
            keys = tuple(sorted({key for labels in series.values for key, _ in labels}))
            family: CounterMetricFamily | SummaryMetricFamily | GaugeMetricFamily
            if series.kind == BUFFERED_METRIC_KIND_COUNTER:
                family = CounterMetricFamily(name, series.description, labels=keys)
            elif series.kind == BUFFERED_METRIC_KIND_HISTOGRAM:
                family = SummaryMetricFamily(name, series.description, labels=keys)
            else:
                family = GaugeMetricFamily(name, series.description, labels=keys)
            for labels, value in series.values.items():
                row = [dict(labels).get(key, "") for key in keys]
                if isinstance(family, SummaryMetricFamily):
                    family.add_metric(row, count_value=series.counts[labels], sum_value=value)
                else:
                    family.add_metric(row, value)
            yield family
