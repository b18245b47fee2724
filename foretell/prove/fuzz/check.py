"""What is asked of a generated model: that it traces, that its bytes are as measured, that a plan of it computes what it does.

    plain     a loop by hand, in PyTorch alone; where that fails or is not finite the draw is no model
    trace     as this CPU runs it, and as a GPU of compute capability 9.0 would; every op has a FLOP rule
    memory    predicted peak of a step's tensors within 5 % of what the allocator recorded in two real steps
    compose   foretell's runtime, with blocks recomputed or moved, micro-batches and clipping, gives the same losses,
              gradients and weights
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretell.errors import ForetellError
from foretell.plan.types import Mesh, Plan, Residency
from foretell.prove.fuzz.generate import draw
from foretell.prove.fuzz.render import Broken, render
from foretell.prove.fuzz.types import Failure, FuzzVerdict, Model
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import Ranks
from foretell.simulate.memory.replay import peak_live
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.on_cpu import measure_on_cpu, trace_as_cpu
from foretell.trace.types import Trace

WITHIN = 0.05
REFUSED = "selective recompute cannot take"
"""What foretell refuses with that reason, because PyTorch does; such a model is judged with full recompute instead."""
STOPPED = "the op at which recomputation stops gives its results back before its own event ends: measured as scratch"
"""Why a prediction for a recomputed step may lie above the measured tensors, up to what was measured with scratch."""
STEPS = 2
RATE = 1e-2
MOST_TURNS = 50
HUGE = 1e8
"""A loss above this is no longer arithmetic worth comparing."""
CLIPPED_WITHIN = 1e-4
"""Norms under an active clip: foretell adds squares over all ranks, PyTorch takes a norm of norms; the last bits differ."""
LEAST_BYTES = 1 << 15
"""Of a reduced model that fails by its memory: below, a handful of numbers is 5 %."""
ALONE = Ranks(rank=0, world=1, local_rank=0, device=torch.device("cpu"), mesh=None, sizes=Mesh())

Predict = Callable[[Trace], int]


def predict(trace: Trace) -> int:
    """Peak bytes in tensors over the first and a later step."""
    return peak_live(trace, tuple(trace.schedule))


@dataclass(frozen=True)
class TwoSteps:
    """What two steps gave."""

    losses: tuple[float, ...]
    gradients: dict[str, Tensor]
    """Before the first update."""
    weights: dict[str, Tensor]
    """Parameters after the steps."""
    norm: float | None = None
    """Of the whole first gradient, before clipping."""


class NoModel(Exception):
    """PyTorch refuses it, or its loss is not finite."""


# ---------------------------------------------------------------------------------------------- drawing


def drawn(seed: str, index: int, ops: int, folder: Path) -> tuple[Model, TwoSteps, int]:
    """The first draw that is a model, what it computes, and how many draws were none."""
    for turn in range(MOST_TURNS):
        model = draw(seed, index, ops, turn)
        try:
            return model, plain(model, written(model, folder)), turn
        except (NoModel, Broken):
            continue
    raise NoModel(f"none of {MOST_TURNS} draws was a model")


def written(model: Model, folder: Path) -> Source:
    path = folder / f"model_{model.index}.py"
    path.write_text(render(model), encoding="utf-8")
    return Source(model=f"{path}:build")


def recipe_of(model: Model) -> Recipe:
    return Recipe(
        precision="fp32", optimizer=model.optimizer, recompute=model.recompute, accumulate=model.accumulate, clip=model.clip
    )


# ---------------------------------------------------------------------------------------------- running


def _others(batch: Any, turn: int) -> Any:
    """Other samples of the same shapes."""
    def other(value: Tensor) -> Tensor:
        return value.flip(0) * (1 - turn / 8) if value.is_floating_point() else value.roll(turn, 0)

    return {name: other(value) if turn else value for name, value in batch.items()}


def _batches(batch: Any, model: Model, step: int) -> list[Any]:
    return [_others(batch, step * model.accumulate + micro) for micro in range(model.accumulate)]


def _optimizer(name: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    kind, _, how = name.partition("-")
    flags = {how: True} if how else {}
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=RATE, **flags)
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9 if kind == "momentum" else 0.0, **flags)


def plain(model: Model, source: Source) -> TwoSteps:
    """Two steps by hand."""
    try:
        return _plain(model, source)
    except ForetellError as error:
        raise NoModel(str(error)) from error
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        raise NoModel(f"{type(error).__name__}: {error}") from error


def _plain(model: Model, source: Source) -> TwoSteps:
    torch.manual_seed(0)
    workload = load(source)
    module, loss_of = workload.model.train(), workload.loss
    assert loss_of is not None
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise NoModel("nothing to train")
    optimizer = _optimizer(model.optimizer, trained)
    torch.manual_seed(1)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    norm = None
    for step in range(STEPS):
        total = torch.zeros(())
        for batch in _batches(workload.batch, model, step):
            inputs = {name: value for name, value in batch.items() if name.startswith("x")}
            loss = loss_of(module(**inputs), batch)
            if model.accumulate > 1:
                loss = loss / model.accumulate
            loss.backward()
            total = total + loss.detach()
        losses.append(float(total))
        if not math.isfinite(losses[-1]) or abs(losses[-1]) > HUGE:
            raise NoModel(f"the loss is {losses[-1]}")
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
            if not all(bool(grad.isfinite().all()) for grad in gradients.values()):
                raise NoModel("a gradient is not finite")
        if model.clip is not None:
            found = torch.nn.utils.clip_grad_norm_(trained, model.clip)
            norm = float(found) if step == 0 else norm
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise NoModel("a weight is not finite")
    return TwoSteps(tuple(losses), gradients, weights, norm)


def composed(model: Model, source: Source) -> TwoSteps:
    """The same two steps through foretell's runtime."""
    torch.manual_seed(0)
    workload = load(source)
    blocks = dict(zip(find_blocks(workload.model), (Residency(mode=mode) for mode in model.modes), strict=False))
    plan = Plan(
        model={"model": source.model}, hardware="auto", precision="fp32", optimizer=model.optimizer, clip=model.clip,
        accumulate=model.accumulate, blocks=blocks,
    )  # fmt: skip
    job = apply(workload, plan, ALONE, learning_rate=RATE)
    torch.manual_seed(1)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    norm = None
    try:
        for step in range(STEPS):
            loss = job.backward(_batches(workload.batch, model, step))
            gradients = gradients or job.gradients()
            result = job.update(loss)
            losses.append(float(result.loss))
            if step == 0 and result.grad_norm is not None:
                norm = float(result.grad_norm)
        weights = {name: p.detach().clone() for name, p in job.named_parameters()}
    finally:
        job.close()
    return TwoSteps(tuple(losses), gradients, weights, norm)


