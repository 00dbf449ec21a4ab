"""``everstep up``, ``controller``, ``agent``, ``demo`` and ``version``: what starts processes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from everstep.commands.common import (
    NamespaceOption,
    Output,
    OutputOption,
    StateOption,
    TemporalOption,
    emit,
)

LedgerUrlOption = Annotated[
    str, typer.Option("--ledger", help="The ledger's database.", metavar="URL")
]


TlsCaOption = Annotated[
    Path | None,
    typer.Option(help="Certificates the other side is checked against.", metavar="FILE"),
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(up)
    app.command()(demo)
    app.command()(controller)
    app.command()(agent)
    app.command()(version)


def up(
    machines: Annotated[int, typer.Option(min=1, max=200, help="Local machines (agents).")] = 3,
    slots: Annotated[int, typer.Option(min=1, max=128, help="Ranks for each machine.")] = 8,
    controllers: Annotated[int, typer.Option(min=1, max=8, help="Controllers.")] = 2,
    state: StateOption = None,
    temporal_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: a free one.")
    ] = None,
    ui_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: a free one.")
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file for the controllers.")] = None,
    temporal_binary: Annotated[
        str | None, typer.Option(help="The `temporal` program to use.", metavar="PATH")
    ] = None,
    probes: Annotated[
        str, typer.Option(help="Probes of each agent: all, none, or names.", metavar="NAME[,NAME]")
    ] = "none",
) -> None:
    """Start the Temporal server, controllers and local agents; Ctrl-C ends them and their ranks."""
    from everstep.commands.common import places
    from everstep.process_log import configure_logging
    from workers.embedded import EmbeddedOptions
    from workers.up_command import run_up

    configure_logging("up")
    if policy is not None:
        from everstep.spec.load import load_policy

        load_policy(policy)
        policy = policy.absolute()
    options = EmbeddedOptions(
        state=places(state).state,
        machines=machines,
        slots=slots,
        controllers=controllers,
        temporal_port=temporal_port,
        ui_port=ui_port,
        policy=policy,
        temporal_binary=temporal_binary,
        probes=probes,
    )
    import asyncio

    raise typer.Exit(asyncio.run(run_up(options)))


def demo(
    report: Annotated[
        Path | None, typer.Option(help="Write the results as JSON.", metavar="FILE")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="State directory; default: a temporary one.", metavar="DIR"),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the state directory.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter outages.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Only these faults (repeatable).", metavar="FAULT")
    ] = None,
) -> None:
    """Break a real training job again and again, and compare it with an uninterrupted one."""
    from everstep.demo.run import DemoOptions, run_demo
    from everstep.process_log import configure_logging

    configure_logging("demo", level=logging.ERROR)

    options = DemoOptions(
        report=report, state=state, keep=keep, quick=quick, only=frozenset(only or ())
    )
    import asyncio

    raise typer.Exit(asyncio.run(run_demo(options)))


def controller(  # noqa: PLR0913, PLR0917 - one argument for each flag
    ledger: LedgerUrlOption,
    secrets: Annotated[Path, typer.Option(help="Directory of token files.", metavar="DIR")],
    checkpoint_root: Annotated[
        Path, typer.Option(help="Where jobs save that name no directory.", metavar="DIR")
    ],
    temporal: TemporalOption = None,
    namespace: NamespaceOption = None,
    listen: Annotated[
        str, typer.Option(help="Where agents register.", metavar="HOST:PORT")
    ] = "127.0.0.1:7700",
    policy: Annotated[Path | None, typer.Option(help="Policy file.", metavar="FILE")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without TLS.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    tls_ca: TlsCaOption = None,
) -> None:
    """Run a controller: workflows, activities and the endpoint where agents register."""
    from everstep.process_log import configure_logging
    from workers.controller import ControllerConfig, run_controller

    configure_logging("controller")
    config = ControllerConfig(
        temporal=temporal,
        namespace=namespace,
        ledger=ledger,
        secrets=secrets,
        listen=listen,
        checkpoint_root=checkpoint_root,
        policy=policy,
        insecure=insecure,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
    )
    import asyncio

    raise typer.Exit(asyncio.run(run_controller(config)))


def agent(  # noqa: PLR0913, PLR0917 - one argument for each flag
    machine_id: Annotated[str, typer.Option(help="This machine's id.")],
    state: Annotated[Path, typer.Option(help="State directory.", metavar="DIR")],
    secrets: Annotated[Path, typer.Option(help="Directory of token files.", metavar="DIR")],
    controller: Annotated[
        str, typer.Option(help="Controllers to register with.", metavar="URL[,URL]")
    ],
    listen: Annotated[
        str, typer.Option(help="Where the agent's API listens.", metavar="HOST:PORT")
    ] = "127.0.0.1:7710",
    address: Annotated[
        str, typer.Option(help="Where other machines reach this one.", metavar="ADDR")
    ] = "127.0.0.1",
    slots: Annotated[int, typer.Option(min=1, max=128, help="Ranks it can take.")] = 8,
    rank_user: Annotated[
        str | None, typer.Option(help="User that ranks run as.", metavar="USER")
    ] = None,
    stop_ranks_on_exit: Annotated[
        bool, typer.Option("--stop-ranks-on-exit", help="SIGTERM also stops the ranks.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without TLS.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    tls_ca: TlsCaOption = None,
    label: Annotated[
        list[str] | None, typer.Option(help="A label of this machine (repeatable).", metavar="K=V")
    ] = None,
    probes: Annotated[
        str, typer.Option(help="Probes to run: all, none, or names.", metavar="NAME[,NAME]")
    ] = "all",
    kernel_log: Annotated[
        Path | None, typer.Option(help="Follow this file, not the kernel's log.", metavar="FILE")
    ] = None,
    site_checks: Annotated[
        Path | None, typer.Option(help="Folder of the site's own checks.", metavar="DIR")
    ] = None,
) -> None:
    """Run this machine's agent."""
    from everstep.process_log import configure_logging
    from workers.agent import AgentConfig, run_agent
    from workers.agent_probes import ProbeChoice

    configure_logging("agent")
    config = AgentConfig(
        machine_id=machine_id,
        state=state,
        secrets=secrets,
        controllers=tuple(url for url in controller.split(",") if url),
        listen=listen,
        address=address,
        slots=slots,
        rank_user=rank_user,
        stop_ranks_on_exit=stop_ranks_on_exit,
        labels=_labels(label or []),
        insecure=insecure,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
        probe_choice=ProbeChoice(
            probes=tuple(name for name in probes.split(",") if name),
            kernel_log=kernel_log,
            site_checks=site_checks,
            own_folder=state / "agent",
        ),
    )
    import asyncio

    raise typer.Exit(asyncio.run(run_agent(config)))


def _labels(given: list[str]) -> dict[str, str]:
    """``K=V`` words as a mapping."""
    from everstep.errors import UsageProblem

    for word in given:
        if not word.partition("=")[0] or "=" not in word:
            raise UsageProblem(f"--label {word}: a label is written like zone=a")
    return dict(word.split("=", 1) for word in given)


def version(output: OutputOption = Output.TABLE) -> None:
    """Say which version this is."""
    import platform
    from importlib.metadata import version as installed

    own = installed("everstep")
    data = {
        "everstep": own,
        "python": platform.python_version(),
        "temporalio": installed("temporalio"),
    }
    emit(output, data, f"everstep {own}")
