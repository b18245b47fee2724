"""`foretell serve MODEL --eject FILE.py`: a server that needs torch and nothing of foretell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from foretell.cli import common
from foretell.cli.plan.eject import check_target, write


def written(model: str, override: Sequence[str], target: Path, sizes: Mapping[str, int], *, seed: int, json: bool) -> int:
    from foretell.eject.server import server
    from foretell.options import words

    check_target(target, force=False, suffix=".py")
    write(target, server(model, words.overrides(override), seed=seed, **sizes))
    command = f"python {target} --port 8000"
    if json:
        return common.emit_json({"eject": {"file": str(target), "command": command}})
    common.emit(f"Written to {target}\nStart it     {command}   (--weights FILE.safetensors)")
    return common.YES
