"""The schema of plan files, and whether a value keeps to it.

The schema is the one place that says what a plan file may hold. It uses a part of JSON Schema (draft 2020-12), which is
read here, so that reading a plan needs no further package and a complaint names the field in plain words. One thing is
stricter: 4.0 is no whole number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from foretell.errors import near_names
from foretell.plan.text import json_text

FILE = "plan.schema.json"
NAME = f"foretell/plan/{FILE}"
"""What a plan file names as its schema."""

LARGEST = 10**30
"""Of any number in a plan: what is larger is no figure of a machine."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip
_WORDS = {
    "object": "an object", "array": "a list", "string": "text", "integer": "a whole number", "number": "a number",
    "boolean": "true or false", "null": "null",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with a value: where, what was found, what to try."""

    field: str
    found: str
    remedy: str


@cache
def load() -> dict[str, Any]:
    """The schema itself, as it travels with the package."""
    text = (resources.files("foretell.plan") / FILE).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def fault(value: Any, rule: Mapping[str, Any] | None = None, field: str = "") -> Fault | None:
    """The first thing about a value that its rule does not allow; None where it keeps to it."""
    rule = resolve(load() if rule is None else rule)
    if "anyOf" in rule:
        return _any_of(value, rule, field)
    if "const" in rule and (value != rule["const"] or type(value) is not type(rule["const"])):
        return Fault(field=field, found=f"is {shown(value)}", remedy=f"write {shown(rule['const'])}")
    if "enum" in rule and value not in rule["enum"]:
        near = near_names(value, rule["enum"]) if isinstance(value, str) else []
        hint = f"did you mean {', '.join(near)}? " if near else ""
        return Fault(field=field, found=f"is {shown(value)}", remedy=f"{hint}known: {', '.join(rule['enum'])}")
    return _of_type(value, rule, field) or _in_bounds(value, rule, field) or _inside(value, rule, field)


def resolve(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rule, with what it refers to under its own words."""
    if "$ref" not in rule:
        return rule
    target: Any = load()
    for step in rule["$ref"].removeprefix("#/").split("/"):
        target = target[step]
    own = {name: value for name, value in rule.items() if name != "$ref"}
    return {**resolve(target), **own}


def shown(value: Any) -> str:
    """A value in a message: as JSON has it, cut short."""
    try:
        text = json_text(value)
    except RecursionError:
        return "nested too deep"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _any_of(value: Any, rule: Mapping[str, Any], field: str) -> Fault | None:
    """None if one choice allows it; else what the choice says that is nearest: the one of the value's own type."""
    faults = []
    for choice in rule["anyOf"]:
        found = fault(value, choice, field)
        if found is None:
            return None
        choice = resolve(choice)
        alike = _is(value, choice.get("type", "string" if "enum" in choice else "null"))
        faults.append((not alike, found))
    if all(far for far, _ in faults):
        words = [_wanted(resolve(choice)) for choice in rule["anyOf"]]
        return Fault(field=field, found=f"is {shown(value)}", remedy=f"write {' or '.join(words)}")
    return min(faults, key=lambda item: item[0])[1]


def _wanted(rule: Mapping[str, Any]) -> str:
    if "enum" in rule:
        return f"one of {', '.join(rule['enum'])}"
    types = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    return " or ".join(_WORDS[name] for name in types)


def _is(value: Any, wanted: str | list[str]) -> bool:
    names = wanted if isinstance(wanted, list) else [wanted]
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, _TYPES[name]) for name in names)


def _of_type(value: Any, rule: Mapping[str, Any], field: str) -> Fault | None:
    if "type" not in rule or _is(value, rule["type"]):
        return None
    return Fault(field=field, found=f"is {shown(value)}", remedy=f"write {_wanted(rule)}")


def _in_bounds(value: Any, rule: Mapping[str, Any], field: str) -> Fault | None:
    """Least values, lengths and forms; a rule about numbers says nothing of text, and so on."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < rule.get("minimum", value):
            return Fault(
                field=field, found=f"is {shown(value)}", remedy=f"write a number of at least {rule['minimum']}"
            )
        if value > rule.get("maximum", LARGEST):
            most = rule.get("maximum", LARGEST)
            return Fault(field=field, found=f"is {shown(value)}", remedy=f"write a number of at most {most:,}")
        if "exclusiveMinimum" in rule and value <= rule["exclusiveMinimum"]:
            return Fault(
                field=field, found=f"is {shown(value)}", remedy=f"write a number above {rule['exclusiveMinimum']}"
            )
    if isinstance(value, str):
        if len(value) < rule.get("minLength", 0):
            return Fault(field=field, found="is empty", remedy="write a name")
        if "pattern" in rule and re.search(rule["pattern"], value) is None:
            return Fault(field=field, found=f"is {shown(value)}", remedy=f"write it like {rule['examples'][0]}")
    return None


def _inside(value: Any, rule: Mapping[str, Any], field: str) -> Fault | None:
    if isinstance(value, list):
        least, most = rule.get("minItems", 0), rule.get("maxItems", len(value))
        if not least <= len(value) <= most:
            return Fault(field=field, found=f"is {shown(value)}", remedy=f"write a list of {least}")
        each = rule.get("items", {})
        return _first(fault(item, each, f"{field}[{place}]") for place, item in enumerate(value))
    if not isinstance(value, dict):
        return None
    known = rule.get("properties", {})
    missing = [name for name in rule.get("required", ()) if name not in value]
    if missing:
        where = _under(field, missing[0])
        return Fault(field=where, found="is missing", remedy=f"add it: {_about(known[missing[0]])}")
    others = rule.get("additionalProperties", {})
    for name, item in value.items():
        found = None
        if name in known:
            found = fault(item, known[name], _under(field, name))
        elif others is False:
            near = near_names(name, known)
            hint = f"did you mean {', '.join(near)}? " if near else ""
            found = Fault(
                field=_under(field, name), found="is not known", remedy=f"{hint}known here: {', '.join(known)}"
            )
        elif others:
            found = fault(item, others, _under(field, name))
        if found is not None:
            return found
    return None


def _first(found: Any) -> Fault | None:
    return next((item for item in found if item is not None), None)


def _under(field: str, name: str) -> str:
    if not field:
        return name
    return f"{field}.{name}" if name.isidentifier() else f"{field}['{name}']"


def _about(rule: Mapping[str, Any]) -> str:
    """What a field is, in the schema's own words."""
    rule = resolve(rule)
    text = str(rule.get("description", ""))
    return f"{text} Write {shown(rule['const'])}" if "const" in rule else text.removesuffix(".")
