"""Software stacks as data: what a framework runs for the same model, and how well. No constant belongs to one run.

A stack says which attention kernel runs, what the memory-bound parts cost, how gradients travel and how busy the
host is. Memory-bound parts are bytes moved per element (per token and channel), so that a device's bandwidth turns
them into seconds; pairs are forward and backward. `reasons` says where a figure that differs from the plain ones
below comes from. Plain figures were measured on one H200 under torch 2.11: kernels timed alone, seconds turned
into bytes at the 4.13 TB/s that a copy reaches there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

Pair = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One framework with its kernels and versions."""

    name: str
    framework: str
    versions: Mapping[str, str] = field(default_factory=dict)
    attention: str = "flash-2"
    """Name of a kernel in `analytic.KERNELS`, or "math": two products with a softmax between them."""
    dtype: str = "bfloat16"
    """Of products that are not 8-bit."""
    fused: bool = False
    """Memory-bound kernels are fused: torch.compile, or written so by hand."""

    norm_bytes: Pair = (5.0, 15.0)
    residual_bytes: Pair = (6.0, 6.0)
    """Of one residual connection; a layer has two."""
    activation_bytes: Pair = (4.0, 6.0)
    """Of an activation without a gate."""
    gate_bytes: Pair = (10.0, 17.0)
    """Of a gated activation."""
    rotary_bytes: Pair = (22.0, 22.0)
    """Of rotary embedding, per element of queries and keys; computed in float32."""
    score_bytes: Pair = (40.0, 40.0)
    """Per score (query, key and head) where attention is "math"; counted: scale, mask, softmax in float32, cast."""
    loose_score_bytes: Pair = (40.0, 40.0)
    """The same where the framework's fused softmax does not take the shape."""
    softmax_keys: int = 0
    """Longest row a fused softmax takes (it also asks for a multiple of four heads times sequences); 0: any shape."""
    table_bytes: float = 8.0
    """Per parameter of the embedding table and micro-batch: its gradient is made whole and added."""
    route_bytes: float = 4.0
    """Per element that is permuted to its expert or back."""
    loss_bytes: float = 50.0
    """Per logit: the loss and its backward."""
    optimizer_bytes: float = 33.0
    """Per parameter of the update."""
    clip_bytes: float = 12.0
    """Per parameter of clipping the gradient norm; 0 without."""
    weight_bytes: float = 0.0
    """Per parameter and micro-batch: casting weights down and gradients up."""

    cast_bytes: float = 4.0
    """Per element that is scaled and cast for an 8-bit product."""
    product8: float = 1.0
    """Factor on the rate of 8-bit products: row-wise scales cost more than one for the tensor."""
    wide_weight_gradients: bool = False
    """Weight gradients stay 16-bit products although the others are 8-bit."""

    gather_bytes: float = 2.0
    """Per parameter on the wire when shards are gathered."""
    reduce_bytes: float = 4.0
    """Per gradient element on the wire."""
    shard_copies: bool = True
    """Parameters and gradients are copied in and out of the buffers of a collective (FSDP2)."""
    drag: float = 0.85
    """How much longer compute takes while a collective runs beside it."""
    reduces_early: bool = True
    """Gradients travel while backward still runs; else all at once after it."""
    reduces_whole: bool = False
    """With sharded optimiser states gradients are still all-reduced, not reduce-scattered."""
    gradients_hidden: float = 0.0
    """Part of the gradients' traffic that a pipeline hides behind its last backwards."""
    tensor_hidden: Pair = (0.0, 0.0)
    """Part of a tensor-parallel layer's traffic that products hide, forward and backward."""
    gathers_narrow: bool = False
    """With 8-bit products, tensor-parallel ranks cast before they gather: fewer bytes, and one cast for all who read."""
    context_shown: float = 0.1
    """Part of the traffic of keys and values that attention does not hide."""
    expert_rate: float = 0.5
    """Part of a dense product's rate that the products of many experts reach: uneven loads, short groups."""
    expert_launches: int = 60
    """Kernels of routing, permuting and grouping in one pass of a layer."""
    expert_hidden: float = 0.3
    """Part of the experts' all-to-all that other work hides."""
    splits_messages: bool = True
    """Tensor-parallel ranks of a stage each send their part of an activation, not all of it."""
    message_shown: float = 1.0
    """Part of a message between stages for which both ends stop."""
    stall_seconds: float = 0.0
    """A pass of a layer (backward is two) waits so long for the host, where launches are not asynchronous."""
    tensor_wait: float = 0.0
    """Seconds a tensor-parallel collective waits for the slowest of its ranks, for each further rank."""
    ring_loss: float = 0.06
    """Longer attention takes for each further context-parallel rank: keys come in pieces, partial results are merged."""
    host_seconds: float = 8e-6
    """Host time to issue one kernel."""

    state_bytes: Pair = (0.0, 16.0)
    """Per parameter: on every rank, and sharded with the optimiser. With full sharding all of it is spread."""
    logit_bytes: float = 10.0
    """Per logit at the peak: 16-bit logits, a float32 copy and its gradient."""
    buffer_bytes: float = 1.0e9
    """Communicators, buckets and workspaces."""
    fragments: float = 0.08
    """What the allocator holds beyond what is used, as a part of it."""

    reports: str = "reserved"
    """What its users print as memory: allocated, reserved (both of the fullest rank) or device (of the first rank)."""

    tied: bool = False
    """The head shares its weights with the embedding."""
    selective: str = "ops"
    """What "selective" recomputation means: ops (every second product kept), layers (every second one), attention."""
    early_stop: bool = True
    """Recomputing a block ends at the last tensor that backward needs: its last product is not done again."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Field → why it has this value."""


