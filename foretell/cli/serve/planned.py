"""`foretell serve PLAN`: what a plan of `plan --serve` says stands for the flags that were not typed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import typer

from foretell.errors import UserError


def from_plan(context: typer.Context, serve: Callable[..., int], path: str) -> int:
    """Forecast it where --on is given, else serve it here, if all of it can be run."""
    from foretell.plan import file

    plan = file.read(path)
    layout = plan.serve
    if layout is None:
        raise UserError(f"{path} is a plan to train", f"foretell run {path}; or foretell plan MODEL --serve writes one to serve")
    given = dict(context.params)
    said = {
        "model": plan.model["model"], "override": [f"{name}={_value(value)}" for name, value in plan.model.get("overrides", {}).items()],
        "pages": layout.pages, "size": layout.page, "running": layout.running, "tokens": layout.tokens, "share": layout.share,
        "tp": layout.tp, "pp": layout.pp, "graphs": layout.graphs, "compiled": layout.compiled, "invariant": layout.invariant,
    }  # fmt: skip
    forecasts = given["on"] is not None
    if forecasts:
        said |= {"replicas": layout.replicas, "weight_format": layout.weights, "kv": layout.kv}
        said |= {"load": layout.load or None, "slo": layout.slo or None}
    else:
        on_cpu = given["device"] == "cpu"
        said |= {"weight_format": layout.weights, "kv": layout.kv}
        lacking = ", ".join((*(() if on_cpu else layout.not_run_yet), *(["several replicas"] if layout.replicas > 1 else [])))
        if lacking:
            remedy = f"foretell serve {path} --on {plan.hardware} forecasts it" + ("" if layout.replicas > 1 else "; --device cpu runs formats")
            raise UserError(f"{path} has {lacking}, which foretell serve does not run yet", remedy)
    for name, value in said.items():
        source = context.get_parameter_source(name)
        if name == "model" or source is None or source.name != "COMMANDLINE":
            given[name] = value
    if forecasts and given["slo"] is not None and given["load"] is None:
        given["slo"] = None
    as_run = {"pages": "pages", "page": "size", "running": "running", "tokens": "tokens", "share": "share", "graphs": "graphs"}
    context.obj = replace(plan, serve=replace(layout, **{name: given[option] for name, option in as_run.items()}))
    return serve(context, **given)


def _value(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)
