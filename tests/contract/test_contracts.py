"""Stubs, implementations and what the workers register are one and the same."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio import activity
from temporalio.activity import _Definition  # the SDK has no public way to ask

from activities import contracts
from activities.policy_source import FleetPolicy
from everstep.ledger import Ledger
from everstep.machine.client import AgentPool
from everstep.spec import messages as m
from everstep.spec.base import Message
from everstep.spec.load import load_policy
from workers.controller import all_activities


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Callable[..., Any]]]:
    """What the two workers carry out, by queue."""
    folder: Path = tmp_path_factory.mktemp("contracts")
    ledger = Ledger(f"sqlite:///{folder}/ledger.db")
    control, watch = all_activities(
        ledger,
        AgentPool("t" * 32),
        FleetPolicy(ledger, load_policy(None)),
        httpx.AsyncClient(),
        folder,
    )
    return {m.TASK_QUEUE: control, m.WATCH_QUEUE: watch}


def stubs() -> dict[str, Callable[..., Any]]:
    """The contract: every function of ``activities.contracts`` that is an activity."""
    return {
        name: function
        for name, function in vars(contracts).items()
        if inspect.iscoroutinefunction(function) and _Definition.from_callable(function)
    }


def shape(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Parameter types and result type, without ``self``."""
    hints = typing.get_type_hints(function)
    result = hints.pop("return")
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return (*(hints[p.name] for p in parameters), result)


def test_contract_lists_the_stubs_and_their_options() -> None:
    assert set(stubs()) == set(contracts.OPTIONS)
    assert len(stubs()) >= 18


def test_every_stub_is_registered_on_its_queue_and_nothing_else_is(
    registered: dict[str, list[Callable[..., Any]]],
) -> None:
    by_queue: dict[str, set[str]] = {m.TASK_QUEUE: set(), m.WATCH_QUEUE: set()}
    for name, options in contracts.OPTIONS.items():
        by_queue[options.queue].add(name)
    names = {
        queue: {_Definition.must_from_callable(function).name for function in functions}
        for queue, functions in registered.items()
    }
    assert names == by_queue


def test_signatures_and_types_are_the_same(
    registered: dict[str, list[Callable[..., Any]]],
) -> None:
    contract = stubs()
    for functions in registered.values():
        for function in functions:
            definition = _Definition.must_from_callable(function)
            assert function.__name__ == definition.name
            assert shape(function) == shape(contract[str(definition.name)]), definition.name


def test_every_activity_takes_and_gives_exactly_one_message() -> None:
    for name, stub in stubs().items():
        types = shape(stub)
        assert len(types) == 2, name
        assert all(issubclass(t, Message) for t in types), name


def test_stubs_are_named_as_their_functions() -> None:
    for name, stub in stubs().items():
        assert _Definition.must_from_callable(stub).name == name


async def test_a_stub_is_never_the_implementation() -> None:
    assert activity.defn is not None
    for name, stub in stubs().items():
        with pytest.raises(NotImplementedError):
            await stub(None)
        assert name in contracts.OPTIONS


def test_options_bound_what_a_dead_controller_can_hold_up() -> None:
    """Everything that may take long is noticed by its heartbeat within seconds."""
    for name, options in contracts.OPTIONS.items():
        notice = options.heartbeat or options.start_to_close
        assert notice <= timedelta(seconds=30), name
        if options.heartbeat is not None:
            assert options.heartbeat < options.start_to_close, name