EAGER = Stack(
    name="pytorch", framework="PyTorch", versions={"torch": "2"}, weight_bytes=12.0,
    reasons={
        "norm_bytes": "measured on one H200: LayerNorm forward and backward, 328 us for 16384 x 4096",
        "gate_bytes": "measured on one H200: SwiGLU forward and backward, 1,536 us for 16384 x 14336",
        "loss_bytes": "measured on one H200: linear and cross-entropy, 100.5 ms, less the products at 750 TFLOP/s",
        "optimizer_bytes": "measured on one H200: fused AdamW, 7,924 us for 1e9 parameters",
        "weight_bytes": "counted: autocast reads 4 and writes 2 bytes a weight, and gradients come back the other way",
        "residual_bytes": "counted: two tensors read, one written",
        "activation_bytes": "counted: one tensor read and written, and one more read in backward",
        "rotary_bytes": "counted: cast up, multiply, cast down",
        "drag": "fitted on every second run of llm-foundry; a collective takes cores, bandwidth and power, and is slowed itself",
        "host_seconds": "assumed",
    },
)  # fmt: skip
"""PyTorch without compilation: one kernel an op, autocast, fused AdamW."""

COMPILED = replace(
    EAGER, name="pytorch-compile", fused=True, norm_bytes=(6.0, 20.0), residual_bytes=(2.0, 0.0),
    activation_bytes=(4.0, 8.0), gate_bytes=(6.0, 9.0), rotary_bytes=(8.0, 8.0), score_bytes=(8.0, 10.0), loss_bytes=26.0,
    reasons={
        **EAGER.reasons,
        "norm_bytes": "measured on one H200: compiled norms move 16 to 44 bytes an element forward and backward",
        "residual_bytes": "assumed: fused into the norm that follows",
        "activation_bytes": "assumed: recomputed in backward rather than kept",
        "gate_bytes": "measured on one H200: compiled SwiGLU, 872 us for 16384 x 14336",
        "loss_bytes": "measured on one H200: compiled linear and cross-entropy, 81.9 ms, less the products",
        "rotary_bytes": "assumed: fused",
        "score_bytes": "counted: mask and softmax in one kernel",
    },
)  # fmt: skip
"""PyTorch under torch.compile."""

FOUNDRY_2 = replace(
    EAGER, name="llm-foundry-0.3", framework="llm-foundry", attention="flash-1", optimizer_bytes=90.0,
    weight_bytes=0.0, shard_copies=False, tied=True,
    versions={"torch": "2.1", "composer": "0.16", "attention": "Triton, FlashAttention 1 algorithm"},
    reasons={
        **EAGER.reasons,
        "attention": "its benchmark script asks for the Triton kernel of 2022, also on H100",
        "loss_bytes": "as PyTorch's own: a fused cross-entropy, but training metrics run over the logits again",
        "optimizer_bytes": "assumed as foreach AdamW (21.7 ms for 1e9 parameters on one H200): its own AdamW is not fused",
        "reduce_bytes": "its FSDP setting DEFAULT reduces in float32",
        "shard_copies": "FSDP 1 gathers one flat parameter: nothing to copy",
        "drag": "fitted; gathers follow backward and are held back by a limit of two",
        "early_stop": "torch 2.1 and later, non-reentrant checkpoints",
    },
)  # fmt: skip

