"""Which number format follows from the device: the one rule, and what recipes and plans call it.

    device has rates for     bfloat16        float16 alone (T4, V100, P100)     neither
    recipe, one device       bf16-autocast   fp16-autocast                      fp32
    recipe, sharded          fsdp-bf16       fsdp-fp16                          fp32
    plan, and on screens     bf16-mixed      fp16-mixed                         fp32

float16 has five bits of exponent, so its gradients are scaled. Plain data, no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.errors import UnknownName, UserError
from foretell.plan.types import FLOAT8, FP16, MASTER
from foretell.trace.recipe import COMPUTES

if TYPE_CHECKING:
    from foretell.hardware import Cluster

MIXED = {"bf16-mixed": ("bf16-autocast", "fsdp-bf16"), FP16: ("fp16-autocast", "fsdp-fp16")}
"""fp32 weights and compute in 16 bits → the recipe's precision on one device, and sharded."""
_MIXED_OF = {"bfloat16": "bf16-mixed", "float16": FP16, "float32": "fp32"}
_OF_PLANS = {
    "fp32": "float32", "bf16-mixed": "bfloat16", FP16: "float16", "bf16": "bfloat16", "fp16": "float16", MASTER: "bfloat16",
    FLOAT8: "bfloat16", "tf32": "tf32",
}  # fmt: skip


# --- names -----------------------------------------------------------------------------------------------------------


def computes_in(precision: str) -> str:
    """The dtype that a plan of this precision computes in."""
    return _OF_PLANS.get(precision, "float32")


def in_recipe(precision: str, sharded: bool) -> str:
    """What a recipe calls a plan's precision."""
    return MIXED[precision][sharded] if precision in MIXED else "bf16" if precision == MASTER else precision


NAMES = ("fp32", "tf32", *MIXED, "bf16", "fp16")
"""What users write and read of a step; recipes have two names for each mixed one, which are read as well."""


def read(name: str, sharded: bool) -> str:
    """The recipe's precision that a user's word means; `UnknownName` otherwise."""
    found = in_recipe(name, sharded)
    if found not in COMPUTES or name == MASTER:
        raise UnknownName("precision", name, NAMES, f"known: {', '.join(NAMES)}")
    return found


def shown(recipe: str) -> str:
    """What users read of a recipe's precision."""
    return in_plan(recipe) or recipe


def in_plan(recipe: str) -> str | None:
    """What a plan calls a recipe's precision; None where no plan has it."""
    mixed = {name: plan for plan, names in MIXED.items() for name in names}
    return mixed.get(recipe, recipe if recipe in ("fp32", "bf16") else None)


# --- devices ---------------------------------------------------------------------------------------------------------


def formats(cluster: Cluster) -> frozenset[str] | None:
    """Number formats that every device computes in; None: all of them, as a CPU does."""
    if {device.backend for device in cluster.devices} == {"cpu"}:
        return None
    return frozenset.intersection(*(frozenset(device.peak_flops_per_second) for device in cluster.devices))


def low(cluster: Cluster) -> str:
    """The 16-bit format to compute in on this hardware; float32 where it has none, and on a CPU."""
    known = formats(cluster) or frozenset()
    return next((dtype for dtype in ("bfloat16", "float16") if dtype in known), "float32")


def default(cluster: Cluster) -> str:
    """The precision of plans for this hardware where none is asked for."""
    return _MIXED_OF[low(cluster)]


def worth_trying(cluster: Cluster) -> tuple[str, ...]:
    """Precisions of plans to search where none is asked for: fp32 too, where 16 bits compute no faster (P100)."""
    first, dtype = default(cluster), low(cluster)
    if first == FP16 and not all(device.peak(dtype) > device.peak("float32") for device in cluster.devices):
        return first, "fp32"
    return (first,)


def moving_states(cluster: Cluster) -> str:
    """The precision of plans that move optimizer states where none is asked for: scaled gradients are not moved."""
    first = default(cluster)
    return "fp32" if first == FP16 else first


def default_recipe(cluster: Cluster, sharded: bool) -> str:
    """The precision of `fit` on this hardware where none is asked for."""
    return in_recipe(default(cluster), sharded)


def for_inference(cluster: Cluster) -> str:
    """The recipe's precision of weights and compute for inference, where none is asked for."""
    return "bf16" if formats(cluster) is None else {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[low(cluster)]


def refuse_recipe(precision: str, cluster: Cluster, sharded: bool) -> None:
    """Raise where a device has no units for what a recipe's precision computes in."""
    _refuse(shown(precision), COMPUTES[precision], cluster, shown(default_recipe(cluster, sharded)))


def refuse_plan(precision: str, cluster: Cluster) -> None:
    """The same of a plan's precision."""
    _refuse(precision, computes_in(precision), cluster, default(cluster))


def missing(dtype: str, cluster: Cluster) -> str:
    """The first device without units for a format; empty where all have them."""
    known = formats(cluster)
    if known is None or dtype in ("float32", *known):
        return ""
    return next(device.name for device in cluster.devices if dtype not in device.peak_flops_per_second)


def _refuse(precision: str, dtype: str, cluster: Cluster, instead: str) -> None:
    lacking = missing(dtype, cluster)
    if lacking:
        other = f"--precision {instead}" + (", or fp32" if instead != "fp32" else "")
        raise UserError(
            f"--precision {precision}: {lacking} has no {dtype} units, and how slowly PyTorch computes it there is not known", other
        )
