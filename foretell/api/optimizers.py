"""A torch optimizer, or its class, as the name that a recipe has for it."""

from __future__ import annotations

from typing import Any

from foretell.errors import UserError

_KINDS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw"}


def optimizer_name(given: Any) -> str:
    """`adamw-fused` of that name, of `torch.optim.AdamW(..., fused=True)`; `adamw` of the class: its default then is torch's own."""
    if isinstance(given, str):
        return given
    kind = given if isinstance(given, type) else type(given)
    groups = [] if isinstance(given, type) else list(getattr(given, "param_groups", []))
    name = _KINDS.get(kind.__name__) if kind.__module__.startswith("torch.optim") else None
    if name is None:
        raise UserError(f"an optimizer {kind.__module__}.{kind.__qualname__} is given", f"give a name, or torch.optim's {', '.join(_KINDS)}")
    if any(group.get("amsgrad") for group in groups):
        raise UserError(f"{kind.__name__} with amsgrad=True, which has a state more", "leave amsgrad out, or follow your script")
    said = {(bool(group.get("momentum")), _variant(group, name)) for group in groups} or {(False, "")}
    if len(said) > 1:
        raise UserError(f"groups of this {kind.__name__} differ in momentum, fused or foreach", "give them the same, or follow your script")
    (momentum, variant), = said
    return ("momentum" if name == "sgd" and momentum else name) + variant


def _variant(group: Any, kind: str) -> str:
    """None and None: torch chooses, as it does for a name without a suffix: for SGD that is foreach."""
    if group.get("fused"):
        return "-fused"
    if group.get("foreach"):
        return "" if kind == "sgd" else "-foreach"
    return "-loop" if group.get("foreach") is False and group.get("fused") is False else ""