FOUNDRY_1 = replace(
    FOUNDRY_2, name="llm-foundry-0.1", reduce_bytes=2.0, early_stop=False,
    versions={"torch": "1.13", "composer": "0.14", "attention": "Triton, FlashAttention 1 algorithm"},
    reasons={
        **FOUNDRY_2.reasons,
        "reduce_bytes": "its FSDP setting PURE reduces in bfloat16",
        "early_stop": "torch 1.13 recomputes blocks whole",
    },
)  # fmt: skip

_TITAN = {
    "gathers_narrow": "its float8 tensor parallel casts a module's input before the gather",
    "reduce_bytes": "its mixed precision policy reduces in float32",
    "rotary_bytes": "complex products, which the compiler leaves as they are",
    "selective": "keeps the results of attention and of every second product",
}

TITAN = replace(
    EAGER, name="torchtitan", framework="torchtitan", gathers_narrow=True, norm_bytes=(45.0, 121.0), weight_bytes=0.0,
    versions={"torch": "2.3 and later"},
    reasons={
        **EAGER.reasons, **_TITAN,
        "norm_bytes": "measured on one H200: RMSNorm written as single ops, 2,706 us for 16384 x 4096",
    },
)  # fmt: skip

TITAN_COMPILED = replace(
    COMPILED, name="torchtitan-compile", framework="torchtitan", rotary_bytes=(22.0, 22.0), weight_bytes=0.0,
    gathers_narrow=True,
    versions={"torch": "2.5 and later"}, reasons={**COMPILED.reasons, **_TITAN},
)  # fmt: skip

TITAN_2025 = replace(
    TITAN_COMPILED, name="torchtitan-2025", versions={"torch": "2.7 and later"}, logit_bytes=4.0, reports="allocated",
    reasons={**TITAN_COMPILED.reasons, "logit_bytes": "assumed: the compiled loss keeps no float32 copy of the logits"},
)  # fmt: skip

LLM_C = replace(
    COMPILED, name="llm.c", framework="llm.c", attention="cudnn", versions={"llm.c": "2024"}, norm_bytes=(6.0, 12.0),
    loss_bytes=6.0, weight_bytes=0.0, reduce_bytes=2.0, tied=True, host_seconds=3e-6,
    reasons={
        **COMPILED.reasons,
        "norm_bytes": "counted: residual and LayerNorm in one kernel",
        "loss_bytes": "counted: softmax, loss and gradient in one pass in place",
        "reduce_bytes": "gradients are bfloat16",
        "host_seconds": "assumed: launched from C",
    },
)  # fmt: skip

NANOGPT = replace(
    COMPILED, name="nanogpt", framework="nanoGPT", attention="math", versions={"torch": "2.0 nightly"},
    optimizer_bytes=90.0, loss_bytes=50.0, tied=True,
    reasons={
        **COMPILED.reasons,
        "attention": "its early versions spell attention out; the compiler fuses the softmax",
        "optimizer_bytes": "foreach AdamW, as measured on one H200",
        "loss_bytes": "assumed as without compilation: the first compilers did not fuse it",
    },
)  # fmt: skip

NANOCHAT = replace(
    COMPILED, name="nanochat", framework="nanochat",
    reasons={**COMPILED.reasons, "fused": "its scripts compile the model"},
)  # fmt: skip

