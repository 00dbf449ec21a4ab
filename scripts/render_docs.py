"""Fill the generated tables of ``docs/`` from the code they describe.

    scripts/render_docs.py            rewrite what is stale
    scripts/render_docs.py --check    change nothing; exit 1 and name what is stale

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; everything else
is written by hand.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML

from everstep.decide import attribution, catalogue, faults, ladder, words
from everstep.machine.probes import gpu_rules
from everstep.spec import job, policy, torchrun

ROOT = Path(__file__).resolve().parent.parent
DOCS = ("ladder.md", "words.md", "policy.md", "job-spec.md", "gpu-probe.md")

_BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def member_docs(module: ModuleType, class_name: str) -> dict[str, str]:
    """The strings under the members of a class, by member name."""
    tree = ast.parse(inspect.getsource(module))
    body = next(
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    docs: dict[str, str] = {}
    for member, after in pairwise(body):
        name = _member_name(member)
        if name and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[name] = " ".join(str(after.value.value).replace("``", "`").split())
    return docs


def _member_name(node: ast.stmt) -> str:
    target = node.target if isinstance(node, ast.AnnAssign) else None
    if isinstance(node, ast.Assign):
        target = node.targets[0]  # type: ignore[assignment]
    return target.id if isinstance(target, ast.Name) else ""


def _rules() -> str:
    rows = ([str(n), f"`{r.name}`", r.when] for n, r in enumerate(attribution.RULES, 1))
    return table(["", "rule", "when"], rows)


def _faults() -> str:
    rows = (
        [f"`{k.name}`", k.says, f"`{k.symptom}`", f"`{k.side}`", f"`{k.cause}`", str(k.weight)]
        for k in faults.FAULTS
    )
    return table(["rule", "the rank", "symptom", "side", "charged to", "weight"], rows)


def _rows() -> str:
    rows = (
        [str(n), f"`{r.name}`", r.when, f"`{r.rung}`", f"`{r.action}`"]
        for n, r in enumerate(ladder.ROWS, 1)
    )
    return table(["", "row", "when", "rung", "action"], rows)


def _symptoms() -> str:
    rows = (
        [f"`{symptom}`", entry.meaning, ", ".join(entry.paper) or "-"]
        for symptom, entry in catalogue.SYMPTOMS.items()
    )
    return table(["symptom", "meaning", "in the paper (Table 1)"], rows)


def _actions() -> str:
    rows = (
        [f"`{a}`", e.meaning, ", ".join(f"`{r}`" for r in e.rungs) or "not in this version"]
        for a, e in catalogue.ACTIONS.items()
    )
    return table(["action", "meaning", "rungs"], rows)


def _rungs() -> str:
    docs = member_docs(words, "Rung")
    return table(["rung", "meaning"], ([f"`{r.value}`", docs[r.name]] for r in words.Rung))


def policy_leaves() -> list[tuple[str, str, str, str]]:
    """Key, default, tag and meaning of every value of the default policy, in file order."""
    document = YAML(typ="rt").load((ROOT / "config" / "policy.yaml").read_text())
    leaves = []
    for section, values in document.items():
        model: Any = policy.Policy.model_fields[section].annotation
        docs = _docs_of(model)
        for key, value in values.items():
            comment = values.ca.items.get(key)
            tag = comment[2].value.strip().lstrip("# ").strip() if comment else ""
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            leaves.append(
                (f"{section}.{key}", shown, tag.splitlines()[0] if tag else "", docs[key])
            )
    return leaves


def _docs_of(model: type[BaseModel]) -> dict[str, str]:
    """The strings under the fields of a model, its bases' too."""
    docs: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base.__module__.startswith("everstep.spec"):
            docs |= member_docs(sys.modules[base.__module__], base.__name__)
    return docs


def _policy() -> str:
    rows = ([f"`{key}`", f"`{value}`", tag, doc] for key, value, tag, doc in policy_leaves())
    return table(["key", "default", "where the default is from", "meaning"], rows)


def _model(model: type[BaseModel], docs: dict[str, str]) -> Callable[[], str]:
    def render() -> str:
        return table(
            ["key", "default", "meaning"],
            (
                [f"`{name}`", _default(field), docs.get(name, "")]
                for name, field in model.model_fields.items()
            ),
        )

    return render


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    return "-" if value is None or value == {} else f"`{value}`"


def _torchrun() -> str:
    rows = (
        [", ".join(f"`{n}`" for n in o.names if "_" not in n), o.treatment.value, o.why]
        for o in torchrun.OPTIONS
    )
    return table(["option", "is", "because / becomes"], rows)


def _gpu_rules() -> str:
    rows = (
        [f"`{name}`", r.when, f"`{r.symptom}`", f"`{r.action}`", r.confidence]
        for name, r in gpu_rules.GPU_RULES.items()
    )
    return table(["rule", "when", "symptom", "action", "confidence"], rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "rules": _rules,
    "faults": _faults,
    "rows": _rows,
    "symptoms": _symptoms,
    "actions": _actions,
    "rungs": _rungs,
    "policy": _policy,
    "gpu-rules": _gpu_rules,
    "job": _model(job.JobSpec, member_docs(job, "JobSpec")),
    "layout": _model(job.Layout, member_docs(job, "Layout")),
    "checkpoint": _model(job.CheckpointSpec, member_docs(job, "CheckpointSpec")),
    "progress": _model(job.ProgressSpec, member_docs(job, "ProgressSpec")),
    "torchrun": _torchrun,
}


def render(text: str) -> str:
    """A document with its generated parts as they should be."""
    return _BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}{m[4]}", text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check all documents; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="change nothing, fail when stale")
    check = parser.parse_args(arguments).check
    stale = 0
    for name in DOCS:
        path = ROOT / "docs" / name
        before = path.read_text(encoding="utf-8")
        after = render(before)
        if after == before:
            continue
        if check:
            stale += 1
            print(f"docs/{name}: stale; run scripts/render_docs.py", file=sys.stderr)
        else:
            path.write_text(after, encoding="utf-8")
            print(f"docs/{name}: rewritten")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
