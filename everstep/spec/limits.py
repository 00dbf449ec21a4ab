"""The policy's sections as the plain numbers that ``everstep.decide`` takes.

``everstep.decide`` knows no pydantic, so the policy is turned into its own small records here.
"""

from __future__ import annotations

from everstep.decide.ladder import LadderLimits
from everstep.spec.policy import Policy


def ladder_limits(policy: Policy) -> LadderLimits:
    """The ladder's budgets as counts and seconds."""
    ladder = policy.ladder
    return LadderLimits(
        budget_window_s=ladder.budget_window.total_seconds(),
        infrastructure_restarts_max=ladder.infrastructure_restarts_max,
        user_code_restarts_max=ladder.user_code_restarts_max,
        unclear_restarts_max=ladder.unclear_restarts_max,
        no_progress_restarts_max=ladder.no_progress_restarts_max,
        evictions_per_window_max=ladder.evictions_per_window_max,
        user_code_gives_up=ladder.user_code_gives_up,
        progress_without_steps_s=(
            policy.detection.first_step_max + ladder.stable_after
        ).total_seconds(),
    )