MEGATRON = replace(
    EAGER, name="megatron-lm", framework="Megatron-LM", attention="math", dtype="float16", fused=True,
    versions={"torch": "1.8 to 1.13"}, norm_bytes=(4.0, 10.0), residual_bytes=(7.0, 5.0), activation_bytes=(4.0, 6.0),
    score_bytes=(9.0, 11.0), loose_score_bytes=(30.0, 30.0), softmax_keys=2048, loss_bytes=30.0, weight_bytes=6.0,
    optimizer_bytes=36.0, reduce_bytes=2.0, reduces_early=False, tied=True, selective="attention", early_stop=False,
    table_bytes=4.0, state_bytes=(4.0, 12.0), reports="allocated",
    reasons={
        "state_bytes": "counted: 16-bit weights and gradients; float32 masters and two moments",
        **EAGER.reasons,
        "norm_bytes": "counted: apex's fused norm reads and writes 16 bits; backward reads twice and sums weights' parts",
        "residual_bytes": "counted: bias, dropout and residual in one kernel, with a byte of mask",
        "activation_bytes": "counted: bias and GELU in one kernel",
        "score_bytes": "counted: scale, mask and softmax in one kernel (4), dropout with its mask (5); backward 6 and 5",
        "loose_score_bytes": "counted: scale, mask, cast up, softmax, cast down, dropout as single kernels",
        "softmax_keys": "its fused kernel takes rows of up to 2048 and a multiple of four heads times sequences",
        "loss_bytes": "counted: float32 copies of the logits in a vocabulary-parallel loss",
        "weight_bytes": "counted: each micro-batch's gradient is added to the one kept: two reads and one write of 16 bits",
        "optimizer_bytes": "counted: apex's FusedAdam over float32 masters and 16-bit copies, with unscaling",
        "reduce_bytes": "gradients of fp16 training travel as fp16",
        "table_bytes": "counted as weight_bytes",
        "reduces_early": "its data parallel of 2021 and 2022 reduces once, after the last backward",
        "early_stop": "its checkpoints run the whole layer again",
    },
)  # fmt: skip
"""Megatron-LM of 2021 and 2022: own fused kernels, no FlashAttention."""

MEGATRON_DEEPSPEED = replace(
    MEGATRON, name="megatron-deepspeed", framework="Megatron-DeepSpeed", dtype="bfloat16", reduces_whole=True,
    state_bytes=(4.0, 16.0), buffer_bytes=2.0e9, reports="device",
    versions={"torch": "1.10", "deepspeed": "0.5"},
    reasons={
        **MEGATRON.reasons,
        "state_bytes": "counted: as Megatron-LM, and a float32 gradient for the shard that is updated",
        "buffer_bytes": "counted: its buckets for gathering and reducing hold 5e8 elements each",
        "reduces_whole": "its pipeline engine all-reduces gradients and then gathers the parameters ZeRO-1 updated",
    },
)  # fmt: skip

MEGATRON_DEEPSPEED_BLOCKING = replace(
    MEGATRON_DEEPSPEED, name="megatron-deepspeed-blocking", stall_seconds=1e-3, tensor_wait=1.7e-4,
    reasons={
        **MEGATRON_DEEPSPEED.reasons,
        "stall_seconds": "its authors ran with CUDA_LAUNCH_BLOCKING=1; set on a coarse grid over every second of their published runs, then rounded",
        "tensor_wait": "likewise: ranks that launch one kernel at a time drift apart between collectives; set likewise",
    },
)  # fmt: skip
"""With launches that block, which kept BLOOM's large jobs from hanging."""

MEGATRON_DEEPSPEED_BF16 = replace(
    MEGATRON_DEEPSPEED_BLOCKING, name="megatron-deepspeed-bf16", reduce_bytes=4.0, weight_bytes=10.0,
    state_bytes=(8.0, 16.0),
    versions={"torch": "1.11", "deepspeed": "0.6 with its bf16 optimiser"},
    reasons={
        **MEGATRON_DEEPSPEED_BLOCKING.reasons,
        "reduce_bytes": "the bf16 optimiser accumulates and reduces gradients in float32",
        "weight_bytes": "counted: a 16-bit gradient is added to a float32 one",
        "state_bytes": "counted: a float32 gradient more on every rank, as its authors say",
    },
)  # fmt: skip

MEGATRON_CORE = replace(
    MEGATRON, name="megatron-core", framework="Megatron-Core", attention="cudnn", dtype="bfloat16",
    versions={"transformer-engine": "1 and 2"}, norm_bytes=(4.0, 8.0), residual_bytes=(6.0, 4.0), gate_bytes=(6.0, 10.0),
    rotary_bytes=(4.0, 4.0), weight_bytes=4.0, reduces_early=True, gradients_hidden=0.8, tensor_hidden=(0.6, 0.7),
    message_shown=0.3, host_seconds=5e-6, loss_bytes=16.0,
    reasons={
        **MEGATRON.reasons,
        "norm_bytes": "counted: Transformer Engine's norm",
        "residual_bytes": "counted: no dropout",
        "gate_bytes": "counted: one kernel each way",
        "rotary_bytes": "counted: one kernel in 16 bits",
        "weight_bytes": "counted: weights' gradients are added inside the product; 8-bit copies of weights",
        "gradients_hidden": "assumed: buckets are reduced while backward runs",
        "tensor_hidden": "assumed: products are cut so that the traffic runs beside them",
        "message_shown": "assumed: messages of the interleaved schedule travel beside compute",
        "loss_bytes": "counted: fused cross-entropy",
    },
)  # fmt: skip
"""Megatron-Core under NeMo and Megatron-Bridge, with Transformer Engine."""