# ---------------------------------------------------------------------------------------------- judging


def differs(model: Model, expected: TwoSteps, found: TwoSteps) -> str:
    """What is not equal, in words; nothing where all is."""
    exact = model.clip is None or (expected.norm is not None and expected.norm < model.clip)
    if expected.losses[0] != found.losses[0] or (exact and expected.losses != found.losses):
        return f"losses {expected.losses} by hand, {found.losses} composed"
    for name in sorted(expected.gradients.keys() | found.gradients.keys()):
        left, right = expected.gradients.get(name), found.gradients.get(name)
        if left is None or right is None:
            return f"the gradient of {name} is there {'composed' if left is None else 'by hand'} alone"
        if not torch.equal(left, right):
            return f"gradients of {name} differ by {float((left - right).abs().max()):.3g} of {float(left.abs().max()):.3g}"
    if model.clip is not None and not _near(expected.norm, found.norm):
        return f"the gradient's norm is {expected.norm} by hand, {found.norm} composed"
    if not exact:
        return ""
    for name, weight in expected.weights.items():
        if not torch.equal(weight, found.weights[name]):
            return f"weights {name} differ by {float((weight - found.weights[name]).abs().max()):.3g} after {STEPS} steps"
    return ""


def _near(expected: float | None, found: float | None) -> bool:
    return expected is not None and found is not None and abs(found - expected) <= CLIPPED_WITHIN * (1e-6 + expected)


def _traced(source: Source, recipe: Recipe, verdict: FuzzVerdict) -> tuple[Trace | None, FuzzVerdict]:
    """Both traces; that of the CPU, and what was found."""
    kind = "trace"
    try:
        here = trace_as_cpu(source, recipe)
        kind = "cuda"
        there = capture(lambda: load(source), recipe, capability=(9, 0))
    except Exception as error:
        said = f"{'tracing as CUDA runs it' if kind == 'cuda' else 'tracing'} was to work; {type(error).__name__}: {error}"
        return None, replace(verdict, failure=Failure(kind, said[:2000], f"{type(error).__name__}: {str(error)[:40]}"))
    lacking = sorted({op.name for trace in (here, there) for one in trace.programs.values() for op in one.ops if op.flops is None})
    if lacking:
        said = f"every op was to have a rule for its FLOPs; {', '.join(lacking)} has none"
        return here, replace(verdict, traced=True, failure=Failure("rule", said, lacking[0]))
    return here, replace(verdict, traced=True)


