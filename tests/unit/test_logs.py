# ruff: noqa: E501 - lines of logs stand here whole
"""Logs of ranks: what class the end of one is, and which lines are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decide.logs import (
    LINE_CHARS_MAX,
    LINES_KEPT_MAX,
    SIGNATURES,
    STALE_AFTER_LINES,
    Signature,
    classify_lines,
)
from everstep.decide.words import LogClass

FRAMES = [
    "Traceback (most recent call last):",
    '  File "train.py", line 10, in <module>',
    "    main()",
    '  File "train.py", line 7, in main',
    "    step()",
    "    ^^^^^^",
]
CHAIN = ["", "During handling of the above exception, another exception occurred:", ""]
PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:41234"


def _class(lines: list[str]) -> LogClass:
    return classify_lines(lines)[0]


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.example[:40])
def test_every_example_matches_its_own_row(signature: Signature) -> None:
    assert signature.log_class is _class([*FRAMES, signature.example])
    if not signature.exception_only:
        assert signature.log_class is _class(["step 1", signature.example])


def test_every_class_that_is_evidence_has_a_row_or_a_rule() -> None:
    by_rule = {LogClass.SILENT, LogClass.PYTHON_EXCEPTION}

    assert set(LogClass) == {s.log_class for s in SIGNATURES} | by_rule


@pytest.mark.parametrize(
    "lines, expected",
    [
        ([], LogClass.SILENT),
        (["", "  ", "\x1b[0m"], LogClass.SILENT),
        (["step 1 loss 2.0", "step 2 loss 1.9"], LogClass.OTHER),
        ([*FRAMES, "ValueError: bad batch"], LogClass.PYTHON_EXCEPTION),
        ([*FRAMES, "ValueError"], LogClass.PYTHON_EXCEPTION),
        ([*FRAMES, "my.pkg.Oops: x", "with a second line"], LogClass.PYTHON_EXCEPTION),
        ([f"[rank3]: {line}" for line in [*FRAMES, PEER]], LogClass.PEER_LOST),
        (["requests.exceptions.ConnectionError: timed out"], LogClass.OTHER),
        (["    raise failure", "ray.exceptions.ActorDiedError: The actor died"], LogClass.PEER_LOST),
        ([*FRAMES, "AssertionError"], LogClass.PYTHON_EXCEPTION),
        (["  File 'x.py', line 1", "SyntaxError: invalid syntax"], LogClass.PYTHON_EXCEPTION),
        ([*FRAMES, "torch.distributed.DistBackendError: NCCL error in: x.hpp:275, invalid usage"], LogClass.OTHER),
        ([*FRAMES, "RuntimeError: Detected mismatch between collectives on ranks."], LogClass.PYTHON_EXCEPTION),
        (["python: can't open file '/x/train.py': [Errno 2] No such file"], LogClass.IMPORT_FAILED),
        ([*FRAMES, "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 8 TiB"], LogClass.OUT_OF_MEMORY),
        ([*FRAMES, "OSError: [Errno 28] No space left on device: '/dev/shm/x'"], LogClass.OTHER),
    ],
)  # fmt: skip
def test_class_of_the_end(lines: list[str], expected: LogClass) -> None:
    assert expected is _class(lines)


def test_the_root_of_a_chain_counts_and_not_its_last_exception() -> None:
    own_first = [*FRAMES, "ValueError: bad batch", *CHAIN, *FRAMES, PEER]
    peer_first = [*FRAMES, PEER, *CHAIN, *FRAMES, "TrainError: step failed"]

    assert LogClass.PYTHON_EXCEPTION is _class(own_first)
    assert LogClass.PEER_LOST is _class(peer_first)


def test_of_separate_tracebacks_the_last_one_counts() -> None:
    handled = [*FRAMES, "ValueError: skipped a file", "step 2", "step 3"]

    assert LogClass.PEER_LOST is _class([*handled, *FRAMES, PEER])


def test_a_traceback_that_was_survived_is_not_the_reason() -> None:
    survived = [*FRAMES, "ValueError: skipped a file"]

    assert LogClass.PYTHON_EXCEPTION is _class([*survived, *["step"] * STALE_AFTER_LINES])
    assert LogClass.OTHER is _class([*survived, *["step"] * (STALE_AFTER_LINES + 1)])


def test_stack_frames_of_libraries_do_not_hide_a_traceback() -> None:
    frames = [f"frame #{n}: c10::Error + 0x{n:x} (libc10.so)" for n in range(100)]

    assert LogClass.PEER_LOST is _class([*FRAMES, PEER, "Exception raised from f", *frames])


def test_the_kept_lines_name_the_place_and_the_exception() -> None:
    _, kept = classify_lines(["x"] * 50 + [*FRAMES, "ValueError: bad batch", "bye"])

    assert kept == ("    step()", "    ^^^^^^", "ValueError: bad batch", "bye")


@given(st.lists(st.text(max_size=400), max_size=60))
def test_any_text_has_a_class_and_few_short_printable_lines(lines: list[str]) -> None:
    log_class, kept = classify_lines(lines)

    assert isinstance(log_class, LogClass)
    assert len(kept) <= LINES_KEPT_MAX
    assert all(len(line) <= LINE_CHARS_MAX and line.isprintable() for line in kept)
    assert (log_class is LogClass.SILENT) == (not kept)
    assert classify_lines(kept)[0] is not LogClass.SILENT or not kept


@given(st.lists(st.sampled_from([*FRAMES, *CHAIN, PEER, "ValueError: x", "step 1"]), max_size=30))
def test_pieces_of_tracebacks_in_any_order_do_no_harm(lines: list[str]) -> None:
    assert isinstance(_class(lines), LogClass)
