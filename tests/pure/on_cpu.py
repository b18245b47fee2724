"""A step traced as this CPU runs it, beside the step really run."""

from __future__ import annotations

from foretell.simulate.memory.replay import peak_live
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.record.on_cpu import measure_on_cpu, trace_as_cpu
from foretell.trace.types import Trace


def compare_on_cpu(source: Source, recipe: Recipe) -> tuple[int, int, Trace]:
    """Predicted and measured peak bytes of tensors, and the trace."""
    trace = trace_as_cpu(source, recipe)
    return peak_live(trace, tuple(trace.schedule)), measure_on_cpu(source, recipe)[0], trace
