"""Jobs that are to share one GPU: each traced and costed as `fit` does it, then all together (`simulate.beside`). No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretell.errors import UserError
from foretell.hardware.lookup import find_profile
from foretell.hardware.types import Cluster
from foretell.plan.precision import default_recipe, refuse_recipe
from foretell.price.speeds import Options
from foretell.simulate.beside import Together, together
from foretell.simulate.parts import PlanCost
from foretell.simulate.plan import predict_step
from foretell.trace.load.model import Source
from foretell.trace.load.model import check as check_source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.child import request
from foretell.trace.store.traces import traced

OF_SOURCE = ("overrides", "micro_batch", "seq", "image", "loss")
OF_RECIPE = ("optimizer", "precision", "recompute", "accumulate", "clip", "lora", "nf4", "freeze", "state_format")


def beside(jobs: Sequence[Mapping[str, Any]], cluster: Cluster, *, cache: bool = True) -> Together:
    """What jobs need and take that run on one device at the same time; each names its `model`, and options as `fit` has them."""
    if cluster.count > 1 or cluster.device.backend not in ("cuda", "rocm"):
        told = f"jobs side by side are predicted on one GPU, and this is {cluster.count} of {cluster.device.name}"
        raise UserError(told, "give one GPU, such as --on H100")
    return together([_cost(job, cluster, cache) for job in jobs])


def _cost(job: Mapping[str, Any], cluster: Cluster, cache: bool) -> PlanCost:
    known = {name: value for name, value in job.items() if value is not None}
    strange = sorted(set(known) - {"model", *OF_SOURCE, *OF_RECIPE})
    if strange:
        raise UserError(f"'{strange[0]}' is no option of a job beside another", f"give {', '.join((*OF_SOURCE, *OF_RECIPE))}")
    source = Source(model=str(known["model"]), **{name: known[name] for name in OF_SOURCE if name in known})
    check_source(source)
    recipe = Recipe(**{"precision": default_recipe(cluster, False), **{name: known[name] for name in OF_RECIPE if name in known}})
    refuse_recipe(recipe.precision, cluster, False)
    asked = request(source, replace(recipe, accumulate=1), cluster.device.compute_capability or (9, 0), {})
    trace, _ = traced(asked, cache=cache)
    return predict_step(trace, recipe, cluster, Options(profile_of=find_profile), micro_batch=source.micro_batch)
