"""A plan in the words of other tools, and theirs in ours. Pure: no torch.

A tool whose files cannot hold the plan's mesh is refused. Whatever else is lost is told, on the screen and in the files.

Names of a plan come from elsewhere. In a command or a shell script there is none of them; where they stand in a comment or a
value, they are written by the rules of that language (`plan.text`), though a plan file with strange names is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from foretell.errors import UnknownName
from foretell.export import accelerate, deepspeed, kubernetes, skypilot, slurm, torchtitan
from foretell.export.types import Exported, refuse
from foretell.plan import legal
from foretell.plan.facts import facts_of
from foretell.plan.text import plain
from foretell.plan.types import PRECISIONS, Plan

TOOLS: Mapping[str, Callable[[Plan], Exported]] = {
    "accelerate": accelerate.write,
    "deepspeed": deepspeed.write,
    "torchtitan": torchtitan.write,
    "slurm": slurm.write,
    "k8s": kubernetes.write,
    "skypilot": skypilot.write,
}

TRAINERS = ("accelerate", "deepspeed", "torchtitan")
"""Tools that train by themselves; the others start foretell."""

__all__ = ["TOOLS", "Exported", "export"]


def export(plan: Plan, tool: str) -> Exported:
    """The files of a tool for a plan."""
    if tool not in TOOLS:
        raise UnknownName("tool", tool, TOOLS, f"known: {', '.join(TOOLS)}")
    legal.check(plan, facts_of(plan))
    if tool in TRAINERS and plan.precision not in PRECISIONS:
        raise refuse(tool, f"precision {plan.precision}", "foretell alone runs it")
    made = TOOLS[tool](plan)
    return replace(made, lost=tuple(map(plain, made.lost)))
