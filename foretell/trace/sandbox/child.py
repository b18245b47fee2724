"""Trace in a process of its own: user code may raise, hang or abort without taking foretell down.

    parent ── request ──►  python -m foretell.trace.sandbox.child   (see `trace.sandbox.process`)
           ◄── reply ────  the trace, user files with hashes, notes; or an error
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from foretell import errors
from foretell.errors import ForetellError, InternalError, ModelError, UserError
from foretell.trace.load.model import Source, configs_of
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox import server, user_code
from foretell.trace.sandbox.blame import at, users_line
from foretell.trace.sandbox.process import TIME_LIMIT, Progress, Stop, WorkerEnded, ask, here, serve
from foretell.units import human_seconds

if TYPE_CHECKING:
    from foretell.trace.record.step import Workload

WORKERS = 2
"""Processes that trace side by side: each may need a gigabyte or two."""
PRELOAD = ("foretell.trace.store.cache", "foretell.trace.fold.deep", "foretell.trace.store.file", "foretell.trace.load.model", "torch._dynamo")
"""What a process that traces will import; the last one when the first fake tensor is made, which takes as long as torch itself."""


def request(
    source: Source, recipe: Recipe, capability: tuple[int, ...], hints: Mapping[str, float]
) -> dict[str, Any]:
    """What is asked of a process that traces; a path counts from the folder it was asked in, and is kept with it."""
    asked = {
        "source": {**vars(source), "overrides": dict(source.overrides)},
        "recipe": recipe.to_json(),
        "capability": list(capability),
        "hints": dict(hints),
    }
    return {**asked, "folder": here()} if user_code.files_of(vars(source)) or configs_of(source.model) else asked


def trace_in_child(asked: Mapping[str, Any], *, time_limit: float = TIME_LIMIT) -> tuple[str, dict[str, Any]]:
    """The text of the trace file, and the child's reply (user files with hashes, notes)."""
    return trace_in_children([asked], time_limit=time_limit)[0]


def trace_in_children(many: Sequence[Mapping[str, Any]], *, time_limit: float = TIME_LIMIT) -> list[tuple[str, dict[str, Any]]]:
    """The same for several, side by side as far as there are cores."""
    plain = all(":" not in asked["source"]["model"] and not asked.get("folder") for asked in many)  # of the zoo
    return ask_all(f"foretell.trace.sandbox.{'plain_child' if plain else 'child'}", many, time_limit=time_limit)


def ask_all(
    module: str, requests: Sequence[Mapping[str, Any]], *, time_limit: float, progress: Progress = lambda _: None
) -> list[tuple[str, dict[str, Any]]]:
    """The text that answers each request and the rest of the reply; the first failure is raised."""
    files = [file for asked in requests for file in user_code.files_of(asked["source"])]
    user_code.before(files)

    def asked_of(place: int) -> list[tuple[str, dict[str, Any]]]:
        mine = requests[place::workers]
        found = ask(module, mine, time_limit=time_limit, progress=progress, imports_from_here=bool(files), stop=stop)
        if isinstance(found, WorkerEnded):
            raise died(mine[len(found.answers)], found, time_limit)
        if "error" in found[-1]:
            raise as_error(found[-1]["error"])
        return [(reply.pop("text"), reply) for reply in found]

    here()
    server.ready(module)
    stop = Stop()
    workers = max(1, min(len(requests), WORKERS, os.cpu_count() or 1))
    if workers == 1:
        return _from_one_tree(asked_of(0))
    with ThreadPoolExecutor(workers) as pool:
        try:
            answers = [iter(found) for found in pool.map(asked_of, range(workers))]
        except BaseException:  # one failed, or Ctrl-C: the others need not go on
            stop.now()
            raise
    return _from_one_tree([next(answers[place % workers]) for place in range(len(requests))])


