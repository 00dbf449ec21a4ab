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
            headers={"authorization": f"Bearer {token}"},
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
        try:
            answer = await self._http.request(
                method, path, timeout=self._limit(timeout_s), **options
            )
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if not answer.is_success:
            raise self._refusal(answer)
        return answer

    @contextlib.asynccontextmanager
    async def lines(
        self, path: str, parameters: dict[str, str]
    ) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of an answer that does not end."""
        limit = self._limit(self._timeouts.stream_silence_s)
        try:
            async with self._http.stream("GET", path, params=parameters, timeout=limit) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise self._refusal(answer)
                yield answer.aiter_lines()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

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
