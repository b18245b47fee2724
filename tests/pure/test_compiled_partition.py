"""What a compiled step keeps for backward, against PyTorch's own partitioner on the same model.

The reference traces forward and backward with AOT autograd on fake tensors, with CUDA's choices and Inductor's
decompositions and joint passes, and asks `min_cut_rematerialization_partition`. Nothing is computed.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from foretell.trace import types
from foretell.trace.cuda import select as cuda
from foretell.trace.inductor.graph import INPUT
from foretell.trace.inductor.joint import join, pieces
from foretell.trace.inductor.partition import partition
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture, no_initialisation
from foretell.trace.record.recorder import Recorder

LONGER = pytest.mark.slow(reason="compiled by torch, as the GPT is")
MODELS = ("gpt-tiny", *(pytest.param(name, marks=LONGER) for name in ("llama-tiny", "t5-tiny", "bert-tiny", "convnext-micro")))
Kept = Counter[tuple[int, str]]
"""How many kept tensors have how many elements of which dtype."""


def ours(name: str) -> Kept:
    trace = capture(lambda: load(Source(model=name, micro_batch=2)), Recipe())
    parts = pieces(trace.programs["micro_first"].ops, trace.storages)
    joint = join(parts, trace.storages)
    here = {id(node) for node in joint.graph.nodes}
    fixed = (types.PARAMETER, types.BUFFER)
    free = {n.index for s, n in joint.inputs.items() if trace.storages[s].role in fixed and id(n) in here}
    outputs = [*joint.outputs.values(), *joint.mutations.values()]
    split = partition(joint.graph.nodes, outputs, list(joint.gradients.values()), free)
    return Counter((node.numel, node.spec.dtype) for node in split.saved if node.kind != INPUT)


def rms_norm(_: Recorder, input: Tensor, shape: list[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
    """The op itself, which Inductor takes apart; the one of a recording is opaque to it."""
    if weight is not None and weight.dtype != input.dtype:
        common = torch.promote_types(weight.dtype, input.dtype)
        input, weight = input.to(common), weight.to(common)
    return torch.ops.aten._fused_rms_norm(input, shape, weight, eps)[0]


def theirs(name: str) -> Kept:
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import detect_fake_mode
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    found: list[Any] = []

    def split(graph: Any, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            joint_graph_passes(graph)
        forward, backward = min_cut_rematerialization_partition(
            graph, inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=list(range(fixed))
        )
        found.extend(backward.graph.find_nodes(op="placeholder"))
        return forward, backward

    with FakeTensorMode(allow_non_fake_inputs=True), cuda.cuda_choices(Recorder(), (9, 0), torch.__version__):
        with no_initialisation():
            workload = load(Source(model=name, micro_batch=2))
        model = workload.model.train()
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        fixed = len(state)
        wanted = inspect.signature(model.forward).parameters
        batch = {key: value for key, value in workload.batch.items() if key in wanted}

        def call(tensors: list[Tensor], inputs: list[Tensor]) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                named = dict(zip(state, tensors, strict=True))
                return torch.func.functional_call(model, named, kwargs=dict(zip(batch, inputs, strict=True)))

        aot_function(
            call, lambda graph, _: graph, lambda graph, _: graph, partition_fn=split,
            decompositions=select_decomp_table(),
        )(list(state.values()), list(batch.values()))  # fmt: skip
    kept = [node.meta["val"] for node in found if not node.name.startswith(("primals", "tangents"))]
    return Counter((math.prod(value.shape), str(value.dtype).removeprefix("torch.")) for value in kept)


@pytest.mark.slow(reason="compiled by torch itself; what an H200 kept is compared in test_compiled_recorded.py")
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tensors_are_kept_as_by_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ours(name)
    monkeypatch.setitem(cuda.CHOICES, "rms_norm", rms_norm)
    reference = theirs(name)
    assert sum(reference.values()) > 10
    assert mine == reference
