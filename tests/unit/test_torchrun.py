# ruff: noqa: E501 - expected lines stand here whole, as a user sees them
"""Launchers in commands: what is replaced, what is dropped, what is refused with which reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from everstep.spec.errors import format_validation_error
from everstep.spec.job import JobSpec
from everstep.spec.torchrun import OPTIONS, Treatment, unwrap_launcher


def _spec(command: str | list[str], **more: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "job", "command": command, **more})


def _refusal(command: str | list[str], **more: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        _spec(command, **more)
    (line,) = format_validation_error(caught.value, model=JobSpec)
    return line


@pytest.mark.parametrize(
    "command, expected, machines, ranks",
    [
        ("torchrun train.py", "python train.py", 1, 1),
        ("torchrun --nnodes 2 --nproc-per-node 4 train.py --lr 1", "python train.py --lr 1", 2, 4),
        ("torchrun --nnodes=2 --nproc_per_node=4 train.py", "python train.py", 2, 4),
        ("torchrun --nnodes=2:2 train.py", "python train.py", 2, 1),
        ("torchrun --nnode 3 train.py", "python train.py", 3, 1),
        ("torchrun --standalone --nproc-per-node 2 train.py", "python train.py", 1, 2),
        ("/opt/env/bin/torchrun train.py", "/opt/env/bin/python train.py", 1, 1),
        ("python3 -m torch.distributed.run --nproc-per-node 2 t.py", "python3 t.py", 1, 2),
        ("python3 -u -m torch.distributed.run t.py", "python3 t.py", 1, 1),
        ("python -um torch.distributed.run t.py", "python t.py", 1, 1),
        ("python -mtorch.distributed.run t.py", "python t.py", 1, 1),
        ("python -X dev -W error -m torch.distributed.run t.py", "python t.py", 1, 1),
        ("/usr/bin/python3.11 -m torch.distributed.run t.py", "/usr/bin/python3.11 t.py", 1, 1),
        ("python /opt/env/bin/torchrun --nproc-per-node 2 t.py", "python t.py", 1, 2),
        ("python /env/site-packages/torch/distributed/run.py t.py", "python t.py", 1, 1),
        (
            "python -m torch.distributed.launch --use_env --nproc_per_node 2 t.py",
            "python t.py",
            1,
            2,
        ),
        ("torchrun -m pkg.train --steps 5", "python -m pkg.train --steps 5", 1, 1),
        ("torchrun --module pkg.train", "python -m pkg.train", 1, 1),
        ("torchrun --no-python ./run.sh --nnodes 9", "./run.sh --nnodes 9", 1, 1),
        ("torchrun --role default t.py", "python t.py", 1, 1),
        ("torchrun t.py -m x --module y -t 3", "python t.py -m x --module y -t 3", 1, 1),
        (
            (
                "torchrun --rdzv_backend c10d --rdzv-endpoint h:1 --rdzv-id 7 --rdzv-conf a=b "
                "--node-rank 1 --master-addr h --master_port 29500 --max-restarts 3 --local-addr x "
                "--monitor-interval 1 --start-method spawn --log-dir /l -r 3 -t 3 --run-path t.py x"
            ),
            "python t.py x",
            1,
            1,
        ),
    ],
)
def test_launcher_is_replaced(command: str, expected: str, machines: int, ranks: int) -> None:
    spec = _spec(command)

    assert tuple(expected.split()) == spec.command
    assert (machines, ranks) == (spec.machines, spec.ranks_per_machine)


@pytest.mark.parametrize(
    "command",
    [
        "python train.py",
        "python train.py torchrun --nnodes 2",
        "python -m pkg.train --launcher torchrun",
        "python -c 'import torch.distributed.run'",
        "./torchrun.sh --nnodes 2",
        "bash train.sh",
        "env A=1 python train.py",
        "srun python train.py",
        "accelerate launch train.py",
        "deepspeed train.py",
        "uv run train.py",
    ],
)
def test_other_commands_pass_unchanged(command: str) -> None:
    data = {"name": "job", "command": command}

    assert unwrap_launcher(data) is data


@pytest.mark.parametrize(
    "command, line",
    [
        (
            "torchrun --nnodes 1:4 t.py",
            (
                "command: got --nnodes 1:4; one number, like --nnodes 2: a job runs on a fixed number of "
                "machines, and those that fail are replaced"
            ),
        ),
        (
            "torchrun --nproc_per_node gpu t.py",
            (
                "command: got --nproc-per-node gpu; a number, like --nproc-per-node 8: the size of a job "
                "must not depend on what one machine has"
            ),
        ),
        (
            "torchrun --nproc-per-node $N t.py",
            (
                "command: got --nproc-per-node '$N'; a whole number of 1 or more is needed (shell "
                "variables are not expanded)"
            ),
        ),
        (
            "torchrun --nnodes 0 t.py",
            "command: got --nnodes '0'; a whole number of 1 or more is needed",
        ),
        (
            "torchrun --nprok-per-node 2 t.py",
            (
                "command: got the torchrun option '--nprok-per-node'; did you mean --nproc-per-node? "
                "options of torchrun 2.13 are understood, before the program's name"
            ),
        ),
        (
            "torchrun",
            "command: got torchrun without a program; write it like `torchrun ... train.py`",
        ),
        (
            "torchrun --nnodes",
            (
                "command: got a torchrun command that cannot be read; argument --nnodes: expected one "
                "argument"
            ),
        ),
        (
            "torchrun -m --no-python x",
            "command: got both --module and --no-python; a module needs python: give only one",
        ),
        (
            "python -m torch.distributed.launch t.py",
            (
                "command: got torch.distributed.launch without --use-env; it hands --local-rank to the "
                "script: read LOCAL_RANK there and write `torchrun`"
            ),
        ),
        (
            "torchrun t.py --out /x/${local_rank}",
            (
                "command: got '/x/${local_rank}'; read LOCAL_RANK in the script: arguments are the same "
                "for all"
            ),
        ),
        (
            "bash -c 'cd /x && torchrun t.py'",
            (
                "command: got torchrun inside 'bash'; it would start a launcher for every rank: write the "
                "torchrun command itself as `command` (variables under `env`)"
            ),
        ),
        (
            "env A=1 torchrun t.py",
            (
                "command: got torchrun inside 'env'; it would start a launcher for every rank: write "
                "`command: torchrun ...` without it (variables under `env`)"
            ),
        ),
        (
            "srun python -m torch.distributed.run t.py",
            (
                "command: got torchrun inside 'srun'; it would start a launcher for every rank: write "
                "`command: torchrun ...` without it (variables under `env`)"
            ),
        ),
    ],
)
def test_refusals_name_the_reason(command: str, line: str) -> None:
    assert line == _refusal(command)


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.treatment is Treatment.REFUSED])
def test_every_refused_option_is_refused(option: Any) -> None:
    value = ["x"] if option.has_value else []
    for name in option.names:
        line = _refusal(["torchrun", name, *value, "t.py"])
        assert f"command: got the torchrun option {option.names[0]}; {option.why}" == line


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.treatment is Treatment.DROPPED])
def test_every_dropped_option_leaves_no_trace(option: Any) -> None:
    value = ["5"] if option.has_value else []
    for name in option.names:
        spec = _spec(["torchrun", name, *value, "t.py", "a"])
        assert spec.command == ("python", "t.py", "a")


def test_conflict_names_both_numbers() -> None:
    assert _refusal("torchrun --nnodes 4 t.py", machines=2) == (
        "command: got --nnodes 4 in the command, and machines: 2; give the number once, or twice the "
        "same (the command means machines: 4)"
    )
    assert "--standalone in the command, and machines: 2" in _refusal(
        "torchrun --standalone t.py", machines=2
    )
    assert "ranks_per_machine: 2" in _refusal(
        "torchrun --nproc-per-node 4 t.py", ranks_per_machine=2
    )


def test_the_same_number_twice_is_no_conflict() -> None:
    spec = _spec("torchrun --nnodes 2 --nproc-per-node 3 t.py", machines=2, ranks_per_machine=3)

    assert (spec.machines, spec.ranks_per_machine) == (2, 3)


def test_sizes_of_the_spec_hold_where_the_command_is_silent() -> None:
    spec = _spec("torchrun t.py", machines=3, ranks_per_machine=2)

    assert (spec.machines, spec.ranks_per_machine) == (3, 2)


def test_every_option_of_the_installed_torchrun_is_in_the_table() -> None:
    run = pytest.importorskip("torch.distributed.run")
    theirs = {n for a in run.get_args_parser()._actions for n in a.option_strings} - {
        "-h",
        "--help",
    }
    ours = {name for option in OPTIONS for name in option.names}

    assert set() == theirs - ours


@given(st.lists(st.text(max_size=12), max_size=8), st.integers(1, 9), st.integers(1, 9))
def test_script_arguments_are_never_touched(
    arguments: list[str], machines: int, ranks: int
) -> None:
    arguments = [a for a in arguments if "${local_rank}" not in a]
    launcher = ["torchrun", f"--nnodes={machines}", "--nproc_per_node", str(ranks), "t.py"]
    result = unwrap_launcher({"name": "job", "command": [*launcher, *arguments]})

    assert ("python", "t.py", *arguments) == result["command"]
    assert (machines, ranks) == (result["machines"], result["ranks_per_machine"])
    assert unwrap_launcher(result) is result  # a second look changes nothing


@given(
    st.one_of(
        st.none(),
        st.integers(),
        st.text(),
        st.lists(st.integers()),
        st.dictionaries(st.text(), st.text()),
    )
)
def test_data_of_any_kind_is_left_to_the_model(data: Any) -> None:
    assert unwrap_launcher(data) is data
    wrapped = {"command": data}
    if not (isinstance(data, str) and "torchrun" in data):
        assert unwrap_launcher(wrapped) is wrapped
