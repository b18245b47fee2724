"""Seal a forecast: canonical JSON, its SHA-256, and a file that is refused once either was touched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.decode import Mismatch
from foretell.errors import FileFormatError, UserError
from foretell.files import one_line, write_atomically
from foretell.prove.types import SCHEMA_VERSION, Sealed

HASH = "sha256"


def canonical(content: Mapping[str, Any]) -> str:
    """One text for one value: names sorted, no spaces, ASCII, the hash itself left out."""
    bare = {name: value for name, value in content.items() if name != HASH}
    return json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(content).encode("ascii")).hexdigest()


def write(sealed: Sealed, path: Path) -> str:
    """Write the forecast with its hash, a line for each row; the hash. A file that is there already is not replaced."""
    if path.exists():
        raise UserError(f"{path} is there already", "a sealed forecast is not replaced; give another path")
    content = sealed.to_json()
    found = digest(content)
    lines = [f" {json.dumps(name)}: {_laid_out(value)}" for name, value in content.items() if name != "rows"]
    rows = ",\n".join(f"  {json.dumps(row, sort_keys=True)}" for row in content["rows"])
    lines += [f' "rows": [\n{rows}\n ]', f' "{HASH}": "{found}"']
    try:
        write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}", "give another path") from None
    return found


def _laid_out(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def read(path: Path) -> tuple[Sealed, str]:
    """The forecast in a file and its hash; refused where they do not belong together."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}", "make one with `foretell compare prove --seal FILE`") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is not a sealed forecast: {one_line(error)}", "give a file that --seal wrote") from None
    if not isinstance(content, dict) or "rows" not in content or HASH not in content:
        raise FileFormatError(f"{path} is not a sealed forecast", "give a file that --seal wrote")
    if content.get("schema_version") != SCHEMA_VERSION:
        said = content.get("schema_version")
        raise FileFormatError(f"{path} is of version {said} and this foretell reads {SCHEMA_VERSION}", "use the foretell that wrote it")
    try:
        found = digest(content)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is not a sealed forecast: {one_line(error)}", "give a file that --seal wrote") from None
    if found != content[HASH]:
        raise FileFormatError(
            f"the seal of {path} is broken: it says {str(content[HASH])[:12]}… and its content gives {found[:12]}…",
            "take the file as it was sealed, or seal a new one",
        )
    try:
        return Sealed.from_json(content), found
    except Mismatch as error:
        raise FileFormatError(f"{path} is not a sealed forecast: {error}", "give a file that --seal wrote") from None


RESTS_ON = (
    "errors.py", "units.py", "quantities.py", "zoo", "trace", "hardware", "plan", "lower", "price", "simulate",
    "prove/dice.py", "prove/draw.py", "prove/forecast.py", "prove/types.py",
)  # fmt: skip
"""Rooms and files that decide what is predicted."""


def own_code() -> str:
    """SHA-256 over the files of foretell that a forecast rests on, names and contents."""
    root = Path(__file__).resolve().parent.parent
    files = [path for room in RESTS_ON for path in (sorted((root / room).rglob("*")) or [root / room])]
    found = hashlib.sha256()
    for path in files:
        if path.suffix in (".py", ".toml", ".json") and "__pycache__" not in path.parts:
            found.update(path.relative_to(root).as_posix().encode() + b"\0")
            found.update(path.read_bytes() + b"\0")
    return found.hexdigest()
