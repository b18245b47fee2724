"""Forwards that were swapped: on modules and not on their classes, so that parameters, hooks and state dict stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class SwappedForwards:
    """Which modules have another forward now, and which were left and why."""

    modules: tuple[tuple[str, nn.Module, Callable[..., Any]], ...]
    left: tuple[tuple[str, str], ...]

    def revert(self) -> None:
        """Give each module its own back; one that somebody has swapped since is theirs."""
        for _, module, put in self.modules:
            if vars(module).get("forward") is put:
                del module.forward

    def __str__(self) -> str:
        lines = [f"{path}: swapped" for path, _, _ in self.modules] + [f"{path}: left, {why}" for path, why in self.left]
        return "\n".join(lines) or "no module is swapped"


def replaced(module: nn.Module) -> bool:
    """Whether somebody has put another forward into it."""
    return "forward" in vars(module)
