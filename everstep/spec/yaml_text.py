"""YAML and JSON text as plain data, with the line of every key.

Bounded in every direction, because the text may come from anybody: size, depth, number of nodes
after aliases are expanded. Only plain data: no tags, no duplicate keys, text as keys.

Not here: files (``everstep.spec.load``) and models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from functools import cache
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    MappingStartEvent,
    NodeEvent,
    SequenceStartEvent,
)
from ruamel.yaml.events import CollectionEndEvent as _CollectionEnd
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scalarbool import ScalarBoolean

from everstep.spec import yaml_cache
from everstep.spec.errors import Loc, Locate, Problem, SpecError, cut, dotted

TEXT_BYTES_MAX = 256 * 1024
DEPTH_MAX = 32
ALIASES_MAX = 100
NODES_MAX = 20_000


def plain_data(text: str, source: str | None = None, *, remember: bool = False) -> Any:
    """The text's data as dicts, lists, str, int, float, bool and None.

    Args:
        text: YAML or JSON.
        source: names it in errors.
        remember: keep what a large text says for the next time (``yaml_cache``); for catalogues
            and policies, which hold no secrets, and never for job specs, which may.

    Raises:
        SpecError: with one problem, naming its line.
    """
    size = len(text.encode("utf-8", "replace"))
    if size > TEXT_BYTES_MAX:
        _fail(source, None, "", "a file that is too large", f"at most {TEXT_BYTES_MAX // 1024} KiB")
    if remember and size >= yaml_cache.WORTH_BYTES:
        return yaml_cache.remembered(text, lambda: _parsed(text, source))
    return _parsed(text, source)


def _parsed(text: str, source: str | None) -> Any:
    if text.lstrip().startswith("{"):
        data = _json_data(text, source)
        if data is not None:
            return data
    return _Plain(source).convert(_compose(text, source), (), 0)


def locator(text: str) -> Locate:
    """Finds the line of a key path in ``text``; of its parent where the key itself is missing."""

    @cache  # only where something is wrong: that is dear for a large text
    def root() -> Any:
        try:
            return _compose(text, None)
        except SpecError:
            return None

    def locate(loc: Loc) -> int | None:
        return None if root() is None else _line_of(root(), loc)

    return locate


def _compose(text: str, source: str | None) -> Any:
    yaml = YAML(typ="rt", pure=True)
    yaml.allow_duplicate_keys = False
    try:
        _check_events(text, source)
        return yaml.load(text)
    except DuplicateKeyError as error:
        line = _mark_line(error)
        key = _quoted_word(str(error.problem))
        _fail(source, line, key, "a key that stands there twice", "give each key once")
    except ReaderError as error:
        shown = f"the character {error.character:#04x}"
        _fail(source, None, "", shown, "text without control characters")
    except MarkedYAMLError as error:
        _fail(source, _mark_line(error), "", *_syntax(error))
    except (YAMLError, ValueError, RecursionError) as error:
        _fail(
            source,
            None,
            "",
            "text that is not YAML",
            cut(str(error).splitlines()[0] if str(error) else "unreadable"),
        )


def _check_events(text: str, source: str | None) -> None:
    """Refuse what would be dear to build, before anything is built."""
    depth = aliases = nodes = documents = 0
    open_anchors: list[str | None] = []
    for event in YAML(typ="rt", pure=True).parse(text):
        line = event.start_mark.line + 1 if event.start_mark else None
        if isinstance(event, NodeEvent):
            nodes += 1
            if not isinstance(event, AliasEvent) and depth == 0:
                documents += 1
        if isinstance(event, AliasEvent):
            aliases += 1
            if event.anchor in open_anchors:
                _fail(
                    source,
                    line,
                    "",
                    f"an alias (*{event.anchor}) inside of itself",
                    "the value written out",
                )
        if isinstance(event, (MappingStartEvent, SequenceStartEvent)):
            depth += 1
            open_anchors.append(event.anchor)
        elif isinstance(event, _CollectionEnd):
            depth -= 1
            open_anchors.pop()
        if documents > 1:
            _fail(source, line, "", "a second document (---)", "one document in a file")
        if depth > DEPTH_MAX:
            _fail(source, line, "", f"more than {DEPTH_MAX} levels of nesting", "a flatter file")
        if aliases > ALIASES_MAX:
            _fail(
                source,
                line,
                "",
                f"more than {ALIASES_MAX} aliases (*name)",
                "the values written out",
            )
        if nodes > NODES_MAX:
            _fail(source, line, "", f"more than {NODES_MAX} values", "a smaller file")


class _Plain:
    """Turns the YAML library's types into plain ones, counting what aliases expand to."""

    def __init__(self, source: str | None) -> None:
        self._source = source
        self._nodes = 0
        self._top: int | None = None

    def convert(self, value: Any, loc: Loc, depth: int, line: int | None = None) -> Any:
        self._nodes += 1
        if self._nodes > NODES_MAX or depth > DEPTH_MAX:
            self._refuse(
                loc[:1], self._top, "aliases that expand too far", "the values written out"
            )
        tag = getattr(getattr(value, "tag", None), "value", None)
        if isinstance(value, TaggedScalar) or tag:
            self._refuse(loc, line, "a YAML tag (!...)", "plain values only")
        if isinstance(value, CommentedMap):
            return self._mapping(value, loc, depth)
        if isinstance(value, CommentedSeq):
            return [
                self.convert(item, (*loc, i), depth + 1, _line_of_item(value, i))
                for i, item in enumerate(value)
            ]
        return self._scalar(value, loc, line)

    def _mapping(self, value: CommentedMap, loc: Loc, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, item in value.items():
            line = _line_of_item(value, key)
            self._top = line if depth == 0 else self._top
            if not isinstance(key, str):
                self._refuse(loc, line, f"the key {cut(str(key))}", "a key must be text: quote it")
            out[str(key)] = self.convert(item, (*loc, str(key)), depth + 1, line)
        return out

    def _scalar(self, value: Any, loc: Loc, line: int | None) -> Any:
        if isinstance(value, ScalarBoolean):  # an int, but written true or false
            return bool(value)
        if value is None or isinstance(value, bool):
            return value
        for kind in (str, int, float):
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, date):
            return self._refuse(loc, line, f"the date {value}", "text is needed: quote it")
        return self._refuse(loc, line, f"a YAML {type(value).__name__}", "plain values only")

    def _refuse(self, loc: Loc, line: int | None, got: str, accepted: str) -> NoReturn:
        _fail(self._source, line, dotted(loc), got, accepted)