def judged(model: Model, folder: Path, *, run: TwoSteps | None = None, predict: Predict = predict, only: str = "") -> FuzzVerdict:
    """All that is asked of a model, until something does not hold; `only` one kind where a failure is being reduced."""
    began = time.perf_counter()
    source = written(model, folder)
    verdict = FuzzVerdict(model.index, model.ops, model.names, blocks=model.repeats if model.block is not None else 0)
    run = run or plain(model, source)
    found = _judged(model, source, run, verdict, predict, only)
    if found.failure is not None and REFUSED in found.failure.said:
        plainer = model.with_(
            recompute="full" if model.recompute == "selective" else model.recompute,
            modes=tuple("recompute" if mode == "selective" else mode for mode in model.modes),
        )
        found = _judged(plainer, source, run, verdict, predict, only)
        found = replace(found, refused=f"{REFUSED}; {found.refused}" if found.refused else REFUSED)
    verdict = found
    return replace(verdict, seconds=time.perf_counter() - began)


def _judged(model: Model, source: Source, run: TwoSteps, verdict: FuzzVerdict, predict: Predict, only: str) -> FuzzVerdict:
    recipe = recipe_of(model)
    if only != "compose":
        trace, verdict = _traced(source, recipe, verdict)
        if trace is not None and verdict.failure is None and only in ("", "memory"):
            predicted = predict(trace)
            measured, whole = measure_on_cpu(source, recipe, steps=STEPS)
            verdict = replace(verdict, predicted=predicted, measured=measured, scratch=whole - measured)
            if model.recompute != "none" and measured * (1 + WITHIN) < predicted <= whole * (1 + WITHIN):
                verdict = replace(verdict, refused=STOPPED)
            elif abs(verdict.error) > WITHIN:
                said = f"predicted peak {predicted:,} bytes was to be within {WITHIN:.0%} of measured {measured:,}; it is {verdict.error:+.1%}"
                verdict = replace(verdict, failure=Failure("memory", said, "over" if verdict.error > 0 else "under"))
    if verdict.failure is None and only in ("", "compose"):
        verdict = _compared(model, source, run, verdict)
    return verdict


def fails_alike(model: Model, folder: Path, known: Failure, predict: Predict = predict) -> bool:
    """Whether a reduced model still fails in that way; of memory, by more than a few small tensors."""
    try:
        found = judged(model, folder, predict=predict, only=known.kind)
    except (NoModel, Broken):
        return False
    if found.failure is None or (found.failure.kind, found.failure.alike) != (known.kind, known.alike):
        return False
    return known.kind != "memory" or found.measured >= LEAST_BYTES


def repro(model: Model, failure: Failure) -> str:
    """A file that shows the failure when it is run."""
    recipe = {name: getattr(model, name) for name in ("optimizer", "recompute", "accumulate", "clip", "modes")}
    words = "\n".join(textwrap.wrap(failure.said, 120))
    of = f"foretell zoo fuzz, seed {model.seed}, model {model.index}, reduced to {model.ops} ops ({', '.join(model.names)})."
    doc = f"{of}\n\n{words}\n\nShow it: python FILE\n"
    main = f"""

if __name__ == "__main__":
    from foretell.prove.fuzz.check import tell

    print(tell(__file__, kind={failure.kind!r}, **{recipe!r}))
"""
    return render(model, doc.replace("\\", "/"), main)


def tell(path: str, *, kind: str = "", **recipe: Any) -> str:
    """Judge a model that is a file already; what is found."""
    from foretell.prove.fuzz.types import ModelGraph

    model = Model("", 0, ModelGraph((), (), ()), (), **{**recipe, "modes": tuple(recipe.get("modes", ()))})
    source = Source(model=f"{path}:build")
    found = _judged(model, source, plain(model, source), FuzzVerdict(0), predict, kind)
    if found.failure is not None:
        return f"{found.failure.kind}: {found.failure.said}"
    return f"nothing fails; predicted peak {found.predicted:,} bytes, measured {found.measured:,}: {found.error:+.1%}"


def _compared(model: Model, source: Source, run: TwoSteps, verdict: FuzzVerdict) -> FuzzVerdict:
    try:
        said = differs(model, run, composed(model, source))
    except Exception as error:
        return replace(verdict, failure=Failure("compose", f"the plan was to run; {type(error).__name__}: {error}"[:2000], type(error).__name__))
    if said:
        return replace(verdict, failure=Failure("compose", f"composed was to equal by hand: {said}", "differs"))
    return replace(verdict, composed=True)
