"""Waiting for the ledger and the Temporal server at a controller's start.

A controller must come up before they do: after a power cut everything starts at once. Each wait
says what it waits for at once, then every ten seconds, and goes on for ever. What waiting cannot
cure (a ledger of a newer version, an address that is none) ends it with one line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import (
    AddSearchAttributesRequest,
    ListSearchAttributesRequest,
)
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.runtime import Runtime
from temporalio.service import RPCError, RPCStatusCode

from everstep.errors import ConfigurationProblem
from everstep.ledger import Ledger, LedgerError, LedgerUnavailable
from workers import runtime as temporal

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 2.0
SAY_INTERVAL_S = 10.0
LEDGER_PATIENCE_S = 0.5
"""Short, so that the end of a waiting controller does not wait for the database."""
SEARCH_ATTRIBUTES = ("EverstepState", "EverstepSymptom", "EverstepCodeVersion")

T = TypeVar("T")
log = structlog.get_logger(__name__)


async def wait_for_ledger(url: str) -> None:
    """Until the ledger is there and of this version; brings its schema up to date.

    Raises:
        ConfigurationProblem: the ledger is not one that this version can use.
    """
    ledger = Ledger(url, patience_s=LEDGER_PATIENCE_S)

    async def migrate() -> None:
        try:
            await asyncio.to_thread(ledger.migrate)
        except LedgerUnavailable as error:
            raise _NotYet(str(error)) from None
        except LedgerError as error:
            raise ConfigurationProblem(f"--ledger: {error}") from None

    try:
        await _until(migrate, "waiting for the ledger")
    finally:
        ledger.close()


async def wait_for_server(
    address: str | None, namespace: str | None, *, runtime: Runtime
) -> Client:
    """Until the Temporal server answers and has the namespace."""

    async def reach() -> Client:
        try:
            client = await temporal.connect(address, namespace, runtime=runtime)
        except (RuntimeError, OSError) as error:
            raise _NotYet(_short(error)) from None
        try:
            await client.workflow_service.describe_namespace(
                DescribeNamespaceRequest(namespace=client.namespace)
            )
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise _NotYet(
                    f"the server has no namespace {client.namespace!r}; create it with "
                    f"`temporal operator namespace create {client.namespace}`"
                ) from None
            if error.status is not RPCStatusCode.PERMISSION_DENIED:
                raise _NotYet(_short(error)) from None
        return client

    return await _until(reach, "waiting for the Temporal server")


async def prepare_namespace(client: Client) -> None:
    """Register our search attributes where they are missing and we may."""
    namespace = client.namespace
    wanted = dict.fromkeys(SEARCH_ATTRIBUTES, IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD)
    try:
        listed = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=namespace)
        )
        missing = {
            name: kind for name, kind in wanted.items() if name not in listed.custom_attributes
        }
        for name, kind in wanted.items():
            if listed.custom_attributes.get(name, kind) != kind:
                log.error("search attribute has another type: jobs cannot run", attribute=name)
        if missing:
            await client.operator_service.add_search_attributes(
                AddSearchAttributesRequest(namespace=namespace, search_attributes=missing)
            )
            log.info("search attributes registered", attributes=sorted(missing))
    except RPCError as error:
        if error.status is RPCStatusCode.ALREADY_EXISTS:
            return  # another controller was quicker
        flags = " ".join(f"--name {name} --type Keyword" for name in SEARCH_ATTRIBUTES)
        log.warning(
            "search attributes not checked; if they are missing, jobs wait for them",
            reason=_short(error),
            create=f"temporal operator search-attribute create --namespace {namespace} {flags}",
        )


class _NotYet(Exception):
    """Wait and try again; the text says for what."""


async def _until(attempt: Callable[[], Awaitable[T]], what: str) -> T:
    loop = asyncio.get_running_loop()
    backoff_s, said_at, said = BACKOFF_MIN_S, -SAY_INTERVAL_S, ""
    while True:
        try:
            result = await attempt()
        except _NotYet as reason:
            now = loop.time()
            if str(reason) != said or now - said_at >= SAY_INTERVAL_S:
                log.warning(what, reason=str(reason))
                said_at, said = now, str(reason)
        else:
            if said:
                log.info("the wait is over", wait=what)
            return result
        await asyncio.sleep(backoff_s)
        backoff_s = min(BACKOFF_MAX_S, backoff_s * 1.5)


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__
