"""The process that runs a script on fake tensors, up to the end of its first step.

    parent ── request ──►  python -m foretell.trace.script.child   (see `trace.sandbox.process`)
           ◄── reply ────  the trace, what the script was found to do, files; or an error that names its line
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from foretell.trace.sandbox.child import PRELOAD as _PRELOAD
from foretell.trace.sandbox.child import answered
from foretell.trace.sandbox.process import TIME_LIMIT, Progress, WorkerEnded, ask, here, serve
from foretell.trace.script.words import ScriptCommand

PRELOAD = (*_PRELOAD, "foretell.trace.script.capture", "torch._dynamo.config", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
"""Fake tensors import the fourth, which takes as long as all the rest: once for all ranks, and the last two come with it."""
WORKER = "foretell.trace.script.child"
_SCRATCH = "foretell-script-"


def request(
    script: ScriptCommand, capability: tuple[int, int] | None, hints: Mapping[str, float], keep_writes: bool, rank: int = 0,
    change: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Without a capability the script is followed as this machine's CPU runs it. `change` is what is done to it on the way (`change.Change`)."""
    asked = {"script": vars(script), "capability": list(capability or ()), "hints": dict(hints), "keep_writes": keep_writes, "rank": rank}
    return {**asked, "change": dict(change)} if change else asked


def follow_in_child(
    asked: Mapping[str, Any], *, time_limit: float = TIME_LIMIT, progress: Progress = lambda _: None
) -> tuple[str, dict[str, Any]]:
    """The text of the trace file, and the rest of the reply. What the script writes is gone when this returns."""
    from foretell.trace.sandbox import server, user_code
    from foretell.trace.sandbox.child import as_error, died

    here()
    server.ready(WORKER)
    clear_stale()
    with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-", ignore_cleanup_errors=True) as scratch:
        found = ask(WORKER, [{**asked, "scratch": scratch}], time_limit=time_limit, progress=progress)
    if isinstance(found, WorkerEnded):
        raise died({"source": {"model": asked["script"]["file"] or asked["script"]["module"]}}, found, time_limit)
    if "error" in found[0]:
        raise as_error(found[0]["error"])
    user_code.after(found[0]["files"])
    return found[0].pop("text"), found[0]


def clear_stale(prefix: str = _SCRATCH) -> None:
    """Remove scratch folders of this user's processes that were killed: PREFIX, the process, and a dash."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        owner = folder.name.removeprefix(prefix).partition("-")[0]
        try:
            if not owner.isdecimal() or folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # gone just now, or another user's
            pass


def _follow(asked: Mapping[str, Any]) -> dict[str, Any]:
    from foretell.trace.load.model import user_files
    from foretell.trace.sandbox.leaving import staying
    from foretell.trace.script.capture import capture_script
    from foretell.trace.script.change import StepChange
    from foretell.trace.script.reads import Reads, written_down
    from foretell.trace.script.spread import about
    from foretell.trace.script.writes import Aside, kept_aside
    from foretell.trace.store.cache import file_hashes
    from foretell.trace.store.file import dumps

    given = {**asked["script"], "words": tuple(asked["script"]["words"]), "arguments": tuple(asked["script"]["arguments"])}
    aside = Aside(asked["scratch"])
    os.environ["TMPDIR"] = tempfile.tempdir = aside.scratch
    reads, capability = Reads([aside.scratch]), tuple(asked["capability"]) or None
    with written_down(reads), nullcontext() if asked["keep_writes"] else kept_aside(aside), staying():
        how: dict[str, Any] = {"hints": asked["hints"], "rank": asked["rank"], "change": StepChange.of(asked.get("change"))}
        trace, seen = capture_script(ScriptCommand(**given), capability=capability, **how)
    notes = seen.world.notes
    if aside.written:
        names = ", ".join(os.path.relpath(one) for one in aside.written[:3]) + (" ..." if len(aside.written) > 3 else "")
        notes.append(f"what the script writes before its first step went to a scratch folder that is gone ({names}); --keep-writes lets it")
    files = file_hashes([*user_files(), *([os.path.abspath(given["file"])] if given["file"] else [])])
    reads.paths -= files.keys()
    stamps = None if asked["keep_writes"] else reads.stamps(aside.written)
    told = {"notes": notes, "micro_batch": seen.micro_batch, "stamps": stamps, "variables": reads.variables, **about(seen.world.ranks)}
    told |= {"shapes": seen.shapes, "tied": seen.tied, "loads": seen.world.loads, "held": seen.second.held, "named": seen.named}
    told["places"] = {what: [*line, seen.places.direct[what]] for what, line in seen.places.lines.items()}
    return {"text": dumps(trace), "files": files, **told}


def main() -> None:
    os.environ["PYTHONUNBUFFERED"] = "1"
    serve(lambda requests, reply: reply(answered(lambda: _follow(requests[0]))))


if __name__ == "__main__":
    main()
