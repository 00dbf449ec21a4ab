"""The watch against the real client and agents that say anything: unknown, bounded, one line."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from temporalio.testing import ActivityEnvironment

from activities.detection import Detection
from everstep.machine.client import AgentClient
from everstep.spec import messages as m
from everstep.spec.agent_api import EventKind
from tests.activity.fakes import (
    GENERATION,
    JOB,
    RUN,
    FakeLocations,
    event,
    hello,
    policy,
    refs,
    state,
)

QUICK = policy(detection={"settle_window": "20ms", "heartbeat_interval": "400ms"})


class Body(httpx.AsyncByteStream):
    """A body that comes in the given chunks, then stays open or ends."""

    def __init__(self, chunks: Iterable[bytes], *, open_after: bool) -> None:
        self.chunks, self.open_after, self.sent = chunks, open_after, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            self.sent += len(chunk)
            yield chunk
            await asyncio.sleep(0)
        if self.open_after:
            await asyncio.Event().wait()


class OneAgent:
    """A pool of one real client over a mock transport."""

    def __init__(self, handler: Callable[[httpx.Request], httpx.Response]) -> None:
        self.client_ = AgentClient(
            "http://m1", "token", machine_id="m1", transport=httpx.MockTransport(handler)
        )

    def client(self, base_url: str, machine_id: str | None = None) -> AgentClient:
        return self.client_


def agent(body: Callable[[], Body], run_state: bytes | None = None) -> OneAgent:
    """An agent whose every stream says ``body()``."""
    known = state("m1").model_dump_json().encode() if run_state is None else run_state

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/events":
            return httpx.Response(200, stream=body())
        return httpx.Response(200, content=known)

    return OneAgent(handle)


async def watch(agents: OneAgent, after_s: float) -> m.WatchResult:
    request = m.WatchRun(
        job_id=JOB,
        run_id=RUN,
        generation=GENERATION,
        machines=refs("m1"),
        until=m.WatchUntil(after_s=after_s),
        policy=QUICK,
    )
    async with asyncio.timeout(20):
        result: m.WatchResult = await ActivityEnvironment().run(
            Detection(FakeLocations(), agents).watch_run, request
        )
    return result


def line(message: Any) -> bytes:
    return bytes(message.model_dump_json().encode() + b"\n")


GOOD = line(hello()) + line(event(EventKind.NONFINITE, seq=1, rank=0))

GARBAGE = {
    "not json": b"hello\n",
    "another type": b'{"type": "surprise"}\n',
    "no type": b'{"seq": 1}\n',
    "a list": b"[]\n",
    "deep": b"[" * 50_000 + b"\n",
    "wrong types": b'{"type":"event","seq":"x","kind":"nonfinite"}\n',
    "unknown kind": b'{"type":"event","seq":1,"kind":"moonphase"}\n',
    "not utf-8": b"\xff\xfe\xfd\n",
    "empty line": b"\n",
    "nothing": b"",
    "html": b"<html>proxy error</html>\n",
    "another machine": line(hello("m2")),
    "another version": line(hello().model_copy(update={"api_version": 9})),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_makes_the_machine_unknown_and_nothing_else(name: str) -> None:
    agents = agent(lambda: Body([GARBAGE[name]], open_after=False))
    with capture_logs() as logs:
        result = await watch(agents, 0.4)
    assert result.kind == "tick"
    assert result.unreachable == ("m1",)
    assert result.observations == ()
    assert len([entry for entry in logs if entry["event"] == "machine unknown"]) == 1


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff", b"[1,2]", b'{"run_id": 5}'])
async def test_a_state_that_makes_no_sense_makes_the_machine_unknown(body: bytes) -> None:
    agents = agent(lambda: Body([line(hello())], open_after=True), run_state=body)
    result = await watch(agents, 0.4)
    assert result.kind == "tick"
    assert result.unreachable == ("m1",)


async def test_lines_in_pieces_are_lines() -> None:
    pieces = [GOOD[i : i + 3] for i in range(0, len(GOOD), 3)]
    assert (await watch(agent(lambda: Body(pieces, open_after=True)), 10)).kind == "trouble"


async def test_after_garbage_a_good_stream_is_believed_again() -> None:
    bodies = iter([GARBAGE["not json"], GARBAGE["deep"], GOOD])
    agents = agent(lambda: Body([next(bodies)], open_after=True))
    assert (await watch(agents, 10)).kind == "trouble"


async def test_a_line_without_an_end_costs_bounded_memory() -> None:
    chunk = b"x" * 65_536
    bodies: list[Body] = []

    def endless() -> Body:
        bodies.append(Body((chunk for _ in range(4096)), open_after=True))
        return bodies[-1]

    tracemalloc.start()
    try:
        result = await watch(agent(endless), 1.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.unreachable == ("m1",)
    assert max(body.sent for body in bodies) < 16 * 1024 * 1024
    assert peak < 64 * 1024 * 1024


async def test_a_compressed_answer_is_not_an_agents() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        bomb = Body([gzip.compress(bytes(1 << 26))], open_after=False)
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=bomb)

    tracemalloc.start()
    try:
        result = await watch(OneAgent(handle), 0.4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.unreachable == ("m1",)
    assert peak < (1 << 26) + (1 << 24)  # the test's own, and a little


async def test_a_flood_of_events_is_one_bounded_result() -> None:
    flood = [line(hello())] + [
        line(event(EventKind.RANK_EXITED, seq=n, rank=n, data={"exit_code": 1}))
        for n in range(1, 3000)
    ]
    result = await watch(agent(lambda: Body(flood, open_after=True)), 10)
    assert result.kind == "trouble"
    assert len(result.model_dump_json()) < 100_000


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "type",
        "seq",
        "kind",
        "job_id",
        "run_id",
        "generation",
        "rank",
        "age_s",
        "reason",
        "data",
        "ring_id",
        "oldest_seq",
        "next_seq",
        "machine_id",
        "agent_boot_id",
        "api_version",
        "monotonic_s",
        "runs",
    ]
)
ALMOST = st.dictionaries(FIELDS, JSON_VALUES).map(lambda d: json.dumps(d).encode())
TYPED = st.tuples(ALMOST, st.sampled_from(["event", "hello", "gap", "heartbeat"])).map(
    lambda pair: json.dumps(json.loads(pair[0]) | {"type": pair[1]}).encode()
)
CHUNKS = st.lists(
    st.binary(max_size=80)
    | ALMOST.map(lambda b: b + b"\n")
    | TYPED.map(lambda b: b + b"\n")
    | st.sampled_from([GOOD, line(hello()), b"\n", b"\r\n", b"\x00"]),
    max_size=8,
)


@given(chunks=CHUNKS)
@settings(max_examples=60)
def test_whatever_comes_the_watch_answers(chunks: list[bytes]) -> None:
    result = asyncio.run(watch(agent(lambda: Body(chunks, open_after=True)), 0.06))
    assert result.kind in {"tick", "trouble"}
    m.WatchResult.model_validate_json(result.model_dump_json())
