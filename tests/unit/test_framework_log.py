# ruff: noqa: E501 - lines of logs stand here as they are printed
"""Lines of real frameworks, and what they tell. Shapes are those that the frameworks print."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.machine.framework_log import LineParser, LogPhase, LogStep, may_tell

MEGATRON = (
    " iteration      122/  250000 | consumed samples:       124928 | elapsed time per iteration "
    "(ms): 500.5 | learning rate: 9.150E-06 | global batch size:  1024 | lm loss: 2.504220E+00 | "
    "loss scale: 1.0 | grad norm: 0.231 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |"
)
BAR = "  2%|▏         | 10/500 [00:10<08:20,  1.02it/s]"


def parsed(*lines: str, pattern: str | None = None) -> list[LogStep | LogPhase | None]:
    parser = LineParser(re.compile(pattern) if pattern is not None else None)
    return [parser.feed(line) for line in lines]


ONE_LINE: list[tuple[str, str, dict[str, Any]]] = [
    (
        "megatron",
        MEGATRON,
        {"step": 122, "loss": 2.50422, "grad_norm": 0.231, "step_time_s": 0.5005},
    ),
    (
        "megatron, newer, behind a prefix",
        (
            "[default7]: [2025-05-27 15:23:07] iteration        1/   24000 | consumed samples: 1024 | "
            "elapsed time per iteration (ms): 2000.0/1990.1 | throughput per GPU (TFLOP/s/GPU): 40.4 | "
            "learning rate: 1.5E-06 | lm loss: 1.192634E+01 | load_balancing_loss: 1.04E+00 | "
            "grad norm: 5.960 | num zeros: 0.0 |"
        ),
        {
            "step": 1,
            "loss": 11.92634,
            "grad_norm": 5.96,
            "step_time_s": 2.0,
            "speed_kind": "tflops",
            "speed": 40.4,
        },
    ),
    (
        "gpt-neox",
        (
            " samples/sec: 7.799 | iteration       34/   10000 | elapsed time per iteration (ms): "
            "4103.1 | learning rate: 2.111E-06 | lm_loss: 1.118665E+01 | number of skipped iterations:"
            "   0 | number of nan iterations:   0 |"
        ),
        {"step": 34, "loss": 11.18665, "step_time_s": 4.1031},
    ),
    (
        "megatron, an update skipped by the loss scaler",
        (
            " iteration       3/    500 | elapsed time per iteration (ms): 20.0 | loss scale: 1.0 | "
            "grad norm: inf | number of skipped iterations:   1 | number of nan iterations:   0 |"
        ),
        {"step": 3, "grad_norm": math.inf, "step_time_s": 0.02, "skipped": True},
    ),
    (
        "torchtitan",
        (
            "[rank0]:[titan] 2026-05-18 16:04:46,338 - root - INFO - step: 14  loss:  3.24405  "
            "grad_norm:  0.8319  memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%"
        ),
        {"step": 14, "loss": 3.24405, "grad_norm": 0.8319, "speed_kind": "mfu", "speed": 0.17},
    ),
    (
        "torchtitan in colours",
        (
            "\x1b[31mstep: 14  \x1b[32mloss:  3.24405  \x1b[38;5;208mgrad_norm:  0.8319  "
            "\x1b[34mtps: 7,282\x1b[39m"
        ),
        {"step": 14, "loss": 3.24405, "grad_norm": 0.8319, "speed_kind": "tps", "speed": 7282.0},
    ),
    (
        "deepspeed",
        (
            "[2024-07-17 19:44:06,829] [INFO] [logging.py:96:log_dist] [Rank 0] step=40, skipped=2, "
            "lr=[5e-05], mom=[[0.9, 0.999]]"
        ),
        {"step": 40},
    ),
    (
        "deepspeed's pipeline engine",
        "steps: 200 loss: 5.5508 lm loss: 5.51 iter time (s): 0.936 samples/sec: 136.706",
        {"step": 200, "loss": 5.5508, "step_time_s": 0.936},
    ),
    (
        "lightning",
        "Epoch 3:  10%|█         | 10/100 [00:01<00:08, 11.36it/s, v_num=0, train_loss=0.25]",
        {"step": 310, "loss": 0.25},
    ),
    (
        "nemo's bar",
        (
            "Epoch 0:   1%|          | 795/77225 [9:07:58<878:01:48, 41.36s/it, loss=3.1, v_num=, "
            "reduced_train_loss=3.090, global_step=794.0, consumed_samples=1.63e+6]"
        ),
        {"step": 794, "loss": 3.1},
    ),
    (
        "nemo's lines",
        (
            "Training epoch 0, iteration 120/149 | lr: 3e-05 | consumed_samples: 121 | "
            "global_batch_size: 1 | global_step: 120 | reduced_train_loss: 1.233 | "
            "train_step_timing in s: 0.031 | val_loss: 4.106"
        ),
        {"step": 120, "loss": 1.233, "step_time_s": 0.031},
    ),
    ("plain", "step 12 loss 3.412", {"step": 12, "loss": 3.412}),
    ("plain with a slash", "Step 7/100, Loss: .5", {"step": 7, "loss": 0.5}),
    (
        "plain with a speed",
        "iter 100: loss 2.3011, time 30.1ms, mfu 12.3%",
        {"step": 100, "loss": 2.3011, "speed_kind": "mfu", "speed": 12.3},
    ),
    (
        "plain, not finite",
        "loss=nan step=7 grad_norm=inf",
        {"step": 7, "loss": math.nan, "grad_norm": math.inf},
    ),
    (
        "a bar with a loss",
        "Steps:   2%|▏  | 10/500 [00:10<08:20, 1.02it/s, loss=0.1, lr=1e-5]",
        {"step": 10, "loss": 0.1},
    ),
]


@pytest.mark.parametrize("line,told", [c[1:] for c in ONE_LINE], ids=[c[0] for c in ONE_LINE])
def test_a_line_of_a_framework(line: str, told: dict[str, Any]) -> None:
    (found,) = parsed(line)
    assert isinstance(found, LogStep)
    expected = {
        "loss": None,
        "grad_norm": None,
        "step_time_s": None,
        "speed": None,
        "speed_kind": None,
    } | told
    for name, value in expected.items():
        shown = getattr(found, name)
        assert shown == (
            pytest.approx(value, nan_ok=True) if isinstance(value, float) else value
        ), name
    assert may_tell(line.encode()), "the quick look must not sort it out"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "downloading step 3 of 5",
        "Map:  45%|███       | 4500/10000 [00:01<00:02, 2000.00 examples/s]",
        BAR,
        "Loading checkpoint shards: 100%|██████████| 2/2 [00:02<00:00,  1.1s/it]",
        "step 250: train loss 1.9, val loss 2.1",
        "test step 3 loss 0.5",
        "step 0 | best loss: inf",
        "warmup_steps: 100, loss_fn: cross_entropy",
        "total steps 500 and a loss of appetite",
        "step 5% loss 3",
        "Epoch 0:   0%|          | 0/100 [00:00<?, ?it/s]",
        "using step size 0.1",
        "step " + "9" * 400 + " loss 1.0",
    ],
)
def test_a_line_that_tells_no_step(line: str) -> None:
    (found,) = parsed(line)
    assert found is None or (isinstance(found, LogStep) and found.step is None)


@pytest.mark.parametrize(
    "line,phase",
    [
        (
            " validation loss at iteration 1000 | lm loss value: 2.3E+00 | lm loss PPL: 1E1 |",
            "eval",
        ),
        ("saving checkpoint at iteration     500 to /ckpt in torch_dist format", "save"),
        ("[titan] - root - INFO - Saving the checkpoint (or staging if async is enabled).", "save"),
        ("validate step:  4  loss:  7.6  memory: 1GiB", "eval"),
        ("***** Running Evaluation *****", "eval"),
        ("Evaluating on 4096 samples", "eval"),
        ("{'eval_loss': 2.1, 'eval_runtime': 1.0}", "eval"),
        ("Validation DataLoader 0:  46%|████      | 73/157 [00:02<00:02, 37.48it/s]", "eval"),
        ("Saving model checkpoint to /out/checkpoint-500", "save"),
    ],
)
def test_a_phase_is_announced(line: str, phase: str) -> None:
    assert parsed(line) == [LogPhase(phase)]  # type: ignore[arg-type]
    assert may_tell(line.encode())


def test_the_trainers_bar_counts_once_its_losses_appear() -> None:
    """The bars of the tokenizer, before, and of the evaluation, between, have other totals."""
    found = parsed(
        "100%|██████████| 32/32 [00:01<00:00, 30.0it/s]",
        BAR,
        "{'loss': 2.3, 'grad_norm': 0.5, 'learning_rate': 5e-05, 'epoch': 0.1}",
        "  2%|▏         | 11/500 [00:11<08:20,  1.02it/s]",
        "100%|██████████| 50/50 [00:10<00:00,  1.02it/s]",
        "  2%|▏         | 12/500 [00:12<08:20,  1.02it/s]",
        "{'loss': '2.2', 'grad_norm': 'nan', 'learning_rate': '5e-05', 'epoch': '0.1'}",
    )
    assert found[:2] == [None, None]
    assert found[2] == LogStep(step=10, loss=2.3, grad_norm=0.5)
    assert found[3] == LogStep(step=11)
    assert found[4] == LogPhase("eval")
    assert found[5] == LogStep(step=12)
    last = found[6]
    assert isinstance(last, LogStep)
    assert (last.step, last.loss) == (12, 2.2)
    assert last.grad_norm is not None
    assert math.isnan(last.grad_norm)


def test_a_trainer_without_a_bar_has_losses_and_no_steps() -> None:
    line = "{'loss': 2.3, 'learning_rate': 5e-05, 'epoch': 0.1}"
    assert parsed(line) == [LogStep(step=None, loss=2.3)]


def test_the_form_with_losses_wins_over_others_of_the_same_job() -> None:
    """GPT-NeoX prints the engine's line too, one step ahead."""
    deepspeed = "[INFO] [logging.py:96:log_dist] [Rank 0] step=35, skipped=0, lr=[2e-06]"
    assert [type(found) for found in parsed(deepspeed, MEGATRON, deepspeed)] == [
        LogStep,
        LogStep,
        type(None),
    ]


