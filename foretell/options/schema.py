"""Options as JSON schema: names, types and what each one means, for programs."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, get_origin

from foretell.options.describe import options_of

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", dict: "object", Mapping: "object", tuple: "array"}


def schema_of(described: type) -> dict[str, Any]:
    """A JSON schema of what a class takes."""
    found: dict[str, Any] = {}
    for one in options_of(described):
        kinds = one.annotation.__args__ if isinstance(one.annotation, UnionType) else (one.annotation,)
        types = [name for kind in kinds if (name := _TYPES.get(get_origin(kind) or kind))]
        default = list(one.default) if isinstance(one.default, tuple) else one.default
        found[one.name] = {"description": one.help, "default": default, **({"type": types} if len(types) == len(kinds) else {})}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": described.__name__, "type": "object", "properties": found}
