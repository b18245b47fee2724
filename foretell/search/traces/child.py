"""Trace several steps in one process of their own: torch is imported once, and user code may abort.

    parent ── requests ──►  python -m foretell.search.traces.child   (see `trace.sandbox.process`)
           ◄── a reply to each, in order
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretell.trace.load.model import Source
from foretell.trace.sandbox import child as single
from foretell.trace.sandbox.process import TIME_LIMIT, Progress, serve

PRELOAD = (*single.PRELOAD, "torch._dynamo.config", "foretell.search.traces.shares", "foretell.search.traces.split")


def trace_all(
    requests: Sequence[Mapping[str, Any]], progress: Progress = lambda _: None, *, time_limit: float = TIME_LIMIT
) -> list[tuple[str, dict[str, Any]]]:
    """The text of each trace file and the child's reply to it; the first failure is raised. Each has the whole time."""
    return single.ask_all("foretell.search.traces.child", requests, time_limit=time_limit, progress=progress)


def parameters_of(source: Source, *, time_limit: float = TIME_LIMIT) -> dict[str, int]:
    """Elements of every parameter of a model, by name: it is built and not run."""
    asked = {"source": {**vars(source), "overrides": dict(source.overrides)}, "names": True}
    (text, _), *_ = trace_all([asked], time_limit=time_limit)
    found: dict[str, int] = json.loads(text)
    return found


def work(requests: Sequence[Mapping[str, Any]], reply: Callable[[dict[str, Any]], None]) -> None:
    for number, asked in enumerate(requests):
        reply({"progress": f"{number + 1} of {len(requests)}: {_told(asked)}"})
        reply(answer(asked))


def _told(asked: Mapping[str, Any]) -> str:
    source = asked["source"]
    if asked.get("shares") or asked.get("names"):
        return f"what ranks can share of {source['model']}" if asked.get("shares") else f"parameters of {source['model']}"
    recipe = asked["recipe"]
    words = [f"{source['model']}, micro-batch {source['micro_batch']}"]
    words += [f"recompute {recipe['recompute']}"] if recipe["recompute"] != "none" else []
    words += [f"tp {asked['tp']['ranks']}"] if asked.get("tp") else []
    words += [f"{axis} {asked[axis]}" for axis in ("cp", "ep") if asked.get(axis)]
    return ", ".join(words)


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for, or its error as data."""
    return single.answered(lambda: _answer(asked))


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    if asked.get("shares"):
        return _shares(asked)
    if asked.get("names"):
        return _names(asked)
    if any(asked.get(axis) for axis in ("tp", "cp", "ep")):
        from foretell.search.traces.split import trace_split

        return trace_split(asked)
    return {**single.trace_asked(asked, summed=not asked.get("in_turn")), **_facts(asked)}


def _shares(asked: Mapping[str, Any]) -> dict[str, Any]:
    from foretell.search.traces.shares import shares_of
    from foretell.trace.load.model import load, user_files
    from foretell.trace.store.cache import file_hashes

    source = Source(**asked["source"])
    return {"text": json.dumps(shares_of(lambda: load(source)).to_json()), "files": file_hashes(user_files())}


def _names(asked: Mapping[str, Any]) -> dict[str, Any]:
    from foretell.trace.load.model import user_files
    from foretell.trace.store.cache import file_hashes

    shapes = _facts({**asked, "facts": True})["shapes"]
    return {"text": json.dumps({name: math.prod(shape) for name, (shape, _) in shapes.items()}), "files": file_hashes(user_files())}


def _facts(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Names, shapes and dtypes of the model's parameters, and which of them are one tensor; where they are asked for."""
    if not asked.get("facts"):
        return {}
    import torch

    from foretell.trace.load.model import load

    with torch.device("meta"):
        model = load(Source(**asked["source"])).model
    shapes = {name: [list(p.shape), str(p.dtype).removeprefix("torch.")] for name, p in model.named_parameters()}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {"shapes": shapes, "tied": [group for group in names.values() if len(group) > 1]}


def main() -> None:
    serve(work)


if __name__ == "__main__":
    main()
