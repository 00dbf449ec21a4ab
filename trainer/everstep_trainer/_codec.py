"""Any nest of plain Python, torch and numpy values as a JSON tree plus raw bytes, without pickle.

A JSON scalar stands for itself. Everything else is a list whose first item is a tag::

    ["f", "0x1.8p+1"]       float, by float.hex(); one that is not finite: 16 hex digits of its bits
    ["i", "-0x1f..."]       int that does not fit into 64 bits
    ["s", "<hex>"]          str with lone surrogates
    ["l" | "t", [...]]      list, tuple
    ["d" | "od", [[k, v]]]  dict, OrderedDict (which may have a third item: torch's ``_metadata``)
    ["b" | "ba", n]         bytes, bytearray:       the n-th blob
    ["T", n] ["A", n]       torch tensor, numpy array
    ["S", n]                numpy scalar

A *blob* is ``{"name", "dtype", "shape", "offset", "bytes"}``: where its bytes lie in the payload.
Only exact types are taken: a subclass would come back as something else, so it is refused, with the
path to it. Reading trusts nothing: what a blob claims is checked against its size before anything
is allocated.

Not here: files and checksums (``_parts``).
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import struct
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep_trainer._errors import CheckpointUnreadable, UnsupportedState

if TYPE_CHECKING:
    from collections.abc import Callable

ALIGNMENT = 64
DEPTH_MAX = 200
_INT64 = 1 << 63
_NUMPY_KINDS = "biufcSUmM"
_NUMPY_DTYPE = re.compile(rf"[<>|][{_NUMPY_KINDS}][0-9]{{1,9}}(\[[0-9]{{0,9}}[A-Za-z]{{1,2}}\])?")


class Encoded(NamedTuple):
    """A state, taken apart. ``sources`` are the objects that hold the bytes of ``blobs``."""

    tree: Any
    blobs: list[dict[str, Any]]
    sources: list[Any]
    payload_bytes: int


class Raw(NamedTuple):
    """Bytes of an object, and what must stay alive for as long as they are used."""

    view: memoryview
    keep: object


def encode(state: Any) -> Encoded:
    """Take ``state`` apart. Nothing is copied yet.

    Raises:
        UnsupportedState: it holds something that cannot be stored.
    """
    encoder = _Encoder()
    tree = encoder.node(state, (), 0)
    return Encoded(tree, encoder.blobs, encoder.sources, encoder.payload_bytes)


class _Encoder:
    def __init__(self) -> None:
        self.blobs: list[dict[str, Any]] = []
        self.sources: list[Any] = []
        self.payload_bytes = 0

    def node(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise UnsupportedState(
                f"state{_where(path[:6])}... is nested more than {DEPTH_MAX} deep: "
                "does it hold itself?"
            )
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -_INT64 <= value < _INT64 else ["i", hex(value)]
        if kind is float:
            return ["f", value.hex() if math.isfinite(value) else struct.pack(">d", value).hex()]
        if kind is str:
            return _encode_text(value)
        if kind is list or kind is tuple:
            items = [self.node(item, (*path, f"[{i}]"), depth + 1) for i, item in enumerate(value)]
            return ["l" if kind is list else "t", items]
        if kind is dict or kind is OrderedDict:
            return self._mapping(value, path, depth)
        if kind is bytes or kind is bytearray:
            n = self._blob(value, path, "bytes", (len(value),), len(value))
            return ["b" if kind is bytes else "ba", n]
        return self._array(value, path)

    def _mapping(self, value: Any, path: tuple[str, ...], depth: int) -> list[Any]:
        items = []
        for key, item in value.items():
            at = (*path, f"[{key!r:.80}]")
            if not _is_key(key):
                raise UnsupportedState(
                    f"state{_where(at)} has a key of type {_type_name(key)}; keys may be str, int, "
                    "float, bool, None, bytes or tuples of these"
                )
            items.append([self.node(key, at, depth + 1), self.node(item, at, depth + 1)])
        if type(value) is dict:
            return ["d", items]
        # Module.state_dict() keeps the versions of its modules in an attribute.
        metadata = getattr(value, "_metadata", None)
        if metadata is None:
            return ["od", items]
        return ["od", items, self.node(metadata, (*path, "._metadata"), depth + 1)]

    def _array(self, value: Any, path: tuple[str, ...]) -> list[Any]:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            _check_tensor(torch, value, path)
            size = value.numel() * value.element_size()
            dtype = f"torch:{str(value.dtype)[len('torch.') :]}"
            return ["T", self._blob(value, path, dtype, tuple(value.shape), size)]
        if numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
            if value.dtype.kind not in _NUMPY_KINDS or value.dtype.fields is not None:
                raise UnsupportedState(
                    f"state{_where(path)} is a numpy value of dtype {value.dtype}, which cannot be "
                    "stored; plain numbers, strings and times can"
                )
            dtype = f"numpy:{value.dtype.str}"
            n = self._blob(value, path, dtype, tuple(value.shape), value.nbytes)
            return ["A" if type(value) is numpy.ndarray else "S", n]
        raise UnsupportedState(
            f"state{_where(path)} is a {_type_name(value)}, which cannot be stored without pickle; "
            "use dict, list, tuple, torch tensors, numpy arrays, numbers, str, bytes, bool and None"
        )

    def _blob(
        self, source: Any, path: tuple[str, ...], dtype: str, shape: tuple[int, ...], size: int
    ) -> int:
        offset = -(-self.payload_bytes // ALIGNMENT) * ALIGNMENT
        self.blobs.append(
            {
                "name": _where(path)[:300],
                "dtype": dtype,
                "shape": list(shape),
                "offset": offset,
                "bytes": size,
            }
        )
        self.sources.append(source)
        self.payload_bytes = offset + size
        return len(self.blobs) - 1


def raw_bytes(source: Any) -> Raw:
    """The bytes of an encoded object, in C order, without a copy where it can be avoided."""
    if isinstance(source, (bytes, bytearray)):
        return Raw(memoryview(source), source)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(source, (numpy.ndarray, numpy.generic)):
        array = numpy.ascontiguousarray(source).reshape(-1)
        return Raw(memoryview(array.view(numpy.uint8)), array) if array.nbytes else _NOTHING
    tensor = source.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return _tensor_memory(tensor)


def decode(tree: Any, blobs: list[Any]) -> Any:
    """Put a state together again. ``blobs`` are what ``allocate`` made, filled.

    Raises:
        CheckpointUnreadable: the tree is not one that ``encode`` makes.
    """
    try:
        return _decode(tree, blobs)
    except (TypeError, ValueError, IndexError, KeyError, struct.error, RecursionError) as error:
        raise CheckpointUnreadable(f"its header describes no state ({error})") from None


def _decode(node: Any, blobs: list[Any]) -> Any:
    if node is None or isinstance(node, (bool, int, str)):
        return node
    tag, content = node[0], node[1]
    if tag in ("l", "t"):
        items = [_decode(item, blobs) for item in content]
        return items if tag == "l" else tuple(items)
    if tag == "d":
        return {_decode(key, blobs): _decode(item, blobs) for key, item in content}
    if tag == "od":
        ordered = OrderedDict((_decode(k, blobs), _decode(v, blobs)) for k, v in content)
        if len(node) > 2:
            ordered._metadata = _decode(node[2], blobs)  # type: ignore[attr-defined]  # noqa: SLF001
        return ordered
    if isinstance(content, str):
        return _decode_scalar(tag, content)
    if not 0 <= content < len(blobs):
        raise ValueError(f"there is no blob {content}")
    return _decode_blob(tag, blobs[content])


def _decode_scalar(tag: str, text: str) -> Any:
    if tag == "f":
        if len(text) == 16 and "x" not in text:
            return struct.unpack(">d", bytes.fromhex(text))[0]
        return float.fromhex(text)
    if tag == "i":
        return int(text, 16)
    if tag == "s":
        return bytes.fromhex(text).decode("utf-8", "surrogatepass")
    raise ValueError(f"unknown tag {tag!r:.20}")


def _decode_blob(tag: str, blob: Any) -> Any:
    if tag == "b":
        return bytes(blob)
    if tag == "S":
        return blob[()]
    if tag in ("ba", "T", "A"):
        return blob
    raise ValueError(f"unknown tag {tag!r:.20}")


def allocate(blob: dict[str, Any]) -> Any:
    """An object of the kind that ``blob`` describes, to be filled through ``raw_bytes``-like views.

    Raises:
        CheckpointUnreadable: the description contradicts itself, or its library is not installed.
    """
    name, dtype, shape, size = blob["name"], blob["dtype"], blob["shape"], blob["bytes"]
    if not all(isinstance(n, int) and n >= 0 for n in (size, *shape)):
        raise CheckpointUnreadable(f"{name} has a size that makes no sense")
    library, _, kind = dtype.partition(":")
    made: Callable[[], Any]
    try:
        if library == "bytes":
            item_bytes, made = 1, functools.partial(bytearray, size)
        elif library == "torch":
            item_bytes, made = _torch_maker(kind, shape)
        elif library == "numpy":
            item_bytes, made = _numpy_maker(kind, shape)
        else:
            raise TypeError(f"unknown dtype {dtype!r:.40}")
    except ImportError:
        raise CheckpointUnreadable(
            f"{name} was saved with {library}, which cannot be imported here"
        ) from None
    except TypeError as error:
        raise CheckpointUnreadable(f"{name} has a dtype unknown here: {error}") from None
    if math.prod(shape) * item_bytes != size:
        raise CheckpointUnreadable(f"{name} has {size} bytes, which does not fit its shape")
    try:
        return made()
    except (ValueError, OverflowError, RuntimeError):
        raise CheckpointUnreadable(f"{name} has a shape that cannot be") from None


def fillable(made: Any) -> Raw:
    """Writable bytes of an object made by ``allocate``."""
    if isinstance(made, bytearray):
        return Raw(memoryview(made), made)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(made, numpy.ndarray):
        if not made.nbytes:
            return _NOTHING
        return Raw(memoryview(made.reshape(-1).view(numpy.uint8)), made)
    return _tensor_memory(made)


_NOTHING = Raw(memoryview(b""), None)


def _torch_maker(kind: str, shape: list[int]) -> tuple[int, Callable[[], Any]]:
    import torch

    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch {torch.__version__} has no {kind!r:.40}")
    item_bytes: int = torch.empty((), dtype=dtype).element_size()
    return item_bytes, functools.partial(torch.empty, shape, dtype=dtype)


def _numpy_maker(kind: str, shape: list[int]) -> tuple[int, Callable[[], Any]]:
    # By name: import-linter sees that this package needs nothing that has to be installed.
    numpy = importlib.import_module("numpy")
    try:
        # numpy reads more than names out of such a string, so only what dtype.str gives goes in.
        dtype = numpy.dtype(kind if _NUMPY_DTYPE.fullmatch(kind) else "")
    except ValueError:
        raise TypeError(f"numpy dtype {kind!r:.40}") from None
    return dtype.itemsize, functools.partial(numpy.empty, shape, dtype=dtype)


def _tensor_memory(tensor: Any) -> Raw:
    # Through the address: works for every dtype (numpy has no bfloat16) and without numpy.
    import ctypes

    size = tensor.numel() * tensor.element_size()
    if not size:
        return _NOTHING
    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    return Raw(memoryview(memory).cast("B"), tensor)


def _check_tensor(torch: Any, value: Any, path: tuple[str, ...]) -> None:
    problem = None
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        problem = f"a {_type_name(value)}; pass its local tensor (for a DTensor: .to_local())"
    elif value.layout is not torch.strided:
        problem = f"a tensor of layout {value.layout}; only dense ones can be stored"
    elif value.is_quantized:
        problem = "a quantized tensor; store its int_repr() and its scale"
    elif value.device.type == "meta":
        problem = "a tensor on the meta device, which has no data"
    if problem:
        raise UnsupportedState(f"state{_where(path)} is {problem}")


def _encode_text(text: str) -> Any:
    # JSON joins two lone surrogates into one character, so those strings travel as bytes.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return ["s", text.encode("utf-8", "surrogatepass").hex()]
    return text


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_key(item) for item in key)
    return key is None or type(key) in (str, int, float, bool, bytes)


def _where(path: tuple[str, ...]) -> str:
    return "".join(path)


def _type_name(value: Any) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__
