"""Any nest of supported values comes back in the same kinds, bit for bit."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from everstep_trainer import CheckpointUnreadable, UnsupportedState, _codec, _parts
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.trainer.kit import same

IDENTITY = {"job_id": "j", "rank": 0}

TORCH_DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any dtype with any bits in them, of any shape up to three dimensions."""
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    made = torch.empty(shape, dtype=dtype)
    size = made.numel() * made.element_size()
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    if size:
        made = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
    return made.transpose(0, 1) if len(shape) == 2 and draw(st.booleans()) else made


arrays = npst.arrays(
    dtype=st.one_of(
        npst.boolean_dtypes(),
        npst.integer_dtypes(endianness="?"),
        npst.floating_dtypes(endianness="?"),
        npst.complex_number_dtypes(),
        npst.datetime64_dtypes(),
        npst.byte_string_dtypes(max_len=5),
        npst.unicode_string_dtypes(max_len=5),
    ),
    shape=npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
numpy_scalars = st.sampled_from(
    [
        np.float32(1.5),
        np.float64("nan"),
        np.int8(-3),
        np.bool_(True),
        np.str_("é"),
        np.uint64(2**63),
    ]
)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.floats(),
    st.text(),
    st.text(alphabet=st.characters(categories=["Cs"]), max_size=3),
    st.binary(max_size=100),
    st.binary(max_size=20).map(bytearray),
)
keys = st.one_of(
    st.text(),
    st.integers(),
    st.booleans(),
    st.none(),
    st.binary(),
    st.tuples(st.text(), st.integers()),
)
states = st.recursive(
    st.one_of(plain, tensors(), arrays, numpy_scalars),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


def round_trip(state: Any, directory: Path) -> Any:
    path = directory / "rank-0.part"
    written = _parts.write_part(path, IDENTITY, _codec.encode(state))
    raw = path.read_bytes()
    assert written.size == len(raw)
    assert hashlib.sha256(raw[:-32]).digest() == raw[-32:]
    assert written.sha256 == raw[-32:].hex()
    return _parts.read_part(path, IDENTITY, written.sha256)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("codec")


@given(state=states)
def test_every_state_comes_back_the_same(state: Any, directory: Path) -> None:
    assert same(round_trip(state, directory), state)


def test_equality_of_these_tests_is_strict() -> None:
    one = torch.tensor([1.0])
    assert not same(1, True)
    assert not same(0.0, -0.0)
    assert not same([1], (1,))
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same(one, one.double())
    assert not same(one, torch.nextafter(one, one * 2))
    assert not same(np.float32(1), np.float64(1))
    assert not same({}, OrderedDict())


def test_a_real_models_and_optimizers_state_comes_back(directory: Path) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.randn(4, 5, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    schedule.step()
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "parameters": list(model.parameters()),
    }
    loaded = round_trip(state, directory)
    assert same(loaded["optimizer"], state["optimizer"])
    assert same(loaded["schedule"], state["schedule"])
    assert same(loaded["model"], state["model"])
    assert loaded["model"]._metadata == state["model"]._metadata
    assert [type(tensor) for tensor in loaded["parameters"]] == [torch.Tensor] * 4
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def test_views_conjugates_and_strides_are_stored_as_what_they_show(directory: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    strange = {
        "column": base[:, 1],
        "every second": base.reshape(-1)[::2],
        "expanded": torch.tensor([5]).expand(3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "needs gradient": (base.clone().requires_grad_() * 2),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "step": np.arange(10)[::3],
    }
    loaded = round_trip(strange, directory)
    for name, value in strange.items():
        shown = value.resolve_conj().resolve_neg() if isinstance(value, torch.Tensor) else value
        assert same(loaded[name], shown), name
    assert not loaded["needs gradient"].requires_grad


def test_what_is_loaded_is_writable_and_shares_nothing(directory: Path) -> None:
    loaded = round_trip({"a": torch.zeros(3), "b": np.zeros(3), "c": torch.zeros(3)}, directory)
    loaded["a"] += 1
    loaded["b"] += 1
    assert loaded["c"].sum() == 0
    assert loaded["a"].data_ptr() % 64 == 0


class Point(NamedTuple):
    x: int
    y: int


class Subclass(dict[str, int]):
    pass


def cycle() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, "state['m'][0] is a set, which cannot be stored without pickle"),
        (Point(1, 2), "Point"),
        (Subclass(a=1), "Subclass"),
        (print, "builtin_function_or_method"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (torch.float32, "torch.dtype"),
        (np.array([None]), "dtype object"),
        (np.array([(1, 2.0)], dtype="i4,f4"), "cannot be stored"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "meta device"),
        ({frozenset(): 1}, "has a key of type frozenset"),
        ({1j: 1}, "has a key of type complex"),
        (cycle(), "does it hold itself?"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:.*sparse.*")
def test_what_cannot_be_stored_is_named(value: Any, message: str) -> None:
    with pytest.raises(UnsupportedState) as caught:
        _codec.encode({"m": [value]})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "state['m'][0]" in str(caught.value)


def test_a_state_with_too_many_plain_values_is_refused(directory: Path) -> None:
    state = ["x" * 1_000_000] * 70
    with pytest.raises(UnsupportedState, match="put large lists of numbers into arrays"):
        round_trip(state, directory)


@pytest.mark.parametrize(
    "tree",
    [
        ["?", 0], ["T", 9], ["T", -1], ["T", True], ["T", "0"], ["f", "zz"], ["f", 3], ["i", "no"],
        ["s", "f"], ["d", [[["l", []], 1]]], ["d", 3], ["l"], [], {"a": 1}, ["l", 4], ["od", [[1]]],
    ],
    ids=lambda tree: str(tree)[:20],
)  # fmt: skip
def test_a_tree_that_nobody_wrote_is_unreadable(tree: Any) -> None:
    with pytest.raises(CheckpointUnreadable):
        _codec.decode(tree, [torch.zeros(1)])


def test_a_bottomless_tree_is_unreadable() -> None:
    tree: Any = 1
    for _ in range(5000):
        tree = ["l", [tree]]
    with pytest.raises(CheckpointUnreadable):
        _codec.decode(tree, [])