MEGASCALE = replace(
    MEGATRON, name="megascale", framework="MegaScale", attention="flash-2", reduces_early=True, gradients_hidden=0.8,
    tensor_hidden=(0.6, 0.6), message_shown=0.2, dtype="bfloat16",
    reasons={
        **MEGATRON.reasons, "gradients_hidden": "assumed: as its authors describe, traffic is hidden where it can be",
        "tensor_hidden": "assumed likewise", "message_shown": "assumed likewise",
    },
)  # fmt: skip

INTERNEVO = replace(
    EAGER, name="internevo", framework="InternEvo", attention="flash-2", versions={"torch": "2.0"}, weight_bytes=6.0,
    norm_bytes=(6.0, 14.0), gate_bytes=(10.0, 17.0), rotary_bytes=(4.0, 4.0), reduce_bytes=2.0, loss_bytes=30.0,
    gradients_hidden=0.6, selective="attention", early_stop=False, state_bytes=(4.0, 12.0),
    reasons={
        **EAGER.reasons,
        "state_bytes": "counted as Megatron-LM's",
        "norm_bytes": "assumed: apex's fused norm",
        "rotary_bytes": "counted: FlashAttention's rotary kernel",
        "reduce_bytes": "gradients travel in 16 bits",
        "loss_bytes": "counted: FlashAttention's cross-entropy on 16-bit logits",
        "gradients_hidden": "assumed: buckets are reduced while backward runs",
        "weight_bytes": "counted as Megatron-LM's",
    },
)  # fmt: skip

DEEPSPEED = replace(
    EAGER, name="deepspeed", framework="DeepSpeed", attention="flash-2", reduce_bytes=2.0, weight_bytes=6.0,
    early_stop=False, selective="attention", state_bytes=(4.0, 12.0),
    reasons={
        **EAGER.reasons, "reduce_bytes": "gradients travel in 16 bits", "weight_bytes": "counted as Megatron-LM's",
        "state_bytes": "counted as Megatron-LM's",
    },
)  # fmt: skip

STACKS: Mapping[str, Stack] = {
    stack.name: stack
    for stack in (
        EAGER, COMPILED, FOUNDRY_1, FOUNDRY_2, TITAN, TITAN_COMPILED, TITAN_2025, LLM_C, NANOGPT, NANOCHAT, MEGATRON,
        MEGATRON_DEEPSPEED, MEGATRON_DEEPSPEED_BLOCKING, MEGATRON_DEEPSPEED_BF16, MEGATRON_CORE, MEGASCALE, INTERNEVO, DEEPSPEED,
    )
}  # fmt: skip


class Float8(NamedTuple):
    """A recipe for 8-bit products: bytes per element cast, factor on their rate, what stays 16-bit."""

    cast_bytes: float
    product8: float
    wide_weight_gradients: bool
    reason: str


FLOAT8: Mapping[str, Float8] = {
    "delayed": Float8(4.0, 1.0, False, "scales from steps before: one pass to cast, one more layout"),
    "tensorwise": Float8(6.0, 1.0, False, "assumed: one pass for the largest value, one to cast"),
    "rowwise": Float8(
        8.0, 0.75, False, "assumed: rows and columns are scaled apart; products with row scales run slower"
    ),
    "rowwise_with_gw_hp": Float8(5.0, 0.75, True, "assumed: as row-wise, weight gradients 16-bit"),
    "mxfp8": Float8(6.0, 0.9, False, "assumed: a scale for every 32 elements, in hardware"),
}


def with_float8(stack: Stack, recipe: str, *, gathered: bool = False) -> Stack:
    """The stack with 8-bit products; `gathered`: shards travel in 8 bits too."""
    chosen = FLOAT8[recipe]
    return replace(
        stack, name=f"{stack.name}+{recipe}", cast_bytes=chosen.cast_bytes, product8=chosen.product8,
        wide_weight_gradients=chosen.wide_weight_gradients, gather_bytes=1.0 if gathered else stack.gather_bytes,
        reasons={**stack.reasons, "cast_bytes": chosen.reason},
    )  # fmt: skip
