"""Plan files: small JSON that a person can read, compare, edit and pass on.

What has its default is left out, but for the figures a reader looks for first. Blocks named one by one become ranges; the
plan read back says the same of every block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from foretell.errors import FileFormatError, UserError
from foretell.files import one_line, write_atomically
from foretell.plan import paths, schema, text
from foretell.plan.types import (
    AXES,
    SCHEMA_VERSION,
    Adapters,
    Mesh,
    Pipeline,
    Plan,
    Residency,
    ServeLayout,
    Split,
    Sync,
)

ALWAYS = (
    "version",
    "model",
    "hardware",
    "mesh",
    "micro_batch",
    "accumulate",
    "precision",
    "optimizer",
    "clip",
    "compile",
)
"""Fields that are written whatever they hold."""
LARGEST = 1e30
"""No number of a plan is larger; infinity is written as one that is."""
MOST_RANKS = 1_000_000
WIDTH = 100
"""Columns that a value may take before it is written on several lines."""
_AGAIN = "write the plan anew with this foretell, or use the foretell that wrote it"


# --- files -----------------------------------------------------------------------------------------------------------


def read(path: str | Path) -> Plan:
    """The plan in a file; whatever is wrong with it is one `UserError`."""
    where = Path(path)
    try:
        content = where.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no plan file {where}", "give the path of a plan, such as plan.json") from None
    except UnicodeDecodeError:
        raise FileFormatError(
            f"{where} is not a plan: it is not text", "give the path of a plan, such as plan.json"
        ) from None
    except OSError as error:
        raise UserError(
            f"{where} cannot be read: {error.strerror or error}", "check the path and its permissions"
        ) from None
    return from_json(_parsed(content, str(where)), str(where))


def read_training(path: str | Path) -> Plan:
    """The same of a plan to train by; one to serve by is refused with what takes it."""
    plan = read(path)
    if plan.serve is not None:
        raise UserError(f"{path} is a plan to serve a model, not to train it", f"foretell serve {text.shell_word(str(path))}")
    return plan


def write(plan: Plan, path: str | Path) -> None:
    """Write a plan, all of it or nothing; one that could not be read back is refused."""
    where = Path(path)
    strange = text.fault(to_json(plan))
    if strange is not None:
        raise UserError(f"the plan cannot be written: {strange[0]} {strange[1]}", "rename what it names")
    try:
        write_atomically(where, text_of(plan), parents=False)
    except OSError as error:
        raise UserError(
            f"the plan cannot be written to {where}: {error.strerror or error}", "give another path"
        ) from None


def text_of(plan: Plan) -> str:
    """The text of a plan file: what fits on a line stands on one."""
    return _laid_out(to_json(plan), "") + "\n"


def _laid_out(value: Any, indent: str, before: int = 0) -> str:
    line = text.json_text(value)
    inner = indent + "  "
    if (indent and len(indent) + before + len(line) <= WIDTH) or not isinstance(value, dict | list) or not value:
        return line
    if isinstance(value, list):
        rows = [_laid_out(item, inner) for item in value]
        return "[\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}]"
    named = [(text.json_text(name), item) for name, item in value.items()]
    rows = [f"{name}: {_laid_out(item, inner, len(name) + 2)}" for name, item in named]
    return "{\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}}}"


def _parsed(content: str, where: str) -> Any:
    """JSON; a name that stands twice and numbers that are none are refused, since they would be read as something else."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in found]
        twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
        if twice is not None:
            raise FileFormatError(f"{where} is not a plan: '{text.shortened(twice)}' stands twice in one object", "keep one of the two")
        return dict(found)

    def constant(name: str) -> Any:
        raise FileFormatError(f"{where} is not a plan: it has {name}, which is no JSON", "write a number or null")

    def number(digits: str) -> int | float:
        found = float(digits)
        if abs(found) > LARGEST:
            raise FileFormatError(f"{where} is not a plan: {text.shortened(digits, 20)} is too large a number", "write a smaller one")
        return found if any(mark in digits for mark in ".eE") else int(digits)

    try:
        return json.loads(content, object_pairs_hook=pairs, parse_constant=constant, parse_float=number, parse_int=number)
    except json.JSONDecodeError as error:
        found = f"line {error.lineno}, column {error.colno}: {error.msg}" if content.strip() else "it is empty"
        raise FileFormatError(f"{where} is not a plan: {found}", "correct the JSON there") from None
    except ValueError as error:  # a number of thousands of digits
        raise FileFormatError(f"{where} is not a plan: {one_line(error).partition(';')[0]}", "correct the JSON there") from None
    except RecursionError:
        raise FileFormatError(f"{where} is not a plan: it is nested too deep", "give the path of a plan") from None