def test_a_bar_that_starts_again_counts_on() -> None:
    bar = "Train: {}%|##  | {}/4 [00:10<08:20, 1.02it/s, loss=0.1]"
    bars = [bar.format(n * 25, n) for n in (1, 4, 1, 2)]
    assert [found.step for found in parsed(*bars) if isinstance(found, LogStep)] == [1, 4, 5, 6]
    plain = [f"Epoch {e}, step {n}/3, loss: 0.5" for e in (1, 2) for n in (1, 2, 3)]
    assert [f.step for f in parsed(*plain) if isinstance(f, LogStep)] == [1, 2, 3, 4, 5, 6]


def test_a_bar_that_has_no_loss_to_show_is_not_nan() -> None:
    bar = "Epoch 0:  10%|# | {}/100 [00:01<00:08, 11.36it/s, loss={}, v_num=0]"
    found = parsed(bar.format(1, "nan"), bar.format(2, "2.5"), bar.format(3, "nan"))
    assert [step.loss for step in found if isinstance(step, LogStep)][:2] == [None, 2.5]
    last = found[2]
    assert isinstance(last, LogStep)
    assert last.loss is not None
    assert math.isnan(last.loss), "after a loss it is one"


def test_skipped_and_nan_iterations_of_megatron() -> None:
    (found,) = parsed(MEGATRON.replace("nan iterations:   0", "nan iterations:   1"))
    assert isinstance(found, LogStep)
    assert found.loss is not None
    assert math.isnan(found.loss), "it leaves such losses out of what it prints"


