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
    host_seconds: float = 8e-6
    """Host time to issue one kernel."""

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
    "reduce_bytes": "its mixed precision policy reduces in float32",
    "rotary_bytes": "complex products, which the compiler leaves as they are",
    "selective": "keeps the results of attention and of every second product",
}

TITAN = replace(
    EAGER, name="torchtitan", framework="torchtitan", norm_bytes=(45.0, 121.0), weight_bytes=0.0,
    versions={"torch": "2.3 and later"},
    reasons={
        **EAGER.reasons, **_TITAN,
        "norm_bytes": "measured on one H200: RMSNorm written as single ops, 2,706 us for 16384 x 4096",
    },
)  # fmt: skip

TITAN_COMPILED = replace(
    COMPILED, name="torchtitan-compile", framework="torchtitan", rotary_bytes=(22.0, 22.0), weight_bytes=0.0,
    versions={"torch": "2.5 and later"}, reasons={**COMPILED.reasons, **_TITAN},
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
    COMPILED, name="nanogpt", framework="nanoGPT", attention="flash-1", versions={"torch": "2.0 nightly"},
    optimizer_bytes=90.0, loss_bytes=50.0, tied=True,
    reasons={
        **COMPILED.reasons,
        "attention": "torch 2.0 ships FlashAttention 1",
        "optimizer_bytes": "foreach AdamW, as measured on one H200",
        "loss_bytes": "assumed as without compilation: the first compilers did not fuse it",
    },
)  # fmt: skip

NANOCHAT = replace(
    COMPILED, name="nanochat", framework="nanochat",
    reasons={**COMPILED.reasons, "fused": "its scripts compile the model"},
)  # fmt: skip

STACKS: Mapping[str, Stack] = {
    stack.name: stack
    for stack in (EAGER, COMPILED, FOUNDRY_1, FOUNDRY_2, TITAN, TITAN_COMPILED, LLM_C, NANOGPT, NANOCHAT)
}


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
