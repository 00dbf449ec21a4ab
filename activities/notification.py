"""Telling people: a log line always, and a webhook where the operator has given one.

The webhook's URL is a secret. It is read from the controller's environment under the name that the
policy gives, and appears nowhere: not in logs, not in errors, not in Temporal.

A message is noted as sent after it was sent: a controller that dies in between sends it twice,
which is better than never. A webhook that cannot be reached never fails a recovery: after a few
tries the message is only a log line, and the result says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import httpx
import structlog
from temporalio import activity

from activities.clients import ledger_call
from activities.failpoints import after_effect
from activities.failures import one_line, temporary
from activities.policy_source import PolicySource, read_snapshot
from everstep.spec import messages as m

WEBHOOK_TIMEOUT_S = 10.0
TRIES_MAX = 6
"""Fewer than the contract allows, so that the last one ends with a result."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Problem:
    reason: str
    again: bool


class NotificationLedger(Protocol):
    """What notifying needs of the ledger."""

    def was_notified(self, key: str, /) -> bool:
        """True when the key was noted."""

    def note_notification(self, key: str, /, *, now: datetime) -> bool:
        """Note the key; True the first time."""


class Notification:
    """The activity of this file."""

    def __init__(
        self,
        ledger: NotificationLedger,
        policy: PolicySource,
        http: httpx.AsyncClient,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._ledger = ledger
        self._policy = policy
        self._http = http
        self._environ = environ

    @activity.defn(name="notify")
    async def notify(self, request: m.Notify) -> m.Done:
        """Tell people; repeats by key are harmless."""
        if await ledger_call(self._ledger.was_notified, request.key):
            return m.Done(note="told before")
        tell = log.info if request.severity == "info" else log.warning
        if activity.info().attempt == 1:
            tell(
                "notification",
                severity=request.severity,
                job_id=request.job_id,
                incident_id=request.incident_id,
                text=request.text,
            )
        policy = await read_snapshot(self._policy, {})
        variable = policy.policy.notify.webhook_url_env
        url = self._environ.get(variable, "") if variable else ""
        problem = await self._post(url, variable, request) if url else None
        if problem is not None:
            if problem.again and activity.info().attempt < TRIES_MAX:
                raise temporary(problem.reason)
            log.error("webhook failed", job_id=request.job_id, reason=problem.reason)
            return m.Done(note=one_line(f"logged only: {problem.reason}"))
        await ledger_call(self._ledger.note_notification, request.key, now=datetime.now(UTC))
        after_effect()
        return m.Done(note="logged and sent to the webhook" if url else "logged")

    async def _post(self, url: str, variable: str, request: m.Notify) -> _Problem | None:
        content = {
            "text": request.text,
            "severity": request.severity,
            "job_id": request.job_id,
            "incident_id": request.incident_id,
            "key": request.key,
        }
        try:
            answer = await self._http.post(url, json=content, timeout=WEBHOOK_TIMEOUT_S)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, ValueError):
            return _Problem(f"{variable}: is not a URL that can be posted to", again=False)
        except httpx.HTTPError as error:
            # Only the kind: the text of an HTTP error may hold the URL.
            return _Problem(f"the webhook of {variable}: {type(error).__name__}", again=True)
        if answer.is_success:
            return None
        again = answer.status_code >= 500 or answer.status_code == httpx.codes.TOO_MANY_REQUESTS
        return _Problem(f"the webhook of {variable}: HTTP {answer.status_code}", again=again)
