"""A traced step under torch.compile, in the ways a plan can ask for. Plain data, no torch.

    model    the whole model is one graph
    blocks   every block is a graph, what lies around them stays eager
    graphs   the whole model, its launches recorded once and replayed (mode "reduce-overhead")
"""

from __future__ import annotations

from foretell.lower.fsdp.sharded import block_of
from foretell.trace.types import Trace


def compiled(trace: Trace, way: str) -> Trace:
    """The trace of the same step, compiled that way."""
    if way == "none":
        return trace
    from foretell.trace.inductor.compiled import compile_trace

    if way == "blocks":
        return compile_trace(trace, block_of=block_of)
    return compile_trace(trace, cuda_graphs=way == "graphs")