def _from_one_tree(answers: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    for _, reply in answers:
        user_code.after(reply.get("files", ()))
    return answers


def died(asked: Mapping[str, Any], ended: WorkerEnded, time_limit: float) -> ForetellError:
    """Why a process that traced is gone, and at which line of the user's it was."""
    model, tail = asked["source"]["model"], _printed(ended.tail)
    where = at(users_line(ended.tail))
    if ended.code is None:
        return ModelError(
            f"tracing {model} took longer than the time limit of {human_seconds(time_limit)}{where}",
            f"a longer one, such as --time-limit {human_seconds(3 * time_limit, short=True)}, or a smaller model or batch; "
            "see that its file neither waits nor loops for ever",
            tail,
        )  # fmt: skip
    if ended.code == -signal.SIGKILL:
        return ModelError(
            f"tracing {model} was killed from outside, most likely for want of memory on this machine",
            "build the model without real tensors of full size (no torch.load, no numpy arrays) in its constructor",
            tail,
        )
    if ended.code < 0:
        name = signal.Signals(-ended.code).name
        return ModelError(
            f"the process that traced {model} crashed ({name}){where}",
            "if that line calls a compiled extension, use a plain PyTorch op; if it does not, the mistake is foretell's: please report it",
            tail,
        )
    return ModelError(
        f"the process that traced {model} was left with exit status {ended.code} and no answer{where}",
        "take out what ends the process (an extension may do it); if there is no such thing, the mistake is foretell's: please report it",
        tail,
    )


def _printed(tail: str) -> str:
    """The end of what the code printed, without the frames that faulthandler wrote."""
    stack = ('  File "', "Current thread", "Stack (most recent", "Extension modules", "Fatal Python error")
    lines = [line for line in tail.strip().splitlines() if not line.startswith(stack)]
    return "\n".join(lines[-12:])


def as_error(data: Mapping[str, Any]) -> ForetellError:
    if data["kind"] == "InternalError":
        return InternalError(data["problem"] + "\n" + data["detail"])
    kind = getattr(errors, data["kind"], UserError)
    error = kind.__new__(kind)
    UserError.__init__(error, data["problem"], data["remedy"], data["detail"])
    if isinstance(error, ModelError):
        error.change = data.get("change", {})
    return error


def answered(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` gives, or its error as data."""
    try:
        return work()
    except UserError as error:
        told = {"problem": error.problem, "remedy": error.remedy, "detail": error.detail, "change": getattr(error, "change", {})}
        return {"error": {"kind": type(error).__name__, **told}}
    except Exception as error:
        import traceback

        problem = f"{type(error).__name__}: {error}"
        return {"error": {"kind": "InternalError", "problem": problem, "remedy": "", "detail": traceback.format_exc()}}


def trace_asked(asked: Mapping[str, Any], summed: bool = False) -> dict[str, Any]:
    import time

    from foretell.trace.fold.deep import capture_deep
    from foretell.trace.load.model import load, notes, user_files
    from foretell.trace.sandbox.blame import at_home, step_error
    from foretell.trace.sandbox.leaving import staying
    from foretell.trace.store.cache import file_hashes
    from foretell.trace.store.file import dumps

    source, recipe = Source(**asked["source"]), Recipe.from_json(asked["recipe"])
    started, home = time.perf_counter(), os.getcwd()
    at_home(home)

    def build() -> Workload:
        os.chdir(home)  # a model may be built more than once, and may change the folder
        return load(source).summed() if summed else load(source)

    try:
        with staying():
            trace = capture_deep(build, recipe, capability=tuple(asked["capability"]), hints=asked["hints"])
    except ForetellError:
        raise
    except (Exception, SystemExit) as error:
        raise step_error(source.model, error) from error
    finally:
        os.chdir(home)
    seconds = time.perf_counter() - started
    return {"text": dumps(trace), "files": file_hashes(user_files()), "notes": notes(), "seconds": seconds}


def main() -> None:
    serve(lambda requests, reply: reply(answered(lambda: trace_asked(requests[0]))))


if __name__ == "__main__":
    main()
