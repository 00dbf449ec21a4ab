"""One HTTP conversation with an agent: requests that end in an answer or in one of two errors.

    AgentError
    ├── AgentUnreachable   no answer, or none of an agent: *unknown*, says nothing about the machine
    └── AgentRefused       the agent's own refusal, with its code

Not here: what is asked (``everstep.machine.client``).
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from everstep.spec.agent_api import ErrorBody, ErrorCode

ANSWER_BYTES_MAX = 16 * 1024 * 1024
LINE_BYTES_MAX = 1024 * 1024
_CONNECTIONS = httpx.Limits(max_connections=10, max_keepalive_connections=4, keepalive_expiry=20.0)
M = TypeVar("M", bound=BaseModel)


class AgentError(Exception):
    """Base of both errors; the text is one line."""


class AgentUnreachable(AgentError):
    """No answer: the machine's state is unknown."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AgentRefused(AgentError):
    """The agent answered no."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimeouts:
    """Limits of one request."""

    connect_s: float = 2.0
    answer_s: float = 10.0
    """For an answer, where the call gives no time of its own."""
    stream_silence_s: float = 7.0
    """Longest silence of an event stream (heartbeats come every two seconds)."""


class Conversation:
    """Connections to one agent."""

    def __init__(
        self,
        base_url: str,
        token: str,
        ssl_context: ssl.SSLContext,
        timeouts: ClientTimeouts,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self.base_url = base_url
        self._timeouts = timeouts
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"authorization": f"Bearer {token}", "accept-encoding": "identity"},
            verify=ssl_context,
            timeout=self._limit(),
            limits=_CONNECTIONS,
            transport=transport,
            # Agents are reached directly; a proxy of the environment is for other things.
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def request(
        self, method: str, path: str, *, timeout_s: float | None = None, **options: Any
    ) -> httpx.Response:
        """One request and its whole answer."""
        limit = self._limit(timeout_s)
        try:
            async with self._http.stream(method, path, timeout=limit, **options) as answer:
                whole = await self._whole(answer)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if not whole.is_success:
            raise self._refusal(whole)
        return whole

    @contextlib.asynccontextmanager
    async def lines(
        self, path: str, parameters: dict[str, str]
    ) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of an answer that does not end."""
        limit = self._limit(self._timeouts.stream_silence_s)
        try:
            async with self._http.stream("GET", path, params=parameters, timeout=limit) as answer:
                if not answer.is_success:
                    raise self._refusal(await self._whole(answer))
                yield self._bounded_lines(answer)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    async def _whole(self, answer: httpx.Response) -> httpx.Response:
        """The answer with its body, which may not be larger than any agent's."""
        content = bytearray()
        async for chunk in self._chunks(answer):
            content += chunk
            if len(content) > ANSWER_BYTES_MAX:
                raise self.not_an_agent()
        return httpx.Response(
            answer.status_code,
            headers=answer.headers,
            content=bytes(content),
            request=answer.request,
        )

    def _chunks(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        """The body as it comes. Agents do not compress; what unpacks may be a thousand times it."""
        if "content-encoding" in answer.headers:
            raise self.not_an_agent()
        return answer.aiter_bytes()

    async def _bounded_lines(self, answer: httpx.Response) -> AsyncIterator[str]:
        """Lines as they come; a line that does not end is not kept in memory for ever."""
        rest = bytearray()
        async for chunk in self._chunks(answer):
            rest += chunk
            if b"\n" in chunk:
                *whole, rest = rest.split(b"\n")
                for line in whole:
                    yield line.decode("utf-8", "replace")
            if len(rest) > LINE_BYTES_MAX:
                raise self.not_an_agent()

    def parsed(self, kind: type[M], content: bytes) -> M:
        """An answer as the model that it has to be."""
        try:
            return kind.model_validate_json(content)
        except ValidationError:
            raise self.not_an_agent() from None

    def not_an_agent(self) -> AgentUnreachable:
        """Somebody answers there, and it is not an agent."""
        return AgentUnreachable(f"{self.base_url}: does not answer like an agent")

    def _refusal(self, answer: httpx.Response) -> AgentError:
        try:
            body = ErrorBody.model_validate_json(answer.content)
        except ValidationError:
            return AgentUnreachable(
                f"{self.base_url}: answers with HTTP {answer.status_code}, and not like an agent"
            )
        return AgentRefused(body.code, body.message)

    def _unreachable(self, error: httpx.HTTPError) -> AgentUnreachable:
        text = " ".join(str(error).split()) or "no answer in time"
        return AgentUnreachable(f"{self.base_url}: {type(error).__name__}: {text}"[:300])

    def _limit(self, timeout_s: float | None = None) -> httpx.Timeout:
        answer_s = self._timeouts.answer_s if timeout_s is None else timeout_s
        return httpx.Timeout(answer_s, connect=self._timeouts.connect_s, pool=None)