def _json_data(text: str, source: str | None) -> Any:
    """The data of JSON text, or None when it is not JSON (flow-style YAML starts alike)."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                _fail(
                    source,
                    _first_repeat(text, key),
                    cut(key),
                    "a key that stands there twice",
                    "give each key once",
                )
            seen[key] = value
        return seen

    def constant(name: str) -> NoReturn:
        _fail(source, None, "", name, "finite numbers only")

    try:
        data = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except (json.JSONDecodeError, RecursionError):
        return None
    _check_plain(data, source)
    return data


def _check_plain(data: Any, source: str | None) -> None:
    todo = [(data, 0)]
    nodes = 0
    while todo:
        value, depth = todo.pop()
        nodes += 1
        if depth > DEPTH_MAX:
            _fail(source, None, "", f"more than {DEPTH_MAX} levels of nesting", "a flatter file")
        if nodes > NODES_MAX:
            _fail(source, None, "", f"more than {NODES_MAX} values", "a smaller file")
        children = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
        todo.extend((child, depth + 1) for child in children)


def _first_repeat(text: str, key: str) -> int | None:
    needle = json.dumps(key)
    first = text.find(needle)
    second = text.find(needle, first + 1)
    return text.count("\n", 0, second) + 1 if second >= 0 else None


def _line_of(root: Any, loc: Loc) -> int | None:
    node, line = root, 1
    for part in loc:
        found = None
        if (isinstance(node, Mapping) and part in node) or (
            isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node)
        ):
            found = _line_of_item(node, part)
        else:
            break
        line = found if found is not None else line
        node = node[part]
    return line


def _line_of_item(node: Any, part: Any) -> int | None:
    positions = getattr(node.lc, "data", None) or {}
    entry = positions.get(part)
    return entry[0] + 1 if entry else None


def _mark_line(error: MarkedYAMLError) -> int | None:
    mark = error.problem_mark or error.context_mark
    return mark.line + 1 if mark is not None else None


def _syntax(error: MarkedYAMLError) -> tuple[str, str]:
    problem = str(error.problem or error.context or "unreadable text")
    if "'\\t'" in problem or "\\t" in problem or "\t" in problem:
        return "a tab", "indent with spaces"
    if "mapping values are not allowed" in problem:
        return "a second `:` in one line", "quote text that contains `: `, or start a new line"
    if "could not find expected ':'" in problem:
        return "a line without `:`", "write `key: value`"
    if "undefined alias" in problem:
        return f"an alias that names no anchor ({_quoted_word(problem)})", "the value written out"
    return "text that is not YAML", cut(problem.replace("\n", " "), 120)


def _quoted_word(problem: str) -> str:
    _, _, rest = problem.partition('"')
    word, _, _ = rest.partition('"')
    if not word:
        _, _, rest = problem.partition("'")
        word, _, _ = rest.partition("'")
    return cut(word)


def _fail(source: str | None, line: int | None, key: str, got: str, accepted: str) -> NoReturn:
    raise SpecError([Problem(key, got, accepted, source, line)]) from None
