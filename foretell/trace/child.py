"""Trace in a process of its own: user code may raise, hang or abort without taking foretell down.

    parent ── request (JSON, stdin) ──►  python -m foretell.trace.child
           ◄── reply (JSON, a file) ───  the trace is written beside it
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell import errors
from foretell.errors import ForetellError, InternalError, ModelError, UserError
from foretell.trace.load import Source
from foretell.trace.recipe import Recipe


def request(
    source: Source, recipe: Recipe, capability: tuple[int, int], hints: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "source": {**vars(source), "overrides": dict(source.overrides)},
        "recipe": recipe.to_json(),
        "capability": list(capability),
        "hints": dict(hints),
    }


def trace_in_child(asked: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of the trace file, and the child's reply (user files with hashes, notes)."""
    with tempfile.TemporaryDirectory(prefix="foretell-") as folder:
        command = [sys.executable, "-m", "foretell.trace.child", folder]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [_package_parent(), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            command, input=json.dumps(asked), text=True, capture_output=True, env=environment, check=False
        )
        reply_file = Path(folder) / "reply.json"
        if not reply_file.exists():
            raise _died(asked, done)
        reply = json.loads(reply_file.read_text())
        if "error" in reply:
            raise _as_error(reply["error"])
        return (Path(folder) / "trace.json").read_text(), reply


def _package_parent() -> str:
    return str(Path(__file__).resolve().parent.parent.parent)


def _died(asked: Mapping[str, Any], done: subprocess.CompletedProcess[str]) -> ForetellError:
    model = asked["source"]["model"]
    tail = "\n".join(done.stderr.strip().splitlines()[-12:])
    if done.returncode == -signal.SIGKILL:
        return ModelError(
            f"tracing {model} was killed, most likely for want of memory on this machine",
            "build the model without real tensors of full size (no torch.load, no numpy arrays) in its constructor",
            tail,
        )
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return ModelError(
            f"the code of {model} aborted the process that traced it ({name})",
            "a compiled extension or a CUDA call in the model does that; build it with plain PyTorch ops",
            tail,
        )
    return InternalError(f"the tracing process ended with code {done.returncode} and no reply\n{tail}")


def _as_error(data: Mapping[str, str]) -> ForetellError:
    if data["kind"] == "InternalError":
        return InternalError(data["problem"] + "\n" + data["detail"])
    kind = getattr(errors, data["kind"], UserError)
    error = kind.__new__(kind)
    UserError.__init__(error, data["problem"], data["remedy"], data["detail"])
    return error


def main(folder: str) -> None:
    asked = json.loads(sys.stdin.read())
    reply = Path(folder) / "reply.json"
    try:
        answer = _trace(asked, Path(folder) / "trace.json")
    except UserError as error:
        answer = {
            "error": {
                "kind": type(error).__name__, "problem": error.problem, "remedy": error.remedy, "detail": error.detail,
            }
        }  # fmt: skip
    except Exception as error:
        import traceback

        answer = {
            "error": {
                "kind": "InternalError", "problem": f"{type(error).__name__}: {error}", "remedy": "",
                "detail": traceback.format_exc(),
            }
        }  # fmt: skip
    reply.write_text(json.dumps(answer))


def _trace(asked: Mapping[str, Any], target: Path, summed: bool = False) -> dict[str, Any]:
    import time

    from foretell.trace.cache import file_hashes
    from foretell.trace.deep import capture_deep
    from foretell.trace.file import save
    from foretell.trace.load import load, notes, step_error, user_files

    source, recipe = Source(**asked["source"]), Recipe.from_json(asked["recipe"])
    started = time.perf_counter()
    try:
        trace = capture_deep(
            lambda: load(source).summed() if summed else load(source), recipe, capability=tuple(asked["capability"]),
            hints=asked["hints"],
        )  # fmt: skip
    except ForetellError:
        raise
    except Exception as error:
        raise step_error(source.model, error) from error
    seconds = time.perf_counter() - started
    save(trace, target)
    return {"files": file_hashes(user_files()), "notes": notes(), "seconds": seconds}


if __name__ == "__main__":
    main(sys.argv[1])
