"""What a step's program says of itself."""

from __future__ import annotations

from foretell.trace.types import Trace


def flops(trace: Trace) -> int:
    """Of a steady step, as far as rules know."""
    run = trace.schedule.get("steady_step") or trace.schedule["evaluation"]
    return sum(times * sum(op.flops or 0 for op in trace.programs[name].ops) for name, times in run)


def said(trace: Trace) -> tuple[str, ...]:
    """What it assumes, and which ops have no rule."""
    assumed = trace.meta.get("assumed", [])
    missing = trace.ops_without_flop_rule
    lines = tuple(str(line) for line in assumed) if isinstance(assumed, (list, tuple)) else ()
    return (*lines, f"no FLOP rule for {', '.join(missing)}: they count as unknown") if missing else lines
