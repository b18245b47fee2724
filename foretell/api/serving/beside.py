"""What a server of a plan gave its requests, beside what is predicted of these very requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.api.serving.forecast import ServingAsked, served_model
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.lower.serving import StepShape
from foretell.plan.types import Plan
from foretell.price.serving.measured_steps import MeasuredSteps
from foretell.search.serving.settings import ServeFigures, figures_of
from foretell.serve.engine import LENGTH, STOP
from foretell.serve.record import RequestRow
from foretell.simulate.serving.load import Load, Request
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.records import Limit, Served, SimulatedAnswer, limit_of
from foretell.simulate.serving.run import simulated
from foretell.simulate.serving.scheduler import Scheduler, StepLimits

GPU_PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class ServedBeside:
    """An answer."""

    requests: int
    left_out: int
    """Cancelled and failed ones."""
    measured: ServeFigures
    predicted: ServeFigures | None
    why_not: str = ""
    """There is no prediction."""

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests, "left_out": self.left_out, "measured": self.measured.to_json(),
            "predicted": None if self.predicted is None else self.predicted.to_json(), "why_not": self.why_not,
        }  # fmt: skip


def beside(plan: Plan, rows: Sequence[RequestRow], on: str = "cpu") -> ServedBeside | None:
    """None where nothing was answered. `on`: torch's name of the device that served."""
    whole = sorted((one for one in rows if one.ended in (LENGTH, STOP) and one.output), key=lambda one: one.came)
    if not whole or plan.serve is None:
        return None
    began = whole[0].came
    load = Load(kind="trace", recorded=tuple(Request(one.came - began, one.prompt, one.output) for one in whole))
    limit = limit_of(plan.serve.slo)
    came = Served(answers=[SimulatedAnswer(one.came - began, one.prompt, one.output, one.first - began, one.last - began) for one in whole])
    measured = _figures(came, load, limit)
    left_out = len(rows) - len(whole)
    try:
        seconds, ahead = _price(plan, on)
    except UserError as error:
        return ServedBeside(requests=len(whole), left_out=left_out, measured=measured, predicted=None, why_not=error.problem)
    layout = plan.serve
    limits = StepLimits(running=layout.running, tokens=max(layout.tokens, layout.running), ahead=ahead)
    served = simulated(load, Scheduler(Pages(layout.pages, layout.page), limits), seconds, float("inf"))
    return ServedBeside(requests=len(whole), left_out=left_out, measured=measured, predicted=_figures(served, load, limit))


def _figures(served: Served, load: Load, limit: Limit) -> ServeFigures:
    return figures_of(served, limit, load.mean[1], load.recorded[-1].at or 1e-9)


def _price(plan: Plan, on: str) -> tuple[Callable[[StepShape], float], bool]:
    """Seconds of steps: as they were measured when the plan was tuned, else by the path; and whether steps are decided one ahead."""
    assert plan.serve is not None
    cluster = parse(plan.hardware)
    there = "a CPU" if cluster.device.backend == "cpu" else cluster.device.name
    here = "a CPU" if on.startswith("cpu") else parse("auto").device.name
    if here != there:
        raise UserError(f"the plan is for {there}, and {here} served it", "a plan for this device")
    told = plan.predicted.get("serving")
    law = told.get("steps") if isinstance(told, dict) else None
    if law is not None:
        return MeasuredSteps.from_json(law).seconds, False
    if cluster.device.backend == "cpu":
        raise UserError("steps on a CPU are predicted from measured ones, and the plan has none", "foretell tune serve writes them")
    precision = plan.precision if plan.precision in GPU_PRECISIONS else "auto"
    layout = plan.serve
    model = served_model(ServingAsked(
        model=str(plan.model["model"]), hardware=plan.hardware, overrides=plan.model.get("overrides", {}), precision=precision,
    ))  # fmt: skip
    return model.costs(layout).seconds, layout.devices == 1