# --- values ----------------------------------------------------------------------------------------------------------


def to_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain JSON values, in the order a person reads them."""
    found: dict[str, Any] = {"$schema": schema.NAME}
    default = Plan(model={}, hardware="")
    for name in ("version", *(item.name for item in fields(Plan) if item.name != "version")):
        value = getattr(plan, name)
        if name in ALWAYS or value != getattr(default, name):
            found[name] = _WRITERS.get(name, _plain)(value)
    return found


def from_json(data: Any, where: str = "the plan") -> Plan:
    """A plan from its JSON; `where` names it in complaints."""
    if not isinstance(data, dict):
        raise FileFormatError(
            f"{where} is not a plan: it is {schema.shown(data)}", "a plan is a JSON object; see docs/plan.md"
        )
    version = data.get("version", SCHEMA_VERSION)
    if type(version) is int and version != SCHEMA_VERSION:
        raise FileFormatError(
            f"{where} is of version {version} and this foretell reads version {SCHEMA_VERSION}", _AGAIN
        )
    strange = text.fault(data)
    if strange is not None:
        raise FileFormatError(f"{where}: {strange[0]} {strange[1]}", "write names that print, on one line")
    fault = schema.fault(data)
    if fault is not None:
        raise FileFormatError(f"{where}: {fault.field} {fault.found}", fault.remedy)
    known = {item.name for item in fields(Plan)}
    plan = Plan(**{name: _READERS.get(name, _same)(value) for name, value in data.items() if name in known})
    if plan.mesh.world > MOST_RANKS:
        raise FileFormatError(f"{where}: mesh has {plan.mesh.world:,} ranks", f"write at most {MOST_RANKS:,}")
    return plan


def _plain(value: Any) -> Any:
    """Mappings as dicts, sequences as lists; a number that is none becomes null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def _same(value: Any) -> Any:
    return value


def _mesh(mesh: Mesh) -> dict[str, int]:
    return {axis: getattr(mesh, axis) for axis in AXES if getattr(mesh, axis) != 1}


def _pipeline(pipeline: Pipeline | None) -> dict[str, Any] | None:
    return None if pipeline is None else {"schedule": pipeline.schedule, "cuts": list(pipeline.cuts)}


def _split(split: Split | None) -> dict[str, Any] | None:
    if split is None:
        return None
    rules = {"rules": dict(split.rules)} if split.rules else {}
    return {**rules, "sequence": split.sequence, "loss": split.loss}


def _blocks(blocks: Mapping[str, Residency]) -> dict[str, str]:
    """Blocks named one by one as ranges; patterns stay as they are, since they may overlap."""
    folded = paths.fold(blocks) if all(map(paths.is_name, blocks)) else blocks
    return {pattern: residency.mode for pattern, residency in folded.items()}


def _notes(notes: Sequence[str]) -> list[str]:
    return [note if text.fault(note) is None else text.plain(note)[: text.MOST_CHARACTERS] for note in notes]


def _residency(value: Any) -> Residency:
    return Residency(mode=value if isinstance(value, str) else value["mode"])


_WRITERS: Mapping[str, Any] = {
    "mesh": _mesh, "pipeline": _pipeline, "split": _split, "blocks": _blocks, "notes": _notes, "adapters": Adapters.to_json,
    "sync": lambda sync: None if sync is None else sync.to_json(),
    "serve": lambda serve: None if serve is None else serve.to_json(),
}  # fmt: skip
_READERS: Mapping[str, Any] = {
    "mesh": lambda value: Mesh(**value),
    "pipeline": lambda value: None if value is None else Pipeline(**{**value, "cuts": tuple(value.get("cuts", ()))}),
    "split": lambda value: None if value is None else Split(**value),
    "blocks": lambda value: {pattern: _residency(item) for pattern, item in value.items()},
    "notes": tuple,
    "placement": tuple,
    "adapters": lambda value: None if value is None else Adapters.from_json(value),
    "sync": lambda value: None if value is None else Sync.from_json(value),
    "serve": lambda value: None if value is None else ServeLayout.from_json(value),
}
