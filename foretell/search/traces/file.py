"""The traces of a run folder: `traces.json.gz`, so that a run can be reported where its model never was. No torch.

    {"kind": "foretell-traces", "schema": 1, "traces": {request: {"trace": ..., "notes": [...], ...}, ...}}
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from foretell.errors import FileFormatError, UserError
from foretell.files import one_line, write_atomically
from foretell.trace.store.file import loads
from foretell.trace.store.traces import Stored, TraceEntry, parsed
from foretell.trace.types import Trace

NAME = "traces.json.gz"
STEP = "trace.json.gz"
"""Of a watched script: the step as it was followed, one trace."""
KIND, SCHEMA = "foretell-traces", 1
MOST_BYTES = 1 << 30
"""That a file may unpack to."""
_REMEDY = "delete it; what is stored in the cache is then taken"


def write(path: Path, traces: Mapping[str, TraceEntry]) -> None:
    """Write what answers requests; whose files it was made from is left out, since a run is reported as it was."""
    content = {"kind": KIND, "schema": SCHEMA, "traces": {name: {**asdict(one), "files": {}} for name, one in traces.items()}}
    write_atomically(path, gzip.compress(json.dumps(content).encode(), 6, mtime=0), parents=False)


def read(path: Path) -> dict[str, Stored]:
    """Request → trace; nothing where there is no such file. Anything wrong with it is one `FileFormatError`."""
    if not path.exists():
        return {}
    try:
        with gzip.open(path) as stream:
            content = stream.read(MOST_BYTES + 1)
        data = json.loads(content)
        if not isinstance(data, dict) or data.get("kind") != KIND or data.get("schema") != SCHEMA or len(content) > MOST_BYTES:
            raise ValueError(f"it is no file of traces of schema {SCHEMA}")
        return {name: parsed(entry) for name, entry in data["traces"].items()}
    except UserError as error:
        raise FileFormatError(f"{path} cannot be read: {error.problem}", _REMEDY) from None
    except (OSError, EOFError, zlib.error, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"{path} cannot be read: {one_line(error)}", _REMEDY) from None


def read_step(path: Path) -> Trace | None:
    """The trace of a watched script; None where there is none."""
    if not path.exists():
        return None
    try:
        with gzip.open(path) as stream:
            return loads(stream.read(MOST_BYTES + 1).decode())
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise FileFormatError(f"{path} cannot be read: {one_line(error)}", "delete it") from None
