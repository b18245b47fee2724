"""`foretell run demo`: the whole loop on this machine, small: probe, plan, train, predicted beside measured."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from foretell.cli import common
from foretell.errors import UserError
from foretell.plan.text import shell_word

if TYPE_CHECKING:
    from foretell.api import DemoPlan
    from foretell.plan.types import Plan
    from foretell.report.comparison import Comparison

TRAIN_SECONDS = 35.0
"""That the steps are predicted to take."""
LEAST_STEPS, MOST_STEPS = 24, 400
"""Enough that the loss clearly falls; not more than that takes on a GPU."""
RATE, WARMUP = "1e-3", 10
ELSEWHERE = ("gpt2", "H100", 8, 1024)
"""A model and a device that are not here: name, hardware, micro-batch, tokens."""
_GUTTER = 11

Result = TypeVar("Result")


def demo(
    out: Path | None = typer.Option(None, metavar="FOLDER", show_default=False, help="The run folder; default runs/demo-DATE."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """Measure this machine, plan a 10M-parameter GPT for it, train it for a minute, print predicted beside measured.

    Exit 0 where the step time and the memory were predicted within their bands, 1 where they were not.
    """
    with _sleeping_threads():
        return _demo(out or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}", json=json)


@contextlib.contextmanager
def _sleeping_threads() -> Iterator[None]:
    """Threads that wait for others sleep instead of spinning: on cores that other programs use too, a spinning one keeps
    the one it waits for from running. Read when torch is loaded, here and in the run."""
    given = os.environ.get("OMP_WAIT_POLICY")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        yield
    finally:
        if given is None:
            del os.environ["OMP_WAIT_POLICY"]


def _demo(out: Path, *, json: bool) -> int:
    stages = DemoPhases(quiet=json)
    path = out.with_name(f"{out.name}.plan.json")
    _check(out)
    _machine(stages)
    text = stages.do("text", "collecting text", _text, lambda found: f"{found[1]:,} files of Python's standard library in {found[0]}")[0]
    plan = _choose(stages)
    steps = _write(plan, path)
    status = _train(stages, path, out, text, steps, plan)
    if status:
        if status == common.INTERRUPTED:
            raise KeyboardInterrupt
        return status
    return _tell(stages, out, path, json=json)


# --- stages ----------------------------------------------------------------------------------------------------------


@dataclass
class DemoPhases:
    """One line for every phase: what it did, and how long it took."""

    quiet: bool
    """Lines go to stderr: stdout is for JSON."""
    began: float = field(default_factory=time.monotonic)
    took: dict[str, float] = field(default_factory=dict)

    def do(self, name: str, doing: str, work: Callable[[], Result], words: Callable[[Result], str]) -> Result:
        with self.timed(name):
            found = common.call(work, doing)
        self.tell(name, words(found))
        return found

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.took[name] = time.monotonic() - began

    def tell(self, name: str, text: str) -> None:
        seconds = f"{self.took[name]:5.1f} s  " if name in self.took else ""
        first, *more = text.split("\n")
        lines = [f"{name:<{_GUTTER}}{seconds}{first}", *(f"{'':<{_GUTTER + 9}}{line}" for line in more)]
        common.emit("\n".join(lines), sys.stderr if self.quiet else sys.stdout)


def _check(out: Path) -> None:
    """Before the work, not after it."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(f"{out} is there already", "give another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = out.with_name(f".{out.name}.try")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"the run folder {out} cannot be written: {error.strerror or error}", "give another --out") from None


def _machine(stages: DemoPhases) -> None:
    def look() -> str:
        from foretell.hardware import parse
        from foretell.units import gib

        cluster = parse("auto")
        device = cluster.device
        what = f"{device.sm_count} cores of {_cpu()}" if device.backend == "cpu" else f"{cluster.count} x {device.name}"
        return f"{what}, {gib(device.memory_bytes)}; torch {common.versions().get('torch')}"

    stages.do("machine", "looking at this machine", look, str)
    from foretell import api
    from foretell.hardware.profile import own_path

    def words(found: Any) -> str:
        profile, path = found
        if path is not None:
            return f"measured what ops, the host and memory cost here, once, into {path}"
        if profile is not None and own_path(profile).exists():
            return f"not needed: {profile.reported_as} was measured on {profile.date[:10]}"
        like = f"predictions rest on {profile.reported_as}, measured on {profile.date[:10]}" if profile is not None else "its speed is unknown"
        return f"{'this machine was too busy to be measured; ' if profile is None or profile.backend == 'cpu' else ''}{like}"

    stages.do("probe", "measuring this machine, about half a minute", api.demo_profile, words)


def _cpu() -> str:
    from foretell.hardware.probe.machine import cpu_name

    return cpu_name()


def _choose(stages: DemoPhases) -> Plan:
    """The best plan for this machine, as fast as the machine is now."""
    from foretell import api
    from foretell.search.solve.choose import told
    from foretell.units import human_bytes

    def chosen(found: DemoPlan) -> str:
        said, also = found.plan.predicted, found.choice.runners_up[:1]
        return "\n".join([
            f"best of {found.choice.costed} plans for {api.DEMO_MODEL} here: {told(found.plan)}",
            f"{human_bytes(said['memory_bytes'])} of {human_bytes(said['capacity_bytes'])} predicted: {said['verdict']}",
            *(f"next: {told(one.plan)}: {one.why}" for one in also),
        ])  # fmt: skip

    plan = stages.do("plan", f"tracing {api.DEMO_MODEL} and costing plans", api.demo_plan, chosen).plan
    pace = stages.do(
        "pace", "running small steps to see how fast this CPU is now", api.demo_pace,
        lambda found: found[1] if found else "not needed on a GPU",
    )  # fmt: skip
    return api.paced(plan, pace[0]) if pace else plan


