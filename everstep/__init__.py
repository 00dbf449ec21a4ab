"""Everstep keeps distributed training jobs running.

The SDK's public names are loaded when they are first used, so that processes which need one small
module of this package (agents, workflow workers, ``everstep version``) do not load all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.client import Client as Client
    from everstep.client import Launched as Launched
    from everstep.client import Sighting as Sighting
    from everstep.connect import Places as Places
    from everstep.connect import find_places as find_places
    from everstep.errors import EverstepError as EverstepError
    from everstep.spec.job import JobSpec as JobSpec
    from everstep.spec.messages import JobResult as JobResult
    from everstep.spec.messages import JobStatus as JobStatus
    from everstep.sync_client import SyncClient as SyncClient

_HOMES = {
    "Client": "everstep.client",
    "EverstepError": "everstep.errors",
    "JobResult": "everstep.spec.messages",
    "JobSpec": "everstep.spec.job",
    "JobStatus": "everstep.spec.messages",
    "Launched": "everstep.client",
    "Places": "everstep.connect",
    "Sighting": "everstep.client",
    "SyncClient": "everstep.sync_client",
    "find_places": "everstep.connect",
}


def __getattr__(name: str) -> Any:
    """Load a public name at its first use."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
