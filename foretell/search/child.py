"""Trace several steps in one process of their own: torch is imported once, and user code may abort.

    parent ── requests (JSON, stdin) ──►  python -m foretell.search.child FOLDER
           ◄── FOLDER/N.json and N.reply for each, in order
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell.errors import UserError
from foretell.trace import child as single

Progress = Callable[[str], None]


def trace_all(
    requests: Sequence[Mapping[str, Any]], progress: Progress = lambda _: None
) -> list[tuple[str, dict[str, Any]]]:
    """The text of each trace file and the child's reply to it; the first failure is raised."""
    with tempfile.TemporaryDirectory(prefix="foretell-") as folder:
        command = [sys.executable, "-m", "foretell.search.child", folder]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        paths = [single._package_parent(), os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        log = Path(folder) / "stderr"
        with (
            log.open("w") as stderr,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment) as process,
        ):
            try:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps(list(requests)))
                process.stdin.close()
                for line in process.stdout:
                    if line.startswith(_MARK):
                        progress(line.removeprefix(_MARK).strip())
                process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        done = subprocess.CompletedProcess(command, process.returncode, "", log.read_text())
        return [_read(Path(folder), number, asked, done) for number, asked in enumerate(requests)]


_MARK = "foretell-progress "


def _read(
    folder: Path, number: int, asked: Mapping[str, Any], done: subprocess.CompletedProcess[str]
) -> tuple[str, dict[str, Any]]:
    reply_file = folder / f"{number}.reply"
    if not reply_file.exists():
        raise single._died(asked, done)
    reply: dict[str, Any] = json.loads(reply_file.read_text())
    if "error" in reply:
        raise single._as_error(reply["error"])
    return (folder / f"{number}.json").read_text(), reply


def main(folder: str) -> None:
    requests = json.loads(sys.stdin.read())
    for number, asked in enumerate(requests):
        print(f"{_MARK}{number + 1} of {len(requests)}: {_told(asked)}", flush=True)  # noqa: T201
        answer = _answer(asked, Path(folder) / f"{number}.json")
        (Path(folder) / f"{number}.reply").write_text(json.dumps(answer))
        if "error" in answer:
            return


def _told(asked: Mapping[str, Any]) -> str:
    source = asked["source"]
    if asked.get("shares"):
        return f"what ranks can share of {source['model']}"
    recipe = asked["recipe"]
    words = [f"{source['model']}, micro-batch {source['micro_batch']}"]
    words += [f"recompute {recipe['recompute']}"] if recipe["recompute"] != "none" else []
    words += [f"tp {asked['tp']['ranks']}"] if asked.get("tp") else []
    words += [f"{axis} {asked[axis]}" for axis in ("cp", "ep") if asked.get(axis)]
    return ", ".join(words)


def _answer(asked: Mapping[str, Any], target: Path) -> dict[str, Any]:
    try:
        if asked.get("shares"):
            return _shares(asked, target)
        if any(asked.get(axis) for axis in ("tp", "cp", "ep")):
            from foretell.search.split_trace import trace_split

            return trace_split(asked, target)
        return {**single._trace(asked, target, summed=not asked.get("in_turn")), **_facts(asked)}
    except UserError as error:
        told = {"problem": error.problem, "remedy": error.remedy, "detail": error.detail}
        return {"error": {"kind": type(error).__name__, **told}}
    except Exception as error:
        import traceback

        problem = f"{type(error).__name__}: {error}"
        return {"error": {"kind": "InternalError", "problem": problem, "remedy": "", "detail": traceback.format_exc()}}


def _shares(asked: Mapping[str, Any], target: Path) -> dict[str, Any]:
    from foretell.search.shares import shares_of
    from foretell.trace.cache import file_hashes
    from foretell.trace.load import Source, load, user_files

    source = Source(**asked["source"])
    target.write_text(json.dumps(shares_of(lambda: load(source)).to_json()))
    return {"files": file_hashes(user_files())}


def _facts(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Names, shapes and dtypes of the model's parameters, and which of them are one tensor; where they are asked for."""
    if not asked.get("facts"):
        return {}
    import torch

    from foretell.trace.load import Source, load

    with torch.device("meta"):
        model = load(Source(**asked["source"])).model
    shapes = {name: [list(p.shape), str(p.dtype).removeprefix("torch.")] for name, p in model.named_parameters()}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {"shapes": shapes, "tied": [group for group in names.values() if len(group) > 1]}


if __name__ == "__main__":
    main(sys.argv[1])
