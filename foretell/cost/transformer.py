"""The work of one training step of a transformer, counted from its shape: kernels by size, parameters, FLOPs.

    Training                    shape, batch, degrees of parallelism, software stack
    forward, backward, head, update → tuples of Work, each one kernel (or a few alike) on one device

Widths are those of one tensor-parallel rank, rows those of one context-parallel rank. No seconds here: `price` in
`transformer_time` turns work into seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from foretell.cost.stack import Stack

GEMM, GEMM8, ATTENTION, ATTENTION_BACKWARD, STREAM = "gemm", "gemm8", "attention", "attention_backward", "stream"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What decides the work of a step."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    """0: neither embedding nor head."""
    seq: int
    gated: bool
    """SwiGLU and rotary embedding, as in Llama; else GELU and learned positions, as in GPT."""
    micro: int
    """Sequences of a micro-batch."""
    micros: int
    """Micro-batches of a step on each data-parallel rank."""
    world: int
    per_node: int
    stack: Stack
    experts: int = 0
    topk: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    """Model parts of a pipeline rank (interleaved schedule)."""
    schedule: str = "1f1b"
    """gpipe, 1f1b, zb-1p, zb-2p or zb-v; with more than one chunk 1f1b is interleaved."""
    sequence_parallel: bool = False
    """Norms and residuals are split over the tensor-parallel ranks."""
    shard: str = "none"
    """zero3, zero2, zero1 or none: what is sharded over the data-parallel ranks."""
    shard_group: int = 0
    """Ranks that share one set of shards; 0: all data-parallel ranks."""
    precision: str = "bf16"
    recompute: str = "none"
    """none, selective or full."""
    offload: str = "none"
    """What lives in host memory: none, or a text naming "optimizer", "param" or "activation"."""

    @property
    def dp(self) -> int:
        return max(1, self.world // (self.tp * self.pp * self.cp))

    @property
    def sharded(self) -> int:
        """Ranks over which shards are spread; context-parallel ranks hold shards too."""
        whole = self.dp * self.cp
        return min(self.shard_group or whole, whole)

    @property
    def tokens(self) -> int:
        """Of a micro-batch on one device."""
        return max(1, self.micro * self.seq // self.cp)

    @property
    def head_dim(self) -> int:
        return max(1, self.hidden // self.heads)

    @property
    def local_heads(self) -> int:
        return ceil(self.heads / self.tp)

    @property
    def kv_width(self) -> int:
        """Channels of keys on one device."""
        return self.head_dim * ceil(self.kv_heads / self.tp)

    @property
    def wide(self) -> int:
        """Bytes of an activation element."""
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def eight_bit(self) -> bool:
        return self.precision in ("fp8", "mxfp8", "nvfp4")


class Work(NamedTuple):
    """One kernel: a product m×n×k, attention over `m` queries, or `nbytes` read and written."""

    kind: str
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    nbytes: float = 0.0
    launches: int = 1
    part: float = 1.0
    """Of the rate that such a kernel usually reaches."""


# ---------------------------------------------------------------- parameters


def products(run: Training) -> list[tuple[int, int]]:
    """Dense weights of a layer on one device as (inputs, outputs), in the order they are used."""
    h, q, kv, ffn = run.hidden, run.head_dim * run.local_heads, run.kv_width, ceil(run.ffn / run.tp)
    attention = [(h, q), (h, kv), (h, kv), (q, h)] if run.gated else [(h, q + 2 * kv), (q, h)]
    if run.experts:
        return attention
    return attention + ([(h, ffn), (h, ffn), (ffn, h)] if run.gated else [(h, ffn), (ffn, h)])


def expert_products(run: Training) -> list[tuple[int, int]]:
    """Weights of one expert; experts are split over their own ranks, not over tensor-parallel ones."""
    if not run.experts:
        return []
    h, ffn = run.hidden, run.ffn
    return [(h, ffn), (h, ffn), (ffn, h)]


def local_experts(run: Training) -> int:
    return max(1, run.experts // max(1, run.ep)) if run.experts else 0


def layer_parameters(run: Training) -> int:
    """Of one layer on one device."""
    dense = sum(inputs * outputs for inputs, outputs in products(run)) + 2 * run.hidden
    routed = local_experts(run) * sum(inputs * outputs for inputs, outputs in expert_products(run))
    return dense + routed + (run.hidden * run.experts)


def table_parameters(run: Training) -> int:
    """Of one embedding table on one device."""
    return ceil(run.vocab / run.tp) * run.hidden


def outside_parameters(run: Training) -> int:
    """Embedding, head and learned positions on one device that holds them all."""
    learned = 0 if run.gated or not run.vocab else run.seq * run.hidden
    return (1 if run.stack.tied else 2) * table_parameters(run) + learned


def parameters(run: Training) -> int:
    """Of the whole model as one device without a pipeline would hold it."""
    return run.layers * layer_parameters(run) + outside_parameters(run)


# ---------------------------------------------------------------- one layer


def forward(run: Training, *, again: bool = False, saved: bool = False) -> list[Work]:
    """One layer. `again`: as recomputed in backward. `saved`: with the results of every second product kept."""
    gemms = [Work(_product(run), run.tokens, outputs, inputs) for inputs, outputs in products(run)]
    if saved:
        gemms = gemms[1::2]
    elif again and run.stack.early_stop and not run.experts:
        gemms = gemms[:-1]
    gemms += experts(run, backward=False)
    return gemms + ([] if saved else [attention(run)]) + pointwise(run, backward=False) + casts(run, backward=False)


def attention(run: Training, *, backward: bool = False) -> Work:
    kind = ATTENTION_BACKWARD if backward else ATTENTION
    return Work(kind, max(1, run.seq // run.cp), run.local_heads, run.head_dim, run.micro)


def backward_inputs(run: Training) -> list[Work]:
    """Gradients of activations: what the stage before waits for."""
    made = [Work(_product(run), run.tokens, inputs, outputs) for inputs, outputs in products(run)]
    made += experts(run, backward=False)
    return [*made, attention(run, backward=True), *pointwise(run, backward=True), *casts(run, backward=True)]


def backward_weights(run: Training) -> list[Work]:
    """Gradients of weights, which nothing waits for before the update."""
    kind = GEMM if run.stack.wide_weight_gradients else _product(run)
    made = [Work(kind, outputs, inputs, run.tokens) for inputs, outputs in products(run)]
    made += experts(run, backward=True)
    nbytes = layer_parameters(run) * run.stack.weight_bytes
    return [*made, Work(STREAM, nbytes=nbytes, launches=len(products(run)))]


def experts(run: Training, *, backward: bool) -> list[Work]:
    """Products of the local experts, tokens spread evenly; `backward`: of the weights' gradients."""
    count = local_experts(run)
    if not count:
        return []
    rows = max(1, ceil(run.tokens * run.topk / count))
    found = []
    for inputs, outputs in expert_products(run):
        sides = (outputs, inputs, rows) if backward else (rows, outputs, inputs)
        found.append(Work(_product(run), *sides, count, part=run.stack.expert_rate))
    routed = run.tokens * run.topk * run.hidden
    moved = Work(STREAM, nbytes=routed * 2 * run.stack.route_bytes, launches=run.stack.expert_launches)
    return [*found, moved]