def _write(plan: Plan, path: Path) -> int:
    """Keep the plan, and decide how many steps to run."""
    from foretell.plan import file

    file.write(plan, path)
    predicted = plan.predicted.get("step_seconds")
    return max(LEAST_STEPS, min(MOST_STEPS, round(TRAIN_SECONDS / predicted))) if predicted else LEAST_STEPS


def _text() -> tuple[Path, int]:
    """The source of Python's standard library, without packages that were installed into it, in a folder of its own."""
    import platform
    import shutil
    import sysconfig

    from foretell.trace.store.cache import folder

    place = folder() / "demo" / f"python-{platform.python_version()}"
    found = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if len(found) < 10:
        raise UserError("the source of Python's standard library is not here", "use a Python that has it")
    try:
        place.mkdir(parents=True, exist_ok=True)
        for file in found:
            copy = place / file.name
            if not copy.exists() or copy.stat().st_size != file.stat().st_size:
                shutil.copyfile(file, copy)
    except OSError as error:
        raise UserError(f"text cannot be kept in {place}: {error.strerror or error}", "set FORETELL_CACHE to another place") from None
    return place, len(found)


# --- training and telling --------------------------------------------------------------------------------------------


def _train(stages: DemoPhases, path: Path, out: Path, text: Path, steps: int, plan: Plan) -> int:
    """`foretell run` in a process of its own, as a user would type it."""
    from foretell.report.words import seconds, step_span
    from foretell.runtime.process.child import command

    said = plan.predicted
    step = "unknown"
    if "step_seconds" in said:
        low, high = said["low_seconds"], said["high_seconds"]
        step = f"{step_span(said['step_seconds'], low, high)}, {seconds(steps * said['step_seconds'])} in all"
    stages.tell("train", f"{steps} steps of {plan.global_batch} x {_tokens(plan)} bytes, predicted {step}; Ctrl-C saves and ends")
    words = [
        "run", str(path), "--data", str(text), "--steps", str(steps), "--lr", RATE, "--warmup", str(WARMUP), "--eval-batches", "4",
        "--out", str(out),
    ]  # fmt: skip
    with stages.timed("train"):
        return command(words)


def _tokens(plan: Plan) -> int:
    return int(plan.predicted.get("tokens_per_step", 0)) // max(1, plan.global_batch) or 1


def _tell(stages: DemoPhases, out: Path, path: Path, *, json: bool) -> int:
    from foretell.cli import compare

    found = compare.written(out)
    first, last = found.loss["first"] or 0.0, found.loss["last"] or 0.0
    stages.tell("train", f"{found.steps + found.skipped_steps} steps: loss {first:.2f} → {last:.2f}")
    _explain(stages, found)
    elsewhere = stages.do("elsewhere", "predicting GPT-2 on an H100", _elsewhere, lambda told: told or "not predicted")
    total = time.monotonic() - stages.began
    ok = found.ok is True
    if json:
        content = {
            "ok": ok, "folder": str(out), "plan": str(path), "comparison": found.to_json(), "elsewhere": elsewhere,
            "seconds": {**stages.took, "total": total},
        }  # fmt: skip
        common.emit_json({"demo": content})
        return common.YES if ok else common.NO_OR_FAILED
    common.emit("")
    compare.show(found)
    common.emit("\n".join(_files(out, path, total, ok)))
    return common.YES if ok else common.NO_OR_FAILED


def _explain(stages: DemoPhases, found: Comparison) -> None:
    """Where the step was not as predicted on a CPU: whether the machine is still as fast as it was."""
    from foretell import api

    step = found.line("step")
    if step is None or step.inside is not False or step.predicted is None or found.hardware.get("kind") != "cpu":
        return

    def words(pace: tuple[float, str] | None) -> str:
        return f"the step was not as predicted. Now: {pace[1] if pace else 'nothing is known of this CPU'}"

    stages.do("pace", "seeing whether this CPU is as fast as before", api.demo_pace, words)


def _elsewhere() -> str:
    """One answer about a machine that is not here; a demo does not fail for it."""
    from foretell import api
    from foretell.report.words import seconds
    from foretell.units import gib

    model, hardware, micro_batch, seq = ELSEWHERE
    try:
        answer = api.fit(model, hardware=hardware, micro_batch=micro_batch, seq=seq)
    except UserError:
        return ""
    step = f", {seconds(answer.time.step_seconds)} a step" if answer.time else ""
    rate = f", {answer.throughput.per_second:,.0f} tokens/s" if answer.throughput else ""
    return f"and on an {hardware}, {model} with {micro_batch} x {seq} tokens would take {gib(answer.memory.device_bytes)}{step}{rate}"


def _files(out: Path, path: Path, total: float, ok: bool) -> list[str]:
    return [
        "",
        f"{'OK' if ok else 'NOT OK'}: {'all' if ok else 'not all'} of what was measured lies within what was predicted; {total:.0f} s in all",
        f"plan       {path}",
        f"run        {out}: plan.json, log.jsonl, measurement.json, comparison.json, checkpoints/",
        f"Next:  foretell compare {shell_word(out)}          foretell run {shell_word(out)} --resume --steps 200",
        "       foretell plan MODEL --on HW     your own model",
    ]