def test_a_jobs_own_pattern_is_the_only_form() -> None:
    pattern = r"update (?P<step>[\d,]+) .*objective=(?P<loss>\S+)(?: norm=(?P<grad_norm>\S+))?"
    assert parsed(
        "update 1,024 took 3 s, objective=1.5e-1 norm=2",
        "update 6 objective=none",
        "step 3 loss 1.0",
        "saving checkpoint at step 5",
        pattern=pattern,
    ) == [
        LogStep(step=1024, loss=0.15, grad_norm=2.0),
        LogStep(step=6),
        None,
        LogPhase("save"),
    ]


@pytest.mark.parametrize("text", ["-3", "nan", "inf", "1e300", "x", ""])
def test_an_own_pattern_may_catch_no_number(text: str) -> None:
    assert parsed(f"n={text}", pattern=r"n=(?P<step>.*)") == [None]


FRAGMENTS = st.sampled_from(
    ["step", "iteration", " 12/ 500 |", "loss", ": ", "=", "nan", "1e5", "%|", "it [", "{'loss': ",
     "\x1b[31m", "|", "Epoch 3:", "12/500 [00:10<1:2, 1it/s, loss=1]", ",", "\0", "9" * 30,
     "grad norm", "Training epoch 1, iteration 2/3 | global_step: ", "skipped=0, lr=["]
)  # fmt: skip


@given(st.lists(st.lists(FRAGMENTS | st.text(max_size=20), max_size=12).map("".join), max_size=8))
def test_no_line_harms_the_parser(lines: list[str]) -> None:
    for found in parsed(*lines):
        if isinstance(found, LogStep) and found.step is not None:
            assert 0 <= found.step < 2**53