def _product(run: Training) -> str:
    return GEMM8 if run.eight_bit else GEMM


def pointwise(run: Training, *, backward: bool) -> list[Work]:
    """Norms, activation, residuals, rotary embedding: bytes of 16-bit tensors, by pass."""
    stack, rows, h = run.stack, run.tokens, run.hidden
    q, kv = run.head_dim * run.local_heads, run.kv_width
    kept = rows / run.tp if run.sequence_parallel else rows
    each = 2 * (stack.norm_bytes[backward] + stack.residual_bytes[backward])
    found = [Work(STREAM, nbytes=kept * h * each, launches=2 if stack.fused else 4)]
    ffn = ceil(run.ffn / run.tp) if not run.experts else run.ffn * run.topk
    if not run.gated:
        found.append(Work(STREAM, nbytes=rows * ffn * stack.activation_bytes[backward]))
        if backward:
            found.append(Work(STREAM, nbytes=rows * (q + 2 * kv) * 4))
        return found
    found.append(Work(STREAM, nbytes=rows * ffn * stack.gate_bytes[backward], launches=1 if stack.fused else 2))
    turned = rows * (q + kv) * stack.rotary_bytes[backward]
    found.append(Work(STREAM, nbytes=turned, launches=1 if stack.fused else 6))
    if run.kv_heads < run.heads:
        found.append(Work(STREAM, nbytes=2 * rows * (kv + q) * 2, launches=2))
    return found


