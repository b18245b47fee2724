"""Options of adapters, for `fit` and `plan`: described once, and read into what a recipe and a plan say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell.errors import UserError
from foretell.options import words
from foretell.options.describe import option
from foretell.trace.recipe import ADAPTED, ALPHA, Adapters, known_base

NAMES = ("lora", "nf4", "adapter", "lora_alpha", "lora_dropout", "lora_targets", "lora_train", "base")
_DESCRIBED: Mapping[str, Mapping[str, Any]] = {
    "lora": {"default": None, "help": "Train LoRA adapters of this rank; default: every weight.", "metavar": "RANK"},
    "nf4": {"default": False, "help": "Hold the frozen base in 4-bit NormalFloat; needs --lora."},
    "adapter": {"default": "lora", "help": "lora, rslora, dora or dora-norm (dora without the full product); needs --lora.", "metavar": "KIND"},
    "lora_alpha": {"default": ALPHA, "help": "What scales an adapter's update.", "metavar": "X"},
    "lora_dropout": {"default": 0.0, "help": "Dropout of what goes into an adapter.", "metavar": "SHARE"},
    "lora_targets": {
        "default": None, "help": "Layers that get adapters, such as q_proj,v_proj; default: all linear layers of the blocks.", "metavar": "NAMES",
        "typed": str, "read": words.names,
    },
    "lora_train": {
        "default": None, "help": "Modules trained whole beside the adapters, such as lm_head.", "metavar": "NAMES", "typed": str,
        "read": words.names,
    },
    "base": {
        "default": (), "help": "Format of the frozen base: bf16, float8, int8, nf4 or nf4-double, of all adapted layers or of a name.",
        "metavar": "[NAME=]FORMAT", "typed": list[str], "read": tuple,
    },
}  # fmt: skip


def of_adapters(name: str) -> Any:
    """One of these options, as a field of an options class."""
    return option(**_DESCRIBED[name])


def adapters_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """`adapters` and `base` of a recipe, as options ask for them."""
    rank = given.get("lora")
    if rank is None:
        for name in ("adapter", "lora_alpha", "lora_dropout", "lora_targets", "lora_train"):
            if given.get(name, _DESCRIBED[name]["default"]) != _DESCRIBED[name]["default"]:
                raise UserError(f"--{name.replace('_', '-')} is given without adapters", "add --lora RANK, for example --lora 16")
    if rank is not None and not rank > 0:
        raise UserError(f"lora must be positive, got {rank}", "give lora a value above zero")
    base = tuple(_format(word) for word in given.get("base") or ()) or (((ADAPTED, "nf4"),) if given.get("nf4") else ())
    if given.get("nf4") and base != ((ADAPTED, "nf4"),):
        raise UserError("--nf4 and --base are given together", "leave --nf4 out: --base says the format")
    if rank is None:
        return {"adapters": None, "base": base}
    found = Adapters(
        kind=given.get("adapter") or "lora", rank=rank, alpha=float(given.get("lora_alpha") or ALPHA),
        dropout=float(given.get("lora_dropout") or 0.0), targets=tuple(given.get("lora_targets") or ()), train=tuple(given.get("lora_train") or ()),
    )  # fmt: skip
    return {"adapters": found, "base": base}


def _format(word: str) -> tuple[str, str]:
    """`nf4`, or `q_proj=nf4-double`."""
    pattern, _, kind = str(word).rpartition("=")
    known_base(pattern or "the adapted layers", kind)
    return pattern or ADAPTED, kind
