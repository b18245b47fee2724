"""The JSON that programs read: answers, failures, and the schema (draft 2020-12) that both keep to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from foretell.quantities import SCHEMA_VERSION, Prediction

FILE = "prediction.schema.json"


@cache
def load() -> dict[str, Any]:
    """The schema itself, as it travels with the package."""
    text = (resources.files("foretell.report") / FILE).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def answer(prediction: Prediction) -> dict[str, Any]:
    """A prediction as JSON has it: lists for tuples."""
    content: dict[str, Any] = plain(prediction.to_json())
    return content


def failure(
    kind: str, message: str, *, remedy: str = "", detail: str = "", versions: Mapping[str, str]
) -> dict[str, Any]:
    """What `--json` prints when there is no answer."""
    error = {"kind": kind, "message": message, "remedy": remedy, "detail": detail}
    return envelope(versions) | {"error": error}


def envelope(versions: Mapping[str, str]) -> dict[str, Any]:
    """What every JSON object of foretell has besides its own content."""
    return {"schema_version": SCHEMA_VERSION, "versions": dict(versions), "assumptions": []}


def plain(value: Any) -> Any:
    """Mappings as dicts, sequences as lists, numbers that are none as null, other things JSON does not know as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