def casts(run: Training, *, backward: bool) -> list[Work]:
    """Scaling and casting for 8-bit products: activations and weights forward, gradients backward."""
    if not run.eight_bit:
        return []
    found, last = [], 0
    shared = run.tp > 1 and run.stack.gathers_narrow
    for inputs, outputs in products(run):
        rows = 0 if shared and not backward and inputs == last else run.tokens
        elements = rows * (outputs if backward else inputs) + (0 if backward else inputs * outputs)
        found.append(Work(STREAM, nbytes=elements * run.stack.cast_bytes, launches=2))
        last = inputs
    return found


# ---------------------------------------------------------------- outside the layers


def embedding(run: Training) -> list[Work]:
    """Looking tokens up and adding their gradients to the table, forward and backward together."""
    if not run.vocab:
        return []
    nbytes = run.tokens * run.hidden * 24 + table_parameters(run) * run.stack.table_bytes
    return [Work(STREAM, nbytes=nbytes, launches=6)]


def head_forward(run: Training) -> list[Work]:
    """Logits and loss."""
    if not run.vocab:
        return []
    width = ceil(run.vocab / run.tp)
    nbytes = run.tokens * width * run.stack.loss_bytes / 2
    return [Work(GEMM, run.tokens, width, run.hidden), Work(STREAM, nbytes=nbytes, launches=4)]


def head_backward(run: Training) -> list[Work]:
    if not run.vocab:
        return []
    width = ceil(run.vocab / run.tp)
    nbytes = run.tokens * width * run.stack.loss_bytes / 2
    return [
        Work(GEMM, run.tokens, run.hidden, width),
        Work(GEMM, width, run.hidden, run.tokens),
        Work(STREAM, nbytes=nbytes, launches=4),
    ]


def update(run: Training, held: float) -> list[Work]:
    """The optimiser over `held` parameters."""
    each = run.stack.optimizer_bytes + run.stack.clip_bytes
    return [Work(STREAM, nbytes=held * each, launches=max(1, 20 * run.layers // run.pp))]


# ---------------------------------------------------------------- FLOPs by convention

MODEL, MODEL_CAUSAL, HARDWARE, WEIGHTS = "model", "model-causal", "hardware", "weights"


def step_flops(run: Training, convention: str) -> float:
    """FLOPs of a step over all devices, as tables count them.

    model: products three times, attention over the full square. model-causal: attention over half of it.
    hardware: with full recomputation the forward of the layers once more. weights: six a parameter and token.
    """
    tokens = float(run.dp * run.micros * run.micro * run.seq)
    h, kv = run.hidden, run.head_dim * run.kv_heads
    ffn = run.ffn * (run.topk if run.experts else 1)
    layer = 2 * (h * (2 * h + 2 * kv) + (3 if run.gated or run.experts else 2) * h * ffn)
    scores = 4 * run.seq * h * (0.5 if convention == MODEL_CAUSAL else 1.0)
    head = 2 * h * run.vocab
    if convention == WEIGHTS:
        return 3 * tokens * (run.layers * layer + head)
    passes = 4 if convention == HARDWARE and run.recompute == "full" else 3
    return tokens * (passes * run.layers * (layer + scores) + 3 * head)
