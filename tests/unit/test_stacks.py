"""From dump to stack: equal places give equal stacks, whatever took and surrounds them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decide.stack_groups import GROUPS_MAX, ProcessStack, group_stacks
from everstep.decide.stack_report import ProcessRole, StackSource, Wait
from everstep.decide.stack_waits import helper_waits_for, role_of_child, waits_for
from everstep.decide.stacks import (
    FRAMES_SHOWN_MAX,
    Frame,
    Thread,
    fingerprint,
    frame,
    parse_faulthandler,
    parse_py_spy,
    shown,
    stack_of,
    steady,
    without_lines,
)

PY_SPY = """\
Process 615: /opt/python/bin/python train.py --name "a (b.py:1)"
Python v3.11.7 (/usr/lib/python3.11/bin/python3.11)

Thread 615 (idle): "MainThread"
    all_reduce (/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:2991)
    wrapper (/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py:81)
    Trainer.step.<locals>.reduce (/jobs/v1/my code (2)/train.py:12)
    <module> (/jobs/v1/my code (2)/train.py:14)
Thread 620 (idle): "QueueFeederThread"
    Condition.wait (/usr/lib/python3.11/threading.py:327)
    Thread._bootstrap (/usr/lib/python3.11/threading.py:1002)
"""

FAULTHANDLER = """\
Thread 0x00007f97f70fc6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f97f7c50b80 (most recent call first):
  File "/o/dist-packages/torch/distributed/distributed_c10d.py", line 2991 in all_reduce
  File "/o/dist-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/elsewhere/train.py", line 12 in reduce
  File "/elsewhere/train.py", line 14 in <module>
"""

FORKED = """\
Thread 77 (idle): "MainThread"
    Numbers.read (/jobs/train.py:6)
    _worker_loop (/env/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py:374)
    BaseProcess.run (/usr/lib/python3.11/multiprocessing/process.py:108)
    BaseProcess._bootstrap (/usr/lib/python3.11/multiprocessing/process.py:314)
    Popen._launch (/usr/lib/python3.11/multiprocessing/popen_fork.py:71)
    main (/jobs/train.py:13)
    <module> (/jobs/train.py:14)
