"""The one place inside an activity's body where the crash sweep can strike: after its effect.

A body calls ``after_effect()`` when what it changes in the world is changed, and its result is not
on its way yet. Normally that does nothing; ``workers.failpoints`` puts its hook here.
"""

from __future__ import annotations

from collections.abc import Callable


def _nothing() -> None:
    return


_hook: Callable[[], None] = _nothing


def set_hook(hook: Callable[[], None] | None) -> None:
    """Install what ``after_effect`` does in this process; None: nothing."""
    global _hook  # noqa: PLW0603 - one per process, like a signal handler
    _hook = hook or _nothing


def after_effect() -> None:
    """Called by every activity body between its effect and its return."""
    _hook()
