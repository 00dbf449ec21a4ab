"""How a machine tells controllers that it is there, and learns what it may still run.

At its start and every interval the agent posts a ``Registration`` to any one of the controllers.
The answer carries fences: a machine that comes back after its run was replaced ends its old ranks
because of it, before anything else. No controller reachable is no reason for anything: training
goes on and the agent keeps trying, with growing pauses and jitter.

Not here: what controllers do with it (``workers.controller``).
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence

import httpx
import structlog
from pydantic import ValidationError

from everstep.machine.guard import one_line, told
from everstep.spec.agent_api import Registration, RegistrationAnswer

PATH = "/v1/agents/register"
ATTEMPT_MAX_S = 5.0
PAUSE_MIN_S = 0.2
INTERVAL_MIN_S, INTERVAL_MAX_S = 0.1, 3600.0
LOG_INTERVAL_S = 60.0

log = structlog.get_logger(__name__)


class Registrar:
    """Keeps one agent registered until it is cancelled."""

    def __init__(
        self,
        controllers: Sequence[str],
        token: str,
        *,
        describe: Callable[[], Registration],
        apply: Callable[[RegistrationAnswer], Awaitable[None]],
        interval_s: float,
        ssl_context: ssl.SSLContext,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._controllers = [url.rstrip("/") for url in controllers]
        self._token = token
        self._describe = describe
        self._apply = apply
        self._interval_s = interval_s
        self._ssl_context = ssl_context
        self._transport = transport
        self._failures = 0
        self._told_at = -LOG_INTERVAL_S
        self._told = ""

    async def run(self) -> None:
        """Register for ever; nothing that goes wrong ends it."""
        async with httpx.AsyncClient(
            headers={"authorization": f"Bearer {self._token}"},
            verify=self._ssl_context,
            timeout=httpx.Timeout(ATTEMPT_MAX_S, connect=2.0),
            transport=self._transport,
            trust_env=False,
        ) as http:
            while True:
                try:
                    answer = await self._register(http)
                    if answer is not None:
                        await self._apply(answer)
                except Exception as error:  # noqa: BLE001 - nothing may end this loop
                    log.error("registration failed, trying again", **told(error))  # noqa: TRY400
                    answer = None
                self._failures = 0 if answer else self._failures + 1
                await asyncio.sleep(self._pause_s())

    async def _register(self, http: httpx.AsyncClient) -> RegistrationAnswer | None:
        """The answer of the first controller that gives one; it is asked first next time."""
        problems = []
        for url in tuple(self._controllers):
            try:
                # Described anew for each: jobs may have ended while another one was silent.
                body = self._describe().model_dump_json()
                response = await http.post(
                    url + PATH, content=body, headers={"content-type": "application/json"}
                )
                response.raise_for_status()
                answer = RegistrationAnswer.model_validate_json(response.content)
            except httpx.HTTPStatusError as error:
                text = one_line(error.response.text, 200)
                problems.append(f"{url}: HTTP {error.response.status_code} {text}")
            except httpx.HTTPError as error:
                problems.append(f"{url}: {type(error).__name__}: {one_line(str(error), 200)}")
            except ValidationError:
                problems.append(f"{url}: does not answer like a controller")
            else:
                self._controllers.sort(key=lambda other: other != url)
                self._note(answer, url)
                return answer
        self._tell("no controller took the registration", problems="; ".join(problems))
        return None

    def _note(self, answer: RegistrationAnswer, url: str) -> None:
        self._interval_s = min(max(answer.register_interval_s, INTERVAL_MIN_S), INTERVAL_MAX_S)
        if not answer.accepted:
            self._tell("a controller refused the registration", problems=one_line(answer.message))
        elif self._told != "registered":
            self._told, self._told_at = "registered", time.monotonic()
            log.info("registered", controller=url)

    def _tell(self, text: str, *, problems: str) -> None:
        """One line when it changes, and once a minute while it lasts."""
        now = time.monotonic()
        if text != self._told or now - self._told_at >= LOG_INTERVAL_S:
            self._told, self._told_at = text, now
            log.warning(text, problems=problems)

    def _pause_s(self) -> float:
        if not self._failures:
            # A fleet that was started at once must not come back at once for ever.
            return self._interval_s * random.uniform(0.9, 1.1)  # noqa: S311 - no secret
        longest = max(self._interval_s, PAUSE_MIN_S)
        pause = min(longest, PAUSE_MIN_S * 2.0 ** min(self._failures - 1, 20))
        return pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