"""


def f(function: str, path: str = "train.py", line: int | None = 1) -> Frame:
    return Frame(function, path, line)


def test_both_ways_to_a_stack_give_the_same_one() -> None:
    by_py_spy = stack_of(parse_py_spy(PY_SPY))
    by_signal = stack_of(parse_faulthandler(FAULTHANDLER))
    assert by_py_spy == by_signal
    assert shown(by_py_spy) == (
        "all_reduce (torch/distributed/distributed_c10d.py:2991)",
        "wrapper (torch/distributed/c10d_logger.py:81)",
        "reduce (train.py:12)",
        "<module> (train.py:14)",
    )
    assert fingerprint(by_py_spy) == fingerprint(by_signal)
    assert len(fingerprint(by_py_spy)) == 16


def test_a_forked_child_has_only_its_own_frames() -> None:
    stack = stack_of(parse_py_spy(FORKED))
    assert [each.function for each in stack] == ["read", "_worker_loop", "run", "_bootstrap"]
    assert role_of_child("python", "", stack) is ProcessRole.DATA_LOADER


def test_where_code_lies_does_not_matter() -> None:
    assert frame("a", "/x/y/train.py", 3) == frame("a", "/z/train.py", 3)
    assert frame("a", "/x/dist-packages/p/q.py", 3).path == "p/q.py"
    assert frame("a", "/x/lib/python3.13t/queue.py", 3).path == "lib/queue.py"
    assert frame("a", "/home/me/Megatron-LM/megatron/core/x.py", 3).path == "megatron/core/x.py"
    assert frame("a", "<frozen runpy>", 3).path == "<frozen runpy>"
    assert str(frame("f\n\x1b[0m", "/x/" + "y" * 300 + ".py", None)).isprintable()


@pytest.mark.parametrize("depth", [2, 3, 7, 40])
def test_a_recursion_is_as_deep_as_one_call(depth: int) -> None:
    walk = [f("visit"), f("children")]
    threads = [Thread("MainThread", (f("read"), *walk * depth, f("main")))]
    once = [Thread("MainThread", (f("read"), *walk, f("main")))]
    assert stack_of(threads) == stack_of(once)


def test_hooks_of_the_backward_pass_stand_above_it() -> None:
    main = (f("_engine_run_backward", "torch/autograd/graph.py"), f("main"))
    hook = (f("all_gather", "torch/distributed/distributed_c10d.py"), f("pre_backward"))
    service = (f("wait", "lib/threading.py"), f("_bootstrap", "lib/threading.py"))
    threads = [Thread("MainThread", main), Thread("", hook), Thread("Thread-1", service)]
    assert stack_of(threads) == hook + main
    assert waits_for(stack_of(threads)) is Wait.PEERS
    assert stack_of([threads[2], Thread("MainThread", (f("step"),)), threads[1]]) == (f("step"),)


def test_two_looks_keep_what_stayed() -> None:
    stuck = (f("reduce", line=5), f("main", line=9))
    assert steady(stuck, stuck) == (stuck, False)
    polling = (f("sleep", line=2), f("poll", line=7), f("main", line=9))
    again = (f("check", line=4), f("poll", line=8), f("main", line=9))
    assert steady(polling, again) == ((f("poll", line=None), f("main", line=9)), True)
    assert without_lines(stuck) == (f("reduce", line=None), f("main", line=None))


FRAMES = st.lists(
    st.builds(f, st.sampled_from("abc"), st.just("t.py"), st.integers(1, 3)), max_size=12
)


@given(FRAMES, FRAMES)
def test_what_stayed_is_the_same_both_ways(a: list[Frame], b: list[Frame]) -> None:
    kept, moved = steady(a, b)
    assert steady(b, a) == (kept, moved)
    assert steady(a, a) == (tuple(a), False)
    assert moved == (tuple(a) != tuple(b))
    outer = list(reversed(a))[: len(kept)]
    assert [each.place for each in reversed(kept)] == [each.place for each in outer]


@given(st.text(max_size=400))
def test_any_text_is_read_without_an_error(text: str) -> None:
    for parse in (parse_py_spy, parse_faulthandler):
        stack = stack_of(parse(text))
        assert waits_for(stack) in Wait
        assert all(line.isprintable() for line in shown(stack))


@given(st.lists(st.sampled_from([*PY_SPY.splitlines(), *FAULTHANDLER.splitlines(), "x", ""])))
def test_any_order_of_lines_is_read_without_an_error(lines: list[str]) -> None:
    for parse in (parse_py_spy, parse_faulthandler):
        stack_of(parse("\n".join(lines)))


def test_a_long_stack_is_shown_by_both_ends() -> None:
    frames = [f(f"f{n}") for n in range(500)]
    lines = shown(frames)
    assert len(lines) == FRAMES_SHOWN_MAX
    assert (lines[0], lines[-1]) == ("f0 (train.py:1)", "f499 (train.py:1)")
    assert any("frames ..." in line for line in lines)


C10D = "torch/distributed/distributed_c10d.py"
LOADER = "torch/utils/data/dataloader.py"


@pytest.mark.parametrize(
    "frames, expected",
    [
        ([f("all_reduce", C10D), f("main")], Wait.PEERS),
        ([f("wait", "megatron/core/pipeline_parallel/p2p_communication.py")], Wait.PEERS),
        ([f("all_reduce_gradients"), f("main")], Wait.PEERS),
        ([f("sleep_a_bit"), f("all_reduce_gradients"), f("main")], Wait.NOTHING),
        ([f("_engine_run_backward", "torch/autograd/graph.py"), f("main")], Wait.DEVICE),
        ([f("hook"), f("_engine_run_backward", "torch/autograd/graph.py")], Wait.NOTHING),
        ([f("synchronize", "torch/cuda/__init__.py"), f("main")], Wait.DEVICE),
        ([f("get", "lib/multiprocessing/queues.py"), f("_get_data", LOADER)], Wait.DATA),
        ([f("__getitem__"), f("fetch", "torch/utils/data/_utils/fetch.py")], Wait.DATA),
        ([f("barrier", C10D), f("save_checkpoint")], Wait.PEERS),
        ([f("wait", "lib/threading.py"), f("save_checkpoint")], Wait.CHECKPOINT),
        ([f("save", "torch/serialization.py"), f("main")], Wait.CHECKPOINT),
        ([f("forward"), f("checkpoint", "torch/utils/checkpoint.py")], Wait.NOTHING),
        ([f("poll", "lib/multiprocessing/popen_fork.py"), f("main")], Wait.CHILD),
        ([f("wait", "lib/subprocess.py"), f("main")], Wait.CHILD),
        ([f("forward"), f("main")], Wait.NOTHING),
        ([], Wait.NOTHING),
    ],
)
def test_what_a_stack_waits_for(frames: list[Frame], expected: Wait) -> None:
    assert waits_for(frames) is expected


def test_a_helper_is_idle_in_its_main_loop_only() -> None:
    receiving = [f("recv", "lib/multiprocessing/connection.py"), f("get", "lib/queue.py")]
    start = [f("run", "lib/multiprocessing/process.py")]
    assert helper_waits_for([*receiving, f("loop"), *start]) is Wait.WORK
    assert helper_waits_for([*receiving, f("read"), f("fetch"), f("loop")]) is Wait.NOTHING
    assert helper_waits_for([f("write"), f("loop"), *start]) is Wait.NOTHING
    assert helper_waits_for([]) is Wait.NOTHING


@pytest.mark.parametrize(
    "comm, line, frames, role",
    [
        ("pt_data_worker", "", [], ProcessRole.DATA_LOADER),
        ("python", "", [f("write_checkpoint"), f("run")], ProcessRole.CHECKPOINT_HELPER),
        ("python", "python -m my.ckpt_uploader", [f("main")], ProcessRole.CHECKPOINT_HELPER),
        ("python", "python serve_metrics.py", [f("main")], ProcessRole.OTHER),
        ("tensorboard", "", [], ProcessRole.OTHER),
    ],
)
def test_children_by_role(comm: str, line: str, frames: list[Frame], role: ProcessRole) -> None:
    assert role_of_child(comm, line, frames) is role


def process(pid: int, *looks: tuple[Frame, ...], **changes: object) -> ProcessStack:
    values: dict[str, object] = {
        "pid": pid,
        "rank": pid,
        "role": ProcessRole.RANK,
        "source": StackSource.PY_SPY,
        "looks": looks,
    }
    return ProcessStack(**(values | changes))  # type: ignore[arg-type]


def test_processes_in_one_place_are_one_group() -> None:
    waiting = (f("all_reduce", C10D), f("main"))
    groups, missed = group_stacks(
        [*(process(n, waiting, waiting) for n in range(20)), process(30, (f("read"),))], lines=True
    )
    assert not missed
    assert [(g.processes, g.spans, g.waits_for) for g in groups] == [
        (20, ((0, 19),), Wait.PEERS),
        (1, ((30, 30),), Wait.NOTHING),
    ]
    assert len(groups[0].pids) == 8


def test_only_a_wait_that_ended_makes_a_rank_move() -> None:
    waiting, busy = (f("all_reduce", C10D), f("main")), (f("forward"), f("main", line=3))
    (went_on,), _ = group_stacks([process(1, waiting, busy)], lines=True)
    assert went_on.moving
    (polls,), _ = group_stacks([process(1, (f("x"), f("poll")), (f("y"), f("poll")))], lines=True)
    assert not polls.moving
    helper = {"role": ProcessRole.CHECKPOINT_HELPER}
    (writes,), _ = group_stacks([process(1, (f("a"),), (f("b"),), **helper)], lines=True)
    assert writes.moving


def test_lines_count_only_where_they_should() -> None:
    pair = [process(1, (f("main", line=1),)), process(2, (f("main", line=2),))]
    assert len(group_stacks(pair, lines=True)[0]) == 2
    assert len(group_stacks(pair, lines=False)[0]) == 1


def test_too_many_different_stacks_are_said_to_be_left_out() -> None:
    many = [process(n, (f(f"f{n}"),), role=ProcessRole.OTHER) for n in range(GROUPS_MAX)]
    groups, missed = group_stacks([*many, process(1000, (f("main"),))], lines=True)
    assert len(groups) == GROUPS_MAX
    assert groups[0].role is ProcessRole.RANK, "ranks first"
    assert [(m.processes, m.role) for m in missed] == [(1, ProcessRole.OTHER)]
