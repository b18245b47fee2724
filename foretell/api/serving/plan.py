"""`foretell plan MODEL --serve`: how to serve a model on some devices, for a load and its limits; and the plan that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foretell.api.serving.forecast import ServedModel, ServingAsked, ServingForecast, answer, served_model
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.plan.precision import in_plan
from foretell.plan.recipe import model_of
from foretell.plan.types import Mesh, Plan, ServeLayout
from foretell.price.speeds import Options
from foretell.search.serving.find import ServeChange, ServeFound, ServePoint, find, front, what_if
from foretell.search.serving.space import GOALS, ServeQuestion
from foretell.simulate.serving.load import Load
from foretell.simulate.serving.records import Limit

LEFT_SECONDS, WHAT_IF_SECONDS = 8.0, 40.0
"""After which no further change is looked at: since the search began, and where they are asked for."""
NEXT_DEVICE = {"A100-SXM-80GB": "H100", "H100-SXM-80GB": "H200", "H200-SXM-141GB": "B200", "A100-SXM-40GB": "A100"}
"""Device → one that would be tried instead."""


@dataclass(frozen=True, kw_only=True)
class ServingPlanAnswer:
    """An answer."""

    found: ServeFound
    plan: Plan | None
    """The best; None: nothing keeps the limits."""
    forecast: ServingForecast | None
    """Of the best, or of the nearest."""

    def to_json(self) -> dict[str, Any]:
        found = self.found
        return {
            "best": None if found.best is None else point_json(found.best), "nearest": None if found.nearest is None else point_json(found.nearest),
            "front": [point_json(one) for one in front(found)], "looked_at": len(found.looked) + len(found.ruled),
            "ruled_out": [{"layout": one.layout.to_json(), "why": one.why} for one in found.ruled], "seconds": found.seconds,
            "what_if": [{"change": one.change, "rate": one.rate, "keeps": one.keeps} for one in found.what_if],
            "forecast": None if self.forecast is None else self.forecast.to_json(),
        }  # fmt: skip


def point_json(one: ServePoint) -> dict[str, Any]:
    return {
        "layout": one.layout.to_json(), "devices": one.layout.devices, "inside": one.inside, "capacity_rate": one.capacity,
        "ttft_p95_seconds": one.ttft, "tpot_p95_seconds": one.tpot, "output_tokens_per_second": one.output_rate,
        "dollars_per_million": one.dollars_per_million, "preemptions": one.served.preemptions, "keeps": one.keeps,
    }  # fmt: skip


def plan_serving(
    model: str, hardware: str, load: Load, load_text: str, limit: Limit, slo: str, *, goal: str = "throughput", may: tuple[str, ...] = (),
    fixed: Mapping[str, int] | None = None, overrides: Mapping[str, Any] | None = None, precision: str = "auto", graphs: bool = True,
    invariant: bool = False, what_ifs: bool = False, patience: float | None = None,
) -> ServingPlanAnswer:  # fmt: skip
    """Search, and describe the best as a plan."""
    if goal not in GOALS:
        raise UserError(f"--goal {goal} is not known", f"one of {', '.join(GOALS)}")
    asked = ServingAsked(model=model, hardware=hardware, overrides=overrides or {}, precision=precision, load=load, limit=limit, graphs=graphs,
                         invariant=invariant)  # fmt: skip
    source = served_model(asked)
    question = ServeQuestion(
        trace=source.trace, recipe=source.recipe, cluster=source.cluster, options=Options(profile_of=find_profile), load=load, limit=limit,
        goal=goal, may=may, fixed=dict(fixed or {}), graphs=graphs, invariant=invariant, patience=patience or 60.0,
    )  # fmt: skip
    found = find(question)
    budget = WHAT_IF_SECONDS if what_ifs or found.best is None else LEFT_SECONDS - found.seconds
    found.what_if = [*_twice(question, found), *what_if(question, found, _others(question, found), budget)] if budget > 0 else _twice(question, found)
    chosen = found.best or found.nearest
    if chosen is None:
        return ServingPlanAnswer(found=found, plan=None, forecast=None)
    costs = found.costs[chosen.layout]
    told = _forecast(source, found, chosen, asked)
    plan = None
    if found.best is not None:
        layout = replace(costs.layout, pages=chosen.layout.pages, replicas=chosen.layout.replicas, load=load_text, slo=slo)
        plan = _plan(source, layout, hardware, told, chosen)
    return ServingPlanAnswer(found=found, plan=plan, forecast=told)


def _forecast(source: ServedModel, found: ServeFound, chosen: ServePoint, asked: ServingAsked) -> ServingForecast:
    costs = found.costs[chosen.layout].limited(chosen.layout)
    return replace(answer(source, costs, replace(asked, limit=Limit())), capacity_rate=chosen.capacity)


def _twice(question: ServeQuestion, found: ServeFound) -> list[ServeChange]:
    """As many devices again serve as many requests again: replicas know nothing of each other."""
    shown = found.best
    if shown is None or not shown.capacity:
        return []
    return [ServeChange(change=f"{question.cluster.count * 2} devices", rate=2 * shown.capacity, keeps=True)]


def _others(question: ServeQuestion, found: ServeFound) -> list[tuple[str, ServeQuestion]]:
    """What else might help: formats that were not allowed, the next device, more of them where nothing keeps the limits."""
    best, cluster = found.nearest, question.cluster
    quick = {} if best is None else {"tp": best.layout.tp, "pp": best.layout.pp}
    others: list[tuple[str, ServeQuestion]] = []

    def formats() -> None:
        for name in ("fp8", "kv-fp8", "int8", "int4"):
            if name not in question.may:
                more = replace(question, may=(*question.may, name), fixed={**question.fixed, **quick})
                if _possible(more, name):
                    others.append((f"--may {name}", more))

    def devices() -> None:
        other = NEXT_DEVICE.get(cluster.device.name)
        if other is not None and not cluster.groups:
            others.append((f"on {other}", replace(question, cluster=parse(f"{cluster.count}x{other}"), fixed=dict(quick))))
        if found.best is None and cluster.nodes == 1 and not cluster.groups:
            others.append((f"{cluster.count * 2} devices", replace(question, cluster=parse(f"{cluster.count * 2}x{cluster.device.name}"))))

    for more in (formats, devices) if found.best is not None else (devices, formats):
        more()
    return others


def _possible(question: ServeQuestion, name: str) -> bool:
    from foretell.lower.serving_formats import refusal

    pair = ("bf16", name.removeprefix("kv-")) if name.startswith("kv-") else (name, "bf16")
    return refusal(question.cluster.device, *pair) is None


def _plan(source: ServedModel, layout: ServeLayout, hardware: str, told: ServingForecast, chosen: ServePoint) -> Plan:
    figures = {name: value for name, value in point_json(chosen).items() if name != "layout"}
    predicted = {"verdict": told.verdict, "memory_bytes": told.device_bytes, "capacity_bytes": told.capacity_bytes, "serving": figures}
    return Plan(
        model=model_of(source.source), hardware=hardware, mesh=Mesh(dp_replicate=layout.replicas, tp=layout.tp, pp=layout.pp),
        precision=in_plan(str(source.recipe.precision)) or "fp16-mixed", serve=layout, predicted=predicted,
        notes=(f"a plan to serve: foretell serve PLAN --on {hardware} forecasts it again",),
    )  # fmt: skip
