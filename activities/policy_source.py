"""The policy in force: what was applied to the fleet last, with a job's overrides laid over it.

The ledger holds it, so that all controllers decide by the same one. A stored policy that this
version cannot read (it was written by a newer one, say) must not stop recoveries: the last one
that could be read stays in force, and a log line says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import structlog

from activities.clients import ledger_call
from activities.failures import one_line, permanent
from everstep.ledger.views import PolicyRow
from everstep.spec.load import LoadedPolicy, SpecError, policy_from_text, snapshot_for_job
from everstep.spec.policy import Policy, PolicySnapshot

CONTROLLER_AUTHOR = "controller"

log = structlog.get_logger(__name__)


class PolicySource(Protocol):
    """Where the policy of a job comes from. Blocks; call it in a thread."""

    def snapshot(self, overrides: Mapping[str, Any], /) -> PolicySnapshot:
        """The policy in force, with a job's overrides."""


class PolicyLedger(Protocol):
    """What the policy needs of the ledger."""

    def active_policy(self) -> tuple[str, str] | None:
        """Text and hash of the policy that was applied last."""

    def policy_history(self) -> Sequence[PolicyRow]:
        """Applications, newest first."""

    def apply_policy(
        self, snapshot: PolicySnapshot, yaml_text: str, *, author: str, reason: str, now: datetime
    ) -> bool:
        """Make a policy the active one."""


class FleetPolicy:
    """The fleet's policy, read from the ledger at every use."""

    def __init__(self, ledger: PolicyLedger, own: LoadedPolicy) -> None:
        """Begin with this controller's own policy file as the last one that could be read."""
        self._ledger = ledger
        self._last = own
        self._last_text: str | None = None

    def snapshot(self, overrides: Mapping[str, Any], /) -> PolicySnapshot:
        """The policy in force, with a job's overrides.

        Raises:
            SpecError: the overrides are not accepted.
            LedgerError: the ledger cannot be read.
        """
        active = self._ledger.active_policy()
        if active is not None and active[0] != self._last_text:
            self._read(active[0])
        return snapshot_for_job(self._last, overrides)

    @property
    def last(self) -> Policy:
        """The policy as it was at the last use."""
        return self._last.policy

    @property
    def last_hash(self) -> str:
        """The hash of that policy."""
        return self._last.hash

    def _read(self, text: str) -> None:
        try:
            self._last = policy_from_text(text, "the ledger (policy applied to the fleet)")
        except SpecError as error:
            log.error(  # noqa: TRY400 - the lines say all
                "the applied policy cannot be read; the one before stays in force",
                reason=one_line(error, 500),
                policy_hash=self._last.hash,
            )
        self._last_text = text


def apply_own_policy(
    ledger: PolicyLedger, own: LoadedPolicy, *, named: bool, now: datetime
) -> bool:
    """Put a controller's policy file in force at its start, if that is what was meant.

    It is when nothing was ever applied, or when this file differs from the one that a controller
    applied last: restarting a controller never takes back what a person has applied since.

    Args:
        ledger: where policies are applied.
        own: the file, as it was loaded.
        named: the operator named it; the installation's own default never replaces a person's.
        now: the instant of the application.

    Returns:
        True when it is now the active one because of this call.
    """
    history = ledger.policy_history()
    by_controller = next((a for a in history if a.author == CONTROLLER_AUTHOR), None)
    if by_controller is not None and by_controller.hash == own.hash:
        return False
    if history and not named and history[0].author != CONTROLLER_AUTHOR:
        return False
    return ledger.apply_policy(
        snapshot_for_job(own, {}),
        own.text,
        author=CONTROLLER_AUTHOR,
        reason=f"{own.source}, at the start of a controller",
        now=now,
    )


async def read_snapshot(policy: PolicySource, overrides: Mapping[str, Any]) -> PolicySnapshot:
    """The policy in force with a job's overrides.

    Raises:
        ApplicationError: the overrides are not accepted (permanent), or the ledger fails.
    """
    try:
        return await ledger_call(policy.snapshot, overrides)
    except SpecError as error:
        raise permanent(str(error)) from None
